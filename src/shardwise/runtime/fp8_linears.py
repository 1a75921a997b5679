"""Converts linear layers of blocks to torchao's, which multiply in fp8; their weights stay ordinary parameters.

Scales are by row: a token's input has one, and so has an output of the weight. So a product does not depend on which
tokens are beside each other in a micro-batch, or on which rank. The weight's gradient is computed without fp8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Final

import torch
from torch import nn

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import PrecisionConfig
from shardwise.layout.layout import Layout
from shardwise.runtime.class_swap import set_attribute, subclass_module

_RECIPE: Final = "rowwise_with_gw_hp"
_MULTIPLE: Final = 16  # the products of fp8 that GPUs have take such sizes
_SMALLEST: Final = 128  # adapters and small projections are sooner multiplied than cast


def convert_linears(
    model: nn.Module, layout: Layout, precision: PrecisionConfig, device: torch.device, is_simulated: bool
) -> list[Callable[[], None]]:
    """Make the linear layers of a model's blocks multiply as `precision.linears` says; others, the head's, stay.

    Args:
        layout: has the blocks, and the dtype of parameters.
        is_simulated: whether nothing is computed, so that any device does.

    Returns:
        the functions that make the layers what they were.

    Raises:
        ConfigError: torchao is missing, the device has no such products, or there is no such layer.
    """
    if precision.linears == "keep":
        return []
    key = f"precision.linears={precision.linears}"
    if precision.linears == "fp8" and layout.precision.param != "bf16":
        wrong = f"{key} returns bf16, and precision.param={layout.precision.param}"
        raise ConfigError("fp8-needs-bf16", f"{wrong}; set precision.param=bf16")
    check_fp8(precision.linears, None if is_simulated else device)
    layers = list(_layers_of_blocks(model, layout))
    if not layers:
        raise ConfigError(
            "no-fp8-layers",
            f"{key} finds no linear layer inside a block with sizes of {_SMALLEST} or more that are multiples of "
            f"{_MULTIPLE}; name the blocks by zero.blocks, or set precision.linears=keep",
        )
    undo: list[Callable[[], None]] = []
    kind, attributes = _converted(is_emulated=precision.linears == "fp8-emulated")
    for layer in layers:
        undo.append(subclass_module(layer, kind))
        undo.extend(set_attribute(layer, name, value) for name, value in attributes.items())
    return undo


def _layers_of_blocks(model: nn.Module, layout: Layout) -> Iterator[nn.Module]:
    for unit in layout.units:
        for module in model.get_submodule(unit).modules():
            if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
                continue
            sizes = module.in_features, module.out_features
            if min(sizes) >= _SMALLEST and not any(size % _MULTIPLE for size in sizes):
                yield module


def _converted(is_emulated: bool) -> tuple[type[nn.Module], dict[str, object]]:
    """Return the class of torchao's layer, and the attributes that it has beside those of torch's."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    plain = nn.Linear(_MULTIPLE, _MULTIPLE, device="meta")
    config = replace(Float8LinearConfig.from_recipe_name(_RECIPE), emulate=is_emulated)
    layer = convert_to_float8_training(plain, config=config)
    return type(layer), {name: value for name, value in vars(layer).items() if name not in vars(plain)}


def check_fp8(linears: str, device: torch.device | None) -> None:
    """Refuse a `precision.linears` without its library, or on a device without such products; None is any device."""
    if linears == "keep":
        return
    key = f"precision.linears={linears}"
    if find_spec("torchao") is None:
        raise ConfigError("extra-missing", f"{key} needs torchao; pip install 'shardwise[fp8]'")
    if linears != "fp8" or device is None:
        return
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return
    found = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    raise ConfigError(
        "no-fp8-products",
        f"{key} needs a GPU that scales products of fp8 by row (H100 or newer), and this is {found}; set "
        "precision.linears=fp8-emulated to see its numbers, without its speed",
    )
