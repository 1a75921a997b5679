"""Splits by cost: work against the plan's own pieces, and the balance that each layout gets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.context import balance_table
from harness.refusals import refused
from shardwise.attention.block_layout import BlockLayout, pack
from shardwise.attention.structures import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
)
from shardwise.context.load_balance import balanced, choose_split, work_per_rank
from shardwise.context.plan import plan_steps
from shardwise.layout.token_ranges import contiguous, zigzag


def work_of_tiles(layout, split, rank):
    tiles = [step.tile for step in plan_steps(layout, split, rank, one_by_one=True)]
    return sum(int(tile.layout.allowed().sum()) for tile in tiles if tile) / layout.num_heads


@st.composite
def layouts(draw):
    block, num_heads = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    documents = []
    for _ in range(draw(st.integers(1, 2))):
        num_blocks, density = draw(st.integers(1, 20)), draw(st.sampled_from((0.0, 0.05, 0.3)))
        blocks = torch.rand(num_heads, num_blocks, num_blocks, generator=generator) < density
        blocks[:, draw(st.integers(0, num_blocks - 1))] = True
        num_tokens = num_blocks * block - draw(st.integers(0, block - 1))
        documents.append(BlockLayout.from_blocks(blocks, block, causal=draw(st.booleans()), num_tokens=num_tokens))
    if missing := -sum(each.num_queries for each in documents) % 12:
        documents.append(BlockLayout.from_blocks(torch.eye(-(-missing // block)), block, num_tokens=missing))
    return pack(documents)


@settings(deadline=None, max_examples=60)
@given(layouts(), st.sampled_from((2, 3, 6)), st.sampled_from((contiguous, zigzag, None)))
def test_work_is_that_of_the_plans_tiles(layout, degree, make):
    split = balanced(layout, degree) if make is None else make(layout.num_queries, degree)
    expected = tuple(work_of_tiles(layout, split, rank) for rank in range(degree))
    assert work_per_rank(layout, split) == expected


BALANCE = {  # (contiguous, zigzag) of (most work over the mean, share of remote tokens needed); 16k tokens over 8 ranks
    "dense causal": (DenseSparsityConfig(1, 64, attention="unidirectional"), (1.87, 0.50), (1.00, 0.75)),
    "dense": (DenseSparsityConfig(1, 64), (1.00, 1.00), (1.00, 1.00)),
    "fixed": (FixedSparsityConfig(1, 64, attention="unidirectional"), (1.84, 0.12), (1.00, 0.19)),
    "window": (LocalSlidingWindowSparsityConfig(1, 64, num_sliding_window_blocks=32), (1.03, 0.06), (1.03, 0.12)),
    # One rank has the dense rows, and needs all keys for them.
    "longformer": (BSLongformerSparsityConfig(1, 64, num_sliding_window_blocks=9), (1.60, 0.16), (1.57, 0.19)),
    "bigbird": (
        BigBirdSparsityConfig(1, 64, num_random_blocks=3, num_sliding_window_blocks=9, num_global_blocks=2),
        (1.83, 0.43),
        (1.81, 0.45),
    ),
}
CHOSEN = {"dense causal": "zigzag", "fixed": "zigzag", "longformer": "zigzag", "bigbird": "balanced"}


@pytest.mark.parametrize("name", BALANCE)
def test_balance_and_choice_of_each_layout(name):
    structure, *expected = BALANCE[name]
    layout = structure.layout(16384)
    *rows, of_balanced = balance_table(layout, 8)
    assert [row.token_layout for row in rows] == ["contiguous", "zigzag"]
    for row, (work, traffic) in zip(rows, expected, strict=True):
        assert (row.work, row.traffic) == (pytest.approx(work, abs=0.006), pytest.approx(traffic, abs=0.006))
    assert of_balanced.work <= 1.05 * min(row.work for row in rows)
    assert choose_split("auto", layout, 8).kind == CHOSEN.get(name, "contiguous")


def test_rows_of_uneven_cost_are_balanced_by_cost_alone():
    blocks = torch.eye(64)
    blocks[torch.randperm(64, generator=torch.Generator().manual_seed(0))[:16], :40] = 1
    layout = BlockLayout.from_blocks(blocks, 16)
    work = {row.token_layout: row.work for row in balance_table(layout, 8)}
    assert work["balanced"] < 1.1 < min(work["contiguous"], work["zigzag"])
    assert choose_split("balanced", layout, 8) is balanced(layout, 8)


def test_cuts_are_between_blocks_where_that_goes():
    causal = BlockLayout.from_blocks(torch.ones(24, 24), 16, causal=True)
    split = balanced(causal, 4)
    assert all(start % 16 == stop % 16 == 0 for share in split.shares for start, stop in share)
    # Three blocks for two ranks.
    short = balanced(BlockLayout.from_blocks(torch.ones(3, 3), 16, causal=True), 2)
    assert max(work_per_rank(BlockLayout.from_blocks(torch.ones(3, 3), 16, causal=True), short)) < 0.51 * 48 * 49 / 2


def test_teams_that_exchange_heads_are_balanced_as_teams():
    layout = DenseSparsityConfig(1, 16, attention="unidirectional").layout(512)
    assert choose_split("auto", layout, 4, heads_over=4).kind == "contiguous"
    assert choose_split("auto", layout, 4, heads_over=2).kind == "zigzag"
    assert [row.work for row in balance_table(layout, 4, heads_over=4)] == [1.0, 1.0, 1.0]
    assert choose_split("auto", layout, 1) == contiguous(512, 1)


def test_lengths_that_do_not_divide():
    layout = BlockLayout.from_blocks(torch.ones(3, 3), 16, num_tokens=46)
    with refused("cp-divides-tokens", "mesh.cp=4", "token_layout=balanced", "46", "legal: 64"):
        choose_split("balanced", layout, 4)
    with refused("cp-divides-tokens", "40, 48"):
        choose_split("zigzag", layout, 4)
    with refused("cp-divides-tokens", "44, 48"):
        choose_split("auto", layout, 4)
    assert choose_split("auto", layout, 2).kind == "contiguous"
