"""Find out by a trial whether a `loss_fn` is a sum or a mean over tokens: under `cp` each rank has some of them.

Some of the batch's tokens, with made-up outputs of the model, are given to it whole and in two halves. As it may decide
by their number, it is also given as many as the sequence has, and as each rank has: by values where these are few, or
else without values, to see whether each decision is the one that it takes for the tokens that were tried.

>>> def mean(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
...     return (output.mean(-1) * targets).mean()
>>> check_loss_by_token(mean, torch.rand(2, 6, 3), torch.rand(2, 6), 6)
>>> def of_sequences(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
...     return (output.mean(-1) * targets).sum(1).sigmoid().mean()
>>> check_loss_by_token(of_sequences, torch.rand(2, 6, 3), torch.rand(2, 6), 6)  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
shardwise.config.errors.ConfigError: loss_fn is no sum or mean over tokens, ...
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.comm.loss import LossFn, LossSum, read_loss
from shardwise.config.errors import ConfigError
from shardwise.dropout.still import StillFunctions
from shardwise.runtime.forward_state import kept_generators
from shardwise.runtime.symbolic_size import SymbolicSizes
from shardwise.runtime.torch_private import OpMode, in_fake_mode, pytree

_LOG: Final = logging.getLogger("shardwise")
_MOST_TOKENS: Final = 16
_MOST_SHOWN: Final = 5
_FEW_NUMBERS: Final = 2**20  # of the outputs for a sequence
_MOST_NUMBERS: Final = 2**26
_TOLERANCE: Final = 1e-4  # outputs are in fp32
_FIX: Final = (
    "return the sum and the count over this rank's tokens, with targets that were shifted before, or use mesh.dp_shard "
    "with zero.stage=3 in place of mesh.cp"
)


def check_loss_by_token(loss_fn: LossFn, output: Any, batch: Any, num_tokens: int, cp: int = 2) -> None:
    """Check that a loss of some tokens is what the losses of parts of them sum to.

    A loss that cannot be computed of made-up outputs, or sends something to other ranks, is taken as it is.

    Args:
        output: of the model for this rank's tokens; only its shapes and dtypes count.
        num_tokens: of this rank; tensors whose second dim is as long have one entry for each.
        cp: ranks that have as many tokens of the sequence each.

    Raises:
        ConfigError: it is another function of the tokens, such as a preference between sequences, a loss that shifts
            the targets itself, or a mean where ranks have different numbers of targets.
    """
    if in_fake_mode():
        return
    trial = _Trial(loss_fn, output, batch, num_tokens)
    num_tried = min(num_tokens // 2 * 2, _MOST_TOKENS)
    if num_tried:
        # The last one's target may be missing.
        trial.compare(torch.linspace(0, num_tokens - 1, num_tried).long().tolist(), 2)
    length = num_tokens * cp
    num_numbers = cp * sum(leaf.numel() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
    if num_numbers <= _FEW_NUMBERS:
        trial.compare([*range(num_tokens)] * cp, cp)
    elif num_tried and (decision := trial.other_decision(length, (num_tokens, num_tried, num_tried // 2))):
        if num_numbers > _MOST_NUMBERS:
            raise ConfigError(
                "cp-token-loss",
                f"loss_fn decides by the number of tokens ({decision}), and each rank of mesh.cp has {num_tokens:,} of "
                f"{length:,}; {_FIX}",
            )
        trial.compare([*range(num_tokens)] * cp, cp)


@dataclass(frozen=True)
class _Trial:
    """Tries a loss; the attributes are those of `check_loss_by_token`."""

    loss_fn: LossFn
    output: Any
    batch: Any
    num_tokens: int

    def compare(self, places: list[int], num_parts: int) -> None:
        """Compare the loss of some tokens with those of parts of them.

        Raises:
            ConfigError: they differ.
        """
        num_tried = len(places)
        draws = torch.Generator().manual_seed(0)
        made_up = _mapped(self.output, self.num_tokens, lambda each: _made_up(each, places, draws))
        targets = _mapped(self.batch, self.num_tokens, lambda each: each[:, places])
        size = num_tried // num_parts
        slices = [slice(None), *(slice(first, first + size) for first in range(0, size * num_parts, size))]
        with torch.no_grad(), kept_generators(), StillFunctions(), _Watch() as watch:
            try:
                whole, *others = (
                    read_loss(_cut(made_up, num_tried, tokens), _cut(targets, num_tried, tokens), self.loss_fn)
                    for tokens in slices
                )
            except Exception as error:  # of the user's code
                _LOG.debug("loss_fn was not tried under mesh.cp: %s", error)
                return
        if not watch.has_sent:
            _compare(whole, others, num_tried)

    def other_decision(self, length: int, others: Sequence[int]) -> str:
        """Return what the loss decides of so many tokens and would not of one of the others; empty where that is
        nothing, or is not known.
        """
        sizes = SymbolicSizes(tokens=length)

        def symbolic(leaf: Tensor) -> Tensor:
            return torch.zeros(
                leaf.shape[0], sizes.numbers["tokens"], *leaf.shape[2:], dtype=leaf.dtype, device=leaf.device
            )

        try:
            with torch.no_grad(), kept_generators(), sizes.in_place():
                arguments = [_mapped(tree, self.num_tokens, symbolic) for tree in (self.output, self.batch)]
                self.loss_fn(*arguments)
        except Exception as error:  # of code that needs values
            _LOG.debug("loss_fn was not tried without values under mesh.cp: %s", error)
            return ""
        return next(filter(None, (sizes.differing_at(tokens=number) for number in others)), "")


def _compare(whole: LossSum, others: Sequence[LossSum], num_tokens: int) -> None:
    totals = [float(loss.total) for loss in (whole, *others)]
    counts = [float(loss.count) for loss in (whole, *others)]
    if not all(map(math.isfinite, totals)) or not any(totals):
        return
    share = 1 if whole.is_counted else len(others)
    total, count = (sum(values[1:]) / share for values in (totals, counts))
    off, scale = abs(totals[0] - total), sum(map(abs, totals))
    if off <= _TOLERANCE * scale and math.isclose(counts[0], count, rel_tol=_TOLERANCE):
        return
    shown = ", ".join(
        f"{value:.6g} / {number:g}" if whole.is_counted else f"{value:.6g}"
        for value, number in zip(totals[:_MOST_SHOWN], counts, strict=False)
    )
    names = "their two halves" if len(others) == 2 else f"their {len(others)} parts"
    raise ConfigError(
        "cp-token-loss",
        f"loss_fn is no sum or mean over tokens, of which each rank of mesh.cp has some: of {num_tokens} tokens and "
        f"{names} it gave {shown}; {_FIX}",
    )


def _made_up(like: Tensor, places: list[int], draws: torch.Generator) -> Tensor:
    """Return numbers between 0 and 1, of which logarithms and roots exist, and which grow along the tokens."""
    if not like.is_floating_point():
        return like[:, places]
    shape = (like.shape[0], len(places), *like.shape[2:])
    growth = torch.linspace(0.01, 1.0, len(places)).view(-1, *[1] * (like.dim() - 2))
    return torch.rand(shape, generator=draws).mul_(growth).to(like.device)


def _cut(tree: Any, num_tokens: int, part: slice) -> Any:
    return _mapped(tree, num_tokens, lambda each: each[:, part])


def _mapped(tree: Any, num_tokens: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a tree with other tensors of tokens."""
    return pytree.tree_map(
        lambda each: (
            change(each) if isinstance(each, Tensor) and each.dim() > 1 and each.shape[1] == num_tokens else each
        ),
        tree,
    )


class _Watch(OpMode):
    """Sees whether something is sent to other ranks."""

    has_sent = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_sent |= "c10d" in func.namespace
        return func(*args, **(kwargs or {}))
