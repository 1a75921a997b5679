"""A layer of experts on one rank: the order of rows, the product of groups and all gradients, against a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

from harness.moe import CASES, FAMILIES, NUM_EXPERTS, gradients_of, make_experts, make_tokens, plain_experts, poisoned
from harness.moe import DispatchedLayer as Layer
from harness.refusals import refusal_of
from shardwise.comm.backends import GlooComm
from shardwise.comm.collectives import CommResources, RankPlace
from shardwise.experts.dispatch import ExpertDispatch
from shardwise.runtime.float64 import float64_throughout
from shardwise.runtime.recompute import recompute_forward

CPU = torch.device("cpu")


@pytest.fixture
def dispatch() -> Iterator[ExpertDispatch]:
    one_rank = GlooComm(RankPlace(0, 1, "ep"), CommResources.alone(CPU, 20.0), None)
    layers = ExpertDispatch(one_rank)
    yield layers
    assert not one_rank.comm_log.counts  # a single rank calls nothing
    layers.close()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape
        most = value.abs().max() if value.numel() else 0.0
        assert ((found[name].double() - value).abs() <= tolerance * most).all(), name


@pytest.mark.parametrize("case", CASES[:-1])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_equals_a_loop_over_tokens(family: str, case: str, dispatch: ExpertDispatch) -> None:
    experts, tokens = make_experts(family), make_tokens(case)
    with float64_throughout():
        found = gradients_of(experts, tokens, lambda *given: dispatch.forward(experts, *given, "layer"))
        expected = gradients_of(experts, tokens, lambda *given: plain_experts(family, experts, *given))
        assert_equal(found, expected, 1e-12)
        if family != "privacy_filter":  # it adds into float32 whatever its dtype
            assert_equal(found, gradients_of(experts, tokens, experts), 1e-12)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_without_tokens_all_gradients_are_zeros(family: str, dispatch: ExpertDispatch) -> None:
    experts, tokens = make_experts(family), make_tokens("two ranks without")
    found = gradients_of(experts, tokens, lambda *given: dispatch.forward(experts, *given, "layer"))
    assert found.pop("out").shape == found.pop("hidden").shape == (0, 8)
    assert found.pop("weights").shape == (0, 2)
    for name, parameter in experts.named_parameters():
        assert torch.equal(found[name], torch.zeros_like(parameter))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "loop"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_memory_that_is_not_written_reaches_no_sum(
    family: str, case: str, dtype: torch.dtype, dispatch: ExpertDispatch
) -> None:
    experts, tokens = make_experts(family, dtype), make_tokens(case, dtype=dtype)
    with poisoned():
        found = gradients_of(experts, tokens, lambda *given: dispatch.forward(experts, *given, "layer"))
    for name, value in found.items():
        assert value.isfinite().all(), name


# Of 16 features rows and matrices are multiples of 16 bytes, which torch's product of groups asks for.
@pytest.mark.parametrize(("hidden", "size"), [(6, 5), (16, 16)], ids=["odd", "aligned"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float16, 0.02), (torch.bfloat16, 0.06), (torch.float32, 1e-5)],
    ids=["fp16", "bf16", "fp32"],
)
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_narrow_dtypes_round_and_no_more(
    family: str, dtype: torch.dtype, tolerance: float, hidden: int, size: int, dispatch: ExpertDispatch
) -> None:
    sizes = {"hidden_size": hidden, "intermediate_size": size}
    experts, wide = make_experts(family, dtype, **sizes), make_experts(family, **sizes)
    with torch.no_grad():
        for each in (experts, wide):
            for parameter in each.parameters():
                parameter.mul_(0.3)  # so that no activation is clamped in one dtype alone
    for ours, theirs in zip(wide.parameters(), experts.parameters(), strict=True):
        ours.data.copy_(theirs)
    tokens = make_tokens("plain", dtype=dtype, hidden_size=hidden)
    reference = make_tokens("plain", hidden_size=hidden)
    reference.hidden.data.copy_(tokens.hidden)
    reference.weights.data.copy_(tokens.weights)
    found = gradients_of(experts, tokens, lambda *given: dispatch.forward(experts, *given, "layer"))
    assert {value.dtype for value in found.values()} == {dtype}
    assert_equal(found, gradients_of(wide, reference, lambda *given: plain_experts(family, wide, *given)), tolerance)


def test_a_router_in_float32_leaves_the_result_as_narrow_as_the_tokens(dispatch: ExpertDispatch) -> None:
    experts, tokens = make_experts("mixtral", torch.bfloat16), make_tokens("plain", dtype=torch.bfloat16)
    tokens.weights = tokens.weights.detach().float().requires_grad_()
    found = gradients_of(experts, tokens, lambda *given: dispatch.forward(experts, *given, "layer"))
    assert (found["out"].dtype, found["weights"].dtype) == (torch.bfloat16, torch.float32)


def test_autocast_narrows_products_and_not_the_result(dispatch: ExpertDispatch) -> None:
    experts = make_experts("mixtral", torch.float32)
    tokens = make_tokens("plain", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients_of(experts, tokens, lambda *given: dispatch.forward(experts, *given, "layer"))
        expected = gradients_of(experts, tokens, experts)
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert_equal(found, {name: value.double() for name, value in expected.items()}, 0.03)
    exact = gradients_of(experts, tokens, experts)
    assert not torch.equal(found["out"], exact["out"])


@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h"])
def test_gradients_may_be_differentiated_again(family: str, dispatch: ExpertDispatch) -> None:
    experts, tokens = make_experts(family), make_tokens("few")
    layer = Layer(experts, dispatch)
    names = [name for name, _ in layer.named_parameters()]

    def run(hidden: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        result: Tensor = functional_call(layer, given, (hidden, tokens.index, weights))
        return result

    inputs = (tokens.hidden, tokens.weights, *experts.parameters())
    assert gradcheck(run, inputs, fast_mode=True)
    assert gradgradcheck(run, inputs, fast_mode=True)


class Undecided(Layer):
    """A router that chooses others each time."""

    def __init__(self, experts: nn.Module, dispatch: ExpertDispatch) -> None:
        super().__init__(experts, dispatch)
        self.numbers = count()  # no state that a second pass is given again

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden, (index + next(self.numbers)) % NUM_EXPERTS, weights)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_recomputation_gives_the_same_bits(mode: str, dispatch: ExpertDispatch) -> None:
    experts, tokens = make_experts("gpt_oss"), make_tokens("plain")
    layer = Layer(experts, dispatch)
    expected = gradients_of(experts, tokens, layer)
    recompute_forward(layer, mode)
    found = gradients_of(experts, tokens, layer)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_recomputation_that_routes_otherwise_is_refused(mode: str, dispatch: ExpertDispatch) -> None:
    experts, tokens = make_experts("mixtral"), make_tokens("plain")
    layer = Undecided(experts, dispatch)
    recompute_forward(layer, mode)
    code, message = refusal_of(lambda: gradients_of(experts, tokens, layer))
    assert code == "routing-changed"
    assert message.startswith("layers.0: ")


@pytest.mark.parametrize("expert", [-1, NUM_EXPERTS])
def test_an_expert_that_is_not_there_is_refused(expert: int, dispatch: ExpertDispatch) -> None:
    experts, tokens = make_experts("mixtral"), make_tokens("plain")
    tokens.index[3, 1] = expert
    code, message = refusal_of(lambda: dispatch.forward(experts, tokens.hidden, tokens.index, tokens.weights, "layer"))
    assert code == "rows-without-rank"
    assert "1 of 10 rows" in message
