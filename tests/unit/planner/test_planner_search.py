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
from shardwise.models.presets import preset
from shardwise.planner.candidates import (
    PlacementCandidate,
    SearchSpace,
    candidates,
    is_legal,
    placements,
    strategy_at,
)
from shardwise.planner.configs import KEYS, config_of, strategy_of
from shardwise.planner.hardware import Cluster, find_gpu, parse_cluster
from shardwise.planner.job import Experts, ModelShape, PlanJob, Strategy
from shardwise.planner.memory import MemoryModel
from shardwise.planner.pricer import Pricer
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
    kind_of,
    least_states_bytes,
    runners_up,
    search,
)
from shardwise.planner.step_time import TimeModel
from shardwise.schedule.formulas import least_bubble_share
from shardwise.schedule.pipelines import RECIPES
from shardwise.schedule.simulate import OpTimes, PipelineSimulator
from shardwise.train.setup import check_job

SHAPE = ModelShape(
    num_layers=6,
    hidden_size=1024,
    num_heads=8,
    num_kv_heads=4,
    head_dim=128,
    ffn_size=4096,
    vocab_size=32_000,
    name="small",
)
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

    def estimate(self, s: Strategy, *, too_much_bytes: float = 0.0) -> MemoryEstimate:
        numel = self.job.shape.num_params / (s.tp * s.pp)
        shards = s.dp_shard * s.cp
        sizes = {
            "params": (2 * numel, 3, s.params_tier),
            "grads": (4 * numel, 2, s.grads_tier),
            "optimizer": (12 * numel, 1, s.optimizer_tier),
        }
        peak: dict[str, float] = {}
        elsewhere: dict[str, float] = {}
        for name, (size, stage, tier) in sizes.items():
            held = size / (shards if s.zero_stage >= stage else 1)
            where = peak if tier == "device" else elsewhere
            where[name if tier == "device" else tier] = where.get(tier, 0.0) + held
        kept = {"none": 34.0, "selective": 24.0, "full": 2 + 32 * (1 - 1 / s.recompute_every)}[s.recompute]
        tokens = self.job.seq_len * s.micro_size / s.cp / (s.tp if s.sequence_parallel else 1)
        layers = self.job.shape.num_layers / s.pp * min(s.pp, s.num_micro_batches)
        factor = 0.1 if s.activations_tier == "host" else 1.0
        peak["activations"] = self.scale * factor * kept * tokens * layers * self.job.shape.hidden_size
        return MemoryEstimate(
            ranks=(RankMemory(pipeline_rank=0, at_rest={}, peak=peak, elsewhere=elsewhere),)  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class FakeTime:
    """Parts that differ from strategy to strategy as they do in truth, by numbers drawn once."""

    job: PlanJob
    weights: Mapping[str, float]

    def busy_s(self, s: Strategy) -> float:
        inner = ("compute", "recompute", "tensor", "context")
        return sum(seconds for part, seconds in self.estimate(s).parts.items() if part in inner)

    def estimate(self, s: Strategy, *, is_quick: bool = False) -> TimeEstimate:
        w = self.weights
        compute = 1.0 + w["small"] / (s.micro_size * s.cp**-1) + w["split"] * (s.tp - 1)
        again = {"none": 0.0, "selective": 0.05, "full": 0.33 / s.recompute_every}[s.recompute] * compute
        tensor = w["tensor"] * (s.tp - 1) * (1.0 if s.sequence_parallel else 1.1)
        context = w["context"] * (s.cp - 1) * {"ring": 1.0, "all-gather": 1.2, "ulysses": 0.9}[s.transport]
        inner = compute + again + tensor + context
        share = least_bubble_share(s.schedule, s.pp, s.num_micro_batches, s.virtual_stages)
        bubble = inner * share + (w["transfer"] * (s.pp * s.virtual_stages - 1))
        data = w["data"] * (s.zero_stage == 3) * s.num_micro_batches + w["shards"] * s.dp_shard
        offload = w["offload"] * sum(FAR[t] for t in (s.params_tier, s.grads_tier, s.optimizer_tier))
        offload += w["offload"] * FAR[s.activations_tier]
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


@dataclass(frozen=True)
class FakePricer:
    memory: FakeMemory
    time: FakeTime


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
            strategy = strategy_at(candidate, placement, space.base)
            memory = pricer.memory.estimate(strategy)
            if missing_memory(memory, job.cluster, margin_share) is None:
                time = pricer.time.estimate(strategy)
                found.append(Estimate(job=job, strategy=strategy, memory=memory, time=time))
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
        assert num_extras(plan.winner.strategy) == num_extras(expected.strategy)
        # Of equally simple ones at the edge of a tie, either may be the winner.
        assert plan.winner.time.step_s == pytest.approx(expected.time.step_s, rel=0.002)
        others = [each.time.step_s for each in plan.best[1:]]
        assert others == sorted(others)
        assert len({each.strategy for each in plan.best}) == len(plan.best)
        kinds = [kind_of(each.strategy) for each in (plan.best[0], *plan.runners_up)]
        assert len(set(kinds)) == len(kinds)
    assert plan.num_priced <= 100_000


def test_fewer_prices_than_strategies_find_it_too() -> None:
    job = job_of(8, 48, 2.0)
    pricer = fake_pricer(job, 7)
    plan = search(job, limits=Limits(num_best=1, max_prices=10**6), pricer=pricer)
    num_strategies = sum(len(placements(job, SearchSpace(), candidate)) for candidate in candidates(job, SearchSpace()))
    assert plan.num_priced < num_strategies / 5


def test_prices_are_bounded_and_that_is_said() -> None:
    job = job_of(8, 48, 2.0)
    plan = search(job, limits=Limits(max_prices=20), pricer=fake_pricer(job, 7))
    assert not plan.is_proven
    assert plan.num_priced < 400
    assert plan.rejected["not looked at"] > 0


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
    experts = Experts(num_experts=128, num_chosen=8, ffn_size=1536)
    sizes = {"num_layers": 94, "hidden_size": 4096, "num_heads": 64, "num_kv_heads": 4, "head_dim": 128}
    shape = ModelShape(**sizes, ffn_size=12_288, vocab_size=151_936, experts=experts)
    job = PlanJob(shape=shape, seq_len=40_960, global_batch=64, cluster=parse_cluster("h100:64"))
    winner = search(job, SearchSpace(pins={"cp": (1,), "tp": (1,), "pp": (1,)})).winner
    assert winner is not None
    assert winner.strategy.activations_tier == "host"
    assert missing_memory(winner.memory, job.cluster, 0.06) is None


def test_twice_the_same() -> None:
    job = job_of(8, 16, 2.0)
    one, other = (search(job, pricer=fake_pricer(job, 3)) for _ in range(2))
    assert [each.strategy for each in one.best] == [each.strategy for each in other.best]
    assert one.rejected == other.rejected


def test_pins_hold() -> None:
    job = job_of(8, 16, 16.0)
    pins: dict[str, tuple[Any, ...]] = {"tp": (2,), "zero_stage": (3,), "recompute": ("full",), "schedule": ("gpipe",)}
    plan = search(job, SearchSpace(pins={**pins, "pp": (2,)}), pricer=fake_pricer(job, 3))
    assert plan.best
    for price in plan.best:
        assert (price.strategy.tp, price.strategy.pp, price.strategy.schedule) == (2, 2, "gpipe")
        assert (price.strategy.zero_stage, price.strategy.recompute) == (3, "full")
    with refused("no-layout", "8 GPUs"):
        search(job, SearchSpace(pins={"tp": (3,)}), pricer=fake_pricer(job, 3))
    with refused("key-not-planned", "tq"):
        SearchSpace(pins={"tq": (3,)})


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 6])
def test_all_that_is_written_can_be_trained(num_gpus: int) -> None:
    job = job_of(num_gpus, 2 * num_gpus, 2.0)
    drawn = random.Random(num_gpus)
    space = SearchSpace(offloads=True)
    every = list(candidates(job, space))
    assert len(every) == len(set(every))
    for candidate in drawn.sample(every, min(len(every), 25)):
        options = placements(job, space, candidate)
        assert len(options) == len(set(options))
        strategy = strategy_at(candidate, drawn.choice(options), space.base)
        assert strategy.num_ranks == num_gpus
        assert strategy.global_batch == job.global_batch
        assert is_legal(job, strategy)
        config = config_of(job, strategy)
        assert strategy_of(config, num_gpus) == strategy
        check_job(config, num_gpus)


@pytest.mark.parametrize("hidden_size", [64, 4096])
def test_no_candidate_takes_less_than_its_bound(hidden_size: int) -> None:
    """Neither where kernels are long nor where launching them takes longer than they do."""
    job = job_of(8, 16, 80.0, replace(SHAPE, hidden_size=hidden_size, ffn_size=4 * hidden_size))
    model, space, drawn = TimeModel(job), SearchSpace(offloads=False), random.Random(hidden_size)
    for candidate in drawn.sample(list(candidates(job, space)), 60):
        placement = drawn.choice(
            placements(job, space, candidate)
            or [PlacementCandidate(0, candidate.num_data_ranks, "batch", *["device"] * 4)]
        )
        least_s = model.busy_s(strategy_at(candidate, placement._replace(zero_stage=3), space.base))
        strategy = strategy_at(candidate, placement, space.base)
        pipeline = (candidate.schedule, candidate.pp, candidate.num_micro_batches, candidate.virtual_stages)
        step_s = model.estimate(strategy, is_quick=True).step_s
        assert least_s * (1 + least_bubble_share(*pipeline)) <= step_s * (1 + 1e-9), strategy


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
    legal = Strategy(tp=2, dp_shard=4, zero_stage=3, num_micro_batches=4, sequence_parallel=True)
    assert is_legal(job, legal)
    assert is_legal(job, replace(legal, activations_tier="host", recompute="selective"))
    for changes in (
        {"tp": 1},
        {"num_micro_batches": 3},
        {"zero_stage": 2, "params_tier": "host"},
        {"activations_tier": "host"},
        {"transport": "ulysses"},
        {"virtual_stages": 2},
    ):
        assert not is_legal(job, replace(legal, **changes)), changes


def test_as_much_stays_on_the_device_as_fits_and_helps() -> None:
    job = job_of(1, 4, 5.0)
    pins = {"optimizer_tier": ("host",), "grads_tier": ("device",), "params_tier": ("device",), "micro_size": (1,)}
    pricer = Pricer(job)
    winner = search(job, SearchSpace(pins={**pins, "recompute": ("none",)}), pricer=pricer).winner
    assert winner is not None
    share = winner.strategy.optimizer_on_device
    assert 0 < share < 1
    assert config_of(job, winner.strategy).tiers.optimizer_on_device == share
    less, more = (pricer.price(replace(winner.strategy, optimizer_on_device=each)) for each in (0.0, share + 0.05))
    assert winner.time.step_s < less.time.step_s
    assert sum(winner.memory.worst.elsewhere.values()) < sum(less.memory.worst.elsewhere.values())
    assert missing_memory(more.memory, job.cluster, Limits().margin_share) is not None


@pytest.mark.parametrize(("num_gpus", "global_batch"), [(8, 64), (64, 256)])
def test_winners_of_the_real_prices_can_be_trained(num_gpus: int, global_batch: int) -> None:
    shape = ModelShape.of_decoder(preset("llama-3-8b"))
    job = replace(job_of(num_gpus, global_batch, 80.0, shape), seq_len=8192)
    plan = search(job, limits=Limits(num_best=5, max_prices=150))
    assert plan.best
    for price in plan.best:
        check_job(config_of(job, price.strategy), num_gpus)


def test_every_key_is_of_a_strategy() -> None:
    assert set(KEYS.values()) <= set(Strategy.__dataclass_fields__)


@dataclass(frozen=True)
class Delayed:
    """Closed forms promise what no pipeline keeps: each takes an hour longer, once its schedule is simulated."""

    times: FakeTime
    simulated: list[Strategy]

    def busy_s(self, s: Strategy) -> float:
        return self.times.busy_s(s)

    def estimate(self, s: Strategy, *, is_quick: bool = False) -> TimeEstimate:
        time = self.times.estimate(s)
        if is_quick or s.pp == 1:
            return time
        self.simulated.append(s)
        return replace(time, step_s=time.step_s + 3600)


def test_so_many_schedules_are_simulated_at_most_and_no_others_are_shown() -> None:
    job, num_best = job_of(8, 48, 80.0), 3
    pricer = fake_pricer(job, 7)
    delayed = Delayed(pricer.time, [])
    space, limits = SearchSpace(pins={"pp": (2, 4), "recompute": ("none",)}), Limits(num_best=num_best)
    plan = search(job, space, limits, FakePricer(pricer.memory, delayed))  # type: ignore[arg-type]
    assert 5 * num_best <= len(delayed.simulated) == len(set(delayed.simulated)) <= 10 * num_best
    assert len(plan.best) == num_best
    assert all(price.time.step_s > 3600 for price in (*plan.best, *plan.runners_up))
    alone = Delayed(pricer.time, [])
    few = search(job, SearchSpace(pins={"pp": (1,)}), limits, FakePricer(pricer.memory, alone))  # type: ignore[arg-type]
    assert few.best
    assert alone.simulated == []  # nothing waits for anything


def test_a_simpler_one_that_is_hardly_slower_is_looked_for_even_where_one_is_wanted() -> None:
    job = job_of(4, 8, 80.0)
    weights = dict.fromkeys(fake_pricer(job, 0).time.weights, 0.0) | {"split": -0.01}
    pricer = FakePricer(FakeMemory(job, 1.0), FakeTime(job, weights))
    space = SearchSpace(pins={"tp": (1, 2), "pp": (1,), "cp": (1,), "recompute": ("none",), "micro_size": (1,)})
    plan = search(job, space, Limits(num_best=1), pricer)
    assert plan.winner is not None
    assert (plan.winner.strategy.tp, plan.winner.time.step_s) == (1, 1.0)


def test_runners_up_are_the_best_of_each_other_mesh_and_schedule() -> None:
    job = job_of(4, 8, 80.0)
    pricer = fake_pricer(job, 0)
    strategies = [
        Strategy(pp=2, micro_size=1),
        Strategy(pp=2, micro_size=2),
        Strategy(pp=2, schedule="zb-h1"),
        Strategy(tp=2),
        Strategy(tp=2, micro_size=4),
        Strategy(cp=2),
    ]
    memory, time = pricer.memory.estimate(strategies[0]), pricer.time.estimate(strategies[0])
    prices = [Estimate(job=job, strategy=each, memory=memory, time=time) for each in strategies]
    assert [each.strategy for each in runners_up(prices, 3)] == [strategies[2], strategies[3]]


def test_what_a_strategy_is_known_to_hold_is_no_more_than_it_holds() -> None:
    shape = replace(SHAPE, num_layers=24, hidden_size=2048, num_heads=16, ffn_size=8192)
    job = replace(job_of(8, 16, 80.0, shape), seq_len=256)
    space, memory, drawn = SearchSpace(offloads=True), MemoryModel(job), random.Random(0)
    for candidate in drawn.sample(list(candidates(job, space)), 80):
        options = placements(job, space, candidate)
        for placement in drawn.sample(options, min(3, len(options))):
            held = memory.estimate(strategy_at(candidate, placement, space.base))
            least = least_states_bytes(job, space.base, candidate, placement)
            assert least <= held.worst.peak_bytes, (candidate, placement)
