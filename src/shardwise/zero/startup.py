"""Spread first values: buffers come from rank 0, and so do parameters across the stages of a pipeline.

It is apart from `shardwise.zero.state_access`, which serves users between steps; this runs once, in `initialize`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn

from shardwise.comm.collectives import Comm
from shardwise.comm.mesh import CommGroups
from shardwise.config.resolve import PrecisionConfig
from shardwise.construction.opaque import as_bytes, quant_state, scales
from shardwise.construction.values import ParamInitializer
from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import GroupSpec
from shardwise.layout.precision import buffer_dtype
from shardwise.runtime.memory_tracker import Category, MemoryTracker
from shardwise.zero.optimizer_plan import NamedGroup
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.state_access import (
    MASTER,
    EngineState,
    read_held_state,
    read_optimizer_states,
    write_optimizer_states,
    write_state,
)


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


def regroup(states: EngineState, layout: Layout, named_groups: Sequence[NamedGroup]) -> None:
    """Make groups and optimizer follow a layout in which other parameters are trainable. All ranks call it.

    Args:
        named_groups: the optimizer's parameter groups by the names of all that is trainable now.
    """
    sharding = states.sharding
    there = {group.spec for group in sharding.groups}
    changed = {spec.unit for spec in there.symmetric_difference(layout.groups)}
    # One unit at a time: its masters and states are copied, its groups replaced, and the new ones filled, so that the
    # copies never take more memory than one unit.
    for unit in [unit.name for unit in sharding.units if unit.name in changed]:
        masters: dict[str, Tensor | None] = {}
        optimizer_states: dict[str, dict[str, Tensor]] = {}
        for spec in there.difference(layout.groups):
            keeps_exact = spec.trainable or layout.gather_codec(spec) is not None
            for place in spec.params if spec.unit == unit and keeps_exact else ():
                masters[place.name] = read_held_state(states, place.name, MASTER)
                if spec.trainable:
                    optimizer_states[place.name] = read_optimizer_states(states, place.name)
        sharding.regroup(unit, layout)
        states.sharded.regroup(sharding.groups, named_groups)
        for spec in set(layout.groups) - there:
            keeps_exact = spec.trainable or layout.gather_codec(spec) is not None
            for place in spec.params if spec.unit == unit and keeps_exact else ():
                if place.name in masters:
                    write_state(states, place.name, masters[place.name], MASTER)
                if spec.trainable and place.name in optimizer_states:
                    write_optimizer_states(states, place.name, optimizer_states[place.name])
    sharding.absent.follow(layout.elsewhere)
