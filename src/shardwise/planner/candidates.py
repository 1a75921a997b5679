"""List what the planner may choose from: candidates of parallelism, and for each the placements of its states.

A parallelism candidate says what is computed where and when: mesh, micro-batch, schedule, how sequences are split, what
is recomputed. A placement candidate says where states are stored: ZeRO stage, size of the shard group, tiers. Both are
generated one after the other, and only those that the engine runs.

>>> from shardwise.models.presets import preset
>>> from shardwise.planner.hardware import parse_cluster
>>> from shardwise.planner.job import ModelShape
>>> shape = ModelShape.of_decoder(preset("llama-3-8b"))
>>> job = PlanJob(shape=shape, seq_len=8192, global_batch=16, cluster=parse_cluster("h100:8"))
>>> space = SearchSpace(pins={"pp": (1,), "cp": (1,), "recompute": ("none",), "micro_size": (1,)})
>>> [(each.tp, each.num_micro_batches) for each in candidates(job, space)]
[(1, 2), (2, 4), (4, 8), (8, 16)]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import TiersConfig, ZeroConfig
from shardwise.layout.zero_stages import STAGES, Placement, effective_stage
from shardwise.optim.rules import num_states
from shardwise.planner.configs import KEYS
from shardwise.planner.job import PlanJob, Strategy
from shardwise.schedule.pipelines import RECIPES

ZERO: Final = tuple(ZeroConfig(stage=number) for number in range(len(STAGES)))
"""The config's section with each stage."""
_GRADS_AWAY: Final = TiersConfig(grads="host")
RECOMPUTES: Final[tuple[tuple[Literal["none", "selective", "full"], int], ...]] = (
    ("none", 1),
    ("selective", 1),
    ("full", 4),
    ("full", 2),
    ("full", 1),
)
"""Modes of recomputation, and every how many blocks they apply to; the one that keeps most comes first."""
_MAX_MICRO_SIZE: Final = 64
# All but four of 799 published runs have at most so many; a pin may have more.
_MAX_VIRTUAL_STAGES: Final = 12
# Tokens of a micro-batch on a rank; from here on matrix products gain nothing by being larger.
_MAX_TOKENS: Final = 2**16
# Tokens of a rank's part of a sequence; below it matrix products are too small to be worth a split.
_MIN_TOKENS: Final = 128
# Share of all devices' memory that the states take from which on other memories are tried.
_CROWDED_SHARE: Final = 0.2


class ParallelismCandidate(NamedTuple):
    """Choose what is computed where and when; fields are those of `Strategy`, and `num_data_ranks` of both dp axes."""

    pp: int
    num_data_ranks: int
    cp: int
    tp: int
    sequence_parallel: bool
    transport: str
    heads_over: int | None
    micro_size: int
    num_micro_batches: int
    schedule: str
    virtual_stages: int
    recompute: str
    recompute_every: int

    @property
    def inner(self) -> tuple[Any, ...]:
        """Return the fields that decide how long a rank computes and communicates inside blocks."""
        split = (self.cp, self.tp, self.sequence_parallel, self.transport, self.heads_over)
        return *split, self.micro_size, self.recompute, self.recompute_every


class PlacementCandidate(NamedTuple):
    """Choose where states are stored; fields are those of `Strategy`."""

    zero_stage: int
    dp_shard: int
    gather: str
    params_tier: str
    grads_tier: str
    optimizer_tier: str
    activations_tier: str

    @property
    def tiers(self) -> tuple[str, str, str, str]:
        """Return the tiers of parameters, gradients, optimizer and activations."""
        return self.params_tier, self.grads_tier, self.optimizer_tier, self.activations_tier

    @property
    def is_on_device(self) -> bool:
        """Say whether everything is stored on the device."""
        return set(self.tiers) == {"device"}


def _no_pins() -> Mapping[str, tuple[Any, ...]]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Say which strategies a search may try.

    Attributes:
        base: every strategy has its precision, chunk of tokens and expert ranks.
        pins: by field of the strategy, the values that are allowed, whether or not they would be tried otherwise.
        offloads: whether states may be stored off the devices; None allows it only where the devices are crowded.

    Raises:
        ConfigError: a pin is of no field that the planner chooses.
    """

    base: Strategy = field(default_factory=Strategy)
    pins: Mapping[str, tuple[Any, ...]] = field(default_factory=_no_pins)
    offloads: bool | None = None

    def __post_init__(self) -> None:
        for name in self.pins:
            if name not in KEYS.values():
                raise ConfigError(
                    "key-not-planned",
                    f"{name} is nothing that the planner chooses; it chooses {', '.join(KEYS.values())}",
                )

    def of(self, name: str, default: Sequence[Any]) -> Sequence[Any]:
        """Return the values to try of the field `name`: its pin, else `default`."""
        return self.pins.get(name, default)

    def allows(self, name: str, value: Any) -> bool:
        """Say whether no pin forbids a value."""
        return name not in self.pins or value in self.pins[name]


def candidates(job: PlanJob, space: SearchSpace) -> Iterator[ParallelismCandidate]:
    """Yield every parallelism candidate of a job that the engine runs; all GPUs of the cluster take part."""
    num_gpus = job.cluster.num_gpus
    for tp in _tensor_sizes(job, space):
        for cp, transport, heads_over in _contexts(job, space, tp):
            sequence_parallel = _sequence_parallel(job, space, tp, cp)
            if sequence_parallel is None:
                continue
            split = (cp, tp, sequence_parallel, transport, heads_over)
            for pp in _pipeline_sizes(job, space, num_gpus // (tp * cp)):
                num_data_ranks = num_gpus // (tp * cp * pp)
                if job.global_batch % num_data_ranks:
                    continue
                each_batch = job.global_batch // num_data_ranks
                for micro_size in _micro_sizes(job, space, each_batch, cp):
                    for schedule, virtual_stages in _schedules(job, space, pp):
                        for recompute, every in _recomputes(space):
                            work = (micro_size, each_batch // micro_size, schedule, virtual_stages, recompute, every)
                            yield ParallelismCandidate._make((pp, num_data_ranks, *split, *work))


def why_none(job: PlanJob, space: SearchSpace) -> str:
    """Say why a job has no candidate: a pin without which there is one, or else batch and cluster."""
    none = f"no layout of {job.cluster.num_gpus} GPUs goes with"
    for key, name in KEYS.items():
        if name not in space.pins:
            continue
        fewer = replace(space, pins={other: values for other, values in space.pins.items() if other != name})
        if next(candidates(job, fewer), None) is not None:
            values = ",".join(str(pin).lower() for pin in space.pins[name])
            beside = " beside what else is pinned" if len(space.pins) > 1 else ""
            return f"{none} {key}={values}{beside}; give another value, or leave it out"
    fix = "give a batch that more numbers divide, or pin less"
    return f"{none} a global batch of {job.global_batch} and what is pinned; {fix}"


def placements(job: PlanJob, space: SearchSpace, candidate: ParallelismCandidate) -> tuple[PlacementCandidate, ...]:
    """Return every way to store the states of a candidate, those off the devices last.

    Args:
        space: the pins, and whether states may leave the devices.
    """
    tried = []
    for tiers in _all_tiers(job, space, candidate):
        is_away = tiers[:3] != ("device", "device", "device")
        for stage in space.of("zero_stage", range(len(STAGES))):
            for gather in _gathers(space, candidate, stage):
                for dp_shard in _shard_sizes(job, space, candidate, stage, is_away):
                    placement = PlacementCandidate(stage, dp_shard, gather, *tiers)
                    if _is_legal(space, candidate, placement):
                        tried.append(placement)
    return tuple(tried)


def strategy_at(candidate: ParallelismCandidate, placement: PlacementCandidate, base: Strategy) -> Strategy:
    """Return the strategy of a parallelism candidate and a placement.

    Args:
        base: its precision, chunk of tokens and expert ranks are taken.
    """
    values = candidate._asdict() | placement._asdict()
    num_data_ranks = values.pop("num_data_ranks")
    taken = {name: getattr(base, name) for name in ("param", "reduce", "accumulate", "matmul", "chunk_tokens", "ep")}
    return Strategy(**values, **taken, dp_replicate=num_data_ranks // placement.dp_shard)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*low, *(number // divisor for divisor in low)})


def is_legal(job: PlanJob, strategy: Strategy) -> bool:
    """Say whether the engine runs a strategy on all GPUs of the job, and no other strategy is the same."""
    if strategy.num_ranks != job.cluster.num_gpus or strategy.global_batch != job.global_batch:
        return False
    pins = {name: (getattr(strategy, name),) for name in KEYS.values()}
    names = ("param", "reduce", "accumulate", "chunk_tokens")
    space = SearchSpace(base=strategy, pins={key: value for key, value in pins.items() if key not in names})
    return any(placements(job, space, candidate) for candidate in candidates(job, space))


def are_states_crowded(job: PlanJob, base: Strategy) -> bool:
    """Say whether the states take much of the devices' memory, even where all devices share them."""
    _, moments = num_states(job.optimizer)
    state_bytes = (8.0 if base.param in ("bf16", "fp16") else 12.0) + 4.0 * moments
    return state_bytes * job.shape.num_params / job.cluster.num_gpus > _CROWDED_SHARE * job.cluster.gpu.memory_bytes


def _tensor_sizes(job: PlanJob, space: SearchSpace) -> list[int]:
    shape, gpu = job.shape, job.cluster.gpu
    domain = max(job.cluster.gpus_per_node, gpu.link_domain if gpu.link_bytes_per_s else 1)
    ffn_sizes = {shape.ffn_size} if shape.experts is None else {shape.experts.ffn_size}
    return [
        tp
        for tp in space.of("tp", [degree for degree in divisors(shape.num_heads) if degree <= domain])
        if shape.num_heads % tp == 0
        and (shape.num_kv_heads % tp == 0 or tp % shape.num_kv_heads == 0)
        and all(size % tp == 0 for size in ffn_sizes)
        and job.cluster.num_gpus % tp == 0
        and (tp == 1 or job.lora.base == "keep")  # a packed matrix cannot be split
    ]


def _contexts(job: PlanJob, space: SearchSpace, tp: int) -> Iterator[tuple[int, str, int | None]]:
    """Yield (cp, transport, heads_over): how sequences are split; with cp above 1, each rank needs two equal parts of
    them.
    """
    domain = max(1, job.cluster.gpus_per_node // tp)
    most = min(job.cluster.num_gpus // tp, job.seq_len // _MIN_TOKENS)
    sizes = [1, *(size for size in (2**power for power in range(1, 12)) if size <= most)]
    for cp in space.of("cp", sizes):
        if (job.cluster.num_gpus // tp) % cp or (cp > 1 and job.seq_len % (2 * cp)):
            continue
        if cp == 1:
            if space.allows("transport", "ring") and space.allows("heads_over", None):
                yield 1, "ring", None
            continue
        for transport in space.of("transport", ("ring", "all-gather", "ulysses")):
            if transport == "ulysses":
                if _exchanges(job, tp, cp) and space.allows("heads_over", None):
                    yield cp, transport, None
                continue
            teams = [
                degree
                for degree in divisors(cp)
                if 1 < degree < cp and (degree <= domain or "heads_over" in space.pins) and _exchanges(job, tp, degree)
            ]
            tried = [None, *(teams[-1:] if transport == "ring" else [])]
            for team in space.of("heads_over", tried):
                if team is None or team in teams:
                    yield cp, transport, team


def _exchanges(job: PlanJob, tp: int, size: int) -> bool:
    """Say whether `size` ranks can exchange heads; source: `shardwise.context.ulysses`."""
    own_heads, own_kv = job.shape.num_heads // tp, max(1, job.shape.num_kv_heads // tp)
    return own_heads % size == 0 and (own_kv % size == 0 or size % own_kv == 0)


def _sequence_parallel(job: PlanJob, space: SearchSpace, tp: int, cp: int) -> bool | None:
    """Return True wherever possible, as it saves memory at equal bytes on the wire; None where pins forbid all."""
    can_be = tp > 1 and job.seq_len % (tp * cp) == 0
    wanted = can_be if space.allows("sequence_parallel", can_be) else not can_be
    return wanted if space.allows("sequence_parallel", wanted) and (can_be or not wanted) else None


def _pipeline_sizes(job: PlanJob, space: SearchSpace, num_ranks: int) -> list[int]:
    most = min(num_ranks, job.shape.num_layers + 2)  # the embedding and the head may be stages of their own
    sizes = [size for size in divisors(num_ranks) if size <= most]
    return [size for size in space.of("pp", sizes) if size in sizes]


def _micro_sizes(job: PlanJob, space: SearchSpace, each_batch: int, cp: int) -> list[int]:
    most = min(_MAX_MICRO_SIZE, max(1, _MAX_TOKENS * cp // job.seq_len))
    sizes = [size for size in divisors(each_batch) if space.allows("num_micro_batches", each_batch // size)]
    return [size for size in sizes if size in space.of("micro_size", range(1, most + 1))]


def _schedules(job: PlanJob, space: SearchSpace, pp: int) -> Iterator[tuple[str, int]]:
    if pp == 1:
        if space.allows("virtual_stages", 1):
            yield "1f1b", 1
        return
    num_layers = job.shape.num_layers
    splits_weights = not job.traits.is_compiled and space.base.chunk_tokens is None
    for schedule in space.of("schedule", [name for name, recipe in RECIPES.items() if recipe.least_bubble_share]):
        recipe = RECIPES[schedule]
        if recipe.splits_backward and not splits_weights:
            continue
        most = (num_layers + 2) // pp
        numbers = [recipe.min_virtual_stages]
        if recipe.is_interleaved:
            tried = range(2, min(most, _MAX_VIRTUAL_STAGES) + 1)
            numbers = [v for v in tried if v in (2, 4) or 0 in (num_layers % (pp * v), (num_layers + 2) % (pp * v))]
        for virtual_stages in space.of("virtual_stages", numbers):
            if recipe.min_virtual_stages <= virtual_stages <= min(most, recipe.max_virtual_stages or most):
                yield schedule, virtual_stages


def _recomputes(space: SearchSpace) -> list[tuple[str, int]]:
    if "recompute_every" in space.pins:
        modes = space.of("recompute", ("none", "selective", "full"))
        pairs = [(mode, every) for mode in modes for every in space.pins["recompute_every"]]
        return [(mode, every) for mode, every in pairs if mode != "none" or every == 1]
    return [(mode, every) for mode, every in RECOMPUTES if space.allows("recompute", mode)]


def _all_tiers(job: PlanJob, space: SearchSpace, candidate: ParallelismCandidate) -> list[tuple[str, str, str, str]]:
    """Return the tiers to try of parameters, gradients, optimizer and activations, the device first."""
    names = ("params_tier", "grads_tier", "optimizer_tier", "activations_tier")
    ladder = [("device", "device", "device")]
    offloads = are_states_crowded(job, space.base) if space.offloads is None else space.offloads
    if offloads:
        ladder += [("device", "device", "host"), ("device", "host", "host"), ("host", "host", "host")]
        if job.cluster.host.nvme_bytes:
            ladder += [("device", "host", "nvme"), ("host", "host", "nvme"), ("nvme", "host", "nvme")]
    # A block's input is a small part of what selective recomputation keeps, so moving it is tried only where pinned.
    activations = ["device", "host"] if candidate.recompute == "full" and offloads else ["device"]
    tried = [(*states, activations_tier) for states in ladder for activations_tier in activations]
    if any(name in space.pins for name in names):
        options = [
            space.of(name, sorted({combination[index] for combination in tried})) for index, name in enumerate(names)
        ]
        tried = sorted(set(product(*options)), key=lambda each: (sum(tier != "device" for tier in each), each))
    return tried


def _gathers(space: SearchSpace, candidate: ParallelismCandidate, stage: int) -> Sequence[str]:
    if candidate.pp == 1 or not STAGES[stage].unshard_for_use:
        return [way for way in ("batch",) if space.allows("gather", way)]
    return space.of("gather", ("batch", "micro-batch"))


def _shard_sizes(
    job: PlanJob, space: SearchSpace, candidate: ParallelismCandidate, stage: int, is_away: bool
) -> list[int]:
    """Return the sizes to try of the group that shares states: a node's ranks, those of some nodes, all."""
    every = divisors(candidate.num_data_ranks)
    if (near := job.zero.secondary_shard) and STAGES[stage].unshard_for_use:
        every = [size for size in every if size * candidate.cp <= near or size * candidate.cp % near == 0]
    if "dp_shard" in space.pins or "dp_replicate" in space.pins:
        return [
            size
            for size in every
            if space.allows("dp_shard", size) and space.allows("dp_replicate", candidate.num_data_ranks // size)
        ]
    if stage == 0:
        return every[-1:]
    if len(every) > 3:
        in_node = max(1, job.cluster.gpus_per_node // (candidate.cp * candidate.tp))
        sizes = {in_node, 4 * in_node, 32 * in_node}
        every = sorted(
            {max(divisor for divisor in every if divisor <= size) for size in sizes} | {candidate.num_data_ranks}
        )
    return [
        size for size in every if size * candidate.cp > 1 or (is_away and candidate.num_data_ranks * candidate.cp == 1)
    ]


def _is_legal(space: SearchSpace, candidate: ParallelismCandidate, placement: PlacementCandidate) -> bool:
    """Say no to what the engine refuses, and to what it runs as another stage's strategy."""
    is_away, stage = placement.tiers[:3] != ("device", "device", "device"), STAGES[placement.zero_stage]
    if is_away and stage.optimizer is not Placement.SHARD:
        return False
    if placement.params_tier != "device" and not stage.unshard_for_use:
        return False
    if placement.activations_tier != "device" and candidate.recompute == "none":
        return False  # only the inputs of blocks that run again are moved
    if "zero_stage" in space.pins:
        return True
    if is_away and candidate.num_data_ranks * candidate.cp == 1:  # nothing is split: stages differ in what may be away
        least = 3 if placement.params_tier != "device" else 2 if placement.grads_tier != "device" else 1
        return placement.zero_stage == least
    tiers = _GRADS_AWAY if placement.grads_tier != "device" else None
    return effective_stage(ZERO[placement.zero_stage], 2, tiers, is_scheduled=candidate.pp > 1) is stage
