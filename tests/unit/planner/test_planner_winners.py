"""What a search with the real prices recommends: it can be trained, it holds what was said, and nothing beats it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise import simulate
from shardwise.config.resolve import Config, ResolvedConfig
from shardwise.config.toml_text import to_toml
from shardwise.models import Decoder, DecoderConfig, lm_loss
from shardwise.models.presets import preset
from shardwise.models.shape import ModelShape
from shardwise.planner.candidates import SearchSpace, candidates, placements
from shardwise.planner.hardware import Cluster, GpuSpec, find_gpu
from shardwise.planner.job import PlanJob, changed, world_size
from shardwise.planner.request import ALWAYS_WRITTEN, split_as, written
from shardwise.planner.results import Estimate, missing_memory
from shardwise.planner.search import Limits, Pricer, search
from shardwise.train.setup import check_job

SMALL = DecoderConfig(
    vocab_size=1024, num_layers=4, hidden_size=256, num_heads=8, num_kv_heads=4, head_dim=32, ffn_size=704,
    max_seq_len=256,
)  # fmt: skip
SEQ_LEN = 256
# A simpler layout may win over one that is faster by less.
AS_GOOD = 1.02
MIB = 2**20


def small_job(num_gpus: int, global_batch: int, memory_mib: float, name: str = "cpu") -> PlanJob:
    """On processes of a CPU, which hold tensors alone, or on a GPU with less memory than it has."""
    gpu = GpuSpec(name=name, memory_bytes=1.0, memory_bytes_per_s=3e12, peak_flops_per_s={"bf16": 1e15})
    gpu = gpu if name == "cpu" else find_gpu(name)
    gpu = replace(gpu, memory_bytes=memory_mib * MIB)
    cluster = Cluster(gpu=gpu, num_gpus=num_gpus, gpus_per_node=min(num_gpus, 4), nic_bytes_per_s=50e9)
    return PlanJob(
        shape=ModelShape.of_decoder(SMALL, name="small"), seq_len=SEQ_LEN, global_batch=global_batch, cluster=cluster
    )


def large_job(name: str, gpu: str, num_gpus: int, global_batch: int, seq_len: int) -> PlanJob:
    device = find_gpu(gpu)
    cluster = Cluster(gpu=device, num_gpus=num_gpus, gpus_per_node=8, nic_bytes_per_s=device.nic_bytes_per_s)
    return PlanJob(
        shape=ModelShape.of_decoder(preset(name), name=name),
        seq_len=seq_len,
        global_batch=global_batch,
        cluster=cluster,
    )


LARGE = [
    large_job("llama-7b", "a100", 8, 64, 4096),
    large_job("llama-3-8b", "h100", 8, 64, 8192),
    large_job("llama-3-70b", "h100", 64, 256, 8192),
    large_job("llama-405b", "h100", 1024, 512, 8192),
]
SMALL_JOBS = [
    small_job(1, 8, 1000.0),
    small_job(1, 8, 160.0),
    small_job(2, 8, 200.0),
    small_job(4, 8, 90.0),
    small_job(4, 16, 70.0),
    small_job(8, 16, 60.0),
]


def first_two(job: PlanJob, space: SearchSpace | None = None) -> Iterator[Estimate]:
    """The winner and the first that loses."""
    plan = search(job, space, Limits(num_best=2, max_prices=100))
    assert plan.winner is not None
    yield plan.winner
    yield from plan.runners_up[:1]


def words(job: PlanJob) -> str:
    cluster = job.cluster
    return f"{job.shape.name} on {cluster.num_gpus} x {cluster.gpu.memory_bytes / 2**30:.2f} GiB"


@pytest.mark.quick(3)
@pytest.mark.parametrize("job", [*LARGE, *SMALL_JOBS], ids=words)
def test_what_wins_and_what_loses_can_be_trained_by_their_files(job: PlanJob) -> None:
    pins = {"mesh.tp": (8,), "mesh.cp": (1,), "mesh.pp": (8, 16)} if job.cluster.num_gpus > 64 else {}
    for price in first_two(job, SearchSpace(pins=pins)):
        config = Config.from_dict(tomllib.loads(to_toml(written(job, price.config), ALWAYS_WRITTEN)))
        assert config == written(job, price.config)
        assert split_as(job.base, config.resolve(job.cluster.num_gpus)) == price.config
        resolved, layout = check_job(config, job.cluster.num_gpus)
        assert resolved.batch.global_size == job.global_batch
        assert layout.mesh.world_size == job.cluster.num_gpus
        assert price.margin_bytes > 0


@pytest.mark.quick(2)
@pytest.mark.parametrize("job", SMALL_JOBS, ids=words)
def test_the_engine_holds_what_the_winner_was_said_to_hold(job: PlanJob) -> None:
    for price in first_two(job, SearchSpace(offloads=False)):
        for rank in {0, price.config.mesh.pp - 1}:
            said, simulation = price.memory.ranks[rank], simulated(job, price.config, rank)
            assert dict(said.at_rest) == simulation.states_bytes
            assert said.peak_bytes == pytest.approx(simulation.peak.peak_bytes, rel=0.25)


def simulated(job: PlanJob, config: ResolvedConfig, pipeline_rank: int) -> Any:
    """The engine itself, over tensors without memory."""
    tokens = torch.zeros(config.batch.micro_size, job.seq_len, dtype=torch.int64)
    return simulate(
        lambda: Decoder(SMALL),
        written(job, config).override(["run.device=cpu"]),
        lambda: (tokens, tokens),
        rank=pipeline_rank * world_size(config) // config.mesh.pp,
        world_size=world_size(config),
        loss_fn=lambda logits, batch: lm_loss(logits, batch[1]),
    )


MEDIUM = ModelShape(
    num_layers=6,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    ffn_size=8192,
    vocab_size=32_000,
    name="medium",
)
USUAL: dict[str, tuple[Any, ...]] = {
    "pipeline.schedule": ("1f1b",),
    "recompute.mode": ("none", "full"),
    "recompute.every": (1,),
}


def medium_job(num_gpus: int, global_batch: int, memory_gib: float) -> PlanJob:
    job = replace(small_job(num_gpus, global_batch, 1024 * memory_gib, "h100"), shape=MEDIUM)
    return replace(job, seq_len=4096)


@pytest.mark.parametrize(
    ("job", "pins"),
    [
        (medium_job(1, 8, 80.0), {}),
        (medium_job(1, 8, 14.0), {}),
        (medium_job(2, 4, 12.0), {}),
        (medium_job(4, 4, 9.0), {"mesh.cp": (1,), "pipeline.schedule": ("1f1b", "zb-h1")}),
        (medium_job(4, 8, 7.0), USUAL),
        (medium_job(8, 16, 20.0), {**USUAL, "context.transport": ("ring",), "context.heads_over": (None,)}),
        (small_job(2, 4, 80_000.0, "h100"), {}),  # kernels are shorter than their launches
    ],
)
def test_nothing_beats_the_winner_by_real_prices(job: PlanJob, pins: dict[str, tuple[Any, ...]]) -> None:
    space, limits, pricer = SearchSpace(pins=pins, offloads=False), Limits(num_best=2, max_prices=100_000), Pricer(job)
    every = [
        changed(candidate, placement)
        for candidate in candidates(job, space)
        for placement in placements(job, space, candidate)
    ]
    fitting = [
        each for each in every if missing_memory(pricer.memory.estimate(each), job.cluster, limits.margin_share) is None
    ]
    fastest_s = min(pricer.time.estimate(each).step_s for each in fitting)
    plan = search(job, space, limits, pricer)
    assert plan.is_proven
    assert plan.winner is not None
    assert plan.winner.config in fitting
    assert plan.winner.time.step_s == pytest.approx(pricer.time.estimate(plan.winner.config).step_s)
    assert plan.winner.time.step_s <= AS_GOOD * fastest_s
