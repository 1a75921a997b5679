"""Hand-over of device memory: an engine's states rest in host memory while somebody else uses the device.

The storages stay, empty, and so do the tensors that view them: parameters, the optimizer's pieces, its states. So
nothing needs to be told that they were away, and training goes on bit for bit. What the states are called:

    params     the parameters that rest on this rank
    master     the optimizer's copies of them, where there are any
    grads      accumulated gradients; without any, their buffers are given up, and made again when needed
    optimizer  the optimizer's states

Not a tier: nothing streams, and nothing can be computed with what is away.

>>> import shardwise
>>> model = nn.Linear(2, 1, bias=False)
>>> engine = shardwise.initialize(model, {"run": {"device": "cpu"}}, loss_fn=lambda output, batch: output.sum())
>>> result = engine.train_step([torch.ones(1, 2)])
>>> engine.offload_states()
{'optimizer': 20, 'master': 0, 'grads': 32, 'params': 32}
>>> engine.train_step([torch.ones(1, 2)])
Traceback (most recent call last):
    ...
RuntimeError: optimizer, master, grads, params are offloaded; call engine.reload_states() first
>>> engine.reload_states()
>>> engine.train_step([torch.ones(1, 2)]).step
2
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from shardwise.config import ConfigError
from shardwise.memory import Category, Ledger
from shardwise.pool import BufferPool
from shardwise.wearing import ReleasedParameterError, released_type, wear
from shardwise.zero.driver import ZeroDriver
from shardwise.zero.group import ParamGroup
from shardwise.zero.params import ParamState
from shardwise.zero.step import ShardedOptimizer

STATES: Final = ("optimizer", "master", "grads", "params")
# torch rounds pinned memory up to a power of two, so large states are cut.
CHUNK_BYTES: Final = 64 * 2**20


class Handover:
    """States of one engine that are away, from `offload` to the end of `restore`.

    Args:
        driver: has the groups.
        sharded: has the optimizer's states.
        ledger: of the device; learns of every move.
        pool: its idle buffers are given up too.
        pin_memory: on CUDA, copy through page-locked memory, several times as fast; torch keeps it for the next time.
    """

    def __init__(
        self, driver: ZeroDriver, sharded: ShardedOptimizer, ledger: Ledger, pool: BufferPool, pin_memory: bool
    ) -> None:
        self._driver = driver
        self._sharded = sharded
        self._ledger = ledger
        self._pool = pool
        self._pin_memory = pin_memory and ledger.device.type == "cuda"
        self._tape = HostTape(0, self._pin_memory)
        self._moved: deque[Tensor] = deque()
        self._states_before: dict[ParamGroup, ParamState] = {}
        self._kinds_before: list[tuple[nn.Parameter, type[nn.Parameter]]] = []
        self._names: tuple[str, ...] = ()

    def offload(self, include: Sequence[str]) -> dict[str, int]:
        """Move the named states to host memory and free their device memory.

        Returns:
            the bytes that each has freed on the device.

        Raises:
            ConfigError: a name in `include` is none of STATES.
            RuntimeError: inside `engine.gathered()`.
        """
        unknown = [name for name in include if name not in STATES]
        if unknown:
            raise ConfigError(f"include has no state {unknown[0]!r}; there are {', '.join(STATES)}")
        self._settle()
        self._names = tuple(name for name in STATES if name in include)
        views: dict[int, tuple[str, Tensor]] = {}
        for name in self._names:
            for tensor in self._tensors(name):
                views.setdefault(id(tensor.untyped_storage()), (name, _bytes_of(tensor)))
        self._tape = HostTape(sum(view.numel() for _, view in views.values()), self._pin_memory)
        freed_bytes = dict.fromkeys(self._names, 0)
        try:
            for name, view in views.values():
                self._move(view)
                freed_bytes[name] += view.numel()
        except BaseException:  # such as too little host memory
            self.restore()
            raise
        if "grads" in self._names:
            freed_bytes["grads"] += self._drop_idle_gradients()
        if "params" in self._names:
            self._guard_parameters()
        self._pool.trim()
        if self._ledger.device.type == "cuda":
            torch.cuda.synchronize(self._ledger.device)
            torch.cuda.empty_cache()
        return freed_bytes

    def restore(self) -> None:
        """Bring back what is away; where the device lacks room it may be called again once there is some."""
        while self._moved:
            view = self._moved[0]
            self._ledger.resize(view, view.numel())
            self._tape.read(view)
            self._moved.popleft()
        for group, state in self._states_before.items():
            group.params.state = state
        for parameter, kind in self._kinds_before:
            wear(parameter, kind)
        if self._ledger.device.type == "cuda":
            torch.cuda.synchronize(self._ledger.device)

    def refuse(self, params_suffice: bool = False) -> None:
        """Raise, unless only what an evaluation does not need is away and `params_suffice`.

        Raises:
            RuntimeError: naming what is away.
        """
        if self._names and not (params_suffice and "params" not in self._names):
            raise RuntimeError(f"{', '.join(self._names)} are offloaded; call engine.reload_states() first")

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

    def _tensors(self, name: str) -> Iterator[Tensor]:
        for group in self._driver.groups:
            params, tiers = group.params, group.spec.tiers
            master, shard = params.master.tensor, params.shard.tensor
            if name == "params":
                yield params.full
                if tiers.params == "device" and shard is not None:
                    yield shard
            elif name == "master" and master is not None and params.master is not params.shard:
                if tiers.optimizer == "device":
                    yield master
            elif name == "grads" and group.grads is not None and group.grads.is_holding:
                yield from group.grads.buffers()
        if name == "optimizer":
            for state in self._sharded.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor) and value.device.type == self._ledger.device.type:
                        self._ledger.track(value, Category.OPTIMIZER)
                        yield value

    def _move(self, view: Tensor) -> None:
        self._tape.write(view)
        self._moved.append(view)
        self._ledger.resize(view, 0)

    def _drop_idle_gradients(self) -> int:
        grads = [group.grads for group in self._driver.groups if group.grads is not None]
        return sum(each.drop() for each in grads if not each.is_holding)

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


class HostTape:
    """Bytes in host memory, read back in the order in which they were written; what has been read is freed.

    Args:
        num_bytes: that will be written.
        pin_memory: page-locked, so that copies from and to CUDA need not be waited for.
    """

    def __init__(self, num_bytes: int, pin_memory: bool) -> None:
        self._num_bytes_left = num_bytes
        self._pin_memory = pin_memory
        self._chunks: deque[Tensor] = deque()
        self._num_written = 0  # of the last chunk
        self._num_read = 0  # of the first

    def write(self, source: Tensor) -> None:
        """Append the bytes of `source`, 1-D uint8, on the device's current stream."""
        while source.numel() > 0:
            if not self._chunks or self._num_written == self._chunks[-1].numel():
                num_bytes = min(CHUNK_BYTES, self._num_bytes_left)
                self._chunks.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin_memory))
                self._num_bytes_left -= num_bytes
                self._num_written = 0
            free = self._chunks[-1][self._num_written :]
            part, source = source[: free.numel()], source[free.numel() :]
            free[: part.numel()].copy_(part, non_blocking=self._pin_memory)
            self._num_written += part.numel()

    def read(self, target: Tensor) -> None:
        """Fill `target`, as long as what was written next, 1-D uint8, on the device's current stream."""
        while target.numel() > 0:
            unread = self._chunks[0][self._num_read :]
            part, target = target[: unread.numel()], target[unread.numel() :]
            part.copy_(unread[: part.numel()], non_blocking=self._pin_memory)
            self._num_read += part.numel()
            if self._num_read == self._chunks[0].numel():
                self._chunks.popleft()
                self._num_read = 0


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as 1-D uint8."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _refuse_use(names: Mapping[int, str]) -> Callable[[nn.Parameter], None]:
    def refuse(parameter: nn.Parameter) -> None:
        raise ReleasedParameterError(
            f"parameter {names[id(parameter)]} is offloaded; call engine.reload_states() first"
        )

    return refuse
