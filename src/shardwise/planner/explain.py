"""Explain why the winner wins and the others lose, by the parts that differ, and what would make a candidate fit.

>>> parts_words({"tensor": -0.8, "bubble": 0.3, "data": 0.001})
'800 ms less exposed tensor exchange, 300 ms more bubble'
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from shardwise.config.resolve import LoraConfig, ResolvedConfig
from shardwise.planner.candidates import divisors, is_legal
from shardwise.planner.hardware import Cluster, usual_node
from shardwise.planner.job import PlanJob, changed, num_data_ranks, trains_all
from shardwise.planner.pricer import Pricer, priced
from shardwise.planner.request import CHUNK_TOKENS
from shardwise.planner.results import (
    TIE_SHARE,
    TIME_PARTS,
    Estimate,
    MissingMemory,
    held_on_node,
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
        yours: how the user's own config does; empty where there is none.
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
            (price.time.step_s, default) for price, default in fitting if price.config.tiers.optimizer == "device"
        ]
        return min(on_device, key=lambda each: each[0], default=(0.0, None))[1]


def reasons_of(plan: SearchResult, pricer: Pricer | None = None, yours: Estimate | None = None) -> Reasons:
    """Explain a plan.

    Args:
        pricer: prices its job; None makes a new one.
        yours: the price of the user's own config; None where there is none.
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
    layout = other.layout
    share = -100 * gained / winner.time.step_s
    if share >= _EQUAL_PERCENT:
        return f"simpler than {layout}, which is {share:.1f} % faster"
    if -share < _EQUAL_PERCENT:
        return f"as fast as {layout}, which comes next"
    return f"{format_s(gained)} faster than {layout}: {parts_words(_differences(winner, other))}"


def why_chosen(winner: Estimate, pricer: Pricer, margin_share: float) -> Iterator[str]:
    """Yield one clause for each part of a candidate that is not the plainest: what the next plainer one lacks or takes.

    Args:
        pricer: prices the candidates of its job.
        margin_share: share of a device's memory that is to stay free.
    """
    job, step_s = winner.job, winner.time.step_s
    for part, plainer in _plainer(winner.config):
        name, config = next((each for each in plainer if is_legal(job, each[1])), ("", None))
        if config is None:
            continue
        memory = pricer.memory.estimate(config)
        missing = missing_memory(memory, job.cluster, margin_share)
        if missing is not None:
            of = "" if missing.tier == "device" else f" {missing.tier}"
            yield f"{part}, since {name} lacks {format_bytes(missing.missing_bytes)} of{of} memory"
            continue
        price = priced(job, config, pricer, memory)
        lost = price.time.step_s - step_s
        if 100 * lost >= _EQUAL_PERCENT * step_s:
            more_of = {name: seconds for name, seconds in _differences(price, winner).items() if seconds > 0}
            most = parts_words(more_of).partition(",")[0]
            yield f"{part}, since {name} takes {format_s(lost)} more: {most}"
        else:
            more = memory.worst.peak_bytes - winner.memory.worst.peak_bytes
            faster = "as fast" if -100 * lost < _EQUAL_PERCENT * step_s else f"{-100 * lost / step_s:.1f} % faster"
            yield f"{part}, though {name} is {faster}" + (f", and takes {format_bytes(more)} more" if more > 0 else "")


def _plainer(s: ResolvedConfig) -> Iterator[tuple[str, list[tuple[str, ResolvedConfig]]]]:
    """Yield each part of a candidate in words, with the next plainer ones, the nearest first."""
    halves = {"batch.accumulation": s.batch.accumulation // 2}
    if s.batch.accumulation % 2:
        halves = {"batch.micro_size": s.batch.micro_size // 2}
    alone: dict[str, dict[str, Any]] = {
        "pp": {"pipeline.schedule": "1f1b", "pipeline.virtual_stages": 1, "pipeline.gather": "batch"},
        "tp": {"tensor.sequence_parallel": False},
        "cp": {"context.transport": "ring", "context.heads_over": None},
    }
    for axis, size in (("pp", s.mesh.pp), ("tp", s.mesh.tp), ("cp", s.mesh.cp)):
        if size > 1 and size % 2 == 0:
            less = {f"mesh.{axis}": size // 2, "mesh.dp_shard": 2 * s.mesh.dp_shard, "zero.stage": max(1, s.zero.stage)}
            less |= halves | (alone[axis] if size == 2 else {})
            yield f"{axis.upper()} {size}", [(f"{axis.upper()} {size // 2}", changed(s, less))]
    if s.zero.stage and s.mesh.dp_shard * s.mesh.cp > 1:
        of_all = changed(s, {"zero.stage": 0, "mesh.dp_shard": num_data_ranks(s), "mesh.dp_replicate": 1})
        lower = [(f"ZeRO-{stage}", changed(s, {"zero.stage": stage})) for stage in range(s.zero.stage - 1, 0, -1)]
        yield f"ZeRO-{s.zero.stage}", [*lower, ("DDP", of_all)]
    if s.mesh.pp > 1 and s.pipeline.schedule != "1f1b":
        yield s.pipeline.schedule, [("1f1b", changed(s, {"pipeline.schedule": "1f1b", "pipeline.virtual_stages": 1}))]
    if s.recompute.mode != "none":
        modes = ["selective", "none"] if s.recompute.mode == "full" else ["none"]
        kept = [(mode, changed(s, {"recompute.mode": mode, "recompute.every": 1})) for mode in modes]
        yield f"recompute {s.recompute.mode}", kept
    if (chunk := s.context.chunk_tokens) is not None:
        yield f"chunks of {chunk:,} tokens", [("the loss in one", changed(s, {"context.chunk_tokens": None}))]
    for state in ("params", "grads", "optimizer", "activations"):
        if (tier := getattr(s.tiers, state)) != "device":
            near = {f"tiers.{state}": "device"} | ({} if state == "activations" else {f"tiers.{state}_on_device": 0.0})
            yield f"{state} on {tier}", [("the device", changed(s, near))]


def why_slower(other: Estimate, winner: Estimate) -> str:
    """Say what another has more of and less of than the winner."""
    lost = other.time.step_s - winner.time.step_s
    share = 100 * lost / winner.time.step_s
    if share < _EQUAL_PERCENT:
        if num_extras(other.config) <= num_extras(winner.config):
            return "as fast"
        return f"{f'{-share:.1f} % faster' if -share >= _EQUAL_PERCENT else 'as fast'}, but less simple"
    return f"{format_s(lost)} ({share:.1f} %) slower: {parts_words(_differences(other, winner))}"


def why_yours(yours: Estimate, winner: Estimate | None, pricer: Pricer, margin_share: float) -> str:
    """Compare a candidate that no search has found with the winner.

    Args:
        yours: the price of the user's config.
        winner: the best that the search found; None where nothing fits.
        pricer: prices the candidates of the job.
        margin_share: share of a device's memory that is to stay free.
    """
    missing = missing_memory(yours.memory, yours.job.cluster, margin_share)
    if missing is not None:
        return why_not(yours, missing, smallest_change(yours.job, yours.config, pricer, margin_share))
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
    """Say how much memory a candidate lacks, and what makes it fit.

    Args:
        change: the change; None where none makes it fit.
    """
    fix = "nothing less of it fits" if change is None else change
    return f"{lacks(price, missing)}; {fix}"


def defaults(plan: SearchResult, pricer: Pricer) -> Iterator[DefaultChoice]:
    """Yield the layouts that people would start with, recomputing all where they must, and how each does."""
    job = plan.job
    for name, configs in _default_configs(job):
        legal = [config for config in configs if is_legal(job, config)]
        if legal:
            yield _default(name, legal, plan, pricer)
        else:
            what = "heads, layers or tokens" if configs else f"{job.global_batch:,} sequences"
            sentence = f"cannot be run: {what} do not divide by its ranks"
            yield DefaultChoice(name=name, price=None, missing=None, sentence=sentence)


def _default(name: str, configs: list[ResolvedConfig], plan: SearchResult, pricer: Pricer) -> DefaultChoice:
    job, margin_share, winner = plan.job, plan.limits.margin_share, plan.winner
    for recompute in ("none", "full"):  # the memories of the last are those of what misses by least
        tried = [changed(config, {"recompute.mode": recompute}) for config in configs]
        memories = [(config, pricer.memory.estimate(config)) for config in tried]
        fitting = [
            priced(job, config, pricer, memory)
            for config, memory in memories
            if missing_memory(memory, job.cluster, margin_share) is None
        ]
        if fitting:
            best = min(fitting, key=lambda each: each.time.step_s)
            sentence = f"{format_s(best.time.step_s)}, nothing is faster"
            if winner is not None and best.time.step_s > winner.time.step_s:
                sentence = why_slower(best, winner)
            prefix = "with recompute full, " if recompute == "full" else ""
            return DefaultChoice(name=name, price=best, missing=None, sentence=prefix + sentence)
    config, memory = min(memories, key=lambda each: each[1].worst.peak_bytes)
    price = priced(job, config, pricer, memory)
    missing = missing_memory(price.memory, job.cluster, margin_share)
    assert missing is not None, "what fits has been returned"
    change = smallest_change(job, price.config, pricer, margin_share)
    return DefaultChoice(name=name, price=price, missing=missing, sentence=why_not(price, missing, change))


def _default_configs(job: PlanJob) -> Iterator[tuple[str, list[ResolvedConfig]]]:
    num_gpus = job.cluster.num_gpus
    base = changed(job.base, {"mesh.dp_shard": num_gpus, "context.chunk_tokens": None})
    yield "DDP", _with_batches(job, base)
    if num_gpus > 1:
        yield "FSDP (ZeRO-3 over all)", _with_batches(job, changed(base, {"zero.stage": 3}))
        yield "ZeRO-2", _with_batches(job, changed(base, {"zero.stage": 2}))
    away = {f"tiers.{state}": "host" for state in ("params", "grads", "optimizer")}
    yield "ZeRO-3, host offload", _with_batches(job, changed(base, {"zero.stage": 3, **away}))
    most = min(8, job.cluster.gpus_per_node)
    if num_gpus > most > 1:
        split = changed(base, {"tensor.sequence_parallel": True})
        sizes = [(tp, pp) for tp in divisors(most)[1:] for pp in divisors(num_gpus // tp)[1:]]
        sizes = [(tp, pp) for tp, pp in sizes if pp <= job.shape.num_layers]
        meshes = [{"mesh.tp": tp, "mesh.pp": pp, "mesh.dp_shard": num_gpus // tp // pp} for tp, pp in sizes]
        stages = [mesh | {"zero.stage": int(mesh["mesh.dp_shard"] > 1)} for mesh in meshes]
        configs = [config for values in stages for config in _with_batches(job, changed(split, values))]
        yield f"Megatron (TP to {most} + PP)", configs


def _with_batches(job: PlanJob, config: ResolvedConfig) -> list[ResolvedConfig]:
    each_batch, left = divmod(job.global_batch, num_data_ranks(config))
    if left:
        return []
    sizes = [size for size in _MICRO_SIZES if each_batch % size == 0]
    return [changed(config, {"batch.micro_size": size, "batch.accumulation": each_batch // size}) for size in sizes]


def _differences(one: Estimate, other: Estimate) -> dict[str, float]:
    return {name: one.time.parts.get(name, 0.0) - other.time.parts.get(name, 0.0) for name in TIME_PARTS}


def lacks(price: Estimate, missing: MissingMemory) -> str:
    """Say how much memory a candidate lacks, and what takes most of it."""
    if missing.tier != "device":
        return f"out of memory by {format_bytes(missing.missing_bytes)} of each node's {missing.tier} memory"
    problem, left = f"out of memory by {format_bytes(-price.margin_bytes)}", price.margin_bytes
    problem = problem if left < 0 else f"only {format_bytes(left)} left, less than is kept free (--margin)"
    rank = next(rank for rank in price.memory.ranks if rank.pipeline_rank == missing.pipeline_rank)
    where = f" on pipeline rank {rank.pipeline_rank}" if price.config.mesh.pp > 1 else ""
    largest = sorted(rank.peak.items(), key=lambda each: -each[1])[:2]
    cluster = price.job.cluster
    host_bytes = held_on_node(price.memory, cluster, "host") - cluster.host.memory_bytes
    host = f"; and by {format_bytes(host_bytes)} of each node's host memory" if host_bytes > 0 else ""
    return f"{problem}{where}: {', '.join(f'{name} {format_bytes(size)}' for name, size in largest)}{host}"


_MOST_MORE_GPUS: Final = 64

Saving = tuple[str, Any]
"""A key of the config, and its value that saves memory."""

# The cheapest first; each is tried on top of those before it.
_SAVINGS: Final[tuple[Saving, ...]] = (
    ("zero.stage", 1),
    ("zero.stage", 3),
    ("batch.micro_size", 1),
    ("context.chunk_tokens", CHUNK_TOKENS),
    ("recompute.mode", "full"),
    ("tiers.optimizer", "host"),
    ("tiers.grads", "host"),
    ("tiers.params", "host"),
    ("tiers.activations", "host"),
)


@dataclass(frozen=True)
class Change:
    """Hold keys of the config with new values, and the price of the candidate to which they lead."""

    words: str
    price: Estimate

    def __str__(self) -> str:
        return f"{self.words} would fit, at {format_s(self.price.time.step_s)}"


def smallest_change(job: PlanJob, config: ResolvedConfig, pricer: Pricer, margin_share: float) -> Change | None:
    """Return a candidate with the savings that it needs to fit, the cheapest first; None where all are not enough.

    Args:
        config: a candidate that does not fit.
        pricer: prices the candidates of the job.
        margin_share: share of a device's memory that is to stay free.
    """

    def fits(savings: Sequence[Saving]) -> bool:
        return _fits(job, _saved(config, savings), pricer, margin_share)

    every = [saving for saving in _SAVINGS if _saved(config, [saving]) != config]
    enough = next((every[:count] for count in range(1, len(every) + 1) if fits(every[:count])), None)
    if enough is None:
        return None
    for saving in reversed(enough):
        fewer = [other for other in enough if other is not saving]
        if fewer and fits(fewer):
            enough = fewer
    return Change(" ".join(f"{key}={value}" for key, value in enough), priced(job, _saved(config, enough), pricer))


def suggest(price: Estimate, missing: MissingMemory, pricer: Pricer, margin_share: float) -> Iterator[str]:
    """Yield what would make it fit, one sentence each; the arguments are those of `fixes`."""
    yield from map(str, fixes(price, missing, pricer, margin_share))


def fixes(price: Estimate, missing: MissingMemory, pricer: Pricer, margin_share: float) -> Iterator[Change | str]:
    """Yield what would make it fit, the best first; for a job of all weights adapters only where nothing else would.

    Args:
        price: of a candidate that does not fit.
        pricer: prices the candidates of its job.
        margin_share: share of a device's memory that is to stay free.
    """
    job, config = price.job, price.config
    change = smallest_change(job, config, pricer, margin_share)
    if change is not None:
        yield change
    if change is None or not trains_all(config):
        yield from adapters_that_fit(job, config, pricer, margin_share)
    if missing.tier == "host":
        needed = format_bytes(held_on_node(price.memory, job.cluster, "host"))
        yield f"host memory of {needed} a node would fit (host_memory_gib in the cluster's file)"
    if (num_gpus := more_gpus(job, config, margin_share)) is not None:
        yield f"{num_gpus:,} GPUs would fit it, with a batch in proportion"


def adapters_that_fit(job: PlanJob, config: ResolvedConfig, pricer: Pricer, margin_share: float) -> Iterator[Change]:
    """Yield the adapters that fit, with the base as it is and in 4 bits, where the config has not the same."""
    is_whole = trains_all(config)
    adapters = LoraConfig(rank=16) if is_whole else config.lora
    packed = adapters.model_copy(update={"base": "nf4"})
    for lora, base in ((adapters, ""), (packed, " lora.base=nf4")):
        values = {f"lora.{key}": value for key, value in lora}
        tried = (changed(_on_device(config), values), changed(config, values))  # what is smaller may fit the device
        fitting = next((each for each in tried if _fits(job, each, pricer, margin_share)), None)
        change = None if fitting is None else Change("", priced(job, fitting, pricer))
        change = change or smallest_change(job, tried[0], pricer, margin_share)
        if change is not None and lora != config.lora:
            keys = f"{f'lora.rank={lora.rank}' if is_whole else ''}{base} {change.words}".strip()
            yield replace(change, words=f"adapters{' beside weights in 4 bits' if base else ''} ({keys})")


def more_gpus(job: PlanJob, config: ResolvedConfig, margin_share: float) -> int | None:
    """Return the GPUs on which a candidate fits, sharded over all data ranks; None where 64 times as many are too few.

    Args:
        job: the job, on too few GPUs.
        config: a candidate that does not fit.
        margin_share: share of a device's memory that is to stay free.
    """
    factor = 2
    while factor <= _MOST_MORE_GPUS:
        larger = replace(job, cluster=_enlarged(job.cluster, factor), global_batch=factor * job.global_batch)
        more, pricer = changed(config, {"mesh.dp_shard": factor * config.mesh.dp_shard}), Pricer(larger)
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


def _on_device(config: ResolvedConfig) -> ResolvedConfig:
    return changed(config, {"tiers.params": "device", "tiers.grads": "device", "tiers.optimizer": "device"})


def _saved(config: ResolvedConfig, savings: Sequence[Saving]) -> ResolvedConfig:
    changes = dict(savings)
    if "batch.micro_size" in changes:
        changes["batch.accumulation"] = config.batch.micro_size * config.batch.accumulation
    if "recompute.mode" in changes:
        changes["recompute.every"] = 1
    return changed(config, changes)


def _fits(job: PlanJob, config: ResolvedConfig, pricer: Pricer, margin_share: float) -> bool:
    if not is_legal(job, config):
        return False
    return missing_memory(pricer.memory.estimate(config), job.cluster, margin_share) is None


def expert_notes(found: SearchResult) -> tuple[str, ...]:
    """Return a note for people where the winner with its experts split over data ranks (`ep`) would be faster.

    Experts are then Shard(0) over `ep`, inside `dp_shard`, and ZeRO shards them over the other data ranks. The search
    lists only what the engine runs, which this is not yet.
    """
    experts, winner = found.job.shape.experts, found.winner
    if experts is None or winner is None:
        return ()
    best, least_s = None, winner.time.step_s * (1 - TIE_SHARE)
    for ep in divisors(winner.config.mesh.dp_shard)[1:]:
        if experts.num_experts % ep:
            continue
        pricer = Pricer(replace(found.job, ep=ep))
        # States of which each rank has fewer may need less sharding.
        for stage in {1, winner.config.zero.stage}:
            split = changed(winner.config, {"zero.stage": stage})
            step_s = pricer.time.estimate(split).step_s
            memory = pricer.memory.estimate(split)
            if step_s < least_s and missing_memory(memory, found.job.cluster, found.limits.margin_share) is None:
                best, least_s = (ep, stage), step_s
    if best is None:
        return ()
    ep, stage = best
    return (
        f"experts over {ep} ranks (EP {ep}) with ZeRO-{stage} would take {format_s(least_s)}, "
        f"{winner.time.step_s / least_s:.1f} times as fast: an estimate, with {found.job.expert_imbalance:g} "
        "times the mean tokens on the fullest rank; our engine does not run mesh.ep yet",
    )
