"""Place stages on pipeline ranks: looped over the ranks, or down and up again in a V.

    looped, v = 2        V-shaped, v = 2
    rank 0   0   3       rank 0   0   5
    rank 1   1   4       rank 1   1   4
    rank 2   2   5       rank 2   2   3

>>> StagePlacement(3, stages_per_rank=2).stages_of(0)
(0, 3)
>>> StagePlacement(3, stages_per_rank=2, is_v_shaped=True).stages_of(0)
(0, 5)
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.schedule.actions import ScheduleError


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """Place stages on `num_ranks` pipeline ranks; in every placement stage 0 is the first and feeds stage 1.

    In a loop, stage s is on rank s % num_ranks. In a V, with two stages a rank, stage s is on rank s on the way
    down and on rank 2 * num_ranks - 1 - s on the way up: the last rank holds two neighbours, the first rank the
    first stage and the last. Raises ScheduleError on counts below 1 and on a V of other than two stages a rank.
    """

    num_ranks: int
    stages_per_rank: int = 1
    is_v_shaped: bool = False

    def __post_init__(self) -> None:
        for name in ("num_ranks", "stages_per_rank"):
            if getattr(self, name) < 1:
                raise ScheduleError(
                    "count-below-one", f"{name}={getattr(self, name)} is below 1; a pipeline has a stage on every rank"
                )
        if self.is_v_shaped and self.stages_per_rank != 2:
            raise ScheduleError(
                "v-has-two-stages", f"stages_per_rank={self.stages_per_rank} of a V, which goes down and up; use 2"
            )

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that holds a stage; raise ScheduleError where there is no such stage."""
        if not 0 <= stage < self.num_stages:
            raise ScheduleError(
                "stage-out-of-range", f"stage={stage} is none of {self.num_stages}; stages count from 0"
            )
        rank = stage % self.num_ranks
        return self.num_ranks - 1 - rank if self.is_v_shaped and stage >= self.num_ranks else rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank holds, ascending; raise ScheduleError where there is no such rank."""
        if not 0 <= rank < self.num_ranks:
            raise ScheduleError("rank-out-of-range", f"rank={rank} is none of {self.num_ranks}; ranks count from 0")
        if self.is_v_shaped:
            return (rank, 2 * self.num_ranks - 1 - rank)
        return tuple(range(rank, self.num_stages, self.num_ranks))
