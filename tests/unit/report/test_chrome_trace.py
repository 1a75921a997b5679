"""The Chrome trace: what other programs need of it, and that nothing is lost on the way back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.report.chrome_trace import chrome_trace, read_chrome_trace
from shardwise.schedule import STREAMS, TRANSFERS, Action, ActionKind, Payload, TimedAction
from shardwise.schedule.actions import COMPUTATIONS

GROUPS = st.one_of(st.none(), st.text(min_size=1, max_size=8))


@st.composite
def timed_actions(draw) -> TimedAction:
    kind = draw(st.sampled_from(ActionKind))
    action = Action(
        kind,
        stage=draw(st.integers(0, 40)),
        micro_batch=draw(st.integers(0, 200)) if kind in COMPUTATIONS | TRANSFERS else None,
        group=draw(GROUPS),
        payload=draw(st.sampled_from(Payload)) if kind in TRANSFERS else None,
    )
    start_s = draw(st.floats(-1e6, 1e6))
    return TimedAction(action, draw(st.integers(0, 63)), start_s, start_s + draw(st.floats(0.0, 1e3)), STREAMS[kind])


@given(st.lists(timed_actions(), min_size=1, max_size=20))
def test_what_is_written_is_read_back_exactly(timed):
    assert read_chrome_trace(json.loads(json.dumps(chrome_trace(timed), allow_nan=False))) == tuple(timed)


@given(st.lists(timed_actions(), min_size=1, max_size=20))
def test_every_event_has_what_the_format_asks_for(timed):
    events = chrome_trace(timed)["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(timed)
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    for event, each in zip(complete, timed, strict=True):
        assert event["pid"] == each.rank
        assert threads[event["pid"], event["tid"]] == each.stream
        assert processes[event["pid"]] == f"pp rank {each.rank}"
        assert event["ts"] == pytest.approx(1e6 * each.start_s)
        assert event["dur"] == pytest.approx(1e6 * each.duration_s)
        assert event["dur"] >= 0


def test_events_of_others_are_passed_over():
    timed = TimedAction(Action.parse("0F0"), 0, 0.0, 1.0, "compute")
    trace = chrome_trace([timed])
    trace["traceEvents"] = [{"ph": "X", "name": "aten::mm", "args": {"rank": 1}}, {"ph": "i"}, *trace["traceEvents"]]
    assert read_chrome_trace(trace) == (timed,)


@pytest.mark.parametrize(
    ("trace", "code"),
    [
        ([], "trace-format"),
        ({}, "trace-format"),
        ({"traceEvents": 3}, "trace-format"),
        ({"traceEvents": []}, "trace-without-actions"),
        ({"traceEvents": [{"ph": "X"}]}, "trace-without-actions"),
    ],
)
def test_what_holds_no_timed_action_is_refused(trace, code):
    with refused(code):
        read_chrome_trace(trace)


@pytest.mark.parametrize(
    "damage", [{"action": "0Q0"}, {"rank": None}, {"start_s": "soon"}, {"start_s": 1.5}, {"end_s": float("inf")}]
)
def test_a_damaged_event_is_named(damage):
    trace = chrome_trace([TimedAction(Action.parse("0F0"), 0, 0.0, 1.0, "compute")])
    trace["traceEvents"][-1]["args"] |= damage
    with refused("trace-event-damaged", repr(damage.get("action", "0F0"))):
        read_chrome_trace(trace)
