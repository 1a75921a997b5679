"""Dense attention on the CPU among any runs of tokens: exact against the oracle, in no more calls than it takes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.attention import reference_attention
from harness.refusals import refused
from shardwise.attention.api import attention_backend, block_sparse_attention_with_lse
from shardwise.attention.backends import BackendPlan, Draw, SavedForBackward, ScoreModifiers
from shardwise.attention.block_layout import BlockLayout, Pattern
from shardwise.attention.custom_op import attend, backend_named
from shardwise.attention.dense import (
    DenseBackend,
    bands_of,
    dense_layout,
    dense_layout_of_documents,
    is_dense,
    merge_partial,
    partial_backend,
)
from shardwise.layout.token_ranges import Runs, TokenSplit, contiguous, join, zigzag
from shardwise.runtime.torch_private import fake_tensors

BACKEND = DenseBackend()
EXTRAS = ScoreModifiers(scale=0.3)


def plan_of(layout: BlockLayout) -> BackendPlan:
    return BACKEND.plan(layout, torch.empty(0), torch.empty(0))


def tensors(layout: BlockLayout, heads: int = 4, kv_heads: int = 2, samples: int = 2, seed: int = 0) -> list[Tensor]:
    """Of q, k, v and the gradient of the output; as projections leave them, [B, N, H, D] in memory."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((layout.num_queries, heads), (layout.num_keys, kv_heads), (layout.num_keys, kv_heads))
    made = [
        torch.randn(samples, num, num_heads, 6, generator=generator, dtype=torch.float64).transpose(1, 2)
        for num, num_heads in (*sizes, sizes[0])
    ]
    return [each.requires_grad_() for each in made[:3]] + made[3:]


def check(layout: BlockLayout, heads: int = 4, kv_heads: int = 2, samples: int = 2, seed: int = 0) -> None:
    """Forward and backward against the oracle and its autograd."""
    q, k, v, grad_out = tensors(layout, heads, kv_heads, samples, seed)
    expected, expected_lse = reference_attention(q, k, v, layout.allowed(), scale=EXTRAS.scale)
    expected_grads = torch.autograd.grad(expected, (q, k, v), grad_out)
    plan = plan_of(layout)
    with torch.no_grad():
        out, lse = BACKEND.forward(q, k, v, EXTRAS, plan)
        grads = BACKEND.backward(grad_out, None, SavedForBackward(q, k, v, out, lse), EXTRAS, plan, False, True)
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-10)
    close(out, expected)
    close(lse, expected_lse)
    for found, wanted in zip((grads.q, grads.k, grads.v), expected_grads, strict=True):
        close(found, wanted)


@st.composite
def layouts(draw: st.DrawFn) -> BlockLayout:
    """Some documents, and any runs of their tokens as queries and as keys."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    layout = dense_layout_of_documents(lengths, causal=draw(st.booleans()))

    def runs() -> Runs:
        edges = sorted(draw(st.sets(st.integers(0, sum(lengths)), max_size=10)))
        return join([tuple(zip(edges[::2], edges[1::2], strict=False))])

    queries = runs()
    return layout.select(queries, queries if draw(st.booleans()) else runs())


@settings(max_examples=150)
@given(layout=layouts(), heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]), samples=st.integers(1, 2))
def test_any_runs_of_any_documents_are_exact(layout: BlockLayout, heads: tuple[int, int], samples: int) -> None:
    check(layout, *heads, samples)


@given(layout=layouts())
def test_each_visible_pair_is_in_one_rectangle(layout: BlockLayout) -> None:
    counted = torch.zeros(layout.num_queries, layout.num_keys, dtype=torch.int64)
    for band in bands_of(layout):
        for queries, keys, mask in band.rectangles():
            ones = torch.ones_like(counted[queries, keys])
            assert ones.numel()
            counted[queries, keys] += ones if mask is None else ones.tril()
    assert torch.equal(counted, layout.allowed()[0].long())


def num_calls(layout: BlockLayout) -> int:
    return sum(len(list(band.rectangles())) for band in bands_of(layout))


@pytest.mark.parametrize(
    ("split", "causal", "over_all_keys"),
    [
        (contiguous(64, 4), False, [1, 1, 1, 1]),
        (zigzag(64, 4), False, [1, 1, 1, 1]),
        (contiguous(64, 4), True, [1, 2, 2, 2]),
        (zigzag(64, 4), True, [3, 4, 4, 2]),
    ],
    ids=["contiguous", "zigzag", "contiguous causal", "zigzag causal"],
)
def test_a_share_over_a_share_is_one_call(split: TokenSplit, causal: bool, over_all_keys: list[int]) -> None:
    layout = dense_layout(64, causal=causal)
    for rank, own in enumerate(split.shares):
        for other, theirs in enumerate(split.shares):
            is_seen = not causal or split.kind == "zigzag" or other <= rank
            assert num_calls(layout.select(own, theirs)) == is_seen
    assert [num_calls(layout.select(own, ((0, 64),))) for own in split.shares] == over_all_keys
    check(layout.select(split.shares[1], split.shares[2]))
    check(layout.select(split.shares[2], ((0, 64),)))


def test_queries_after_a_diagonal_share_its_call() -> None:
    layout = dense_layout(40, causal=True).select(queries=((0, 10), (20, 30)), keys=((0, 10), (35, 40)))
    assert num_calls(layout) == 1
    check(layout)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_partial_gradients_by_the_final_result_add_up(kv_heads: int) -> None:
    layout, split = dense_layout(48, causal=True), zigzag(48, 4)
    own = split.shares[1]
    whole = layout.select(own, ((0, 48),))
    q, k, v, grad_out = tensors(whole, kv_heads=kv_heads)
    expected, expected_lse = reference_attention(q, k, v, whole.allowed(), scale=EXTRAS.scale)
    expected_grads = torch.autograd.grad(expected, (q, k, v), grad_out)
    parts = []
    for share in split.shares:
        places = torch.tensor([token for run in share for token in range(*run)])
        parts.append((layout.select(own, share), k.detach()[:, :, places], v.detach()[:, :, places], places))
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, dtype=torch.float64)
    for part, keys, values, _ in parts:
        merge_partial(out, lse, *BACKEND.forward(q.detach(), keys, values, EXTRAS, plan_of(part)))
    torch.testing.assert_close((out, lse), (expected, expected_lse), rtol=0, atol=1e-10)
    dq, dk, dv = (torch.zeros_like(each) for each in (q, k, v))
    for part, keys, values, places in parts:
        saved = SavedForBackward(q.detach(), keys, values, out, lse)
        grads = BACKEND.backward(grad_out, None, saved, EXTRAS, plan_of(part), False, True)
        dq += grads.q
        dk[:, :, places], dv[:, :, places] = grads.k, grads.v
    for found, wanted in zip((dq, dk, dv), expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_numbers_are_summed_wide(dtype: torch.dtype) -> None:
    layout = dense_layout(96, causal=True).select(((16, 48), (64, 96)), ((0, 96),))
    q, k, v, grad_out = (each.detach().to(dtype) for each in tensors(layout))
    wide = [each.double().requires_grad_() for each in (q, k, v)]
    expected, expected_lse = reference_attention(*wide, layout.allowed(), scale=EXTRAS.scale)
    expected_grads = torch.autograd.grad(expected, wide, grad_out.double())
    plan = plan_of(layout)
    out, lse = BACKEND.forward(q, k, v, EXTRAS, plan)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    limit = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=limit, atol=limit)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=limit, atol=limit)
    for is_wide in (False, True):
        grads = BACKEND.backward(grad_out, None, SavedForBackward(q, k, v, out, lse), EXTRAS, plan, False, is_wide)
        for found, wanted in zip((grads.q, grads.k, grads.v), expected_grads, strict=True):
            assert found.dtype == (torch.float32 if is_wide else dtype)
            torch.testing.assert_close(found.double(), wanted, rtol=8 * limit, atol=8 * limit)
    torch.testing.assert_close(grads.v.double(), expected_grads[2], rtol=0, atol=1e-4)  # the wide ones, not rounded


def test_strides_of_any_kind_are_taken() -> None:
    layout = dense_layout(12, causal=True)
    q, k, v, _ = (each.detach() for each in tensors(layout, 2, 2))
    plan = plan_of(layout)
    k = k[:, :, :1].expand(-1, -1, 12, -1)
    q, v = (each.transpose(2, 3).contiguous().transpose(2, 3) for each in (q, v))
    grad_out = torch.ones((), dtype=torch.float64).expand(q.shape)
    out, lse = BACKEND.forward(q, k, v, EXTRAS, plan)
    grads = BACKEND.backward(grad_out, None, SavedForBackward(q, k, v, out, lse), EXTRAS, plan, False)
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    expected, _ = reference_attention(*leaves, layout.allowed(), scale=EXTRAS.scale)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    expected_grads = torch.autograd.grad(expected, leaves, grad_out)
    for found, wanted in zip((grads.q, grads.k, grads.v), expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_through_the_op_it_is_differentiable_and_fakes_need_no_plan() -> None:
    layout = dense_layout(20, causal=True).select(((4, 9), (12, 20)), ((0, 3), (5, 20)))
    q, k, v, grad_out = tensors(layout)
    out, _ = attend(q, k, v, EXTRAS, layout, "dense")
    expected, _ = reference_attention(q, k, v, layout.allowed(), scale=EXTRAS.scale)
    wanted = torch.autograd.grad(expected, (q, k, v), grad_out)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), grad_out), wanted, rtol=0, atol=1e-10)
    assert isinstance(backend_named("dense"), DenseBackend)
    with fake_tensors():
        fake = torch.empty(2, 4, layout.num_queries, 6)
        keys = torch.empty(2, 2, layout.num_keys, 6)
        assert attend(fake, keys, keys, EXTRAS, layout, "dense")[0].shape == fake.shape


def test_no_samples_and_no_keys_are_taken() -> None:
    check(dense_layout(8, causal=True), samples=0)
    check(dense_layout(8, causal=False).select(((0, 4),), ()))
    check(dense_layout(8, causal=False).select((), ((0, 4),)))


class TestChoice:
    def test_which_layouts_are_dense(self) -> None:
        blocks = torch.ones(3, 3)
        assert is_dense(BlockLayout.from_blocks(blocks, 4))
        assert is_dense(BlockLayout.from_blocks(blocks, 4, causal=True))
        assert is_dense(BlockLayout((Pattern(blocks.bool()[None], 4, True, 12),)))
        assert not is_dense(BlockLayout.from_blocks(blocks.tril(), 4))
        blocks[2, 0] = 0
        assert not is_dense(BlockLayout.from_blocks(blocks, 4, causal=True))
        assert not is_dense(BlockLayout.from_blocks(torch.stack([torch.ones(3, 3), blocks]), 4))
        assert is_dense(dense_layout_of_documents([3, 500, 3], causal=True))
        with refused("dense-layout"):
            plan_of(BlockLayout.from_blocks(blocks, 4))

    def test_documents_do_not_see_each_other(self) -> None:
        for causal in (False, True):
            allowed = dense_layout_of_documents([2, 130, 1], causal=causal).allowed()[0]
            documents = torch.tensor([0] * 2 + [1] * 130 + [2])
            expected = documents[:, None] == documents
            assert torch.equal(allowed, expected.tril() if causal else expected)

    def test_blocks_are_larger_where_there_would_be_too_many(self) -> None:
        assert dense_layout(4096 * 2, causal=True).block == 128
        long = dense_layout(2**19 + 1, causal=False)
        assert long.block == 256
        assert long.num_keys == 2**19 + 1

    def test_dense_layouts_without_extras_run_on_it(self) -> None:
        q = torch.empty(1, 2, 8, 4)
        layout = dense_layout(8, causal=True)
        sparse = BlockLayout.from_blocks(torch.eye(2), 4)
        draw = Draw(*(torch.empty(1, 2, 8, dtype=torch.int32),) * 2, torch.empty(8, dtype=torch.int32), 0.1)
        assert partial_backend(layout, q, ScoreModifiers(1.0)) == "dense"
        assert partial_backend(layout.select(((0, 3),), ((2, 8),)), q, ScoreModifiers(1.0)) == "dense"
        assert partial_backend(sparse, q, ScoreModifiers(1.0)) == "cpu"
        assert partial_backend(layout, q, ScoreModifiers(1.0, key_padding=torch.ones(1, 8, dtype=torch.bool))) == "cpu"
        assert partial_backend(layout, q, ScoreModifiers(1.0, bias=torch.ones(1, 2, 8, 8))) == "cpu"
        assert partial_backend(layout, q, ScoreModifiers(1.0, draw=draw)) == "cpu"
        with attention_backend("cpu"):
            assert partial_backend(layout, q, ScoreModifiers(1.0)) == "cpu"

    def test_what_it_lacks_is_refused(self) -> None:
        layout = dense_layout(8, causal=True)
        q, k, v, _ = tensors(layout)
        with attention_backend("dense"):
            with refused("dense-operands"):
                block_sparse_attention_with_lse(q, k, v, layout, key_padding=torch.ones(2, 8, dtype=torch.bool))
            _, lse = block_sparse_attention_with_lse(q, k, v, layout)
            with refused("dense-lse-gradient"):
                lse.sum().backward()
