"""More positions than a model had: learned ones tiled, rotary ones scaled by transformers."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.huggingface import build_model
from harness.refusals import refused
from shardwise.attention.positions import extend_position_embedding, extend_rope, update_tokenizer_model_max_length

pytest.importorskip("transformers")


def build(family: str) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 41, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    if family == "roberta":
        module = importlib.import_module("transformers.models.roberta")
        config = module.RobertaConfig(**sizes, intermediate_size=24, max_position_embeddings=34, pad_token_id=1)
        return module.RobertaForMaskedLM(config).eval()
    if family == "opt":
        module = importlib.import_module("transformers.models.opt")
        config = module.OPTConfig(**sizes, ffn_dim=24, max_position_embeddings=32, word_embed_proj_dim=16)
        return module.OPTForCausalLM(config).eval()
    return build_model(family).eval()


# Where the table is, rows in front that are no position, and the config's number beyond the positions.
TABLES = {
    "bert": ("bert.embeddings.position_embeddings", 0, 0),
    "roberta": ("roberta.embeddings.position_embeddings", 2, 2),
    "gpt2": ("transformer.wpe", 0, 0),
    "opt": ("model.decoder.embed_positions", 2, 0),
}


@functools.cache
def tokens(length: int) -> Tensor:
    return torch.randint(4, 41, (1, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", TABLES)
def test_learned_positions_repeat(family: str, tmp_path: Path) -> None:
    path, offset, beyond = TABLES[family]
    model = build(family)
    before = model.get_submodule(path).weight.detach().clone()
    short = model(input_ids=tokens(32)).logits
    assert extend_position_embedding(model, 77) is model
    after = model.get_submodule(path).weight
    assert isinstance(after, nn.Parameter)
    assert after.shape == (77 + offset, 16)
    assert torch.equal(after[: offset + 32], before)
    for start in (32, 64):
        stop = min(start + 32, 77)
        assert torch.equal(after[offset + start : offset + stop], before[offset : offset + stop - start])
    assert model.config.max_position_embeddings == 77 + beyond
    torch.testing.assert_close(model(input_ids=tokens(32)).logits, short)
    long = model(input_ids=tokens(77)).logits
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(input_ids=tokens(77)).logits, long)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_long_sequences_run_with_buffers_of_the_old_module(family: str) -> None:
    model = build(family)
    extend_position_embedding(model, 50)
    embeddings = model.base_model.embeddings
    assert embeddings.position_ids.shape == embeddings.token_type_ids.shape
    assert embeddings.position_ids[0].tolist() == list(range(len(embeddings.position_embeddings.weight)))
    assert "position_ids" in dict(embeddings.named_buffers())
    assert not any("position_ids" in name for name in model.state_dict())


@pytest.mark.parametrize(("method", "kept"), [("linear", 64), ("yarn", 64), ("ntk", 32), ("dynamic", 32)])
def test_rotary_positions_are_those_of_a_model_made_so(method: str, kept: int) -> None:
    model = build("llama").double()
    plain = model.model.rotary_emb.inv_freq.clone()
    assert extend_rope(model, 64, method) is model
    assert model.config.max_position_embeddings == kept
    made = type(model)(model.config).double().eval()
    made.load_state_dict(model.state_dict())
    for length in (64, 16):
        expected = made(input_ids=tokens(length)).logits
        torch.testing.assert_close(model(input_ids=tokens(length)).logits, expected)
        if length == 64:
            assert not torch.allclose(model.model.rotary_emb.inv_freq.double(), plain)


def test_parameters_of_a_method_are_passed_on() -> None:
    model = extend_rope(build("llama"), 64, "llama3", low_freq_factor=1.0, high_freq_factor=4.0)
    assert model.config.rope_parameters["high_freq_factor"] == 4.0
    assert model.config.rope_parameters["original_max_position_embeddings"] == 32


def test_what_cannot_be_extended_is_refused() -> None:
    with refused("no-learned-positions", "extend_rope"):
        extend_position_embedding(build("llama"), 64)
    with refused("no-rotary-positions", "extend_position_embedding"):
        extend_rope(build("bert"), 64)
    with refused("max-position", "max_position=32", "the 32"):
        extend_position_embedding(build("bert"), 32)
    with refused("max-position", "max_position=16", "the 32"):
        extend_rope(build("llama"), 16)
    with refused("rope-method", "method='longer'"):
        extend_rope(build("llama"), 64, "longer")
    with refused("rope-scaled-already"):
        extend_rope(extend_rope(build("llama"), 64), 128)


def test_a_tokenizer_follows() -> None:
    tokenizer = SimpleNamespace(model_max_length=32, init_kwargs={"model_max_length": 32})
    assert update_tokenizer_model_max_length(tokenizer, 64) is tokenizer
    assert tokenizer.model_max_length == tokenizer.init_kwargs["model_max_length"] == 64
