"""Name states and devices as DeepSpeed does."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from shardwise.compat.deepspeed.finder import answers

__getattr__ = answers(__name__)


class OffloadDeviceEnum(StrEnum):
    """Names a tier."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """Names a state."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def released_states(include: Iterable[OffloadStateTypeEnum | str] | None) -> list[str] | None:
    """Return the names by which `Engine.offload` knows states; None for all."""
    names = {"optim_states": "optimizer", "hp_params": "master", "lp_params": "params", "lp_grads": "grads"}
    return None if include is None else [names[state] for state in map(OffloadStateTypeEnum, include) if state in names]
