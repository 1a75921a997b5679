"""Slicing arithmetic says which elements of a global tensor are where in a local buffer. It uses integers only.

A local tensor is a list of pieces, each a rectangle of the global tensor that is stored row-major and contiguous
in the local buffer; what no piece covers is padding. Sharding a buffer by flat ranges cuts its pieces, and
moving from one layout to another copies the rectangles that both hold. The library has no other slicing arithmetic.

Rank 0 of two holds the left half of a (4, 6) matrix, and ZeRO cuts its 12 elements into shards of 7 and 5:

    columns  0  1  2   3 4 5
    row 0    0  1  2 | . . .
    row 1    3  4  5 | . . .      shard 0: offsets 0 to 6 of the left half
    row 2    6 [7  8]| . . .      shard 1: offsets 7 to 11, in the two rectangles in brackets
    row 3   [9 10 11]| . . .

>>> left = LocalTensor.split((4, 6), dim=1, index=0, degree=2)
>>> shard = intersect(left, 7, 12)
>>> [(str(piece.rect), piece.local_offset) for piece in shard]
[('[2:3, 1:3]', 0), ('[3:4, 0:3]', 2)]
>>> last_row = LocalTensor.split((4, 6), dim=0, index=3, degree=4)
>>> [str(copy.rect) for copy in overlap(shard, last_row.pieces)]
['[3:4, 0:3]']
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from operator import add, gt, lt, sub
from typing import Self

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rect:
    """Describe the elements of a global tensor from `start` up to `stop` in every dim; of a 0-d tensor, its one.

    >>> a, b = Rect((0, 0), (3, 3)), Rect((1, 2), (4, 5))
    >>> a.shape, a.numel, str(a.intersect(b))
    ((3, 3), 9, '[1:3, 2:3]')

    Raises:
        ValueError: `stop` is before `start` in a dim, or they differ in their number of dims.
    """

    start: Shape
    stop: Shape

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or any(map(gt, self.start, self.stop)):
            raise ValueError(f"{self.start} to {self.stop} is no rectangle; give start <= stop for every dim")

    @classmethod
    def whole(cls, shape: Shape) -> Self:
        """Return the rectangle of all elements of a tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def shape(self) -> Shape:
        """Return the number of elements along each dim."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        """Count all elements; 1 for a 0-d tensor."""
        return math.prod(map(sub, self.stop, self.start))

    def intersect(self, other: Rect) -> Rect | None:
        """Return the elements that are in both, None where there are none.

        Raises:
            ValueError: the two cannot be of one tensor, since they differ in their number of dims.
        """
        if len(self.start) != len(other.start):
            raise ValueError(f"{self} and {other} differ in number of dims; give rectangles of one tensor")
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Rect(start, stop) if all(map(lt, start, stop)) else None

    def slices_in(self, outer: Rect) -> tuple[slice, ...]:
        """Return the index of this rectangle in an array that holds `outer`, which contains it."""
        bounds = zip(self.start, self.stop, outer.start, strict=True)
        return tuple(slice(start - origin, stop - origin) for start, stop, origin in bounds)

    def __str__(self) -> str:
        return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(self.start, self.stop, strict=True))}]"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Place a rectangle of a global tensor, row-major and contiguous, at `local_offset` of a local 1-D buffer."""

    rect: Rect
    local_offset: int

    @property
    def local_stop(self) -> int:
        """Return the first offset after the chunk."""
        return self.local_offset + self.rect.numel

    def shifted(self, num_elements: int) -> Chunk:
        """Return the same rectangle, `num_elements` later in the buffer."""
        return Chunk(self.rect, self.local_offset + num_elements)


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """Describe what one rank holds of one global tensor, in a local 1-D buffer.

    Two ranks may hold the same elements (replicated KV heads), and a buffer several global tensors (`fuse`).

    Attributes:
        pieces: its rectangles in the order of their offsets; none is empty and no two overlap in the buffer.
        numel: elements of the buffer; those in no piece are padding or belong to another tensor.

    Raises:
        ValueError: a piece is empty, reaches out of the tensor or the buffer, or overlaps another.
    """

    global_shape: Shape
    pieces: tuple[Chunk, ...]
    numel: int

    def __post_init__(self) -> None:
        whole, end = Rect.whole(self.global_shape), 0
        for piece in self.pieces:
            if whole.intersect(piece.rect) != piece.rect:
                raise ValueError(f"{piece.rect} is empty or not within shape {self.global_shape}; cut it first")
            if piece.local_offset < end:
                raise ValueError(f"{piece} starts before offset {end}, the end of the last; order the pieces")
            end = piece.local_stop
        if end > self.numel:
            raise ValueError(f"numel={self.numel}, but pieces reach offset {end}; give at least numel={end}")

    @classmethod
    def whole(cls, shape: Shape) -> Self:
        """Return the local tensor that holds all of a tensor, without padding."""
        return cls.block(shape, Rect.whole(shape))

    @classmethod
    def block(cls, global_shape: Shape, rect: Rect, numel: int | None = None) -> Self:
        """Put one rectangle at the front of a buffer.

        Of a vocabulary of 5 padded to 6, the second of two ranks holds two rows, and one that is padding:

        >>> LocalTensor.block((5, 4), Rect((3, 0), (5, 4)), numel=3 * 4).numel
        12

        Args:
            rect: the elements held; an empty one gives a buffer without pieces.
            numel: elements of the buffer; None for as many as `rect` has.
        """
        pieces = (Chunk(rect, 0),) if rect.numel else ()
        return cls(global_shape, pieces, rect.numel if numel is None else numel)

    @classmethod
    def split(cls, global_shape: Shape, dim: int, index: int, degree: int) -> Self:
        """Return part `index` of a tensor split along `dim`; the first parts may have one index more.

        For KV heads that several ranks replicate, split by the number of heads and give those ranks the same index.

        >>> [str(piece.rect) for i in range(3) for piece in LocalTensor.split((5, 4), 0, i, 3).pieces]
        ['[0:2, 0:4]', '[2:4, 0:4]', '[4:5, 0:4]']

        Args:
            dim: the dim that is split, from 0.

        Raises:
            ValueError: the tensor has no such dim, or the split no such part.
        """
        if not 0 <= dim < len(global_shape):
            raise ValueError(f"dim={dim} is not one of the {len(global_shape)} dims of {global_shape}; count from 0")
        if not 0 <= index < degree:
            raise ValueError(f"index={index} is not one of {degree} parts; count from 0")
        size, num_larger = divmod(global_shape[dim], degree)
        first = index * size + min(index, num_larger)
        last = first + size + (index < num_larger)
        start = tuple(first if d == dim else 0 for d in range(len(global_shape)))
        stop = tuple(last if d == dim else length for d, length in enumerate(global_shape))
        return cls.block(global_shape, Rect(start, stop))


def flat_range_to_rects(rect: Rect, start: int, stop: int) -> tuple[Chunk, ...]:
    """Cut the range [start, stop) of the row-major elements of `rect` into rectangles, at most 2 * ndim - 1.

    Args:
        rect: any rectangle; the rectangles returned are of the same global tensor.

    Returns:
        The rectangles in order, each at its offset from `start`. The range [2, 10) of a (3, 4) box gives three:

            . . 0 1
            2 3 4 5
            6 7 . .

    >>> [(str(piece.rect), piece.local_offset) for piece in flat_range_to_rects(Rect.whole((3, 4)), 2, 10)]
    [('[0:1, 2:4]', 0), ('[1:2, 0:4]', 2), ('[2:3, 0:2]', 6)]

    Raises:
        ValueError: the range reaches out of `rect`.
    """
    _check_range(start, stop, rect.numel)
    pieces, offset = [], 0
    for low, high in _boxes(rect.shape, start, stop):
        box = Rect(tuple(map(add, rect.start, low)), tuple(map(add, rect.start, high)))
        pieces.append(Chunk(box, offset))
        offset += box.numel
    return tuple(pieces)


def intersect(local: LocalTensor, start: int, stop: int) -> tuple[Chunk, ...]:
    """Return the pieces that a ZeRO shard [start, stop) of the local buffer owns, at offsets from `start`.

    Raises:
        ValueError: the range reaches out of the buffer.
    """
    _check_range(start, stop, local.numel)
    pieces: list[Chunk] = []
    for piece in local.pieces[bisect_right(local.pieces, start, key=lambda piece: piece.local_stop) :]:
        if piece.local_offset >= stop:
            break
        first, last = max(start, piece.local_offset), min(stop, piece.local_stop)
        rects = flat_range_to_rects(piece.rect, first - piece.local_offset, last - piece.local_offset)
        pieces += (rect.shifted(first - start) for rect in rects)
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class SliceCopy:
    """Name a rectangle that is part of the piece `source` in one buffer and of `destination` in another."""

    source: Chunk
    destination: Chunk
    rect: Rect


def overlap(have: Sequence[Chunk], want: Sequence[Chunk]) -> tuple[SliceCopy, ...]:
    """Return the copies that bring as much of `want` as `have` holds; both are pieces of one global tensor.

    To reshard from any layout to any other, call it for each pair of a source and a destination buffer.
    Where two pieces of `have` hold the same elements, both are copied.
    """
    sources = sorted(have, key=lambda piece: _rows(piece)[0])
    # In this order, the sources whose rows meet a destination's are in one slice: those after it start too
    # late, those before it stop too early. Trying each pair is slow with hundreds of pieces on either side.
    starts = [_rows(piece)[0] for piece in sources]
    furthest_stops = list(accumulate((_rows(piece)[1] for piece in sources), max))
    copies = []
    for destination in want:
        first, last = _rows(destination)
        for source in sources[bisect_right(furthest_stops, first) : bisect_left(starts, last)]:
            if rect := source.rect.intersect(destination.rect):
                copies.append(SliceCopy(source, destination, rect))
    return tuple(copies)


def rect_to_flat_ranges(rect: Rect, within: Rect, max_gap: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the ranges [start, stop) of the row-major elements of `within` that hold `rect`, in order.

    Ranges with small gaps come as one, so that a reader of a few columns of a matrix in a file reads everything between
    them at once. Where the gaps between rows are larger, smaller ones between planes stay too.

    >>> columns, matrix = Rect((1, 1), (3, 3)), Rect.whole((4, 4))
    >>> list(rect_to_flat_ranges(columns, matrix)), list(rect_to_flat_ranges(columns, matrix, max_gap=2))
    ([(5, 7), (9, 11)], [(5, 11)])

    Args:
        within: the rectangle whose elements are counted; `rect` is inside it.
        max_gap: elements between two ranges that are joined, at most.
    """
    if not rect.numel:
        return
    first, length, stride = 0, 1, 1
    loops: list[range] = []  # of the dims whose gaps are larger, the outermost first
    for low, high, start, stop in zip(
        rect.start[::-1], rect.stop[::-1], within.start[::-1], within.stop[::-1], strict=True
    ):
        first += (low - start) * stride
        if stride - length <= max_gap:
            length += (high - low - 1) * stride
        elif high - low > 1:
            loops.insert(0, range(0, (high - low) * stride, stride))
        stride *= stop - start
    for offsets in product(*loops):
        yield first + sum(offsets), first + sum(offsets) + length


# A rectangle, and the pieces whose elements, one piece after the other, are its own row-major elements.
Stack = tuple[Rect, tuple[Chunk, ...]]


def stack(pieces: Sequence[Chunk]) -> tuple[Stack, ...]:
    """Join pieces into rectangles whose row-major elements are the pieces', one piece after the other.

    A part of a fused matrix that is split by columns is one piece for each row: thousands of pieces join into one.

    >>> rows = [Chunk(Rect((row, 4), (row + 1, 8)), 12 * row) for row in range(3)]
    >>> [(str(rect), len(parts)) for rect, parts in stack(rows)]
    [('[0:3, 4:8]', 3)]

    Args:
        pieces: of one global tensor, none empty; they need not be neighbours in the local buffer.

    Returns:
        Each rectangle with its pieces in order, sorted by where it starts.
    """
    stacks = [_Open(piece.rect.start, piece.rect.stop, [piece]) for piece in pieces]
    stacks.sort(key=lambda stack: stack.start)
    # Innermost first: pieces that fill a row together then stack with other rows.
    for dim in reversed(range(len(stacks[0].start) if stacks else 0)):
        stacks = _stacked_along(dim, stacks)
    return tuple((Rect(stack.start, stack.stop), tuple(stack.pieces)) for stack in stacks)


@dataclass(slots=True)
class _Open:
    """Hold a rectangle that may grow."""

    start: Shape
    stop: Shape
    pieces: list[Chunk]


def _stacked_along(dim: int, stacks: list[_Open]) -> list[_Open]:
    """Join neighbours along `dim` that have one index in the dims before and the same bounds after; keep the order."""
    stacked, last = [], dict[tuple[Shape, ...], _Open]()
    for stack in stacks:
        start, stop = stack.start, stack.stop
        if math.prod(map(sub, stop[:dim], start[:dim])) > 1:
            stacked.append(stack)
            continue
        key = (start[:dim], start[dim + 1 :], stop[dim + 1 :])
        below = last.get(key)
        if below is not None and below.stop[dim] == start[dim]:
            below.stop = stop
            below.pieces += stack.pieces
        else:
            last[key] = stack
            stacked.append(stack)
    return stacked


def _rows(piece: Chunk) -> tuple[int, int]:
    """Return the range of dim 0; a 0-d tensor counts as one row."""
    return (piece.rect.start[0], piece.rect.stop[0]) if piece.rect.start else (0, 1)


def _boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a range at its rows: the end of the first one, whole rows, the front of the last one."""
    if start == stop:
        return
    if not shape:
        yield (), ()
        return
    row_numel = math.prod(shape[1:])
    first, head = divmod(start, row_numel)
    last, tail = divmod(stop, row_numel)
    if first == last:
        yield from _boxes_in_row(first, shape[1:], head, tail)
        return
    if head:
        yield from _boxes_in_row(first, shape[1:], head, row_numel)
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last, *shape[1:])
    yield from _boxes_in_row(last, shape[1:], 0, tail)


def _boxes_in_row(row: int, row_shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    for low, high in _boxes(row_shape, start, stop):
        yield (row, *low), (row + 1, *high)


def _check_range(start: int, stop: int, numel: int) -> None:
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"[{start}, {stop}) is not a range of {numel} elements; give 0 <= start <= stop <= {numel}")
