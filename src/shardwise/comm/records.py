"""Records the collectives of one engine: how many and how large, the latest, and the one this rank is in.

`shardwise.comm.collectives` writes it, and the watchdog's thread reads it at the same time: so a value that changes is
replaced whole.

>>> comm_log = CommLog(rank=1)
>>> group = comm_log.open_group("dp_shard", (0, 1))
>>> call = comm_log.add("all_gather", "blocks.7", group, torch.zeros(8, dtype=torch.bfloat16), passes=1)
>>> print(call)
all_gather #1 of blocks.7 over dp_shard (2 ranks)
>>> print(call.note())
all_gather #1 of blocks.7 (8 x bf16 over dp_shard)
>>> call.wire_bytes, call.position
(8, 1)
"""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from shardwise.config.errors import CodedError
from shardwise.layout.precision import dtype_key
from shardwise.runtime.device import Event, kind_of

# Enough for the collectives of one step, which the host may have enqueued ahead of the device.
_MAX_ENQUEUED = 4096

# The ops of the two ends of a message, and the op that stands for both.
SEND: Final = "send"
RECEIVE: Final = "receive"
MESSAGE: Final = "message"

# The op in which each rank sends the others as much as it needs.
EXCHANGE: Final = "exchange"


class HangsUp(Protocol):
    """Is a communicator, as far as the log of its collectives needs it."""

    def hang_up(self) -> None:
        """End what waits for other ranks."""


class CommError(CodedError, RuntimeError):
    """Says that a collective failed, or ranks began different ones: which rank was in which one, and why."""


class MissingRankError(CommError):
    """Says that a rank did not come to compare its collective."""


@dataclass(frozen=True)
class RankGroup:
    """Names the ranks of the world among which collectives run in one order; `index` counts the groups of an engine.

    A pipe, from the first of two ranks to the second, has a name instead: not all ranks have as many.
    """

    index: int
    axis: str
    ranks: tuple[int, ...]
    pipe: str = ""

    @cached_property
    def key(self) -> str:
        """Return a name that its members share and no other group of the engine has."""
        return f"{self.pipe or self.index}.{self.ranks[0]}"


@dataclass(frozen=True)
class CollectiveNote:
    """Describes a collective for other ranks in plain values.

    Attributes:
        number: counts up over all collectives of one engine on one rank.
        group: key of the group of ranks.
        position: counts up over the collectives of that group; all its ranks are at the same position.
        numel: elements of the buffer; of an exchange, the bytes that this rank sends.
        dtype: of the elements on the wire.
    """

    number: int
    op: str
    name: str
    axis: str
    group: str
    position: int
    numel: int
    dtype: str

    @property
    def signature(self) -> tuple[str, str, int, str]:
        """Return what must be the same on all ranks of the group at one position."""
        op = MESSAGE if self.op in (SEND, RECEIVE) else self.op
        return op, self.name, 0 if op == EXCHANGE else self.numel, self.dtype

    @property
    def title(self) -> str:
        """Return op, number and name."""
        return f"{self.op} #{self.number} of {self.name}"

    def __str__(self) -> str:
        amount = f"{self.numel} bytes sent" if self.op == EXCHANGE else f"{self.numel} x {self.dtype}"
        return f"{self.title} ({amount} over {self.axis})"


class Collective(NamedTuple):
    """Records one collective of this rank; fields as in `CollectiveNote`."""

    number: int
    op: str
    name: str
    group: RankGroup
    position: int
    numel: int
    dtype: torch.dtype
    wire_bytes: int

    @property
    def axis(self) -> str:
        """Return the group's axis of the mesh."""
        return self.group.axis

    @property
    def num_ranks(self) -> int:
        """Return how many ranks take part."""
        return len(self.group.ranks)

    def note(self) -> CollectiveNote:
        """Describe the collective for other ranks."""
        of_group = self.axis, self.group.key, self.position
        return CollectiveNote(self.number, self.op, self.name, *of_group, self.numel, dtype_key(self.dtype))

    def __str__(self) -> str:
        return f"{self.op} #{self.number} of {self.name} over {self.axis} ({self.num_ranks} ranks)"


@dataclass(frozen=True)
class CollectiveCount:
    """Counts calls and bytes of one op on one axis."""

    num_calls: int = 0
    wire_bytes: int = 0


class CollectiveEvent(NamedTuple):
    """Records when this rank entered or left a collective, in seconds of `time.monotonic`, and on which thread."""

    call: Collective
    at_s: float
    thread: int


@dataclass(eq=False)
class CommLog:
    """Records the collectives of one engine, over all its groups of ranks.

    Attributes:
        rank: of this process in the world.
        num_calls: of all calls; the next one's number is one more.
        positions: how many of them each group has begun, by key.
        num_groups: that have been opened, pipes apart.
        inside: the collective that the host is in, starting it or waiting.
        left: the latest collective that the host has left.
        enqueued: collectives on the device, each with the event after it; oldest first, kept if there is a watchdog.
        check: compares a call with those of its group before it starts.
        explain: says why a call does not end, where the ranks can be asked.
        waited_s: seconds that the host has been in collectives.
        has_failed: a collective has failed, and the connections between the ranks with it.
    """

    rank: int = 0
    counts: dict[tuple[str, str], CollectiveCount] = field(default_factory=dict)
    recent: deque[Collective] = field(default_factory=lambda: deque(maxlen=32))
    num_calls: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    num_groups: int = 0
    inside: CollectiveEvent | None = None
    left: CollectiveEvent | None = None
    enqueued: deque[tuple[Collective, Event]] = field(default_factory=lambda: deque(maxlen=_MAX_ENQUEUED))
    check: Callable[[Collective], None] | None = None
    explain: Callable[[Collective], str | None] | None = None
    waited_s: float = 0.0
    has_failed: bool = False
    comms: weakref.WeakSet[HangsUp] = field(default_factory=weakref.WeakSet)

    @property
    def is_watched(self) -> bool:
        """Say whether a watchdog looks for collectives that do not end."""
        return self.explain is not None

    def open_group(self, axis: str, ranks: tuple[int, ...]) -> RankGroup:
        """Record a group of ranks; all of them open their groups in the same order."""
        group = RankGroup(self.num_groups, axis, ranks)
        self.num_groups += 1
        self.positions[group.key] = 0
        return group

    def open_pipe(self, axis: str, ranks: tuple[int, int], name: str) -> RankGroup:
        """Record a pipe from one rank to another.

        Args:
            ranks: of the world: source and destination.
            name: the same at both ends; no other pipe of this rank has it.
        """
        group = RankGroup(-1, axis, ranks, name)
        if group.key in self.positions:
            raise ValueError(f"rank {self.rank} has a pipe {name!r} already; give each its own name")
        self.positions[group.key] = 0
        return group

    def add_message(self, op: str, name: str, pipe: RankGroup, buffer: Tensor) -> Collective:
        """Record one end of a message: its bytes count where it is sent, and not where it is received."""
        return self.add(op, name, pipe, buffer, passes=2 if op == SEND else 0)  # of which (n - 1)/n is the buffer

    def add(self, op: str, name: str, group: RankGroup, buffer: Tensor, passes: int) -> Collective:
        """Record a collective that sends `passes` times (n - 1)/n of the buffer from each rank, as a ring does.

        Args:
            passes: 1 for a gather or a reduce-scatter, 2 for an all-reduce.
        """
        num_ranks = len(group.ranks)
        wire_bytes = passes * buffer.numel() * buffer.element_size() * (num_ranks - 1) // num_ranks
        return self._add(op, name, group, buffer.numel(), buffer.dtype, wire_bytes)

    def add_rows(self, op: str, name: str, group: RankGroup, rows: Tensor) -> Collective:
        """Record a collective of p ranks of a group, this one included, that sends the others `rows` [p, b]."""
        wire_bytes = (rows.shape[0] - 1) * rows.shape[1] * rows.element_size()
        return self._add(op, name, group, rows.numel(), rows.dtype, wire_bytes)

    def add_exchange(self, name: str, group: RankGroup, num_bytes: int) -> Collective:
        """Record an exchange; other ranks may send more or less than this one."""
        return self._add(EXCHANGE, name, group, num_bytes, torch.uint8, num_bytes)

    def _add(self, op: str, name: str, group: RankGroup, numel: int, dtype: torch.dtype, wire_bytes: int) -> Collective:
        self.num_calls += 1
        self.positions[group.key] += 1
        position = self.positions[group.key]
        call = Collective(self.num_calls, op, name, group, position, numel, dtype, wire_bytes)
        self.recent.append(call)
        count = self.counts.get((group.axis, op), CollectiveCount())
        self.counts[group.axis, op] = CollectiveCount(count.num_calls + 1, count.wire_bytes + wire_bytes)
        return call

    def enqueue(self, call: Collective, done: Event) -> None:
        """Record that `call` is on the device and ends at `done`."""
        if self.is_watched:
            self.enqueued.append((call, done))

    def begin(self, call: Collective) -> None:
        """Record that the host starts `call`, or begins to wait for it."""
        # One object in one assignment: the watchdog's thread reads it without a lock.
        self.inside = CollectiveEvent(call, time.monotonic(), threading.get_ident())

    def end(self) -> None:
        """Record that the host goes on."""
        inside, self.inside = self.inside, None
        if inside is not None:
            self.left = CollectiveEvent(inside.call, time.monotonic(), inside.thread)
            self.waited_s += self.left.at_s - inside.at_s

    @contextmanager
    def running(self, call: Collective) -> Iterator[None]:
        """Record that the host is in `call` while the body runs.

        Raises:
            CommError: the body failed; the message says in which call, and why as far as the ranks know.
        """
        self.begin(call)
        try:
            yield
        except (torch.OutOfMemoryError, CommError):
            raise
        except RuntimeError as error:
            self.has_failed = True
            raise CommError(
                "collective-failed", f"rank {self.rank} failed in {call}: {self.cause(call)} ({_reason(error)})"
            ) from error
        finally:
            self.end()

    def start_read(self, values: Tensor, device: torch.device, call: Collective | None) -> Callable[[], list[Any]]:
        """Start to copy numbers, of `call` if of any, from a device to the host; return what waits for them."""
        on_host, copied = values, None
        row = kind_of(device)
        if row.is_in_stream_order:
            on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=row.pins)
            on_host.copy_(values, non_blocking=True)
            copied = Event.record(device)

        def read() -> list[Any]:
            if copied is not None:
                with nullcontext() if call is None else self.running(call):  # here the host waits
                    copied.wait_on_host()
                    if self.has_failed:  # see [Note: A failure elsewhere ends what the device waits for]
                        raise RuntimeError("the communicator was aborted")
            return on_host.tolist()

        return read

    def hang_up(self) -> None:
        """End all that the host and the device wait for; no result is to be used."""
        self.has_failed = True
        for comm in list(self.comms):
            comm.hang_up()

    def cause(self, call: Collective) -> str:
        """Say why other ranks do not take part."""
        cause = self.explain(call) if self.explain is not None else None
        return cause or "another rank died, hangs or runs other code: see its log"


def _reason(error: Exception) -> str:
    """Return what went wrong, without gloo's source line and advice."""
    line = (str(error).splitlines() or ["no reason given"])[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).partition(". ")[0]
