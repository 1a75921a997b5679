"""The kernels' look-up tables: read as a kernel reads them, they give each pair of tokens that is seen exactly once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.tiles import require_complete, visits
from shardwise.attention.block_layout import BlockLayout, Pattern, pack
from shardwise.attention.triton.lut import ITEM_HEAD, HeadGroups, TileSide, TileWidth, best_width, tables_of


@st.composite
def layouts(draw: st.DrawFn) -> BlockLayout:
    block = draw(st.sampled_from([16, 32, 64, 128, 3, 24, 48]))
    num_heads = draw(st.sampled_from([1, 1, 4]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def document() -> BlockLayout:
        num_tokens = draw(st.integers(1, 300 if block >= 16 else 60))
        size = -(-num_tokens // block)
        blocks = torch.rand(num_heads, size, size, generator=generator) < draw(st.sampled_from([0.1, 0.4, 1.0]))
        return BlockLayout.from_blocks(blocks, block, causal=draw(st.booleans()), num_tokens=num_tokens)

    layout = pack([document() for _ in range(draw(st.integers(1, 3)))])
    if len(layout.patterns) == 1 and draw(st.booleans()):
        layout = layout.queries_from(draw(st.integers(0, layout.num_keys - 1)))
    return layout


@settings(max_examples=120)
@given(
    layout=layouts(),
    of_queries=st.booleans(),
    width=st.sampled_from([(64, 64), (128, 32), (32, 128), (16, 16), (64, 32), (128, 128)]),
    limit=st.sampled_from([None, 1, 3]),
    kv=st.sampled_from([1, 2, 4]),
)
def test_each_allowed_pair_is_visited_once(
    layout: BlockLayout, of_queries: bool, width: tuple[int, int], limit: int | None, kv: int
) -> None:
    entry = best_width(layout, of_queries, width[1], width[0]).entry  # what a block allows
    side, heads = TileSide(of_queries, TileWidth(width[0], entry)), HeadGroups(4, kv)
    tables = tables_of(layout, side, heads, limit)
    allowed = layout.allowed().numpy()
    np.testing.assert_array_equal(visits(tables, side, allowed.shape, heads), allowed.astype(int))


@settings(max_examples=40)
@given(layout=layouts(), of_queries=st.booleans(), limit=st.sampled_from([None, 1, 3]))
def test_tiles_and_slots_are_complete(layout: BlockLayout, of_queries: bool, limit: int | None) -> None:
    tables = tables_of(layout, TileSide(of_queries, TileWidth(64, 16)), HeadGroups(4, 2), limit)
    require_complete(tables, 64, layout.num_queries if of_queries else layout.num_keys)


def test_the_longest_come_first_and_long_ones_are_split() -> None:
    blocks = torch.eye(512)
    blocks[0] = 1  # one query block sees everything
    layout = BlockLayout.from_blocks(blocks, 64)
    tables = tables_of(layout, TileSide(True, TileWidth(64, 64)), HeadGroups(1, 1))
    work = tables.items[0, :, ITEM_HEAD + 1] - tables.items[0, :, ITEM_HEAD]
    assert list(work) == sorted(work, reverse=True)
    assert work.max() == 16  # 512 entries in 32 parts
    assert tables.num_slots == 32


@pytest.mark.parametrize("causal", [False, True])
def test_small_blocks_waste_nothing_on_gathered_tokens(causal: bool) -> None:
    size, block, stride = 128, 16, 4
    index = torch.arange(size)
    blocks = (index[:, None] // stride == index // stride) | (index % stride == stride - 1)  # as Fixed with defaults
    layout = BlockLayout.from_blocks(blocks, block, causal=causal)
    tables = tables_of(layout, TileSide(True, TileWidth(64, 64)), HeadGroups(1, 1))
    visited = (len(tables.full) + len(tables.partial)) * 64 * 64
    assert visited <= 1.2 * block * block * int(layout.patterns[0].blocks.sum())


def test_a_tile_no_wider_than_the_block_is_one_run() -> None:
    layout = BlockLayout((Pattern(torch.ones(1, 3, 3, dtype=torch.bool), 128, False, 300),))
    tables = tables_of(layout, TileSide(True, TileWidth(64, 32)), HeadGroups(1, 1))
    assert (tables.run, tables.sub_block, tables.full.shape[1], tables.partial.shape[1]) == (64, 32, 1, 3)


def test_the_width_follows_the_pattern() -> None:
    window, disjoint = torch.eye(128), torch.arange(128)[:, None] % 16 == torch.arange(128) // 8
    assert best_width(BlockLayout.from_blocks(disjoint, 16), True, 64, 128).tile == 16
    assert best_width(BlockLayout.from_blocks(window, 64), True, 64, 128).tile == 64
    assert best_width(BlockLayout.from_blocks(window, 128), True, 64, 128).tile == 128
    assert best_width(BlockLayout.from_blocks(window, 128), True, 64, 64).tile == 64
