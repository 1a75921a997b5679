"""Explain why the winner wins and the others lose, by the parts that differ, and what would make a strategy fit.

>>> parts_words({"tensor": -0.8, "bubble": 0.3, "data": 0.001})
'800 ms less exposed tensor exchange, 300 ms more bubble'
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from shardwise.config.resolve import LoraConfig
from shardwise.planner.candidates import divisors, is_legal
from shardwise.planner.hardware import Cluster, usual_node
from shardwise.planner.job import PlanJob, Strategy
from shardwise.planner.pricer import Pricer, priced
from shardwise.planner.request import CHUNK_TOKENS
from shardwise.planner.results import (
    TIE_SHARE,
    TIME_PARTS,
    Estimate,
    MissingMemory,
    held_on_node,
    layout_words,
    missing_memory,
    num_extras,
)
from shardwise.planner.search import SearchResult
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
        price: of its fastest micro-batch that fits, or of micro-batches of one sample; None where it cannot be run.
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
        chosen: of each part of the winner that is not the plainest, what the next plainer one lacks.
        runners_up: why each loses, in the order of `SearchResult.runners_up`.
        misses, suggestions: where nothing fits: what the nearest lacks, and what would make it fit, the best first.
        changes: those of the suggestions that are priced.
        yours: how the user's own strategy does; empty where there is none.
    """

    wins: str = ""
    chosen: tuple[str, ...] = ()
    runners_up: tuple[str, ...] = ()
    defaults: tuple[DefaultChoice, ...] = ()
    misses: str = ""
    suggestions: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    yours: str = ""

    @property
    def plain(self) -> DefaultChoice | None:
        """Return the fastest popular layout that fits without other memories; None where none does."""
        fitting = [
            (default.price, default)
            for default in self.defaults
            if default.price is not None and default.missing is None
        ]
        on_device = [
            (price.time.step_s, default) for price, default in fitting if price.strategy.optimizer_tier == "device"
        ]
        return min(on_device, key=lambda each: each[0], default=(0.0, None))[1]


def reasons_of(plan: SearchResult, pricer: Pricer | None = None, yours: Estimate | None = None) -> Reasons:
    """Explain a plan.

    Args:
        pricer: prices its job; None makes a new one.
        yours: the price of the user's own strategy; None where there is none.
    """
    pricer = pricer or Pricer(plan.job)
    winner, margin_share = plan.winner, plan.limits.margin_share
    reasons = Reasons(
        defaults=tuple(defaults(plan, pricer)),
        yours="" if yours is None else why_yours(yours, winner, pricer, margin_share),
    )
    if winner is not None:
        return replace(
            reasons,
            wins=why_faster(winner, plan.runners_up[0]) if plan.runners_up else "no other mesh or schedule fits",
            chosen=tuple(why_chosen(winner, pricer, margin_share)),
            runners_up=tuple(why_slower(runner_up, winner) for runner_up in plan.runners_up),
        )
    tried = [(each.price, each.missing) for each in reasons.defaults if each.price is not None and each.missing]
    # Where not even the states of a rank fit, nothing was priced by the search.
    nearest = plan.nearest or min(tried, key=lambda each: each[1].missing_bytes, default=None)
    if nearest is None:
        return reasons
    found = tuple(fixes(*nearest, pricer, margin_share))
    changes = tuple(fix for fix in found if isinstance(fix, Change))
    return replace(reasons, misses=lacks(*nearest), suggestions=tuple(map(str, found)), changes=changes)


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


def why_chosen(winner: Estimate, pricer: Pricer, margin_share: float) -> Iterator[str]:
    """Yield one clause for each part of a strategy that is not the plainest: what the next plainer one lacks or takes.

    Args:
        pricer: prices the strategies of its job.
        margin_share: share of a device's memory that is to stay free.
    """
    job, step_s = winner.job, winner.time.step_s
    for part, plainer in _plainer(winner.strategy):
        name, strategy = next((each for each in plainer if is_legal(job, each[1])), ("", None))
        if strategy is None:
            continue
        memory = pricer.memory.estimate(strategy)
        missing = missing_memory(memory, job.cluster, margin_share)
        if missing is not None:
            of = "" if missing.tier == "device" else f" {missing.tier}"
            yield f"{part}, since {name} lacks {format_bytes(missing.missing_bytes)} of{of} memory"
            continue
        price = priced(job, strategy, pricer, memory)
        lost = price.time.step_s - step_s
        if 100 * lost >= _EQUAL_PERCENT * step_s:
            more_of = {name: seconds for name, seconds in _differences(price, winner).items() if seconds > 0}
            most = parts_words(more_of).partition(",")[0]
            yield f"{part}, since {name} takes {format_s(lost)} more: {most}"
        else:
            more = memory.worst.peak_bytes - winner.memory.worst.peak_bytes
            faster = "as fast" if -100 * lost < _EQUAL_PERCENT * step_s else f"{-100 * lost / step_s:.1f} % faster"
            yield f"{part}, though {name} is {faster}" + (f", and takes {format_bytes(more)} more" if more > 0 else "")


def _plainer(s: Strategy) -> Iterator[tuple[str, list[tuple[str, Strategy]]]]:
    """Yield each part of a strategy in words, with the next plainer ones, the nearest first."""
    for axis, size in (("pp", s.pp), ("tp", s.tp), ("cp", s.cp)):
        if size > 1 and size % 2 == 0:
            less: dict[str, Any] = {axis: size // 2, "dp_shard": 2 * s.dp_shard, "zero_stage": max(1, s.zero_stage)}
            less |= {"num_micro_batches": s.num_micro_batches // 2} if s.num_micro_batches % 2 == 0 else {}
            less |= {"micro_size": s.micro_size // 2} if s.num_micro_batches % 2 else {}
            if size == 2:
                less |= {"schedule": "1f1b", "virtual_stages": 1, "gather": "batch"} if axis == "pp" else {}
                less |= {"sequence_parallel": False} if axis == "tp" else {}
                less |= {"transport": "ring", "heads_over": None} if axis == "cp" else {}
            yield f"{axis.upper()} {size}", [(f"{axis.upper()} {size // 2}", replace(s, **less))]
    if s.zero_stage and s.dp_shard * s.cp > 1:
        of_all = replace(s, zero_stage=0, dp_shard=s.num_data_ranks, dp_replicate=1)
        lower = [(f"ZeRO-{stage}", replace(s, zero_stage=stage)) for stage in range(s.zero_stage - 1, 0, -1)]
        yield f"ZeRO-{s.zero_stage}", [*lower, ("DDP", of_all)]
    if s.pp > 1 and s.schedule != "1f1b":
        yield s.schedule, [("1f1b", replace(s, schedule="1f1b", virtual_stages=1))]
    if s.recompute != "none":
        modes: list[Any] = ["selective", "none"] if s.recompute == "full" else ["none"]
        yield f"recompute {s.recompute}", [(mode, replace(s, recompute=mode, recompute_every=1)) for mode in modes]
    if s.chunk_tokens is not None:
        yield f"chunks of {s.chunk_tokens:,} tokens", [("the loss in one", replace(s, chunk_tokens=None))]
    for state in ("params", "grads", "optimizer", "activations"):
        if (tier := getattr(s, f"{state}_tier")) != "device":
            near: dict[str, Any] = {f"{state}_tier": "device"}
            near |= {} if state == "activations" else {f"{state}_on_device": 0.0}
            yield f"{state} on {tier}", [("the device", replace(s, **near))]


def why_slower(other: Estimate, winner: Estimate) -> str:
    """Say what another has more of and less of than the winner."""
    lost = other.time.step_s - winner.time.step_s
    share = 100 * lost / winner.time.step_s
    if share < _EQUAL_PERCENT:
        if num_extras(other.strategy) <= num_extras(winner.strategy):
            return "as fast"
        return f"{f'{-share:.1f} % faster' if -share >= _EQUAL_PERCENT else 'as fast'}, but less simple"
    return f"{format_s(lost)} ({share:.1f} %) slower: {parts_words(_differences(other, winner))}"


def why_yours(yours: Estimate, winner: Estimate | None, pricer: Pricer, margin_share: float) -> str:
    """Compare a strategy that no search has found with the winner.

    Args:
        yours: the price of the user's strategy.
        winner: the best that the search found; None where nothing fits.
        pricer: prices the strategies of the job.
        margin_share: share of a device's memory that is to stay free.
    """
    missing = missing_memory(yours.memory, yours.job.cluster, margin_share)
    if missing is not None:
        return why_not(yours, missing, smallest_change(yours.job, yours.strategy, pricer, margin_share))
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
    shown = [(name, seconds) for name, seconds in ordered if abs(seconds) > _LEAST_SHARE * largest][:4]
    return ", ".join(
        f"{format_s(abs(seconds))} {'less' if seconds < 0 else 'more'} {PART_WORDS[name]}" for name, seconds in shown
    )


def why_not(price: Estimate, missing: MissingMemory, change: Change | None) -> str:
    """Say how much memory a strategy lacks, and what makes it fit.

    Args:
        change: the change; None where none makes it fit.
    """
    fix = "nothing less of it fits" if change is None else change
    return f"{lacks(price, missing)}; {fix}"


def defaults(plan: SearchResult, pricer: Pricer) -> Iterator[DefaultChoice]:
    """Yield the layouts that people would start with, recomputing all where they must, and how each does."""
    job = plan.job
    for name, strategies in _default_strategies(job, plan):
        legal = [strategy for strategy in strategies if is_legal(job, strategy)]
        if legal:
            yield _default(name, legal, plan, pricer)
        else:
            what = "heads, layers or tokens" if strategies else f"{job.global_batch:,} sequences"
            sentence = f"cannot be run: {what} do not divide by its ranks"
            yield DefaultChoice(name=name, price=None, missing=None, sentence=sentence)


def _default(name: str, strategies: list[Strategy], plan: SearchResult, pricer: Pricer) -> DefaultChoice:
    job, margin_share, winner = plan.job, plan.limits.margin_share, plan.winner
    for recompute in ("none", "full"):  # the memories of the last are those of what misses by least
        tried = [replace(strategy, recompute=recompute) for strategy in strategies]
        memories = [(strategy, pricer.memory.estimate(strategy)) for strategy in tried]
        fitting = [
            priced(job, strategy, pricer, memory)
            for strategy, memory in memories
            if missing_memory(memory, job.cluster, margin_share) is None
        ]
        if fitting:
            best = min(fitting, key=lambda each: each.time.step_s)
            sentence = f"{format_s(best.time.step_s)}, nothing is faster"
            if winner is not None and best.time.step_s > winner.time.step_s:
                sentence = why_slower(best, winner)
            prefix = "with recompute full, " if recompute == "full" else ""
            return DefaultChoice(name=name, price=best, missing=None, sentence=prefix + sentence)
    strategy, memory = min(memories, key=lambda each: each[1].worst.peak_bytes)
    price = priced(job, strategy, pricer, memory)
    missing = missing_memory(price.memory, job.cluster, margin_share)
    assert missing is not None, "what fits has been returned"
    change = smallest_change(job, price.strategy, pricer, margin_share)
    return DefaultChoice(name=name, price=price, missing=missing, sentence=why_not(price, missing, change))


def _default_strategies(job: PlanJob, plan: SearchResult) -> Iterator[tuple[str, list[Strategy]]]:
    num_gpus = job.cluster.num_gpus
    best = plan.winner or (plan.nearest[0] if plan.nearest else None)
    base = Strategy() if best is None else best.strategy
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
        meshes = [mesh if mesh.dp_shard > 1 else replace(mesh, zero_stage=0) for mesh in meshes]
        yield f"Megatron (TP to {most} + PP)", [strategy for mesh in meshes for strategy in _with_batches(job, mesh)]


def _with_batches(job: PlanJob, strategy: Strategy) -> list[Strategy]:
    each_batch, left = divmod(job.global_batch, strategy.num_data_ranks)
    if left:
        return []
    sizes = [size for size in _MICRO_SIZES if each_batch % size == 0]
    return [replace(strategy, micro_size=size, num_micro_batches=each_batch // size) for size in sizes]


def _differences(one: Estimate, other: Estimate) -> dict[str, float]:
    return {name: one.time.parts.get(name, 0.0) - other.time.parts.get(name, 0.0) for name in TIME_PARTS}


def lacks(price: Estimate, missing: MissingMemory) -> str:
    """Say how much memory a strategy lacks, and what takes most of it."""
    if missing.tier != "device":
        return f"out of memory by {format_bytes(missing.missing_bytes)} of each node's {missing.tier} memory"
    problem, left = f"out of memory by {format_bytes(-price.margin_bytes)}", price.margin_bytes
    problem = problem if left < 0 else f"only {format_bytes(left)} left, less than is kept free (--margin)"
    rank = next(rank for rank in price.memory.ranks if rank.pipeline_rank == missing.pipeline_rank)
    where = f" on pipeline rank {rank.pipeline_rank}" if price.strategy.pp > 1 else ""
    largest = sorted(rank.peak.items(), key=lambda each: -each[1])[:2]
    cluster = price.job.cluster
    host_bytes = held_on_node(price.memory, cluster, "host") - cluster.host.memory_bytes
    host = f"; and by {format_bytes(host_bytes)} of each node's host memory" if host_bytes > 0 else ""
    return f"{problem}{where}: {', '.join(f'{name} {format_bytes(size)}' for name, size in largest)}{host}"


_MOST_MORE_GPUS: Final = 64

Saving = tuple[str, dict[str, Any]]
"""Keys of the config, and the fields of a strategy that they set."""

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

    def __str__(self) -> str:
        return f"{self.words} would fit, at {format_s(self.price.time.step_s)}"


def smallest_change(job: PlanJob, strategy: Strategy, pricer: Pricer, margin_share: float) -> Change | None:
    """Return a strategy with the savings that it needs to fit, the cheapest first; None where all are not enough.

    Args:
        strategy: a strategy that does not fit.
        pricer: prices the strategies of the job.
        margin_share: share of a device's memory that is to stay free.
    """

    def fits(savings: Sequence[Saving]) -> bool:
        return _fits(job, _saved(strategy, savings), pricer, margin_share)

    every = [
        saving for saving in _SAVINGS if any(getattr(strategy, name) != value for name, value in saving[1].items())
    ]
    enough = next((every[:count] for count in range(1, len(every) + 1) if fits(every[:count])), None)
    if enough is None:
        return None
    for saving in reversed(enough):
        fewer = [other for other in enough if other is not saving]
        if fewer and fits(fewer):
            enough = fewer
    return Change(" ".join(label for label, _ in enough), priced(job, _saved(strategy, enough), pricer))


def suggest(price: Estimate, missing: MissingMemory, pricer: Pricer, margin_share: float) -> Iterator[str]:
    """Yield what would make it fit, one sentence each; the arguments are those of `fixes`."""
    yield from map(str, fixes(price, missing, pricer, margin_share))


def fixes(price: Estimate, missing: MissingMemory, pricer: Pricer, margin_share: float) -> Iterator[Change | str]:
    """Yield what would make it fit, the best first; for a job of all weights adapters only where nothing else would.

    Args:
        price: of a strategy that does not fit.
        pricer: prices the strategies of its job.
        margin_share: share of a device's memory that is to stay free.
    """
    job, strategy = price.job, price.strategy
    change = smallest_change(job, strategy, pricer, margin_share)
    if change is not None:
        yield change
    if change is None or not job.trains_all:
        yield from adapters_that_fit(job, strategy, margin_share)
    if missing.tier == "host":
        needed = format_bytes(held_on_node(price.memory, job.cluster, "host"))
        yield f"host memory of {needed} a node would fit (host_memory_gib in the cluster's file)"
    if (num_gpus := more_gpus(job, strategy, margin_share)) is not None:
        yield f"{num_gpus:,} GPUs would fit it, with a batch in proportion"


def adapters_that_fit(job: PlanJob, strategy: Strategy, margin_share: float) -> Iterator[Change]:
    """Yield the adapters that fit, with the base as it is and in 4 bits, where the job has not the same."""
    adapters = LoraConfig(rank=16) if job.trains_all else job.lora
    packed = adapters.model_copy(update={"base": "nf4"})
    for lora, base in ((adapters, ""), (packed, " lora.base=nf4")):
        lean = replace(job, lora=lora)
        pricer = Pricer(lean)
        tried = (_on_device(strategy), strategy)  # what is smaller may need no other memory
        fitting = next((each for each in tried if _fits(lean, each, pricer, margin_share)), None)
        change = None if fitting is None else Change("", priced(lean, fitting, pricer))
        change = change or smallest_change(lean, tried[0], pricer, margin_share)
        if change is not None and lora != job.lora:
            keys = f"{f'lora.rank={lora.rank}' if job.trains_all else ''}{base} {change.words}".strip()
            yield replace(change, words=f"adapters{' beside weights in 4 bits' if base else ''} ({keys})")


def more_gpus(job: PlanJob, strategy: Strategy, margin_share: float) -> int | None:
    """Return the GPUs on which a strategy fits, sharded over all data ranks; None where 64 times as many are too few.

    Args:
        job: the job, on too few GPUs.
        strategy: a strategy that does not fit.
        margin_share: share of a device's memory that is to stay free.
    """
    factor = 2
    while factor <= _MOST_MORE_GPUS:
        larger = replace(job, cluster=_enlarged(job.cluster, factor), global_batch=factor * job.global_batch)
        more, pricer = replace(strategy, dp_shard=factor * strategy.dp_shard), Pricer(larger)
        fits = missing_memory(pricer.memory.estimate(more), larger.cluster, margin_share) is None
        if fits or smallest_change(larger, _on_device(more), pricer, margin_share) is not None:
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


def _fits(job: PlanJob, strategy: Strategy, pricer: Pricer, margin_share: float) -> bool:
    if not is_legal(job, strategy):
        return False
    return missing_memory(pricer.memory.estimate(strategy), job.cluster, margin_share) is None


def expert_notes(found: SearchResult, pricer: Pricer) -> tuple[str, ...]:
    """Return a note for people where the winner with its experts split over data ranks (`ep`) would be faster.

    Experts are then Shard(0) over `ep`, inside `dp_shard`, and ZeRO shards them over the other data ranks. The search
    lists only what the engine runs, which this is not yet.
    """
    experts, winner = found.job.shape.experts, found.winner
    if experts is None or winner is None:
        return ()
    best, least_s = None, winner.time.step_s * (1 - TIE_SHARE)
    for ep in divisors(winner.strategy.dp_shard)[1:]:
        # States of which each rank has fewer may need less sharding.
        for stage in {1, winner.strategy.zero_stage} if experts.num_experts % ep == 0 else ():
            split = replace(winner.strategy, ep=ep, zero_stage=stage)
            step_s = pricer.time.estimate(split).step_s
            memory = pricer.memory.estimate(split)
            if step_s < least_s and missing_memory(memory, found.job.cluster, found.limits.margin_share) is None:
                best, least_s = split, step_s
    if best is None:
        return ()
    return (
        f"experts over {best.ep} ranks (EP {best.ep}) with ZeRO-{best.zero_stage} would take {format_s(least_s)}, "
        f"{winner.time.step_s / least_s:.1f} times as fast: an estimate, with {found.job.traits.expert_imbalance:g} "
        "times the mean tokens on the fullest rank; our engine does not run mesh.ep yet",
    )
