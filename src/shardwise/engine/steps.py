"""This module says how an engine computes the micro-batches of a step: one after the other, or as a schedule says.

An engine has one runner for its lifetime. All take a step in the same way: forwards, backwards, then `Engine._step`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import CommFactory
from shardwise.comm.consistency import BatchCheck
from shardwise.comm.loss import LossAccumulator, LossFn, LossSum, read_loss
from shardwise.comm.mesh import CommGroups
from shardwise.comm.watchdog import Watchdog
from shardwise.context.batch import BatchSharder, TokenShard
from shardwise.context.huggingface import without_num_items
from shardwise.dropout import KeyedDraws
from shardwise.engine.types import StepResult
from shardwise.layout.layout import Layout
from shardwise.runtime.precision import LossScaler, explain_dtypes, to_device, torch_dtype
from shardwise.runtime.recompute import call_model
from shardwise.runtime.torch_private import pytree
from shardwise.tensor.apply import explain_shapes
from shardwise.zero.optimizer import StepInBackward
from shardwise.zero.sharding_state import ShardingState

Result = TypeVar("Result")


class StepEngine(Protocol):
    """Names the part of an engine that its runner uses; `shardwise.engine.engine.Engine` is one."""

    model: nn.Module
    layout: Layout
    device: torch.device
    num_steps: int
    _step_in_backward: StepInBackward
    _batches: deque[Any]
    _check_batch: BatchCheck
    _comm_factory: CommFactory
    _comms: CommGroups
    _draws: KeyedDraws
    _sharding: ShardingState
    _is_broken: bool
    _loss_fn: LossFn | None
    _losses: LossAccumulator
    _scaler: LossScaler
    _sequences: BatchSharder
    _syncs: bool
    _watchdog: Watchdog | None

    def __call__(self, batch: Any) -> Tensor:
        """Run the forward of one batch."""

    def backward(self, loss: Tensor) -> None:
        """Run the backward of one loss."""

    def _before_model(self) -> None: ...

    def _begin_backward(self) -> None: ...

    def _check_usable(self, *, params_suffice: bool = False) -> None: ...

    def _forward(self, batch: Any) -> LossSum | None: ...

    def _step(self) -> StepResult: ...


class StepRunner(Protocol):
    """Computes micro-batches with an engine, which is given each time: a runner does not keep it alive."""

    def check_direct(self, call: str) -> None:
        """Raise if forwards, backwards and steps cannot be called one by one."""

    def forward(self, engine: StepEngine, batch: Any) -> LossSum | None:
        """Run the forward of one batch; None where another rank has its loss."""

    def train(self, engine: StepEngine, batches: Sequence[Any]) -> StepResult:
        """Take a step over micro-batches."""

    def evaluate(self, engine: StepEngine, batches: Sequence[Any], losses: LossAccumulator) -> None:
        """Count the losses of batches into `losses`, forward only.

        Args:
            engine: to compute with.
            batches: each as for `engine(batch)`.
            losses: is given the losses.
        """

    def end_step(self) -> None:
        """Forget what a step, or an exception, has left."""

    def close(self) -> None:
        """Close what the runner has opened."""


@dataclass(frozen=True)
class RankBatch:
    """Holds a rank's share of a batch, on the device, and its samples.

    Attributes:
        share: the tokens of this rank, inputs in the parameters' dtype.
        num_samples: 0 where it cannot be known.
        first_sample: how many samples of this step this rank has before it.
        number: of its forward in the step, from 0.
    """

    share: TokenShard
    num_samples: int
    first_sample: int
    number: int

    @classmethod
    def of(cls, engine: StepEngine, batch: Any, first_sample: int, number: int) -> Self:
        """Take a batch, which must be the same on ranks that compute it together.

        Args:
            engine: whose device, dtype and layout count.
            batch: of this data rank.
            first_sample: how many samples of this step this rank has before it.
            number: of its forward in the step, from 0.
        """
        engine._check_batch(batch, is_first_step=engine.num_steps == 0)
        has_more = engine._loss_fn is not None and isinstance(batch, list | tuple)
        share = engine._sequences.share(to_device(batch, engine.device), has_more)
        given = share.inputs
        if engine._loss_fn is None:
            given = without_num_items(engine.model, given, share.num_targets)
        inputs = to_device(given, engine.device, torch_dtype(engine.layout.precision.param))
        sizes = [leaf.shape[0] for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        return cls(replace(share, inputs=inputs), sizes[0] if sizes else 0, first_sample, number)

    def loss(self, engine: StepEngine, output: Any) -> LossSum:
        """Read the loss of this share from the model's output."""
        share = self.share
        cp = engine.layout.mesh.cp
        return read_loss(output, share.batch, engine._loss_fn, cp, share.loss_weight, share.num_targets)


def run_model(engine: StepEngine, taken: RankBatch, read: Callable[[Any], Result]) -> Result:
    """Run the model's forward and return what `read` makes of its output, before the parameters that it reads are
    resharded.

    Args:
        engine: whose model runs.
        taken: the batch.
        read: is given the model's output.
    """
    try:
        with engine._sharding.serving(), _numbers_for(engine, taken):
            return read(call_model(engine.model, taken.share.inputs))
    except BaseException as error:
        explain_shapes(error, engine.model, engine.layout.tensor)
        explain_dtypes(error, engine.model, torch_dtype(engine.layout.precision.param))
        raise


def _numbers_for(engine: StepEngine, taken: RankBatch) -> AbstractContextManager[None]:
    """Draw, in a forward in training mode inside, the numbers of its samples, on any rank that computes them."""
    if not (engine.model.training and taken.num_samples):
        return nullcontext()
    mesh = engine.layout.mesh
    data_rank = mesh.data_index(engine._comm_factory.rank)
    first_sample = taken.first_sample * mesh.num_data_ranks + data_rank * taken.num_samples
    return engine._draws.at(engine.num_steps, taken.number, first_sample, taken.num_samples, taken.share.tokens)


class SequentialRunner:
    """Runs forward and backward of each micro-batch in turn."""

    def __init__(self) -> None:
        self._num_forwards = self._num_samples = 0

    def check_direct(self, call: str) -> None:
        """Do nothing: forwards, backwards and steps can be called one by one."""

    def forward(self, engine: StepEngine, batch: Any) -> LossSum:
        """Run the forward."""
        engine._check_usable(params_suffice=not torch.is_grad_enabled())
        taken = RankBatch.of(engine, batch, self._num_samples, self._num_forwards)
        self._num_forwards, self._num_samples = taken.number + 1, taken.first_sample + taken.num_samples
        return run_model(engine, taken, lambda output: taken.loss(engine, output))

    def train(self, engine: StepEngine, batches: Sequence[Any]) -> StepResult:
        """Take a step; during the last backward parameters may be stepped as soon as their gradients are final."""
        for index, batch in enumerate(batches, 1):
            loss = engine(batch)
            engine._step_in_backward.is_armed = index == len(batches)
            engine.backward(loss)
        # Not `step`: an error of a save, raised there, would leave the gradients of these batches to the next step.
        return engine._step()

    def evaluate(self, engine: StepEngine, batches: Sequence[Any], losses: LossAccumulator) -> None:
        """Run the forwards.

        Args:
            engine: to compute with.
            batches: each as for `engine(batch)`.
            losses: is given the losses.
        """
        for batch in batches:
            total = engine._forward(batch)
            assert total is not None, "this run has every loss"
            losses.add(total)

    def end_step(self) -> None:
        """Start counting forwards and samples of the next step."""
        self._num_forwards = self._num_samples = 0

    def close(self) -> None:
        """Do nothing: nothing is open."""
