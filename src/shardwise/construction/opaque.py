"""Opaque parameters are frozen values that no one may cast: integers, and weights that bitsandbytes packs in 4 bits.

They are stored and sent as bytes. A packed weight is known by its `quant_state`, whatever dtype its bytes pass for; the
scales in it are no parameters, and each rank keeps them whole.

>>> packed = nn.Parameter(torch.zeros(6, 1, dtype=torch.uint8), requires_grad=False)
>>> is_opaque(packed), is_opaque(nn.Parameter(torch.zeros(6, 1)))
(True, False)
>>> bytes_shape(nn.Parameter(torch.zeros(3, 4, dtype=torch.int16), requires_grad=False))
(3, 8)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config.errors import ConfigError


def quant_state(parameter: Tensor) -> Any:
    """Return what unpacks a parameter of bitsandbytes, with its scales; None for any other."""
    return getattr(parameter, "quant_state", None)


def is_opaque(parameter: Tensor) -> bool:
    """Say whether a parameter's values are bytes that must stay as they are."""
    is_number = parameter.is_floating_point() or parameter.is_complex()
    return not is_number or quant_state(parameter) is not None


def check_opaque(name: str, parameter: Tensor) -> None:
    """Refuse what is not packed in a way that stays correct while its bytes are in another place.

    Raises:
        ConfigError: names the parameter.
    """
    kind = type(parameter).__name__
    if hasattr(parameter, "quant_state") and parameter.quant_state is None:
        raise ConfigError(
            "parameter-not-packed",
            f"parameter {name} is a {kind} that is not packed yet; move the model to its device (model.to) first",
        )
    if hasattr(parameter, "SCB"):
        raise ConfigError(
            "packed-in-8-bits",
            f"parameter {name} is a {kind} of LLM.int8(), whose layers keep the weight a second time; load the model "
            "with load_in_4bit=True",
        )
    if is_opaque(parameter) and parameter.requires_grad:
        raise ConfigError(
            "packed-parameter-trains", f"parameter {name} is packed, so it has no gradient; set its requires_grad=False"
        )


def bytes_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter's bytes: that of the parameter, where the last dimension counts bytes."""
    *outer, last = parameter.shape or (1,)
    return (*outer, last * parameter.element_size())


def as_bytes(values: Tensor) -> Tensor:
    """Return the bytes of values, 1-D."""
    return values.contiguous().view(-1).view(torch.uint8)


def scales(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that unpack a model's packed parameters, by name."""
    for name, parameter in model.named_parameters():
        yield from _tensors_of(name, quant_state(parameter))


def beside_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a model has beside its parameters, by name: buffers and scales, of which every rank holds all."""
    yield from model.named_buffers()
    yield from scales(model)


def _tensors_of(prefix: str, state: Any) -> Iterator[tuple[str, Tensor]]:
    for name, value in vars(state).items() if state is not None else ():
        if isinstance(value, Tensor):
            yield f"{prefix}.{name}", value
        elif type(value) is type(state):  # the scales are packed too
            yield from _tensors_of(f"{prefix}.{name}", value)
