"""Suggest what would make a strategy fit: another config, a shorter sequence, more memory or GPUs, adapters.

Each is tried alone, by its memory, and named by the key, the flag or the file that sets it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from shardwise.config.resolve import LoraConfig
from shardwise.planner.candidates import is_legal
from shardwise.planner.hardware import Cluster, usual_node
from shardwise.planner.job import PlanJob, Strategy
from shardwise.planner.memory_limit import MissingMemory, held_on_node, missing_memory
from shardwise.planner.neighbours import CHUNK_TOKENS, Change, price_changes
from shardwise.planner.pricer import Pricing
from shardwise.planner.results import Estimate
from shardwise.runtime.format import format_bytes, format_s

_MOST_MORE_GPUS: Final = 64
_LEAST_TOKENS: Final = 512

Saving = tuple[str, dict[str, Any]]
"""Keys of the config, and the fields of a strategy that they set."""

# Changes that save memory, the cheapest first; each is tried on top of those before it.
_SAVINGS: Final[tuple[Saving, ...]] = (
    ("zero.stage=3", {"zero_stage": 3}),
    ("batch.micro_size=1", {"micro_size": 1}),
    (f"context.chunk_tokens={CHUNK_TOKENS}", {"chunk_tokens": CHUNK_TOKENS}),
    ("recompute.mode=full", {"recompute": "full", "recompute_every": 1}),
    ("tiers.optimizer=host", {"optimizer_tier": "host"}),
    ("tiers.grads=host", {"grads_tier": "host"}),
    ("tiers.params=host", {"params_tier": "host"}),
    ("tiers.activations=host", {"activations_tier": "host"}),
)
_ON_DISKS: Final[tuple[dict[str, Any], ...]] = (
    {"optimizer_tier": "nvme", "grads_tier": "host"},
    {"optimizer_tier": "nvme", "grads_tier": "host", "params_tier": "host"},
    {"optimizer_tier": "nvme", "grads_tier": "host", "params_tier": "nvme"},
    {"optimizer_tier": "nvme", "grads_tier": "nvme", "params_tier": "nvme"},
)


def smallest_change(job: PlanJob, strategy: Strategy, pricing: Pricing, margin_share: float) -> Change | None:
    """Return the single change that makes a strategy fit and leaves it fastest, else the fewest changes that do; else
    None.

    Args:
        job: the job.
        strategy: a strategy that does not fit.
        pricing: prices the strategies of the job.
        margin_share: share of a device's memory that is to stay free.
    """
    changes = price_changes(job, strategy, pricing, margin_share)
    if changes and changes[0].missing is None:
        return changes[0]
    return made_to_fit(job, strategy, pricing, margin_share)


def would_fit(change: Change) -> str:
    """Say that a change would make a strategy fit, and its step time."""
    return f"{change.words} would fit, at {format_s(change.price.time.step_s)}"


def made_to_fit(job: PlanJob, strategy: Strategy, pricing: Pricing, margin_share: float) -> Change | None:
    """Return a strategy with the savings that it needs to fit, the cheapest first; None where all are not enough.

    The arguments are those of `smallest_change`.
    """

    def fits(savings: Sequence[Saving]) -> bool:
        other = _saved(strategy, savings)
        return is_legal(job, other) and _fits(job, other, pricing, margin_share)

    every = [each for each in _SAVINGS if any(getattr(strategy, name) != value for name, value in each[1].items())]
    enough = next((every[:count] for count in range(1, len(every) + 1) if fits(every[:count])), None)
    if enough is None:
        return None
    for each in reversed(enough):
        fewer = [other for other in enough if other is not each]
        if fewer and fits(fewer):
            enough = fewer
    other = _saved(strategy, enough)
    price = Estimate(job=job, strategy=other, memory=pricing.memory.estimate(other), time=pricing.time.estimate(other))
    return Change(words=" ".join(words for words, _ in enough), price=price, missing=None)


def suggest(
    price: Estimate,
    missing: MissingMemory,
    pricing: Pricing,
    pricing_of: Callable[[PlanJob], Pricing],
    margin_share: float,
) -> Iterator[str]:
    """Yield what would make it fit, one sentence each; disks and adapters only where no config would.

    Args:
        price: of a strategy that does not fit.
        missing: what it lacks.
        pricing: prices the strategies of its job.
        pricing_of: makes the pricing of another job.
        margin_share: share of a device's memory that is to stay free.
    """
    job, strategy = price.job, price.strategy
    change = smallest_change(job, strategy, pricing, margin_share)
    if change is not None:
        yield would_fit(change)
    seq_len = shorter(job, strategy, pricing_of, margin_share)
    if seq_len is not None:
        yield f"sequences of {seq_len:,} tokens would fit (--seq {seq_len})"
    if missing.tier == "host":
        needed = format_bytes(held_on_node(price.memory, job.cluster, "host"))
        yield f"host memory of {needed} a node would fit (host_memory_gib in the cluster's file)"
    if change is None:
        yield from _disks(job, strategy, pricing_of, margin_share)
    if (num_gpus := more_gpus(job, strategy, pricing_of, margin_share)) is not None:
        yield f"{num_gpus:,} GPUs would fit it, with a batch in proportion"
    if change is None:
        yield from _adapters(job, strategy, pricing_of, margin_share)


def shorter(
    job: PlanJob, strategy: Strategy, pricing_of: Callable[[PlanJob], Pricing], margin_share: float
) -> int | None:
    """Return the tokens of the longest sequence, by repeated halving, with which a strategy fits; None where none does.

    Args:
        job: the job, whose sequences are too long.
        strategy: a strategy that does not fit.
        pricing_of: makes the pricing of another job.
        margin_share: share of a device's memory that is to stay free.
    """
    seq_len = job.seq_len // 2
    while seq_len >= _LEAST_TOKENS:
        less = replace(job, seq_len=seq_len)
        if is_legal(less, strategy) and _fits(less, strategy, pricing_of(less), margin_share):
            return seq_len
        seq_len //= 2
    return None


def more_gpus(
    job: PlanJob, strategy: Strategy, pricing_of: Callable[[PlanJob], Pricing], margin_share: float
) -> int | None:
    """Return the GPUs on which a strategy fits, sharded over all data ranks; None where 64 times as many are too few.

    The arguments are those of `shorter`.
    """
    factor = 2
    while factor <= _MOST_MORE_GPUS:
        larger = replace(job, cluster=_enlarged(job.cluster, factor), global_batch=factor * job.global_batch)
        more = replace(strategy, dp_shard=factor * strategy.dp_shard)
        pricing = pricing_of(larger)
        if _fits(larger, more, pricing, margin_share):
            return larger.cluster.num_gpus
        if made_to_fit(larger, _on_device(more), pricing, margin_share) is not None:
            return larger.cluster.num_gpus
        factor *= 2
    return None


def _enlarged(cluster: Cluster, factor: int) -> Cluster:
    """Return a cluster of `factor` times the GPUs; a single node is filled first."""
    num_gpus, per_node = factor * cluster.num_gpus, cluster.gpus_per_node
    if per_node == cluster.num_gpus:
        per_node = max(per_node, min(num_gpus, usual_node(cluster.gpu)))
    return replace(cluster, num_gpus=num_gpus, gpus_per_node=per_node)


def _disks(
    job: PlanJob, strategy: Strategy, pricing_of: Callable[[PlanJob], Pricing], margin_share: float
) -> Iterator[str]:
    """Yield the disks that would make it fit, for a cluster that has none."""
    host = job.cluster.host
    if host.nvme_bytes:
        return
    roomy = replace(job, cluster=replace(job.cluster, host=replace(host, nvme_bytes=math.inf)))
    pricing = pricing_of(roomy)
    for tiers in _ON_DISKS:
        away = replace(strategy, zero_stage=3, **tiers)
        if is_legal(roomy, away) and _fits(roomy, away, pricing, margin_share):
            needed = format_bytes(held_on_node(pricing.memory.estimate(away), job.cluster, "nvme"))
            step = format_s(pricing.time.estimate(away).step_s)
            yield f"disks of {needed} a node for states would fit, at {step} (nvme_gib in the cluster's file)"
            return


def _adapters(
    job: PlanJob, strategy: Strategy, pricing_of: Callable[[PlanJob], Pricing], margin_share: float
) -> Iterator[str]:
    lean = replace(job, lora=LoraConfig(rank=16))
    pricing = pricing_of(lean)
    here = _on_device(strategy)
    if _fits(lean, here, pricing, margin_share):
        yield "adapters alone would fit (lora.rank=16, docs/finetune.md)"
    elif _fits(lean, replace(here, zero_stage=3, params_tier="host"), pricing, margin_share):
        yield "adapters alone would fit (lora.rank=16 tiers.params=host, docs/finetune.md)"


def _on_device(strategy: Strategy) -> Strategy:
    return replace(strategy, params_tier="device", grads_tier="device", optimizer_tier="device")


def _saved(strategy: Strategy, savings: Sequence[Saving]) -> Strategy:
    changes = {name: value for _, fields in savings for name, value in fields.items()}
    if "micro_size" in changes:
        changes["num_micro_batches"] = strategy.micro_size * strategy.num_micro_batches
    return replace(strategy, **changes)


def _fits(job: PlanJob, strategy: Strategy, pricing: Pricing, margin_share: float) -> bool:
    return missing_memory(pricing.memory.estimate(strategy), job.cluster, margin_share) is None
