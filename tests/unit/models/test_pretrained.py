"""Folders of transformers that are no causal models: one line says what they are."""

import pytest
from transformers import GPT2Config, PreTrainedConfig, T5Config, ViTConfig

from harness.refusals import refused
from shardwise.models.pretrained import build_model

OTHERS = (T5Config(), ViTConfig())


@pytest.mark.parametrize("config", OTHERS, ids=lambda config: config.model_type)
def test_a_model_of_another_kind_is_refused_by_its_name(config: PreTrainedConfig) -> None:
    with refused("model-not-buildable", config.model_type, "model.path=here") as error:
        build_model(config, "model.path=here")
    assert len(str(error.value)) < 250, "not every kind that there is"


def test_a_causal_model_is_built() -> None:
    model = build_model(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16), "model.path=here")
    assert type(model).__name__ == "GPT2LMHeadModel"
