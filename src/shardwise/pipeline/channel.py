"""What carries boundary values and their gradients between two neighbouring stages, on two ranks or on one.

The source's stage calls `send` and `post_gradients`, the destination's `post_receive` and `send_gradients`, each once
for every micro-batch that the schedule passes between them, in an order that both ends share. Where the links know no
tags (NCCL) the order is that of all channels from the one rank to the other. No call waits for the other end but the
`wait` of what has been posted; so what stands between two computations may be started in any order.

>>> channel = LocalChannel()
>>> sent, letter = channel.send({"hidden": torch.ones(2, requires_grad=True), "step": 3}), channel.post_receive()
>>> received = letter.wait()
>>> received["hidden"].is_leaf, received["hidden"].requires_grad, received["step"]
(True, True, 3)
>>> [leaf.shape for leaf in leaves_with_gradient(received)]
[torch.Size([2])]
>>> sent, letter = channel.send_gradients([None]), channel.post_gradients()
>>> letter.wait()
[None]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.comm_p2p import Pipes
from shardwise.pipeline.messages import PIPES_PER_WAY, Inbox, Outbox, Way
from shardwise.pipeline.packing import containers_in, put_together, take_apart


class Outgoing(Protocol):
    """A value on its way; it holds the tensors, so keep it until it is done."""

    def wait(self) -> None:
        """Return when the receiver has it; on CUDA let the compute stream wait for that."""

    def is_done(self) -> bool:
        """Whether to wait for it would hold up nothing."""


class Incoming(Protocol):
    """A value that is to come."""

    def wait(self) -> Any:
        """The value; may be called again."""


class AnyChannel(Protocol):
    """Either channel; who receives may post a receive before the other end has sent."""

    def send(self, value: Any) -> Outgoing:
        """Start to send a boundary value, any pytree of tensors and plain values; returns at once."""

    def post_receive(self) -> Incoming:
        """Post the receive of the next value; its tensors are leaves, which require grad where those sent do."""

    def send_gradients(self, gradients: Sequence[Tensor | None]) -> Outgoing:
        """Start to send the gradients of a received value's `leaves_with_gradient`; None where there is none."""

    def post_gradients(self) -> Incoming:
        """Post the receive of the gradients of the next value, of the values sent: of its `leaves_with_gradient`."""

    def close(self) -> None:
        """Receive what has been posted and never waited for."""


@dataclass(frozen=True)
class Boundary:
    """Between two neighbouring stages on different ranks.

    Attributes:
        number: counts the boundaries of the pipeline; each rank opens its channels in this order.
        ends: the ranks along the pipeline's axis that hold the stage before it and the one behind.
        name: for counts and messages.
    """

    number: int
    ends: tuple[int, int]
    name: str


class Channel:
    """One end of a channel between two ranks.

    Args:
        pipes: of this rank.
        boundary: between the two stages.
        types: of containers in values, which torch's pytree has not registered: the named tuples that this rank's
            model returns.
        describe: gives the next value where the source is simulated, and is called for nothing else.
    """

    def __init__(
        self,
        pipes: Pipes,
        boundary: Boundary,
        types: Iterable[type] = (),
        describe: Callable[[], Any] | None = None,
    ) -> None:
        source, destination = boundary.ends
        tag = 2 * PIPES_PER_WAY * boundary.number
        values = Way.open(pipes, (source, destination), f"{boundary.name} values", tag)
        gradients = Way.open(pipes, (destination, source), f"{boundary.name} gradients", tag + PIPES_PER_WAY)
        self._is_simulated = values.header.moves_nothing
        self._simulated_gradients: deque[list[Tensor]] = deque()
        is_source = pipes.rank == source
        imagine = self._simulated_gradients.popleft if is_source else describe
        if self._is_simulated and imagine is None:
            raise ValueError(f"{boundary.name}: nothing arrives from a simulated rank; give `describe`")
        self._outbox = Outbox(values if is_source else gradients)
        self._inbox = Inbox(gradients if is_source else values, types, imagine if self._is_simulated else None)

    def send(self, value: Any) -> Outgoing:
        """Start to send a boundary value."""
        if self._is_simulated:
            leaves = leaves_with_gradient(value)
            # On meta: until they are received, no rank holds them.
            self._simulated_gradients.append([torch.empty_like(leaf, device="meta") for leaf in leaves])
        return self._outbox.send(value)

    def post_receive(self) -> Incoming:
        """Post the receive of the next boundary value."""
        return self._inbox.post()

    def send_gradients(self, gradients: Sequence[Tensor | None]) -> Outgoing:
        """Start to send gradients."""
        return self._outbox.send([None if each is None else each.detach() for each in gradients])

    def post_gradients(self) -> Incoming:
        """Post the receive of the next gradients."""
        return self._inbox.post()

    def close(self) -> None:
        """Receive what has been posted and never waited for."""
        self._inbox.close()


class LocalChannel:
    """A channel between two stages of one rank: tensors are handed over, not copied."""

    def __init__(self) -> None:
        self._values = _Shelf()
        self._gradients = _Shelf()

    def send(self, value: Any) -> Outgoing:
        """Hand over a boundary value.

        Raises:
            ConfigError: another rank could not have received it.
        """
        packing, tensors, plain = take_apart(value)
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        return self._values.put(put_together(packing, leaves, plain, containers_in(value)))

    def post_receive(self) -> Incoming:
        """Ask for the next boundary value."""
        return self._values.ask()

    def send_gradients(self, gradients: Sequence[Tensor | None]) -> Outgoing:
        """Hand over gradients."""
        return self._gradients.put([None if each is None else each.detach() for each in gradients])

    def post_gradients(self) -> Incoming:
        """Ask for the next gradients."""
        return self._gradients.ask()

    def close(self) -> None:
        """Drop what nobody has taken."""
        self._values.clear()
        self._gradients.clear()


class _Shelf:
    """Values by number, between who puts and who takes them."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._num_put = 0
        self._num_asked = 0

    def put(self, value: Any) -> _Handed:
        self._values[self._num_put] = value
        self._num_put += 1
        return _Handed()

    def ask(self) -> _Asked:
        self._num_asked += 1
        return _Asked(self._values, self._num_asked - 1)

    def clear(self) -> None:
        self._values.clear()


class _Handed:
    """A value that has been handed over."""

    def wait(self) -> None:
        """There is nothing to wait for."""

    def is_done(self) -> bool:
        """It is."""
        return True


class _Asked:
    """A value that is on the shelf, or will be before it is waited for."""

    def __init__(self, values: dict[int, Any], number: int) -> None:
        self._values = values
        self._number = number
        self._taken: tuple[Any] | None = None

    def wait(self) -> Any:
        """Take the value.

        Raises:
            RuntimeError: the other stage, which runs on this thread, has not sent it.
        """
        if self._taken is None:
            if self._number not in self._values:
                raise RuntimeError(f"value {self._number} between two stages of this rank is awaited before it is sent")
            self._taken = (self._values.pop(self._number),)
        return self._taken[0]


def leaves_with_gradient(value: Any) -> list[Tensor]:
    """The tensors of a boundary value whose gradients travel back, in their order, which is the same on both ends.

    Args:
        value: as sent or received.
    """
    return [tensor for tensor in take_apart(value)[1] if tensor.requires_grad]
