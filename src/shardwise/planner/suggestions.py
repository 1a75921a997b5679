"""Suggest what would make a strategy fit: another config, a shorter sequence, more memory or GPUs, adapters.

Each is tried alone, by its memory, and named by the key, the flag or the file that sets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from shardwise.config.resolve import LoraConfig
from shardwise.planner.candidates import is_legal
from shardwise.planner.hardware import Cluster, usual_node
from shardwise.planner.job import PlanJob, Strategy
from shardwise.planner.memory_limit import MissingMemory, held_on_node, missing_memory
from shardwise.planner.pricer import Pricing, priced
from shardwise.planner.results import Estimate
from shardwise.runtime.format import format_bytes, format_s

CHUNK_TOKENS: Final = 1024
_MOST_MORE_GPUS: Final = 64
_LEAST_TOKENS: Final = 512

Saving = tuple[str, dict[str, Any]]
"""Keys of the config, and the fields of a strategy that they set."""
PricingOf = Callable[[PlanJob], Pricing]
"""Makes the pricing of another job."""

# Changes that save memory, the cheapest first; each is tried on top of those before it.
_SAVINGS: Final[tuple[Saving, ...]] = (
    ("zero.stage=1", {"zero_stage": 1}),
    ("zero.stage=3", {"zero_stage": 3}),
    ("batch.micro_size=1", {"micro_size": 1}),
    (f"context.chunk_tokens={CHUNK_TOKENS}", {"chunk_tokens": CHUNK_TOKENS}),
    ("recompute.mode=full", {"recompute": "full", "recompute_every": 1}),
    ("tiers.optimizer=host", {"optimizer_tier": "host"}),
    ("tiers.grads=host", {"grads_tier": "host"}),
    ("tiers.params=host", {"params_tier": "host"}),
    ("tiers.activations=host", {"activations_tier": "host"}),
)


@dataclass(frozen=True)
class Change:
    """Hold keys of the config with new values, and the price of the strategy to which they lead."""

    words: str
    price: Estimate


def would_fit(change: Change) -> str:
    """Say that a change would make a strategy fit, and its step time."""
    return f"{change.words} would fit, at {format_s(change.price.time.step_s)}"


def smallest_change(job: PlanJob, strategy: Strategy, pricing: Pricing, margin_share: float) -> Change | None:
    """Return the single saving that makes a strategy fit and leaves it fastest, else the fewest that do; else None.

    Args:
        job: the job.
        strategy: a strategy that does not fit.
        pricing: prices the strategies of the job.
        margin_share: share of a device's memory that is to stay free.
    """
    alone = [(saving[0], _saved(strategy, [saving])) for saving in _SAVINGS]
    fitting = [
        Change(words, priced(job, other, pricing))
        for words, other in alone
        if other != strategy and _fits(job, other, pricing, margin_share)
    ]
    fastest = min(fitting, key=lambda each: each.price.time.step_s, default=None)
    return fastest or made_to_fit(job, strategy, pricing, margin_share)


def made_to_fit(job: PlanJob, strategy: Strategy, pricing: Pricing, margin_share: float) -> Change | None:
    """Return a strategy with the savings that it needs to fit, the cheapest first; None where all are not enough.

    The arguments are those of `smallest_change`.
    """

    def fits(savings: Sequence[Saving]) -> bool:
        return _fits(job, _saved(strategy, savings), pricing, margin_share)

    every = [each for each in _SAVINGS if any(getattr(strategy, name) != value for name, value in each[1].items())]
    enough = next((every[:count] for count in range(1, len(every) + 1) if fits(every[:count])), None)
    if enough is None:
        return None
    for each in reversed(enough):
        fewer = [other for other in enough if other is not each]
        if fewer and fits(fewer):
            enough = fewer
    return Change(" ".join(words for words, _ in enough), priced(job, _saved(strategy, enough), pricing))


def suggest(
    price: Estimate, missing: MissingMemory, pricing: Pricing, pricing_of: PricingOf, margin_share: float
) -> Iterator[str]:
    """Yield what would make it fit, one sentence each, the best first; adapters only where no config would.

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
    if missing.tier == "host":
        needed = format_bytes(held_on_node(price.memory, job.cluster, "host"))
        yield f"host memory of {needed} a node would fit (host_memory_gib in the cluster's file)"
    if (num_gpus := more_gpus(job, strategy, pricing_of, margin_share)) is not None:
        yield f"{num_gpus:,} GPUs would fit it, with a batch in proportion"
    if (seq_len := shorter(job, strategy, pricing_of, margin_share)) is not None:
        yield f"sequences of {seq_len:,} tokens would fit (--seq {seq_len})"
    if change is None:
        here = _on_device(strategy)
        for base, words, adapted in (
            ("keep", "", here),
            ("nf4", " beside weights in 4 bits (lora.base=nf4)", here),
            ("keep", " with tiers.params=host", replace(here, zero_stage=3, params_tier="host")),
        ):
            lean = replace(job, lora=LoraConfig.model_validate({"rank": 16, "base": base}))
            if _fits(lean, adapted, pricing_of(lean), margin_share):
                yield f"adapters alone (LoRA, lora.rank=16){words} would fit (docs/finetune.md)"
                return


def shorter(job: PlanJob, strategy: Strategy, pricing_of: PricingOf, margin_share: float) -> int | None:
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
        if _fits(less, strategy, pricing_of(less), margin_share):
            return seq_len
        seq_len //= 2
    return None


def more_gpus(job: PlanJob, strategy: Strategy, pricing_of: PricingOf, margin_share: float) -> int | None:
    """Return the GPUs on which a strategy fits, sharded over all data ranks; None where 64 times as many are too few.

    The arguments are those of `shorter`.
    """
    factor = 2
    while factor <= _MOST_MORE_GPUS:
        larger = replace(job, cluster=_enlarged(job.cluster, factor), global_batch=factor * job.global_batch)
        more, pricing = replace(strategy, dp_shard=factor * strategy.dp_shard), pricing_of(larger)
        fits = missing_memory(pricing.memory.estimate(more), larger.cluster, margin_share) is None
        if fits or made_to_fit(larger, _on_device(more), pricing, margin_share) is not None:
            return larger.cluster.num_gpus
        factor *= 2
    return None


def _enlarged(cluster: Cluster, factor: int) -> Cluster:
    """Return a cluster of `factor` times the GPUs; a single node is filled first."""
    num_gpus, per_node = factor * cluster.num_gpus, cluster.gpus_per_node
    if per_node == cluster.num_gpus:
        per_node = max(per_node, min(num_gpus, usual_node(cluster.gpu)))
    return replace(cluster, num_gpus=num_gpus, gpus_per_node=per_node)


def _on_device(strategy: Strategy) -> Strategy:
    return replace(strategy, params_tier="device", grads_tier="device", optimizer_tier="device")


def _saved(strategy: Strategy, savings: Sequence[Saving]) -> Strategy:
    changes = {name: value for _, fields in savings for name, value in fields.items()}
    if "micro_size" in changes:
        changes["num_micro_batches"] = strategy.micro_size * strategy.num_micro_batches
    return replace(strategy, **changes)


def _fits(job: PlanJob, strategy: Strategy, pricing: Pricing, margin_share: float) -> bool:
    if not is_legal(job, strategy):
        return False
    return missing_memory(pricing.memory.estimate(strategy), job.cluster, margin_share) is None
