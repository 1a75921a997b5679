"""Messages carry pytrees in one direction, from a `Sender` to its `Receiver`; shapes may change at any message.

A message is a header, perhaps a text, and tensors. The header (40 bytes) and the text are sent from host to host, so
that no device is waited for. The header names the message's spec (`PytreeSpec`) by number and says how long the text
is. The text holds the spec where it is new, and the plain values where they differ from the last with this spec. Both
ends keep the latest `MAX_SPECS` specs by number.

A receiver that knows the spec need not wait for the header to receive the tensors. So both ends know from the messages
so far, and from nothing else, in which of two states the next message is:

    state          the next message's tensors are received       the state after it
    -------------  --------------------------------------------  ------------------------------------------------
    header first   when its header has been read                 agreed on its spec, if the message before had the
                                                                 same; else header first
    agreed on p    at once, in the shapes of p                   agreed on p, if it has spec p; else header first

Where a message in the state "agreed on p" has another spec, its sender first sends tensors of p, with any content, says
so in the header, and then sends its own: a change costs one wasted transfer, and no receive ever has the wrong size.
The tensors of a message are received after those of all messages before it, so "at once" means: as soon as it is posted
and the header before it has been read. Neither end waits for the other, except where the receiver asks for a value.

Where the other ranks are only simulated nothing arrives, and the receiver makes each value itself.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.comm.p2p import P2PChannel, P2PChannels, P2PTransfer
from shardwise.comm.records import CommError
from shardwise.pipeline.pytree_codec import PytreeSpec, plain_from_json, plain_to_json, put_together, take_apart

MAX_SPECS: Final = 64
PIPES_PER_WAY: Final = 3
# message, spec, bytes of the spec's text, bytes of the plain values' text, whether tensors as agreed come first
_HEADER_FIELDS: Final = 5


@dataclass
class SpecCache:
    """Keeps the spec on which both ends of a direction agree before the next message.

    >>> agreement = SpecCache()
    >>> [agreement.follow(spec) for spec in (1, 1, 1, 2, 2, 1)]
    [None, 1, 1, None, 2, None]
    """

    last: int | None = None
    agreed: int | None = None

    def follow(self, spec: int) -> int | None:
        """Take note of the number of a message's spec; return what is agreed from here on, None for nothing."""
        self.agreed = spec if spec == self.last else None
        self.last = spec
        return self.agreed


@dataclass
class KnownSpec:
    """Holds a spec that both ends know, and the text of its last plain values."""

    spec: PytreeSpec
    plain: str = ""


@dataclass
class SpecMemory:
    """Keeps the specs of a direction that were used last, by number; both ends see the same messages, so keep the same.

    Attributes:
        specs: by number; the one used last is the last entry.
        numbers: the number of each spec in `specs`.
        num_specs: how many specs there have been in all.
    """

    specs: OrderedDict[int, KnownSpec] = field(default_factory=OrderedDict)
    numbers: dict[PytreeSpec, int] = field(default_factory=dict)
    num_specs: int = 0

    def add(self, spec: PytreeSpec) -> int:
        """Give a new spec its number, and forget the least recently used one if there are too many."""
        number, self.num_specs = self.num_specs, self.num_specs + 1
        self.specs[number] = KnownSpec(spec)
        self.numbers[spec] = number
        if len(self.specs) > MAX_SPECS:
            del self.numbers[self.specs.popitem(last=False)[1].spec]
        return number

    def use(self, number: int) -> KnownSpec:
        """Return the spec of this number, and mark it as used last."""
        self.specs.move_to_end(number)
        return self.specs[number]

    def texts(self, spec: PytreeSpec, plain: Sequence[Any]) -> tuple[int, list[str]]:
        """Return a spec's number and the texts that a message with these plain values needs; call `use` next."""
        plain_text = plain_to_json(plain)
        if (number := self.numbers.get(spec)) is not None:
            return number, ["", "" if self.specs[number].plain == plain_text else plain_text]
        return self.add(spec), [spec.to_json(), plain_text]


@dataclass(frozen=True)
class P2PDirection:
    """Holds the channels of one direction between two ranks: for headers, for texts, and for tensors."""

    name: str
    header: P2PChannel
    text: P2PChannel
    tensors: P2PChannel
    line: deque[Any]

    @classmethod
    def open(cls, pipes: P2PChannels, ends: tuple[int, int], name: str, tag: int) -> P2PDirection:
        """Open the three channels; both ends must call this.

        Args:
            pipes: this rank's point-to-point channels.
            ends: the ranks that send and receive.
            name: for counts and messages.
            tag: the first of `PIPES_PER_WAY` consecutive tags that only this direction uses.
        """
        return cls(
            name,
            pipes.open(ends, f"{name} header", tag, on_host=True),
            pipes.open(ends, f"{name} text", tag + 1, on_host=True),
            pipes.open(ends, name, tag + 2),
            pipes.line(ends),
        )


class PendingSend:
    """Holds a message that is being sent, and its tensors. Dropping it blocks the thread until the message arrives."""

    def __init__(self, transfers: Sequence[P2PTransfer]) -> None:
        self._transfers = tuple(transfers)

    def wait(self) -> None:
        """Return when the receiver has it; on CUDA, when it has the header, and let the compute stream wait."""
        _wait_for(self._transfers)

    def is_done(self) -> bool:
        """Say whether `wait` would return at once; with gloo this is False until `wait` has been called."""
        last = self._transfers[-1]
        if last.is_on_device:  # the receiver takes the header first
            return last.is_done()
        return all(transfer.is_done() for transfer in self._transfers)


class Sender:
    """Sends the messages of a direction."""

    def __init__(self, direction: P2PDirection) -> None:
        self._direction = direction
        self._agreement = SpecCache()
        self._memory = SpecMemory()
        self._num_sent = 0

    def send(self, value: Any) -> PendingSend:
        """Start to send a pytree, and return at once; what is returned holds the tensors until they have arrived.

        Args:
            value: its tensors must not change until then. Those of another device arrive on the pipeline's device.

        Raises:
            ConfigError: the value holds what no message can carry; nothing is sent.
        """
        spec, tensors, plain = take_apart(value)
        direction, device, agreed = self._direction, self._direction.tensors.device, self._agreement.agreed
        number, texts = self._memory.texts(spec, plain)
        is_changed = agreed is not None and agreed != number
        header = [self._num_sent, number, *(len(text.encode()) for text in texts), int(is_changed)]
        transfers = [direction.header.send([torch.tensor(header, dtype=torch.int64)], f"{direction.name} header")]
        transfers += [direction.text.send([self._bytes(text)], f"{direction.name} text") for text in texts if text]
        if agreed is not None and is_changed:
            stale = [part.allocate(device).zero_() for part in self._memory.specs[agreed].spec.tensors]
            transfers.append(direction.tensors.send(stale, direction.name))
        transfers.append(direction.tensors.send([_for_wire(tensor, device) for tensor in tensors], direction.name))
        known = self._memory.use(number)
        known.plain = texts[1] or known.plain
        self._agreement.follow(number)
        self._num_sent += 1
        return PendingSend(transfers)

    def _bytes(self, text: str) -> Tensor:
        """Return the text's bytes as a uint8 tensor [b]."""
        content = text.encode()
        if self._direction.text.moves_nothing:  # torch makes no fake tensor of what the host holds
            return torch.empty(len(content), dtype=torch.uint8)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class Receiver:
    """Receives the messages of a direction.

    Args:
        direction: the channels on which this rank receives.
        types: container types that may arrive, beside those that torch's pytree knows.
        make_value: returns the next message's value where the sender is simulated; it is called only there.
    """

    def __init__(self, direction: P2PDirection, types: Iterable[type], make_value: Callable[[], Any] | None) -> None:
        self.direction = direction
        self.agreement = SpecCache()
        self.memory = SpecMemory()
        self.types = tuple(types)
        self.make_value = make_value
        self._num_posted = 0

    def post(self) -> PendingRecv:
        """Post the receives of the next message as far as they are known; never waits."""
        pending_recv = PendingRecv(self, self._num_posted)
        self._num_posted += 1
        self.direction.line.append(pending_recv)
        self.direction.line[0].receive_early()
        return pending_recv

    def close(self) -> None:
        """Receive what has been posted, so that no sender waits for it."""
        while self.direction.line and not self.direction.tensors.comm_log.has_failed:
            self.direction.line[-1].wait()
        self.direction.line.clear()


class PendingRecv:
    """Represents a posted message: `wait` gives its value. One that is dropped is received all the same."""

    def __init__(self, receiver: Receiver, number: int) -> None:
        direction = receiver.direction
        self._receiver = receiver
        self._number = number
        self._is_read = False
        self._is_early = False
        self._tensors: list[Tensor] = []
        self._plain: list[Any] = []
        self._spec: PytreeSpec | None = None
        self._value: Any = None
        self._header = torch.empty(_HEADER_FIELDS, dtype=torch.int64)
        self._header_transfer = direction.header.receive([self._header], f"{direction.name} header")
        self._transfers: list[P2PTransfer] = []

    def wait(self) -> Any:
        """Return the value; its tensors can be used on the current stream; leaves require grad where those sent did.

        Raises:
            CommError: it does not arrive, or the two ends are not at the same message.
            ConfigError: it has a container of a type that is not known here.
        """
        line = self._receiver.direction.line
        while not self._is_read:
            line[0].read()
            line.popleft()
            if line:
                line[0].receive_early()
        _wait_for(self._transfers)
        if self._spec is not None:
            for tensor, part in zip(self._tensors, self._spec.tensors, strict=True):
                tensor.requires_grad_(part.requires_grad)
            self._value = put_together(self._spec, self._tensors, self._plain, self._receiver.types)
            self._spec, self._tensors = None, []
        return self._value

    def receive_early(self) -> None:
        """Receive the tensors as agreed, if a spec is agreed; this must be the first message in its line."""
        agreed = self._receiver.agreement.agreed
        if agreed is not None and not self._is_early:
            self._is_early = True
            self._receive(self._receiver.memory.specs[agreed].spec)

    def read(self) -> None:
        """Read the header, and receive what was not received early; this must be the first message in its line."""
        receiver, agreed = self._receiver, self._receiver.agreement.agreed
        number, is_changed, texts = self._imagine() if receiver.make_value is not None else self._read_header()
        if is_changed != (agreed is not None and agreed != number) or number > receiver.memory.num_specs:
            raise CommError(
                "boundary-message-spec",
                f"{receiver.direction.name}: message {self._number} is not as agreed; run the same code on all ranks",
            )
        if number == receiver.memory.num_specs:
            receiver.memory.add(PytreeSpec.from_json(texts[0]))
        known = receiver.memory.use(number)
        known.plain = texts[1] or known.plain
        if is_changed or not self._is_early:
            self._receive(known.spec)
        self._spec, self._plain = known.spec, plain_from_json(known.plain)
        receiver.agreement.follow(number)
        self._is_read = True

    def _receive(self, spec: PytreeSpec) -> None:
        """Start to receive a spec's tensors; an unwanted early transfer stays in `_transfers` until it has finished."""
        tensors = self._receiver.direction.tensors
        self._tensors = [part.allocate(tensors.device) for part in spec.tensors]
        self._transfers.append(tensors.receive(self._tensors, self._receiver.direction.name))

    def _read_header(self) -> tuple[int, bool, list[str]]:
        """Return the spec's number, whether it differs from the agreed one, and the texts."""
        self._header_transfer.wait()
        message, number, *num_bytes, is_changed = self._header.tolist()
        if message != self._number:
            raise CommError(
                "boundary-message-order",
                f"{self._receiver.direction.name}: message {message} came where {self._number} was awaited; "
                "run the same code on all ranks",
            )
        return number, bool(is_changed), [self._read_text(num) for num in num_bytes]

    def _read_text(self, num_bytes: int) -> str:
        return bytes(self._read_bytes(num_bytes).tolist()).decode() if num_bytes else ""

    def _read_bytes(self, num_bytes: int) -> Tensor:
        text, direction = torch.empty(num_bytes, dtype=torch.uint8), self._receiver.direction
        direction.text.receive([text], f"{direction.name} text").wait()
        return text

    def _imagine(self) -> tuple[int, bool, list[str]]:
        """Return what the header of a message from a simulated rank would say; it is still received and counted."""
        receiver = self._receiver
        self._header_transfer.wait()
        spec, _, plain = take_apart(receiver.make_value() if receiver.make_value is not None else None)
        number, texts = receiver.memory.texts(spec, plain)
        for text in texts:
            self._read_bytes(len(text.encode()))
        return number, receiver.agreement.agreed not in (None, number), texts

    def __del__(self) -> None:
        """Receive a message that was never waited for, since its sender waits until it is received."""
        if not self._is_read and not self._receiver.direction.tensors.comm_log.has_failed:
            with suppress(Exception):
                self.wait()


def _for_wire(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor as it can be sent: contiguous and on the device; without a copy where it is so already."""
    return tensor.detach().to(device).resolve_conj().resolve_neg().contiguous()


def _wait_for(transfers: Sequence[P2PTransfer]) -> None:
    for transfer in transfers:
        transfer.wait()
