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


def _read(parameter: nn.Parameter, state: str) -> Tensor | None:
    engine, name = _place(parameter)
    found: Tensor | None = engine.read(name, state) if state in engine.states_of(name) else None
    return found


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the fp32 values of a parameter, whole; all ranks call it, as for the functions below."""
    value = _read(param, "master")
    value = _read(param, "param") if value is None else value
    return value if value is None or value.dtype == torch.float64 else value.float()


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
