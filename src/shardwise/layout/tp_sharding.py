"""Splits over the tp axis say which rectangles of a parameter each rank of a tensor-parallel group holds.

A parameter is split along one dim, or every rank holds all of it. Along that dim it may be several logical tensors one
after the other (query, key and value in one matrix), each split by itself, in units that stay whole (heads). Where
there are fewer units than ranks, neighbours share one: each holds all of it, and its gradient is the sum of theirs.

A matrix of 4 query heads and 2 key heads, 2 rows each, over 4 ranks: a rank has one query head, two share a key head.

>>> split = ParamSplit((12, 3), degree=4, dim=0, parts=(FusedPart(8, 4), FusedPart(4, 2)))
>>> split.local_shape
(4, 3)
>>> for rank in range(4):
...     print([f"{share.source} at {share.target}" for share in split.shares(rank)])
['[0:2, 0:3] at [0:2, 0:3]', '[8:10, 0:3] at [2:4, 0:3]']
['[2:4, 0:3] at [0:2, 0:3]', '[8:10, 0:3] at [2:4, 0:3]']
['[4:6, 0:3] at [0:2, 0:3]', '[10:12, 0:3] at [2:4, 0:3]']
['[6:8, 0:3] at [0:2, 0:3]', '[10:12, 0:3] at [2:4, 0:3]']
>>> [(share.num_sharers, share.is_summed) for share in split.shares(0)]
[(1, False), (2, True)]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from shardwise.config.errors import ConfigError
from shardwise.layout.facts import ExpertDim
from shardwise.layout.mesh_shape import nearest_divisors
from shardwise.layout.slicing import Chunk, LocalTensor, Rect, Shape


@dataclass(frozen=True)
class FusedPart:
    """Describe one logical tensor along the split dim.

    Attributes:
        num_units: units that stay whole, such as heads; None where every index may be split from the next.
        is_padded: ranks hold equal numbers of indices even where `size` does not divide evenly (a vocabulary); the
            last ranks' surplus is padding.
    """

    size: int
    num_units: int | None = None
    is_padded: bool = False

    def local_size(self, degree: int) -> int:
        """Return the number of indices that each rank holds, padding included."""
        if self.is_padded:
            return -(-self.size // degree)
        return self.size // self._units * max(1, self._units // degree)

    def num_sharers(self, degree: int) -> int:
        """Return the number of neighbouring ranks that hold the same indices."""
        return 1 if self.is_padded else max(1, degree // self._units)

    def range_of(self, index: int, degree: int) -> tuple[int, int]:
        """Return the indices [start, stop) that rank `index` holds, without padding."""
        size = self.local_size(degree)
        start = index // self.num_sharers(degree) * size
        return min(start, self.size), min(start + size, self.size)

    def check(self, degree: int, what: str) -> None:
        """Refuse a degree that does not divide the units.

        Args:
            what: name of what is split, such as `num_heads`, for the message.

        Raises:
            ConfigError: units and ranks do not fit; with the nearest degrees that do.
        """
        if not self.is_padded and self._units % degree and degree % self._units:
            check_divides(degree, self._units, what)

    @property
    def _units(self) -> int:
        return self.size if self.num_units is None else self.num_units


def check_divides(degree: int, number: int, what: str) -> None:
    """Refuse a degree that does not divide a number.

    Args:
        number: must be a multiple of `degree`.
        what: name of the number, such as `num_heads`, for the message.

    Raises:
        ConfigError: it does not divide; with the nearest degrees that do.
    """
    if number % degree:
        raise ConfigError(
            "tp-divides-units",
            f"tp={degree} does not divide {what}={number}; nearest legal: {nearest_divisors(number, degree)}",
        )


def check_length(length: int, degree: int, key: str, fix: str, cp: int = 1) -> None:
    """Refuse a sequence that does not divide into equal parts for `degree` ranks.

    Args:
        key: start of the message, which names the length.
        fix: what else the user can do, for the message.
        cp: ranks that split the sequence first.

    Raises:
        ConfigError: the length does not divide; with the nearest ones that do.
    """
    unit = degree * cp
    if length % unit:
        below = length // unit * unit
        nearest = ", ".join(str(size) for size in (below, below + unit) if size)
        over_cp = f" x cp={cp}" if cp > 1 else ""
        raise ConfigError(
            "tp-divides-tokens",
            f"{key}{length} does not divide by tp={degree}{over_cp}, as tensor.sequence_parallel needs; nearest legal: "
            f"{nearest}; {fix}",
        )


@dataclass(frozen=True)
class TpShard:
    """Describe one rectangle of a parameter on one rank.

    Attributes:
        source: the rectangle in the whole parameter.
        target: the rectangle in the rank's local tensor.
        num_sharers: neighbouring ranks that hold the same elements; the first of them owns them.
        is_summed: the gradient is the sum of the sharers'; otherwise theirs are equal.
    """

    source: Rect
    target: Rect
    num_sharers: int
    is_summed: bool

    def is_owned_by(self, index: int) -> bool:
        """Say whether rank `index`, one of those that hold the rectangle, is the first of them."""
        return index % self.num_sharers == 0

    def flat_ranges(self, local_shape: Shape) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the flattened local tensor that `target` covers, in order; neighbouring rows may join.

        >>> list(TpShard(Rect.whole((2, 2)), Rect((0, 1), (2, 3)), 1, False).flat_ranges((2, 4)))
        [(1, 3), (5, 7)]
        """
        for rect in _rows(self.target, local_shape):
            strides = (math.prod(local_shape[dim + 1 :]) for dim in range(len(local_shape)))
            start = sum(index * stride for index, stride in zip(rect.start, strides, strict=True))
            yield start, start + rect.numel

    def pieces(self, local_shape: Shape) -> Iterator[Chunk]:
        """Yield the rectangle as pieces of the flattened local tensor, in order."""
        for rect, (start, _) in zip(_rows(self.target, local_shape), self.flat_ranges(local_shape), strict=True):
            low = tuple(s + at - t for s, at, t in zip(self.source.start, rect.start, self.target.start, strict=True))
            high = tuple(at + size for at, size in zip(low, rect.shape, strict=True))
            yield Chunk(Rect(low, high), start)


@dataclass(frozen=True)
class ParamSplit:
    """Describe how one parameter is split over the ranks of a tensor-parallel group; see the module's example.

    Attributes:
        dim: the dim along which it is split; None where every rank holds all of it.
        parts: the logical tensors along `dim`, in order.
        is_partial: every rank holds all of it and computes a part of its gradient only.
    """

    global_shape: Shape
    degree: int = 1
    dim: int | None = None
    parts: tuple[FusedPart, ...] = ()
    is_partial: bool = False

    @cached_property
    def local_shape(self) -> Shape:
        """Return the shape of each rank's tensor, padding included."""
        if self.dim is None:
            return self.global_shape
        size = sum(part.local_size(self.degree) for part in self.parts)
        return *self.global_shape[: self.dim], size, *self.global_shape[self.dim + 1 :]

    @property
    def is_whole(self) -> bool:
        """Say whether every rank holds all of the parameter."""
        return self.dim is None

    def shares(self, index: int) -> tuple[TpShard, ...]:
        """Return the rectangles that rank `index` of the group holds."""
        return tuple(self._shares(index))

    def _shares(self, index: int) -> Iterator[TpShard]:
        if self.dim is None:
            rect = Rect.whole(self.global_shape)
            yield TpShard(rect, rect, self.degree, self.is_partial)
            return
        source_offset = target_offset = 0
        for part in self.parts:
            start, stop = part.range_of(index, self.degree)
            source = self._slab(self.global_shape, source_offset + start, source_offset + stop)
            target = self._slab(self.local_shape, target_offset, target_offset + stop - start)
            sharers = part.num_sharers(self.degree)
            if source.numel:
                yield TpShard(source, target, sharers, is_summed=sharers > 1)
            source_offset += part.size
            target_offset += part.local_size(self.degree)

    def _slab(self, shape: Shape, start: int, stop: int) -> Rect:
        low = tuple(start if dim == self.dim else 0 for dim in range(len(shape)))
        return Rect(low, tuple(stop if dim == self.dim else size for dim, size in enumerate(shape)))

    def local(self, index: int, *, owned_only: bool = False) -> LocalTensor:
        """Return the pieces that rank `index` holds, in the order of its flat local tensor.

        Args:
            index: the rank's index in the group.
            owned_only: leave out what it holds but another rank owns.
        """
        shares = [share for share in self.shares(index) if not owned_only or share.is_owned_by(index)]
        pieces = sorted(
            (piece for share in shares for piece in share.pieces(self.local_shape)),
            key=lambda piece: piece.local_offset,
        )
        return LocalTensor(self.global_shape, tuple(pieces), math.prod(self.local_shape))


@lru_cache(maxsize=2**8)  # a planner asks for the same few of thousands of layouts
def expert_split(shape: Shape, experts: ExpertDim, ep: int) -> ParamSplit:
    """Return how a parameter of experts is split among the ranks that hold different ones.

    >>> from shardwise.layout.facts import ExpertDim
    >>> expert_split((8, 3, 4), ExpertDim(8), ep=2).local_shape
    (4, 3, 4)

    Raises:
        ConfigError: `ep` does not divide the experts; with the nearest degrees that do.
    """
    if experts.num_experts % ep:
        raise ConfigError(
            "ep-divides-experts",
            f"mesh.ep={ep} does not divide num_experts={experts.num_experts}; "
            f"nearest legal: {nearest_divisors(experts.num_experts, ep)}",
        )
    part = FusedPart(shape[experts.dim] // experts.num_repeats, num_units=experts.num_experts)
    return ParamSplit(shape, ep, experts.dim, (part,) * experts.num_repeats)


def _rows(rect: Rect, shape: Shape) -> Iterator[Rect]:
    """Cut a rectangle of a tensor of this shape into rectangles that are contiguous in its memory."""
    inner = len(shape)
    while inner > 0 and rect.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    # Dims from `inner` on are covered whole, and the one before them may be any range.
    outer = max(inner - 1, 0)
    for index in product(*map(range, rect.start[:outer], rect.stop[:outer])):
        yield Rect((*index, *rect.start[outer:]), (*(at + 1 for at in index), *rect.stop[outer:]))
