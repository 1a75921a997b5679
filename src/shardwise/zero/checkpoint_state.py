"""List an engine's states for checkpoints: what this rank holds of each, and what it writes.

A rank holds the range of each group that its optimizer steps, in the optimizer's precision. Ranks that hold the same
range, as in stage 0 or in replicas, write a part of it each, so that all write about as much:

    ZeRO-2 over 2 ranks        rank 0 holds and writes the first half of a group, rank 1 the second
    stage 0 over 2 ranks       both hold all of it; rank 0 writes the first half, rank 1 the second
    2 replicas of 2 shards     ranks 0 and 2 hold the first half; rank 0 writes the first quarter, rank 2 the second

This is a weight of 6 x 4 on a mesh of 2 x 2, tp innermost: rows split by ZeRO-3, columns by tensor parallelism.

>>> from shardwise.layout.tp_sharding import ParamSplit, FusedPart
>>> split = ParamSplit((6, 4), degree=2, dim=1, parts=(FusedPart(4),))
>>> spec = ParamSpec("down.weight", (), split.local_shape, 0, split)
>>> group = GroupSpec("root", "root", (spec,), True, num_ranks=2, num_shards=2)
>>> for data, tp in ((0, 0), (0, 1), (1, 0), (1, 1)):
...     (part,) = parts_of(group, group.shard_range(data), group.written_range(data, replica=0), tp)
...     print(part.start, part.stop, [str(piece.rect) for piece in part.pieces], part.written == part.pieces)
0 8 ['[0:4, 0:2]'] True
0 8 ['[0:4, 2:4]'] True
8 12 ['[4:6, 0:2]'] True
8 12 ['[4:6, 2:4]'] True
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.config.errors import ConfigError
from shardwise.layout.param_groups import GroupSpec, ParamSpec
from shardwise.layout.slicing import Chunk as Rectangle
from shardwise.layout.slicing import LocalTensor, intersect
from shardwise.optim.rules import needed_states
from shardwise.runtime.optimizer_probe import inner_optimizers
from shardwise.runtime.state_shards import PARAM, FlatState, ScalarState, StateShard, TensorFlatState, is_flat
from shardwise.zero.group_step import Wanted, odd_states
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.state_access import EngineState
from shardwise.zero.whole_step import WholeParameters

Range = tuple[int, int]


@dataclass(frozen=True)
class StateShardPart:
    """Describes what a rank holds of one parameter; nothing if `start` is `stop`.

    Attributes:
        start: first element of the range in the flattened local parameter.
        offset: the position of the range's first element in what the rank holds of the group.
        pieces: the range as rectangles of the whole parameter, offsets counted from the range's first element.
        written: the rectangles, or parts of them, that the rank writes.
    """

    spec: ParamSpec
    trainable: bool
    start: int = 0
    stop: int = 0
    offset: int = 0
    pieces: tuple[Rectangle, ...] = ()
    written: tuple[Rectangle, ...] = ()

    def state_shard(self, state: str, flat: FlatState) -> StateShard:
        """Return the shard of one state; `flat` is as long as the range."""
        spec, trainable = self.spec, self.trainable
        return StateShard(
            spec.name, spec.aliases, state, spec.global_shape, flat, self.pieces, self.written, trainable=trainable
        )


def parts_of(group: GroupSpec, held: Range, written: Range, tp_index: int) -> Iterator[StateShardPart]:
    """Yield what a rank holds, and writes, of each parameter of a group.

    Args:
        held: range of its flat buffer that the rank holds, in elements.
        written: the part of that range which the rank writes, where it is the owner.
        tp_index: the rank's index in its tensor-parallel group.
    """
    slots = {slot.param.name: slot for slot in group.slots(*held)}
    for spec in group.params:
        slot = slots.get(spec.name)
        if slot is None:
            yield StateShardPart(spec, group.trainable)
            continue
        low, high = max(slot.start, written[0] - spec.offset), min(slot.stop, written[1] - spec.offset)
        local = spec.split.local(tp_index)
        owned = local if spec.split.degree == 1 else spec.split.local(tp_index, owned_only=True)
        own = intersect(owned, low, high) if low < high else ()
        mine = tuple(piece.shifted(low - slot.start) for piece in own)
        yield StateShardPart(
            spec, group.trainable, slot.start, slot.stop, slot.offset, intersect(local, slot.start, slot.stop), mine
        )


def held_parameters(states: EngineState) -> Iterator[StateShard]:
    """Yield a state shard of every parameter of the model, empty where this rank holds nothing."""
    for group in states.sharding.groups:
        master = group.master
        for part in _parts(states, group):
            yield part.state_shard(PARAM, master.part(part.offset, part.offset + part.stop - part.start))
    dtype = next(iter(states.sharding.groups)).master.dtype
    for spec in states.elsewhere:
        for place in spec.params:
            yield StateShardPart(place, spec.trainable).state_shard(PARAM, TensorFlatState(torch.empty(0, dtype=dtype)))


def held_optimizer_states(states: EngineState) -> Iterator[StateShard | ScalarState]:
    """Yield the optimizer's states of what this rank holds.

    Tensors of other shapes than their parameter are apart, in `odd_optimizer_states`.

    Raises:
        ConfigError: a state is neither a number nor a tensor.
    """
    _refuse_inner_states(states.sharded.optimizer)
    if states.sharded.whole is not None:
        yield from _held_by_owner(states, states.sharded.whole)
        return
    pieces = {(piece.group, piece.name): piece for piece in states.sharded.pieces}
    for group in states.sharding.groups:
        for part in _parts(states, group) if group.grads is not None else ():
            piece = pieces.get((group, part.spec.name))
            if piece is not None:
                yield from _of_piece(_in_flats(states.sharded.keeper_of(piece).states_of(piece), part), part)


def _refuse_inner_states(optimizer: Optimizer) -> None:
    for inner in inner_optimizers(optimizer):
        if inner.state and inner.state is not optimizer.state:
            raise ConfigError(
                "optimizer-inner-state",
                f"{type(optimizer).__name__} wraps {type(inner).__name__}, whose states are in no checkpoint; "
                'save(contents="weights"), or let the wrapper share its `state`',
            )


def _held_by_owner(states: EngineState, whole: WholeParameters) -> Iterator[StateShard | ScalarState]:
    for name, spec in whole.places.items():
        view = whole.views[name]
        in_optimizer = states.sharded.optimizer.state.get(view, {})
        odd = dict(odd_states(in_optimizer, view))
        flats = {
            key: TensorFlatState(each.detach().view(-1)) if isinstance(each, Tensor) and each.dim() else each
            for key, each in in_optimizer.items()
            if key not in odd
        }
        pieces = LocalTensor.whole(spec.global_shape).pieces
        written = pieces if _writes_what_it_owns(states, name) else ()
        part = StateShardPart(spec, True, 0, view.numel(), 0, pieces, written)
        yield from _of_piece(_in_flats(flats, part), part)


def _writes_what_it_owns(states: EngineState, name: str) -> bool:
    """Say whether this rank is in the first replica, and in the first stage that has the parameter."""
    return states.comms.replicas.rank == 0 and _is_in_first_stage(states, _group_of(states, name))


def _writes_first_element(states: EngineState, name: str) -> bool:
    """Say whether this rank writes the first element of a parameter, which no other rank does.

    The optimizer is element-wise, so that a state of another shape than a piece is the same of all pieces.
    """
    group = _group_of(states, name)
    comms = group.comms
    offset = next(spec.offset for spec in group.spec.params if spec.name == name)
    low, high = group.spec.written_range(comms.shards.rank, comms.replicas.rank)
    return low <= offset < high and comms.tensor.rank == 0 and _is_in_first_stage(states, group)


def _group_of(states: EngineState, name: str) -> ParamGroup:
    return next(group for group in states.sharding.groups if any(spec.name == name for spec in group.spec.params))


def _is_in_first_stage(states: EngineState, group: ParamGroup) -> bool:
    return len(group.holders) <= 1 or states.comms.pipeline.rank == group.holders[0]


def odd_optimizer_states(states: EngineState) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer's states that have other shapes than their parameter, such as factors, if this rank is to
    write them; each with a name that `place_odd_state` takes.
    """
    sharded = states.sharded
    is_writer = _writes_first_element if sharded.whole is None else _writes_what_it_owns
    for keeper in sharded.keepers:
        for name, state, value in keeper.odd_states():
            if is_writer(states, name):
                yield f"{name}/{state}", value


def place_odd_state(states: EngineState, where: str, value: Tensor) -> None:
    """Give the optimizer a state that `odd_optimizer_states` yielded, on the ranks that step the parameter or a piece.

    Args:
        where: the name that came with it.
    """
    name, _, key = where.rpartition("/")
    view = states.sharded.views().get(name)
    if view is not None:
        states.sharded.optimizer.state[view][key] = value.to(view.device)


def check_optimizer_states(
    states: EngineState, wanted: Mapping[str, Mapping[str, Wanted]], options: Sequence[Mapping[str, Any]] | None
) -> None:
    """Raise if the wanted states are not those that the optimizer steps with.

    Args:
        options: new options for each of the optimizer's groups; None if they stay as they are.

    Raises:
        ConfigError: a state is missing, or is one number and should be as long as the parameter, or the reverse.
    """
    sharded = states.sharded
    if sharded.whole is not None:
        return
    kind = type(sharded.optimizer).__name__
    given = {id(group): each for group, each in zip(sharded.optimizer.param_groups, options or (), strict=False)}
    for piece in sharded.pieces:
        current, names = sharded.options_of(piece), wanted.get(piece.name, {})
        if current is None:
            continue
        needed = needed_states(sharded.optimizer, {**current, **given.get(id(current), {})})
        keeper = sharded.keeper_of(piece)
        kept, wrong = keeper.states_of(piece), []
        if needed is not None:
            wrong += [f"has no {state}" for state in sorted(needed - names.keys()) if names]
            lacking = sorted(keeper.cannot_store(piece, needed))
            wrong += [f"has a {state}, which the tier of the optimizer cannot store" for state in lacking]
        for state, each in names.items():
            is_number = isinstance(each, ScalarState)
            # Of an optimizer that we do not know, what it has says so, if it has stepped.
            should_be = state == "step" if needed is not None else not is_flat(kept.get(state))
            has_known = needed is not None or kept.get(state) is not None
            if has_known and isinstance(each, torch.dtype) and not _may_be(each, kept.get(state)):
                wrong.append(f"has {each} for {state}")
            if is_number != should_be and has_known:
                wrong.append(f"has {'one number' if is_number else 'elements'} for {state}")
        if wrong:
            raise ConfigError(
                "optimizer-states-unfit",
                f"{piece.name} {wrong[0]}, which {kind} cannot step with; use an older checkpoint, or "
                "weights_only=True",
            )


def _may_be(dtype: torch.dtype, kept: Any) -> bool:
    """Say whether a state may be of a dtype; it is of integers only if the optimizer has it so."""
    own = getattr(kept, "dtype", torch.float32)
    return dtype.is_floating_point or dtype.is_complex or not (own.is_floating_point or own.is_complex)


def prepare_optimizer_states(states: EngineState, wanted: Mapping[str, Mapping[str, Wanted]]) -> None:
    """Give the optimizer, for what this rank holds, exactly the wanted states: numbers set, tensors ready to be filled.

    Parameters of which none are wanted get the states of an optimizer that has not stepped.

    Args:
        wanted: by parameter and state: its number; or for a tensor as long as the parameter a dtype of its own, or None
            for the parameter's.
    """
    states.sharded.prepare_states(wanted)


def adopt_masters(states: EngineState) -> None:
    """Update the parameters from the masters that were written; feedback starts at zero. All ranks call it."""
    for group in states.sharding.groups:
        group.adopt_master()
        for residual in group.grads.sums.residuals if group.grads is not None else ():
            residual.zero_()


def _parts(states: EngineState, group: ParamGroup) -> Iterator[StateShardPart]:
    comms = group.comms
    written = group.spec.written_range(comms.shards.rank, comms.replicas.rank)
    if not _is_in_first_stage(states, group):
        written = (0, 0)  # the first stage that holds it writes it
    return parts_of(group.spec, (group.shard_start, group.shard_stop), written, comms.tensor.rank)


def _of_piece(
    values: Mapping[str, FlatState | ScalarState], part: StateShardPart
) -> Iterator[StateShard | ScalarState]:
    for state, value in values.items():
        yield value if isinstance(value, ScalarState) else part.state_shard(state, value)


def _in_flats(values: Mapping[str, Any], part: StateShardPart) -> dict[str, FlatState | ScalarState]:
    """Return the states that torch's optimizer has of a piece, without those that are None."""
    name = part.spec.name
    flats: dict[str, FlatState | ScalarState] = {}
    for state, value in values.items():
        if is_flat(value):
            flats[state] = value
        elif isinstance(value, Tensor) and value.dim() == 0:
            flats[state] = ScalarState(name, state, value.item(), str(value.dtype).removeprefix("torch."))
        elif isinstance(value, int | float):
            flats[state] = ScalarState(name, state, value, "float" if isinstance(value, float) else "int")
        elif value is not None and not isinstance(value, Tensor):  # tensors of other sizes are saved apart
            raise ConfigError(
                "optimizer-state-shape",
                f"the optimizer's state {state} of {name} is {type(value).__name__}; a checkpoint keeps numbers and "
                "tensors: use an optimizer that has such states alone",
            )
    return flats
