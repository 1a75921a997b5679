"""Says what a plan of tensor parallelism may lack, where a split model's code fails on a shape.

A rank's tensors have some of the features; code that takes a size from an attribute, or a layer that was left whole,
then meets shapes that torch calls invalid, without a word about the plan.

>>> import torch
>>> from shardwise.layout.splits import Part
>>> from shardwise.layout.tensor_plan import LayerSplit, TensorPlan, tensor_layout
>>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
>>> layout = tensor_layout(model, TensorPlan((LayerSplit("0", "column", (Part(32),)),)), 2, sequence_parallel=False)
>>> try:
...     model[1:](torch.ones(4, 16))
... except RuntimeError as error:
...     print(shape_hint(error, model, layout))
mesh.tp=2: 2 is whole, but gets some features; give it the style 'row' in the plan, or take out the column before
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from typing import Final

from torch import nn

from shardwise.layout.tensor_plan import LayerSplit, TensorLayout, is_within

_SPEAKS_OF_SHAPES: Final = re.compile(r"shape|size|dimension|cannot be multiplied|to unpack")


def explain_shapes(error: BaseException, model: nn.Module, tensor: TensorLayout | None) -> None:
    """Add to a forward's error what the plan may lack, where it is one of shapes.

    Args:
        error: as it was raised.
        model: whose forward raised it.
        tensor: how the model is split; None where it is not.
    """
    hint = shape_hint(error, model, tensor) if tensor is not None else ""
    if hint:
        error.add_note(hint)


def shape_hint(error: BaseException, model: nn.Module, tensor: TensorLayout) -> str:
    """What the plan may lack, in a line; empty where the error is of something else."""
    if type(error) not in (RuntimeError, ValueError, AssertionError) or not _speaks_of_shapes(error):
        return ""
    names = {id(module): name for name, module in model.named_modules()}
    inside = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    failed = next((each for each in reversed(inside) if id(each) in names and isinstance(each, nn.Module)), None)
    if failed is None:
        return ""
    name = names[id(failed)]
    layer = next((each for each in tensor.plan.layers if each.module == name), None)
    cure = _layer_cure(layer) if layer is not None else _module_cure(name, failed, tensor)
    return f"mesh.tp={tensor.degree}: {name or type(model).__name__} {cure}"


def _speaks_of_shapes(error: BaseException) -> bool:
    return not str(error) or _SPEAKS_OF_SHAPES.search(str(error)) is not None


def _layer_cure(layer: LayerSplit) -> str:
    if layer.style == "row":
        return "is a row layer, but gets all features; split the layer before it ('column'), or make it 'row-split'"
    return (
        f"is split ('{layer.style}'), but gets some of the features; end the column layers before it in a 'row' layer, "
        "or make them 'column-gather'"
    )


def _module_cure(name: str, module: nn.Module, tensor: TensorLayout) -> str:
    if isinstance(module, nn.Linear):
        return "is whole, but gets some features; give it the style 'row' in the plan, or take out the column before"
    layers = ", ".join(_within(name, (layer.module for layer in tensor.plan.layers if layer.style == "column")))
    reason = f" ({layers} split them)" if layers else ""
    sizes = _sizes(name, module, tensor)
    known = f", such as {', '.join(f'{key}={value}' for key, value in sizes)}" if sizes else ""
    attribute = sizes[0][0] if len(sizes) == 1 else "<attribute>"
    return (
        f"computes with 1/{tensor.degree} of the features{reason}; if its code takes a number of heads or features "
        f"from an attribute{known}, add 'local {attribute}' for it to the plan"
    )


def _within(name: str, layers: Iterable[str]) -> list[str]:
    return [layer.removeprefix(f"{name}.") for layer in layers if name and is_within(layer, (name,))]


def _sizes(name: str, module: nn.Module, tensor: TensorLayout) -> list[tuple[str, int]]:
    """Whole numbers of a module that could be a rank's share, and are not yet."""
    done = {attribute for owner, attribute, _ in tensor.plan.attributes if owner == name}
    return [
        (key, value)
        for key, value in vars(module).items()
        if type(value) is int and value > 1 and value % tensor.degree == 0 and key not in done
    ]
