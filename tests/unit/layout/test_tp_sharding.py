"""Splits over the tp axis: every element is held, as often as it says, and pieces say where."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.copies import apply_copies
from harness.refusals import refused
from shardwise.layout.mesh_shape import nearest_divisors
from shardwise.layout.slicing import LocalTensor, Rect, overlap
from shardwise.layout.tp_sharding import FusedPart, ParamSplit


@st.composite
def param_splits(draw: st.DrawFn) -> ParamSplit:
    degree = draw(st.sampled_from([1, 2, 3, 4, 6]))
    num_dims = draw(st.integers(1, 3))
    dim = draw(st.integers(0, num_dims - 1))
    parts = tuple(draw(part(degree)) for _ in range(draw(st.integers(1, 3))))
    shape = [draw(st.integers(1, 4)) for _ in range(num_dims)]
    shape[dim] = sum(each.size for each in parts)
    return ParamSplit(tuple(shape), degree, dim, parts)


@st.composite
def part(draw: st.DrawFn, degree: int) -> FusedPart:
    kind = draw(st.sampled_from(["indices", "heads", "shared", "padded"]))
    if kind == "padded":
        return FusedPart(draw(st.integers(1, 13)), is_padded=True)
    if kind == "indices":
        return FusedPart(degree * draw(st.integers(1, 3)))
    divisors = [number for number in range(1, degree + 1) if degree % number == 0]
    num_units = draw(st.sampled_from(divisors)) if kind == "shared" else degree * draw(st.integers(1, 3))
    return FusedPart(num_units * draw(st.integers(1, 3)), num_units)


@given(param_splits())
def test_every_element_is_held_by_as_many_ranks_as_share_it(split: ParamSplit) -> None:
    holders = np.zeros(split.global_shape, dtype=int)
    expected = np.zeros(split.global_shape, dtype=int)
    owners = np.zeros(split.global_shape, dtype=int)
    for rank in range(split.degree):
        for share in split.shares(rank):
            index = share.source.slices_in(Rect.whole(split.global_shape))
            holders[index] += 1
            expected[index] = share.num_sharers
            owners[index] += share.is_owned_by(rank)
            assert share.source.shape == share.target.shape
            assert share.is_summed == (share.num_sharers > 1)
    assert (holders == expected).all()
    assert (owners == 1).all()


@given(param_splits())
def test_pieces_and_rectangles_say_the_same(split: ParamSplit) -> None:
    whole = np.arange(1, math.prod(split.global_shape) + 1).reshape(split.global_shape)
    for rank in range(split.degree):
        by_rects = np.zeros(split.local_shape, dtype=int)
        covered = []
        for share in split.shares(rank):
            target = share.target.slices_in(Rect.whole(split.local_shape))
            by_rects[target] = whole[share.source.slices_in(Rect.whole(split.global_shape))]
            covered += list(share.flat_ranges(split.local_shape))
        by_pieces = np.zeros(math.prod(split.local_shape), dtype=int)
        local = split.local(rank)
        apply_copies(whole.reshape(-1), by_pieces, overlap(LocalTensor.whole(split.global_shape).pieces, local.pieces))
        assert (by_pieces == by_rects.reshape(-1)).all()
        held = {index for start, stop in covered for index in range(start, stop)}
        assert held == set(np.flatnonzero(by_pieces)), "what no range covers is padding"


def test_a_replicated_parameter_is_one_share_of_all() -> None:
    split = ParamSplit((4, 2), degree=3)
    (share,) = split.shares(2)
    assert (share.num_sharers, share.is_summed, share.is_owned_by(2), share.is_owned_by(0)) == (3, False, False, True)
    assert ParamSplit((4, 2), degree=3, is_partial=True).shares(0)[0].is_summed


def test_the_last_ranks_of_a_small_vocabulary_hold_padding_alone() -> None:
    split = ParamSplit((5, 2), degree=4, dim=0, parts=(FusedPart(5, is_padded=True),))
    assert split.local_shape == (2, 2)
    assert [str(share.source) for rank in range(4) for share in split.shares(rank)] == [
        "[0:2, 0:2]",
        "[2:4, 0:2]",
        "[4:5, 0:2]",
    ]


@pytest.mark.parametrize(
    ("part", "degree", "legal"),
    [
        (FusedPart(64, 32), 3, "2, 4"),
        (FusedPart(12), 5, "4, 6"),
        (FusedPart(64, 2), 3, "2"),
        (FusedPart(8, 8), 16, None),
    ],
)
def test_units_that_do_not_divide_are_refused_with_the_nearest_that_do(
    part: FusedPart, degree: int, legal: str | None
) -> None:
    if legal is None:
        part.check(degree, "num_heads")
        return
    with refused("tp-divides-units", f"tp={degree}", f"nearest legal: {legal}"):
        part.check(degree, "num_heads")


def test_nearest_divisors_are_those_on_both_sides() -> None:
    assert (nearest_divisors(32, 3), nearest_divisors(7, 9), nearest_divisors(6, 1)) == ("2, 4", "7", "2")


@given(param_splits())
def test_what_a_rank_owns_is_part_of_what_it_holds_and_all_ranks_own_each_element_once(split: ParamSplit) -> None:
    owners = np.zeros(split.global_shape, dtype=int)
    for rank in range(split.degree):
        held, owned = split.local(rank), split.local(rank, owned_only=True)
        assert set(owned.pieces) <= set(held.pieces)
        assert owned.global_shape == held.global_shape
        assert owned.numel == held.numel == math.prod(split.local_shape)
        for piece in owned.pieces:
            owners[piece.rect.slices_in(Rect.whole(split.global_shape))] += 1
    assert (owners == 1).all()
