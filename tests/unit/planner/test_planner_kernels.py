"""Times of kernels, worked out by hand on machines where one kind of work takes all the time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner_eval.models import PublishedComputeModel
from planner_eval.traits import PublishedTraits, run_by
from shardwise.config.resolve import ResolvedConfig
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.models.shape import ExpertsShape, ModelShape
from shardwise.planner.calibration import PassTimes
from shardwise.planner.compute_time import ComputeTimeModel, ceiling_flops_per_s, shape_share
from shardwise.planner.hardware import Cluster, FittedConstants, GpuSpec
from shardwise.planner.host_time import NO_HOST, queued_s
from shardwise.planner.job import BASE, PlanJob, changed
from shardwise.planner.profile import AttentionTime, MatmulTime, Profile

RATE, FREE = 1e9, 1e30
TOKENS = 128
# Of a block: 64 x 128 for queries, 64 x 32 for keys and for values, 128 x 64 after them, and 3 x 64 x 96.
ATTENTION_PARAMS, FFN_PARAMS, HEAD_PARAMS = 20_480, 18_432, 64_000
SHAPE = ModelShape(
    num_layers=4, hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=16, ffn_size=96, vocab_size=1000
)  # fmt: skip
# Each of 8 holds 3 x 64 x 32 and is one of the router's columns; a token passes 2 of them and 1 that all pass.
EXPERTS = ExpertsShape(num_experts=8, num_chosen=2, ffn_size=32, num_shared=1, num_dense_layers=1)
PASSED_PARAMS = 64 * 8 + 3 * (3 * 64 * 32)
GPU = GpuSpec(
    name="plain",
    memory_bytes=1e12,
    memory_bytes_per_s=RATE,
    peak_flops_per_s={"bf16": RATE, "fp8": 2 * RATE},
    ceiling_flops_per_s={"bf16": RATE},
    num_cores=1,
    fitted=FittedConstants(matmul_share=1.0, memory_share=1.0, network_share=1.0),
)


def model(
    *,
    products: float = FREE,
    scores: float = FREE,
    stream: float = FREE,
    shape: ModelShape = SHAPE,
    **facts: Any,
) -> ComputeTimeModel:
    """A machine that does so many FLOPs in products and in attention's scores, and moves so many bytes, a second."""
    profile = Profile(
        device="plain",
        num_ranks=1,
        num_threads=1,
        memory_bytes=1e12,
        matmuls=tuple(
            MatmulTime(dtype=dtype, m=1, n=1, k=1, seconds=2 / products) for dtype in ("bf16", "fp32", "fp8")
        ),
        attentions=tuple(
            AttentionTime(dtype=dtype, num_heads=1, head_dim=1, seq_len=1, forward_s=4 / scores, backward_s=10 / scores)
            for dtype in ("bf16", "fp32")
        ),
        stream_bytes_per_s=stream,
        call_s=1e-30,
    )
    cluster = Cluster(gpu=GPU, num_gpus=8, gpus_per_node=8, nic_bytes_per_s=1e9, profile=profile)
    return ComputeTimeModel(PlanJob(shape=shape, seq_len=TOKENS, global_batch=8, cluster=cluster, **facts))


def seconds(times: PassTimes) -> tuple[float, float, float, float]:
    return times.forward_s, times.backward_input_s, times.backward_weight_s, times.recompute_s


def flops_s(params: float, tokens: float = TOKENS) -> float:
    """Of one product of each token with so many weights."""
    return 2 * tokens * params / RATE


@pytest.mark.parametrize(
    ("config", "tokens", "params"),
    [
        (BASE, TOKENS, ATTENTION_PARAMS + FFN_PARAMS),
        (changed(BASE, {"batch.micro_size": 3, "mesh.cp": 2}), 1.5 * TOKENS, ATTENTION_PARAMS + FFN_PARAMS),
        (changed(BASE, {"mesh.tp": 2}), TOKENS, (ATTENTION_PARAMS + FFN_PARAMS) / 2),
        # Each of 4 ranks has 2 heads, and keys and values of 1, since half a head is none.
        (changed(BASE, {"mesh.tp": 4}), TOKENS, 64 * (2 + 2) * 16 + 64 * 2 * 16 + FFN_PARAMS / 4),
    ],
)
def test_each_pass_multiplies_each_token_by_each_weight(config: ResolvedConfig, tokens: float, params: float) -> None:
    each_s = flops_s(params, tokens)
    assert seconds(model(products=RATE).block(config)) == pytest.approx((each_s, each_s, each_s, 0.0))
    head_s = flops_s(HEAD_PARAMS / config.mesh.tp, tokens)
    assert seconds(model(products=RATE).head(config)) == pytest.approx((head_s, head_s, head_s, 0.0))


def test_a_plain_feed_forward_has_two_matrices() -> None:
    block = model(products=RATE, shape=replace(SHAPE, ffn="plain")).block(BASE)
    assert block.forward_s == pytest.approx(flops_s(ATTENTION_PARAMS + FFN_PARAMS * 2 / 3))


@pytest.mark.parametrize("ep", [1, 4])
def test_tokens_pass_the_experts_that_they_chose_and_those_that_all_pass(ep: int) -> None:
    even = model(products=RATE, shape=replace(SHAPE, experts=EXPERTS), usual_skew=1.0)
    block = even.block(changed(BASE, {"mesh.dp_shard": 8, "mesh.ep": ep}))
    each_s = flops_s(ATTENTION_PARAMS + FFN_PARAMS / 4 + PASSED_PARAMS * 3 / 4)  # one layer of four is dense
    assert seconds(block) == pytest.approx((each_s, each_s, each_s, 0.0))


def test_the_fullest_rank_of_experts_is_waited_for() -> None:
    even = model(products=RATE, shape=replace(SHAPE, experts=EXPERTS), usual_skew=1.0)
    whole, split = (changed(BASE, {"mesh.dp_shard": 8, "mesh.ep": ep}) for ep in (1, 4))
    skewed = {"experts.skew": 1.5}
    assert even.block(changed(whole, skewed)) == even.block(whole)
    over = [even.block(config).forward_s for config in (split, changed(split, skewed))]
    routed = FFN_PARAMS / 96 * EXPERTS.ffn_size * EXPERTS.num_chosen
    assert over[1] - over[0] == pytest.approx(0.5 * flops_s(routed * 3 / 4))
    usual = model(products=RATE, shape=replace(SHAPE, experts=EXPERTS), usual_skew=1.5)
    assert usual.block(split).forward_s == over[1]


def test_streams_of_experts_grow_with_the_tokens_they_are_sent() -> None:
    one, two = (
        model(stream=RATE, shape=replace(SHAPE, experts=replace(EXPERTS, num_chosen=chosen, num_dense_layers=0)))
        for chosen in (1, 2)
    )
    # Another 2 x 128 x 64 bytes are copied there and back, and 2 x 128 x 32 more are activated.
    passes_s = two.block(BASE).forward_s - one.block(BASE).forward_s
    dense = model(stream=RATE).block(BASE).forward_s
    wider = model(stream=RATE, shape=replace(SHAPE, ffn_size=96 + 32)).block(BASE).forward_s
    assert passes_s == pytest.approx(wider - dense + 11 * 2 * TOKENS * 64 / RATE)
    dense_layer = replace(EXPERTS, num_dense_layers=1)
    mixed = model(stream=RATE, shape=replace(SHAPE, experts=dense_layer)).block(BASE).forward_s
    all_routed = two.block(BASE).forward_s
    assert mixed == pytest.approx(0.75 * all_routed + 0.25 * dense)


def test_attention_meets_all_keys_or_those_of_its_windows() -> None:
    # 4 FLOPs of each token, key and element of all heads, and 10 in the backward.
    whole_s = 4 * TOKENS * TOKENS * 128 / RATE
    block = model(scores=RATE).block(BASE)
    assert seconds(block) == pytest.approx((whole_s, 2.5 * whole_s, 0.0, 0.0))
    assert model(scores=RATE).block(changed(BASE, {"mesh.tp": 2, "mesh.cp": 2})).forward_s == pytest.approx(whole_s / 4)
    windowed = model(scores=RATE, shape=replace(SHAPE, window=32))
    assert windowed.block(BASE).forward_s == pytest.approx(whole_s / 2)


def test_split_sequences_stream_their_share_of_everything() -> None:
    streams = model(stream=RATE)
    whole, split, shared = (
        streams.block(each).forward_s
        for each in (
            BASE,
            changed(BASE, {"mesh.tp": 2, "tensor.sequence_parallel": True}),
            changed(BASE, {"mesh.tp": 2}),
        )
    )
    assert split == pytest.approx(whole / 2)
    assert whole / 2 < shared < whole


@pytest.mark.parametrize(
    ("config", "wide_bytes"),
    [
        (changed(BASE, {"batch.accumulation": 2}), 8),  # read and written in fp32
        (changed(BASE, {"batch.accumulation": 2, "precision.accumulate": "param"}), 4),
        (changed(BASE, {"batch.accumulation": 1}), 0),
        (
            changed(BASE, {"batch.accumulation": 2, "zero.stage": 3, "mesh.dp_shard": 8}),
            0,
        ),  # each is reduced as it comes
    ],
)
def test_gradients_are_added_to_those_of_other_micro_batches(config: ResolvedConfig, wide_bytes: int) -> None:
    block = model(stream=RATE).block(config)
    assert block.backward_weight_s == pytest.approx(wide_bytes * (ATTENTION_PARAMS + FFN_PARAMS) / RATE)


def test_what_is_computed_again_is_what_was_not_kept() -> None:
    full, every_other, selective = (
        changed(BASE, {"recompute.mode": "full"}),
        changed(BASE, {"recompute.mode": "full", "recompute.every": 2}),
        changed(BASE, {"recompute.mode": "selective"}),
    )
    products, streams, scores = model(products=RATE), model(stream=RATE), model(scores=RATE)
    assert products.block(full).recompute_s == products.block(full).forward_s
    assert products.block(every_other).recompute_s == products.block(full).forward_s / 2
    assert products.block(selective).recompute_s == pytest.approx(0.0)
    assert streams.block(selective).recompute_s == pytest.approx(streams.block(selective).forward_s)
    unfused = unmeasured(attention="unfused")
    assert unfused.block(selective).recompute_s == pytest.approx(unfused.attention(selective).forward_s)
    assert scores.block(selective).recompute_s == pytest.approx(0.0)


def test_a_feed_forward_in_chunks_is_computed_once_more_where_its_block_is_not() -> None:
    products = model(products=RATE)
    again = [
        products.block(changed(BASE, {"recompute.mode": mode, "context.chunk_tokens": chunk})).recompute_s
        for mode in ("none", "full")
        for chunk in (None, 1024)
    ]
    assert again[0] == 0.0 < again[1] < again[2] == again[3]


def test_the_loss_reads_and_writes_whole_logits_or_a_rank_s_own() -> None:
    split, whole = changed(BASE, {"mesh.tp": 4}), BASE
    own, kept = model(stream=RATE), published(model(stream=RATE), logits_bytes=4.0, splits_logits=False)
    assert own.head(split).forward_s == pytest.approx(own.head(whole).forward_s / 4)
    assert kept.head(split).forward_s == pytest.approx(kept.head(whole).forward_s)
    widened = published(model(stream=RATE), logits_bytes=12.0)
    # 8 bytes of each fp32 logit forward and 16 backward, and a cast of 6 bytes where it is bf16.
    logits = TOKENS * 1000
    assert widened.head(whole).forward_s == pytest.approx((8 + 6) * logits / RATE)
    assert widened.head(whole).backward_input_s == pytest.approx((16 + 6) * logits / RATE)
    assert widened.head(changed(BASE, {"precision.param": "fp32"})).forward_s == pytest.approx(8 * logits / RATE)


def test_the_head_is_no_narrower_than_its_weights() -> None:
    assert model(stream=RATE).head(changed(BASE, {"precision.linears": "fp8"})) == model(stream=RATE).head(BASE)


def test_the_embedding_is_looked_up_and_its_gradients_are_summed() -> None:
    wide_s = 2 * TOKENS * 64 / RATE
    assert seconds(model(stream=RATE).embedding(BASE)) == pytest.approx((2 * wide_s, 0.0, 4 * wide_s, 0.0))


def test_the_optimizer_moves_its_states_and_what_is_narrower_besides() -> None:
    # Parameter, gradient and two moments in fp32 are read, and all but the gradient written: 28 bytes.
    assert model(stream=RATE).step_s(changed(BASE, {"precision.param": "fp32"}), 1e6) == pytest.approx(0.028)
    assert model(stream=RATE).step_s(BASE, 1e6) == pytest.approx(0.030)


def published(own: ComputeTimeModel, **facts: Any) -> ComputeTimeModel:
    return PublishedComputeModel(run_by(own.job, PublishedTraits(**facts)))


def unmeasured(shape: ModelShape = SHAPE, gpu: GpuSpec = GPU, **facts: Any) -> ComputeTimeModel:
    cluster = Cluster(gpu=gpu, num_gpus=8, gpus_per_node=8, nic_bytes_per_s=1e9)
    job = PlanJob(shape=shape, seq_len=128, global_batch=8, cluster=cluster)
    return published(ComputeTimeModel(job), **facts)


def test_the_host_launches_what_a_block_s_code_has_and_a_graph_launches_itself() -> None:
    eager, graphed = (unmeasured(is_graphed=each).host(BASE) for each in (False, True))
    compiled = unmeasured().host(changed(BASE, {"compile.enabled": True}))
    assert (eager.forward_s, eager.backward_s) == pytest.approx((42 * 12e-6, 78 * 10e-6))
    assert (compiled.forward_s, compiled.backward_s) == pytest.approx((14 * 14e-6, 25 * 14e-6))
    assert graphed == NO_HOST
    assert NO_HOST.forward_s == NO_HOST.backward_s == sum(NO_HOST.ends_s) == 0
    again = unmeasured().host(changed(BASE, {"recompute.mode": "full", "recompute.every": 2}))
    assert again.backward_s == pytest.approx(eager.backward_s + eager.forward_s / 2)
    grace = unmeasured(gpu=replace(GPU, name="gb200")).host(BASE)
    assert grace.forward_s == pytest.approx(2.6 * eager.forward_s)
    profile = Profile(device="plain", num_ranks=1, num_threads=1, memory_bytes=1e12, call_s=24e-6)
    measured = replace(unmeasured().job.cluster, profile=profile)
    slow = PublishedComputeModel(replace(unmeasured().job, cluster=measured)).host(BASE)
    assert slow.forward_s == pytest.approx(2 * eager.forward_s)
    job = unmeasured().job
    processor = replace(job, cluster=replace(job.cluster, gpu=replace(GPU, name="cpu")))
    assert ComputeTimeModel(processor).host(BASE) == NO_HOST


def test_our_own_code_around_a_block_costs_by_stage_and_parameter() -> None:
    own = ComputeTimeModel(unmeasured().job)
    plain = unmeasured().host(BASE)
    for stage, around_s in ((0, 51e-6), (2, 51e-6 + 9 * 6e-6), (3, 81e-6 + 9 * 6e-6)):
        host = own.host(changed(BASE, {"mesh.dp_shard": 8, "zero.stage": stage}))
        both_s = host.forward_s + host.backward_s - plain.forward_s - plain.backward_s
        assert both_s == pytest.approx(around_s)
    assert own.host(BASE).param_s > 0


def test_experts_of_few_tokens_multiply_half_empty_tiles() -> None:
    # Of 64 rows in tiles of 128, a mean of as many again are empty; of 4096 none matter.
    few, many = (shape_share(m, 1024, 4096, 1, 64, is_routed=True) for m in (64, 4096))
    assert few < 0.75 * shape_share(128, 1024, 4096, 1, 64)
    assert many == pytest.approx(shape_share(4096, 1024, 4096, 1, 64), rel=0.02)


def test_a_product_takes_its_flops_at_what_its_tiles_reach_and_a_kernel_s_start() -> None:
    # Two tiles of 256 x 128 one after the other, each 192 deep after 96 in which it fills: two thirds of the rate.
    assert shape_share(256, 256, 192, 1) == pytest.approx(2 / 3)
    # On three cores they leave one empty, however deep.
    assert shape_share(256, 256, 10**9, 3) == pytest.approx(2 / 3, rel=1e-6)
    half = replace(GPU, fitted=replace(GPU.fitted, matmul_share=0.5))
    product_s = 2 * 256 * 256 * 192 / (RATE / 2 * 2 / 3)
    assert unmeasured(gpu=half)._product_s(256, 256, 192, "bf16") == pytest.approx(product_s + 2.5e-6, rel=1e-9)


def test_a_dtype_that_was_not_measured_reaches_the_share_that_another_did() -> None:
    job = unmeasured(gpu=replace(GPU, ceiling_flops_per_s={"bf16": 0.7 * RATE})).job
    assert ceiling_flops_per_s(job, "bf16") == 0.7 * RATE
    assert ceiling_flops_per_s(job, "fp8") == pytest.approx(0.7 * 2 * RATE)
    assert ceiling_flops_per_s(unmeasured(gpu=replace(GPU, ceiling_flops_per_s={})).job, "bf16") == 0.8 * RATE


def test_flash_attention_takes_half_of_all_pairs_and_five_halves_of_that_back() -> None:
    # Of heads as large as its tiles are, over so many keys that beginning and ending are nothing.
    long = replace(SHAPE, head_dim=128)
    deep = unmeasured(shape=long)
    times = ComputeTimeModel(replace(deep.job, seq_len=10**8)).attention(BASE)
    pairs_s = 4 * 1e8 * 1e8 * 8 * 128 / 2 / RATE
    assert times.forward_s == pytest.approx(pairs_s / 0.97, rel=1e-4)
    assert times.backward_input_s == pytest.approx(2.5 * pairs_s / 0.86, rel=1e-4)


def test_flash_attention_on_amd_is_slower_back_than_forth() -> None:
    amd = replace(GPU, name="mi300x", peak_flops_per_s={"bf16": RATE}, ceiling_flops_per_s={})
    deep = unmeasured(gpu=amd, shape=replace(SHAPE, head_dim=128))
    times = ComputeTimeModel(replace(deep.job, seq_len=10**8)).attention(BASE)
    pairs_s = 4 * 1e8 * 1e8 * 8 * 128 / 2 / RATE
    assert times.forward_s == pytest.approx(pairs_s / 0.27, rel=1e-4)
    assert times.backward_input_s == pytest.approx(2.5 * pairs_s / 0.155, rel=1e-4)


def test_a_host_that_reads_each_loss_hides_nothing_of_the_next_micro_batch() -> None:
    device, host = (2.0, 4.0), (1.0, 2.0)
    ahead_s, waiting_s = (queued_s(device, host, num_micro_batches=5, reads_loss=reads) for reads in (False, True))
    assert ahead_s == waiting_s == 30.0  # its launches are the shorter ones either way
    ahead_s, waiting_s = (
        queued_s(device, host, num_micro_batches=5, alone_s=1.0, reads_loss=reads) for reads in (False, True)
    )
    assert (ahead_s, waiting_s) == (31.0, 35.0)


@pytest.mark.parametrize(("param", "num_more"), [("fp32", 4), ("bf16", 9)])  # scale, mask; widen, narrow, wide softmax
def test_a_softmax_that_is_written_out_reads_and_writes_scores_more_often(param: Any, num_more: int) -> None:
    gpu = replace(GPU, peak_flops_per_s={"bf16": RATE, "fp32": RATE}, ceiling_flops_per_s={})
    config = changed(BASE, {"precision.param": param})
    fused, written = (unmeasured(gpu=gpu, attention=each).attention(config) for each in ("fused-softmax", "unfused"))
    pass_s = 8 * TOKENS**2 * DTYPE_BYTES[param] / RATE
    assert written.forward_s - fused.forward_s == pytest.approx(num_more * pass_s)
    assert written.backward_input_s - fused.backward_input_s == pytest.approx(num_more * pass_s)


def test_gradients_of_a_rank_s_own_experts_are_added() -> None:
    shape = replace(SHAPE, experts=replace(EXPERTS, num_dense_layers=0))
    config = changed(BASE, {"mesh.dp_shard": 8, "mesh.ep": 4, "batch.accumulation": 2})
    block = model(stream=RATE, shape=shape).block(config)
    held = ATTENTION_PARAMS + 64 * 8 + (8 // 4 + 1) * 3 * 64 * 32  # the router, 2 experts of 8, and the shared one
    assert block.backward_weight_s == pytest.approx(8 * held / RATE)
