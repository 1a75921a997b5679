"""List the parameters of each unit, adapters included, and the units of each pipeline stage of a strategy.

>>> from shardwise.config.resolve import Config
>>> from shardwise.planner.hardware import Cluster, GpuSpec
>>> from shardwise.models.presets import preset
>>> gpu = GpuSpec(name="h100", memory_bytes=80 * 2**30, memory_bytes_per_s=3e12, peak_flops_per_s={"bf16": 989e12})
>>> cluster = Cluster(gpu=gpu, num_gpus=16, gpus_per_node=8, nic_bytes_per_s=5e10)
>>> job = PlanJob(shape=ModelShape.of_decoder(preset("llama-3-8b")), seq_len=8192, global_batch=16, cluster=cluster)
>>> config = Config.from_dict({"mesh": {"pp": 4}, "batch": {"accumulation": 8}})
>>> StageTable(job).of(config.resolve(world_size=16)).layers
(7, 9, 9, 7)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Final, Literal

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import LoraConfig, ResolvedConfig
from shardwise.layout.facts import ParamEntry, StageUnit
from shardwise.layout.stage_partition import UnitCost, partition_stages
from shardwise.layout.tp_sharding import FusedPart, ParamSplit
from shardwise.planner.job import ModelShape, PlanJob
from shardwise.schedule.pipelines import placement_of
from shardwise.schedule.placement import StagePlacement


@dataclass(frozen=True, kw_only=True)
class SkeletonParam:
    """Describe one parameter of a unit, by its name within it.

    Attributes:
        dim: along which tp splits it into `part`; None where every rank holds all of it.
        is_of_experts: whether it holds one matrix of each expert, side by side along dim 0.
        is_packed: whether its elements are stored in 4 bits each, as bytes (`lora.base = "nf4"`).
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    part: FusedPart | None = None
    is_of_experts: bool = False
    is_packed: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape of what is stored: of the bytes, where it is packed."""
        return ((math.prod(self.shape) + 1) // 2, 1) if self.is_packed else self.shape

    def split(self, tp: int) -> ParamSplit:
        """Return its split over the tensor-parallel group."""
        return ParamSplit(self.shape, tp, self.dim, () if self.part is None else (self.part,))


def block_params(shape: ModelShape, *, has_experts: bool = False, expert_ranks: int = 1) -> tuple[SkeletonParam, ...]:
    """List the parameters of one layer, in the order of its module.

    Args:
        has_experts: whether the layer's feed-forward is experts.
        expert_ranks: over which whole experts are spread; the parameters are those of one rank.
    """
    ffn = _expert_params(shape, expert_ranks) if has_experts else _ffn_params(shape, "ffn", shape.ffn_size)
    norms = (_norm(shape, "attention_norm"), _norm(shape, "ffn_norm"))
    return (*norms[0], *_attention_params(shape), *norms[1], *ffn)


UnitKind = Literal["dense", "experts", "tokens", "positions", "norm", "head"]
"""Blocks, without experts and with them; the tables of tokens and of positions; the norm after the blocks; the head."""


def params_of(shape: ModelShape, kind: UnitKind, *, expert_ranks: int = 1) -> tuple[SkeletonParam, ...]:
    """List the parameters of a unit; the head's as if it were not tied.

    Args:
        expert_ranks: over which whole experts are spread; the parameters are those of one rank.
    """
    vocab, table = FusedPart(shape.vocab_size, is_padded=True), (shape.vocab_size, shape.hidden_size)
    if kind == "tokens":
        return (SkeletonParam(name="embed.weight", shape=table, dim=0, part=vocab),)
    if kind == "positions":
        positions = SkeletonParam(name="positions.weight", shape=(shape.num_positions, shape.hidden_size))
        return (positions,) if shape.num_positions else ()
    if kind == "norm":
        return tuple(_norm(shape, "norm"))
    if kind == "head":
        return (SkeletonParam(name="head.weight", shape=table, dim=0, part=vocab),)
    return block_params(shape, has_experts=kind == "experts", expert_ranks=expert_ranks)


def _norm(shape: ModelShape, name: str) -> Iterator[SkeletonParam]:
    yield SkeletonParam(name=f"{name}.weight", shape=(shape.hidden_size,))
    if shape.has_biases:
        yield SkeletonParam(name=f"{name}.bias", shape=(shape.hidden_size,))


def _attention_params(shape: ModelShape) -> Iterator[SkeletonParam]:
    query = FusedPart(shape.num_heads * shape.head_dim, shape.num_heads)
    kv = FusedPart(shape.num_kv_heads * shape.head_dim, shape.num_kv_heads)
    for name, split in (("query", query), ("key", kv), ("value", kv)):
        yield from _linear(shape, f"attention.{name}", (split.size, shape.hidden_size), 0, split)
    yield from _linear(shape, "attention.out", (shape.hidden_size, query.size), 1, query)


def _ffn_params(shape: ModelShape, name: str, ffn_size: int) -> Iterator[SkeletonParam]:
    split = FusedPart(ffn_size)
    for column in ("gate", "up") if shape.ffn == "gated" else ("up",):
        yield from _linear(shape, f"{name}.{column}", (ffn_size, shape.hidden_size), 0, split)
    yield from _linear(shape, f"{name}.down", (shape.hidden_size, ffn_size), 1, split)


def _expert_params(shape: ModelShape, expert_ranks: int) -> Iterator[SkeletonParam]:
    experts = shape.experts
    if experts is None:
        return
    yield SkeletonParam(name="ffn.router.weight", shape=(experts.num_experts, shape.hidden_size))
    if experts.num_shared:
        yield from _ffn_params(shape, "ffn.shared", experts.num_shared * experts.ffn_size)
    num_here, size, hidden = -(-experts.num_experts // expert_ranks), experts.ffn_size, shape.hidden_size
    names = ("gate", "up", "down") if shape.ffn == "gated" else ("up", "down")
    for name in names:
        dim, matrix = (2, (hidden, size)) if name == "down" else (1, (size, hidden))
        yield SkeletonParam(
            name=f"ffn.experts.{name}",
            shape=(num_here, *matrix),
            dim=dim,
            part=FusedPart(size),
            is_of_experts=True,
        )


def _linear(shape: ModelShape, name: str, size: tuple[int, int], dim: int, part: FusedPart) -> Iterator[SkeletonParam]:
    """Yield a layer's weight, and its bias, which tp splits where it splits the outputs."""
    yield SkeletonParam(name=f"{name}.weight", shape=size, dim=dim, part=part)
    if shape.has_biases and dim == 0:
        yield SkeletonParam(name=f"{name}.bias", shape=size[:1], dim=0, part=part)
    elif shape.has_biases:
        yield SkeletonParam(name=f"{name}.bias", shape=size[:1])


@dataclass(frozen=True)
class StageLayouts:
    """Describe the stages of a pipeline; without one there is a single stage of everything.

    Attributes:
        placement: which rank of the pipeline has which stages.
        layers: blocks of each stage, in order.
        num_dense: how many blocks at the front have a feed-forward without experts.
        norm_stage: the stage that has the norm after the blocks; the last has the head, the first the embedding.
    """

    placement: StagePlacement
    layers: tuple[int, ...]
    num_dense: int
    norm_stage: int

    @property
    def head_stage(self) -> int:
        """Return the index of the last stage."""
        return len(self.layers) - 1

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return the index of the first block of each stage."""
        return tuple(accumulate(self.layers[:-1], initial=0))

    @cached_property
    def kinds(self) -> tuple[tuple[int, int], ...]:
        """Count for each stage its dense blocks and its blocks with experts."""
        ends = tuple(accumulate(self.layers))
        dense = [max(0, min(end, self.num_dense) - end + num) for end, num in zip(ends, self.layers, strict=True)]
        return tuple((num_dense, num - num_dense) for num_dense, num in zip(dense, self.layers, strict=True))

    @cached_property
    def _held(self) -> dict[int, tuple[tuple[tuple[int, int], bool, bool, bool], ...]]:
        marked = [
            (kinds, stage == 0, stage == self.norm_stage, stage == self.head_stage)
            for stage, kinds in enumerate(self.kinds)
        ]
        ranks = range(self.placement.num_ranks)
        return {rank: tuple(marked[stage] for stage in self.placement.stages_of(rank)) for rank in ranks}

    def held_by(self, rank: int) -> tuple[tuple[tuple[int, int], bool, bool, bool], ...]:
        """Return for each stage of a rank its dense blocks and those with experts, and whether it has embedding, norm,
        head.
        """
        return self._held[rank]

    def layers_on(self, rank: int) -> int:
        """Count the blocks of all stages of a pipeline rank."""
        return sum(self.layers[stage] for stage in self.placement.stages_of(rank))


class StageTable:
    """Cut the stages of a job's candidates; candidates with the same cut share it."""

    def __init__(self, job: PlanJob) -> None:
        self.job = job
        self._stages: dict[tuple[object, ...], StageLayouts] = {}
        self._cuts: dict[StagePlacement, tuple[tuple[int, ...], int]] = {}  # several schedules have one placement

    def of(self, config: ResolvedConfig) -> StageLayouts:
        """Return the stages of a strategy: its own, or as `shardwise.layout.stage_partition` cuts our decoder.

        Raises:
            ConfigError: the schedule has no such stages, there are more stages than units, or the candidate's own are
                not of all blocks.
        """
        s = config
        key = (s.mesh.pp, s.pipeline.schedule, s.pipeline.virtual_stages, s.pipeline.cut) if s.mesh.pp > 1 else ()
        layouts = self._stages.get(key)
        if layouts is None:
            layouts = self._stages[key] = self._cut(s)
        return layouts

    def _cut(self, s: ResolvedConfig) -> StageLayouts:
        shape = self.job.shape
        num_dense = shape.num_layers - shape.num_expert_layers
        if s.mesh.pp == 1:
            return StageLayouts(StagePlacement(1), (shape.num_layers,), num_dense, 0)
        placement = placement_of(s.pipeline.schedule, s.mesh.pp, s.pipeline.virtual_stages)
        if s.pipeline.cut is not None:
            layers = layers_between(s.pipeline.cut, shape.num_layers)
            if len(layers) != placement.num_stages or min(layers) < 0:
                raise ConfigError(
                    "stage-layers-count",
                    f"pipeline.cut makes {len(layers)} stages of {layers} blocks, but there are "
                    f"{placement.num_stages} stages; name the first module of every stage but the first, in order",
                )
            return StageLayouts(placement, layers, num_dense, placement.num_stages - 1)
        if placement not in self._cuts:
            self._cuts[placement] = cut_by_cost(shape, placement)
        layers, norm_stage = self._cuts[placement]
        return StageLayouts(placement, layers, num_dense, norm_stage)


def layers_between(cut: Sequence[str], num_layers: int) -> tuple[int, ...]:
    """Count the blocks of each stage, where every stage but the first begins with a named module.

    >>> layers_between(("blocks.3", "blocks.5", "head"), 8)
    (3, 2, 3, 0)
    """
    starts: list[int] = []
    for name in cut:
        prefix, _, index = name.rpartition(".")
        starts.append(int(index) if prefix == "blocks" and index.isdecimal() else num_layers)
    return tuple(stop - start for start, stop in pairwise((0, *starts, num_layers)))


def cut_by_cost(shape: ModelShape, placement: StagePlacement) -> tuple[tuple[int, ...], int]:
    """Return the blocks of each stage as `shardwise.layout.stage_partition` cuts, and the stage of the norm after them.

    Raises:
        ConfigError: there are more stages than units.
    """
    chosen = 1.0 if shape.experts is None else shape.experts.num_chosen / shape.experts.num_experts
    num_dense = shape.num_layers - shape.num_expert_layers
    kinds = {has: block_params(shape, has_experts=has) for has in (False, True)}
    head = params_of(shape, "head")
    embed = _cost_of("embed", (*params_of(shape, "tokens"), *params_of(shape, "positions")))
    costs = [replace(embed, compute=0.0)]  # rows are looked up
    costs += [_cost_of(f"blocks.{index}", kinds[index >= num_dense], chosen) for index in range(shape.num_layers)]
    costs += [_cost_of("norm", params_of(shape, "norm")), _cost_of("head", head)]
    entry = ParamEntry("head.weight", (), "head", head[0].shape, requires_grad=True)
    cut = partition_stages(
        [
            StageUnit(cost.name, (cost.name,), (entry,), cost.name != "blocks.0" or not shape.num_positions)
            for cost in costs
        ],
        costs,
        placement.num_stages,
        placement=[placement.rank_of(stage) for stage in range(placement.num_stages)],
    )
    names = [[unit.name for unit in stage] for stage in cut.stages]
    layers = tuple(sum(name.startswith("blocks.") for name in stage) for stage in names)
    return layers, next(index for index, stage in enumerate(names) if "norm" in stage)


def _cost_of(name: str, params: tuple[SkeletonParam, ...], share_of_experts: float = 1.0) -> UnitCost:
    """Return the cost of a unit for a token, of which experts compute their share."""
    sizes = [(param, float(math.prod(param.shape))) for param in params]
    flops = sum(2.0 * n * (share_of_experts if p.is_of_experts else 1.0) for p, n in sizes if len(p.shape) > 1)
    return UnitCost(name, flops, sum(size for _, size in sizes))


ALL: Final = "all-linear"
# What Hugging Face's models call the layers of the skeleton; one name may stand for several that are fused there.
_NAMES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "attention.query": frozenset({"q_proj", "qkv_proj", "query_key_value", "c_attn"}),
        "attention.key": frozenset({"k_proj", "qkv_proj", "query_key_value", "c_attn"}),
        "attention.value": frozenset({"v_proj", "qkv_proj", "query_key_value", "c_attn"}),
        "attention.out": frozenset({"o_proj", "out_proj", "dense", "c_proj"}),
        "ffn.router": frozenset({"gate", "router"}),
        "gate": frozenset({"gate_proj", "gate_up_proj"}),
        "up": frozenset({"up_proj", "gate_up_proj", "fc1", "dense_h_to_4h", "c_fc"}),
        "down": frozenset({"down_proj", "fc2", "dense_4h_to_h", "c_proj"}),
    }
)


SCALE_BYTES: Final = 1 / 64 + 4 / (64 * 256)
"""Bytes of scales for an element that is packed: one of a block of 64, and 4 for 256 of these (Dettmers et al. 2023,
arXiv 2305.14314, section 3)."""

PACKED_BYTES: Final = 0.5
"""Bytes of an element that is packed."""


def packed_params(shape: ModelShape, lora: LoraConfig, *, has_experts: bool) -> list[SkeletonParam]:
    """Return the weights of a layer that are packed in 4 bits.

    Args:
        lora: the adapters, and how their base is stored.
        has_experts: whether the layer's feed-forward is experts.
    """
    if lora.base == "keep":
        return []
    return [param for param in with_adapters(block_params(shape, has_experts=has_experts), lora) if param.is_packed]


def is_adapter(param: SkeletonParam) -> bool:
    """Say whether a parameter is one of an adapter's matrices."""
    return ".lora_" in param.name


def with_adapters(params: Sequence[SkeletonParam], lora: LoraConfig) -> tuple[SkeletonParam, ...]:
    """Return the parameters of a layer, and after each linear layer that is adapted its two matrices.

    The linear layers themselves are packed where `lora.base` says so; experts, which are no such layers, are not. What
    a layer splits over tensor-parallel ranks, its inputs or its outputs, the matrix on that side splits too.

    Args:
        lora: the adapters' rank and the layers that have them.

    Raises:
        ConfigError: no layer has one of the targets' names.
    """
    if not lora.rank:
        return tuple(params)
    targets = {target.rpartition(".")[2] for target in lora.targets}
    known_names = frozenset[str]().union(*_NAMES.values())
    if ALL not in targets and not targets & known_names:
        names = ", ".join(sorted(known_names))
        raise ConfigError("lora-targets-unknown", f"lora.targets={[*lora.targets]} name no layer; use some of {names}")
    adapters: list[SkeletonParam] = []
    for param in params:
        layer = param.name.removesuffix(".weight")
        called = _NAMES.get(layer) or _NAMES.get(layer.rpartition(".")[2], frozenset())
        is_linear = bool(called) and not param.name.endswith(".bias")
        is_packed = is_linear and lora.base == "nf4" and not param.is_of_experts and layer != "ffn.router"
        adapters.append(replace(param, is_packed=is_packed))
        if is_linear and (ALL in targets or called & targets):
            adapters += _beside_experts(param, lora.rank) if param.is_of_experts else _beside(param, layer, lora.rank)
    return tuple(adapters)


def _beside(layer: SkeletonParam, layer_name: str, rank: int) -> Iterator[SkeletonParam]:
    outputs, inputs = layer.shape
    for name, shape, dim in (("A", (rank, inputs), 1), ("B", (outputs, rank), 0)):
        is_split = layer.dim == dim
        part = layer.part if is_split else None
        yield SkeletonParam(
            name=f"{layer_name}.lora_{name}.weight", shape=shape, dim=dim if is_split else None, part=part
        )


def _beside_experts(experts: SkeletonParam, rank: int) -> Iterator[SkeletonParam]:
    """Yield what PEFT puts beside all experts; it takes gate and up as one weight, of twice the rank."""
    num_experts, outputs, inputs = experts.shape
    ranks = num_experts * rank
    yield SkeletonParam(name=f"{experts.name}.lora_A.weight", shape=(ranks, inputs), is_of_experts=True)
    second = (outputs, ranks if experts.name.endswith("down") else 2 * ranks)
    yield SkeletonParam(name=f"{experts.name}.lora_B.weight", shape=second, is_of_experts=True)
