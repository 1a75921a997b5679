"""Faults of streams that a GPU would show now and then, each planted in the library: an order must show every one.

The numbers of the eager order without the fault are those that the other orders with it are held against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from shardwise.comm.backends import NcclComm
from shardwise.comm.collectives import AsyncWork
from shardwise.offload import activations, storage
from shardwise.runtime import buffer_pool, memory_tracker, torch_private
from shardwise.runtime.device import Event

Plant = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fault:
    """What is done wrong, and the case of `orders` that it is done in."""

    name: str
    case: str
    plant: Plant


def unwaited(method: str, *others: Plant) -> Plant:
    """A collective is not waited for."""
    plain = getattr(NcclComm, method)

    def start(self: NcclComm, *args: Any, **kwargs: Any) -> AsyncWork:
        plain(self, *args, **kwargs)
        return AsyncWork()

    return lambda: together(mock.patch.object(NcclComm, method, start), *(plant() for plant in others))


@contextmanager
def together(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def pool_without_events() -> AbstractContextManager[Any]:
    """A buffer is handed out again while its last user runs."""
    return mock.patch.object(buffer_pool, "_record", return_value=None)


def side_streams_begin_at_once() -> AbstractContextManager[Any]:
    return mock.patch.object(torch.cuda.Stream, "wait_stream")


def events_are_early() -> AbstractContextManager[Any]:
    """An event marks where its stream was at the event before."""
    last: dict[int, Any] = {}
    plain = torch.cuda.Event.record

    def record(self: Any, stream: Any = None) -> None:
        plain(self, stream)
        number = torch.cuda.current_stream().stream_id if stream is None else stream.stream_id
        self.mark, last[number] = last.get(number, self.mark), self.mark

    return mock.patch.object(torch.cuda.Event, "record", record)


def unsharded_memory_of_a_side_stream() -> AbstractContextManager[Any]:
    """Its next owner may write there while the compute stream still reads."""
    side = torch.cuda.Stream()

    def set_storage(memory: torch.UntypedStorage, num_bytes: int) -> None:
        with torch.cuda.stream(side):
            torch_private.set_unsharded_storage(memory, num_bytes)

    return mock.patch.object(memory_tracker, "set_unsharded_storage", set_storage)


def host_reads_at_once() -> AbstractContextManager[Any]:
    return mock.patch.object(Event, "wait_on_host")


def gathers_on_another_stream() -> AbstractContextManager[Any]:
    """A gather runs on a stream that waits for nothing, and the event is recorded on the one that it was meant for."""
    plain, wrong = NcclComm.all_gather, torch.cuda.Stream()

    def all_gather(self: NcclComm, *args: Any, **kwargs: Any) -> AsyncWork:
        c10d = self._c10d

        def move(full: torch.Tensor, own: torch.Tensor, group: Any = None) -> None:
            with torch.cuda.stream(wrong):
                type(c10d).all_gather_into_tensor(c10d, full, own, group=group)

        with mock.patch.object(c10d, "all_gather_into_tensor", move):
            return plain(self, *args, **kwargs)

    return mock.patch.object(NcclComm, "all_gather", all_gather)


class DeafEvent(Event):
    """Is waited for by no stream and no host."""

    def wait(self) -> None:
        pass

    def wait_on_host(self) -> None:
        pass


def deaf(module: Any) -> Plant:
    return lambda: mock.patch.object(module, "Event", DeafEvent)


FAULTS = (
    Fault("a gather is not waited for", "stage 3, recompute none", unwaited("all_gather")),
    Fault("a reduction is not waited for", "stage 2", unwaited("reduce_scatter", pool_without_events)),
    Fault("a side stream does not wait for what it reads", "stage 3, recompute none", side_streams_begin_at_once),
    Fault("the worker reads gradients before they have come", "optimizer on the host", deaf(storage)),
    Fault("an event is recorded too early", "stage 3, recompute full", events_are_early),
    Fault("memory is of the wrong stream", "stage 3, recompute none", unsharded_memory_of_a_side_stream),
    Fault("the host reads before the copy", "stage 2", host_reads_at_once),
    Fault("a collective is on the wrong stream", "stage 3, recompute none", gathers_on_another_stream),
    Fault("a reload of inputs is not waited for", "activations on the host", deaf(activations)),
    Fault("a copy from the host is not waited for", "everything on the host", deaf(storage)),
    Fault("a message is not waited for", "Muon", unwaited("exchange")),
    Fault("a sum in parts is not waited for", "tp, chunks that overlap", unwaited("start_sum")),
)
