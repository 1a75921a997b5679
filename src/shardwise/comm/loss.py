"""Losses are kept as sums and counts, so that every token that counts weighs the same over ranks and micro-batches.

>>> total = read_loss(torch.ones(3), None, lambda output, batch: (output.sum(), 3))
>>> total.mean()
tensor(1.)
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Comm, ScalarSum
from shardwise.comm.mesh import CommGroups
from shardwise.config.arguments import NO_CLASS
from shardwise.config.errors import CodedError, ConfigError, EngineError
from shardwise.runtime.device import number_dtype, numbers_on
from shardwise.runtime.module_calls import watch_calls
from shardwise.runtime.torch_private import pytree

LossFn = Annotated[Callable[[Any, Any], Any], NO_CLASS]

_LOG: Final = logging.getLogger("shardwise")

# What a module was given whose output is not finite; a rank that does not know says nothing.
_GIVEN: Final = (
    "",
    ", whose input was not finite already: the data of this batch are bad",
    ", whose input was finite and whose parameters are not: training has diverged before this step",
    ", whose input and parameters were finite: training diverges there",
)


class NonFiniteLossError(CodedError, ArithmeticError, ValueError):
    """A loss or gradient is NaN or infinite; the message names the first module that produced such a value."""


@dataclass(frozen=True)
class LossSum:
    """Holds a loss summed over what counts: `total` and `count`, both 0-d tensors on one device.

    `is_counted` is False for a single number: how much it is the mean of is not known, so it counts as one.
    """

    total: Tensor
    count: Tensor
    is_counted: bool = True

    def mean(self) -> Tensor:
        """Return the mean loss; 0 where nothing counts."""
        return self.total / self.divisor()

    def divisor(self) -> Tensor:
        """Return the count, and 1 where nothing counts."""
        return torch.where(self.count == 0, torch.ones_like(self.count), self.count)


def read_loss(
    output: Any,
    batch: Any,
    loss_fn: LossFn | None,
    num_parts: int = 1,
    own_weight: Tensor | None = None,
    num_targets: Tensor | None = None,
) -> LossSum:
    """Take the loss from `loss_fn`, or from the model's output: a scalar, (sum, count), (loss, ...), `.loss`,
    `["loss"]`.

    Args:
        loss_fn: None where the output has the loss.
        num_parts: ranks that share the batch's tokens; their scalars, each a mean over some, count as one together.
        own_weight: 0-d, of this rank's scalar among theirs, if it is the model's own; None for equal weights.
        num_targets: 0-d, how many targets the model's own scalar is the mean of; None to count it as one.

    Raises:
        ConfigError: there is no scalar loss in it.
    """
    loss = output if loss_fn is None else loss_fn(output, batch)
    if loss_fn is None and not isinstance(loss, Tensor | tuple):
        loss = loss.get("loss") if isinstance(loss, Mapping) else getattr(loss, "loss", None)
    if _is_sum_and_count(loss):
        total, count = loss
    else:
        is_outputs = loss_fn is None and isinstance(loss, tuple) and len(loss) > 0
        total, count = loss[0] if is_outputs else loss, 1 if num_parts == 1 else 1 / num_parts
    if not isinstance(total, Tensor) or total.numel() != 1 or total.is_complex():
        source = "the model's output" if loss_fn is None else "what loss_fn returned"
        found = (
            f"a tensor of shape {tuple(total.shape)} in {total.dtype}"
            if isinstance(total, Tensor)
            else f"a {type(loss).__name__}"
        )
        raise ConfigError(
            "no-scalar-loss", f"{source} is {found} and no scalar loss; pass a loss_fn that returns (sum, count)"
        )
    if num_parts > 1 and not _is_sum_and_count(loss):
        total = total / num_parts if loss_fn is not None or own_weight is None else total * own_weight
    is_counted = _is_sum_and_count(loss)
    if loss_fn is None and num_targets is not None and not is_counted:
        widened = total.to(torch.promote_types(total.dtype, torch.float32))
        number = num_targets.to(total.device)
        total = torch.where(number > 0, widened * number, 0)  # a mean over no targets is NaN
        count, is_counted = num_targets / num_parts, True
    return LossSum(total.reshape(()), _on_device(count, total).detach().reshape(()), is_counted)


def check_loss(loss: Tensor) -> None:
    """Refuse a loss that has no gradient.

    Raises:
        ConfigError: it is not one number, or leads to no trained parameter.
    """
    if loss.numel() != 1:
        raise ConfigError("no-scalar-loss", f"the loss has shape {tuple(loss.shape)}; give one number, such as its sum")
    if not loss.requires_grad:
        raise ConfigError("loss-without-graph", "the loss leads to no trained parameter; leave out detach(), no_grad()")


def _on_device(count: Tensor | float, total: Tensor) -> Tensor:
    """Move a count to the loss's device; copying a number would hold up the host until the device has done all its
    work.
    """
    if isinstance(count, Tensor):
        return count.to(total.device, non_blocking=True)
    dtype = torch.promote_types(total.dtype, torch.float32) if isinstance(count, float) else None
    return torch.full((), count, dtype=dtype, device=total.device)


def _is_sum_and_count(loss: Any) -> bool:
    if not isinstance(loss, tuple) or len(loss) != 2:
        return False
    return isinstance(loss[1], int | float) or (isinstance(loss[1], Tensor) and loss[1].numel() == 1)


@dataclass
class PlainMode:
    """Says how losses count that tell no number of targets: scalars that `engine(batch)` did not return, and those of
    backwards that a script calls on tensors.

    Attributes:
        is_on: whether a step may have such losses.
        scale: of the gradient of such a loss in the step's mean; None where the script scales the loss itself.
        count: of what each rank's losses of a step are the mean; 1 / data ranks makes the step's loss their sum.
        is_next_scaled: the script has scaled the loss of its next backward on a tensor.
        is_loss_known: the step has had no backward on a tensor.
    """

    is_on: bool = False
    scale: float | None = 1.0
    count: float = 1.0
    is_next_scaled: bool = False
    is_loss_known: bool = True

    @property
    def weight(self) -> float:
        """Return what the gradient of such a loss weighs."""
        return 1.0 if self.scale is None else self.scale

    def check_unseen(self, loss_scale: float) -> None:
        """Take a backward that a script has called on a tensor, whose loss is not seen.

        Raises:
            ConfigError: the script must scale the loss.
        """
        if (self.scale is None or loss_scale != 1.0) and not self.is_next_scaled:
            raise ConfigError(
                "backward-unscaled",
                f"loss.backward() under a loss scale of {loss_scale:g}; call engine.backward(loss)",
            )
        self.is_loss_known = self.is_next_scaled = False

    def begin_step(self) -> None:
        """Forget what the last step had."""
        self.is_loss_known, self.is_next_scaled = True, False


class LossAccumulator:
    """Sums the losses since the last step, and knows which of them still await their backward.

    Gradients of sums are taken divided by `normaliser`, a power of two near the count of the first micro-batch: large
    counts would overflow fp16 and small ones underflow it, and a power of two changes no other bit.

    Args:
        comms: of the engine; ranks that share a layer's matrices compute the same loss, which counts once.

    Attributes:
        normaliser: 0 before the first loss of a step.
        plain: how losses without a count are taken.
        adds_up: the losses of a step add up on a rank: what the first one counts is the count of all.
    """

    def __init__(self, comms: CommGroups) -> None:
        self.normaliser = 0.0
        self.plain, self.adds_up = PlainMode(), False
        self._comms = comms
        self._has_warned = self._is_plain = False
        self._rows: list[Tensor] = []  # loss and count of each
        self._open: list[tuple[weakref.ref[Tensor], LossSum]] = []

    @property
    def is_empty(self) -> bool:
        """Say whether no loss has been counted in since the last step."""
        return not self._rows

    @property
    def has_open(self) -> bool:
        """Say whether a loss still awaits its backward."""
        return any(reference() is not None for reference, _ in self._open)

    @property
    def is_first(self) -> bool:
        """Say whether this rank is the first of those that have counted a loss in."""
        return bool(self._rows) and self._comms.model.rank == 0

    @property
    def is_plain(self) -> bool:
        """Say whether the losses of this step are of any scalars."""
        return self._is_plain

    def add(self, total: LossSum) -> None:
        """Count a loss in."""
        dtype = number_dtype(total.total.device)
        count = total.count * 0 if self.adds_up and self._rows else total.count
        self._rows.append(torch.stack([total.total.detach().to(dtype), count.to(dtype)]))

    def count_error(self, count: float, where: str) -> EngineError | None:
        """Return the error for a sum of counts from `sum_with` with one that no loss can have; None if it has none."""
        if math.isfinite(count):
            return None
        own = ", ".join(f"{float(each):g}" for _, each in self._rows) or "none"
        return EngineError(
            "loss-count",
            f"{where}: loss_fn must return (sum, count) with a finite count above 0, or 0 for both; on some rank it "
            f"did not (here the counts are {own}), so nothing is updated: count the targets, and return a sum of 0 "
            "where there are none",
        )

    def open(self, total: LossSum) -> Tensor:
        """Return the mean loss; give it to `close` when its backward runs."""
        mean = total.mean()
        self._open = [(reference, other) for reference, other in self._open if reference() is not None]
        self._open.append((weakref.ref(mean), replace(total, total=total.total.detach())))
        return mean

    def count_in(self, total: LossSum) -> Tensor:
        """Count a loss in and return the weight of its mean's gradient, a 0-d tensor."""
        meets_others = bool(self._rows) or self._comms.data.world_size > 1
        self.add(total)
        if meets_others and not total.is_counted and not self._has_warned:
            self._has_warned = True
            if self.is_first:
                _LOG.warning(
                    "the loss is one number without a count, so every micro-batch of every rank weighs the same; where "
                    "they hold different numbers of targets, pass a loss_fn that returns (sum, count)"
                )
        return total.divisor() / self._agree_on_normaliser(total)

    def close(self, mean: Tensor) -> Tensor:
        """Count in a loss that `open` returned, and return the weight of its gradient, a 0-d tensor.

        Raises:
            ConfigError: `mean` is not such a loss.
        """
        place = self._place_of(mean)
        if place is not None and not self._is_plain:
            return self.count_in(self._open.pop(place)[1])
        raise ConfigError(
            "loss-not-from-engine",
            "backward got a tensor that engine(batch) did not return, or the same one twice, so how much counts in it "
            "is unknown; compute the loss in loss_fn and pass on what engine(batch) returns, or run the model by "
            "engine.forward(...), after which any loss is taken",
        )

    def knows(self, loss: Tensor) -> bool:
        """Say whether `open` returned this loss, and its backward has not run."""
        return self._place_of(loss) is not None

    def add_plain(self, loss: Tensor) -> None:
        """Add a loss without a count: those of a step add up on a rank, and all ranks weigh the same.

        Raises:
            ConfigError: losses with a count, or of another scale, have been added in this step.
        """
        scale = self.plain.weight
        if self._rows and not (self._is_plain and self.normaliser == scale):
            raise ConfigError(
                "losses-mixed",
                "a step got backwards of two kinds of losses, whose weights differ: that of engine(batch), that of "
                "engine.backward and that of a tensor; use one of them within a step",
            )
        count = 0.0 if self._rows else self.plain.count
        self.add(LossSum(loss.detach().reshape(()), loss.new_full((), count, dtype=number_dtype(loss.device))))
        self._is_plain, self.normaliser = True, scale

    def sum_with(self, values: Tensor, name: str, known: Sequence[float] = ()) -> list[float]:
        """Sum loss, count, a vector of further values (fp64, on the device) and numbers of the host over the ranks.

        What has no count and no loss, or a mean over nothing, adds nothing. The count is NaN on all ranks where one of
        them has counted what no loss can have: a number below 0, NaN, or 0 beside a loss.
        """
        return self.start_sum_with(values, name, known).read()

    def start_sum_with(self, values: Tensor, name: str, known: Sequence[float] = ()) -> ScalarSum:
        """Start what `sum_with` does."""
        return self._comms.all.start_sum_of_scalars(self._before(values), name, known)

    def sum_over_ranks(self, name: str, known: Sequence[float] = ()) -> tuple[float, ...]:
        """Return the loss's sum and count over the ranks, and those of numbers of the host."""
        return tuple(self.sum_with(numbers_on(self._comms.all.device, []), name, known))

    def deviation(self) -> Tensor:
        """Return a number, fp64 [1], whose sum over the ranks is 0 where those of each tensor-parallel group, which
        compute one loss, have the same; [0] where each has a loss of its own.
        """
        tensor = self._comms.tensor
        if tensor.world_size == 1:
            return numbers_on(tensor.device, [])
        return self._own_sums()[:1] * (1.0 if tensor.rank == 0 else -1.0 / (tensor.world_size - 1))

    def _before(self, values: Tensor) -> Tensor:
        """Put loss and count of this rank, where they count, before further values."""
        return torch.cat([self._own_sums() if self._comms.tensor.rank == 0 else values.new_zeros(2), values])

    def _own_sums(self) -> Tensor:
        if not self._rows:
            device = self._comms.all.device
            return torch.zeros(2, dtype=number_dtype(device), device=device)
        rows = torch.stack(self._rows)  # [n, 2]
        if not (self._is_plain or self.adds_up):
            totals, counts = rows.unbind(1)
            is_nothing = (counts == 0) & ~(totals.abs() > 0)  # NaN is not above 0
            counts = counts.where((counts > 0) | is_nothing, math.nan)
            rows = torch.stack([totals.where(~is_nothing, 0), counts], dim=1)
        return sum(rows.unbind(), rows.new_zeros(2))

    def clear(self, keeps_open: bool = False) -> None:
        """Start the next step; with `keeps_open` losses that await their backward may have it there."""
        self._rows.clear()
        if not keeps_open:
            self._open.clear()
        if self._is_plain:
            self._is_plain, self.normaliser = False, 0.0

    def _place_of(self, loss: Tensor) -> int | None:
        return next((place for place, (reference, _) in enumerate(self._open) if reference() is loss), None)

    def _agree_on_normaliser(self, total: LossSum) -> float:
        # Once a step: gradients of all its micro-batches, on all ranks, are added up, so they need one scale.
        if self.normaliser == 0.0:
            count = total.count.to(number_dtype(total.count.device)).nan_to_num(0, 0, 0).reshape(1)
            if total.is_counted and self._comms.context.world_size > 1:  # hooks see gradients as in one process
                count = count.new_tensor(self._comms.context.sum_scalars(count, "loss normaliser"))
            (largest,) = self._comms.data.max_scalars(count, "loss normaliser")
            self.normaliser = 2.0 ** round(math.log2(largest)) if largest > 0 else 1.0
        return self.normaliser


def first_nonfinite_module(
    model: nn.Module, batches: Sequence[Any], forward: Callable[[Any], object], comm: Comm
) -> str:
    """Run the step's forwards again and say which module's output is the first that is not finite, on which rank.

    It also says whether what the module was given was finite: if not, the data are bad; if so, training diverges. Each
    rank finds its own first; of those it is the first one in the model's order of modules. All ranks call it, with
    equally many batches.

    Args:
        forward: runs the forward of one batch.
    """
    begun: list[tuple[str, int]] = []  # the modules that are being called, each with what it was given
    found: list[tuple[str, int]] = []

    def begin(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parameters = list(module.parameters(recurse=False))
        begun.append((name, 1 if not _is_finite((args, kwargs)) else 2 if not _is_finite(parameters) else 3))

    def end(output: Any) -> None:
        called = begun.pop()
        if not found and not _is_finite(output):
            found.append(called)

    modules = [name for name, _ in model.named_modules()]
    with torch.no_grad(), watch_calls(model, begin, end):
        for batch in batches:
            forward(batch)
    reports = torch.zeros(comm.world_size, dtype=number_dtype(comm.device), device=comm.device)
    for name, given in found:  # the model itself comes last
        reports[comm.rank] = (modules.index(name) or len(modules)) + given / len(_GIVEN)
    summed = comm.sum_scalars(reports, "first non-finite module")
    reported = [(int(report), rank) for rank, report in enumerate(summed) if report]
    if not reported:
        return "every module's output is finite, so it arose in the loss or in the backward"
    position, rank = min(reported)  # a stage sends its output to the next, which may be a lower rank's
    name = modules[position % len(modules)] or type(model).__name__
    given = round((summed[rank] - position) * len(_GIVEN))
    return f"the first module with a non-finite output is {name} on rank {rank}{_GIVEN[given]}"


def _is_finite(values: Any) -> bool:
    leaves = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))
    return all(bool(leaf.isfinite().all()) for leaf in leaves if leaf.is_floating_point())
