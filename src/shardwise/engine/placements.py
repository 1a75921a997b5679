"""Finds how the ranks of a tensor-parallel group have a tensor, and converts between a rank's part and the whole.

Where a tensor is split follows from the plan. Of a tensor that the plan does not name, such as the output of an
activation function between two layers, it is found once, by comparing the tensor over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function

from shardwise.comm.collectives import Comm
from shardwise.config.errors import ConfigError
from shardwise.layout.tensor_plan import LayerSplit, TensorPlan, is_within
from shardwise.layout.tp_sharding import FusedPart, ParamSplit
from shardwise.runtime.device import number_dtype
from shardwise.runtime.torch_private import unseen_by_op_modes
from shardwise.zero.tp_params import gather_param, owned_part, shard_param


@dataclass(frozen=True)
class Placement:
    """Says how the ranks have a tensor.

    Attributes:
        dim: along which it is split; None where every rank has all of it.
        parts: along `dim`; None for equal parts.
        is_partial: each rank has all of it, and a part of its gradient.
    """

    dim: int | None = None
    parts: tuple[FusedPart, ...] | None = None
    is_partial: bool = False

    def fits(self, shape: torch.Size, degree: int) -> bool:
        """Say whether a rank's tensor may have this shape."""
        if self.dim is None:
            return True
        if self.parts is None:
            return len(shape) > self.dim
        return len(shape) > 0 and shape[self.dim] == sum(part.local_size(degree) for part in self.parts)

    def split_of(self, shape: torch.Size, degree: int) -> ParamSplit:
        """Return the split of the whole of which a rank's tensor has this shape."""
        if self.dim is None:
            return ParamSplit(tuple(shape), degree, is_partial=self.is_partial)
        dim = self.dim % len(shape)
        parts = (FusedPart(shape[dim] * degree),) if self.parts is None else self.parts
        return ParamSplit((*shape[:dim], sum(part.size for part in parts), *shape[dim + 1 :]), degree, dim, parts)


WHOLE: Final = Placement()
PARTIAL: Final = Placement(is_partial=True)
SEQUENCE: Final = Placement(dim=1)

Placements = tuple[Placement | None, Placement | None]
"""Of the first floating tensor that a module is given, and of the first that it returns; None where it is not known."""


class PlanPlacements:
    """Answers how tensors are split, for one plan.

    Args:
        local_length: returns how many tokens this rank has of a split sequence; None where it is not known.
    """

    def __init__(
        self, plan: TensorPlan, comm: Comm, splits_sequence: bool, local_length: Callable[[], int | None]
    ) -> None:
        self.comm = comm
        self._plan = plan
        self._splits_sequence = splits_sequence
        self._local_length = local_length
        self._regions = [region.module for region in plan.regions]
        self._layers = {layer.module: layer for layer in plan.layers}
        self._found: dict[Hashable, Placement | ConfigError] = {}

    def of_module(self, name: str) -> Placements:
        """Return what follows from the plan for a module."""
        layer = self._layers.get(name)
        stack = next((stack for stack in self._plan.stacks if is_within(name, stack.modules)), None)
        is_sequence = self._splits_sequence and stack is not None
        outside = SEQUENCE if is_sequence else WHOLE
        if layer is not None:
            inside = PARTIAL if self._is_inside(name) else outside
            return {
                "column": (inside, _features(layer, layer.gathers_output)),
                "row": (_features(layer, layer.splits_input), outside),
                "column-embedding": (WHOLE, _features(layer, layer.gathers_output)),
            }.get(layer.style, (WHOLE, WHOLE))
        if name in self._regions or name in self._plan.after_rows:
            return outside, outside
        if self._is_near_split(name):
            return None, None
        if stack is None or not is_sequence:
            return WHOLE, WHOLE
        return (WHOLE if name == stack.first else SEQUENCE), (WHOLE if name == stack.last else SEQUENCE)

    def has_parts(self, name: str) -> bool:
        """Say whether a module may be given or return parts of tensors."""
        return name in self._regions or self.of_module(name) != (WHOLE, WHOLE)

    def of_tensor(self, tensor: Tensor, name: str, key: Hashable, what: str) -> Placement:
        """Return the placement of a tensor; the first time all ranks compare it.

        Args:
            name: of the module that has it; empty for the model.
            key: tells it from the module's other tensors.

        Raises:
            ConfigError: each rank has a part, and it is not clear which.
        """
        key = name, key, tensor.dim(), tensor.grad_fn is not None
        if key not in self._found:
            try:
                self._found[key] = self._find(tensor, name, what)
            except ConfigError as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, ConfigError):
            raise found.with_traceback(None)
        return found

    def split_of(self, tensor: Tensor, placement: Placement, what: str) -> ParamSplit:
        """Return the split of the whole of which a rank has a part."""
        if not placement.fits(tensor.shape, self.comm.world_size):
            raise self.unclear(f"{what} of shape {tuple(tensor.shape)} is not split as the plan says")
        return placement.split_of(tensor.shape, self.comm.world_size)

    def unclear(self, what: str) -> ConfigError:
        """Return the error for a part whose whole cannot be shown."""
        return ConfigError(
            "split-value-unclear",
            f"{what}, so under mesh.tp={self.comm.world_size} the whole of it is not known; take it from the output of "
            "a layer that the plan names or of a module around it, or leave the layers next to it whole in the plan",
        )

    def _find(self, tensor: Tensor, name: str, what: str) -> Placement:
        if self._is_equal(tensor, what):
            opens, closes = _ends_of(tensor)
            if opens and closes:
                raise self.unclear(f"{what} is computed from what a split module is given and from what it returns")
            return PARTIAL if opens else WHOLE
        if tensor.dim() == 3 and tensor.shape[1] == self._local_length():
            return SEQUENCE
        fitting = {each for each in self._guesses(name, tensor.dim()) if each.fits(tensor.shape, self.comm.world_size)}
        if len(fitting) != 1:
            raise self.unclear(f"each rank has a part of {what}, of shape {tuple(tensor.shape)}")
        return fitting.pop()

    def _guesses(self, name: str, num_dims: int) -> Iterator[Placement]:
        """Yield how tensors beside split layers may be split: as features of a layer, or by heads."""
        parent = name.rpartition(".")[0]
        for layer in self._plan.layers:
            if layer.style not in ("column", "row") or not is_within(layer.module, (name, parent)):
                continue
            if num_dims == 4:
                units = [part.num_units for part in layer.parts]
                if layer.style == "row" and None not in units:
                    yield Placement(1, tuple(FusedPart(number) for number in units if number is not None))
            else:
                yield Placement(-1, layer.parts)

    def _is_equal(self, tensor: Tensor, what: str) -> bool:
        values = tensor.detach().to(number_dtype(tensor.device)).reshape(-1)
        weights = torch.arange(1, len(values) + 1, device=values.device).to(values.dtype)
        digest = torch.stack([values.sum(), values.abs().sum(), values @ weights]).nan_to_num(0.0, 0.0, 0.0)
        largest = self.comm.max_scalars(torch.cat([digest, -digest]), f"compare {what}")
        return all(high == -low for high, low in zip(largest[:3], largest[3:], strict=True))

    def _is_inside(self, name: str) -> bool:
        """Say whether a module's tensors that all ranks have are parts of a region's, so that gradients are partial."""
        return name not in (*self._regions, *self._plan.after_rows) and is_within(name, self._regions)

    def _is_near_split(self, name: str) -> bool:
        """Say whether a module that the plan does not name may be given a part: one beside a split layer."""
        parent = name.rpartition(".")[0]
        beside = any(
            layer.style in ("column", "row") and layer.module.rpartition(".")[0] == parent
            for layer in self._plan.layers
        )
        return beside or self._is_inside(name)


def _ends_of(tensor: Tensor) -> tuple[bool, bool]:
    """Say whether a tensor's graph leads into a split module, where gradients are partial, and whether out of one."""
    nodes: list[Any] = [tensor.grad_fn]
    seen: set[Any] = {None}
    ends: set[bool] = set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = type(node).__name__.removesuffix("Backward").lstrip("_")
        if kind in _OPENS or kind in _CLOSES:
            ends.add(kind in _OPENS)
        else:
            nodes += [parent for parent, _ in node.next_functions]
    return True in ends, False in ends


# Functions of `shardwise.tensor.mappings`, of the split head, and below.
_OPENS: Final = frozenset({"CopyToTp", "GatherSequence", "Parted"})
_CLOSES: Final = frozenset(
    {"ReduceFromTp", "ScatterSequence", "Row", "Gather", "Gathered", "GatherVocab", "Sum", "EachToken"}
)


def _features(layer: LayerSplit, is_whole: bool) -> Placement:
    return WHOLE if is_whole else Placement(-1, layer.parts)


def gathered(part: Tensor, split: ParamSplit, comm: Comm, name: str) -> Tensor:
    """Return the whole of a tensor; of its gradient, which all ranks have, each takes its part."""
    whole: Tensor = _Gathered.apply(part, split, comm, name)
    return whole


def parted(whole: Tensor, split: ParamSplit, comm: Comm, name: str) -> Tensor:
    """Return this rank's part of a tensor; the gradients of the ranks' parts are gathered."""
    part: Tensor = _Parted.apply(whole, split, comm, name)
    return part


def refused(tensor: Tensor, error: ConfigError) -> Tensor:
    """Return a tensor of the same values, whose backward raises."""
    same: Tensor = _Refused.apply(tensor, error)
    return same


class _Refused(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, error: ConfigError) -> Tensor:
        ctx.error = error
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise ctx.error


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, split: ParamSplit, comm: Comm, name: str) -> Tensor:
        ctx.split, ctx.comm = split, comm
        with unseen_by_op_modes():
            return gather_param(split, part.detach(), comm, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        own = shard_param(ctx.split, ctx.comm.rank, gradient)
        return owned_part(ctx.split, ctx.comm.rank, own), None, None, None


class _Parted(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, split: ParamSplit, comm: Comm, name: str) -> Tensor:
        ctx.split, ctx.comm, ctx.name = split, comm, name
        return shard_param(split, comm.rank, whole.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gather_param(ctx.split, gradient, ctx.comm, ctx.name, is_gradient=True), None, None, None
