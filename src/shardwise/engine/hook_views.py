"""Shows hooks of users whole tensors where a module of a split model computes with this rank's part.

A module that has a hook of a user, on its forward or its backward, is called with a view: its arguments are gathered
before its hooks and split again before its forward; its output is gathered after the forward and split again after the
hooks. Each gather and each split has the other as its backward, so hooks see whole gradients too, and a feature that a
hook keeps may enter the loss, which all ranks compute. Modules without hooks are not touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

from torch import Tensor, nn

from shardwise.config.resolve import ResolvedConfig
from shardwise.dropout import KeyedDraws
from shardwise.engine.placements import WHOLE, Placements, PlanPlacements, gathered, parted
from shardwise.engine.whole_values import WholeReads, WholeResults
from shardwise.layout.tensor_plan import TensorLayout
from shardwise.layout.tp_sharding import ParamSplit
from shardwise.runtime.class_swap import Call, answer_calls
from shardwise.runtime.module_calls import replace_forward
from shardwise.runtime.torch_private import hook_dicts, pytree
from shardwise.runtime.user_hooks import has_any_user_hooks, has_global_hooks
from shardwise.tensor.mappings import TpMappings
from shardwise.zero.sharding_state import ShardingState

Splits = list[ParamSplit | None]


class SplitModelValues:
    """Bundles what shows hooks and losses whole values of a split model.

    Attributes:
        parameters: as hooks and losses read them.
        results: of a forward, as losses read them.
    """

    views: HookViews
    parameters: WholeReads
    results: WholeResults

    def __init__(
        self,
        model: nn.Module,
        tensor: TensorLayout,
        config: ResolvedConfig,
        mappings: TpMappings,
        draws: KeyedDraws,
        sharding: ShardingState,
    ) -> None:
        comm, splits_sequence = mappings.comm, config.tensor.sequence_parallel
        placements = PlanPlacements(tensor.plan, comm, splits_sequence, lambda: mappings.num_local_tokens)
        self.parameters = WholeReads(model, tensor, comm, draws, sharding, config.compile.enabled)
        draws.around.append(self.parameters.shown_in_forward)
        self.views = HookViews(model, placements, self.parameters, mappings.keeps_whole)
        self.results = WholeResults(model, placements, mappings.keeps_whole)


class HookViews:
    """Gives the modules of a split model views for hooks, as long as they have any.

    Args:
        keeps_whole: says whether an evaluation leaves a sequence whole.

    Attributes:
        joined: names of modules with hooks on some ranks only, whose views all ranks have.
    """

    def __init__(
        self,
        model: nn.Module,
        placements: PlanPlacements,
        parameters: WholeReads,
        keeps_whole: Callable[[], bool],
    ) -> None:
        self._placements = placements
        self._parameters = parameters
        self._keeps_whole = keeps_whole
        self._modules = {name: module for name, module in model.named_modules() if name and placements.has_parts(name)}
        self._dicts = [(hooks, name) for name, module in self._modules.items() for hooks in hook_dicts(module)]
        self._undo: dict[str, list[Callable[[], None]]] = {}
        self.joined: set[str] = set()

    def follow(self) -> None:
        """Give views to the modules that have hooks by now, and take them from those that have none."""
        hooked = [*self.hooked(), *(name for name in sorted(self.joined) if name in self._modules)]
        for name in self._undo.keys() - set(hooked):
            self._remove(name)
        for name in hooked:
            if name not in self._undo:
                self._undo[name] = list(self._give(name))

    def hooked(self) -> list[str]:
        """Return the names of the modules that have hooks of users."""
        if has_global_hooks():
            return list(self._modules)
        names = dict.fromkeys(name for hooks, name in self._dicts if hooks)
        return [name for name in names if has_any_user_hooks(self._modules[name])]

    def close(self) -> None:
        """Take the views from the modules."""
        for name in list(self._undo):
            self._remove(name)

    def _remove(self, name: str) -> None:
        for undo in reversed(self._undo.pop(name)):
            undo()

    def _give(self, name: str) -> Iterator[Callable[[], None]]:
        module, keeps_whole, own_forward = self._modules[name], self._keeps_whole, self._modules[name].forward
        view = _View(name, self._placements, self._parameters)

        def answer(called: nn.Module, own: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if called is not module or keeps_whole():
                return own(*args, **kwargs)
            return view.call(own, args, kwargs)

        @functools.wraps(own_forward)
        def forward(called: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if called is not module:
                return type(called).forward(called, *args, **kwargs)
            return view.forward(own_forward, args, kwargs) if view.is_open else own_forward(*args, **kwargs)

        yield answer_calls(module, answer)
        yield replace_forward(module, MethodType(forward, module))


class _View:
    """Converts what a module is given and returns; its calls may be nested."""

    def __init__(self, name: str, placements: PlanPlacements, parameters: WholeReads) -> None:
        self._name = name
        self._placements = placements
        self._parameters = parameters
        self._first: Placements = placements.of_module(name)
        self._open: list[Splits] = []  # of the arguments of calls whose forward is yet to run
        self._returned: list[Splits] = []  # of the outputs of calls whose hooks run

    @property
    def is_open(self) -> bool:
        """Say whether the next forward is given whole arguments."""
        return bool(self._open)

    def call(self, own: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module with whole arguments, and return this rank's part of its output."""
        (args, kwargs), splits = self._gathered((args, kwargs), 0)
        depth = len(self._open), len(self._returned)
        self._open.append(splits)
        try:
            with self._parameters.shown():
                output = own(*args, **kwargs)
            return self._parted(output, self._returned.pop(), 1)
        finally:
            del self._open[depth[0] :], self._returned[depth[1] :]

    def forward(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's own forward on this rank's part of the arguments, and return its whole output."""
        with self._parameters.hidden():
            args, kwargs = self._parted((args, kwargs), self._open.pop(), 0)
            output, splits = self._gathered(own(*args, **kwargs), 1)
        self._returned.append(splits)
        return output

    def _gathered(self, tree: Any, side: int) -> tuple[Any, Splits]:
        """Return whole tensors in place of this rank's parts, and their splits; arguments are side 0, outputs 1."""
        leaves, structure = pytree.tree_flatten(tree, _LEAVES[side])
        what = f"{_SIDES[side]} of {self._name}"
        splits: Splits = []
        for index in _tensors(leaves):
            leaf, placement = leaves[index], None if splits else self._first[side]
            if placement is None:
                placement = self._placements.of_tensor(leaf, self._name, (side, index), f"the {what}")
            split = None if placement == WHOLE else self._placements.split_of(leaf, placement, f"the {what}")
            if split is not None:
                leaves[index] = gathered(leaf, split, self._placements.comm, f"{what} for its hooks")
            splits.append(split)
        return pytree.tree_unflatten(leaves, structure), splits

    def _parted(self, tree: Any, splits: Splits, side: int) -> Any:
        """Return this rank's parts in place of whole tensors."""
        if not any(splits):
            return tree
        leaves, structure = pytree.tree_flatten(tree, _LEAVES[side])
        places, what = _tensors(leaves), f"{_SIDES[side]} of {self._name}"
        for index, split in zip(places, splits, strict=False):
            if split is not None and (len(places) != len(splits) or leaves[index].shape != split.global_shape):
                raise self._placements.unclear(f"a hook changes the shape or the number of the tensors in the {what}")
            if split is not None:
                leaves[index] = parted(leaves[index], split, self._placements.comm, f"{what} for its hooks")
        return pytree.tree_unflatten(leaves, structure)


def _tensors(leaves: list[Any]) -> list[int]:
    return [index for index, leaf in enumerate(leaves) if type(leaf) is Tensor and leaf.is_floating_point()]


def _is_no_plain_container(value: Any) -> bool:
    """Say whether an argument must stay the same object, as a forward may write into it, such as a cache."""
    return type(value) not in (tuple, list, dict)


_SIDES = ("argument", "output")
_LEAVES = (_is_no_plain_container, None)
