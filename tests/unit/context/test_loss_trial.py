"""The trial knows a loss that is no sum or mean over tokens before a rank of `cp` takes a part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from harness.refusals import refused
from shardwise.context.loss_trial import check_loss_by_token

NUM_TOKENS, NUM_CLASSES = 40, 5
TARGETS = torch.arange(3 * NUM_TOKENS).view(3, NUM_TOKENS) % NUM_CLASSES
LAST_IGNORED = TARGETS.clone()
LAST_IGNORED[:, -1] = -100

Loss = Callable[[Any, Tensor], Any]


def token_losses(output: Any, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(output["logits"].transpose(1, 2), targets, reduction="none", **options)


def summed(output: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    losses = token_losses(output, targets, label_smoothing=0.1)
    return losses.sum(), (targets != -100).sum()


def mean(output: Any, targets: Tensor) -> Tensor:
    losses = token_losses(output, targets)
    return losses.sum() / (targets != -100).sum()


def dropped_out(output: Any, targets: Tensor) -> Tensor:
    return F.dropout(token_losses(output, targets), 0.5).mean() + torch.rand(1).mul(0).sum()


def preference(output: Any, targets: Tensor) -> Tensor:
    one, other, _ = token_losses(output, targets).sum(1)
    return -F.logsigmoid(0.1 * (one - other))


def counted_rows(output: Any, targets: Tensor) -> tuple[Tensor, int]:
    return token_losses(output, targets).sum(), len(targets)


def shifting(output: Any, targets: Tensor) -> tuple[Tensor, int]:
    losses = token_losses({"logits": output["logits"][:, :-1]}, targets[:, 1:])
    return losses.sum(), losses.numel()


def normalised(output: Any, targets: Tensor) -> tuple[Tensor, int]:
    losses = token_losses(output, targets)
    advantages = (losses - losses.mean()) / losses.std()
    return (losses * advantages).sum(), losses.numel()


def try_loss(loss_fn: Loss, targets: Tensor) -> None:
    output = {"logits": torch.zeros(3, NUM_TOKENS, NUM_CLASSES), "pooled": torch.zeros(3, 2)}
    check_loss_by_token(loss_fn, output, targets, NUM_TOKENS)


@pytest.mark.parametrize(
    ("loss_fn", "targets"),
    [(summed, TARGETS), (summed, LAST_IGNORED), (mean, TARGETS), (dropped_out, TARGETS), (summed, TARGETS * 0 - 100)],
)
def test_sums_and_even_means_are_taken(loss_fn: Loss, targets: Tensor) -> None:
    before = torch.get_rng_state()
    try_loss(loss_fn, targets)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("loss_fn", "targets"),
    [
        (preference, TARGETS),
        (counted_rows, TARGETS),
        (shifting, TARGETS),
        (normalised, TARGETS),
        (mean, LAST_IGNORED),
    ],
)
def test_others_are_refused(loss_fn: Loss, targets: Tensor) -> None:
    with refused("cp-token-loss", "sum and the count"):
        try_loss(loss_fn, targets)


def test_a_loss_that_made_up_outputs_do_not_suit_is_left_alone() -> None:
    def picky(output: Any, targets: Tensor) -> Tensor:
        assert output["logits"].shape[1] == NUM_TOKENS
        return preference(output, targets)

    try_loss(picky, TARGETS)
