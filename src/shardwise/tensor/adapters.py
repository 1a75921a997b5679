"""Split PEFT's adapters beside the linear layers that they adapt; peft is not imported.

A plan names the layer, which PEFT has put into a module of its own as `base_layer`, beside a product of two small
matrices: `lora_B(lora_A(x))` is added to `base_layer(x)`. The adapter is split as its layer is. After a column layer's
input comes `lora_A`, which is whole, and `lora_B` has its outputs; `lora_A` has a row layer's inputs, and after the sum
over the ranks comes `lora_B`, which is whole. It is apart from `plan_table` for the length of that file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from torch import nn

from shardwise.layout.tensor_plan import LayerSplit, SplitDropout, TensorPlan, is_within
from shardwise.tensor.kinds import is_transposed


def with_adapters(plan: TensorPlan, modules: Mapping[str, nn.Module]) -> TensorPlan:
    """Return a plan that splits PEFT's LoRA beside the layers that the given one splits.

    Args:
        plan: names layers, some of which PEFT has wrapped.
    """
    regions = [region.module for region in plan.regions]
    layers: list[LayerSplit] = []
    partial, after_rows, dropouts = [*plan.partial], [*plan.after_rows], [*plan.dropouts]
    for split in plan.layers:
        base = getattr(modules[split.module], "base_layer", None)
        if not isinstance(base, nn.Module):
            layers.append(split)
            continue
        layers.append(replace(split, module=f"{split.module}.base_layer", is_transposed=is_transposed(base)))
        for first, second, dropout in _adapters(split.module, modules):
            if split.style == "column":
                layers.append(replace(split, module=second, is_transposed=False))
                partial += [f"{first}.weight"] if is_within(split.module, regions) else []
            else:
                layers.append(replace(split, module=first, is_transposed=False))
                after_rows.append(second)
                dropouts += [SplitDropout(dropout, dim=-1)] if isinstance(modules[dropout], nn.Dropout) else []
    return replace(
        plan, layers=tuple(layers), partial=tuple(partial), after_rows=tuple(after_rows), dropouts=tuple(dropouts)
    )


def _adapters(name: str, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, str]]:
    """Yield the names of the two matrices and of the dropout before them, of each adapter of a module."""
    adapters: Collection[str] = getattr(modules[name], "lora_A", {}).keys()
    for adapter in adapters:
        yield f"{name}.lora_A.{adapter}", f"{name}.lora_B.{adapter}", f"{name}.lora_dropout.{adapter}"
