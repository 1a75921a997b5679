"""A stage's side of the boundary to its neighbour: what has been sent and what has been posted, by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from shardwise.comm_p2p import Pipes
from shardwise.pipeline.channel import AnyChannel, Boundary, Channel, Incoming, LocalChannel, Outgoing
from shardwise.schedule.placement import StagePlacement

OnEnd = Callable[[], None]


class Port:
    """One end of a channel, or both where the two stages are on one rank.

    Args:
        channel: to the neighbour.
        is_local: both stages are on this rank: there are no actions that send or receive.
    """

    def __init__(self, channel: AnyChannel, is_local: bool) -> None:
        self.is_local = is_local
        self._channel = channel
        self._posted: dict[tuple[bool, int], tuple[Incoming, OnEnd]] = {}
        self._sent: dict[tuple[bool, int], Outgoing] = {}

    def send(self, micro_batch: int, value: Any) -> None:
        """Start to send a value to the next stage."""
        self._sent[False, micro_batch] = self._channel.send(value)

    def send_gradients(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> None:
        """Start to send gradients to the stage before."""
        self._sent = {key: sent for key, sent in self._sent.items() if not sent.is_done()}
        self._sent[True, micro_batch] = self._channel.send_gradients(gradients)

    def post(self, micro_batch: int, on_end: OnEnd) -> None:
        """Be ready to receive a value; `on_end` is called when it is there."""
        self._posted[False, micro_batch] = self._channel.post_receive(), on_end

    def post_gradients(self, micro_batch: int, on_end: OnEnd) -> None:
        """Be ready to receive gradients."""
        self._posted[True, micro_batch] = self._channel.post_gradients(), on_end

    def take(self, micro_batch: int) -> Any:
        """Wait for a value; its tensors are leaves that require gradients where the sent ones do."""
        if self.is_local:
            self.post(micro_batch, _nothing)
        return self._take(False, micro_batch)

    def take_gradients(self, micro_batch: int) -> Sequence[Tensor | None]:
        """Wait for gradients, one for each tensor sent that requires one, in the order of the value's leaves."""
        if self.is_local:
            self.post_gradients(micro_batch, _nothing)
        gradients: Sequence[Tensor | None] = self._take(True, micro_batch)
        sent = self._sent.pop((False, micro_batch), None)
        if sent is not None:  # gradients are computed from it, so it is through: gloo lets go of it when waited for
            sent.wait()
        return gradients

    def finish(self) -> None:
        """Wait until all that was sent is through."""
        for sent in self._sent.values():
            sent.wait()
        self._sent.clear()

    def close(self) -> None:
        """Receive what has been posted and never taken."""
        self._posted.clear()
        self._channel.close()

    def _take(self, is_gradient: bool, micro_batch: int) -> Any:
        incoming, on_end = self._posted.pop((is_gradient, micro_batch))
        value = incoming.wait()
        on_end()
        return value


def open_ports(
    pipes: Pipes,
    placement: StagePlacement,
    index: int,
    types: Iterable[type] = (),
    describe: Callable[[int], Any] | None = None,
) -> tuple[dict[int, Port], dict[int, Port]]:
    """The ports of one rank's stages to the stages before them, and to the next ones; all ranks open theirs alike.

    Args:
        pipes: of this rank.
        placement: of the stages.
        index: of this rank in the pipeline.
        types: of containers that boundary values may have, beside those that torch's pytree knows.
        describe: where other ranks are simulated, gives an example of what a stage receives.
    """
    inlets: dict[int, Port] = {}
    outlets: dict[int, Port] = {}
    held = placement.stages_of(index)
    for stage in range(placement.num_stages - 1):
        ends = placement.rank_of(stage), placement.rank_of(stage + 1)
        if index not in ends:
            continue
        is_local = ends[0] == ends[1]
        source = None if describe is None else _example(describe, stage + 1)
        boundary = Boundary(stage, ends, f"stage {stage} to {stage + 1}")
        port = Port(LocalChannel() if is_local else Channel(pipes, boundary, types, source), is_local)
        if stage in held:
            outlets[stage] = port
        if stage + 1 in held:
            inlets[stage + 1] = port
    return inlets, outlets


def _example(describe: Callable[[int], Any], stage: int) -> Callable[[], Any]:
    return lambda: describe(stage)


def _nothing() -> None:
    pass
