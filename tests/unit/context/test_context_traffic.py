"""Bytes that ranks send, exactly, against the closed forms and against counts by hand."""

from dataclasses import replace

import pytest
import torch

from harness.context import AttentionSizes, ContextTraffic, bytes_of_attention, bytes_of_heads, bytes_of_steps
from shardwise.attention.block_layout import BlockLayout
from shardwise.attention.structures import BSLongformerSparsityConfig, DenseSparsityConfig
from shardwise.context.plan import plan_steps
from shardwise.layout.token_ranges import contiguous, zigzag

SIZES = AttentionSizes(samples=3, num_heads=8, num_kv_heads=2, head_dim=16)
CAUSAL = DenseSparsityConfig(1, 8, attention="unidirectional").layout(512)
BOTH_WAYS = DenseSparsityConfig(1, 8).layout(512)


def sent(layout, split, sizes=SIZES, **kinds):
    return [bytes_of_attention(layout, split, rank, sizes, **kinds) for rank in range(split.degree)]


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("make", [contiguous, zigzag])
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_dense_attention_sends_what_the_closed_form_says(degree, make, one_by_one):
    # (c - 1) 4 (s / c) b k d in bf16, forward; the same again with fp32 gradients, so thrice that, backward.
    ring = (degree - 1) * 4 * (512 // degree) * 3 * 2 * 16
    assert sent(BOTH_WAYS, make(512, degree), one_by_one=one_by_one) == [ContextTraffic(ring, 3 * ring)] * degree
    # Causal: half of that, or three quarters.
    share = {contiguous: 2, zigzag: 3}[make]
    of_ranks = sent(CAUSAL, make(512, degree), one_by_one=one_by_one)
    assert 4 * sum(each.forward for each in of_ranks) == share * degree * ring
    assert sum(each.backward for each in of_ranks) == 3 * sum(each.forward for each in of_ranks)


def test_ranks_of_causal_attention_send_forward_what_later_ones_need_and_gradients_the_other_way():
    row = 4 * 128 * 3 * 2 * 16
    assert sent(CAUSAL, contiguous(512, 4)) == [
        ContextTraffic((3 - rank) * row, (3 - rank) * row + 2 * rank * row) for rank in range(4)
    ]


def test_teams_exchange_heads_and_then_keys_of_fewer_heads():
    heads = bytes_of_heads(128, 2, SIZES)
    between = 4 * 256 * 3 * 1 * 16
    expected = ContextTraffic(heads.forward + between, heads.backward + 3 * between)
    assert sent(BOTH_WAYS, contiguous(512, 4), heads_over=2) == [expected] * 4


def test_only_keys_that_are_seen_are_sent():
    layout = BSLongformerSparsityConfig(num_heads=1, block=4, num_sliding_window_blocks=1).layout(512)
    kv = 3 * 2 * 2 * 16  # numbers of a token's key and value
    # All ranks see the first block's keys, and its queries, of the first rank, see all.
    first, *others = sent(layout, contiguous(512, 4))
    assert first == ContextTraffic(3 * 4 * kv * 2, 3 * 4 * kv * 2 + 3 * 128 * kv * 4)
    assert others == [ContextTraffic(128 * kv * 2, 128 * kv * 2 + 4 * kv * 4)] * 3


def test_sizes_count_in_proportion():
    layout = BlockLayout.from_blocks(torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.4, 8)
    steps = plan_steps(layout, zigzag(64, 4), 1, one_by_one=False)
    once = bytes_of_steps(steps, SIZES)
    assert once.forward > 0
    assert bytes_of_steps(steps, replace(SIZES, samples=6)) == ContextTraffic(2 * once.forward, 2 * once.backward)
    wider = replace(SIZES, element_bytes=4, wide_bytes=8)
    assert bytes_of_steps(steps, wider) == ContextTraffic(2 * once.forward, 2 * once.backward)
