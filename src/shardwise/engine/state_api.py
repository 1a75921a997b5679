"""What is done with an engine's states beside training: gather, read, write, hand over. One half of `Engine`.

Under the same names as the functions in `zero.access` and `zero.memory_release`, which have the examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Comm, CommError, CommGroups
from shardwise.comm.loss import LossAccumulator
from shardwise.comm.watchdog import Watchdog
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
    """The methods; `Engine` has the attributes, and makes them."""

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
            write: at the end, what rank 0 has written into the parameters (`load_state_dict`, `nn.init`, in place under
                `torch.no_grad`) becomes everybody's, in the optimizer's masters too; after an exception it does not.
                Of split layers each rank's part is what the first rank with that part has written; padding is zeroed.
                So too of the stages of a pipeline: of each parameter, what the first rank that holds it has written.

        Raises:
            MemoryError: on CUDA, the whole parameters would not fit beside what is there.
        """
        self._refuse_if_away(params_suffice=True)
        self.tiers.worker.check()
        if write:
            self._refuse_if_away()
        self._check_room_to_gather()
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
                        self._sharding.keep_all_until_backward()

    def read(self, name: str, state: str = "param", *, to_rank: int | None = None) -> Tensor | None:
        """A copy of one state of a parameter, whole, on every rank or on one; see `access.read_state`. All call it."""
        self._check_usable()
        return access.read_state(self._states(), name, state, to_rank)

    def write(
        self, name: str, value: Tensor | float | None, state: str = "param", *, from_rank: int | None = None
    ) -> None:
        """Replace one state of a parameter by every, or one, rank's value; see `access.write_state`. All call it."""
        self._check_usable()
        access.write_state(self._states(), name, value, state, from_rank)

    def states_of(self, name: str) -> tuple[str, ...]:
        """What `read` and `write` take as `state` of a parameter now. All ranks call it."""
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
        """Hand memory over between phases, for generation or reinforcement learning: put states aside until `reload`.

        All ranks call it alike. Without `params` in `include` the model can still be evaluated. Buffers of the model
        stay. See `zero.memory_release`.

        Args:
            include: of `optimizer`, `master`, `grads`, `params`; None for all.
            to: "host" moves what rests on the device to host memory. "nvme" moves that, and what rests on the host,
                into a file, so that both memories are free. What rests on NVMe stays there either way.
            path: the folder for that file; None for `tiers.nvme_path`.
            pin_memory: of the host, on CUDA: several times as fast, and torch keeps it for the next time.

        Returns:
            the bytes that each state has freed: of the device, and with "nvme" of device and host together.

        Raises:
            ConfigError: there is no such state or target, or no folder is named.
            SwapError: the folder has no room, or cannot be written. After this and any other error all is as it was.
            MemoryError: the host has no room.
            CommError: another rank has failed so.
            RuntimeError: inside `gathered`, or states are away already.
        """
        self._check_usable()
        aside = memory_release.ReleaseTarget(to, None if path is None else Path(path), pin_memory)
        away = memory_release.MemoryRelease(self._sharding, self._sharded, self.memory, self._pool, self.tiers, aside)
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
            raise failure or CommError("another rank could not offload its states and says why; nothing is offloaded")
        self._away = away
        return freed_bytes

    def reload(self) -> None:
        """Take the memory back: the states are as they were, bit for bit. Does nothing where none are away.

        Raises:
            torch.OutOfMemoryError: the device has no room; call it again once there is some.
            SwapError: the file cannot be read; a new engine goes on from the last checkpoint.
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
        """`offload` for the context."""
        freed_bytes = self.offload(include, to, path=path, pin_memory=pin_memory)
        try:
            yield freed_bytes
        finally:
            self.reload()

    @contextmanager
    def _failures_explained(self) -> Iterator[None]:
        """Inside, a failure of memory is raised with the table of what this rank holds and the settings that help.

        A failure of the host or of NVMe is this rank's alone, so the others are told.
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
        self._sharding.settle()
        self.tiers.settle()
        return access.EngineState(
            self._sharding, self._sharded, self._comms, self._losses, self._scaler.scale, self.layout.elsewhere
        )

    def _refuse_if_away(self, params_suffice: bool = False) -> None:
        if self._is_closed:
            raise RuntimeError("the engine is closed; call shardwise.initialize for a new one")
        if self._away is not None:
            self._away.refuse(params_suffice)

    def _check_usable(self, params_suffice: bool = False) -> None:
        self._refuse_if_away(params_suffice)
        if self._is_broken:
            raise RuntimeError("the last backward raised and left gradients incomplete; call engine.zero_grad() first")
        if self._is_half_loaded:
            raise RuntimeError(
                "states are mixed, since the last load or step was cut off midway; load a checkpoint that is whole"
            )
        self.tiers.worker.check()

    def _check_room_to_gather(self) -> None:
        if self.device.type != "cuda" or not self.layout.stage.unshard_for_use:
            return
        layout = self.layout
        missing_bytes = sum(
            group.padded_numel * DTYPE_BYTES[layout.precision_of(group).param] for group in layout.groups
        )
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        free_bytes += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        lacks = torch.tensor([float(missing_bytes > free_bytes)], dtype=torch.float64, device=self.device)
        if self.comm.max_scalars(lacks, "room to gather") > [0.0]:  # on all ranks alike: the gather needs them all
            raise MemoryError(
                f"gathering all parameters takes {missing_bytes / 2**30:.1f} GiB of {free_bytes / 2**30:.1f} GiB free; "
                "generate with the forward alone, which gathers block by block, or on more memory"
            )
