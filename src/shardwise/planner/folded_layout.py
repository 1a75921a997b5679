"""Fold the Layout of a shape: equal blocks become one group with a count.

It says the same as `plan_layout` of the whole model, to the byte, at a cost that depends on neither the number of
layers nor that of data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardwise.config.resolve import ResolvedConfig, Tier
from shardwise.layout.facts import ModelFacts, ParamEntry
from shardwise.layout.layout import TIERS, Layout
from shardwise.layout.param_groups import ROOT, GroupSpec
from shardwise.layout.pipeline_layout import PipelineLayout
from shardwise.layout.resolve import layout_of
from shardwise.layout.tensor_plan import TensorLayout, TensorPlan
from shardwise.layout.tp_sharding import ParamSplit
from shardwise.layout.zero_stages import STAGES
from shardwise.optim.rules import matrix_state_names
from shardwise.planner.job import ModelShape, PlanJob, SectionNumbers, UnitKind, changed, trains_all
from shardwise.planner.stages import StageLayouts, StageTable, is_adapter, with_adapters

_LAST = "last"
_EXPERTS = ":experts"


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
        self._units: dict[tuple[Any, ...], _Unit] = {}
        self._numbers = SectionNumbers()
        self._ranks: dict[tuple[Any, ...], FoldedLayout] = {}
        self._at_rest: dict[tuple[Any, ...], dict[str, int]] = {}

    def at_rest(self, config: ResolvedConfig, pipeline_rank: int = 0) -> dict[str, int]:
        """Return the bytes by role of the first rank of the shard group, as `Layout.bytes_at_rest`."""
        key = self.key(config, pipeline_rank)
        found = self._at_rest.get(key)
        if found is None:
            found = self._at_rest[key] = self._bytes_at_rest(config, pipeline_rank, None)
        return found

    def by_tier(self, config: ResolvedConfig, pipeline_rank: int = 0) -> dict[Tier, dict[str, int]]:
        """Return `at_rest` of each tier that holds anything, as `Layout.bytes_by_tier`."""
        if (config.tiers.params, config.tiers.grads, config.tiers.optimizer) == ("device",) * 3:
            return {"device": self.at_rest(config, pipeline_rank)}
        by_tier = {tier: self._bytes_at_rest(config, pipeline_rank, tier) for tier in TIERS}
        return {tier: totals for tier, totals in by_tier.items() if any(totals.values())}

    def on_wire(self, config: ResolvedConfig, pipeline_rank: int = 0) -> dict[str, int]:
        """Return the bytes that a rank sends in a step, by collective, as `Layout.bytes_on_wire`."""
        rank = self.rank(config, pipeline_rank)
        return rank.total(lambda group: rank.layout.group_bytes_on_wire(group, config.batch.accumulation))

    def rank(self, config: ResolvedConfig, pipeline_rank: int = 0) -> FoldedLayout:
        """Return the folded groups of one rank of the pipeline."""
        key = self.key(config, pipeline_rank)
        found = self._ranks.get(key)
        if found is None:
            found = self._ranks[key] = self._fold(config, pipeline_rank)
        return found

    def key(self, config: ResolvedConfig, pipeline_rank: int) -> tuple[Any, ...]:
        """Return all that the groups depend on; pipeline ranks that hold the same share one key."""
        mesh, layers = config.mesh, self.stages.of(config).held_by(pipeline_rank)
        axes = (mesh.pp > 1, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp)
        number = self._numbers.of
        sections = number(config.zero), number(config.tiers), number(config.precision), number(config.lora)
        return *axes, layers, config.pipeline.gather, config.optimizer.name, *sections

    def _bytes_at_rest(self, config: ResolvedConfig, pipeline_rank: int, tier: Tier | None) -> dict[str, int]:
        rank = self.rank(config, pipeline_rank)
        return rank.total(lambda group: rank.layout.group_bytes_at_rest(group, 0, tier))

    def _fold(self, config: ResolvedConfig, pipeline_rank: int) -> FoldedLayout:
        stages, tiers = self.stages.of(config), config.tiers
        # Of a share, each rank's first blocks stay on the device, so none stands for others.
        is_unfolded = bool(tiers.params_on_device or tiers.grads_on_device or tiers.optimizer_on_device)
        every = range(stages.placement.num_stages)
        held = every if is_unfolded else stages.placement.stages_of(pipeline_rank)
        counts, members = {ROOT: 1}, list(_root(self.job.shape, stages))
        for stage in held:
            for name, kind, count in _blocks_of(stages, stage, is_alone=config.mesh.pp == 1):
                for unit in [f"{name}.{index}" for index in range(count)] if is_unfolded else [name]:
                    counts[unit] = 1 if is_unfolded else count
                    members.append(((stage,), unit, kind))
        units = [(used_by, self._unit(config, unit, kind)) for used_by, unit, kind in members]
        entries = tuple(entry for _, unit in units for entry in unit.entries)
        pipeline = tensor = None
        if config.mesh.pp > 1:
            stages_of = {entry.name: used_by for used_by, unit in units for entry in unit.entries}
            gathers_once = config.pipeline.gather == "batch" or not STAGES[config.zero.stage].unshard_for_use
            pipeline = PipelineLayout(stages.placement, (), stages_of, gathers_once, index=pipeline_rank)
        if config.mesh.tp > 1:
            splits = {name: split for _, unit in units for name, split in unit.splits.items()}
            tensor = TensorLayout(TensorPlan(), splits, config.mesh.tp, config.tensor.sequence_parallel)
        names = tuple(dict.fromkeys(entry.unit for entry in entries if entry.unit != ROOT))
        facts = ModelFacts(self.job.shape.name, names, entries)
        return self._counted(layout_of(facts, _legal(config), tensor, pipeline), counts)

    def _unit(self, config: ResolvedConfig, name: str, kind: UnitKind) -> _Unit:
        key = (name, kind, self._numbers.of(config.lora), config.optimizer.name, config.mesh.tp)
        if key not in self._units:
            params = self.job.shape.params_of(kind, expert_ranks=self.job.ep)
            params = with_adapters(params, config.lora) if name != ROOT else params
            has_matrices = name != ROOT and bool(matrix_state_names(config.optimizer.name))
            entries = [
                ParamEntry(
                    f"{name}.{param.name}",
                    (),
                    name + _EXPERTS * param.is_of_experts,
                    param.stored_shape,
                    requires_grad=trains_all(config) or is_adapter(param),
                    is_opaque=param.is_packed,
                    is_matrix=has_matrices and len(param.shape) > 1,
                )
                for param in params
            ]
            splits = {f"{name}.{param.name}": param.split(config.mesh.tp) for param in params}
            self._units[key] = _Unit(tuple(entries), splits)
        return self._units[key]

    def _counted(self, layout: Layout, counts: Mapping[str, int]) -> FoldedLayout:
        """Count the groups; experts, whose groups are their own, are of their block's unit, and on `ep` times fewer
        ranks.
        """
        ep, groups = self.job.ep, []
        for group in layout.groups:
            if is_of_experts(group):
                num_ranks, num_shards = max(1, group.num_ranks // ep), max(1, group.num_shards // ep)
                group = replace(group, unit=group.unit.removesuffix(_EXPERTS))
                group = replace(group, num_ranks=num_ranks, num_shards=num_shards)
            groups.append(group)
        units = tuple(dict.fromkeys(group.unit for group in groups if group.unit != ROOT))
        layout = replace(layout, units=units, groups=tuple(groups), elsewhere=())
        return FoldedLayout(layout, tuple(LayerCount(group, counts[group.unit]) for group in groups))


@dataclass(frozen=True)
class _Unit:
    entries: tuple[ParamEntry, ...]
    splits: Mapping[str, ParamSplit]


def is_of_experts(group: GroupSpec) -> bool:
    """Say whether a group's parameters are of experts, which `ep` ranks split."""
    return _EXPERTS in group.name


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
