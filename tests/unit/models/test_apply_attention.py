"""The attention section and models of transformers: given, taken back, and refused where it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from harness.huggingface import FAMILIES, build_model
from harness.refusals import refused
from shardwise import initialize
from shardwise.config.resolve import AttentionConfig
from shardwise.models.apply_attention import apply_attention, check_attention

pytestmark = pytest.mark.begin

pytest.importorskip("transformers")
WINDOW = AttentionConfig(kind="sliding-window", block=2, num_sliding_window_blocks=1)


def output(model: nn.Module, family: str) -> torch.Tensor:
    batch = FAMILIES[family].batch(0, 2, torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(**batch).logits
    return logits


def settings(**sections: Any) -> dict[str, Any]:
    return {
        "attention": WINDOW.model_dump(),
        "run": {"device": "cpu"},
        "optimizer": {"name": "sgd", "lr": 0.1},
        **sections,
    }


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
def test_an_engine_gives_a_model_the_section_and_takes_it_back(family: str) -> None:
    model = build_model(family).eval()
    before = output(model, family)
    with initialize(model, settings()) as engine, engine.gathered():
        assert not torch.allclose(output(model, family), before)
    torch.testing.assert_close(output(model, family), before)
    assert not any("_shardwise_structure" in module.__dict__ for module in model.modules())


@pytest.mark.full
@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.full), "full", "selective"])
def test_compiled_blocks_train_equally(recompute: str) -> None:
    losses = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        compiled = {"enabled": is_compiled, "backend": "eager"}
        sections = settings(compile=compiled, recompute={"mode": recompute})
        with initialize(build_model("llama"), {**sections, "zero": {"stage": 3}}) as engine:
            batches = [FAMILIES["llama"].batch(step, 2, torch.float32) for step in range(3)]
            losses.append([engine.train_step([batch]).loss for batch in batches])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_models_that_cannot_take_it_are_refused() -> None:
    with refused("attention-needs-decoder", "attention.kind=sliding-window", "Linear"):
        check_attention(nn.Linear(2, 2), WINDOW)
    mamba = build_model("mamba")
    with refused("attention-interface", "Mamba"):
        initialize(mamba, settings())
    assert apply_attention(mamba, AttentionConfig()) == []


def test_heads_of_several_numbers_cannot_differ() -> None:
    both = nn.ModuleList([build_model("bert"), build_model("bert", num_attention_heads=2)])
    with refused("heads-differ-between-layers", "[2, 4]"):
        apply_attention(both, AttentionConfig(kind="bigbird", block=2, different_layout_per_head=True))
    (undo,) = apply_attention(both, WINDOW)
    undo()
