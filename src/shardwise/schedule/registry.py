"""List the pipeline schedules by name: how each places its stages, and which function generates it.

>>> print(pipeline_step("gpipe", num_ranks=2, num_micro_batches=2))
rank 0: 0F0 0F1 0B0 0B1
rank 1: 1F0 1F1 1B0 1B1
>>> placement_of("zb-v", num_ranks=4).stages_of(0)
(0, 7)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardwise.config.errors import ConfigError
from shardwise.schedule.actions import Schedule
from shardwise.schedule.pipelines import (
    ScheduleRows,
    gpipe_rows,
    interleaved_rows,
    naive_rows,
    one_f_one_b_rows,
    zero_bubble_h1_rows,
    zero_bubble_h2_rows,
    zero_bubble_v_rows,
)
from shardwise.schedule.placement import StagePlacement


@dataclass(frozen=True, slots=True)
class ScheduleRecipe:
    """Describe a pipeline schedule.

    `rows` takes the numbers of ranks, micro-batches and virtual stages. `splits_backward` says that it
    writes BACKWARD_INPUT and BACKWARD_WEIGHT instead of BACKWARD. A rank has `min_virtual_stages` to
    `max_virtual_stages` stages (None: any number); `rule` says so in error messages, with alternatives.
    `repeats_by_rounds` says that what a rank holds repeats itself after a few rounds of micro-batches, of the lengths
    of `interleaved_rounds`; the planner then counts those rounds only.
    """

    name: str
    rows: Callable[[int, int, int], ScheduleRows]
    splits_backward: bool = False
    is_v_shaped: bool = False
    repeats_by_rounds: bool = False
    min_virtual_stages: int = 1
    max_virtual_stages: int | None = None
    rule: str = "which has a stage or more on every rank; use 1 or more"

    @property
    def is_interleaved(self) -> bool:
        """Say whether a rank has two stages or more, as many as the user wants."""
        return self.min_virtual_stages > 1 and self.max_virtual_stages is None

    def placement(self, num_ranks: int, virtual_stages: int = 1) -> StagePlacement:
        """Return where the stages are; 1 virtual stage, the default of the config, means 2 in a V.

        Raises ConfigError where the schedule has no such number of virtual stages, ScheduleError without a rank.
        """
        stages_per_rank = 2 if self.is_v_shaped and virtual_stages == 1 else virtual_stages
        most = stages_per_rank if self.max_virtual_stages is None else self.max_virtual_stages
        if not self.min_virtual_stages <= stages_per_rank <= most:
            raise ConfigError(
                "schedule-virtual-stages",
                f"pipeline.virtual_stages={virtual_stages} for schedule {self.name}, {self.rule}",
            )
        return StagePlacement(num_ranks, stages_per_rank, self.is_v_shaped)


_ONE_STAGE = "which has one stage a rank; use 1, or schedule interleaved"
_SEVERAL_STAGES = "which has several stages a rank; use 2 or more, or schedule 1f1b"
_TWO_STAGES = "which has two stages a rank, in a V; use 2, or schedule interleaved"

RECIPES: Mapping[str, ScheduleRecipe] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            ScheduleRecipe("naive", naive_rows),
            ScheduleRecipe("gpipe", gpipe_rows),
            ScheduleRecipe("1f1b", lambda p, m, v: one_f_one_b_rows(p, m), max_virtual_stages=1, rule=_ONE_STAGE),
            ScheduleRecipe(
                "interleaved", interleaved_rows, repeats_by_rounds=True, min_virtual_stages=2, rule=_SEVERAL_STAGES
            ),
            ScheduleRecipe(
                "zb-h1",
                lambda p, m, v: zero_bubble_h1_rows(p, m),
                splits_backward=True,
                repeats_by_rounds=True,
                max_virtual_stages=1,
                rule=_ONE_STAGE,
            ),
            ScheduleRecipe(
                "zb-h2",
                lambda p, m, v: zero_bubble_h2_rows(p, m),
                splits_backward=True,
                repeats_by_rounds=True,
                max_virtual_stages=1,
                rule=_ONE_STAGE,
            ),
            ScheduleRecipe(
                "zb-v",
                lambda p, m, v: zero_bubble_v_rows(p, m),
                splits_backward=True,
                repeats_by_rounds=True,
                is_v_shaped=True,
                min_virtual_stages=2,
                max_virtual_stages=2,
                rule=_TWO_STAGES,
            ),
        )
    }
)
"""`pipeline.schedule` may name these schedules."""


def recipe_of(name: str) -> ScheduleRecipe:
    """Return the recipe of a name; raise ConfigError where there is none."""
    if name not in RECIPES:
        raise ConfigError(
            "schedule-unknown", f"pipeline.schedule={name!r} is no schedule; use one of {', '.join(RECIPES)}"
        )
    return RECIPES[name]


def placement_of(recipe_name: str, num_ranks: int, virtual_stages: int = 1) -> StagePlacement:
    """Return where the stages of a schedule are.

    Args:
        virtual_stages: stages a rank; 1 means 2 in a V.

    Raises ConfigError as `ScheduleRecipe.placement` and `recipe_of` do.
    """
    return recipe_of(recipe_name).placement(num_ranks, virtual_stages)


def pipeline_step(recipe_name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Return the computations of one optimizer step, a row for each pipeline rank, of whole stages.

    Args:
        virtual_stages: stages a rank; 1 means 2 in a V.

    Raises ConfigError where the schedule is unknown or has no such number of virtual stages, and ScheduleError
    on counts below 1.
    """
    return pipeline_rows(recipe_name, num_ranks, num_micro_batches, virtual_stages).schedule()


def pipeline_rows(recipe_name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> ScheduleRows:
    """Return the rows of `pipeline_step`, generated rank by rank and without `Action` objects.

    `recipe_name`, `num_ranks`, `num_micro_batches`, `virtual_stages` and the errors are those of `pipeline_step`.

    >>> [stage for _, stage, _ in pipeline_rows("zb-v", num_ranks=4, num_micro_batches=1).of(1)]
    [1, 6, 6, 6, 1, 1]
    """
    recipe = recipe_of(recipe_name)
    placement = recipe.placement(num_ranks, virtual_stages)
    return recipe.rows(num_ranks, num_micro_batches, placement.stages_per_rank)
