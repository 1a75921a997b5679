"""The terminal's drawing, character by character."""

import io

import pytest
from rich.console import Console
from rich.style import Style

from shardwise.report import timeline_text
from shardwise.report.panel import TerminalPanel, fill
from shardwise.schedule import ActionKind, Schedule, TimedAction, simulate
from shardwise.schedule.actions import Action

ONE_F_ONE_B = Schedule.parse("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1")


def gpipe(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    numbers = range(num_micro_batches)
    rows = []
    for rank in range(num_ranks):
        stages = [rank + num_ranks * chunk for chunk in range(num_chunks)]
        row = [Action(ActionKind.FORWARD, stage, number) for stage in stages for number in numbers]
        row += [Action(ActionKind.BACKWARD, stage, number) for stage in reversed(stages) for number in numbers]
        rows.append(tuple(row))
    return Schedule(tuple(rows))


def cost(rank: int, action: Action) -> float:
    return 2.0 if action.kind is ActionKind.BACKWARD else 1.0


def drawn(schedule: Schedule, width: int, formula_s: float | None = None) -> list[str]:
    panel = TerminalPanel("title", simulate(schedule, cost), formula_s)
    return [line.rstrip() for line in timeline_text.draw([panel], width).plain.splitlines()]


def test_cells_grow_with_the_terminal_but_not_without_end():
    assert len(drawn(ONE_F_ONE_B, 60)[2]) > len(drawn(ONE_F_ONE_B, 42)[2])
    assert drawn(ONE_F_ONE_B, 500)[2] == drawn(ONE_F_ONE_B, 68)[2]


def test_a_long_schedule_is_wrapped_and_nothing_is_lost():
    lines = drawn(gpipe(2, 8), 54)
    rows = [line[14:] for line in lines if line.startswith("rank 0")]
    assert len(rows) == 2
    assert max(map(len, lines[:-3])) <= 54
    for number in range(8):
        assert f"F{number}" in "".join(rows)
        assert f"B{number}" in "".join(rows)


def test_what_does_not_fit_is_scaled_down_to_what_fills_most():
    lines = drawn(gpipe(2, 1000), 54)
    rows = [line[14:] for line in lines if line.startswith("rank 1")]
    assert len(rows) == 4
    # Of 3002 s in 160 columns: forwards take 53, backwards 107.
    text = "".join(rows)
    assert text.count("F") == pytest.approx(53, abs=2)
    assert text.count("B") == pytest.approx(107, abs=2)


def test_a_column_that_is_mostly_idle_is_a_dot():
    def forward(start_s: float, end_s: float) -> TimedAction:
        return TimedAction(Action(ActionKind.FORWARD, micro_batch=0), 0, start_s, end_s, "compute")

    # Four bands of 20 columns over 400 s: the first forward fills its column to 40 %, the second to 60 %.
    timed = [forward(0.0, 2.0), forward(5.0, 8.0), forward(390.0, 400.0)]
    lines = timeline_text.draw([TerminalPanel("", timed)], 14 + 20).plain.splitlines()
    row = "".join(line[14:] for line in lines if line.startswith("rank 0"))
    assert row == "·F" + 76 * "·" + "F0"


def test_panels_share_a_scale():
    short, long = (TerminalPanel(name, simulate(gpipe(2, num), cost)) for name, num in (("short", 2), ("long", 6)))
    same = timeline_text.draw([short, long], 80).plain.splitlines()
    assert same[2].startswith("rank 0  67 %  F0 F1 ")


def test_kinds_have_their_colours_and_a_plain_console_has_none():
    panel = TerminalPanel("title", simulate(ONE_F_ONE_B, cost))
    text = timeline_text.draw([panel], 80)
    colours = {
        text.plain[span.start : span.end].strip(): span.style.bgcolor.name
        for span in text.spans
        if isinstance(span.style, Style) and span.style.bgcolor
    }
    assert colours["F0"] == fill(ActionKind.FORWARD)
    assert colours["B0"] == fill(ActionKind.BACKWARD)
    assert colours["F1"] == colours["F0"]
    for is_terminal in (True, False):
        stream = io.StringIO()
        Console(file=stream, force_terminal=is_terminal, width=80, _environ={"TERM": "xterm-256color"}).print(text)
        assert ("\x1b[" in stream.getvalue()) == is_terminal
