"""Hand-over of memory: an engine's states are put aside while somebody else uses the device, and come back.

The storages stay, empty, and so do the tensors that view them: parameters, the optimizer's pieces, its states. So
nothing needs to be told that they were away, and training goes on bit for bit. What the states are called:

    params     the parameters that rest on this rank
    master     the optimizer's copies of them, where there are any
    grads      accumulated gradients; without any, their buffers are given up, and made again when needed
    optimizer  the optimizer's states

What rests on the device goes to host memory. Or it goes into a file, and with it what rests on the host: then both
memories are free. What rests in files stays there, and the buffers that it moves through are given up.

Not a tier: nothing streams, and nothing can be computed with what is away.

>>> import shardwise
>>> model = nn.Linear(2, 1, bias=False)
>>> engine = shardwise.initialize(model, {"run": {"device": "cpu"}}, loss_fn=lambda output, batch: output.sum())
>>> result = engine.train_step([torch.ones(1, 2)])
>>> engine.offload()
{'optimizer': 20, 'master': 0, 'grads': 32, 'params': 32}
>>> engine.train_step([torch.ones(1, 2)])
Traceback (most recent call last):
    ...
RuntimeError: optimizer, master, grads, params are offloaded; call engine.reload() first
>>> engine.reload()
>>> engine.train_step([torch.ones(1, 2)]).step
2
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

import torch
from torch import Tensor, nn

from shardwise.config import ConfigError
from shardwise.memory import Category, Ledger, trim_host_memory
from shardwise.pool import BufferPool
from shardwise.tiers.rests import DeviceRest, HostRest, Rest
from shardwise.tiers.tape import FileTape, HostTape, Tape
from shardwise.tiers.tiers import Tiers
from shardwise.wearing import ReleasedParameterError, released_type, wear
from shardwise.zero.driver import ZeroDriver
from shardwise.zero.group import ParamGroup
from shardwise.zero.params import ParamState
from shardwise.zero.step import ShardedOptimizer

STATES: Final = ("optimizer", "master", "grads", "params")

Target = Literal["host", "nvme"]


@dataclass(frozen=True)
class Aside:
    """Where states are put.

    Attributes:
        target: host memory or a file.
        path: of the folder for that; None for `tiers.nvme_path`.
        pin_memory: of the host, on CUDA: copies are several times as fast, and torch keeps it for the next time.
    """

    target: Target = "host"
    path: Path | None = None
    pin_memory: bool = True


class _Memory(Protocol):
    """What is freed and comes back, with or without its content."""

    @property
    def num_bytes(self) -> int:
        """Of it, free or not."""

    def bytes(self) -> Tensor:
        """All of it, 1-D uint8."""

    def free(self) -> None:
        """Give it to others."""

    def allocate(self) -> None:
        """Have it back, without its content."""


class _Storage:
    """A storage of the device; its views live on."""

    def __init__(self, tensor: Tensor, ledger: Ledger) -> None:
        storage = tensor.untyped_storage()
        self.num_bytes = storage.nbytes()
        self._view = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (self.num_bytes,), (1,))
        self._ledger = ledger

    def bytes(self) -> Tensor:
        return self._view

    def free(self) -> None:
        self._ledger.resize(self._view, 0)

    def allocate(self) -> None:
        self._ledger.resize(self._view, self.num_bytes)


class _OnHost:
    """What rests in host memory."""

    def __init__(self, rest: HostRest) -> None:
        self.num_bytes = rest.numel * rest.dtype.itemsize
        self._rest = rest

    def bytes(self) -> Tensor:
        return self._rest.tensor.view(torch.uint8)

    def free(self) -> None:
        self._rest.free()

    def allocate(self) -> None:
        self._rest.allocate()


class Handover:
    """States of one engine that are away, from `offload` to the end of `restore`.

    Args:
        driver: has the groups.
        sharded: has the optimizer's states.
        ledger: of the device; learns of every move.
        pool: of the device; its idle buffers are given up too.
        tiers: has the host's books and buffers.
        aside: where states are put.
    """

    def __init__(
        self,
        driver: ZeroDriver,
        sharded: ShardedOptimizer,
        ledger: Ledger,
        pool: BufferPool,
        tiers: Tiers,
        aside: Aside,
    ) -> None:
        self._driver = driver
        self._sharded = sharded
        self._ledger = ledger
        self._pool = pool
        self._tiers = tiers
        self._aside = aside
        self._tape: Tape = HostTape(0, pin_memory=False)
        self._freed: deque[_Memory] = deque()
        self._given_up: list[_Memory] = []  # without content
        self._states_before: dict[ParamGroup, ParamState] = {}
        self._kinds_before: list[tuple[nn.Parameter, type[nn.Parameter]]] = []
        self._names: tuple[str, ...] = ()

    def offload(self, include: Sequence[str]) -> dict[str, int]:
        """Put the named states aside and free their memory; after an error all are as they were.

        Returns:
            the bytes that each has freed: on the device, and with the target `nvme` on the host too.

        Raises:
            ConfigError: a name in `include` is none of STATES, there is no such target, or no folder for it.
            RuntimeError: inside `engine.gathered()`.
            SwapError: the folder has no room for them, or cannot be written.
            MemoryError: the host has none.
        """
        check_choices(include, self._aside)
        self._settle()
        self._names = tuple(name for name in STATES if name in include)
        found: dict[int, tuple[str, _Memory]] = {}
        for name in self._names:
            for tensor in self._on_device(name):
                found.setdefault(id(tensor.untyped_storage()), (name, _Storage(tensor, self._ledger)))
            for rest in self._on_host(name):
                found.setdefault(id(rest), (name, _OnHost(rest)))
        freed_bytes = dict.fromkeys(self._names, 0)
        try:
            self._put_aside([memory for _, memory in found.values()])
        except BaseException:  # such as too little host memory
            self.restore()
            raise
        for name, memory in found.values():
            freed_bytes[name] += memory.num_bytes
        if "grads" in self._names:
            freed_bytes["grads"] += self._drop_idle_gradients()
        if "params" in self._names:
            self._guard_parameters()
        self._trim()
        return freed_bytes

    def restore(self) -> None:
        """Bring back what is away; where the device lacks room it may be called again once there is some.

        Raises:
            SwapError: the file cannot be read.
        """
        while self._given_up:
            self._given_up[-1].allocate()
            self._given_up.pop()
        while self._freed:
            memory = self._freed[0]
            memory.allocate()
            self._tape.read(memory.bytes())
            self._freed.popleft()
        for group, state in self._states_before.items():
            group.params.state = state
        for parameter, kind in self._kinds_before:
            wear(parameter, kind)
        self._tape.close()
        self._tiers.trim()
        if self._ledger.device.type == "cuda":
            torch.cuda.synchronize(self._ledger.device)

    def refuse(self, params_suffice: bool = False) -> None:
        """Raise, unless only what an evaluation does not need is away and `params_suffice`.

        Raises:
            RuntimeError: naming what is away.
        """
        if self._names and not (params_suffice and "params" not in self._names):
            raise RuntimeError(f"{', '.join(self._names)} are offloaded; call engine.reload() first")

    def _settle(self) -> None:
        """End what is under way, and leave of the parameters only what rests."""
        self._driver.settle()
        self._driver.reshard_all()
        for group in self._driver.groups:
            group.finish_reduce()
            if not group.params.is_released_between_uses:
                group.wait()
            elif group.params.state is not ParamState.SHARDED:
                raise RuntimeError("states cannot be offloaded inside engine.gathered(); leave it first")
        self._tiers.settle()
        if self._ledger.device.type == "cuda":
            torch.cuda.synchronize(self._ledger.device)
        for group in self._driver.groups:
            group.params.shard.forget()

    def _put_aside(self, memories: Sequence[_Memory]) -> None:
        num_bytes = sum(memory.num_bytes for memory in memories)
        if self._aside.target == "host":
            self._tape = HostTape(num_bytes, self._aside.pin_memory and self._ledger.device.type == "cuda")
            for memory in memories:  # each is freed before the next takes room on the host
                self._tape.write(memory.bytes())
                self._freed.append(memory)
                memory.free()
            return
        if num_bytes:
            self._tape = FileTape(self._tiers.open_folder(self._aside.path), num_bytes, self._tiers.buffers)
            for memory in memories:
                self._tape.write(memory.bytes())
            self._tape.flush()  # a write that fails later would lose what is freed by then
        for memory in memories:
            self._freed.append(memory)
            memory.free()

    def _on_device(self, name: str) -> Iterator[Tensor]:
        """What a state has of the device's memory."""
        yield from (rest.tensor for rest in self._rests(name) if isinstance(rest, DeviceRest))
        for group in self._driver.groups:
            if name == "params":
                yield group.params.full
            elif name == "grads" and group.grads is not None and group.grads.is_holding:
                yield from group.grads.buffers()
        for state in self._sharded.optimizer.state.values() if name == "optimizer" else ():
            for value in state.values():
                if isinstance(value, Tensor) and value.device.type == self._ledger.device.type:
                    self._ledger.track(value, Category.OPTIMIZER)
                    yield value

    def _on_host(self, name: str) -> Iterator[HostRest]:
        """What goes from the host."""
        if self._aside.target == "nvme":
            yield from (rest for rest in self._rests(name) if isinstance(rest, HostRest))

    def _rests(self, name: str) -> Iterator[Rest]:
        for group in self._driver.groups:
            params, grads = group.params, group.grads
            if name == "params":
                yield params.shard
            elif name == "master" and params.master is not params.shard:
                yield params.master
            elif name == "grads" and grads is not None and grads.is_away and grads.is_holding:
                yield grads.rest
        if name == "optimizer":
            yield from self._sharded.streamed_states()

    def _drop_idle_gradients(self) -> int:
        """Give up memory that holds no gradients; returns its bytes."""
        idle = [each.grads for each in self._driver.groups if each.grads is not None and not each.grads.is_holding]
        rests = [grads.rest for grads in idle if grads.is_away and self._aside.target == "nvme"]
        on_host = [_OnHost(rest) for rest in rests if isinstance(rest, HostRest)]
        for memory in on_host:
            memory.free()
            self._given_up.append(memory)
        return sum(grads.drop() for grads in idle) + sum(memory.num_bytes for memory in on_host)

    def _guard_parameters(self) -> None:
        names: dict[int, str] = {}
        offloaded = released_type(_refuse_use(names))
        for group in self._driver.groups:
            self._states_before[group] = group.params.state
            group.params.state = ParamState.OFFLOADED
            for parameter, place in zip(group.params.parameters, group.spec.params, strict=True):
                names[id(parameter)] = place.name
                self._kinds_before.append((parameter, type(parameter)))
                wear(parameter, offloaded)

    def _trim(self) -> None:
        """Give what was freed back to the system."""
        self._pool.trim()
        self._tiers.trim()
        if self._ledger.device.type == "cuda":
            torch.cuda.synchronize(self._ledger.device)
            torch.cuda.empty_cache()
        trim_host_memory()


def check_choices(include: Sequence[str], aside: Aside) -> None:
    """Raise where states or a target are named that there are not.

    Raises:
        ConfigError: naming those that there are.
    """
    unknown = [name for name in include if name not in STATES]
    if unknown:
        raise ConfigError(f"include has no state {unknown[0]!r}; there are {', '.join(STATES)}")
    if aside.target not in ("host", "nvme"):
        raise ConfigError(f"to={aside.target!r} is no place for states; choose host or nvme")
    if aside.path is not None and aside.target == "host":
        raise ConfigError(f"path={str(aside.path)!r} is for files, and to='host' makes none; set to='nvme'")


def _refuse_use(names: Mapping[int, str]) -> Callable[[nn.Parameter], None]:
    def refuse(parameter: nn.Parameter) -> None:
        raise ReleasedParameterError(f"parameter {names[id(parameter)]} is offloaded; call engine.reload() first")

    return refuse
