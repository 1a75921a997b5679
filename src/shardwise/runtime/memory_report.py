"""These values report what the memory tracker counts: a snapshot, its table, and the settings that need less memory.

The module is pure; `shardwise.runtime.memory_tracker` counts, and these names are imported from there.

>>> from shardwise.config.resolve import Config
>>> config = Config.from_dict({"zero": {"stage": 2}, "batch": {"micro_size": 4}}).resolve(world_size=2)
>>> live = dict.fromkeys(Category, 0) | {Category.PARAMETERS: 2**31, Category.ACTIVATIONS: 2**32}
>>> snapshot = MemorySnapshot("cpu", live, 3 * 2**31, live, 3 * 2**31, fragment_bytes=0, metered=True)
>>> for row in format_table(snapshot):
...     print(*row)
activations 4.000 67%
parameters 2.000 33%
total 6.000 100%
>>> for advice in oom_advice(snapshot, config):
...     print(advice)
recompute.mode=full recompute.every=1: keeps only the inputs of blocks for the backward, about 3.00 GiB less
batch.micro_size=2 batch.accumulation=2: the same global batch in smaller pieces, about 2.00 GiB less
precision.param=bf16: computes in bf16 with fp32 master weights, about 2.00 GiB less
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from shardwise.config.resolve import ResolvedConfig
from shardwise.runtime.device import kind_of
from shardwise.runtime.format import format_bytes


class Category(StrEnum):
    """Says what a storage holds."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    GATHERED = "gathered"
    BUCKETS = "buckets"
    ACTIVATIONS = "activations"
    OTHER = "other"


@dataclass(frozen=True)
class MemorySnapshot:
    """Holds the memory of one device at one moment, all in bytes.

    Args:
        live_bytes: by category, every category present; their sum is `total_bytes`.
        peak_live_bytes: by category at the highest total since `MemoryTracker.reset_peak`; empty on CUDA where no meter
            was on to see it.
        reserved_bytes: that the process holds of the device: on CUDA the allocator's, on the CPU the total.
        fragment_bytes: reserved minus used: the allocator's and the pools' idle bytes.
        metered: whether a meter was on since `MemoryTracker.reset_peak`; the CPU counts activations only under one.
    """

    device_type: str
    live_bytes: Mapping[Category, int]
    peak_bytes: int
    peak_live_bytes: Mapping[Category, int]
    reserved_bytes: int
    fragment_bytes: int
    metered: bool

    @property
    def total_bytes(self) -> int:
        """Return the sum over the categories."""
        return sum(self.live_bytes.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the snapshot as plain dicts, for a line of JSON."""
        return {
            "device_type": self.device_type,
            "live_bytes": {category.value: num_bytes for category, num_bytes in self.live_bytes.items()},
            "total_bytes": self.total_bytes,
            "peak_bytes": self.peak_bytes,
            "peak_live_bytes": {category.value: num_bytes for category, num_bytes in self.peak_live_bytes.items()},
            "reserved_bytes": self.reserved_bytes,
            "fragment_bytes": self.fragment_bytes,
            "metered": self.metered,
        }


@dataclass(frozen=True)
class MemoryAdvice:
    """Holds settings that need less memory.

    Args:
        saved_bytes: an estimate, by which several are ordered.
    """

    assignments: tuple[str, ...]
    reason: str
    saved_bytes: int

    def __str__(self) -> str:
        saving = f", about {format_bytes(self.saved_bytes)} less" if self.saved_bytes else ""
        return f"{' '.join(self.assignments)}: {self.reason}{saving}"


def format_table(snapshot: MemorySnapshot) -> list[tuple[str, str, str]]:
    """Make the rows (category, GiB, share) of an out-of-memory message, largest first.

    They are those of the peak where its categories are known, else of the moment of the snapshot.
    """
    live_bytes = _at_worst(snapshot)
    total_bytes = sum(live_bytes.values())
    used = sorted(((num_bytes, category) for category, num_bytes in live_bytes.items() if num_bytes), reverse=True)
    rows = [(category.value, num_bytes) for num_bytes, category in used]
    rows.append(("total", total_bytes))
    return [(name, f"{num_bytes / 2**30:.3f}", f"{num_bytes / max(1, total_bytes):.0%}") for name, num_bytes in rows]


def oom_advice(snapshot: MemorySnapshot, config: ResolvedConfig) -> list[MemoryAdvice]:
    """Return the three settings that would save most memory, fewer where fewer are left to change."""
    live_bytes = _at_worst(snapshot)
    advisers = (_advise_on_states, _advise_on_activations, _advise_on_tiers)
    candidates = [each for advise in advisers for each in advise(live_bytes, config)]
    # The sort is stable, so settings of equal or unknown saving keep the order above: cheapest in time first.
    return sorted(candidates, key=lambda advice: -advice.saved_bytes)[:3]


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether a failure is one of memory: Python's, the CUDA allocator's or the CPU allocator's."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def oom_message(error: BaseException, where: str, snapshot: MemorySnapshot, config: ResolvedConfig) -> str:
    """Make the message for a failure of memory: one line with the fix first, then the table and the settings.

    Args:
        where: such as `on rank 0 in step 3`.
    """
    rows = [f"  {name:<12} {gib:>9} GiB {share:>5}" for name, gib, share in format_table(snapshot)]
    advice = [str(each) for each in oom_advice(snapshot, config)]
    fix = f"try {advice[0].partition(':')[0]}" if advice else "use a smaller model or more ranks"
    lines = [f"out of memory {where}: {first_line(error)}; {fix}", "what it holds:", *rows]
    if kind_of(snapshot.device_type).counts_memory and snapshot.fragment_bytes > snapshot.reserved_bytes // 10:
        idle = f"{format_bytes(snapshot.fragment_bytes)} of {format_bytes(snapshot.reserved_bytes)}"
        lines.append(f"  reserved but idle: {idle}; PYTORCH_ALLOC_CONF=expandable_segments:True leaves less of it")
    if advice:
        lines += ["settings that need less:", *(f"  {each}" for each in advice)]
    return "\n".join(lines)


def first_line(error: BaseException) -> str:
    """Return the first line of a failure, without the source line of torch's CPU allocator."""
    lines = re.sub(r"^\[enforce fail[^\]]*\] err == 0\. ", "", str(error).strip()).splitlines()
    return lines[0] if lines else type(error).__name__


def _at_worst(snapshot: MemorySnapshot) -> Mapping[Category, int]:
    return snapshot.peak_live_bytes or snapshot.live_bytes


def _advise_on_states(live_bytes: Mapping[Category, int], config: ResolvedConfig) -> Iterator[MemoryAdvice]:
    zero, num_shards = config.zero, config.mesh.dp_shard or 1
    if zero.stage < 3 and num_shards > 1:
        by_stage = {
            0: (Category.OPTIMIZER, Category.GRADIENTS),
            1: (Category.GRADIENTS,),
            2: (Category.PARAMETERS,),
        }
        sharded = by_stage[zero.stage]
        saved_bytes = sum(live_bytes[category] for category in sharded) * (num_shards - 1) // num_shards
        reason = f"shards {' and '.join(sharded)} over {num_shards} ranks"
        yield MemoryAdvice((f"zero.stage={max(2, zero.stage + 1)}",), reason, saved_bytes)
    is_half = config.precision.param in ("bf16", "fp16")
    if is_half and config.precision.accumulate == "fp32":
        reason = f"accumulates gradients in {config.precision.param}"
        yield MemoryAdvice(("precision.accumulate=param",), reason, live_bytes[Category.GRADIENTS] // 2)
    if is_half and config.precision.reduce == "fp32":
        reason = f"sends gradients in {config.precision.param}"
        yield MemoryAdvice(("precision.reduce=param",), reason, live_bytes[Category.BUCKETS] // 2)
    if zero.stage == 3 and zero.overlap and num_shards > 1:
        reason = "gathers no block ahead"
        yield MemoryAdvice(("zero.overlap=false",), reason, live_bytes[Category.GATHERED] // 2)


def _advise_on_tiers(live_bytes: Mapping[Category, int], config: ResolvedConfig) -> Iterator[MemoryAdvice]:
    tiers, stage = config.tiers, config.zero.stage
    for key, tier, category, least_stage in (
        ("optimizer", tiers.optimizer, Category.OPTIMIZER, 1),
        ("grads", tiers.grads, Category.GRADIENTS, 2),
        ("params", tiers.params, Category.PARAMETERS, 3),
    ):
        if tier == "device" and stage >= least_stage and live_bytes[category] > 0:
            yield MemoryAdvice((f"tiers.{key}=host",), "keeps them in host memory", live_bytes[category])
            return


def _advise_on_activations(live_bytes: Mapping[Category, int], config: ResolvedConfig) -> Iterator[MemoryAdvice]:
    activation_bytes, recompute, batch = live_bytes[Category.ACTIVATIONS], config.recompute, config.batch
    if recompute.mode != "full" or recompute.every > 1:
        # A guess: blocks keep a few percent of their activations, but one block and the logits stay in full.
        saved_bytes = activation_bytes * 3 // 4 if recompute.mode == "none" else activation_bytes // 2
        reason = "keeps only the inputs of blocks for the backward"
        yield MemoryAdvice(("recompute.mode=full", "recompute.every=1"), reason, saved_bytes)
    if batch.micro_size is not None and batch.micro_size > 1:
        factor = next(factor for factor in range(2, batch.micro_size + 1) if batch.micro_size % factor == 0)
        micro, accumulation = batch.micro_size // factor, (batch.accumulation or 1) * factor
        assignments = (f"batch.micro_size={micro}", f"batch.accumulation={accumulation}")
        yield MemoryAdvice(
            assignments, "the same global batch in smaller pieces", activation_bytes * (factor - 1) // factor
        )
    if config.precision.param not in ("bf16", "fp16"):
        activation_bytes += live_bytes[Category.GATHERED]
        yield MemoryAdvice(
            ("precision.param=bf16",), "computes in bf16 with fp32 master weights", activation_bytes // 2
        )
