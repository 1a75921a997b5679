"""The planner's model of memory grows with what needs more, and counts what other code stores otherwise."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engine_memory import job_of
from planner_eval.models import PublishedMemoryModel
from planner_eval.traits import PublishedTraits, run_by
from shardwise.config.resolve import ResolvedConfig
from shardwise.layout.activation_bytes import FP32_BYTES
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.models import DecoderConfig
from shardwise.planner.hardware import find_gpu
from shardwise.planner.job import BASE, PlanJob, changed
from shardwise.planner.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES, UNLINKED_SHARE, MemoryModel
from shardwise.planner.results import RankMemory

SHAPE = DecoderConfig(
    vocab_size=1024, num_layers=4, hidden_size=256, num_heads=8, num_kv_heads=4, head_dim=32, ffn_size=704,
    max_seq_len=512,
)  # fmt: skip
SEQ_LEN = 256


def job(name: str = "cpu", **changes: Any) -> PlanJob:
    plain = job_of(SHAPE, SEQ_LEN, name)
    return replace(plain, shape=replace(plain.shape, **changes))


def test_no_device_holds_more_than_tensors_on_a_cpu() -> None:
    peak = MemoryModel(job()).estimate(changed(BASE, {"batch.micro_size": 4})).worst.peak
    assert peak["overhead"] == peak["rounding"] == 0
    assert MemoryModel(job("h100")).estimate(changed(BASE, {"batch.micro_size": 4})).worst.peak["overhead"] > 0


def test_less_is_held_with_more_recomputation_and_smaller_micro_batches() -> None:
    model = MemoryModel(job("h100"))
    peaks = [
        model.estimate(changed(BASE, {"batch.micro_size": 8, "recompute.mode": mode})).worst.peak_bytes
        for mode in ("none", "selective", "full")  # type: ignore[arg-type]
    ]
    assert peaks == sorted(peaks, reverse=True)
    sizes = [model.estimate(changed(BASE, {"batch.micro_size": size})).worst.peak_bytes for size in (1, 2, 4)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("param", ["bf16", "fp32"])
def test_scores_that_are_kept_grow_with_the_square_of_the_sequence(param: Any) -> None:
    flash, fused = (
        PublishedMemoryModel(run_by(job(), PublishedTraits(attention=attention))).block_bytes(
            changed(BASE, {"precision.param": param}), has_experts=False
        )
        for attention in ("flash", "fused-softmax")  # type: ignore[arg-type]
    )
    each = DTYPE_BYTES[param] * SEQ_LEN - FP32_BYTES  # less the log-sum-exp
    assert fused.kept - flash.kept == SHAPE.num_heads * SEQ_LEN * each


def of_traits(traits: PublishedTraits, config: ResolvedConfig, name: str = "h100") -> RankMemory:
    return PublishedMemoryModel(run_by(job(name), traits)).estimate(config).ranks[0]


@pytest.mark.parametrize("param", ["bf16", "fp32"])
def test_scores_are_kept_in_the_dtype_of_the_softmax(param: Any) -> None:
    fused, dropped = (
        of_traits(
            PublishedTraits(attention="fused-softmax", has_dropout=each), changed(BASE, {"precision.param": param})
        ).peak["activations"]
        for each in (False, True)
    )
    scores, features = SHAPE.num_heads * SEQ_LEN**2, SHAPE.hidden_size * SEQ_LEN
    assert dropped - fused == SHAPE.num_layers * (scores * (DTYPE_BYTES[param] + 1) + 2 * features)


def test_outputs_that_are_freed_are_those_of_the_micro_batches_in_flight() -> None:
    config = changed(BASE, {"mesh.pp": 2, "batch.accumulation": 4})
    kept, freed = (of_traits(PublishedTraits(frees_outputs=each), config).peak["activations"] for each in (False, True))
    assert kept - freed == 2 * SEQ_LEN * SHAPE.hidden_size * DTYPE_BYTES["bf16"]


def test_parameters_may_be_stored_in_a_share_of_their_bytes() -> None:
    whole, half = (of_traits(PublishedTraits(params_share=each), BASE).peak["params"] for each in (1.0, 0.5))
    assert whole == 2 * half > 0


def test_states_without_a_master_are_stored_in_a_share_of_their_bytes() -> None:
    full, third = (of_traits(PublishedTraits(optimizer_share=each), BASE).peak for each in (1.0, 1 / 3))
    assert full["optimizer"] == pytest.approx(3 * third["optimizer"])
    assert third["optimizer"] == pytest.approx(2 * third["params"])  # two moments in bf16


def test_ranks_that_each_hold_the_whole_table_store_more_of_all_states() -> None:
    split, whole = (
        of_traits(PublishedTraits(whole_embedding=each), changed(BASE, {"mesh.tp": 4})).peak for each in (False, True)
    )
    more = (1 - 1 / 4) * SHAPE.vocab_size * SHAPE.hidden_size
    assert whole["params"] - split["params"] == pytest.approx(DTYPE_BYTES["bf16"] * more)
    assert whole["optimizer"] / split["optimizer"] == pytest.approx(whole["params"] / split["params"])


def test_whole_gradients_become_shards_with_the_last_micro_batch_alone() -> None:
    config = changed(BASE, {"mesh.dp_shard": 4, "zero.stage": 3})
    sharded, beside, instead = (
        of_traits(PublishedTraits(unsharded_grad_bytes=each, reduces_once=once), config).peak["grads"]
        for each, once in ((0.0, False), (4.0, False), (4.0, True))
    )
    assert beside == sharded + instead
    assert 0 < sharded < instead


def test_a_step_that_reads_narrow_gradients_widens_none() -> None:
    config = changed(BASE, {"precision.accumulate": "param", "recompute.mode": "full"})
    wide, narrow = (of_traits(PublishedTraits(widens_grads=each), config, "cpu") for each in (True, False))
    assert wide.peak["workspace"] >= FP32_BYTES * wide.at_rest["param"] / DTYPE_BYTES["bf16"]
    assert narrow.peak_bytes < wide.peak_bytes


@pytest.mark.parametrize(
    ("config", "num_communicators"),
    [
        (BASE, 0),
        (changed(BASE, {"mesh.tp": 8}), 1),
        (changed(BASE, {"mesh.tp": 4, "mesh.dp_shard": 2}), 3),  # that of all ranks besides
        (changed(BASE, {"mesh.tp": 2, "mesh.pp": 2, "mesh.cp": 2, "batch.accumulation": 2}), 4),
    ],
)
def test_each_axis_has_a_communicator_and_all_ranks_another(config: ResolvedConfig, num_communicators: int) -> None:
    overhead = MemoryModel(job("h100")).estimate(config).worst.peak["overhead"]
    assert overhead == CONTEXT_BYTES + num_communicators * COMMUNICATOR_BYTES * UNLINKED_SHARE


def test_communicators_of_devices_without_links_have_few_channels() -> None:
    config, plain = changed(BASE, {"mesh.dp_shard": 2}), job("h100")
    linked, unlinked = (
        MemoryModel(replace(plain, cluster=replace(plain.cluster, gpu=find_gpu(name)))).estimate(config)
        for name in ("h100", "rtx-4090")
    )
    assert linked.worst.peak["overhead"] == CONTEXT_BYTES + COMMUNICATOR_BYTES
    assert unlinked.worst.peak["overhead"] == CONTEXT_BYTES + COMMUNICATOR_BYTES / 12


def test_first_ranks_of_a_pipeline_hold_more_micro_batches() -> None:
    ranks = (
        MemoryModel(job("h100", num_layers=16)).estimate(changed(BASE, {"mesh.pp": 4, "batch.accumulation": 8})).ranks
    )
    kept = [rank.peak["activations"] for rank in ranks]
    assert kept[0] > kept[1] > kept[2] > kept[3]


@st.composite
def configs(draw: st.DrawFn) -> ResolvedConfig:
    pp = draw(st.sampled_from([1, 1, 2, 4]))
    tp = draw(st.sampled_from([1, 2, 4]))
    cp = draw(st.sampled_from([1, 2]))
    return changed(
        BASE,
        {
            "mesh.pp": pp,
            "mesh.tp": tp,
            "mesh.cp": cp,
            "mesh.dp_shard": draw(st.sampled_from([1, 2, 8])),
            "zero.stage": draw(st.integers(0, 3)),
            "batch.micro_size": draw(st.integers(1, 6)),
            "batch.accumulation": draw(st.integers(1, 6)),
            "pipeline.schedule": draw(st.sampled_from(["1f1b", "gpipe", "zb-h1", "zb-h2"])) if pp > 1 else "1f1b",
            "pipeline.gather": draw(st.sampled_from(["batch", "micro-batch"])),
            "tensor.sequence_parallel": tp > 1 and draw(st.booleans()),
            "context.chunk_tokens": draw(st.sampled_from([None, 1, 64, 4096])),
            "recompute.mode": draw(st.sampled_from(["none", "selective", "full"])),
            "precision.param": draw(st.sampled_from(["bf16", "fp32"])),
            "precision.accumulate": draw(st.sampled_from(["param", "fp32"])),
        },
    )


def peaks(config: ResolvedConfig) -> list[float]:
    return [rank.peak_bytes for rank in MemoryModel(job()).estimate(config).ranks]


def test_after_a_rank_that_holds_too_much_none_is_looked_at() -> None:
    config, model = changed(BASE, {"mesh.pp": 4, "batch.accumulation": 8}), MemoryModel(job())
    every = model.estimate(config)
    peaks = [each.peak_bytes for each in every.ranks]
    assert model.estimate(config, too_much_bytes=peaks[0] - 1).ranks == every.ranks[:1]
    assert model.estimate(config, too_much_bytes=max(peaks)) == every


@settings(deadline=None, max_examples=60)
@given(configs())
def test_any_strategy_has_finite_figures_that_grow_with_the_micro_batch(config: ResolvedConfig) -> None:
    ranks = MemoryModel(job()).estimate(config).ranks
    assert all(math.isfinite(size) and size >= 0 for rank in ranks for size in (*rank.peak.values(), rank.peak_bytes))
    assert all(rank.peak_bytes > 0 for rank in ranks)
    larger = peaks(changed(config, {"batch.micro_size": config.batch.micro_size + 1}))
    assert all(rank.peak_bytes <= more for rank, more in zip(ranks, larger, strict=True))


def most_at_rest(config: ResolvedConfig) -> int:
    return max(sum(rank.at_rest.values()) for rank in MemoryModel(job()).estimate(config).ranks)


@settings(deadline=None, max_examples=30)
@given(configs())
def test_more_ranks_of_a_model_and_later_stages_store_no_more(config: ResolvedConfig) -> None:
    later = [most_at_rest(changed(config, {"zero.stage": stage})) for stage in range(4)]
    assert later == sorted(later, reverse=True)
    split = [most_at_rest(changed(config, {"mesh.tp": size, "tensor.sequence_parallel": False})) for size in (1, 2, 4)]
    assert split == sorted(split, reverse=True)
    piped = [
        most_at_rest(changed(config, {"mesh.pp": size, "pipeline.schedule": "1f1b", "zero.stage": 0}))
        for size in (1, 2, 4)
    ]
    assert piped == sorted(piped, reverse=True)


@settings(deadline=None, max_examples=30)
@given(configs())
def test_more_recomputation_keeps_no_more(config: ResolvedConfig) -> None:
    kept = [
        MemoryModel(job()).block_bytes(changed(config, {"recompute.mode": mode}), has_experts=False).kept
        for mode in ("full", "selective", "none")
    ]
    assert kept == sorted(kept)


def test_a_code_that_gathers_tensor_by_tensor_holds_the_largest_alone() -> None:
    config = changed(BASE, {"mesh.dp_shard": 8, "zero.stage": 3})
    blocks, tensors = (
        of_traits(PublishedTraits(moves_tensors=each), config).bytes_of("gathered", "buckets") for each in (False, True)
    )
    assert tensors < 0.8 * blocks
