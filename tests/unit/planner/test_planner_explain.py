"""Why a plan's winner wins and the others lose, and what makes a job fit, on prices that are simple enough to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from shardwise.config.resolve import ResolvedConfig
from shardwise.models.presets import preset
from shardwise.models.shape import ModelShape
from shardwise.planner.candidates import SearchSpace
from shardwise.planner.explain import (
    fixes,
    lacks,
    reasons_of,
    smallest_change,
    why_chosen,
    why_faster,
    why_slower,
    why_yours,
)
from shardwise.planner.hardware import Cluster, Host, find_gpu, parse_cluster
from shardwise.planner.job import BASE, PlanJob, changed
from shardwise.planner.results import (
    Estimate,
    MemoryEstimate,
    MissingMemory,
    RankMemory,
    TimeEstimate,
    missing_memory,
    missing_on_node,
    num_extras,
    simplest,
)
from shardwise.planner.search import Limits, Pricer, search

GIB = 2**30
CLUSTER = Cluster(
    gpu=replace(find_gpu("h100"), memory_bytes=80 * GIB),
    num_gpus=16,
    gpus_per_node=8,
    nic_bytes_per_s=50e9,
    host=Host(memory_bytes=1000 * GIB, nvme_bytes=800 * GIB),
)
JOB = PlanJob(shape=ModelShape.of_decoder(preset("llama-3-8b")), seq_len=8192, global_batch=64, cluster=CLUSTER)
DESKTOP = replace(parse_cluster("rtx-4090:1"), host=Host(memory_bytes=128 * GIB))
PLAIN, SPLIT = changed(BASE, {"mesh.dp_shard": 16}), changed(BASE, {"mesh.tp": 2, "mesh.dp_shard": 8})


def job_of(name: str, cluster: Cluster, global_batch: int = 8) -> PlanJob:
    shape = ModelShape.of_decoder(preset(name), name)
    return PlanJob(shape=shape, seq_len=4096, global_batch=global_batch, cluster=cluster)


def with_memory(job: PlanJob, gib: float) -> PlanJob:
    return replace(job, cluster=replace(job.cluster, gpu=replace(job.cluster.gpu, memory_bytes=gib * GIB)))


def memory_of(*peaks: dict[str, float], **elsewhere: float) -> MemoryEstimate:
    away = {tier: size * GIB for tier, size in elsewhere.items()}
    ranks = [
        RankMemory(
            pipeline_rank=rank, at_rest={}, peak={name: size * GIB for name, size in peak.items()}, elsewhere=away
        )  # type: ignore[arg-type]
        for rank, peak in enumerate(peaks)
    ]
    return MemoryEstimate(ranks=tuple(ranks))


def price_of(config: ResolvedConfig, memory: MemoryEstimate, **parts: float) -> Estimate:
    step_s = sum(parts.values())
    time = TimeEstimate(step_s=step_s, low_s=step_s, high_s=step_s, parts=parts)
    return Estimate(job=JOB, config=config, memory=memory, time=time)


def held_gib(s: ResolvedConfig) -> dict[str, float]:
    """32 GiB of activations for each sample, or 4 of them recomputed; 128 GiB of states, shared from stage 1 on."""
    activations = 32.0 * s.batch.micro_size * {"none": 1.0, "selective": 0.75, "full": 0.125}[s.recompute.mode]
    states = 128.0 / (s.mesh.dp_shard if s.zero.stage else 1) / s.mesh.tp
    logits = 0.0 if s.context.chunk_tokens else 16.0 * s.batch.micro_size
    return {"optimizer": states, "activations": activations, "logits": logits}


def crowded_gib(s: ResolvedConfig) -> dict[str, float]:
    """60 GiB that are always there, 30 of activations, 20 of the optimizer, 1 that stage 3 shares."""
    size = 60 + 30 * (s.recompute.mode != "full") + 20 * (s.tiers.optimizer == "device") + (s.zero.stage < 3)
    return {"params": float(size)}


class Memory:
    def __init__(self, held: Callable[[ResolvedConfig], dict[str, float]]) -> None:
        self.held = held

    def estimate(self, s: ResolvedConfig, *, too_much_bytes: float = 0.0) -> MemoryEstimate:
        return memory_of(self.held(s))


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
        return sum(self.estimate(s).parts[name] for name in ("compute", "recompute", "tensor", "context"))


class Prices(Pricer):
    def __init__(
        self, job: PlanJob = JOB, held: Callable[..., dict[str, float]] = held_gib, margin: float = 0.06
    ) -> None:
        self.job, self.margin_share = job, margin
        self.memory, self.time = Memory(held), Time()  # type: ignore[assignment]


def test_at_most_four_parts_that_differ_are_named_and_none_that_is_next_to_nothing() -> None:
    one = price_of(BASE, memory_of({}), compute=2.0, bubble=0.4, data=0.3, step=0.2, offload=0.04)
    other = price_of(changed(BASE, {"mesh.tp": 8}), memory_of({}), compute=3.0, tensor=0.9)
    words = "1.00 s less compute, 900 ms less exposed tensor exchange, 400 ms more bubble, "
    assert why_faster(one, other).endswith(f": {words}300 ms more exposed gathers and reductions")
    only = price_of(SPLIT, memory_of({}), compute=3.0, bubble=0.4, data=0.3, step=0.2, offload=0.0)
    assert why_slower(only, one).endswith("slower: 1.00 s more compute")


@pytest.mark.parametrize(
    ("memory", "missing"),
    [
        (memory_of({"params": 80.0}), None),
        (memory_of({"params": 10.0}, {"params": 10.0, "activations": 72.0}), MissingMemory("device", 2 * GIB)),
        # All ranks of a node share its host and its disks.
        (memory_of({}, host=125.0), None),
        (memory_of({}, host=126.0), MissingMemory("host", 8 * GIB)),
        (memory_of({}, nvme=100.0), None),
        (memory_of({}, nvme=101.0), MissingMemory("nvme", 8 * GIB)),
        (memory_of({"params": 81.0}, host=126.0), MissingMemory("device", GIB)),
    ],
)
def test_what_is_missing(memory: MemoryEstimate, missing: MissingMemory | None) -> None:
    assert missing_memory(memory, CLUSTER, 0.0) == missing
    in_all = {None: 0, "host": 8, "nvme": 8, "device": 16}[missing and missing.tier]
    assert missing_on_node(memory, CLUSTER, 0.0) == in_all * GIB
    if missing is not None:
        assert f"{missing.missing_bytes / GIB:.2f} GiB" in lacks(
            price_of(changed(BASE, {"mesh.pp": 2}), memory, compute=1.0), missing
        )


@pytest.mark.parametrize(
    ("other_s", "faster", "slower", "yours"),
    [
        (9.9, "simpler than {}, which is 1.0 % faster", "1.0 % faster, but less simple", "100.0 ms (1.0 %) faster"),
        (10.001, "as fast as {}, which comes next", "as fast, but less simple", "as fast"),
        (9.999, "as fast as {}, which comes next", "as fast, but less simple", "as fast"),
        (11.0, "1.00 s faster than {}: 1.00 s less compute", "1.00 s (10.0 %) slower: ", "1.00 s (10.0 %) slower: "),
    ],
)
def test_two_layouts_are_compared_by_time_and_then_by_simplicity(
    other_s: float, faster: str, slower: str, yours: str
) -> None:
    winner = price_of(PLAIN, memory_of({"params": 1.0}), compute=10.0)
    other = price_of(SPLIT, memory_of({"params": 1.0}), compute=other_s)
    assert why_faster(winner, other) == faster.format(other.layout)
    assert why_slower(other, winner).startswith(slower)
    assert why_yours(other, winner, Prices()).startswith(yours)
    if "less simple" in slower:  # one that does no more than the winner has no excuse
        assert why_slower(replace(other, config=PLAIN), winner) == "as fast"
    # It fits, but 6 % of 80 GiB is to stay free.
    crowded = replace(other, memory=memory_of({"params": 79.0}))
    assert why_yours(crowded, winner, Prices()).startswith("only 1.00 GiB left, less than is kept free")


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({"recompute.mode": "full"}, 0),
        ({"recompute.mode": "full", "recompute.every": 2}, 1),
        ({"mesh.pp": 2}, 1),
        ({"mesh.pp": 2, "pipeline.schedule": "interleaved", "pipeline.virtual_stages": 2}, 2),
        ({"mesh.pp": 2, "pipeline.schedule": "zb-h1"}, 3),
        ({"mesh.cp": 2}, 1),
        ({"mesh.cp": 2, "context.transport": "ulysses"}, 2),
        ({"mesh.cp": 4, "context.heads_over": 2}, 3),
        ({"tiers.optimizer": "host"}, 1),
        ({"tiers.optimizer": "nvme"}, 2),
    ],
)
def test_what_a_strategy_does_besides_is_counted(changes: dict[str, object], number: int) -> None:
    assert num_extras(changed(BASE, changes)) == number


def test_a_simpler_one_may_be_two_per_cent_slower() -> None:
    fast, slow, slower = (
        price_of(each, memory_of({}), compute=seconds)
        for each, seconds in ((SPLIT, 1.0), (PLAIN, 1.019), (changed(PLAIN, {"zero.stage": 1}), 1.018))
    )
    assert simplest([fast, slow]) is slow
    assert simplest([fast, slow, slower]) is slower
    assert simplest([fast, price_of(PLAIN, memory_of({}), compute=1.03)]) is fast


SHARED = {"mesh.dp_shard": 16, "zero.stage": 1}


@pytest.mark.parametrize(
    ("held", "changes", "words"),
    [
        # 32 + 16 GiB a sample; two samples are 21 GiB too many, of which one at a time saves 48.
        (held_gib, {**SHARED, "batch.micro_size": 2, "batch.accumulation": 2}, "batch.micro_size=1"),
        # Whole states on every rank are too many, until they are shared.
        (held_gib, {"mesh.dp_shard": 16, "batch.accumulation": 4}, "zero.stage=1"),
        (crowded_gib, {**SHARED, "batch.accumulation": 4}, "recompute.mode=full tiers.optimizer=host"),
    ],
)  # fmt: skip
def test_no_more_is_changed_than_must_be(held: Callable, changes: dict[str, object], words: str) -> None:
    change = smallest_change(changed(BASE, changes), Prices(held=held))
    assert change is not None
    assert change.words == words
    # With less than 60 GiB nothing is enough.
    assert held is held_gib or smallest_change(changed(BASE, changes), Prices(held=held, margin=0.26)) is None


def test_reasons_of_a_plan() -> None:
    plan = search(JOB, limits=Limits(num_best=4), pricer=Prices())
    reasons = reasons_of(plan, Prices())
    by_name = {each.name: each for each in reasons.defaults}
    ddp, fsdp = by_name["DDP"], by_name["FSDP (ZeRO-3 over all)"]
    assert ddp.missing is not None
    assert "optimizer 128 GiB" in ddp.sentence
    assert "zero.stage=1 would fit" in ddp.sentence
    assert "20.0 ms more exposed gathers and reductions" in fsdp.sentence
    assert "1.20 s more exposed offload" in by_name["ZeRO-3, host offload"].sentence
    # 8 GiB of states and 48 of a sample: of 1, 2 and 4 samples on each of 16 ranks, one fits; of DDP none.
    assert [each.price and each.price.config.batch.micro_size for each in (fsdp, ddp)] == [1, 1]
    assert len(reasons.runners_up) == len(plan.runners_up)
    assert reasons.wins
    assert reasons.suggestions == ()


def test_of_a_popular_layout_the_fastest_that_fits_counts_and_all_is_recomputed_where_it_must() -> None:
    roomy, small = with_memory(JOB, 400.0), with_memory(JOB, 40.0)
    plan = search(roomy, limits=Limits(num_best=4), pricer=Prices(roomy))
    by_name = {each.name: each.price for each in reasons_of(plan, Prices(roomy)).defaults}
    ddp, megatron = by_name["DDP"], by_name["Megatron (TP to 8 + PP)"]
    assert ddp is not None
    assert megatron is not None
    assert ddp.config.batch.micro_size == 4  # larger ones compute faster
    # Each further rank of a tensor or a pipeline axis costs more than it brings, in `Time`.
    assert (megatron.config.mesh.tp, megatron.config.mesh.pp, megatron.config.zero.stage) == (2, 2, 1)
    # A sample of 48 GiB beside states of 8 does not fit on 40 GiB, its recomputed one does.
    space = SearchSpace(pins={"recompute.mode": ("full",)})
    plan = search(small, space, Limits(num_best=4), pricer=Prices(small))
    fsdp = next(each for each in reasons_of(plan, Prices(small)).defaults if each.name.startswith("FSDP"))
    assert fsdp.price is not None
    assert fsdp.missing is None
    assert fsdp.price.config.recompute.mode == "full"
    assert fsdp.sentence.startswith("with recompute full, ")


def test_where_nothing_fits_it_is_said_what_is_missing() -> None:
    small = with_memory(JOB, 12.0)
    plan = search(small, SearchSpace(pins={"recompute.mode": ("none",)}), Limits(num_best=2), Prices(small))
    assert plan.winner is None
    reasons = reasons_of(plan, Prices(small))
    assert reasons.wins == ""
    assert "out of memory by" in reasons.misses


@pytest.mark.parametrize("cluster", ["h100:64", "rtx-4090:2", "a100-80:8"])
def test_each_part_that_was_chosen_has_a_clause_that_holds(cluster: str) -> None:
    job = job_of("llama-7b", parse_cluster(cluster), global_batch=128)
    pricer = Pricer(job)
    winner = search(job, pricer=pricer).winner
    assert winner is not None
    clauses, config = list(why_chosen(winner, pricer)), winner.config
    for part, is_there in (
        (f"ZeRO-{config.zero.stage}", config.zero.stage > 0 and config.tiers.params == "device"),
        (f"PP {config.mesh.pp}", config.mesh.pp > 1),
        (f"TP {config.mesh.tp}", config.mesh.tp > 1),
        ("optimizer on host", config.tiers.optimizer == "host"),
    ):
        assert any(clause.startswith(f"{part}, ") for clause in clauses) == is_there, part
    if config.zero.stage == 3 and config.tiers.params == "device":
        memory = pricer.memory.estimate(changed(config, {"zero.stage": 2}))
        (clause,) = (each for each in clauses if each.startswith("ZeRO-3"))
        assert ("lacks" in clause) == (pricer.missing(memory) is not None)


def test_more_of_the_host_and_adapters_are_what_would_fit() -> None:
    job = job_of("llama-13b", DESKTOP)
    found = search(job)
    assert found.winner is None
    assert found.nearest is not None
    price, missing = found.nearest
    held = price.memory.worst.elsewhere["host"]
    assert missing.tier == "host"
    said = list(map(str, fixes(price, missing, Pricer(job))))
    assert f"host memory of {held / GIB:.0f} GiB a node would fit (host_memory_gib in the cluster's file)" in said
    assert any("adapters beside weights in 4 bits (lora.rank=16 lora.base=nf4" in each for each in said)
    # What is said of the host holds.
    assert search(replace(job, cluster=replace(DESKTOP, host=Host(memory_bytes=held)))).winner is not None


AWAY = {"zero.stage": 3, "tiers.params": "host", "tiers.grads": "host", "tiers.optimizer": "host"}


@pytest.mark.parametrize(
    ("job", "changes", "num_gpus"),
    [
        # 113 GiB of states and little else; a node is filled first.
        (job_of("llama-7b", replace(parse_cluster("a100-80:1"), host=Host(memory_bytes=0.0)), 1), {}, 2),
        # Eight devices share one host: two hosts of 128 GiB have enough, one has not.
        (job_of("llama-13b", DESKTOP, 1), AWAY, 16),
    ],
)
def test_more_gpus_are_what_would_fit(job: PlanJob, changes: dict[str, object], num_gpus: int) -> None:
    pricer = Pricer(job)
    price = pricer.price(changed(BASE, {"recompute.mode": "full", **changes}))
    missing = pricer.missing(price.memory)
    assert missing is not None
    assert f"{num_gpus} GPUs would fit it, with a batch in proportion" in map(str, fixes(price, missing, pricer))


def test_a_host_that_holds_not_all_may_hold_enough() -> None:
    winner = search(job_of("llama-7b", replace(DESKTOP, host=Host(memory_bytes=110 * GIB)))).winner
    assert winner is not None
    assert winner.config.tiers.params == "device"
    assert winner.memory.worst.elsewhere["host"] <= 110 * GIB


def test_your_own_layout_has_a_fix_and_where_a_config_would_do_no_one_trains_adapters() -> None:
    pricer = Pricer(job_of("llama-7b", parse_cluster("a100-40:8")))
    yours = pricer.price(changed(BASE, {"mesh.dp_shard": 8, "zero.stage": 2}))
    said = why_yours(yours, None, pricer)
    assert said.startswith("out of memory by ")
    assert "pipeline rank" not in said
    missing = pricer.missing(yours.memory)
    assert missing is not None
    first, *others = map(str, fixes(yours, missing, pricer))
    assert first in said
    assert not any("adapters" in each for each in others)
    fits = pricer.price(changed(BASE, {"mesh.dp_shard": 8, "zero.stage": 3, "recompute.mode": "full"}))
    assert why_yours(fits, None, pricer).startswith("fits, ")
