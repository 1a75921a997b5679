"""The sharded optimizer step: the optimizer sees one 1-D view for each parameter piece in this rank's slices."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm import Comm
from shardwise.memory import Category, Ledger
from shardwise.optim import refuse_unless_element_wise
from shardwise.schedule.actions import Kind
from shardwise.timeline import Timeline
from shardwise.zero.group import ParamGroup
from shardwise.zero.optimizer_plan import NamedGroup, OptimizerFactory, fresh_states
from shardwise.zero.sharers import Sharing, square_sum, sum_over_sharers


@dataclass(frozen=True)
class Piece:
    """A parameter's part in this rank's slice of a group.

    Attributes:
        name: of the parameter.
        group: that it belongs to.
        view: of the master, 1-D: what the optimizer sees.
        start: of the view, in the slice.
        stop: likewise.
    """

    name: str
    group: ParamGroup
    view: nn.Parameter
    start: int
    stop: int


class ShardedOptimizer:
    """An element-wise optimizer over the pieces that this rank holds.

    Args:
        groups: all of the engine's.
        named_groups: which parameters share which options.
        factory: makes the optimizer from parameter groups, or adopts a given one.
        ledger: learns of the optimizer's states.
        tensor: the tensor-parallel group.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        named_groups: Sequence[NamedGroup],
        factory: OptimizerFactory,
        ledger: Ledger,
        tensor: Comm,
    ) -> None:
        self._ledger = ledger
        self._tensor = tensor
        self._sharing: dict[ParamGroup, Sharing] = {}
        self._groups: list[ParamGroup] = []
        self.pieces: list[Piece] = []
        # torch refuses an optimizer without parameters, but a rank may own nothing except padding.
        self._placeholder = nn.Parameter(torch.empty(0))
        self._named_groups: tuple[NamedGroup, ...] = ()
        self._take(groups)
        self.optimizer = factory(self._param_groups(named_groups))
        refuse_unless_element_wise(self.optimizer)
        self._has_states_at_once = bool(self.optimizer.state)  # such as Adagrad's
        self._is_stepping = False
        this = weakref.ref(self)
        self._step_guard = self.optimizer.register_step_pre_hook(lambda *_: _refuse_own_step(this()))

    def regroup(self, groups: Sequence[ParamGroup], named_groups: Sequence[NamedGroup]) -> None:
        """Step other groups from now on; what is in both keeps its states, the rest starts without any.

        Args:
            groups: all of the engine's.
            named_groups: as many as before.
        """
        before = {id(piece) for piece in self.pieces}
        self._take(groups)
        for options, group in zip(self.optimizer.param_groups, self._param_groups(named_groups), strict=True):
            options["params"] = group["params"]
        known = {id(piece.view) for piece in self.pieces} | {id(self._placeholder)}
        for view in [view for view in self.optimizer.state if id(view) not in known]:
            del self.optimizer.state[view]
        self.forget_states([piece for piece in self.pieces if id(piece) not in before])

    def forget_states(self, pieces: Sequence[Piece]) -> None:
        """Let the optimizer have of these pieces what it has before its first step: mostly nothing."""
        views = {id(piece.view) for piece in pieces}
        for piece in pieces:
            self.optimizer.state.pop(piece.view, None)
        if self._has_states_at_once and views:
            groups = [
                {**group, "params": own}
                for group in self.optimizer.param_groups
                if (own := [view for view in group["params"] if id(view) in views])
            ]
            self.optimizer.state.update(fresh_states(self.optimizer, groups))

    def track_states(self) -> None:
        """Tell the ledger of states that are new."""
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self._ledger.track(value, Category.OPTIMIZER)

    def _take(self, groups: Sequence[ParamGroup]) -> None:
        kept: dict[ParamGroup, list[Piece]] = {}
        for piece in self.pieces:
            kept.setdefault(piece.group, []).append(piece)
        self._groups = [group for group in groups if group.grads is not None]
        self.names = [place.name for group in self._groups for place in group.spec.params]
        self.pieces = [piece for group in self._groups for piece in kept.get(group) or _pieces(group)]
        self._sharing = {group: Sharing.of(group, self._tensor.rank, self._tensor.world_size) for group in self._groups}

    def _param_groups(self, named_groups: Sequence[NamedGroup]) -> list[dict[str, Any]]:
        self._named_groups = tuple(named_groups)
        by_name: dict[str, list[nn.Parameter]] = {}
        for piece in self.pieces:
            by_name.setdefault(piece.name, []).append(piece.view)
        param_groups = [
            {**named.options, "params": [view for name in named.names for view in by_name.get(name, [])]}
            for named in named_groups
        ]
        if not any(group["params"] for group in param_groups):
            param_groups[0]["params"] = [self._placeholder]
        return param_groups

    def used(self) -> list[bool]:
        """For each of `names`, whether it has got a gradient on this rank since the last step."""
        return [flag for group in self._groups if group.grads for flag in group.grads.was_used]

    def gradients(self) -> dict[ParamGroup, Tensor]:
        """This rank's gradient slices, 1-D, in the master's dtype, of the groups that have any."""
        found = {group: group.grads.gradient() for group in self._groups if group.grads is not None}
        return {group: gradient for group, gradient in found.items() if gradient is not None}

    def sum_over_sharers(self, gradients: Mapping[ParamGroup, Tensor]) -> None:
        """Make the gradients of what ranks of the tensor-parallel group share theirs in common, in place."""
        sum_over_sharers([(self._sharing[group], gradient) for group, gradient in gradients.items()], self._tensor)

    def square_sums(self, gradients: Mapping[ParamGroup, Tensor]) -> list[Tensor]:
        """For each slice the sum of its squares, fp64 and 0-d; what such ranks share counts on one of them."""
        return [square_sum(self._sharing[group], gradient) for group, gradient in gradients.items()]

    def step(
        self, gradients: Mapping[ParamGroup, Tensor], factor: float, used: Mapping[str, bool], timeline: Timeline
    ) -> None:
        """Update the masters with `factor` times the gradients, and the parameters after them.

        Args:
            gradients: as `gradients` returned them; they are scaled in place.
            factor: what turns accumulated sums into the clipped mean gradient.
            used: parameters that got a gradient on some rank; the others are left alone, as in plain torch.
            timeline: where the step is recorded.
        """
        with timeline.span(Kind.STEP, None):
            for gradient in gradients.values():
                gradient.mul_(factor)
            for piece in self.pieces:
                slices = gradients.get(piece.group) if used[piece.name] else None
                piece.view.grad = slices[piece.start : piece.stop] if slices is not None else None
            self._is_stepping = True
            try:
                self.optimizer.step()
            finally:
                self._is_stepping = False
            for piece in self.pieces:
                piece.view.grad = None
        self.track_states()
        self.clear()
        for group in self._groups:
            group.refresh()

    def clear(self) -> None:
        """Forget the gradients."""
        for group in self._groups:
            if group.grads is not None:
                group.grads.clear()

    def close(self) -> None:
        """Forget all states; the optimizer's groups hold the model's own parameters again, those that it trained."""
        self.clear()
        self._step_guard.remove()
        parameters = {
            place.name: parameter
            for group in self._groups
            for place, parameter in zip(group.spec.params, group.params.parameters, strict=True)
        }
        for group in self.optimizer.param_groups:
            group["params"] = []
        for group, named in zip(self.optimizer.param_groups, self._named_groups, strict=False):
            group["params"] = [parameters[name] for name in named.names if name in parameters]
        self.optimizer.state.clear()
        self.pieces.clear()
        self._groups.clear()
        self._sharing.clear()


def _refuse_own_step(sharded: ShardedOptimizer | None) -> None:
    if sharded is not None and not sharded._is_stepping:
        raise RuntimeError("optimizer.step() has no gradients, which the engine keeps; call engine.step() instead")


def _pieces(group: ParamGroup) -> list[Piece]:
    params = group.params
    return [
        Piece(
            name=slot.param.name,
            group=group,
            view=nn.Parameter(params.master[slot.offset : slot.offset + slot.stop - slot.start]),
            start=slot.offset,
            stop=slot.offset + slot.stop - slot.start,
        )
        for slot in group.spec.slots(params.shard_start, params.shard_stop)
    ]
