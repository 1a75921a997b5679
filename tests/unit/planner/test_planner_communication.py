"""What ranks exchange: how often, of what, and what of it hides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.context import AttentionSizes, bytes_of_attention
from planner_eval.models import PublishedCommModel
from planner_eval.traits import PublishedTraits, run_by
from shardwise.attention.block_layout import BlockLayout
from shardwise.config.resolve import Reduce
from shardwise.config.sections import Gather
from shardwise.layout.token_ranges import contiguous, zigzag
from shardwise.models.presets import preset
from shardwise.models.shape import ExpertsShape, ModelShape
from shardwise.planner.collectives import NetworkModel
from shardwise.planner.comm_time import CommTimeModel, TokenExchange, context_bytes, exposed_s
from shardwise.planner.hardware import Cluster, FittedConstants, find_gpu
from shardwise.planner.job import BASE, PlanJob, changed, num_data_ranks

CLUSTER = Cluster(gpu=find_gpu("h100"), num_gpus=64, gpus_per_node=8, nic_bytes_per_s=5e10)
DISPATCH_NETWORK = NetworkModel(
    replace(
        CLUSTER,
        gpu=replace(
            CLUSTER.gpu,
            link_bytes_per_s=CLUSTER.gpu.link_bytes_per_s * 0.7 / 0.9,
            fitted=FittedConstants(network_share=0.9),
        ),
    ),
    collisions=0.0,
)
JOB = PlanJob(shape=ModelShape.of_decoder(preset("llama-3-8b")), seq_len=8192, global_batch=64, cluster=CLUSTER)
MODEL = CommTimeModel(JOB)


def with_traits(**facts: bool | int) -> CommTimeModel:
    return PublishedCommModel(run_by(JOB, PublishedTraits(**facts)))


def test_one_rank_exchanges_nothing() -> None:
    one = changed(BASE, {"batch.accumulation": 4})
    block, data = MODEL.block(one), MODEL.data(one)
    for each in (block.forward, block.backward, block.recompute, MODEL.head(one).forward, MODEL.embedding(one).forward):
        assert each.tensor_s == each.context_s == each.experts_s == 0
    assert data.total_s == data.exposed_s(0.0, 0.0) == MODEL.transfer_s(one) == 0


def test_full_recomputation_repeats_the_forward_s_collectives() -> None:
    plain = MODEL.block(changed(BASE, {"mesh.tp": 4, "recompute.mode": "full"}))
    assert plain.recompute.tensor_s == plain.forward.tensor_s == plain.backward.tensor_s > 0
    assert MODEL.block(changed(BASE, {"mesh.tp": 4})).recompute.tensor_s == 0
    every_other = MODEL.block(changed(BASE, {"mesh.tp": 4, "recompute.mode": "full", "recompute.every": 2}))
    assert every_other.recompute.tensor_s == plain.recompute.tensor_s / 2


def test_split_sequences_gather_their_inputs_again_unless_the_forward_runs_again() -> None:
    split = {
        mode: MODEL.block(changed(BASE, {"mesh.tp": 4, "tensor.sequence_parallel": True, "recompute.mode": mode}))
        for mode in ("none", "full")
    }
    gather_s = MODEL.network.collective_s("all_gather", 2 * 8192 * 4096, 4)
    none, full = split["none"], split["full"]
    assert none.backward.tensor_s == pytest.approx(none.forward.tensor_s + 2 * gather_s)
    assert none.backward.hidden_tensor == pytest.approx(1 / 3)
    assert full.backward.tensor_s == pytest.approx(none.forward.tensor_s)
    assert full.backward.hidden_tensor == 0


def test_a_block_is_the_same_for_every_number_of_data_ranks() -> None:
    assert MODEL.block(changed(BASE, {"mesh.tp": 4, "mesh.dp_shard": 2})) == MODEL.block(
        changed(BASE, {"mesh.tp": 4, "mesh.dp_shard": 4096})
    )


SMALL = ModelShape(
    num_layers=1, hidden_size=32, num_heads=8, num_kv_heads=4, head_dim=8, ffn_size=32, vocab_size=32
)  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("split", [zigzag, contiguous])
def test_a_ring_moves_what_its_plan_says(num_ranks: int, split) -> None:  # type: ignore[no-untyped-def]
    sizes = AttentionSizes(samples=2, num_heads=4, num_kv_heads=2, head_dim=8)
    tokens = split(8 * num_ranks, num_ranks)
    config = changed(BASE, {"mesh.cp": num_ranks, "mesh.tp": 2, "batch.micro_size": 2})
    heads, keys = context_bytes(SMALL, config, 8 * num_ranks)
    assert heads == (0, 0)
    dense = BlockLayout.from_blocks(torch.ones(tokens.num_tokens, tokens.num_tokens), 1)
    for rank in range(num_ranks):
        assert bytes_of_attention(dense, tokens, rank, sizes) == keys
    causal = BlockLayout.from_blocks(torch.ones(tokens.num_tokens, tokens.num_tokens), 1, causal=True)
    assert max(bytes_of_attention(causal, tokens, rank, sizes).forward for rank in range(num_ranks)) == keys[0]


@pytest.mark.parametrize(("num_ranks", "forward", "backward"), [(2, 10, 10), (8, 28, 42)])
def test_an_exchange_of_heads_sends_what_the_closed_form_says(num_ranks: int, forward: int, backward: int) -> None:
    # u - 1 of u parts of q, k, v and the output: 8 + 8 + 2 + 2 heads in bf16. Each of 8 ranks has one of 2 KV heads,
    # whose gradients are summed in fp32.
    config = changed(BASE, {"mesh.cp": num_ranks, "context.transport": "ulysses", "batch.micro_size": 3})
    heads, keys = context_bytes(replace(SMALL, num_kv_heads=2), config, 64 * num_ranks)
    assert heads == (forward * 64 * 3 * 8 * 2, backward * 64 * 3 * 8 * 2)
    assert keys == (0, 0)


@pytest.mark.parametrize("over", [2, 4])
def test_ranks_of_few_heads_exchange_them_and_then_keys(over: int) -> None:
    config = changed(BASE, {"mesh.cp": 8, "context.heads_over": over})
    heads, keys = context_bytes(SMALL, config, 64)
    dense = BlockLayout.from_blocks(torch.ones(64, 64), 1)
    sizes = AttentionSizes(samples=1, num_heads=8, num_kv_heads=4, head_dim=8)
    both = bytes_of_attention(dense, contiguous(64, 8), 0, sizes, heads_over=over)
    assert (heads[0] + keys[0], heads[1] + keys[1]) == both


def test_keys_move_less_where_few_heads_have_them_than_heads_do() -> None:
    ring, ulysses, gathered, both = (
        MODEL.block(changed(BASE, {"mesh.cp": 8, "context.transport": transport, "context.heads_over": over})).forward
        for transport, over in (("ring", None), ("ulysses", None), ("all-gather", None), ("ring", 4))
    )
    assert min(each.context_s for each in (ring, ulysses, gathered, both)) > 0
    assert ring.hidden_context == both.hidden_context == 1
    assert ulysses.hidden_context == gathered.hidden_context == 0
    assert gathered.context_s < ring.context_s  # one call in place of seven
    assert MODEL.block(changed(BASE, {"mesh.cp": 8})).backward.context_s > 2 * ring.context_s


def test_experts_exchange_tokens_only_where_they_are_split() -> None:
    experts = ExpertsShape(num_experts=8, num_chosen=2, ffn_size=14336)
    job = replace(JOB, shape=replace(JOB.shape, experts=experts))
    model = CommTimeModel(job)
    assert model.block(changed(BASE, {"mesh.dp_shard": 8})).forward.experts_s == 0
    config = changed(BASE, {"mesh.dp_shard": 8, "mesh.ep": 8})
    split = model.block(config).forward.experts_s
    assert split > 0
    halved = replace(job, shape=replace(job.shape, experts=replace(experts, num_dense_layers=16)))
    assert CommTimeModel(halved).block(config).forward.experts_s == pytest.approx(split / 2)


def test_a_token_crosses_the_network_once_for_each_node_of_its_experts_where_the_code_sends_it_so() -> None:
    def experts_s(num_chosen: int, **facts: bool) -> float:
        experts = ExpertsShape(num_experts=256, num_chosen=num_chosen, ffn_size=2048)
        job = replace(JOB, shape=replace(JOB.shape, experts=experts))
        return (
            PublishedCommModel(run_by(job, PublishedTraits(**facts)))
            .block(changed(BASE, {"mesh.dp_shard": 64, "mesh.ep": 64}))
            .forward.experts_s
        )

    tokens_bytes = 2 * 8192 * 4096
    network = DISPATCH_NETWORK
    for num_chosen, copies in ((1, 1.0), (8, 8 * (1 - (7 / 8) ** 8))):
        assert experts_s(num_chosen) == pytest.approx(
            2 * network.collective_s("all_to_all", copies * tokens_bytes, 8, stride=8), rel=0.05
        )
    assert experts_s(32) < 8.1 * experts_s(1)  # of 8 nodes no more than all
    assert experts_s(8, dedups_tokens=False) == pytest.approx(8 * experts_s(1, dedups_tokens=False), rel=0.02)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tp_sums_what_it_splits_and_gathers_what_experts_return(sequence_parallel: bool) -> None:
    config = changed(BASE, {"mesh.tp": 2, "tensor.sequence_parallel": sequence_parallel})
    experts = ExpertsShape(num_experts=8, num_chosen=2, ffn_size=64)
    jobs = [replace(JOB, shape=replace(JOB.shape, experts=each)) for each in (None, experts)]
    dense, routed = (CommTimeModel(job).block(config).forward.tensor_s for job in jobs)
    gathered = 0.0 if sequence_parallel else MODEL.network.collective_s("all_gather", ACTIVATION_BYTES, 2)
    assert routed == pytest.approx(dense / 2 + gathered)
    shared = replace(JOB, shape=replace(JOB.shape, experts=replace(experts, num_shared=1)))
    assert CommTimeModel(shared).block(config).forward.tensor_s == dense


def test_stages_gather_and_reduce_as_often_as_the_layout_says() -> None:
    data = {
        stage: MODEL.data(changed(BASE, {"mesh.dp_shard": 8, "zero.stage": stage, "batch.accumulation": 4}))
        for stage in range(4)
    }
    assert data[0].forward_s == data[1].forward_s == data[2].forward_s == 0 < data[3].forward_s
    assert data[0].first_forward_s == data[3].first_forward_s == 0 < data[1].first_forward_s
    assert data[1].backward_s == 0 < data[2].backward_s
    again_s = data[3].backward_s - data[2].backward_s  # all but the root and the last block
    assert 0.7 * data[3].forward_s < again_s < data[3].forward_s
    assert data[1].total_s < data[2].total_s < data[3].total_s
    scheduled = MODEL.data(changed(BASE, {"mesh.pp": 2, "mesh.dp_shard": 8, "zero.stage": 3, "batch.accumulation": 4}))
    assert scheduled.forward_s == scheduled.backward_s == 0 < scheduled.first_forward_s
    each = MODEL.data(
        changed(
            BASE,
            {
                "mesh.pp": 2,
                "mesh.dp_shard": 8,
                "zero.stage": 3,
                "batch.accumulation": 4,
                "pipeline.gather": "micro-batch",
            },
        )
    )
    assert each.forward_s > 0


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "axes",
    [
        {"mesh.dp_shard": 8},
        {"mesh.dp_shard": 4, "mesh.dp_replicate": 2, "precision.reduce": "fp32"},
        {"mesh.dp_shard": 2, "mesh.cp": 2, "mesh.tp": 2},
        {"mesh.dp_shard": 4, "mesh.pp": 4},
        {"mesh.dp_shard": 4, "mesh.pp": 2, "mesh.tp": 2, "pipeline.gather": "micro-batch"},
        {"mesh.dp_shard": 4, "mesh.pp": 2, "pipeline.schedule": "interleaved", "pipeline.virtual_stages": 2},
    ],
)
@pytest.mark.parametrize("is_tied", [False, True])
def test_calls_send_what_the_layout_says(zero_stage: int, axes: dict[str, int], is_tied: bool) -> None:
    model = CommTimeModel(replace(JOB, shape=replace(JOB.shape, is_tied=is_tied)))
    config = changed(BASE, {"zero.stage": zero_stage, "batch.accumulation": 4, **axes})
    for rank in range(config.mesh.pp):
        wire = {"all_reduce": 0, "reduce_scatter": 0, "all_gather": 0}
        for call in model.data_calls(config, rank):
            times = call.count * (4 if call.moment in ("forward", "backward") else 1)
            sent = call.num_bytes * (call.num_ranks - 1) // call.num_ranks
            wire[call.op] += times * sent * (2 if call.op == "all_reduce" else 1)
        assert wire == model.layouts.on_wire(config, rank)


@pytest.mark.parametrize("gather", ["param", "int8"])
@pytest.mark.parametrize(
    ("num_micro_batches", "axes"), [(1, {"mesh.dp_shard": 64}), (4, {"mesh.dp_shard": 16, "mesh.pp": 4})]
)
def test_secondary_shards_keep_gathers_within_a_node(
    gather: Gather, num_micro_batches: int, axes: dict[str, int]
) -> None:
    job = replace(JOB, cluster=replace(CLUSTER, nic_bytes_per_s=5e9))  # where the network is slow
    model, late = CommTimeModel(job), {"batch.accumulation": num_micro_batches, "pipeline.gather": "micro-batch"}
    base = changed(BASE, {"zero.stage": 3, **late, **axes})
    config = changed(base, {"zero.secondary_shard": 8, "precision.gather": gather})
    sent = {8: 0, axes["mesh.dp_shard"]: 0}
    for call in model.data_calls(config):
        if call.op == "all_gather":
            times = call.count * (num_micro_batches if call.moment in ("forward", "backward") else 1)
            sent[call.num_ranks] += times * (call.num_bytes * (call.num_ranks - 1) // call.num_ranks)
    wire = model.layouts.on_wire(config)
    assert sent[axes["mesh.dp_shard"]] == wire["all_gather"]
    near_bytes = wire["secondary_all_gather"]
    assert near_bytes <= sent[8] <= near_bytes * (1 if num_micro_batches == 1 else 1.2)
    plain = model.data(base)
    assert model.data(config).total_s < plain.total_s
    assert model.data(changed(base, {"precision.gather": "int8"})).total_s < plain.total_s


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("axes", "node"),
    [
        ({"mesh.dp_shard": 8, "mesh.tp": 2}, 0),
        ({"mesh.dp_shard": 8, "mesh.tp": 2}, 4),
        ({"mesh.dp_shard": 4, "mesh.dp_replicate": 2}, 0),
        ({"mesh.dp_shard": 4, "mesh.pp": 2}, 0),
    ],
)
def test_encoded_sums_send_what_the_layout_says(zero_stage: int, axes: dict[str, int], node: int) -> None:
    """As many bytes; steps within nodes are among neighbours, and those across them among one rank of each."""
    model, base = CommTimeModel(JOB), changed(BASE, {"zero.stage": zero_stage, "zero.secondary_shard": node, **axes})
    config = changed(base, {"batch.accumulation": 4, "precision.reduce": "int8"})
    for rank in range(config.mesh.pp):
        calls, sent = model.data_calls(config, rank), 0
        for call in calls:
            times = call.count * (4 if call.moment in ("forward", "backward") else 1)
            passes = 2 if call.op == "all_reduce" else 1
            is_of_sum = call.op != "all_gather" or call.moment == "last backward"
            sent += is_of_sum * times * passes * (call.num_bytes * (call.num_ranks - 1) // call.num_ranks)
        wire = model.layouts.on_wire(config, rank)
        assert sent == wire["all_reduce"] + wire["reduce_scatter"]
        hops = {(call.num_ranks, call.stride) for call in calls if call.op == "all_to_all"}
        if node:
            assert hops == {(4, 2), (2, 8)}
        else:
            assert (num_data_ranks(config) if zero_stage == 0 else config.mesh.dp_shard, config.mesh.tp) in hops


def test_codes_shorten_reductions_where_they_stay_in_a_node_first() -> None:
    def reduce_s(dp_shard: int, reduce: Reduce, node: int) -> float:
        zero = {"mesh.dp_shard": dp_shard, "zero.stage": 2, "zero.secondary_shard": node}
        return MODEL.data(changed(BASE, {**zero, "batch.accumulation": 2, "precision.reduce": reduce})).backward_s

    assert reduce_s(8, "int4", 0) < reduce_s(8, "int8", 0) < reduce_s(8, "param", 0)
    assert reduce_s(64, "int8", 8) < reduce_s(64, "param", 0) < reduce_s(64, "int8", 0)


def test_shards_within_a_node_need_less_of_the_network() -> None:
    whole, hybrid = (
        MODEL.data(
            changed(
                BASE,
                {"mesh.dp_replicate": 64 // shards, "mesh.dp_shard": shards, "zero.stage": 3, "batch.accumulation": 8},
            )
        )
        for shards in (64, 8)
    )
    assert hybrid.total_s < whole.total_s
    over_all, in_node = (
        with_traits(optimizer_shards=shards).data(changed(BASE, {"mesh.dp_shard": 64, "zero.stage": 1}))
        for shards in (64, 8)
    )
    assert in_node.first_forward_s < over_all.first_forward_s


def test_wide_reductions_take_longer() -> None:
    narrow, wide = (
        MODEL.data(
            changed(BASE, {"mesh.dp_shard": 64, "zero.stage": 2, "batch.accumulation": 2, "precision.reduce": reduce})
        )
        for reduce in ("param", "fp32")
    )
    assert 1.5 < wide.backward_s / narrow.backward_s < 2


def test_codes_that_do_not_overlap_wait_for_all() -> None:
    config = changed(BASE, {"mesh.dp_shard": 64, "zero.stage": 3, "batch.accumulation": 2})
    waiting = MODEL.data(changed(config, {"zero.overlap": False}))
    assert waiting.exposed_s(10.0, 10.0) == waiting.total_s
    data = MODEL.data(config)
    assert data.exposed_s(0.0, 0.0) == pytest.approx(data.total_s)
    assert data.alone_forward_s + data.alone_backward_s <= data.exposed_s(10.0, 20.0) < data.total_s / 2


def test_gathers_that_are_not_deferred_belong_to_the_step() -> None:
    config = changed(BASE, {"mesh.dp_shard": 64, "zero.stage": 1, "batch.accumulation": 2})
    deferred, waiting = (with_traits(defers_gathers=each).data(config) for each in (True, False))
    assert waiting.total_s == pytest.approx(deferred.total_s)
    assert waiting.first_forward_s == 0
    assert waiting.step_s == pytest.approx(deferred.step_s + deferred.first_forward_s)
    assert waiting.exposed_s(10.0, 10.0) > deferred.exposed_s(10.0, 10.0)
    sharded = changed(BASE, {"mesh.dp_shard": 64, "zero.stage": 3})
    assert with_traits(defers_gathers=False).data(sharded) == MODEL.data(sharded)


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10))
def test_what_is_exposed_grows_with_what_moves_and_shrinks_with_what_is_computed(
    moved: float, one: float, other: float
) -> None:
    less, more = sorted((one, other))
    assert 0 <= exposed_s(moved, more) <= exposed_s(moved, less) <= moved
    assert exposed_s(less, moved) <= exposed_s(more, moved)


def test_transfers_shrink_with_split_sequences() -> None:
    whole, split = (
        MODEL.transfer_s(
            changed(BASE, {"mesh.pp": 4, "mesh.tp": 8, "mesh.dp_shard": 2, "tensor.sequence_parallel": is_split})
        )
        for is_split in (False, True)
    )
    assert split < whole < 8 * split


def test_several_stages_of_a_rank_hide_what_is_needed_once_beside_more_micro_batches() -> None:
    one, several = (
        MODEL.data(
            changed(
                BASE,
                {
                    "mesh.pp": 4,
                    "mesh.dp_shard": 4,
                    "zero.stage": 1,
                    "batch.accumulation": 8,
                    "pipeline.schedule": schedule,
                    "pipeline.virtual_stages": stages,
                },
            )
        )
        for schedule, stages in (("1f1b", 1), ("interleaved", 4))
    )
    assert (one.num_hiding, several.num_hiding) == (1, 4)
    forward_s, backward_s = one.first_forward_s / 2, one.last_backward_s / 2
    assert several.exposed_s(forward_s, backward_s) < one.exposed_s(forward_s, backward_s)
    assert several.exposed_s(0.0, 0.0) == pytest.approx(several.total_s)


KIB, MIB = 2**10, 2**20
ACTIVATION_BYTES = 64 * MIB  # 8,192 tokens of 4,096 elements of 2 bytes
SECONDS = MODEL.network.collective_s


def test_head_and_embedding_exchange_what_split_vocabularies_need() -> None:
    sum_s, gather_s, scatter_s = (
        SECONDS(op, ACTIVATION_BYTES, 4) for op in ("all_reduce", "all_gather", "reduce_scatter")
    )
    numbers_s = 3 * SECONDS("all_reduce", 32 * KIB, 4)  # of a token, in fp32
    whole, split = changed(BASE, {"mesh.tp": 4}), changed(BASE, {"mesh.tp": 4, "tensor.sequence_parallel": True})
    assert MODEL.head(whole).forward.tensor_s == pytest.approx(numbers_s)
    assert MODEL.head(whole).backward.tensor_s == pytest.approx(sum_s)
    assert MODEL.head(split).forward.tensor_s == pytest.approx(numbers_s + gather_s)
    assert MODEL.head(split).backward.tensor_s == pytest.approx(gather_s + scatter_s)
    assert MODEL.embedding(whole).forward.tensor_s == pytest.approx(sum_s)
    assert MODEL.embedding(whole).backward.tensor_s == 0
    assert MODEL.embedding(split).forward.tensor_s == pytest.approx(scatter_s)
    assert MODEL.embedding(split).backward.tensor_s == pytest.approx(gather_s)
    of_half = MODEL.head(changed(whole, {"mesh.cp": 2})).forward.tensor_s
    assert of_half == pytest.approx(3 * SECONDS("all_reduce", 16 * KIB, 4))


def test_a_stage_sends_its_activation_to_the_same_rank_of_the_next() -> None:
    share = CLUSTER.gpu.fitted.network_share  # which a send alone does not lose
    config = changed(BASE, {"mesh.pp": 4, "mesh.tp": 8, "mesh.dp_shard": 2})
    assert MODEL.transfer_s(config) == pytest.approx(SECONDS("send", share * ACTIVATION_BYTES, 4, 16))
    split = changed(config, {"tensor.sequence_parallel": True})
    assert MODEL.transfer_s(split) == pytest.approx(SECONDS("send", share * ACTIVATION_BYTES / 8, 4, 16))


def test_keys_and_values_are_sent_as_often_as_their_transport_says() -> None:
    # Of 2,048 tokens and 4 of 8 heads, each of 128 elements of 2 bytes, keys and values: 4 MiB to each other rank.
    ring, gathered = (
        MODEL.block(changed(BASE, {"mesh.cp": 4, "mesh.tp": 2, "context.transport": each})).forward.context_s
        for each in ("ring", "all-gather")
    )
    assert ring == pytest.approx(3 * SECONDS("send", 4 * MIB, 4, 2))
    assert gathered == pytest.approx(SECONDS("all_gather", 16 * MIB, 4, 2))
    # Queries, keys, values and results of 2,048 tokens and 32, 8, 8 and 32 heads: 40 MiB in two exchanges.
    heads = MODEL.block(changed(BASE, {"mesh.cp": 4, "context.transport": "ulysses"}))
    assert heads.forward.context_s == pytest.approx(2 * SECONDS("all_to_all", 20 * MIB, 4))
    assert heads.backward.context_s == pytest.approx(heads.forward.context_s)
    # Teams of 2 exchange heads of 1,024 tokens, half of them each (10 MiB), and go around 4 with 2,048 tokens.
    both = MODEL.block(changed(BASE, {"mesh.cp": 8, "mesh.tp": 2, "context.heads_over": 2})).forward
    assert both.context_s == pytest.approx(
        2 * SECONDS("all_to_all", 5 * MIB, 2, 2) + 3 * SECONDS("send", 2 * MIB, 4, 4)
    )
    assert (
        MODEL.block(changed(BASE, {"mesh.cp": 8, "context.heads_over": 8})).forward.hidden_context == 0
    )  # nothing goes around


def test_what_overlaps_products_or_attention_is_a_share_of_each() -> None:
    exchange = TokenExchange(tensor_s=4.0, context_s=10.0, experts_s=1.0, hidden_tensor=0.75, hidden_context=1.0)
    # 1 s in the open and a fifth of 3 s; of 10 s what 6 s of attention leave.
    assert exchange.exposed(16.0, 6.0) == pytest.approx({"tensor": 1.6, "context": 4.0, "experts": 1.0})
    overlapped = MODEL.block(changed(BASE, {"mesh.tp": 4, "tensor.overlap_chunks": 4})).forward
    assert overlapped.hidden_tensor == 0.75


def test_tokens_go_to_experts_and_come_back() -> None:
    experts = ExpertsShape(num_experts=8, num_chosen=2, ffn_size=14336)
    model = CommTimeModel(replace(JOB, shape=replace(JOB.shape, experts=experts), usual_skew=1.0))
    there_s = DISPATCH_NETWORK.collective_s("all_to_all", 2 * ACTIVATION_BYTES, 8)
    one, two = (changed(BASE, {"mesh.dp_shard": 8, "mesh.tp": tp, "mesh.ep": 8}) for tp in (1, 2))
    assert model.block(one).forward.experts_s == pytest.approx(2 * there_s)
    assert model.block(changed(one, {"experts.skew": 1.5})).forward.experts_s == pytest.approx(3 * there_s, rel=0.01)
    # Each of two ranks sends half of the tokens.
    half_s = DISPATCH_NETWORK.collective_s("all_to_all", ACTIVATION_BYTES, 8)
    assert model.block(two).forward.experts_s == pytest.approx(2 * half_s)
    calls = model.data_calls(changed(two, {"zero.stage": 1}))
    strides = {call.stride for call in calls if call.num_ranks > 1}
    assert strides == {2, 8}  # of what all data ranks share, and of the two that have the same experts


def test_replicas_of_a_shard_stand_as_far_apart_as_a_shard_group_reaches() -> None:
    calls = MODEL.data_calls(
        changed(
            BASE, {"mesh.dp_replicate": 2, "mesh.dp_shard": 4, "mesh.tp": 2, "zero.stage": 1, "batch.accumulation": 2}
        )
    )
    assert {(call.num_ranks, call.stride) for call in calls if call.op == "all_reduce"} == {(2, 8)}
    assert {(call.num_ranks, call.stride) for call in calls if call.op != "all_reduce"} == {(4, 2)}
    odd = with_traits(optimizer_shards=48).data_calls(changed(BASE, {"mesh.dp_shard": 64, "zero.stage": 1}))
    assert {call.num_ranks for call in odd if call.op != "all_reduce"} == {64}


def test_the_first_gathers_and_the_last_reductions_run_alone() -> None:
    config = changed(BASE, {"mesh.dp_shard": 8, "zero.stage": 3, "batch.accumulation": 2, "precision.reduce": "fp32"})
    data, root = MODEL.data(config), MODEL.layouts.rank(config).folds[0].group
    gather_s = SECONDS("all_gather", 2 * root.padded_numel, 8)
    reduce_s = SECONDS("reduce_scatter", 4 * root.padded_numel, 8)
    assert (data.alone_forward_s, data.alone_backward_s) == pytest.approx((gather_s, reduce_s))
    stage_2 = with_traits(defers_gathers=False).data(
        changed(BASE, {"mesh.dp_shard": 64, "zero.stage": 2, "batch.accumulation": 2})
    )
    assert stage_2.first_forward_s == 0


def test_gradients_that_stay_whole_are_reduced_once() -> None:
    config = changed(BASE, {"mesh.dp_shard": 8, "zero.stage": 3, "batch.accumulation": 4})
    each_time, once = (with_traits(reduces_once=each).data_calls(config) for each in (False, True))
    assert {call.moment for call in each_time if call.op == "reduce_scatter"} == {"backward"}
    assert {call.moment for call in once if call.op == "reduce_scatter"} == {"last backward"}
    assert [call for call in each_time if call.op != "reduce_scatter"] == [
        call for call in once if call.op != "reduce_scatter"
    ]


def test_no_more_micro_batches_hide_what_is_needed_once_than_there_are() -> None:
    few = changed(
        BASE,
        {
            "mesh.pp": 4,
            "mesh.dp_shard": 4,
            "zero.stage": 1,
            "batch.accumulation": 2,
            "pipeline.schedule": "interleaved",
            "pipeline.virtual_stages": 4,
        },
    )
    assert MODEL.data(few).num_hiding == 2
