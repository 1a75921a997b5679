"""Find the modules of a model that are its experts, by Hugging Face's interface of experts.

Such a module has the weights of all experts in stacks [experts, ., .], says by flags how they are laid out, and is
called with the tokens, the experts that each token goes to, and their weights. Any module with these attributes counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from shardwise.config.errors import ConfigError
from shardwise.layout.facts import ExpertDim

_FLAGS: Final = ("has_gate", "has_bias", "is_transposed", "num_experts")
_ROUTER_NAMES: Final = frozenset({"router", "gate"})  # tell it from other matrices that have as many rows by chance


@dataclass(frozen=True)
class FoundExperts:
    """Says where a model has a module of experts.

    Attributes:
        wrappers: those of PEFT around it, the outermost last.
        parent: the module around it and its wrappers, which calls its router.
    """

    name: str
    module: Any
    wrappers: Mapping[str, Any]
    parent_name: str
    parent: nn.Module

    @property
    def num_experts(self) -> int:
        return int(self.module.num_experts)


def experts_of(model: nn.Module) -> list[FoundExperts]:
    """Return the modules of experts of a model in its order, each once, by its last name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = []
    for name in {id(module): name for name, module in modules.items() if is_experts(module)}.values():
        wrappers = _wrappers_of(name, modules)
        parent = [name, *wrappers][-1].rpartition(".")[0]
        layers.append(FoundExperts(name, modules[name], wrappers, parent, modules[parent]))
    return layers


def is_experts(module: Any) -> bool:
    """Say whether a module is a stack of experts, all of them or those of one rank."""
    if not all(hasattr(module, flag) for flag in _FLAGS):
        return False
    packed = packed_stack(module, "down_proj")
    down: Any = getattr(module, "down_proj", None) if packed is None else packed.quant_state
    if packed is None and not isinstance(down, nn.Parameter):
        return False
    return len(down.shape) == 3 and down.shape[0] > 0 and module.num_experts % down.shape[0] == 0


def stack_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of experts that are stacks: the weights, then the biases."""
    weights = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return weights + tuple(f"{name}_bias" for name in weights if module.has_bias)


def packed_stack(module: nn.Module, name: str) -> Any:
    """Return what unpacks a stack, by its `quant_state`, where bitsandbytes has packed it; None for a plain stack.

    The bytes are then a parameter of the module, `parametrizations.NAME.original`.
    """
    packed = getattr(module, "parametrizations", {})
    return packed[name][0] if name in packed and hasattr(packed[name][0], "quant_state") else None


def part_of_packed(state: Any, name: str, ep: int, rank: int) -> Any:
    """Return what unpacks one rank's experts of a packed stack.

    Raises:
        ConfigError: an expert is no whole number of the blocks of elements, or of scales, that have a scale.
    """
    num_values = state.shape.numel() // state.shape[0]
    for level in filter(None, (state, state.state2)):  # the second packs the scales of the first
        if num_values % level.blocksize:
            raise ConfigError(
                "opaque-over-ep",
                f"mesh.ep={ep} divides the packed experts of {name}, and {num_values} of one are no whole number of "
                f"blocks of {level.blocksize} that share a scale; set mesh.ep=1",
            )
        num_values //= level.blocksize
    changes = {"shape": torch.Size((state.shape[0] // ep, *state.shape[1:]))}
    if state.state2 is not None:
        changes["state2"] = _with_scales(state.state2, ep, rank)
    return _with_scales(state, ep, rank, **changes)


def _with_scales(state: Any, ep: int, rank: int, **changes: Any) -> Any:
    copied = copy(state)
    vars(copied).update(absmax=state.absmax.chunk(ep)[rank], **changes)
    return copied


def dims_in_experts(modules: Mapping[str, Any]) -> dict[str, ExpertDim | None]:
    """Return how each parameter that experts use is made of experts, by name; None for one that they share.

    Args:
        modules: all of a model's, by every name.
    """
    dims: dict[str, ExpertDim | None] = {}
    for prefix, module in modules.items():
        if not is_experts(module):
            continue
        num_experts = int(module.num_experts)
        stacks = {
            name if packed_stack(module, name) is None else f"parametrizations.{name}.original": ExpertDim(num_experts)
            for name in stack_names(module)
        }
        start = f"{prefix}.".removeprefix(".")
        dims |= {start + name: stacks.get(name) for name, _ in module.named_parameters(remove_duplicate=False)}
        dims |= _adapters(prefix, modules, num_experts)
    return dims


def _adapters(prefix: str, modules: Mapping[str, nn.Module], num_experts: int) -> Iterator[tuple[str, ExpertDim]]:
    """Yield the parameters of PEFT's wrappers around experts.

    A has the ranks of one expert after the other, and B all experts of one rank after the other.
    """
    for at, wrapper in _wrappers_of(prefix, modules).items():
        for name, rank in wrapper.r.items():
            yield f"{at}.lora_A.{name}.weight", ExpertDim(num_experts)
            yield f"{at}.lora_B.{name}.weight", ExpertDim(num_experts, dim=1, num_repeats=rank)


def _wrappers_of(name: str, modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return PEFT's wrappers around a module of experts, by name."""
    wrappers = {}
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
        wrappers[name] = modules[name]
    return wrappers


def router_of(parent: nn.Module, experts: Any) -> nn.Module | None:
    """Return the router of a module of experts: the module whose matrix has a row for each of them.

    Args:
        parent: of the experts, or of the outermost wrapper around them.

    Returns:
        None where there is none, or where several could be it.
    """
    num_experts, inside = experts.num_experts, {id(module) for module in experts.modules()}
    candidates = {
        name: module
        for name, module in parent.named_modules()
        if id(module) not in inside
        and any(weight.dim() == 2 and len(weight) == num_experts for weight in module.parameters(recurse=False))
    }
    named = [module for name, module in candidates.items() if not _ROUTER_NAMES.isdisjoint(name.split("."))]
    likely = named or [*candidates.values()]
    return likely[0] if len(likely) == 1 else None
