"""Ends Python code of others that takes too long or too much memory, such as a chat template that loops.

>>> with limited(0.2):
...     while True:
...         pass
Traceback (most recent call last):
    ...
shardwise.train.time_limit.LimitError: it is not done after 0.2 s
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import psutil

# What is done by then pays a timer, some 50 us.
_FIRST_LOOK_S: Final = 0.02
_MAX_BYTES: Final = 2**29


class LimitError(Exception):
    """What runs took more time or memory than it may."""


class _StopError(BaseException):
    """Is raised by another thread between two instructions of the code that is to end, which does not catch it."""


@contextmanager
def limited(limit_s: float, max_bytes: int = _MAX_BYTES) -> Iterator[None]:
    """End what runs inside, between two instructions of Python, after a time or when it has taken much memory.

    Raises:
        LimitError: it was ended.
    """
    watch = _Watch(threading.get_ident(), limit_s, max_bytes)
    timer = threading.Timer(_FIRST_LOOK_S, watch.look)
    timer.daemon = True
    timer.start()
    try:
        yield
    except _StopError:
        raise LimitError(watch.why) from None
    finally:
        watch.end()
        timer.cancel()


class _Watch:
    """Looks at a thread until it ends what it does, or is to be ended."""

    def __init__(self, thread: int, limit_s: float, max_bytes: int) -> None:
        self.why = ""
        self._thread, self._limit_s, self._max_bytes = thread, limit_s, max_bytes
        self._is_done = threading.Event()
        self._stopping = threading.Lock()

    def look(self) -> None:
        end_s = time.monotonic() + self._limit_s - _FIRST_LOOK_S
        process = psutil.Process()
        first_bytes = process.memory_info().rss
        while not self._is_done.wait(_FIRST_LOOK_S):
            has_much = process.memory_info().rss - first_bytes > self._max_bytes
            if has_much or time.monotonic() > end_s:
                self.why = (
                    "it takes more memory than it may" if has_much else f"it is not done after {self._limit_s:g} s"
                )
                with self._stopping:
                    if not self._is_done.is_set():
                        _raise_in(self._thread, _StopError)
                return

    def end(self) -> None:
        with self._stopping:
            self._is_done.set()
            if self.why:  # what was raised too late to be seen is taken back
                _raise_in(self._thread, None)


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    raised = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
