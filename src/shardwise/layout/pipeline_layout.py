"""The pipeline layout says which units each stage runs and which ranks of the pipeline hold which parameters.

Two stages a rank, looped over two ranks, of a model whose head is tied to its embedding:

    rank 0   stage 0: embed, block 0     stage 2: block 2
    rank 1   stage 1: block 1            stage 3: block 3, norm, head: holds embed.weight too

>>> placement = StagePlacement(num_ranks=2, stages_per_rank=2)
>>> units = (("embed", "b0"), ("b1",), ("b2",), ("b3", "norm", "head"))
>>> pipeline = PipelineLayout(placement, units, {"embed.weight": (0, 3), "b1.weight": (1,)}, index=1)
>>> sorted(pipeline.held), pipeline.holders((0, 3)), pipeline.holders((1,))
([1, 3], (0, 1), (1,))
>>> pipeline.rank_running("b2.norm.running_mean"), pipeline.rank_running("positions")
(0, None)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.schedule.placement import StagePlacement


@dataclass(frozen=True)
class PipelineLayout:
    """Hold the stages of a model, and this rank's place among them.

    Attributes:
        placement: which rank of the pipeline has which stages.
        units: names of the modules that each stage runs, in order; a stage sends the last one's output to the next.
        stages_of: the stages that use each parameter, ascending, by the first of its names.
        gathers_once: parameters stored as shards are gathered once a batch, and gradients reduced once; otherwise
            for each micro-batch.
        index: of this rank in the pipeline.
        summary: a table of the stages with their costs, for people.
    """

    placement: StagePlacement
    units: tuple[tuple[str, ...], ...]
    stages_of: Mapping[str, tuple[int, ...]]
    gathers_once: bool = True
    index: int = 0
    summary: str = ""

    @property
    def num_stages(self) -> int:
        """Return the number of stages of all ranks."""
        return self.placement.num_stages

    @property
    def held(self) -> frozenset[int]:
        """Return the stages of this rank."""
        return self.stages_on(self.index)

    @property
    def has_last(self) -> bool:
        """Say whether this rank has the last stage, which computes the loss."""
        return self.num_stages - 1 in self.held

    def stages_on(self, index: int) -> frozenset[int]:
        """Return the stages of pipeline rank `index`."""
        return frozenset(self.placement.stages_of(index))

    def holders(self, stages: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks of the pipeline that have any of `stages`, ascending."""
        return tuple(sorted({self.placement.rank_of(stage) for stage in stages}))

    def rank_running(self, name: str) -> int | None:
        """Return the rank of the pipeline that runs the module of a buffer; None where every rank does.

        Args:
            name: fully qualified name of the buffer, or of anything else within a module.
        """
        parts = name.split(".")
        modules = {".".join(parts[:end]) for end in range(len(parts), 0, -1)}
        stage = next((stage for stage, units in enumerate(self.units) if not modules.isdisjoint(units)), None)
        return None if stage is None else self.placement.rank_of(stage)
