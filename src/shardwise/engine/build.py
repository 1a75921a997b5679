"""This module makes the parts of an engine, in the order in which they need each other, and what undoes them."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.comm.agreement import Agreement, all_or_none
from shardwise.comm.collectives import Comm, CommFactory
from shardwise.comm.consistency import BatchCheck
from shardwise.comm.loss import LossAccumulator, LossFn
from shardwise.comm.mesh import CommGroups, connect
from shardwise.comm.p2p import P2PChannels
from shardwise.comm.watchdog import Watchdog, watch
from shardwise.config.resolve import PrecisionConfig, ResolvedConfig
from shardwise.construction.opaque import as_bytes, quant_state, scales
from shardwise.construction.values import ParamInitializer
from shardwise.context.apply import apply_context_parallel
from shardwise.context.batch import BatchSharder
from shardwise.dropout import KeyedDraws, key_dropouts
from shardwise.engine.hook_views import SplitModelValues
from shardwise.engine.parts import EngineParts, EngineStatus, StepState
from shardwise.engine.pipeline_runner import PipelineRunner, make_stages
from shardwise.engine.runner import SequentialRunner, StepRunner
from shardwise.engine.state_api import note_engine
from shardwise.engine.step import StepEvents
from shardwise.engine.types import Scheduler
from shardwise.engine.whole_values import check_of_graphs
from shardwise.experts.adapter import divide_experts
from shardwise.experts.balance import RouterBalance
from shardwise.experts.routers import Routers
from shardwise.layout.layout import Layout
from shardwise.layout.mesh_shape import CONTEXT_AXES, PIPELINE_AXES, TENSOR_AXES
from shardwise.layout.param_groups import GroupSpec
from shardwise.layout.pipeline_layout import PipelineLayout
from shardwise.offload.activations import ActivationStore, build_store
from shardwise.offload.tiers import Tiers
from shardwise.optim.schedules import own_scheduler
from shardwise.pipeline.stage_module import StageForward
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.device import Streams
from shardwise.runtime.fp8_linears import convert_linears
from shardwise.runtime.memory_tracker import Category, MemoryTracker
from shardwise.runtime.module_calls import call_after_forward
from shardwise.runtime.optimizer_probe import check_scheduler
from shardwise.runtime.precision import LossScaler, buffer_dtype
from shardwise.runtime.recompute import replace_forwards
from shardwise.runtime.timeline import Timeline
from shardwise.runtime.user_hooks import HooksOnce
from shardwise.tensor.apply import dropout_zones, split_model
from shardwise.tensor.chunked import chunk_model
from shardwise.tensor.layers import mappings_of
from shardwise.tensor.loss_parallel import LazyLogitsHead, deferring_heads, settle_all
from shardwise.tensor.sequence_proof import prove_sequences
from shardwise.zero.optimizer import ShardedOptimizer
from shardwise.zero.optimizer_plan import OptimizerFactory, OptimizerPlan, plan_optimizer
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.resources import ShardingResources
from shardwise.zero.sharding_state import ShardingState


@dataclass(frozen=True)
class EngineInputs:
    """Bundles what an engine is made of.

    Attributes:
        model: any module; it is changed in place.
        layout: which slice of each state each rank holds.
        memory: the tracker of the device on which the engine computes.
        comm_factory: makes the communicators, real or simulated.
        loss_fn: as for `initialize`, and so are `optimizer` and `scheduler`.
        has_values: False where the caller writes all values later, so that none are drawn or sent.
    """

    model: nn.Module
    config: ResolvedConfig
    layout: Layout
    memory: MemoryTracker
    comm_factory: CommFactory
    loss_fn: LossFn | None = None
    optimizer: Optimizer | OptimizerFactory | None = None
    scheduler: Scheduler | None = None
    has_values: bool = True

    @cached_property
    def agreement(self) -> Agreement:
        """Return that of all ranks of the engine."""
        factory, ranks = self.comm_factory, range(self.layout.mesh.world_size)
        return Agreement(factory.store, ranks, factory.rank, self.config.run.timeout_s, "engine")


def build(inputs: EngineInputs) -> tuple[EngineParts, StepRunner, ExitStack]:
    """Make the parts of an engine.

    Returns:
        the parts, the runner, and for `release` what is to be closed; after an error all is closed.
    """
    model, config, layout, memory = inputs.model, inputs.config, inputs.layout, inputs.memory
    comm_factory, device = inputs.comm_factory, inputs.memory.device
    with ExitStack() as cleanup:
        cleanup.callback(comm_factory.close)
        streams, pool = Streams(device, config.zero.overlap), BufferPool(device, memory)
        optimizer_plan = plan_optimizer(inputs.optimizer, config.optimizer, model, layout, device)
        optimizer_plan.groups_of(layout)  # refused before ranks meet
        has_owners = optimizer_plan.may_step_whole
        comms = connect(comm_factory, layout.mesh, config, device, streams, pool, layout, has_owners)
        timeline, comm_log = Timeline(comm_factory.rank), comms.all.comm_log
        timeline.clock.waited_s = lambda: comm_log.waited_s
        watchdog = watch(comm_factory.store, comm_log, timeline, config.run, device)
        if watchdog is not None:
            cleanup.callback(watchdog.close)
        cleanup.callback(pool.trim)
        values = ParamInitializer(model, config.run.seed, inputs.has_values)
        broadcast_buffers(model, config.precision, memory, comms.all)
        broadcast_scales(model, memory, comms.all)
        stages = make_stages(model, layout, device, comms.all.is_simulated)
        tiers = _open_tiers(inputs, streams, comms.all.is_simulated)
        cleanup.callback(tiers.close)
        zero = config.zero
        events = StepEvents()
        resources = ShardingResources(
            comms,
            pool,
            memory,
            timeline,
            values,
            tiers,
            zero.overlap,
            zero.lockstep,
            layout.precision.states,
            events,
        )
        broadcast_params_across_stages(values, layout, comms)
        sharding = ShardingState(model, layout, resources)
        try:
            agree_on_tied(sharding.groups, comms)
            values.close()
            with all_or_none(inputs.agreement, "optimizer"):
                parts, pipes = _make_parts(inputs, resources, sharding, optimizer_plan, watchdog, stages, cleanup)
            events.follow(parts)
            runner: StepRunner = SequentialRunner(parts)
            if stages is not None and pipes is not None:
                runner = PipelineRunner(parts, stages, pipes)
                cleanup.callback(runner.close)
        except BaseException:
            release(cleanup, tiers, sharding)
            raise
        return parts, runner, cleanup.pop_all()


def release(cleanup: ExitStack, tiers: Tiers, sharding: ShardingState, keep_values: bool = True) -> None:
    """Give the model its parameters back and close all else; a rank frees its own even where others do not come.

    Args:
        keep_values: False leaves the parameters without values, on meta.
    """
    with cleanup:
        # Parameters become whole even if their values are spoilt; the failure that spoilt them is raised once.
        unreported = tiers.recover().unreported
        sharding.close(keep_values)
        if unreported is not None:
            raise unreported


def _open_tiers(inputs: EngineInputs, streams: Streams, is_simulated: bool) -> Tiers:
    """Reserve memory on the host and on NVMe, on all ranks or none."""
    config, comm_factory = inputs.config, inputs.comm_factory
    tiers = Tiers(config.tiers, inputs.layout, streams, inputs.memory, comm_factory.rank, is_simulated)
    if "nvme" in (config.tiers.params, config.tiers.grads, config.tiers.optimizer):
        try:
            with all_or_none(inputs.agreement, "tiers"):
                tiers.reserve()
        except BaseException:
            tiers.close()
            raise
    return tiers


def _make_parts(
    inputs: EngineInputs,
    resources: ShardingResources,
    sharding: ShardingState,
    optimizer_plan: OptimizerPlan,
    watchdog: Watchdog | None,
    stages: StageForward | None,
    cleanup: ExitStack,
) -> tuple[EngineParts, P2PChannels | None]:
    """Alter the model's modules, open the channels between stages, and make the optimizer and what a step needs."""
    config, layout, comm_factory, comms = inputs.config, inputs.layout, inputs.comm_factory, resources.comms
    rank, pipes = comm_factory.rank, None
    draws = KeyedDraws(config.run.seed, inputs.memory.device, config.mesh.cp)
    sequences, activations, experts, balance = _alter_modules(inputs, resources, draws, cleanup)
    if stages is not None:
        _undo_at_end(cleanup, stages.install({"routers": balance.tables}))
        streams, comm_log = resources.tiers.streams, comms.all.comm_log
        pipes = P2PChannels(comm_factory, layout.mesh, streams.device, config.run.timeout_s, streams, comm_log)
    sharded = ShardedOptimizer(sharding.groups, optimizer_plan.groups_of(layout), optimizer_plan, resources)
    if inputs.scheduler is not None:
        check_scheduler(inputs.scheduler, sharded.optimizer)
    split_values, hooks_once = _follow_hooks(inputs, comms, draws, sharding, cleanup)
    one_sample = layout.mesh.ranks_along((*PIPELINE_AXES, *CONTEXT_AXES, *TENSOR_AXES), rank)
    scheduler = inputs.scheduler or own_scheduler(config, sharded.optimizer)
    watched = balance if len(balance.counts) else None
    parts = EngineParts(
        model=inputs.model,
        state=StepState(config, layout, inputs.loss_fn, scheduler, deque(maxlen=config.batch.accumulation), watched),
        resources=resources,
        comm_factory=comm_factory,
        watchdog=watchdog,
        status=EngineStatus(resources.tiers.worker.outcome),
        agreement=inputs.agreement,
        check_batch=BatchCheck(comm_factory.store, one_sample, rank, config.run),
        losses=LossAccumulator(comms),
        scaler=LossScaler(config.precision),
        draws=draws,
        sequences=sequences,
        activations=activations,
        sharding=sharding,
        sharded=sharded,
        optimizer_plan=optimizer_plan,
        split_values=split_values,
        heads=deferring_heads(inputs.model),
        hooks_once=hooks_once,
        experts=experts,
    )
    if parts.heads:
        settle = partial(_settle_if_alone, parts.heads, weakref.ref(sharding))
        cleanup.callback(call_after_forward(inputs.model, settle).remove)
    _undo_at_end(cleanup, (sharded.close, parts.losses.clear, parts.state.batches.clear))
    cleanup.callback(note_engine(parts))
    cleanup.callback(parts.note_update)
    return parts, pipes


def _settle_if_alone(heads: Sequence[LazyLogitsHead], sharding: weakref.ref[ShardingState]) -> None:
    """Settle logits at the end of a forward that no call of the engine runs, before parameters are resharded."""
    state = sharding()
    if state is not None and not state.is_serving and not torch.is_grad_enabled():
        settle_all(heads)


def _follow_hooks(
    inputs: EngineInputs, comms: CommGroups, draws: KeyedDraws, sharding: ShardingState, cleanup: ExitStack
) -> tuple[SplitModelValues | None, HooksOnce | None]:
    """Make what shows whole values to hooks of users and to losses, and what recomputes without hooks that look."""
    model, config, tensor = inputs.model, inputs.config, inputs.layout.tensor
    values = once = None
    if tensor is not None and (mappings := mappings_of(model)) is not None and not comms.all.is_simulated:
        values = SplitModelValues(model, tensor, config, mappings, draws, sharding)
        cleanup.callback(values.views.close)
    if config.recompute.mode != "none":
        once = HooksOnce(model.get_submodule(name) for name in inputs.layout.held_units)
        cleanup.callback(once.close)
    return values, once


def _alter_modules(
    inputs: EngineInputs, resources: ShardingResources, draws: KeyedDraws, cleanup: ExitStack
) -> tuple[BatchSharder | None, ActivationStore | None, Routers | None, RouterBalance]:
    """Set up attention, split layers, experts, convert linear ones, key dropouts, chunk, recompute and compile, in this
    order.

    Returns:
        what shares batches out, where activations are offloaded, what dispatches tokens to experts, and what watches
        their routers.
    """
    model, config, layout, tiers = inputs.model, inputs.config, inputs.layout, resources.tiers
    tensor, tp = layout.tensor, resources.comms.tensor
    places = [place for group in layout.model_groups for place in group.params if place.over_tp is not None]
    shapes = {name: place.global_shape for place in places for name in (place.name, *place.aliases)}
    if tensor is not None and not resources.comms.all.is_simulated:
        _undo_at_end(cleanup, prove_sequences(model, tensor, config, shapes))
    context, shifts_labels = resources.comms.context, layout.facts.shifts_labels
    sequences, undo_context = apply_context_parallel(model, config, context, shifts_labels, shapes)
    _undo_at_end(cleanup, undo_context)
    if tensor is not None:
        is_in_pipeline, cp = layout.pipeline is not None, config.mesh.cp
        undo = split_model(model, tensor.plan, tp, config.tensor, tensor.splits, is_in_pipeline, cp)
        _undo_at_end(cleanup, undo)
    mappings = mappings_of(model) if tensor is not None else None
    experts, tokens = None, resources.comms.tokens
    if any(entry.experts for entry in layout.facts.params):
        experts = divide_experts(model, layout, mappings, tokens, config.experts, cleanup)
    balance = RouterBalance(model, layout, config, resources.comms, mappings, cleanup)
    is_simulated = resources.comms.all.is_simulated
    _undo_at_end(cleanup, convert_linears(model, layout, config.precision, inputs.memory.device, is_simulated))
    zones = dropout_zones(model, tensor, tp.rank) if tensor is not None else {}
    compiled = layout.units if config.compile.enabled else ()
    stages = layout.pipeline.units if layout.pipeline is not None else ()
    keyed = key_dropouts(
        model,
        draws,
        zones,
        must_be_keyed=tensor is not None,
        compiled=compiled,
        shares=_shared_forward(config),
        stage_units=[unit for units in stages for unit in units],
        absent_ids=_absent_ids(model, layout.pipeline) if layout.pipeline is not None else (),
    )
    _undo_at_end(cleanup, keyed)
    _undo_at_end(cleanup, chunk_model(model, config, layout, draws))
    activations = build_store(config, tiers.streams, tiers.buffers, tiers.traffic, inputs.memory)
    check_graph = check_of_graphs(model, tensor, layout.units) if tensor is not None else None
    _undo_at_end(cleanup, replace_forwards(model, layout, config, activations, check_graph))
    return sequences, activations, experts, balance


def _absent_ids(model: nn.Module, pipeline: PipelineLayout) -> set[int]:
    """Return the ids of the modules that are in units of other ranks alone."""
    units = [(stage in pipeline.held, unit) for stage, names in enumerate(pipeline.units) for unit in names]
    modules = [(is_held, id(module)) for is_held, unit in units for module in model.get_submodule(unit).modules()]
    return {module for _, module in modules} - {module for is_held, module in modules if is_held}


def _shared_forward(config: ResolvedConfig) -> str:
    """Return by which key of the config ranks compute parts of one forward that may draw; "" for none."""
    if config.mesh.pp > 1:
        return "mesh.pp"
    if config.mesh.cp > 1:
        return "mesh.cp"
    return "tensor.sequence_parallel" if config.mesh.tp > 1 and config.tensor.sequence_parallel else ""


def _undo_at_end(cleanup: ExitStack, undo: Iterable[Callable[[], None]]) -> None:
    for each in undo:
        cleanup.callback(each)


def broadcast_buffers(model: nn.Module, precision: PrecisionConfig, memory: MemoryTracker, comm: Comm) -> None:
    """Move a model's buffers to the device, with rank 0's values; `precision.buffers` says in which dtype."""
    for name, buffer in model.named_buffers():
        buffer.data = buffer.data.to(comm.device, buffer_dtype(buffer.dtype, precision))
        memory.track(buffer, Category.OTHER)
        if comm.world_size > 1 and buffer.numel() > 0:
            comm.broadcast(buffer.data, f"buffer {name}")


def broadcast_scales(model: nn.Module, memory: MemoryTracker, comm: Comm) -> None:
    """Move to the device what unpacks a model's packed parameters, with rank 0's values, as they are stored.

    Args:
        model: the model whose parameters have scales.
    """
    for parameter in model.parameters():
        if (state := quant_state(parameter)) is not None:
            state.to(comm.device)
    for module in model.modules():
        # bitsandbytes would replace the bytes by others on the CPU in evaluation, and these would be in no shard.
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    for name, tensor in scales(model):
        memory.track(tensor, Category.OTHER)
        if comm.world_size > 1 and tensor.numel() > 0:
            comm.broadcast(tensor.view(-1), f"scales {name}")


def broadcast_params_across_stages(values: ParamInitializer, layout: Layout, comms: CommGroups) -> None:
    """Send the first rank's initial values to the first rank of each stage, for the parameters that it holds.

    From there they go to the stage's other ranks, and replace the values that those have. Where values are keyed by
    name, every rank draws the same. Where each rank has a slice, the stage's ranks share the slices of their own
    parameters from now on.

    Args:
        values: the model's initial values; one parameter is sent at a time.
        layout: says which parameters this rank holds.
    """
    if comms.pipeline.world_size == 1 or not values.has_values:
        return
    held = {group.name for group in layout.groups}
    for group in _by_turns(layout.model_groups):
        for place in group.params:
            if values.is_sharded(place.name):
                values.move(place.name, comms.model if group.name in held else None)
    if comms.model.rank > 0:
        return
    for group in layout.model_groups:
        for place in group.params:
            if values.is_same_everywhere(place.name) or place.numel == 0:
                continue
            own = values.read(place.name)
            sent = own.to(comms.pipeline.device).contiguous()
            flat = as_bytes(sent) if group.is_opaque else sent.view(-1)
            comms.pipeline.broadcast(flat, f"initial values of {place.name}")
            own.copy_(sent)


def _by_turns(groups: Sequence[GroupSpec]) -> list[GroupSpec]:
    """Order groups so that the stages take turns: so a rank gives away as much as it takes."""
    seen: Counter[tuple[int, ...]] = Counter()

    def turn(group: GroupSpec) -> int:
        seen[group.stages] += 1
        return seen[group.stages]

    return sorted(groups, key=turn)


def agree_on_tied(groups: Sequence[ParamGroup], comms: CommGroups) -> None:
    """Make parameters that several stages hold start from equal values."""
    for group in groups:
        tied = comms.tied.get(group.holders)
        if tied is None:
            continue
        master = group.master
        whole = master.read(0, master.numel).to(tied.device, copy=True)
        tied.broadcast(whole, f"tied values of {group.spec.name}")
        master.write(0, whole)
        group.adopt_master()
