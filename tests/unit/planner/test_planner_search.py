"""The search against pricing everything, on spaces small enough for that."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.config.resolve import ResolvedConfig
from shardwise.models.shape import ExpertsShape, ModelShape
from shardwise.planner.candidates import (
    SearchSpace,
    candidates,
    is_legal,
    placements,
)
from shardwise.planner.hardware import Cluster, find_gpu, parse_cluster
from shardwise.planner.job import BASE, PlanJob, changed, world_size
from shardwise.planner.memory import MemoryModel
from shardwise.planner.request import split_as, written
from shardwise.planner.results import (
    Estimate,
    MemoryEstimate,
    RankMemory,
    TimeEstimate,
    missing_memory,
    num_extras,
    simplest,
)
from shardwise.planner.search import (
    Limits,
    Pricer,
    kind_of,
    least_states_bytes,
    search,
)
from shardwise.planner.step_time import TimeModel
from shardwise.schedule.formulas import least_bubble_share
from shardwise.schedule.pipelines import RECIPES
from shardwise.schedule.simulate import OpTimes, PipelineSimulator
from shardwise.train.setup import check_job

SHAPE = ModelShape(
    num_layers=6, hidden_size=1024, num_heads=8, num_kv_heads=4, head_dim=128, ffn_size=4096, vocab_size=32_000,
    name="small",
)  # fmt: skip
FAR = {"device": 0, "host": 1, "nvme": 2}


def job_of(num_gpus: int, global_batch: int, memory_gib: float, shape: ModelShape = SHAPE) -> PlanJob:
    gpu = replace(find_gpu("h100"), memory_bytes=memory_gib * 2**30)
    cluster = Cluster(gpu=gpu, num_gpus=num_gpus, gpus_per_node=4, nic_bytes_per_s=50e9)
    return PlanJob(shape=shape, seq_len=2048, global_batch=global_batch, cluster=cluster)


@dataclass(frozen=True)
class FakeMemory:
    """Grows with what is kept, and shrinks with what is shared."""

    job: PlanJob
    scale: float

    def estimate(self, s: ResolvedConfig, *, too_much_bytes: float = 0.0) -> MemoryEstimate:
        numel = self.job.shape.num_params / (s.mesh.tp * s.mesh.pp)
        shards = s.mesh.dp_shard * s.mesh.cp
        sizes = {
            "params": (2 * numel, 3, s.tiers.params),
            "grads": (4 * numel, 2, s.tiers.grads),
            "optimizer": (12 * numel, 1, s.tiers.optimizer),
        }
        peak: dict[str, float] = {}
        elsewhere: dict[str, float] = {}
        for name, (size, stage, tier) in sizes.items():
            held = size / (shards if s.zero.stage >= stage else 1)
            where = peak if tier == "device" else elsewhere
            where[name if tier == "device" else tier] = where.get(tier, 0.0) + held
        kept = {"none": 34.0, "selective": 24.0, "full": 2 + 32 * (1 - 1 / s.recompute.every)}[s.recompute.mode]
        tokens = self.job.seq_len * s.batch.micro_size / s.mesh.cp / (s.mesh.tp if s.tensor.sequence_parallel else 1)
        layers = self.job.shape.num_layers / s.mesh.pp * min(s.mesh.pp, s.batch.accumulation)
        factor = 0.1 if s.tiers.activations == "host" else 1.0
        peak["activations"] = self.scale * factor * kept * tokens * layers * self.job.shape.hidden_size
        return MemoryEstimate(
            ranks=(RankMemory(pipeline_rank=0, at_rest={}, peak=peak, elsewhere=elsewhere),)  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class FakeTime:
    """Parts that differ from candidate to candidate as they do in truth, by numbers drawn once."""

    job: PlanJob
    weights: Mapping[str, float]

    def busy_s(self, s: ResolvedConfig) -> float:
        inner = ("compute", "recompute", "tensor", "context")
        return sum(seconds for part, seconds in self.estimate(s).parts.items() if part in inner)

    def stages_s(self, s: ResolvedConfig) -> float:
        return sum(seconds for part, seconds in self.estimate(s).parts.items() if part not in ("data", "offload"))

    def estimate(self, s: ResolvedConfig, *, is_quick: bool = False) -> TimeEstimate:
        w = self.weights
        compute = 1.0 + w["small"] / (s.batch.micro_size * s.mesh.cp**-1) + w["split"] * (s.mesh.tp - 1)
        again = {"none": 0.0, "selective": 0.05, "full": 0.33 / s.recompute.every}[s.recompute.mode] * compute
        tensor = w["tensor"] * (s.mesh.tp - 1) * (1.0 if s.tensor.sequence_parallel else 1.1)
        context = w["context"] * (s.mesh.cp - 1) * {"ring": 1.0, "all-gather": 1.2, "ulysses": 0.9}[s.context.transport]
        inner = compute + again + tensor + context
        share = least_bubble_share(s.pipeline.schedule, s.mesh.pp, s.batch.accumulation, s.pipeline.virtual_stages)
        bubble = inner * share + (w["transfer"] * (s.mesh.pp * s.pipeline.virtual_stages - 1))
        data = w["data"] * (s.zero.stage == 3) * s.batch.accumulation + w["shards"] * s.mesh.dp_shard
        offload = w["offload"] * sum(FAR[t] for t in (s.tiers.params, s.tiers.grads, s.tiers.optimizer))
        offload += w["offload"] * FAR[s.tiers.activations]
        parts = {
            "compute": compute,
            "recompute": again,
            "tensor": tensor,
            "context": context,
            "bubble": bubble,
            "data": data,
            "offload": offload,
        }
        step_s = sum(parts.values())
        return TimeEstimate(step_s=step_s, low_s=step_s, high_s=step_s, parts=parts)


class FakePricer(Pricer):
    def __init__(self, memory: FakeMemory, time: FakeTime | Delayed) -> None:
        self.job, self.margin_share = memory.job, Limits().margin_share
        self.memory, self.time = memory, time  # type: ignore[assignment]


def fake_pricer(job: PlanJob, seed: int) -> FakePricer:
    drawn = random.Random(seed)
    names = ("small", "split", "tensor", "context", "transfer", "data", "shards", "offload")
    weights = {name: drawn.choice([0.0, 0.001, 0.01, 0.1]) * drawn.random() for name in names}
    # Never less than what the search knows that every block keeps.
    return FakePricer(FakeMemory(job, drawn.choice([1.0, 2.0, 4.0])), FakeTime(job, weights))


def brute_force(job: PlanJob, pricer: FakePricer, space: SearchSpace, margin_share: float) -> Estimate | None:
    found = []
    for candidate in candidates(job, space):
        for placement in placements(job, space, candidate):
            config = changed(candidate, placement)
            memory = pricer.memory.estimate(config)
            if missing_memory(memory, job.cluster, margin_share) is None:
                time = pricer.time.estimate(config)
                found.append(Estimate(job=job, config=config, memory=memory, time=time))
    return simplest(found) if found else None


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.sampled_from([(1, 1), (1, 6), (2, 1), (2, 2), (2, 6), (6, 1)]),
    memory_gib=st.sampled_from([0.5, 1.0, 2.0, 4.0, 16.0]),
    seed=st.integers(0, 1000),
)
def test_the_best_is_found(sizes: tuple[int, int], memory_gib: float, seed: int) -> None:
    check_best(*sizes, memory_gib, seed)


@pytest.mark.parametrize(("num_gpus", "batches", "memory_gib"), [(4, 2, 2.0), (12, 1, 1.0)])
def test_the_best_is_found_among_many(num_gpus: int, batches: int, memory_gib: float) -> None:
    check_best(num_gpus, batches, memory_gib, seed=5)


def check_best(num_gpus: int, batches: int, memory_gib: float, seed: int) -> None:
    job = job_of(num_gpus, num_gpus * batches, memory_gib)
    pricer = fake_pricer(job, seed)
    space, limits = SearchSpace(), Limits(num_best=3, max_prices=100_000)
    expected = brute_force(job, pricer, space, limits.margin_share)
    plan = search(job, space, limits, pricer)
    assert plan.is_proven
    if expected is None:
        assert plan.winner is None
        assert plan.nearest is not None
    else:
        assert plan.winner is not None
        assert num_extras(plan.winner.config) == num_extras(expected.config)
        # Of equally simple ones at the edge of a tie, either may be the winner.
        assert plan.winner.time.step_s == pytest.approx(expected.time.step_s, rel=0.002)
        others = [each.time.step_s for each in plan.best[1:]]
        assert others == sorted(others)
        assert len({each.config for each in plan.best}) == len(plan.best)
        kinds = [kind_of(each.config) for each in (plan.best[0], *plan.runners_up)]
        assert len(set(kinds)) == len(kinds)
    assert plan.num_priced <= 100_000


def test_fewer_prices_than_placed_candidates_find_it_too() -> None:
    job = job_of(8, 48, 2.0)
    pricer = fake_pricer(job, 7)
    plan = search(job, limits=Limits(num_best=1, max_prices=10**6), pricer=pricer)
    space = SearchSpace()
    every = [placement for candidate in candidates(job, space) for placement in placements(job, space, candidate)]
    assert plan.num_priced < len(every) / 5


@pytest.mark.quick(8)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("max_prices", [20, 200, 1000])
def test_what_was_not_looked_at_is_no_faster_than_is_said(seed: int, max_prices: int) -> None:
    job = job_of(8, 48, 2.0)
    cut = search(job, limits=Limits(num_best=2, max_prices=max_prices), pricer=fake_pricer(job, seed))
    whole = search(job, limits=Limits(num_best=2, max_prices=10**6), pricer=fake_pricer(job, seed))
    assert cut.winner is not None
    assert whole.winner is not None
    assert whole.is_proven
    fastest_s = min(each.time.step_s for each in whole.best)
    assert fastest_s >= cut.winner.time.step_s * (1 - cut.gap_share) * (1 - 0.02 - 1e-9)  # simpler ones may win by 2 %
    assert cut.is_proven or cut.rejected["not looked at"] + cut.num_fitting > 0


@pytest.mark.parametrize("memory_gib", [0.2, 1.0, 2.0, 16.0])
@pytest.mark.parametrize("max_prices", [20, 200, 10**6])
def test_each_candidate_is_counted_once(memory_gib: float, max_prices: int) -> None:
    job = job_of(8, 48, memory_gib)
    plan = search(job, limits=Limits(max_prices=max_prices), pricer=fake_pricer(job, 7))
    assert plan.num_candidates == len(list(candidates(job, SearchSpace())))
    assert plan.num_fitting + sum(plan.rejected.values()) == plan.num_candidates
    assert (plan.num_fitting > 0) == bool(plan.best)


def test_what_fits_only_with_its_activations_away_is_found() -> None:
    """Without recomputation no activations move: the leanest layout is none of those that are looked at first."""
    experts = ExpertsShape(num_experts=128, num_chosen=8, ffn_size=1536)
    sizes = {"num_layers": 94, "hidden_size": 4096, "num_heads": 64, "num_kv_heads": 4, "head_dim": 128}
    shape = ModelShape(**sizes, ffn_size=12_288, vocab_size=151_936, experts=experts)
    job = PlanJob(shape=shape, seq_len=40_960, global_batch=64, cluster=parse_cluster("h100:64"))
    winner = search(job, SearchSpace(pins={"mesh.cp": (1,), "mesh.tp": (1,), "mesh.pp": (1,)})).winner
    assert winner is not None
    assert winner.config.tiers.activations == "host"
    assert missing_memory(winner.memory, job.cluster, 0.06) is None


def test_twice_the_same() -> None:
    job = job_of(8, 16, 2.0)
    one, other = (search(job, pricer=fake_pricer(job, 3)) for _ in range(2))
    assert [each.config for each in one.best] == [each.config for each in other.best]
    assert one.rejected == other.rejected


def test_pins_hold() -> None:
    job = job_of(8, 16, 16.0)
    pins: dict[str, tuple[Any, ...]] = {"mesh.tp": (2,), "zero.stage": (3,), "recompute.mode": ("full",)}
    plan = search(
        job, SearchSpace(pins={**pins, "mesh.pp": (2,), "pipeline.schedule": ("gpipe",)}), pricer=fake_pricer(job, 3)
    )
    assert plan.best
    for price in plan.best:
        assert (price.config.mesh.tp, price.config.mesh.pp, price.config.pipeline.schedule) == (2, 2, "gpipe")
        assert (price.config.zero.stage, price.config.recompute.mode) == (3, "full")
    with refused("no-layout", "8 GPUs"):
        search(job, SearchSpace(pins={"mesh.tp": (3,)}), pricer=fake_pricer(job, 3))


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 6])
def test_all_that_is_written_can_be_trained(num_gpus: int) -> None:
    job = job_of(num_gpus, 2 * num_gpus, 2.0)
    drawn = random.Random(num_gpus)
    space = SearchSpace(offloads=True)
    every = list(candidates(job, space))
    assert len(every) == len(set(every))
    for candidate in drawn.sample(every, min(len(every), 25)):
        options = [changed(candidate, placement) for placement in placements(job, space, candidate)]
        assert len(options) == len(set(options))
        config = drawn.choice(options)
        assert world_size(config) == num_gpus
        assert config.batch.global_size == job.global_batch
        assert is_legal(job, config)
        assert split_as(job.base, written(job, config).resolve(num_gpus)) == config
        check_job(written(job, config), num_gpus)


@pytest.mark.parametrize("hidden_size", [64, 4096])
def test_no_candidate_takes_less_than_its_bound(hidden_size: int) -> None:
    """Neither where kernels are long nor where launching them takes longer than they do."""
    job = job_of(8, 16, 80.0, replace(SHAPE, hidden_size=hidden_size, ffn_size=4 * hidden_size))
    model, space, drawn = TimeModel(job), SearchSpace(offloads=False), random.Random(hidden_size)
    for candidate in drawn.sample(list(candidates(job, space)), 60):
        config = changed(candidate, drawn.choice([*placements(job, space, candidate)] or [{}]))
        least_s = model.busy_s(changed(config, {"zero.stage": 3}))
        pipeline = (config.pipeline.schedule, config.mesh.pp, config.batch.accumulation)
        step_s = model.estimate(config, is_quick=True).step_s
        assert least_s * (1 + least_bubble_share(*pipeline, config.pipeline.virtual_stages)) <= step_s * (1 + 1e-9), (
            config
        )


@given(
    st.sampled_from([("interleaved", 4), *((name, recipe.min_virtual_stages) for name, recipe in RECIPES.items())]),
    st.integers(2, 6),
    st.integers(1, 14),
    st.floats(1.0, 2.5),
    st.floats(0.5, 1.0),
)
def test_no_schedule_waits_less_than_its_bound(
    schedule: tuple[str, int], pp: int, num_micro_batches: int, backward_s: float, weight_s: float
) -> None:
    name, virtual_stages = schedule
    stage = OpTimes(forward_s=1.0, backward_input_s=backward_s, backward_weight_s=weight_s)
    stages = [stage] * (pp * virtual_stages)
    span = PipelineSimulator().span(name, pp, virtual_stages, num_micro_batches, stages)
    share = least_bubble_share(name, pp, num_micro_batches, virtual_stages)
    assert span.step_s >= (1 + share) * span.busy_s[0] * (1 - 1e-9)


def test_what_the_engine_refuses_is_not_legal() -> None:
    job = job_of(8, 16, 2.0)
    legal = changed(
        BASE,
        {"mesh.tp": 2, "mesh.dp_shard": 4, "zero.stage": 3, "batch.accumulation": 4, "tensor.sequence_parallel": True},
    )
    assert is_legal(job, legal)
    assert is_legal(job, changed(legal, {"tiers.activations": "host", "recompute.mode": "selective"}))
    for changes in (
        {"mesh.tp": 1},
        {"batch.accumulation": 3},
        {"zero.stage": 2, "tiers.params": "host"},
        {"tiers.activations": "host"},
        {"context.transport": "ulysses"},
        {"pipeline.virtual_stages": 2},
    ):
        assert not is_legal(job, changed(legal, changes)), changes


def test_as_much_stays_on_the_device_as_fits_and_helps() -> None:
    job = job_of(1, 4, 5.0)
    pins = {"tiers.optimizer": ("host",), "tiers.grads": ("device",), "tiers.params": ("device",)}
    pricer = Pricer(job)
    winner = search(
        job, SearchSpace(pins={**pins, "recompute.mode": ("none",), "batch.micro_size": (1,)}), pricer=pricer
    ).winner
    assert winner is not None
    share = winner.config.tiers.optimizer_on_device
    assert 0 < share < 1
    assert written(job, winner.config).tiers.optimizer_on_device == share
    less, more = (
        pricer.price(changed(winner.config, {"tiers.optimizer_on_device": each})) for each in (0.0, share + 0.05)
    )
    assert winner.time.step_s < less.time.step_s
    assert sum(winner.memory.worst.elsewhere.values()) < sum(less.memory.worst.elsewhere.values())
    assert missing_memory(more.memory, job.cluster, Limits().margin_share) is not None


@dataclass(frozen=True)
class Delayed:
    """Closed forms promise what no pipeline keeps: each takes an hour longer, once its schedule is simulated."""

    times: FakeTime
    simulated: list[ResolvedConfig]

    def busy_s(self, s: ResolvedConfig) -> float:
        return self.times.busy_s(s)

    def stages_s(self, s: ResolvedConfig) -> float:
        return self.times.stages_s(s)

    def estimate(self, s: ResolvedConfig, *, is_quick: bool = False) -> TimeEstimate:
        time = self.times.estimate(s)
        if is_quick or s.mesh.pp == 1:
            return time
        self.simulated.append(s)
        return replace(time, step_s=time.step_s + 3600)


def test_so_many_schedules_are_simulated_at_most_and_no_others_are_shown() -> None:
    job, num_best = job_of(8, 48, 80.0), 3
    pricer = fake_pricer(job, 7)
    delayed = Delayed(pricer.time, [])
    space, limits = SearchSpace(pins={"mesh.pp": (2, 4), "recompute.mode": ("none",)}), Limits(num_best=num_best)
    plan = search(job, space, limits, FakePricer(pricer.memory, delayed))
    assert 5 * num_best <= len(delayed.simulated) == len(set(delayed.simulated)) <= 10 * num_best
    assert len(plan.best) == num_best
    assert all(price.time.step_s > 3600 for price in (*plan.best, *plan.runners_up))
    alone = Delayed(pricer.time, [])
    few = search(job, SearchSpace(pins={"mesh.pp": (1,)}), limits, FakePricer(pricer.memory, alone))
    assert few.best
    assert alone.simulated == []  # nothing waits for anything


def test_a_simpler_one_that_is_hardly_slower_is_looked_for_even_where_one_is_wanted() -> None:
    job = job_of(4, 8, 80.0)
    weights = dict.fromkeys(fake_pricer(job, 0).time.weights, 0.0) | {"split": -0.01}
    pricer = FakePricer(FakeMemory(job, 1.0), FakeTime(job, weights))
    pins = {"mesh.tp": (1, 2), "mesh.pp": (1,), "mesh.cp": (1,), "recompute.mode": ("none",), "batch.micro_size": (1,)}
    plan = search(job, SearchSpace(pins=pins), Limits(num_best=1), pricer)
    assert plan.winner is not None
    assert (plan.winner.config.mesh.tp, plan.winner.time.step_s) == (1, 1.0)


def test_what_a_candidate_is_known_to_hold_is_no_more_than_it_holds() -> None:
    shape = replace(SHAPE, num_layers=24, hidden_size=2048, num_heads=16, ffn_size=8192)
    job = replace(job_of(8, 16, 80.0, shape), seq_len=256)
    space, memory, drawn = SearchSpace(offloads=True), MemoryModel(job), random.Random(0)
    for candidate in drawn.sample(list(candidates(job, space)), 80):
        options = [changed(candidate, placement) for placement in placements(job, space, candidate)]
        for config in drawn.sample(options, min(3, len(options))):
            held = memory.estimate(config)
            assert least_states_bytes(job, config) <= held.worst.peak_bytes, config
