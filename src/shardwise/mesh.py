"""Process groups of the mesh's named axes, over torch's DeviceMesh.

The pure shape of the mesh is `shardwise.layout.mesh_shape`; this module only turns it into groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.config import ConfigError
from shardwise.layout.mesh_shape import AXES, MeshShape


@dataclass(frozen=True)
class Mesh:
    """A mesh shape with its process groups."""

    shape: MeshShape
    device_mesh: DeviceMesh

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """The process group of the ranks that differ from this one along `axes` only."""
        live = tuple(axis for axis in axes if axis in (self.device_mesh.mesh_dim_names or ()))
        if not live:
            raise ConfigError(f"axes {axes} hold one rank; there is no group to communicate in")
        if len(live) > 1:
            raise ConfigError(f"a group over the axes {' and '.join(live)} together is not built yet; use one of them")
        return self.device_mesh[live[0]].get_group()


def ensure_process_group(device: torch.device, timeout_s: float) -> int:
    """Return the world size; start a process group first where none is: torchrun's, or one of this process alone."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_s)
        if dist.is_torchelastic_launched():
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return dist.get_world_size()


def build_mesh(shape: MeshShape, device: torch.device) -> Mesh:
    """Create the groups of a mesh; axes of one rank get none, and an axis that spans the world reuses the world's.

    Raises:
        ConfigError: the shape does not hold as many ranks as the world.
    """
    if shape.world_size != dist.get_world_size():
        raise ConfigError(
            f"the mesh holds {shape.world_size} ranks but the world {dist.get_world_size()}; start {shape.world_size}"
        )
    live = tuple((axis, size) for axis in AXES if (size := getattr(shape, axis)) > 1) or (("dp_shard", 1),)
    names, sizes = zip(*live, strict=True)
    return Mesh(shape, init_device_mesh(device.type, sizes, mesh_dim_names=names))
