"""What users read of a split Hugging Face model: generated text, an accuracy, logits in a loss of their own."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.huggingface import build_model
from harness.pool import WorkerPool
from harness.tensor import make_case
from harness.training import make_config
from shardwise import initialize
from shardwise.runtime.float64 import float64_throughout

pytest.importorskip("transformers")

PROMPT = torch.tensor([[5, 7, 9, 11, 13]])  # no tp divides its length, nor the 1 of a step with a cache


def generate(model: nn.Module) -> list[list[int]]:
    with torch.no_grad():
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        tokens: Tensor = model.generate(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), **options)
    return tokens.tolist()


def build(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return build_model(name).double().eval()


def split_config(world_size: int, **sections: Any) -> Any:
    return make_config(1, {"mesh": {"tp": world_size}, "tensor": {"sequence_parallel": True}, **sections})


def generate_split(rank: int, world_size: int, name: str) -> list[list[int]]:
    model = build(name)
    with (
        float64_throughout(),
        initialize(model, split_config(world_size, zero={"stage": 3})) as engine,
        engine.gathered() as whole,
    ):
        return generate(whole)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_sequences_that_grow_are_generated_as_by_one_process(ranks: WorkerPool, name: str) -> None:
    with float64_throughout():
        expected = generate(build(name))
    assert ranks(2).run(generate_split, name) == [expected] * 2


def read_logits(rank: int, world_size: int) -> tuple[list[float], list[str]]:
    """The losses of users' own functions, and what is logged about them."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    case = make_case("llama")
    batch = case.batch(0, 2, torch.float64)
    inputs = {key: value for key, value in batch.items() if key != "labels"}

    def usual(output: Any, given: Any) -> Tensor:
        logits = output.logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), given[1].view(-1))

    def unusual(output: Any, given: Any) -> Tensor:
        logits = output.logits.log_softmax(-1)
        return F.nll_loss(logits.view(-1, logits.shape[-1]), given[1].view(-1))

    logging.getLogger("shardwise").addHandler(handler)
    losses = []
    try:
        for loss_fn in (usual, unusual):
            with (
                float64_throughout(),
                initialize(build("llama"), split_config(world_size), loss_fn=loss_fn) as engine,
            ):
                losses += [engine.train_step([(inputs, batch["labels"])]).loss for _ in range(2)]
                with torch.no_grad():
                    assert engine.model(**inputs).logits.argmax(-1).shape == batch["labels"].shape
    finally:
        logging.getLogger("shardwise").removeHandler(handler)
    return losses, said


def test_logits_are_gathered_for_gradients_only_and_one_rank_says_so(ranks: WorkerPool) -> None:
    (losses, said), (_, said_elsewhere) = ranks(2).run(read_logits)
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-9)
    (message,) = said
    assert message.startswith("log_softmax reads the logits of lm_head, so from now on full logits")
    assert said_elsewhere == []
