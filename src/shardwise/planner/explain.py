"""Explain why the winner wins and the others lose, by the parts that differ, and what would make a candidate fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from shardwise.config.resolve import LoraConfig, ResolvedConfig
from shardwise.planner.candidates import divisors, is_legal
from shardwise.planner.hardware import Cluster, usual_node
from shardwise.planner.job import PlanJob, changed, num_data_ranks, trains_all
from shardwise.planner.request import CHUNK_TOKENS
from shardwise.planner.results import TIME_PARTS, Estimate, MissingMemory, held_on_node, num_extras
from shardwise.planner.search import Pricer, SearchResult
from shardwise.runtime.format import format_bytes, format_s

# Share of the difference of two times; smaller parts are left out.
_LEAST_SHARE: Final = 0.05
# Less is the same: it would be read as 0.0.
_EQUAL_PERCENT: Final = 0.05
_MICRO_SIZES: Final = (8, 4, 2, 1)
_MORE_GPUS: Final = (2, 4, 8, 16, 32, 64)


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
        yours: the price of the user's own config, and how it does; None where there is none.
    """

    wins: str = ""
    chosen: tuple[str, ...] = ()
    runners_up: tuple[str, ...] = ()
    defaults: tuple[DefaultChoice, ...] = ()
    misses: str = ""
    suggestions: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    yours: tuple[Estimate, str] | None = None


def reasons_of(plan: SearchResult, pricer: Pricer | None = None, yours: Estimate | None = None) -> Reasons:
    """Explain a plan.

    Args:
        pricer: prices its job; None makes a new one.
        yours: the price of the user's own config; None where there is none.
    """
    pricer, winner = pricer or Pricer(plan.job, plan.limits.margin_share), plan.winner
    reasons = Reasons(
        defaults=tuple(_defaults(winner, pricer)),
        yours=None if yours is None else (yours, why_yours(yours, winner, pricer)),
    )
    if winner is not None:
        return replace(
            reasons,
            wins=why_faster(winner, plan.runners_up[0]) if plan.runners_up else "no other mesh or schedule fits",
            chosen=tuple(why_chosen(winner, pricer)),
            runners_up=tuple(why_slower(runner_up, winner) for runner_up in plan.runners_up),
        )
    tried = [(each.price, each.missing) for each in reasons.defaults if each.price is not None and each.missing]
    # Where not even the states of a rank fit, nothing was priced by the search.
    nearest = plan.nearest or min(tried, key=lambda each: each[1].missing_bytes, default=None)
    if nearest is None:
        return reasons
    found = tuple(fixes(*nearest, pricer))
    changes = tuple(fix for fix in found if isinstance(fix, Change))
    return replace(reasons, misses=lacks(*nearest), suggestions=tuple(map(str, found)), changes=changes)


def why_faster(winner: Estimate, other: Estimate) -> str:
    """Say what the winner has less of and more of than another."""
    gained, layout = other.time.step_s - winner.time.step_s, other.layout
    percent = 100 * gained / winner.time.step_s
    if percent <= -_EQUAL_PERCENT:
        return f"simpler than {layout}, which is {-percent:.1f} % faster"
    if percent < _EQUAL_PERCENT:
        return f"as fast as {layout}, which comes next"
    return f"{format_s(gained)} faster than {layout}: {_parts_words(winner, other)}"


def why_slower(other: Estimate, winner: Estimate) -> str:
    """Say what another has more of and less of than the winner."""
    lost = other.time.step_s - winner.time.step_s
    percent = 100 * lost / winner.time.step_s
    if percent >= _EQUAL_PERCENT:
        return f"{format_s(lost)} ({percent:.1f} %) slower: {_parts_words(other, winner)}"
    as_fast = f"{-percent:.1f} % faster" if percent <= -_EQUAL_PERCENT else "as fast"
    return f"{as_fast}, but less simple" if num_extras(other.config) > num_extras(winner.config) else "as fast"


def why_yours(yours: Estimate, winner: Estimate | None, pricer: Pricer) -> str:
    """Compare the user's own candidate with the best that the search found, which is None where nothing fits."""
    missing = pricer.missing(yours.memory)
    if missing is not None:
        return _why_not(yours, missing, pricer)
    if winner is None:
        return "fits, though the search found nothing that does: keep it"
    gained = winner.time.step_s - yours.time.step_s
    percent = 100 * gained / winner.time.step_s
    if percent >= _EQUAL_PERCENT:
        return f"{format_s(gained)} ({percent:.1f} %) faster than what the search found: keep it"
    return why_slower(yours, winner)


def why_chosen(winner: Estimate, pricer: Pricer) -> Iterator[str]:
    """Yield a clause for each part of a candidate that is not plain: what the next plainer one lacks or takes."""
    step_s = winner.time.step_s
    for part, plainer in _plainer(winner.config):
        name, config = next((each for each in plainer if is_legal(winner.job, each[1])), ("", None))
        if config is None:
            continue
        memory = pricer.memory.estimate(config)
        if (missing := pricer.missing(memory)) is not None:
            of = "" if missing.tier == "device" else f" {missing.tier}"
            yield f"{part}, since {name} lacks {format_bytes(missing.missing_bytes)} of{of} memory"
            continue
        price = pricer.price(config, memory)
        lost = price.time.step_s - step_s
        if 100 * lost >= _EQUAL_PERCENT * step_s:
            yield f"{part}, since {name} takes {format_s(lost)} more: {_parts_words(price, winner, only_more=True)}"
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
    if s.mesh.ep % 2 == 0:
        yield f"EP {s.mesh.ep}", [(f"EP {s.mesh.ep // 2}", changed(s, {"mesh.ep": s.mesh.ep // 2}))]
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


def _parts_words(one: Estimate, other: Estimate, *, only_more: bool = False) -> str:
    """Name the parts of which one takes more or less than the other, the largest first; or the one of most more."""
    differences = {name: one.time.parts.get(name, 0.0) - other.time.parts.get(name, 0.0) for name in TIME_PARTS}
    ordered = sorted(differences.items(), key=lambda each: -each[1] if only_more else -abs(each[1]))
    least = _LEAST_SHARE * abs(ordered[0][1])
    shown = [(name, seconds) for name, seconds in ordered if abs(seconds) > least][: 1 if only_more else 4]
    return ", ".join(
        f"{format_s(abs(seconds))} {'less' if seconds < 0 else 'more'} {TIME_PARTS[name].label}"
        for name, seconds in shown
    )


def _why_not(price: Estimate, missing: MissingMemory, pricer: Pricer) -> str:
    """Say how much memory a candidate lacks, and which change makes it fit."""
    return f"{lacks(price, missing)}; {smallest_change(price.config, pricer) or 'nothing less of it fits'}"


def _defaults(winner: Estimate | None, pricer: Pricer) -> Iterator[DefaultChoice]:
    """Yield the layouts that people would start with, recomputing all where they must, and how each does."""
    job = pricer.job
    for name, configs in _default_configs(job):
        legal = [config for config in configs if is_legal(job, config)]
        if legal:
            yield _default(name, legal, winner, pricer)
        else:
            what = "heads, layers or tokens" if configs else f"{job.global_batch:,} sequences"
            sentence = f"cannot be run: {what} do not divide by its ranks"
            yield DefaultChoice(name=name, price=None, missing=None, sentence=sentence)


def _default(name: str, configs: list[ResolvedConfig], winner: Estimate | None, pricer: Pricer) -> DefaultChoice:
    for recompute in ("none", "full"):  # the memories of the last are those of what misses by least
        tried = [changed(config, {"recompute.mode": recompute}) for config in configs]
        memories = [(config, pricer.memory.estimate(config)) for config in tried]
        fitting = [pricer.price(config, memory) for config, memory in memories if pricer.missing(memory) is None]
        if fitting:
            best = min(fitting, key=lambda each: each.time.step_s)
            sentence = f"{format_s(best.time.step_s)}, nothing is faster"
            if winner is not None and best.time.step_s > winner.time.step_s:
                sentence = why_slower(best, winner)
            prefix = "with recompute full, " if recompute == "full" else ""
            return DefaultChoice(name=name, price=best, missing=None, sentence=prefix + sentence)
    price = pricer.price(*min(memories, key=lambda each: each[1].worst.peak_bytes))
    missing = pricer.missing(price.memory)
    assert missing is not None, "what fits has been returned"
    return DefaultChoice(name=name, price=price, missing=missing, sentence=_why_not(price, missing, pricer))


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


def lacks(price: Estimate, missing: MissingMemory) -> str:
    """Say how much memory a candidate lacks, and what takes most of it."""
    if missing.tier != "device":
        return f"out of memory by {format_bytes(missing.missing_bytes)} of each node's {missing.tier} memory"
    problem, left = f"out of memory by {format_bytes(-price.margin_bytes)}", price.margin_bytes
    problem = problem if left < 0 else f"only {format_bytes(left)} left, less than is kept free (--margin)"
    rank = price.memory.worst
    where = f" on pipeline rank {rank.pipeline_rank}" if price.config.mesh.pp > 1 else ""
    largest = sorted(rank.peak.items(), key=lambda each: -each[1])[:2]
    cluster = price.job.cluster
    host_bytes = held_on_node(price.memory, cluster, "host") - cluster.host.memory_bytes
    host = f"; and by {format_bytes(host_bytes)} of each node's host memory" if host_bytes > 0 else ""
    return f"{problem}{where}: {', '.join(f'{name} {format_bytes(size)}' for name, size in largest)}{host}"


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


def smallest_change(config: ResolvedConfig, pricer: Pricer) -> Change | None:
    """Return a candidate that does not fit with the savings that it needs, the cheapest first; None where all are not
    enough.
    """

    def fits(savings: Sequence[Saving]) -> bool:
        return _fits(_saved(config, savings), pricer)

    every = [saving for saving in _SAVINGS if _saved(config, [saving]) != config]
    enough = next((every[:count] for count in range(1, len(every) + 1) if fits(every[:count])), None)
    if enough is None:
        return None
    for saving in reversed(enough):
        fewer = [other for other in enough if other is not saving]
        if fewer and fits(fewer):
            enough = fewer
    return Change(" ".join(f"{key}={value}" for key, value in enough), pricer.price(_saved(config, enough)))


def fixes(price: Estimate, missing: MissingMemory, pricer: Pricer) -> Iterator[Change | str]:
    """Yield what would make a candidate fit, the best first; for a job of all weights adapters only where nothing else
    would.
    """
    job, config = price.job, price.config
    change = smallest_change(config, pricer)
    if change is not None:
        yield change
    if change is None or not trains_all(config):
        yield from _adapters_that_fit(config, pricer)
    if missing.tier == "host":
        needed = format_bytes(held_on_node(price.memory, job.cluster, "host"))
        yield f"host memory of {needed} a node would fit (host_memory_gib in the cluster's file)"
    if (num_gpus := _more_gpus(config, pricer)) is not None:
        yield f"{num_gpus:,} GPUs would fit it, with a batch in proportion"


def _adapters_that_fit(config: ResolvedConfig, pricer: Pricer) -> Iterator[Change]:
    """Yield the adapters that fit, with the base as it is and in 4 bits, where the config has not the same."""
    is_whole = trains_all(config)
    adapters = LoraConfig(rank=16) if is_whole else config.lora
    packed = adapters.model_copy(update={"base": "nf4"})
    for lora, base in ((adapters, ""), (packed, " lora.base=nf4")):
        values = {f"lora.{key}": value for key, value in lora}
        tried = (changed(_on_device(config), values), changed(config, values))  # what is smaller may fit the device
        fitting = next((each for each in tried if _fits(each, pricer)), None)
        change = smallest_change(tried[0], pricer) if fitting is None else Change("", pricer.price(fitting))
        if change is not None and lora != config.lora:
            keys = f"{f'lora.rank={lora.rank}' if is_whole else ''}{base} {change.words}".strip()
            yield replace(change, words=f"adapters{' beside weights in 4 bits' if base else ''} ({keys})")


def _more_gpus(config: ResolvedConfig, pricer: Pricer) -> int | None:
    """Return the GPUs on which a candidate fits, all data ranks sharing it; None where 64 times as many are too few."""
    job = pricer.job
    for factor in _MORE_GPUS:
        larger = replace(job, cluster=_enlarged(job.cluster, factor), global_batch=factor * job.global_batch)
        more = changed(config, {"mesh.dp_shard": factor * config.mesh.dp_shard})
        larger_pricer = Pricer(larger, pricer.margin_share)
        fits = larger_pricer.missing(larger_pricer.memory.estimate(more)) is None
        if fits or smallest_change(_on_device(more), larger_pricer) is not None:
            return larger.cluster.num_gpus
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


def _fits(config: ResolvedConfig, pricer: Pricer) -> bool:
    return is_legal(pricer.job, config) and pricer.missing(pricer.memory.estimate(config)) is None
