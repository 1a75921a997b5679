"""Layouts of blocks: how they are made, cut and packed, and how dense they are."""

import copy
import pickle
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.attention.block_layout import BlockLayout, pack
from shardwise.attention.structures import FixedSparsityConfig, LocalSlidingWindowSparsityConfig


@st.composite
def layouts(draw, max_documents=3):
    """Random blocks of one or several documents, causal or not, with a short last block or none."""
    block, num_heads, causal = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2])), draw(st.booleans())
    documents = []
    for _ in range(draw(st.integers(1, max_documents))):
        num_blocks = draw(st.integers(1, 6))
        bits = draw(st.lists(st.booleans(), min_size=num_heads * num_blocks**2, max_size=num_heads * num_blocks**2))
        blocks = torch.tensor(bits).reshape(num_heads, num_blocks, num_blocks)
        num_tokens = num_blocks * block - draw(st.integers(0, block - 1))
        documents.append(BlockLayout.from_blocks(blocks, block, causal=causal, num_tokens=num_tokens))
    if len(documents) > 1:
        return pack(documents)
    return documents[0].queries_from(draw(st.integers(0, documents[0].num_keys - 1)))


@given(layout=layouts())
def test_density_is_the_share_of_pairs_that_are_allowed(layout):
    allowed = layout.allowed()
    assert layout.density == pytest.approx(allowed.float().mean().item())
    below = torch.zeros_like(allowed[0])
    query = 0
    before = 0
    for pattern in layout.patterns:
        for position in range(pattern.query_runs[0][0], pattern.num_tokens):
            below[query, : before + position + 1] = True
            query += 1
        before += pattern.num_tokens
    assert layout.causal_density == pytest.approx((allowed & below).sum().item() / below.sum().item() / len(allowed))


@given(layout=layouts(), rows=st.integers(1, 9), columns=st.integers(1, 9))
def test_tile_density_counts_whole_tiles_over_the_gathered_blocks_of_each_row_of_tiles(layout, rows, columns):
    computed = 0
    for pattern in layout.patterns:
        for head in pattern.blocks:
            for start in range(pattern.query_runs[0][0], pattern.num_tokens, rows):
                queries = range(start, min(start + rows, pattern.num_tokens))
                keys = {key for query in queries for key in range(head.shape[-1]) if head[query // pattern.block, key]}
                computed += rows * columns * -(-len(keys) * pattern.block // columns)
    expected = computed / layout.num_heads / (layout.num_queries * layout.num_keys)
    assert layout.tile_density(rows, columns) == pytest.approx(expected)


def test_tiles_of_the_block_size_waste_nothing():
    blocks = torch.eye(8, dtype=torch.bool).roll(3, 0)
    layout = BlockLayout.from_blocks(blocks, 64)
    assert layout.density == layout.tile_density(64, 64) == 0.125
    assert layout.tile_density(128, 64) == 0.25
    assert layout.tile_density(16, 64) == 0.125
    assert layout.tile_density(64, 128) == 0.25


def test_a_packed_row_is_as_dense_as_its_documents_leave_it():
    layout = BlockLayout.from_blocks(torch.ones(2, 2), 4, causal=True)
    assert layout.causal_density == 1
    assert pack([layout, layout]).causal_density == 2 * 36 / 136


@pytest.mark.parametrize("num_tokens", [1, 5, 16])
def test_a_function_says_the_same_in_rows_at_a_time(num_tokens, monkeypatch):
    def parity(head, query, key):
        return (query + key) % 3 == head

    whole = BlockLayout.from_function(parity, num_tokens, 2, num_heads=2)
    monkeypatch.setattr("shardwise.attention.block_layout._MAX_FUNCTION_NUMEL", 3)
    in_parts = BlockLayout.from_function(parity, num_tokens, 2, num_heads=2)
    assert torch.equal(whole.allowed(), in_parts.allowed())
    assert whole.allowed().shape == (2, num_tokens, num_tokens)
    causal = BlockLayout.from_function(parity, num_tokens, 2, num_heads=2, causal=True)
    assert torch.equal(causal.allowed(), whole.allowed().tril())


def test_blocks_that_are_none_are_refused():
    with refused("no-blocks", "num_tokens=0", "2"):
        BlockLayout.from_function(lambda head, query, key: key == 0, 0, 2)
    with refused("blocks-square", "(2, 3)"):
        BlockLayout.from_blocks(torch.ones(2, 3), 4)
    with refused("blocks-hold-tokens", "num_tokens=9", "3 blocks of 4", "5 to 8"):
        BlockLayout.from_blocks(torch.ones(2, 2), 4, num_tokens=9)
    with refused("block-positive", "block=0"):
        BlockLayout.from_blocks(torch.ones(2, 2), 0)


def test_blocks_are_a_copy():
    mine = torch.ones(2, 2)
    layout = BlockLayout.from_blocks(mine, 4)
    mine.zero_()
    assert layout.density == 1


def test_plans_are_made_once_for_each_key_and_layout():
    calls = []
    layout = BlockLayout.from_blocks(torch.ones(4, 2, 2), 4)
    assert [layout.cached("plan", lambda whole: calls.append(whole) or 7) for _ in range(2)] == [7, 7]
    assert calls == [layout]
    assert layout.of_heads(2, 2) is layout.of_heads(2, 2)
    assert layout.of_heads(2, 2).num_heads == 2
    shared = BlockLayout.from_blocks(torch.ones(2, 2), 4)
    assert shared.of_heads(2, 2) is shared


def test_later_queries_alone():
    layout = BlockLayout.from_blocks(torch.tensor([[1, 0], [0, 1]]), 3, causal=True, num_tokens=5)
    late = layout.queries_from(2)
    assert (late.num_queries, late.num_keys) == (3, 5)
    assert torch.equal(late.allowed(), layout.allowed()[:, 2:])
    for wrong in (lambda: layout.queries_from(5), lambda: pack([layout, layout]).queries_from(1)):
        with refused("first-query"):
            wrong()


def test_documents_of_different_kinds_are_not_packed():
    one, other = BlockLayout.from_blocks(torch.ones(2, 2), 4), BlockLayout.from_blocks(torch.ones(2, 2), 8)
    with refused("documents-of-one-kind", "[(4, 1), (8, 1)]"):
        pack([one, other])


def test_copies_and_pickles_take_no_plans_along():
    layout = BlockLayout.from_blocks(torch.eye(3), block=4)
    plan = layout.cached("plan", lambda whole: torch.ones(2**20))
    module = torch.nn.Module()
    module.layout = layout
    assert copy.deepcopy(module).layout is copy.copy(layout) is layout
    pickled = pickle.dumps(module)
    assert len(pickled) < plan.nbytes // 100
    loaded = pickle.loads(pickled).layout
    assert loaded.allowed().equal(layout.allowed())
    assert loaded.cached("plan", lambda whole: "made again") == "made again"


def test_of_many_keys_the_last_made_are_kept():
    layout = BlockLayout.from_blocks(torch.eye(3), block=4)
    plans = [weakref.ref(layout.cached(key, lambda whole: torch.ones(1))) for key in range(200)]
    assert plans[-1]() is layout.cached(199, lambda whole: torch.zeros(1))
    assert sum(plan() is not None for plan in plans) < 100


@pytest.mark.parametrize("attention", ["unidirectional", "bidirectional"])
def test_the_drawing_has_the_blocks_of_the_layout(attention):
    layout = LocalSlidingWindowSparsityConfig(4, 16, 3, attention).layout(512)
    blocks = layout.patterns[0].blocks[0]
    drawn = str(layout).splitlines()[: len(blocks)]
    for number, (line, row) in enumerate(zip(drawn, blocks.tolist(), strict=True), 1):
        assert line == "".join("██" if each else "··" for each in (row[:number] if attention[0] == "u" else row))


def test_a_cell_of_many_blocks_shows_any_share_of_them():
    lines = str(LocalSlidingWindowSparsityConfig(4, 16, 3, "unidirectional").layout(8192)).splitlines()
    assert "a cell is 13 x 13 blocks" in lines[40]
    assert all(line[-1] in "░▒▓" for line in lines[:40]), "the diagonal is seen, and not whole"


def test_layouts_that_some_heads_have_are_shaded():
    options = {"block": 64, "num_local_blocks": 4, "attention": "unidirectional"}
    heads = {"different_layout_per_head": True, "num_different_global_patterns": 2}
    one, two = (str(FixedSparsityConfig(4, **options, **more).layout(1024)).splitlines() for more in ({}, heads))
    assert not set("░▒▓") & set("".join(one[:16]))
    assert set("░▒▓") & set("".join(two[:16]))


def test_what_is_left_of_dense_attention_is_said_beside_the_drawing():
    *_, num_blocks, visible, of_64, _ = str(
        FixedSparsityConfig(4, 64, attention="unidirectional").layout(1024)
    ).splitlines()
    assert "64 of 256" in num_blocks
    assert "43.8 % of the causal half" in visible
    assert "25 % computed: up to 2.1 times" in of_64
    assert "visible      0 % of all pairs" in str(BlockLayout.from_blocks(torch.zeros(2, 2), 16))
