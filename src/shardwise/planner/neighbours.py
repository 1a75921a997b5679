"""Find strategies one step away from another, to see what a change of one thing does.

>>> from shardwise.models.presets import preset
>>> from shardwise.planner.hardware import find_gpu
>>> from shardwise.planner.hardware import Cluster
>>> from shardwise.planner.shape import ModelShape
>>> job = PlanJob(shape=ModelShape.of_decoder(preset("llama-3-8b")), seq_len=8192, global_batch=16,
...           cluster=Cluster(gpu=find_gpu("h100"), num_gpus=8, gpus_per_node=8, nic_bytes_per_s=50e9))
>>> changes = dict(neighbours(job, Strategy(dp_shard=8, num_micro_batches=2)))
>>> changes["mesh.tp=2"].num_micro_batches, changes["zero.stage=3"].zero_stage
(4, 3)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from shardwise.planner.candidates import RECOMPUTES, is_legal
from shardwise.planner.job import PlanJob, Strategy
from shardwise.planner.memory_limit import MissingMemory, missing_memory
from shardwise.planner.pricer import Pricing
from shardwise.planner.results import Estimate

CHUNK_TOKENS: Final = 1024
_TIERS: Final = (("host", "device", "device"), ("host", "host", "device"), ("host", "host", "host"))
_SHARES: Final = (0.75, 0.5, 0.25)
# The share of a state that stays on the device is a multiple of one over this number.
_NUM_STEPS: Final = 20
_NO_SHARES: Final = MappingProxyType({"params_on_device": 0.0, "grads_on_device": 0.0, "optimizer_on_device": 0.0})


@dataclass(frozen=True, kw_only=True)
class Change:
    """Describe a step away from a strategy, in keys of the config, and where it leads.

    Attributes:
        words: the keys and their new values.
        price: of the changed strategy.
        missing: what does not fit; None where all does.
    """

    words: str
    price: Estimate
    missing: MissingMemory | None


def neighbours(job: PlanJob, strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """Yield every strategy that the engine runs one step away, with the keys that it changes."""
    seen = {strategy}
    for words, other in _changed(job, strategy):
        if other not in seen and is_legal(job, other):
            seen.add(other)
            yield words, other


def price_changes(job: PlanJob, strategy: Strategy, pricing: Pricing, margin_share: float) -> tuple[Change, ...]:
    """Return all neighbours with their prices, those that fit first, the fastest first.

    Args:
        job: the job.
        strategy: the strategy to change.
        pricing: prices the strategies of the job.
        margin_share: share of a device's memory that is to stay free.
    """
    found = []
    for words, other in neighbours(job, strategy):
        memory = pricing.memory.estimate(other)
        price = Estimate(job=job, strategy=other, memory=memory, time=pricing.time.estimate(other))
        found.append(Change(words=words, price=price, missing=missing_memory(memory, job.cluster, margin_share)))
    return tuple(sorted(found, key=lambda each: (each.missing is not None, each.price.time.step_s)))


def _changed(job: PlanJob, s: Strategy) -> Iterator[tuple[str, Strategy]]:
    for mode, every in RECOMPUTES:
        words = f"recompute.mode={mode}" + (f" recompute.every={every}" if every > 1 else "")
        tier = s.activations_tier if mode != "none" else "device"
        yield words, replace(s, recompute=mode, recompute_every=every, activations_tier=tier)
    each_batch = s.micro_size * s.num_micro_batches
    for micro_size in (s.micro_size // 2, 2 * s.micro_size, 1):
        if micro_size and each_batch % micro_size == 0:
            yield f"batch.micro_size={micro_size}", _with_micro(s, micro_size)
    for stage in range(4) if s.num_data_ranks * s.cp > 1 else ():  # else nothing is split
        yield f"zero.stage={stage}", replace(s, zero_stage=stage, gather="batch" if stage < 3 else s.gather)
    for gather in ("batch", "micro-batch"):
        yield f"pipeline.gather={gather}", replace(s, gather=gather)
    yield from _shard_groups(job, s)
    yield from _meshes(s)
    yield from _schedules(s)
    for optimizer, grads, params in _TIERS:
        words = " ".join(f"tiers.{name}=host" for name in ("optimizer", *["grads"] * (grads == "host")))
        words += " tiers.params=host" if params == "host" else ""
        tiers = {"optimizer_tier": optimizer, "grads_tier": grads, "params_tier": params}
        yield words, replace(s, **tiers, **_NO_SHARES)  # type: ignore[arg-type]
    yield from _shares(s, _SHARES)
    yield "tiers.activations=host", replace(s, activations_tier="host")
    if s.chunk_tokens is None and s.schedule in ("1f1b", "interleaved") and not job.traits.is_compiled:
        yield f"context.chunk_tokens={CHUNK_TOKENS}", replace(s, chunk_tokens=CHUNK_TOKENS)


def more_on_device(price: Estimate, usable_bytes: float) -> Iterator[Strategy]:
    """Yield the strategy with as large a share of its states on the device as may fit, and with a little less.

    Args:
        price: of a strategy that stores states off the device; for any other nothing is yielded.
        usable_bytes: of a device.
    """
    worst = price.memory.worst
    if away_bytes := sum(worst.elsewhere.values()):
        most = int(_NUM_STEPS * min(1.0, (usable_bytes - worst.peak_bytes) / away_bytes))
        tried = [step / _NUM_STEPS for step in (most, most - 1) if 0 < step < _NUM_STEPS]
        yield from (strategy for _, strategy in _shares(price.strategy, tried))


def _shares(s: Strategy, of: Iterable[float]) -> Iterator[tuple[str, Strategy]]:
    """Yield the strategy with each share of its offloaded states kept on the device."""
    away = [state for state in ("params", "grads", "optimizer") if getattr(s, f"{state}_tier") != "device"]
    for share in of if away else ():
        words = " ".join(f"tiers.{state}_on_device={share}" for state in away)
        yield words, replace(s, **{f"{state}_on_device": share for state in away})  # type: ignore[arg-type]


def _with_micro(s: Strategy, micro_size: int) -> Strategy:
    return replace(s, micro_size=micro_size, num_micro_batches=s.micro_size * s.num_micro_batches // micro_size)


def _shard_groups(job: PlanJob, s: Strategy) -> Iterator[tuple[str, Strategy]]:
    in_node = max(1, job.cluster.gpus_per_node // (s.cp * s.tp))
    for dp_shard in (s.num_data_ranks, in_node, s.dp_shard // 2, 2 * s.dp_shard):
        if dp_shard and s.num_data_ranks % dp_shard == 0:
            yield f"mesh.dp_shard={dp_shard}", replace(s, dp_shard=dp_shard, dp_replicate=s.num_data_ranks // dp_shard)


def _meshes(s: Strategy) -> Iterator[tuple[str, Strategy]]:
    for axis in ("tp", "cp", "pp"):
        for twice in (True, False):
            size = getattr(s, axis)
            if not twice and size % 2:
                continue
            changes: dict[str, Any] = {axis: 2 * size if twice else size // 2}
            if axis == "tp":
                changes["sequence_parallel"] = changes["tp"] > 1
            elif axis == "cp" and changes["cp"] == 1:
                changes |= {"transport": "ring", "heads_over": None}
            elif axis == "pp":
                changes |= {"stage_layers": None}
                changes |= {"schedule": "1f1b", "virtual_stages": 1, "gather": "batch"} if changes["pp"] == 1 else {}
            other = _with_data_ranks(s, twice)
            if other is not None:
                yield f"mesh.{axis}={changes[axis]}", replace(other, **changes)


def _with_data_ranks(s: Strategy, is_half: bool) -> Strategy | None:
    """Halve or double the data ranks, with as many samples in all; None where that is not possible."""
    if not is_half:
        if s.num_micro_batches % 2:
            return None
        return replace(s, dp_shard=2 * s.dp_shard, num_micro_batches=s.num_micro_batches // 2)
    if s.dp_replicate % 2 == 0:
        return replace(s, dp_replicate=s.dp_replicate // 2, num_micro_batches=2 * s.num_micro_batches)
    if s.dp_shard % 2 == 0:
        return replace(s, dp_shard=s.dp_shard // 2, num_micro_batches=2 * s.num_micro_batches)
    return None


def _schedules(s: Strategy) -> Iterator[tuple[str, Strategy]]:
    if s.pp == 1:
        return
    plain = replace(s, stage_layers=None)
    for schedule, virtual_stages in (("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)):
        yield f"pipeline.schedule={schedule}", replace(plain, schedule=schedule, virtual_stages=virtual_stages)
    for virtual_stages in (2, 2 * s.virtual_stages):
        words = f"pipeline.schedule=interleaved pipeline.virtual_stages={virtual_stages}"
        yield words, replace(plain, schedule="interleaved", virtual_stages=virtual_stages)
