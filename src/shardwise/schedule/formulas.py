"""Compute bubbles and micro-batches in flight, by the closed forms of `RECIPES` where it has them, and FLOPs.

Those of the pipeline schedules hold for equal stages and free transfers, and some only for enough micro-batches or for
some costs. Where one does not hold, a ScheduleError says so, and `simulate` gives the numbers of the schedule itself.

A stage activation is what a stage keeps of one micro-batch for its backward. It is *in flight* from FORWARD
until BACKWARD or BACKWARD_INPUT has ended. What BACKWARD_INPUT leaves for the gradients of the weights is
*deferred* until BACKWARD_WEIGHT has ended. A forward without a backward, as in an evaluation, holds its activation
only while it runs.

Symbols: p ranks, m micro-batches, v stages a rank, i a rank from 0; F, B and W are the seconds that a rank takes
for one micro-batch's forward, gradient of the input and gradient of the weights, all its stages together.

>>> bubble_s("1f1b", 4, 8, 1, forward_s=1, backward_input_s=1, backward_weight_s=1)
9.0
>>> bubble_s("zb-h1", 4, 8, 1, forward_s=1, backward_input_s=1, backward_weight_s=1)
3
>>> max_in_flight("interleaved", 4, 8, 2, rank=0)  # pv + p - 1
11
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from shardwise.schedule.actions import Action, ActionKind, ScheduleError
from shardwise.schedule.pipelines import interleaved_rounds, pipeline_rows, placement_of, recipe_of
from shardwise.schedule.simulate import OpTimes

_ENDS_IN_FLIGHT = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
_SPLIT = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)

# Rounds of micro-batches after which a schedule that `repeats_by_rounds` holds what it held before.
_NUM_ROUNDS: Final = 3


def bubble_s(
    recipe_name: str,
    num_ranks: int,
    num_micro_batches: int,
    virtual_stages: int,
    forward_s: float,
    backward_input_s: float,
    backward_weight_s: float,
) -> float:
    """Return the seconds that the rank with the longest span is idle between its first start and its last end.

    `rank_bubble_s` measures the same. A rank's own span counts, since an optimizer step that waits for no other
    rank may begin directly after it; where the step waits for all ranks, H2 and ZB-V lose more. `RECIPES` has the
    formulas and where they hold.

    Args:
        forward_s: F of the formulas; B is `backward_input_s`, and W is `backward_weight_s`.

    Raises ScheduleError where a formula does not hold, and what `placement_of` raises.
    """
    p, m = num_ranks, num_micro_batches
    v, bubble = placement_of(recipe_name, p, virtual_stages).stages_per_rank, recipe_of(recipe_name).bubble
    unknown = f"where the bubble of {recipe_name} has no closed form; simulate the schedule"
    if bubble is None:
        raise ScheduleError("no-closed-form", f"schedule {recipe_name} is one {unknown}")
    if m < (least := bubble.least_micro_batches(p, v)):
        raise ScheduleError("no-closed-form", f"num_micro_batches={m} is below {least}, {unknown}")
    if bubble.needs_ordered_costs and not backward_weight_s <= forward_s <= backward_input_s:
        costs = f"F={forward_s} s, B={backward_input_s} s, W={backward_weight_s} s"
        raise ScheduleError("no-closed-form", f"{costs} without W <= F <= B, {unknown}")
    return bubble.seconds(p, m, v, forward_s, backward_input_s, backward_weight_s)


def bubble_share(
    recipe_name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int, times: OpTimes
) -> float | None:
    """Return `bubble_s` as a share of the longest span of a rank; None where there is no closed form or no time.

    >>> bubble_share("1f1b", 4, 9, 1, OpTimes())
    0.25

    Args:
        times: of a micro-batch on each rank, of which the transfer is free.

    Raises what `placement_of` raises.
    """
    try:
        idle_s = bubble_s(
            recipe_name,
            num_ranks,
            num_micro_batches,
            virtual_stages,
            times.forward_s,
            times.backward_input_s,
            times.backward_weight_s,
        )
    except ScheduleError:
        return None
    span_s = idle_s + num_micro_batches * times.total_s
    return idle_s / span_s if span_s > 0 else None


def least_bubble_share(recipe_name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int) -> float:
    """Return a lower bound of the bubble as a share of what a rank computes for any times of equal stages, or 0.

    >>> least_bubble_share("interleaved", 4, 8, 3), least_bubble_share("zb-h2", 4, 8, 1)
    (0.125, 0.0)
    >>> least_bubble_share("interleaved", 4, 1, 3), round(least_bubble_share("zb-h2", 4, 1, 1), 3)
    (3.0, 1.8)
    """
    formula = recipe_of(recipe_name).least_bubble_share
    return 0.0 if formula is None else formula(num_ranks, num_micro_batches, virtual_stages)


def max_in_flight(recipe_name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int, rank: int) -> int:
    """Return the most stage activations that a rank holds between forward and backward, each 1/v of a rank's layers.

    Raises what `placement_of` raises, and ScheduleError where there is no such rank or no micro-batch.
    """
    placement = pipeline_rows(recipe_name, num_ranks, num_micro_batches, virtual_stages).placement
    placement.stages_of(rank)  # raises where there is no such rank
    formula, v = recipe_of(recipe_name).max_in_flight, placement.stages_per_rank
    if formula is not None:
        return formula(num_ranks, num_micro_batches, v, rank)
    moments = moments_in_flight(recipe_name, num_ranks, num_micro_batches, virtual_stages, rank)
    return max(sum(held[:v]) for _, *held in moments)


def moments_in_flight(
    recipe_name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int, rank: int
) -> tuple[tuple[int, ...], ...]:
    """Return what a rank holds at the moments of a step; of equal moments one, and what rounds repeat once.

    >>> moments_in_flight("1f1b", 4, 8, 1, rank=1)
    ((0, 3, 0),)
    >>> moments_in_flight("zb-h1", 2, 4, 1, rank=1)
    ((-1, 1, 0), (0, 1, 0), (-1, 0, 1), (-1, 1, 1), (0, 1, 1), (-1, 0, 2))

    Returns:
        For each moment: the index, among the rank's stages, of the one whose backward begins, or -1 where a computation
        ends; the micro-batches in flight of each stage; and of each stage those with deferred gradients of weights.
    """
    recipe, stages = recipe_of(recipe_name), placement_of(recipe_name, num_ranks, virtual_stages).stages_of(rank)
    if len(stages) == 1 and not recipe.splits_backward and recipe.max_in_flight:  # most is held as a backward begins
        return ((0, max_in_flight(recipe_name, num_ranks, num_micro_batches, virtual_stages, rank), 0),)
    number = num_distinct_micro_batches(recipe_name, num_ranks, num_micro_batches)
    index_of, num_stages = {stage: index for index, stage in enumerate(stages)}, len(stages)
    counts, moments = [0] * (2 * num_stages), dict[tuple[int, ...], None]()
    for kind, stage in pipeline_rows(recipe_name, num_ranks, number, virtual_stages).row(rank):
        index = index_of[stage]
        if kind is ActionKind.FORWARD:
            counts[index] += 1
            moments[-1, *counts] = None
        elif kind is ActionKind.BACKWARD_WEIGHT:
            counts[num_stages + index] -= 1
        else:
            moments[index, *counts] = None
            counts[index] -= 1
            if kind is ActionKind.BACKWARD_INPUT:
                counts[num_stages + index] += 1
                moments[-1, *counts] = None
    return tuple(moments)


def num_distinct_micro_batches(recipe_name: str, num_ranks: int, num_micro_batches: int) -> int:
    """Return the micro-batches after which `moments_in_flight` of a schedule repeats itself, or all of them."""
    if not recipe_of(recipe_name).repeats_by_rounds:
        return num_micro_batches
    return min(num_micro_batches, _NUM_ROUNDS * max(interleaved_rounds(num_ranks, num_micro_batches)))


def held_along(row: Sequence[Action], in_flight_bytes: float, deferred_bytes: float) -> list[float]:
    """Return the bytes held during each action of a row.

    Where a row names a stage's groups, the stage holds from its first group's forward to its last group's backward.

    Args:
        in_flight_bytes: of a stage activation in flight, M_B of Qi et al. 2023 (arXiv 2401.10241), section 2.3.
        deferred_bytes: kept for a deferred gradient of weights, M_W there.
    """
    first: dict[tuple[int, int | None], int] = {}
    last: dict[tuple[ActionKind, int, int | None], int] = {}
    for index, action in enumerate(row):
        if action.kind is ActionKind.FORWARD:
            first.setdefault((action.stage, action.micro_batch), index)
        last[action.kind, action.stage, action.micro_batch] = index
    # What is held during action k is the sum of the changes up to k.
    changes: list[float] = [0] * (len(row) + 1)
    for key, start in first.items():
        end = max(last.get((kind, *key), start) for kind in _ENDS_IN_FLIGHT)
        changes[start] += in_flight_bytes
        changes[end + 1] -= in_flight_bytes
        begin, finish = (last.get((kind, *key), end) for kind in _SPLIT)
        changes[begin + 1] += deferred_bytes
        changes[finish + 1] -= deferred_bytes
    return list(accumulate(changes[:-1]))


def training_flops_per_token(
    num_matmul_params: float, attention_width: float, num_keys: float, *, trains: bool = True
) -> float:
    """Return the model FLOPs of forward and backward for one token, nothing computed twice.

    They are 6 N + 12 L H D S: Chowdhery et al. 2022 (PaLM, arXiv 2204.02311), appendix B. A matrix that is not trained
    has no gradient of its own, which leaves 4 N.

    >>> training_flops_per_token(8e9, 32 * 4096, 8192) / 1e9
    60.884901888

    Args:
        num_matmul_params: N, elements of the matrices that multiply a token: the head's are, an embedding's are not.
        attention_width: L H D, layers times heads times elements of a head.
        num_keys: S, keys that a token attends to, a mean; the paper counts all, a causal mask leaves half.
    """
    return (6.0 if trains else 4.0) * num_matmul_params + 12.0 * attention_width * num_keys
