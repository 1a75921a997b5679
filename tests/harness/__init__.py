"""What the process tests stand on: ranks, independent measurements, references, combinations. No part of the
library.

`pool` runs functions on gloo ranks, `live_bytes` and `wire_bytes` measure without the library's own counters,
`models` and `reference` give parity its two sides, `combinations` chooses what is tested together.

Test folders are packages (`parity/__init__.py`): pytest then puts `tests/` on `sys.path`, and a test module
has one name (`parity.test_parity`) here and in the workers.
"""
