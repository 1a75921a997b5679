"""Text forms round-trip, meaningless actions cannot be made, and errors say value, rule and fix."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.schedule import COMPUTATIONS, STREAMS, TRANSFERS, Action, ActionKind, Payload, Schedule

counts = st.integers(0, 10_000)
groups = st.none() | st.text("ab.3_[]%; \n\té", min_size=1, max_size=12)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    kind = draw(st.sampled_from(ActionKind))
    optional = counts if kind in COMPUTATIONS | TRANSFERS else st.none()
    micro_batch = draw(st.none() | counts if kind in (ActionKind.FETCH, ActionKind.EVICT) else optional)
    payload = draw(st.sampled_from(Payload)) if kind in TRANSFERS else None
    return Action(kind, draw(counts), micro_batch, draw(groups), payload)


@settings(deadline=None, derandomize=True)
@given(actions())
def test_action_round_trips(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert not set(str(action)) & set(" \n\t")  # a row is split at white space


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.lists(actions(), max_size=5).map(tuple), min_size=1, max_size=4).map(tuple),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_schedule_round_trips(rows: tuple, first: bool, second: bool, third: bool) -> None:
    schedule = Schedule(
        rows, unshard_for_use=first, reduce_each_backward=second, unshard_after_step=third and not first
    )
    assert Schedule.parse(str(schedule)) == schedule


@settings(deadline=None, derandomize=True)
@given(actions(), actions())
def test_actions_are_totally_ordered_and_hashable(one: Action, other: Action) -> None:
    assert (one < other) + (other < one) + (one == other) == 1
    assert len({one, other}) == 2 - (one == other)
    assert (one <= other) == (one < other or one == other)


def test_order_is_by_stage_then_micro_batch_then_kind_then_payload_then_group() -> None:
    texts = ["0STEP", "0B0", "0F0", "0F0[a]", "0F0[b]", "0SEND_B0", "0SEND_F0", "0B1", "1STEP"]
    assert [str(action) for action in sorted(map(Action.parse, reversed(texts)))] == texts


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(ActionKind.FORWARD, micro_batch=1), "0F1"),
        (Action(ActionKind.SEND, stage=2, micro_batch=0, payload=Payload.ACTIVATION), "2SEND_F0"),
        (Action(ActionKind.RECEIVE, stage=2, micro_batch=0, payload=Payload.GRADIENT), "2RECV_B0"),
        (Action(ActionKind.UNSHARD, group="blocks.3"), "0UNSHARD[blocks.3]"),
        (Action(ActionKind.BACKWARD_WEIGHT, stage=1, micro_batch=12, group="a b]"), "1W12[a%20b%5D]"),
        (Action(ActionKind.EVICT, micro_batch=3, group="b0"), "0EVICT3[b0]"),
    ],
)
def test_text_form(action: Action, text: str) -> None:
    assert str(action) == text


@pytest.mark.parametrize("text", ["", "F0", "0X1", "0F1[]", "0F1 0F2", "0F-1", "0f1", "0F1[a", "٣F0"])
def test_what_is_no_action_is_refused_with_an_example(text: str) -> None:
    with refused("action-text", repr(text), "0F1"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"kind": ActionKind.FORWARD}, ("action-needs-micro-batch", "FORWARD")),
        ({"kind": ActionKind.SEND, "micro_batch": 0}, ("payload-of-transfers", "payload=None for SEND")),
        ({"kind": ActionKind.STEP, "payload": Payload.ACTIVATION}, ("payload-of-transfers", "STEP")),
        ({"kind": ActionKind.UNSHARD, "micro_batch": 3}, ("action-without-micro-batch", "micro_batch=3", "UNSHARD")),
        ({"kind": ActionKind.STEP, "stage": -1}, ("stage-negative", "stage=-1", "STEP")),
        ({"kind": ActionKind.BACKWARD, "micro_batch": -2}, ("micro-batch-negative", "micro_batch=-2", "BACKWARD")),
        ({"kind": ActionKind.STEP, "group": ""}, ("group-name-empty", "STEP")),
    ],
)
def test_meaningless_actions_are_refused(fields: dict, values: tuple[str, ...]) -> None:
    with refused(*values):
        Action(**fields)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", ("schedule-without-ranks",)),
        ("rank 1: 0F0", ("schedule-row-label", "'rank 1: 0F0'", "'rank 0:'")),
        ("rank 0: 0F0\n0F0", ("schedule-row-label", "rank 1")),
        ("rules: unshard_for_fun\nrank 0: 0F0", ("schedule-rule-unknown", "'unshard_for_fun'")),
        (
            "rules: unshard_for_use unshard_after_step\nrank 0: 0F0",
            ("schedule-rules-contradict", "unshard_for_use=True"),
        ),
        ("rank 0: 0F0 oops", ("action-text", "'oops'")),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, values: tuple[str, ...]) -> None:
    with refused(*values):
        Schedule.parse(text)


def test_every_kind_has_a_stream() -> None:
    assert set(STREAMS) == set(ActionKind)
