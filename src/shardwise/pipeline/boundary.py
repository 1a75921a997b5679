"""Channels carry boundary values and their gradients between two neighbouring stages, on two ranks or on one.

The source's stage calls `send` and `post_gradients`, the destination's `post_receive` and `send_gradients`, each once
for every micro-batch that the schedule passes between them, in an order that both ends share. Where the backend knows
no tags (NCCL) the order is that of all channels from the one rank to the other. Only the `wait` of what has been posted
waits for the other end; so the transfers between two computations may be started in any order.

>>> channel = SameRankChannel()
>>> sent, posted = channel.send({"hidden": torch.ones(2, requires_grad=True), "step": 3}), channel.post_receive()
>>> received = posted.wait()
>>> received["hidden"].is_leaf, received["hidden"].requires_grad, received["step"]
(True, True, 3)
>>> [leaf.shape for leaf in leaves_with_gradient(received)]
[torch.Size([2])]
>>> sent, posted = channel.send_gradients([None]), channel.post_gradients()
>>> posted.wait()
[None]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.comm.p2p import P2PChannels
from shardwise.pipeline.boundary_messages import PIPES_PER_WAY, P2PDirection, Receiver, Sender
from shardwise.pipeline.pytree_codec import containers_in, put_together, take_apart
from shardwise.schedule.placement import StagePlacement


class ChannelOutput(Protocol):
    """Represents a value that is being sent; it holds the tensors, so keep it until it is done."""

    def wait(self) -> None:
        """Return when the receiver has it; on CUDA let the compute stream wait for that."""

    def is_done(self) -> bool:
        """Say whether `wait` would return at once."""


class ChannelInput(Protocol):
    """Holds a value that has not been taken yet."""

    def wait(self) -> Any:
        """Wait for the value and return it; may be called again."""


class BoundaryTransport(Protocol):
    """Defines the interface of both kinds of channel; the receiver may post a receive before the other end has sent."""

    def send(self, value: Any) -> ChannelOutput:
        """Start to send a boundary value, any pytree of tensors and plain values; returns at once."""

    def post_receive(self) -> ChannelInput:
        """Post the receive of the next value; its tensors are leaves, which require grad where those sent do."""

    def send_gradients(self, gradients: Sequence[Tensor | None]) -> ChannelOutput:
        """Start to send the gradients of a received value's `leaves_with_gradient`; None where there is none."""

    def post_gradients(self) -> ChannelInput:
        """Post the receive of the next gradients: those of the `leaves_with_gradient` of a value that was sent."""

    def close(self) -> None:
        """Receive what has been posted and never waited for."""


@dataclass(frozen=True)
class Boundary:
    """Describes the cut between two neighbouring stages on different ranks.

    Attributes:
        number: counts the boundaries of the pipeline; each rank opens its channels in this order.
        ends: the ranks along the pipeline's axis that hold the stage before it and the stage after it.
        name: for counts and messages.
    """

    number: int
    ends: tuple[int, int]
    name: str


class BoundaryChannel:
    """Is one end of a channel between two ranks.

    Args:
        pipes: this rank's point-to-point channels.
        boundary: the boundary between the two stages.
        types: container types in values that torch's pytree has not registered: the named tuples that this rank's
            model returns.
        describe: returns the next value where the source is simulated; it is called for nothing else.
    """

    def __init__(
        self,
        pipes: P2PChannels,
        boundary: Boundary,
        types: Iterable[type] = (),
        describe: Callable[[], Any] | None = None,
    ) -> None:
        source, destination = boundary.ends
        tag = 2 * PIPES_PER_WAY * boundary.number
        values = P2PDirection.open(pipes, (source, destination), f"{boundary.name} values", tag)
        gradients = P2PDirection.open(pipes, (destination, source), f"{boundary.name} gradients", tag + PIPES_PER_WAY)
        self._is_simulated = values.header.moves_nothing
        self._simulated_gradients: deque[list[Tensor]] = deque()
        is_source = pipes.rank == source
        imagine = self._simulated_gradients.popleft if is_source else describe
        if self._is_simulated and imagine is None:
            raise ValueError(f"{boundary.name}: nothing arrives from a simulated rank; give `describe`")
        self._sender = Sender(values if is_source else gradients)
        self._receiver = Receiver(gradients if is_source else values, types, imagine if self._is_simulated else None)

    def send(self, value: Any) -> ChannelOutput:
        """Start to send a boundary value."""
        if self._is_simulated:
            leaves = leaves_with_gradient(value)
            # On meta: until they are received, no rank holds them.
            self._simulated_gradients.append([torch.empty_like(leaf, device="meta") for leaf in leaves])
        return self._sender.send(value)

    def post_receive(self) -> ChannelInput:
        """Post the receive of the next boundary value."""
        return self._receiver.post()

    def send_gradients(self, gradients: Sequence[Tensor | None]) -> ChannelOutput:
        """Start to send gradients."""
        return self._sender.send([None if each is None else each.detach() for each in gradients])

    def post_gradients(self) -> ChannelInput:
        """Post the receive of the next gradients."""
        return self._receiver.post()

    def close(self) -> None:
        """Receive what has been posted and never waited for."""
        self._receiver.close()


class SameRankChannel:
    """Connects two stages of one rank: tensors are handed over, not copied."""

    def __init__(self) -> None:
        self._values = _ReceivedTensors()
        self._gradients = _ReceivedTensors()

    def send(self, value: Any) -> ChannelOutput:
        """Hand over a boundary value.

        Raises:
            ConfigError: the value could not have been sent to another rank.
        """
        spec, tensors, plain = take_apart(value)
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        return self._values.put(put_together(spec, leaves, plain, containers_in(value)))

    def post_receive(self) -> ChannelInput:
        """Ask for the next boundary value."""
        return self._values.ask()

    def send_gradients(self, gradients: Sequence[Tensor | None]) -> ChannelOutput:
        """Hand over gradients."""
        return self._gradients.put([None if each is None else each.detach() for each in gradients])

    def post_gradients(self) -> ChannelInput:
        """Ask for the next gradients."""
        return self._gradients.ask()

    def close(self) -> None:
        """Drop the values that were not taken."""
        self._values.clear()
        self._gradients.clear()


class _ReceivedTensors:
    """Holds values by number that one stage has put and the other has not yet taken."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._num_put = 0
        self._num_asked = 0

    def put(self, value: Any) -> _LocalMessage:
        self._values[self._num_put] = value
        self._num_put += 1
        return _LocalMessage()

    def ask(self) -> _PostedReceive:
        self._num_asked += 1
        return _PostedReceive(self._values, self._num_asked - 1)

    def clear(self) -> None:
        self._values.clear()


class _LocalMessage:
    """Holds a value that has been handed over."""

    def wait(self) -> None:
        """Return at once."""

    def is_done(self) -> bool:
        """Return True."""
        return True


class _PostedReceive:
    """Holds a value that has been put, or will be before it is waited for."""

    def __init__(self, values: dict[int, Any], number: int) -> None:
        self._values = values
        self._number = number
        self._taken: tuple[Any] | None = None

    def wait(self) -> Any:
        """Take the value.

        Raises:
            RuntimeError: the other stage, which runs on this thread too, has not sent it.
        """
        if self._taken is None:
            if self._number not in self._values:
                raise RuntimeError(f"value {self._number} between two stages of this rank is awaited before it is sent")
            self._taken = (self._values.pop(self._number),)
        return self._taken[0]


def leaves_with_gradient(value: Any) -> list[Tensor]:
    """Return the tensors of a boundary value whose gradients are sent back, in the same order on both ends.

    Args:
        value: the value as it was sent or received.
    """
    return [tensor for tensor in take_apart(value)[1] if tensor.requires_grad]


OnEnd = Callable[[], None]


class StageBoundary:
    """Is one end of a channel, or both where the two stages are on one rank.

    Args:
        channel: the channel to the neighbour.
        is_local: True where both stages are on this rank: there are no actions that send or receive.
    """

    def __init__(self, channel: BoundaryTransport, is_local: bool) -> None:
        self.is_local = is_local
        self._channel = channel
        self._posted: dict[tuple[bool, int], tuple[ChannelInput, OnEnd]] = {}
        self._sent: dict[tuple[bool, int], ChannelOutput] = {}

    def send(self, micro_batch: int, value: Any) -> None:
        """Start to send a value to the next stage."""
        self._sent[False, micro_batch] = self._channel.send(value)

    def send_gradients(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> None:
        """Start to send gradients to the stage before."""
        self._sent = {key: sent for key, sent in self._sent.items() if not sent.is_done()}
        self._sent[True, micro_batch] = self._channel.send_gradients(gradients)

    def post(self, micro_batch: int, on_end: OnEnd) -> None:
        """Post the receive of a value; `on_end` is called when it has arrived."""
        self._posted[False, micro_batch] = self._channel.post_receive(), on_end

    def post_gradients(self, micro_batch: int, on_end: OnEnd) -> None:
        """Post the receive of gradients; `on_end` is called when they have arrived."""
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
        if sent is not None:  # gradients were computed from it, so it has arrived; gloo frees it when it is waited for
            sent.wait()
        return gradients

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
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


def open_boundaries(
    pipes: P2PChannels,
    placement: StagePlacement,
    index: int,
    types: Iterable[type] = (),
    describe: Callable[[int], Any] | None = None,
) -> tuple[dict[int, StageBoundary], dict[int, StageBoundary]]:
    """Open the boundaries of one rank's stages, in the same order on all ranks.

    Args:
        pipes: this rank's point-to-point channels.
        placement: says which rank holds which stage.
        index: of this rank in the pipeline.
        types: container types that boundary values may have, beside those that torch's pytree knows.
        describe: returns an example of what a stage receives, where other ranks are simulated; else None.

    Returns:
        By stage, the boundaries to the stages before; and by stage, those to the next stages.
    """
    inlets: dict[int, StageBoundary] = {}
    outlets: dict[int, StageBoundary] = {}
    held = placement.stages_of(index)
    for stage in range(placement.num_stages - 1):
        ends = placement.rank_of(stage), placement.rank_of(stage + 1)
        if index not in ends:
            continue
        is_local = ends[0] == ends[1]
        source = None if describe is None else _example(describe, stage + 1)
        boundary = Boundary(stage, ends, f"stage {stage} to {stage + 1}")
        stage_boundary = StageBoundary(
            SameRankChannel() if is_local else BoundaryChannel(pipes, boundary, types, source), is_local
        )
        if stage in held:
            outlets[stage] = stage_boundary
        if stage + 1 in held:
            inlets[stage + 1] = stage_boundary
    return inlets, outlets


def _example(describe: Callable[[int], Any], stage: int) -> Callable[[], Any]:
    return lambda: describe(stage)


def _nothing() -> None:
    pass
