"""Offer helpers of `deepspeed.runtime.utils`."""

from __future__ import annotations

import random

import numpy as np
import torch

from shardwise.compat.deepspeed.accelerator import get_accelerator
from shardwise.compat.deepspeed.finder import answers
from shardwise.compat.deepspeed.utils import logger
from shardwise.engine.runner import to_device as move_to_device  # noqa: F401
from shardwise.runtime.format import format_bytes

__getattr__ = answers(__name__)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the live memory of the device; nothing unless `force`."""
    if force:
        logger.info("%s: %s allocated", message, format_bytes(get_accelerator().memory_allocated()))


def empty_cache() -> None:
    """Give cached memory back to the GPU."""
    get_accelerator().empty_cache()


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
