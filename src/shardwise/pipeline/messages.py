"""Messages of pytrees in one direction, whose shapes may change at any of them: an `Outbox` and its `Inbox`.

A message is a header, perhaps a text, and tensors. The header (40 bytes) and the text travel between the hosts, so that
no device is waited for. The header names the message's packing by number and says how long the text is, which holds the
packing where it is new, and the plain values where they differ from the packing's last. Both ends keep the packings by
number, the latest `MAX_PACKINGS`.

The receiver need not wait for the header to receive the tensors, if it knows the packing. So both ends know from the
messages so far, and from nothing else, in which of two states the next one is:

    state          the next message's tensors are received       it becomes
    -------------  --------------------------------------------  ------------------------------------------------
    header first   when its header has been read                 AGREED on its packing, if the one before had the
                                                                 same; else header first
    agreed on p    at once, in the shapes of p                   AGREED on p, if it has packing p; else header first

Where a message in the state "agreed on p" has another packing, its sender first sends tensors of p, with any content,
says so in the header, and then its own: a change costs one wasted transfer, and no receive is ever of the wrong size.
The tensors of a message are received behind those of all messages before it, so at once means: as soon as it is posted
and the header before it has been read. Neither end ever waits for the other but where the receiver asks for a value.

Where the other ranks are only simulated nothing arrives, and the inbox makes each value itself.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.comm_books import CommError
from shardwise.comm_p2p import PipeComm, Pipes, Transfer
from shardwise.pipeline.packing import Packing, plain_from_json, plain_to_json, put_together, take_apart

MAX_PACKINGS: Final = 64
PIPES_PER_WAY: Final = 3
# message, packing, bytes of the packing's text, bytes of the plain values', whether tensors as agreed come first
_HEADER_FIELDS: Final = 5


@dataclass
class Agreement:
    """On which packing both ends of a way agree, before the next message.

    >>> agreement = Agreement()
    >>> [agreement.follow(packing) for packing in (1, 1, 1, 2, 2, 1)]
    [None, 1, 1, None, 2, None]
    """

    last: int | None = None
    agreed: int | None = None

    def follow(self, packing: int) -> int | None:
        """Take note of a message's packing; returns what is agreed from here on."""
        self.agreed = packing if packing == self.last else None
        self.last = packing
        return self.agreed


@dataclass
class KnownPacking:
    """A packing that both ends know, and the text of its last plain values."""

    packing: Packing
    plain: str = ""


@dataclass
class Memory:
    """The packings of a way that were used last, by number; alike on both ends, which see the same messages.

    Attributes:
        packings: the latest used stands last.
        numbers: of the same.
        num_packings: that there have been.
    """

    packings: OrderedDict[int, KnownPacking] = field(default_factory=OrderedDict)
    numbers: dict[Packing, int] = field(default_factory=dict)
    num_packings: int = 0

    def add(self, packing: Packing) -> int:
        """Give a new packing its number, and forget the one that was not used for longest if there are too many."""
        number, self.num_packings = self.num_packings, self.num_packings + 1
        self.packings[number] = KnownPacking(packing)
        self.numbers[packing] = number
        if len(self.packings) > MAX_PACKINGS:
            del self.numbers[self.packings.popitem(last=False)[1].packing]
        return number

    def use(self, number: int) -> KnownPacking:
        """The packing of this number."""
        self.packings.move_to_end(number)
        return self.packings[number]

    def texts(self, packing: Packing, plain: Sequence[Any]) -> tuple[int, list[str]]:
        """A packing's number, and the texts that a message with these plain values needs; use it next."""
        plain_text = plain_to_json(plain)
        if (number := self.numbers.get(packing)) is not None:
            return number, ["", "" if self.packings[number].plain == plain_text else plain_text]
        return self.add(packing), [packing.to_json(), plain_text]


@dataclass(frozen=True)
class Way:
    """The pipes of one direction between two ranks: for headers, for texts, and for tensors."""

    name: str
    header: PipeComm
    text: PipeComm
    tensors: PipeComm
    line: deque[Any]

    @classmethod
    def open(cls, pipes: Pipes, ends: tuple[int, int], name: str, tag: int) -> Way:
        """Open it on both ends; `tag` and the `PIPES_PER_WAY` - 1 behind it are this way's alone."""
        return cls(
            name,
            pipes.open(ends, f"{name} header", tag, on_host=True),
            pipes.open(ends, f"{name} text", tag + 1, on_host=True),
            pipes.open(ends, name, tag + 2),
            pipes.line(ends),
        )


class Sent:
    """A message on its way, and its tensors. One that is dropped holds up its thread until it is through."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self._transfers = tuple(transfers)

    def wait(self) -> None:
        """Return when the receiver has it; on CUDA, when it has the header, and let the compute stream wait."""
        _wait_for(self._transfers)

    def is_done(self) -> bool:
        """Whether to wait for it would hold up nothing; gloo does not tell before it has been waited for."""
        last = self._transfers[-1]
        if last.is_on_device:  # the receiver takes the header first
            return last.is_done()
        return all(transfer.is_done() for transfer in self._transfers)


class Outbox:
    """The sending end of a way."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._agreement = Agreement()
        self._memory = Memory()
        self._num_sent = 0

    def send(self, value: Any) -> Sent:
        """Start to send a pytree; returns at once, and what is returned holds the tensors until they are through.

        Args:
            value: its tensors must not change until then. Those of another device arrive on that of the pipeline.

        Raises:
            ConfigError: the value holds what no message can carry; nothing is sent.
        """
        packing, tensors, plain = take_apart(value)
        way, device, agreed = self._way, self._way.tensors.device, self._agreement.agreed
        number, texts = self._memory.texts(packing, plain)
        is_changed = agreed is not None and agreed != number
        header = [self._num_sent, number, *(len(text.encode()) for text in texts), int(is_changed)]
        transfers = [way.header.send([torch.tensor(header, dtype=torch.int64)], f"{way.name} header")]
        transfers += [way.text.send([self._bytes(text)], f"{way.name} text") for text in texts if text]
        if agreed is not None and is_changed:
            stale = [part.allocate(device).zero_() for part in self._memory.packings[agreed].packing.tensors]
            transfers.append(way.tensors.send(stale, way.name))
        transfers.append(way.tensors.send([_for_wire(tensor, device) for tensor in tensors], way.name))
        known = self._memory.use(number)
        known.plain = texts[1] or known.plain
        self._agreement.follow(number)
        self._num_sent += 1
        return Sent(transfers)

    def _bytes(self, text: str) -> Tensor:
        """The text [b] as uint8."""
        content = text.encode()
        if self._way.text.moves_nothing:  # torch makes no fake tensor of what the host holds
            return torch.empty(len(content), dtype=torch.uint8)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class Inbox:
    """The receiving end of a way.

    Args:
        way: whose source sends.
        types: of containers that may come, beside those that torch's pytree knows.
        make_value: gives the next message's value where the sender is simulated, and only there.
    """

    def __init__(self, way: Way, types: Iterable[type], make_value: Callable[[], Any] | None) -> None:
        self.way = way
        self.agreement = Agreement()
        self.memory = Memory()
        self.types = tuple(types)
        self.make_value = make_value
        self._num_posted = 0

    def post(self) -> Letter:
        """Post the receives of the next message as far as they are known; never waits."""
        letter = Letter(self, self._num_posted)
        self._num_posted += 1
        self.way.line.append(letter)
        self.way.line[0].receive_early()
        return letter

    def close(self) -> None:
        """Receive what has been posted, so that no sender waits for it."""
        while self.way.line and not self.way.tensors.books.has_failed:
            self.way.line[-1].wait()
        self.way.line.clear()


class Letter:
    """A message that has been posted: `wait` gives its value. One that is dropped is received all the same."""

    def __init__(self, inbox: Inbox, number: int) -> None:
        way = inbox.way
        self._inbox = inbox
        self._number = number
        self._is_read = False
        self._is_early = False
        self._tensors: list[Tensor] = []
        self._plain: list[Any] = []
        self._packing: Packing | None = None
        self._value: Any = None
        self._header = torch.empty(_HEADER_FIELDS, dtype=torch.int64)
        self._header_transfer = way.header.receive([self._header], f"{way.name} header")
        self._transfers: list[Transfer] = []

    def wait(self) -> Any:
        """The value; its tensors can be used on the current stream, and are leaves that require grad where they did.

        Raises:
            CommError: it does not come, or the two ends are not at the same message.
            ConfigError: it has a container of a type that is not known here.
        """
        line = self._inbox.way.line
        while not self._is_read:
            line[0].read()
            line.popleft()
            if line:
                line[0].receive_early()
        _wait_for(self._transfers)
        if self._packing is not None:
            for tensor, part in zip(self._tensors, self._packing.tensors, strict=True):
                tensor.requires_grad_(part.requires_grad)
            self._value = put_together(self._packing, self._tensors, self._plain, self._inbox.types)
            self._packing, self._tensors = None, []
        return self._value

    def receive_early(self) -> None:
        """First in its line: receive the tensors as agreed, if they are."""
        agreed = self._inbox.agreement.agreed
        if agreed is not None and not self._is_early:
            self._is_early = True
            self._receive(self._inbox.memory.packings[agreed].packing)

    def read(self) -> None:
        """First in its line: read the header, and receive what is not received early."""
        inbox, agreed = self._inbox, self._inbox.agreement.agreed
        number, is_changed, texts = self._imagine() if inbox.make_value is not None else self._read_header()
        if is_changed != (agreed is not None and agreed != number) or number > inbox.memory.num_packings:
            raise CommError(
                f"{inbox.way.name}: message {self._number} is not as agreed; run the same code on all ranks"
            )
        if number == inbox.memory.num_packings:
            inbox.memory.add(Packing.from_json(texts[0]))
        known = inbox.memory.use(number)
        known.plain = texts[1] or known.plain
        if is_changed or not self._is_early:
            self._receive(known.packing)
        self._packing, self._plain = known.packing, plain_from_json(known.plain)
        inbox.agreement.follow(number)
        self._is_read = True

    def _receive(self, packing: Packing) -> None:
        """What has been received early, and is not wanted, is held until it is through."""
        tensors = self._inbox.way.tensors
        self._tensors = [part.allocate(tensors.device) for part in packing.tensors]
        self._transfers.append(tensors.receive(self._tensors, self._inbox.way.name))

    def _read_header(self) -> tuple[int, bool, list[str]]:
        """The packing's number, whether it is another than agreed, and the texts."""
        self._header_transfer.wait()
        message, number, *num_bytes, is_changed = self._header.tolist()
        if message != self._number:
            raise CommError(
                f"{self._inbox.way.name}: message {message} came where {self._number} was awaited; "
                "run the same code on all ranks"
            )
        return number, bool(is_changed), [self._read_text(num) for num in num_bytes]

    def _read_text(self, num_bytes: int) -> str:
        return bytes(self._read_bytes(num_bytes).tolist()).decode() if num_bytes else ""

    def _read_bytes(self, num_bytes: int) -> Tensor:
        text, way = torch.empty(num_bytes, dtype=torch.uint8), self._inbox.way
        way.text.receive([text], f"{way.name} text").wait()
        return text

    def _imagine(self) -> tuple[int, bool, list[str]]:
        """What the header of a message from a simulated rank would say; it is received all the same, and counted."""
        inbox = self._inbox
        self._header_transfer.wait()
        packing, _, plain = take_apart(inbox.make_value() if inbox.make_value is not None else None)
        number, texts = inbox.memory.texts(packing, plain)
        for text in texts:
            self._read_bytes(len(text.encode()))
        return number, inbox.agreement.agreed not in (None, number), texts

    def __del__(self) -> None:
        """The sender of a message that nobody wants waits until it is received."""
        if not self._is_read and not self._inbox.way.tensors.books.has_failed:
            with suppress(Exception):
                self.wait()


def _for_wire(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor itself where it can travel as it lies in memory."""
    return tensor.detach().to(device).resolve_conj().resolve_neg().contiguous()


def _wait_for(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
