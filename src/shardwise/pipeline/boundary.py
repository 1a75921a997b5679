"""Boundaries carry values and their gradients between two neighbouring stages, on two ranks or on one.

Each stage has one end of a boundary. The end of the stage before sends values and receives their gradients; the end of
the stage after receives values and sends gradients. A value is any pytree of tensors and plain values.

Both ends agree on the spec of a value (`PytreeSpec`) before it is sent, so that its tensors alone are sent:

    the value is                              messages
    ----------------------------------------  ---------------------------------------------------------------------
    as agreed, small, on the host             one: the tensors, and a word that is 0
    as agreed, else                           the word from host to host, and one for each tensor
    not as agreed, or nothing is agreed       those of what is agreed, with any content, the word alone for nothing;
                                              then the spec, as long as the word says, and the tensors in one message,
                                              all from host to host

What is agreed for a micro-batch depends only on what both ends know when a step begins: the shapes of the micro-batch's
tensors, and the values that were sent in earlier steps. Agreed is the spec that all micro-batches of such shapes had in
the last step with any. Of shapes that are new it is that of the latest others, in which the sizes differ that differ
between the shapes. So a receiver posts receives of the right sizes ahead, and another sequence length costs nothing.

>>> before, after = LocalEnd.pair()
>>> before.send(0, {"hidden": torch.ones(2, requires_grad=True), "step": 3})
>>> received = after.take(0)
>>> received["hidden"].is_leaf, received["hidden"].requires_grad, received["step"]
(True, True, 3)
>>> after.send(0, [None])
>>> before.take(0)
[None]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, Self

import torch
from torch import Tensor

from shardwise.comm.p2p import P2PChannel, P2PChannels, P2PTransfer
from shardwise.comm.records import CommError
from shardwise.pipeline.pytree_codec import PytreeSpec, containers_in, put_together, take_apart, tensors_in
from shardwise.schedule.placement import StagePlacement

# Up to here copying costs the two ranks less than one more message does.
PACKED_BYTES: Final = 2**18
# Each channel keeps so many specs; micro-batches of more shapes than these are described again.
MAX_SPECS: Final = 1024
_WORD_BYTES: Final = 8
_HOST: Final = torch.device("cpu")
_NOTHING: Final = PytreeSpec("", ())  # is agreed where nothing is; no value has this spec

OnEnd = Callable[[], None]

Shapes = tuple[tuple[int, ...], ...]
Key = tuple[bool, Shapes]
"""Whether a micro-batch is computed with gradients, and the shapes of its tensors."""


class _AgreedSpecs:
    """Holds what both ends of one direction agree on; both call it in the same order with the same arguments."""

    def __init__(self) -> None:
        self._agreed: dict[Key, PytreeSpec] = {}
        self._seen: dict[Key, PytreeSpec] = {}
        self._latest: dict[bool, tuple[Key, PytreeSpec]] = {}
        self._keys: Sequence[Key] = ()

    # [Note: Both ends agree without a message]
    # A sender knows the spec of a value when it sends it, the receiver only once it has it: in between they know
    # different things. So what a step has shown counts from the next one on, when both have all values of the last. A
    # kind of micro-batch that had two specs in one step has none agreed, and each of its values is described.
    def begin_step(self, keys: Sequence[Key]) -> None:
        """Agree on what the last step has shown, for the micro-batches of the next one."""
        self._agreed.update(self._seen)
        self._latest.update({key[0]: (key, spec) for key, spec in self._seen.items() if spec != _NOTHING})
        self._seen.clear()
        if len(self._agreed) > MAX_SPECS:
            self._agreed.clear()
        self._keys = keys

    def agreed(self, micro_batch: int) -> PytreeSpec:
        """Return the spec in which a micro-batch's value is expected."""
        key = self._keys[micro_batch]
        if key in self._agreed or key[0] not in self._latest:
            return self._agreed.get(key, _NOTHING)
        other, spec = self._latest[key[0]]
        return _resized(spec, other[1], key[1])

    def note(self, micro_batch: int, spec: PytreeSpec) -> None:
        """Take note of the spec that a value has."""
        key = self._keys[micro_batch]
        self._seen[key] = spec if self._seen.get(key, spec) == spec else _NOTHING


@dataclass(frozen=True)
class _Direction:
    """Holds the channels from one rank to another: for words, for what was not agreed, and for tensors."""

    # [Note: Three channels for each direction]
    # Receives of a word and of tensors are posted before it is known whether a value is as agreed, and those of the
    # next value may be posted too. What describes a value is therefore sent on a channel of its own: on another one it
    # would end in a receive that was posted for something else.
    name: str
    words: P2PChannel
    unagreed: P2PChannel
    tensors: P2PChannel
    specs: _AgreedSpecs

    @classmethod
    def open(cls, channels: P2PChannels, ends: tuple[int, int], name: str, tag: int) -> Self:
        """Open the channels; both ends must call this.

        Args:
            ends: the ranks that send and receive.
            tag: the first of three consecutive tags that only this direction uses.
        """
        words = channels.open(ends, f"{name} words", tag, on_host=True)
        unagreed = channels.open(ends, f"{name} not agreed", tag + 1, on_host=True)
        return cls(name, words, unagreed, channels.open(ends, name, tag + 2), _AgreedSpecs())

    def packs(self, spec: PytreeSpec) -> bool:
        """Say whether a value's tensors are sent with the word."""
        return self.tensors.waits_on_host and spec.offsets[-1] <= PACKED_BYTES


@dataclass
class _Posted:
    """Holds a value whose receives have been posted in the spec that is agreed."""

    micro_batch: int
    agreed: PytreeSpec
    first: Tensor
    tensors: list[Tensor]
    transfers: list[P2PTransfer]
    on_end: OnEnd


class RemoteEnd:
    """Is one end of a boundary between two ranks.

    It holds all that is under way. What it sends must not change until it is sent.

    Args:
        number: counts the boundaries of the pipeline; each rank opens its own in this order.
        ends: the ranks along the pipeline's axis that hold the stage before it and the stage after it.
        types: container types in values that torch's pytree has not registered: the named tuples that this rank's
            model returns.
        describe: returns the value of a micro-batch where the source is simulated; it is called for nothing else.
    """

    is_local = False

    def __init__(
        self,
        channels: P2PChannels,
        number: int,
        ends: tuple[int, int],
        types: Iterable[type] = (),
        describe: Callable[[], Any] | None = None,
    ) -> None:
        name, tag = f"stage {number} to {number + 1}", 6 * number
        values = _Direction.open(channels, ends, f"{name} values", tag)
        gradients = _Direction.open(channels, ends[::-1], f"{name} gradients", tag + 3)
        self._is_source = channels.rank == ends[0]
        self._out, self._in = (values, gradients) if self._is_source else (gradients, values)
        self._types = tuple(types)
        self._is_simulated = self._in.words.moves_nothing
        self._simulated_gradients: deque[list[Tensor]] = deque()
        self._describe = self._simulated_gradients.popleft if self._is_source else describe
        if self._is_simulated and self._describe is None:
            raise ValueError(f"{name}: nothing arrives from a simulated rank; give `describe`")
        self._posted: deque[_Posted] = deque()
        self._arrived: dict[int, tuple[PytreeSpec, list[Tensor], OnEnd]] = {}
        self._sent: dict[int, list[P2PTransfer]] = {}

    def begin_step(self, keys: Sequence[Key]) -> None:
        """Prepare for the micro-batches of a step."""
        self._out.specs.begin_step(keys)
        self._in.specs.begin_step(keys)

    def send(self, micro_batch: int, value: Any) -> None:
        """Start to send a value, or the gradients of one.

        Raises:
            ConfigError: the value holds what no message can carry; nothing is sent.
        """
        spec, tensors = take_apart(value)
        out, agreed = self._out, self._out.specs.agreed(micro_batch)
        if self._is_simulated and self._is_source:
            # On meta: until they are received, no rank holds them.
            leaves = [tensor for tensor in tensors if tensor.requires_grad]
            self._simulated_gradients.append([torch.empty_like(leaf, device="meta") for leaf in leaves])
        is_agreed = spec == agreed
        spec = agreed if is_agreed else spec  # which knows its offsets
        text = "" if is_agreed else spec.to_json()
        # The other end has posted its receives for what is agreed, and a posted receive takes the next message of its
        # channel, whatever that has. So these receives are filled first, with any content.
        given = tensors if is_agreed else _allocate(agreed, _HOST)
        if out.packs(agreed):
            transfers = [out.words.send([_packed(agreed, given, len(text))], out.name)]
        else:
            transfers = [out.words.send([_packed(_NOTHING, (), len(text))], out.name)]
            transfers.append(out.tensors.send([_for_wire(tensor, out.tensors.device) for tensor in given], out.name))
        if not is_agreed:
            unagreed = [_bytes(text, self._is_simulated), _packed(spec, tensors)]
            transfers.append(out.unagreed.send(unagreed, f"{out.name} not agreed"))
        out.specs.note(micro_batch, spec)
        # [Note: How long a sent message is held]
        # A message holds its tensors until it is waited for. NCCL's can say that they have left. gloo's cannot, and to
        # wait at once would hold up this stage until the other one has taken the message. Values are waited for in
        # `take`: gradients that have come back show that what they were computed from had arrived. `finish` waits for
        # all others.
        for sent in self._sent.values():
            if sent[-1].is_done():
                sent[-1].wait()  # which frees the tensors
        self._sent[micro_batch] = transfers

    def post(self, micro_batch: int, on_end: OnEnd) -> None:
        """Post the receive of a value as far as it is agreed; `on_end` is called when it has been taken."""
        way, agreed = self._in, self._in.specs.agreed(micro_batch)
        is_packed = way.packs(agreed)
        first = torch.empty((agreed.offsets[-1] if is_packed else 0) + _WORD_BYTES, dtype=torch.uint8)
        transfers, tensors = [way.words.receive([first], way.name)], []
        if not is_packed:
            tensors = _allocate(agreed, way.tensors.device)
            transfers.append(way.tensors.receive(tensors, way.name))
        # `take` waits: see [Note: Receives are posted ahead]
        self._posted.append(_Posted(micro_batch, agreed, first, tensors, transfers, on_end))

    def take(self, micro_batch: int) -> Any:
        """Wait for a value; its tensors can be used on the current stream, and are leaves that require gradients where
        those sent did.

        Raises:
            CommError: it does not arrive.
            ConfigError: it has a container of a type that is not known here.
        """
        while micro_batch not in self._arrived:
            self._receive_next()
        spec, tensors, on_end = self._arrived.pop(micro_batch)
        on_end()
        for transfer in self._sent.pop(micro_batch, ()):
            transfer.wait()  # it has arrived: see [Note: How long a sent message is held]
        for tensor, part in zip(tensors, spec.tensors, strict=True):
            tensor.requires_grad_(part.requires_grad)
        return put_together(spec, tensors, self._types)

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for transfers in self._sent.values():
            for transfer in transfers:
                transfer.wait()
        self._sent.clear()

    def close(self) -> None:
        """End what is under way, where the connection to the other rank holds, so that it does not wait in vain."""
        with suppress(CommError):
            while self._posted and not self._in.words.comm_log.has_failed:
                self._receive_next()
            if not self._in.words.comm_log.has_failed:
                self.finish()
        for held in (self._posted, self._arrived, self._sent, self._simulated_gradients):
            held.clear()

    def _receive_next(self) -> None:
        """Wait for the value that was posted first."""
        posted, way = self._posted.popleft(), self._in
        for transfer in posted.transfers:
            transfer.wait()
        spec, num_bytes = self._read_word(posted)
        if num_bytes > 0:
            text = torch.empty(num_bytes, dtype=torch.uint8)
            way.unagreed.receive([text], f"{way.name} not agreed").wait()
            spec = spec or PytreeSpec.from_json(bytes(text.tolist()).decode())
            buffer = torch.empty(spec.offsets[-1], dtype=torch.uint8)
            way.unagreed.receive([buffer], f"{way.name} not agreed").wait()
            tensors = [tensor.to(way.tensors.device) for tensor in _unpacked(buffer, spec)]
        else:
            assert spec is not None, "a word of 0 says that a value is as agreed"
            tensors = posted.tensors or _unpacked(posted.first, spec)
        way.specs.note(posted.micro_batch, spec)
        self._arrived[posted.micro_batch] = spec, tensors, posted.on_end

    def _read_word(self, posted: _Posted) -> tuple[PytreeSpec | None, int]:
        """Return a value's spec, None where it must be received, and the bytes of its text; 0 where it is as agreed."""
        if not self._is_simulated:
            num_bytes = int(posted.first[-_WORD_BYTES:].view(torch.int64))
            return (None if num_bytes else posted.agreed), num_bytes
        assert self._describe is not None, "as checked at first"
        spec = take_apart(self._describe())[0]
        return spec, 0 if spec == posted.agreed else len(spec.to_json().encode())


class LocalEnd:
    """Is one end of a boundary between two stages of one rank: tensors are handed over, not copied.

    Args:
        outgoing: holds what this end sends, by micro-batch, until the other end takes it.
        incoming: holds what the other end sends.
    """

    is_local = True

    def __init__(self, outgoing: dict[int, Any], incoming: dict[int, Any]) -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Make the ends of the stage before and of the stage after."""
        values: dict[int, Any] = {}
        gradients: dict[int, Any] = {}
        return cls(values, gradients), cls(gradients, values)

    def begin_step(self, keys: Sequence[Key]) -> None:
        """Do nothing: there is nothing to agree on."""

    def send(self, micro_batch: int, value: Any) -> None:
        """Hand over a value, or the gradients of one.

        Raises:
            ConfigError: the value could not have been sent to another rank.
        """
        spec, tensors = take_apart(value)
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        self._outgoing[micro_batch] = put_together(spec, leaves, containers_in(value))

    def post(self, micro_batch: int, on_end: OnEnd) -> None:
        """Do nothing: a value is there when it is taken."""

    def take(self, micro_batch: int) -> Any:
        """Return the value that the other end has sent."""
        return self._incoming.pop(micro_batch)

    def finish(self) -> None:
        """Do nothing: nothing is under way."""

    def close(self) -> None:
        """Drop what was not taken."""
        self._outgoing.clear()
        self._incoming.clear()


BoundaryEnd = RemoteEnd | LocalEnd


def leaves_with_gradient(value: Any) -> list[Tensor]:
    """Return the tensors of a value whose gradients are sent back, in the same order on both ends.

    Args:
        value: the value as it was sent or received.
    """
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def open_boundaries(
    channels: P2PChannels,
    placement: StagePlacement,
    index: int,
    types: Iterable[type] = (),
    describe: Callable[[int], Any] | None = None,
) -> tuple[dict[int, BoundaryEnd], dict[int, BoundaryEnd]]:
    """Open the boundaries of one rank's stages, in the same order on all ranks.

    Args:
        placement: says which rank holds which stage.
        index: of this rank in the pipeline.
        types: container types that boundary values may have, beside those that torch's pytree knows.
        describe: returns an example of what a stage receives, where other ranks are simulated; else None.

    Returns:
        By stage, its end of the boundary to the stage before; and by stage, its end of that to the next stage.
    """
    inlets: dict[int, BoundaryEnd] = {}
    outlets: dict[int, BoundaryEnd] = {}
    for stage in range(placement.num_stages - 1):
        ends = placement.rank_of(stage), placement.rank_of(stage + 1)
        if ends == (index, index):
            outlets[stage], inlets[stage + 1] = LocalEnd.pair()
        elif index in ends:
            example = None if describe is None else partial(describe, stage + 1)
            end = RemoteEnd(channels, stage, ends, types, example)
            if ends[0] == index:
                outlets[stage] = end
            else:
                inlets[stage + 1] = end
    return inlets, outlets


def _resized(spec: PytreeSpec, before: Shapes, after: Shapes) -> PytreeSpec:
    """Return a spec in which the sizes differ that differ between two micro-batches, as where a sequence is longer."""
    if [*map(len, before)] != [*map(len, after)]:
        return _NOTHING
    sizes: dict[int, int] = {}
    for one, other in zip(chain(*before), chain(*after), strict=True):
        if sizes.setdefault(one, other) != other:
            return _NOTHING
    parts = (tensor._replace(shape=tuple(sizes.get(size, size) for size in tensor.shape)) for tensor in spec.tensors)
    return PytreeSpec(spec.tree, tuple(parts))


def _packed(spec: PytreeSpec, tensors: Sequence[Tensor], word: int | None = None) -> Tensor:
    """Copy tensors into one message, after them the word if there is one."""
    offsets = spec.offsets
    buffer = torch.empty(offsets[-1] + (0 if word is None else _WORD_BYTES), dtype=torch.uint8)
    for tensor, view in zip(tensors, _views(buffer, spec, offsets), strict=True):
        view.copy_(tensor.detach())
    if word is not None:
        buffer[-_WORD_BYTES:].view(torch.int64).fill_(word)
    return buffer


def _unpacked(buffer: Tensor, spec: PytreeSpec) -> list[Tensor]:
    """Return the tensors in a message. They share its memory, but not the count of changes in place (`data`)."""
    return [view.data for view in _views(buffer, spec, spec.offsets)]


def _views(buffer: Tensor, spec: PytreeSpec, offsets: Sequence[int]) -> list[Tensor]:
    places = zip(spec.tensors, offsets, strict=False)
    return [buffer[at : at + part.num_bytes].view(part.dtype).view(part.shape) for part, at in places]


def _allocate(spec: PytreeSpec, device: torch.device) -> list[Tensor]:
    """Return tensors of a spec, with any content."""
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in spec.tensors]


def _for_wire(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor as it can be sent: contiguous and on the device; without a copy where it is so already."""
    return tensor.detach().to(device).resolve_conj().resolve_neg().contiguous()


def _bytes(text: str, is_simulated: bool) -> Tensor:
    """Return the bytes of a text as a uint8 tensor [b]."""
    content = text.encode()
    if is_simulated:  # torch makes no fake tensor of what the host holds
        return torch.empty(len(content), dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
