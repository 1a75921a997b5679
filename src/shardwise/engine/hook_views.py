"""Shows hooks of users whole tensors where a module of a split model computes with this rank's part.

A module that has a hook of a user, or a hook on its backward, is called with a view: its arguments are gathered before
its hooks and split again before its forward; its output is gathered after the forward and split again after the hooks.
Each gather and each split has the other as its backward, so hooks see whole gradients too, and a feature that a hook
keeps may enter the loss, which all ranks compute. Modules without hooks are not touched.

Where a tensor is split follows from the plan. Of modules that the plan does not name, such as an activation function
between two layers, it is found at their first call, by comparing the tensor over the ranks; where that does not tell,
an error names the module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardwise.comm.collectives import Comm
from shardwise.config.resolve import Config, ConfigError
from shardwise.layout.layout import Layout
from shardwise.layout.tensor_plan import LayerSplit, TensorPlan, is_within
from shardwise.layout.tp_sharding import FusedPart, ParamSplit
from shardwise.runtime.class_swap import Call, answer_calls
from shardwise.runtime.module_hooks import replace_forward
from shardwise.runtime.torch_private import pytree, unseen_by_op_modes
from shardwise.runtime.user_hooks import has_any_user_hooks, hook_dicts
from shardwise.tensor.layers import mappings_of
from shardwise.zero.tp_params import gather_param, owned_part, shard_param


@dataclass(frozen=True)
class Placement:
    """Says how the ranks of a tensor-parallel group have a tensor.

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
        if self.dim is None or self.parts is None:
            return self.dim is None or len(shape) > self.dim
        return len(shape) > 0 and shape[self.dim] == sum(part.local_size(degree) for part in self.parts)

    def split_of(self, shape: torch.Size, degree: int) -> ParamSplit:
        """Return the split of the whole of which a rank has a tensor of this shape."""
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


def view_hooks(model: nn.Module, layout: Layout, config: Config, comm: Comm) -> HookViews | None:
    """Return what gives a model's modules views for hooks; None where no layer is split.

    Args:
        model: after it was split.
        layout: of the run.
        config: of the run.
        comm: the tensor-parallel group.
    """
    mappings = mappings_of(model) if layout.tensor is not None and comm.world_size > 1 else None
    if layout.tensor is None or mappings is None or comm.is_simulated:
        return None
    return HookViews(model, layout.tensor.plan, comm, config.tensor.sequence_parallel, mappings.keeps_whole)


class HookViews:
    """Gives the modules of a split model views for hooks, as long as they have any.

    Args:
        model: after it was split.
        plan: by which.
        comm: the tensor-parallel group.
        splits_sequence: whether stacks have split sequences.
        keeps_whole: says whether an evaluation leaves a sequence whole.
    """

    def __init__(
        self, model: nn.Module, plan: TensorPlan, comm: Comm, splits_sequence: bool, keeps_whole: Callable[[], bool]
    ) -> None:
        self._comm = comm
        self._plan = plan
        self._splits_sequence = splits_sequence
        self._keeps_whole = keeps_whole
        self._modules = dict(model.named_modules())
        self._dicts = [(each, name) for name, module in self._modules.items() if name for each in hook_dicts(module)]
        self._undo: dict[str, list[Callable[[], None]]] = {}

    def follow(self) -> None:
        """Give views to the modules that have hooks by now, and take them from those that have none."""
        names = dict.fromkeys(name for hooks, name in self._dicts if hooks)
        hooked = {name for name in names if has_any_user_hooks(self._modules[name])}
        for name in self._undo.keys() - hooked:
            self._remove(name)
        for name in hooked - self._undo.keys():
            self._undo[name] = list(self._give(name))

    def close(self) -> None:
        """Take the views from the modules."""
        for name in list(self._undo):
            self._remove(name)

    def _remove(self, name: str) -> None:
        for undo in reversed(self._undo.pop(name)):
            undo()

    def _give(self, name: str) -> Iterator[Callable[[], None]]:
        module = self._modules[name]
        placements = self._placements_of(name)
        if placements == (WHOLE, WHOLE):
            return
        view = _View(name, self._comm, placements, tuple(self._guesses(name)), self._is_inside(name))
        keeps_whole = self._keeps_whole

        def answer(called: nn.Module, own: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if called is not module or keeps_whole():
                return own(*args, **kwargs)
            return view.call(own, args, kwargs)

        own_forward = module.forward

        @functools.wraps(own_forward)
        def forward(called: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if called is not module or not view.is_open:
                own = own_forward if called is module else MethodType(type(called).forward, called)
                return own(*args, **kwargs)
            return view.forward(own_forward, args, kwargs)

        yield answer_calls(module, answer)
        yield replace_forward(module, MethodType(forward, module))

    def _is_inside(self, name: str) -> bool:
        regions = [region.module for region in self._plan.regions]
        return name not in regions and is_within(name, regions) and name not in self._plan.after_rows

    def _placements_of(self, name: str) -> Placements:
        """Return the placements that follow from the plan."""
        plan, is_sequence = self._plan, self._is_on_sequence(name)
        layer = next((each for each in plan.layers if each.module == name), None)
        outside = SEQUENCE if is_sequence else WHOLE
        if layer is not None and layer.style == "column":
            return (PARTIAL if self._is_inside(name) else outside), _features(layer, layer.gathers_output)
        if layer is not None and layer.style == "row":
            return _features(layer, layer.splits_input), outside
        if layer is not None and layer.style == "column-embedding":
            return WHOLE, _features(layer, layer.gathers_output)
        if layer is not None:
            return WHOLE, WHOLE
        if name in plan.after_rows or name in [region.module for region in plan.regions]:
            return outside, outside
        stack = next((each for each in plan.stacks if is_within(name, each.modules)), None)
        if is_sequence and stack is not None and not self._is_inside(name):
            return (WHOLE if name == stack.first else SEQUENCE), (WHOLE if name == stack.last else SEQUENCE)
        return (None, None) if self._is_near_split(name) else (WHOLE, WHOLE)

    def _is_on_sequence(self, name: str) -> bool:
        return self._splits_sequence and any(is_within(name, stack.modules) for stack in self._plan.stacks)

    def _is_near_split(self, name: str) -> bool:
        """Say whether a module that the plan does not name may be given part of a tensor: one beside a split layer."""
        parent = name.rpartition(".")[0]
        beside = any(layer.style in ("column", "row") and _parent(layer) == parent for layer in self._plan.layers)
        return beside or self._is_inside(name)

    def _guesses(self, name: str) -> Iterator[Placement]:
        """Yield how tensors beside split layers may be split: as features of a layer, or by heads."""
        parent = name.rpartition(".")[0]
        near = [each for each in self._plan.layers if is_within(each.module, (name, parent))]
        for layer in near:
            if layer.style in ("column", "row"):
                yield Placement(-1, layer.parts)
        for layer in near:
            for part in layer.parts:
                if layer.style == "row" and part.num_units is not None:
                    yield Placement(1, (FusedPart(part.num_units),))


def _parent(layer: LayerSplit) -> str:
    return layer.module.rpartition(".")[0]


def _features(layer: LayerSplit, is_whole: bool) -> Placement:
    return WHOLE if is_whole else Placement(-1, layer.parts)


class _View:
    """Converts what a module is given and returns; its calls may be nested."""

    def __init__(
        self, name: str, comm: Comm, placements: Placements, guesses: tuple[Placement, ...], is_inside: bool
    ) -> None:
        self._name = name
        self._comm = comm
        self._first = dict(zip(("argument", "output"), placements, strict=True))
        self._guesses = guesses
        self._otherwise = PARTIAL if is_inside else WHOLE
        self._known: dict[tuple[str, int, int], Placement] = {}
        self._open: list[list[ParamSplit | None]] = []  # of the arguments of calls whose forward is yet to run
        self._returned: list[list[ParamSplit | None]] = []

    @property
    def is_open(self) -> bool:
        """Say whether the next forward is given whole arguments."""
        return bool(self._open)

    def call(self, own: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module, with whole arguments, and return this rank's part of its output."""
        (args, kwargs), splits = self._gathered((args, kwargs), "argument", _is_no_plain_container)
        self._open.append(splits)
        depth = len(self._returned)
        try:
            output = own(*args, **kwargs)
            return self._parted(output, self._returned[-1], "output") if len(self._returned) > depth else output
        finally:
            del self._returned[depth:]
            if len(self._open) > depth:
                self._open.pop()

    def forward(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's own forward on this rank's part of the arguments, and return its whole output."""
        args, kwargs = self._parted((args, kwargs), self._open.pop(), "argument", _is_no_plain_container)
        output, splits = self._gathered(own(*args, **kwargs), "output")
        self._returned.append(splits)
        return output

    def _gathered(
        self, tree: Any, what: str, is_leaf: Callable[[Any], bool] | None = None
    ) -> tuple[Any, list[ParamSplit | None]]:
        """Return whole tensors in place of this rank's parts, and their splits."""
        leaves, structure = pytree.tree_flatten(tree, is_leaf)
        splits: list[ParamSplit | None] = []
        is_first = True
        for index, leaf in enumerate(leaves):
            if type(leaf) is not Tensor or not leaf.is_floating_point():
                continue
            placement = self._first[what] if is_first else None
            is_first = False
            if placement is None:
                placement = self._found(leaf, (what, len(splits), leaf.dim()))
            split = None
            if placement != WHOLE:
                split = self._split_of(leaf, placement, what)
                leaves[index] = _Gathered.apply(leaf, split, self._comm, f"{what} of {self._name} for its hooks")
            splits.append(split)
        return pytree.tree_unflatten(leaves, structure), splits

    def _parted(
        self, tree: Any, splits: list[ParamSplit | None], what: str, is_leaf: Callable[[Any], bool] | None = None
    ) -> Any:
        """Return this rank's parts in place of whole tensors."""
        leaves, structure = pytree.tree_flatten(tree, is_leaf)
        places = [index for index, leaf in enumerate(leaves) if type(leaf) is Tensor and leaf.is_floating_point()]
        if all(split is None for split in splits):
            return tree
        shapes = [tuple(leaves[index].shape) for index in places]
        if len(places) != len(splits) or any(
            split is not None and shape != split.global_shape for split, shape in zip(splits, shapes, strict=False)
        ):
            raise self._unclear(f"changes the shape or the number of the tensors of its {what}")
        for index, split in zip(places, splits, strict=True):
            if split is not None:
                leaves[index] = _Parted.apply(leaves[index], split, self._comm, f"{what} of {self._name} for its hooks")
        return pytree.tree_unflatten(leaves, structure)

    def _split_of(self, leaf: Tensor, placement: Placement, what: str) -> ParamSplit:
        if not placement.fits(leaf.shape, self._comm.world_size):
            raise self._unclear(f"sees an {what} of shape {tuple(leaf.shape)}, which is not split as the plan says")
        return placement.split_of(leaf.shape, self._comm.world_size)

    def _found(self, leaf: Tensor, key: tuple[str, int, int]) -> Placement:
        """Return the placement of a tensor that the plan does not name; the first time all ranks compare it."""
        if key not in self._known:
            fitting = dict.fromkeys(each for each in self._guesses if each.fits(leaf.shape, self._comm.world_size))
            if self._is_equal(leaf):
                self._known[key] = self._otherwise
            elif len(fitting) == 1:
                (self._known[key],) = fitting
            else:
                raise self._unclear(f"sees an {key[0]} of which each rank has a part, of shape {tuple(leaf.shape)}")
        return self._known[key]

    def _is_equal(self, leaf: Tensor) -> bool:
        values = leaf.detach().double().reshape(-1)
        digest = torch.stack([values.sum(), values.abs().sum(), values @ torch.arange(len(values)).to(values)])
        digest = digest.nan_to_num(0.0)
        largest = self._comm.max_scalars(torch.cat([digest, -digest]), f"compare what hooks of {self._name} see")
        return all(high == -low for high, low in zip(largest[:3], largest[3:], strict=True))

    def _unclear(self, what: str) -> ConfigError:
        return ConfigError(
            "hook-sees-part",
            f"a hook on {self._name} {what}, under mesh.tp={self._comm.world_size}; put it on a layer that the plan "
            "names or on a module around it, or leave the layers next to it whole in the plan",
        )


def _is_no_plain_container(value: Any) -> bool:
    """Say whether a forward may write into an argument, such as a cache, so that it must stay the same object."""
    return type(value) not in (tuple, list, dict)


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, split: ParamSplit, comm: Comm, name: str) -> Tensor:
        ctx.split, ctx.comm, ctx.name = split, comm, name
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
