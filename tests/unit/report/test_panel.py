"""What every drawing says about a timeline, whatever its form."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.zero_schedules import data_parallel_step
from shardwise.report import timeline_text
from shardwise.report.panel import TerminalPanel, format_tick_s, ticks
from shardwise.schedule import Schedule, TimedAction, bubble_fraction, simulate
from shardwise.schedule.actions import Action, ActionKind

GPIPE = Schedule.parse("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1")


@given(times=st.lists(st.floats(0.01, 10.0), min_size=8, max_size=8), shift_s=st.floats(-1e3, 1e3))
def test_the_ranks_bubbles_average_to_the_schedules(times, shift_s):
    costs = dict(zip([(rank, action) for rank, row in enumerate(GPIPE.ranks) for action in row], times, strict=True))
    timed = simulate(GPIPE, lambda rank, action: costs[rank, action])
    late = [TimedAction(t.action, t.rank, t.start_s + shift_s, t.end_s + shift_s, t.stream) for t in timed]
    fractions = TerminalPanel("", late).idle_fractions
    assert sum(fractions.values()) / len(fractions) == pytest.approx(bubble_fraction(timed), abs=1e-9)
    assert TerminalPanel("", timed).bubble == bubble_fraction(timed)


def test_the_bubble_of_a_rank_counts_only_what_it_computes():
    timed = simulate(Schedule.parse("rank 0: 0F0 0SEND_F0\nrank 1: 1RECV_F0 1F0"), lambda rank, action: 1.0)
    assert TerminalPanel("", timed).idle_fractions == {0: 0.75, 1: 0.75}


def test_rows_with_time_come_in_the_order_of_the_schedule():
    step = data_parallel_step(["root", "b0"], 1, unshard_for_use=True)
    timed = simulate(step, lambda rank, action: 0.0 if action.kind is ActionKind.REDUCE else 1.0)
    unheard_of = TimedAction(Action(ActionKind.FETCH, group="b0"), 0, 0.0, 1.0, "a stream of tomorrow")
    assert TerminalPanel("", [unheard_of, *timed]).streams == ("compute", "gather", "a stream of tomorrow")


def test_a_ranks_stages_are_its_chunks():
    timed = simulate(Schedule.parse("rank 0: 0F0 3F0\nrank 1: 1F0 2F0"), lambda rank, action: 1.0)
    panel = TerminalPanel("", timed)
    assert panel.num_chunks == 2
    assert {str(each.action): panel.chunk(each) for each in timed} == {"0F0": 0, "3F0": 1, "1F0": 0, "2F0": 1}


def test_no_actions_are_a_timeline_of_nothing():
    panel = TerminalPanel("", ())
    assert (panel.start_s, panel.makespan_s, panel.rows, panel.bubble) == (0.0, 0.0, {}, 0.0)
    assert "bubble" in timeline_text.draw([panel]).plain


@given(span_s=st.floats(1e-7, 1e6), max_num=st.integers(2, 60))
def test_ticks_are_round_and_few_and_evenly_apart(span_s, max_num):
    found = ticks(span_s, max_num)
    assert 1 <= len(found) <= max_num
    assert found[0] == 0.0
    assert found[-1] <= span_s * (1 + 1e-6)
    gaps = [later - earlier for earlier, later in pairwise(found)]
    assert gaps == pytest.approx([gaps[0]] * len(gaps) if gaps else [])
    # No coarser than need be: where there is space for three, there are at least two.
    assert len(found) >= 2 or max_num < 3
    assert {f"{tick:e}"[0] for tick in found[1:2]} <= {"1", "2", "5"}


def test_times_are_shown_in_the_unit_of_the_whole():
    assert [format_tick_s(seconds, 0.05) for seconds in (0.0, 0.0125)] == ["0 ms", "12.5 ms"]
    assert (format_tick_s(1500.25), format_tick_s(150000.0), format_tick_s(1e-17, span_s=3.0)) == (
        "1500 s",
        "150000 s",
        "0 s",
    )


def test_the_bubble_of_formulas_is_that_within_the_longest_span():
    timed = simulate(Schedule.parse("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1"), lambda rank, action: 1.0)
    panel = TerminalPanel("", timed, formula_s=2.0)
    # Rank 0 computes from 0 to 2 and from 4 to 6 of 6 s, rank 1 from 1 to 5 without a pause.
    assert panel.spans_s == {0: (6.0, 2.0), 1: (4.0, 0.0)}
