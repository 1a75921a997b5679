"""Why a plan's winner wins and the others lose, on prices that are simple enough to know."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.config.resolve import ResolvedConfig
from shardwise.models.presets import preset
from shardwise.planner.candidates import SearchSpace
from shardwise.planner.cost import cost_per_step
from shardwise.planner.explain import (
    parts_words,
    reasons_of,
    smallest_change,
    why_faster,
    why_not,
    why_slower,
    why_yours,
)
from shardwise.planner.hardware import Cluster, Host, find_gpu
from shardwise.planner.job import BASE, ModelShape, PlanJob, changed
from shardwise.planner.results import (
    Estimate,
    MemoryEstimate,
    MissingMemory,
    RankMemory,
    TimeEstimate,
    missing_memory,
    num_extras,
    simplest,
    usable_bytes,
)
from shardwise.planner.search import Limits, search

GIB = 2**30
CLUSTER = Cluster(
    gpu=replace(find_gpu("h100"), memory_bytes=80 * GIB),
    num_gpus=16,
    gpus_per_node=8,
    nic_bytes_per_s=50e9,
    host=Host(memory_bytes=1000 * GIB),
)
JOB = PlanJob(shape=ModelShape.of_decoder(preset("llama-3-8b")), seq_len=8192, global_batch=64, cluster=CLUSTER)


def memory_of(*peaks: dict[str, float], host_gib: float = 0.0) -> MemoryEstimate:
    return MemoryEstimate(
        ranks=tuple(
            RankMemory(
                pipeline_rank=rank,
                at_rest={},
                peak={name: size * GIB for name, size in peak.items()},
                elsewhere={"host": host_gib * GIB},
            )
            for rank, peak in enumerate(peaks)
        )
    )


def price_of(config: ResolvedConfig, memory: MemoryEstimate, **parts: float) -> Estimate:
    step_s = sum(parts.values())
    return Estimate(
        job=JOB,
        config=config,
        memory=memory,
        time=TimeEstimate(step_s=step_s, low_s=step_s, high_s=step_s, parts=parts),
    )


class Memory:
    """32 GiB of activations for each sample, or 4 of them recomputed; 128 GiB of states, shared from stage 1 on."""

    def estimate(self, s: ResolvedConfig, *, too_much_bytes: float = 0.0) -> MemoryEstimate:
        activations = 32.0 * s.batch.micro_size * {"none": 1.0, "selective": 0.75, "full": 0.125}[s.recompute.mode]
        states = 128.0 / (s.mesh.dp_shard if s.zero.stage else 1) / s.mesh.tp
        logits = 0.0 if s.context.chunk_tokens else 16.0 * s.batch.micro_size
        return memory_of({"optimizer": states, "activations": activations, "logits": logits})


class Time:
    """A second, less where samples are taken together, more where something is computed or moved besides."""

    def stages_s(self, s: ResolvedConfig) -> float:
        return sum(seconds for part, seconds in self.estimate(s).parts.items() if part not in ("data", "offload"))

    def estimate(self, s: ResolvedConfig, *, is_quick: bool = False) -> TimeEstimate:
        parts = {
            "compute": 1.0 + 0.1 / s.batch.micro_size,
            "recompute": {"none": 0.0, "selective": 0.2, "full": 0.33}[s.recompute.mode],
            "tensor": 0.3 * (s.mesh.tp - 1),
            "context": 0.2 * (s.mesh.cp - 1),
            "bubble": 0.25 * (s.mesh.pp - 1),
            "data": 0.01 * s.zero.stage,
            "offload": 0.4 * sum(each != "device" for each in (s.tiers.params, s.tiers.grads, s.tiers.optimizer)),
        }
        step_s = sum(parts.values())
        return TimeEstimate(step_s=step_s, low_s=step_s, high_s=step_s, parts=parts)

    def busy_s(self, s: ResolvedConfig) -> float:
        parts = self.estimate(s).parts
        return parts["compute"] + parts["recompute"] + parts["tensor"] + parts["context"]


class Prices:
    def __init__(self) -> None:
        self.memory, self.time = Memory(), Time()


def test_the_parts_that_differ_are_said() -> None:
    one = price_of(BASE, memory_of({}), compute=1.0, bubble=0.5)
    other = price_of(changed(BASE, {"mesh.tp": 8}), memory_of({}), compute=1.0, tensor=0.9, bubble=0.1)
    assert why_faster(one, other).startswith("500 ms faster than TP 8")
    assert why_faster(one, other).endswith(": 900 ms less exposed tensor exchange, 400 ms more bubble")
    assert why_slower(other, one) == "500 ms (33.3 %) slower: 900 ms more exposed tensor exchange, 400 ms less bubble"


def test_what_does_not_fit_is_of_the_rank_that_lacks_most() -> None:
    memory = memory_of({"params": 10.0}, {"params": 10.0, "activations": 60.0, "logits": 12.0})
    missing = missing_memory(memory, CLUSTER, 0.06)
    assert missing is not None
    assert (missing.tier, missing.pipeline_rank) == ("device", 1)
    assert missing.missing_bytes == pytest.approx(82 * GIB - 0.94 * 80 * GIB)
    said = why_not(price_of(changed(BASE, {"mesh.pp": 2}), memory, compute=1.0), missing, None)
    assert said.startswith("out of memory by 2.00 GiB on pipeline rank 1: activations 60.0 GiB, logits 12.0 GiB;")
    assert missing_memory(memory, CLUSTER, -0.1) is None
    assert usable_bytes(CLUSTER, 0.5) == 40 * GIB


def test_hosts_hold_what_all_their_ranks_move() -> None:
    assert missing_memory(memory_of({}, host_gib=125.0), CLUSTER, 0.0) is None
    missing = missing_memory(memory_of({}, host_gib=126.0), CLUSTER, 0.0)
    assert missing == MissingMemory("host", 8 * GIB, 0)
    said = why_not(price_of(BASE, memory_of({}), compute=1.0), MissingMemory("host", 8 * GIB, 0), None)
    assert said.startswith("out of memory by 8.00 GiB of each node's host memory")


def test_the_fewest_changes_that_fit_are_the_fix() -> None:
    # 32 + 16 GiB a sample; two samples are 21 GiB too many, of which one at a time saves 48.
    config = changed(BASE, {"mesh.dp_shard": 16, "zero.stage": 1, "batch.micro_size": 2, "batch.accumulation": 2})
    change = smallest_change(JOB, config, Prices(), 0.06)
    assert change is not None
    assert change.words == "batch.micro_size=1"
    # Whole states on every rank are too many, until they are shared.
    alone = smallest_change(JOB, changed(BASE, {"mesh.dp_shard": 16, "batch.accumulation": 4}), Prices(), 0.06)
    assert alone is not None
    assert alone.words == "zero.stage=1"
    # Of 8 samples neither is enough; less of them at a time and all recomputed.
    both = smallest_change(
        JOB,
        changed(BASE, {"mesh.dp_shard": 8, "mesh.tp": 2, "batch.micro_size": 8, "tensor.sequence_parallel": True}),
        Prices(),
        0.06,
    )
    assert both is not None
    assert missing_memory(both.price.memory, CLUSTER, 0.06) is None
    assert len(both.words.split()) > 1


def test_reasons_of_a_plan() -> None:
    prices = Prices()
    plan = search(JOB, limits=Limits(num_best=4), pricer=prices)
    reasons = reasons_of(plan, prices)
    by_name = {each.name: each for each in reasons.defaults}
    ddp = by_name["DDP"]
    assert ddp.missing is not None
    assert "optimizer 128 GiB" in ddp.sentence
    assert "zero.stage=1 would fit" in ddp.sentence
    fsdp = by_name["FSDP (ZeRO-3 over all)"]
    assert fsdp.missing is None
    assert "20.0 ms more exposed gathers and reductions" in fsdp.sentence
    assert "1.20 s more exposed offload" in by_name["ZeRO-3, host offload"].sentence
    assert "more exposed tensor exchange" in by_name["Megatron (TP to 8 + PP)"].sentence
    assert len(reasons.runners_up) == len(plan.runners_up)
    assert reasons.wins
    assert reasons.suggestions == ()


def test_popular_layouts_recompute_where_they_must_and_the_fastest_is_the_plain_one() -> None:
    """A sample of 48 GiB beside states of 8 does not fit on 40 GiB, its recomputed one does."""
    small = replace(JOB, cluster=replace(CLUSTER, gpu=replace(CLUSTER.gpu, memory_bytes=40 * GIB)))
    prices = Prices()
    plan = search(small, SearchSpace(pins={"recompute.mode": ("full",)}), Limits(num_best=4), pricer=prices)
    reasons = reasons_of(plan, prices)
    fsdp = next(each for each in reasons.defaults if each.name.startswith("FSDP"))
    assert fsdp.price is not None
    assert fsdp.missing is None
    assert fsdp.price.config.recompute.mode == "full"
    assert fsdp.sentence.startswith("with recompute full, ")
    plain = reasons.plain
    assert plain is not None
    assert plain.price is not None
    fitting = [each.price for each in reasons.defaults if each.missing is None and each.price is not None]
    on_device = [each for each in fitting if each.config.tiers.optimizer == "device"]
    assert plain.price.time.step_s == min(each.time.step_s for each in on_device)
    assert len(on_device) < len(fitting)


def test_where_nothing_fits_it_is_said_what_would_do() -> None:
    small = replace(JOB, cluster=replace(CLUSTER, gpu=replace(CLUSTER.gpu, memory_bytes=12 * GIB)))
    space = SearchSpace(pins={"recompute.mode": ("none",)})
    plan = search(small, space, Limits(num_best=2), Prices())
    assert plan.winner is None
    reasons = reasons_of(plan, Prices())
    assert reasons.wins == ""
    assert "out of memory by" in reasons.misses


def test_cost_is_that_of_all_devices() -> None:
    price = price_of(BASE, memory_of({}), compute=3600.0)
    job = replace(JOB, cluster=replace(CLUSTER, gpu=replace(CLUSTER.gpu, price_per_hour=2.0)))
    assert cost_per_step(replace(price, job=job)) == 32.0
    free = replace(JOB, cluster=replace(CLUSTER, gpu=replace(CLUSTER.gpu, price_per_hour=0.0)))
    assert cost_per_step(replace(price, job=free)) is None


PLAIN, SPLIT = changed(BASE, {"mesh.dp_shard": 16}), changed(BASE, {"mesh.tp": 2, "mesh.dp_shard": 8})


@pytest.mark.parametrize(
    ("other_s", "faster", "slower"),
    [
        (9.9, "simpler than TP 2, DDP over 8, micro-batch 1, which is 1.0 % faster", "1.0 % faster, but less simple"),
        (10.001, "as fast as TP 2, DDP over 8, micro-batch 1, which comes next", "as fast, but less simple"),
        (9.999, "as fast as TP 2, DDP over 8, micro-batch 1, which comes next", "as fast, but less simple"),
        (11.0, "1.00 s faster than TP 2, DDP over 8, micro-batch 1: 1.00 s less compute", "1.00 s (10.0 %) slower: "),
    ],
)
def test_what_is_as_fast_but_simpler_is_said(other_s: float, faster: str, slower: str) -> None:
    winner = price_of(PLAIN, memory_of({"params": 1.0}), compute=10.0)
    other = price_of(SPLIT, memory_of({"params": 1.0}), compute=other_s)
    assert why_faster(winner, other) == faster
    assert why_slower(other, winner).startswith(slower)
    if "less simple" in slower:
        # One that does no more than the winner has no excuse.
        assert why_slower(replace(other, config=PLAIN), winner) == "as fast"


@pytest.mark.parametrize(
    ("your_s", "words"),
    [(8.0, "2.00 s (20.0 %) faster than what the search found: keep it"), (10.0, "as fast"), (11.0, "1.00 s (10.0 %)")],
)
def test_a_layout_of_your_own_is_set_beside_the_winner(your_s: float, words: str) -> None:
    winner = price_of(PLAIN, memory_of({"params": 1.0}), compute=10.0)
    yours = price_of(SPLIT, memory_of({"params": 1.0}), compute=your_s)
    assert why_yours(yours, winner, Prices(), 0.06).startswith(words)
    crowded = price_of(SPLIT, memory_of({"params": 79.0}), compute=your_s)
    # It fits, but 6 % of 80 GiB is to stay free.
    assert why_yours(crowded, winner, Prices(), 0.06).startswith("only 1.00 GiB left, less than is kept free")


def test_at_most_four_parts_are_said_and_none_that_is_next_to_nothing() -> None:
    parts = {"compute": 1.0, "tensor": -0.5, "bubble": 0.4, "data": 0.3, "step": 0.2, "offload": 0.04}
    words = parts_words(parts)
    assert words.count(",") == 3
    assert words.endswith("300 ms more exposed gathers and reductions")
    assert parts_words({"compute": 1.0, "offload": 0.04}) == "1.00 s more compute"


def test_of_a_default_the_fastest_micro_batch_counts_and_of_what_does_not_fit_the_one_that_lacks_least() -> None:
    prices = Prices()
    plan = search(JOB, limits=Limits(num_best=4), pricer=prices)
    by_name = {each.name: each for each in reasons_of(plan, prices).defaults}
    fsdp, ddp = by_name["FSDP (ZeRO-3 over all)"], by_name["DDP"]
    assert fsdp.price is not None
    assert ddp.price is not None
    # 8 GiB of states and 48 of a sample: of 1, 2 and 4 samples on each of 16 ranks, one fits.
    assert (fsdp.price.config.batch.micro_size, ddp.price.config.batch.micro_size) == (1, 1)
    roomy = replace(JOB, cluster=replace(CLUSTER, gpu=replace(CLUSTER.gpu, memory_bytes=400 * GIB)))
    plan = search(roomy, limits=Limits(num_best=4), pricer=prices)
    by_name = {each.name: each for each in reasons_of(plan, prices).defaults}
    ddp = by_name["DDP"]
    assert ddp.price is not None
    assert ddp.price.config.batch.micro_size == 4  # larger ones compute faster
    assert ddp.sentence.endswith("nothing is faster")
    megatron = by_name["Megatron (TP to 8 + PP)"]
    assert megatron.price is not None
    # Each further rank of a tensor or a pipeline axis costs more than it brings, in `Time`.
    assert (megatron.price.config.mesh.tp, megatron.price.config.mesh.pp, megatron.price.config.zero.stage) == (2, 2, 1)


@pytest.mark.parametrize(
    ("config", "number"),
    [
        (changed(BASE, {"recompute.mode": "full"}), 0),
        (changed(BASE, {"recompute.mode": "full", "recompute.every": 2}), 1),
        (changed(BASE, {"mesh.pp": 2}), 1),
        (changed(BASE, {"mesh.pp": 2, "pipeline.schedule": "interleaved", "pipeline.virtual_stages": 2}), 2),
        (changed(BASE, {"mesh.pp": 2, "pipeline.schedule": "zb-h1"}), 3),
        (changed(BASE, {"mesh.cp": 2}), 1),
        (changed(BASE, {"mesh.cp": 2, "context.transport": "ulysses"}), 2),
        (changed(BASE, {"mesh.cp": 4, "context.heads_over": 2}), 3),
        (changed(BASE, {"tiers.optimizer": "host"}), 1),
        (changed(BASE, {"tiers.optimizer": "nvme"}), 2),
    ],
)
def test_what_a_strategy_does_besides_is_counted(config: ResolvedConfig, number: int) -> None:
    assert num_extras(config) == number


def test_a_simpler_one_may_be_two_per_cent_slower() -> None:
    fast, slow, slower = (
        price_of(each, memory_of({}), compute=seconds)
        for each, seconds in ((SPLIT, 1.0), (PLAIN, 1.019), (changed(PLAIN, {"zero.stage": 1}), 1.018))
    )
    assert simplest([fast, slow]) is slow
    assert simplest([fast, slow, slower]) is slower
    assert simplest([fast, price_of(PLAIN, memory_of({}), compute=1.03)]) is fast


def test_disks_hold_what_all_ranks_of_a_node_move_there() -> None:
    cluster = replace(CLUSTER, host=Host(memory_bytes=1e15, nvme_bytes=800 * GIB))
    (rank,) = memory_of({}).ranks
    for size, missing in ((100, None), (101, MissingMemory("nvme", 8 * GIB, 0))):
        held = MemoryEstimate(ranks=(replace(rank, elsewhere={"nvme": size * GIB}),))
        assert missing_memory(held, cluster, 0.0) == missing
