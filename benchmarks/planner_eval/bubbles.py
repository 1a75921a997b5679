"""Compute the idle share of a pipeline's ranks from the schedule and the times of its computations.

>>> round(bubble_rate("1f1b", 8, 24, 1, OpTimes(18.522, 18.086, 9.337, 0.601)), 4)
0.2431
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from planner_eval.searched_schedule import zero_bubble_searched
from shardwise.schedule.lower import insert_transfers
from shardwise.schedule.pipelines import placement_of
from shardwise.schedule.simulate import OpTimes, PipelineSimulator, rank_span_s, simulate

SEARCHED: Final[Mapping[str, tuple[str, int]]] = MappingProxyType({"zb-1p": ("zb-h1", 1), "zb-2p": ("zb-h2", 2)})
"""Schedules that are searched for their times: the recipe whose memory they keep to, and how many times p that is."""


def bubble_rate(
    recipe_name: str,
    num_ranks: int,
    num_micro_batches: int,
    virtual_stages: int,
    times: OpTimes,
    *,
    deferred_share: float = 1.0,
) -> float:
    """Return the bubble rate of Qi et al. 2023 (arXiv 2401.10241), section 2.3: (cost - m(F + B + W)) / cost.

    The cost is the longest time between a rank's first computation and its last, since in their runs no rank waits
    for the others before it updates its parameters.

    Args:
        recipe_name: as `pipeline.schedule`; or zb-1p or zb-2p, which are searched for the given times.
        num_ranks: of the pipeline.
        num_micro_batches: of a step.
        virtual_stages: stages of each rank.
        times: of a micro-batch on each rank, all its stages together.
        deferred_share: as the function `deferred_share` returns it.

    Raises:
        ConfigError: no such schedule, or not with so many stages a rank.
        ScheduleError: a count below 1.
    """
    of_recipe, times_p = SEARCHED.get(recipe_name, (recipe_name, 0))
    placement = placement_of(of_recipe, num_ranks, virtual_stages)
    stages = [times.split(placement.stages_per_rank)] * placement.num_stages
    span = PipelineSimulator().span(of_recipe, num_ranks, virtual_stages, num_micro_batches, stages)
    if not times_p:
        return span.bubble_rate
    searched = zero_bubble_searched(
        num_ranks, num_micro_batches, times, max_held=times_p * num_ranks, deferred_share=deferred_share
    )
    timed = simulate(insert_transfers(searched), times.cost(1))
    span_s = max(rank_span_s(timed, rank) for rank in range(num_ranks))
    return min(span.bubble_rate, 1 - num_micro_batches * times.total_s / span_s)


def deferred_share(hidden_size: int, num_heads: int, seq_len: int) -> float:
    """Return M_W / M_B: the share of what a block keeps for its backward that only its gradients of weights still need.

    It is 32 sbh of sb(34h + 5as) bytes, where the scores of attention are kept: Qi et al. 2023 (arXiv 2401.10241),
    table 1.

    >>> round(deferred_share(2304, 24, 1024), 3)
    0.366

    Args:
        hidden_size: of the model.
        num_heads: of attention.
        seq_len: tokens of a sequence.
    """
    return 32 * hidden_size / (34 * hidden_size + 5 * num_heads * seq_len)
