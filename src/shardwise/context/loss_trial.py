"""Find out by a trial whether a `loss_fn` is a sum or a mean over tokens: under `cp` each rank has some of them.

Some of the batch's tokens, with made-up outputs of the model, are given to it whole and in two halves.

>>> def mean(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
...     return (output.mean(-1) * targets).mean()
>>> check_loss_by_token(mean, torch.rand(2, 6, 3), torch.rand(2, 6), 6)
>>> def of_sequences(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
...     return (output.mean(-1) * targets).sum(1).sigmoid().mean()
>>> check_loss_by_token(of_sequences, torch.rand(2, 6, 3), torch.rand(2, 6), 6)  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
shardwise.config.resolve.ConfigError: loss_fn is no sum or mean over tokens, ...
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.comm.loss import LossFn, LossSum, read_loss
from shardwise.config.resolve import ConfigError
from shardwise.dropout.still import StillFunctions
from shardwise.runtime.forward_state import kept_generators
from shardwise.runtime.torch_private import OpMode, in_fake_mode, pytree

_LOG: Final = logging.getLogger("shardwise")
_MOST_TOKENS: Final = 16
_TOLERANCE: Final = 1e-4  # outputs are in fp32
_FIX: Final = (
    "return the sum and the count over this rank's tokens, with targets that were shifted before, or use mesh.dp_shard "
    "with zero.stage=3 in place of mesh.cp"
)


def check_loss_by_token(loss_fn: LossFn, output: Any, batch: Any, num_tokens: int) -> None:
    """Check that a loss of some tokens is what the losses of two halves of them sum to.

    A loss that cannot be computed of made-up outputs, or sends something to other ranks, is taken as it is.

    Args:
        output: of the model for this rank's tokens; only its shapes and dtypes count.
        num_tokens: of this rank; tensors whose second dim is as long have one entry for each.

    Raises:
        ConfigError: it is another function of the tokens, such as a preference between sequences, a loss that shifts
            the targets itself, or a mean where ranks have different numbers of targets.
    """
    num_tried = min(num_tokens // 2 * 2, _MOST_TOKENS)
    if not num_tried or in_fake_mode():
        return
    places = torch.linspace(0, num_tokens - 1, num_tried).long().tolist()  # the last one's target may be missing
    half = num_tried // 2
    draws = torch.Generator().manual_seed(0)
    made_up = _mapped(output, num_tokens, lambda each: _made_up(each, places, draws))
    targets = _mapped(batch, num_tokens, lambda each: each[:, places])
    with torch.no_grad(), kept_generators(), StillFunctions(), _Watch() as watch:
        try:
            whole, first, second = (
                read_loss(_cut(made_up, num_tried, part), _cut(targets, num_tried, part), loss_fn)
                for part in (slice(None), slice(half), slice(half, None))
            )
        except Exception as error:  # of the user's code
            _LOG.debug("loss_fn was not tried under mesh.cp: %s", error)
            return
    if not watch.has_sent:
        _compare(whole, first, second, num_tried)


def _compare(whole: LossSum, first: LossSum, second: LossSum, num_tokens: int) -> None:
    totals = [float(each.total) for each in (whole, first, second)]
    counts = [float(each.count) for each in (whole, first, second)]
    if not all(map(math.isfinite, totals)) or not any(totals):
        return
    total, count = (sum(each[1:]) if whole.is_counted else sum(each[1:]) / 2 for each in (totals, counts))
    off, scale = abs(totals[0] - total), sum(map(abs, totals))
    if off <= _TOLERANCE * scale and math.isclose(counts[0], count, rel_tol=_TOLERANCE):
        return
    shown = ", ".join(
        f"{value:.6g} / {number:g}" if whole.is_counted else f"{value:.6g}"
        for value, number in zip(totals, counts, strict=True)
    )
    raise ConfigError(
        "cp-token-loss",
        f"loss_fn is no sum or mean over tokens, of which each rank of mesh.cp has some: of {num_tokens} tokens and "
        f"their two halves it gave {shown}; {_FIX}",
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
