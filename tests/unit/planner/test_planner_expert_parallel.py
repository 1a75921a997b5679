"""Experts that `mesh.ep` divides are held, exchanged, searched and written."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.config.resolve import Config
from shardwise.models.shape import ExpertsShape, ModelShape
from shardwise.planner.candidates import SearchSpace, candidates, placements
from shardwise.planner.folded_layout import FoldedLayouts
from shardwise.planner.hardware import cluster_of, parse_cluster
from shardwise.planner.job import BASE, PlanJob, changed
from shardwise.planner.memory import MemoryModel
from shardwise.planner.profile import MatmulTime, Profile
from shardwise.planner.request import base_of, job_of, written
from shardwise.planner.search import Pricer, least_states_bytes
from shardwise.verify.finalists import peak_of

FAST = parse_cluster("h100:64")
EXPERTS = ExpertsShape(num_experts=256, num_chosen=8, ffn_size=512, num_shared=1)
SHAPE = ModelShape(
    num_layers=6, hidden_size=7168, num_heads=64, num_kv_heads=8, head_dim=128, ffn_size=18432, vocab_size=32000,
    experts=EXPERTS, name="wide",
)  # fmt: skip


@pytest.mark.parametrize("ep", [2, 8])
def test_each_rank_holds_its_experts_and_zero_shards_them_over_the_others(ep: int) -> None:
    job = PlanJob(shape=SHAPE, seq_len=2048, global_batch=256, cluster=FAST)
    one = changed(BASE, {"mesh.dp_shard": 64, "zero.stage": 1})
    whole, split = (FoldedLayouts(job).at_rest(changed(one, {"mesh.ep": each})) for each in (1, ep))
    experts = 2 * SHAPE.num_layers * 256 * 3 * 7168 * 512
    assert whole["param"] - split["param"] == pytest.approx(experts * (1 - 1 / ep), rel=0.001)
    # ZeRO-1's states are as many on each rank: ep times fewer experts over ep times fewer ranks.
    assert split["optimizer"] == pytest.approx(whole["optimizer"], rel=0.001)


def test_the_most_experts_within_a_node_are_tried_first_and_legal() -> None:
    job = PlanJob(shape=SHAPE, seq_len=2048, global_batch=256, cluster=FAST)
    space = SearchSpace(pins={"mesh.pp": (1, 8), "mesh.tp": (1, 2), "mesh.cp": (1,)})
    tried = [(each.mesh.pp, each.mesh.ep) for each in candidates(job, space)]
    assert {ep for pp, ep in tried if pp == 1} == {8, 16, 32, 1}
    assert {ep for pp, ep in tried if pp == 8} == {8, 1}
    few = candidates(job, replace(space, pins={**space.pins, "mesh.ep": (2, 3)}))
    assert {each.mesh.ep for each in few} == {2}
    small = replace(job, shape=replace(SHAPE, experts=replace(EXPERTS, num_experts=8)))
    assert {each.mesh.ep for each in candidates(small, space)} == {8, 1}
    dense = replace(job, shape=replace(SHAPE, experts=None))
    assert {each.mesh.ep for each in candidates(dense, space)} == {1}
    compiled = changed(BASE, {"compile.enabled": True})
    assert {(each.mesh.tp, each.mesh.ep) for each in candidates(job, space, compiled)} == {(1, 1)}


def test_a_candidate_has_the_same_price_whatever_was_priced_before_it() -> None:
    job = PlanJob(shape=SHAPE, seq_len=2048, global_batch=256, cluster=FAST)
    drawn, known, pins = random.Random(0), Pricer(job), {"mesh.pp": (1, 2), "mesh.cp": (1,), "batch.micro_size": (1,)}
    for config in drawn.sample([*candidates(job, SearchSpace(pins=pins))], 5):
        for one in (changed(config, {"mesh.ep": ep}) for ep in (1, 8)):
            for values in drawn.sample([*placements(job, SearchSpace(offloads=True), one)], 2):
                fresh, placed = Pricer(job), changed(one, values)
                assert known.price(placed) == fresh.price(placed)
                assert known.time.estimate(placed, is_quick=True) == fresh.time.estimate(placed, is_quick=True)
                assert known.time.stages_s(placed) == fresh.time.stages_s(placed)


def test_a_shard_group_is_a_multiple_of_the_ranks_that_divide_experts() -> None:
    job = PlanJob(shape=SHAPE, seq_len=2048, global_batch=256, cluster=FAST)
    config = changed(BASE, {"mesh.dp_shard": 32, "mesh.tp": 2, "mesh.ep": 16})
    sizes = {placed["mesh.dp_shard"] for placed in placements(job, SearchSpace(), config)}
    assert sizes == {8, 16, 32}


def test_shard_groups_are_tried_where_a_node_has_fewer_ranks_than_divide_experts() -> None:
    job = PlanJob(shape=SHAPE, seq_len=2048, global_batch=4096, cluster=parse_cluster("h100:2048"))
    config = changed(BASE, {"mesh.dp_shard": 2048, "mesh.ep": 64})
    assert {placed["mesh.dp_shard"] for placed in placements(job, SearchSpace(), config)} == {64, 256, 2048}


def test_a_stage_of_dense_layers_alone_holds_what_it_does_where_nothing_divides_experts() -> None:
    shape = replace(SHAPE, num_layers=8, experts=replace(EXPERTS, num_dense_layers=5))
    job = PlanJob(shape=shape, seq_len=2048, global_batch=256, cluster=FAST)
    layouts, one = FoldedLayouts(job), changed(BASE, {"mesh.pp": 2, "mesh.dp_shard": 32, "zero.stage": 1})
    split = changed(one, {"mesh.ep": 8})
    assert layouts.at_rest(split, 0) == layouts.at_rest(one, 0)
    assert sum(layouts.at_rest(split, 1).values()) < sum(layouts.at_rest(one, 1).values())


@pytest.mark.parametrize("tp", [1, 2])
def test_the_least_states_are_those_of_dense_and_of_divided_parameters(tp: int) -> None:
    job = PlanJob(shape=SHAPE, seq_len=2048, global_batch=256, cluster=FAST)
    config = changed(BASE, {"mesh.dp_shard": 64 // tp, "mesh.tp": tp, "mesh.ep": 8, "zero.stage": 2})
    held = FoldedLayouts(job).at_rest(config)
    assert 0.4 * sum(held.values()) < least_states_bytes(job, config) <= 1.001 * sum(held.values())


def test_what_is_written_divides_the_experts_too() -> None:
    model = Config().override(['model.path="mixture"'])
    job = PlanJob(shape=SHAPE, seq_len=2048, global_batch=256, cluster=FAST, base=base_of(model))
    config = changed(job.base, {"mesh.dp_shard": 64, "mesh.ep": 8, "batch.micro_size": 4})
    assert written(job, config).resolve(world_size=64).mesh.ep == 8


@pytest.mark.parametrize(
    "mesh", [{"dp_shard": 4}, {"dp_shard": 4, "ep": 4}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "tp": 2, "ep": 4}]
)
@pytest.mark.parametrize("stage", [2, 3])
def test_states_and_peak_are_nearly_the_engine_s_own(tmp_path: Path, mesh: dict[str, int], stage: int) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.MixtralConfig(
        hidden_size=256, intermediate_size=384, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=1000, max_position_embeddings=128, num_local_experts=8,
    ).save_pretrained(tmp_path)  # fmt: skip
    config = Config.from_dict(
        {
            "model": {"path": str(tmp_path)}, "mesh": mesh, "zero": {"stage": stage}, "run": {"device": "cpu"},
            "data": {"seq_len": 128}, "batch": {"micro_size": 8}, "precision": {"param": "bf16"},
        }
    )  # fmt: skip
    product = MatmulTime(dtype="bf16", m=1, n=1, k=1, seconds=1e-9)
    machine = Profile(device="cpu", num_ranks=4, num_threads=1, memory_bytes=1e10, matmuls=(product,))
    job = replace(job_of(config, cluster_of(machine)), usual_skew=1.0)  # as simulated ranks share tokens
    estimate, simulated = MemoryModel(job).estimate(config.resolve(4)), peak_of(config.model_dump_json(), 4, 0)
    states = ("params", "grads", "optimizer")
    assert sum(estimate.worst.peak[name] for name in states) == pytest.approx(
        sum(simulated[name] for name in states), rel=0.02
    )
    assert estimate.worst.peak_bytes == pytest.approx(sum(simulated.values()), rel=0.25)
