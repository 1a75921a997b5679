"""Decide in which order a model's blocks are gathered, as they run or in lockstep, and their gradients reduced.

An order learns what runs and answers what to prefetch. It knows blocks by name only, and moves nothing itself.

`RecordedOrder` follows the model: the last forward's order is a hint for the next, a wrong guess costs a wait. It
assumes that all ranks run the same blocks, since a gather needs them all. `StaticOrder` does not: every rank
gathers every block once a forward and once a backward, in module order, also those that its own input skips.

>>> order = StaticOrder(("a", "b", "c", "d"))
>>> order.start_forward(), order.enter_forward("a"), order.next_units()
((), (), ('b',))
>>> order.enter_forward("d"), order.end_forward()
(('b', 'c'), ())
>>> order.start_backward(), order.enter_backward("c"), order.next_units()
((), ('d',), ('b',))
>>> order.end_backward()
('b', 'a')
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from shardwise.comm.collectives import Comm
from shardwise.config.errors import CodedError
from shardwise.runtime.device import numbers_on
from shardwise.zero.param_group import ParamGroup

Names = Sequence[str]


class LockstepError(CodedError, RuntimeError):
    """Says that a block ran out of module order, or twice, under `zero.lockstep`."""


class PrefetchOrder(Protocol):
    """Answers what to gather; `enter_...` and `end_...` return skipped blocks, to be gathered and released at once.

    A block that comes when it cannot raises a `LockstepError`.

    Attributes:
        is_lockstep: it is the same on all ranks, whatever blocks they run.
    """

    is_lockstep: bool

    def start_forward(self) -> Names:
        """Begin a forward."""

    def enter_forward(self, name: str) -> Names:
        """Note that a block's forward is about to begin."""

    def end_forward(self) -> Names:
        """End the forward."""

    def start_backward(self) -> Names:
        """Begin a backward."""

    def enter_backward(self, name: str) -> Names:
        """Note that a block's backward is about to begin."""

    def end_backward(self) -> Names:
        """End the backward."""

    def next_units(self) -> Names:
        """Return the block that is likely to be needed next."""

    def upcoming(self, count: int) -> Names:
        """Return up to `count` blocks that are likely to be needed after the next one."""

    def is_last(self, name: str) -> bool:
        """Say whether the backward is likely to begin with this block, so that it need not be released before."""

    def unused(self) -> Names:
        """Return the blocks that the forward has not run, as far as it is known."""


class RecordedOrder:
    """Repeats the order of the last forward.

    Args:
        names: the blocks in module order: the first guess.
    """

    is_lockstep = False

    def __init__(self, names: Names) -> None:
        self._names = tuple(names)
        self._order: Names = self._names
        self._seen: list[str] = []
        self._next: Names = ()
        self._beyond: Names = ()

    def start_forward(self) -> Names:
        self._seen = []
        self._next, self._beyond = self._order[:1], self._order[1:]
        return ()

    def enter_forward(self, name: str) -> Names:
        self._seen.append(name)
        self._set_next(name, self._order)
        return ()

    def end_forward(self) -> Names:
        self._order = tuple(self._seen) or self._order
        return ()

    def start_backward(self) -> Names:
        self._next, self._beyond = self._order[-1:], self._order[-2::-1]
        return ()

    def enter_backward(self, name: str) -> Names:
        self._set_next(name, self._order[::-1])
        return ()

    def end_backward(self) -> Names:
        return ()

    def next_units(self) -> Names:
        """Return the block that followed last time; only once for each block that runs."""
        units, self._next = self._next, ()
        return units

    def upcoming(self, count: int) -> Names:
        return self._beyond[:count]

    def is_last(self, name: str) -> bool:
        return bool(self._order) and name == self._order[-1]

    def unused(self) -> Names:
        return [name for name in self._names if name not in self._seen]

    def _set_next(self, name: str, order: Names) -> None:
        position = order.index(name) + 1 if name in order else len(order)
        self._next, self._beyond = order[position : position + 1], order[position + 1 :]


class StaticOrder:
    """Follows module order, the same on all ranks."""

    is_lockstep = True

    def __init__(self, names: Names) -> None:
        self._names = tuple(names)
        self._path: Names = self._names
        self._position = len(names)  # of the next block to gather, in `_path`
        self._has_next = False

    def start_forward(self) -> Names:
        return self._start(self._names)

    def enter_forward(self, name: str) -> Names:
        return self._advance(name, "forward")

    def end_forward(self) -> Names:
        return self._end()

    def start_backward(self) -> Names:
        return self._start(self._names[::-1])

    def enter_backward(self, name: str) -> Names:
        return self._advance(name, "backward")

    def end_backward(self) -> Names:
        return self._end()

    def next_units(self) -> Names:
        has_next, self._has_next = self._has_next, False
        return self._path[self._position : self._position + 1] if has_next else ()

    def upcoming(self, count: int) -> Names:
        return self._path[self._position + 1 : self._position + 1 + count]

    def is_last(self, name: str) -> bool:
        return name == self._names[-1]

    def unused(self) -> Names:
        return ()

    def _start(self, path: Names) -> Names:
        self._path, self._position, self._has_next = path, 0, True
        return ()

    def _advance(self, name: str, what: str) -> Names:
        position = self._path.index(name)
        if position < self._position:
            raise LockstepError(
                "block-order",
                f"the {what} of block {name} came after that of {self._path[self._position - 1]}, or twice, but "
                "zero.lockstep=true gathers every block once, in module order; let blocks run in that order, or set "
                "zero.lockstep=false where all ranks run the same blocks",
            )
        skipped = self._path[self._position : position]
        self._position, self._has_next = position + 1, True
        return skipped

    def _end(self) -> Names:
        skipped = self._path[self._position :]
        self._position, self._has_next = len(self._path), False
        return skipped


Group = TypeVar("Group")


class ReductionOrder(Generic[Group]):
    """Says which groups a backward may reduce now: from the last unit to the root, so that all ranks meet.

    Ranks whose models take different paths get gradients in different orders. So a group is reduced once its own
    gradients and those of all groups before it in the order are there.

    >>> order = ReductionOrder(["blocks.1", "blocks.0", "root"])
    >>> order.start_backward()
    >>> order.mark_done("blocks.0"), order.take_ready()
    (None, [])
    >>> order.mark_done("blocks.1"), order.take_ready()
    (None, ['blocks.1', 'blocks.0'])
    >>> order.note_gradient("blocks.0"), order.take_until(3), order.late
    (None, ['root'], ['blocks.0'])

    Args:
        groups: in the order of their reductions.

    Attributes:
        groups: those with gradients, in the order of their reductions.
        is_last: those that start now are the last ones before the step.
        late: those that got a gradient after their reduction in this backward; they are reduced once more at its end.
        final: those whose gradients a schedule has reduced for the last time before the step.
    """

    # [Note: One order of reductions]
    # Ranks match the collectives of a communicator by their order alone. Where they start them in different orders,
    # gloo mixes tensors of one size without an error. Gradients arrive in the order of this rank's graph, so their
    # arrival alone must not start a reduction. And a bucket is sent as a whole, often from where the gradients were
    # put: so it waits for the last gradient of its group. A gradient that comes later, from a use outside of the unit,
    # makes the group be reduced once more, at the end of the backward.
    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self.groups: list[Group] = []
        self.late: list[Group] = []
        self.final: set[Group] = set()
        self.running = RunningReductions()
        self.is_last = True
        self.has_unreduced = False
        self._position: dict[Group, int] = {}
        self._done: set[Group] = set()
        self._num_taken = 0
        self.set_groups(groups)

    def set_groups(self, groups: Iterable[Group]) -> None:
        """Replace the groups."""
        self.groups = list(groups)
        self._position = {group: position for position, group in enumerate(self.groups)}
        self._done &= set(self.groups)

    def expect(self, is_last: bool) -> None:
        """Note whether the reductions from now on are the last ones before the step."""
        self.is_last = is_last

    def leave(self, has_unreduced: bool) -> None:
        """Note whether gradients wait for a reduction that a later backward, or the step, starts."""
        self.has_unreduced = has_unreduced

    def start_backward(self) -> None:
        """Expect the gradients of every group."""
        self._num_taken = 0
        self._done.clear()

    def mark_done(self, *groups: Group) -> None:
        """Note that groups get no more gradients in this backward, as far as can be known."""
        self._done.update(groups)

    def note_gradient(self, group: Group) -> None:
        """Note a gradient: one that comes after the reduction of its group is of a use outside its unit, before it."""
        if self._position[group] < self._num_taken and group not in self.late:
            self.late.append(group)

    def take_ready(self) -> list[Group]:
        """Return the next groups that are done, as far as all before them are."""
        position = self._num_taken
        while position < len(self.groups) and self.groups[position] in self._done:
            position += 1
        return self.take_until(position)

    def take_before(self, groups: Iterable[Group]) -> list[Group]:
        """Return the groups, not taken so far, that come before all of these."""
        return self.take_until(min((self._position[group] for group in groups if group in self._position), default=0))

    def take_all(self) -> list[Group]:
        """Return all groups that have not been taken in this backward."""
        return self.take_until(len(self.groups))

    def take_until(self, position: int) -> list[Group]:
        """Return the groups up to `position`, which have not been taken so far and are not final."""
        taken = [group for group in self.groups[self._num_taken : position] if group not in self.final]
        self._num_taken = max(self._num_taken, position)
        return taken

    def late_on_any(self, ranks: Comm) -> list[Group]:
        """Return the groups that are late on any of the ranks, in the order of reductions. All of them call it.

        Args:
            ranks: their hosts, which know what is late: a device would have to end all its work before it could answer.
        """
        flags = [float(group in self.late) for group in self.groups]
        agreed = ranks.max_scalars(numbers_on(ranks.device, []), "late gradients", flags)
        return [group for group, flag in zip(self.groups, agreed, strict=True) if flag]

    @property
    def has_open(self) -> bool:
        """Say whether a group may get gradients before the step that no schedule has reduced."""
        return any(group not in self.final for group in self.groups)


class RunningReductions:
    """Keeps at most two reductions under way: one may wait for its second collective while the next one starts."""

    # [Note: Two reductions at a time]
    # A reduction holds its bucket, what it sends and what it receives until it is waited for. With one at a time the
    # network would be idle while gloo's sums run on the host, and between the two sums of hybrid sharding. Without a
    # limit the buckets of all units would be held at once.
    def __init__(self) -> None:
        self.groups: deque[ParamGroup] = deque()

    def add(self, group: ParamGroup) -> None:
        """Keep a reduction that has just been started."""
        while len(self.groups) > 1:
            self._end_first()
        for other in self.groups:
            if other.grads is not None:
                other.grads.advance_reduce()  # see [Note: A reduction under way]
        self.groups.append(group)

    def finish(self) -> None:
        """Wait for all of them."""
        while self.groups:
            self._end_first()

    def _end_first(self) -> None:
        self.groups.popleft().finish_reduce()
