"""The memory of a plan's finalists is the engine's own, simulated in processes within a time; what follows from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.engine_memory import Sample, drawn, job_of
from shardwise.models.presets import preset
from shardwise.planner.job import changed, world_size
from shardwise.planner.request import written
from shardwise.planner.results import Estimate
from shardwise.planner.search import Pricer, SearchResult, search, settle
from shardwise.verify import finalists
from shardwise.verify.finalists import peak_of, simulate_finalists, with_peak


def error_of(sample: Sample) -> float:
    """Relative to the peak of all micro-batches, on the rank that the planner takes for the fullest."""
    shape = replace(sample.shape, head_dim=sample.shape.hidden_size // sample.shape.num_heads)  # as `train` can have it
    sample = replace(sample, shape=shape)
    config, job = sample.config, job_of(shape, sample.seq_len)
    job = replace(job, global_batch=config.batch.global_size)
    job = replace(job, cluster=replace(job.cluster, num_gpus=world_size(config), gpus_per_node=world_size(config)))
    worst = sample.estimated().worst.pipeline_rank
    config = written(job, config).override(["run.device=cuda"])
    found = peak_of(config.model_dump_json(), world_size(config), worst * world_size(config) // config.mesh.pp)
    return sum(found.values()) / sample.simulated(worst).peak.peak_bytes - 1


@pytest.mark.quick(1)
@pytest.mark.parametrize("sample", drawn(seed=27, num_samples=5), ids=range(5))
def test_the_peak_is_the_engines_own(sample: Sample) -> None:
    assert abs(error_of(sample)) <= 0.02


@pytest.mark.full
@pytest.mark.parametrize("seed", range(200, 220))
def test_the_peak_is_the_engines_own_in_a_hundred_jobs(seed: int) -> None:
    for sample in drawn(seed, 5):
        assert abs(error_of(sample)) <= 0.02, sample


@pytest.fixture(scope="module")
def plan() -> SearchResult:
    """A search on devices that the best layouts fill by more than a half."""
    job = replace(job_of(preset("tiny"), seq_len=64, device="gpu"), global_batch=64)
    fullest = max(each.memory.worst.peak_bytes for each in search(job).best[:2])
    gpu = replace(job.cluster.gpu, memory_bytes=1.2 * fullest)
    return search(replace(job, cluster=replace(job.cluster, gpu=gpu)))


@pytest.mark.full
def test_processes_settle_what_fills_a_device(plan: SearchResult) -> None:
    best = list(plan.best[:2])
    found = simulate_finalists(best, limit_s=200.0)
    assert all(each.memory.worst.is_simulated for each in found)
    config = written(plan.job, best[0].config).override(["run.device=cuda"])
    rank = best[0].memory.worst.pipeline_rank * 8 // best[0].config.mesh.pp
    peak = peak_of(config.model_dump_json(), 8, rank)
    around = best[0].memory.worst.bytes_of("overhead", "rounding")
    assert found[0].memory.worst.peak_bytes == pytest.approx(sum(peak.values()) + around)
    assert simulate_finalists(best, limit_s=0.0) == best
    assert simulate_finalists(best, limit_s=0.001) == best, "no process has begun by then"


def test_what_is_far_from_full_is_not_simulated(plan: SearchResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finalists.multiprocessing, "get_context", lambda kind: pytest.fail("a process was started"))
    gpu = replace(plan.job.cluster.gpu, memory_bytes=1e12)
    job = replace(plan.job, cluster=replace(plan.job.cluster, gpu=gpu))
    assert simulate_finalists([replace(plan.best[0], job=job)], limit_s=100.0)


def simulated(price: Estimate, peak_bytes: float) -> Estimate:
    around = price.memory.worst.bytes_of("overhead", "rounding")
    return with_peak(price, {"activations": peak_bytes - around})


def test_a_simulated_peak_decides_what_fits(plan: SearchResult) -> None:
    first, second, size = plan.best[0], plan.best[1], plan.job.cluster.gpu.memory_bytes
    kept = settle(plan, [simulated(first, 0.8 * size), second])
    assert kept.winner is not None
    assert kept.winner.config == first.config
    assert kept.winner.memory.worst.is_simulated
    left_out = settle(plan, [simulated(first, 1.1 * size), second])
    assert left_out.winner is not None
    assert first.config not in [each.config for each in (*left_out.best, *left_out.runners_up)]
    # What was estimated to miss by little, and does not, is faster than what fitted.
    near = replace(first, config=changed(first.config, {"batch.micro_size": 64}), time=replace(first.time, step_s=1e-9))
    missed = replace(plan, near_misses=(near,))
    assert settle(missed, [near]).winner == plan.winner
    found = settle(missed, [simulated(near, 0.5 * size)]).winner
    assert found is not None
    assert found.config == near.config
    nothing = settle(plan, [simulated(each, 2 * size) for each in (*plan.best, *plan.runners_up)])
    assert nothing.winner is None
    assert nothing.nearest is not None


def test_near_misses_are_faster_than_what_fits(plan: SearchResult) -> None:
    winner = plan.best[0]
    peak = winner.memory.worst.peak_bytes
    gpu = replace(plan.job.cluster.gpu, memory_bytes=0.99 * peak / (1 - plan.limits.margin_share))
    tight = replace(plan.job, cluster=replace(plan.job.cluster, gpu=gpu))
    found = search(tight, pricer=Pricer(tight))
    assert found.winner is None or found.winner.time.step_s >= winner.time.step_s
    for price in found.near_misses:
        over = price.memory.worst.peak_bytes - gpu.memory_bytes * (1 - plan.limits.margin_share)
        assert 0 < over <= 0.05 * gpu.memory_bytes
        assert found.winner is None or price.time.step_s < found.winner.time.step_s
