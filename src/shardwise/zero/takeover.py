"""What a user has written into whole parameters, inside `engine.gathered(write=True)`, made everybody's."""

from __future__ import annotations

import torch

from shardwise.tiers.sweep import CHUNK_NUMEL
from shardwise.zero.access import States
from shardwise.zero.tensor_parts import settle


def take_over(states: States) -> None:
    """Make what the first rank has written into whole parameters everybody's, in the masters too. All ranks call it.

    The first rank is rank 0; of a split layer's parts, and of a pipeline's stages, the first that holds them. A master
    keeps its precision where its parameter is unchanged.
    """
    data = states.comms.data
    for group in states.driver.groups:
        params = group.params
        if data.world_size > 1:
            data.broadcast(params.full, f"written parameters of {group.spec.name}")
        for place in group.spec.params:
            written = params.full[place.offset : place.offset + place.numel].view(place.shape)
            settle(place.split, written, states.comms.tensor, f"written {place.name}")
        tied = states.comms.tied.get(group.holders)
        if tied is not None:
            tied.broadcast(params.full, f"written parameters of {group.spec.name} on stages {group.spec.stages}")
        own = params.full[params.shard_start : params.shard_stop]
        for start in range(0, own.numel(), CHUNK_NUMEL) if params.master is not params.shard else ():
            written = own[start : start + CHUNK_NUMEL]
            master = params.master.read(start, start + written.numel()).to(own.device)
            is_changed = written != master.to(own.dtype)
            params.master.write(start, torch.where(is_changed, written.to(master.dtype), master))
        if params.is_released_between_uses:
            params.shard.forget()
            params.shard.write(0, own)
        for index in range(len(params.parameters)):
            params.accept_written(index)
