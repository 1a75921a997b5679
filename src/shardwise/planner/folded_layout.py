"""Cut a shape into the stages of a config, and fold its Layout: equal blocks become one group with a count.

It says the same as `plan_layout` of the whole model, to the byte, at a cost that depends on neither the number of
layers nor that of data-parallel ranks.

>>> from shardwise.planner.hardware import parse_cluster
>>> from shardwise.models.presets import preset
>>> shape = ModelShape.of_decoder(preset("llama-3-8b"))
>>> job = PlanJob(shape=shape, seq_len=8192, global_batch=16, cluster=parse_cluster("h100:16"))
>>> StageTable(job).of(changed(job.base, {"mesh.pp": 4, "mesh.dp_shard": 4})).layers
(7, 9, 9, 7)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, get_args

from shardwise.config.resolve import ResolvedConfig, Tier
from shardwise.layout.facts import ModelFacts, ParamEntry, StageUnit
from shardwise.layout.layout import TIERS, Layout
from shardwise.layout.param_groups import ROOT, GroupSpec
from shardwise.layout.pipeline_layout import PipelineLayout
from shardwise.layout.resolve import layout_of
from shardwise.layout.stage_partition import bytes_per_element, find_partition
from shardwise.layout.tensor_plan import TensorLayout, TensorPlan
from shardwise.layout.tp_sharding import ParamSplit
from shardwise.layout.zero_stages import STAGES
from shardwise.models.shape import ModelShape, SkeletonParam, UnitKind, is_adapter, with_adapters
from shardwise.optim.rules import matrix_state_names
from shardwise.planner.job import PlanJob, SectionNumbers, changed, trains_all
from shardwise.schedule.pipelines import placement_of
from shardwise.schedule.placement import StagePlacement

_LAST = "last"


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
    def contents(self) -> tuple[tuple[int, bool, bool], ...]:
        """Return for each stage its blocks, and whether it has the embedding, and the head."""
        return tuple((num, index == 0, index == self.head_stage) for index, num in enumerate(self.layers))

    @cached_property
    def of_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Return the stages of each rank of the pipeline."""
        return tuple(tuple(self.placement.stages_of(rank)) for rank in range(self.placement.num_ranks))

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
        return {rank: tuple(marked[stage] for stage in held) for rank, held in enumerate(self.of_ranks)}

    def held_by(self, rank: int) -> tuple[tuple[tuple[int, int], bool, bool, bool], ...]:
        """Return for each stage of a rank its dense blocks and those with experts, and whether it has embedding, norm,
        head.
        """
        return self._held[rank]

    def layers_on(self, rank: int) -> int:
        """Count the blocks of all stages of a pipeline rank."""
        return sum(self.layers[stage] for stage in self.of_ranks[rank])


class StageTable:
    """Cut the stages of a job's candidates as the engine cuts a model of that shape, each kind of cut once."""

    def __init__(self, job: PlanJob) -> None:
        self.job = job
        self._numbers = SectionNumbers()
        self._stages: dict[tuple[object, ...], StageLayouts] = {}
        self._last: tuple[ResolvedConfig | None, StageLayouts] = None, StageLayouts(StagePlacement(1), (), 0, 0)
        self._cuts: dict[tuple[object, ...], tuple[tuple[int, ...], int]] = {}
        self._of_kind: dict[tuple[object, ...], Mapping[UnitKind, tuple[ParamEntry, ...]]] = {}

    def of(self, config: ResolvedConfig) -> StageLayouts:
        """Return the stages of a config.

        Raises:
            ConfigError: the schedule has no such stages, there are more stages than units, or `pipeline.cut` does not
                fit them.
        """
        if config is self._last[0]:  # the ranks of one candidate are asked for one after another
            return self._last[1]
        s, number, key = config, self._numbers.of, tuple[object, ...]()
        if s.mesh.pp > 1:
            sections = number(s.pipeline), number(s.zero), number(s.tiers), number(s.precision), number(s.lora)
            key = (s.mesh.pp, s.mesh.dp_shard * s.mesh.cp, s.optimizer.name, *sections)
        stages = self._stages.get(key)
        if stages is None:
            shape, placement = self.job.shape, StagePlacement(1)
            cut: tuple[tuple[int, ...], int] = (shape.num_layers,), 0
            if s.mesh.pp > 1:
                placement = placement_of(s.pipeline.schedule, s.mesh.pp, s.pipeline.virtual_stages)
                cut = self._cut(s, placement)
            num_dense = shape.num_layers - shape.num_expert_layers
            stages = self._stages[key] = StageLayouts(placement, cut[0], num_dense, cut[1])
        self._last = config, stages
        return stages

    def _cut(self, config: ResolvedConfig, placement: StagePlacement) -> tuple[tuple[int, ...], int]:
        """Return the blocks of each stage, and the stage of the norm after them.

        Only the ratios of what elements take decide, so that placements of states seldom need a cut of their own.
        """
        shape, num_bytes, section = self.job.shape, bytes_per_element(config), config.pipeline
        of_kind = self._entries(config)
        sizes = [num_bytes(entry) for entries in of_kind.values() for entry in entries]
        ratios = tuple(round(size / sizes[0], 9) for size in sizes)
        key = (placement, section.balance, section.cut, self._numbers.of(config.lora), ratios)
        if key not in self._cuts:
            # A model of another code calls its modules otherwise; measured times are of names that are not known here.
            cut = None if section.cut is None else tuple(_own_name(name) for name in section.cut)
            named = changed(config, {"pipeline.cut": cut, "pipeline.unit_seconds": None})
            stages = find_partition(tuple(_stage_units(shape, of_kind)), named).stages
            names = [[unit.name for unit in stage] for stage in stages]
            layers = tuple(sum(name.startswith("blocks.") for name in stage) for stage in names)
            self._cuts[key] = layers, next(index for index, stage in enumerate(names) if "norm" in stage)
        return self._cuts[key]

    def _entries(self, config: ResolvedConfig) -> Mapping[UnitKind, tuple[ParamEntry, ...]]:
        key = self._numbers.of(config.lora), config.optimizer.name
        if key not in self._of_kind:
            kinds: tuple[UnitKind, ...] = get_args(UnitKind)
            self._of_kind[key] = {name: tuple(entries_of(self.job.shape, config, name, name)) for name in kinds}
        return self._of_kind[key]


def _own_name(name: str) -> str:
    """Return what our decoder calls the module at which a stage begins.

    >>> [_own_name(name) for name in ("model.layers.3", "model.norm", "lm_head")]
    ['blocks.3', 'norm', 'head']
    """
    index = name.rpartition(".")[2]
    return f"blocks.{index}" if index.isdecimal() else "norm" if "norm" in name else "head"


def _stage_units(shape: ModelShape, of_kind: Mapping[UnitKind, tuple[ParamEntry, ...]]) -> Iterator[StageUnit]:
    """Yield the units between which a pipeline may be cut, with the FLOPs of their products for a token."""
    flops = {kind: 2.0 * shape.matmul_numel(kind) for kind in (*shape.blocks, "head")}
    yield StageUnit("embed", ("embed",), of_kind["tokens"] + of_kind["positions"], is_cut_allowed_before=True)
    for index in range(shape.num_layers):
        of_block: UnitKind = "dense" if index < shape.num_layers - shape.num_expert_layers else "experts"
        is_allowed = index > 0 or not shape.num_positions
        name = f"blocks.{index}"
        yield StageUnit(name, (name,), of_kind[of_block], is_allowed, flops[of_block])
    yield StageUnit("norm", ("norm",), of_kind["norm"], is_cut_allowed_before=True)
    yield StageUnit("head", ("head",), of_kind["head"], True, flops["head"])


def unit_params(shape: ModelShape, config: ResolvedConfig, kind: UnitKind) -> tuple[SkeletonParam, ...]:
    """Return the parameters of a unit, adapters of a block included."""
    params = shape.params_of(kind)
    return with_adapters(params, config.lora) if kind in ("dense", "experts") else params


def entries_of(shape: ModelShape, config: ResolvedConfig, name: str, kind: UnitKind) -> Iterator[ParamEntry]:
    """Yield the parameters of a unit, adapters included, as a layout takes them."""
    has_matrices = kind in ("dense", "experts") and bool(matrix_state_names(config.optimizer.name))
    for param in unit_params(shape, config, kind):
        yield ParamEntry(
            f"{name}.{param.name}",
            (),
            name,
            param.stored_shape,
            requires_grad=trains_all(config) or is_adapter(param),
            is_opaque=param.is_packed,
            is_matrix=has_matrices and len(param.shape) > 1,
            experts=param.experts,
        )


@dataclass(frozen=True)
class LayerCount:
    """Count the equal groups on a rank."""

    group: GroupSpec
    count: int


@dataclass(frozen=True)
class FoldedLayout:
    """Hold the groups of one rank of the pipeline, and the layout that they follow."""

    layout: Layout
    folds: tuple[LayerCount, ...]

    def total(self, of_group: Callable[[GroupSpec], Mapping[Any, int]]) -> dict[Any, int]:
        """Sum `of_group` over all groups, each times its count."""
        totals: dict[Any, int] = {}
        for fold in self.folds:
            for key, num_bytes in of_group(fold.group).items():
                totals[key] = totals.get(key, 0) + fold.count * num_bytes
        return totals

    @cached_property
    def numel(self) -> int:
        """Return the elements of the flat buffers of all groups, unsharded, padding included."""
        return sum(fold.count * fold.group.padded_numel for fold in self.folds)


class FoldedLayouts:
    """Build the folded Layouts of a job's candidates, and keep what several of them share."""

    def __init__(self, job: PlanJob, stages: StageTable | None = None) -> None:
        self.job = job
        self.stages = stages or StageTable(job)
        self._units: dict[tuple[Any, ...], tuple[tuple[ParamEntry, ...], dict[str, ParamSplit]]] = {}
        self._numbers = SectionNumbers()
        self._last: tuple[ResolvedConfig | None, tuple[Any, ...]] = None, ()
        self._ranks: dict[tuple[Any, ...], FoldedLayout] = {}
        self._at_rest: dict[tuple[Any, ...], dict[str, int]] = {}

    def at_rest(self, config: ResolvedConfig, pipeline_rank: int = 0, tier: Tier | None = None) -> dict[str, int]:
        """Return the bytes by role of the first rank of the shard group, as `Layout.bytes_at_rest`."""
        key = (*self.key(config, pipeline_rank), tier)
        if key not in self._at_rest:
            self._at_rest[key] = self._bytes_at_rest(config, pipeline_rank, tier)
        return self._at_rest[key]

    def by_tier(self, config: ResolvedConfig, pipeline_rank: int = 0) -> dict[Tier, dict[str, int]]:
        """Return `at_rest` of each tier that holds anything, as `Layout.bytes_by_tier`."""
        if (config.tiers.params, config.tiers.grads, config.tiers.optimizer) == ("device",) * 3:
            return {"device": self.at_rest(config, pipeline_rank)}
        by_tier = {tier: self.at_rest(config, pipeline_rank, tier) for tier in TIERS}
        return {tier: totals for tier, totals in by_tier.items() if any(totals.values())}

    def on_wire(self, config: ResolvedConfig, pipeline_rank: int = 0) -> dict[str, int]:
        """Return the bytes that a rank sends in a step, by collective, as `Layout.bytes_on_wire`."""
        rank = self.rank(config, pipeline_rank)
        return rank.total(lambda group: rank.layout.group_bytes_on_wire(group, config.batch.accumulation))

    def rank(self, config: ResolvedConfig, pipeline_rank: int = 0) -> FoldedLayout:
        """Return the folded groups of one rank of the pipeline."""
        key = self.key(config, pipeline_rank)
        if key not in self._ranks:
            self._ranks[key] = self._fold(config, pipeline_rank)
        return self._ranks[key]

    def key(self, config: ResolvedConfig, pipeline_rank: int) -> tuple[Any, ...]:
        """Return all that the groups depend on; pipeline ranks that hold the same share one key."""
        if config is not self._last[0]:
            mesh, number = config.mesh, self._numbers.of
            axes = (mesh.pp > 1, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp, mesh.ep)
            sections = number(config.zero), number(config.tiers), number(config.precision), number(config.lora)
            self._last = config, (*axes, config.pipeline.gather, config.optimizer.name, *sections)
        return self._last[1], self.stages.of(config).held_by(pipeline_rank)

    def _bytes_at_rest(self, config: ResolvedConfig, pipeline_rank: int, tier: Tier | None) -> dict[str, int]:
        rank = self.rank(config, pipeline_rank)
        return rank.total(lambda group: rank.layout.group_bytes_at_rest(group, 0, tier))

    def _fold(self, config: ResolvedConfig, pipeline_rank: int) -> FoldedLayout:
        stages, tiers = self.stages.of(config), config.tiers
        # Of a share, each rank's first blocks stay on the device, so none stands for others.
        is_unfolded = bool(tiers.params_on_device or tiers.grads_on_device or tiers.optimizer_on_device)
        every, held = range(stages.placement.num_stages), stages.placement.stages_of(pipeline_rank)
        # Muon's matrices, and the experts that mesh.ep divides, are looked for in all blocks; the rank may have none.
        lacks_experts = config.mesh.ep > 1 and not any(stages.kinds[stage][1] for stage in held)
        if is_unfolded:
            held = tuple(every)
        elif lacks_experts or not stages.layers_on(pipeline_rank):
            blocks = [[stage for stage in every if stages.kinds[stage][kind]][:1] for kind in (0, 1)]
            held = tuple(sorted({*held, *blocks[0], *blocks[1]}))
        counts, members = {ROOT: 1}, list(_root(self.job.shape, stages))
        for stage in held:
            for name, kind, count in _blocks_of(stages, stage, is_alone=config.mesh.pp == 1):
                for unit in [f"{name}.{index}" for index in range(count)] if is_unfolded else [name]:
                    counts[unit] = 1 if is_unfolded else count
                    members.append(((stage,), unit, kind))
        units = [(used_by, *self._unit(config, unit, kind)) for used_by, unit, kind in members]
        entries = tuple(entry for _, of_unit, _ in units for entry in of_unit)
        pipeline = tensor = None
        if config.mesh.pp > 1:
            stages_of = {entry.name: used_by for used_by, of_unit, _ in units for entry in of_unit}
            gathers_once = config.pipeline.gather == "batch" or not STAGES[config.zero.stage].unshard_for_use
            pipeline = PipelineLayout(stages.placement, (), stages_of, gathers_once, index=pipeline_rank)
        if config.mesh.tp > 1:
            splits = {name: split for _, _, of_unit in units for name, split in of_unit.items()}
            tensor = TensorLayout(TensorPlan(), splits, config.mesh.tp, config.tensor.sequence_parallel)
        names = tuple(dict.fromkeys(entry.unit for entry in entries if entry.unit != ROOT))
        facts = ModelFacts(self.job.shape.name, names, entries)
        layout = layout_of(facts, _legal(config), tensor, pipeline)
        held_units = {group.unit for group in layout.groups}
        layout = replace(layout, units=tuple(unit for unit in names if unit in held_units), elsewhere=())
        return FoldedLayout(layout, tuple(LayerCount(group, counts[group.unit]) for group in layout.groups))

    def _unit(
        self, config: ResolvedConfig, name: str, kind: UnitKind
    ) -> tuple[tuple[ParamEntry, ...], dict[str, ParamSplit]]:
        key = (name, kind, self._numbers.of(config.lora), config.optimizer.name, config.mesh.tp)
        if key not in self._units:
            entries, params = entries_of(self.job.shape, config, name, kind), unit_params(self.job.shape, config, kind)
            splits = {f"{name}.{one.name}": one.split(config.mesh.tp) for one in params if one.experts is None}
            self._units[key] = tuple(entries), splits
        return self._units[key]


def _root(shape: ModelShape, stages: StageLayouts) -> Iterator[tuple[tuple[int, ...], str, UnitKind]]:
    """Yield what is in no block, with the stages that use it."""
    last = stages.head_stage
    yield tuple(sorted({0, last})) if shape.is_tied else (0,), ROOT, "tokens"
    yield (0,), ROOT, "positions"
    yield (stages.norm_stage,), ROOT, "norm"
    if not shape.is_tied:
        yield (last,), ROOT, "head"


def _blocks_of(stages: StageLayouts, stage: int, *, is_alone: bool) -> Iterator[tuple[str, UnitKind, int]]:
    """Yield the equal blocks of a stage: their name, their kind, their number.

    Without a pipeline the last one is apart: what it was gathered for in the forward serves its backward.
    """
    kinds: tuple[UnitKind, ...] = ("dense", "experts")
    runs = [(kind, count) for kind, count in zip(kinds, stages.kinds[stage], strict=True) if count]
    for kind, count in runs:
        is_last = is_alone and kind == runs[-1][0]
        if count > is_last:
            yield f"{kind}.{stage}", kind, count - is_last
        if is_last:
            yield f"{kind}.{stage}.{_LAST}", kind, 1


def _legal(config: ResolvedConfig) -> ResolvedConfig:
    """Return a config without secondary shards that the engine would refuse, as changes of a candidate may have."""
    near, num_shards = config.zero.secondary_shard, config.mesh.dp_shard * config.mesh.cp
    if near and num_shards % near and not STAGES[config.zero.stage].unshard_for_use:
        return changed(config, {"zero.secondary_shard": 0})
    return config
