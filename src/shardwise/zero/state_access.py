"""Read and write full parameters, gradients and optimizer states by name, on all ranks together.

In every stage a rank holds of each flattened parameter one range, or nothing. Reading puts the ranges of the shard
group together; writing takes this rank's range out of the full tensor, without communication. Replicas do the same with
the same values. Here rank 0 holds the first 8 of the 9 elements of weight b, on 2 ranks:

    rank 0   engine.write("b", full)   keeps full[0:8]
    rank 1   engine.write("b", full)   keeps full[8:9]
    both     engine.read("b")          full again

This is not for training loops: a read of a sharded state sends twice the tensor's bytes.

>>> import shardwise
>>> model = torch.nn.Linear(2, 1)
>>> engine = shardwise.initialize(model, {"run": {"device": "cpu"}}, loss_fn=lambda output, batch: output.sum())
>>> engine.write("weight", torch.tensor([[1.0, 2.0]]))
>>> result = engine.train_step([torch.ones(1, 2)])
>>> engine.read("weight").shape, engine.read("weight", "exp_avg").shape, engine.read("weight", "step")
(torch.Size([1, 2]), torch.Size([1, 2]), tensor(1.))
>>> engine.read("wieght")
Traceback (most recent call last):
    ...
shardwise.config.errors.ConfigError: the model has no parameter 'wieght'; did you mean weight?
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.comm.loss import LossAccumulator
from shardwise.comm.merged import exchange_texts, merge_parts
from shardwise.comm.mesh import CommGroups
from shardwise.config.arguments import described
from shardwise.config.errors import ConfigError
from shardwise.layout.param_groups import GroupSpec, ParamSlice, ParamSpec
from shardwise.runtime.device import numbers_on
from shardwise.runtime.optimizer_probe import first_states
from shardwise.runtime.state_shards import FlatState, is_flat
from shardwise.zero.optimizer import ShardedOptimizer
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.sharding_state import ShardingState
from shardwise.zero.stored_state import ParamPiece, place_state
from shardwise.zero.tp_params import gather_param, owned_part, shard_param, synchronize_shares
from shardwise.zero.whole_step import StateKind, WholeParameters, kinds_of, read_whole

PARAM: Final = "param"
MASTER: Final = "master"
GRAD: Final = "grad"


@dataclass(frozen=True)
class EngineState:
    """Bundles what holds the states of an engine's model on this rank.

    Attributes:
        sharding: has the groups, and finishes their reductions.
        losses: accumulates the loss and the count by which gradients are divided.
        loss_scale: the factor in the accumulated gradients.
        elsewhere: the groups that only other ranks of the pipeline hold.
    """

    sharding: ShardingState
    sharded: ShardedOptimizer
    comms: CommGroups
    losses: LossAccumulator
    loss_scale: float
    elsewhere: tuple[GroupSpec, ...] = ()


@dataclass(frozen=True)
class ParamLocation:
    """Locates a parameter: its group, its index there, and the range of it that this rank holds, if any."""

    group: ParamGroup
    index: int
    slot: ParamSlice | None

    @property
    def spec(self) -> ParamSpec:
        """Return the parameter's spec: name, shape and offset."""
        return self.group.spec.params[self.index]

    @property
    def is_whole(self) -> bool:
        """Say whether every rank holds all of the parameter."""
        group = self.group
        return group.shard_stop - group.shard_start == group.spec.padded_numel

    def own_part(self, held: FlatState) -> FlatState | None:
        """Return the parameter's part in what this rank holds of the group."""
        slot = self.slot
        return None if slot is None else held.part(slot.offset, slot.offset + slot.stop - slot.start)


def read_state(states: EngineState, name: str, state: str = PARAM, to_rank: int | None = None) -> Tensor | None:
    """Return the full tensor of one state of a parameter, as a copy. All ranks call it with the same arguments.

    Args:
        name: a name of the parameter, any of them if it is tied.
        state: `param` as computed with, `master` in the optimizer's precision (exact, where parameters are encoded to
            be sent), `grad` (the mean gradient so far, before clipping; reduces what is not reduced yet; in a pipeline
            it is there within a step only), or one of the optimizer's keys.
        to_rank: the only rank that gets it, the others get None; None for all ranks.

    Returns:
        a tensor of the parameter's shape, or 0-d for a number; None where there is no gradient or no state yet.

    Raises:
        ConfigError: there is no such parameter, state or rank.
    """
    _check_rank(states, "to_rank", to_rank)
    value = _across_stages(states, name, f"{state} of {name}", lambda: read_held_state(states, name, state))
    return value if to_rank in (None, states.comms.all.rank) else None


def read_held_state(states: EngineState, name: str, state: str) -> Tensor | None:
    """Read a state as `read_state` does, on the ranks of the parameter's stages only; all of them call it.

    Args:
        name: a name of a parameter of this rank's stages.
    """
    place = find_held(states, name)
    whole = states.sharded.whole
    if whole is not None and state not in (PARAM, MASTER, GRAD):
        return _read_of_owner(states, whole, place, state)
    local = _read_local(states, place, state)
    if local is not None and local.dim() and local.numel() == place.spec.numel:  # not a factor, say
        local = local.view(place.spec.shape)
        local = gather_param(
            place.spec.split, local, place.group.comms.tensor, f"{state} of {name}", is_gradient=state == GRAD
        )
    return local


def _read_of_owner(states: EngineState, whole: WholeParameters, place: ParamLocation, state: str) -> Tensor | None:
    """Return a state of a parameter that one rank steps whole."""
    kinds = _kinds(states, place)
    if not kinds and _may_come(states, state):
        return None
    kind, name, shape = _pick(kinds, place, state), place.spec.name, place.spec.global_shape
    if kind.value is not None:
        return torch.tensor(kind.value, dtype=kind.torch_dtype)
    flat = read_whole(whole, states.sharded.optimizer, name, state, kind, torch.Size(shape).numel())
    return flat.view(shape if kind.shape is None else kind.shape)


def _read_local(states: EngineState, place: ParamLocation, state: str) -> Tensor | None:
    """Return a state of this rank's part in the tensor-parallel group, 1-D, or 0-d where it is a number."""
    spec, group = place.spec, place.group
    if state == GRAD:
        return _read_grad(states, place)
    if state == PARAM and not group.is_released_between_uses:
        group.wait()
        return group.full[spec.offset : spec.offset + spec.numel].clone()
    if state in (PARAM, MASTER):
        held = group.shard if state == PARAM else group.master
        exact = _assemble(states, place, place.own_part(held), held.dtype, state)
        return group.transport.shown(exact, group.full.dtype) if state == PARAM else exact
    return _read_optimizer_state(states, place, state)


def write_state(
    states: EngineState, name: str, value: Tensor | float | None, state: str = PARAM, from_rank: int | None = None
) -> None:
    """Replace one state of a parameter. All ranks call it, not between a forward and its backward.

    Args:
        name: a name of the parameter, any of them if it is tied.
        value: of the state's shape, any floating dtype, the same on every rank. A written `param` or `master` sets
            both: the master takes the value, the parameter the value rounded. A written `grad` stands for the mean
            gradient of all backwards so far.
        from_rank: the rank whose value all ranks take, the others may give None; None if every rank gives it.

    Raises:
        ConfigError: there is no such parameter, state or rank, no gradient to replace, or the value has another shape.
    """
    _check_rank(states, "from_rank", from_rank)
    place, spec = find(states, name), spec_of(states, name)
    is_number, dtype = False, torch.float64  # on every rank, whatever its stages' parameters are
    shape = torch.Size(spec.global_shape)
    if state not in (PARAM, MASTER, GRAD):
        note = _of_holder(
            states, place, f"kind of {state} of {name}", lambda own: asdict(_pick(_kinds(states, own), own, state))
        )
        kind = StateKind(**note)
        is_number, dtype = kind.value is not None, kind.torch_dtype
        shape = torch.Size() if is_number else shape if kind.shape is None else torch.Size(kind.shape)
    flat = _receive(states, value, shape, dtype, from_rank, f"{state} of {name}")
    if place is None:
        return
    is_odd = not is_number and shape != spec.global_shape
    if (is_odd or states.sharded.whole is not None) and state not in (PARAM, MASTER, GRAD):
        if (view := states.sharded.views().get(spec.name)) is not None:
            place_state(states.sharded.optimizer, view, state, flat)
        return
    if not is_number:
        split, tp_index = place.spec.split, place.group.comms.tensor.rank
        local = shard_param(split, tp_index, flat)
        flat = (owned_part(split, tp_index, local) if state == GRAD else local).reshape(-1)
    with torch.no_grad():
        if state in (PARAM, MASTER):
            write_param(place, flat)
        elif state == GRAD:
            _write_grad(states, place, flat)
        else:
            write_optimizer_state(states, place, flat, state)


def read_optimizer_states(states: EngineState, name: str) -> dict[str, Tensor]:
    """Return all that the optimizer keeps of a parameter: full states 1-D, numbers 0-d.

    All ranks of the parameter's stages call it. With `write_optimizer_states` it moves states to another layout. A
    parameter that an owner steps whole keeps its states, so there are none to move.
    """
    place = find_held(states, name)
    if states.sharded.whole is not None:
        return {}
    return {
        key: torch.tensor(kind.value, dtype=kind.torch_dtype)
        if kind.value is not None
        else _own_state(states, place, key, kind)
        for key, kind in _kinds(states, place).items()
    }


def write_optimizer_states(states: EngineState, name: str, values: Mapping[str, Tensor]) -> None:
    """Give a parameter what `read_optimizer_states` returned, also where the optimizer has not stepped yet.

    Args:
        name: a name of a parameter of this rank's stages.
        values: by state: full 1-D tensors, and 0-d numbers.
    """
    place = find_held(states, name)
    for key, value in values.items():
        write_optimizer_state(states, place, value, key)


def states_of(states: EngineState, name: str) -> tuple[str, ...]:
    """Return the states that `read_state` knows of a parameter now, the same on every rank. All ranks call it."""
    place = find(states, name)
    found = _of_holder(states, place, f"states of {name}", lambda own: {"": [*_fixed(own), *_kinds(states, own)]})
    return tuple(found[""])


def find(states: EngineState, name: str) -> ParamLocation | None:
    """Return the location of the parameter that has this name or alias; None where other stages have it.

    Raises:
        ConfigError: the model has no such parameter.
    """
    for group in states.sharding.groups:
        for index, spec in enumerate(group.spec.params):
            if name == spec.name or name in spec.aliases:
                slots = group.spec.slots(group.shard_start, group.shard_stop)
                return ParamLocation(group, index, next((slot for slot in slots if slot.param is spec), None))
    spec_of(states, name)
    return None


def find_held(states: EngineState, name: str) -> ParamLocation:
    """Return the location of a parameter of this rank's stages.

    Raises:
        ConfigError: there is none of that name, or it is of another stage.
    """
    place = find(states, name)
    if place is None:
        raise ConfigError(
            "parameter-on-other-stage",
            f"{name} is of another stage of the pipeline; engine.read gives it on every rank",
        )
    return place


def spec_of(states: EngineState, name: str) -> ParamSpec:
    """Return the spec of a parameter of any stage: name and shape.

    Raises:
        ConfigError: there is none of that name.
    """
    specs = [
        spec for group in (*(each.spec for each in states.sharding.groups), *states.elsewhere) for spec in group.params
    ]
    found = next((spec for spec in specs if name == spec.name or name in spec.aliases), None)
    if found is not None:
        return found
    names = [alias for spec in specs for alias in (spec.name, *spec.aliases)]
    close = difflib.get_close_matches(name, names, n=3)
    fix = f"did you mean {' or '.join(close)}?" if close else f"names are such as {', '.join(names[:3])}"
    raise ConfigError("unknown-parameter", f"the model has no parameter {name!r}; {fix}")


def _of_holder(
    states: EngineState, place: ParamLocation | None, what: str, make: Callable[[ParamLocation], dict[str, Any]]
) -> dict[str, Any]:
    """Return the result of `make` from the ranks that hold a parameter, on the ranks of all stages.

    Raises:
        ConfigError: `make` raises it on a rank that holds the parameter.
    """
    if states.comms.pipeline.world_size == 1 and place is not None:
        return make(place)
    note: dict[str, Any] = {}
    if place is not None:
        try:
            note = make(place)
        except ConfigError as error:
            note = {"code": error.code, "error": str(error)}
    notes = [json.loads(text) for text in exchange_texts(states.comms.pipeline, json.dumps(note), what)]
    result: dict[str, Any] = next(note for note in notes if note)
    if "error" in result:
        raise ConfigError(result["code"], result["error"])
    return result


def _across_stages(states: EngineState, name: str, what: str, read: Callable[[], Tensor | None]) -> Tensor | None:
    """Return the tensor that `read` returns on the ranks that hold a parameter, on the ranks of all stages."""
    pipeline = states.comms.pipeline
    if pipeline.world_size == 1:
        return read()
    value: Tensor | None = None

    def describe(place: ParamLocation) -> dict[str, Any]:
        nonlocal value
        value = read()
        if value is None:
            return {"rank": pipeline.rank, "shape": None, "dtype": ""}
        return {"rank": pipeline.rank, "shape": list(value.shape), "dtype": _dtype_name(value.dtype)}

    note = _of_holder(states, find(states, name), what, describe)
    if note["shape"] is None:
        return None
    shape, dtype = torch.Size(note["shape"]), getattr(torch, note["dtype"])
    own = value.to(pipeline.device) if value is not None and pipeline.rank == note["rank"] else None
    return merge_parts(pipeline, own, 0, shape.numel(), dtype, what).view(shape)


def _read_grad(states: EngineState, place: ParamLocation) -> Tensor | None:
    grads = place.group.grads
    if grads is None or states.comms.pipeline.world_size > 1:
        return None
    to_mean, is_used = mean_gradient(states, place)
    accumulated = grads.accumulated()
    if accumulated is None or not is_used:
        return None
    full = _assemble(states, place, place.own_part(accumulated), accumulated.dtype, GRAD)
    return full.to(place.group.master.dtype).mul_(to_mean)


def _write_grad(states: EngineState, place: ParamLocation, flat: Tensor) -> None:
    grads = place.group.grads
    to_mean, _ = (0.0, False) if grads is None else mean_gradient(states, place)
    accumulated = None if grads is None else grads.accumulated()
    if grads is None or accumulated is None:
        if grads is None:
            raise ConfigError("parameter-frozen", f"{place.spec.name} has no gradient to replace; it is frozen")
        raise ConfigError(
            "no-gradient", f"{place.spec.name} has no gradient to replace; call engine.backward(loss) first"
        )
    copy_range(place.own_part(accumulated), flat.to(place.group.master.dtype) / to_mean, place)
    grads.arrivals.mark_used(place.index)


def mean_gradient(states: EngineState, place: ParamLocation) -> tuple[float, bool]:
    """Return the factor from the accumulated sum to the mean gradient, and whether any rank has used the parameter."""
    states.sharding.finish()
    grads, data = place.group.grads, states.comms.data
    is_used = grads is not None and grads.arrivals.used[place.index]
    flag = numbers_on(data.device, [float(is_used)])
    _, count, num_used = states.losses.sum_with(flag, f"gradient of {place.spec.name}")
    return states.losses.normaliser / ((count or 1.0) * states.loss_scale), num_used > 0


def write_param(place: ParamLocation, flat: Tensor) -> None:
    """Write a whole parameter, 1-D, into what this rank has of it."""
    group = place.group
    wide = flat.to(group.master.dtype)
    if group.transport.has_copies:
        copy_range(place.own_part(group.master), wide, place)
        group.adopt_master()
        return
    rounded = wide.to(group.shard.dtype)
    if not group.is_sharded:
        group.wait()
        group.parameters[place.index].copy_(group.shaped(place.index, rounded))
        group.writes.accept(place.index)
    copy_range(place.own_part(group.shard), rounded, place)
    if group.master is not group.shard:
        copy_range(place.own_part(group.master), wide, place)


def _read_optimizer_state(states: EngineState, place: ParamLocation, state: str) -> Tensor | None:
    kinds = _kinds(states, place)
    if not kinds and _may_come(states, state):
        return None
    kind = _pick(kinds, place, state)
    if kind.value is not None:
        return torch.tensor(kind.value, dtype=kind.torch_dtype)
    return _own_state(states, place, state, kind)


def _may_come(states: EngineState, state: str) -> bool:
    """Say whether a parameter without states may get one of this name: what the optimizer keeps after a first step."""
    if difflib.get_close_matches(state, (PARAM, MASTER, GRAD), n=1):
        return False
    kept = first_states(states.sharded.optimizer)
    return not kept or state in kept


def _own_state(states: EngineState, place: ParamLocation, state: str, kind: StateKind) -> Tensor:
    own = own_states(states, place).get(state)
    if kind.shape is not None and isinstance(own, Tensor):
        return own.detach().clone()
    return _assemble(states, place, own, kind.torch_dtype, state)


def write_optimizer_state(states: EngineState, place: ParamLocation, value: Tensor, state: str) -> None:
    """Write this rank's part of a 1-D state, or a 0-d one; make it if it is not there."""
    piece, slot = _own_piece(states, place), place.slot
    if piece is None or slot is None:
        return
    is_cut = value.dim() and value.numel() == place.spec.numel  # else a number, or such as a factor
    states.sharded.keeper_of(piece).write_state(piece, state, value[slot.start : slot.stop] if is_cut else value)


def _own_piece(states: EngineState, place: ParamLocation) -> ParamPiece | None:
    pieces = states.sharded.pieces
    return next((piece for piece in pieces if piece.group is place.group and piece.name == place.spec.name), None)


def own_states(states: EngineState, place: ParamLocation) -> Mapping[str, Any]:
    """Return what the optimizer keeps on this rank of a parameter, by name."""
    piece = _own_piece(states, place)
    return states.sharded.keeper_of(piece).states_of(piece) if piece is not None else {}


def _kinds(states: EngineState, place: ParamLocation) -> dict[str, StateKind]:
    """Return the optimizer's states of a parameter; ranks that hold nothing of it learn them from the others."""
    if states.sharded.whole is not None:
        return kinds_of(states.sharded.whole, states.sharded.optimizer, place.spec.name)
    own: dict[str, tuple[str, float | None, tuple[int, ...] | None]] = {}
    for key, value in own_states(states, place).items():
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0):
            own[key] = (_dtype_name(torch.as_tensor(value).dtype), float(value), None)
        elif is_flat(value) and place.slot and value.numel == place.slot.stop - place.slot.start:
            own[key] = (_dtype_name(value.dtype), None, None)
        elif isinstance(value, Tensor) and place.is_whole:
            own[key] = (_dtype_name(value.dtype), None, tuple(value.shape))
    if place.is_whole:
        return {key: StateKind(*kind) for key, kind in own.items()}
    texts = exchange_texts(place.group.comms.shards, json.dumps(own), f"optimizer states of {place.spec.name}")
    return {key: StateKind(*kind) for text in texts for key, kind in json.loads(text).items()}


def _pick(kinds: Mapping[str, StateKind], place: ParamLocation, state: str) -> StateKind:
    if state in kinds:
        return kinds[state]
    there = ", ".join((*_fixed(place), *kinds))
    later = "" if kinds or place.group.grads is None else ", and the optimizer's after its first step"
    raise ConfigError("unknown-state", f"{place.spec.name} has no state {state!r}; there are {there}{later}")


def _fixed(place: ParamLocation) -> tuple[str, ...]:
    return (PARAM, MASTER, GRAD) if place.group.grads is not None else (PARAM, MASTER)


def _assemble(
    states: EngineState, place: ParamLocation, part: FlatState | None, dtype: torch.dtype, state: str
) -> Tensor:
    """Return the full tensor, 1-D and on the device, from the parts of the shard group, or from this rank's whole."""
    spec, shards = place.spec, place.group.comms.shards
    own = None if part is None else part.read(0, part.numel).detach()
    if place.is_whole and own is not None:
        return own.to(shards.device, copy=True)
    start = place.slot.start if place.slot is not None else 0
    return merge_parts(shards, own, start, spec.numel, dtype, f"{state} of {spec.name}")


def _as_state(value: Any, what: str) -> Tensor | None:
    """Return what was given to be written as a tensor; arrays and nested lists of numbers are taken too."""
    try:
        given = None if value is None else torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        given = torch.empty((), device="meta")
    if given is not None and (given.is_meta or given.is_complex()):
        raise ConfigError(
            "written-value", f"{described('value', value)} and has no real numbers for {what}; give a tensor of them"
        )
    return given


def _receive(
    states: EngineState,
    value: Tensor | float | None,
    shape: torch.Size,
    dtype: torch.dtype,
    from_rank: int | None,
    what: str,
) -> Tensor:
    """Return the value that was given on this rank, or on `from_rank`, with its shape checked."""
    ranks = states.comms.all
    given = _as_state(value, what)
    is_giver = from_rank in (None, ranks.rank)
    is_wrong = is_giver and (given is None or given.shape != shape)
    found = "nothing" if given is None else str(tuple(given.shape))
    if from_rank is not None:  # all ranks raise, or none: the others would wait for the value
        flag = numbers_on(ranks.device, [float(is_wrong)])
        is_wrong = ranks.max_scalars(flag, f"shape of {what}") > [0.0]
        found = found if is_giver else "another"
    if is_wrong:
        giver = ranks.rank if from_rank is None else from_rank
        raise ConfigError(
            "written-shape", f"{what} has shape {tuple(shape)}, but rank {giver} gave {found}; give that shape"
        )
    if given is not None and from_rank is None:
        return given.to(ranks.device)
    part = given.to(ranks.device) if given is not None and is_giver else None
    return merge_parts(ranks, part, 0, shape.numel(), dtype, what).view(shape)


def copy_range(target: FlatState | None, flat: Tensor, place: ParamLocation) -> None:
    """Write this rank's part of a whole state.

    Args:
        target: where this rank stores its part; None where it has none.
    """
    if target is not None and place.slot is not None:
        target.write(0, flat[place.slot.start : place.slot.stop])


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_rank(states: EngineState, argument: str, rank: int | None) -> None:
    num_ranks = states.comms.all.world_size
    if rank is not None and not 0 <= rank < num_ranks:
        raise ConfigError("rank-out-of-range", f"{argument}={rank} is no rank; there are 0 to {num_ranks - 1}")


def take_over(states: EngineState, groups: Iterable[ParamGroup], source: int = 0) -> None:
    """Spread what one rank has written into whole groups to all ranks, in the masters too. All ranks call it.

    Of a split layer's parts, and of a pipeline's stages, it is the first rank that holds them. A master keeps its
    precision where its parameter is unchanged.

    Args:
        source: the rank among those that average gradients.
    """
    for group in groups:
        data = group.comms.data
        if data.world_size > 1:
            data.broadcast(group.full, f"written parameters of {group.spec.name}", source)
        for place in group.spec.params:
            written = group.full[place.offset : place.offset + place.numel].view(place.shape)
            synchronize_shares(place.split, written, group.comms.tensor, f"written {place.name}")
        tied = states.comms.tied.get(group.holders)
        if tied is not None:
            tied.broadcast(group.full, f"written parameters of {group.spec.name} on stages {group.spec.stages}")
        group.take_written()
        if group.transport.has_copies:
            group.adopt_master()
