"""The sampler with a recording callable in place of a model, and once with a decoder."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.refusals import refused
from shardwise.models.decoder import Decoder, generate
from shardwise.models.presets import preset

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -torch.inf])


class Recorder:
    """Gives the same logits for every position and keeps what it was asked."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []

    def __call__(self, tokens: Tensor) -> Tensor:
        self.inputs.append(tokens)
        return LOGITS.expand(*tokens.shape, -1)


def sample(num_tokens: int = 400, **options: Any) -> Tensor:
    prompt = torch.tensor([[4], [4]])  # [B, 1]
    generator = torch.Generator().manual_seed(7)
    return generate(Recorder(), prompt, num_tokens, max_seq_len=4, generator=generator, **options)


def test_the_input_is_cropped_to_the_longest_the_model_takes() -> None:
    model = Recorder()
    prompt = torch.tensor([[0, 1, 2]])  # [B, S]
    tokens = generate(model, prompt, 4, max_seq_len=4, temperature=0)
    assert [t.shape[1] for t in model.inputs] == [3, 4, 4, 4]
    assert tokens.tolist() == [[0, 1, 2, 1, 1, 1, 1]]
    assert model.inputs[-1].tolist() == tokens[:, 2:6].tolist()


def test_a_generator_makes_it_reproducible_and_rows_differ() -> None:
    first, second = sample(), sample()
    assert torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


def test_samples_follow_the_tempered_probabilities() -> None:
    for temperature in (1.0, 3.0):
        drawn = sample(num_tokens=1500, temperature=temperature)[:, 1:]
        frequency = torch.bincount(drawn.flatten(), minlength=5) / drawn.numel()
        torch.testing.assert_close(frequency, (LOGITS / temperature).softmax(-1), rtol=0, atol=0.03)


def test_top_k_keeps_the_likeliest() -> None:
    assert set(sample(top_k=2, temperature=5.0)[:, 1:].unique().tolist()) == {1, 3}
    assert set(sample(top_k=1)[:, 1:].unique().tolist()) == {1}
    assert set(sample(top_k=99, temperature=5.0)[:, 1:].unique().tolist()) == {0, 1, 2, 3}


def test_a_bf16_decoder_generates_past_its_context_without_a_graph() -> None:
    config = dataclasses.replace(preset("tiny"), vocab_size=9, num_layers=1, max_seq_len=5)
    model = Decoder(config, dtype=torch.bfloat16)
    tokens = generate(model, torch.zeros(3, 2, dtype=torch.long), 6, max_seq_len=config.max_seq_len)
    assert tokens.shape == (3, 8)
    assert tokens.dtype == torch.long
    assert tokens.max() < 9


@pytest.mark.parametrize(
    ("prompt_len", "options", "refusal"),
    [
        (0, {}, ("prompt-empty",)),
        (1, {"temperature": -1.0}, ("temperature-negative", "temperature=-1.0")),
        (1, {"top_k": 0}, ("top-k-empty", "top_k=0")),
    ],
)
def test_what_cannot_be_sampled_is_refused(prompt_len: int, options: dict[str, Any], refusal: tuple[str, ...]) -> None:
    with refused(*refusal):
        generate(Recorder(), torch.zeros(1, prompt_len, dtype=torch.long), 1, max_seq_len=4, **options)
