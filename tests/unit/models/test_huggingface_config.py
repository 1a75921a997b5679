"""Shapes of Hugging Face's `config.json`: every field that is not the default, what is noted, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.refusals import refused
from shardwise.models import huggingface_config
from shardwise.models.huggingface_config import read_huggingface, source_of
from shardwise.models.presets import preset
from shardwise.models.shape import ExpertsShape, ModelShape, ModelSource


def model_of(model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more):
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocab}
    sizes |= {"num_key_value_heads": kv_heads, "intermediate_size": ffn}
    return {"model_type": model_type, **sizes, **more}


LLAMA_3_8B = model_of("llama", 32, 4096, 32, 8, 14336, 128256, max_position_embeddings=8192, tie_word_embeddings=False)
MIXTRAL = model_of("mixtral", 32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2)
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "mlp_only_layers": []}
LATENT = {"kv_lora_rank": 512, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1}
LATENT |= {"num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_intermediate_size": 2048}
DEEPSEEK_V3 = model_of("deepseek_v3", 61, 7168, 128, 128, 18432, 129280, **LATENT)
GPT2_XL = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024, "vocab_size": 50257}
OPT = model_of("opt", 32, 4096, 32, 32, 16384, 50272, max_position_embeddings=2048, ffn_dim=16384)
QWEN2 = model_of("qwen2", 28, 3584, 28, 4, 18944, 152064, use_sliding_window=False, sliding_window=131072)
LLAMA4 = {"intermediate_size_mlp": 16384, "num_experts_per_tok": 1, "head_dim": 128}
UNKNOWN = {**LLAMA_3_8B, "model_type": "novel"}  # which nothing completes
SIZES = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1000}


def test_a_llama_is_the_preset(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    imported = read_huggingface(path)
    assert imported.shape == ModelShape.of_decoder(preset("llama-3-8b"), "llama")
    assert (imported.longest, imported.notes) == (8192, ())


@pytest.mark.parametrize(
    ("values", "billions", "share"),
    [
        (GPT2_XL, 1.5576, 0.0005),
        (MIXTRAL, 46.70, 0.0005),
        (model_of("qwen3_moe", 48, 2048, 32, 4, 6144, 151936, head_dim=128, **EXPERTS), 30.53, 0.001),
        (DEEPSEEK_V3, 671.0, 0.01),  # latent attention is approximate
        (OPT, 6.658, 0.0005),
        (model_of("gpt_neox", 44, 6144, 64, 64, 24576, 50432), 20.55, 0.001),
        (model_of("gemma", 28, 3072, 16, 16, 24576, 256000, head_dim=256), 8.538, 0.0005),
        (QWEN2, 7.616, 0.001),
        (model_of("llama4_text", 48, 5120, 40, 8, 8192, 202048, num_local_experts=16, **LLAMA4), 107.8, 0.001),
        (
            model_of(
                "llama4_text",
                48,
                5120,
                40,
                8,
                8192,
                202048,
                num_local_experts=128,
                interleave_moe_layer_step=2,
                **LLAMA4,
            ),
            400.7,
            0.001,
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_shapes_have_the_published_number_of_parameters(values, billions, share):
    assert source_of(values, "config.json").shape.num_params / 1e9 == pytest.approx(billions, rel=share)


def test_a_model_of_latent_attention_and_experts() -> None:
    values = SIZES | {
        "model_type": "deepseek_v3", "kv_lora_rank": 64, "v_head_dim": 96, "num_key_value_heads": 8,
        "intermediate_size": 2048, "moe_intermediate_size": 256, "n_routed_experts": 16, "n_shared_experts": 2,
        "num_experts_per_tok": 4, "first_k_dense_replace": 3, "max_position_embeddings": 4096,
    }  # fmt: skip
    experts = ExpertsShape(num_experts=16, num_chosen=4, ffn_size=256, num_shared=2, num_dense_layers=3)
    shape = ModelShape(
        num_layers=4, hidden_size=512, num_heads=8, num_kv_heads=1, head_dim=96, ffn_size=2048, vocab_size=1000,
        experts=experts, name="deepseek_v3",
    )  # fmt: skip
    notes = ("latent attention is priced as attention with one head of keys and values",)
    assert source_of(values, "c") == ModelSource(shape=shape, longest=4096, notes=notes)


def test_a_model_of_learned_positions_in_parts() -> None:
    text = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100, "n_positions": 32}
    shape = ModelShape(
        num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn_size=256, vocab_size=100,
        ffn="plain", is_tied=True, has_biases=True, num_positions=32, name="a-model",
    )  # fmt: skip
    whole = {"model_type": "seeing", "text_config": text, "_name_or_path": "someone/a-model"}
    notes = ("of a model with several parts, that of text alone is planned",)
    assert source_of(whole, "c") == ModelSource(shape=shape, longest=32, notes=notes)
    assert source_of(text | {"text_config": {}}, "c").notes == ()


@pytest.mark.parametrize("part", ["vision_config", "audio_config"])
def test_parts_of_a_model_that_are_left_out_are_said(part: str) -> None:
    (note,) = source_of({**QWEN2, part: {"hidden_size": 64}}, "config.json").notes
    assert "text alone" in note


def test_a_model_that_is_unknown() -> None:
    values = {
        "d_model": 96, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "ffn_dim": 128, "vocab_size": 10,
        "hidden_act": "GELU", "seq_length": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    shape = ModelShape(
        num_layers=2, hidden_size=96, num_heads=6, num_kv_heads=2, head_dim=16, ffn_size=128, vocab_size=10,
        ffn="plain", is_tied=True,
    )  # fmt: skip
    notes = ("model_type none is read by its fields' names: check the number of parameters",)
    assert source_of(values, "c") == ModelSource(shape=shape, longest=64, notes=notes)


@pytest.mark.parametrize("is_installed", [True, False])
@pytest.mark.parametrize(
    ("kinds", "is_gated", "has_biases", "is_tied", "num_positions"),
    [
        ("llama mistral qwen2 qwen3 phi3 olmo olmo2 stablelm granite smollm3", True, False, False, 0),
        ("gemma gemma2 gemma3_text cohere cohere2", True, False, True, 0),
        ("gpt2 gpt_neo", False, True, True, 16),
        ("opt", False, True, True, 18),
        ("gptj phi gpt_neox", False, True, False, 0),
        ("bloom starcoder2", False, True, True, 0),
        ("falcon", False, False, True, 0),
    ],
)
def test_what_no_file_says(
    kinds: str, is_gated: bool, has_biases: bool, is_tied: bool, num_positions: int, is_installed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if is_installed:
        pytest.importorskip("transformers")
    else:
        monkeypatch.setattr(huggingface_config, "find_spec", lambda name: None)
    for kind in kinds.split():
        values = SIZES | {
            "model_type": kind, "max_position_embeddings": 16, "intermediate_size": 2048, "num_key_value_heads": 8,
            "head_dim": 64, "multi_query": False, "ffn_dim": 2048, "tie_word_embeddings": is_tied, "max_seq_len": 16,
            "sliding_window": None,
        }  # fmt: skip
        assert source_of(values, "c").shape == ModelShape(
            num_layers=4, hidden_size=512, num_heads=8, num_kv_heads=8, head_dim=64, ffn_size=2048, vocab_size=1000,
            ffn="gated" if is_gated else "plain", is_tied=is_tied, has_biases=has_biases, num_positions=num_positions,
            name=kind,
        )  # fmt: skip


def test_transformers_completes_what_a_file_leaves_out() -> None:
    pytest.importorskip("transformers")
    values = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10240}
    shape = source_of(values, "c").shape
    assert shape is not None
    # What Gemma 3's files leave out: 8 heads of 256, 4 of keys, and a tied head of 262,208 tokens.
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.is_tied) == (8, 4, 256, True)
    assert shape.vocab_size == 262_208


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"sliding_window": 64},
        {"sliding_window": 64, "use_sliding_window": False},
        {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0},
        {"head_dim": 64, "mlp_only_layers": [0], "layer_types": ["full_attention"] * 4},
        {"num_local_experts": 16, "num_experts_per_tok": 2, "n_layers": 5},
        {"vision_config": {"hidden_size": 64}},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_a_file_that_states_all_is_read_as_transformers_completes_it(kind: str, more: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    values = model_of(kind, 4, 512, 8, 2, 2048, 1000, max_position_embeddings=128, head_dim=32)
    values |= (EXPERTS if kind == "qwen3_moe" else {}) | {"hidden_act": "silu", "tie_word_embeddings": True} | more
    # One name is left out, whose default is the same: so the file is completed.
    assert source_of(values, "c") == source_of(without(values, "hidden_act"), "c")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"hidden_act": "SwiGLU"}, {"ffn": "gated"}),
        ({"hidden_activation": "gelu"}, {"ffn": "plain"}),
        ({}, {"ffn": "gated", "is_tied": False, "has_biases": False}),
        ({"model_type": "falcon", "multi_query": True}, {"num_kv_heads": 1, "has_biases": False, "ffn": "plain"}),
        ({"model_type": "falcon", "multi_query": False}, {"num_kv_heads": 8}),
        ({"model_type": "mpt", "attn_config": "flash"}, {"num_kv_heads": 8}),
        ({"model_type": "mpt", "attn_config": {"num_kv_heads": 2}, "num_kv_heads": 4}, {"num_kv_heads": 4}),
        ({"head_dim": 64, "num_attention_heads": 7}, {"head_dim": 64, "num_heads": 7}),
        ({"text_config": "none"}, {"hidden_size": 512}),
        (
            {"num_experts": 4, "moe_topk": 1, "moe_intermediate_size": 100, "shared_expert_intermediate_size": 180},
            {"experts": ExpertsShape(num_experts=4, num_chosen=1, ffn_size=100, num_shared=2)},
        ),
        (
            {
                "model_type": "qwen2_moe",
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "mlp_only_layers": [0, 1],
                "moe_intermediate_size": 128,
                "shared_expert_intermediate_size": 384,
                "num_key_value_heads": 8,
            },
            {"experts": ExpertsShape(num_experts=8, num_chosen=2, ffn_size=128, num_shared=3, num_dense_layers=2)},
        ),
        (
            {"num_experts": 4, "moe_topk": 1, "n_shared_experts": 1, "shared_expert_intermediate_size": 640},
            {"experts": ExpertsShape(num_experts=4, num_chosen=1, ffn_size=64, num_shared=1)},
        ),
        ({"sliding_window": 32, "sliding_window_pattern": 6}, {"window": None}),
        ({"sliding_window": 0}, {"window": None}),
        ({"sliding_window": "32"}, {"window": None}),
        ({"num_experts": 1}, {"experts": None}),
        ({"num_local_experts": 4, "moe_top_k": 2}, {"experts": ExpertsShape(num_experts=4, num_chosen=2, ffn_size=64)}),
        (
            {"num_experts": 4, "moe_topk": 1, "moe_intermediate_size": 100, "shared_expert_intermediate_size": 40},
            {"experts": ExpertsShape(num_experts=4, num_chosen=1, ffn_size=100, num_shared=1)},
        ),
        ({"model_type": "gpt_bigcode", "multi_query": True, "intermediate_size": None}, {"ffn_size": 2048}),
        (
            {"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 4},
            {"num_kv_heads": 4, "is_tied": True},
        ),
        ({"model_type": "mpt", "attn_config": {"kv_n_heads": 8, "num_kv_heads": 2}}, {"num_kv_heads": 2}),
        ({"model_type": "novel", "expansion_ratio": 3, "intermediate_size": None}, {"ffn_size": 1536}),
        ({"model_type": "mistral", "sliding_window": 32}, {"window": 32}),
        ({"model_type": "mistral", "sliding_window": 32, "layer_types": ["full"]}, {"window": None}),
        ({"model_type": "mixtral", "sliding_window": 32, "use_sliding_window": False}, {"window": None}),
        ({"model_type": "gemma2", "sliding_window": 32}, {"window": None}),
        ({"model_type": "llama", "_name_or_path": "org/some-7b/"}, {"name": "some-7b"}),
        ({"text_config": {**SIZES, "intermediate_size": 64}, "tie_word_embeddings": True}, {"is_tied": True}),
        ({"_name_or_path": ""}, {"name": "model"}),
    ],
)
def test_fields_of_models(values: dict[str, Any], expected: dict[str, Any]) -> None:
    shape = source_of(SIZES | {"intermediate_size": 64} | values, "c").shape
    assert {name: getattr(shape, name) for name in expected} == expected


def without(values: dict, key: str) -> dict:
    return {name: value for name, value in values.items() if name != key}


@pytest.mark.parametrize(
    ("values", "code", "named"),
    [
        (without(UNKNOWN, "hidden_size"), "import-key-missing", "hidden_size (or n_embd"),
        ({**without(UNKNOWN, "vocab_size"), "vocab_sise": 5}, "import-key-missing", "vocab_sise?"),
        ({**LLAMA_3_8B, "num_hidden_layers": "32"}, "import-integer", "num_hidden_layers='32'"),
        ({**LLAMA_3_8B, "num_attention_heads": 33, "num_key_value_heads": 11}, "heads-divide-hidden", "33 heads"),
    ],
)
def test_what_a_model_misses_is_named(values, code, named):
    with refused(code, "config.json", named) as error:
        source_of(values, "config.json")
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("value", [-1, 0.5, "x", True, [1], {"of": 1}])
@pytest.mark.parametrize(
    "key",
    [
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "intermediate_size", "max_position_embeddings", "num_local_experts", "num_experts_per_tok",
        "moe_intermediate_size", "n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace",
    ],
)  # fmt: skip
def test_a_size_of_a_model_that_is_none_is_refused(key: str, value: object) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    many = ("n_shared", "shared", "first", "max_position", "num_local")
    of_layers = ("num_experts_per", "moe_")  # other readers take 0, and a list
    least = 0 if key.startswith(many) or (key.startswith(of_layers) and not isinstance(value, list)) else 1
    with refused("import-integer", f"c.json: {key}={value!r}", f">= {least}"):
        source_of(SIZES | {"intermediate_size": 2048} | experts | {key: value}, "c.json")


def test_one_number_for_each_layer_is_read_where_all_are_equal() -> None:
    experts = {"intermediate_size": 2048, "num_local_experts": 4, "num_experts_per_tok": 2}
    one, each = (source_of(SIZES | experts | {"moe_intermediate_size": size}, "c") for size in (512, [512, 512]))
    assert one.shape == each.shape
    with refused("import-integer", "c: moe_intermediate_size=[512, 256]"):
        source_of(SIZES | experts | {"moe_intermediate_size": [512, 256]}, "c")


def test_layers_without_experts_are_a_list_and_a_ratio_a_number() -> None:
    experts = {"intermediate_size": 2048, "num_local_experts": 4, "num_experts_per_tok": 2}
    with refused("mlp-only-layers", "c: mlp_only_layers=3"):
        source_of(SIZES | experts | {"mlp_only_layers": 3}, "c")
    with refused("import-integer", "c: expansion_ratio='four'"):
        source_of(SIZES | {"expansion_ratio": "four"}, "c")
