"""Sum the gradients that the ranks of a tensor-parallel group, or several stages of a pipeline, share.

They are summed over their sharers before the step, and count once in the gradient's norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from shardwise.comm.collectives import Comm
from shardwise.layout.param_groups import GroupSpec
from shardwise.layout.tp_sharding import TpShard
from shardwise.runtime.state_shards import FlatState

Range = tuple[int, int]


@dataclass(frozen=True)
class SharedGradRanges:
    """Says what one rank shares of a group's flat buffer, as ranges of this rank's slice.

    Attributes:
        summed: by number of sharers, the ranges where each has a part of the gradient.
        owned: the ranges that this rank counts; None for all.
    """

    summed: Mapping[int, tuple[Range, ...]]
    owned: tuple[Range, ...] | None

    @classmethod
    def of(cls, spec: GroupSpec, held: slice, tp_index: int, degree: int, left_out: Sequence[Range] = ()) -> Self:
        """Return the shared ranges of a rank's slice of a group.

        Args:
            held: the range of the group's flat buffer that the rank holds, in elements.
            tp_index: the rank's index in its tensor-parallel group.
            left_out: ranges of the flat buffer that the rank does not count, in order.
        """
        if degree == 1 and not left_out:
            return cls({}, None)
        start, stop = held.start, held.stop
        summed: dict[int, list[Range]] = {}
        owned: list[Range] = []
        gaps = list(left_out)
        for low, high, share in _shared(spec, tp_index):
            if share.is_summed:
                summed.setdefault(share.num_sharers, []).append((low, high))
            if not share.is_owned_by(tp_index):
                gaps.append((low, high))
        position = 0
        for low, high in sorted(gaps):
            owned.append((position, low))
            position = max(position, high)
        owned.append((position, spec.padded_numel))
        within = {num_sharers: tuple(_within(ranges, start, stop)) for num_sharers, ranges in summed.items()}
        return cls(within, tuple(_within(owned, start, stop)))


def sum_over_sharers(gradients: Sequence[tuple[SharedGradRanges, FlatState]], comm: Comm) -> None:
    """Sum, in place, the gradients of which each rank has a part: one collective for each number of sharers.

    Neighbours that share heads use one row of a table; the other rows belong to other neighbours.

    Args:
        gradients: for each group what this rank shares, and its slice.
    """
    by_sharers: dict[int, list[FlatState]] = {}
    for sharing, gradient in gradients:
        for num_sharers, ranges in sharing.summed.items():
            by_sharers.setdefault(num_sharers, []).extend(gradient.part(low, high) for low, high in ranges)
    for num_sharers, parts in sorted(by_sharers.items()):
        row = comm.rank // num_sharers
        _sum_parts(parts, comm, row, comm.world_size // num_sharers, f"gradients that {num_sharers} ranks share")


def sum_over_stages(
    gradients: Mapping[tuple[int, ...], Sequence[FlatState]], comms: Mapping[tuple[int, ...], Comm]
) -> None:
    """Sum, in place, the gradients of parameters that several stages of a pipeline hold: equal bits on all of them.

    Args:
        gradients: this rank's slices, by the ranks of the pipeline that hold them.
    """
    for holders, parts in sorted(gradients.items()):
        _sum_parts(parts, comms[holders], 0, 1, f"gradients of stages' tied parameters on {holders}")


def _sum_parts(parts: Sequence[FlatState], comm: Comm, row: int, num_rows: int, name: str) -> None:
    """Sum flat parts in one collective, each rank in its row of a table."""
    numels = [part.numel for part in parts]
    if not parts:
        return
    dtype = max((part.dtype for part in parts), key=lambda each: each.itemsize)
    # Small parts of many parameters go in one collective. Ranks that share nothing with each other write into different
    # rows, and add zeros to the others.
    table = torch.zeros(num_rows, sum(numels), dtype=dtype, device=comm.device)  # [rows, elements]
    own = table[row]
    for part, place in zip(parts, own.split(numels), strict=True):
        place.copy_(part.read(0, part.numel))
    comm.sum_in_place(table.view(-1), name)
    for part, summed in zip(parts, own.split(numels), strict=True):
        part.write(0, summed)


def _shared(spec: GroupSpec, tp_index: int) -> Iterator[tuple[int, int, TpShard]]:
    """Yield what a rank shares with others, as ranges of the flat buffer, in order."""
    for param in spec.params:
        found = [
            (param.offset + low, param.offset + high, share)
            for share in param.split.shares(tp_index)
            if share.num_sharers > 1
            for low, high in share.flat_ranges(param.shape)
        ]
        yield from sorted(found, key=lambda each: each[0])


def _within(ranges: Sequence[Range], start: int, stop: int) -> Iterator[Range]:
    """Yield the parts of ranges that are in [start, stop), counted from `start`."""
    for low, high in ranges:
        if max(low, start) < min(high, stop):
            yield max(low, start) - start, min(high, stop) - start
