"""The sharded optimizer step: the optimizer sees one 1-D view for each parameter piece in this rank's slices."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.config import ConfigError
from shardwise.memory import Category, Ledger
from shardwise.optim import refuse_unless_element_wise
from shardwise.schedule.actions import Kind
from shardwise.timeline import Timeline
from shardwise.zero.group import ParamGroup

OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]


@dataclass(frozen=True)
class NamedGroup:
    """A parameter group of the optimizer by names: options (lr, weight_decay, ...) and whom they hold for."""

    names: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Piece:
    """A parameter's part in this rank's slice of a group: a 1-D view of the master, and its range in the slice."""

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
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        named_groups: Sequence[NamedGroup],
        factory: OptimizerFactory,
        ledger: Ledger,
    ) -> None:
        self._groups = [group for group in groups if group.grads is not None]
        self.names = [place.name for group in self._groups for place in group.spec.params]
        self.pieces = [piece for group in self._groups for piece in _pieces(group)]
        by_name: dict[str, list[nn.Parameter]] = {}
        for piece in self.pieces:
            by_name.setdefault(piece.name, []).append(piece.view)
        param_groups = [
            {**named.options, "params": [view for name in named.names for view in by_name.get(name, [])]}
            for named in named_groups
        ]
        if not any(group["params"] for group in param_groups):
            # torch refuses an optimizer without parameters, but a rank may own nothing except padding.
            param_groups[0]["params"] = [nn.Parameter(torch.empty(0))]
        self.optimizer = factory(param_groups)
        refuse_unless_element_wise(self.optimizer)
        self._ledger = ledger

    def used(self) -> list[bool]:
        """For each of `names`, whether it has got a gradient on this rank since the last step."""
        return [flag for group in self._groups if group.grads for flag in group.grads.was_used]

    def gradients(self) -> dict[ParamGroup, Tensor]:
        """This rank's gradient slices, 1-D, in the master's dtype, of the groups that have any."""
        found = {group: group.grads.gradient() for group in self._groups if group.grads is not None}
        return {group: gradient for group, gradient in found.items() if gradient is not None}

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
            self.optimizer.step()
            for piece in self.pieces:
                piece.view.grad = None
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self._ledger.track(value, Category.OPTIMIZER)
        self.clear()
        for group in self._groups:
            group.refresh()

    def clear(self) -> None:
        """Forget the gradients."""
        for group in self._groups:
            if group.grads is not None:
                group.grads.clear()


def adopt(optimizer: Optimizer, names: Mapping[int, str]) -> tuple[list[NamedGroup], OptimizerFactory]:
    """Take over an optimizer built on the model's own parameters: the same object, its groups over pieces.

    Args:
        optimizer: without state, since state of whole parameters does not fit pieces.
        names: of the model's parameters, by id.

    Raises:
        ConfigError: it has stepped already, or holds a tensor that is no parameter of the model.
    """
    if any(state.get("step", 1) != 0 for state in optimizer.state.values()):
        raise ConfigError("the optimizer has state already; pass it to initialize before its first step")
    named_groups = []
    for group in optimizer.param_groups:
        unknown = [tuple(parameter.shape) for parameter in group["params"] if id(parameter) not in names]
        if unknown:
            raise ConfigError(
                f"the optimizer holds a tensor of shape {unknown[0]} that is no parameter of the model; leave it out"
            )
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        named_groups.append(NamedGroup(tuple(names[id(parameter)] for parameter in group["params"]), options))

    def replace_parameters(param_groups: list[dict[str, Any]]) -> Optimizer:
        for group, replacement in zip(optimizer.param_groups, param_groups, strict=True):
            group["params"] = replacement["params"]
            group.pop("param_names", None)
        if optimizer.state:  # some, such as Adagrad, make it in their constructor
            accepted = inspect.signature(type(optimizer)).parameters
            options = {key: value for key, value in optimizer.defaults.items() if key in accepted}
            optimizer.state = type(optimizer)(param_groups, **options).state
        return optimizer

    return named_groups, replace_parameters


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
