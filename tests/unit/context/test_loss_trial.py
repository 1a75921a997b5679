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


def by_length(longest: int) -> Loss:
    def loss(output: Any, targets: Tensor) -> tuple[Tensor, int]:
        losses = token_losses(output, targets)
        return losses.sum() * (2 if losses.shape[1] > longest else 1), losses.numel()

    return loss


@pytest.mark.parametrize("num_tokens", [24, 3000, 400_000])
@pytest.mark.parametrize("cp", [2, 4])
def test_a_loss_that_decides_by_the_number_of_tokens_is_refused_where_a_rank_decides_otherwise(
    num_tokens: int, cp: int
) -> None:
    output = {"logits": torch.zeros(1).expand(1, num_tokens, 100)}
    targets = torch.zeros(1, num_tokens, dtype=torch.long)
    for longest in (num_tokens, num_tokens * cp - 1):
        with refused("cp-token-loss", "mesh.dp_shard"):
            check_loss_by_token(by_length(longest), output, targets, num_tokens, cp)
    check_loss_by_token(by_length(num_tokens * cp), output, targets, num_tokens, cp)
    check_loss_by_token(summed, output, targets, num_tokens, cp)
