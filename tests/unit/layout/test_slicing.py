"""Slicing arithmetic against NumPy: each expected buffer is built by NumPy's own splitting and flattening."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.copies import apply_copies
from harness.states import fuse
from shardwise.layout.slicing import (
    Chunk,
    LocalTensor,
    Rect,
    flat_range_to_rects,
    intersect,
    overlap,
    rect_to_flat_ranges,
    stack,
)

PADDING = -1
SIZES = st.integers(1, 6) | st.integers(0, 6)  # a tensor of no elements now and then
SHAPES = st.lists(SIZES, max_size=4).map(tuple)  # 0-d included


def numbered(shape: tuple[int, ...], first: int = 0) -> np.ndarray:
    """A tensor whose every element is different, so that equal values mean equal elements."""
    return np.arange(first, first + int(np.prod(shape))).reshape(shape)


def read(tensor: np.ndarray, rect: Rect) -> np.ndarray:
    return tensor[(*map(slice, rect.start, rect.stop), ...)]  # the ellipsis makes a view of a 0-d array, too


def fill(buffer: np.ndarray, tensor: np.ndarray, pieces: Sequence[Chunk]) -> np.ndarray:
    """Write each piece of `tensor` at its place, and nothing over anything."""
    for piece in pieces:
        place = buffer[piece.local_offset : piece.local_stop]
        assert np.all(place == PADDING)
        place[:] = read(tensor, piece.rect).ravel()
    return buffer


@dataclass(frozen=True)
class Sharding:
    """A tensor split in `degree` along `dim` (None: not split), and each part in `num_shards` flat shards."""

    dim: int | None
    degree: int
    num_shards: int

    def shards(self, tensor: np.ndarray) -> list[tuple[tuple[Chunk, ...], np.ndarray]]:
        """The pieces, by the library, and the buffer, by NumPy, of each shard; the last is padded."""
        parts = [tensor] if self.dim is None else np.array_split(tensor, self.degree, axis=self.dim)
        found = []
        for index, part in enumerate(parts):
            if self.dim is None:
                local = LocalTensor.whole(tensor.shape)
            else:
                local = LocalTensor.split(tensor.shape, self.dim, index, self.degree)
            assert local.numel == part.size
            length = -(-local.numel // self.num_shards)
            flat = np.full(length * self.num_shards, PADDING)
            flat[: part.size] = part.ravel()
            for start in range(0, length * self.num_shards, length or 1):
                pieces = intersect(local, min(start, local.numel), min(start + length, local.numel))
                found.append((pieces, flat[start : start + length]))
        return found


@st.composite
def shardings(draw: st.DrawFn, num_dims: int) -> Sharding:
    dim = draw(st.none() | st.integers(0, num_dims - 1)) if num_dims else None
    return Sharding(dim, draw(st.integers(1, 5)), draw(st.integers(1, 8)))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Rect:
    bounds = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return Rect(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))


@given(st.data())
def test_a_flat_range_is_few_rectangles_in_order(data: st.DataObject) -> None:
    tensor = numbered(data.draw(SHAPES))
    rect = data.draw(boxes(tensor.shape))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, rect.numel)] * 2)))
    pieces = flat_range_to_rects(rect, start, stop)
    values = [value for piece in pieces for value in read(tensor, piece.rect).ravel()]
    assert values == read(tensor, rect).ravel()[start:stop].tolist()
    stops = [piece.local_stop for piece in pieces]
    assert [piece.local_offset for piece in pieces] == [0, *stops][: len(pieces)]
    assert all(piece.rect.numel > 0 for piece in pieces)
    assert len(pieces) <= max(1, 2 * tensor.ndim - 1)


@pytest.mark.parametrize("num_dims", [1, 2, 3, 4])
def test_the_bound_on_the_number_of_rectangles_is_met(num_dims: int) -> None:
    rect = Rect.whole((3,) * num_dims)
    assert len(flat_range_to_rects(rect, 1, rect.numel - 1)) == 2 * num_dims - 1


@settings(max_examples=200)
@given(st.data())
def test_every_element_is_owned_exactly_once(data: st.DataObject) -> None:
    tensor = numbered(data.draw(SHAPES))
    owners = np.zeros(tensor.shape, dtype=int)
    for pieces, expected in data.draw(shardings(tensor.ndim)).shards(tensor):
        for piece in pieces:
            read(owners, piece.rect)[...] += 1
        np.testing.assert_array_equal(fill(np.full_like(expected, PADDING), tensor, pieces), expected)
    assert np.all(owners == 1)


@settings(max_examples=200)
@given(st.data())
def test_any_sharding_reshards_to_any_other(data: st.DataObject) -> None:
    tensor = numbered(data.draw(SHAPES))
    sources = data.draw(shardings(tensor.ndim)).shards(tensor)
    for want, expected in data.draw(shardings(tensor.ndim)).shards(tensor):
        buffer = np.full_like(expected, PADDING)
        num_copied = 0
        for have, source in sources:
            copies = overlap(have, want)
            apply_copies(source, buffer, copies)
            num_copied += sum(copy.rect.numel for copy in copies)
        np.testing.assert_array_equal(buffer, expected)
        assert num_copied == np.count_nonzero(expected != PADDING)


@given(st.data())
def test_overlap_finds_what_trying_every_pair_finds(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    pieces = st.lists(st.builds(Chunk, boxes(shape), st.integers(0, 9)), max_size=8)
    have, want = data.draw(pieces), data.draw(pieces)
    tried = [(a, b, rect) for a in have for b in want if (rect := a.rect.intersect(b.rect))]
    found = [(copy.source, copy.destination, copy.rect) for copy in overlap(have, want)]
    assert sorted(found, key=repr) == sorted(tried, key=repr)


@given(st.data())
def test_rectangles_intersect_in_their_common_elements(data: st.DataObject) -> None:
    tensor = numbered(data.draw(SHAPES))
    a, b = data.draw(boxes(tensor.shape)), data.draw(boxes(tensor.shape))
    common = np.intersect1d(read(tensor, a), read(tensor, b))
    both = a.intersect(b)
    assert (both is None) == (common.size == 0)
    if both is not None:
        np.testing.assert_array_equal(read(tensor, both).ravel(), common)
        np.testing.assert_array_equal(read(tensor, a)[both.slices_in(a)], read(tensor, both))


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor])
@pytest.mark.parametrize("shape", [(), (4, 6)])
def test_copies_work_on_arrays_and_tensors(convert: Callable[[Any], Any], shape: tuple[int, ...]) -> None:
    local = LocalTensor.whole(shape)
    source, destination = convert([*range(local.numel)]), convert([PADDING] * (local.numel + 3))
    want = [piece.shifted(2) for piece in intersect(local, 0, local.numel)]
    apply_copies(source, destination, overlap(local.pieces, want))
    assert destination.tolist() == [PADDING, PADDING, *range(local.numel), PADDING]


@pytest.mark.parametrize("num_shards", [1, 3])
def test_fused_qkv_with_replicated_kv_heads_unfuses(num_shards: int) -> None:
    """Two KV heads over tp=4: ranks 0 and 1 hold the same one, and so do ranks 2 and 3."""
    logical = (numbered((16, 5)), numbered((4, 5), first=100), numbered((4, 5), first=200))
    unfused = [np.full(tensor.size, PADDING) for tensor in logical]
    times_held = [np.zeros(tensor.shape, dtype=int) for tensor in logical]
    for rank in range(4):
        splits = [(rank, 4), (rank // 2, 2), (rank // 2, 2)]  # index and degree of q, k and v
        split_tensors = list(zip(logical, splits, strict=True))
        fused = fuse([LocalTensor.split(tensor.shape, 0, *split) for tensor, split in split_tensors])
        local = np.concatenate([np.split(t, degree)[index] for t, (index, degree) in split_tensors]).ravel()
        for shard in np.array_split(np.arange(local.size), num_shards):
            start, stop = shard[0].item(), shard[-1].item() + 1
            for part, found, times in zip(fused, unfused, times_held, strict=True):
                have = intersect(part, start, stop)
                copies = overlap(have, LocalTensor.whole(part.global_shape).pieces)
                apply_copies(local[start:stop], found, copies)
                for piece in have:
                    read(times, piece.rect)[...] += 1
    for tensor, found, times, expected in zip(logical, unfused, times_held, (1, 2, 2), strict=True):
        np.testing.assert_array_equal(found.reshape(tensor.shape), tensor)
        assert np.all(times == expected)


def test_vocabulary_padding_is_in_no_piece() -> None:
    last = LocalTensor.block((5, 4), Rect((3, 0), (5, 4)), numel=12)
    assert [intersect(last, start, start + 4) for start in (0, 4, 8)] == [
        (Chunk(Rect((3, 0), (4, 4)), 0),),
        (Chunk(Rect((4, 0), (5, 4)), 0),),
        (),
    ]


def test_what_is_no_slice_is_refused() -> None:
    row = Rect((0, 0), (1, 4))
    with pytest.raises(ValueError, match=r"\(2,\) to \(1,\)"):
        Rect((2,), (1,))
    with pytest.raises(ValueError, match=r"\(0,\) to \(1, 1\)"):
        Rect((0,), (1, 1))
    with pytest.raises(ValueError, match=r"\[0:1, 0:4\] and \[0:4\]"):
        row.intersect(Rect.whole((4,)))
    for start, stop in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(ValueError, match=f"{start}, {stop}"):
            flat_range_to_rects(row, start, stop)
        with pytest.raises(ValueError, match=f"{start}, {stop}"):
            intersect(LocalTensor.whole((4,)), start, stop)
    for dim in (-1, 2):
        with pytest.raises(ValueError, match=f"dim={dim} "):
            LocalTensor.split((4, 4), dim, 0, 2)
    for index in (-1, 2):
        with pytest.raises(ValueError, match=f"index={index} "):
            LocalTensor.split((4, 4), 0, index, 2)


def test_pieces_that_do_not_fit_their_buffer_are_refused() -> None:
    row = Rect((0, 0), (1, 4))
    with pytest.raises(ValueError, match=r"\[0:1, 0:4\].* \(1, 3\)"):
        LocalTensor((1, 3), (Chunk(row, 0),), 4)
    with pytest.raises(ValueError, match=r"\[0:0, 0:4\]"):
        LocalTensor((1, 4), (Chunk(Rect((0, 0), (0, 4)), 0),), 4)
    with pytest.raises(ValueError, match="offset 4"):
        LocalTensor((1, 4), (Chunk(row, 0), Chunk(row, 3)), 8)
    with pytest.raises(ValueError, match="numel=5"):
        LocalTensor((1, 4), (Chunk(row, 1),), 4)


@given(st.data(), st.integers(0, 12))
def test_the_flat_ranges_of_a_rectangle_are_its_elements_and_gaps_no_larger_than_allowed(
    data: st.DataObject, max_gap: int
) -> None:
    tensor = numbered(data.draw(SHAPES))
    within = data.draw(boxes(tensor.shape))
    cut = data.draw(boxes(within.shape))
    rect = Rect(*(tuple(np.add(within.start, bound).tolist()) for bound in (cut.start, cut.stop)))
    flat, wanted = read(tensor, within).ravel(), set(read(tensor, rect).ravel().tolist())
    exact, joined = (list(rect_to_flat_ranges(rect, within, gap)) for gap in (0, max_gap))
    assert [value for start, stop in exact for value in flat[start:stop]] == read(tensor, rect).ravel().tolist()
    covered = [int(value) for start, stop in joined for value in flat[start:stop]]
    assert wanted <= set(covered)
    assert len(covered) == len(set(covered))
    for (_, stop), (start, _) in pairwise(joined):
        assert stop <= start
    # What is read over is between elements that are wanted, in runs no longer than the gap.
    for start, stop in joined:
        is_wanted = [value in wanted for value in flat[start:stop].tolist()]
        gaps = "".join(map(str, map(int, is_wanted))).strip("1").split("1")
        assert is_wanted[0]
        assert is_wanted[-1]
        assert max(map(len, gaps)) <= max_gap


@settings(max_examples=200)
@given(st.data())
def test_stacked_pieces_are_their_rectangle_row_major(data: st.DataObject) -> None:
    tensor = numbered(data.draw(SHAPES))
    sharding = data.draw(shardings(tensor.ndim))
    for pieces, buffer in sharding.shards(tensor):
        rows = [part for piece in pieces for part in _rows_of(piece)] if data.draw(st.booleans()) else list(pieces)
        shuffled = data.draw(st.permutations(rows))
        found = stack(shuffled)
        assert len(found) <= len(pieces)
        for rect, parts in found:
            values = [value for part in parts for value in buffer[part.local_offset : part.local_stop].tolist()]
            assert values == read(tensor, rect).ravel().tolist()
        assert sorted(part.local_offset for _, parts in found for part in parts) == [row.local_offset for row in rows]


def _rows_of(piece: Chunk) -> list[Chunk]:
    """A piece as one piece for each innermost row, or element of a vector."""
    *outer, length = piece.rect.shape or (1,)
    length = length if outer else 1
    cuts = range(0, piece.rect.numel, length)
    parts = [flat_range_to_rects(piece.rect, cut, cut + length) for cut in cuts]
    return [part.shifted(piece.local_offset + cut) for cut, (part,) in zip(cuts, parts, strict=True)]


def test_a_fused_part_split_by_columns_stacks_to_one_rectangle() -> None:
    query, key = (LocalTensor.split((1600, 1200), 1, 1, 4) for _ in range(2))
    in_buffer, _ = fuse((query, key), num_rows=1600)
    assert len(in_buffer.pieces) == 1600
    ((rect, parts),) = stack(in_buffer.pieces)
    assert (rect, parts) == (query.pieces[0].rect, in_buffer.pieces)
