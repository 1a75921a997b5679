"""Find the modules of a model that are its experts, by Hugging Face's interface of experts.

Such a module has the weights of all experts in stacks [experts, ., .], says by flags how they are laid out, and is
called with the tokens, the experts that each token goes to, and their weights. Any module with these attributes counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import nn

from shardwise.layout.facts import ExpertDim

_FLAGS: Final = ("has_gate", "has_bias", "is_transposed", "num_experts")


def is_experts(module: nn.Module) -> bool:
    """Say whether a module is a stack of experts that can be divided among ranks."""
    down = getattr(module, "down_proj", None)
    has_interface = all(hasattr(module, flag) for flag in _FLAGS) and isinstance(down, nn.Parameter)
    return has_interface and down is not None and down.dim() == 3 and down.shape[0] == module.num_experts


def stack_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of experts that are stacks: the weights, then the biases."""
    weights = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return weights + tuple(f"{name}_bias" for name in weights if module.has_bias)


def dims_in_experts(modules: Mapping[str, nn.Module]) -> dict[str, ExpertDim | None]:
    """Return how each parameter that experts use is made of experts, by name; None for one that they share.

    Args:
        modules: all of a model's, by every name.
    """
    found: dict[str, ExpertDim | None] = {}
    for prefix, module in modules.items():
        if not is_experts(module):
            continue
        stacks = {name: ExpertDim(int(module.num_experts)) for name in stack_names(module)}
        own = f"{prefix}.".removeprefix(".")
        found |= {own + name: stacks.get(name) for name, _ in module.named_parameters(remove_duplicate=False)}
        found |= _adapters(prefix, modules, int(module.num_experts))
    return found


def _adapters(prefix: str, modules: Mapping[str, nn.Module], num_experts: int) -> Iterator[tuple[str, ExpertDim]]:
    """Yield the parameters of PEFT's wrappers around experts: A has the ranks of one expert after the other, and of each
    rank B has all experts.
    """
    while prefix.endswith(".base_layer"):
        prefix = prefix.removesuffix(".base_layer")
        wrapper: Any = modules[prefix]
        for name, rank in wrapper.r.items():
            yield f"{prefix}.lora_A.{name}.weight", ExpertDim(num_experts)
            yield f"{prefix}.lora_B.{name}.weight", ExpertDim(num_experts, dim=1, num_repeats=rank)
