"""Explain why the winner wins and the others lose, by the parts that differ.

>>> parts_words({"tensor": -0.8, "bubble": 0.3, "data": 0.001})
'800 ms less exposed tensor exchange, 300 ms more bubble'
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from shardwise.planner.candidates import divisors, is_legal
from shardwise.planner.format import layout_words
from shardwise.planner.job import PlanJob, Strategy
from shardwise.planner.memory_limit import MissingMemory, missing_memory
from shardwise.planner.pricer import Pricer, Pricing, priced
from shardwise.planner.results import TIME_PARTS, Estimate, extras_words, num_extras
from shardwise.planner.search import SearchResult
from shardwise.planner.suggestions import Change, PricingOf, smallest_change, suggest, would_fit
from shardwise.runtime.format import format_bytes, format_s

PART_WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "compute": "compute",
        "recompute": "recomputation",
        "tensor": "exposed tensor exchange",
        "context": "exposed context exchange",
        "experts": "exposed experts' exchange",
        "bubble": "bubble",
        "data": "exposed gathers and reductions",
        "offload": "exposed offload",
        "step": "optimizer step",
        "other": "waiting for the slowest",
    }
)
# Share of the difference of two times; smaller parts are left out.
_LEAST_SHARE: Final = 0.05
# Less is the same: it would be read as 0.0.
_EQUAL_PERCENT: Final = 0.05
_MICRO_SIZES: Final = (8, 4, 2, 1)


@dataclass(frozen=True, kw_only=True)
class DefaultChoice:
    """Describe a layout that many people would start with.

    Attributes:
        name: by which it is known.
        price: of its fastest micro-batch that fits, or of micro-batches of one sample; None where it cannot be run.
        missing: what does not fit.
        sentence: why it loses, or that it does not.
    """

    name: str
    price: Estimate | None
    missing: MissingMemory | None
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Reasons:
    """Explain a plan.

    Attributes:
        wins: why the winner beats the next.
        runners_up: why each loses, in the order of `SearchResult.runners_up`.
        defaults: why popular layouts lose.
        misses, suggestions: where nothing fits: what the nearest lacks, and what would make it fit, the best first.
        yours: how the user's own strategy does; empty where there is none.
    """

    wins: str = ""
    runners_up: tuple[str, ...] = ()
    defaults: tuple[DefaultChoice, ...] = ()
    misses: str = ""
    suggestions: tuple[str, ...] = ()
    yours: str = ""

    @property
    def plain(self) -> DefaultChoice | None:
        """Return the fastest popular layout that fits without other memories; None where none does."""
        fitting = [(each.price, each) for each in self.defaults if each.price is not None and each.missing is None]
        here = [(price.time.step_s, each) for price, each in fitting if price.strategy.optimizer_tier == "device"]
        return min(here, key=lambda each: each[0], default=(0.0, None))[1]


def reasons_of(
    plan: SearchResult,
    pricing: Pricing | None = None,
    pricing_of: PricingOf | None = None,
    yours: Estimate | None = None,
) -> Reasons:
    """Explain a plan.

    Args:
        plan: as `search` found it.
        pricing: prices its job; None makes a new `Pricer`.
        pricing_of: makes the pricing of other jobs; None means `Pricer`.
        yours: the price of the user's own strategy; None where there is none.
    """
    make = pricing_of or Pricer
    pricing = pricing or make(plan.job)
    winner, margin_share = plan.winner, plan.limits.margin_share
    found = Reasons(
        defaults=tuple(defaults(plan, pricing)),
        yours="" if yours is None else why_yours(yours, winner, pricing, margin_share),
    )
    if winner is not None:
        return replace(
            found,
            wins=why_faster(winner, plan.runners_up[0]) if plan.runners_up else "no other mesh or schedule fits",
            runners_up=tuple(why_slower(each, winner) for each in plan.runners_up),
        )
    if plan.nearest is None:
        return found
    suggestions = tuple(suggest(*plan.nearest, pricing, make, margin_share))
    return replace(found, misses=lacks(*plan.nearest), suggestions=suggestions)


def why_faster(winner: Estimate, other: Estimate) -> str:
    """Say what the winner has less of and more of than another."""
    gained = other.time.step_s - winner.time.step_s
    layout = layout_words(other.strategy)
    share = -100 * gained / winner.time.step_s
    if share >= _EQUAL_PERCENT:
        return f"simpler than {layout}, which is {share:.1f} % faster"
    if -share < _EQUAL_PERCENT:
        return f"as fast as {layout}, which comes next"
    return f"{format_s(gained)} faster than {layout}: {parts_words(_differences(winner, other))}"


def why_slower(other: Estimate, winner: Estimate) -> str:
    """Say what another has more of and less of than the winner."""
    lost = other.time.step_s - winner.time.step_s
    share = 100 * lost / winner.time.step_s
    if share < _EQUAL_PERCENT:
        if num_extras(other.strategy) <= num_extras(winner.strategy):
            return "as fast"
        gained = f"{-share:.1f} % faster" if -share >= _EQUAL_PERCENT else "as fast"
        return f"{gained}, but less simple: {extras_words(other.strategy, winner.strategy)}"
    return f"{format_s(lost)} ({share:.1f} %) slower: {parts_words(_differences(other, winner))}"


def why_yours(yours: Estimate, winner: Estimate | None, pricing: Pricing, margin_share: float) -> str:
    """Compare a strategy that no search has found with the winner.

    Args:
        yours: the price of the user's strategy.
        winner: the best that the search found; None where nothing fits.
        pricing: prices the strategies of the job.
        margin_share: share of a device's memory that is to stay free.
    """
    missing = missing_memory(yours.memory, yours.job.cluster, margin_share)
    if missing is not None:
        return why_not(yours, missing, smallest_change(yours.job, yours.strategy, pricing, margin_share))
    if winner is None:
        return "fits, though the search found nothing that does: keep it"
    gained = winner.time.step_s - yours.time.step_s
    share = 100 * gained / winner.time.step_s
    if share >= _EQUAL_PERCENT:
        return f"{format_s(gained)} ({share:.1f} %) faster than what the search found: keep it"
    return why_slower(yours, winner)


def parts_words(differences: Mapping[str, float]) -> str:
    """Name the parts that differ most between two times, the largest first."""
    ordered = sorted(differences.items(), key=lambda each: -abs(each[1]))
    largest = abs(ordered[0][1]) if ordered else 0.0
    shown = [(part, seconds) for part, seconds in ordered if abs(seconds) > _LEAST_SHARE * largest][:4]
    return ", ".join(
        f"{format_s(abs(seconds))} {'less' if seconds < 0 else 'more'} {PART_WORDS[part]}" for part, seconds in shown
    )


def why_not(price: Estimate, missing: MissingMemory, change: Change | None) -> str:
    """Say how much memory a strategy lacks, and what makes it fit.

    Args:
        price: of the strategy.
        missing: what does not fit.
        change: the change; None where none makes it fit.
    """
    fix = "nothing less of it fits" if change is None else would_fit(change)
    return f"{lacks(price, missing)}; {fix}"


def defaults(plan: SearchResult, pricing: Pricing) -> Iterator[DefaultChoice]:
    """Yield the layouts that people would start with, recomputing all where they must, and how each does."""
    job = plan.job
    for name, strategies in _default_strategies(job, plan):
        legal = [each for each in strategies if is_legal(job, each)]
        if legal:
            yield _default(name, legal, plan, pricing)
        else:
            what = "heads, layers or tokens" if strategies else f"{job.global_batch:,} sequences"
            sentence = f"cannot be run: {what} do not divide by its ranks"
            yield DefaultChoice(name=name, price=None, missing=None, sentence=sentence)


def _default(name: str, strategies: list[Strategy], plan: SearchResult, pricing: Pricing) -> DefaultChoice:
    job, margin_share, winner = plan.job, plan.limits.margin_share, plan.winner
    for recompute in ("none", "full"):  # the memories of the last are those of what misses by least
        tried = [replace(each, recompute=recompute) for each in strategies]
        memories = [(each, pricing.memory.estimate(each)) for each in tried]
        fitting = [
            priced(job, each, pricing, memory)
            for each, memory in memories
            if missing_memory(memory, job.cluster, margin_share) is None
        ]
        if fitting:
            best = min(fitting, key=lambda each: each.time.step_s)
            sentence = f"{format_s(best.time.step_s)}, nothing is faster"
            if winner is not None and best.time.step_s > winner.time.step_s:
                sentence = why_slower(best, winner)
            words = "with recompute full, " if recompute == "full" else ""
            return DefaultChoice(name=name, price=best, missing=None, sentence=words + sentence)
    strategy, memory = min(memories, key=lambda each: each[1].worst.peak_bytes)
    price = priced(job, strategy, pricing, memory)
    missing = missing_memory(price.memory, job.cluster, margin_share)
    assert missing is not None, "what fits has been returned"
    change = smallest_change(job, price.strategy, pricing, margin_share)
    return DefaultChoice(name=name, price=price, missing=missing, sentence=why_not(price, missing, change))


def _default_strategies(job: PlanJob, plan: SearchResult) -> Iterator[tuple[str, list[Strategy]]]:
    num_gpus = job.cluster.num_gpus
    found = plan.winner or (plan.nearest[0] if plan.nearest else None)
    base = Strategy() if found is None else found.strategy
    base = Strategy(param=base.param, reduce=base.reduce, accumulate=base.accumulate, matmul=base.matmul)
    host = {"optimizer_tier": "host", "grads_tier": "host"}
    yield "DDP", _with_batches(job, replace(base, dp_shard=num_gpus))
    if num_gpus > 1:
        yield "FSDP (ZeRO-3 over all)", _with_batches(job, replace(base, dp_shard=num_gpus, zero_stage=3))
        yield "ZeRO-2", _with_batches(job, replace(base, dp_shard=num_gpus, zero_stage=2))
    offloaded = replace(base, dp_shard=num_gpus, zero_stage=3, params_tier="host", **host)  # type: ignore[arg-type]
    yield "ZeRO-3, host offload", _with_batches(job, offloaded)
    most = min(8, job.cluster.gpus_per_node)
    if num_gpus > most > 1:
        split = replace(base, sequence_parallel=True)
        sizes = [(tp, pp) for tp in divisors(most)[1:] for pp in divisors(num_gpus // tp)[1:]]
        sizes = [(tp, pp) for tp, pp in sizes if pp <= job.shape.num_layers]
        meshes = [replace(split, tp=tp, pp=pp, dp_shard=num_gpus // tp // pp, zero_stage=1) for tp, pp in sizes]
        meshes = [each if each.dp_shard > 1 else replace(each, zero_stage=0) for each in meshes]
        yield f"Megatron (TP to {most} + PP)", [each for mesh in meshes for each in _with_batches(job, mesh)]


def _with_batches(job: PlanJob, strategy: Strategy) -> list[Strategy]:
    each_batch, left = divmod(job.global_batch, strategy.num_data_ranks)
    if left:
        return []
    sizes = [size for size in _MICRO_SIZES if each_batch % size == 0]
    return [replace(strategy, micro_size=size, num_micro_batches=each_batch // size) for size in sizes]


def _differences(one: Estimate, other: Estimate) -> dict[str, float]:
    return {part: one.time.parts.get(part, 0.0) - other.time.parts.get(part, 0.0) for part in TIME_PARTS}


def lacks(price: Estimate, missing: MissingMemory) -> str:
    """Say how much memory a strategy lacks, and what takes most of it."""
    words = f"out of memory by {format_bytes(missing.missing_bytes)}"
    if missing.tier != "device":
        return f"{words} of each node's {missing.tier} memory"
    rank = next(each for each in price.memory.ranks if each.pipeline_rank == missing.pipeline_rank)
    where = f" on pipeline rank {rank.pipeline_rank}" if price.strategy.pp > 1 else ""
    largest = sorted(rank.peak.items(), key=lambda each: -each[1])[:2]
    return f"{words}{where}: {', '.join(f'{name} {format_bytes(size)}' for name, size in largest)}"
