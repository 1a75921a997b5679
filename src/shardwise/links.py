"""What a `shardwise.comm.Comm` stands on: raw collectives among the ranks of a group, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import torch.distributed as dist
from torch import Tensor

# From here on gloo's own all-reduce of fp32 among two ranks is as fast as sending all and adding.
RING_BYTES: Final = 2**20


class Links(Protocol):
    """The ranks of one group, and the raw collectives among them, each starting at once.

    Attributes:
        rank: of this process in the group.
        world_size: of the group.
        waits_on_host: the host waits for the works that a collective returns (gloo); otherwise collectives run in the
            order of the current stream (NCCL) and there are none.
        moves_nothing: the other ranks are not there, and tensors have no values.
    """

    rank: int
    world_size: int
    waits_on_host: bool
    moves_nothing: bool

    def all_gather(self, full: Tensor) -> list[dist.Work]:
        """Fill `full` [n * s] with every rank's slice."""

    def all_to_all(self, received: Tensor, source: Tensor) -> list[dist.Work]:
        """Send slice i of `source` [n * s] to rank i, and receive its own into slice i of `received` [n * s]."""

    def exchange(self, received: Tensor, source: Tensor) -> list[dist.Work]:
        """Of two ranks: send `source` [s] to the other, and receive its own into `received` [s]."""

    def exchange_all(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
    ) -> list[dist.Work]:
        """Send tensors to other ranks and receive from them, all at once; contiguous ones, not empty, by rank.

        All ranks of the group call it alike, those too that send and receive nothing.
        """

    def reduce_scatter(self, out: Tensor, source: Tensor) -> list[dist.Work]:
        """Sum `source` [n * s] over the ranks in the dtype on the wire; leave this rank's slice in `out` [s]."""

    def all_reduce(self, buffer: Tensor, op: dist.ReduceOp.RedOpType) -> list[dist.Work]:
        """Reduce in place, in the dtype on the wire."""

    def broadcast(self, buffer: Tensor) -> list[dist.Work]:
        """Give every rank what rank 0 of the group holds."""

    def send(self, buffer: Tensor, to: int, tag: int = 0) -> list[dist.Work]:
        """Send a contiguous tensor, not empty, to rank `to` of the group, whose receives of this tag take it in order.

        On NCCL tags are nothing, and messages from one rank to another are taken in order.
        """

    def receive(self, buffer: Tensor, source: int, tag: int = 0) -> list[dist.Work]:
        """Receive into a contiguous tensor, as large as what `source` sends."""

    def hang_up(self) -> None:
        """End all messages of the group, which others may wait for: on gloo those fail at once, and so do later ones.

        On NCCL they wait until their time-out.
        """

    def read(self, values: Tensor, known: Sequence[float]) -> list[float]:
        """The numbers of a reduced vector, on the host; its last ones were `known` to this rank's host before."""


class Network(Protocol):
    """Where an engine's links come from.

    Attributes:
        rank: of this process in the world.
        store: where ranks speak to each other beside their collectives; None where there is one process.
        examples: where other ranks are simulated, what each stage of a pipeline receives, by stage; None where they are
            real, or there is no pipeline.
    """

    rank: int
    store: dist.Store | None
    examples: Mapping[int, Any] | None

    def links(self, axes: tuple[str, ...], use: str) -> Links:
        """Links to the ranks that differ from this one along `axes` only; another use never shares a communicator."""

    def links_among(self, axes: tuple[str, ...], indices: tuple[int, ...]) -> Links | None:
        """Links among some of those ranks, by their indices there; None where this rank is none of them."""

    def close(self) -> None:
        """Give back what was made."""


def check_exchange(
    sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]], rank: int, world_size: int
) -> None:
    """Raise unless an exchange is one.

    Raises:
        ValueError: a tensor has no element, is not contiguous, or is for no other rank of the group.
    """
    for peer, tensors in (*sends.items(), *receives.items()):
        if peer == rank or not 0 <= peer < world_size:
            raise ValueError(f"rank {rank} of {world_size} exchanges nothing with rank {peer}; name another rank")
        if not all(each.numel() and each.is_contiguous() for each in tensors):
            raise ValueError(f"a tensor between ranks {rank} and {peer} is empty or strided; leave it out or copy it")
