"""Offer DeepSpeed's topologies: which rank has which coordinates, the last axis fastest."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any, Final

import torch.distributed as dist

from shardwise.compat.deepspeed.finder import answers
from shardwise.compat.deepspeed.utils import groups
from shardwise.layout.mesh_shape import DATA_AXES, PIPELINE_AXES, TENSOR_AXES

_AXES: Final = MappingProxyType({"pipe": PIPELINE_AXES, "data": DATA_AXES, "model": TENSOR_AXES})

__getattr__ = answers(__name__)


class ProcessTopology:
    """Numbers the ranks of a grid with named axes, the slowest first."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        coord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        self.ProcessCoord = coord
        self.mapping: dict[Any, int] = {coord(*at): rank for rank, at in enumerate(product(*map(range, dims)))}

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

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return a rank's coordinates as text for the name of a file; the arguments are those of DeepSpeed.

        >>> PipeModelDataParallelTopology(2, 2, 1).get_rank_repr(3, omit_axes=["data"])
        'pipe_01-model_01'
        """
        coordinates = self.get_coord(rank)._asdict().items()
        return outer_sep.join(f"{axis}{inner_sep}{index:02d}" for axis, index in coordinates if axis not in omit_axes)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the ranks that differ in one axis only, for each of the others' coordinates."""
        if axis not in self.axes:
            return []
        others = [range(size) for name, size in zip(self.axes, self.dims, strict=True) if name != axis]
        names = [name for name in self.axes if name != axis]
        return [self.filter_match(**dict(zip(names, indices, strict=True))) for indices in product(*others)]

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


class PipelineParallelGrid:
    """Answers Megatron's questions about this rank's place in a topology: an engine's `grid`, and its `mpu`.

    The arguments are those of DeepSpeed; `process_group` is not used.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._topo = topology or PipeDataParallelTopology(1, self.world_size)
        self._coord = self._topo.get_coord(self.global_rank)
        self.pipe_parallel_size, self.data_parallel_size = self._size("pipe"), self._size("data")
        self.model_parallel_size = self.slice_parallel_size = self._size("model")
        self.stage_id, self.data_parallel_id = self._index("pipe"), self._index("data")
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self.pipe_parallel_size - 1

    def topology(self) -> ProcessTopology:
        """Return the topology."""
        return self._topo

    def stage_to_global(self, stage_id: int, **coordinates: int) -> int:
        """Return the rank of another stage at this rank's place."""
        return self._topo.get_rank(**{**self._coord._asdict(), **coordinates, "pipe": stage_id})

    def get_stage_id(self) -> int:
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        return self.data_parallel_id

    def get_global_rank(self) -> int:
        return self.global_rank

    def _size(self, axis: str) -> int:
        return max(1, self._topo.get_dim(axis))

    def _index(self, axis: str) -> int:
        return int(getattr(self._coord, axis, 0))

    def __getattr__(self, name: str) -> Any:
        """Return `get_pipe_parallel_rank` and its kin: of an axis the rank, the world's size, or torch's group."""
        axis, _, what = name.removeprefix("get_").partition("_parallel_")
        axis = {"slice": "model"}.get(axis, axis)
        if name.startswith("get_") and axis in ("pipe", "data", "model"):
            if what in ("rank", "world_size"):
                number = self._index(axis) if what == "rank" else self._size(axis)
                return lambda: number
            if what == "group":
                return lambda: groups.group(_AXES[axis])
        raise AttributeError(f"PipelineParallelGrid has no {name}")
