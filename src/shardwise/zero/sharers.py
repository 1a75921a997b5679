"""What neighbours in a tensor-parallel group share: gradients that are parts of one sum, and who counts them.

Norms on parts of a sequence and heads that several ranks hold: each rank has a part of their gradients. These are
summed once a step, on the shards. What ranks hold alike counts once in the norm. Four ranks that share two key heads,
and a norm `n` whose gradient is partial:

    flat buffer   q k0 n | q k0 n | q k1 n | q k1 n     k: summed over (0, 1) and over (2, 3); n: over all four
    counted       q k0 n | q      | q k1   | q          in the squared norm
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from shardwise.comm import Comm
from shardwise.flats import Flat
from shardwise.layout.groups import GroupSpec
from shardwise.layout.splits import Share

Range = tuple[int, int]


@dataclass(frozen=True)
class Sharing:
    """What one rank shares of a group's flat buffer, as ranges of this rank's slice.

    Attributes:
        summed: by number of sharers, where each has a part of the gradient.
        owned: what this rank counts; None for all of it.
    """

    summed: Mapping[int, tuple[Range, ...]]
    owned: tuple[Range, ...] | None

    @classmethod
    def of(cls, spec: GroupSpec, held: slice, tp_index: int, degree: int) -> Self:
        """The sharing of a rank's slice of a group, the range `held` of its flat buffer."""
        if degree == 1:
            return cls({}, None)
        start, stop = held.start, held.stop
        summed: dict[int, list[Range]] = {}
        owned: list[Range] = []
        position = 0
        for low, high, share in _shared(spec, tp_index):
            if share.is_summed:
                summed.setdefault(share.num_sharers, []).append((low, high))
            if not share.is_owned_by(tp_index):
                owned.append((position, low))
                position = high
        owned.append((position, spec.padded_numel))
        within = {num_sharers: tuple(_within(ranges, start, stop)) for num_sharers, ranges in summed.items()}
        return cls(within, tuple(_within(owned, start, stop)))


def sum_over_sharers(gradients: Sequence[tuple[Sharing, Flat]], comm: Comm) -> None:
    """Sum, in place, the gradients of which each rank has a part: one collective for each number of sharers.

    Neighbours that share heads take one row of a table of which the other rows are other neighbours'.

    Args:
        gradients: of each group what this rank shares, and its slice.
        comm: the tensor-parallel group.
    """
    by_sharers: dict[int, list[Flat]] = {}
    for sharing, gradient in gradients:
        for num_sharers, ranges in sharing.summed.items():
            by_sharers.setdefault(num_sharers, []).extend(gradient.part(low, high) for low, high in ranges)
    for num_sharers, parts in sorted(by_sharers.items()):
        row = comm.rank // num_sharers
        _sum_parts(parts, comm, row, comm.world_size // num_sharers, f"gradients that {num_sharers} ranks share")


def sum_over_stages(gradients: Mapping[tuple[int, ...], Sequence[Flat]], comms: Mapping[tuple[int, ...], Comm]) -> None:
    """Sum, in place, the gradients of parameters that several stages of a pipeline hold: equal bits on all of them.

    Args:
        gradients: this rank's slices, by the ranks of the pipeline that hold them.
        comms: among those.
    """
    for holders, parts in sorted(gradients.items()):
        _sum_parts(parts, comms[holders], 0, 1, f"gradients of stages' tied parameters on {holders}")


def _sum_parts(parts: Sequence[Flat], comm: Comm, row: int, num_rows: int, name: str) -> None:
    """Sum flat parts in one collective, each rank in its row of a table."""
    numels = [part.numel for part in parts]
    if not parts:
        return
    dtype = max((part.dtype for part in parts), key=lambda each: each.itemsize)
    table = torch.zeros(num_rows, sum(numels), dtype=dtype, device=comm.device)  # [rows, elements]
    own = table[row]
    for part, place in zip(parts, own.split(numels), strict=True):
        place.copy_(part.read(0, part.numel))
    comm.sum_in_place(table.view(-1), name)
    for part, summed in zip(parts, own.split(numels), strict=True):
        part.write(0, summed)


def square_sum(sharing: Sharing, gradient: Tensor) -> Tensor:
    """The sum of the squares of a gradient slice, fp64 and 0-d; what ranks share counts on its owner alone."""
    parts = [gradient] if sharing.owned is None else [gradient[low:high] for low, high in sharing.owned]
    squares = [torch.linalg.vector_norm(part).double().square() for part in parts]
    return torch.stack(squares).sum() if squares else gradient.new_zeros((), dtype=torch.float64)


def _shared(spec: GroupSpec, tp_index: int) -> Iterator[tuple[int, int, Share]]:
    """What a rank shares with others, as ranges of the flat buffer, in order."""
    for param in spec.params:
        found = [
            (param.offset + low, param.offset + high, share)
            for share in param.split.shares(tp_index)
            if share.num_sharers > 1
            for low, high in share.flat_ranges(param.shape)
        ]
        yield from sorted(found, key=lambda each: each[0])


def _within(ranges: Sequence[Range], start: int, stop: int) -> Iterator[Range]:
    """The parts of ranges that lie in [start, stop), counted from `start`."""
    for low, high in ranges:
        if max(low, start) < min(high, stop):
            yield max(low, start) - start, min(high, stop) - start
