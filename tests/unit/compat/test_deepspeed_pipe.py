"""What `PipelineModule` and the topologies say before ranks start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.compat.deepspeed.pipe import LayerSpec, PipelineModule
from shardwise.compat.deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from shardwise.config.errors import ConfigError


def chain(num_blocks: int, **options: Any) -> PipelineModule:
    blocks = [each for _ in range(num_blocks) for each in (nn.Linear(4, 4), nn.ReLU())]
    return PipelineModule([nn.Embedding(8, 4), *blocks, torch.sigmoid], loss_fn=nn.MSELoss(), **options)


@pytest.mark.parametrize(
    ("method", "num_stages", "cut"),
    [
        ("uniform", 2, ["5"]),
        ("uniform", 5, ["2", "4", "6", "8"]),
        ("type:linear", 2, ["5"]),
        ("type:Linear|Embedding", 3, ["3", "7"]),
        ("type:linear", 4, ["3", "5", "7"]),
    ],
)
def test_methods_of_partition(method: str, num_stages: int, cut: list[str]) -> None:
    plan = chain(4, num_stages=num_stages, partition_method=method).train_batch_plan({"zero": {"stage": 1}})
    assert plan == {"zero": {"stage": 1}, "mesh": {"pp": num_stages}, "pipeline": {"cut": cut}}


def test_costs_decide_by_default_and_the_json_wins() -> None:
    given = {"pipeline": {"cut": ["3"]}, "recompute": {"mode": "selective"}}
    model = chain(4, num_stages=2, activation_checkpoint_interval=2)
    assert model.train_batch_plan({}) == {"mesh": {"pp": 2}, "recompute": {"mode": "full"}}
    assert model.train_batch_plan(given) == {**given, "mesh": {"pp": 2}}


def test_layers_are_seeded_one_by_one() -> None:
    seeds: list[int] = []
    model = PipelineModule(
        [LayerSpec(nn.Linear, 4, 4), nn.ReLU(), LayerSpec(nn.Linear, 4, 4)],
        num_stages=1,
        seed_layers=True,
        seed_fn=seeds.append,
        base_seed=5,
    )
    assert (seeds, len(model)) == ([5, 7], 3)


def test_topology() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    assert [topology.get_rank(**topology.get_coord(rank)._asdict()) for rank in range(12)] == list(range(12))
    assert topology.get_axis_comm_lists("data")[:2] == [[0, 2, 4], [1, 3, 5]]
    assert topology.get_axis_comm_lists("none") == []
    assert topology.filter_match(pipe=1, model=0) == [6, 8, 10]
    assert topology.get_axis_list("pipe", 0) == list(range(6))
    assert (topology.get_dim("data"), topology.get_dim("none"), topology.world_size()) == (3, 0, 12)
    with pytest.raises(ValueError, match="filter_match"):
        topology.get_rank(pipe=0)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({}, "pipeline-stages"),
        ({"topology": PipeModelDataParallelTopology(2, 2, 1)}, "pipeline-layers-split"),
        ({"topology": ProcessTopology(["data", "pipe"], [2, 2])}, "pipeline-topology"),
        ({"topology": ProcessTopology(["pipe", "expert"], [2, 2])}, "pipeline-topology"),
        ({"num_stages": 2, "partition_method": "profile"}, "pipeline-method"),
        ({"num_stages": 2, "partition_method": "type:nothing"}, "pipeline-method"),
    ],
)
def test_what_cannot_be_cut_is_refused(options: dict[str, Any], code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        chain(2, **options).train_batch_plan({})
    assert caught.value.code == code
