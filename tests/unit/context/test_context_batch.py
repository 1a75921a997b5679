"""How batches of whole sequences are cut: what is, what stays, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from harness.refusals import refused
from harness.scanned import scanned
from shardwise.context.batch import TokenShardedBatch, cut_batch, main_input, take_tokens
from shardwise.hf.losses import count_targets
from shardwise.layout.token_ranges import zigzag

LENGTH, SAMPLES = 8, 2
TOKENS = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH)
OWN = ((0, 2), (6, 8))
CUT = TOKENS[:, [0, 1, 6, 7]]


class Model(nn.Module):
    """Takes two inputs and positions."""

    def forward(self, tokens: Tensor, kinds: Tensor | None = None, positions: Tensor | None = None) -> Tensor:  # [B, S]
        return tokens


def test_what_has_the_sequence_as_dim_1_is_cut_however_deep_it_is() -> None:
    features = torch.randn(SAMPLES, LENGTH, 3)  # [B, S, 3]
    batch = {"a": [TOKENS, {"b": (features, None)}], "shared": TOKENS[:1]}
    own = cut_batch(batch, TOKENS, OWN)
    assert own["a"][0].equal(CUT)
    assert own["a"][1]["b"][0].equal(features[:, [0, 1, 6, 7]])
    assert own["shared"].equal(CUT[:1])
    assert own["a"][0].is_contiguous()


def test_all_else_stays_as_it_is() -> None:
    others = {
        "one a sample": torch.ones(SAMPLES),
        "as long, but of one dim": torch.ones(LENGTH),
        "other features": torch.ones(SAMPLES, 3, LENGTH),
        "kept by its shape": torch.ones(SAMPLES, 1, LENGTH),
        "scale": 2.0,
        "name": "text",
        "none": None,
    }
    assert all(each is others[name] for name, each in cut_batch(others, TOKENS, OWN).items())


def test_a_tensor_of_the_same_size_by_chance_is_cut() -> None:
    """What the module says of it."""
    assert cut_batch(torch.ones(5, LENGTH), TOKENS, OWN).shape == (5, 4)


@pytest.mark.parametrize("shape", [(LENGTH, LENGTH), (SAMPLES, 1, LENGTH, LENGTH)])
def test_masks_of_pairs_are_refused_and_squares_of_samples_or_features_are_cut(shape: tuple[int, ...]) -> None:
    with refused("cp-pair-mask", "8 tokens"):
        cut_batch(torch.ones(shape), TOKENS, OWN)
    with refused("cp-pair-mask"):
        cut_batch(torch.ones(SAMPLES, LENGTH, LENGTH, dtype=torch.bool), TOKENS, OWN)
    assert cut_batch(torch.ones(SAMPLES, LENGTH, LENGTH), TOKENS, OWN).shape == (SAMPLES, 4, LENGTH)
    square = torch.arange(LENGTH**2).view(LENGTH, LENGTH)  # as many samples as tokens
    assert cut_batch(square, square, OWN).equal(take_tokens(square, OWN))


def test_the_sequence_is_that_of_the_tokens() -> None:
    mask, embedded = torch.ones(SAMPLES, 5), torch.randn(SAMPLES, LENGTH, 3)  # [B, 5], [B, S, 3]
    assert main_input({"mask": mask, "input_ids": TOKENS}) is TOKENS
    assert main_input({"mask": mask, "input_ids": None, "inputs_embeds": embedded}) is embedded
    assert main_input([torch.ones(3), {"x": TOKENS}]) is TOKENS


@pytest.mark.parametrize(
    "inputs", [TOKENS[0], TOKENS[:, :0], {"input_ids": TOKENS[0]}, {"input_ids": TOKENS[:, :0]}, {"scale": 1.0}]
)
def test_a_batch_without_tokens_is_refused(inputs: Any) -> None:
    with refused("cp-no-input"):
        main_input(inputs)


@pytest.mark.parametrize("has_more", [False, True])
def test_a_rank_gets_its_tokens_their_positions_and_its_targets(has_more: bool) -> None:
    sequences = TokenShardedBatch(Model(), 0, lambda length: zigzag(length, 2))
    inputs = [TOKENS, TOKENS + 1]
    share = sequences.share((inputs, TOKENS) if has_more else inputs, has_more)
    assert share.tokens == OWN
    assert list(share.inputs) == ["tokens", "kinds", "positions"]
    assert share.inputs["tokens"].equal(CUT)
    assert share.inputs["kinds"].equal(CUT + 1)
    assert share.inputs["positions"].tolist() == [0, 1, 6, 7]
    assert share.batch[1].equal(CUT if has_more else CUT + 1)


def test_more_inputs_than_the_model_takes_are_refused() -> None:
    sequences = TokenShardedBatch(Model(), 0, lambda length: zigzag(length, 2))
    with refused("too-many-inputs", "4 inputs", "3 (tokens, kinds, positions)"):
        sequences.share([TOKENS] * 4, False)


SMALL = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
T5 = {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
BART = {"vocab_size": 16, "d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**SMALL), 2),
        ("BertForMaskedLM", lambda: transformers.BertConfig(**SMALL), 4),
        ("BertForMultipleChoice", lambda: transformers.BertConfig(**SMALL), 4),
        ("T5ForConditionalGeneration", lambda: transformers.T5Config(**T5), 4),
        ("BartForCausalLM", lambda: transformers.BartConfig(**BART), 4),
        ("BertForPreTraining", lambda: transformers.BertConfig(**SMALL), None),
        ("BertModel", lambda: transformers.BertConfig(**SMALL), None),
    ],
)
def test_targets_of_models_of_transformers_are_counted(
    kind: str, config: Callable[[], Any], expected: int | None
) -> None:
    """As the model's own mean counts them: a causal model leaves out the first label of each row."""
    model = getattr(transformers, kind)(config())
    found = count_targets({"labels": torch.tensor([[1, 2, -100], [3, -100, 4]])}, scanned(model).shifts_labels)
    assert (None if found is None else int(found)) == expected


def test_targets_of_a_forward_that_transformers_did_not_write_are_not_counted() -> None:
    class FocalForCausalLM(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            return (super().forward(input_ids).logits.mean() - labels).square().mean()

    model = FocalForCausalLM(transformers.LlamaConfig(**SMALL))
    assert count_targets({"labels": torch.tensor([[1, 2, 3]])}, scanned(model).shifts_labels) is None
