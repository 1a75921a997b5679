"""What an engine is made of: parts that stay for its life, its status, and the state of its step, which changes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint.manifest import CheckpointError
from shardwise.comm.agreement import Agreement
from shardwise.comm.collectives import Comm, CommFactory
from shardwise.comm.consistency import BatchCheck
from shardwise.comm.loss import LossAccumulator, LossFn
from shardwise.comm.mesh import CommGroups
from shardwise.comm.watchdog import Watchdog
from shardwise.config.errors import CodedError, EngineError
from shardwise.config.resolve import ResolvedConfig
from shardwise.context.batch import BatchSharder
from shardwise.dropout import KeyedDraws
from shardwise.engine.hook_views import SplitModelValues
from shardwise.engine.types import Scheduler
from shardwise.experts.balance import RouterBalance
from shardwise.experts.routers import Routers
from shardwise.layout.layout import Layout
from shardwise.offload.activations import ActivationStore
from shardwise.offload.nvme import SwapError
from shardwise.offload.tiers import Tiers
from shardwise.offload.worker import HostWorkError, WorkerOutcome
from shardwise.runtime.device import numbers_on
from shardwise.runtime.memory_tracker import MemoryTracker, explain_out_of_memory
from shardwise.runtime.precision import LossScaler, torch_dtype
from shardwise.runtime.timeline import Timeline
from shardwise.runtime.torch_private import in_backward
from shardwise.runtime.user_hooks import HooksOnce
from shardwise.tensor.loss_parallel import LazyLogitsHead
from shardwise.zero.memory_release import MemoryRelease
from shardwise.zero.optimizer import ShardedOptimizer
from shardwise.zero.optimizer_plan import OptimizerPlan
from shardwise.zero.resources import ShardingResources
from shardwise.zero.sharding_state import ShardingState
from shardwise.zero.state_access import EngineState


class Integrity(Enum):
    """Says what a load or a step that was cut off has left mixed, and so what must be loaded."""

    WHOLE = "whole"
    WEIGHTS_MIXED = "weights mixed"  # the weights of one step: any whole checkpoint
    ALL_MIXED = "all mixed"  # optimizer states too: a checkpoint that has them


@dataclass
class StopRequests:
    """Knows which ranks were asked to stop; they add what they know to a sum over the ranks that is taken anyway.

    Attributes:
        num_asked: ranks that were, at the last sum.
        rank_sum: the sum of their numbers, so the rank where it is one.
    """

    is_asked: Callable[[], bool] = bool
    num_asked: int = 0
    rank_sum: int = 0

    def to_sum(self, rank: int) -> tuple[float, float]:
        """Return what this rank adds to the sum."""
        is_asked = self.is_asked()
        return float(is_asked), float(is_asked * rank)

    def take(self, summed: Sequence[float]) -> list[float]:
        """Take the sum of `to_sum` from the end of a vector, and return the others."""
        *others, num_asked, rank_sum = summed
        self.num_asked, self.rank_sum = int(num_asked), int(rank_sum)
        return others


class Walk(Protocol):
    """Is a pass over the weights that is under way."""

    def end(self) -> None:
        """End it on this rank, and let the others know."""


def _no_walk() -> None:
    """Return the walk of an engine that hands nothing over."""


class EngineStatus:
    """Tracks whether an engine is open, its states whole and in place, its gradients complete.

    >>> status = EngineStatus(WorkerOutcome())
    >>> status.begin_load(with_states=False)
    >>> status.integrity.value
    'weights mixed'
    >>> status.end_load(with_states=False)
    >>> status.check()

    Each method that changes it is one transition. `check` and `check_present` raise where it does not allow a call.

    Args:
        on_host: what has become of the work of the thread that works on the host.

    Attributes:
        is_in_backward: a backward is under way, or has raised.
        away: the states that are offloaded until `reload`; None where all are in place.
    """

    def __init__(self, on_host: WorkerOutcome) -> None:
        self._on_host = on_host
        self._is_closed = self.is_in_backward = False
        self.away: MemoryRelease | None = None
        self.integrity = Integrity.WHOLE
        self._walk: Callable[[], Walk | None] = _no_walk

    def close(self) -> bool:
        """Close it for good, and say whether it was open."""
        was_open, self._is_closed = not self._is_closed, True
        return was_open

    def begin_backward(self) -> None:
        """Note that gradients are incomplete until `end_backward`."""
        self.is_in_backward = True

    def end_backward(self) -> None:
        """Note that gradients are complete, or have been dropped."""
        self.is_in_backward = False

    def begin_walk(self, walk: Walk, is_kept: bool = False) -> None:
        """Note that weights are handed over: any other use of the engine ends that.

        Args:
            is_kept: the engine alone refers to the walk; otherwise it is over once its user drops it.
        """
        self._walk = (lambda: walk) if is_kept else weakref.ref(walk)

    def take_walk(self) -> Walk | None:
        """Return the walk that is under way, which the caller ends from now on."""
        walk, self._walk = self._walk(), _no_walk
        return walk

    def release(self, states: MemoryRelease) -> None:
        """Note that states are away."""
        self.away = states

    def restore(self) -> None:
        """Bring the states back that are away."""
        if self.away is not None:
            self.away.restore()
            self.away = None

    def mix(self) -> None:
        """Note that some states are of one step and others of another, until all are loaded."""
        self.integrity = Integrity.ALL_MIXED

    def begin_load(self, with_states: bool) -> None:
        """Note that what is loaded is mixed until `end_load`; `with_states` if optimizer states are loaded too."""
        if with_states:
            self.mix()
        elif self.integrity is Integrity.WHOLE:
            self.integrity = Integrity.WEIGHTS_MIXED

    def end_load(self, with_states: bool) -> None:
        """Note that all is read; weights alone cannot repair what is mixed in the optimizer's states."""
        if with_states or self.integrity is Integrity.WEIGHTS_MIXED:
            self.integrity = Integrity.WHOLE

    def check_present(self, params_suffice: bool = False) -> None:
        """Raise where the engine is closed or states are away; parameters are enough where they `params_suffice`.

        Raises:
            EngineError: it names what is away.
        """
        if (walk := self.take_walk()) is not None:
            walk.end()
        if self._is_closed:
            raise EngineError("engine-closed", "the engine is closed; call shardwise.initialize for a new one")
        if self.away is not None:
            self.away.refuse(params_suffice)

    def check(self, params_suffice: bool = False) -> None:
        """Raise where the engine can be used only after another call; parameters may suffice as in `check_present`.

        Raises:
            EngineError: it names that call.
            HostWorkError: the thread that works on the host has failed.
        """
        self.check_present(params_suffice)
        if self.is_in_backward and not in_backward():
            raise EngineError(
                "gradients-incomplete",
                "the last backward raised and left gradients incomplete; call engine.zero_grad() first",
            )
        if self.integrity is not Integrity.WHOLE:
            raise EngineError(
                "states-mixed",
                "states are mixed, since the last load or step was cut off midway; load a checkpoint that is whole",
            )
        if self._on_host.failure is not None:
            self._on_host.check()


@dataclass
class StepState:
    """Holds how far an engine's step has come, and what a script may replace between steps.

    Attributes:
        layout: another one after parameters were frozen.
        batches: of this step, to search them for values that are not finite.
        balance: counts the tokens of this step's experts, and adds the losses of routers; None where not wanted.
        num_backwards, num_forwards, num_samples: how many there were since the last step.
        syncs: whether gradients are summed over ranks: not inside `without_sync`.
        before_update: called after the last backward of a step, such as to measure.
        is_aliased: the user has views of parameters on some rank: updates on the host come at once.
        tried_lengths: of the parts of sequences for which `loss_fn` was tried; None where it needs no trial.
    """

    config: ResolvedConfig
    layout: Layout
    loss_fn: LossFn | None
    scheduler: Scheduler
    batches: deque[Any]
    balance: RouterBalance | None
    num_steps: int = 0
    num_backwards: int = 0
    num_forwards: int = 0
    num_samples: int = 0
    syncs: bool = True
    is_aliased: bool = False
    before_update: Callable[[], None] | None = None
    stops: StopRequests = field(default_factory=StopRequests)
    tried_lengths: set[int] | None = field(default_factory=set)

    def take_forward(self, num_samples: int, is_training: bool) -> tuple[int, int]:
        """Count a forward; return how many samples of this step this rank has before it, and its number from 0.

        A forward in evaluation draws nothing and does not count: the next one in training draws as it would without.
        """
        before = self.num_samples, self.num_forwards
        if is_training:
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
        if self.balance is not None:
            self.balance.forget()

    def continue_from(self, num_steps: int) -> None:
        """Go on after a checkpoint's step."""
        self.num_steps = num_steps

    def take_length(self, num_tokens: int) -> bool:
        """Say whether the loss must be tried on parts of sequences of so many tokens, and note that it was."""
        if self.tried_lengths is None or num_tokens in self.tried_lengths:
            return False
        self.tried_lengths.add(num_tokens)
        return True

    @contextmanager
    def with_own_loss(self, loss_fn: LossFn) -> Iterator[None]:
        """Take the loss of the forwards inside from a function of the library, which needs no trial."""
        before = self.loss_fn, self.tried_lengths
        self.loss_fn, self.tried_lengths = loss_fn, None
        try:
            yield
        finally:
            self.loss_fn, self.tried_lengths = before

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
        sequences: takes this rank's tokens of batches; None where each rank computes all tokens of its samples.
        split_values: None where no layer is split.
        experts: None where the model has none.
    """

    model: nn.Module
    state: StepState
    resources: ShardingResources
    comm_factory: CommFactory
    watchdog: Watchdog | None
    status: EngineStatus
    agreement: Agreement
    check_batch: BatchCheck
    losses: LossAccumulator
    scaler: LossScaler
    draws: KeyedDraws
    sequences: BatchSharder | None
    activations: ActivationStore | None
    sharding: ShardingState
    sharded: ShardedOptimizer
    optimizer_plan: OptimizerPlan
    split_values: SplitModelValues | None
    heads: Sequence[LazyLogitsHead]
    hooks_once: HooksOnce | None
    experts: Routers | None

    @property
    def config(self) -> ResolvedConfig:
        """Return the resolved config, of which a drop-in may change the batch."""
        return self.state.config

    @property
    def layout(self) -> Layout:
        """Return which slice of each state each rank holds now."""
        return self.state.layout

    @cached_property
    def comms(self) -> CommGroups:
        """Return the communicators of all axes."""
        return self.resources.comms

    @cached_property
    def comm(self) -> Comm:
        """Return the ranks that take the same optimizer step."""
        return self.resources.comms.all

    @cached_property
    def memory(self) -> MemoryTracker:
        """Return the tracker of the device."""
        return self.resources.tracker

    @cached_property
    def device(self) -> torch.device:
        """Return the device on which the engine computes."""
        return self.resources.tracker.device

    @cached_property
    def param_dtype(self) -> torch.dtype:
        """Return the dtype in which the model computes."""
        return torch_dtype(self.layout.precision.param)

    @cached_property
    def tiers(self) -> Tiers:
        """Return where states are stored."""
        return self.resources.tiers

    @cached_property
    def timeline(self) -> Timeline:
        """Return the record of what this rank does when."""
        return self.resources.timeline

    @cached_property
    def optimizer(self) -> Optimizer:
        """Return torch's optimizer over this rank's shards."""
        return self.sharded.optimizer

    @cached_property
    def data_place(self) -> tuple[int, int]:
        """Return which of the micro-batches that are computed at a time this rank computes, and how many they are."""
        mesh = self.layout.mesh
        return mesh.data_index(self.comm_factory.rank), mesh.num_data_ranks

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

        What fails on this rank alone is noted for the others, until the next call: on a device nothing else ends the
        collectives in which they wait. What the engine refuses, it refuses on all ranks.
        """
        if self.watchdog is not None and self.watchdog.has_noted:
            self.note_failure("")
        where = f"on rank {self.comm.rank} in step {self.state.num_steps + 1}"
        try:
            with explain_out_of_memory(self.memory, self.config, where):
                yield
        except Exception as error:
            if not isinstance(error, CodedError):
                self.note_failure(f"{type(error).__name__}: {error}")
            elif isinstance(error, HostWorkError | SwapError):
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
        flag = numbers_on(self.device, [float(is_so)])
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
