"""Offer `deepspeed.checkpointing`: activation checkpointing by torch's, with inputs on the host if asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as recompute

from shardwise.compat.deepspeed.config import read_config, translate
from shardwise.compat.deepspeed.finder import answers
from shardwise.compat.deepspeed.utils import logger
from shardwise.config.errors import ConfigError
from shardwise.runtime.device import choose_kind, current_device, forked_rng, rng_state, set_rng_state

__getattr__ = answers(__name__)

_MODEL_PARALLEL: Final = "model-parallel-rng"


@dataclass
class _Settings:
    is_configured: bool = False
    on_host: bool = False
    mpu: Any = None


_SETTINGS: Final = _Settings()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function whose activations the backward computes again, with the same random numbers."""
    if not _SETTINGS.on_host:
        return recompute(function, *args, use_reentrant=False, **kwargs)

    def call(*values: Any) -> Any:
        return function(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))

    # The reentrant kind saves its inputs as a function of autograd does, so that they can be saved elsewhere.
    with save_on_cpu(pin_memory=choose_kind("auto").pins):
        return recompute(call, *args, *kwargs.values(), use_reentrant=True)


non_reentrant_checkpoint = checkpoint


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say where `checkpoint` keeps its inputs; the arguments are those of DeepSpeed.

    `checkpoint_in_cpu`, or else the JSON's `cpu_checkpointing`, keeps them on the host. `mpu_` has
    `get_model_parallel_rank`, for the random numbers of split layers. The others have no effect.
    """
    section: Mapping[str, Any] = {}
    if deepspeed_config is not None:
        section = translate(read_config(deepspeed_config), refuse=False).section("activation_checkpointing")
    on_host = section.get("cpu_checkpointing", False) if checkpoint_in_cpu is None else checkpoint_in_cpu
    _SETTINGS.is_configured, _SETTINGS.on_host = True, bool(on_host)
    _SETTINGS.mpu = mpu_ if mpu_ is not None else _SETTINGS.mpu
    if partition_activations or section.get("partition_activations", False):
        fix = 'put "shardwise": {"tensor": {"sequence_parallel": true}} into the JSON, with mesh.tp'
        logger.info("partition_activations has no effect here; %s", fix)


def is_configured() -> bool:
    return _SETTINGS.is_configured


def reset() -> None:
    """Do nothing: no buffers are kept between steps."""


class CudaRNGStatesTracker:
    """Keeps states of the device's random numbers by name; `states` are what `get_states` returns."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}

    def reset(self) -> None:
        self.states_ = {}

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin a state from a seed."""
        if name in self.states_:
            raise ConfigError("rng-state-twice", f"the random state {name} is there already; call reset() first")
        with _forked():
            torch.manual_seed(seed)
            self.states_[name] = _state()

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the state of that name inside the context."""
        if name not in self.states_:
            raise ConfigError(
                "rng-state-unknown", f"there is no random state {name}; add it, or seed the model parallel one"
            )
        with _forked():
            _set_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = _state()


_TRACKER: Final = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    return _TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed torch, and the state for layers that are split, which differs between the ranks that share one."""
    rank = _SETTINGS.mpu.get_model_parallel_rank() if _SETTINGS.mpu is not None else 0
    _TRACKER.reset()
    torch.manual_seed(seed)
    _TRACKER.add(_MODEL_PARALLEL, seed + 2718 + rank)


def _state() -> Tensor:
    state = rng_state(_device())
    return torch.get_rng_state() if state is None else state


def _set_state(state: Tensor) -> None:
    device = _device()
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        set_rng_state(device, state)


def _forked() -> Any:
    return forked_rng(_device())


def _device() -> torch.device:
    return current_device(choose_kind("auto"))
