"""The SVG of timelines."""

from collections import Counter
from xml.etree import ElementTree

import pytest

from shardwise.report import timeline_svg
from shardwise.report.palette import fill
from shardwise.report.panel import TerminalPanel
from shardwise.schedule import ActionKind, Schedule, data_parallel_step, simulate
from shardwise.schedule.actions import Action

SVG = "{http://www.w3.org/2000/svg}"
SCHEDULE = Schedule.parse(
    "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
    "rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1I1 1SEND_B1 1W1"
)


def cost(rank: int, action: Action) -> float:
    return {ActionKind.BACKWARD: 2.0, ActionKind.SEND: 0.5, ActionKind.RECEIVE: 0.0}.get(action.kind, 1.0)


def panel(title: str = "title") -> TerminalPanel:
    return TerminalPanel(title, simulate(SCHEDULE, cost), 2.75)


def actions_of(text: str) -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(text).iter(f"{SVG}rect") if "action" in each.get("class", "")]


def test_every_action_that_takes_time_is_one_rectangle_of_its_kind_and_colour():
    rects = actions_of(timeline_svg.draw([panel()]))
    lasting = [each for each in panel().actions if each.duration_s > 0]
    assert Counter(rect.get("class") for rect in rects) == Counter(
        f"action {each.action.kind.name.lower()}" for each in lasting
    )
    for rect in rects:
        assert rect.get("fill") == fill(ActionKind[rect.get("class", "").split()[1].upper()])


def test_rectangles_stand_where_their_times_are():
    rects = {rect[0].text.partition(":")[0]: rect for rect in actions_of(timeline_svg.draw([panel()]))}
    x = {name: float(rect.get("x")) for name, rect in rects.items()}
    scale = x["0F1"] - x["0F0"]
    for each in panel().actions:
        if each.duration_s > 0:
            rect = rects[str(each.action)]
            assert x[str(each.action)] == pytest.approx(x["0F0"] + scale * each.start_s, abs=0.1)
            # A pixel is the gap to the next.
            assert float(rect.get("width")) == pytest.approx(scale * each.duration_s - 1, abs=0.1)
    y = {name: float(rect.get("y")) for name, rect in rects.items()}
    assert y["0F0"] == y["0F1"] == y["0B1"] < y["0SEND_F0"] < y["1F0"] == y["1W1"] < y["1SEND_B0"]


def test_on_hover_an_action_says_what_it_is_and_when():
    (rect,) = [each for each in actions_of(timeline_svg.draw([panel()])) if each[0].text.startswith("1F0:")]
    assert rect[0].text == "1F0: forward of stage 1, micro-batch 0\nrank 1, 1.5 s to 2.5 s (1 s)"


def test_panels_share_an_axis_or_have_their_own():
    slow = TerminalPanel("slow", simulate(SCHEDULE, lambda rank, action: 2 * cost(rank, action)))

    def first_widths(same_axis: bool) -> list[float]:
        rects = actions_of(timeline_svg.draw([panel(), slow], same_axis=same_axis))
        return [float(rect.get("width")) + 1 for rect in rects if rect[0].text.startswith("0F0:")]

    quick_width, slow_width = first_widths(same_axis=True)
    assert slow_width == pytest.approx(2 * quick_width, abs=0.1)
    quick_width, slow_width = first_widths(same_axis=False)
    assert slow_width == pytest.approx(quick_width, abs=0.1)


def test_the_clock_may_begin_anywhere():
    late = [
        type(each)(each.action, each.rank, each.start_s + 1e4, each.end_s + 1e4, each.stream)
        for each in panel().actions
    ]
    assert timeline_svg.draw([TerminalPanel("title", late, 2.75)]) == timeline_svg.draw([panel()])


def test_a_title_is_text_whatever_it_holds():
    title = "a < b & 'c' {d}"
    texts = [each.text for each in ElementTree.fromstring(timeline_svg.draw([panel(title)])).iter(f"{SVG}text")]
    assert title in texts


def test_many_ranks_and_micro_batches_keep_their_numbers():
    rows = ["rank 0: " + " ".join(f"0F{number}" for number in range(200))]
    wide = TerminalPanel("wide", simulate(Schedule.parse("\n".join(rows)), cost))
    numbers = [each.text for each in ElementTree.fromstring(timeline_svg.draw([wide])).iter(f"{SVG}text")]
    assert "99" in numbers


def test_transfers_and_collectives_have_rows_of_their_own():
    step = data_parallel_step(["root", "b0"], 1, unshard_for_use=True, num_ranks=2)
    rects = actions_of(timeline_svg.draw([TerminalPanel("", simulate(step, lambda rank, action: 1.0))]))
    tops: dict[str, set[float]] = {}
    for rect in rects:
        tops.setdefault(rect.get("class").split()[1], set()).add(float(rect.get("y")))
    by_rank = {kind: sorted(found) for kind, found in tops.items()}
    assert {len(found) for found in by_rank.values()} == {2}
    for rank in (0, 1):
        streams = [by_rank[kind][rank] for kind in ("forward", "unshard", "reduce")]
        assert streams == sorted(set(streams))
    assert by_rank["reduce"][0] < by_rank["forward"][1]
