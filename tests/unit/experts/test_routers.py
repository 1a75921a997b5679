"""Routers choose the experts that they are given, and their weights stay what the model's own code makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.moe import HIDDEN, make_experts
from harness.moe_models import MOE_FAMILIES, build_moe, moe_case
from harness.refusals import refusal_of
from shardwise.construction.experts import is_experts, router_of
from shardwise.experts.routers import RouterReplay, Routers
from shardwise.runtime.float64 import float64_throughout
from shardwise.runtime.recompute import recompute_forward

pytest.importorskip("transformers")

NUM_EXPERTS = 8
# One finds the experts of a token in a table, the other samples them, one after the other.
NOT_REPLAYABLE = ("deepseek_v4", "phimoe")
REPLAYABLE = sorted(set(MOE_FAMILIES) - set(NOT_REPLAYABLE))


@dataclass
class Calls:
    """What the experts of each layer are called with."""

    index: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


@contextmanager
def watched(model: nn.Module) -> Iterator[Calls]:
    calls = Calls()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        _, index, weights = (*args, *kwargs.values())
        calls.index.append(index.detach().clone())
        calls.weights.append(weights.detach().clone())

    hooks = [each.register_forward_pre_hook(note, with_kwargs=True) for each in model.modules() if is_experts(each)]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def make(family: str, **options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(1)
    model = build_moe(family, **options).to(torch.float64)
    return model, moe_case(family).batch(3, 2, torch.float64)


def run(
    model: nn.Module, batch: Mapping[str, Tensor], routing: Tensor | None = None
) -> tuple[Calls, dict[str, Tensor]]:
    """The calls of the experts, and loss and gradients by name."""
    model.zero_grad()
    with closing(Routers(model)) as routers, float64_throughout(), watched(model) as calls:
        checked = None if routing is None else routers.checked(routing, batch["input_ids"].shape)
        with routers.following(checked) if checked is not None else nullcontext():
            torch.manual_seed(2)
            loss = model(**batch).loss
        loss.backward()
    grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return calls, {"loss": loss.detach(), **{name: grad.clone() for name, grad in grads.items()}}


def others(batch: Mapping[str, Tensor], calls: Calls) -> Tensor:
    """Experts for each token and layer at random, [B, S, L, k]."""
    generator = torch.Generator().manual_seed(4)
    num_choices, num_layers = calls.index[0].shape[1], len(calls.index)
    scores = torch.rand(*batch["input_ids"].shape, num_layers, NUM_EXPERTS, generator=generator)
    return scores.topk(num_choices).indices


def by_layer(routing: Tensor) -> list[Tensor]:
    return [layer.flatten(0, 1) for layer in routing.unbind(2)]


@pytest.mark.parametrize("family", REPLAYABLE)
def test_tokens_go_where_they_are_sent(family: str) -> None:
    model, batch = make(family)
    routing = others(batch, run(model, batch)[0])
    calls, values = run(model, batch, routing.to(torch.int16))
    turned, again = run(model, batch, routing.flip(-1))
    assert len(calls.index) == routing.shape[2]
    for layer, expected in enumerate(by_layer(routing)):
        assert torch.equal(calls.index[layer], expected), layer
        assert torch.equal(turned.index[layer], expected.flip(-1)), layer
        # A weight belongs to its expert, in whatever order the choices are named.
        assert torch.allclose(turned.weights[layer].flip(-1), calls.weights[layer], rtol=1e-12, atol=0), layer
    for name, value in values.items():
        assert (again[name] - value).abs().max() <= 1e-11 * value.abs().max(), name


@pytest.mark.quick(13)
@pytest.mark.parametrize("family", REPLAYABLE)
def test_what_the_router_chose_changes_no_bit(family: str) -> None:
    model, batch = make(family)
    calls, values = run(model, batch)
    routing = torch.stack([index.view(*batch["input_ids"].shape, -1) for index in calls.index], 2)
    replayed, again = run(model, batch, routing)
    assert all(torch.equal(*pair) for pair in zip(replayed.index, calls.index, strict=True))
    assert all(torch.equal(*pair) for pair in zip(replayed.weights, calls.weights, strict=True))
    assert values.keys() == again.keys()
    assert [name for name, value in values.items() if not torch.equal(again[name], value)] == []


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_weights_are_those_of_the_formula(family: str) -> None:
    model, batch = make(family)
    routing = others(batch, run(model, batch)[0])
    layers = [model.get_submodule(name) for name, module in model.named_modules() if is_experts(module)]
    routers = [router_of(parent_of(model, experts), experts) for experts in layers]
    logits: list[Tensor] = []

    def note(router: Any, args: tuple[Tensor]) -> None:
        hidden = args[0].flatten(0, -2).detach()
        logits.append(F.linear(hidden, router.weight.detach(), getattr(router, "bias", None)))

    for router in routers:
        assert router is not None
        router.register_forward_pre_hook(note)
    calls, _ = run(model, batch, routing)
    for layer, index in enumerate(by_layer(routing)):
        if family == "gpt_oss":
            expected = logits[layer].gather(1, index).softmax(-1)
        else:
            scores = logits[layer].softmax(-1) if family == "mixtral" else logits[layer].sigmoid()
            expected = scores.gather(1, index)
            expected = expected / expected.sum(-1, keepdim=True)
            expected = expected * getattr(model.config, "routed_scaling_factor", 1.0)
        assert (calls.weights[layer] - expected).abs().max() <= 1e-12, layer


def parent_of(model: nn.Module, experts: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if experts in module.children())


def test_the_groups_of_given_experts_are_not_masked() -> None:
    model, batch = make("deepseek_v2", topk_method="group_limited_greedy", n_group=2, topk_group=1)
    own, _ = run(model, batch)
    routing = torch.stack([index.view(*batch["input_ids"].shape, -1) for index in own.index], 2)
    away = (routing + NUM_EXPERTS // 2) % NUM_EXPERTS  # all in the group that the router has not chosen
    calls, _ = run(model, batch, away)
    assert all(torch.equal(*pair) for pair in zip(calls.index, by_layer(away), strict=True))
    assert all((weights > 0).all() for weights in calls.weights)


def test_all_blocks_may_be_given_as_inference_engines_do() -> None:
    model, batch = make("glm4_moe", num_hidden_layers=4, first_k_dense_replace=1)
    routing = others(batch, run(model, batch)[0])
    dense = torch.full_like(routing[:, :, :1], -1)  # no expert: of a block that has none
    calls, values = run(model, batch, torch.cat([dense, routing], 2))
    assert routing.shape[2] == 3
    assert all(torch.equal(*pair) for pair in zip(calls.index, by_layer(routing), strict=True))
    again = run(model, batch, routing)[1]
    assert all(torch.equal(again[name], value) for name, value in values.items())


def test_a_rank_of_a_split_sequence_takes_its_part() -> None:
    routing = torch.arange(24).view(2, 4, 3) % NUM_EXPERTS
    scores = torch.rand(4, NUM_EXPERTS)
    for rank in range(2):
        router = RouterReplay("layer", NUM_EXPERTS, lambda: routing, (rank, 2))
        with router.choosing():
            index = scores.topk(3).indices
            whole = torch.rand(8, NUM_EXPERTS).topk(3).indices  # as in what is computed whole on every rank
        assert torch.equal(index, routing[:, 2 * rank : 2 * rank + 2].flatten(0, 1))
        assert torch.equal(whole, routing.flatten(0, 1))


@pytest.mark.parametrize("take", [torch.topk, Tensor.topk], ids=["function", "method"])
def test_only_the_best_along_the_last_dim_are_a_choice(take: Any) -> None:
    routing, scores = torch.tensor([[[5, 1], [0, 7]]]), torch.rand(2, NUM_EXPERTS)
    with RouterReplay("layer", NUM_EXPERTS, lambda: routing).choosing():
        assert torch.equal(take(scores, k=2, dim=1, sorted=False)[1], routing[0])
        assert torch.equal(take(scores, 2, -1, True, True).values, scores.gather(1, routing[0]))
        assert torch.equal(take(scores, 2, largest=False)[1], scores.argsort(1)[:, :2])
        assert torch.equal(take(scores, 1, 0)[1], scores.argmax(0, keepdim=True))
        keys = torch.rand(2, 2 * NUM_EXPERTS)
        assert torch.equal(take(keys, NUM_EXPERTS + 1)[1], keys.argsort(1, descending=True)[:, : NUM_EXPERTS + 1])


class Changing(nn.Module):
    """A router of groups whose scores are other ones in each pass."""

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.numbers = iter(range(9))  # no state that a second pass is given again
        self.note = note

    def forward(self, scores: Tensor) -> Tensor:
        scores = scores.roll(3 * next(self.numbers), -1)
        with RouterReplay("layer", NUM_EXPERTS, lambda: None).choosing():
            groups = scores.view(-1, 2, 4).topk(2)[0].sum(-1).topk(1)[1]
            values, index = scores.topk(2)
        self.note(torch.cat([groups, index], 1))
        return values.exp()


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_second_pass_chooses_as_the_first(mode: str) -> None:
    chosen: list[Tensor] = []
    router, scores = Changing(chosen.append), torch.rand(5, NUM_EXPERTS, dtype=torch.float64, requires_grad=True)
    recompute_forward(router, mode)
    router(scores).sum().backward()
    first, second = chosen
    assert torch.equal(first, second)
    assert torch.equal(first[:, 1:], scores.topk(2)[1])


def refused_routing(model: nn.Module, batch: Mapping[str, Tensor], routing: Any) -> str:
    code, message = refusal_of(lambda: run(model, batch, routing))
    assert "\n" not in message
    return code


def test_what_does_not_fit_is_refused() -> None:
    model, batch = make("mixtral")
    routing = others(batch, run(model, batch)[0])
    for expert in (-1, NUM_EXPERTS):
        wrong = routing.clone()
        wrong[1, 2, 0, 1] = expert
        assert refused_routing(model, batch, wrong) == "routing-range"
    assert refused_routing(model, batch, routing.double()) == "routing-range"
    for wrong_shape in (routing[:, 1:], routing[1:], routing[:, :, :1], routing.flatten(2), routing.tolist()):
        assert refused_routing(model, batch, wrong_shape) == "routing-shape"
    assert refused_routing(model, batch, routing[..., :1]) == "routing-shape"


@pytest.mark.parametrize("family", NOT_REPLAYABLE)
def test_a_router_without_topk_is_refused(family: str) -> None:
    model, batch = make(family)
    routing = others(batch, run(model, batch)[0])
    assert refused_routing(model, batch, routing) == "router-not-replayable"


def test_a_router_that_does_not_follow_its_topk_is_refused() -> None:
    model, batch = make("mixtral")
    routing = others(batch, run(model, batch)[0])
    for experts in [module for module in model.modules() if is_experts(module)]:
        experts.register_forward_pre_hook(lambda module, args: (args[0], (args[1] + 1) % NUM_EXPERTS, args[2]))
    routers = Routers(model)
    with float64_throughout(), routers.following(routers.checked(routing, batch["input_ids"].shape)):
        code, message = refusal_of(lambda: model(**batch))
    assert code == "router-not-replayable"
    assert message.startswith("model.layers.0.mlp.experts: ")


class Indexed(nn.Module):
    """A block in which a token chooses others too, as many as its experts, among as many as there are experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False), make_experts("mixtral", torch.float32)
        self.keys: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.keys.append((x @ x.T).topk(2).indices)
        weights, index = self.gate(x[self.keys[-1]].sum(1)).softmax(-1).topk(2)
        mixed: Tensor = self.experts(x, index, weights)
        return mixed


@pytest.mark.parametrize("replays", [False, True])
def test_a_choice_of_attention_in_the_same_block_stays(replays: bool) -> None:
    model, x = nn.Sequential(Indexed()), torch.randn(NUM_EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(0))
    routing = (torch.arange(NUM_EXPERTS).view(1, -1, 1, 1) + torch.tensor([1, 4])) % NUM_EXPERTS
    with closing(Routers(model)) as routers, watched(model) as calls:
        checked = routers.checked(routing, torch.Size((1, NUM_EXPERTS)))
        with routers.following(checked) if replays else nullcontext():
            model(x)
    assert torch.equal(calls.index[0], routing[0, :, 0]) == replays
    assert torch.equal(model[0].keys[0], (x @ x.T).topk(2).indices)
