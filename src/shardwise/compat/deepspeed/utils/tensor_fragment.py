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
from shardwise.runtime.state_shards import FlatState, TensorFlatState, is_flat
from shardwise.zero import state_access
from shardwise.zero.state_access import GRAD, MASTER, EngineState, ParamLocation, find_held

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


def _read_own_part(states: EngineState, name: str, state: str) -> Tensor | None:
    """Return a copy of what this rank holds of a state, 1-D, empty where others hold all; None where there is none yet.

    No other rank takes part, but in a gradient, which is a mean over the ranks; and nothing is put together, so a part
    of a tensor-parallel split is one of that.

    Args:
        name: a name of a parameter of this rank's stages.
        state: `master`, `grad`, or one of the optimizer's keys.
    """
    place = find_held(states, name)
    to_mean, held = _own_part(states, place, state)
    if held is None:
        return None
    found = held.read(0, held.numel).detach().to(states.comms.shards.device, copy=True)
    return found if to_mean is None else found.to(place.group.master.dtype).mul_(to_mean)


def _write_own_part(states: EngineState, name: str, value: Tensor, state: str) -> None:
    """Replace what this rank holds of a state, by a tensor as `_read_own_part` returns it.

    Args:
        name: a name of a parameter of this rank's stages.
        value: of as many elements as this rank holds.
        state: as for `_read_own_part`; a `master` sets the parameter, too.

    Raises:
        ConfigError: the value has another number of elements, there is no such state yet, or the parameter is gathered.
    """
    place = find_held(states, name)
    to_mean, held = _own_part(states, place, state)
    if held is None:
        raise ConfigError("no-state-yet", f"{name} has no {state} to replace; it is there after a backward or a step")
    if held.numel != value.numel():
        fix = f"this rank holds {held.numel}; give as many"
        raise ConfigError("local-state-shape", f"{state} of {name} got {value.numel()} elements, and {fix}")
    flat = torch.zeros(place.spec.numel, dtype=value.dtype, device=states.comms.shards.device)
    start = place.slot.start if place.slot is not None else 0
    flat[start : start + value.numel()].copy_(value.detach().reshape(-1))
    with torch.no_grad():
        if state == MASTER:
            if not place.group.is_sharded and not place.is_whole:
                fix = "give all of it to engine.write (DeepSpeed's safe_set_full_fp32_param), or write after a step"
                raise ConfigError(
                    "parameter-gathered", f"{name} is whole on each rank now, and only a part of it was given; {fix}"
                )
            state_access.write_param(place, flat)
        elif to_mean is None:
            state_access.write_optimizer_state(states, place, flat, state)
        else:
            state_access.copy_range(held, flat.to(place.group.master.dtype) / to_mean, place)


def _own_part(states: EngineState, place: ParamLocation, state: str) -> tuple[float | None, FlatState | None]:
    """Return what this rank holds of a state, and of a gradient the factor from it to the mean."""
    nothing = TensorFlatState(torch.empty(0, dtype=place.group.master.dtype, device=states.comms.shards.device))
    if state == MASTER:
        return None, place.own_part(place.group.master) or nothing
    if state != GRAD:
        if place.slot is None:
            return None, nothing
        found = state_access.own_states(states, place).get(state)
        return None, found if is_flat(found) else None
    grads = place.group.grads
    to_mean, is_used = (0.0, False) if grads is None else state_access.mean_gradient(states, place)
    accumulated = None if grads is None else grads.accumulated()
    if accumulated is None or not is_used:
        return to_mean, None
    return to_mean, place.own_part(accumulated) or nothing


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor:
    """Return a copy of this rank's slice of the fp32 values, 1-D; the slices in the order of the ranks are the whole.

    No other rank takes part. A slice may be empty: slices are of a block's parameters together.
    """
    value = _wide(_read_own_part(*_local(param), "master"))
    assert value is not None, "every parameter has it"
    return value


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return a copy of this rank's slice of the gradient so far; all ranks call it, since it is a mean over them."""
    return _read_own_part(*_local(param), "grad")


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a copy of this rank's slice of a state of the optimizer; None before the first step."""
    return _read_own_part(*_local(param), optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's slice of the values, in the master too."""
    _write_own_part(*_local(param), value, "master")


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's slice of the gradient so far; all ranks call it."""
    _write_own_part(*_local(param), value, "grad")


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace this rank's slice of a state of the optimizer; the arguments are those of DeepSpeed."""
    _write_own_part(*_local(param), value, optim_state_key)
