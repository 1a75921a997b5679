"""What is said to make a job fit does make it fit, and nothing less of the same does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.config.resolve import ResolvedConfig
from shardwise.models.presets import preset
from shardwise.planner.candidates import SearchSpace, candidates, placements
from shardwise.planner.explain import lacks, more_gpus, smallest_change, suggest, why_yours
from shardwise.planner.hardware import Cluster, Host, find_gpu, parse_cluster
from shardwise.planner.job import BASE, ModelShape, PlanJob, changed
from shardwise.planner.pricer import Pricer
from shardwise.planner.results import (
    Estimate,
    MemoryEstimate,
    RankMemory,
    TimeEstimate,
    missing_memory,
    missing_on_node,
)
from shardwise.planner.search import search

GIB = 2**30
DESKTOP = replace(parse_cluster("rtx-4090:1"), host=Host(memory_bytes=128 * GIB))


def job_of(name: str, cluster: Cluster, global_batch: int = 8, seq_len: int = 4096) -> PlanJob:
    shape = ModelShape.of_decoder(preset(name), name)
    return PlanJob(shape=shape, seq_len=seq_len, global_batch=global_batch, cluster=cluster)


class Made:
    """Prices with 60 GiB that always are there, 30 of activations, 20 of the optimizer, 1 that stage 3 shares."""

    @property
    def memory(self) -> Made:
        return self

    @property
    def time(self) -> Times:
        return Times()

    def estimate(self, s: ResolvedConfig, *, too_much_bytes: float = 0.0) -> MemoryEstimate:
        size = 60 + 30 * (s.recompute.mode != "full") + 20 * (s.tiers.optimizer == "device") + (s.zero.stage < 3)
        return MemoryEstimate(ranks=(RankMemory(pipeline_rank=0, at_rest={}, peak={"params": size * GIB}),))


class Times:
    def estimate(self, s: ResolvedConfig, *, is_quick: bool = False) -> TimeEstimate:
        return TimeEstimate(step_s=1.0, low_s=1.0, high_s=1.0, parts={})


def test_no_more_is_changed_than_must_be() -> None:
    gpu = replace(find_gpu("h100"), memory_bytes=80 * GIB)
    job = job_of("llama-3-8b", replace(parse_cluster("h100:8"), gpu=gpu))
    config = changed(BASE, {"mesh.dp_shard": 8, "zero.stage": 1})
    change = smallest_change(job, config, Made(), 0.06)
    assert change is not None
    assert change.words == "recompute.mode=full tiers.optimizer=host"
    # 61 GiB with both: with less than that nothing does.
    assert smallest_change(job, config, Made(), 0.26) is None


def test_more_gpus_fill_the_node_first() -> None:
    alone = job_of("llama-7b", replace(parse_cluster("a100-80:1"), host=Host(memory_bytes=0.0)), global_batch=1)
    # 113 GiB of states and little else.
    assert more_gpus(alone, changed(BASE, {"recompute.mode": "full"}), 0.06) == 2
    # Eight devices share one host: two hosts of 128 GiB have enough, one has not.
    job = job_of("llama-13b", DESKTOP, global_batch=1)
    away = changed(
        BASE,
        {
            "zero.stage": 3,
            "recompute.mode": "full",
            "tiers.params": "host",
            "tiers.grads": "host",
            "tiers.optimizer": "host",
        },
    )
    assert more_gpus(job, away, 0.06) == 16


def test_each_fix_is_said_with_what_makes_it_so() -> None:
    job = job_of("llama-13b", DESKTOP)
    found = search(job)
    assert found.winner is None
    assert found.nearest is not None
    price, missing = found.nearest
    held = price.memory.worst.elsewhere["host"]
    assert missing.tier == "host"
    said = list(suggest(price, missing, Pricer(job), 0.06))
    assert f"host memory of {held / GIB:.0f} GiB a node would fit (host_memory_gib in the cluster's file)" in said
    assert any("adapters beside weights in 4 bits (lora.rank=16 lora.base=nf4" in each for each in said)
    # What is said of the host holds.
    roomy = replace(job, cluster=replace(DESKTOP, host=Host(memory_bytes=held)))
    assert search(roomy).winner is not None


def test_a_host_that_holds_not_all_may_hold_enough() -> None:
    job = job_of("llama-7b", replace(DESKTOP, host=Host(memory_bytes=110 * GIB)))
    winner = search(job).winner
    assert winner is not None
    assert winner.config.tiers.params == "device"
    assert winner.memory.worst.elsewhere["host"] <= 110 * GIB


def test_what_lacks_in_both_memories_counts_twice() -> None:
    ranks = (RankMemory(pipeline_rank=0, at_rest={}, peak={"params": 30.0 * GIB}, elsewhere={"host": 130.0 * GIB}),)
    memory = MemoryEstimate(ranks=ranks)
    cluster = replace(DESKTOP, gpu=replace(DESKTOP.gpu, memory_bytes=20 * GIB))
    assert missing_on_node(memory, cluster, 0.0) == 12 * GIB
    missing = missing_memory(memory, cluster, 0.0)
    assert missing is not None
    assert missing.missing_bytes == 10 * GIB


@pytest.mark.parametrize("away", ["tiers.optimizer", "tiers.grads", "tiers.params"])
def test_one_rank_has_one_stage_for_each_way_to_store(away: str) -> None:
    job = job_of("llama-7b", DESKTOP)
    space = SearchSpace(offloads=True)
    candidate = next(each for each in candidates(job, space) if each.recompute.mode == "full")
    placed = [changed(candidate, each) for each in placements(job, space, candidate) if each[away] == "host"]
    found = [(each.tiers, each.pipeline.gather) for each in placed]
    assert found
    assert len(set(found)) == len(found)


def test_your_own_layout_has_a_fix_and_no_pipeline_rank_without_a_pipeline() -> None:
    job = job_of("llama-7b", parse_cluster("a100-40:8"))
    pricer = Pricer(job)
    yours: Estimate = pricer.price(changed(BASE, {"mesh.dp_shard": 8, "zero.stage": 2}))
    said = why_yours(yours, None, pricer, 0.06)
    assert said.startswith("out of memory by ")
    assert "pipeline rank" not in said
    assert " would fit, at " in said
    split = pricer.price(changed(BASE, {"mesh.pp": 2, "mesh.dp_shard": 4, "batch.accumulation": 2}))
    missing = missing_memory(split.memory, job.cluster, 0.06)
    assert missing is not None
    assert "on pipeline rank 0: " in lacks(split, missing)
    fits = pricer.price(changed(BASE, {"mesh.dp_shard": 8, "zero.stage": 3, "recompute.mode": "full"}))
    assert why_yours(fits, None, pricer, 0.06).startswith("fits, ")


def test_where_a_config_would_do_no_one_trains_adapters() -> None:
    job = job_of("llama-7b", parse_cluster("a100-40:8"))
    pricer = Pricer(job)
    price = pricer.price(changed(BASE, {"mesh.dp_shard": 8, "zero.stage": 2}))
    missing = missing_memory(price.memory, job.cluster, 0.06)
    assert missing is not None
    said = list(suggest(price, missing, pricer, 0.06))
    assert " would fit, at " in said[0]
    assert said[1].endswith(" GPUs would fit it, with a batch in proportion")
    assert not any("LoRA" in each for each in said)
