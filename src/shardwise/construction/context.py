"""Build a model so that each rank keeps a slice of it, or draws its values later.

torch says when a module registers a parameter or a child. From this `init` knows which module is being constructed.
Without a seed the constructors run as ever, and rank 0's values are everybody's: so they are those of plain
construction, whatever computes them. The parameters of one module at a time are whole. Once another module registers
or uses a parameter, they become slices. A later use gathers them again, such as that of `self.apply(...)` at the end
of a constructor. One collective for each parameter is the price, so all ranks run the same code.

With a seed nothing is drawn and no rank talks: a parameter moves to meta when it is registered, and `initialize`
draws what a rank holds by the modules' `reset_parameters` and `_init_weights` (`shardwise.runtime.keyed_rng`). What
other code has written cannot be repeated so, and is refused.

torch has no hook at the end of a constructor. To wrap the `__init__` of every class, as DeepSpeed does, would change
classes of others for the same moments, and needs a gather around `Module.apply` as well.

>>> with init(seed=7):
...     model = torch.nn.Linear(2, 3)
>>> model.weight.is_meta, model.weight.shape
(True, torch.Size([3, 2]))
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from shardwise.comm.backends import comm_over
from shardwise.comm.collectives import Comm
from shardwise.config.resolve import RunConfig
from shardwise.construction.shards import (
    USE_INSIDE_INIT,
    KeyedValues,
    ShardedParameter,
    defer,
    num_writes,
    shard,
    unshard,
    values_of,
)
from shardwise.launch.process_group import join_launched
from shardwise.runtime.module_hooks import watch_registrations
from shardwise.runtime.torch_private import has_views


@contextmanager
def init(seed: int | None = None, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Build models, or load them by `from_pretrained`, without holding them: `initialize` takes them over.

    Initialise inside as well: afterwards a parameter can be used in `shardwise.gathered` alone. Inside another
    `init()` it does nothing. Modules that other threads build are left alone.

    Args:
        seed: None draws as plain construction would: the values are bit for bit those that torch's generator gives on
            rank 0 now, and the generator ends where it would. All ranks build the same model, and each keeps a slice
            of each parameter; one process alone keeps all. With a seed nothing is drawn yet: values are keyed by it
            and by the names of modules, a rank draws those that it holds a part of, and torch's generator keeps its
            state.
        group: the ranks that share the parameters; None for all. Where a launcher has started this process, and it has
            joined no process group yet, it joins one.
    """
    if USE_INSIDE_INIT.get() is not None:
        yield
        return
    if seed is not None:
        with torch.random.fork_rng(devices=[]), _Deferral(seed).watching():
            yield
        return
    timeout_s = RunConfig().timeout_s
    if join_launched("cuda" if torch.cuda.is_available() else "cpu", timeout_s) == 1:
        yield
        return
    with _Sharding(comm_over(group, timeout_s)).watching():
        yield


class _Sharding:
    """Shards each parameter after its module's constructor; the parameters of one module at a time are whole.

    Args:
        comm: the ranks that share the parameters.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._thread = threading.get_ident()
        self._module: nn.Module | None = None
        self._whole: list[nn.Parameter] = []  # to be sharded when another module comes
        self._viewed: list[nn.Parameter] = []  # to be sharded at the end

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Shard what is registered inside the context."""
        token = USE_INSIDE_INIT.set(self.use)
        try:
            with watch_registrations(self.on_parameter, self.on_module):
                yield
            self._shard_all()
            for parameter in filter(_has_values, self._viewed):
                shard(parameter, self._comm, takes_first=True)
        finally:
            USE_INSIDE_INIT.reset(token)

    def on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Shard the parameters of the module before, and keep this one whole while its own is constructed.

        A parametrization takes parameters over from its module, which goes on.
        """
        if threading.get_ident() != self._thread or not _has_values(parameter):
            return
        if module is not self._module and not isinstance(module, ParametrizationList):
            self._shard_all()
            self._module = module
        self._add(parameter)

    def on_module(self, child: nn.Module) -> None:
        """Shard parameters that were never registered, as in a deep copy."""
        if threading.get_ident() != self._thread:
            return
        for parameter in filter(_has_values, child.parameters()):
            if all(parameter is not each for each in (*self._whole, *self._viewed)):
                shard(parameter, self._comm, takes_first=True)

    def use(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make parameters whole that an operation needs, and shard all others."""
        self._shard_all()
        self._module = None
        for parameter in parameters:
            if isinstance(parameter, ShardedParameter):  # not if it comes twice
                unshard(parameter)
                self._add(parameter)

    def _add(self, parameter: nn.Parameter) -> None:
        if all(parameter is not each for each in self._whole):
            self._whole.append(parameter)

    def _shard_all(self) -> None:
        whole, self._whole = self._whole, []
        for parameter in filter(_has_values, whole):
            if self._is_viewed(parameter):
                self._viewed.append(parameter)
            else:
                shard(parameter, self._comm, takes_first=True)

    def _is_viewed(self, parameter: nn.Parameter) -> bool:
        """Say whether rank 0 holds a view of a parameter, such as `p.data` in `p.data.copy_(...)`, to write it."""
        found = torch.tensor([has_views(parameter)], dtype=torch.uint8, device=self._comm.device)
        self._comm.broadcast(found, "whether a parameter has views")
        return bool(found)


class _Deferral:
    """Moves each parameter to meta when it is registered, and notes how often constructors write it.

    Args:
        seed: of the values.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._thread = threading.get_ident()
        self._deferred: list[nn.Parameter] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Defer what is registered inside the context."""
        token = USE_INSIDE_INIT.set(lambda parameters: None)
        try:
            with watch_registrations(self.on_parameter, self.on_module):
                yield
        finally:
            USE_INSIDE_INIT.reset(token)
            for parameter in self._deferred:
                values = values_of(parameter)
                if isinstance(values, KeyedValues):
                    values.num_inside = num_writes(parameter)
            self._deferred.clear()

    def on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Defer a parameter, unless it takes the place of another: then its values are given, as by a loader."""
        is_first = getattr(module, name, None) is None
        if threading.get_ident() == self._thread and is_first and _has_values(parameter):
            defer(parameter, self._seed)
            self._deferred.append(parameter)

    def on_module(self, child: nn.Module) -> None:
        """Note the writes of a constructor that has ended."""
        for parameter in child.parameters(recurse=False):
            values = values_of(parameter)
            if isinstance(values, KeyedValues) and values.num_built is None:
                values.num_built = num_writes(parameter)


def _has_values(parameter: nn.Parameter) -> bool:
    """Say whether a parameter is a plain one: no subclass, nothing lazy, not on meta and not empty."""
    return type(parameter) is nn.Parameter and not parameter.is_meta and parameter.numel() > 0
