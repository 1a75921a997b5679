"""An engine's states as a checkpoint sees them: what this rank holds of each, and what it writes.

A rank holds the range of each group that its optimizer steps, in the optimizer's precision; from that all else follows.
Ranks that hold the same range, as in stage 0 or in replicas, write a part of it each, so all write about as much:

    ZeRO-2 over 2 ranks        rank 0 holds and writes the first half of a group, rank 1 the second
    stage 0 over 2 ranks       both hold all of it; rank 0 writes the first half, rank 1 the second
    2 replicas of 2 shards     ranks 0 and 2 hold the first half; rank 0 writes the first quarter, rank 2 the second
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.config import ConfigError
from shardwise.holdings import PARAM, HeldNumber, Holding
from shardwise.layout.groups import ParamSpec
from shardwise.layout.pieces import LocalTensor, intersect
from shardwise.layout.pieces import Piece as Rectangle
from shardwise.zero.access import States, place_optimizer_state
from shardwise.zero.group import ParamGroup
from shardwise.zero.step import Piece


@dataclass(frozen=True)
class _Part:
    """A rank's range [start, stop) of one flattened local parameter, and that of it which the rank writes."""

    group: ParamGroup
    spec: ParamSpec
    start: int
    stop: int
    offset: int
    pieces: tuple[Rectangle, ...]
    written: tuple[Rectangle, ...]

    def holding(self, state: str, tensor: Tensor) -> Holding:
        spec = self.spec
        is_trainable = self.group.spec.trainable
        return Holding(
            spec.name, spec.aliases, state, spec.global_shape, tensor, self.pieces, self.written, trainable=is_trainable
        )


def held_parameters(states: States) -> Iterator[Holding]:
    """Every parameter of the model, those too of which this rank holds nothing."""
    for group in states.driver.groups:
        master = group.params.master
        for part in _parts(states, group):
            yield part.holding(PARAM, master[part.offset : part.offset + part.stop - part.start])


def held_optimizer_states(states: States) -> Iterator[Holding | HeldNumber]:
    """The optimizer's states of what this rank holds.

    Raises:
        ConfigError: a state is neither one number nor as long as the parameter.
    """
    pieces = {(piece.group, piece.name): piece for piece in states.sharded.pieces}
    for group in states.driver.groups:
        for part in _parts(states, group) if group.grads is not None else ():
            piece = pieces.get((group, part.spec.name))
            if piece is not None:
                yield from _of_piece(states.sharded.optimizer.state.get(piece.view, {}), part)


Wanted = HeldNumber | torch.dtype | None


def prepare_optimizer_states(states: States, wanted: Mapping[str, Mapping[str, Wanted]]) -> None:
    """Let the optimizer have, of what this rank holds, just the wanted states: numbers set, tensors to be filled.

    Parameters of which none are wanted have those of an optimizer that has not stepped.

    Args:
        states: of the engine.
        wanted: by parameter and state: its number; or for a tensor as long as the parameter a dtype of its own, or None
            for the parameter's.
    """
    sharded = states.sharded
    sharded.forget_states([piece for piece in sharded.pieces if not wanted.get(piece.name)])
    for piece in sharded.pieces:
        names = wanted.get(piece.name, {})
        kept = sharded.optimizer.state[piece.view] if names else {}
        for name in [name for name in kept if name not in names]:
            del kept[name]
        for name, each in names.items():
            _prepare(states, piece, name, each)
    sharded.track_states()


def adopt_masters(states: States) -> None:
    """Let the parameters follow the masters that were written. All ranks call it."""
    for group in states.driver.groups:
        group.adopt_master()


def _parts(states: States, group: ParamGroup) -> Iterator[_Part]:
    comms, params = states.comms, group.params
    first, last = group.spec.written_range(comms.shards.rank, comms.replicas.rank)
    slots = {slot.param.name: slot for slot in group.spec.slots(params.shard_start, params.shard_stop)}
    for spec in group.spec.params:
        slot = slots.get(spec.name)
        if slot is None:
            yield _Part(group, spec, 0, 0, 0, (), ())
            continue
        held, owned = (spec.split.local(comms.tensor.rank, owned_only=only) for only in (False, True))
        low = max(slot.start, first - spec.offset)
        high = min(slot.stop, last - spec.offset)
        written = tuple(piece.shifted(low - slot.start) for piece in _cut(owned, low, high))
        pieces = intersect(held, slot.start, slot.stop)
        yield _Part(group, spec, slot.start, slot.stop, slot.offset, pieces, written)


def _cut(local: LocalTensor, start: int, stop: int) -> tuple[Rectangle, ...]:
    return intersect(local, start, stop) if start < stop else ()


def _of_piece(values: Mapping[str, Any], part: _Part) -> Iterator[Holding | HeldNumber]:
    name, numel = part.spec.name, part.stop - part.start
    for state, value in values.items():
        if isinstance(value, Tensor) and value.dim() and value.numel() == numel:
            yield part.holding(state, value.detach().view(-1))
        elif isinstance(value, Tensor) and value.dim() == 0:
            yield HeldNumber(name, state, value.item(), str(value.dtype).removeprefix("torch."))
        elif isinstance(value, int | float):
            yield HeldNumber(name, state, value, "float" if isinstance(value, float) else "int")
        elif value is not None:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"the optimizer's state {state} of {name} is {found}; a checkpoint keeps numbers, and tensors as long "
                "as the parameter: use an element-wise optimizer"
            )


def _prepare(states: States, piece: Piece, name: str, wanted: Wanted) -> None:
    optimizer = states.sharded.optimizer
    current = optimizer.state[piece.view].get(name)
    if isinstance(wanted, HeldNumber):
        if isinstance(current, Tensor) and current.dim():
            del optimizer.state[piece.view][name]
        kind = {"int": int, "float": float}.get(wanted.dtype)
        value = torch.tensor(wanted.value, dtype=getattr(torch, wanted.dtype) if kind is None else None)
        place_optimizer_state(optimizer, piece.view, name, kind(wanted.value) if kind is not None else value)
    elif not (isinstance(current, Tensor) and current.shape == piece.view.shape and wanted in (None, current.dtype)):
        optimizer.state[piece.view][name] = torch.zeros_like(piece.view, dtype=wanted, requires_grad=False)
