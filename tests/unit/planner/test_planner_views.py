"""What is printed of a price: each number worked out by hand, whatever the words around it."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from shardwise.config.resolve import ResolvedConfig
from shardwise.models.shape import ModelShape
from shardwise.planner.explain import Reasons
from shardwise.planner.hardware import Cluster, GpuSpec, Host
from shardwise.planner.job import BASE, PlanJob, changed
from shardwise.planner.render import (
    bar_of,
    cautions,
    limit_words,
    memory_words,
    plan_dict,
    plan_view,
    price_dict,
    price_rows,
    price_table,
    run_dict,
    run_words,
    speed_words,
    stage_rows,
    time_rows,
)
from shardwise.planner.results import (
    MEMORY_PARTS,
    Estimate,
    MemoryEstimate,
    MissingMemory,
    RankMemory,
    TimeEstimate,
    layout_words,
)
from shardwise.planner.search import Limits, Pricer, SearchResult
from shardwise.verify.finalists import with_peak

GIB = 2**30
SHAPE = ModelShape(
    num_layers=4, hidden_size=64, num_heads=8, num_kv_heads=8, head_dim=64, ffn_size=96, vocab_size=1000
)  # fmt: skip
# 8,192 tokens a second and device: the peak is twice what the model needs for them.
GPU = GpuSpec(
    name="plain",
    memory_bytes=80 * GIB,
    memory_bytes_per_s=1e12,
    peak_flops_per_s={"bf16": 2 * 8192 * SHAPE.flops_per_token(8192)},
    link_domain=8,
    price_per_hour=2.0,
)
CLUSTER = Cluster(gpu=GPU, num_gpus=16, gpus_per_node=8, nic_bytes_per_s=5e10, host=Host(nvme_bytes=1e12))
JOB = PlanJob(shape=SHAPE, seq_len=8192, global_batch=64, cluster=CLUSTER)


def price_of(
    *peaks: dict[str, float],
    config: ResolvedConfig | None = None,
    elsewhere: dict[str, float] | None = None,
    **parts: float,
) -> Estimate:
    """With so many GiB on each rank of the pipeline, and so many seconds."""
    ranks = tuple(
        RankMemory(
            pipeline_rank=rank,
            at_rest={},
            peak={name: size * GIB for name, size in peak.items()},
            elsewhere={tier: size * GIB for tier, size in (elsewhere or {}).items()},  # type: ignore[misc]
        )
        for rank, peak in enumerate(peaks)
    )
    step_s = sum(parts.values()) or 4.0
    time = TimeEstimate(step_s=step_s, low_s=0.75 * step_s, high_s=1.5 * step_s, parts=parts, bubble_rate=0.125)
    return Estimate(job=JOB, config=config or BASE, memory=MemoryEstimate(ranks=ranks), time=time)


def cautions_of(price: Estimate, margin_share: float = 0.0) -> list[str]:
    return list(cautions(price, Pricer(price.job, margin_share)))


def printed(view: RenderableType, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(view)
    return " ".join(captured.get().split())


def test_speed_is_given_by_tokens_and_by_the_peak() -> None:
    words = speed_words(price_of({"params": 1.0}, compute=4.0))
    assert words.startswith("4.00 s (3.00 to 6.00 s), 8,192 tokens/s a GPU, MFU 50.0 % of bf16")


def test_memory_is_that_of_the_worst_rank_and_of_what_is_stored_elsewhere() -> None:
    ranks = ({"params": 10.0, "activations": 20.0}, {"params": 40.0, "activations": 30.0})
    words = memory_words(price_of(*ranks, config=changed(BASE, {"mesh.pp": 2}), elsewhere={"host": 5.0, "nvme": 7.0}))
    for each in ("70.0 GiB of 80.0 GiB", "pipeline rank 1 of 2", "10.0 GiB left", "host", "nvme"):
        assert each in words
    assert "out of memory by 20.0 GiB" in memory_words(price_of({"params": 100.0}))


def test_cost_is_of_tokens_of_a_day_and_of_a_run() -> None:
    # 16 devices for an hour at 2 dollars; 64 x 8,192 = 524,288 tokens: 61.04 dollars a million.
    price, num_tokens = price_of({"params": 1.0}, compute=3600.0), 24 * 524_288
    assert str(dict(price_rows(price))["cost"]).startswith("$61.0 for a million tokens, $768 a day, at $2.00")
    # 24 steps an hour each are a day; the interval is of 0.75 and 1.5 of it.
    assert run_words(price, num_tokens) == "12.6 M tokens: $768, 1.00 days (0.75 to 1.50)"
    assert run_dict(price, num_tokens) == {"num_tokens": num_tokens, "days": 1.0, "usd": 768.0}
    free = replace(price, job=replace(JOB, cluster=replace(CLUSTER, gpu=replace(GPU, price_per_hour=0.0))))
    assert "cost" not in dict(price_rows(free))
    assert run_words(free, num_tokens) == "12.6 M tokens: 1.00 days (0.75 to 1.50)"
    assert run_dict(free, num_tokens)["usd"] is None


def test_of_a_long_pipeline_its_worst_rank_is_among_those_shown() -> None:
    peaks = [{"params": 1.0, "logits": 0.0} for _ in range(16)]
    peaks[5] = {"params": 1.0, "logits": 3.0}
    rows = dict(stage_rows(price_of(*peaks, config=changed(BASE, {"mesh.pp": 16}))))
    assert rows["rank 5"] == "4.00 GiB, the most: params 1.00 GiB, logits 3.00 GiB"
    assert [name for name, words in rows.items() if "the most" in str(words)] == ["rank 5"]
    assert len(rows) == 5


def test_parts_of_a_step_have_their_seconds() -> None:
    rows = dict(time_rows(price_of({}, {}, config=changed(BASE, {"mesh.pp": 2}), compute=0.020, bubble=0.005)))
    assert rows["time"] == "compute 20.0 ms, bubble 5.00 ms"
    assert "12.5 %" in str(rows["bubble"])


def test_bars_are_as_long_as_what_they_show() -> None:
    marks = {name: MEMORY_PARTS[name] for name in ("params", "grads")}
    assert bar_of({"grads": 10.0, "params": 30.0}, marks, 40.0, 8).plain == "ppppppgg"
    assert bar_of({"params": 40.0}, marks, 80.0, 8).plain == "pppp····"
    assert bar_of({"params": 40.0}, marks, 20.0, 9).plain == "pppp|pppp"


def test_rows_of_a_table_have_their_own_figures() -> None:
    text = printed(price_table([price_of({"params": 5.0}, compute=8.0)]))
    assert text.endswith("8.00 s 4,096 25.0 ~5.0"), "an estimate"
    settled = with_peak(price_of({}, compute=8.0), {"params": 5.0 * 2**30})
    assert printed(price_table([settled])).endswith("8.00 s 4,096 25.0 5.0")


@pytest.mark.parametrize(
    ("peak", "margin_share", "words"),
    [
        (70.0, 0.06, None),
        (78.0, 0.06, "only 2.00 GiB (2.5 %) of device memory"),
        (90.0, 0.0, "out of memory by 10.0 GiB"),
    ],
)
def test_too_little_memory_is_cautioned(peak: float, margin_share: float, words: str | None) -> None:
    said = cautions_of(price_of({"params": peak}, compute=1.0), margin_share)
    assert len(said) == (words is not None)
    assert words is None or words in said[0]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("tensor", "exposed tensor exchange; try a smaller mesh.tp, or"),
        ("context", "exposed context exchange; try a smaller mesh.cp, or"),
        ("experts", "exposed experts' exchange; keep the ranks"),
        ("bubble", "bubble; try more micro-batches"),
        ("data", "exposed gathers and reductions; try a smaller mesh.dp_shard"),
        ("offload", "exposed offload; try to keep"),
        ("recompute", "recomputation; try recompute.mode=selective"),
    ],
)
def test_a_large_part_of_a_step_is_cautioned(part: str, words: str) -> None:
    assert cautions_of(price_of({}, compute=861.0, **{part: 139.0})) == []
    (said,) = cautions_of(price_of({}, compute=3.0, **{part: 1.0}))
    assert said.startswith(f"25 % of a step is {words}")
    assert len(cautions_of(price_of({}, compute=17.0, **{part: 3.0}))) == 1  # 15 %


def test_an_axis_beyond_a_node_and_its_links_is_cautioned() -> None:
    def said(tp: int, link_domain: int) -> list[str]:
        price = price_of({}, config=changed(BASE, {"mesh.tp": tp}), compute=1.0)
        cluster = replace(CLUSTER, gpu=replace(GPU, link_domain=link_domain))
        return cautions_of(replace(price, job=replace(JOB, cluster=cluster)))

    assert said(8, 1) == said(16, 16) == []
    assert said(16, 8) == ["mesh.tp=16 reaches beyond a node of 8, over the network"]
    assert len(said(32, 16)) == 1


def test_kernels_that_are_shorter_than_their_launches_are_cautioned() -> None:
    fast = replace(CLUSTER, gpu=replace(GPU, peak_flops_per_s={"bf16": 1e15}, memory_bytes_per_s=1e13))
    price = price_of({}, compute=1.0)
    short = replace(JOB, seq_len=64, cluster=fast)
    for job, is_said in ((JOB, False), (short, True)):
        said = "".join(cautions_of(replace(price, job=job)))
        assert ("shorter than the host takes to launch them" in said) is is_said


def test_what_limits_a_step_is_said_with_its_share() -> None:
    price = price_of({}, compute=6.9, tensor=1.0, data=1.0, bubble=0.6, recompute=0.3, offload=0.2)
    assert limit_words(price) == "compute, 69 % of a step; links 20 %, pipeline 6 %, memory 5 %"
    assert limit_words(price_of({}, compute=1.0, offload=3.0)) == "memory, 75 % of a step; compute 25 %"
    assert limit_words(price_of({}, compute=1.0)) == "compute, 100 % of a step"


def plan_of(*prices: Estimate, **facts: Any) -> SearchResult:
    found: dict[str, Any] = {
        "job": JOB,
        "limits": Limits(),
        "best": prices,
        "runners_up": prices[1:],
        "nearest": None,
        "rejected": {"slower": 1},
        "num_candidates": 7,
        "num_priced": 9,
        "gap_share": 0.0,
        "elapsed_s": 0.5,
    }
    return SearchResult(**(found | facts))


def view_of(plan: SearchResult, is_whole: bool = False, **reasons: Any) -> str:
    empty: dict[str, Any] = {"wins": "", "runners_up": (), "defaults": (), "suggestions": ()}
    said = Reasons(**(empty | reasons))
    return printed(plan_view(plan, said, is_whole=is_whole))


PRICES = tuple(
    price_of({"params": 70.0 - 10 * index}, config=changed(BASE, {"mesh.tp": 2**index}), compute=4.0 + index)
    for index in range(6)
)


def test_what_was_not_looked_at_is_said_in_the_short_answer_too() -> None:
    assert "unproven" not in view_of(plan_of(*PRICES), wins="so")
    text = view_of(plan_of(*PRICES, gap_share=0.031, rejected={"not looked at": 5}), wins="so")
    assert "5 of 7 candidates were not looked at and may be up to 3.1 % faster" in text
    assert "may fit" in view_of(plan_of(gap_share=1.0, rejected={"not looked at": 5}))


def test_a_plan_is_written_in_gib_and_with_what_is_nearest() -> None:
    found = price_dict(PRICES[0])
    assert (found["peak_gib"], found["margin_gib"], found["mfu"]) == (70.0, 10.0, 0.5)
    missing = MissingMemory("device", 1.0)
    said = Reasons(wins="", runners_up=(), defaults=(), suggestions=())
    assert plan_dict(plan_of(nearest=(PRICES[1], missing)), said, Pricer(JOB))["nearest"] == price_dict(PRICES[1])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            changed(
                BASE, {"mesh.pp": 2, "pipeline.schedule": "zb-v", "pipeline.virtual_stages": 2, "batch.accumulation": 4}
            ),
            "PP 2 zb-v, micro-batch 1 x 4",
        ),
        (
            changed(BASE, {"mesh.cp": 4, "mesh.dp_shard": 2, "context.heads_over": 2, "zero.stage": 1}),
            "CP 4 ring with Ulysses over 2, ZeRO-1 over 8",
        ),
        (
            changed(BASE, {"mesh.cp": 4, "context.transport": "ulysses", "context.heads_over": 4}),
            "CP 4 ulysses, DDP over 4",
        ),
        (
            changed(BASE, {"mesh.pp": 2, "mesh.dp_shard": 4, "zero.stage": 3, "pipeline.gather": "micro-batch"}),
            "ZeRO-3 over 4 each micro-batch",
        ),
        (changed(BASE, {"mesh.pp": 2, "mesh.dp_shard": 4, "zero.stage": 3}), "PP 2 1f1b, ZeRO-3 over 4, micro-batch 1"),
        (
            changed(BASE, {"mesh.dp_shard": 4, "zero.stage": 1, "pipeline.gather": "micro-batch"}),
            "ZeRO-1 over 4, micro-batch 1",
        ),
        (
            changed(BASE, {"recompute.mode": "full", "recompute.every": 4, "tiers.activations": "host"}),
            "full every 4, activations on host",
        ),
    ],
)
def test_layouts_in_words(config: ResolvedConfig, words: str) -> None:
    assert layout_words(config).endswith(words) or words in layout_words(config)
