"""Ranks as processes that each have the virtual device: `NcclComm` runs as it is, and its messages stay pending.

What a rank gives to a collective is read when its stream comes to it; gloo moves it between the processes; what the
rank gets is written once it is there. No host waits, as with NCCL.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from device.virtual.cuda_names import Device
from device.virtual.operators import Region, below_autograd, is_on_device
from device.virtual.streams import Gate

TIMEOUT_S = 60.0
Start = Callable[[Tensor, Tensor], Sequence[dist.Work | None]]


@dataclass(frozen=True)
class Message:
    """Used as `dist.P2POp`."""

    op: Callable[..., Any]
    tensor: Tensor
    group: Any = None
    group_peer: int = 0


class StreamWork:
    """Used as `dist.Work` of NCCL: to wait for it makes the current stream wait."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self, timeout: Any = None) -> bool:
        self._event.wait()
        return True

    def is_completed(self) -> bool:
        return self._event.query()


class Transport:
    """gloo's collectives of host memory, in the place of NCCL's of the device."""

    def __init__(self) -> None:
        self._plain = {name: getattr(dist, name) for name in (*COLLECTIVES, "isend", "irecv", "batch_isend_irecv")}
        self._plain_message = dist.P2POp
        self._waiters = ThreadPoolExecutor(64)  # gloo says of no message whether it is over
        self._messages: dict[int, torch.cuda.Stream] = {}  # of each process group
        self._aborted: set[dist.ProcessGroup] = set()

    def install(self) -> None:
        """Put these functions where `torch.distributed`'s are."""
        for name in COLLECTIVES:
            setattr(dist, name, self._of_device(name))
        dist.isend, dist.irecv, dist.batch_isend_irecv = self.isend, self.irecv, self.batch_isend_irecv
        dist.P2POp = Message
        plain_backend = dist.ProcessGroup._get_backend

        def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
            if torch.device(device).type != "cuda":
                return plain_backend(group, device)
            return SimpleNamespace(abort=partial(self._aborted.add, group))

        dist.ProcessGroup._get_backend = backend_of

    def _of_device(self, name: str) -> Callable[..., Any]:
        num_tensors, is_scatter = len(COLLECTIVES[name]), name.startswith("reduce_scatter")

        def call(*args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
            args = (*args, *(kwargs.pop(tensor) for tensor in COLLECTIVES[name][len(args) :]))
            tensors, others = args[:num_tensors], args[num_tensors:]
            if not is_on_device(tensors[0]):
                return self._plain[name](*args, group=group, async_op=async_op, **kwargs)

            def start(out: Tensor, source: Tensor) -> Sequence[dist.Work | None]:
                if is_scatter:  # of which gloo has none: the slice is cut where it is taken
                    return [self._plain["all_reduce"](source, group=group, async_op=True, **kwargs)]
                given = (source,) if num_tensors == 1 else (out, source)
                return [self._plain[name](*given, *others, group=group, async_op=True, **kwargs)]

            take = cut_slice(dist.get_rank(group)) if is_scatter else copy_out
            route = group or dist.group.WORLD, take if num_tensors == 2 else copy_source
            self._launch(name, tensors[0], tensors[-1], start, *route)
            return StreamWork(torch.cuda.current_stream().record_event()) if async_op else None

        return call

    def isend(self, tensor: Tensor, dst: Any = None, group: Any = None, tag: int = 0, group_dst: int = 0) -> Any:
        if not is_on_device(tensor):
            return self._plain["isend"](tensor, dst, group, tag, group_dst)
        return self.batch_isend_irecv([Message(self.isend, tensor, group, group_dst)])[0]

    def irecv(self, tensor: Tensor, src: Any = None, group: Any = None, tag: int = 0, group_src: int = 0) -> Any:
        if not is_on_device(tensor):
            return self._plain["irecv"](tensor, src, group, tag, group_src)
        return self.batch_isend_irecv([Message(self.irecv, tensor, group, group_src)])[0]

    def batch_isend_irecv(self, batch: Sequence[Message]) -> list[Any]:
        """Move messages on a stream of their communicator's own, as NCCL does."""
        if not is_on_device(batch[0].tensor):
            plain = {self.isend: self._plain["isend"], self.irecv: self._plain["irecv"]}
            moved = [
                self._plain_message(plain[each.op], each.tensor, None, each.group, 0, each.group_peer) for each in batch
            ]
            return self._plain["batch_isend_irecv"](moved)
        stream = self._messages.setdefault(id(batch[0].group), torch.cuda.Stream())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._launch_messages(batch)
            return [StreamWork(stream.record_event())]

    def _launch_messages(self, batch: Sequence[Message]) -> None:
        regions = [Region.of(Device.native, message.tensor) for message in batch]
        received: dict[int, Tensor] = {}
        to_itself: list[Tensor] = []

        def start() -> Sequence[dist.Work]:
            works = []
            for index, (message, region) in enumerate(zip(batch, regions, strict=True)):
                values = region.open().clone()
                if message.group_peer == dist.get_rank(message.group):  # NCCL copies, and gloo cannot
                    if message.op == self.isend:
                        to_itself.append(values)
                    else:
                        received[index] = to_itself.pop(0)
                elif message.op == self.isend:
                    works.append(self._plain["isend"](values, group=message.group, group_dst=message.group_peer))
                else:
                    received[index] = values
                    works.append(self._plain["irecv"](values, group=message.group, group_src=message.group_peer))
            return works

        def finish() -> None:
            for index, values in received.items():
                regions[index].open().copy_(values)

        self._run("messages", start, finish, batch[0].group or dist.group.WORLD)

    def _launch(
        self, name: str, out: Tensor, source: Tensor, start: Start, group: dist.ProcessGroup, take: Callable[..., None]
    ) -> None:
        into, out_of = Region.of(Device.native, out), Region.of(Device.native, source)
        moved: list[Tensor] = []

        def begin() -> Sequence[dist.Work | None]:
            moved.extend((torch.empty(into.shape, dtype=into.dtype), out_of.open().clone()))
            return start(*moved)

        self._run(name, begin, lambda: take(into.open(), *moved), group)

    def _run(
        self,
        name: str,
        start: Callable[[], Sequence[dist.Work | None]],
        finish: Callable[[], None],
        group: dist.ProcessGroup,
    ) -> None:
        """Enqueue what starts a transfer, a gate that opens when it is over, and what takes its values.

        What is aborted is over, with whatever is there.
        """
        pending: list[Future[Any]] = []
        is_started: list[bool] = []

        def is_aborted() -> bool:
            return group in self._aborted

        def begin() -> None:
            if is_aborted():
                return
            with below_autograd():
                works = [work for work in start() if work is not None]
            pending.extend(self._waiters.submit(work.wait, timedelta(seconds=TIMEOUT_S)) for work in works)
            is_started.append(True)

        def end() -> None:
            if is_aborted():
                return
            for future in pending:
                future.result()
            with below_autograd():
                finish()

        stream = Device.native.current_stream()
        Device.scheduler.launch(name, begin)
        is_over = Gate(lambda: is_aborted() or (bool(is_started) and all(each.done() for each in pending)))
        Device.scheduler.wait_at(is_over, stream)
        Device.scheduler.launch(f"{name} end", end)


# Names of tensors among each one's arguments; torch 2.13 gave some of them new names.
COLLECTIVES = {
    name: tensors
    for name, tensors in {
        "all_reduce": ("tensor",),
        "broadcast": ("tensor",),
        "all_gather_single": ("output_tensor", "input_tensor"),
        "all_gather_into_tensor": ("output_tensor", "input_tensor"),
        "reduce_scatter_single": ("output", "input"),
        "reduce_scatter_tensor": ("output", "input"),
        "all_to_all_single": ("output", "input"),
    }.items()
    if hasattr(dist, name)
}


def copy_out(target: Tensor, out: Tensor, source: Tensor) -> None:
    target.copy_(out)


def copy_source(target: Tensor, out: Tensor, source: Tensor) -> None:
    target.copy_(source)


def cut_slice(rank: int) -> Callable[[Tensor, Tensor, Tensor], None]:
    def take(target: Tensor, out: Tensor, source: Tensor) -> None:
        numel = target.numel()
        target.view(-1).copy_(source.view(-1)[rank * numel : (rank + 1) * numel])

    return take


def join() -> None:
    """Meet the other ranks that the environment names, over gloo alone."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    Transport().install()
    Device.scheduler.go_on_by_itself()


def stand_for_nccl() -> None:
    """Let process groups of NCCL be of gloo, with functions that move what is on the virtual device."""
    Transport().install()
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # which registers it
    plain_init, plain_new = dist.init_process_group, dist.new_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        # C++ of torch's calls some by itself, and gloo would read device addresses. Those of one rank change nothing.
        is_alone = int(kwargs.get("world_size", os.environ.get("WORLD_SIZE", "1"))) == 1
        backend = (backend or "cpu:gloo,cuda:nccl").replace("nccl", "fake" if is_alone else "gloo")
        plain_init(backend, *args, **kwargs)
        if dist.get_world_size() > 1:
            Device.scheduler.go_on_by_itself()

    def new_group(ranks: Any = None, timeout: Any = None, backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return plain_new(ranks, timeout, backend and backend.replace("nccl", "gloo"), *args, **kwargs)

    plain_wrap = DistributedDataParallel.__init__

    def wrap(module: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        plain_wrap(module, *args, **kwargs)
        if dist.get_world_size(module.process_group) == 1:
            module.register_comm_hook(None, lambda state, bucket: sum_alone(bucket))

    DistributedDataParallel.__init__ = wrap
    dist.init_process_group, dist.new_group = init_process_group, new_group
    dist.get_backend_config = lambda group=None: "cpu:gloo,cuda:nccl"
    dist.is_nccl_available = lambda: True


def sum_alone(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket of DDP's among one rank: the stand-in for NCCL has no result to give it."""
    summed: torch.futures.Future[Tensor] = torch.futures.Future(devices=[bucket.buffer().device])
    summed.set_result(bucket.buffer())
    return summed


def start_ranks(num_ranks: int, module: str, arguments: Sequence[str] = ()) -> list[subprocess.Popen[str]]:
    """Start a module with these arguments on each rank."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"}
    command = [sys.executable, "-m", module, *arguments]
    return [
        subprocess.Popen(command, env=os.environ | place | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(num_ranks)
    ]
