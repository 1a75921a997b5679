"""From a plan to the slice of each parameter."""

from __future__ import annotations

import pytest
from torch import nn

from harness.refusals import refused
from harness.scanned import scanned
from shardwise.layout.tensor_plan import LayerSplit, SequenceStack, SharedInput, TensorPlan, param_splits
from shardwise.layout.tp_sharding import FusedPart, ParamSplit


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 8))


class Model(nn.Module):
    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.block = Block()
        self.head = nn.Linear(8, 13, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight


LAYERS = (
    LayerSplit("embed", "vocab", (FusedPart(13, is_padded=True),)),
    LayerSplit("block.mlp.0", "column", (FusedPart(32),)),
    LayerSplit("block.mlp.2", "row", (FusedPart(32),)),
    LayerSplit("head", "head", (FusedPart(13, is_padded=True),)),
)
REGIONS = (SharedInput("block.mlp", ("input",)),)
STACKS = (SequenceStack("block", "x", "block", ("block",)),)
PLAN = TensorPlan(LAYERS, REGIONS, STACKS)


def splits(plan: TensorPlan = PLAN, *, is_tied: bool = False, sequence_parallel: bool = False) -> dict[str, ParamSplit]:
    return param_splits(scanned(Model(is_tied)).params, plan, 2, sequence_parallel)


def test_layers_are_split_by_their_style_and_the_rest_is_whole() -> None:
    assert {name: (split.local_shape, split.dim) for name, split in splits().items()} == {
        "embed.weight": ((7, 8), 0),
        "block.norm.weight": ((8,), None),
        "block.norm.bias": ((8,), None),
        "block.mlp.0.weight": ((16, 8), 0),
        "block.mlp.0.bias": ((16,), 0),
        "block.mlp.1.weight": ((32,), None),
        "block.mlp.1.bias": ((32,), None),
        "block.mlp.2.weight": ((8, 16), 1),
        "block.mlp.2.bias": ((8,), None),
        "head.weight": ((7, 8), 0),
    }


def test_without_sequence_parallelism_only_what_the_plan_names_is_partial() -> None:
    assert not any(split.is_partial for split in splits().values())
    named = splits(TensorPlan(LAYERS, partial=("block.mlp.1.weight",)))
    assert [name for name, split in named.items() if split.is_partial] == ["block.mlp.1.weight"]


def test_under_sequence_parallelism_what_works_on_a_part_of_the_sequence_is_partial() -> None:
    partial = [name for name, split in splits(sequence_parallel=True).items() if split.is_partial]
    assert partial == ["block.norm.weight", "block.norm.bias", "block.mlp.2.bias"], "norm, and the bias after the sum"


def test_tied_parameters_have_one_split_by_all_their_names() -> None:
    tied = splits(is_tied=True)
    assert tied["embed.weight"] == tied["head.weight"]


def test_tied_parameters_that_are_split_in_two_ways_are_refused() -> None:
    with refused("tied-splits-differ", "embed.weight: along dim 0", "head.weight: whole"):
        splits(TensorPlan(LAYERS[:-1]), is_tied=True)


def test_a_module_that_only_registers_a_tied_parameter_has_no_say() -> None:
    class Registers(nn.Module):
        def __init__(self, head: nn.Linear) -> None:
            super().__init__()
            self.bias = head.bias

    head = nn.Linear(8, 13)
    model = nn.ModuleDict({"first": Registers(head), "head": head})
    found = param_splits(scanned(model).params, TensorPlan((LAYERS[-1],)), 2, sequence_parallel=False)
    assert found["first.bias"] == found["head.bias"] == ParamSplit((13,), 2, 0, (FusedPart(13, is_padded=True),))


@pytest.mark.parametrize(
    ("layer", "refusal"),
    [
        (
            LayerSplit("block.mlp.0", "column", (FusedPart(30),)),
            ("parts-fill-dim", "block.mlp.0", "30"),
        ),
        (LayerSplit("block.mlp.0", "column", (FusedPart(32, 1),)), None),
        (LayerSplit("block.mlp.2", "row", (FusedPart(32, 1),)), ("tp-divides-units", "tp=2", "units of block.mlp.2=1")),
    ],
)
def test_parts_that_do_not_fit_are_refused(layer: LayerSplit, refusal: tuple[str, ...] | None) -> None:
    if refusal is None:  # one unit that both ranks share
        splits(TensorPlan((layer,)))
        return
    with refused(*refusal):
        splits(TensorPlan((layer,)))
