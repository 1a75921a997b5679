"""Every generated schedule verifies, and every single mistake in one is caught unless it is none.

Which mistakes are none is decided by an oracle that shares nothing with the verifier: it runs the row on symbolic
values and compares what the step leaves with what it should.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.refusals import refused
from harness.zero_schedules import data_parallel_step, forward_only
from shardwise.schedule import Action, ActionKind, Schedule, ScheduleError, verify

RULES = (
    {},
    {"reduce_each_backward": True},
    {"unshard_after_step": True},
    {"unshard_after_step": True, "reduce_each_backward": True},
    {"unshard_for_use": True},
    {"unshard_for_use": True, "reduce_each_backward": True},
)


def steps(num_micro_batches: tuple[int, ...] = (1, 2)) -> Iterator[Schedule]:
    for rules in RULES:
        for groups in (("root",), ("root", "b0"), ("root", "b0", "b1")):
            for m in num_micro_batches:
                for ends_kept in (True, False) if "unshard_for_use" in rules else (True,):
                    num_ranks = 1 + (len(groups) == 2)
                    options = {**rules, "ends_kept": ends_kept, "num_ranks": num_ranks}
                    yield data_parallel_step(groups, m, **options, recompute=groups[1:] if m == 2 else ())


STEPS = tuple(steps((1, 2, 3)))


def with_row(schedule: Schedule, row: tuple[Action, ...]) -> Schedule:
    """The schedule with another last row."""
    return replace(schedule, ranks=(*schedule.ranks[:-1], row))


def is_legal(schedule: Schedule) -> bool:
    try:
        verify(schedule)
    except ScheduleError as error:
        first_line = str(error).splitlines()[0]
        assert "; " in first_line, f"no fix in {first_line!r}"
        return False
    return True


def outcome(schedule: Schedule, row: tuple[Action, ...]) -> tuple | None:
    """What a row leaves, on symbolic values; None where it reads what is not there or moves for nothing."""
    shard = {action.group: hash(action.group) for action in schedule.ranks[0]}
    full = {} if schedule.unshard_for_use else dict(shard)
    used, hidden, saved, redone, grads, reduced = set(), {}, {}, {}, {}, {}
    try:
        for action in row:
            group, m = action.group, action.micro_batch
            match action.kind:
                case ActionKind.FORWARD:
                    saved[m, group] = hidden.get(m, m)
                    hidden[m] = hash(("F", saved[m, group], full[group]))
                    used.add(group)
                case ActionKind.RECOMPUTE:
                    if (m, group) in redone:
                        return None
                    redone[m, group] = (saved[m, group], full[group])
                    used.add(group)
                case ActionKind.BACKWARD:
                    if schedule.reduce_each_backward and group in grads:
                        return None
                    hidden[m] = hash(("B", hidden[m], full[group]))
                    inputs = redone.get((m, group), (saved.pop((m, group)), full[group]))
                    grads[group] = grads.get(group, 0) + hash((hidden[m], inputs))
                    used.add(group)
                case ActionKind.UNSHARD:
                    if full.get(group) == shard[group]:
                        return None
                    full[group] = shard[group]
                    used.discard(group)
                case ActionKind.RESHARD:
                    del full[group]
                    used.remove(group)
                case ActionKind.REDUCE:
                    if not schedule.reduce_each_backward and group in reduced:
                        return None
                    reduced[group] = reduced.get(group, 0) + grads.pop(group)
                case ActionKind.STEP:
                    shard[group] = hash((shard[group], reduced.pop(group)))
                    if not (schedule.unshard_for_use or schedule.unshard_after_step):
                        full[group] = shard[group]
    except KeyError:
        return None
    return shard, full, grads, reduced


def issued(row: tuple[Action, ...]) -> tuple[list[Action], ...]:
    return tuple([action for action in row if action.kind is kind] for kind in (ActionKind.UNSHARD, ActionKind.REDUCE))


def is_harmless(schedule: Schedule, row: tuple[Action, ...]) -> bool:
    """Whether a step may have this last row instead of its own."""
    aligned = len(schedule.ranks) == 1 or issued(row) == issued(schedule.ranks[0])
    return aligned and outcome(schedule, row) == outcome(schedule, schedule.ranks[0])


def check(schedule: Schedule, row: tuple[Action, ...]) -> bool:
    """Hold the verdict on the schedule with another last row against the oracle's."""
    mutant = with_row(schedule, row)
    legal = is_harmless(schedule, row)
    assert is_legal(mutant) == legal, f"not {'legal' if not legal else 'caught'}:\n{mutant}"
    return legal


def test_a_missing_action_is_caught() -> None:
    """All but RECOMPUTE: without it a block keeps its activations, which is a step too."""
    for schedule in steps():
        row = schedule.ranks[-1]
        for index, action in enumerate(row):
            legal = check(schedule, row[:index] + row[index + 1 :])
            assert legal == (action.kind is ActionKind.RECOMPUTE)


def test_a_doubled_action_is_caught() -> None:
    for schedule in steps():
        row = schedule.ranks[-1]
        for index, action in enumerate(row):
            assert not check(schedule, (*row[:index], action, *row[index:]))


def test_a_missing_action_of_a_sharded_evaluation_is_caught() -> None:
    for groups in (("root",), ("root", "b0"), ("root", "b0", "b1")):
        for m in (1, 2):
            row = forward_only(groups, m, unshard_for_use=True).ranks[0]
            for index in range(len(row)):
                assert not is_legal(Schedule((row[:index] + row[index + 1 :],), unshard_for_use=True))


def test_swapped_neighbours_are_caught_unless_the_step_stays_the_same() -> None:
    """The pairs that may change places, all of them: any other swap of neighbours in any schedule is caught."""
    legal = {True: set(), False: set()}
    for schedule in steps():
        row = schedule.ranks[-1]
        for i in range(len(row) - 1):
            if check(schedule, (*row[:i], row[i + 1], row[i], *row[i + 2 :])):
                kinds = " ".join(sorted(action.kind.name for action in row[i : i + 2]))
                legal[row[i].group == row[i + 1].group].add(kinds)
    assert legal[True] == {  # neighbours about one group
        "BACKWARD FORWARD",  # of two micro-batches
        "FORWARD REDUCE",  # of two micro-batches
        "REDUCE RESHARD",
        "RESHARD STEP",
    }
    assert legal[False] == {  # about two groups
        *("FORWARD UNSHARD", "RECOMPUTE UNSHARD", "BACKWARD UNSHARD"),  # prefetching less
        *("FORWARD RESHARD", "RECOMPUTE RESHARD", "BACKWARD RESHARD", "RESHARD RESHARD"),  # freeing later
        *("RECOMPUTE REDUCE", "BACKWARD REDUCE"),  # reducing later
        "BACKWARD RECOMPUTE",  # recomputing earlier
        "UNSHARD UNSHARD",  # where no other rank minds
        *("STEP STEP", "STEP UNSHARD"),
    }


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_any_two_swapped_actions_are_caught_unless_the_step_stays_the_same(which: int, i: int, j: int) -> None:
    schedule = STEPS[which % len(STEPS)]
    row = list(schedule.ranks[-1])
    i, j = i % len(row), j % len(row)
    row[i], row[j] = row[j], row[i]
    check(schedule, tuple(row))


LEGAL = {
    "gpipe without transfers": "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1",
    "1f1b with transfers": (
        "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE 0STEP\n"
        "rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE 1STEP"
    ),
    "zero bubble, and one backward left whole": (
        "rank 0: 0F0 0F1 0I0 0I1 0W0 0W1 0REDUCE 0STEP\nrank 1: 1F0 1I0 1F1 1B1 1W0 1REDUCE 1STEP"
    ),
    "v-shaped: two stages on a rank": "rank 0: 0F0 3F0 3B0 0B0\nrank 1: 1F0 2F0 2B0 1B0",
    "lowered, but not to its transfers": "rank 0: 0F0 0B0 0REDUCE 0STEP\nrank 1: 1F0 1B0 1REDUCE 1STEP",
    "lowered to its transfers alone": ("rank 0: 0F0 0SEND_F0 0RECV_B0 0B0\nrank 1: 1RECV_F0 1F0 1B0 1SEND_B0"),
    "receives posted long before their use": (
        "rank 0: 0RECV_B0 0RECV_B1 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0B1\n"
        "rank 1: 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    ),
    "receives of two channels in any order": (
        "rank 0: 0F0 0SEND_F0 0RECV_B0 0B0\n"
        "rank 1: 1RECV_B0 1RECV_F0 1F0 1SEND_F0 1B0 1SEND_B0\nrank 2: 2RECV_F0 2F0 2B0 2SEND_B0"
    ),
    "micro-batches in any order": "rank 0: 0F1 0F0 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1",
    "a frozen first stage": "rank 0: 0F0\nrank 1: 1F0 1B0 1REDUCE 1STEP",
    "groups gathered once for whole-stage computations": (
        "rules: unshard_for_use\nrank 0: 0UNSHARD[a] 0UNSHARD[b] 0F0 0F1 0B0 0B1 0REDUCE[b] 0RESHARD[b]"
        " 0REDUCE[a] 0RESHARD[a] 0STEP[a] 0STEP[b]"
    ),
    "two replicas of two stages": "rank 0: 0F0\nrank 1: 0F0\nrank 2: 1F0\nrank 3: 1F0",
    "a step while the backward runs": ("rank 0: 0F0[a] 0F0[b] 0B0[b] 0REDUCE[b] 0STEP[b] 0B0[a] 0REDUCE[a] 0STEP[a]"),
    "offload": "rank 0: 0FETCH[a] 0F0[a] 0B0[a] 0REDUCE[a] 0EVICT[a] 0STEP[a]",
}

ILLEGAL = {
    "nothing": ("rank 0: 0UNSHARD", "schedule-without-forward"),
    "missing forward": ("rank 0: 0F1", "computation-missing", "0F0", "rank 0"),
    "missing weight gradient": ("rank 0: 0F0 0I0", "computation-missing", "0W0", "rank 0"),
    "doubled": ("rank 0: 0F0 0F0", "computation-repeated", "0F0 on rank 0"),
    "whole and split backward": ("rank 0: 0F0 0B0 0W0", "gradient-made-twice", "0B0 and 0W0 on rank 0"),
    "gap between stages": (
        "rank 0: 0F0\nrank 1: 2F0",
        "stage-replicas-differ",
        "stage 1 is on 0 ranks",
        "and stage 0 on 1",
    ),
    "no first stage": ("rank 0: 1F0", "stage-replicas-differ", "stage 1 is on 1 ranks", "and stage 0 on 0"),
    "uneven replicas": (
        "rank 0: 0F0\nrank 1: 0F0\nrank 2: 1F0",
        "stage-replicas-differ",
        "stage 1 is on 1 ranks",
        "and stage 0 on 2",
    ),
    "no gradient to start from": ("rank 0: 0F0 0B0\nrank 1: 1F0", "stage-without-backward", "gradients of stage 1"),
    "send without receive": ("rank 0: 0F0 0SEND_F0\nrank 1: 1F0", "transfer-unmatched", "1RECV_F0 on rank 1"),
    "receive without send": (
        "rank 0: 0F0 0RECV_B0 0B0\nrank 1: 1F0 1B0",
        "transfer-unmatched",
        "0RECV_B0 on rank 0",
        "1SEND_B0 on rank 1",
    ),
    "sent twice": ("rank 0: 0F0 0SEND_F0 0SEND_F0\nrank 1: 1RECV_F0 1F0", "transfer-repeated", "0SEND_F0 on rank 0"),
    "sent to no rank": ("rank 0: 0F0 0SEND_F0", "transfer-without-partner", "stage 1"),
    "received from no rank": ("rank 0: 0RECV_F0 0F0", "transfer-without-partner", "stage -1"),
    "sent to itself": ("rank 0: 0F0 0SEND_F0 1RECV_F0 1F0", "transfer-within-rank", "0SEND_F0 on rank 0"),
    "sent for nothing": (
        "rank 0: 0F0 0SEND_F0 0RECV_B0\nrank 1: 1RECV_F0 1F0 1B0 1SEND_B0",
        "transfer-without-computation",
        "0RECV_B0 on rank 0",
    ),
    "sent out of nothing": (
        "rank 0: 0F0 0SEND_F0 0RECV_B0\nrank 1: 1RECV_F0 1F0 1SEND_B0",
        "transfer-without-computation",
        "0RECV_B0 on rank 0",
    ),
    "neither sent nor received": (
        "rank 0: 0F0 0SEND_F0 0F1\nrank 1: 1RECV_F0 1F0 1F1",
        "receive-missing",
        "1F1 on rank 1",
        "rank 0",
        "0SEND_F1",
        "1RECV_F1",
    ),
    "received in another order than sent": (
        "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1\nrank 1: 1RECV_F1 1RECV_F0 1F0 1F1",
        "channel-out-of-order",
        "1RECV_F1 on rank 1",
        "0SEND_F0 on rank 0",
    ),
    "activations and gradients of two stages crossed on a channel": (
        "rank 0: 0F0 0SEND_F0 2RECV_F0 2F0 2B0 2SEND_B0 0RECV_B0 0B0\n"
        "rank 1: 1RECV_B0 1RECV_F0 1F0 1SEND_F0 1B0 1SEND_B0",
        "channel-out-of-order",
        "1RECV_B0 on rank 1",
        "0SEND_F0 on rank 0",
    ),
    "received after its use": (
        "rank 0: 0F0 0SEND_F0\nrank 1: 1F0 1RECV_F0",
        "action-out-of-order",
        "1F0 on rank 1",
        "1RECV_F0",
    ),
    "one stage neither reduced nor stepped": (
        "rank 0: 0F0 0B0 0REDUCE 0STEP\nrank 1: 1F0 1B0",
        "gradients-not-reduced",
        "1B0 on rank 1",
        "1REDUCE",
    ),
    "sent before it is computed": (
        "rank 0: 0SEND_F0 0F0\nrank 1: 1RECV_F0 1F0",
        "action-out-of-order",
        "0SEND_F0 on rank 0",
        "0F0",
    ),
    "backward before forward": ("rank 0: 0B0 0F0", "action-out-of-order", "0B0 on rank 0", "0F0"),
    "recompute after its backward": (
        "rank 0: 0F0 0B0 0RECOMPUTE0",
        "action-out-of-order",
        "0B0 on rank 0",
        "0RECOMPUTE0",
    ),
    "forward order changes": (
        "rank 0: 0F0[a] 0F0[b] 0F1[b] 0F1[a]",
        "groups-out-of-order",
        "0F1[a] on rank 0",
        "0F1[b]",
    ),
    "backward in forward order": (
        "rank 0: 0F0[a] 0F0[b] 0B0[a] 0B0[b]",
        "groups-out-of-order",
        "0B0[b] on rank 0",
        "0B0[a]",
    ),
    "used as shards": (
        "rules: unshard_for_use\nrank 0: 0UNSHARD 0F0 0RESHARD 0B0",
        "used-before-unshard",
        "0B0 on rank 0",
        "action 2",
        "0UNSHARD",
    ),
    "used when stale": (
        "rules: unshard_after_step\nrank 0: 0F0[a] 0B0[a] 0REDUCE[a] 0STEP[a] 0F1[a] 0UNSHARD[a] 0B1[a]",
        "used-before-unshard",
        "0F1",
    ),
    "resharded though stored whole": ("rank 0: 0F0 0RESHARD", "unshard-missing-at-end"),
    "left unsharded": ("rules: unshard_for_use\nrank 0: 0UNSHARD 0F0", "reshard-missing-at-end", "0RESHARD"),
    "left stale": ("rules: unshard_after_step\nrank 0: 0F0 0B0 0REDUCE 0STEP", "unshard-missing-at-end", "0UNSHARD"),
    "gathered for nothing": (
        "rules: unshard_for_use\nrank 0: 0UNSHARD 0F0 0RESHARD 0UNSHARD 0RESHARD",
        "reshard-before-use",
    ),
    "reduced before its last backward": (
        "rank 0: 0F0 0B0 0REDUCE 0F1 0B1 0STEP",
        "backward-after-reduce",
        "0B1 on rank 0",
        "action 2",
        "0REDUCE",
    ),
    "not reduced between": (
        "rules: reduce_each_backward\nrank 0: 0F0 0F1 0B0 0B1 0REDUCE 0STEP",
        "backward-before-reduce",
        "0REDUCE",
    ),
    "step before reduce": ("rank 0: 0F0 0B0 0STEP 0REDUCE", "step-before-reduce", "action 1", "0REDUCE"),
    "step of one group, reduce of another": (
        "rank 0: 0F0[a] 0F0[b] 0B0[b] 0REDUCE[b] 0B0[a] 0STEP[a] 0STEP[b]",
        "step-before-reduce",
        "0STEP[a] on rank 0",
    ),
    "never stepped": ("rank 0: 0F0 0B0 0REDUCE", "gradients-not-stepped", "0STEP"),
    "collectives in other order": (
        "rules: unshard_for_use\n"
        "rank 0: 0UNSHARD[a] 0UNSHARD[b] 0F0[a] 0F0[b]\n"
        "rank 1: 0UNSHARD[b] 0UNSHARD[a] 0F0[a] 0F0[b]",
        "replica-collectives-differ",
        "rank 0",
        "0UNSHARD[a]",
        "rank 1",
        "0UNSHARD[b]",
    ),
    "a collective that one rank skips": (
        "rank 0: 0F0 0B0 0REDUCE 0STEP\nrank 1: 0F0 0B0",
        "replica-collectives-differ",
        "rank 0",
        "0REDUCE",
        "rank 1",
    ),
    "issue blocked by a computation": (
        "rank 0: 0F0 0RECV_B0 0B0 0SEND_F0\nrank 1: 1RECV_F0 1F0 1B0 1SEND_B0",
        "schedule-deadlock",
        "0SEND_F0 on rank 0",
        "0B0 on rank 0",
        "0RECV_B0 on rank 0",
    ),
    "stages waiting for each other": ("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1B1 1F0 1B0", "schedule-deadlock"),
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal(name: str) -> None:
    verify(Schedule.parse(LEGAL[name]))


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal(name: str) -> None:
    text, code, *values = ILLEGAL[name]
    with refused(code, *values):
        verify(Schedule.parse(text))


def test_a_long_deadlock_names_a_few_of_its_actions() -> None:
    """Every rank runs the micro-batches in another order than the one before it."""
    rows = []
    for rank in range(8):
        order = (0, 1) if rank % 2 else (1, 0)
        rows.append(f"rank {rank}: " + " ".join(f"{rank}F{m} {rank}B{m}" for m in order))
    with refused("schedule-deadlock") as caught:
        verify(Schedule.parse("\n".join(rows)))
    assert str(caught.value).splitlines()[0].count(" waits for ") <= 8


def test_a_rank_holds_no_more_activations_than_it_may() -> None:
    schedule = Schedule.parse("rank 0: 0F0 0F1 0F2 0B0 0B1 0B2\nrank 1: 1F0 1B0 1F1 1B1 1F2 1B2")
    verify(schedule, max_in_flight=(3, 1))
    with refused("activations-over-limit", "0F2 on rank 0", "3 stage", "2 allowed") as caught:
        verify(schedule, max_in_flight=(2, 1))
    assert str(caught.value).splitlines()[1:] == [
        "rank 0: 0F0 0F1 0F2 0B0 0B1 0B2",
        "                ^^^ action 2",
    ]
    with refused("activation-bounds", "max_in_flight=[2]", "1 ranks of 2"):
        verify(schedule, max_in_flight=(2,))


def test_an_arrow_is_under_the_place() -> None:
    text = (
        "rules: unshard_for_use\n"
        "rank 0: 0UNSHARD[root] 0UNSHARD[b0] 0F0[root] 0F0[b0] 0RESHARD[b0] 0B0[b0] 0REDUCE[b0] 0RESHARD[b0]"
        " 0B0[root] 0REDUCE[root] 0RESHARD[root] 0STEP[root] 0STEP[b0]"
    )
    with refused("used-before-unshard", "0B0[b0] on rank 0", "after action 4", "0UNSHARD[b0]") as caught:
        verify(Schedule.parse(text))
    assert str(caught.value).splitlines()[1:] == [
        "rank 0: ... 0UNSHARD[b0] 0F0[root] 0F0[b0] 0RESHARD[b0] 0B0[b0] 0REDUCE[b0] 0RESHARD[b0] 0B0[root]"
        " 0REDUCE[root] ...",
        "                                                        ^^^^^^^ action 5",
    ]


def test_both_ends_of_a_channel_get_an_arrow() -> None:
    text = "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1\nrank 1: 1RECV_F1 1RECV_F0 1F0 1F1"
    with refused("channel-out-of-order") as caught:
        verify(Schedule.parse(text))
    assert str(caught.value).splitlines()[1:] == [
        "rank 1: 1RECV_F1 1RECV_F0 1F0 1F1",
        "        ^^^^^^^^ action 0",
        "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1",
        "            ^^^^^^^^ action 1",
    ]
