"""This module says how an engine computes the micro-batches of a step: one after the other, or as a schedule says.

An engine has one runner for its lifetime. All take a step in the same way: forwards, backwards, `StepContext.step`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, Self, TypeVar

import torch
from torch import Tensor

from shardwise.comm.loss import LossAccumulator, LossSum, read_loss
from shardwise.config.resolve import ConfigError
from shardwise.context.batch import TokenShard, main_input
from shardwise.context.huggingface import check_num_items, take_num_items
from shardwise.context.loss_trial import check_loss_by_token
from shardwise.engine.step_context import StepContext, as_list
from shardwise.engine.types import EvalResult, StepResult
from shardwise.runtime.batch_errors import refuse_misfit
from shardwise.runtime.precision import explain_dtypes, to_device, torch_dtype
from shardwise.runtime.recompute import call_model
from shardwise.runtime.torch_private import pytree
from shardwise.tensor.apply import explain_shapes
from shardwise.tensor.loss_parallel import settle_all

Result = TypeVar("Result")

_LOG: Final = logging.getLogger("shardwise")


class StepRunner(Protocol):
    """Computes micro-batches of one engine."""

    def check_direct(self, call: str) -> None:
        """Raise if forwards, backwards and steps cannot be called one by one."""

    def forward(self, batch: Any) -> LossSum | None:
        """Run the forward of one batch; None where another rank has its loss."""

    def train(self, batches: Sequence[Any]) -> StepResult:
        """Take a step over micro-batches."""

    def evaluate(self, batches: Sequence[Any], losses: LossAccumulator) -> None:
        """Count the losses of batches, each as for `engine(batch)`, into `losses`, forward only."""


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
    def of(cls, context: StepContext, batch: Any, first_sample: int, number: int) -> Self:
        """Take a batch, which must be the same on ranks that compute it together.

        Args:
            context: whose device, dtype and layout count.
            first_sample: how many samples of this step this rank has before it.
            number: of its forward in the step, from 0.
        """
        context.check_batch(batch, is_first_step=context.num_steps == 0)
        if number == 0:
            context.agree_on_hooks()
        has_more = context.loss_fn is not None and isinstance(batch, list | tuple)
        given, num_items = take_num_items(batch) if context.loss_fn is None else (batch, None)
        share = context.sequences.share(to_device(given, context.device), has_more)
        check_num_items(context.model, num_items, share.num_targets)
        inputs = to_device(share.inputs, context.device, torch_dtype(context.layout.precision.param))
        return cls(replace(share, inputs=inputs), _num_samples(inputs), first_sample, number)

    def loss(self, context: StepContext, output: Any) -> LossSum:
        """Read the loss of this share from the model's output."""
        share = self.share
        cp, whole = context.layout.mesh.cp, context.split_values
        if whole is not None:
            output = whole.results.take(output)
        if share.is_new_length and context.loss_fn is not None:
            check_loss_by_token(context.loss_fn, output, share.batch, main_input(share.inputs).shape[1], cp)
        with nullcontext() if whole is None or context.loss_fn is None else whole.parameters.shown():
            return read_loss(output, share.batch, context.loss_fn, cp, share.loss_weight, share.num_targets)


def _num_samples(inputs: Any) -> int:
    """Return the size of the first tensor's first dim; 0 where there is none."""
    leaves = pytree.tree_leaves(inputs)
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0), 0)


def run_model(context: StepContext, taken: RankBatch, read: Callable[[Any], Result]) -> Result:
    """Run the model's forward and return what `read` makes of its output, before the parameters that it reads are
    resharded.

    Args:
        read: is given the model's output.
    """
    try:
        with context.sharding.serving(), _numbers_for(context, taken):
            result = read(call_model(context.model, taken.share.inputs))
            settle_unless_trained(context)
            return result
    except BaseException as error:
        explain_shapes(error, context.model, context.layout.tensor)
        explain_dtypes(error, context.model, torch_dtype(context.layout.precision.param))
        refuse_misfit(error, context.model, taken.share.inputs)
        raise


def settle_unless_trained(context: StepContext) -> None:
    """Settle the logits that are still referenced after a forward without a backward, while parameters are whole."""
    if not torch.is_grad_enabled():
        settle_all(context.heads)


def _numbers_for(context: StepContext, taken: RankBatch, args: Sequence[Any] = ()) -> AbstractContextManager[None]:
    """Draw, in a forward in training mode inside, the numbers of its samples, on any rank that computes them; `args`
    are inputs that the batch has no name for.
    """
    if not (context.model.training and taken.num_samples):
        whole = context.split_values
        return nullcontext() if whole is None else whole.parameters.shown_in_forward()
    mesh = context.layout.mesh
    data_rank = mesh.data_index(context.comm_factory.rank)
    first_sample = taken.first_sample * mesh.num_data_ranks + data_rank * taken.num_samples
    tokens, length = taken.share.tokens, _length(args or taken.share.inputs)
    return context.draws.at(context.num_steps, taken.number, first_sample, taken.num_samples, tokens, length)


def _length(inputs: Any) -> int | None:
    """Return how many tokens a sequence of the inputs has; None where no tensor has any."""
    try:
        return int(main_input(inputs).shape[1])
    except ConfigError:
        return None


def forward_plain(context: StepContext, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the model's own forward and return its output; where `mesh.cp` splits sequences, that of this rank's tokens.

    There the model's own loss is scaled so that its mean over the ranks is the loss of the sequence.

    Args:
        kwargs: of the model; all inputs where `mesh.cp` is more than 1.

    Raises:
        ConfigError: under `mesh.cp` an input has no name.
    """
    context.status.check(params_suffice=not torch.is_grad_enabled())
    context.is_plain |= torch.is_grad_enabled()
    cp, share = context.layout.mesh.cp, TokenShard(None, kwargs)
    if cp > 1 and args:
        raise ConfigError(
            "plain-inputs-unnamed",
            f"engine.forward got {len(args)} inputs without names under mesh.cp={cp}, which cuts them by name; pass "
            "keyword arguments",
        )
    context.check_batch((args, kwargs), is_first_step=context.num_steps == 0)
    if context.num_forwards == 0:
        context.agree_on_hooks()
    if cp > 1:
        share = context.sequences.share(to_device(dict(kwargs), context.device), False)
    taken = RankBatch(share, _num_samples((args, kwargs)), context.num_samples, context.num_forwards)
    context.num_forwards += 1
    context.num_samples += taken.num_samples
    with _forward_phase(context), context.sharding.serving(), _numbers_for(context, taken, args):
        try:
            output = context.model(*args, **share.inputs)
        except Exception as error:
            if not (args and share.inputs):
                refuse_misfit(error, context.model, args or share.inputs)
            raise
        settle_unless_trained(context)
        if context.split_values is not None:
            output = context.split_values.results.take(output)
    if share.loss_weight is not None and getattr(output, "loss", None) is not None:
        output.loss = output.loss * share.loss_weight * cp
    return output


@contextmanager
def _forward_phase(context: StepContext) -> Iterator[None]:
    """Count the seconds inside as those of a step's forward; an evaluation's are of no step."""
    if not torch.is_grad_enabled():
        yield
        return
    context.timeline.clock.switch("forward")
    try:
        yield
    finally:
        context.timeline.clock.switch("other")


class SequentialRunner:
    """Runs forward and backward of each micro-batch in turn."""

    def __init__(self, context: StepContext) -> None:
        self._context = context

    def check_direct(self, call: str) -> None:
        """Do nothing: forwards, backwards and steps can be called one by one."""

    def forward(self, batch: Any) -> LossSum:
        """Run the forward."""
        context = self._context
        context.status.check(params_suffice=not torch.is_grad_enabled())
        context.timeline.micro_batch = context.num_backwards
        with _forward_phase(context):
            taken = RankBatch.of(context, batch, context.num_samples, context.num_forwards)
            context.num_forwards += 1
            context.num_samples += taken.num_samples
            return run_model(context, taken, lambda output: taken.loss(context, output))

    def train(self, batches: Sequence[Any]) -> StepResult:
        """Take a step."""
        context = self._context
        for index, batch in enumerate(batches, 1):
            loss = context.open_loss(batch, self.forward(batch))
            context.backward(loss, is_boundary=index == len(batches))
        return context.step(self.forward)

    def evaluate(self, batches: Sequence[Any], losses: LossAccumulator) -> None:
        """Run the forwards; `losses` is given the losses of `batches`."""
        for batch in batches:
            losses.add(self.forward(batch))


def evaluate(
    context: StepContext, runner: StepRunner, batches: Sequence[Any] | Mapping[str, Any] | Tensor
) -> EvalResult:
    """Return the mean loss over batches of all data ranks, in the model's eval mode.

    Args:
        batches: each as for `engine(batch)`; a dict or a tensor is one.
    """
    training = [module for module in context.model.modules() if module.training]
    context.model.eval()
    losses = LossAccumulator(context.comms)
    try:
        with torch.no_grad():
            runner.evaluate(as_list(batches), losses)
    finally:
        for module in training:
            module.training = True
    loss_sum, count = context.take_asking(losses.sum_over_ranks("evaluation", context.own_asking()))
    if (error := losses.count_error(count, "evaluation")) is not None:
        raise error
    if count == 0 and context.comm.rank == 0:
        _LOG.warning("nothing counted in an evaluation: its batches have no targets, and loss 0 stands for no value")
    return EvalResult(loss_sum / (count or 1.0), count)
