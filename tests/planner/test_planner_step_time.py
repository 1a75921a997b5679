"""Times of kernels and steps grow with what they have to do, and their parts make up the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.planner.catalogue import find_gpu
from shardwise.planner.compute import ComputeModel, alignment_share, shape_share
from shardwise.planner.hardware import Cluster
from shardwise.planner.job import Job, Practice, Strategy
from shardwise.planner.profile import MatmulTime, Profile
from shardwise.planner.shape import ModelShape
from shardwise.planner.step_time import TimeModel

SHAPE = ModelShape(
    num_layers=16,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    ffn_size=5504,
    vocab_size=32000,
)
CLUSTER = Cluster(gpu=find_gpu("h100"), num_gpus=32, gpus_per_node=8, nic_bytes_per_s=50e9)
JOB = Job(shape=SHAPE, seq_len=4096, global_batch=128, cluster=CLUSTER)
PLAIN = Strategy(dp_shard=32, micro_size=4)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from(["none", "selective", "full"]),
    st.booleans(),
)
def test_parts_make_up_the_step(tp: int, pp: int, cp: int, zero_stage: int, recompute: str, is_quick: bool) -> None:
    shards = 32 // (tp * pp * cp)
    micro_batches = 128 // shards
    strategy = Strategy(
        tp=tp,
        pp=pp,
        cp=cp,
        dp_shard=shards,
        zero_stage=zero_stage,
        recompute=recompute,  # type: ignore[arg-type]
        num_micro_batches=micro_batches,
        sequence_parallel=tp > 1,
    )
    time = TimeModel(JOB).estimate(strategy, is_quick=is_quick)
    assert sum(time.parts.values()) == pytest.approx(time.step_s, rel=1e-12)
    assert min(time.parts.values()) >= 0
    assert time.low_s < time.step_s < time.high_s
    assert (time.bubble_rate is None) == (pp == 1)
    assert (time.parts["recompute"] > 0) == (recompute != "none")


def test_what_is_computed_again_takes_a_forward() -> None:
    model = ComputeModel(JOB)
    whole, every_second = (model.block(replace(PLAIN, recompute="full", recompute_every=n)) for n in (1, 2))
    assert whole.recompute_s == whole.forward_s
    assert every_second.recompute_s == whole.forward_s / 2


def test_more_micro_batches_leave_less_bubble() -> None:
    rates = []
    for count in (4, 8, 64):
        job = replace(JOB, global_batch=8 * count)
        rates.append(TimeModel(job).estimate(Strategy(pp=4, dp_shard=8, num_micro_batches=count)).bubble_rate)
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 2 * rates[-1]


@pytest.mark.parametrize("field", ["memory_bytes_per_s", "link_bytes_per_s"])
def test_a_faster_device_is_no_slower(field: str) -> None:
    strategy = Strategy(tp=4, dp_shard=8, sequence_parallel=True, micro_size=4, num_micro_batches=4)
    faster = replace(CLUSTER.gpu, **{field: 2 * getattr(CLUSTER.gpu, field)})
    before = TimeModel(JOB).estimate(strategy).step_s
    assert TimeModel(replace(JOB, cluster=replace(CLUSTER, gpu=faster))).estimate(strategy).step_s < before


def test_scores_that_are_written_out_cost_time() -> None:
    times = [
        ComputeModel(replace(JOB, practice=Practice(attention=kernel))).block(PLAIN).total_s  # type: ignore[arg-type]
        for kernel in ("flash", "fused-softmax", "unfused")
    ]
    assert times == sorted(times)
    assert len(set(times)) == 3


def test_frozen_weights_have_no_gradients() -> None:
    frozen = ComputeModel(replace(JOB, practice=Practice(trains_all=False))).block(PLAIN)
    trained = ComputeModel(JOB).block(PLAIN)
    assert frozen.backward_weight_s == 0.0 < trained.backward_weight_s
    assert frozen.forward_s == trained.forward_s


def test_a_measured_product_is_believed() -> None:
    seconds = {}
    for rate in (1e9, 2e9):
        measured = MatmulTime(dtype="bf16", m=512, n=512, k=512, seconds=2 * 512**3 / rate)
        profile = Profile(device="cpu", num_ranks=2, num_threads=1, memory_bytes=1e9, matmuls=(measured,))
        job = replace(JOB, cluster=replace(CLUSTER, profile=profile))
        seconds[rate] = ComputeModel(job).head(PLAIN).forward_s
    assert seconds[1e9] == pytest.approx(2 * seconds[2e9], rel=0.01)


@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 200))
def test_no_shape_reaches_more_than_all(m: int, n: int, k: int, num_cores: int) -> None:
    assert 0 < shape_share(m, n, k, num_cores) <= 1


def test_rows_begin_where_vectors_do() -> None:
    assert alignment_share(1024, 1024, 2) == 1.0
    assert alignment_share(1024, 1800, 2) == alignment_share(1800, 1024, 2) < 1.0
    assert alignment_share(108, 108, 2) < alignment_share(144, 144, 2)


def test_the_first_flash_attention_is_about_half_as_fast() -> None:
    first, second = (
        ComputeModel(replace(JOB, practice=Practice(has_first_flash=is_first))).attention(PLAIN)
        for is_first in (True, False)
    )
    assert 0.5 < second.total_s / first.total_s < 0.7


def test_attention_that_knows_nothing_of_hopper_gains_nothing_from_its_matrix_products() -> None:
    long = replace(JOB, seq_len=32768)
    plain, tuned = (
        ComputeModel(replace(long, practice=Practice(has_tuned_attention=is_tuned))).attention(PLAIN)
        for is_tuned in (False, True)
    )
    assert plain.forward_s > 1.3 * tuned.forward_s
    flops = 2.0 * 4 * 32768**2 * SHAPE.num_heads * SHAPE.head_dim
    assert 300e12 < flops / plain.forward_s < 400e12


def test_adding_up_a_gradient_costs_more_where_it_is_a_kernel_of_its_own() -> None:
    several = replace(PLAIN, micro_size=1, num_micro_batches=4)
    eager, fused = (
        ComputeModel(replace(JOB, practice=Practice(is_compiled=is_fused))).block(several).backward_weight_s
        for is_fused in (False, True)
    )
    assert eager > 1.05 * fused


def test_fp4_casts_read_more_than_fp8_casts() -> None:
    gpu = find_gpu("b200")
    model = ComputeModel(replace(JOB, cluster=replace(CLUSTER, gpu=gpu)))
    products, casts = [], []
    for dtype in ("fp8", "fp4"):
        s = replace(PLAIN, matmul=dtype)
        products.append(sum(model._product_s(each.m, each.n, each.k, dtype) for each in model._dense_linears(s)))
        casts.append(model._linears(model._dense_linears(s), s, dtype).forward_s - products[-1])
    assert casts[1] > casts[0]
    assert products[1] < products[0]
