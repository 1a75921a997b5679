"""Hold what the planner finds (memory of a rank by category, time of a step by part), and say it in a few words.

>>> rank = RankMemory(pipeline_rank=0, at_rest={"param": 4}, peak={"params": 4.0, "activations": 6.0})
>>> rank.peak_bytes
10.0
>>> from shardwise.config.resolve import Config
>>> split = {"mesh": {"tp": 8, "pp": 4}, "tensor": {"sequence_parallel": True}, "batch": {"accumulation": 16}}
>>> print(layout_words(Config.from_dict({**split, "zero": {"stage": 1}}).resolve(512)))
TP 8+SP, PP 4 1f1b, ZeRO-1 over 16, micro-batch 1 x 16
>>> away = {"zero": {"stage": 1}, "tiers": {"optimizer": "host", "optimizer_on_device": 0.5}}
>>> print(layout_words(Config.from_dict(away).resolve(8)))
ZeRO-1 over 8, micro-batch 1, optimizer but 50 % on host
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

from shardwise.config.resolve import ResolvedConfig, Tier
from shardwise.layout.zero_stages import STAGES
from shardwise.planner.hardware import Cluster
from shardwise.planner.job import PlanJob, product_dtype, trains_all
from shardwise.runtime.format import format_count, three_digits
from shardwise.schedule.pipelines import recipe_of


class TimePart(NamedTuple):
    """Say what people call a part of a step, what limits a step by it, and in which part of a timeline it is."""

    label: str
    limit: str
    timeline: str


TIME_PARTS: Final[Mapping[str, TimePart]] = MappingProxyType(
    {
        "compute": TimePart("compute", "compute", "compute"),
        "recompute": TimePart("recomputation", "memory", "compute"),
        "tensor": TimePart("exposed tensor exchange", "links", "compute"),
        "context": TimePart("exposed context exchange", "links", "compute"),
        "experts": TimePart("exposed experts' exchange", "links", "compute"),
        "bubble": TimePart("bubble", "pipeline", "bubble"),  # transfers between stages included
        "data": TimePart("exposed gathers and reductions", "links", "data"),
        "offload": TimePart("exposed offload", "memory", "offload"),
        "step": TimePart("optimizer step", "memory", "step"),
        "other": TimePart("waiting for the slowest", "", "other"),
    }
)
"""The planner's parts of a step; what a block exchanges is part of its forward in a timeline."""

TIMELINE_PARTS: Final = tuple(dict.fromkeys(entry.timeline for entry in TIME_PARTS.values()))


class MemoryPart(NamedTuple):
    """Say how a part of a peak is drawn, and in which of the memory tracker's categories it is.

    Attributes:
        colour: that the eight of every terminal have, or near to one.
        category: its value; empty for what the tracker does not see.
    """

    sign: str
    colour: str
    category: str = ""


Marks = Mapping[str, MemoryPart]
MEMORY_PARTS: Final[Marks] = MappingProxyType(
    {
        "params": MemoryPart("p", "blue", "parameters"),
        "grads": MemoryPart("g", "green", "gradients"),
        "optimizer": MemoryPart("o", "magenta", "optimizer"),
        "gathered": MemoryPart("u", "bright_blue", "gathered"),  # parameters unsharded for use
        "buckets": MemoryPart("b", "bright_green", "buckets"),  # gradients until their reduction, and what that needs
        "activations": MemoryPart("a", "yellow", "activations"),
        "logits": MemoryPart("l", "red", "activations"),
        "workspace": MemoryPart("w", "cyan", "other"),  # of attention, of the backward's own tensors, of the step
        "overhead": MemoryPart("c", "white"),  # the device's context, communicators
        "rounding": MemoryPart("r", "bright_black"),  # of the allocator
    }
)
"""The planner's parts of the memory at a peak."""


def parts_of(category: str) -> tuple[str, ...]:
    """Return the parts that the memory tracker counts in a category.

    >>> parts_of("activations")
    ('activations', 'logits')
    """
    return tuple(name for name, entry in MEMORY_PARTS.items() if entry.category == category)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Hold the bytes of each rank at one place of the pipeline.

    Attributes:
        at_rest: by role, as `Layout.bytes_at_rest` gives it, of all tiers.
        peak: of the device at the highest moment of a step, by `MEMORY_PARTS`.
        elsewhere: stored in other memories, by tier.
        is_simulated: whether the tensors of the peak are the engine's own, simulated, and not the model's estimate.
    """

    pipeline_rank: int
    at_rest: Mapping[str, int]
    peak: Mapping[str, float]
    elsewhere: Mapping[Tier, float] = field(default_factory=dict)
    is_simulated: bool = False

    @property
    def peak_bytes(self) -> float:
        """Return the bytes of the device at the peak, all categories."""
        return sum(self.peak.values())

    def bytes_of(self, *parts: str) -> float:
        """Return the bytes of some parts together."""
        return sum(self.peak.get(part, 0.0) for part in parts)


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Hold the memory of one rank at each place of the pipeline."""

    ranks: tuple[RankMemory, ...]

    @property
    def worst(self) -> RankMemory:
        """Return the rank with the highest peak; once a rank was simulated, that one."""
        return max(self.ranks, key=lambda each: (each.is_simulated, each.peak_bytes))


@dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """Hold the seconds of an optimizer step.

    Attributes:
        low_s, high_s: four of five runs are expected between these.
        parts: of the step, by `TIME_PARTS`; their sum is `step_s`.
        bubble_rate: the share of a pipeline's span in which a rank neither computes nor communicates, by Qi et al.
            2023 (arXiv 2401.10241), section 2.3; None without a pipeline.
        kind: what the interval comes from, as `step_time.kind_of` says; empty where none was asked.
    """

    step_s: float
    low_s: float
    high_s: float
    parts: Mapping[str, float]
    bubble_rate: float | None = None
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Hold the price of one candidate."""

    job: PlanJob
    config: ResolvedConfig
    memory: MemoryEstimate
    time: TimeEstimate

    @property
    def layout(self) -> str:
        """Return the candidate on one line."""
        return layout_words(self.config)

    @property
    def margin_bytes(self) -> float:
        """Return the device memory that is left on the worst rank; below 0 where it does not fit."""
        return self.job.cluster.gpu.memory_bytes - self.memory.worst.peak_bytes

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Return the job's tokens a second, divided by the number of devices."""
        return self.job.tokens / self.time.step_s / self.job.cluster.num_gpus

    @property
    def usd_per_step(self) -> float | None:
        """Return the dollars of all devices for one step; None where their price is not known."""
        cluster = self.job.cluster
        return cluster.gpu.price_per_hour * cluster.num_gpus * self.time.step_s / 3600 or None

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Return the dollars of all devices for a million tokens; None where their price is not known."""
        return None if self.usd_per_step is None else self.usd_per_step / self.job.tokens * 1e6

    def mfu(self, *, is_causal_halved: bool = False) -> float | None:
        """Return model FLOPs over the device's peak in the matrix products' dtype; None where that is not known.

        Args:
            is_causal_halved: whether keys after a query are left out; by default all keys of attention count.
        """
        peak = self.job.cluster.gpu.peak_flops_per_s.get(product_dtype(self.config))
        shape, is_whole = self.job.shape, trains_all(self.config)
        flops = shape.flops_per_token(self.job.seq_len, is_causal_halved=is_causal_halved, trains_all=is_whole)
        return flops * self.tokens_per_s_per_gpu / peak if peak else None


TIE_SHARE: Final = 0.02
"""Share of a step's time by which a simpler candidate may be slower than the fastest and still be preferred."""


def num_extras(s: ResolvedConfig) -> int:
    """Count axes beyond the data-parallel one, schedules beyond 1F1B, memories beyond the device, and the like.

    Each doubling of a context axis counts, and of virtual stages beyond two.
    """
    tiers = (s.tiers.params, s.tiers.grads, s.tiers.optimizer, s.tiers.activations)
    extras = (s.mesh.pp > 1) + (s.mesh.tp > 1) + (s.mesh.cp - 1).bit_length()
    extras += s.mesh.cp > 1 and (s.context.heads_over is not None or s.context.transport != "ring")
    extras += (
        (s.mesh.pp > 1 and s.pipeline.schedule != "1f1b")
        + recipe_of(s.pipeline.schedule).splits_backward
        + (s.recompute.every > 1)
    )
    extras += max(0, (s.pipeline.virtual_stages - 1).bit_length() - 1)
    extras += sum(tier != "device" for tier in tiers) + tiers.count("nvme") + (s.context.chunk_tokens is not None)
    return extras + (max(s.tiers.params_on_device, s.tiers.grads_on_device, s.tiers.optimizer_on_device) > 0)


def simplest(prices: Iterable[Estimate]) -> Estimate:
    """Return the simplest of those within `TIE_SHARE` of the fastest, and of equally simple ones the fastest."""
    every = list(prices)
    least_s = min(price.time.step_s for price in every)
    tied = [price for price in every if price.time.step_s <= (1 + TIE_SHARE) * least_s]
    return min(tied, key=lambda price: (num_extras(price.config), price.time.step_s))


def by_timeline_part(parts: Mapping[str, float]) -> dict[str, float]:
    """Sum the planner's parts into those of a timeline."""
    sums = dict.fromkeys(TIMELINE_PARTS, 0.0)
    for name, entry in TIME_PARTS.items():
        sums[entry.timeline] += parts.get(name, 0.0)
    return sums


USUAL_MARGIN: Final = 0.06
"""Share of a device's memory that is kept free: what no estimate sees, such as fragments and other processes."""


@dataclass(frozen=True)
class MissingMemory:
    """Say how many bytes a memory lacks: the device of the fullest rank, or a node's host memory or disks."""

    tier: Tier
    missing_bytes: float


def usable_bytes(cluster: Cluster, margin_share: float) -> float:
    """Return the bytes of a device's memory, without the share `margin_share` that stays free."""
    return cluster.gpu.memory_bytes * (1 - margin_share)


def held_on_node(memory: MemoryEstimate, cluster: Cluster, tier: Tier) -> float:
    """Return the bytes of `tier` on a node of `cluster`, if all its ranks hold as much as the fullest of `memory`."""
    return max(rank.elsewhere.get(tier, 0.0) for rank in memory.ranks) * cluster.gpus_per_node


def missing_on_node(memory: MemoryEstimate, cluster: Cluster, margin_share: float) -> float:
    """Return the bytes that all memories of a node lack together; the arguments are those of `missing_memory`."""
    lacking = _lacking(memory, cluster, margin_share)
    return sum(lack.missing_bytes * (cluster.gpus_per_node if lack.tier == "device" else 1) for lack in lacking)


def missing_memory(memory: MemoryEstimate, cluster: Cluster, margin_share: float) -> MissingMemory | None:
    """Return what is missing, of the device first; None where all fits.

    The ranks of a node of `cluster` share its host memory and disks. Of a device `margin_share` is to stay free.
    """
    return next(_lacking(memory, cluster, margin_share), None)


def _lacking(memory: MemoryEstimate, cluster: Cluster, margin_share: float) -> Iterator[MissingMemory]:
    missing = memory.worst.peak_bytes - usable_bytes(cluster, margin_share)
    if missing > 0:
        yield MissingMemory("device", missing)
    of_node: tuple[tuple[Tier, float], ...]
    of_node = (("host", cluster.host.memory_bytes), ("nvme", cluster.host.nvme_bytes))
    for tier, size in of_node:
        missing = held_on_node(memory, cluster, tier) - size
        if missing > 0:
            yield MissingMemory(tier, missing)


def layout_words(config: ResolvedConfig) -> str:
    """Write a candidate on one line; what has its usual value is left out."""
    return ", ".join(_layout_parts(config))


def _layout_parts(s: ResolvedConfig) -> Iterator[str]:
    if s.mesh.tp > 1:
        yield f"TP {s.mesh.tp}+SP" if s.tensor.sequence_parallel else f"TP {s.mesh.tp}"
    if s.mesh.pp > 1:
        yield f"PP {s.mesh.pp} {s.pipeline.schedule}" + (
            f" ({s.pipeline.virtual_stages} virtual stages)" if s.pipeline.schedule == "interleaved" else ""
        )
    if s.mesh.cp > 1:
        heads = (
            f" with Ulysses over {s.context.heads_over}"
            if s.context.heads_over and s.context.transport != "ulysses"
            else ""
        )
        yield f"CP {s.mesh.cp} {s.context.transport}{heads}"
    if s.mesh.ep > 1:
        yield f"EP {s.mesh.ep}"
    yield from _data_parts(s)
    yield f"micro-batch {s.batch.micro_size}" + (f" x {s.batch.accumulation}" if s.batch.accumulation > 1 else "")
    if s.recompute.mode != "none":
        every = f" every {s.recompute.every}" if s.recompute.every > 1 else ""
        yield f"recompute {s.recompute.mode}{every}"
    placed = (
        ("params", s.tiers.params, s.tiers.params_on_device),
        ("grads", s.tiers.grads, s.tiers.grads_on_device),
        ("optimizer", s.tiers.optimizer, s.tiers.optimizer_on_device),
        ("activations", s.tiers.activations, 0.0),
    )
    for tier in ("host", "nvme"):
        states = [f"{name} but {100 * share:.0f} %" if share else name for name, of, share in placed if of == tier]
        if states:
            yield f"{' and '.join(states)} on {tier}"


def _data_parts(s: ResolvedConfig) -> Iterator[str]:
    num_shards, replicas = s.mesh.dp_shard * s.mesh.cp, s.mesh.dp_replicate
    if num_shards * replicas == 1:
        return
    if s.zero.stage == 0:
        yield f"DDP over {num_shards * replicas}"
        return
    gathers_each_time = STAGES[s.zero.stage].unshard_for_use and s.mesh.pp > 1 and s.pipeline.gather == "micro-batch"
    each_time = " each micro-batch" if gathers_each_time else ""
    yield f"ZeRO-{s.zero.stage} over {num_shards}" + (f" x {replicas} replicas" if replicas > 1 else "") + each_time


def money_words(dollars: float) -> str:
    """Write an amount of dollars in three digits.

    >>> money_words(1.834), money_words(36_740), money_words(2_180_000), money_words(0.00214)
    ('$1.83', '$36.7 k', '$2.18 M', '$0.0021')
    """
    if dollars < 1:
        return f"${dollars:.2g}"
    return f"${three_digits(dollars)}" if dollars < 1e3 else f"${format_count(dollars)}"
