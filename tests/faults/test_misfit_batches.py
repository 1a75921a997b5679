"""A batch that a model or its loss does not take is one error in every layout, which other ranks quote or have too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.pool import WorkerPool
from harness.refusals import refusal_of
from shardwise import initialize
from shardwise.models import Decoder, DecoderConfig, lm_loss

VOCAB, LENGTH = 32, 8
SHAPE = DecoderConfig(
    vocab_size=VOCAB,
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=32,
    max_seq_len=16,
)


def tokens(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


# Tokens and targets, with the code: most are met by an operator of torch's far inside, some by us.
MISFITS: dict[str, tuple[Any, Any, str]] = {
    "three dims": (tokens(2, LENGTH, 2), tokens(2, LENGTH), "batch-misfit"),
    "one dim": (tokens(LENGTH), tokens(LENGTH), "batch-misfit"),
    "floats": (tokens(2, LENGTH).float(), tokens(2, LENGTH), "batch-misfit"),
    "beyond the vocabulary": (tokens(2, LENGTH) + VOCAB, tokens(2, LENGTH), "batch-misfit"),
    "a negative token": (tokens(2, LENGTH) - 1, tokens(2, LENGTH), "batch-misfit"),
    "too long": (tokens(2, 32), tokens(2, 32), "sequence-too-long"),
    "nothing": (None, tokens(2, LENGTH), "batch-misfit"),
    "an array": (tokens(2, LENGTH).numpy(), tokens(2, LENGTH), "batch-misfit"),
    "a target beyond the vocabulary": (tokens(2, LENGTH), tokens(2, LENGTH) + VOCAB, "batch-misfit"),
    "targets of fewer samples": (tokens(2, LENGTH), tokens(1, LENGTH), "batch-misfit"),
    "targets that are floats": (tokens(2, LENGTH), tokens(2, LENGTH).float(), "batch-misfit"),
}


# What has no tokens to cut over the ranks.
UNCUT = ("one dim", "nothing", "an array")


def try_misfits(rank: int, world_size: int, mesh: dict[str, int]) -> list[tuple[str, str]]:
    """An engine for each, as an error amid a schedule leaves stages apart."""
    found = []
    for number, (inputs, targets, _) in enumerate(MISFITS.values()):
        config = {
            "mesh": mesh,
            "batch": {"accumulation": 2},
            "run": {"device": "cpu", "timeout_s": 60.0},
            "precision": {"param": "fp32"},
        }
        engine = initialize(Decoder(SHAPE), config, loss_fn=lambda output, batch: lm_loss(output, batch[1]))
        good = (tokens(2, LENGTH), tokens(2, LENGTH))
        call: Callable[[list[Any]], Any] = engine.eval_step if number % 3 == 2 else engine.train_step
        found.append(refusal_of(lambda call=call, bad=(inputs, targets), good=good: call([good, bad])))
        engine.close()
    return found


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"tp": 2}, {"cp": 2}, {}], ids=str)
def test_a_batch_that_does_not_fit_is_one_error(ranks: WorkerPool, mesh: dict[str, int]) -> None:
    num_ranks = 2 if mesh else 1
    found = zip(*ranks(num_ranks).run(try_misfits, mesh), strict=True)
    for (name, (*_, code)), refusals in zip(MISFITS.items(), found, strict=True):
        codes = {each for each, _ in refusals}
        code = "cp-no-input" if mesh == {"cp": 2} and name in UNCUT else code
        assert codes <= {code, "collective-failed"}, (name, refusals)
        assert code in codes, (name, refusals)
        for said, message in refusals:
            assert "\n" not in message
            assert said != "collective-failed" or "has failed: " in message, (name, message)


# Losses of tokens [2, LENGTH] over an odd vocabulary, whose last rank under tp has a row of padding.
ODD = 33


def flat(function: Callable[..., Tensor], **more: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, targets: function(logits.reshape(-1, ODD), targets.reshape(-1), **more)


LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "lm_loss": lm_loss,
    "smoothed lm_loss": lambda logits, targets: lm_loss(logits, targets, label_smoothing=0.1, z_loss=0.1),
    "cross_entropy": flat(F.cross_entropy),
    "of each token": lambda logits, targets: F.cross_entropy(logits.mT, targets, reduction="none").mean(),
    "smoothed": flat(F.cross_entropy, label_smoothing=0.1),
    "weighted": flat(F.cross_entropy, weight=torch.ones(ODD)),
    "other ignore_index": flat(F.cross_entropy, ignore_index=0),
    "nll_loss": lambda logits, targets: F.nll_loss(logits.log_softmax(-1).flatten(0, -2), targets.flatten()),
}
WRONG_TARGETS: dict[str, Tensor] = {
    "in the padding": tokens(2, LENGTH) + ODD,
    "one beyond": torch.tensor([[0] * 7 + [64]] * 2),
    "negative": tokens(2, LENGTH) - 1,
    "fewer": tokens(1, LENGTH),
    "more": tokens(3, LENGTH),
    "one": tokens(1),
    "floats": tokens(2, LENGTH).float(),
    "a bool": tokens(2, LENGTH).bool(),
}
WRONG_TOKENS: dict[str, Tensor] = {
    "in the padding": tokens(2, LENGTH) + ODD,
    "one beyond": torch.tensor([[0] * 7 + [64]] * 2),
    "negative": tokens(2, LENGTH) - 1,
    "floats": tokens(2, LENGTH).float(),
}


def try_losses(rank: int, world_size: int, sections: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The code of the error of each loss with each wrong tensor."""
    config = {"run": {"device": "cpu", "timeout_s": 60.0}, "precision": {"param": "fp32"}, **sections}
    chosen: list[Callable[[Tensor, Tensor], Any]] = []
    model = Decoder(dataclasses.replace(SHAPE, vocab_size=ODD))
    engine = initialize(model, config, loss_fn=lambda output, batch: chosen[-1](output, batch[1]))
    found = {}
    for name, loss in LOSSES.items():
        chosen.append(loss)
        engine.eval_step([(tokens(2, LENGTH), tokens(2, LENGTH))])
        for kind, targets in WRONG_TARGETS.items():
            batch = (tokens(2, LENGTH), targets)
            found[f"{name}, {kind}"] = refusal_of(lambda batch=batch: engine.eval_step([batch]))[0]
    for kind, inputs in WRONG_TOKENS.items():
        batch = (inputs, tokens(2, LENGTH))
        found[f"tokens, {kind}"] = refusal_of(lambda batch=batch: engine.eval_step([batch]))[0]
    engine.close()
    return found


LAYOUTS: list[dict[str, dict[str, Any]]] = [
    {},
    {"context": {"chunk_tokens": 3}},
    {"mesh": {"tp": 2}},
    {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": False}, "context": {"chunk_tokens": 3}},
]


@pytest.mark.quick(2)
@pytest.mark.parametrize("sections", LAYOUTS, ids=str)
def test_wrong_tokens_and_targets_are_refused_in_every_loss(
    ranks: WorkerPool, sections: dict[str, dict[str, Any]]
) -> None:
    for found in ranks(2 if "mesh" in sections else 1).run(try_losses, sections):
        wrong = {name: code for name, code in found.items() if code != "batch-misfit"}
        assert not wrong, wrong


class Faulty(nn.Module):
    """Has a fault of its own, or raises what a batch would make an operator raise."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.linear, self.fault = nn.Linear(4, 4), fault
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.fault == "attribute":
            return self.kept.mean() + y  # type: ignore[attr-defined,no-any-return]
        if self.fault == "unpack":
            (first, second), third = self.kept, y
            return first + second + third
        if self.fault == "tuple":
            return y * y.shape[7]
        if self.fault == "value":
            raise ValueError("Expected input of another size")
        if self.fault == "runtime":
            raise RuntimeError("size mismatch of my own")
        return y


@pytest.mark.parametrize("is_loss", [False, True], ids=["model", "loss"])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("attribute", AttributeError),
        ("unpack", ValueError),
        ("tuple", IndexError),
        ("value", ValueError),
        ("runtime", RuntimeError),
    ],
)
def test_a_fault_of_the_users_own_code_stays_theirs(fault: str, kind: type[Exception], is_loss: bool) -> None:
    model, other = Faulty("" if is_loss else fault), Faulty(fault)
    config = {"run": {"device": "cpu"}, "precision": {"param": "fp32"}}
    engine = initialize(model, config, loss_fn=lambda y, _: (other(y) if is_loss else y).sum())
    with engine, pytest.raises(kind) as caught:
        engine.train_step([(torch.ones(2, 4), None)])
    assert type(caught.value) is kind
    assert caught.traceback[-1].name == "forward"
    assert "Faulty was given input [2, 4]" in caught.value.__notes__[0]
