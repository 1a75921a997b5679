"""How a document's queries, or its keys, are cut into tiles, wherever its tokens are spread. Pure numpy; no Triton.

Tensors hold a document's tokens one run behind another. A tile takes them as they lie, from several runs where their
GRANULES (a power of two of tokens that divides a block) are whole. The kernels compare a query's place in its tensor
with a key's, n <= m + shift, with one shift a tile: which is right for a STRETCH of tokens.

>>> zigzag = Axis(own=((0, 4), (8, 12)), other=((0, 12),), places=(0, 0), of_queries=True)
>>> [(each.begin, each.index, each.shift) for each in stretches_of(zigzag, causal=True)]
[(0, 0, 0), (8, 4, 4)]
>>> tiles_of(zigzag, causal=True, granule=4, width=8).tokens.tolist()
[[0, 0, 4, 0], [4, 4, 8, 4]]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwise.layout.runs import Runs

Ints: TypeAlias = NDArray[np.int64]

NOT_CAUSAL: Final = 1 << 30  # a shift that lets every query see every key


@dataclass(frozen=True)
class Axis:
    """One axis of a document.

    Attributes:
        own: its tokens.
        other: those of the other axis.
        places: where the first of each lies in its tensor.
        of_queries: whether it is that of queries.
    """

    own: Runs
    other: Runs
    places: tuple[int, int]
    of_queries: bool


@dataclass(frozen=True)
class Stretch:
    """Tokens of one run to which one shift applies.

    Attributes:
        begin: the first token.
        end: after the last.
        index: where `begin` lies in the tensor.
        shift: the right one; None where no token is on the other axis too, and each from `least` on is right.
        least: see there.
    """

    begin: int
    end: int
    index: int
    shift: int | None
    least: int


@dataclass(frozen=True, eq=False)
class Granules:
    """Tokens of one granule and one stretch.

    Attributes:
        stretch: which one.
        begin: the first token.
        end: after the last.
        index: where `begin` lies in the tensor.
    """

    stretch: Ints
    begin: Ints
    end: Ints
    index: Ints


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of an axis.

    Attributes:
        tokens: [tiles, 4]: origin, begin and end in the tensor, and the shift.
        granules: in the order of the tiles.
        slots: [granules], where each lies: granules from the origin of the first tile, if all tiles were whole.
    """

    tokens: Ints
    granules: Granules
    slots: Ints


def stretches_of(axis: Axis, *, causal: bool) -> list[Stretch]:
    """The runs of an axis, cut where a causal pattern needs another shift.

    Bits tell of granules that lie wholly before or after others. So the comparison must be exact only for tokens that
    are on both axes, and must let pass what is seen elsewhere. For queries that holds until another run of keys begins,
    but for the first run, before which there is nothing to see; for keys from where a run of queries ended, but for the
    last one, after which nobody sees.
    """
    starts, stops = [start for start, _ in axis.other], [stop for _, stop in axis.other]
    sums = [0, *accumulate(stop - start for start, stop in axis.other)]
    cuts = [] if not causal else starts[1:] if axis.of_queries else stops[:-1]
    found = []
    index = axis.places[0]
    for run in axis.own:
        for begin, end in pairwise([run[0], *cuts[bisect_right(cuts, run[0]) : bisect_left(cuts, run[1])], run[1]]):
            shift, least = None, -NOT_CAUSAL
            if causal:
                nearest = bisect_right(stops, begin)  # of the other axis' runs, the first that does not end before
                start = starts[nearest] if nearest < len(starts) else end
                before = axis.places[1] + sums[nearest] + max(0, begin - start)  # the other axis' tokens before `begin`
                if start < end:
                    shift = (before - index - max(0, start - begin)) * (1 if axis.of_queries else -1)
                else:
                    least = before - 1 - index if axis.of_queries else index + end - begin - 1 - before
            found.append(Stretch(begin, end, index, shift, least))
            index += end - begin
    return found


def granules_of(stretches: Sequence[Stretch], granule: int) -> Granules:
    """The tokens of stretches, cut at granules."""
    cuts = [np.arange(each.begin // granule * granule, each.end, granule) for each in stretches]
    stretch = np.repeat(np.arange(len(stretches)), _ints([len(each) for each in cuts]))  # [granules]
    first, last, place = _ints([(each.begin, each.end, each.index) for each in stretches]).reshape(-1, 3)[stretch].T
    begin = np.concatenate([_ints([]), *cuts])
    end, begin = np.minimum(begin + granule, last), np.maximum(begin, first)
    return Granules(stretch, begin, end, begin - first + place)


def tiles_of(axis: Axis, *, causal: bool, granule: int, width: int) -> Tiles:
    """The tiles of an axis.

    In a long run they begin at multiples of their width in the document, as what patterns repeat does. They go on into
    the next run where that leaves granules whole and the shift right.

    Args:
        axis: of one document.
        causal: whether a token sees none after it.
        granule: tokens of one; divides the width and the block.
        width: tokens of a tile.
    """
    stretches = stretches_of(axis, causal=causal)
    anchors: list[int] = []  # of each stretch: where slots are counted from
    origins: list[int] = []  # of each tile
    shifts: list[tuple[int | None, int]] = []  # of each tile: the exact one, and the least
    for each in stretches:
        place = each.index - origins[-1] if origins else 0  # in the tile before
        is_whole = bool(origins) and each.begin % granule == 0 == place % granule
        both = _agreed(shifts[-1], (each.shift, each.least)) if is_whole and place < width else None
        if both is not None:
            origin, shifts[-1] = origins.pop(), both
        else:
            is_long = each.begin // width < (each.end - 1) // width
            origin = each.index - (0 if is_whole and place == width else each.begin % (width if is_long else granule))
        anchors.append(origin - len(origins) * width)
        origins += range(origin, each.index + each.end - each.begin, width)
        shifts += [(each.shift, each.least)] * (len(origins) - len(shifts))
    granules = granules_of(stretches, granule)
    slots = (granules.index - _ints(anchors)[granules.stretch]) // granule
    borders = np.searchsorted(slots, np.arange(len(origins) + 1) * (width // granule))  # [tiles + 1], of granules
    begin = granules.index[borders[:-1]]
    end = (granules.index + granules.end - granules.begin)[borders[1:] - 1]
    exact = [NOT_CAUSAL if shift is None else shift for shift, _ in shifts]
    return Tiles(np.stack([_ints(origins), begin, end, _ints(exact)], 1), granules, slots)


def _agreed(one: tuple[int | None, int], other: tuple[int | None, int]) -> tuple[int | None, int] | None:
    """The shift of two stretches together, if there is one: what is exact, and at least."""
    exact = {shift for shift, _ in (one, other) if shift is not None}
    least = max(one[1], other[1])
    if len(exact) > 1 or any(shift < least for shift in exact):
        return None
    return (*exact, None)[0], least


def _ints(numbers: Sequence[int] | Sequence[tuple[int, ...]]) -> Ints:
    return np.array(numbers, dtype=np.int64)
