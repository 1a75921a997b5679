"""Freezing and unfreezing between steps: parameters change their group, and their states go with them, or go.

A unit's trainable and its frozen parameters lie in two groups. Where a parameter's `requires_grad` has changed, the
unit's groups are made anew, one unit at a time: masters and optimizer states of what stays trainable are kept bit for
bit, a newly trainable parameter starts without states, as in plain torch, and a newly frozen one loses its.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardwise.comm import Comms
from shardwise.layout.layout import Layout
from shardwise.zero.driver import ZeroDriver
from shardwise.zero.group import ParamGroup
from shardwise.zero.step import NamedGroup, Piece, ShardedOptimizer


def regroup(
    driver: ZeroDriver,
    sharded: ShardedOptimizer,
    layout: Layout,
    named_groups: Sequence[NamedGroup],
    comms: Comms,
) -> None:
    """Make groups and optimizer follow a layout in which other parameters are trainable; all ranks do so alike.

    Args:
        driver: of the engine.
        sharded: its optimizer.
        layout: the new one.
        named_groups: the optimizer's parameter groups by the names of all that is trainable now.
        comms: of the engine.
    """
    wanted = set(layout.groups)
    changed = sorted({group.spec.unit for group in driver.groups} & _units_that_differ(driver, layout))
    for unit in changed:
        masters: dict[str, Tensor] = {}
        states: dict[str, dict[str, Tensor]] = {}
        for group in driver.groups:
            if group.spec.unit == unit and group.spec not in wanted and group.grads is not None:
                pieces = [piece for piece in sharded.pieces if piece.group is group]
                held = [(piece, piece.view) for piece in pieces]
                masters.update(_gather(group, held, group.params.master.dtype, comms))
                states.update(_whole_states(group, pieces, sharded, comms))
        before = set(driver.groups)
        driver.regroup(unit, layout)
        for group in driver.groups:
            if group not in before and group.grads is not None:
                _restore_masters(group, masters)
        sharded.regroup(driver.groups, named_groups, states)


def _units_that_differ(driver: ZeroDriver, layout: Layout) -> set[str]:
    there = {group.spec for group in driver.groups}
    return {spec.unit for spec in there.symmetric_difference(layout.groups)}


def _whole_states(
    group: ParamGroup, pieces: Sequence[Piece], sharded: ShardedOptimizer, comms: Comms
) -> dict[str, dict[str, Tensor]]:
    """The optimizer's states of those of a group's parameters that have any, whole and 1-D, or 0-d."""
    scalars = _agree_on_scalars(group, pieces, sharded, comms)
    whole: dict[str, dict[str, Tensor]] = {name: {} for name in scalars}
    for key, example in sharded.state_keys().items():
        if example.dim() > 0:
            held = [(piece, sharded.optimizer.state[piece.view].get(key)) for piece in pieces]
            present = [(piece, value) for piece, value in held if value is not None]
            for name, values in _gather(group, present, example.dtype, comms):
                if name in whole:
                    whole[name][key] = values
        else:
            for name, numbers in scalars.items():
                whole[name][key] = torch.tensor(numbers[key], dtype=example.dtype, device=example.device)
    return whole


def _gather(
    group: ParamGroup, held: Sequence[tuple[Piece, Tensor]], dtype: torch.dtype, comms: Comms
) -> Iterator[tuple[str, Tensor]]:
    """Put the pieces of all ranks of the shard group together; (name, whole 1-D values) of every parameter."""
    spec, params = group.spec, group.params
    flat = torch.zeros(spec.padded_numel, dtype=dtype, device=params.master.device)
    for piece, values in held:
        flat[params.shard_start + piece.start : params.shard_start + piece.stop] = values.detach()
    if params.shard_stop - params.shard_start < spec.padded_numel:
        comms.shards.all_gather(flat, f"states of {spec.name}").wait()
    yield from ((place.name, flat[place.offset : place.offset + place.numel].clone()) for place in spec.params)


def _agree_on_scalars(
    group: ParamGroup, pieces: Sequence[Piece], sharded: ShardedOptimizer, comms: Comms
) -> dict[str, dict[str, float]]:
    """The 0-d states of the parameters that have states: a rank without a piece learns them from the others."""
    keys = [key for key, example in sharded.state_keys().items() if example.dim() == 0]
    names = [place.name for place in group.spec.params]
    table = torch.full((len(names), 1 + len(keys)), -1.0, dtype=torch.float64)  # [params, has states + scalars]
    for piece in pieces:
        state = sharded.optimizer.state.get(piece.view)
        if state:
            table[names.index(piece.name)] = torch.tensor([1.0, *(float(state[key]) for key in keys)])
    device = comms.shards.device
    agreed = comms.shards.max_scalars(table.flatten().to(device), f"step counts of {group.spec.name}")
    rows = [agreed[start : start + 1 + len(keys)] for start in range(0, len(agreed), 1 + len(keys))]
    return {name: dict(zip(keys, row[1:], strict=True)) for name, row in zip(names, rows, strict=True) if row[0] > 0}


def _restore_masters(group: ParamGroup, masters: Mapping[str, Tensor]) -> None:
    params = group.params
    for slot in group.spec.slots(params.shard_start, params.shard_stop):
        if slot.param.name in masters:
            values = masters[slot.param.name][slot.start : slot.stop]
            params.master[slot.offset : slot.offset + values.numel()] = values
