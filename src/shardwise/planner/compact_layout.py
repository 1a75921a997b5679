"""Fold the Layout of a shape: equal blocks become one group with a count.

It says the same as `plan_layout` of the whole model, to the byte, at a cost that depends on neither the number of
layers nor that of data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from shardwise.layout.zero_stages import STAGES
from shardwise.planner.job import PlanJob, changed, trains_all
from shardwise.planner.stages import (
    SkeletonParam,
    StageLayouts,
    StageTable,
    block_params,
    embedding_params,
    head_params,
    is_adapter,
    norm_params,
    with_adapters,
)

_LAST = "last"
_EXPERTS = ":experts"


@dataclass(frozen=True)
class LayerCount:
    """Count the equal groups on a rank."""

    group: GroupSpec
    count: int


@dataclass(frozen=True)
class RankLayerCounts:
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


class CompactLayout:
    """Build the folded Layouts of a job's candidates, and keep what several of them share."""

    def __init__(self, job: PlanJob, stages: StageTable | None = None) -> None:
        self.job = job
        self.stages = stages or StageTable(job)
        self._params: dict[tuple[Any, ...], tuple[SkeletonParam, ...]] = {}
        self._ranks: dict[tuple[Any, ...], RankLayerCounts] = {}
        self._at_rest: dict[tuple[Any, ...], dict[str, int]] = {}

    def at_rest(self, config: ResolvedConfig, pipeline_rank: int = 0) -> dict[str, int]:
        """Return the bytes by role of the first rank of the shard group, as `Layout.bytes_at_rest`."""
        key = self.key(config, pipeline_rank)
        if key not in self._at_rest:
            self._at_rest[key] = self._bytes_at_rest(config, pipeline_rank, None)
        return self._at_rest[key]

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

    def rank(self, config: ResolvedConfig, pipeline_rank: int = 0) -> RankLayerCounts:
        """Return the folded groups of one rank of the pipeline."""
        key = self.key(config, pipeline_rank)
        if key not in self._ranks:
            self._ranks[key] = self._fold(config, pipeline_rank)
        return self._ranks[key]

    def key(self, config: ResolvedConfig, pipeline_rank: int) -> tuple[Any, ...]:
        """Return all that the groups depend on; pipeline ranks that hold the same share one key."""
        mesh, layers = config.mesh, self.stages.of(config).held_by(pipeline_rank)
        axes = (mesh.pp > 1, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp)
        sections = (config.zero, config.tiers, config.precision, config.lora)
        return *axes, layers, config.pipeline.gather, config.optimizer.name, *sections

    def _bytes_at_rest(self, config: ResolvedConfig, pipeline_rank: int, tier: Tier | None) -> dict[str, int]:
        rank = self.rank(config, pipeline_rank)
        return rank.total(lambda group: rank.layout.group_bytes_at_rest(group, 0, tier))

    def _fold(self, config: ResolvedConfig, pipeline_rank: int) -> RankLayerCounts:
        stages, tiers = self.stages.of(config), config.tiers
        # Of a share, each rank's first blocks stay on the device, so none stands for others.
        is_unfolded = bool(tiers.params_on_device or tiers.grads_on_device or tiers.optimizer_on_device)
        every = range(stages.placement.num_stages)
        held = every if is_unfolded else stages.placement.stages_of(pipeline_rank)
        counts, members = {ROOT: 1}, list(self._root(config, stages))
        for stage in held:
            for name, has_experts, count in _blocks_of(stages, stage, is_alone=config.mesh.pp == 1):
                for unit in [f"{name}.{index}" for index in range(count)] if is_unfolded else [name]:
                    counts[unit] = 1 if is_unfolded else count
                    members.append(((stage,), unit, self._block(config, has_experts=has_experts)))
        entries = [_entry(config, unit, param) for _, unit, params in members for param in params]
        names = [f"{unit}.{param.name}" for _, unit, params in members for param in params]
        pipeline = tensor = None
        if config.mesh.pp > 1:
            stages_of = {f"{unit}.{param.name}": used_by for used_by, unit, params in members for param in params}
            gathers_once = config.pipeline.gather == "batch" or not STAGES[config.zero.stage].unshard_for_use
            pipeline = PipelineLayout(stages.placement, (), stages_of, gathers_once, index=pipeline_rank)
        if (tp := config.mesh.tp) > 1:
            params = [param for _, _, params in members for param in params]
            splits = {name: param.split(tp) for name, param in zip(names, params, strict=True)}
            tensor = TensorLayout(TensorPlan(), splits, tp, config.tensor.sequence_parallel)
        units = tuple(dict.fromkeys(entry.unit for entry in entries if entry.unit != ROOT))
        facts = ModelFacts(self.job.shape.name, units, tuple(entries))
        return self._counted(layout_of(facts, _legal(config), tensor, pipeline), counts)

    def _counted(self, layout: Layout, counts: Mapping[str, int]) -> RankLayerCounts:
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
        return RankLayerCounts(layout, tuple(LayerCount(group, counts[group.unit]) for group in groups))

    def _block(self, config: ResolvedConfig, *, has_experts: bool) -> tuple[SkeletonParam, ...]:
        key = (has_experts, config.lora)
        if key not in self._params:
            params = block_params(self.job.shape, has_experts=has_experts, expert_ranks=self.job.ep)
            self._params[key] = with_adapters(params, config.lora)
        return self._params[key]

    def _root(
        self, config: ResolvedConfig, stages: StageLayouts
    ) -> Iterator[tuple[tuple[int, ...], str, Sequence[SkeletonParam]]]:
        """Yield what is in no block, with the stages that use it."""
        shape, last = self.job.shape, stages.head_stage
        tokens, *positions = embedding_params(shape)
        yield tuple(sorted({0, last})) if shape.is_tied else (0,), ROOT, [tokens]
        yield (0,), ROOT, positions
        yield (stages.norm_stage,), ROOT, norm_params(shape)
        if not shape.is_tied:
            yield (last,), ROOT, head_params(shape)


def is_of_experts(group: GroupSpec) -> bool:
    """Say whether a group's parameters are of experts, which `ep` ranks split."""
    return _EXPERTS in group.name


def _blocks_of(stages: StageLayouts, stage: int, *, is_alone: bool) -> Iterator[tuple[str, bool, int]]:
    """Yield the equal blocks of a stage: their name, whether they have experts, their number.

    Without a pipeline the last one is apart: what it was gathered for in the forward serves its backward.
    """
    runs = [(has_experts, count) for has_experts, count in enumerate(stages.kinds[stage]) if count]
    for has_experts, count in runs:
        name, is_last = f"{'experts' if has_experts else 'dense'}.{stage}", is_alone and has_experts == runs[-1][0]
        if count > is_last:
            yield name, bool(has_experts), count - is_last
        if is_last:
            yield f"{name}.{_LAST}", bool(has_experts), 1


def _entry(config: ResolvedConfig, unit: str, param: SkeletonParam) -> ParamEntry:
    return ParamEntry(
        f"{unit}.{param.name}",
        (),
        unit + _EXPERTS * param.is_of_experts,
        param.stored_shape,
        requires_grad=trains_all(config) or is_adapter(param),
        is_opaque=param.is_packed,
        is_matrix=unit != ROOT and len(param.shape) > 1,
    )


def _legal(config: ResolvedConfig) -> ResolvedConfig:
    """Return a config without secondary shards that the engine would refuse, as changes of a candidate may have."""
    near, num_shards = config.zero.secondary_shard, config.mesh.dp_shard * config.mesh.cp
    if near and num_shards % near and not STAGES[config.zero.stage].unshard_for_use:
        return changed(config, {"zero.secondary_shard": 0})
    return config
