"""The sums of routers, what is made of them, and who is refused, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import balance
from harness.balance import WatchedRouters, biases_of, fixed_length
from harness.moe import HIDDEN, NUM_EXPERTS, make_experts, square
from harness.moe_models import moe_case
from harness.tensor import mixture
from harness.training import make_config
from shardwise import ConfigError, Engine, initialize
from shardwise.config.errors import EngineError
from shardwise.config.sections import ExpertsConfig
from shardwise.experts.balance import bias_changes, counts_of, router_loss, router_table, skew_of
from shardwise.models import Decoder, preset
from shardwise.runtime.float64 import float64_throughout

BATCH = torch.float64


def test_the_losses_of_two_tokens_are_those_by_hand():
    # Probabilities 1/4 and 3/4, and 1/2 twice; the first token goes to expert 1, the second to expert 0.
    logits = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]], dtype=torch.float64)
    table = router_table(logits, torch.tensor([[1], [0]]))
    squares = math.log(4) ** 2 + math.log(2) ** 2
    assert table[0].tolist() == pytest.approx([1, 1, 0.75, 1.25, 2, squares])
    even = 2 * (0.5 * 0.375 + 0.5 * 0.625)
    assert router_loss(table, table, ExpertsConfig(aux_loss=0.1)).item() == pytest.approx(0.1 * even)
    assert router_loss(table, table, ExpertsConfig(z_loss=0.2)).item() == pytest.approx(0.2 * squares / 2)


def test_each_sequence_has_a_loss_of_its_own():
    logits = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]], dtype=torch.float64)
    table = router_table(logits, torch.tensor([[1], [0]]), num_groups=2)
    assert table[:, :2].tolist() == [[0, 1], [1, 0]]
    by_sequence = 2 * 0.75, 2 * 0.5
    assert router_loss(table, table, ExpertsConfig(aux_loss=1.0)).item() == pytest.approx(sum(by_sequence) / 2)


def test_parts_of_a_loss_and_their_gradients_add_up():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(10, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    index, config = logits.topk(2).indices, ExpertsConfig(aux_loss=0.3, z_loss=0.2)
    whole = router_table(logits, index)
    parts = [router_table(*rows) for rows in zip(logits.split([3, 7]), index.split([3, 7]), strict=True)]
    summed = torch.stack(parts).detach().sum(0)
    (expected,) = torch.autograd.grad(router_loss(whole, whole, config), logits)
    (actual,) = torch.autograd.grad(sum(router_loss(part, summed, config) for part in parts), logits)
    values = [router_loss(table, table, config).item() for table in (summed, whole)]
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    assert (actual - expected).abs().max() <= 1e-12


def test_no_tokens_have_no_loss():
    table = router_table(torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.long))
    assert router_loss(table, table, ExpertsConfig(aux_loss=1.0, z_loss=1.0)).item() == 0


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
def test_choices_are_counted_by_group(dtype):
    index = torch.tensor([[0, 2, 2, 1], [3, 3, 3, 0]], dtype=dtype)
    assert counts_of(index, 4).tolist() == [[1, 1, 2, 0], [1, 0, 0, 3]]


def test_a_bias_moves_by_its_rate_towards_the_mean():
    assert bias_changes([6.0, 0.0, 3.0], rate=0.1) == [-0.1, 0.1, 0.0]


def test_skew_is_the_fullest_over_the_mean():
    assert skew_of([6.0, 0.0, 3.0]) == 2.0
    assert skew_of([0.0, 0.0]) == 1.0


def engine_of(family: str, experts: dict[str, Any], **sections: Any) -> tuple[Engine, nn.Module, Any]:
    case = fixed_length(moe_case(family))
    model = case.build(torch.float64)
    return initialize(model, make_config(1, {"experts": experts, **sections})), model, case


@pytest.mark.parametrize(
    "family", ["afmoe", "deepseek_v3", "ernie4_5_moe", "hy_v3", "laguna", "lfm2_moe", "minimax_m2"]
)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_moves_the_biases_and_an_evaluation_does_not(family, stage):
    pytest.importorskip("transformers")
    engine, model, case = engine_of(family, {"bias_rate": 0.25}, zero={"stage": stage})
    routers = WatchedRouters(model)
    names = list(biases_of(model))
    parameters = dict(model.named_parameters())

    def biases() -> dict[str, torch.Tensor]:
        return {name: engine.read(name) if name in parameters else model.get_buffer(name).clone() for name in names}

    with float64_throughout(), engine:
        before = biases()
        engine.eval_step([case.batch(1, 2, BATCH)])
        assert all(torch.equal(bias, before[name]) for name, bias in biases().items())
        result = engine.train_step([case.batch(0, 2, BATCH)])
        counts = list(routers.counts().values())
        for (name, bias), count in zip(biases().items(), counts, strict=True):
            moved = 0.25 * (count.mean() - count).sign()
            assert torch.allclose(bias.view(-1), before[name].view(-1) + moved, rtol=0, atol=1e-7)
        assert result.expert_skew == pytest.approx([(count.max() / count.mean()).item() for count in counts])


def test_a_skipped_step_moves_no_bias():
    pytest.importorskip("transformers")
    engine, model, case = engine_of("deepseek_v3", {"bias_rate": 0.25})
    before = {name: bias.clone() for name, bias in biases_of(model).items()}
    batch = case.batch(0, 2, BATCH)
    with engine:
        result = engine.train_step([batch | {"labels": torch.full_like(batch["labels"], -100)}])
        assert result.skipped
        assert all(torch.equal(bias, before[name]) for name, bias in biases_of(model).items())
        assert all(skew > 1 for skew in result.expert_skew)


def test_gradients_that_are_dropped_have_chosen_nothing():
    pytest.importorskip("transformers")
    engine, _, case = engine_of("deepseek_v3", {"bias_rate": 0.25})
    with engine:
        engine.backward(engine(case.batch(1, 2, BATCH)))
        engine.zero_grad()
        after = engine.train_step([case.batch(0, 2, BATCH)]).expert_skew
    engine, _, case = engine_of("deepseek_v3", {"bias_rate": 0.25})
    with engine:
        assert engine.train_step([case.batch(0, 2, BATCH)]).expert_skew == after


def test_the_losses_join_the_loss_of_the_models_output_in_plain_mode():
    pytest.importorskip("transformers")
    case = fixed_length(mixture())
    plain = case.build(torch.float64)
    routers = WatchedRouters(plain)
    batch = case.batch(0, 2, BATCH)
    with float64_throughout():
        expected = plain(**batch).loss + balance.router_loss(routers, 1, 0.5, 0.25)
        expected.backward()
        with initialize(
            case.build(torch.float64), make_config(1, {"experts": {"aux_loss": 0.5, "z_loss": 0.25}})
        ) as engine:
            loss = engine.forward(**batch).loss
            engine.backward(loss)
            name = "model.layers.0.mlp.gate.weight"
            assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
            assert (engine.read(name, "grad") - plain.get_parameter(name).grad).abs().max() <= 1e-12
            with pytest.raises(ConfigError) as caught:
                engine.forward(input_ids=batch["input_ids"])
            assert caught.value.code == "aux-loss-in-plain-mode"
            engine.zero_grad()
            engine.train_step([batch])
            with torch.no_grad():
                assert engine.forward(input_ids=batch["input_ids"]).logits.shape[0] == 2


@pytest.mark.parametrize(
    ("family", "experts", "sections", "code"),
    [
        ("mixtral", {"bias_rate": 0.1}, {}, "router-without-bias"),
        ("dbrx", {"aux_loss": 0.1}, {}, "routers-not-seen"),
        ("mixtral", {"aux_loss": 0.1}, {"compile": {"enabled": True}}, "routers-not-seen"),
    ],
)
def test_what_cannot_be_balanced_is_refused(family, experts, sections, code):
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError) as caught:
        engine_of(family, experts, **sections)
    assert caught.value.code == code


def test_a_refusal_leaves_the_layers_that_could_be_balanced_as_they_were():
    model = Decoder(replace(preset("tiny-moe"), num_layers=2, router_bias=True))
    model.blocks[1].ffn.router.register_buffer("e_score_correction_bias", None)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError) as caught:
        initialize(model, make_config(1, {"experts": {"bias_rate": 0.1}}))
    assert caught.value.code == "router-without-bias"
    assert [type(module) for module in model.modules()] == classes


def test_routers_whose_logits_are_not_seen_are_refused():
    pytest.importorskip("transformers")
    engine, _, case = engine_of("zaya", {"aux_loss": 0.1})
    with engine, pytest.raises(EngineError) as caught:
        engine.train_step([case.batch(0, 2, BATCH)])
    assert caught.value.code == "router-logits-unknown"


class EveryExpert(nn.Module):
    """A router that sends each token to all experts, and returns their weights before its logits, or after them."""

    def __init__(self, are_weights_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, NUM_EXPERTS * HIDDEN).view(NUM_EXPERTS, HIDDEN))
        self.are_weights_first = are_weights_first

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.weight.T
        weights, index = logits.softmax(-1).topk(NUM_EXPERTS)
        return (weights, index, logits) if self.are_weights_first else (logits, index, weights)


class EveryExpertBlock(nn.Module):
    def __init__(self, are_weights_first: bool) -> None:
        super().__init__()
        self.router, self.experts = EveryExpert(are_weights_first), make_experts("mixtral", torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        first, index, last = self.router(x)
        mixed: Tensor = self.experts(x, index, first if self.router.are_weights_first else last)
        return mixed


def test_weights_of_all_experts_are_not_taken_for_logits() -> None:
    losses = []
    for are_weights_first in (False, True):
        config = make_config(1, {"experts": {"aux_loss": 1.0, "z_loss": 1.0}})
        with initialize(nn.Sequential(EveryExpertBlock(are_weights_first)), config, loss_fn=square) as engine:
            losses.append(engine.train_step([torch.linspace(-1, 1, 4 * HIDDEN).view(4, HIDDEN)]).loss)
    assert losses[1] == losses[0]
