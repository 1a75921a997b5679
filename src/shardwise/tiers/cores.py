"""The cores that work on the host keeps to."""

from __future__ import annotations

import os

import torch


def bind_this_thread(cores: tuple[int, ...] | None, num_threads: int) -> None:
    """Keep the calling thread, and those that torch starts for it, to `cores`.

    Args:
        cores: None for those of the process.
        num_threads: that torch's kernels use where `cores` is None.
    """
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores) if cores else num_threads)
