"""This module says how an engine computes the micro-batches of a step: one after the other, or as a schedule says.

An engine has one runner for its lifetime. All take a step in the same way: forwards, backwards, `update`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.loss import LossAccumulator, LossSum, read_loss
from shardwise.config.errors import ConfigError
from shardwise.context.batch import IGNORED, TokenShard, main_input, take_tokens
from shardwise.context.loss_trial import check_loss_by_token
from shardwise.engine.parts import EngineParts
from shardwise.engine.step import agree_on_hooks, open_loss, run_backward, update
from shardwise.engine.types import EvalResult, StepResult
from shardwise.hf.losses import check_num_items, count_targets, take_num_items
from shardwise.runtime.batch_errors import refuse_misfit
from shardwise.runtime.device import copied_to
from shardwise.runtime.module_hooks import call_model
from shardwise.runtime.precision import explain_dtypes
from shardwise.runtime.torch_private import pytree
from shardwise.tensor.apply import explain_shapes
from shardwise.tensor.chunked import deferred_head
from shardwise.tensor.loss_parallel import settle_all
from shardwise.tensor.token_log_probs import TokenLogProbs, token_log_probs

Result = TypeVar("Result")

_LOG: Final = logging.getLogger("shardwise")


class StepRunner(Protocol):
    """Computes micro-batches of one engine."""

    def check_direct(self, call: str) -> None:
        """Raise if forwards, backwards and steps cannot be called one by one."""

    def forward(self, batch: Any) -> LossSum | None:
        """Run the forward of one batch; None where another rank has its loss."""

    def accumulate(self, batches: Sequence[Any]) -> None:
        """Run forwards and backwards of a step's micro-batches."""

    def step(self) -> StepResult:
        """Update by the gradients since the last step."""

    def evaluate(self, batches: Sequence[Any], losses: LossAccumulator) -> None:
        """Count the losses of batches, each as for `engine(batch)`, into `losses`, forward only."""

    def end_evaluation(self) -> None:
        """Do what follows the sum of an evaluation's losses, to which all ranks have come."""


def to_device(tree: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Move the tensors of a pytree to `device`, the floating ones to `dtype` too where one is given.

    Any mapping counts as a dict. Other leaves stay.
    """

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_meta and device.type != "meta":
            raise ConfigError(
                "batch-without-values",
                f"a tensor of the batch, of shape {tuple(leaf.shape)}, is on meta and has no values; make it elsewhere",
            )
        wanted = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
        return copied_to(device, leaf, wanted)

    return pytree.tree_map(move, _with_dicts(tree))


def _with_dicts(tree: Any) -> Any:
    """Make dicts of the mappings of a pytree, such as the batches of Hugging Face's tokenizers."""
    return pytree.tree_map(lambda leaf: _with_dicts(dict(leaf)) if isinstance(leaf, Mapping) else leaf, tree)


@dataclass(frozen=True)
class RankBatch:
    """Holds a rank's share of a batch, on the device, and its samples.

    Attributes:
        share: the tokens of this rank, inputs in the parameters' dtype.
        num_samples: 0 where it cannot be known.
        first_sample: how many samples of this step this rank has before it.
        number: of its forward in the step, from 0.
        routing: the experts of its tokens, for each layer of them, [B, S, L, k]; None where routers choose.
    """

    share: TokenShard
    num_samples: int
    first_sample: int
    number: int
    routing: Tensor | None = None

    @classmethod
    def of(cls, parts: EngineParts, batch: Any, first_sample: int, number: int) -> Self:
        """Take a batch, which must be the same on ranks that compute it together."""
        if parts.check_batch.has_others:
            parts.check_batch(batch, is_first_step=parts.state.num_steps == 0)
        if number == 0:
            agree_on_hooks(parts)
        has_more = parts.state.loss_fn is not None and isinstance(batch, list | tuple)
        data, num_items = take_num_items(batch) if parts.state.loss_fn is None else (batch, None)
        for_model, routing = _take_routing(parts, data[0] if has_more else data)
        if routing is not None:
            data = (for_model, *data[1:]) if has_more else for_model
        share = (_whole_share if parts.sequences is None else _own_share)(parts, data, has_more)
        if num_items is not None:
            check_num_items(parts.model, num_items, share.num_targets)
        inputs = to_device(share.inputs, parts.device, parts.param_dtype)
        routing = _own_routing(parts, routing, share)
        return cls(replace(share, inputs=inputs), _num_samples(inputs), first_sample, number, routing)

    def loss(self, parts: EngineParts, output: Any) -> LossSum:
        """Read the loss of this share from the model's output."""
        share = self.share
        cp, whole = parts.layout.mesh.cp, parts.split_values
        if whole is not None:
            output = whole.results.take(output)
        if parts.sequences is not None and parts.state.loss_fn is not None:
            num_tokens = main_input(share.inputs).shape[1]
            if parts.state.take_length(num_tokens):
                check_loss_by_token(parts.state.loss_fn, output, share.batch, num_tokens, cp)
        with nullcontext() if whole is None or parts.state.loss_fn is None else whole.parameters.shown():
            loss = read_loss(output, share.batch, parts.state.loss_fn, cp, share.loss_weight, share.num_targets)
        return loss if parts.state.balance is None else parts.state.balance.add(loss)


def _whole_share(parts: EngineParts, batch: Any, has_more: bool) -> TokenShard:
    """Return all of a batch, where each rank computes every token of its samples; `has_more` as for `BatchSharder`."""
    batch = to_device(batch, parts.device)
    inputs, shifts_labels = batch[0] if has_more else batch, parts.layout.facts.shifts_labels
    num_targets = None if shifts_labels is None else count_targets(inputs, shifts_labels)
    return TokenShard(batch, inputs, num_targets=num_targets)


def _own_share(parts: EngineParts, batch: Any, has_more: bool) -> TokenShard:
    """Return this rank's tokens of a batch; `has_more` as for `BatchSharder`.

    They are moved after they were cut: to read the masks and positions of sequences on a device, the host would wait.
    """
    assert parts.sequences is not None, "sequences are split"
    share = parts.sequences.share(_with_dicts(batch), has_more)
    tensors = share.batch, share.inputs, share.loss_weight, share.num_targets
    moved, inputs, weight, num_targets = to_device(tensors, parts.device)
    return TokenShard(moved, inputs, share.tokens, weight, num_targets)


def _take_routing(parts: EngineParts, inputs: Any) -> tuple[Any, Tensor | None]:
    """Take from a model's inputs the experts that its tokens are to be sent to, where they name them."""
    return (inputs, None) if parts.experts is None else parts.experts.take(inputs)


def _own_routing(parts: EngineParts, routing: Tensor | None, share: TokenShard) -> Tensor | None:
    """Return the experts of this rank's tokens on its device."""
    if routing is not None and share.tokens is not None:
        routing = take_tokens(routing, share.tokens)
    return None if routing is None else copied_to(parts.device, routing, routing.dtype)


def _num_samples(inputs: Any) -> int:
    """Return the size of the first tensor's first dim; 0 where there is none."""
    leaves = pytree.tree_leaves(inputs)
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0), 0)


def run_model(parts: EngineParts, taken: RankBatch, read: Callable[[Any], Result]) -> Result:
    """Run the model's forward and return what `read` makes of its output, before the parameters that it reads are
    resharded.
    """
    try:
        with parts.sharding.serving(), _numbers_for(parts, taken), _routers_of(parts, taken):
            result = read(call_model(parts.model, taken.share.inputs))
            settle_unless_trained(parts)
            return result
    except BaseException as error:
        explain_shapes(error, parts.model, parts.layout.tensor)
        explain_dtypes(error, parts.model, parts.param_dtype)
        refuse_misfit(error, parts.model, taken.share.inputs)
        raise


@contextmanager
def _routers_of(parts: EngineParts, taken: RankBatch) -> Iterator[None]:
    """Let routers follow the batch inside, where it names experts, and be watched."""
    with ExitStack() as inside:
        if parts.experts is not None and taken.routing is not None:
            inside.enter_context(parts.experts.following(taken.routing))
        if parts.state.balance is not None:
            inside.enter_context(parts.state.balance.forward(taken.num_samples))
        yield


def settle_unless_trained(parts: EngineParts) -> None:
    """Settle the logits that are still referenced after a forward without a backward, while parameters are whole."""
    if not torch.is_grad_enabled():
        settle_all(parts.heads)


def _numbers_for(parts: EngineParts, taken: RankBatch, args: Sequence[Any] = ()) -> AbstractContextManager[None]:
    """Draw, in a forward in training mode inside, the numbers of its samples, on any rank that computes them; `args`
    are inputs that the batch has no name for.
    """
    if not (parts.model.training and taken.num_samples):
        whole = parts.split_values
        return nullcontext() if whole is None else whole.parameters.shown_in_forward()
    data_rank, num_data_ranks = parts.data_place
    first_sample = taken.first_sample * num_data_ranks + data_rank * taken.num_samples
    length = None if parts.draws.is_quiet else _length(args or taken.share.inputs)
    return parts.draws.at(
        parts.state.num_steps, taken.number, first_sample, taken.num_samples, taken.share.tokens, length
    )


def _length(inputs: Any) -> int | None:
    """Return how many tokens a sequence of the inputs has; None where no tensor has any."""
    try:
        return int(main_input(inputs).shape[1])
    except ConfigError:
        return None


def forward_plain(parts: EngineParts, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the model's own forward and return its output; where `mesh.cp` splits sequences, that of this rank's tokens.

    There the model's own loss is scaled so that its mean over the ranks is the loss of the sequence.

    Args:
        kwargs: of the model; all inputs where `mesh.cp` is more than 1.

    Raises:
        ConfigError: under `mesh.cp` an input has no name.
    """
    parts.status.check(params_suffice=not torch.is_grad_enabled())
    parts.losses.plain.is_on |= torch.is_grad_enabled()
    cp = parts.layout.mesh.cp
    if parts.sequences is not None and args:
        raise ConfigError(
            "plain-inputs-unnamed",
            f"engine.forward got {len(args)} inputs without names under mesh.cp={cp}, which cuts them by name; pass "
            "keyword arguments",
        )
    if parts.check_batch.has_others:
        parts.check_batch((args, kwargs), is_first_step=parts.state.num_steps == 0)
    if parts.state.num_forwards == 0:
        agree_on_hooks(parts)
    kwargs, routing = _take_routing(parts, kwargs)
    share = TokenShard(None, kwargs) if parts.sequences is None else _own_share(parts, kwargs, False)
    num_samples = _num_samples((args, kwargs))
    number = parts.state.take_forward(num_samples, parts.model.training)
    taken = RankBatch(share, num_samples, *number, _own_routing(parts, routing, share))
    numbers, routers = _numbers_for(parts, taken, args), _routers_of(parts, taken)
    with _forward_phase(parts), parts.sharding.serving(), numbers, routers:
        try:
            output = parts.model(*args, **share.inputs)
        except Exception as error:
            if not (args and share.inputs):
                refuse_misfit(error, parts.model, args or share.inputs)
            raise
        settle_unless_trained(parts)
        if parts.split_values is not None:
            output = parts.split_values.results.take(output)
        loss = getattr(output, "loss", None)
        if share.loss_weight is not None and loss is not None:
            loss = loss * share.loss_weight * cp
        balance = parts.state.balance
        if balance is not None and balance.is_in_loss:
            if loss is None:
                raise ConfigError(
                    "aux-loss-in-plain-mode",
                    "the losses of routers are added to the loss of the model's output, which has none; pass labels, "
                    "or set experts.aux_loss=0 and experts.z_loss=0",
                )
            loss = balance.add(LossSum(loss, torch.ones_like(loss))).total
        if loss is not None and loss is not output.loss:
            output.loss = loss
    return output


@contextmanager
def _forward_phase(parts: EngineParts) -> Iterator[None]:
    """Count the seconds inside as those of a step's forward; an evaluation's are of no step."""
    if not torch.is_grad_enabled():
        yield
        return
    parts.timeline.clock.switch("forward")
    try:
        yield
    finally:
        parts.timeline.clock.switch("other")


class SequentialRunner:
    """Runs forward and backward of each micro-batch in turn."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    def check_direct(self, call: str) -> None:
        """Do nothing: forwards, backwards and steps can be called one by one."""

    def forward(self, batch: Any) -> LossSum:
        parts = self._parts
        parts.status.check(params_suffice=not torch.is_grad_enabled())
        parts.timeline.micro_batch = parts.state.num_backwards
        with _forward_phase(parts):
            taken = RankBatch.of(parts, batch, parts.state.num_samples, parts.state.num_forwards)
            parts.state.take_forward(taken.num_samples, parts.model.training)
            return run_model(parts, taken, lambda output: taken.loss(parts, output))

    def accumulate(self, batches: Sequence[Any]) -> None:
        parts = self._parts
        for index, batch in enumerate(batches, 1):
            loss = open_loss(parts, batch, self.forward(batch))
            run_backward(parts, loss, is_boundary=index == len(batches))

    def step(self) -> StepResult:
        return update(self._parts, self.forward)

    def evaluate(self, batches: Sequence[Any], losses: LossAccumulator) -> None:
        for batch in batches:
            losses.add(self.forward(batch))

    def end_evaluation(self) -> None:
        """Do nothing."""


def micro_batches(parts: EngineParts, batches: Sequence[Any] | Mapping[str, Any] | Tensor) -> Sequence[Any]:
    """Return the micro-batches of a step as a sequence; a dict or a tensor is one.

    Raises:
        ConfigError: they are more or fewer than `batch.accumulation`, or the parts of one.
    """
    expected = parts.config.batch.accumulation
    if isinstance(batches, Mapping | Tensor):
        batches = [batches]
    if len(batches) != expected:
        got, fix = f"{len(batches)}", f"give {expected} or set batch.accumulation={len(batches)}"
        if expected == 1 and isinstance(batches, tuple):
            got, fix = f"a tuple of {len(batches)}", "give [batch] where it is one micro-batch"
        raise ConfigError(
            "micro-batch-count",
            f"train_step takes a list of batch.accumulation={expected} micro-batches and got {got}; {fix}",
        )
    return as_list(batches)


def as_list(batches: Sequence[Any] | Mapping[str, Any] | Tensor) -> Sequence[Any]:
    """Return batches as a sequence; a dict or a tensor is one.

    Raises:
        ConfigError: they are the parts of one batch, such as inputs and targets, or an array of others.
    """
    if isinstance(batches, Mapping | Tensor):
        return [batches]
    is_array = hasattr(batches, "__array__")
    if isinstance(batches, list | tuple) and len(batches) > 1 and all(isinstance(batche, Tensor) for batche in batches):
        kinds = {(batche.dtype, batche.dim()) for batche in batches}
        is_one = isinstance(batches, tuple) or len(kinds) > 1
    else:
        is_one = False
    if is_array or is_one:
        found = f"a {type(batches).__name__} of {len(batches)}" + ("" if is_array else " tensors")
        raise ConfigError(
            "micro-batch-parts",
            f"train_step and eval_step take a list of micro-batches and got {found}, which may be the parts of one; "
            "give [batch] where it is one, and a list of tensors of one kind where each is one",
        )
    return batches


def evaluate(parts: EngineParts, runner: StepRunner, batches: Sequence[Any] | Mapping[str, Any] | Tensor) -> EvalResult:
    """Return the mean loss over batches of all data ranks, in the model's eval mode.

    Args:
        batches: each as for `engine(batch)`; a dict or a tensor is one.
    """
    training = [module for module in parts.model.modules() if module.training]
    parts.model.eval()
    losses = LossAccumulator(parts.comms)
    try:
        with torch.no_grad():
            runner.evaluate(as_list(batches), losses)
    finally:
        for module in training:
            module.training = True
    loss_sum, count = parts.state.stops.take(
        losses.sum_over_ranks("evaluation", parts.state.stops.to_sum(parts.comm.rank))
    )
    runner.end_evaluation()
    if (error := losses.count_error(count, "evaluation")) is not None:
        raise error
    if count == 0 and parts.comm.rank == 0:
        _LOG.warning("nothing counted in an evaluation: its batches have no targets, and loss 0 stands for no value")
    return EvalResult(loss_sum / (count or 1.0), count)


def log_probs(parts: EngineParts, runner: StepRunner, batch: Any, temperature: float, entropy: bool) -> TokenLogProbs:
    """Return those of whole sequences on every rank; see `Engine.log_probs`."""
    inputs, targets = _inputs_and_targets(batch)
    recorder = _LogProbRecorder(temperature, entropy)
    # Each rank computes some of the tokens, or none: these say which, since they are cut as the targets are.
    places = torch.arange(targets.numel(), device=targets.device).view(targets.shape)
    with deferred_head(parts.model, parts.layout), parts.state.with_own_loss(recorder):
        evaluate(parts, runner, [(inputs, targets, places)])
    values = recorder.spread(targets, parts)
    for comm in (parts.comms.context, parts.comms.pipeline):
        if comm.world_size > 1:
            comm.sum_in_place(values, "log-probabilities")  # of each token one rank has a value, the others 0
    log_probs, *entropies = values.view(-1, *targets.shape).unbind()
    return TokenLogProbs(log_probs, entropies[0] if entropy else None)


def _inputs_and_targets(batch: Any) -> tuple[Any, Tensor]:
    """Return what is for the model, and the target of each place.

    Raises:
        ConfigError: the batch has no tokens from which targets follow.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    is_named = isinstance(batch, Mapping)
    tokens = (batch.get("labels", batch.get("input_ids")) if is_named else batch) if batch is not None else None
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
        raise ConfigError(
            "log-probs-batch",
            f"a batch of type {type(batch).__name__} has no tokens [B, S]; give (inputs, targets), input_ids by name, "
            "or a tensor of tokens",
        )
    mask = batch.get("attention_mask") if is_named and "labels" not in batch else None
    if mask is not None:
        tokens = tokens.where(mask.bool(), IGNORED)
    targets = F.pad(tokens[:, 1:], (0, 1), value=IGNORED)
    return ({name: value for name, value in batch.items() if name != "labels"} if is_named else batch), targets


class _LogProbRecorder:
    """Is a `loss_fn` that remembers the log-probabilities of its one call."""

    def __init__(self, temperature: float, entropy: bool) -> None:
        self._temperature, self._entropy = temperature, entropy
        self._seen: tuple[TokenLogProbs, Tensor] | None = None

    def __call__(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        _, targets, places = batch
        of_tokens = token_log_probs(output, targets, temperature=self._temperature, entropy=self._entropy)
        self._seen = of_tokens, places
        return -of_tokens.log_probs.sum(), (targets != IGNORED).sum()

    def spread(self, targets: Tensor, parts: EngineParts) -> Tensor:
        """Return log-probabilities and entropies of this rank at their places among all targets, [1 or 2, B * S]."""
        wide = torch.promote_types(parts.param_dtype, torch.float32)
        values = torch.zeros(1 + self._entropy, targets.numel(), dtype=wide, device=parts.device)
        if self._seen is not None:
            of_tokens, places = self._seen
            for row, number in zip(values, (of_tokens.log_probs, of_tokens.entropies), strict=False):
                if number is not None:
                    row[places.flatten()] = number.detach().to(wide).flatten()
        return values.view(-1)
