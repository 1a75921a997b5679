"""Unfreezing between steps, and freezing before the first: parameters change their group, and states go with them.

A unit's trainable and its frozen parameters lie in two groups. Where a parameter is to change its group, the unit's
groups are made anew, one unit at a time: masters and optimizer states of what stays trainable are kept bit for bit, and
a newly trainable parameter starts without states, as in plain torch. What has been trained and is frozen stays where it
is, and a step leaves it alone, as in plain torch too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardwise.layout.layout import Layout
from shardwise.zero.access import (
    MASTER,
    States,
    read_held_state,
    read_optimizer_states,
    write_optimizer_states,
    write_state,
)
from shardwise.zero.optimizer_plan import NamedGroup


def regroup(states: States, layout: Layout, named_groups: Sequence[NamedGroup]) -> None:
    """Make groups and optimizer follow a layout in which other parameters are trainable; all ranks do so alike.

    Args:
        states: of the engine.
        layout: the new one.
        named_groups: the optimizer's parameter groups by the names of all that is trainable now.
    """
    driver = states.driver
    there = {group.spec for group in driver.groups}
    changed = {spec.unit for spec in there.symmetric_difference(layout.groups)}
    for unit in [unit.name for unit in driver.units if unit.name in changed]:
        masters: dict[str, Tensor | None] = {}
        optimizer_states: dict[str, dict[str, Tensor]] = {}
        for spec in there.difference(layout.groups):
            for place in spec.params if spec.unit == unit and spec.trainable else ():
                masters[place.name] = read_held_state(states, place.name, MASTER)
                optimizer_states[place.name] = read_optimizer_states(states, place.name)
        driver.regroup(unit, layout)
        states.sharded.regroup(driver.groups, named_groups)
        for spec in set(layout.groups) - there:
            for place in spec.params if spec.unit == unit and spec.trainable else ():
                if place.name in masters:
                    write_state(states, place.name, masters[place.name], MASTER)
                    write_optimizer_states(states, place.name, optimizer_states[place.name])
    driver.absent.follow(layout.elsewhere)
