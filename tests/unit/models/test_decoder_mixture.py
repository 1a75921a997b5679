"""The decoder's experts against a loop over tokens, stacks against the lists that they are made of, and a folder."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.listed_experts import ListedExpert, in_stacks, listed
from harness.moe import poisoned
from harness.refusals import refused
from harness.small_decoder import SMALL_DECODER
from harness.training import make_config
from shardwise import initialize
from shardwise.checkpoint.hf.config_files import config_files, decoder_config, describe
from shardwise.models import Decoder, Experts, flops_per_token, lm_loss, num_params, preset
from shardwise.models.decoder_experts import MixtureOfExperts, Router
from shardwise.models.presets import ModelConfig
from shardwise.models.presets import decoder_config as shape_of
from shardwise.runtime.keyed_rng import init_parameters
from shardwise.runtime.torch_private import fake_tensors

SMALL = replace(SMALL_DECODER, num_experts=4, num_chosen=2, expert_size=20)


def small_decoder(**changes: object) -> Decoder:
    model = Decoder(dataclasses.replace(SMALL, **changes), dtype=torch.float64)
    init_parameters(model, seed=1)
    return model


def mixture_of(model: Decoder) -> MixtureOfExperts:
    mixture = model.get_submodule("blocks.0.ffn")
    assert isinstance(mixture, MixtureOfExperts)
    return mixture


@pytest.mark.parametrize("num_shared", [0, 2])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_mixture_equals_a_loop_over_tokens(num_shared: int, has_bias: bool) -> None:
    mixture = mixture_of(small_decoder(num_shared_experts=num_shared, router_bias=has_bias))
    bias = torch.tensor([0.0, 0.0, 2.0, 1.0], dtype=torch.float64) if has_bias else torch.zeros(4)
    if has_bias:
        mixture.router.e_score_correction_bias = bias
    x = torch.randn(2, 3, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gate_up, down = mixture.experts.gate_up_proj, mixture.experts.down_proj
    for token, found in zip(x.flatten(0, 1), mixture(x).flatten(0, 1), strict=True):
        shares = torch.softmax(mixture.router.weight @ token, 0)
        chosen = (shares + bias).argsort(descending=True)[:2]
        assert not has_bias or sorted(chosen.tolist()) == [2, 3]
        expected = 0 if mixture.shared is None else mixture.shared(token)
        for expert in chosen:
            gate, up = (gate_up[expert] @ token).split(20)
            expected = expected + shares[expert] / shares[chosen].sum() * (down[expert] @ (F.silu(gate) * up))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-18)


def test_a_router_computes_in_fp32_and_no_gradient_reaches_its_bias() -> None:
    router = Router(dataclasses.replace(SMALL, router_bias=True), dtype=torch.bfloat16)
    logits, weights, index = router(torch.randn(5, 24, dtype=torch.bfloat16))
    assert logits.dtype == weights.dtype == torch.float32
    assert index.shape == (5, 2)
    assert not router.e_score_correction_bias.requires_grad
    assert [name for name, _ in router.named_parameters()] == ["weight"]


# Of 24 and 20 float32 numbers all rows are multiples of 16 bytes, so torch's product of groups takes them.
KERNEL_AND_LOOP = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "loop"])


def drawn_experts(dtype: torch.dtype) -> Experts:
    return mixture_of(small_decoder()).experts.to(dtype)


@KERNEL_AND_LOOP
def test_an_expert_without_tokens_and_no_tokens_at_all_have_gradients_of_zero(dtype: torch.dtype) -> None:
    experts = drawn_experts(dtype)
    index, weights = torch.tensor([[0, 1], [1, 0]]), torch.full((2, 2), 0.5, dtype=dtype)
    with poisoned():
        experts(torch.randn(2, 24, dtype=dtype), index, weights).sum().backward()
    assert [bool(grad.any()) for grad in experts.down_proj.grad] == [True, True, False, False]
    assert experts(torch.zeros(0, 24, dtype=dtype), index[:0], weights[:0]).shape == (0, 24)


@KERNEL_AND_LOOP
def test_the_host_reads_numbers_of_rows_for_a_loop_alone(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else of what runs between the router and the next layer names a tensor's values."""
    experts = drawn_experts(dtype)
    hidden, index = torch.randn(6, 24, dtype=dtype, requires_grad=True), torch.rand(6, 4).topk(2).indices
    reads: list[Tensor] = []

    def tolist(tensor: Tensor) -> list[Any]:
        reads.append(tensor)
        return list(tensor.numpy())

    monkeypatch.setattr(Tensor, "tolist", tolist)
    experts(hidden, index, torch.rand(6, 2, dtype=dtype)).sum().backward()
    assert bool(reads) == (dtype == torch.float64)


def loss_of(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return lm_loss(logits, batch[1])


def test_a_compiled_mixture_is_one_graph_and_computes_the_same() -> None:
    """The backend runs what autograd makes of the graph as it is; inductor is as slow as it is exact."""
    batch = torch.arange(24).view(2, 12)
    traces = []
    for compiled in ({}, {"compile": {"enabled": True, "backend": "aot_eager"}}):
        model = small_decoder(num_shared_experts=1)
        with initialize(
            model, make_config(1, {"recompute": {"mode": "selective"}, **compiled}), loss_fn=loss_of
        ) as engine:
            results = [engine.train_step([(batch + step, batch + 1)]) for step in range(2)]
            traces.append([number for result in results for number in (result.loss, result.grad_norm)])
    assert traces[1] == pytest.approx(traces[0], rel=1e-12)


@pytest.mark.parametrize("changes", [{}, {"num_shared_experts": 3}, {"expert_size": None}, {"tie_embeddings": True}])
def test_num_params_equals_the_built_mixture(changes: dict[str, object]) -> None:
    config = dataclasses.replace(SMALL, **changes)
    assert num_params(config) == sum(p.numel() for p in Decoder(config, device="meta").parameters())


def test_flops_count_the_chosen_experts() -> None:
    dense = dataclasses.replace(SMALL, num_experts=0, ffn_size=40)
    routers = 6 * SMALL.num_layers * SMALL.num_experts * SMALL.hidden_size
    assert flops_per_token(SMALL, 8) == flops_per_token(dense, 8) + routers


def test_a_decoder_of_no_values_runs_on_fake_tensors() -> None:
    with fake_tensors(), torch.device("cpu"):
        logits = Decoder(SMALL)(torch.zeros(2, 5, dtype=torch.int64))
    assert logits.shape == (2, 5, 37)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with refused("chosen-exceed-experts", "num_chosen=5", "num_experts=4"):
        dataclasses.replace(SMALL, num_chosen=5)
    with refused("shape-not-positive", "num_chosen=0"):
        dataclasses.replace(SMALL, num_chosen=0)
    with refused("expert-keys-unused", "model.expert_size=8", "model.num_experts"):
        shape_of(ModelConfig(expert_size=8))
    assert shape_of(ModelConfig(preset="tiny-moe", num_experts=0)).num_experts == 0
    assert shape_of(ModelConfig(num_experts=4, num_shared_experts=1)).shared_size == preset("tiny").ffn_size


def test_what_has_no_experts_is_described_as_before_there_were_any() -> None:
    dense = dataclasses.replace(SMALL, num_experts=0)
    assert not {"num_experts", "router_bias"} & dense.values().keys()
    for config in (dense, SMALL, dataclasses.replace(SMALL, router_bias=True)):
        assert decoder_config({"class": "Decoder", "config": config.values()}) == dataclasses.replace(
            config, **({} if config.num_experts else {"expert_size": None})
        )


def test_a_folder_is_mixtrals_and_what_that_has_not_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_bytes(config_files(describe(small_decoder()), "F64")["config.json"])
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (theirs.model_type, theirs.num_local_experts, theirs.num_experts_per_tok) == ("mixtral", 4, 2)
    assert theirs.intermediate_size == 20
    for changes in ({"num_shared_experts": 1}, {"router_bias": True}):
        with refused("export-experts", f"{next(iter(changes))}={next(iter(changes.values()))}"):
            config_files(describe(small_decoder(**changes)), "F64")


def test_stacked_experts_have_the_bits_of_their_list_and_compute_the_same() -> None:
    """Gate and up are one product in a stack, which rounds in another order than two."""
    models = [listed(is_stacked=is_stacked).build(torch.float64) for is_stacked in (False, True)]
    expected, found = ({name: p.detach().clone() for name, p in model.named_parameters()} for model in models)
    assert all(value.equal(found[name]) for name, value in in_stacks(expected).items())
    tokens = torch.arange(24).view(3, 8)
    logits = [model(tokens) for model in models]
    torch.testing.assert_close(*logits, rtol=1e-12, atol=1e-14)
    for each in logits:
        each.square().sum().backward()
    grads = [{name: p.grad for name, p in model.named_parameters()} for model in models]
    for name, value in in_stacks(grads[0]).items():
        torch.testing.assert_close(grads[1][name], value, rtol=1e-11, atol=1e-13)


def biased() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_plain_feed_forwards_with_biases_are_stacked(is_frozen: bool) -> None:
    mlps = nn.ModuleList(biased() for _ in range(3)).requires_grad_(not is_frozen)
    experts = Experts.stacked(mlps, gate=None, up="0", down="2", act_fn=F.gelu)
    assert experts.has_bias
    assert not experts.has_gate
    assert {parameter.requires_grad for parameter in experts.parameters()} == {not is_frozen}
    x, index = torch.randn(4, 6), torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]])
    expected = torch.zeros_like(x)
    for number, mlp in enumerate(mlps):
        token = (index == number).any(-1)
        expected[token] += mlp(x[token])
    torch.testing.assert_close(experts(x, index, torch.ones(4, 2)), expected)


def one_of_other_size() -> list[nn.Module]:
    return [ListedExpert(), nn.ModuleDict({name: nn.Linear(12, 12, bias=False) for name in ("w1", "w2", "w3")})]


def with_a_norm() -> list[nn.Module]:
    expert = ListedExpert()
    expert.norm = nn.LayerNorm(12)
    return [expert, copy.deepcopy(expert)]


def some_biased() -> list[nn.Module]:
    expert = ListedExpert()
    expert.w2 = nn.Linear(20, 12)
    return [expert, copy.deepcopy(expert)]


def other_function() -> list[nn.Module]:
    class Clamped(ListedExpert):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).clamp(-0.01, 0.01)

    return [Clamped(), Clamped()]


@pytest.mark.parametrize("make", [list, one_of_other_size, some_biased, with_a_norm, other_function])
def test_what_is_no_list_of_equal_feed_forwards_is_refused(make: Callable[[], list[nn.Module]]) -> None:
    with refused("experts-not-equal", "gate="):
        Experts.stacked(make(), gate="w1", up="w3", down="w2", act_fn=F.gelu)


def test_another_activation_is_refused() -> None:
    with refused("experts-not-equal", "ListedExpert", "act_fn"):
        Experts.stacked([ListedExpert().train()], gate="w1", up="w3", down="w2")
