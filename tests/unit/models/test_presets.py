"""Presets against the published sizes, and what a config's model section makes of them."""

from __future__ import annotations

import pytest

from harness.refusals import refused
from shardwise.config.resolve import ModelConfig
from shardwise.models.presets import PRESETS, decoder_config, preset
from shardwise.models.shape import num_params

PUBLISHED = {
    "1b": 1_100_048_384,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
}
NAMED = {"tiny": 6e6, "25m": 25e6, "100m": 100e6, "350m": 350e6, "tiny-moe": 16e6, "gpt-3-175b": 175e9}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_are_exact(name: str) -> None:
    assert num_params(preset(name)) == PUBLISHED[name]


def test_every_other_preset_has_about_the_size_its_name_says() -> None:
    assert PUBLISHED.keys() | NAMED.keys() == PRESETS.keys()
    for name, size in NAMED.items():
        assert num_params(preset(name)) == pytest.approx(size, rel=0.03), name


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("llama-450b", "did you mean llama-405b?"),
        ("LLAMA-405B", "did you mean llama-405b?"),
        ("llama-3-7b", "did you mean llama-3-70b?"),
        ("zzz", f"presets are {', '.join(PRESETS)}"),
    ],
)
def test_unknown_preset_suggests(name: str, fix: str) -> None:
    with refused("unknown-preset", name, fix):
        preset(name)


def test_presets_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        PRESETS["mine"] = preset("tiny")  # type: ignore[index]


def test_the_section_overrides_the_preset() -> None:
    sizes = {"num_layers": 3, "hidden_size": 96, "num_heads": 6, "num_kv_heads": 2, "ffn_size": 50}
    shape = decoder_config(ModelConfig(preset="llama-7b", **sizes), max_seq_len=64)
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads) == (3, 96, 6, 2)
    assert (shape.head_dim, shape.ffn_size, shape.max_seq_len, shape.vocab_size) == (16, 50, 64, 32_000)
    assert not shape.tie_embeddings
    assert decoder_config(ModelConfig(tie_embeddings=False)).tie_embeddings is False
    assert decoder_config(ModelConfig()) == preset("tiny")


def test_the_vocabulary_is_the_sections_then_the_tokenizers_then_the_presets() -> None:
    assert decoder_config(ModelConfig(vocab_size=640), 8, 600).vocab_size == 640
    assert decoder_config(ModelConfig(), 8, 600).vocab_size == 600
    assert decoder_config(ModelConfig(), 8).vocab_size == 4096


@pytest.mark.parametrize(
    ("model", "refusal"),
    [
        (
            ModelConfig(vocab_size=500),
            ("vocabulary-too-small", "model.vocab_size=500", "600"),
        ),
        (
            ModelConfig(hidden_size=100, num_heads=8),
            ("heads-divide-hidden", "model.num_heads=8", "hidden_size: 96, 104"),
        ),
        (
            ModelConfig(hidden_size=5, num_heads=8),
            ("heads-divide-hidden", "model.num_heads=8", "hidden_size: 8"),
        ),
    ],
)
def test_sections_that_do_not_fit_are_refused(model: ModelConfig, refusal: tuple[str, ...]) -> None:
    with refused(*refusal):
        decoder_config(model, 8, 600)
