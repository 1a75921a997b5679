"""This module has what is done with an engine's states outside of training: gather, read, write, offload. One half of
`Engine`.

The methods have the names of the functions in `zero.state_access` and `zero.memory_release`, which have the examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Comm
from shardwise.comm.loss import LossAccumulator
from shardwise.comm.mesh import CommGroups
from shardwise.comm.records import CommError
from shardwise.comm.watchdog import Watchdog
from shardwise.config.errors import EngineError
from shardwise.config.resolve import Config
from shardwise.layout.layout import Layout
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.offload.nvme import SwapError
from shardwise.offload.tiers import Tiers
from shardwise.offload.worker import HostWorkError
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.memory_tracker import MemoryTracker, explain_out_of_memory
from shardwise.runtime.precision import LossScaler
from shardwise.runtime.torch_private import num_recorded
from shardwise.zero import memory_release
from shardwise.zero import state_access as access
from shardwise.zero.optimizer import ShardedOptimizer
from shardwise.zero.sharding_state import ShardingState
from shardwise.zero.state_access import take_over


class StateApi:
    """Provides the methods for states; `Engine` has the attributes and makes them."""

    model: nn.Module
    config: Config
    num_steps: int
    layout: Layout
    device: torch.device
    comm: Comm
    memory: MemoryTracker
    tiers: Tiers
    _pool: BufferPool
    _comms: CommGroups
    _sharding: ShardingState
    _sharded: ShardedOptimizer
    _losses: LossAccumulator
    _scaler: LossScaler
    _away: memory_release.MemoryRelease | None
    _is_broken: bool
    _is_closed: bool
    _is_half_loaded: bool
    _watchdog: Watchdog | None

    @contextmanager
    def gathered(self, write: bool = False) -> Iterator[nn.Module]:
        """Keep all parameters whole on every rank inside the context: to generate, to inspect. All ranks must enter.

        With `mesh.tp` more than 1, parameters of split layers are whole over the data ranks, but still this rank's part
        of the layer: `read` gives, and `write` takes, whole tensors. With `mesh.pp` more than 1, each rank has the
        parameters of its own stages; those of others are on meta, and `model.load_state_dict` needs them left out.

        Args:
            write: at the end every rank takes what rank 0 has written into the parameters (`load_state_dict`,
                `nn.init`, in place under `torch.no_grad`), in the optimizer's masters too; after an exception it does
                not. Each part of a split layer is taken from the first rank that has that part; padding is zeroed. Each
                parameter of a pipeline's stage is taken from the first rank that holds it.

        Raises:
            MemoryError: on CUDA, the whole parameters would not fit into the free memory.
        """
        self._refuse_if_away(params_suffice=True)
        self.tiers.worker.check()
        if write:
            self._refuse_if_away()
        self._check_memory_to_gather()
        was_held, num_before = self._sharding.is_held, num_recorded()
        with self._failures_explained():
            self._sharding.unshard_all()
            try:
                yield self.model
                if write:
                    take_over(self._states())
            finally:
                if not was_held:
                    self._sharding.reshard_all(release_held=True)
                    if num_recorded() > num_before:
                        self._sharding.pin_all_until_backward()

    def read(self, name: str, state: str = "param", *, to_rank: int | None = None) -> Tensor | None:
        """Return a copy of one state of a parameter, whole, on every rank or on one; see
        `zero.state_access.read_state`. All ranks call it.

        Args:
            name: of the parameter.
            state: `param`, or one that `states_of` lists.
            to_rank: the only rank that gets it; None for all.
        """
        self._check_usable()
        return access.read_state(self._states(), name, state, to_rank)

    def write(
        self, name: str, value: Tensor | float | None, state: str = "param", *, from_rank: int | None = None
    ) -> None:
        """Replace one state of a parameter by every, or one, rank's value; see `zero.state_access.write_state`. All
        ranks call it.

        Args:
            name: of the parameter.
            value: the whole state; None on ranks that give none.
            state: `param`, or one that `states_of` lists.
            from_rank: the only rank whose value counts; None where every rank gives it.
        """
        self._check_usable()
        access.write_state(self._states(), name, value, state, from_rank)

    def states_of(self, name: str) -> tuple[str, ...]:
        """List what `read` and `write` take as `state` of a parameter now. All ranks call it."""
        self._check_usable()
        return access.states_of(self._states(), name)

    def offload(
        self,
        include: Sequence[str] | None = None,
        to: memory_release.Target = "host",
        *,
        path: str | Path | None = None,
        pin_memory: bool = True,
    ) -> Mapping[str, int]:
        """Free memory between phases, for generation or reinforcement learning: move states away until `reload`.

        All ranks call it. Without `params` in `include` the model can still be evaluated. Buffers of the model stay.
        See `zero.memory_release`.

        Args:
            include: of `optimizer`, `master`, `grads`, `params`; None for all.
            to: "host" moves what is stored on the device to host memory. "nvme" moves that, and what is stored on the
                host, into a file, so that both memories are free. What is stored on NVMe stays there either way.
            path: the folder for that file; None for `tiers.nvme_path`.
            pin_memory: pin the host memory, on CUDA: several times as fast, and torch keeps it for the next time.

        Returns:
            the bytes that each state has freed: of the device, and with "nvme" of device and host together.

        Raises:
            ConfigError: there is no such state or target, or no folder is named.
            SwapError: the disk is full, or the folder cannot be written. After any error all states are as they were.
            MemoryError: the host has too little memory.
            CommError: another rank has failed in this way.
            EngineError: inside `gathered`, or states are away already.
        """
        self._check_usable()
        target = memory_release.ReleaseTarget(to, None if path is None else Path(path), pin_memory)
        away = memory_release.MemoryRelease(self._sharding, self._sharded, self.memory, self._pool, self.tiers, target)
        freed_bytes: Mapping[str, int] = {}
        failure: Exception | None = None
        try:
            freed_bytes = away.offload(memory_release.STATES if include is None else include)
        except Exception as error:
            failure = error
        failed = torch.tensor([float(failure is not None)], dtype=torch.float64, device=self.device)
        if self.comm.max_scalars(failed, "the end of engine.offload") > [0.0]:
            if failure is None:
                away.restore()
            raise failure or CommError(
                "other-rank-offload", "another rank could not offload its states and says why; nothing is offloaded"
            )
        self._away = away
        return freed_bytes

    def reload(self) -> None:
        """Move the states back: they are as they were, bit for bit. Do nothing where none are away.

        Raises:
            torch.OutOfMemoryError: the device has too little memory; call it again once there is enough.
            SwapError: the file cannot be read; go on with a new engine from the last checkpoint.
        """
        if self._away is not None:
            self._away.restore()
            self._away = None

    @contextmanager
    def offloaded(
        self,
        include: Sequence[str] | None = None,
        to: memory_release.Target = "host",
        *,
        path: str | Path | None = None,
        pin_memory: bool = True,
    ) -> Iterator[Mapping[str, int]]:
        """Call `offload` for the context, and `reload` at its end. The arguments are those of `offload`.

        Args:
            include: states to move.
            to: where they go.
            path: the folder for a file.
            pin_memory: of the host.
        """
        freed_bytes = self.offload(include, to, path=path, pin_memory=pin_memory)
        try:
            yield freed_bytes
        finally:
            self.reload()

    @contextmanager
    def _failures_explained(self) -> Iterator[None]:
        """Raise a failure of memory inside with the table of what this rank holds and the settings that help.

        A failure of the host or of NVMe happens on this rank alone, so it is noted for the others.
        """
        where = f"on rank {self.comm.rank} in step {self.num_steps + 1}"
        try:
            with explain_out_of_memory(self.memory, self.config, where):
                yield
        except (HostWorkError, SwapError) as error:
            if self._watchdog is not None:
                self._watchdog.note_failure(str(error))
            raise

    def _states(self) -> access.EngineState:
        self._sharding.drain()
        self.tiers.wait_idle()
        return access.EngineState(
            self._sharding, self._sharded, self._comms, self._losses, self._scaler.scale, self.layout.elsewhere
        )

    def _refuse_if_away(self, params_suffice: bool = False) -> None:
        if self._is_closed:
            raise EngineError("engine-closed", "the engine is closed; call shardwise.initialize for a new one")
        if self._away is not None:
            self._away.refuse(params_suffice)

    def _check_usable(self, params_suffice: bool = False) -> None:
        self._refuse_if_away(params_suffice)
        if self._is_broken:
            raise EngineError(
                "gradients-incomplete",
                "the last backward raised and left gradients incomplete; call engine.zero_grad() first",
            )
        if self._is_half_loaded:
            raise EngineError(
                "states-mixed",
                "states are mixed, since the last load or step was cut off midway; load a checkpoint that is whole",
            )
        self.tiers.worker.check()

    def _check_memory_to_gather(self) -> None:
        if self.device.type != "cuda" or not self.layout.stage.unshard_for_use:
            return
        layout = self.layout
        missing_bytes = sum(
            group.padded_numel * DTYPE_BYTES[layout.precision_of(group).param] for group in layout.groups
        )
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        free_bytes += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        lacks = torch.tensor([float(missing_bytes > free_bytes)], dtype=torch.float64, device=self.device)
        if self.comm.max_scalars(lacks, "memory to gather") > [0.0]:  # the same on all ranks: the gather needs them all
            raise MemoryError(
                f"gathering all parameters takes {missing_bytes / 2**30:.1f} GiB of {free_bytes / 2**30:.1f} GiB free; "
                "generate with the forward alone, which gathers block by block, or on more memory"
            )
