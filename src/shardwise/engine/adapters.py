"""What PEFT makes of a model's names and values: its adapters alone, or the model with them merged into its weights.

PEFT itself merges, and says which names an adapter's file has: it is given copies of its modules, whose parameters are
whole, one module at a time. peft is imported only where a model has adapters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.checkpoint.manifest import CheckpointError
from shardwise.layout.slicing import Shape

_UNLOAD: Final = "unload_and_optionally_merge_module"


@dataclass(frozen=True)
class AdaptedModel:
    """Is a model with, or without, adapters of PEFT.

    Attributes:
        shapes: of its parameters and persistent buffers, whole, by all their names.
    """

    model: Any
    shapes: Mapping[str, Shape]

    @property
    def is_adapted(self) -> bool:
        """Say whether there are adapters."""
        return hasattr(self.model, "peft_config")

    @cached_property
    def base(self) -> Any:
        """Return the model that has been adapted."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @cached_property
    def _prefix(self) -> str:
        return next(f"{name}." for name, module in self.model.named_modules() if module is self.base).lstrip(".")

    @cached_property
    def wrappers(self) -> tuple[str, ...]:
        """Return the names of the modules that PEFT has put in the place of others, without those inside of them."""
        names: list[str] = []
        for name, module in self.model.named_modules() if self.is_adapted else ():
            if _is_wrapper(module) and not any(name.startswith(f"{wrapper}.") for wrapper in names):
                names.append(name)
        return tuple(names)

    @cached_property
    def wrapper_of(self) -> Mapping[str, str]:
        """Return the wrapper that a tensor is in, by the tensor's name; those of its adapters are among them."""
        starts = {f"{wrapper}.": wrapper for wrapper in self.wrappers}
        return {name: starts[start] for start in starts for name in self.shapes if name.startswith(start)}

    @cached_property
    def plain_names(self) -> Mapping[str, str]:
        """Return the base model's name of each tensor that is not of an adapter, by its name here."""
        names = {name: name.removeprefix(self._prefix) for name in self.shapes if name not in self.wrapper_of}
        for wrapper, inside in groupby(self.wrapper_of, self.wrapper_of.__getitem__):
            empty = {name: torch.empty(self.shapes[name], device="meta") for name in inside}
            owners = {id(tensor): name for name, tensor in empty.items()}
            for plain, tensor in self._unloaded(wrapper, empty, merge=False):
                if id(tensor) in owners:
                    names[owners[id(tensor)]] = plain
        return names

    def merged(self, wrapper: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that remain of a wrapper once its adapters are merged into them, by their plain names.

        Args:
            values: of all tensors inside of it, by name; some are overwritten.
        """
        with torch.no_grad():
            return {plain: tensor.detach() for plain, tensor in self._unloaded(wrapper, values, merge=True)}

    def adapter_names(self) -> Mapping[str, str]:
        """Return the name that the file of the active adapter has for each of its tensors, by its name here.

        Raises:
            CheckpointError: there is no adapter.
        """
        if not self.is_adapted:
            raise CheckpointError(
                "no-adapters", f'adapters="only", and {type(self.model).__name__} has none of PEFT; leave adapters out'
            )
        from peft import get_peft_model_state_dict

        empty = {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        owners = {id(tensor): name for name, tensor in empty.items()}
        active = getattr(self.model, "active_adapter", None)
        active = active if isinstance(active, str) else next(iter(self.model.peft_config))
        stored = get_peft_model_state_dict(self.model, state_dict=dict(empty), adapter_name=active)
        return {owners[id(tensor)]: name for name, tensor in stored.items()}

    def _unloaded(self, wrapper: str, values: Mapping[str, Tensor], *, merge: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield what a wrapper leaves in its place, by plain names."""
        module: Any = _copied(self.model.get_submodule(wrapper), wrapper, values)
        if hasattr(module, _UNLOAD):
            plain: nn.Module = getattr(module, _UNLOAD)(merge=merge, safe_merge=False, adapter_names=None)
        else:
            if merge:
                module.merge()
            plain = module.get_base_layer()
        for name, tensor in (*plain.named_parameters(), *plain.named_buffers()):
            yield f"{wrapper.removeprefix(self._prefix)}.{name}", tensor


def _is_wrapper(module: nn.Module) -> bool:
    cls = type(module)  # an instance answers for what it wraps
    return hasattr(cls, _UNLOAD) or (hasattr(cls, "get_base_layer") and hasattr(cls, "merge"))


def _copied(module: nn.Module, name: str, values: Mapping[str, Tensor]) -> nn.Module:
    """Return a module of the same attributes, without hooks, whose tensors are those that `values` has by name."""
    twin = copy.copy(module)
    # Copied too is what a merge notes there, or the model's own modules would take themselves to be merged.
    state = {key: copy.copy(value) if isinstance(value, list | dict) else value for key, value in vars(module).items()}
    state |= {key: type(value)() for key, value in state.items() if "_hooks" in key and isinstance(value, dict)}
    for tensors in ("_parameters", "_buffers"):
        state[tensors] = {key: values.get(f"{name}.{key}", tensor) for key, tensor in vars(module)[tensors].items()}
    children = vars(module)["_modules"].items()
    vars(twin).update(
        state, _modules={key: child and _copied(child, f"{name}.{key}", values) for key, child in children}
    )
    return twin
