"""Lets a pipeline's schedule drive the groups of its stages.

Groups stay whole for a batch, and are reduced after their last backward. Each micro-batch in flight has its own record
of what units remember of its forward.
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
        sharding: the sharding state of the engine's groups.
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
        self._records: dict[tuple[int, int], list[tuple[int, bool]]] = {}

    def unshard(self, stage: int) -> None:
        """Start to gather a stage's parameters, which stay whole until `reshard`."""
        for group in self._groups_of(stage):
            group.unshard()
            self._kept_for.setdefault(group, set()).add(stage)

    def wait(self, stage: int) -> None:
        """Wait for the parameters that `unshard` has asked for."""
        for group in self._groups_of(stage):
            if stage in self._kept_for.get(group, ()) and group not in self._sharding.kept:
                group.show()
                group.pin()
                self._sharding.kept.add(group)

    def reshard(self, stage: int) -> None:
        """Release a stage's parameters that no other stage keeps."""
        for group in self._groups_of(stage):
            keepers = self._kept_for.get(group, set())
            keepers.discard(stage)
            if not keepers:
                self._sharding.kept.discard(group)
                group.pin(group in self._sharding.held)
                group.reshard()

    def prefetch(self, stage: int) -> None:
        """Start what gathering a stage's parameters would have to wait for on the host."""
        for group in self._groups_of(stage):
            group.prefetch()

    def reduce(self, stage: int, is_last: bool) -> None:
        """Start to reduce a stage's gradients.

        With `is_last`, a group that several stages of this rank add to is reduced with the last of these stages.
        """
        self._reduced_stages.add(stage)
        groups = [
            group
            for group in self._groups_of(stage)
            if not is_last or self._reduced_stages.issuperset(self._held.intersection(group.spec.stages))
        ]
        self._sharding.reduce(groups, is_last)

    def select_stage(self, stage: int) -> None:
        """Prepare a stage's computation: select its order of blocks, and the root's parameters that it uses."""
        self._sharding.order = self._orders[stage]
        self._sharding.units[0].stage = stage

    def save_record(self, stage: int, micro_batch: int) -> None:
        """Keep what units remember of a forward whose backward comes after those of other forwards."""
        self._records[stage, micro_batch] = [unit.save_record() for unit in self._sharding.units]

    def restore_record(self, stage: int, micro_batch: int) -> None:
        """Restore what `save_record` has kept, before the backward of that forward."""
        for unit, record in zip(self._sharding.units, self._records.pop((stage, micro_batch), ()), strict=False):
            unit.restore_record(record)  # but for a second half of the backward

    def end_step(self) -> None:
        """Forget what was under way."""
        self._records.clear()
        self._reduced_stages.clear()
        self._kept_for.clear()
        self._sharding.units[0].stage = None

    def _groups_of(self, stage: int) -> list[ParamGroup]:
        return [group for group in self._sharding.groups if stage in group.spec.stages]
