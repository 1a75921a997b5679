"""Which modules form units, and whose every parameter is."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from harness.refusals import refused
from harness.scanned import scanned
from shardwise.layout.facts import ParamEntry
from shardwise.layout.param_groups import ROOT


class Block(nn.Module):
    """A weight and a nested layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.up = nn.Linear(2, 3)


class Decoder(nn.Module):
    """Embedding, blocks, norm and head, as most models have."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 2)
        self.blocks = blocks
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 5, bias=False)


class TwoTowers(nn.Module):
    """Containers at several depths."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Decoder(nn.ModuleList([Block(), Block()]))
        self.decoder = Decoder(nn.ModuleList([Block()]))
        self.bridge = nn.Linear(2, 2)


def two_blocks() -> nn.ModuleList:
    return nn.ModuleList([Block(), Block()])


@pytest.mark.parametrize(
    ("make", "units"),
    [
        (lambda: Decoder(two_blocks()), ["blocks.0", "blocks.1"]),
        (lambda: Decoder(nn.Sequential(Block(), nn.ReLU(), Block())), ["blocks.0", "blocks.2"]),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), ["0", "2"]),
        (TwoTowers, ["encoder.blocks.0", "encoder.blocks.1", "decoder.blocks.0"]),
        # Of nested containers, a list of lists is walked through; a Sequential inside a container is one block.
        (
            lambda: Decoder(nn.ModuleList([two_blocks(), two_blocks()])),
            [f"blocks.{i}.{j}" for i in (0, 1) for j in (0, 1)],
        ),
        (lambda: nn.Sequential(nn.Sequential(Block(), Block()), Block()), ["0", "1"]),
        (lambda: Decoder(nn.ModuleList([nn.ModuleDict({"a": nn.Linear(1, 1)})])), []),
        (lambda: Decoder(nn.ModuleDict({"a": two_blocks()})), ["blocks.a.0", "blocks.a.1"]),
        (lambda: Decoder(Block()), []),
        (Block, []),
    ],
)
def test_units_are_the_children_of_the_outermost_containers(make: Callable[[], nn.Module], units: list[str]) -> None:
    assert scanned(make()).units == tuple(units)


@pytest.mark.parametrize(
    ("patterns", "units"),
    [
        (["Block"], ["encoder.blocks.0", "encoder.blocks.1", "decoder.blocks.0"]),
        (["encoder.blocks.[0-9]"], ["encoder.blocks.0", "encoder.blocks.1"]),
        (["decoder"], ["decoder"]),
        (["bridge", "encoder.blocks.1"], ["encoder.blocks.1", "bridge"]),
        (["LayerNorm", "*.blocks.0"], ["encoder.blocks.0", "encoder.norm", "decoder.blocks.0", "decoder.norm"]),
        ([], []),
    ],
)
def test_patterns_name_classes_or_modules(patterns: list[str], units: list[str]) -> None:
    assert scanned(TwoTowers(), patterns).units == tuple(units)


def test_patterns_that_do_not_fit_are_refused() -> None:
    classes = "Block, Decoder, Embedding, LayerNorm, Linear, ModuleList"
    with refused("no-module-matches", "zero.blocks='blocks.7'", classes):
        scanned(Decoder(two_blocks()), ["Block", "blocks.7"])
    with refused("block-in-block", "zero.blocks", "blocks.1.up is inside block blocks.1"):
        scanned(Decoder(two_blocks()), ["Block", "blocks.1.up"])
    with refused("no-module-matches", "'block'"):
        scanned(Decoder(two_blocks()), ["block"])  # case matters


def test_of_what_one_pattern_matches_the_outermost_are_blocks() -> None:
    assert scanned(Decoder(two_blocks()), ["blocks.*"]).units == ("blocks.0", "blocks.1")


def test_names_that_only_begin_equally_are_no_nest() -> None:
    model = nn.ModuleDict({"a": Block(), "ab": Block()})
    assert scanned(model, ["a", "ab"]).units == ("a", "ab")
    assert [entry.unit for entry in scanned(model, ["a", "ab"]).params] == ["a"] * 3 + ["ab"] * 3


def units_of(model: nn.Module) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {entry.name: (entry.unit, entry.aliases) for entry in scanned(model).params}


def test_parameters_come_once_in_module_order_with_their_unit() -> None:
    model = Decoder(two_blocks())
    model.blocks[1].up.bias.requires_grad_(False)
    entries = scanned(model).params
    assert [entry.name for entry in entries] == [name for name, _ in model.named_parameters()]
    assert {entry.name: entry.shape for entry in entries} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    assert [entry.name for entry in entries if not entry.requires_grad] == ["blocks.1.up.bias"]
    assert {entry.name: entry.unit for entry in entries} == {
        name: ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ROOT
        for name, _ in model.named_parameters()
    }
    assert entries[1] == ParamEntry("blocks.0.scale", (), "blocks.0", (), True)


def test_ties_belong_to_the_unit_that_holds_all_their_names() -> None:
    model = Decoder(two_blocks())
    model.head.weight = model.embedding.weight
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.blocks[0].tied = model.blocks[0].scale
    found = units_of(model)
    assert found["embedding.weight"] == (ROOT, ("head.weight",))
    assert found["blocks.0.up.weight"] == (ROOT, ("blocks.1.up.weight",))
    assert found["blocks.0.scale"] == ("blocks.0", ("blocks.0.tied",))
    assert found["blocks.1.scale"] == ("blocks.1", ())
    model.blocks[1].out = model.embedding
    assert units_of(model)["embedding.weight"] == (ROOT, ("blocks.1.out.weight", "head.weight"))


def test_a_parameter_of_the_unit_itself_is_the_units() -> None:
    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.ParameterList([nn.Parameter(torch.ones(1))])])

    assert units_of(Weights()) == {"layers.0.0": ("layers.0", ())}


def test_a_block_that_stands_twice_is_one_unit() -> None:
    """As ALBERT shares its layers: its parameters are used by that block alone."""
    block = Block()
    model = Decoder(nn.Sequential(block, nn.Tanh(), block))
    assert scanned(model).units == ("blocks.0",)
    assert units_of(model)["blocks.0.scale"][0] == "blocks.0"


def test_meta_tensors_will_do() -> None:
    assert units_of(Decoder(two_blocks()).to("meta")) == units_of(Decoder(two_blocks()))
