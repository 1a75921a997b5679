"""FlexAttention's mask of a layout against the layout itself, and its scores, without a GPU, against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_mask, flex_attention

from harness.attention import reference_attention
from harness.refusals import refused
from shardwise.attention.backends import Draw, ScoreModifiers
from shardwise.attention.block_layout import BlockLayout, pack
from shardwise.attention.flex import TILE, block_mask_of, flex_attention_of, flex_options
from shardwise.layout.token_ranges import Runs

CPU = torch.device("cpu")


def random_layout(seed: int, block: int, num_tokens: int, heads: int = 1, *, causal: bool = False) -> BlockLayout:
    """Half of the blocks; one block row, of the first head, sees nothing."""
    num_blocks = -(-num_tokens // block)
    blocks = torch.rand(heads, num_blocks, num_blocks, generator=torch.Generator().manual_seed(seed)) < 0.5
    blocks[0, num_blocks // 2] = False
    return BlockLayout.from_blocks(blocks, block, causal=causal, num_tokens=num_tokens)


def by_tile(whole: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """What `reduce` says of each tile of bools [heads, queries, keys]; tokens beyond the end see nothing."""
    padding = (0, -whole.shape[2] % TILE, 0, -whole.shape[1] % TILE)
    padded = torch.nn.functional.pad(whole, padding)
    tiles = padded.unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE))  # [heads, rows, TILE, columns, TILE]
    return reduce(reduce(tiles, 4), 2)


def dense(num: Tensor, indices: Tensor) -> Tensor:
    """Lists of tiles as bools [heads, rows, columns]."""
    is_listed = torch.arange(indices.shape[-1]) < num[0, ..., None]  # [heads, rows, columns]
    return torch.zeros_like(is_listed).scatter(-1, indices[0].long(), is_listed)


def check(layout: BlockLayout) -> BlockMask:
    """The mask's lists and its function say what the layout says; whole tiles are never asked, others are exact."""
    mask = block_mask_of(layout, CPU)
    expected = layout.allowed()
    assert mask.shape[-2:] == expected.shape[-2:]
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    partial, full = dense(mask.kv_num_blocks, mask.kv_indices), dense(mask.full_kv_num_blocks, mask.full_kv_indices)
    every = by_tile(expected, torch.all)
    assert torch.equal(full, every)
    assert torch.equal(partial, by_tile(expected, torch.any) & ~every)
    asked = create_mask(mask.mask_mod, 1, layout.num_heads, *expected.shape[-2:], device="cpu")[0]
    spread = [
        each.repeat_interleave(TILE, 1).repeat_interleave(TILE, 2)[:, : expected.shape[1], : expected.shape[2]]
        for each in (partial, full)
    ]
    assert torch.equal(spread[0] & asked | spread[1], expected)
    return mask


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 9),
    st.sampled_from([1, 16, 48, 64, 96, 128, 192, 256]),
    st.lists(st.integers(1, 400), min_size=1, max_size=4),
    st.sampled_from([1, 3]),
    st.booleans(),
)
@example(0, 128, [512], 1, True)
@example(0, 128, [500], 2, False)
@example(0, 64, [1, 127, 128, 1], 1, True)
def test_the_mask_says_what_the_layout_says(
    seed: int, block: int, lengths: list[int], heads: int, is_causal: bool
) -> None:
    documents = [random_layout(seed + i, block, each, heads, causal=is_causal) for i, each in enumerate(lengths)]
    check(pack(documents))


def test_documents_may_differ_in_causality() -> None:
    check(pack([random_layout(0, 64, 300, causal=True), random_layout(1, 64, 200)]))


@pytest.mark.parametrize("first_query", [1, 128, 299])
@pytest.mark.parametrize("block", [64, 128, 256])
def test_queries_after_cached_keys(block: int, first_query: int) -> None:
    check(random_layout(0, block, 300, causal=True).queries_from(first_query))
    num_blocks = -(-300 // block)
    whole = BlockLayout.from_blocks(torch.ones(num_blocks, num_blocks), block, causal=True, num_tokens=300)
    check(whole.queries_from(first_query))


def test_whole_blocks_of_the_tiles_size_are_not_masked() -> None:
    blocks = torch.ones(4, 4)
    assert check(BlockLayout.from_blocks(blocks, 128)).kv_num_blocks.sum() == 0
    assert check(BlockLayout.from_blocks(blocks, 128, causal=True)).kv_num_blocks.tolist() == [[[1, 1, 1, 1]]]
    assert check(BlockLayout.from_blocks(torch.ones(8, 8), 64)).kv_num_blocks.sum() == 0


def test_tiles_are_found_once() -> None:
    layout = random_layout(0, 64, 300)
    assert block_mask_of(layout, CPU).kv_indices is block_mask_of(layout, CPU).kv_indices


def qkv(batch: int, heads: int, kv_heads: int, layout: BlockLayout) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, layout.num_queries), (kv_heads, layout.num_keys), (kv_heads, layout.num_keys))
    q, k, v = (torch.randn(batch, *each, 16, generator=generator, dtype=torch.float64) for each in shapes)
    return q, k, v


LAYOUTS = {
    "plain": lambda: random_layout(0, 64, 160),
    "causal, per head": lambda: random_layout(1, 64, 150, 6, causal=True),
    "packed": lambda: pack([random_layout(2, 32, each, causal=True) for each in (30, 100, 20)]),
    "cached": lambda: random_layout(3, 32, 150, causal=True).queries_from(140),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("extras", ["", "padding", "bias", "padding, bias a head"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_uncompiled_flex_equals_the_reference(name: str, extras: str) -> None:
    layout = LAYOUTS[name]()
    q, k, v = qkv(2, 6, 2, layout)  # groups of three: not a power of two
    padding = bias = None
    if "padding" in extras:
        padding = torch.rand(2, layout.num_keys, generator=torch.Generator().manual_seed(1)) < 0.8
        padding[1] = False
    if "bias" in extras:
        bias = torch.randn(1, 6 if "head" in extras else 1, layout.num_queries, layout.num_keys, dtype=torch.float64)
    options = flex_options(q, k, layout, ScoreModifiers(0.3, padding, bias))
    out, aux = flex_attention(q, k, v, **options)
    expected, lse = reference_attention(q, k, v, layout.allowed(), scale=0.3, key_padding=padding, bias=bias)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(aux.lse, lse)
    assert not aux.lse.isnan().any()


@pytest.mark.parametrize("num_heads", [1, 6])
def test_a_bias_has_the_references_gradient(num_heads: int) -> None:
    """By both results, through flex's own backward without kernels; on CPUs it refuses q, k and v that need one."""
    layout = random_layout(1, 64, 150, causal=True)
    q, k, v = qkv(1, 6, 2, layout)
    bias = torch.randn(1, num_heads, 150, 150, dtype=torch.float64, requires_grad=True)
    padding = torch.rand(1, 150, generator=torch.Generator().manual_seed(1)) < 0.8
    options = flex_options(q, k, layout, ScoreModifiers(0.3, padding, bias))
    out, aux = torch.compile(flex_attention, fullgraph=True, backend="aot_eager")(q, k, v, **options)
    expected = reference_attention(q, k, v, layout.allowed(), scale=0.3, key_padding=padding, bias=bias)
    grads = [
        torch.autograd.grad(each.sin().sum() + lse[lse > -torch.inf].sum(), bias)[0]
        for each, lse in ((out, aux.lse), expected)
    ]
    torch.testing.assert_close(grads[0], grads[1])
    assert grads[1].any()


@pytest.mark.full
def test_compiled_flex_equals_the_reference() -> None:
    """Of what torch compiles for CPUs, there are neither gradients nor the log-sum-exp."""
    layout = random_layout(0, 64, 300, 4, causal=True)
    q, k, v = (each.float() for each in qkv(2, 4, 2, layout))
    options = flex_options(q, k, layout, ScoreModifiers(0.3)) | {"return_aux": AuxRequest()}
    out = torch.compile(flex_attention, fullgraph=True)(q, k, v, **options)[0]
    expected, _ = reference_attention(q, k, v, layout.allowed(), scale=0.3)
    torch.testing.assert_close(out, expected)


def test_what_flex_has_not_is_said() -> None:
    layout = random_layout(0, 64, 100)
    q, k, v = qkv(1, 1, 1, layout)
    numbers = torch.ones(1, 1, 100, dtype=torch.int32)
    draw = Draw(numbers, numbers, numbers[0, 0], 0.25)
    with refused("flex-dropout", "dropout=0.25", "triton"):
        flex_options(q, k, layout, ScoreModifiers(0.3, draw=draw))
    with refused("flex-on-cpu", "device='cpu'"):
        flex_attention_of(q, k, v, layout, ScoreModifiers(0.3))


@pytest.mark.parametrize(
    ("queries", "keys"),
    [(((0, 64),), ((0, 256),)), (((0, 64), (192, 256)), ((0, 256),)), (((0, 256),), ((64, 256),)), ((), ((0, 256),))],
)
def test_flex_refuses_other_selections_than_the_last_queries(queries: Runs, keys: Runs) -> None:
    layout = random_layout(0, 64, 256).select(queries, keys)
    with refused("flex-queries", "256 tokens", "triton"):
        block_mask_of(layout, CPU)
