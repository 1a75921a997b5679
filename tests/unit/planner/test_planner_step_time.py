"""Times of kernels and steps grow with what they have to do, and their parts make up the whole."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner_eval.models import PublishedComputeModel
from planner_eval.traits import PublishedTraits, run_by
from shardwise.config.resolve import ResolvedConfig
from shardwise.models.shape import ExpertsShape, ModelShape
from shardwise.planner.calibration import PassTimes
from shardwise.planner.comm_time import exposed_s
from shardwise.planner.compute_time import ComputeTimeModel, alignment_share, shape_share
from shardwise.planner.hardware import Cluster, find_gpu
from shardwise.planner.job import BASE, PlanJob, changed
from shardwise.planner.profile import MatmulTime, Profile
from shardwise.planner.step_time import STRAGGLING, TimeModel, quick_bubble_s
from shardwise.schedule.simulate import OpTimes, PipelineSimulator

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
JOB = PlanJob(shape=SHAPE, seq_len=4096, global_batch=128, cluster=CLUSTER)
PLAIN = changed(BASE, {"mesh.dp_shard": 32, "batch.micro_size": 4})


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
    config = changed(
        BASE,
        {
            "mesh.tp": tp,
            "mesh.pp": pp,
            "mesh.cp": cp,
            "mesh.dp_shard": shards,
            "zero.stage": zero_stage,
            "recompute.mode": recompute,
            "batch.accumulation": micro_batches,
            "tensor.sequence_parallel": tp > 1,
        },
    )
    time = TimeModel(JOB).estimate(config, is_quick=is_quick)
    assert sum(time.parts.values()) == pytest.approx(time.step_s, rel=1e-12)
    assert min(time.parts.values()) >= 0
    assert time.low_s < time.step_s < time.high_s
    assert (time.bubble_rate is None) == (pp == 1)
    assert (time.parts["recompute"] > 0) == (recompute != "none")


def test_what_is_computed_again_takes_a_forward() -> None:
    model = ComputeTimeModel(JOB)
    whole, every_second = (
        model.block(changed(PLAIN, {"recompute.mode": "full", "recompute.every": n})) for n in (1, 2)
    )
    assert whole.recompute_s == whole.forward_s
    assert every_second.recompute_s == whole.forward_s / 2


def test_more_micro_batches_leave_less_bubble() -> None:
    rates = []
    for count in (4, 8, 64):
        job = replace(JOB, global_batch=8 * count)
        rates.append(
            TimeModel(job)
            .estimate(changed(BASE, {"mesh.pp": 4, "mesh.dp_shard": 8, "batch.accumulation": count}))
            .bubble_rate
        )
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 2 * rates[-1]


@pytest.mark.parametrize("field", ["memory_bytes_per_s", "link_bytes_per_s"])
def test_a_faster_device_is_no_slower(field: str) -> None:
    config = changed(
        BASE,
        {
            "mesh.tp": 4,
            "mesh.dp_shard": 8,
            "tensor.sequence_parallel": True,
            "batch.micro_size": 4,
            "batch.accumulation": 4,
        },
    )
    faster = replace(CLUSTER.gpu, **{field: 2 * getattr(CLUSTER.gpu, field)})
    before = TimeModel(JOB).estimate(config).step_s
    assert TimeModel(replace(JOB, cluster=replace(CLUSTER, gpu=faster))).estimate(config).step_s < before


def test_scores_that_are_written_out_cost_time() -> None:
    times = [
        PublishedComputeModel(run_by(JOB, PublishedTraits(attention=kernel))).block(PLAIN).total_s  # type: ignore[arg-type]
        for kernel in ("flash", "fused-softmax", "unfused")
    ]
    assert times == sorted(times)
    assert len(set(times)) == 3


def test_a_measured_product_is_believed() -> None:
    seconds = {}
    for rate in (1e9, 2e9):
        measured = MatmulTime(dtype="bf16", m=512, n=512, k=512, seconds=2 * 512**3 / rate)
        profile = Profile(device="cpu", num_ranks=2, num_threads=1, memory_bytes=1e9, matmuls=(measured,))
        job = replace(JOB, cluster=replace(CLUSTER, profile=profile))
        seconds[rate] = ComputeTimeModel(job).head(PLAIN).forward_s
    assert seconds[1e9] == pytest.approx(2 * seconds[2e9], rel=0.01)


@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 200))
def test_no_shape_reaches_more_than_all(m: int, n: int, k: int, num_cores: int) -> None:
    assert 0 < shape_share(m, n, k, num_cores) <= 1


def test_products_side_by_side_fill_the_cores_that_one_of_them_leaves_idle() -> None:
    one, many = (shape_share(256, 1536, 4096, 132, count) for count in (1, 64))
    assert many > 1.5 * one


def test_experts_take_time_by_all_their_tokens_however_many_each_has() -> None:
    seconds = {}
    for num_experts in (16, 12):  # 4096 tokens of each, and 5461 and a third
        experts = ExpertsShape(num_experts=num_experts, num_chosen=4, ffn_size=2048)
        job = replace(JOB, shape=replace(SHAPE, experts=experts))
        seconds[num_experts] = ComputeTimeModel(job).block(changed(PLAIN, {"batch.accumulation": 1})).total_s
    assert seconds[12] == pytest.approx(seconds[16], rel=0.05)


def test_rows_begin_where_vectors_do() -> None:
    assert alignment_share(1024, 1024, 2) == 1.0
    assert alignment_share(1024, 1800, 2) == alignment_share(1800, 1024, 2) < 1.0
    assert alignment_share(108, 108, 2) < alignment_share(144, 144, 2)


def test_the_first_flash_attention_is_about_half_as_fast() -> None:
    first, second = (
        PublishedComputeModel(run_by(JOB, PublishedTraits(has_first_flash=is_first))).attention(PLAIN)
        for is_first in (True, False)
    )
    assert 0.45 < second.total_s / first.total_s < 0.55


def test_attention_that_knows_nothing_of_hopper_gains_nothing_from_its_matrix_products() -> None:
    long = replace(JOB, seq_len=32768)
    plain, tuned = (
        PublishedComputeModel(run_by(long, PublishedTraits(has_tuned_attention=is_tuned))).attention(PLAIN)
        for is_tuned in (False, True)
    )
    assert plain.forward_s > 1.3 * tuned.forward_s
    flops = 2.0 * 4 * 32768**2 * SHAPE.num_heads * SHAPE.head_dim
    assert 300e12 < flops / plain.forward_s < 400e12


def test_adding_up_a_gradient_costs_more_where_it_is_a_kernel_of_its_own() -> None:
    several = changed(PLAIN, {"batch.micro_size": 1, "batch.accumulation": 4})
    eager, fused = (
        ComputeTimeModel(JOB).block(changed(several, {"compile.enabled": is_fused})).backward_weight_s
        for is_fused in (False, True)
    )
    assert eager > 1.05 * fused


def test_fp4_casts_read_more_than_fp8_casts() -> None:
    gpu = find_gpu("b200")
    free = dict.fromkeys(gpu.peak_flops_per_s, 1e30)  # so that casts are all that differs
    fast = replace(gpu, peak_flops_per_s=free, ceiling_flops_per_s=free)
    casts, products = (
        [
            ComputeTimeModel(replace(JOB, cluster=replace(CLUSTER, gpu=each)))
            .block(changed(PLAIN, {"precision.linears": dtype}))
            .forward_s
            for dtype in ("fp8", "fp4")
        ]
        for each in (fast, gpu)
    )
    assert casts[1] > casts[0]
    assert products[1] - casts[1] < products[0] - casts[0]


MODEL = TimeModel(JOB)


def units(s: ResolvedConfig) -> tuple[PassTimes, PassTimes, PassTimes]:
    """A block, the embedding and the head, which exchange nothing."""
    return MODEL.compute.block(s), MODEL.compute.embedding(s), MODEL.compute.head(s)


def test_a_pipeline_takes_what_its_stages_and_their_schedule_take() -> None:
    layers, cut = (5, 4, 4, 3), ("blocks.5", "blocks.9", "blocks.13")
    s = changed(BASE, {"mesh.pp": 4, "mesh.dp_shard": 8, "batch.accumulation": 16, "pipeline.cut": cut})
    block, first, last = units(s)
    stages = [block.times(num) for num in layers]
    stages = [stages[0].plus(first), *stages[1:3], stages[3].plus(last)]
    transfer_s = MODEL.communication.transfer_s(s)
    timed = [OpTimes(each.forward_s, each.backward_input_s, each.backward_weight_s, transfer_s) for each in stages]
    span = PipelineSimulator().span("1f1b", 4, 1, 16, timed)
    found, quick = MODEL.estimate(s), MODEL.estimate(s, is_quick=True)
    busiest_s = 16 * max(each.total_s for each in timed)
    for time in (found, quick):
        assert time.parts["compute"] == pytest.approx(busiest_s)
    assert found.parts["bubble"] == pytest.approx(span.step_s - busiest_s)
    assert found.bubble_rate == pytest.approx(span.bubble_rate)
    # (p - 1) (F + B + W) of the mean stage, and there and back between 4 of them.
    mean_s = sum(each.total_s for each in timed) / 4
    assert quick.parts["bubble"] == pytest.approx(3 * mean_s + 6 * transfer_s)


def test_operations_of_a_rank_are_all_its_stages_and_its_share_of_the_step() -> None:
    s = changed(
        BASE,
        {
            "mesh.pp": 4,
            "mesh.dp_shard": 8,
            "batch.accumulation": 16,
            "pipeline.schedule": "interleaved",
            "pipeline.virtual_stages": 2,
        },
    )
    block, first, last = units(s)
    whole, times = block.times(16).plus(first).plus(last), MODEL.op_times(s)
    for name in ("forward_s", "backward_input_s", "backward_weight_s"):
        assert getattr(times, name) == pytest.approx(getattr(whole, name) / 4)
    waiting = 1 + STRAGGLING * math.sqrt(2 * math.log(4))  # of the slowest of 4 nodes
    assert MODEL.busy_s(s) == pytest.approx(16 * whole.total_s / 4 * waiting)


def test_the_slowest_of_many_nodes_decides() -> None:
    found = MODEL.estimate(PLAIN)
    others_s = found.step_s - found.parts["other"]
    assert found.parts["other"] == pytest.approx(STRAGGLING * math.sqrt(2 * math.log(4)) * others_s)
    alone = replace(JOB, cluster=replace(CLUSTER, num_gpus=8), global_batch=32)
    assert TimeModel(alone).estimate(changed(BASE, {"mesh.dp_shard": 8, "batch.micro_size": 4})).parts["other"] == 0


@pytest.mark.parametrize(
    ("changes", "shards"),
    [
        ({}, 1),
        ({"zero.stage": 1}, 32),
        ({"zero.stage": 1, "mesh.cp": 2, "mesh.dp_shard": 16, "batch.micro_size": 8}, 32),
    ],
)
def test_a_step_is_over_a_rank_s_share_of_the_elements(changes: dict[str, int], shards: int) -> None:
    s = changed(PLAIN, changes)
    rank = MODEL.layouts.rank(s, 0)
    launched_s = MODEL.compute.host(s).param_s * sum(fold.count * len(fold.group.params) for fold in rank.folds)
    found = MODEL.estimate(s).parts["step"]
    assert found == pytest.approx(max(launched_s, MODEL.compute.step_s(s, rank.numel / shards)))
    assert 0 < launched_s < MODEL.compute.step_s(s, rank.numel)


def test_a_step_waits_for_the_host_where_kernels_are_short() -> None:
    cluster = replace(CLUSTER, num_gpus=1)
    few = replace(JOB, cluster=cluster, seq_len=128, global_batch=4)
    one, model = changed(BASE, {"batch.micro_size": 1, "batch.accumulation": 4}), TimeModel(few)
    host = model.compute.host(one)
    found = model.estimate(one)
    launched_s = 4 * few.shape.num_layers * (host.forward_s + host.backward_s)
    assert launched_s < found.step_s - found.parts["step"] < 1.2 * launched_s
    assert found.kind == "launches"
    assert found.high_s - found.step_s > 0.8 * found.step_s
    # Of a long step it is hidden: what it takes is what the device does.
    block, (first, last) = model.compute.block(PLAIN), (model.compute.embedding(PLAIN), model.compute.head(PLAIN))
    assert MODEL.estimate(PLAIN).kind == "fitted"
    assert block.total_s > host.forward_s + host.backward_s or first.total_s + last.total_s > 0


def test_passes_of_a_pipeline_take_no_less_than_their_launches() -> None:
    few = replace(JOB, seq_len=128, global_batch=64)
    s = changed(BASE, {"mesh.pp": 4, "mesh.dp_shard": 8, "batch.micro_size": 1, "batch.accumulation": 8})
    model = TimeModel(few)
    host = model.compute.host(s)
    found = model.estimate(s)
    launched_s = 8 * few.shape.num_layers / 4 * (host.forward_s + host.backward_s)
    assert found.parts["compute"] > 0.9 * launched_s


def test_a_step_on_the_host_is_part_of_the_offload() -> None:
    parts = MODEL.estimate(changed(PLAIN, {"zero.stage": 1, "tiers.optimizer": "host"})).parts
    assert parts["step"] == 0 < parts["offload"]


def test_gathers_and_moves_hide_beside_the_pass_that_they_belong_to() -> None:
    slow = replace(JOB, cluster=replace(CLUSTER, nic_bytes_per_s=1e10, gpu=replace(CLUSTER.gpu, host_bytes_per_s=2e9)))
    model = TimeModel(slow)
    s = changed(
        BASE,
        {
            "mesh.dp_shard": 32,
            "batch.micro_size": 1,
            "batch.accumulation": 4,
            "zero.stage": 3,
            "tiers.params": "host",
            "precision.reduce": "fp32",
        },
    )
    block, first, last = model.compute.block(s), model.compute.embedding(s), model.compute.head(s)
    whole = block.times(16).plus(first).plus(last)
    passes = whole.forward_s, whole.backward_s
    parts = model.estimate(s).parts
    assert parts["data"] == pytest.approx(model.communication.data(s).exposed_s(*passes))
    assert parts["offload"] == pytest.approx(model.offload.times(s).exposed_s(*passes))
    for hides in (model.communication.data(s), model.offload.times(s)):  # the order of the passes counts
        assert abs(hides.exposed_s(*passes) - hides.exposed_s(*reversed(passes))) > 1e-4


def test_exchanges_of_a_block_hide_beside_its_own_products_and_attention() -> None:
    far = replace(JOB, cluster=replace(CLUSTER, gpus_per_node=1, gpu=replace(CLUSTER.gpu, link_bytes_per_s=0.0)))
    model = TimeModel(far)
    split = {"mesh.cp": 2, "mesh.tp": 2, "mesh.dp_shard": 8, "tensor.sequence_parallel": True}
    batch = {"batch.micro_size": 4, "batch.accumulation": 4, "recompute.mode": "full", "recompute.every": 4}
    s = changed(BASE, split | batch)
    block, attention, exchange = model.compute.block(s), model.compute.attention(s), model.communication.block(s)
    again_s = min(attention.forward_s, block.recompute_s)
    sides = ((exchange.forward, attention.forward_s), (exchange.backward, attention.backward_s))
    context_s = sum(exposed_s(each.context_s, beside_s) for each, beside_s in (*sides, (exchange.recompute, again_s)))
    parts = model.estimate(s).parts
    assert attention.forward_s > block.recompute_s / 4
    assert parts["context"] == pytest.approx(4 * 16 * context_s)
    hidden = exchange.backward.hidden_tensor * exchange.backward.tensor_s
    assert hidden > 0
    products_s = block.backward_s - attention.backward_s
    tensor_s = exchange.forward.tensor_s + exchange.backward.tensor_s - hidden + exposed_s(hidden, products_s)
    tensor_s += exchange.recompute.tensor_s
    ends = (model.communication.embedding(s), model.communication.head(s))
    ends_s = sum(each.forward.tensor_s + each.backward.tensor_s for each in ends)
    assert parts["tensor"] == pytest.approx(4 * (16 * tensor_s + ends_s))


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.2), (1.0, 0.8, 0.7), (1.0, 1.3, 0.9), (1.0, 0.8, 1.1)])
def test_quick_bubbles_of_zero_bubble_schedules_are_those_of_their_simulation(times: tuple[float, ...]) -> None:
    for name, num_virtual, off_s in (("zb-h1", 1, 1e-9), ("zb-h2", 1, 1e-9), ("zb-v", 2, 0.25)):
        forward_s, backward_s, weight_s = (each / num_virtual for each in times)
        stage = OpTimes(forward_s=forward_s, backward_input_s=backward_s, backward_weight_s=weight_s)
        stages = [stage] * (4 * num_virtual)
        span = PipelineSimulator().span(name, 4, num_virtual, 16, stages)
        s = changed(
            BASE,
            {"mesh.pp": 4, "batch.accumulation": 16, "pipeline.schedule": name, "pipeline.virtual_stages": num_virtual},
        )
        assert quick_bubble_s(s, stages) == pytest.approx(max(span.rank_spans_s) - span.busy_s[0], abs=off_s), name
