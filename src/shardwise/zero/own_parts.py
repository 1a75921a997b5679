"""Read and write what this rank holds of a parameter's states, alone: no other rank takes part.

It is apart from `state_access`, where all ranks do the same, for the length of that file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.config.errors import ConfigError
from shardwise.runtime.state_shards import FlatState, TensorFlatState, is_flat
from shardwise.zero import state_access
from shardwise.zero.state_access import GRAD, MASTER, EngineState, ParamLocation, find_held


def read_own_part(states: EngineState, name: str, state: str) -> Tensor | None:
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


def write_own_part(states: EngineState, name: str, value: Tensor, state: str) -> None:
    """Replace what this rank holds of a state, by a tensor as `read_own_part` returns it.

    Args:
        name: a name of a parameter of this rank's stages.
        value: of as many elements as this rank holds.
        state: as for `read_own_part`; a `master` sets the parameter, too.

    Raises:
        ConfigError: the value has another number of elements, there is no such state yet, or the parameter is gathered.
    """
    place = find_held(states, name)
    to_mean, held = _own_part(states, place, state)
    if held is None:
        raise ConfigError("no-state-yet", f"{name} has no {state} to replace; it is there after a backward or a step")
    if held.numel != value.numel():
        fix = f"this rank holds {held.numel}; give as many"
        raise ConfigError("written-shape", f"{state} of {name} got {value.numel()} elements, and {fix}")
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
