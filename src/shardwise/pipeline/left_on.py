"""Values that units keep on themselves: where a unit is skipped, ghosts stand in their place.

A block may leave what others read later as an attribute, such as `self.aux_loss`. Where another stage computes the
block, that attribute has its first value, or that of another micro-batch: what reads it would be wrong without a word.
So once for each class of skipped units a copy without values runs, and what it leaves on itself is put as ghosts onto
each skipped unit, for as long as the stage's forward runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch_private import Ghosts, pytree
from shardwise.wearing import set_attribute


class Traces:
    """Puts ghosts where skipped units would leave values.

    Args:
        modules: that may be skipped, as the user built them.
        ghosts: the maker.
    """

    def __init__(self, modules: Sequence[nn.Module], ghosts: Ghosts) -> None:
        self._ghosts = ghosts
        self._copies: dict[type, nn.Module] = {}
        self._left: dict[type, list[tuple[str, str, Any]]] = {}
        self._undo: list[Callable[[], None]] = []
        for module in modules:
            if type(module) not in self._copies:
                tensors = [*module.parameters(), *module.buffers()]
                with suppress(Exception):  # what cannot be copied is not looked into
                    self._copies[type(module)] = copy.deepcopy(
                        module, {id(each): ghosts.like(each) for each in tensors}
                    )

    def leave(self, module: nn.Module, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A unit is skipped: put onto it what units of its class leave on themselves.

        Args:
            module: the unit.
            kind: its class as the user built it.
            args: that it was called with, and `kwargs`.
            kwargs: see there.
        """
        if kind in self._copies:
            self._left[kind] = list(self._run(self._copies.pop(kind), args, kwargs))
        for path, name, value in self._left.get(kind, ()):
            with suppress(AttributeError):  # another unit of the class may lack the part
                self._undo.append(set_attribute(module.get_submodule(path), name, value))

    def remove(self) -> None:
        """Let the units have what they had."""
        while self._undo:
            self._undo.pop()()

    def _run(self, ghostly: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
        """What a copy leaves on itself: the part's name, the attribute's and its value."""
        before = {id(leaf) for *_, value in _attributes(ghostly) for leaf in self._ghosts_in(value)}
        own_args, own_kwargs = pytree.tree_map(
            lambda leaf: self._ghosts.like(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        # Where it fails, what it has left until then stands.
        with suppress(Exception), torch.no_grad(), self._ghosts.only():
            ghostly(*own_args, **own_kwargs)
        for path, name, value in _attributes(ghostly):
            if any(id(leaf) not in before for leaf in self._ghosts_in(value)):
                yield path, name, value

    def _ghosts_in(self, value: Any) -> list[Any]:
        return [leaf for leaf in pytree.tree_leaves(value) if self._ghosts.is_one(leaf)]


def _attributes(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """What stands on a module and its parts beside parameters, buffers and modules."""
    for path, part in module.named_modules():
        for name, value in [*vars(part).items()]:
            if not name.startswith(("_parameters", "_buffers", "_modules")):
                yield path, name, value
