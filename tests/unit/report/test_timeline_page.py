"""Timelines on the page, as a browser draws them: what is visible, merged, found, and moved."""

import json

import pytest

from harness.browser import ask_page
from shardwise.report import page
from shardwise.report.packing import num_chars, packed_timeline
from shardwise.report.panel import TerminalPanel
from shardwise.schedule import Schedule, TimedAction, simulate
from shardwise.schedule.actions import Action, ActionKind

pytestmark = pytest.mark.begin

SCHEDULE = Schedule.parse(
    "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
    "rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1I1 1SEND_B1 1W1"
)
NUM_RANKS, NUM_MICRO_BATCHES = 512, 128


def cost(rank: int, action: Action) -> float:
    return {ActionKind.BACKWARD: 2.0, ActionKind.SEND: 0.5, ActionKind.RECEIVE: 0.0}.get(action.kind, 1.0)


def panel(title: str = "title") -> TerminalPanel:
    return TerminalPanel(title, simulate(SCHEDULE, cost), 2.75)


def page_of(*panels: TerminalPanel) -> str:
    source = page.source("plan", "plan", "")
    source["timelines"] = page.timelines(panels)
    return page.draw([source])


def many(num_ranks: int = NUM_RANKS, num_micro_batches: int = NUM_MICRO_BATCHES) -> TerminalPanel:
    """Return a step of many ranks: forward, input and weight gradient of each micro-batch, each rank a second later."""
    kinds = ((ActionKind.FORWARD, 0.0), (ActionKind.BACKWARD_INPUT, 1.0), (ActionKind.BACKWARD_WEIGHT, 2.0))
    actions = [
        TimedAction(Action(kind, stage=rank, micro_batch=batch), rank, at, at + 1.0, "compute")
        for rank in range(num_ranks)
        for batch in range(num_micro_batches)
        for kind, offset in kinds
        for at in [rank + 3.0 * batch + offset]
    ]
    return TerminalPanel("many", actions)


FIRST = "const [panel] = window.report.timelines.panels;"


def test_every_action_is_where_its_time_is(tmp_path):
    script = f"""{FIRST}
    const [step] = [panel.x(1 / panel.tick) - panel.x(0)];
    return {{
      texts: Array.from(panel.start, (_, index) => panel.describe(index)), drawn: panel.drawn, step,
      left: Array.from(panel.start, (at) => (panel.x(at) - panel.x(0)) / step),
      width: Array.from(panel.start, (at, index) => (panel.end[index] - at) * panel.tick),
      pixel: Array.from(panel.canvas.getContext("2d").getImageData(panel.x(0.1 / panel.tick), 34, 1, 1).data),
    }};"""
    found = ask_page(page_of(panel()), script, tmp_path)
    lasting = sorted((each for each in panel().actions if each.duration_s > 0), key=lambda each: each.start_s)
    assert sorted(found["left"]) == pytest.approx([each.start_s for each in lasting], abs=1e-5)
    assert sum(found["width"]) == pytest.approx(sum(each.duration_s for each in lasting), abs=1e-4)
    assert "forward of stage 1, micro-batch 0\nrank 1, 1.5 s to 2.5 s (1 s)" in found["texts"]
    assert found["drawn"]["single"] == len(lasting)
    assert found["drawn"]["merged"] == 0
    assert found["pixel"] == [0x2F, 0x6F, 0xB7, 255], "rank 0's first tenth of a second is a forward"


def test_panels_share_an_axis_or_have_their_own(tmp_path):
    slow = TerminalPanel("slow", simulate(SCHEDULE, lambda rank, action: 2 * cost(rank, action)))
    script = """const {panels} = window.report.timelines;
    const widths = () => panels.map((panel) => panel.x(1 / panel.tick) - panel.x(0));
    const shared = widths();
    window.report.timelines.isSameAxis = false;
    window.report.timelines.fit();
    return {shared, own: widths()};"""
    found = ask_page(page_of(panel(), slow), script, tmp_path)
    assert found["shared"][0] == pytest.approx(found["shared"][1])
    assert found["own"][0] == pytest.approx(2 * found["own"][1])


def test_512_ranks_and_128_micro_batches_can_be_seen_moved_and_searched(tmp_path):
    text = page_of(many())
    assert len(text.encode()) <= page.MAX_BYTES
    script = f"""{FIRST}
    const {{timelines}} = window.report, shown = () => ({{...panel.drawn}});
    const seen = {{all: shown(), actions: panel.start.length, height: panel.canvas.clientHeight}};
    const wheel = (fields) => panel.canvas.dispatchEvent(new WheelEvent("wheel", {{...fields, cancelable: true}}));
    wheel({{deltaY: 1e6}});
    await frame();
    seen.bottom = shown();
    for (let count = 0; count < 8; count++) timelines.zoom(0.5);
    timelines.scaleRows(4);
    await frame();
    seen.near = shown();
    timelines.search("rank 300 mb 64");
    seen.found = panel.matches.map((index) => panel.describe(index));
    timelines.jump(1);
    await frame();
    seen.jumped = {{...shown(), from: panel.from, to: panel.to}};
    timelines.search("w7");
    seen.codes = panel.matches.length;
    timelines.fit();
    await frame();
    seen.again = shown();
    return seen;"""
    found = ask_page(text, script, tmp_path)
    assert found["actions"] == 3 * NUM_RANKS * NUM_MICRO_BATCHES
    assert found["height"] < 500
    assert found["all"]["names"][0] == 0
    assert found["bottom"]["names"][-1] > 500
    assert found["near"]["labels"] > 0
    # Three and a half seconds are shown, and only what is shown is drawn.
    assert 0 < found["near"]["single"] <= 6 * found["near"]["rows"]
    assert [line.splitlines()[0] for line in found["found"]] == [
        f"{word} of stage 300, micro-batch 64" for word in ("forward", "input gradient", "weight gradient")
    ]
    assert 300 in found["jumped"]["names"]
    assert found["jumped"]["from"] < 300 + 3 * 64 + 0.5 < found["jumped"]["to"]
    assert found["jumped"]["labels"] > 0
    assert found["codes"] == NUM_RANKS
    assert found["again"]["rows"] < NUM_RANKS


def test_actions_narrower_than_a_pixel_are_merged(tmp_path):
    half = [each for each in many(2, 3000).actions if each.action.kind is ActionKind.FORWARD]
    script = f"""{FIRST}
    const pixel = (row, x) => panel.canvas.getContext("2d").getImageData(x, 30 + row * panel.pitch, 1, 1).data[2];
    return {{drawn: panel.drawn, width: panel.width, blue: [300, 600, 900].map((x) => pixel(0, x))}};"""
    whole = ask_page(page_of(many(2, 3000)), script, tmp_path)
    third = ask_page(page_of(TerminalPanel("half", half)), script, tmp_path)
    for found in (whole, third):
        assert found["drawn"]["single"] == 0
        assert 0.9 * found["width"] < found["drawn"]["merged"] / 2 <= found["width"] + 1
    # A third of the time is busy: the paper is seen through the blue, whose third channel is 0xb7 on 0xf3.
    assert all(0xB7 + 20 < each < 0xF3 for each in third["blue"])


def test_a_timeline_that_is_too_large_is_coarser_and_says_so():
    whole = panel()
    full = num_chars(packed_timeline(whole, 10**9))
    assert packed_timeline(whole, full)["left_out"] == []
    small = packed_timeline(whole, full // 2)
    assert small["streams"] == ("compute",)
    assert any("send" in each for each in small["left_out"])
    many_ranks = packed_timeline(many(), 2_000)
    assert num_chars(many_ranks) <= 2_000
    assert any("ranks" in each for each in many_ranks["left_out"])


def test_an_action_inside_another_is_on_top_and_counts_once(tmp_path):
    outer = TimedAction(Action.parse("0F0[root]"), 0, 0.0, 8.0, "compute")
    inner = [TimedAction(Action.parse(f"0F0[b{at}]"), 0, at, at + 1.0, "compute") for at in (1.0, 6.0)]
    late = TimedAction(Action.parse("0B0[root]"), 0, 8.0, 10.0, "compute")
    nested = TerminalPanel("nested", [outer, *inner, late])
    assert nested.idle_fractions == {0: 0.0}
    script = f"""{FIRST}
    const at = (seconds) => panel.describe(panel.find(panel.x(seconds / panel.tick), 34)).split("\\n")[0];
    return [0.5, 1.5, 4, 6.5, 9].map(at);"""
    found = ask_page(page_of(nested), script, tmp_path)
    assert [text.split(", ")[1] for text in found] == ["root", "b1.0", "root", "b6.0", "root"]
    assert json.dumps(found).count("backward") == 1
