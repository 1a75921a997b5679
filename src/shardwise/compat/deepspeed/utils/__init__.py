"""Offer `deepspeed.utils`: the logger, and small helpers; the table of names has the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, reduce
from logging import INFO, Logger, getLevelNamesMapping, getLogger
from typing import Any, Final

import torch.distributed as dist
from torch import device as torch_device
from torch import dtype as torch_dtype
from torch import get_default_dtype, set_default_dtype

from shardwise.compat.deepspeed.finder import answers
from shardwise.config.errors import ConfigError

ENGINE: Final = "_deepspeed_engine"  # of a model, a weak reference
PLACE: Final = "_deepspeed_place"  # of a parameter: that reference, and its name

logger: Final = getLogger("DeepSpeed")
__getattr__ = answers(__name__)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = INFO) -> None:
    """Log a message on these ranks, -1 for all; the arguments are those of DeepSpeed."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if rank < 0 or {-1, rank} & set(ranks or ()):
        logger.log(level, "[Rank %d] %s", rank, message)


@cache
def log_dist_once(message: str, ranks: tuple[int, ...] | None = None, level: int = INFO) -> None:
    """Log a message the first time; the arguments are those of DeepSpeed."""
    log_dist(message, ranks, level)


def set_log_level_from_string(log_level_str: str, custom_logger: Logger | None = None) -> None:
    """Set the level of the logger by its name, such as "debug"."""
    level = getLevelNamesMapping().get(log_level_str.upper())
    if level is None:
        level_names = ", ".join(name.lower() for name in getLevelNamesMapping())
        raise ConfigError("log-level-unknown", f"log level {log_level_str!r} is unknown; take one of {level_names}")
    (custom_logger or logger).setLevel(level)


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as it is: torch's profiler names its own operators."""
    return func


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return an attribute by a dotted name."""
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set an attribute by a dotted name; the arguments are those of DeepSpeed."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


@contextmanager
def OnDevice(dtype: torch_dtype, device: str = "meta", enabled: bool = True) -> Iterator[None]:  # noqa: N802
    """Make modules inside the context on a device, with a dtype; the arguments are those of DeepSpeed."""
    if not enabled:
        yield
        return
    before = get_default_dtype()
    set_default_dtype(dtype)
    try:
        with torch_device(device):
            yield
    finally:
        set_default_dtype(before)
