"""What is said of a published run, from a price that is made up: which candidate it had, and in which quantities."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from planner_eval import prices
from planner_eval.bubbles import bubble_rate
from planner_eval.cases import Case, read_case
from planner_eval.models import PublishedPricer, PublishedTimeModel
from planner_eval.prices import (
    convention_of,
    flops_per_token,
    memory_gib,
    memory_kind_of,
    predict,
    predict_row,
    settled,
)
from shardwise.config.resolve import ResolvedConfig
from shardwise.planner.job import BASE, PlanJob, changed
from shardwise.planner.results import Estimate, MemoryEstimate, RankMemory, TimeEstimate
from shardwise.schedule.simulate import PipelineSimulator

GIB = 2**30
GPT = {"layers": 4, "hidden": 64, "heads": 4, "ffn": 256, "ffn_type": "gelu_mlp", "vocab": 1000, "seq": 128}
ROW: dict[str, Any] = {
    "id": "x",
    "model": GPT,
    "hardware": {"gpu": "A100-80GB", "num_gpus": 8},
    "parallel": {
        "pp": 2, "zero_stage": 1, "micro_batch": 1, "global_batch": 32, "recompute": "none", "schedule": "1f1b",
    },
}  # fmt: skip


def case_of(row: dict[str, Any] = ROW, /, **parallel: Any) -> Case:
    return read_case(row | {"parallel": row["parallel"] | parallel})


class MadeUp:
    """Prices by a rule, and keeps what it was asked."""

    def __init__(self, peak_gib: Any, step_s: Any) -> None:
        self.peak_gib, self.step_s, self.asked = peak_gib, step_s, list[ResolvedConfig]()
        self.time = SimpleNamespace(pipelines=None)

    def __call__(self, job: PlanJob) -> MadeUp:
        self.job = job
        return self

    def price(self, config: ResolvedConfig) -> Estimate:
        self.asked.append(config)
        step_s = self.step_s(config)
        peaks = self.peak_gib(config)
        ranks = tuple(
            RankMemory(pipeline_rank=rank, at_rest={"param": GIB}, peak={"params": peak * GIB, "rounding": 0.5 * GIB})
            for rank, peak in enumerate(peaks)
        )
        time = TimeEstimate(step_s=step_s, low_s=step_s, high_s=step_s, parts={}, bubble_rate=0.375)
        return Estimate(job=self.job, config=config, memory=MemoryEstimate(ranks=ranks), time=time)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    found = MadeUp(lambda config: (1.0, 2.0), lambda config: 1.0 + config.batch.micro_size)
    monkeypatch.setattr(prices, "PublishedPricer", found)
    return found


def test_what_is_written_is_priced_as_it_is(made: MadeUp) -> None:
    case = case_of()
    price = settled(case)
    assert price is not None
    assert made.asked == [price.config] == [case.config]
    assert settled(Case(id="", group="", tier="", quantity="")) is None


def test_where_nothing_fits_all_ways_to_spare_memory_are_tried_in_order(made: MadeUp) -> None:
    made.peak_gib = lambda config: (100.0 + config.batch.micro_size, 90.0)
    case = case_of(micro_batch=None, zero_stage=None, recompute=None, offload="possibly")
    price = settled(case)
    assert price is not None
    tried = list(
        dict.fromkeys(
            (each.tiers.activations, each.tiers.optimizer, each.zero.stage, each.recompute.mode, each.recompute.every)
            for each in made.asked
        )
    )
    modes = [("none", 1), ("selective", 1), ("full", 4), ("full", 2), ("full", 1)]
    tiers = [("device", "device"), ("host", "device"), ("host", "host")]
    assert tried == [(*tier, stage, *mode) for tier in tiers for stage in (1, 3) for mode in modes]
    # Of 8 samples a rank: with 4 of each micro-batch two would fill no pipeline of two.
    assert [(each.batch.micro_size, each.batch.accumulation) for each in made.asked] == [(2, 4), (1, 8)] * len(tried)
    assert price.config == made.asked[-1]  # of the last ones, that which lacks least


def test_of_sizes_that_fit_the_fastest_is_taken_and_nothing_more_is_tried(made: MadeUp) -> None:
    made.peak_gib = lambda config: (100.0 if config.recompute.mode == "none" or config.batch.micro_size == 4 else 70.0,)
    made.step_s = lambda config: 1 / config.batch.micro_size
    case = case_of(pp=1, micro_batch=None, recompute=None)
    price = settled(case)
    assert price is not None
    assert (price.config.batch.micro_size, price.config.recompute.mode) == (2, "selective")
    assert [each.batch.micro_size for each in made.asked] == [4, 2, 1, 4, 2, 1]
    assert {each.zero.stage for each in made.asked} == {1}
    assert case.job is not None
    gpu_gib = case.job.cluster.gpu.memory_bytes / GIB
    made.peak_gib = lambda config: (gpu_gib - 0.5,)  # to the last byte
    fullest = settled(case)
    assert fullest is not None
    assert (fullest.config.recompute.mode, fullest.margin_bytes) == ("none", 0)


@pytest.mark.parametrize(
    ("parallel", "sizes"),
    [
        ({"global_batch": 48}, [4, 2, 1]),  # 12 a rank, 3 micro-batches
        ({"global_batch": 24}, [2, 1]),  # 6 a rank
        ({"global_batch": 16, "pp": 2}, [1]),  # 4 a rank
        ({"global_batch": 64, "pp": 2}, [4, 2, 1]),
        ({"global_batch": None, "pp": 2}, [1]),  # whose batch is a guess, too
        ({"global_batch": None, "micro_batch": 4}, [4]),
    ],
)
def test_sizes_of_a_micro_batch_that_a_run_may_have_had(
    parallel: dict[str, Any], sizes: list[int], made: MadeUp
) -> None:
    settled(case_of(**({"pp": 1, "micro_batch": None} | parallel) | ({"dp": 4})))
    assert [each.batch.micro_size for each in made.asked] == sizes


def test_figures_are_of_the_priced_step_in_the_runs_own_batch(made: MadeUp) -> None:
    case = replace(case_of(), tokens_scale=1.5, trained_share=0.5)
    assert case.job is not None
    found = predict(case, convention="all-keys")
    assert found.as_row() == {
        "iteration_time_s": 3.0,
        "tflops_per_gpu": pytest.approx(0.5 * case.job.shape.flops_per_token(128) * 1.5 * 32 * 128 / 3.0 / 8 / 1e12),
        "memory_gib_per_gpu": 2.0,  # of the second rank, without the allocator's rounding
        "feasible": True,
        "bubble_rate": 0.375,
    }
    assert predict(case, of_first_rank=True).memory_gib_per_gpu == 1.0
    assert predict(case, memory_kind="reserved").memory_gib_per_gpu == 2.5
    assert predict(replace(case, quantity="single_layer_time")).as_row() == dict.fromkeys(found.as_row())
    assert predict(replace(case, quantity="activation_memory_ratio")).price is None
    gpu_gib = case.job.cluster.gpu.memory_bytes / GIB
    made.peak_gib = lambda config: (1.0, gpu_gib - 0.5)
    assert predict(case).feasible  # to the last byte
    made.peak_gib = lambda config: (1.0, gpu_gib)
    assert not predict(case).feasible


def test_known_schedules_are_shared(made: MadeUp) -> None:
    pipelines = PipelineSimulator()
    settled(case_of(), pipelines)
    assert made.time.pipelines is pipelines


def test_ways_of_counting_are_read_beside_the_inputs_first(made: MadeUp) -> None:
    case, full = case_of(), {"memory_kind": "reserved"}
    outputs = {"memory_kind": "peak as logged", "flops_convention": "causal"}
    assert predict_row(ROW, case).memory_gib_per_gpu == 2.0
    assert predict_row(ROW | {"outputs": outputs}, case).memory_gib_per_gpu == 1.0
    assert predict_row(ROW | full | {"outputs": outputs}, case).memory_gib_per_gpu == 2.5
    assert predict_row(ROW | {"parallel": full, "outputs": outputs}, case).memory_gib_per_gpu == 2.5
    causal, plain = (predict_row(ROW | {"outputs": each}, case).tflops_per_gpu for each in (outputs, {}))
    assert case.job is not None
    shape = case.job.shape
    assert causal is not None
    assert causal == pytest.approx(
        (plain or 0) * shape.flops_per_token(128, is_causal_halved=True) / shape.flops_per_token(128)
    )


def test_bubbles_are_of_measured_times_or_of_priced_ones_where_they_are_asked_for(made: MadeUp) -> None:
    measured = predict(case_of(op_times_ms={"T_F": 1, "T_B": 1, "T_W": 1}, global_batch=64))
    # One stage of 2 waits for (p - 1) forwards and backwards around 16 micro-batches.
    assert measured.bubble_rate == pytest.approx(1 / 17)
    row = ROW | {"quantity": "schedule_bubble", "parallel": ROW["parallel"] | {"global_batch": 64}}
    case = read_case(row)
    assert case.job is not None
    assert case.config is not None
    times = PublishedTimeModel(case.job).op_times(case.config)
    assert predict(case).bubble_rate == bubble_rate("1f1b", 2, 16, 1, times) != measured.bubble_rate
    searched = case_of(op_times_ms={"T_F": 1, "T_B": 1, "T_W": 1}, global_batch=64, schedule="zb-2p")
    assert searched.searched_schedule == "zb-2p"
    assert predict(searched).bubble_rate == pytest.approx(0)  # with memory for all, none is left


@pytest.mark.parametrize(
    ("written", "parallel", "gpu", "convention"),
    [
        (None, {}, "A100", "all-keys"),
        (None, {"recompute": "full"}, "A100", "all-keys"),
        (None, {"precision": "fp16"}, "A100", "all-keys"),
        (None, {"recompute": "full", "precision": "fp16"}, "A100", "hardware"),
        ("", {}, "B200", "causal"),
        ("Model FLOPs; hardware ones counts recompute", {}, "B200", "all-keys"),
        ("96Bslh^2(1+...)", {}, "A100", "hardware"),
        ("6N + 12Lds", {"recompute": "full", "precision": "fp16"}, "A100", "all-keys"),
        ("causal, hardware", {}, "A100", "causal"),
    ],
)
def test_flops_are_counted_as_it_is_written_or_was_usual(
    written: str | None, parallel: dict[str, Any], gpu: str, convention: str
) -> None:
    case = case_of(ROW | {"hardware": {"gpu": gpu, "num_gpus": 8}}, **parallel)
    assert convention_of(written, case) == convention
    assert convention_of(None, Case(id="", group="", tier="", quantity="")) == "all-keys"


@pytest.mark.parametrize(
    ("config", "again"),
    [
        (BASE, 0.0),
        # A third of what the blocks take: products with 12 h^2 weights, scores and values of 128 keys.
        (changed(BASE, {"recompute.mode": "full"}), 2 * 4 * 12 * 64**2 + 4 * 4 * 64 * 128),
        (changed(BASE, {"recompute.mode": "full", "recompute.every": 4}), (2 * 4 * 12 * 64**2 + 4 * 4 * 64 * 128) / 4),
        (changed(BASE, {"recompute.mode": "selective"}), 4 * 4 * 64 * 128),
    ],
)
def test_flops_of_the_hardware_count_what_is_computed_again(config: ResolvedConfig, again: float) -> None:
    job = case_of().job
    assert job is not None
    once = 6 * (4 * 12 * 64**2 + 1000 * 64) + 12 * 4 * 64 * 128
    assert flops_per_token(job, config, "hardware") == pytest.approx(once + again)
    assert flops_per_token(job, config, "all-keys") == once
    assert flops_per_token(job, config, "causal") == once - 6 * 4 * 64 * 128


def test_memory_of_each_kind_has_its_categories() -> None:
    names = ("params", "grads", "optimizer", "gathered", "activations", "logits", "overhead", "rounding")
    rank = RankMemory(
        pipeline_rank=0,
        at_rest={"param": 1000 * GIB, "grad": 2000 * GIB, "optimizer": 4000 * GIB},
        peak={name: 2.0**index * GIB for index, name in enumerate(names)},
    )
    assert memory_gib(rank, "states") == 7000
    assert memory_gib(rank, "activations") == 16
    assert memory_gib(rank, "states+activations") == 1 + 2 + 4 + 16
    assert memory_gib(rank, "allocated") == 63
    assert memory_gib(rank, "reserved", 0.5) == 63 + 128 + 16
    assert memory_gib(rank, "device", 0.5) == 255 + 16
    assert memory_gib(rank, "allocated", 0.5) == 63


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("params+grads and optimizer", "states"),
        ("model states + activations", "states+activations"),
        ("Activation memory", "activations"),
        ("Torch reserved", "reserved"),
        ("allocated", "allocated"),
        ("torch", "allocated"),
        ("", "allocated"),
        ("nvidia-smi", "device"),
    ],
)
def test_kinds_of_memory_by_what_people_write(written: str, kind: str) -> None:
    assert memory_kind_of(written) == kind


def test_a_priced_run_is_that_of_the_planner() -> None:
    case = case_of()
    assert case.job is not None
    assert case.config is not None
    assert settled(case) == PublishedPricer(case.job).price(case.config)
