"""Collectives under way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress


class Pending:
    """A collective under way; `wait` makes its result usable on the current stream, and may be called again.

    Args:
        wait: for the collective; None where there is nothing to wait for.
        then: starts a second collective on what the first has left, and returns that one.
    """

    def __init__(self, wait: Callable[[], None] | None, then: Callable[[], Pending] | None = None) -> None:
        self._wait = wait
        self._then = then
        self._second: Pending | None = None

    def advance(self) -> None:
        """Finish the collective that is under way and start the one that follows it, if there is one."""
        if self._second is not None:
            self._second.advance()
            return
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()
        if self._then is not None:
            then, self._then = self._then, None
            self._second = then()

    def __del__(self) -> None:
        """A collective that nobody waits for, as of a dropped engine, must end all the same.

        gloo cancels a receive whose work is dropped, and what the other rank has sent goes to the next one.
        """
        if self._wait is not None:
            with suppress(Exception):
                self._wait()

    def wait(self) -> None:
        """Finish all of them."""
        self.advance()
        if self._second is not None:
            self._second.wait()
