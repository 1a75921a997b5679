"""First values: rank 0's buffers are everybody's, and so are its parameters over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwise.comm import Comm, Comms
from shardwise.config import PrecisionConfig
from shardwise.deferred import ValueSource
from shardwise.layout.layout import Layout
from shardwise.layout.precision import buffer_dtype
from shardwise.memory import Category, Ledger
from shardwise.precision import torch_dtype
from shardwise.zero.group import ParamGroup


def adopt_buffers(model: nn.Module, precision: PrecisionConfig, memory: Ledger, comm: Comm) -> None:
    """Move a model's buffers to the device, with rank 0's values; `precision.buffers` says in which dtype.

    Args:
        model: whose buffers change.
        precision: of the engine.
        memory: counts the buffers.
        comm: over all ranks.
    """
    for name, buffer in model.named_buffers():
        buffer.data = buffer.data.to(comm.device, buffer_dtype(buffer.dtype, precision))
        memory.track(buffer, Category.OTHER)
        if comm.world_size > 1 and buffer.numel() > 0:
            comm.broadcast(buffer.data, f"buffer {name}")


def spread_first_values(values: ValueSource, layout: Layout, comms: Comms) -> None:
    """Let the first rank of each stage have the values of the very first rank, for what it holds.

    From there they go to the stage's other ranks. Where values are keyed by name, every rank draws the same.

    Args:
        values: of the model; one parameter is sent at a time.
        layout: says which parameters this rank holds.
        comms: of the engine.
    """
    if comms.pipeline.world_size == 1 or comms.model.rank > 0:
        return
    held = {group.name for group in layout.groups}
    dtype, device = torch_dtype(layout.precision.master), comms.pipeline.device
    for group in layout.model_groups:
        for place in group.params:
            name, shape = place.name, place.global_shape
            if values.is_blank(name) or values.is_same_everywhere(name):
                continue
            is_first = comms.pipeline.rank == 0
            sent = values.read(name).reshape(shape).to(device, dtype) if is_first else torch.empty(shape, dtype=dtype)
            sent = sent.to(device).contiguous()
            if sent.numel() > 0:
                comms.pipeline.broadcast(sent.view(-1), f"initial values of {name}")
            if group.name in held and not is_first:
                values.give(name, sent)


def agree_on_tied(groups: Sequence[ParamGroup], comms: Comms) -> None:
    """Let parameters that several stages hold start from equal values."""
    for group in groups:
        tied = comms.tied.get(group.holders)
        if tied is None:
            continue
        master = group.params.master
        whole = master.read(0, master.numel).to(tied.device, copy=True)
        tied.broadcast(whole, f"tied values of {group.spec.name}")
        master.write(0, whole)
        group.adopt_master()
