"""Buffers of a step are those of the engine's own pool, taken and given back by hand as its reductions do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness.engine_memory import job_of
from shardwise.models import DecoderConfig
from shardwise.planner.buffer_memory import BufferTable, GatheredUnits, sums_of, tied_bytes
from shardwise.planner.compact_layout import CompactLayout, RankLayerCounts
from shardwise.planner.job import Strategy
from shardwise.runtime.buffer_pool import BufferPool

SHAPE = DecoderConfig(
    vocab_size=96, num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=144, max_seq_len=64
)
JOB = job_of(SHAPE, 64)
TIED = job_of(replace(SHAPE, tie_embeddings=True), 64)
NARROW, WIDE = torch.bfloat16, torch.float32
NUM_ROUNDS = 3


def folds_of(strategy: Strategy, rank: int = 0) -> RankLayerCounts:
    return CompactLayout(JOB).rank(strategy, rank)


def numels(folds: RankLayerCounts) -> dict[str, int]:
    """Elements of the flat buffer of each group."""
    return {fold.group.name: fold.group.padded_numel for fold in folds.folds}


class Hand:
    """The engine's pool, and the reductions that are under way."""

    def __init__(self) -> None:
        self.pool = BufferPool()
        self.under_way: list[list[torch.Tensor]] = []
        self.highest = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        taken = self.pool.acquire(numel, dtype)
        self.highest = max(self.highest, self.pool.reserved_bytes)
        return taken

    def start(self, *borrowed: torch.Tensor) -> None:
        """A reduction, which gives these back in turn; the one before ends as it has started."""
        self.finish()
        self.under_way.append(list(borrowed))

    def finish(self) -> None:
        for borrowed in self.under_way:
            for each in borrowed:
                self.pool.release(each)
        self.under_way.clear()


def test_gradients_that_are_stored_as_shards_have_a_bucket_and_what_is_received() -> None:
    strategy = Strategy(dp_shard=2, zero_stage=2)
    folds, hand = folds_of(strategy), Hand()
    root, block = numels(folds)["root@0"], numels(folds)["dense.0"]
    of_root = hand.take(root, NARROW)
    with_root = hand.pool.reserved_bytes
    filling, reducing = [], []
    for _ in range(3):
        bucket = hand.take(block, NARROW)
        filling.append(hand.pool.reserved_bytes)
        hand.start(hand.take(block, NARROW), bucket)
        reducing.append(hand.pool.reserved_bytes)
    hand.start(hand.take(root, NARROW), of_root)
    (found,) = BufferTable(JOB).of(strategy, folds)
    last = max(hand.pool.reserved_bytes, reducing[-1])
    assert (found.idle, found.with_root, found.last) == (0, with_root, last)
    assert (found.filling, found.reducing) == (tuple(filling), tuple(reducing))


def test_wide_sums_of_narrow_messages_have_a_copy_to_send() -> None:
    strategy = Strategy(dp_shard=2, zero_stage=1)  # gradients are stored whole, in fp32
    folds, hand = folds_of(strategy), Hand()
    reducing = []
    for _ in range(3):
        block = numels(folds)["dense.0"]
        hand.start(hand.take(block, NARROW), hand.take(block, NARROW))
        reducing.append(hand.pool.reserved_bytes)
    (found,) = BufferTable(JOB).of(strategy, folds)
    assert (found.idle, found.with_root) == (0, 0)
    assert found.reducing == tuple(reducing)
    assert found.filling == (0, *reducing[:-1])


def test_a_pipeline_keeps_what_its_first_step_has_made() -> None:
    strategy = Strategy(pp=2, dp_shard=2, zero_stage=1, num_micro_batches=2)
    folds, hand = folds_of(strategy), Hand()
    order = [fold.group.padded_numel for fold in folds.folds if fold.group.unit != "root" for _ in range(fold.count)]
    order.append(numels(folds)["root@0"])
    idle = []
    for _ in range(2):
        for numel in order:
            hand.start(hand.take(numel, NARROW), hand.take(numel, NARROW))
        hand.finish()
        idle.append(hand.pool.reserved_bytes)
    (found,) = BufferTable(JOB).of(strategy, folds)
    assert (found.idle, found.last) == (idle[0], hand.highest)


def test_where_each_micro_batch_is_reduced_all_buckets_of_a_stage_wait_for_it() -> None:
    strategy = Strategy(pp=2, dp_shard=2, zero_stage=3, num_micro_batches=5, gather="micro-batch")
    folds, hand = folds_of(strategy), Hand()
    order = [fold.group.padded_numel for fold in folds.folds if fold.group.unit != "root" for _ in range(fold.count)]
    order.append(numels(folds)["root@0"])
    idle = 0
    for step in range(2):
        for _ in range(NUM_ROUNDS):
            buckets = [hand.take(numel, WIDE) for numel in order]
            for numel, bucket in zip(order, buckets, strict=True):
                wire, received = hand.take(numel, NARROW), hand.take(numel, NARROW)
                hand.start(received, bucket, wire)
        hand.finish()
        idle = hand.pool.reserved_bytes if step == 0 else idle
    (found,) = BufferTable(JOB).of(strategy, folds, reductions=((0, False), (0, True)) * NUM_ROUNDS)
    assert (found.idle, found.last) == (idle, hand.highest)


def test_a_sum_leaves_its_buffers_in_the_pool() -> None:
    strategy = Strategy(dp_shard=2, zero_stage=2)
    folds, hand = folds_of(strategy), Hand()
    together = [hand.take(size, torch.uint8) for size in (40_000, 20_000, 20_000)]
    hand.start(*together)
    hand.finish()
    (found,) = BufferTable(JOB).of(strategy, folds, (40_000, 20_000, 20_000))
    assert found.idle == hand.pool.reserved_bytes


@pytest.mark.parametrize(
    ("strategy", "whole_bytes", "place", "expected"),
    [
        (Strategy(), 4096, "all", ()),
        (Strategy(tp=2), 4096, "blocks", (4096,)),
        (Strategy(tp=2), 4096, "ends", ()),
        (Strategy(tp=2, param="fp32"), 2**20 - 4, "all", (2**20 - 4,)),
        (Strategy(tp=2, param="fp32"), 2**20, "all", ()),
        (Strategy(tp=2), 2**21, "all", (2**21,)),
        (Strategy(tp=2, sequence_parallel=True), 4096, "all", ()),
        (Strategy(tp=4), 4096, "blocks", (8192, 4096, 4096)),
        (Strategy(tp=4, param="fp32"), 4096, "all", ()),
        (Strategy(tp=4, sequence_parallel=True), 4096, "blocks", (4096,)),
        (Strategy(tp=4, sequence_parallel=True), 4096, "ends", (8192, 4096, 4096)),
        (Strategy(tp=4, sequence_parallel=True, param="fp32"), 4096, "ends", ()),
    ],
)
def test_buffers_of_sums_are_by_ranks_size_width_and_what_is_summed(strategy, whole_bytes, place, expected) -> None:
    whole = folds_of(strategy)
    is_wanted = {"all": lambda unit: True, "blocks": lambda unit: unit != "root", "ends": lambda unit: unit == "root"}
    folds = replace(whole, folds=tuple(fold for fold in whole.folds if is_wanted[place](fold.group.unit)))
    assert sums_of(strategy, whole_bytes, folds) == expected


def test_a_table_that_two_ranks_share_is_summed_in_fp32() -> None:
    whole = Strategy(pp=2, num_micro_batches=2)
    shards = replace(whole, dp_shard=2, zero_stage=1)
    table = SHAPE.vocab_size * SHAPE.hidden_size
    folded = CompactLayout(TIED)
    assert [tied_bytes(folded.rank(each, 1)) for each in (whole, shards)] == [4 * table, 2 * table]
    assert tied_bytes(folds_of(whole)) == 0
    both_ends = replace(whole, schedule="zb-v", virtual_stages=2)
    assert tied_bytes(folded.rank(both_ends, 0)) == 0  # one rank has them


def test_a_stage_gathers_its_own_table_alone_where_it_gathers_each_time() -> None:
    strategy = Strategy(pp=2, dp_shard=2, zero_stage=3, num_micro_batches=2, schedule="zb-v", virtual_stages=2)
    each_time = replace(strategy, gather="micro-batch")
    folds = folds_of(each_time)
    first, last = (GatheredUnits.of(each_time, folds, index) for index in (0, 1))
    assert first.root == numels(folds)["root@0"]
    assert last.root == numels(folds)["root@3"]
    assert GatheredUnits.of(strategy, folds_of(strategy)).num_bytes(0) == 2 * folds.numel
