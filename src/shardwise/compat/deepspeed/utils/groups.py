"""Offer the ranks' groups by DeepSpeed's names, of the newest engine: before it, every rank is a data rank.

Ranks that share a sequence are one data rank; `sequence_data` counts each of them, and gradients are means over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch.distributed as dist

from shardwise.compat.deepspeed.finder import answers
from shardwise.compat.deepspeed.runtime.sequence_parallel import parallel_state_sp
from shardwise.layout.mesh_shape import DATA_AXES, GRADIENT_AXES, PIPELINE_AXES, TENSOR_AXES, MeshShape

_AXES: Final = (
    ("sequence_data_parallel", GRADIENT_AXES),
    ("tensor_model_parallel", TENSOR_AXES),
    ("model_parallel", TENSOR_AXES),
    ("data_parallel", DATA_AXES),
)


@dataclass
class _Newest:
    mesh: MeshShape | None = None
    of_axes: Mapping[tuple[str, ...], Any] = field(default_factory=dict)


_NEWEST: Final = _Newest()
_answer = answers(__name__)


def note_engine(mesh: MeshShape, comms: Any) -> None:
    """Take the groups of an engine, by its mesh and its communicators; all ranks do so together."""
    data = comms.data.process_group
    if mesh.cp > 1:
        data, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in mesh.groups_along(DATA_AXES)])
    of_axes = {DATA_AXES: data, GRADIENT_AXES: comms.data.process_group, TENSOR_AXES: comms.tensor.process_group}
    of_axes[PIPELINE_AXES] = comms.pipeline.process_group
    _NEWEST.mesh, _NEWEST.of_axes = mesh, of_axes


def world_size(axes: tuple[str, ...]) -> int:
    """Return the ranks along axes of the mesh."""
    if _NEWEST.mesh is not None:
        return _NEWEST.mesh.size_along(axes)
    return dist.get_world_size() if axes != TENSOR_AXES and dist.is_initialized() else 1


def rank(axes: tuple[str, ...]) -> int:
    """Return this rank's place along axes of the mesh."""
    own_rank = dist.get_rank() if dist.is_initialized() else 0
    if _NEWEST.mesh is not None:
        return _NEWEST.mesh.index_along(axes, own_rank)
    return own_rank if axes != TENSOR_AXES else 0


def group(axes: tuple[str, ...]) -> Any:
    """Return torch's group of the ranks along axes of the mesh."""
    return dist.group.WORLD if world_size(axes) == dist.get_world_size() else _NEWEST.of_axes[axes]


def __getattr__(name: str) -> Any:
    public_name = name.removeprefix("_")
    if hasattr(parallel_state_sp, public_name):
        return getattr(parallel_state_sp, public_name)
    for prefix, axes in _AXES:
        function = {"world_size": world_size, "rank": rank, "group": group}.get(
            public_name.removeprefix(f"get_{prefix}_")
        )
        if function is not None and public_name.startswith(f"get_{prefix}_"):
            return lambda: function(axes)
    return _answer(name)
