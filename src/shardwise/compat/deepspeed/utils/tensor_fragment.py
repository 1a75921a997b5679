"""Offer safe access to the states of a parameter: whole ones in every stage, this rank's slice of them in stage 3."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.compat.deepspeed.finder import answers
from shardwise.compat.deepspeed.utils import PLACE
from shardwise.config.errors import ConfigError
from shardwise.zero.own_parts import read_own_part, write_own_part

__getattr__ = answers(__name__)


@dataclass
class fragment_address:  # noqa: N801  DeepSpeed's name
    """Says which elements of a flat state are a parameter's: DeepSpeed's checkpoints contain it."""

    numel: int
    start: int


def _place(parameter: nn.Parameter) -> tuple[Any, str]:
    reference, name = parameter.__dict__.get(PLACE, (lambda: None, ""))
    engine = reference()
    if engine is None:
        raise ConfigError(
            "parameter-before-initialize",
            f"a parameter of shape {tuple(parameter.shape)} belongs to no engine; call deepspeed.initialize first",
        )
    return engine.inner, name


def _read(parameter: nn.Parameter, state: str) -> Tensor | None:
    engine, name = _place(parameter)
    value: Tensor | None = engine.read(name, state) if state in engine.states_of(name) else None
    return value


def _wide(value: Tensor | None) -> Tensor | None:
    return value if value is None or value.dtype == torch.float64 else value.float()


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the fp32 values of a parameter, whole; all ranks call it, as for the functions below."""
    value = _read(param, "master")
    return _wide(_read(param, "param") if value is None else value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the gradient of this step so far; None where there is none."""
    return _read(param, "grad")


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a state of the optimizer, such as `exp_avg`; None before the first step."""
    return _read(param, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace the values of a parameter, in its master too."""
    engine, name = _place(param)
    engine.write(name, value)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the gradient of this step so far."""
    engine, name = _place(param)
    engine.write(name, value, "grad")


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace a state of the optimizer, such as `exp_avg`; the arguments are those of DeepSpeed."""
    engine, name = _place(param)
    engine.write(name, value, optim_state_key)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace each gradient of this step so far by what a function makes of it and its parameter."""
    for parameter in param_list:
        if parameter.requires_grad and (grad := safe_get_full_grad(parameter)) is not None:
            safe_set_full_grad(parameter, update_func(grad, parameter))


get_full_hp_param = safe_get_full_optimizer_state
get_full_hp_grad = safe_get_full_grad


def _local(parameter: nn.Parameter) -> tuple[Any, str]:
    engine, name = _place(parameter)
    if engine.config.zero.stage != 3:
        raise ConfigError(
            "local-state-needs-stage-3",
            f"zero_optimization.stage={engine.config.zero.stage}: a rank has slices of parameters in stage 3 alone, as "
            "in DeepSpeed; call safe_get_full_* or safe_set_full_*",
        )
    return engine.parts.usable_states(), name


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor:
    """Return a copy of this rank's slice of the fp32 values, 1-D; the slices in the order of the ranks are the whole.

    No other rank takes part. A slice may be empty: slices are of a block's parameters together.
    """
    value = _wide(read_own_part(*_local(param), "master"))
    assert value is not None, "every parameter has it"
    return value


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return a copy of this rank's slice of the gradient so far; all ranks call it, since it is a mean over them."""
    return read_own_part(*_local(param), "grad")


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a copy of this rank's slice of a state of the optimizer; None before the first step."""
    return read_own_part(*_local(param), optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's slice of the values, in the master too."""
    write_own_part(*_local(param), value, "master")


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's slice of the gradient so far; all ranks call it."""
    write_own_part(*_local(param), value, "grad")


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace this rank's slice of a state of the optimizer; the arguments are those of DeepSpeed."""
    write_own_part(*_local(param), value, optim_state_key)
