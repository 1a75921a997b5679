"""Simulate the best layouts of a plan, in processes, within a time limit.

The planner's own memory model is quick and only ranks candidates: what the worst rank of a finalist holds at its peak
takes the place of its estimate. What a GPU's context, communicators and allocator add stays estimated, and so does a
candidate that our engine or decoder cannot run. The processes import torch; who asks them does not.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config
from shardwise.planner.request import written
from shardwise.planner.results import Estimate, MemoryEstimate, RankMemory, parts_of

_MOST_PROCESSES: Final = 4
# Below this share of a device's memory no error of an estimate matters.
_MATTERS_FROM: Final = 0.5


def simulate_finalists(
    prices: Sequence[Estimate],
    limit_s: float,
    announce: Callable[[str], None] = lambda doing: None,
) -> list[Estimate]:
    """Return the prices; those that fill half a device and whose simulation ends in time have the engine's own peak.

    Args:
        prices: the most wanted first, which is the order of simulations.
        limit_s: seconds after which the processes are ended; 0 starts none.
        announce: called with a few words before each wait.
    """
    end_s, settled = time.monotonic() + limit_s, list(prices)
    jobs = {number: job for number, price in enumerate(prices) if (job := _job(price)) is not None}
    if not jobs or limit_s <= 0:
        return settled
    num_processes = min(_MOST_PROCESSES, os.cpu_count() or 1, len(jobs))
    with multiprocessing.get_context("spawn").Pool(num_processes, _use_one_core) as pool:
        asked = {number: pool.apply_async(peak_of, job) for number, job in jobs.items()}
        for count, (number, answer) in enumerate(asked.items(), 1):
            announce(f"simulating the memory of the best layouts, {count} of {len(asked)}")
            with suppress(multiprocessing.TimeoutError, ConfigError):
                settled[number] = with_peak(prices[number], answer.get(max(0.0, end_s - time.monotonic())))
    return settled


def _job(price: Estimate) -> tuple[str, int, int] | None:
    """Return what `peak_of` takes; None for what only the planner can have, or what is far from full."""
    if price.memory.worst.peak_bytes < _MATTERS_FROM * price.job.cluster.gpu.memory_bytes:
        return None
    if price.config.lora.rank and price.job.base.model.path is None:  # adapters of a shape, which no run can have
        return None
    try:
        config = written(price.job, price.config).override([f"run.device={price.job.cluster.gpu.run_device}"])
    except ConfigError:
        return None
    num_ranks = price.job.cluster.num_gpus
    return config.model_dump_json(), num_ranks, price.memory.worst.pipeline_rank * num_ranks // price.config.mesh.pp


def peak_of(config: str, num_ranks: int, rank: int) -> dict[str, float]:
    """Simulate a `rank` of `num_ranks` of a `config` in JSON, and return the bytes at its peak by category."""
    from shardwise.verify.dry_run import dry_run

    figures = dry_run(Config.from_json(config), num_ranks, (rank,)).ranks[0]
    return {parts_of(category)[0]: float(num_bytes) for category, num_bytes in figures.peak.items()}


def _use_one_core() -> None:
    import torch

    torch.set_num_threads(1)


def with_peak(price: Estimate, peak: Mapping[str, float]) -> Estimate:
    """Return a price whose worst rank has a simulated peak; what is no tensor stays as estimated."""
    worst = price.memory.worst
    around = {name: worst.peak[name] for name in ("overhead", "rounding") if name in worst.peak}
    settled = replace(worst, peak={**peak, **around}, is_simulated=True)
    ranks: tuple[RankMemory, ...] = tuple(settled if each is worst else each for each in price.memory.ranks)
    return replace(price, memory=MemoryEstimate(ranks=ranks))
