"""Merging partial attention: any order and any parts give the softmax over all keys, and nothing seen stays nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from harness.attention import reference_attention
from shardwise.attention.dense import merge_partial

Partial = tuple[Tensor, Tensor]


def nothing(queries: int, dtype: torch.dtype = torch.float64) -> Partial:
    return torch.zeros(2, 2, queries, 3, dtype=dtype), torch.full((2, 2, queries), -torch.inf, dtype=dtype)


def merged(parts: list[Partial], queries: int) -> Partial:
    out, lse = nothing(queries)
    for part in parts:
        merge_partial(out, lse, *part)
    return out, lse


@given(seed=st.integers(0, 2**20), spread=st.sampled_from([0.1, 1.0, 30.0, 1000.0]), data=st.data())
def test_parts_in_any_order_give_attention_over_their_union(seed: int, spread: float, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_parts = data.draw(st.integers(1, 5))
    q = torch.randn(2, 2, 4, 3, generator=generator, dtype=torch.float64) * spread
    k, v = torch.randn(2, 2, 2, 9, 3, generator=generator, dtype=torch.float64)
    part_of = torch.randint(0, num_parts, (9,), generator=generator)
    seen = torch.rand(4, 9, generator=generator) < 0.5
    parts = [reference_attention(q, k, v, seen & (part_of == part)) for part in range(num_parts)]
    order = data.draw(st.permutations(range(num_parts)))
    expected = reference_attention(q, k, v, seen)
    for found in (merged(parts, 4), merged([parts[each] for each in order], 4)):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_empty_side_leaves_the_other_to_the_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    full = (
        torch.randn(2, 2, 50, 3, generator=generator, dtype=dtype),
        torch.randn(2, 2, 50, generator=generator, dtype=dtype).mul(100),
    )
    for first, second in ((full, nothing(50, dtype)), (nothing(50, dtype), full)):
        out, lse = (each.clone() for each in first)
        merge_partial(out, lse, *second)
        assert torch.equal(out, full[0])
        assert torch.equal(lse, full[1])


def test_two_empty_sides_are_empty() -> None:
    out, lse = merged([nothing(3), nothing(3)], 3)
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_views_are_written_in_place_and_narrow_parts_are_widened() -> None:
    whole_out, whole_lse = torch.zeros(1, 5, 2, 3), torch.full((1, 2, 5), -torch.inf)
    part = torch.randn(1, 2, 3, 3, generator=torch.Generator().manual_seed(2)).bfloat16()
    merge_partial(whole_out.transpose(1, 2)[:, :, 1:4], whole_lse[:, :, 1:4], part, torch.zeros(1, 2, 3))
    assert torch.equal(whole_out[:, 1:4].transpose(1, 2), part.float())
    assert not whole_out[:, [0, 4]].any()
    assert (whole_lse == -torch.inf).tolist() == [[[True, False, False, False, True]] * 2]


def test_what_is_no_number_is_not_hidden() -> None:
    out, lse = nothing(1)
    merge_partial(out, lse, torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan))
    assert out.isnan().all()
    assert lse.isnan().all()
