"""The lists that the generators write, and their counts against the wire formulas of the stage table."""

from collections import Counter

import pytest

from harness.refusals import refused
from shardwise.schedule import ActionKind, Schedule, data_parallel_step, forward_only, verify

GROUPS = ("root", "b0", "b1", "b2")
STAGES = (
    {},
    {"unshard_after_step": True},
    {"unshard_after_step": True, "reduce_each_backward": True},
    {"unshard_for_use": True, "reduce_each_backward": True},
)


def row(schedule: Schedule) -> str:
    return " ".join(str(action).removeprefix("0") for action in schedule.ranks[0])


def test_stage_3_prefetches_the_next_group() -> None:
    step = data_parallel_step(("root", "b0", "b1"), 1, **STAGES[3])
    assert row(step) == (
        "UNSHARD[root] UNSHARD[b0] F0[root] UNSHARD[b1] F0[b0] RESHARD[b0] F0[b1] "
        "UNSHARD[b0] B0[b1] REDUCE[b1] RESHARD[b1] B0[b0] REDUCE[b0] RESHARD[b0] "
        "B0[root] REDUCE[root] RESHARD[root] STEP[root] STEP[b0] STEP[b1]"
    )


def test_stage_1_reduces_once_and_gathers_what_it_stepped() -> None:
    step = data_parallel_step(("root", "b0"), 2, **STAGES[1])
    assert row(step) == (
        "F0[root] F0[b0] B0[b0] B0[root] F1[root] F1[b0] B1[b0] REDUCE[b0] B1[root] REDUCE[root] "
        "STEP[root] UNSHARD[root] STEP[b0] UNSHARD[b0]"
    )


def test_recompute_stands_before_the_backward_of_the_groups_named() -> None:
    step = data_parallel_step(("root", "b0", "b1"), 1, recompute=("b1",))
    assert "F0[b1] RECOMPUTE0[b1] B0[b1]" in row(step)
    assert row(step).count("RECOMPUTE") == 1


def test_evaluation() -> None:
    assert row(forward_only(("root", "b0"), 2)) == "F0[root] F0[b0] F1[root] F1[b0]"
    gathered = forward_only(("root", "b0"), 1, unshard_for_use=True)
    assert row(gathered) == "UNSHARD[root] UNSHARD[b0] F0[root] F0[b0] RESHARD[b0] RESHARD[root]"


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("stage", "num_gathers", "num_reduces"),
    [
        (0, lambda m: 0, lambda m: 1),  # an all-reduce at the boundary
        (1, lambda m: 1, lambda m: 1),
        (2, lambda m: 1, lambda m: m),
        (3, lambda m: 2 * m, lambda m: m),
    ],
)
def test_collectives_a_step_equal_the_stage_table(stage, num_gathers, num_reduces, num_micro_batches) -> None:
    """In units of one group: 2Ψ | Ψ + Ψ | mΨ + Ψ | 2mΨ + mΨ, where the root group is not kept."""
    step = data_parallel_step(GROUPS, num_micro_batches, **STAGES[stage], ends_kept=False, num_ranks=2)
    for rank in step.ranks:
        count = Counter((action.kind, action.group) for action in rank)
        for group in GROUPS:
            assert count[ActionKind.UNSHARD, group] == num_gathers(num_micro_batches)
            assert count[ActionKind.REDUCE, group] == num_reduces(num_micro_batches)
            assert count[ActionKind.STEP, group] == 1
            assert count[ActionKind.FORWARD, group] == count[ActionKind.BACKWARD, group] == num_micro_batches


def test_the_root_and_the_last_block_are_gathered_once_a_micro_batch() -> None:
    step = data_parallel_step(GROUPS, 3, **STAGES[3])
    count = Counter((action.kind, action.group) for action in step.ranks[0])
    assert [count[ActionKind.UNSHARD, group] for group in GROUPS] == [3, 6, 6, 3]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("groups", [GROUPS[:1], GROUPS[:2], GROUPS])
def test_every_generated_schedule_verifies(groups, stage) -> None:
    for num_micro_batches in (1, 2, 3):
        for ends_kept in (True, False):
            for recompute in ((), groups[1:]):
                options = {**STAGES[stage], "ends_kept": ends_kept, "recompute": recompute, "num_ranks": 2}
                verify(data_parallel_step(groups, num_micro_batches, **options))
        verify(forward_only(groups, num_micro_batches, unshard_for_use=stage == 3, num_ranks=2))


@pytest.mark.parametrize("unshard_for_use", [True, False])
@pytest.mark.parametrize("reduce_each_backward", [True, False])
def test_rules_are_free_to_combine(unshard_for_use, reduce_each_backward) -> None:
    """Stage 3 under no_sync reduces once; plain data parallelism without no_sync reduces each backward."""
    rules = {"unshard_for_use": unshard_for_use, "reduce_each_backward": reduce_each_backward}
    verify(data_parallel_step(GROUPS, 2, **rules))


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ({"groups": ()}, ("groups-empty", "groups=[]")),
        ({"groups": ("root", "b0", "b0")}, ("group-named-twice", "'b0'")),
        ({"num_micro_batches": 0}, ("count-below-one", "num_micro_batches=0")),
        ({"num_ranks": 0}, ("count-below-one", "num_ranks=0")),
        ({"recompute": ("b9",)}, ("recompute-group-unknown", "recompute='b9'", "root, b0")),
        ({"unshard_for_use": True, "unshard_after_step": True}, ("schedule-rules-contradict", "unshard_for_use=True")),
    ],
)
def test_refusals(arguments: dict, values: tuple[str, ...]) -> None:
    with refused(*values):
        data_parallel_step(**{"groups": ("root", "b0"), "num_micro_batches": 1, **arguments})
