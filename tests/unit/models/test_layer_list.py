"""Models written as lists of layers: what they compute, what they share, and what is refused."""

import copy

import pytest
import torch
from torch import Tensor, nn

import shardwise
from harness.refusals import refused
from harness.scanned import stage_units_of
from shardwise import LayerList, LayerSpec


def tied_model() -> LayerList:
    return LayerList(
        [
            LayerSpec(nn.Embedding, 16, 4, tied="embedding"),
            LayerSpec(nn.Linear, 4, 4),
            torch.tanh,
            LayerSpec(nn.Linear, 4, 16, bias=False, tied="embedding"),
        ]
    )


def test_it_computes_what_its_layers_compute() -> None:
    model = tied_model()
    tokens = torch.arange(6).view(2, 3)  # [B, S]
    weight = model[0].weight
    expected = torch.tanh(model[1](weight[tokens])) @ weight.T  # [B, S, V]
    assert torch.equal(model(tokens), expected)
    model(tokens).sum().backward()
    assert weight.grad is model[3].weight.grad
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "1.weight", "1.bias"]
    assert list(model.state_dict()) == ["0.weight", "1.weight", "1.bias", "3.weight"]


def test_each_spec_builds_its_own_and_modules_are_taken_as_they_are() -> None:
    spec, layer = LayerSpec(nn.Linear, 2, 2), nn.Linear(2, 2)
    model = LayerList([spec, spec, layer])
    assert model[0] is not model[1]
    assert model[2] is layer
    assert repr(spec) == "LayerSpec(Linear, 2, 2)"


class Split(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, 2 * x


class Join(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x - y


def test_tuples_are_positional_arguments() -> None:
    x = torch.ones(2)
    assert torch.equal(LayerList([Split(), Join()])(x), -x)
    assert torch.equal(LayerList([Join(), Split(), lambda x, y: (y, x), Join()])(3 * x, x), 2 * x)
    assert torch.equal(LayerList([Join()])((x, 2 * x)), -x)


def test_another_forward_of_shared_parameters() -> None:
    model = LayerList(
        [
            LayerSpec(nn.Embedding, 16, 4, tied="embedding"),
            LayerSpec(nn.Linear, 4, 4, name="mix"),
            LayerSpec(nn.Embedding, 16, 4, tied="embedding", forward_fn=lambda layer, x: x @ layer.weight.T),
        ]
    )
    tokens = torch.arange(4).view(1, 4)  # [B, S]
    assert torch.equal(model(tokens), model.mix(model[0](tokens)) @ model[0].weight.T)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert names == ["0.weight", "mix.weight", "mix.bias", "2.layer.weight"]
    assert len(list(model.parameters())) == 3


def test_parameters_of_other_names_are_a_layers_own() -> None:
    model = LayerList([LayerSpec(nn.Linear, 3, 3, tied="w", bias=False), LayerSpec(nn.Linear, 3, 3, tied="w")])
    assert model[1].weight is model[0].weight
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "1.bias"]


def test_parameters_deep_inside_are_shared() -> None:
    def nest() -> nn.Module:
        return nn.ModuleDict({"inner": nn.Linear(2, 2)})

    model = LayerList([LayerSpec(nest, tied="a"), LayerSpec(nest, tied="b"), LayerSpec(nest, tied="a")])
    assert model[2]["inner"].bias is model[0]["inner"].bias
    assert model[1]["inner"].bias is not model[0]["inner"].bias


def test_a_copy_is_tied_to_itself() -> None:
    model = copy.deepcopy(tied_model())
    assert model[3].weight is model[0].weight


def test_it_is_built_without_memory() -> None:
    with torch.device("meta"):
        assert all(each.is_meta for each in tied_model().parameters())
    with shardwise.init(seed=1):
        model = tied_model()
    assert all(each.is_meta for each in model.parameters())
    assert model[3].weight is model[0].weight


def test_every_entry_is_a_unit_of_a_pipeline() -> None:
    units = stage_units_of(tied_model())
    assert [(unit.name, [entry.name for entry in unit.params]) for unit in units] == [
        ("0", ["0.weight"]),
        ("1", ["1.weight", "1.bias"]),
        ("2", []),
        ("3", ["0.weight"]),
    ]
    assert all(unit.is_cut_allowed_before for unit in units)


@pytest.mark.parametrize(
    ("specs", "refusal"),
    [
        ([], ("no-layers",)),
        ([nn.ReLU], ("layer-is-class", "entry 0", "ReLU")),
        (
            [torch.tanh, 3],
            ("layer-not-callable", "entry 1", "int"),
        ),
        ([LayerSpec(dict, a=1)], ("factory-returns-no-module", "LayerSpec(dict, a=1)")),
        (
            [torch.tanh, LayerSpec(nn.ReLU, name="0")],
            ("layer-name-twice", "entry 1", "named 0"),
        ),
        (
            [LayerSpec(nn.Linear, 2, 2, tied="t"), LayerSpec(nn.ReLU, tied="t")],
            ("tied-names-differ", "entry 1, tied='t'", "weight, bias"),
        ),
        (
            [LayerSpec(nn.Linear, 2, 3, tied="t"), LayerSpec(nn.Linear, 3, 2, tied="t", bias=False)],
            ("tied-shapes-differ", "entry 1, tied='t'", "weight", "[2, 3]", "[3, 2]"),
        ),
    ],
)
def test_lists_that_make_no_model_are_refused(specs: list[object], refusal: tuple[str, ...]) -> None:
    with refused(*refusal):
        LayerList(specs)
