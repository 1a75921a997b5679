"""Models are scaled down to sizes that divide by the folded mesh as their own do by the run's."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.config.resolve import AttentionConfig, Config
from shardwise.layout.mesh_shape import MeshShape
from shardwise.models import PRESETS, Decoder, DecoderConfig, num_params, preset
from shardwise.models.shrink import (
    Scale,
    read_huggingface,
    shrink_decoder,
    shrink_huggingface,
    shrink_layers,
    shrink_seq_len,
)
from shardwise.tensor.plan_layout import plan_layout
from shardwise.verify.job import fold_mesh

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008],
    "pad_token_id": None,
    "attention_dropout": 0.1,
    "rms_norm_eps": 1e-05,
    "layer_types": ["full_attention"] * 80,
    "sliding_window": 4096,
}


def scale_of(mesh, num_kv_heads, virtual_stages=1, every=1):
    folded = fold_mesh(mesh, num_kv_heads)
    return Scale(mesh, folded, mesh.pp * virtual_stages, folded.pp * min(2, virtual_stages), every)


@st.composite
def decoders(draw):
    """A decoder that `tp` ranks can hold, and the mesh."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    num_kv_heads = draw(st.sampled_from([each for each in range(1, 17) if tp % each == 0 or each % tp == 0]))
    per_kv_head = draw(st.sampled_from([each for each in range(1, 17) if num_kv_heads * each % tp == 0]))
    shape = DecoderConfig(
        vocab_size=draw(st.integers(100, 200_000)),
        num_layers=draw(st.integers(1, 130)),
        hidden_size=draw(st.integers(64, 16_384)),
        num_heads=num_kv_heads * per_kv_head,
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([32, 64, 80, 128])),
        ffn_size=tp * draw(st.integers(8, 4096)),
        max_seq_len=draw(st.integers(8, 8192)),
        tie_embeddings=draw(st.booleans()),
    )
    return shape, MeshShape(pp=draw(st.integers(1, 16)), dp_shard=draw(st.integers(1, 4)), tp=tp)


def test_sparse_attention_has_several_small_blocks():
    """A block of the run's would hold all of the small sequence, and the structure would leave no pair out."""
    attention = AttentionConfig(kind="bigbird", num_random_blocks=2, different_layout_per_head=True)
    shape = replace(preset("llama-3-8b"), attention=attention)
    mesh = MeshShape(pp=2, dp_shard=2, tp=4)
    small = shrink_decoder(shape, scale_of(mesh, shape.num_kv_heads))
    assert small.attention == attention.model_copy(update={"block": 2})
    assert small.max_seq_len >= 12
    assert shrink_decoder(preset("llama-3-8b"), scale_of(mesh, 8)).attention == AttentionConfig()


@given(decoders(), st.integers(1, 3), st.integers(1, 4))
def test_a_small_decoder_divides_as_the_whole_one_does(drawn, virtual_stages, every):
    shape, mesh = drawn
    scale = scale_of(mesh, shape.num_kv_heads, virtual_stages, every)
    small, tp = shrink_decoder(shape, scale), scale.folded.tp
    assert small.num_heads % tp == small.ffn_size % tp == 0
    assert (tp > small.num_kv_heads) == (mesh.tp > shape.num_kv_heads)
    assert small.num_kv_heads % tp == 0 or tp % small.num_kv_heads == 0
    if tp > 1:
        assert (small.vocab_size % tp == 0) == (shape.vocab_size % mesh.tp == 0)
        assert (small.max_seq_len % tp == 0) == (shape.max_seq_len % mesh.tp == 0)
    assert (small.num_heads == small.num_kv_heads) == (shape.num_heads == shape.num_kv_heads)
    assert small.tie_embeddings == shape.tie_embeddings
    assert small.num_layers <= shape.num_layers
    if shape.num_layers >= scale.num_stages:
        assert small.num_layers >= scale.num_folded_stages
        assert (small.num_layers > every) == (shape.num_layers > every)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_small_preset_has_a_layout(name, tied):
    shape = replace(preset(name), tie_embeddings=tied)
    mesh = MeshShape(pp=4, dp_shard=8, tp=4)
    if shape.num_heads % 4:
        pytest.skip("its own heads do not divide")
    scale = scale_of(mesh, shape.num_kv_heads)
    small = shrink_decoder(shape, scale)
    assert num_params(small) < 2**21
    sizes = {"pp": scale.folded.pp, "dp_shard": scale.folded.dp_shard, "tp": scale.folded.tp}
    config = Config.from_dict({"mesh": sizes, "batch": {"accumulation": 9}}).resolve(scale.folded.world_size)
    assert plan_layout(Decoder(small, device="meta"), config).pipeline.num_stages == scale.folded.pp


def test_ratios_stay():
    small = shrink_decoder(preset("llama-405b"), scale_of(MeshShape(pp=16, tp=8), 8))
    assert small.num_heads // small.num_kv_heads == 16
    assert small.ffn_size / small.hidden_size == pytest.approx(53_248 / 16_384, rel=0.02)
    assert small.num_layers == 9  # 126 do not divide by 16 stages
    assert (small.rope_theta, small.norm_eps) == (500_000.0, 1e-5)


def test_layers_where_embedding_and_head_are_stages():
    scale = Scale(MeshShape(pp=8), MeshShape(pp=4), 8, 4)
    assert [shrink_layers(number, scale) for number in (6, 8, 12, 16, 17, 80)] == [2, 4, 5, 8, 9, 8]


def test_a_hugging_face_config_keeps_ratios_and_everything_else():
    small = shrink_huggingface(LLAMA, scale_of(MeshShape(pp=8, dp_shard=8, tp=8), 8), seq_len=8192)
    sizes = {key: value for key, value in small.items() if LLAMA[key] != value}
    assert sizes == {
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "intermediate_size": 224,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 60,
        "max_position_embeddings": 48,
        "bos_token_id": 1,
        "eos_token_id": [2, 2],
        "layer_types": ["full_attention"] * 8,
        "sliding_window": 6,
    }
    assert shrink_huggingface(LLAMA, scale_of(MeshShape(tp=8), 8), seq_len=2048)["sliding_window"] == 4096


def test_other_names_of_sizes():
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_inner": None}
    small = shrink_huggingface(gpt2, scale_of(MeshShape(tp=4), 12), seq_len=1024)
    assert small == {**gpt2, "n_layer": 2, "n_embd": 16, "n_head": 4, "vocab_size": 61}
    moe = {**LLAMA, "num_local_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 4096, "head_dim": 64}
    small = shrink_huggingface(moe, scale_of(MeshShape(dp_shard=8), 8), seq_len=1024)
    assert (small["num_local_experts"], small["num_experts_per_tok"], small["head_dim"]) == (4, 2, 4)
    assert small["hidden_size"] == 2 * 4 * small["num_attention_heads"]
    assert small["moe_intermediate_size"] == round(4096 / 28672 * small["intermediate_size"])


def test_heads_of_a_size_of_their_own():
    gemma = {**LLAMA, "hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    small = shrink_huggingface(gemma, scale_of(MeshShape(dp_shard=8), 4), seq_len=1024)
    # Wider than the heads together, as before, and a multiple of their number.
    assert (small["num_attention_heads"], small["head_dim"], small["hidden_size"]) == (4, 4, 20)
    narrow = shrink_huggingface({**gemma, "hidden_size": 1024}, scale_of(MeshShape(dp_shard=8), 4), seq_len=1024)
    assert narrow["hidden_size"] == 8


def test_an_encoder_decoder_has_a_first_token():
    t5 = {"model_type": "t5", "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": 4}
    t5 |= {"num_heads": 8, "vocab_size": 32128, "is_encoder_decoder": True}
    small = shrink_huggingface(t5, scale_of(MeshShape(tp=2), 8), seq_len=512)
    assert (small["num_layers"], small["num_decoder_layers"], small["d_kv"]) == (2, 2, 4)
    assert (small["d_model"], small["d_ff"], small["decoder_start_token_id"]) == (16, 64, 0)


def test_unknown_names_are_refused():
    with refused("model-size-unknown", "clip", "num_hidden_layers"):
        read_huggingface({"model_type": "clip", "text_config": {}})


@pytest.mark.parametrize(("seq_len", "expected"), [(4096, 16), (4100, 12)])
def test_a_split_sequence_divides_for_every_token_layout(seq_len, expected):
    scale = scale_of(MeshShape(cp=4, tp=2), 8)
    assert scale.folded == MeshShape(cp=2, tp=2)
    assert shrink_seq_len(seq_len, scale) == expected
