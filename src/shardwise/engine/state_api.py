"""This module takes an engine's states out of training: it gathers and offloads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from shardwise.comm.records import CommError
from shardwise.engine.step_context import StepContext
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.runtime.module_hooks import saves_noted
from shardwise.zero.memory_release import STATES, MemoryRelease, ReleaseTarget
from shardwise.zero.state_access import take_over


@contextmanager
def gathered(context: StepContext, write: bool) -> Iterator[nn.Module]:
    """Keep all parameters whole inside; with `write` take over what rank 0 has written. See `Engine.gathered`."""
    context.status.check_present(params_suffice=not write)
    context.tiers.worker.check()
    _check_memory_to_gather(context)
    sharding = context.sharding
    was_held = sharding.is_held
    with context.failures_explained(), saves_noted() as saves:
        sharding.unshard_all()
        try:
            yield context.model
            if write:
                take_over(context.states())
        finally:
            if not was_held:
                sharding.reshard_all(release_held=True)
                if saves:  # a backward will read them
                    sharding.pin_all_until_backward()


def offload(context: StepContext, include: Sequence[str] | None, target: ReleaseTarget) -> Mapping[str, int]:
    """Move states away on all ranks, or on none; return the bytes that each has freed. See `Engine.offload`.

    Args:
        context: of the engine.
        include: states to move; None for all.
        target: where they go.
    """
    context.status.check()
    away = MemoryRelease(context.sharding, context.sharded, context.memory, context.pool, context.tiers, target)
    freed_bytes: Mapping[str, int] = {}
    failure: Exception | None = None
    try:
        freed_bytes = away.offload(STATES if include is None else include)
    except Exception as error:
        failure = error
    if context.holds_anywhere(failure is not None, "the end of engine.offload"):
        if failure is None:
            away.restore()
        raise failure or CommError(
            "other-rank-offload", "another rank could not offload its states and says why; nothing is offloaded"
        )
    context.status.release(away)
    return freed_bytes


def _check_memory_to_gather(context: StepContext) -> None:
    layout = context.layout
    if context.device.type != "cuda" or not layout.stage.unshard_for_use:
        return
    missing_bytes = sum(group.padded_numel * DTYPE_BYTES[layout.precision_of(group).param] for group in layout.groups)
    free_bytes, _ = torch.cuda.mem_get_info(context.device)
    free_bytes += torch.cuda.memory_reserved(context.device) - torch.cuda.memory_allocated(context.device)
    if context.holds_anywhere(missing_bytes > free_bytes, "memory to gather"):  # the gather needs all ranks
        raise MemoryError(
            f"gathering all parameters takes {missing_bytes / 2**30:.1f} GiB of {free_bytes / 2**30:.1f} GiB free; "
            "generate with the forward alone, which gathers block by block, or on more memory"
        )
