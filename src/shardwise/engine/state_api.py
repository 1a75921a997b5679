"""State access has what is done with an engine's states outside of training: gather, read, write, offload.

`zero.state_access` and `zero.memory_release` do the work, and have the examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwise.comm.records import CommError
from shardwise.engine.step_context import StepContext
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.runtime.torch_private import num_recorded
from shardwise.zero import state_access as access
from shardwise.zero.memory_release import STATES, MemoryRelease, ReleaseTarget


class StateAccess:
    """Gathers, reads, writes and offloads the states of an engine.

    Args:
        context: of the engine.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context

    @contextmanager
    def gathered(self, write: bool) -> Iterator[nn.Module]:
        """Keep all parameters whole inside; with `write` every rank takes what rank 0 has written."""
        context = self._context
        context.status.check_present(params_suffice=not write)
        context.tiers.worker.check()
        self._check_memory_to_gather()
        sharding = context.sharding
        was_held, num_before = sharding.is_held, num_recorded()
        with context.failures_explained():
            sharding.unshard_all()
            try:
                yield context.model
                if write:
                    access.take_over(context.states())
            finally:
                if not was_held:
                    sharding.reshard_all(release_held=True)
                    if num_recorded() > num_before:
                        sharding.pin_all_until_backward()

    def read(self, name: str, state: str, to_rank: int | None) -> Tensor | None:
        """Return a copy of one state; the arguments are those of `Engine.read`."""
        self._context.status.check()
        return access.read_state(self._context.states(), name, state, to_rank)

    def write(self, name: str, value: Tensor | float | None, state: str, from_rank: int | None) -> None:
        """Replace one state; the arguments are those of `Engine.write`."""
        self._context.status.check()
        access.write_state(self._context.states(), name, value, state, from_rank)

    def states_of(self, name: str) -> tuple[str, ...]:
        """List the states of a parameter."""
        self._context.status.check()
        return access.states_of(self._context.states(), name)

    def offload(self, include: Sequence[str] | None, target: ReleaseTarget) -> Mapping[str, int]:
        """Move states away on all ranks, or on none; return the bytes that each has freed."""
        context = self._context
        context.status.check()
        away = MemoryRelease(context.sharding, context.sharded, context.memory, context.pool, context.tiers, target)
        freed_bytes: Mapping[str, int] = {}
        failure: Exception | None = None
        try:
            freed_bytes = away.offload(STATES if include is None else include)
        except Exception as error:
            failure = error
        if self._holds_anywhere(failure is not None, "the end of engine.offload"):
            if failure is None:
                away.restore()
            raise failure or CommError(
                "other-rank-offload", "another rank could not offload its states and says why; nothing is offloaded"
            )
        context.status.release(away)
        return freed_bytes

    def _check_memory_to_gather(self) -> None:
        context, layout = self._context, self._context.layout
        if context.device.type != "cuda" or not layout.stage.unshard_for_use:
            return
        missing_bytes = sum(
            group.padded_numel * DTYPE_BYTES[layout.precision_of(group).param] for group in layout.groups
        )
        free_bytes, _ = torch.cuda.mem_get_info(context.device)
        free_bytes += torch.cuda.memory_reserved(context.device) - torch.cuda.memory_allocated(context.device)
        if self._holds_anywhere(missing_bytes > free_bytes, "memory to gather"):  # the gather needs all ranks
            raise MemoryError(
                f"gathering all parameters takes {missing_bytes / 2**30:.1f} GiB of {free_bytes / 2**30:.1f} GiB free; "
                "generate with the forward alone, which gathers block by block, or on more memory"
            )

    def _holds_anywhere(self, is_so: bool, subject: str) -> bool:
        """Say whether something holds on any rank; all ranks call it."""
        flag = torch.tensor([float(is_so)], dtype=torch.float64, device=self._context.device)
        return self._context.comm.max_scalars(flag, subject) > [0.0]
