"""The groups of a pipeline's stages, as a schedule drives them: whole for a batch, reduced when their last backward is
over, and apart in what their units remember of several forwards under way.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.layout.layout import Layout
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.prefetch import PrefetchOrder, RecordedOrder
from shardwise.zero.sharding_state import ShardingState


class PipelineAdapter:
    """Drives the groups of this rank's stages.

    Args:
        driver: of the engine's groups.
        layout: with the pipeline.
    """

    def __init__(self, sharding: ShardingState, layout: Layout) -> None:
        pipeline = layout.pipeline
        assert pipeline is not None, "only a pipeline has a schedule"
        self._sharding = sharding
        self._held = pipeline.held
        self._reduced_stages: set[int] = set()
        self._kept_for: dict[ParamGroup, set[int]] = {}
        stage_of_unit = {group.unit: group.stages[0] for group in layout.groups}
        units = {
            stage: [unit for unit in layout.held_units if stage_of_unit.get(unit) == stage] for stage in self._held
        }
        self._orders: Mapping[int, PrefetchOrder] = {stage: RecordedOrder(names) for stage, names in units.items()}
        self._aside: dict[tuple[int, int], list[tuple[int, bool]]] = {}

    def unshard(self, stage: int) -> None:
        """Start to gather a stage's parameters, which stay whole until `reshard`."""
        for group in self._groups_of(stage):
            group.unshard()
            self._kept_for.setdefault(group, set()).add(stage)

    def wait(self, stage: int) -> None:
        """Have the parameters present that `unshard` has asked for."""
        for group in self._groups_of(stage):
            if stage in self._kept_for.get(group, ()) and group not in self._sharding.kept:
                group.keep()
                self._sharding.kept.add(group)

    def reshard(self, stage: int) -> None:
        """Release a stage's parameters that no other stage keeps."""
        for group in self._groups_of(stage):
            keepers = self._kept_for.get(group, set())
            keepers.discard(stage)
            if not keepers:
                self._sharding.kept.discard(group)
                group.is_pinned = self._sharding.is_held
                group.reshard()

    def prefetch(self, stage: int) -> None:
        """Start what gathering a stage's parameters would have to wait for on the host."""
        for group in self._groups_of(stage):
            group.prefetch()

    def reduce(self, stage: int, is_last: bool) -> None:
        """Start to reduce a stage's gradients; those that another stage of this rank adds to, with the last of them."""
        self._reduced_stages.add(stage)
        groups = [
            group
            for group in self._groups_of(stage)
            if not is_last or self._reduced_stages.issuperset(self._held.intersection(group.spec.stages))
        ]
        self._sharding.reduce(groups, is_last)

    def enter(self, stage: int) -> None:
        """A stage is about to compute: its blocks follow each other, and beside them it uses its own parameters."""
        self._sharding.order = self._orders[stage]
        self._sharding.units[0].stage = stage

    def set_aside(self, stage: int, micro_batch: int) -> None:
        """A forward has ended whose backward comes later, behind those of others."""
        self._aside[stage, micro_batch] = [unit.set_aside() for unit in self._sharding.units]

    def take_up(self, stage: int, micro_batch: int) -> None:
        """The backward of a forward that was set aside is about to begin."""
        for unit, aside in zip(self._sharding.units, self._aside.pop((stage, micro_batch), ()), strict=False):
            unit.take_up(aside)  # but for a second half of the backward

    def end_step(self) -> None:
        """Forget what was under way."""
        self._aside.clear()
        self._reduced_stages.clear()
        self._kept_for.clear()
        self._sharding.units[0].stage = None

    def _groups_of(self, stage: int) -> list[ParamGroup]:
        return [group for group in self._sharding.groups if stage in group.spec.stages]
