"""Bounds the requests to a store: those of a `PatientStore` end. torch bounds how long a key is waited for, not how
long the store's host may be silent: if that is stopped or its machine freezes, a request of torch's never returns, for
any time-out.

>>> store = PatientStore(dist.HashStore(), timeout_s=5.0, prefix="part")
>>> store.set("key", "value")
>>> store.get("key"), store.check(["other"])
(b'value', False)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import torch.distributed as dist

from shardwise.config.errors import CodedError
from shardwise.runtime.clock import AwakeClock

Answer = TypeVar("Answer")

_SLICE_S: Final = 0.5
# A host that has been silent is asked again, with a shorter wait.
_AGAIN_S: Final = 1.0

_Request = tuple[Future[Any], Callable[[], Any]] | None


class StoreSilentError(CodedError, RuntimeError):
    """Says that the process of the store does not answer; it has not closed the connection either."""


class PatientStore(dist.Store):
    """Sends requests to a part of a store on a thread of its own, and waits for each no longer than `timeout_s`.

    Args:
        store: any; of another `PatientStore`, the store that it uses.
    """

    def __init__(self, store: dist.Store, timeout_s: float, prefix: str = "") -> None:
        super().__init__()
        beneath: dist.Store = store._store if isinstance(store, PatientStore) else store
        self._store: dist.Store = dist.PrefixStore(prefix, beneath) if prefix else beneath
        self._timeout_s = timeout_s
        self._is_silent = False
        self._asker = _RequestThread()
        weakref.finalize(self, self._asker.end)

    def close(self) -> None:
        """End the thread; one more request starts another."""
        self._asker.end()

    def set(self, key: str, value: str) -> None:
        self.ask(partial(self._store.set, key, value))

    def get(self, key: str) -> bytes:
        return self.ask(partial(self._store.get, key))

    def add(self, key: str, value: int) -> int:
        return self.ask(partial(self._store.add, key, value))

    def check(self, keys: list[str]) -> bool:
        return self.ask(partial(self._store.check, keys))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Set `key` to `desired_value` if its value is `expected_value`; return the value after that."""
        return self.ask(partial(self._store.compare_set, key, expected_value, desired_value))

    def delete_key(self, key: str) -> bool:
        return self.ask(partial(self._store.delete_key, key))

    def num_keys(self) -> int:
        return self.ask(self._store.num_keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are there; wait for at most `timeout`, plus the time for an answer."""
        timeout = timedelta(seconds=self._timeout_s) if timeout is None else timeout
        self.ask(partial(self._store.wait, keys, timeout), self._timeout_s + timeout.total_seconds())

    def ask(self, request: Callable[[], Answer], timeout_s: float | None = None) -> Answer:
        """Return the answer to a request, which a thread makes; None waits as long as the store may take."""
        patience_s = _AGAIN_S if self._is_silent else self._timeout_s if timeout_s is None else timeout_s
        answer: Future[Answer] = Future()
        self._asker.put(answer, request)
        # In slices: if this process itself was stopped, that time does not count against the answer.
        clock = AwakeClock(gap_s=2 * _SLICE_S)
        while (left_s := patience_s - clock.now_s()) > 0:
            with suppress(TimeoutError):
                value = answer.result(min(_SLICE_S, left_s))
                self._is_silent = False
                return value
        answer.cancel()
        self._is_silent = True
        raise StoreSilentError(
            "store-silent",
            f"the store has not answered for {patience_s:g} s: the process that holds it, mostly rank 0's or the "
            "launcher's, is stopped or its machine hangs",
        )


def ask_in_time(request: Callable[[], Answer], timeout_s: float) -> Answer:
    """Return the result of a request of torch's that begins with a store, such as opening one.

    Raises:
        StoreSilentError: it has not returned within `timeout_s`; its thread is abandoned.
    """
    asker = PatientStore(dist.HashStore(), timeout_s)
    try:
        return asker.ask(request)
    finally:
        asker.close()


class _RequestThread:
    """Runs requests on a thread, which may be abandoned in a request without an answer."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[_Request] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, answer: Future[Any], request: Callable[[], Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._requests,), name="shardwise-store", daemon=True)
            self._thread.start()
        self._requests.put((answer, request))

    def end(self) -> None:
        """End the thread; a request under way must not return while the interpreter ends."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._requests.put(None)
            if thread is not threading.current_thread():
                thread.join(timeout=_AGAIN_S)


def _serve(requests: SimpleQueue[_Request]) -> None:
    while (asked := requests.get()) is not None:
        answer, request = asked
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(request())
            except Exception as error:
                answer.set_exception(error)
        # The thread may wait long for the next request, and would keep all that the last one refers to.
        del asked, answer, request
