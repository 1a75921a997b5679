"""Offer DeepSpeed's topologies: which rank has which coordinates, the last axis fastest."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from shardwise.compat.deepspeed.finder import answers

__getattr__ = answers(__name__)


class ProcessTopology:
    """Numbers the ranks of a grid with named axes, the slowest first."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        coord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        self.ProcessCoord = coord
        self.mapping: dict[Any, int] = {coord(*each): rank for rank, each in enumerate(product(*map(range, dims)))}

    def get_rank(self, **coordinates: int) -> int:
        """Return the rank that has all these coordinates."""
        if coordinates.keys() != set(self.axes):
            raise ValueError(f"get_rank takes all of {self.axes}, not {list(coordinates)}; use filter_match for some")
        return self.mapping[self.ProcessCoord(**coordinates)]

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the ranks along an axis; 0 for one that is not there."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        return list(self.mapping)[rank]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the ranks that differ in one axis only, for each of the others' coordinates."""
        if axis not in self.axes:
            return []
        others = [range(size) for name, size in zip(self.axes, self.dims, strict=True) if name != axis]
        names = [name for name in self.axes if name != axis]
        return [self.filter_match(**dict(zip(names, each, strict=True))) for each in product(*others)]

    def filter_match(self, **coordinates: int) -> list[int]:
        """Return the ranks that have these coordinates."""
        wanted = coordinates.items()
        return [rank for coord, rank in self.mapping.items() if wanted <= coord._asdict().items()]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        return prod(self.dims)


class PipeDataParallelTopology(ProcessTopology):
    """Has the ranks of a stage beside each other."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Has the ranks that split a layer beside each other, then those of a stage; arguments are those of DeepSpeed."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])
