"""What holds for every plan, whoever made it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torch import nn

from shardwise.config import ConfigError
from shardwise.layout.splits import check_divides
from shardwise.layout.tensor_plan import LayerSplit, TensorPlan, is_within
from shardwise.tensor.plans.draft import argument_names, split_size, why_whole


def check_plan(model: nn.Module, plan: TensorPlan, degree: int, sequence_parallel: bool) -> None:
    """Refuse a plan that does not fit a model.

    Args:
        model: whose names and shapes are read.
        plan: for it.
        degree: ranks of the tensor-parallel group.
        sequence_parallel: whether the plan needs a stack.

    Raises:
        ConfigError: a name is not the model's, it splits nothing, parts do not fill their dim or do not divide, a
            region lies in another, or there is no stack.
    """
    modules = dict(model.named_modules())
    if not plan.layers:
        raise ConfigError("the tensor-parallel plan splits no layer; name some, such as {'blocks.*.up': 'column'}")
    for name in _module_names(plan):
        if name not in modules:
            raise unknown_name(name, modules, "module")
    params = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for name in plan.partial:
        if name not in params:
            raise unknown_name(name, params, "parameter")
    for region in plan.regions:
        for name in (*region.inputs, *region.whole_inputs):
            _check_argument(modules[region.module], region.module, name)
    for stack in plan.stacks:
        _check_argument(modules[stack.first], stack.first, stack.argument)
    _check_regions(plan, params)
    for layer in plan.layers:
        _check_layer(modules[layer.module], layer, degree)
    if sequence_parallel and not plan.stacks:
        reason = next((note for note in plan.notes if note.startswith("no sequence")), "the plan names no blocks")
        raise ConfigError(
            "tensor.sequence_parallel=true needs a plan that says between which blocks the sequence is split: "
            f"{reason}; set it to false, or name blocks, regions and the last norm in a table, such as "
            "{'blocks.*': 'stack x last=norm', 'blocks.*.ffn': 'region x'}"
        )


def unknown_name(name: str, names: Iterable[str], kind: str) -> ConfigError:
    """The error for a name, or a pattern, that the model does not have; it names close ones."""
    names = [each for each in names if each]
    close = difflib.get_close_matches(name, names, n=3)
    cure = f"did you mean {' or '.join(close)}?" if close else f"names are such as {', '.join(names[:3])}"
    return ConfigError(f"the tensor-parallel plan names {name!r}, but the model has no such {kind}; {cure}")


def _module_names(plan: TensorPlan) -> Iterable[str]:
    for items in (plan.layers, plan.regions, plan.dropouts):
        yield from (item.module for item in items)
    for stack in plan.stacks:
        yield from (stack.first, stack.last, *stack.modules)
    for name, _, _ in plan.attributes:
        yield name


def _check_argument(module: nn.Module, name: str, argument: str) -> None:
    names = argument_names(module)
    if argument not in names:
        raise ConfigError(f"{name} has no argument {argument!r}; its forward takes {', '.join(names)}")


def _check_regions(plan: TensorPlan, params: Iterable[str]) -> None:
    """In a region whose input enters once, what is computed whole would count once for each rank in the backward."""
    split = {layer.module for layer in plan.layers}
    regions = [region.module for region in plan.regions]
    for region in regions:
        outer = next((each for each in regions if region.startswith(f"{each}.")), None)
        if outer is not None:
            raise ConfigError(
                f"region {region} lies in region {outer}, so its gradients would be summed twice; keep one of them"
            )
    for name in params:
        module = name.rpartition(".")[0]
        if module not in split and name not in plan.partial and is_within(module, regions):
            raise ConfigError(
                f"{name} lies in a region of the tensor-parallel plan, where ranks work on parts, but the plan neither "
                "splits it nor calls it partial; name its module, such as column, row or partial, or move it (an "
                "adapter, say) out of the region"
            )


def _check_layer(module: nn.Module, layer: LayerSplit, degree: int) -> None:
    size = split_size(module, layer.module, layer.style)
    if why := why_whole(module, layer.style):
        raise ConfigError(
            f"layer {layer.module} cannot be split by {layer.style!r}: {why}; take it out of the plan, or let "
            "shardwise.propose_plan(model, batch, tp=...) make one, which leaves whole what cannot be split"
        )
    total = sum(part.size for part in layer.parts)
    if total != size:
        raise ConfigError(f"{layer.module}: parts of {total} features in all do not fill its {size}")
    for part in layer.parts:
        units = part.size if part.num_units is None else part.num_units
        what = f"the {'features' if part.num_units is None else 'units'} of {layer.module}"
        if part.size % units:
            raise ConfigError(f"{layer.module}: {part.size} features do not divide by {units} units")
        part.check(degree, what)
        if layer.style == "row" and not part.is_padded:
            check_divides(degree, units, what)  # ranks that share inputs would add them twice
