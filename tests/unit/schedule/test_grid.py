"""Drawings compared whole, and the window of large ones."""

import pytest

from shardwise.schedule import Action, ActionKind, Schedule, ScheduleError, dependencies, lower, verify
from shardwise.schedule.drawing import MAX_WIDTH, drawn


def explained(text: str) -> list[str]:
    with pytest.raises(ScheduleError) as caught:
        verify(Schedule.parse(text))
    return str(caught.value).splitlines()[1:]


def gpipe(p: int, m: int) -> Schedule:
    rows = [
        tuple(Action(kind, rank, i) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) for i in range(m))
        for rank in range(p)
    ]
    return lower(Schedule(tuple(rows)))


def test_what_cannot_run_stands_in_parentheses_after_what_can() -> None:
    assert explained("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B1 1F1 1B0") == [
        "slot     0    1     2      3      4  ( ) cannot run",
        "rank 0  0F0  0F1  (0B0)  (0B1)    .",
        "rank 1   .   1F0  (1B1)  (1F1)  (1B0)",
        "                   ^^^    ^^^ action 1, action 2",
    ]


def test_a_receive_waits_for_nothing_and_its_user_for_the_send() -> None:
    schedule = Schedule.parse("rank 0: 0F0 0F1 0SEND_F0\nrank 1: 1RECV_F0 1F0 1F1")
    assert drawn(schedule, ((1, 1),), dependencies(schedule)) == [
        "slot       0       1      2       3    4",
        "rank 0    0F0     0F1  0SEND_F0   .    .",
        "rank 1  1RECV_F0   .      .      1F0  1F1",
        "                                 ^^^ action 1",
    ]


def test_both_ends_of_a_channel_get_an_arrow() -> None:
    lines = explained("rank 0: 0F0 0SEND_F0 0F1 0SEND_F1\nrank 1: 1RECV_F1 1RECV_F0 1F0 1F1")
    assert lines == [
        "slot       0         1       2      3       4",
        "rank 0    0F0     0SEND_F0  0F1  0SEND_F1   .",
        "                  ^^^^^^^^ action 1",
        "rank 1  1RECV_F1  1RECV_F0  1F0     .      1F1",
        "        ^^^^^^^^ action 0",
    ]


def test_a_large_schedule_is_drawn_around_the_place() -> None:
    schedule = gpipe(24, 30)
    place = (10, 50)
    lines = drawn(schedule, (place,), dependencies(schedule))
    assert max(map(len, lines)) <= MAX_WIDTH
    ranks = [line.split()[1] for line in lines if line.startswith("rank")]
    assert ranks == ["8", "9", "10", "11", "12"]
    assert lines[1] == lines[-1] == "..."
    above, arrow = lines[4:6]
    text = str(schedule.ranks[10][50])
    assert above[arrow.index("^") : arrow.rindex("^") + 1] == text
    assert arrow.strip() == "^" * len(text) + " action 50"
    assert all(line.split()[2] == "..." and line.endswith("...") for line in lines if line.startswith("rank"))


def test_places_far_from_each_other_get_a_window_each() -> None:
    schedule = gpipe(4, 60)
    lines = drawn(schedule, ((0, 0), (0, 130), (0, 150)), dependencies(schedule))
    assert lines.count("") == 1
    arrows = [line.strip() for line in lines if "^" in line]
    assert arrows == ["^^^ action 0", "^^^ action 130"]
    assert lines[1].split()[:4] == ["rank", "0", "0F0", "0SEND_F0"]


def test_no_place_no_drawing() -> None:
    schedule = gpipe(2, 2)
    assert drawn(schedule, (), dependencies(schedule)) == []


@pytest.mark.parametrize("index", range(8))
def test_every_place_of_a_long_row_is_under_its_arrow(index: int) -> None:
    schedule = gpipe(3, 40)
    index *= len(schedule.ranks[1]) // 8
    lines = drawn(schedule, ((1, index),), dependencies(schedule))
    where = next(i for i, line in enumerate(lines) if "^" in line)
    caret = lines[where].index("^")
    assert lines[where - 1][caret:].split()[0] == str(schedule.ranks[1][index])
