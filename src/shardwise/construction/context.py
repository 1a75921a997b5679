"""Build a model so that each rank keeps a slice of it, or draws its values later.

The constructors run as ever, and rank 0's values are everybody's: so they are those of plain construction, whatever
computes them. torch says when a module registers a parameter, and so which module is being constructed. Its parameters
are whole; once another module registers or uses one, they become slices. A later use gathers them again, such as that
of `self.apply(...)` in a constructor. Each of this is a collective, so all ranks run the same code.

>>> with init(seed=7):
...     model = torch.nn.Linear(2, 3)
>>> model.weight.is_meta, model.weight.shape
(True, torch.Size([3, 2]))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from shardwise.comm.backends import world_comm
from shardwise.comm.collectives import Comm
from shardwise.config.arguments import checked
from shardwise.config.resolve import RunConfig
from shardwise.construction.shards import USE_INSIDE_INIT, KeyedValues, ParamShard, mark, refuse, unshard
from shardwise.launch.process_group import join_launched
from shardwise.runtime.device import choose_kind
from shardwise.runtime.module_calls import watch_registrations
from shardwise.runtime.torch_private import has_views


@checked
@contextmanager
def init(seed: int | None = None) -> Iterator[None]:
    """Build models, or load them by `from_pretrained`, without holding them: `initialize` takes them over.

    Initialise inside as well: afterwards a parameter can be used in `shardwise.gathered` alone. Inside another
    `init()` it does nothing, nor to modules of other threads. It joins the process group that a launcher has prepared.

    Args:
        seed: None draws as plain construction would: bit for bit the values that torch's generator gives on rank 0 now.
            All ranks build the same model, and each keeps a slice of each parameter; one process alone keeps all. With
            a seed nothing is drawn yet: a rank draws what it holds a part of, keyed by the seed and the names of
            modules, by `reset_parameters` of a module and the nearest `_init_weights(module)` around. Other code that
            uses a parameter is refused. torch's generator keeps its state.
    """
    if USE_INSIDE_INIT.get() is not None:
        yield
    elif seed is not None:
        with torch.random.fork_rng(devices=[]), _Construction(None, seed).watching():
            yield
    elif join_launched(choose_kind("auto").name, RunConfig().timeout_s) == 1:
        yield
    else:
        with _Construction(world_comm(RunConfig().timeout_s)).watching():
            yield


class _Construction:
    """Shards each parameter after its module's constructor, or without `comm` leaves it to be drawn from the seed."""

    def __init__(self, comm: Comm | None, seed: int = 0) -> None:
        self._comm = comm
        self._seed = seed
        self._module: nn.Module | None = None
        self._whole: dict[nn.Parameter, None] = {}  # to be sharded when another module comes
        self._viewed: dict[nn.Parameter, None] = {}  # to be sharded at the end

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Shard what this thread registers inside the context."""
        token = USE_INSIDE_INIT.set(self.use)
        try:
            with watch_registrations(self.on_parameter, self.on_module):
                yield
            self._shard_whole(at_end=True)
        finally:
            USE_INSIDE_INIT.reset(token)

    def on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Shard the parameters of the module before, and keep this one whole while its own is constructed."""
        if not self._is_mine(parameter) or (self._comm is None and getattr(module, name, None) is not None):
            return  # such as one whose values are given in place of those to be drawn, by a loader
        if self._comm is None:
            mark(parameter, KeyedValues(self._seed))
            return
        if module is not self._module and not isinstance(module, ParametrizationList):  # for a module that goes on
            self._shard_whole()
            self._module = module
        self._whole[parameter] = None

    def on_module(self, child: nn.Module) -> None:
        """Shard parameters that were never registered, as in a deep copy."""
        for parameter in filter(self._is_mine, child.parameters()):
            if self._comm is not None and parameter not in self._whole and parameter not in self._viewed:
                mark(parameter, ParamShard.of(self._comm, parameter.detach(), source=0))

    def use(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make parameters whole that an operation uses, one of which is sharded, and shard all others."""
        if self._comm is None:
            refuse(parameters)
        sharded = dict.fromkeys(parameter for parameter in parameters if type(parameter) is not nn.Parameter)
        used = sharded | dict.fromkeys(parameter for parameter in parameters if parameter in self._whole)
        self._whole = {each: None for each in self._whole if each not in used}
        self._shard_whole()
        self._whole = used
        for parameter in sharded:
            unshard(parameter)

    def _is_mine(self, parameter: nn.Parameter) -> bool:
        """Say whether this thread builds, and a parameter has values: no subclass, nothing lazy or empty."""
        is_plain = type(parameter) is nn.Parameter and not parameter.is_meta and parameter.numel() > 0
        return is_plain and USE_INSIDE_INIT.get() == self.use

    def _shard_whole(self, at_end: bool = False) -> None:
        """Shard parameters, but at the end only if rank 0 has a view to write one: `p.data` in `p.data.copy_(...)`."""
        whole, self._whole, comm = self._viewed | self._whole if at_end else self._whole, {}, self._comm
        for parameter in filter(self._is_mine, whole):
            assert comm is not None, "without it nothing is kept whole"
            is_viewed = torch.tensor([has_views(parameter)], dtype=torch.uint8, device=comm.device)
            comm.broadcast(is_viewed, "whether a parameter has views")
            if is_viewed and not at_end:
                self._viewed[parameter] = None
            else:
                mark(parameter, ParamShard.of(comm, parameter.detach(), source=0))
