"""Find strategies one step away from another, to see what a change of one thing does.

>>> from shardwise.models.presets import preset
>>> from shardwise.planner.hardware import parse_cluster
>>> from shardwise.planner.shape import ModelShape
>>> shape = ModelShape.of_decoder(preset("llama-3-8b"))
>>> job = PlanJob(shape=shape, seq_len=8192, global_batch=16, cluster=parse_cluster("h100:8"))
>>> changes = dict(neighbours(job, Strategy(dp_shard=8, num_micro_batches=2)))
>>> changes["mesh.tp=2"].num_micro_batches, changes["zero.stage=3"].zero_stage
(4, 3)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from shardwise.planner.candidates import RECOMPUTES, is_legal
from shardwise.planner.configs import KEYS
from shardwise.planner.job import PlanJob, Strategy
from shardwise.planner.memory_limit import MissingMemory, missing_memory
from shardwise.planner.pricer import Pricing, priced
from shardwise.planner.results import Estimate

CHUNK_TOKENS: Final = 1024
_STATES: Final = ("optimizer", "grads", "params")
# The share of a state that stays on the device is a multiple of one over this number.
_NUM_STEPS: Final = 20

Fields = dict[str, Any]


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
    keys = {field: key for key, field in KEYS.items()}
    seen = {strategy}
    for fields, consequences in _changes(job, strategy):
        other = replace(strategy, **fields, **consequences)
        if other not in seen and is_legal(job, other):
            seen.add(other)
            yield " ".join(f"{keys[name]}={value}" for name, value in fields.items()), other


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
        price = priced(job, other, pricing)
        found.append(Change(words=words, price=price, missing=missing_memory(price.memory, job.cluster, margin_share)))
    return tuple(sorted(found, key=lambda each: (each.missing is not None, each.price.time.step_s)))


def more_on_device(price: Estimate, usable_bytes: float) -> Iterator[Strategy]:
    """Yield the strategy with as large a share of its states on the device as may fit, and with a little less.

    Args:
        price: of a strategy that stores states off the device; for any other nothing is yielded.
        usable_bytes: of a device.
    """
    worst = price.memory.worst
    if away_bytes := sum(worst.elsewhere.values()):
        most = int(_NUM_STEPS * min(1.0, (usable_bytes - worst.peak_bytes) / away_bytes))
        for step in (most, most - 1):
            shares = _shares(price.strategy, step / _NUM_STEPS)
            if 0 < step < _NUM_STEPS and shares:
                yield replace(price.strategy, **shares)


def _shares(s: Strategy, share: float) -> Fields:
    return {f"{name}_on_device": share for name in reversed(_STATES) if getattr(s, f"{name}_tier") != "device"}


def _changes(job: PlanJob, s: Strategy) -> Iterator[tuple[Fields, Fields]]:
    """Yield the fields of a change, and those that follow from it."""
    for mode, every in RECOMPUTES:
        fields = {"recompute": mode} | ({"recompute_every": every} if every > 1 else {})
        kept = {} if mode != "none" else {"activations_tier": "device"}
        yield fields, kept | ({} if every > 1 else {"recompute_every": 1})
    each_batch = s.micro_size * s.num_micro_batches
    for micro_size in (s.micro_size // 2, 2 * s.micro_size, 1):
        if micro_size and each_batch % micro_size == 0:
            yield {"micro_size": micro_size}, {"num_micro_batches": each_batch // micro_size}
    for stage in range(4) if s.num_data_ranks * s.cp > 1 else ():  # else nothing is split
        yield {"zero_stage": stage}, {} if stage == 3 else {"gather": "batch"}
    for gather in ("batch", "micro-batch"):
        yield {"gather": gather}, {}
    in_node = max(1, job.cluster.gpus_per_node // (s.cp * s.tp))
    for dp_shard in (s.num_data_ranks, in_node, s.dp_shard // 2, 2 * s.dp_shard):
        if dp_shard and s.num_data_ranks % dp_shard == 0:
            yield {"dp_shard": dp_shard}, {"dp_replicate": s.num_data_ranks // dp_shard}
    yield from _meshes(s)
    if s.pp > 1:
        schedules = (("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2))
        for schedule, virtual_stages in schedules:
            yield {"schedule": schedule}, {"virtual_stages": virtual_stages, "stage_layers": None}
        for virtual_stages in (2, 2 * s.virtual_stages):
            yield {"schedule": "interleaved", "virtual_stages": virtual_stages}, {"stage_layers": None}
    for num_away in (1, 2, 3):
        here = {f"{name}_tier": "device" for name in _STATES[num_away:]}
        on_device = {f"{name}_on_device": 0.0 for name in _STATES}
        yield {f"{name}_tier": "host" for name in _STATES[:num_away]}, here | on_device
    for share in (0.75, 0.5, 0.25):
        yield _shares(s, share), {}
    yield {"activations_tier": "host"}, {}
    if s.chunk_tokens is None and s.schedule in ("1f1b", "interleaved") and not job.traits.is_compiled:
        yield {"chunk_tokens": CHUNK_TOKENS}, {}


def _meshes(s: Strategy) -> Iterator[tuple[Fields, Fields]]:
    """Yield each axis twice and half as large; the data ranks make up for it, with as many samples in all."""
    for axis in ("tp", "cp", "pp"):
        size, samples = getattr(s, axis), s.num_micro_batches
        for larger in ("dp_replicate", "dp_shard"):
            if getattr(s, larger) % 2 == 0:
                fewer = {larger: getattr(s, larger) // 2, "num_micro_batches": 2 * samples}
                yield {axis: 2 * size}, fewer | ({"sequence_parallel": True} if axis == "tp" else _uncut(axis))
                break
        if size % 2 == 0 and samples % 2 == 0:
            less: Fields = {"dp_shard": 2 * s.dp_shard, "num_micro_batches": samples // 2, **_uncut(axis)}
            if axis == "tp":
                less["sequence_parallel"] = size > 2
            elif size == 2 and axis == "cp":
                less |= {"transport": "ring", "heads_over": None}
            elif size == 2:
                less |= {"schedule": "1f1b", "virtual_stages": 1, "gather": "batch"}
            yield {axis: size // 2}, less


def _uncut(axis: str) -> Fields:
    return {"stage_layers": None} if axis == "pp" else {}
