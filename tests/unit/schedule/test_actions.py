"""Text forms round-trip, meaningless actions cannot be made, and errors say value, rule and cure."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.schedule import COMPUTATIONS, STREAMS, TRANSFERS, Action, ActionKind, Payload, Schedule, ScheduleError

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
    with pytest.raises(ScheduleError, match=r"is not an action; .* 0F1, 2SEND_F0 or 0UNSHARD\[blocks.3\]"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": ActionKind.FORWARD}, "FORWARD has no micro_batch"),
        ({"kind": ActionKind.SEND, "micro_batch": 0}, "payload=None for SEND"),
        ({"kind": ActionKind.STEP, "payload": Payload.ACTIVATION}, "for STEP; SEND and RECEIVE carry one"),
        ({"kind": ActionKind.UNSHARD, "micro_batch": 3}, "micro_batch=3 for UNSHARD, which belongs to none"),
        ({"kind": ActionKind.STEP, "stage": -1}, "stage=-1 of STEP is negative"),
        ({"kind": ActionKind.BACKWARD, "micro_batch": -2}, "micro_batch=-2 of BACKWARD is negative"),
        ({"kind": ActionKind.STEP, "group": ""}, "use None for the whole stage"),
    ],
)
def test_meaningless_actions_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Action(**fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a schedule of 0 ranks"),
        ("rank 1: 0F0", "is not that of rank 0; begin it with 'rank 0:'"),
        ("rank 0: 0F0\n0F0", "is not that of rank 1"),
        ("rules: unshard_for_fun\nrank 0: 0F0", "'unshard_for_fun' is not a rule of schedules"),
        ("rules: unshard_for_use unshard_after_step\nrank 0: 0F0", "contradicts unshard_for_use=True"),
        ("rank 0: 0F0 oops", "'oops' is not an action"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.parse(text)


def test_every_kind_has_a_stream() -> None:
    assert set(STREAMS) == set(ActionKind)
