"""Resolve a layout: by the facts of a model, a config and a plan of tensor parallelism, on every axis.

>>> params = tuple(ParamEntry(f"{unit}.weight", (), unit, (64, 64), requires_grad=True) for unit in ("0", "1"))
>>> from shardwise.config.resolve import Config
>>> config = Config.from_dict({"zero": {"stage": 2}, "precision": {"param": "bf16"}})
>>> layout = resolve_layout(ModelFacts("Model", ("0", "1"), params), config.resolve(world_size=2))
>>> [group.name for group in layout.groups], layout.numel
(['0', '1'], 8192)
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import ResolvedConfig
from shardwise.layout.facts import ModelFacts, ParamEntry
from shardwise.layout.layout import Layout, assign_tiers_by_rank, states_of
from shardwise.layout.mesh_shape import SHARD_AXES, MeshShape, check_rank
from shardwise.layout.param_groups import aligned_to_blocks, build_groups, check_blocks, whole_below
from shardwise.layout.pipeline_layout import PipelineLayout
from shardwise.layout.precision import precision_policy
from shardwise.layout.stage_partition import find_partition
from shardwise.layout.tensor_plan import TensorLayout, TensorPlan, param_splits
from shardwise.layout.tp_sharding import ParamSplit, expert_split
from shardwise.layout.zero_stages import STAGES, ZeroStage, effective_stage
from shardwise.optim.rules import matrix_state_names
from shardwise.schedule.pipelines import placement_of

_LOG: Final = logging.getLogger("shardwise")


def resolve_layout(
    facts: ModelFacts, config: ResolvedConfig, plan: TensorPlan | None = None, *, rank: int = 0
) -> Layout:
    """Compute the layout of a model on every axis.

    Args:
        plan: how layers are split, if over several ranks.
        rank: whose stages are the layout's own, in a pipeline.

    Raises:
        ConfigError: the model has no parameters, there is no such rank, sizes do not divide, the model cannot be cut
            into the stages, or the optimizer has nothing to step.
    """
    mesh = MeshShape.from_config(config.mesh)
    check_rank(rank, mesh.world_size)
    pipeline = tensor = None
    if mesh.pp > 1:
        pipeline = _pipeline_layout(facts, config, mesh.coordinate(rank).pp)
    if plan is not None and mesh.tp > 1:
        _LOG.info("split over tp=%d:\n%s", mesh.tp, plan)
        is_sequence = config.tensor.sequence_parallel
        splits = param_splits([param for param in facts.params if not param.is_in_experts], plan, mesh.tp, is_sequence)
        tensor = TensorLayout(plan, splits, mesh.tp, is_sequence)
    return layout_of(facts, config, tensor, pipeline)


def layout_of(
    facts: ModelFacts,
    config: ResolvedConfig,
    tensor: TensorLayout | None = None,
    pipeline: PipelineLayout | None = None,
    trained: Collection[str] = (),
) -> Layout:
    """Compute the layout of a model of which it is known how it is split and cut.

    Args:
        trained: parameters that keep gradients and states whether or not they are frozen now.
    """
    mesh = MeshShape.from_config(config.mesh)
    if mesh.tp != (1 if tensor is None else tensor.degree):
        raise ConfigError(
            "tp-needs-plan", f"mesh.tp={mesh.tp} needs a plan of how layers are split; use shardwise.plan_layout"
        )
    entries = _entries(facts, config, trained)
    policy, units, stage = precision_policy(config.precision), facts.units, _stage(facts, config, mesh)
    splits = {} if tensor is None else dict(tensor.splits)
    of_experts = _expert_splits(facts, mesh, config)
    stages_of = None if pipeline is None else pipeline.stages_of
    below = whole_below(config.zero.keep_whole_below, stage, policy)
    for key in policy.block_keys[:1]:
        check_blocks(splits, "tp", key)
        check_blocks(of_experts, "ep", key)
    splits |= of_experts
    groups = build_groups(entries, units, mesh, config.zero.replicate_frozen, splits, stages_of, below)
    groups = aligned_to_blocks(groups, policy)
    groups = assign_tiers_by_rank(
        groups, config.tiers, lambda group: 0 if pipeline is None else pipeline.holders(group.stages)[0]
    )
    states = states_of(stage, policy, config.optimizer, groups)
    layout = Layout(mesh, units, groups, stage, policy, states, tensor, pipeline, facts=facts)
    return layout if pipeline is None else layout.of_pipeline_rank(pipeline.index)


def _stage(facts: ModelFacts, config: ResolvedConfig, mesh: MeshShape) -> ZeroStage:
    """Return the run's stage: that of the ranks that share the dense states, or else those of experts."""
    zero, num_shards = config.zero, mesh.size_along(SHARD_AXES)
    if num_shards == 1 and any(entry.experts for entry in facts.params):
        zero, num_shards = zero.model_copy(update={"secondary_shard": 0}), mesh.experts.size_along(SHARD_AXES)
    return effective_stage(zero, num_shards, config.tiers, is_scheduled=config.mesh.pp > 1)


def _expert_splits(facts: ModelFacts, mesh: MeshShape, config: ResolvedConfig) -> dict[str, ParamSplit]:
    """Return how the parameters that experts use are split among the ranks, by each of their names.

    What experts share is whole on every rank. Each tp rank uses it for other tokens, so its gradient is their sum.
    """
    has_experts, replays = any(entry.experts for entry in facts.params), config.experts.replay
    if (mesh.ep > 1 or replays) and not has_experts:
        key = "experts.replay=true sends tokens to" if mesh.ep == 1 else f"mesh.ep={mesh.ep} divides"
        raise ConfigError(
            "ep-without-experts",
            f"{key} experts, and {facts.kind} has none with Hugging Face's interface of experts; stack lists of them "
            "by shardwise.models.Experts.stacked, or set mesh.ep=1 and experts.replay=false, and zero.stage=3",
        )
    if config.compile.enabled and has_experts and (mesh.divides_experts or replays):
        raise ConfigError(
            "compile-with-experts",
            "compile.enabled=true compiles a block as one graph, and where its tokens go depends on their values; "
            "set compile.enabled=false, or mesh.ep=1, mesh.tp=1 and experts.replay=false",
        )
    if not mesh.divides_experts:
        return {}
    splits: dict[str, ParamSplit] = {}
    for entry in facts.params:
        if entry.experts is not None:
            split = expert_split(entry.shape, entry.experts, mesh.ep)
        elif entry.is_in_experts:
            split = ParamSplit(entry.shape, mesh.tp, is_partial=True)
        else:
            continue
        splits.update(dict.fromkeys((entry.name, *entry.aliases), split))
    return splits


def _entries(facts: ModelFacts, config: ResolvedConfig, trained: Collection[str]) -> list[ParamEntry]:
    """Return the parameters as the config has them stored and stepped."""
    has_matrices = bool(matrix_state_names(config.optimizer.name))
    if has_matrices and not any(entry.is_matrix for entry in facts.params):
        raise ConfigError(
            "muon-no-matrix",
            f"optimizer.name=muon steps the linear layers inside blocks, and {facts.kind} has none; name its "
            "blocks in zero.blocks, or set optimizer.name=adamw",
        )
    if not facts.params:
        raise ConfigError("no-parameters", f"{facts.kind} has no parameters; there is nothing to train or shard")
    return [
        _stored(
            entry,
            requires_grad=entry.requires_grad or entry.name in trained,
            is_wide=config.precision.param in entry.wide_in,
            is_matrix=has_matrices and entry.is_matrix,
            fused=entry.fused if has_matrices and entry.is_matrix else None,
        )
        for entry in facts.params
    ]


def _stored(entry: ParamEntry, **values: Any) -> ParamEntry:
    # Planners ask for thousands of layouts, in which no entry changes.
    return replace(entry, **values) if any(getattr(entry, name) != values[name] for name in values) else entry


def _pipeline_layout(facts: ModelFacts, config: ResolvedConfig, index: int) -> PipelineLayout:
    partition, section = find_partition(facts.stage_units, config), config.pipeline
    summary = partition.describe()
    _LOG.info("%d stages over pp=%d:\n%s", partition.num_stages, config.mesh.pp, summary)
    return PipelineLayout(
        placement_of(section.schedule, config.mesh.pp, section.virtual_stages),
        tuple(tuple(name for unit in stage for name in unit.modules) for stage in partition.stages),
        {entry.name: partition.stages_of[entry.name] for unit in partition.units for entry in unit.params},
        gathers_once=section.gather == "batch" or not STAGES[config.zero.stage].unshard_for_use,
        index=index,
        summary=summary,
    )
