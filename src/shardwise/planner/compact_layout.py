"""Fold the Layout of a shape: equal blocks become one group with a count.

It says the same as `plan_layout` of the whole model, to the byte, at a cost that depends on neither the number of
layers nor that of data-parallel ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from shardwise.config.resolve import ResolvedConfig, Tier
from shardwise.layout.facts import ParamEntry
from shardwise.layout.layout import TIERS, Layout, assign_tiers, states_of
from shardwise.layout.mesh_shape import GRADIENT_AXES, SHARD_AXES, MeshShape
from shardwise.layout.param_groups import ROOT, GroupSpec, aligned_to_blocks, build_groups, whole_below
from shardwise.layout.pipeline_layout import PipelineLayout
from shardwise.layout.precision import precision_policy
from shardwise.layout.zero_stages import STAGES, ZeroStage, effective_stage
from shardwise.optim.rules import matrix_state_names
from shardwise.planner.job import PlanJob, trains_all
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
        self._templates: dict[tuple[Any, ...], tuple[GroupSpec, ...]] = {}
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
        s, stages, mesh, stage = config, self.stages.of(config), MeshShape.from_config(config.mesh), _stage(config)
        policy = precision_policy(s.precision)
        held_folds = [
            LayerCount(_placed(fold.group, mesh, self.job.ep), fold.count)
            for fold in self._held(s, stages, pipeline_rank)
        ]
        folds = tuple(self._tiered(s, held_folds, pipeline_rank))
        groups = tuple(fold.group for fold in folds)
        states = states_of(stage, policy, s.optimizer, groups)
        pipeline = None
        if s.mesh.pp > 1:
            gathers_once = s.pipeline.gather == "batch" or not STAGES[s.zero.stage].unshard_for_use
            pipeline = PipelineLayout(stages.placement, (), {}, gathers_once, index=pipeline_rank)
        units = tuple(dict.fromkeys(group.unit for group in groups if group.unit != ROOT))
        return RankLayerCounts(Layout(mesh, units, groups, stage, policy, states, None, pipeline), folds)

    def _tiered(self, config: ResolvedConfig, held: Sequence[LayerCount], pipeline_rank: int) -> Iterator[LayerCount]:
        """Yield the folds with the tiers of their states; a fold of which a share stays on the device becomes several.

        What several pipeline ranks hold is stored in the tier that it has on the first of them.
        """
        tiers = config.tiers
        if (tiers.params, tiers.grads, tiers.optimizer) == ("device",) * 3:
            yield from held
            return
        if not (tiers.params_on_device or tiers.grads_on_device or tiers.optimizer_on_device):
            yield from (LayerCount(assign_tiers((fold.group,), tiers)[0], fold.count) for fold in held)
            return
        rank_of = self.stages.of(config).placement.rank_of
        holders = [min(map(rank_of, fold.group.stages)) if config.mesh.pp > 1 else pipeline_rank for fold in held]
        own_folds = [fold for fold, holder in zip(held, holders, strict=True) if holder == pipeline_rank]
        # A block may have two groups.
        runs = [list(run) for _, run in groupby(own_folds, key=lambda fold: fold.group.unit)]
        unfolded = [
            replace(fold.group, name=f"{fold.group.name}.{index}")
            for run in runs
            for index in range(run[0].count)
            for fold in run
        ]
        assigned = {group.name: group.tiers for group in assign_tiers(unfolded, tiers)}
        for fold, holder in zip(held, holders, strict=True):
            if holder != pipeline_rank:
                of_holder = self.rank(config, holder).folds
                first = next(other for other in of_holder if other.group.name == fold.group.name)
                yield LayerCount(replace(fold.group, tiers=first.group.tiers), fold.count)
                continue
            counts = Counter(assigned[f"{fold.group.name}.{index}"] for index in range(fold.count))
            yield from (LayerCount(replace(fold.group, tiers=tiers_of), count) for tiers_of, count in counts.items())

    def _held(self, config: ResolvedConfig, stages: StageLayouts, pipeline_rank: int) -> Iterable[LayerCount]:
        """Yield the templates of what a pipeline rank holds: the root's first, the last block at the end."""
        held_stages = stages.placement.stages_of(pipeline_rank)
        for group in self._root(config, stages):
            if not set(group.stages).isdisjoint(held_stages):
                yield LayerCount(group, 1)
        for stage in held_stages:
            kinds = enumerate(stages.kinds[stage])
            runs = [(bool(is_of_experts), count, str(stage)) for is_of_experts, count in kinds if count]
            if config.mesh.pp == 1 and runs:  # what the last block was gathered for in the forward serves its backward
                has_experts, count, name = runs.pop()
                runs += [(has_experts, count - 1, name), (has_experts, 1, _LAST)]
            for has_experts, count, name in runs:
                groups = self._block(config, f"{'experts' if has_experts else 'dense'}.{name}", stage, has_experts)
                yield from (LayerCount(group, count) for group in groups if count)

    def _block(self, config: ResolvedConfig, name: str, stage: int, has_experts: bool) -> tuple[GroupSpec, ...]:
        below = _keep_whole_below(config)
        key = (config.mesh.tp, name, stage, below, config.lora, config.optimizer.name, config.precision)
        if key not in self._templates:
            params = with_adapters(
                block_params(self.job.shape, has_experts=has_experts, expert_ranks=self.job.ep), config.lora
            )
            parts = {
                suffix: [param for param in params if param.is_of_experts is bool(suffix)] for suffix in ("", _EXPERTS)
            }
            self._templates[key] = tuple(
                replace(group, name=group.name + suffix, stages=(stage,))
                for suffix, group_params in parts.items()
                for group in self._templates_of(group_params, config, name, below)
            )
        return self._templates[key]

    def _root(self, config: ResolvedConfig, stages: StageLayouts) -> tuple[GroupSpec, ...]:
        """Return the groups of what is in no block: one without a pipeline, else one for each set of stages that use
        it.
        """
        shape, last = self.job.shape, stages.head_stage
        below = _keep_whole_below(config)
        key = (config.mesh.tp, config.mesh.pp > 1, stages.norm_stage, last, below, config.lora, config.precision)
        if key in self._templates:
            return self._templates[key]
        tied = tuple(sorted({0, last})) if shape.is_tied else (0,)
        tables = embedding_params(shape)
        members = [((tied if index == 0 else (0,)), param) for index, param in enumerate(tables)]
        members += [((stages.norm_stage,), param) for param in norm_params(shape)]
        members += [] if shape.is_tied else [((last,), param) for param in head_params(shape)]
        by_stages: dict[tuple[int, ...], list[SkeletonParam]] = {}
        for used_by, param in members:
            by_stages.setdefault(used_by if config.mesh.pp > 1 else (0,), []).append(param)
        self._templates[key] = tuple(
            replace(group, name=f"{ROOT}@{'+'.join(map(str, used_by))}{group.name.removeprefix(ROOT)}", stages=used_by)
            for used_by, params in sorted(by_stages.items())
            for group in self._templates_of(params, config, ROOT, below)
        )
        return self._templates[key]

    def _templates_of(
        self, params: Sequence[SkeletonParam], config: ResolvedConfig, unit: str, below: int
    ) -> tuple[GroupSpec, ...]:
        """Return the groups of some parameters on one data rank: trained ones, frozen ones, those kept whole."""
        has_matrices = unit != ROOT and bool(matrix_state_names(config.optimizer.name))
        entries = [
            ParamEntry(
                param.name,
                (),
                unit,
                param.stored_shape,
                requires_grad=trains_all(config) or is_adapter(param),
                is_opaque=param.is_packed,
                is_matrix=has_matrices and len(param.shape) > 1,
            )
            for param in params
        ]
        splits = {param.name: param.split(config.mesh.tp) for param in params} if config.mesh.tp > 1 else None
        units = () if unit == ROOT else (unit,)
        groups = build_groups(entries, units, 1, 1, config.zero.replicate_frozen, splits, keep_whole_below=below)
        return aligned_to_blocks(groups, precision_policy(config.precision))


def is_of_experts(group: GroupSpec) -> bool:
    """Say whether a group's parameters are of experts, which `ep` ranks split."""
    return group.name.endswith(_EXPERTS)


def _placed(group: GroupSpec, mesh: MeshShape, ep: int) -> GroupSpec:
    """Give a template the ranks of a mesh; experts are on `ep` times fewer."""
    share = ep if is_of_experts(group) else 1
    num_ranks, num_shards = mesh.size_along(GRADIENT_AXES) // share, mesh.size_along(SHARD_AXES) // share
    return replace(group, num_ranks=max(1, num_ranks), num_shards=max(1, num_shards))


def _keep_whole_below(config: ResolvedConfig) -> int:
    return whole_below(config.zero.keep_whole_below, _stage(config), precision_policy(config.precision))


def _stage(config: ResolvedConfig) -> ZeroStage:
    zero, num_shards = config.zero, config.mesh.dp_shard * config.mesh.cp
    if zero.secondary_shard and num_shards % zero.secondary_shard and not STAGES[zero.stage].unshard_for_use:
        zero = zero.model_copy(update={"secondary_shard": 0})
    return effective_stage(zero, num_shards, config.tiers, is_scheduled=config.mesh.pp > 1)
