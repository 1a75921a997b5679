"""Links to ranks that are not there: what a simulated rank's engine stands on.

>>> from shardwise.layout.mesh_shape import MeshShape
>>> network = SimulatedNetwork(MeshShape(dp_shard=512, tp=8), rank=17, backend="nccl")
>>> links = network.links(("dp_shard",), "states")
>>> links.rank, links.world_size
(2, 512)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from shardwise.layout.mesh_shape import MeshShape

Backend = Literal["gloo", "nccl"]


class SimulatedLinks:
    """Links to ranks that are not there: nothing moves, and every collective is over at once.

    Args:
        rank: in the group.
        world_size: of the group.
        backend: in whose way `Comm` uses the links.
    """

    moves_nothing = True

    def __init__(self, rank: int, world_size: int, backend: Backend) -> None:
        self.rank = rank
        self.world_size = world_size
        self.waits_on_host = backend == "gloo"

    def all_gather(self, full: Tensor) -> list[dist.Work]:
        """Leave `full` as it is."""
        return []

    def all_to_all(self, received: Tensor, source: Tensor) -> list[dist.Work]:
        """Leave `received` as it is."""
        return []

    def exchange(self, received: Tensor, source: Tensor) -> list[dist.Work]:
        """Leave `received` as it is."""
        return []

    def exchange_all(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
    ) -> list[dist.Work]:
        """Leave what is received as it is."""
        return []

    def reduce_scatter(self, out: Tensor, source: Tensor) -> list[dist.Work]:
        """Leave `out` as it is."""
        return []

    def all_reduce(self, buffer: Tensor, op: dist.ReduceOp.RedOpType) -> list[dist.Work]:
        """Leave `buffer` as it is."""
        return []

    def broadcast(self, buffer: Tensor) -> list[dist.Work]:
        """Leave `buffer` as it is."""
        return []

    def send(self, buffer: Tensor, to: int, tag: int = 0) -> list[dist.Work]:
        """Nobody gets it."""
        return []

    def receive(self, buffer: Tensor, source: int, tag: int = 0) -> list[dist.Work]:
        """Leave `buffer` as it is."""
        return []

    def hang_up(self) -> None:
        """Nobody waits."""

    def read(self, values: Tensor, known: Sequence[float]) -> list[float]:
        """Ones, with which any step goes through; of what the host knew, that: the other ranks do as this one."""
        return [1.0] * (values.numel() - len(known)) + [float(number) for number in known]


class SimulatedNetwork:
    """A network around one rank of a mesh.

    Args:
        mesh: of all ranks.
        rank: that is there.
        backend: as for `SimulatedLinks`.
        examples: of what the stages of a pipeline receive; see `Network`.
    """

    def __init__(self, mesh: MeshShape, rank: int, backend: Backend, examples: Mapping[int, Any] | None = None) -> None:
        self.rank = rank
        self.store: dist.Store | None = None
        self.examples = examples
        self._mesh = mesh
        self._backend = backend

    def links(self, axes: tuple[str, ...], use: str) -> SimulatedLinks:
        """Links along `axes`, whatever their use."""
        return SimulatedLinks(self._mesh.index_along(axes, self.rank), self._mesh.size_along(axes), self._backend)

    def links_among(self, axes: tuple[str, ...], indices: tuple[int, ...]) -> SimulatedLinks | None:
        """Links among some of the ranks along `axes`."""
        index = self._mesh.index_along(axes, self.rank)
        return SimulatedLinks(indices.index(index), len(indices), self._backend) if index in indices else None

    def close(self) -> None:
        """There is nothing to give back."""
