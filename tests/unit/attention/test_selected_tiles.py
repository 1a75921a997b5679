"""The kernels' tables and results where a rank has some of a sequence's queries and some of its keys alone."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.attention import reference_attention
from harness.tiles import require_complete, visits
from shardwise.attention.backends import AttentionGrads, BackendPlan, SavedForBackward, ScoreModifiers
from shardwise.attention.block_layout import BlockLayout, pack
from shardwise.attention.triton import backend
from shardwise.attention.triton.lut import HeadGroups, Lut, TileSide, TileWidth, best_width, tables_of
from shardwise.attention.triton.plan import plan_of
from shardwise.layout.token_ranges import Runs, TokenSplit, contiguous, join, zigzag

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@st.composite
def runs_of(draw: st.DrawFn, num_tokens: int, block: int) -> Runs:
    """Tokens: none, all, a few runs at any bounds or at those of blocks."""
    step = draw(st.sampled_from([1, block, 4 * block]))
    bound = st.integers(0, num_tokens // step).map(lambda number: number * step)
    pairs = draw(st.lists(st.tuples(bound, bound), max_size=5))
    return join([((min(pair), max(pair)),) for pair in pairs if pair[0] != pair[1]])


@st.composite
def selected(draw: st.DrawFn) -> BlockLayout:
    block = draw(st.sampled_from([16, 32, 64, 128, 3, 24, 48]))
    num_heads = draw(st.sampled_from([1, 1, 4]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def document() -> BlockLayout:
        num_tokens = draw(st.integers(1, 300 if block >= 16 else 60))
        size = -(-num_tokens // block)
        blocks = torch.rand(num_heads, size, size, generator=generator) < draw(st.sampled_from([0.1, 0.4, 1.0]))
        return BlockLayout.from_blocks(blocks, block, causal=draw(st.booleans()), num_tokens=num_tokens)

    layout = pack([document() for _ in range(draw(st.integers(1, 3)))])
    queries = draw(runs_of(layout.num_keys, block))
    keys = queries if draw(st.booleans()) else draw(runs_of(layout.num_keys, block))
    return layout.select(queries, keys)


def dense(block: int, num_tokens: int, *, causal: bool = True) -> BlockLayout:
    size = -(-num_tokens // block)
    return BlockLayout.from_blocks(torch.ones(size, size), block, causal=causal, num_tokens=num_tokens)


DIAGONAL = BlockLayout.from_blocks(torch.eye(4), 16)
CROSSING: tuple[Runs, Runs] = ((5, 20), (22, 41), (45, 64)), ((0, 12), (14, 30), (33, 64))
DISTANT: tuple[Runs, Runs] = ((0, 16), (80, 112)), ((0, 16), (32, 64), (112, 128))


def tables_for(layout: BlockLayout, of_queries: bool, tile: int = 64, entry: int = 64) -> Lut:
    entry = best_width(layout, of_queries, entry, tile).entry  # what a block allows
    return tables_of(layout, TileSide(of_queries, TileWidth(tile, entry)), HeadGroups(1, 1), 10**6)


@settings(max_examples=60)
@given(
    layout=selected(),
    of_queries=st.booleans(),
    width=st.sampled_from([(64, 64), (128, 32), (32, 128), (16, 16), (64, 32), (128, 128)]),
    limit=st.sampled_from([None, 1, 3]),
    kv=st.sampled_from([1, 2, 4]),
)
@example(dense(16, 64).select(*CROSSING), True, (64, 64), None, 1)
@example(dense(16, 64).select(*CROSSING), False, (64, 64), None, 1)
@example(dense(16, 128).select(*DISTANT), True, (64, 64), None, 1)
@example(dense(16, 128).select(*DISTANT), False, (64, 64), None, 1)
@example(DIAGONAL.select(((0, 16), (20, 40)), ((0, 64),)), True, (64, 64), None, 1)
@example(dense(16, 64).select((), ((0, 64),)), False, (64, 64), None, 1)
@example(dense(16, 64).select((), ()), True, (64, 64), None, 1)
def test_each_allowed_pair_of_selected_tokens_is_visited_once(
    layout: BlockLayout, of_queries: bool, width: tuple[int, int], limit: int | None, kv: int
) -> None:
    entry = best_width(layout, of_queries, width[1], width[0]).entry
    side, heads = TileSide(of_queries, TileWidth(width[0], entry)), HeadGroups(4, kv)
    tables = tables_of(layout, side, heads, limit)
    allowed = layout.allowed().numpy()
    np.testing.assert_array_equal(visits(tables, side, allowed.shape, heads), allowed.astype(int))
    require_complete(tables, side.width.tile, layout.num_queries if of_queries else layout.num_keys)


def digest(layouts: list[BlockLayout]) -> str:
    """Of all tables, but for numbers that stand where a sub-block is missing."""
    found = hashlib.sha256()
    for layout in layouts:
        for of_queries in (True, False):
            for tile, entry in ((64, 64), (128, 32), (16, 16)):
                entry = best_width(layout, of_queries, entry, tile).entry
                tables = tables_of(layout, TileSide(of_queries, TileWidth(tile, entry)), HeadGroups(2, 1), 2)
                numbers = np.array([tables.run, tables.sub_block, tables.num_slots])
                for each in (tables.items, tables.full, tables.partial, tables.merges, numbers):
                    found.update(str((each.shape, each.tolist())).encode())
    return found.hexdigest()


def test_the_tables_of_whole_layouts_are_those_from_before_tokens_could_be_selected() -> None:
    def arranged(block: int, num_tokens: int, causal: bool, num_heads: int = 1) -> BlockLayout:
        def seen(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return ((query * 5 + key * 3 + head) % 7 < 3) | (query == key)

        return BlockLayout.from_function(seen, num_tokens, block, num_heads=num_heads, causal=causal)

    layouts = [
        arranged(block, num_tokens, causal, num_heads)
        for block in (3, 16, 24, 64, 128)
        for num_tokens in (50, 333)
        for causal in (False, True)
        for num_heads in (1, 2)
    ]
    layouts.append(pack([arranged(32, each, causal) for each, causal in ((5, True), (150, False), (64, True))]))
    assert digest(layouts) == "f13f23d4f9a465c0ad07d62e21f50a6d5eef41b724c395398569db9fce3434c3"


def begins_and_ends(layout: BlockLayout, of_queries: bool, tile: int = 64) -> list[list[int]]:
    return sorted(tables_for(layout, of_queries, tile).items[0, :, 1:3].tolist())


@pytest.mark.parametrize("of_queries", [True, False])
def test_tiles_go_on_from_run_to_run_where_one_shift_serves_both(of_queries: bool) -> None:
    own = tuple((start, start + 16) for start in range(0, 512, 64))  # blocks dealt to a rank, 8 of 16 tokens
    later = tuple((start + 16, stop + 16) for start, stop in own)
    layout = dense(16, 512)
    for queries, keys in ((own, own), (own, later), (later, own)):
        assert begins_and_ends(layout.select(queries, keys), of_queries) == [[0, 64], [64, 128]]
    everything: Runs = ((0, 512),)
    chosen = (own, everything) if of_queries else (everything, own)
    assert begins_and_ends(layout.select(*chosen), of_queries) == [[i, i + 16] for i in range(0, 128, 16)]
    assert begins_and_ends(dense(16, 512, causal=False).select(*chosen), of_queries) == [[0, 64], [64, 128]]


def test_zigzag_cuts_no_tile_of_whole_chunks() -> None:
    layout = dense(64, 1024)
    for keys in [*zigzag(1024, 4).shares, ((0, 1024),)]:
        selected = layout.select(zigzag(1024, 4).shares[1], keys)
        assert begins_and_ends(selected, True, 128) == [[0, 128], [128, 256]]
        assert len(tables_for(selected, False, 128).items[0]) == selected.num_keys // 128


@pytest.mark.parametrize("split", [contiguous(512, 4), zigzag(512, 4)], ids=lambda split: split.kind)
@pytest.mark.parametrize("of_queries", [True, False])
def test_a_selection_visits_no_more_than_its_share(split: TokenSplit, of_queries: bool) -> None:
    """Whole tiles of 64: all ranks' entries over all steps of a ring are those of the whole layout."""
    layout = dense(64, 512)

    def entries(of: BlockLayout) -> int:
        tables = tables_for(of, of_queries)
        return len(tables.full) + len(tables.partial)

    parts = [layout.select(queries, keys) for queries in split.shares for keys in split.shares]
    assert sum(map(entries, parts)) == entries(layout)


HEAD_DIM, SCALE = 16, 0.3
Tokens = list[int]


def tokens_of(runs: Runs) -> Tokens:
    return [token for run in runs for token in range(*run)]


@dataclass(frozen=True, eq=False)
class Whole:
    """A sequence's tensors, what attends over them, and the reference's results and gradients."""

    layout: BlockLayout
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    key_padding: Tensor | None
    out: Tensor
    lse: Tensor
    grads: tuple[Tensor, ...]


def whole_of(layout: BlockLayout, heads: HeadGroups, dtype: torch.dtype, *, is_padded: bool = False) -> Whole:
    generator = torch.Generator().manual_seed(3)
    num_tokens = layout.num_keys

    def rows(num_heads: int) -> Tensor:  # [1, heads, N, D]
        return torch.randn(1, num_heads, num_tokens, HEAD_DIM, generator=generator).to(DEVICE, dtype)

    q, k, v, grad_out = rows(heads.query), rows(heads.kv), rows(heads.kv), rows(heads.query)
    padding = (torch.rand(1, num_tokens, generator=generator) < 0.7).to(DEVICE) if is_padded else None
    wide = [each.double().requires_grad_() for each in (q, k, v)]
    out, lse = reference_attention(*wide, layout.allowed().to(DEVICE), scale=SCALE, key_padding=padding)
    grads = torch.autograd.grad(out, wide, grad_out.double())
    return Whole(layout, q, k, v, grad_out, padding, out.detach(), lse.detach(), grads)


@dataclass(frozen=True, eq=False)
class Part:
    """Attention over some tokens alone."""

    whole: Whole
    queries: Tokens
    keys: Tokens
    extras: ScoreModifiers
    plan: BackendPlan

    @staticmethod
    def of(whole: Whole, queries: Runs, keys: Runs, limit: int | None = None) -> Part:
        layout = whole.layout.select(queries, keys)
        heads = HeadGroups(whole.q.shape[1], whole.k.shape[1])
        options: dict[str, Any] = {"head_dim": HEAD_DIM, "dtype": whole.q.dtype, "device": DEVICE, "limit": limit}
        padding = None if whole.key_padding is None else whole.key_padding[:, tokens_of(keys)]
        plan = plan_of(layout, heads, **options)
        return Part(whole, tokens_of(queries), tokens_of(keys), ScoreModifiers(SCALE, padding), plan)

    def forward(self) -> tuple[Tensor, Tensor]:
        whole = self.whole
        k, v = whole.k[:, :, self.keys], whole.v[:, :, self.keys]
        return backend.forward(whole.q[:, :, self.queries], k, v, self.extras, self.plan)

    def backward(self, out: Tensor, lse: Tensor, *, is_wide: bool) -> AttentionGrads:
        """Given the final results of the part's queries."""
        whole = self.whole
        k, v = whole.k[:, :, self.keys], whole.v[:, :, self.keys]
        saved = SavedForBackward(whole.q[:, :, self.queries], k, v, out, lse)
        grad_out = whole.grad_out[:, :, self.queries]
        return backend.backward(grad_out, None, saved, self.extras, self.plan, False, is_wide=is_wide)


def merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The partial results of the same queries as one, written out."""
    outs, lses = torch.stack([out.double() for out, _ in parts]), torch.stack([lse.double() for _, lse in parts])
    lse = lses.logsumexp(0)
    weights = torch.where(lses > -torch.inf, (lses - lse).exp(), 0.0)
    return (outs * weights[..., None]).sum(0), lse


def random_layout(block: int, num_tokens: int, num_heads: int, *, causal: bool) -> BlockLayout:
    size = -(-num_tokens // block)
    blocks = torch.rand(num_heads, size, size, generator=torch.Generator().manual_seed(block)) < 0.6
    blocks[:, 0] = False  # rows that see nothing
    blocks[:, -1] = True
    return BlockLayout.from_blocks(blocks, block, causal=causal, num_tokens=num_tokens)


FP32, BF16 = torch.float32, torch.bfloat16
CUT: list[Runs] = [((0, 21), (40, 45), (70, 96)), ((21, 40), (45, 70))]
SPARSE, OF_HEADS = (random_layout(16, 96, num_heads, causal=True) for num_heads in (1, 2))
CASES: dict[str, tuple[BlockLayout, HeadGroups, torch.dtype, list[Runs], int | None]] = {  # the number: at most entries
    "zigzag": (dense(16, 96), HeadGroups(1, 1), FP32, list(zigzag(96, 3).shares), None),
    "zigzag, sparse, grouped, padded, split": (SPARSE, HeadGroups(2, 1), BF16, list(zigzag(96, 2).shares), 1),
    "cut blocks, split": (dense(32, 96), HeadGroups(1, 1), FP32, CUT, 1),
    "cut blocks, heads that differ, padded": (OF_HEADS, HeadGroups(2, 1), FP32, CUT, None),
    "cut blocks, not causal": (random_layout(32, 96, 1, causal=False), HeadGroups(1, 1), BF16, CUT, None),
    "documents": (pack([dense(32, each) for each in (50, 46)]), HeadGroups(1, 1), FP32, CUT, None),
    "large blocks": (dense(128, 256), HeadGroups(1, 1), FP32, list(zigzag(256, 2).shares), None),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", CASES)
def test_partial_results_and_gradients_add_up_to_the_reference(name: str) -> None:
    """Each rank's queries over each rank's keys: merged, and differentiated by the final results."""
    layout, heads, dtype, shares, limit = CASES[name]
    whole = whole_of(layout, heads, dtype, is_padded="padded" in name)
    found = [torch.zeros_like(each) for each in whole.grads]
    tolerance = {FP32: 5e-6, BF16: 4e-2}[dtype]
    for queries in shares:
        parts = [Part.of(whole, queries, keys, limit) for keys in shares]
        out, lse = merged([part.forward() for part in parts])
        own = tokens_of(queries)
        torch.testing.assert_close(out, whole.out[:, :, own], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse, whole.lse[:, :, own], rtol=1e-5, atol=1e-5)
        for part in parts:
            grads = part.backward(out.to(dtype), lse.float(), is_wide=True)
            places = (part.queries, part.keys, part.keys)
            for total, grad, tokens in zip(found, (grads.q, grads.k, grads.v), places, strict=True):
                assert grad.dtype == torch.float32
                assert grad.isfinite().all()
                total[:, :, tokens] += grad.double()
    for total, want in zip(found, whole.grads, strict=True):
        torch.testing.assert_close(total, want, rtol=tolerance, atol=tolerance * max(1.0, float(want.abs().max())))


def test_wide_gradients_are_those_before_they_are_rounded() -> None:
    whole = whole_of(dense(16, 48), HeadGroups(2, 1), torch.float16)
    for limit in (None, 1):  # a program alone, and sums of several
        part = Part.of(whole, ((0, 48),), ((0, 48),), limit)
        out, lse = part.forward()
        narrow, wide = (part.backward(out, lse, is_wide=is_wide) for is_wide in (False, True))
        for one, other in zip((narrow.q, narrow.k, narrow.v), (wide.q, wide.k, wide.v), strict=True):
            assert (one.dtype, other.dtype) == (torch.float16, torch.float32)
            assert torch.equal(one, other.half())
            assert not torch.equal(one.float(), other)


@pytest.mark.parametrize("lse", [1.5, -torch.inf])
def test_keys_that_no_query_sees_add_nothing(lse: float) -> None:
    """Queries that saw keys elsewhere, or none at all, and keys after all of them; or none of either."""
    whole = whole_of(dense(16, 64), HeadGroups(2, 1), FP32)
    for queries, keys in ((((0, 20),), ((24, 64),)), (((0, 20),), ()), ((), ((24, 64),)), ((), ())):
        part = Part.of(whole, queries, keys)
        out, found = part.forward()
        assert not out.any()
        assert (found == -torch.inf).all()
        final = torch.full_like(found, lse)
        grads = part.backward(torch.zeros_like(out) if lse < 0 else torch.ones_like(out), final, is_wide=True)
        assert (grads.q.shape, grads.k.shape) == (out.shape, (1, 1, len(part.keys), HEAD_DIM))
        assert not any(each.any() or each.isnan().any() for each in (grads.q, grads.k, grads.v))


def test_rows_that_see_nothing_in_the_end_have_no_gradient() -> None:
    whole = whole_of(random_layout(16, 64, 1, causal=False), HeadGroups(1, 1), FP32)
    part = Part.of(whole, ((0, 64),), ((16, 48),))
    out, lse = part.forward()
    assert (lse[:, :, :16] == -torch.inf).all()
    grads = part.backward(out, lse, is_wide=False)
    assert not grads.q[:, :, :16].any()
    assert grads.q[:, :, 48:].any()
    assert all(each.isfinite().all() for each in (grads.q, grads.k, grads.v))


def test_the_final_output_may_be_wide() -> None:
    whole = whole_of(dense(16, 32), HeadGroups(1, 1), BF16)
    part = Part.of(whole, ((0, 32),), ((0, 32),))
    out, lse = part.forward()
    one, other = part.backward(out, lse, is_wide=True), part.backward(out.float(), lse, is_wide=True)
    assert torch.equal(one.q, other.q)
