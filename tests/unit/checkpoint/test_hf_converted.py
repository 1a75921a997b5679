"""Folders whose names are not the model's, as transformers converts them: what is read, written, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.refusals import refused
from shardwise import Engine, initialize

transformers = pytest.importorskip("transformers")
loading = pytest.importorskip("transformers.core_model_loading")
from safetensors.torch import load_file, save_file  # noqa: E402

SIZES = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
# By class: the options of its config.
MODELS: dict[str, dict[str, Any]] = {
    "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 4},
    "MixtralForCausalLM": {"num_local_experts": 3},
    "Qwen3MoeForCausalLM": {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "head_dim": 4},
    "GraniteMoeForCausalLM": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "ViTForImageClassification": {"image_size": 8, "patch_size": 4},
    "LlamaForCausalLM": {},
}


def make_model(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**SIZES, **MODELS[name]))


def make_engine(model: nn.Module) -> Engine:
    config = {"run": {"device": "cpu"}, "precision": {"param": "fp32"}}
    return initialize(model, config, loss_fn=lambda output, batch: (output.logits.sum(), 1))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_has_the_names_of_transformers(name: str, tmp_path: Path) -> None:
    source = make_model(name, 0)
    source.save_pretrained(tmp_path / "theirs")
    (tmp_path / "own").mkdir()
    save_file(
        {key: value.clone() for key, value in source.state_dict().items()}, tmp_path / "own" / "model.safetensors"
    )
    model = make_model(name, 1)
    engine = make_engine(model)
    for folder in ("theirs", "own"):  # a folder may have the model's names too
        engine.import_weights(tmp_path / folder)
        torch.testing.assert_close(dict(model.state_dict()), dict(source.state_dict()), rtol=0, atol=0)
        head = model.get_parameter("lm_head.weight" if "Causal" in name else "classifier.weight")
        engine.write(next(key for key, each in model.named_parameters() if each is head), torch.zeros_like(head))
    engine.import_weights(tmp_path / "theirs")
    engine.export_weights(tmp_path / "ours")
    engine.close()
    torch.testing.assert_close(stored(tmp_path / "ours"), stored(tmp_path / "theirs"), rtol=0, atol=0)
    again = type(source).from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(dict(again.state_dict()), dict(source.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_tensor_of_a_folder_may_have_rows_of_several(tmp_path: Path, is_adapted: bool) -> None:
    """As where a folder has queries, keys and values in one, and some of these have adapters."""
    names = ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
    conversions = [loading.WeightConverter("qkv_proj.weight", names, [loading.Chunk(dim=0)])]
    source, model = make_model("LlamaForCausalLM", 0), make_model("LlamaForCausalLM", 1)
    source._weight_conversions = model._weight_conversions = conversions
    source.save_pretrained(tmp_path / "theirs")
    theirs = stored(tmp_path / "theirs")
    assert "model.layers.1.self_attn.qkv_proj.weight" in theirs
    engine = make_engine(model)
    engine.import_weights(tmp_path / "theirs")
    torch.testing.assert_close(dict(model.state_dict()), dict(source.state_dict()), rtol=0, atol=0)
    engine.close()
    if is_adapted:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
        peft.set_peft_model_state_dict(
            adapted := peft.get_peft_model(source, peft.LoraConfig(target_modules=["q_proj"], r=2)),
            peft.get_peft_model_state_dict(model),
        )
        adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
        theirs = stored(tmp_path / "merged")
    with make_engine(model) as engine:
        pairs = dict(engine.weights(bucket_bytes=100))
        assert [info.name for info in engine.weights().metadata()] == [*pairs]
        torch.testing.assert_close(pairs, theirs, rtol=0, atol=0)
        engine.export_weights(tmp_path / "ours")
    torch.testing.assert_close(stored(tmp_path / "ours"), theirs, rtol=0, atol=0)


def test_a_tied_weight_has_the_name_that_transformers_keeps(tmp_path: Path) -> None:
    class Reversed(transformers.LlamaForCausalLM):
        _tied_weights_keys = {"model.embed_tokens.weight": "lm_head.weight"}  # noqa: RUF012

    model = Reversed(Reversed.config_class(**SIZES, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "theirs")
    with make_engine(model) as engine:
        engine.export_weights(tmp_path / "ours")
        engine.import_weights(tmp_path / "theirs")
    theirs = stored(tmp_path / "theirs")
    assert "model.embed_tokens.weight" not in theirs
    torch.testing.assert_close(stored(tmp_path / "ours"), theirs, rtol=0, atol=0)


def test_what_is_more_than_parts_is_refused(tmp_path: Path) -> None:
    model = make_model("LlamaForCausalLM", 0)
    model.save_pretrained(tmp_path / "theirs")
    model._weight_conversions = [loading.WeightConverter("q_proj.weight", "q_proj.weight", [loading.Interleave(dim=0)])]
    model.save_pretrained(tmp_path / "again")
    engine = make_engine(model)
    for call in (lambda: engine.import_weights(tmp_path / "theirs"), lambda: engine.export_weights(tmp_path / "ours")):
        with refused("weights-converted", "q_proj.weight", "LlamaForCausalLM"):
            call()
    weights = dict(engine.weights(names=None, to_rank=0))  # as the error says
    model.save_pretrained(tmp_path / "ours", state_dict=weights)
    engine.close()
    torch.testing.assert_close(stored(tmp_path / "ours"), stored(tmp_path / "again"), rtol=0, atol=0)


class Rotation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(4.0))
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.frequencies


class Sharing(nn.Module):
    """Has one module at three places, which no load ties again."""

    def __init__(self) -> None:
        super().__init__()
        self.rotation = Rotation()
        self.blocks = nn.ModuleList(nn.ModuleDict({"rotation": self.rotation, "out": nn.Linear(4, 4)}) for _ in "ab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block["out"](block["rotation"](x))
        return x


def test_a_folder_has_every_name_that_a_strict_load_asks_for(tmp_path: Path) -> None:
    model = Sharing()
    config = {"run": {"device": "cpu"}, "precision": {"param": "fp32"}}
    engine = initialize(model, config, loss_fn=lambda output, batch: (output.sum(), 1))
    engine.export_weights(tmp_path / "ours")
    again = Sharing()
    again.load_state_dict(stored(tmp_path / "ours"), strict=True)
    engine.import_weights(tmp_path / "ours")
    engine.close()
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
