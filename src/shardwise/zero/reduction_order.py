"""Keep the order in which a backward reduces its groups: from the last unit to the root, so that all ranks meet.

Ranks whose models take different paths get gradients in different orders. So a group is reduced once its own gradients
and those of all groups before it in the order are there.

>>> order = ReductionOrder(["blocks.1", "blocks.0", "root"])
>>> order.start_backward()
>>> order.mark_done("blocks.0"), order.take_ready()
(None, [])
>>> order.mark_done("blocks.1"), order.take_ready()
(None, ['blocks.1', 'blocks.0'])
>>> order.note_gradient("blocks.0"), order.take_until(3), order.late
(None, ['root'], ['blocks.0'])
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

import torch

from shardwise.comm.collectives import Comm
from shardwise.zero.param_group import ParamGroup

Group = TypeVar("Group")


class ReductionOrder(Generic[Group]):
    """Says which groups a backward may reduce now.

    Args:
        groups: in the order of their reductions.

    Attributes:
        groups: those with gradients, in the order of their reductions.
        late: those that got a gradient after their reduction in this backward; they are reduced once more at its end.
        final: those whose gradients a schedule has reduced for the last time before the step.
    """

    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self.groups: list[Group] = []
        self.late: list[Group] = []
        self.final: set[Group] = set()
        self._position: dict[Group, int] = {}
        self._done: set[Group] = set()
        self._num_taken = 0
        self.set_groups(groups)

    def set_groups(self, groups: Iterable[Group]) -> None:
        """Replace the groups."""
        self.groups = list(groups)
        self._position = {group: position for position, group in enumerate(self.groups)}
        self._done &= set(self.groups)

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
        """Return the groups that are late on any of the ranks, in the order of reductions. All of them call it."""
        flags = [float(group in self.late) for group in self.groups]
        agreed = ranks.max_scalars(torch.zeros(0, dtype=torch.float64, device=ranks.device), "late gradients", flags)
        return [group for group, flag in zip(self.groups, agreed, strict=True) if flag]

    @property
    def has_open(self) -> bool:
        """Say whether a group may get gradients before the step that no schedule has reduced."""
        return any(group not in self.final for group in self.groups)


class RunningReductions:
    """Keeps at most two reductions under way: one may wait for its second collective while the next one starts."""

    def __init__(self) -> None:
        self._groups: deque[ParamGroup] = deque()

    def add(self, group: ParamGroup) -> None:
        """Keep a reduction that has just been started."""
        while len(self._groups) > 1:
            self._end_first()
        for other in self._groups:
            if other.grads is not None:
                other.grads.advance_reduce()
        self._groups.append(group)

    def finish(self) -> None:
        """Wait for all of them."""
        while self._groups:
            self._end_first()

    def _end_first(self) -> None:
        self._groups.popleft().finish_reduce()
