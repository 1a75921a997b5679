"""Observe one forward of a model without memory: which linear layers feed which, and what modules are called with.

Nodes of the graph of gradients say what follows from what. Each module's outputs are copied for those who get them, so
that a node of a copy is before another node only where code outside of the module uses this output.

>>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
>>> Observation(model, torch.zeros(3, 4)).feeders("2", ["0", "2"])
{'0'}
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.config.errors import ConfigError
from shardwise.runtime.module_calls import change_inputs, watch_calls
from shardwise.runtime.torch_private import (
    NO_VALUE_ERRORS,
    OpMode,
    OpOverload,
    fake_copy,
    fake_tensors,
    pytree,
    quiet_fakes,
    view_base,
)
from shardwise.tensor.plan_table import NO_TENSOR
from shardwise.tensor.prove import BlockCall, NotProvedError, call_model, in_short, plain_output


@dataclass(frozen=True)
class Call:
    """Describes the first call of a module.

    Attributes:
        arguments: those that are tensors, by name.
        leaves: all that its arguments hold; `first` is the first tensor of these.
        outputs: nodes of what its output holds, in the graph of gradients; None of what has no gradient.
    """

    arguments: Mapping[str, Tensor]
    leaves: Sequence[Any]
    first: Tensor | None
    outputs: list[Any]


class Observation:
    """Holds the calls of one forward.

    Attributes:
        calls: the first of each module, in the order in which they began.
        deciding: modules whose code asked for the values of tensors, and by which op; it got zeros.

    Raises:
        ConfigError: the model's own forward depends on the values of tensors, or a module's in an unsupported way.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.calls: dict[str, Call] = {}
        self.deciding: dict[str, str] = {}
        self._stack: list[tuple[str, Call]] = []
        with fake_tensors(), quiet_fakes():
            tensors = [*model.parameters(), *model.buffers()]
            copied = copy.deepcopy(model, {id(tensor): fake_copy(tensor) for tensor in tensors})
            for parameter in copied.parameters():
                parameter.requires_grad_(parameter.is_floating_point())
            batch = pytree.tree_map(lambda leaf: fake_copy(leaf) if isinstance(leaf, Tensor) else leaf, batch)
            self._batch = [_base(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
            try:
                with watch_calls(copied, self._before, self._after), _Decisions(self):
                    output = call_model(copied, batch)
            except Exception as error:
                if not isinstance(error, NO_VALUE_ERRORS) and not self.deciding:
                    raise
                place = f"in {', '.join(self.deciding) or 'its forward'}"
                raise ConfigError(
                    "tp-value-decisions",
                    f"the model decides on the values of tensors {place} ({in_short(error)}), so running it once says "
                    f"nothing of another batch; give a plan as a table, or {NO_TENSOR}",
                ) from error
        self._returned = [_node(leaf) for leaf in pytree.tree_leaves(plain_output(output))]
        self._used = _nodes_before(self._returned)

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        except TypeError:
            bound = {}  # its forward will say what is wrong
        leaves = pytree.tree_leaves((args, kwargs))
        first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
        call = Call({key: value for key, value in bound.items() if isinstance(value, Tensor)}, leaves, first, [])
        self._stack.append((name, call))
        self.calls.setdefault(name, call)

    def _after(self, output: Any) -> Any:
        _, call = self._stack.pop()
        output = pytree.tree_map(lambda leaf: leaf.clone() if _node(leaf) else leaf, output)
        call.outputs.extend(_node(leaf) for leaf in pytree.tree_leaves(plain_output(output)))
        return output

    @property
    def module(self) -> str:
        """Return the name of the module that runs."""
        return self._stack[-1][0] if self._stack else ""

    def feeders(self, name: str, layers: Collection[str]) -> set[str]:
        """Return the layers whose outputs become a layer's input, or with no name the model's, through no other one."""
        made = {self.calls[layer].outputs[0]: layer for layer in layers}
        starts = [_node(self.calls[name].first)] if name else self._returned
        return {made[node] for node in _nodes_before(starts, made) if node in made}

    def is_of_batch(self, tensor: Tensor | None) -> bool:
        """Return whether a tensor is one of the batch's, perhaps in another shape."""
        return tensor is not None and any(_base(tensor) is leaf for leaf in self._batch)

    def is_returned(self, name: str) -> bool:
        """Return whether the model returns what a module gives, perhaps in another shape."""
        (given,) = self.calls[name].outputs
        for node in self._returned:
            while node not in (None, given) and node.name() in _RESHAPES:
                node = node.next_functions[0][0]
            if node is given:
                return True
        return False

    def block(self, model: nn.Module, batch: Any, name: str) -> BlockCall:
        """Return the first call of a module of a model with values.

        Raises:
            NotProvedError: without gradients it is not called.
            Exception: of the model's code, or its arguments cannot be copied.
        """
        copied, inputs = copy.deepcopy(model), {id(call.first) for call in self.calls.values()}

        def end(called: nn.Module, args: Any, kwargs: Any) -> Any:
            raise _ReachedError(copy.deepcopy((args, kwargs)))

        call = self.calls[name]
        change_inputs(copied.get_submodule(name), end)
        has_gradient = [_is_float(leaf) and (leaf.requires_grad or id(leaf) in inputs) for leaf in call.leaves]
        try:
            with torch.no_grad():
                call_model(copied, batch)
        except _ReachedError as reached:
            block = copy.deepcopy(model.get_submodule(name))
            return BlockCall(name, block, reached.args[0], has_gradient, [node in self._used for node in call.outputs])
        raise NotProvedError(f"{name} is not called without gradients")


_RESHAPES: Final = ("CloneBackward0", "ViewBackward0", "UnsafeViewBackward0", "SliceBackward0", "AliasBackward0")


class _ReachedError(Exception):
    """Ends a forward where a module is called, with its arguments."""


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _base(tensor: Tensor) -> Tensor:
    base = view_base(tensor)
    return tensor if base is None else base


def _node(leaf: Any) -> Any:
    return leaf.grad_fn if isinstance(leaf, Tensor) else None


def _nodes_before(starts: Sequence[Any], ends: Collection[Any] = ()) -> set[Any]:
    """Return the nodes from which others follow, through none of `ends`."""
    nodes: set[Any] = set()
    left = list(starts)
    while left:
        node = left.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            left += [before for before, _ in node.next_functions] if node not in ends else []
    return nodes


class _Decisions(OpMode):
    """Sees ops that need values, and gives the first index or zero: the module that asks is left whole."""

    def __init__(self, seen: Observation) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except NO_VALUE_ERRORS:
            module, name = self._seen.module, str(func)
            if not module or name not in ("aten.nonzero.default", "aten._local_scalar_dense.default"):
                raise
            self._seen.deciding.setdefault(module, name)
            x = args[0]
            if name == "aten.nonzero.default":
                return x.new_zeros((1, x.dim()), dtype=torch.int64)
            return False if x.dtype is torch.bool else 0.0 if x.is_floating_point() else 0
