"""Public bug reports of other projects' users, rebuilt on this library: see `docs/public-reports.md`.

Each case is a function with a source and a list of layouts; `benchmarks/public_reports.py` runs them.
"""
