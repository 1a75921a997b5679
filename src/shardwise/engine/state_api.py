"""This module takes states out of training: it gathers parameters, and offloads what an engine has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import Tensor, nn

from shardwise.comm.collectives import Comm
from shardwise.comm.consistency import have_same_bits
from shardwise.comm.records import CommError
from shardwise.config.arguments import check, checked
from shardwise.config.errors import ConfigError
from shardwise.construction.shards import gathered_shards, other_writes
from shardwise.engine.parts import EngineParts
from shardwise.layout.mesh_shape import GRADIENT_AXES, MeshShape
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.runtime.device import free_bytes
from shardwise.zero.memory_release import STATES, MemoryRelease, ReleaseTarget
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.state_access import take_over

# By the identity of a parameter, which lives as long as its engine. In the parameter it could not be pickled.
_ENGINE_OF: Final[WeakValueDictionary[int, EngineParts]] = WeakValueDictionary()


def note_engine(parts: EngineParts) -> Callable[[], None]:
    """Note which engine has the model's parameters, so that `gathered` finds it; return what undoes that."""
    keys = [id(parameter) for parameter in parts.model.parameters()]
    _ENGINE_OF.update(dict.fromkeys(keys, parts))

    def forget() -> None:
        for key in keys:
            _ENGINE_OF.pop(key, None)

    return forget


@checked
@contextmanager
def gathered(parameters: Iterable[nn.Parameter] | nn.Parameter, modifier_rank: int | None = None) -> Iterator[None]:
    """Make parameters whole inside the context: slices of `shardwise.init()`, and those that an engine shards.

    All ranks enter it with the same parameters, and leave it. It may be nested. What is written is kept at its end, in
    an engine's masters too; after an exception slices are as before, if this context has gathered them. Of an engine
    the whole units are gathered that have the parameters, as `Engine.gathered` gathers all.

    Args:
        parameters: one, or any number of them; those that are whole already stay so.
        modifier_rank: the rank that alone writes: its values are everybody's. None if all ranks write the same.

    Raises:
        ConfigError: there is no rank `modifier_rank`, or it is not 0 where ranks have other parts of the model; or
            there is none, and ranks have written different values.

    >>> import torch
    >>> weight = nn.Parameter(torch.ones(2))
    >>> with gathered([weight]):  # does nothing to a parameter that is whole
    ...     weight.sum().item()
    2.0
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if modifier_rank is not None and not 0 <= modifier_rank < num_ranks:
        raise ConfigError(
            "modifier-rank", f"modifier_rank={modifier_rank} is none of {num_ranks} ranks; write on rank 0"
        )
    given = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
    check("gathered", "parameters", given, list[nn.Parameter])
    with ExitStack() as stack:
        wanted = {id(parameter) for parameter in given}
        noted = dict.fromkeys(_ENGINE_OF.get(id(parameter)) for parameter in given)
        for parts in filter(None, noted):
            groups = [group for group in parts.sharding.groups if wanted.intersection(map(id, group.parameters))]
            if groups or wanted.intersection(parts.sharding.absent.names):  # other stages may have them
                source = 0 if modifier_rank is None else _source(parts.layout.mesh, modifier_rank)
                write = None if modifier_rank is None else True
                stack.enter_context(gathered_groups(parts, write, groups, source))
        stack.enter_context(gathered_shards(given, modifier_rank))
        yield


class _UnitRead:
    """Is a walk over parameters, one at a time, while one unit of them is whole.

    Attributes:
        last: of the unit's parameters, in the model's order.
        context: to be closed once the unit need not be whole.
    """

    def __init__(self, parts: EngineParts, unit: str) -> None:
        groups = [group for group in parts.sharding.groups if group.spec.unit == unit]
        inside = {id(parameter) for group in groups for parameter in group.parameters}
        self.unit, self.context = unit, ExitStack()
        self.last = [parameter for parameter in parts.model.parameters() if id(parameter) in inside][-1]
        self.context.enter_context(gathered_groups(parts, None, groups))

    def end(self) -> None:
        self.context.close()


@contextmanager
def gathered_in_turn(parameter: nn.Parameter) -> Iterator[None]:
    """Make one of many parameters whole that are read one after the other, as `gathered` makes it.

    Its unit is gathered once for all of them: it stays whole, until its last parameter was read, one of another unit
    is asked for, or the engine is used otherwise.
    """
    parts = _ENGINE_OF.get(id(parameter))
    groups = [] if parts is None else parts.sharding.groups
    unit = next((group.spec.unit for group in groups if any(parameter is one for one in group.parameters)), None)
    if parts is None or unit is None or parts.status.is_in_backward:
        with gathered([parameter]):
            yield
        return
    read = parts.status.take_walk()
    if not isinstance(read, _UnitRead) or read.unit != unit:
        if read is not None:
            read.end()
        read = _UnitRead(parts, unit)
    with ExitStack() as stack:
        stack.push(read.context)
        yield
        if parameter is not read.last:
            stack.pop_all()
            parts.status.begin_walk(read, is_kept=True)


def _source(mesh: MeshShape, modifier_rank: int) -> int:
    """Return which of the ranks that average gradients is the one that writes.

    Raises:
        ConfigError: others have parts of the model that it has not.
    """
    if modifier_rank and mesh.tp * mesh.pp * mesh.ep > 1:
        where = f"modifier_rank={modifier_rank} under mesh.tp={mesh.tp}, mesh.pp={mesh.pp}, mesh.ep={mesh.ep}"
        raise ConfigError("modifier-rank", f"{where} has a part of the model alone; write on rank 0")
    return mesh.index_along(GRADIENT_AXES, modifier_rank)


@contextmanager
def gathered_groups(
    parts: EngineParts, write: bool | None, groups: Sequence[ParamGroup] | None = None, source: int = 0
) -> Iterator[nn.Module]:
    """Keep parameters whole inside, and take over what one rank has written. See `Engine.gathered`.

    Graphs and views of the parameters may outlive the context: they keep the memory.

    Args:
        write: whether to take over; None to do so if any rank has written.
        groups: that have the parameters; None for all.
        source: which of the ranks that average gradients has written.

    Raises:
        ConfigError: a parameter was written through its `data`, and `write` is False; or ranks have written different
            values, and `write` is None.
    """
    parts.status.check_present(params_suffice=not write)
    parts.tiers.worker.outcome.check()
    sharding = parts.sharding
    chosen = sharding.groups if groups is None else groups
    _check_memory_to_gather(parts, chosen)
    with parts.failures_explained():
        for group in chosen:
            group.follow_writes()  # of before
        held = sharding.hold(chosen)
        try:
            yield parts.model
            chosen = [group for group in sharding.groups if groups is None or group in groups]
            if write is None:
                write = parts.holds_anywhere(
                    any(group.writes.are_there for group in chosen), "whether a rank has written"
                )
                parts.status.check_present(params_suffice=not write)
                if write:
                    _refuse_other_writes(parts, chosen)
            if write:
                parts.note_update()
                take_over(parts.states(), chosen, source)
            _refuse_written_data(chosen)
        finally:
            sharding.held.difference_update(held)
            held = [group for group in sharding.groups if group in held]  # those that were not replaced
            for group in held:
                group.writes.forget_data()
                group.writes.refuse_new()
            sharding.reshard_all(held, keeps_views=True)


def _refuse_other_writes(parts: EngineParts, groups: Sequence[ParamGroup]) -> None:
    """Raise on all ranks where they have written different values, and none was named whose values count."""
    over: dict[Comm, list[Tensor]] = {}
    for group in groups:
        over.setdefault(group.comms.data, []).append(group.full)
    is_same = [have_same_bits(comm, values, "what ranks have written") for comm, values in over.items()]
    if parts.holds_anywhere(not all(is_same), "whether ranks have written different values"):
        raise other_writes([param.name for group in groups for param in group.spec.params])


def _refuse_written_data(groups: Sequence[ParamGroup]) -> None:
    """Raise where what was written through `data` is not taken over: no version counts it, so none would find it."""
    name = next((name for group in groups if (name := group.writes.written_data) is not None), None)
    if name is not None:
        raise ConfigError(
            "parameter-written",
            f"parameter {name} was written through its data inside engine.gathered(), but the engine trains a master "
            "of its own; write inside `with engine.gathered(write=True):`",
        )


def offload(parts: EngineParts, include: Sequence[str] | None, target: ReleaseTarget) -> Mapping[str, int]:
    """Move states away on all ranks, or on none; return the bytes that each has freed. See `Engine.offload`.

    Args:
        include: states to move; None for all.
    """
    parts.status.check()
    away = MemoryRelease(parts.sharding, parts.sharded, parts.memory, parts.resources.pool, parts.tiers, target)
    freed_bytes: Mapping[str, int] = {}
    failure: Exception | None = None
    try:
        freed_bytes = away.offload(STATES if include is None else include)
    except Exception as error:
        failure = error
    if parts.holds_anywhere(failure is not None, "the end of engine.offload"):
        if failure is None:
            away.restore()
        raise failure or CommError(
            "other-rank-offload", "another rank could not offload its states and says why; nothing is offloaded"
        )
    parts.status.release(away)
    return freed_bytes


def _check_memory_to_gather(parts: EngineParts, groups: Sequence[ParamGroup]) -> None:
    layout = parts.layout
    left_bytes = free_bytes(parts.device)
    if left_bytes is None or not layout.stage.unshard_for_use:
        return
    specs = [group.spec for group in groups]
    missing_bytes = sum(spec.padded_numel * DTYPE_BYTES[layout.precision_of(spec).param] for spec in specs)
    if parts.holds_anywhere(missing_bytes > left_bytes, "memory to gather"):  # the gather needs all ranks
        raise MemoryError(
            f"gathering the parameters takes {missing_bytes / 2**30:.1f} GiB of {left_bytes / 2**30:.1f} GiB free; "
            "generate with the forward alone, which gathers block by block, or on more memory"
        )
