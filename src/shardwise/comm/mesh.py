"""A mesh makes the process groups of its named axes when they are first asked for; `close` destroys them.

The pure shape of the mesh is `shardwise.layout.mesh_shape`; this module only turns it into groups. Hybrid sharding on
two machines of two GPUs, dp_replicate=2 x dp_shard=2: rank 1 shards over (0, 1), inside its machine, averages its shard
with rank 3 over (1, 3), and sums scalars over all four.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import torch.distributed as dist

from shardwise.comm.store import PatientStore
from shardwise.config.resolve import ConfigError
from shardwise.layout.mesh_shape import MeshShape

# Uses of groups of a pipeline's ranks: for tensors on the host, also where the other groups are of NCCL; for messages
# to higher ranks; and to lower ones.
HOST: Final = "host"
DOWN: Final = "down"
UP: Final = "up"


class Mesh:
    """Holds a mesh shape with its process groups.

    Args:
        shape: of the mesh.
        timeout_s: seconds for the groups' collectives.

    Raises:
        ConfigError: the shape does not hold as many ranks as the world.
    """

    def __init__(self, shape: MeshShape, timeout_s: float) -> None:
        if shape.world_size != dist.get_world_size():
            raise ConfigError(
                "mesh-world-size",
                f"the mesh holds {shape.world_size} ranks but the world {dist.get_world_size()}; "
                f"start {shape.world_size}",
            )
        self.shape = shape
        self.rank = dist.get_rank()
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}

    def group(self, axes: tuple[str, ...], use: str = "gather") -> dist.ProcessGroup:
        """Return the process group of the ranks that differ from this one along `axes` only; all of them call it
        together.

        Args:
            axes: of the mesh.
            use: collectives of different uses run at the same time, so each use has its group; that of `HOST` is
                gloo's.
        """
        ranks = self.shape.ranks_along(axes, self.rank)
        if len(ranks) == self.shape.world_size and use == "gather" and dist.group.WORLD is not None:
            return dist.group.WORLD
        if (ranks, use) not in self._groups:
            # All ranks make all groups of the axes: torch names them by a count, and no name may come twice.
            for members in self.shape.groups_along(axes):
                backend = "gloo" if use == HOST else None
                group = dist.new_group(list(members), self._timeout, backend, group_desc=f"shardwise {use}")
                if members == ranks:
                    self._groups[ranks, use] = group
        return self._groups[ranks, use]

    def group_among(self, axes: tuple[str, ...], indices: tuple[int, ...], use: str) -> dist.ProcessGroup | None:
        """Return the process group of some of the ranks along `axes`, by their indices there; None if this is none of
        them.

        All ranks of the world call it together, in the same order, and once for the same `indices` and `use`: each call
        makes its groups. It takes the same indices along each line of ranks.

        Args:
            axes: of the mesh.
            indices: of the ranks along `axes`.
            use: what the group is for; it is a part of torch's description of it.
        """
        own = None
        for along in self.shape.groups_along(axes):
            members = tuple(along[index] for index in indices)
            group = dist.new_group(list(members), timeout=self._timeout, group_desc=f"shardwise {use}")
            if self.rank in members:
                own = self._groups[members, use] = group
        return own

    def close(self) -> None:
        """Destroy the groups, except that of the world, which is not the mesh's."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()


def open_store(timeout_s: float = 300.0) -> dist.Store | None:
    """Open a part of the default group's store for one more engine; None for one rank.

    Every rank opens equally many, in the same order. It shares torch's connection: one of its own would be free while
    torch itself waits in the store, as when it makes a communicator, but to open it holds the interpreter's lock, and
    takes seconds where a name server does not answer.

    Args:
        timeout_s: seconds for the store's answer to one request.
    """
    group = dist.group.WORLD
    if group is None or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    store = PatientStore(group.get_group_store(), timeout_s)
    number = store.add(f"shardwise/{dist.get_rank()}/num_engines", 1)
    return PatientStore(store, timeout_s, f"shardwise/engine{number}")
