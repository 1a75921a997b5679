"""List what the planner may choose from: resolved configs that the engine runs, each made of `PlanJob.base`.

The walk has an order of keys. A `Family` has what is computed and exchanged inside blocks: how tokens and heads are
split, the micro-batch, what is recomputed. Its members differ in the pipeline over which blocks are laid. Last come the
placements of states: ZeRO stage, size of the shard group, tiers.

>>> from shardwise.models.presets import preset
>>> from shardwise.planner.hardware import parse_cluster
>>> from shardwise.models.shape import ModelShape
>>> shape = ModelShape.of_decoder(preset("llama-3-8b"))
>>> job = PlanJob(shape=shape, seq_len=8192, global_batch=16, cluster=parse_cluster("h100:8"))
>>> space = SearchSpace(pins={"mesh.pp": (1,), "mesh.cp": (1,), "recompute.mode": ("none",), "batch.micro_size": (1,)})
>>> [(each.mesh.tp, each.batch.accumulation) for each in candidates(job, space)]
[(1, 2), (2, 4), (4, 8), (8, 16)]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Any, Final, Literal

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import ResolvedConfig, TiersConfig, ZeroConfig
from shardwise.config.sections import ContextConfig, PipelineConfig
from shardwise.layout.param_groups import check_blocks
from shardwise.layout.precision import DTYPE_BYTES, precision_policy
from shardwise.layout.tp_sharding import expert_split
from shardwise.layout.zero_stages import STAGES, Placement, effective_stage
from shardwise.models.shape import ModelShape, UnitKind, with_adapters
from shardwise.optim.rules import num_states
from shardwise.planner.job import PlanJob, changed, num_data_ranks, param_of, trains_all, world_size
from shardwise.schedule.formulas import least_bubble_share
from shardwise.schedule.pipelines import RECIPES

Values = Mapping[str, Any]
"""Values of keys of the config."""

_STATES: Final = ("params", "grads", "optimizer")
_LEAVES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "mesh": ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"),
        "zero": ("stage",),
        "batch": ("micro_size", "accumulation"),
        "pipeline": ("schedule", "virtual_stages", "gather"),
        "tensor": ("sequence_parallel",),
        "context": ("transport", "heads_over"),
        "recompute": ("mode", "every"),
        "tiers": ("params", "grads", "optimizer", "activations", *(f"{name}_on_device" for name in _STATES)),
    }
)
PLANNED: Final = tuple(f"{section}.{leaf}" for section, leaves in _LEAVES.items() for leaf in leaves)
"""The keys that the planner chooses, unless they are pinned."""
_NO_PIPELINE: Final = MappingProxyType({f"pipeline.{key}": value for key, value in PipelineConfig()})
_NO_CONTEXT: Final = MappingProxyType(
    {f"context.{key}": value for key, value in ContextConfig() if key != "chunk_tokens"}
)
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
# Larger groups of experts than fit inside a node, which are tried.
_MOST_FAR: Final = 2
# All but four of 799 published runs have at most so many; a pin may have more.
_MAX_VIRTUAL_STAGES: Final = 12
# Tokens of a micro-batch on a rank; from here on matrix products gain nothing by being larger.
_MAX_TOKENS: Final = 2**16
# Tokens of a rank's part of a sequence; below it matrix products are too small to be worth a split.
_MIN_TOKENS: Final = 128
# Share of all devices' memory that the states take from which on other memories are tried.
_CROWDED_SHARE: Final = 0.2


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Say which candidates a search may try.

    Attributes:
        pins: allowed values, by key of the config; keys that are missing here are free.
        offloads: whether states may be stored off the devices; None where they take much of them.
    """

    pins: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    offloads: bool | None = None

    def of(self, name: str, default: Sequence[Any]) -> Sequence[Any]:
        """Return the values to try of the key `name`: its pin, else `default`."""
        return self.pins.get(name, default)

    def allows(self, name: str, value: Any) -> bool:
        """Say whether no pin forbids a value."""
        return name not in self.pins or value in self.pins[name]


@dataclass(frozen=True)
class Family:
    """Hold candidates that compute and exchange the same inside blocks, and differ in the pipeline.

    Attributes:
        pipelines: the least share of a bubble and the other keys of each, the least share first.
    """

    base: ResolvedConfig
    pipelines: tuple[tuple[float, Values], ...]

    def member(self, index: int) -> ResolvedConfig:
        """Return a candidate, whose states are on the devices, shared by all data ranks."""
        return changed(self.base, self.pipelines[index][1])


def families(job: PlanJob, space: SearchSpace, base: ResolvedConfig | None = None) -> Iterator[Family]:
    """Yield every candidate of a job that the engine runs, by family; all GPUs of the cluster take part.

    Args:
        base: what candidates have of keys that are not planned; None takes the job's.
    """
    base, num_gpus, bubble_of = base or job.base, job.cluster.num_gpus, cache(least_bubble_share)
    for tp in _tensor_sizes(job, space, base):
        for context in _contexts(job, space, tp):
            cp = context["mesh.cp"]
            sequence_parallel = _sequence_parallel(job, space, tp, cp)
            if sequence_parallel is None:
                continue
            split = {"mesh.tp": tp, **context, "tensor.sequence_parallel": sequence_parallel}
            by_work: dict[tuple[int, int], list[tuple[float, Values]]] = {}
            for pp in _pipeline_sizes(job, space, num_gpus // (tp * cp)):
                data_ranks = num_gpus // (tp * cp * pp)
                if job.global_batch % data_ranks:
                    continue
                each_batch = job.global_batch // data_ranks
                mesh = {"mesh.pp": pp, "mesh.dp_shard": data_ranks, "mesh.dp_replicate": 1}
                schedules, sizes = list(_schedules(job, space, pp, base)), _micro_sizes(job, space, each_batch, cp)
                for ep, micro_size in product(_expert_sizes(job, space, base, num_gpus // pp), sizes):
                    count = each_batch // micro_size
                    by_work.setdefault((ep, micro_size), []).extend(
                        (
                            bubble_of(schedule["pipeline.schedule"], pp, count, schedule["pipeline.virtual_stages"]),
                            {**mesh, "batch.accumulation": count, **schedule},
                        )
                        for schedule in schedules
                    )
            for (ep, micro_size), pipelines in by_work.items():
                members = tuple(sorted(pipelines, key=lambda one: one[0]))
                for mode, every in _recomputes(space) if members else ():
                    work = {"batch.micro_size": micro_size, "recompute.mode": mode, "recompute.every": every}
                    yield Family(changed(base, {**split, "mesh.ep": ep, **work}), members)


def candidates(job: PlanJob, space: SearchSpace, base: ResolvedConfig | None = None) -> Iterator[ResolvedConfig]:
    """Yield the members of all families; the arguments are those of `families`."""
    for family in families(job, space, base):
        yield from map(family.member, range(len(family.pipelines)))


def why_none(job: PlanJob, space: SearchSpace) -> str:
    """Say why a job has no candidate: a pin without which there is one, or else batch and cluster."""
    none = f"no layout of {job.cluster.num_gpus} GPUs goes with"
    for key in PLANNED:
        if key not in space.pins:
            continue
        fewer = replace(space, pins={other: values for other, values in space.pins.items() if other != key})
        if next(families(job, fewer), None) is not None:
            values = ",".join(str(pin).lower() for pin in space.pins[key])
            beside = " beside what else is pinned" if len(space.pins) > 1 else ""
            return f"{none} {key}={values}{beside}; give another value, or leave it out"
    fix = "give a batch that more numbers divide, or pin less"
    return f"{none} a global batch of {job.global_batch} and what is pinned; {fix}"


def placements(job: PlanJob, space: SearchSpace, config: ResolvedConfig) -> Iterator[Values]:
    """Yield every way to store the states of a candidate, as changes of it, those off the devices last."""
    for tiers in _all_tiers(job, space, config):
        is_away = any(tiers[name] != "device" for name in _STATES)
        of_tiers: dict[str, Any] = {f"tiers.{name}": tier for name, tier in tiers.items()}
        of_tiers["tiers.nvme_path"] = (config.tiers.nvme_path or "nvme") if "nvme" in tiers.values() else None
        for stage in space.of("zero.stage", range(len(STAGES))):
            if not _is_legal(space, config, stage, tiers):
                continue
            for gather in _gathers(space, config, stage):
                for dp_shard in _shard_sizes(job, space, config, stage, is_away):
                    mesh = {"mesh.dp_shard": dp_shard, "mesh.dp_replicate": num_data_ranks(config) // dp_shard}
                    near = _secondary_shard(config, stage, tiers["params"], dp_shard * config.mesh.cp)
                    zero = {"zero.stage": stage, "zero.secondary_shard": near}
                    yield {**zero, **mesh, "pipeline.gather": gather, **of_tiers}


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*low, *(number // divisor for divisor in low)})


def is_legal(job: PlanJob, config: ResolvedConfig) -> bool:
    """Say whether the engine runs a config on all GPUs of the job, and no other candidate is the same."""
    if world_size(config) != job.cluster.num_gpus or config.batch.global_size != job.global_batch:
        return False
    leaves = {key: key.split(".") for key in PLANNED}
    space = SearchSpace(pins={key: (getattr(getattr(config, name), leaf),) for key, (name, leaf) in leaves.items()})
    return any(any(placements(job, space, candidate)) for candidate in candidates(job, space, config))


def are_states_crowded(job: PlanJob, base: ResolvedConfig) -> bool:
    """Say whether the states take much of the devices' memory, even where all devices share them."""
    _, moments = num_states(base.optimizer.name)
    state_bytes = (8.0 if param_of(base) in ("bf16", "fp16") else 12.0) + 4.0 * moments
    return state_bytes * job.shape.num_params / job.cluster.num_gpus > _CROWDED_SHARE * job.cluster.gpu.memory_bytes


def _expert_sizes(job: PlanJob, space: SearchSpace, base: ResolvedConfig, num_ranks: int) -> list[int]:
    """Return over how many of the ranks of a stage experts are divided, the most within a node first."""
    experts = job.shape.experts
    if experts is None or base.compile.enabled:  # compiled blocks have no divided experts
        return [ep for ep in space.of("mesh.ep", (1,)) if ep == 1]
    common = divisors(math.gcd(experts.num_experts, num_ranks))
    legal = [ep for ep in common if not _cuts_blocks(job.shape, base, 1, ep)]
    if "mesh.ep" in space.pins:
        return [ep for ep in space.pins["mesh.ep"] if ep in legal]
    near = max(ep for ep in legal if ep <= _link_domain(job))
    # Experts that are all on each rank are worth a try where a device has the memory for them.
    is_small = DTYPE_BYTES[param_of(base)] * job.shape.num_expert_params < job.cluster.gpu.memory_bytes
    return [near, *[ep for ep in legal if ep > near][:_MOST_FAR], *[1] * (near > 1 and is_small)]


def _link_domain(job: PlanJob) -> int:
    """Return how many devices fast links join."""
    gpu = job.cluster.gpu
    return max(job.cluster.gpus_per_node, gpu.link_domain if gpu.link_bytes_per_s else 1)


def _tensor_sizes(job: PlanJob, space: SearchSpace, base: ResolvedConfig) -> list[int]:
    shape, domain = job.shape, _link_domain(job)
    return [
        tp
        for tp in space.of("mesh.tp", [degree for degree in divisors(shape.num_heads) if degree <= domain])
        if shape.num_heads % tp == 0
        and (shape.num_kv_heads % tp == 0 or tp % shape.num_kv_heads == 0)
        and _split_ffn_size(shape) % tp == 0
        and not (tp > 1 and base.compile.enabled and shape.experts)
        and job.cluster.num_gpus % tp == 0
        and (tp == 1 or base.lora.base == "keep")  # a packed matrix cannot be split
        and not (tp > 1 and _cuts_blocks(shape, base, tp))
    ]


def _split_ffn_size(shape: ModelShape) -> int:
    """Return what tp divides of feed-forwards: experts are whole."""
    experts = shape.experts
    of_dense = shape.ffn_size if experts is None or experts.num_dense_layers else 0
    return math.gcd(of_dense, experts.num_shared * experts.ffn_size if experts else 0)


def _cuts_blocks(shape: ModelShape, base: ResolvedConfig, tp: int, ep: int = 1) -> bool:
    """Say whether a degree cuts the blocks of codes, which the engine refuses."""
    keys = precision_policy(base.precision).block_keys[:1]
    if not keys:
        return False
    units: list[UnitKind] = [kind for kind, count in shape.blocks.items() if count]
    params = {
        f"{kind}.{param.name}": param
        for kind in (*units, "tokens", "head")
        for param in with_adapters(shape.params_of(kind), base.lora)
    }
    try:
        for key in keys:
            check_blocks({name: param.split(tp) for name, param in params.items()}, "tp", key)
            of_experts = ((name, param.shape, param.experts) for name, param in params.items() if param.experts)
            check_blocks({name: expert_split(shape, experts, ep) for name, shape, experts in of_experts}, "ep", key)
    except ConfigError:
        return True
    return False


def _contexts(job: PlanJob, space: SearchSpace, tp: int) -> Iterator[Values]:
    """Yield how sequences are split; with mesh.cp above 1, each rank needs two equal parts of them."""
    domain = max(1, job.cluster.gpus_per_node // tp)
    most = min(job.cluster.num_gpus // tp, job.seq_len // _MIN_TOKENS)
    is_pinned = "context.heads_over" in space.pins
    sizes = [1, *(size for size in (2**power for power in range(1, 12)) if size <= most)]
    for cp in space.of("mesh.cp", sizes):
        if (job.cluster.num_gpus // tp) % cp or (cp > 1 and job.seq_len % (2 * cp)):
            continue
        if cp == 1:
            if space.allows("context.transport", "ring") and space.allows("context.heads_over", None):
                yield {"mesh.cp": 1, **_NO_CONTEXT}
            continue
        for transport in space.of("context.transport", ("ring", "all-gather", "ulysses")):
            if transport == "ulysses":
                if _exchanges(job, tp, cp) and space.allows("context.heads_over", None):
                    yield {"mesh.cp": cp, "context.transport": transport, "context.heads_over": None}
                continue
            teams = [
                degree
                for degree in divisors(cp)
                if 1 < degree < cp and (degree <= domain or is_pinned) and _exchanges(job, tp, degree)
            ]
            tried = [None, *(teams[-1:] if transport == "ring" else [])]
            for team in space.of("context.heads_over", tried):
                if team is None or team in teams:
                    yield {"mesh.cp": cp, "context.transport": transport, "context.heads_over": team}


def _exchanges(job: PlanJob, tp: int, size: int) -> bool:
    """Say whether `size` ranks can exchange heads; source: `shardwise.context.ulysses`."""
    own_heads, own_kv = job.shape.num_heads // tp, max(1, job.shape.num_kv_heads // tp)
    return own_heads % size == 0 and (own_kv % size == 0 or size % own_kv == 0)


def _sequence_parallel(job: PlanJob, space: SearchSpace, tp: int, cp: int) -> bool | None:
    """Return True wherever possible, as it saves memory at equal bytes on the wire; None where pins forbid all."""
    can_be = tp > 1 and job.seq_len % (tp * cp) == 0
    wanted = can_be if space.allows("tensor.sequence_parallel", can_be) else not can_be
    return wanted if space.allows("tensor.sequence_parallel", wanted) and (can_be or not wanted) else None


def _pipeline_sizes(job: PlanJob, space: SearchSpace, num_ranks: int) -> list[int]:
    most = min(num_ranks, job.shape.num_layers + 2)  # the embedding and the head may be stages of their own
    sizes = [size for size in divisors(num_ranks) if size <= most]
    return [size for size in space.of("mesh.pp", sizes) if size in sizes]


def _micro_sizes(job: PlanJob, space: SearchSpace, each_batch: int, cp: int) -> list[int]:
    most = min(_MAX_MICRO_SIZE, max(1, _MAX_TOKENS * cp // job.seq_len))
    sizes = [size for size in divisors(each_batch) if space.allows("batch.accumulation", each_batch // size)]
    return [size for size in sizes if size in space.of("batch.micro_size", range(1, most + 1))]


def _schedules(job: PlanJob, space: SearchSpace, pp: int, base: ResolvedConfig) -> Iterator[Values]:
    if pp == 1:
        if space.allows("pipeline.virtual_stages", 1):
            yield _NO_PIPELINE
        return
    num_layers = job.shape.num_layers
    splits_weights = not base.compile.enabled and base.context.chunk_tokens is None
    for schedule in space.of(
        "pipeline.schedule", [name for name, recipe in RECIPES.items() if recipe.least_bubble_share]
    ):
        recipe = RECIPES[schedule]
        if recipe.splits_backward and not splits_weights:
            continue
        most = (num_layers + 2) // pp
        numbers = [recipe.min_virtual_stages]
        if recipe.is_interleaved:
            tried = range(2, min(most, _MAX_VIRTUAL_STAGES) + 1)
            numbers = [v for v in tried if v in (2, 4) or 0 in (num_layers % (pp * v), (num_layers + 2) % (pp * v))]
        for virtual_stages in space.of("pipeline.virtual_stages", numbers):
            if recipe.min_virtual_stages <= virtual_stages <= min(most, recipe.max_virtual_stages or most):
                yield {"pipeline.schedule": schedule, "pipeline.virtual_stages": virtual_stages}


def _recomputes(space: SearchSpace) -> list[tuple[str, int]]:
    if "recompute.every" in space.pins:
        modes = space.of("recompute.mode", ("none", "selective", "full"))
        pairs = [(mode, every) for mode in modes for every in space.pins["recompute.every"]]
        return [(mode, every) for mode, every in pairs if mode != "none" or every == 1]
    return [(mode, every) for mode, every in RECOMPUTES if space.allows("recompute.mode", mode)]


def _all_tiers(job: PlanJob, space: SearchSpace, config: ResolvedConfig) -> list[dict[str, str]]:
    """Return the tiers to try of parameters, gradients, optimizer and activations, the device first."""
    names = ("params", "grads", "optimizer", "activations")
    ladder = [("device", "device", "device")]
    offloads = are_states_crowded(job, config) if space.offloads is None else space.offloads
    if offloads:
        # Beside adapters the frozen weights are what is large.
        ladder += [("host", "device", "device")] * (not trains_all(config))
        ladder += [("device", "device", "host"), ("device", "host", "host"), ("host", "host", "host")]
        if job.cluster.host.nvme_bytes:
            ladder += [("device", "host", "nvme"), ("host", "host", "nvme"), ("nvme", "host", "nvme")]
    # A block's input is a small part of what selective recomputation keeps, so moving it is tried only where pinned.
    activations = ["device", "host"] if config.recompute.mode == "full" and offloads else ["device"]
    tried = [(*states, activations_tier) for states in ladder for activations_tier in activations]
    if any(f"tiers.{name}" in space.pins for name in names):
        options = [
            space.of(f"tiers.{name}", sorted({combination[index] for combination in tried}))
            for index, name in enumerate(names)
        ]
        tried = sorted(set(product(*options)), key=lambda each: (sum(tier != "device" for tier in each), each))
    return [dict(zip(names, tiers, strict=True)) for tiers in tried]


def _gathers(space: SearchSpace, config: ResolvedConfig, stage: int) -> Sequence[str]:
    if config.mesh.pp == 1 or not STAGES[stage].unshard_for_use:
        return [way for way in ("batch",) if space.allows("pipeline.gather", way)]
    return space.of("pipeline.gather", ("batch", "micro-batch"))


def _shard_sizes(job: PlanJob, space: SearchSpace, config: ResolvedConfig, stage: int, is_away: bool) -> list[int]:
    """Return the sizes to try of the group that shares states: a node's ranks, those of some nodes, all."""
    data_ranks, cp = num_data_ranks(config), config.mesh.cp
    every = [size for size in divisors(data_ranks) if size * cp * config.mesh.tp % config.mesh.ep == 0]
    if (near := config.zero.secondary_shard) and STAGES[stage].unshard_for_use:
        every = [size for size in every if size * cp <= near or size * cp % near == 0]
    if "mesh.dp_shard" in space.pins or "mesh.dp_replicate" in space.pins:
        return [
            size
            for size in every
            if space.allows("mesh.dp_shard", size) and space.allows("mesh.dp_replicate", data_ranks // size)
        ]
    if stage == 0:
        return every[-1:]
    if len(every) > 3:
        in_node = max(1, job.cluster.gpus_per_node // (cp * config.mesh.tp))
        sizes = {in_node, 4 * in_node, 32 * in_node}
        fitting = {max((size for size in every if size <= limit), default=every[0]) for limit in sizes}
        every = sorted(fitting | {data_ranks})
    return [size for size in every if size * cp > 1 or (is_away and data_ranks * cp == 1)]


def _secondary_shard(config: ResolvedConfig, stage: int, params_tier: str, num_shards: int) -> int:
    """Return `zero.secondary_shard`, or 0 where it would do nothing, which the engine refuses."""
    near = config.zero.secondary_shard
    if STAGES[stage].unshard_for_use:
        return near if params_tier == "device" else 0
    encodes = config.precision.reduce not in ("param", "fp32")
    return near if near and encodes and num_shards % near == 0 else 0


def _is_legal(space: SearchSpace, config: ResolvedConfig, number: int, tiers: Mapping[str, str]) -> bool:
    """Say no to what the engine refuses, and to what it runs as another stage's candidate."""
    stage, is_away = STAGES[number], any(tiers[name] != "device" for name in _STATES)
    if is_away and stage.optimizer is not Placement.SHARD:
        return False
    if tiers["params"] != "device" and not stage.unshard_for_use:
        return False
    if tiers["activations"] != "device" and config.recompute.mode == "none":
        return False  # only the inputs of blocks that run again are moved
    if "zero.stage" in space.pins:
        return True
    if is_away and num_data_ranks(config) * config.mesh.cp == 1:  # nothing is split: stages differ in what may be away
        least = 3 if tiers["params"] != "device" else 2 if tiers["grads"] != "device" else 1
        return number == least
    grads_away = _GRADS_AWAY if tiers["grads"] != "device" else None
    return effective_stage(ZERO[number], 2, grads_away, is_scheduled=config.mesh.pp > 1) is stage
