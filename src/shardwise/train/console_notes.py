"""Writes a run's notes: which states are stored where, how fast the disk is, how a pipeline is cut."""

from __future__ import annotations

import logging
from pathlib import Path

from shardwise.config.resolve import Tier
from shardwise.engine.engine import Engine
from shardwise.layout.layout import Layout
from shardwise.layout.stage_partition import find_partition
from shardwise.offload.disk_bench import USEFUL_BYTES_PER_S, measure_swap, passes_s, step_s
from shardwise.offload.nvme import SwapError
from shardwise.runtime.format import format_bytes, format_s
from shardwise.train.loop import Trainer

_NAMES: tuple[tuple[Tier, str], ...] = (("device", "device"), ("host", "host"), ("nvme", "NVMe"))
_ROLES = (("param", "parameters"), ("grad", "gradients"), ("optimizer", "optimizer"))

log = logging.getLogger("shardwise")


def tiers_line(layout: Layout) -> str:
    """Return the bytes of rank 0's states by tier as text; empty where all are stored on the device."""
    by_tier = layout.bytes_by_tier()
    if not by_tier.keys() - {"device"}:
        return ""
    parts = []
    for tier, place in _NAMES:
        held = by_tier.get(tier, {})
        states = ", ".join(f"{name} {format_bytes(held[role])}" for role, name in _ROLES if held.get(role))
        parts += [f"{place}: {states}"] if states else []
    return "; ".join(parts)


def measure_disk(engine: Engine, rank: int) -> str:
    """Measure the disk that stores states and return what it means for a step; empty without states on NVMe.

    It takes less than a second. Every rank calls it at the same time, so each measures its share of a common disk.
    """
    path = engine.config.tiers.nvme_path
    if path is None or "nvme" not in engine.layout.bytes_by_tier():
        return ""
    try:
        speed = measure_swap(Path(path), rank)
    except SwapError as error:  # its own files the engine has made by now
        log.warning("the disk was not measured: %s", error)
        return f"the disk of {path} was not measured: {error}"
    read_rate, write_rate = speed.read_bytes_per_s, speed.write_bytes_per_s
    rates = f"reads {read_rate / 1e9:.2f} GB/s and writes {write_rate / 1e9:.2f} GB/s a rank"
    if engine.device.type == "cuda" and min(read_rate, write_rate) < USEFUL_BYTES_PER_S:  # a CPU needs less
        rates += f", less than the {USEFUL_BYTES_PER_S / 1e9:g} that a GPU needs"
    optimizer_s = step_s(engine.layout, read_rate, write_rate)
    others_s = passes_s(engine.layout, engine.config.batch.accumulation or 1, read_rate, write_rate)
    times = [f"{format_s(optimizer_s)} for the optimizer"] if optimizer_s else []
    times += [f"{format_s(others_s)} for the forward and backward"] if others_s else []
    return f"{speed.path} {rates}; of each step the disk works at most {' and '.join(times)}"


def cut_note(trainer: Trainer) -> str:
    """Return the table of the pipeline's stages; empty without a pipeline."""
    config = trainer.config
    return "" if config.mesh.pp == 1 else find_partition(trainer.model.skeleton(), config).describe()
