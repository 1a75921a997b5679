"""What an engine is made of: parts that stay for its life, and the state of its step, which changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint.manifest import CheckpointError
from shardwise.comm.collectives import Comm, CommFactory
from shardwise.comm.consistency import BatchCheck
from shardwise.comm.loss import LossAccumulator, LossFn
from shardwise.comm.mesh import CommGroups
from shardwise.comm.watchdog import Watchdog
from shardwise.config.resolve import ResolvedConfig
from shardwise.context.batch import BatchSharder
from shardwise.dropout import KeyedDraws
from shardwise.engine.hook_views import SplitModelValues
from shardwise.engine.status import EngineStatus, StopRequests
from shardwise.engine.types import Scheduler
from shardwise.layout.layout import Layout
from shardwise.offload.activations import ActivationStore
from shardwise.offload.nvme import SwapError
from shardwise.offload.tiers import Tiers
from shardwise.offload.worker import HostWorkError
from shardwise.runtime.memory_tracker import MemoryTracker, explain_out_of_memory
from shardwise.runtime.precision import LossScaler
from shardwise.runtime.timeline import Timeline
from shardwise.runtime.user_hooks import HooksOnce
from shardwise.tensor.loss_parallel import LazyLogitsHead
from shardwise.zero.optimizer import ShardedOptimizer
from shardwise.zero.optimizer_plan import OptimizerPlan
from shardwise.zero.resources import ShardingResources
from shardwise.zero.sharding_state import ShardingState
from shardwise.zero.state_access import EngineState


@dataclass
class StepState:
    """Holds how far an engine's step has come, and what a script may replace between steps.

    Attributes:
        layout: another one after parameters were frozen.
        batches: of this step, to search them for values that are not finite.
        num_backwards, num_forwards, num_samples: since the last step.
        syncs: False inside `without_sync`.
        before_update: called after the last backward of a step, such as to measure.
        is_aliased: the user has views of parameters on some rank: updates on the host come at once.
    """

    config: ResolvedConfig
    layout: Layout
    loss_fn: LossFn | None
    scheduler: Scheduler
    batches: deque[Any]
    num_steps: int = 0
    num_backwards: int = 0
    num_forwards: int = 0
    num_samples: int = 0
    syncs: bool = True
    is_aliased: bool = False
    before_update: Callable[[], None] | None = None
    stops: StopRequests = field(default_factory=StopRequests)

    def take_forward(self, num_samples: int) -> tuple[int, int]:
        """Count a forward; return how many samples of this step this rank has before it, and its number from 0."""
        before = self.num_samples, self.num_forwards
        self.num_samples, self.num_forwards = self.num_samples + num_samples, self.num_forwards + 1
        return before

    def take_backward(self, is_boundary: bool | None) -> tuple[bool, bool]:
        """Count a backward.

        Args:
            is_boundary: whether it is the last before the step; None where `batch.accumulation` tells.

        Returns:
            Whether it is, and whether ranks sum its gradients then.
        """
        self.num_backwards += 1
        if is_boundary is None:
            is_boundary = self.num_backwards >= (self.config.batch.accumulation or 1)
        is_last = self.syncs and is_boundary
        return is_last, self.syncs and (self.layout.stage.reduce_each_backward or is_boundary)

    def begin_again(self) -> None:
        """Count from 0: a step has ended or was given up."""
        self.num_backwards = self.num_forwards = self.num_samples = 0
        self.batches.clear()

    def continue_from(self, num_steps: int) -> None:
        """Go on after a checkpoint's step."""
        self.num_steps = num_steps

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Let the backwards inside sum no gradients over the ranks."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before


@dataclass(frozen=True, eq=False)
class EngineParts:
    """Holds the parts of an engine, which `build` makes.

    Attributes:
        resources: what all groups of the engine share; communicators, memory, tiers and timeline are among them.
        watchdog: None where there is one rank.
        split_values: None where no layer is split.
        heads: whose logits are deferred.
        hooks_once: None where nothing is recomputed.
    """

    model: nn.Module
    state: StepState
    resources: ShardingResources
    comm_factory: CommFactory
    watchdog: Watchdog | None
    status: EngineStatus
    check_batch: BatchCheck
    losses: LossAccumulator
    scaler: LossScaler
    draws: KeyedDraws
    sequences: BatchSharder
    activations: ActivationStore | None
    sharding: ShardingState
    sharded: ShardedOptimizer
    optimizer_plan: OptimizerPlan
    split_values: SplitModelValues | None
    heads: Sequence[LazyLogitsHead]
    hooks_once: HooksOnce | None

    @property
    def config(self) -> ResolvedConfig:
        """Return the resolved config, of which a drop-in may change the batch."""
        return self.state.config

    @property
    def layout(self) -> Layout:
        """Return which slice of each state each rank holds now."""
        return self.state.layout

    @property
    def comms(self) -> CommGroups:
        """Return the communicators of all axes."""
        return self.resources.comms

    @property
    def comm(self) -> Comm:
        """Return the ranks that take the same optimizer step."""
        return self.resources.comms.all

    @property
    def memory(self) -> MemoryTracker:
        """Return the tracker of the device."""
        return self.resources.tracker

    @property
    def device(self) -> torch.device:
        """Return the device on which the engine computes."""
        return self.resources.tracker.device

    @property
    def tiers(self) -> Tiers:
        """Return where states are stored."""
        return self.resources.tiers

    @property
    def timeline(self) -> Timeline:
        """Return the record of what this rank does when."""
        return self.resources.timeline

    @property
    def optimizer(self) -> Optimizer:
        """Return torch's optimizer over this rank's shards."""
        return self.sharded.optimizer

    def states(self) -> EngineState:
        """Return what holds the states of this rank, once no update of them is under way."""
        self.sharding.drain()
        self.tiers.wait_idle()
        self.sharded.take_changes()
        for group in self.sharding.groups:
            if group not in self.sharding.held:  # else `gathered` says what becomes of it
                group.follow_writes()
        return EngineState(
            self.sharding, self.sharded, self.comms, self.losses, self.scaler.scale, self.layout.elsewhere
        )

    def usable_states(self) -> EngineState:
        """Return the same where the engine may be used, and raise as `EngineStatus.check` where not."""
        self.status.check()
        return self.states()

    @contextmanager
    def failures_explained(self) -> Iterator[None]:
        """Raise a failure of memory inside with the table of what this rank holds and the settings that help.

        A failure of the host or of NVMe happens on this rank alone, so it is noted for the others.
        """
        where = f"on rank {self.comm.rank} in step {self.state.num_steps + 1}"
        try:
            with explain_out_of_memory(self.memory, self.config, where):
                yield
        except (HostWorkError, SwapError) as error:
            self.note_failure(str(error))
            raise

    def note_failure(self, text: str) -> None:
        """Note why this rank has failed, for the ranks that wait for it; an empty text says that all is well again."""
        if self.watchdog is not None:
            self.watchdog.note_failure(text)

    def note_update(self) -> None:
        """Note that parameters are about to be written: logits that wait to be computed would get the new values."""
        for head in self.heads:
            head.note_update()

    def holds_anywhere(self, is_so: bool, subject: str) -> bool:
        """Say whether something holds on any rank; `subject` is for messages. All ranks call it."""
        flag = torch.tensor([float(is_so)], dtype=torch.float64, device=self.device)
        return self.comm.max_scalars(flag, subject) > [0.0]

    def refuse_if_simulated(self) -> None:
        """Raise where the other ranks are not there.

        Raises:
            CheckpointError: they are not.
        """
        if self.comm_factory.store is None and self.comm.world_size > 1:
            raise CheckpointError(
                "simulated-rank", "a simulated rank has no states to save or load; do so on real ranks"
            )
