"""In which order a model's blocks are gathered: by the blocks that run, or in lockstep with the other ranks.

An order is told what runs and answers what to gather ahead. It knows blocks by name only, and moves nothing itself.

`RecordedOrder` follows the model: the last forward's order is a hint for the next, a wrong guess costs a wait. It takes
for granted that all ranks run the same blocks, since a gather needs them all. `StaticOrder` does not: every rank
gathers every block once a forward and once a backward, in module order, also those that its own input skips.

>>> order = StaticOrder(("a", "b", "c", "d"))
>>> order.start_forward(), order.enter_forward("a"), order.ahead()
((), (), ('b',))
>>> order.enter_forward("d"), order.end_forward()
(('b', 'c'), ())
>>> order.start_backward(), order.enter_backward("c"), order.ahead()
((), ('d',), ('b',))
>>> order.end_backward()
('b', 'a')
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Names = Sequence[str]


class LockstepError(RuntimeError):
    """A block ran out of module order, or twice, under `zero.lockstep`."""


class PrefetchOrder(Protocol):
    """What a driver asks; `enter` and `end` return the skipped blocks, to be gathered and released at once."""

    def start_forward(self) -> Names:
        """A forward begins."""

    def enter_forward(self, name: str) -> Names:
        """A block's forward is about to begin."""

    def end_forward(self) -> Names:
        """The forward is over."""

    def start_backward(self) -> Names:
        """A backward begins."""

    def enter_backward(self, name: str) -> Names:
        """A block's backward is about to begin."""

    def end_backward(self) -> Names:
        """The backward is over."""

    def ahead(self) -> Names:
        """What is likely to be needed next."""

    def upcoming(self, count: int) -> Names:
        """What is likely to be needed behind that."""

    def is_last(self, name: str) -> bool:
        """Whether the backward is likely to begin with this block, so that it need not be released before."""

    def unused(self) -> Names:
        """The blocks that the forward has not run, as far as it is known."""


class RecordedOrder:
    """The order of the last forward, whatever it was.

    Args:
        names: of the blocks, in module order: the first guess.
    """

    def __init__(self, names: Names) -> None:
        self._names = tuple(names)
        self._order: Names = self._names
        self._seen: list[str] = []
        self._ahead: Names = ()
        self._beyond: Names = ()

    def start_forward(self) -> Names:
        """Learn anew."""
        self._seen = []
        self._ahead, self._beyond = self._order[:1], self._order[1:]
        return ()

    def enter_forward(self, name: str) -> Names:
        """Note the block; no other is concerned."""
        self._seen.append(name)
        self._look_ahead(name, self._order)
        return ()

    def end_forward(self) -> Names:
        """Keep what was learnt."""
        self._order = tuple(self._seen) or self._order
        return ()

    def start_backward(self) -> Names:
        """The backward takes the forward's order in reverse."""
        self._ahead, self._beyond = self._order[-1:], self._order[-2::-1]
        return ()

    def enter_backward(self, name: str) -> Names:
        """Note where the backward is."""
        self._look_ahead(name, self._order[::-1])
        return ()

    def end_backward(self) -> Names:
        """Nothing is missing."""
        return ()

    def ahead(self) -> Names:
        """The block that followed last time; once."""
        ahead, self._ahead = self._ahead, ()
        return ahead

    def upcoming(self, count: int) -> Names:
        """The blocks that followed that one."""
        return self._beyond[:count]

    def is_last(self, name: str) -> bool:
        """Whether the block was the last one."""
        return bool(self._order) and name == self._order[-1]

    def unused(self) -> Names:
        """The blocks that the current forward has not run."""
        return [name for name in self._names if name not in self._seen]

    def _look_ahead(self, name: str, order: Names) -> None:
        position = order.index(name) + 1 if name in order else len(order)
        self._ahead, self._beyond = order[position : position + 1], order[position + 1 :]


class StaticOrder:
    """Module order, for all ranks alike.

    Args:
        names: of the blocks, in module order.
    """

    def __init__(self, names: Names) -> None:
        self._names = tuple(names)
        self._position = 0  # of the next block to gather, in `_path`
        self._path: Names = ()
        self._has_ahead = False

    def start_forward(self) -> Names:
        """Begin at the first block."""
        return self._start(self._names)

    def enter_forward(self, name: str) -> Names:
        """Return the blocks between the last one and this.

        Raises:
            LockstepError: it has been passed already.
        """
        return self._enter(name, "forward")

    def end_forward(self) -> Names:
        """Return the blocks behind the last one that ran."""
        return self._end()

    def start_backward(self) -> Names:
        """Begin at the last block."""
        return self._start(self._names[::-1])

    def enter_backward(self, name: str) -> Names:
        """Return the blocks between the last one and this.

        Raises:
            LockstepError: it has been passed already.
        """
        return self._enter(name, "backward")

    def end_backward(self) -> Names:
        """Return the blocks that the backward has not reached."""
        return self._end()

    def ahead(self) -> Names:
        """The next block in module order, once."""
        has_ahead, self._has_ahead = self._has_ahead, False
        return self._path[self._position : self._position + 1] if has_ahead else ()

    def upcoming(self, count: int) -> Names:
        """The blocks behind the next one in module order."""
        return self._path[self._position + 1 : self._position + 1 + count]

    def is_last(self, name: str) -> bool:
        """Whether the block is the last in module order."""
        return name == self._names[-1]

    def unused(self) -> Names:
        """None: the blocks that were skipped have been passed."""
        return ()

    def _start(self, path: Names) -> Names:
        self._path, self._position, self._has_ahead = path, 0, True
        return ()

    def _enter(self, name: str, what: str) -> Names:
        position = self._path.index(name)
        if position < self._position:
            raise LockstepError(
                f"the {what} of block {name} came after that of {self._path[self._position - 1]}, or twice, but "
                "zero.lockstep=true gathers every block once, in module order; let blocks run in that order, or set "
                "zero.lockstep=false where all ranks run the same blocks"
            )
        skipped = self._path[self._position : position]
        self._position, self._has_ahead = position + 1, True
        return skipped

    def _end(self) -> Names:
        skipped = self._path[self._position :]
        self._position, self._has_ahead = len(self._path), False
        return skipped
