"""Time-outs that shall expire in tests, and end nothing that is healthy before, however long the machine stalls.

So a test takes its first steps under a long one, and calls `fail_after` or `give_up_after` where only what never comes
is waited for.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

from harness.waiting import PATIENCE_S
from shardwise import Engine
from shardwise.comm import watchdog
from shardwise.comm.collectives import Comm
from shardwise.comm.records import CommLog


def fail_after(log: CommLog, timeout_s: float) -> None:
    """From now on the collectives and messages that are counted there, and checks of them, wait only so long."""
    if log.check is not None:
        log.check.timeout_s = timeout_s
    for each in gc.get_objects():
        if issubclass(type(each), Comm) and each.comm_log is log:
            each._timeout = timedelta(seconds=timeout_s)


def give_up_after(engine: Engine, timeout_s: float) -> None:
    """From now on the engine's collectives, messages, saves and loads wait only so long for other ranks."""
    fail_after(engine.comm.comm_log, timeout_s)
    engine.checkpoints.saver.timeout_s = engine.parts.agreement.timeout_s = timeout_s
    object.__setattr__(engine.config.run, "timeout_s", timeout_s)


@contextmanager
def answers_may_be_late() -> Iterator[None]:
    """Watchdogs wait as long as it takes for the answers of ranks; not for tests in which one can give none."""
    with patch.object(watchdog, "_ANSWER_S", PATIENCE_S / 4):
        yield
