"""Offer `deepspeed.utils`: the logger, and safe access to states of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from logging import INFO, getLogger
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.compat import submodules
from shardwise.config.resolve import ConfigError

ENGINE: Final = "_deepspeed_engine"  # of a model, a weak reference
PLACE: Final = "_deepspeed_place"  # of a parameter: that reference, and its name

logger: Final = getLogger("DeepSpeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = INFO) -> None:
    """Log a message on these ranks, -1 for all; the arguments are those of DeepSpeed."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if rank < 0 or {-1, rank} & set(ranks or ()):
        logger.log(level, "[Rank %d] %s", rank, message)


def _place(parameter: nn.Parameter) -> tuple[Any, str]:
    reference, name = parameter.__dict__.get(PLACE, (lambda: None, ""))
    engine = reference()
    if engine is None:
        raise ConfigError(
            "parameter-before-initialize",
            f"a parameter of shape {tuple(parameter.shape)} belongs to no engine; call deepspeed.initialize first",
        )
    return engine.inner, name


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the fp32 values of a parameter, whole; all ranks call it, as for the functions below."""
    engine, name = _place(param)
    state = "master" if "master" in engine.states_of(name) else "param"
    value: Tensor = engine.read(name, state)
    return value.float() if value.dtype != torch.float64 else value


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the gradient of this step so far; None where there is none."""
    engine, name = _place(param)
    found: Tensor | None = engine.read(name, "grad") if "grad" in engine.states_of(name) else None
    return found


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a state of the optimizer, such as `exp_avg`; None before the first step."""
    engine, name = _place(param)
    found: Tensor | None = engine.read(name, optim_state_key) if optim_state_key in engine.states_of(name) else None
    return found


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


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[Any]) -> list[nn.Module]:
    """Return the modules of some classes, or of their names: blocks are units, whatever of them a rank runs."""
    names = {each if isinstance(each, str) else each.__name__ for each in leaf_module_classes}
    return [each for each in model.modules() if {type(each).__name__, _qualified(type(each))} & names]


unset_z3_leaf_modules = set_z3_leaf_modules


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def __getattr__(name: str) -> Any:
    if name == "RepeatingLoader":
        from shardwise.compat.deepspeed.runtime.dataloader import RepeatingLoader

        return RepeatingLoader
    return submodules(__name__)(name)
