"""Lowered pipelines: what the passes write, and that every mistake in it is caught unless it is none.

Rows come from small recipes, and from a scheduler that picks any computation that is ready. Which mistakes are none is
decided by an oracle that shares nothing with the verifier: it runs all rows at once on symbolic values, over channels
that deliver in order whatever the names, and compares what the step leaves with what it should.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.refusals import refused
from harness.zero_schedules import data_parallel_step
from shardwise.schedule import (
    COMPUTATIONS,
    TRANSFERS,
    Action,
    ActionKind,
    Payload,
    Schedule,
    ScheduleError,
    insert_gathers,
    insert_offload,
    insert_transfers,
    lower,
    makespan_s,
    simulate,
    verify,
)

STAGE_0 = {"unshard_for_use": False, "reduce_each_backward": False, "unshard_after_step": False}
STAGE_1 = {**STAGE_0, "unshard_after_step": True}
STAGE_3 = {**STAGE_0, "unshard_for_use": True}
STAGE_3_EACH = {**STAGE_3, "reduce_each_backward": True, "gather": "micro-batch"}
RULES = (STAGE_0, STAGE_1, STAGE_3, STAGE_3_EACH)

GPIPE = "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1"
ONE_F_ONE_B = "rank 0: 0F0 0F1 0B0 0F2 0B1 0B2\nrank 1: 1F0 1B0 1F1 1B1 1F2 1B2"
SPLIT = "rank 0: 0F0 0F1 0I0 0W0 0I1 0W1\nrank 1: 1F0 1I0 1F1 1I1 1W0 1W1"
V_SHAPED = "rank 0: 0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1\nrank 1: 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"
LOOPED = "rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\nrank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
EVALUATION = "rank 0: 0F0 0F1\nrank 1: 1F0 1F1"
FROZEN = "rank 0: 0F0 0F1\nrank 1: 1F0 1B0 1F1 1B1"
ALONE = "rank 0: 0F0 1F0 1B0 0B0"
RECIPES = (GPIPE, ONE_F_ONE_B, SPLIT, V_SHAPED, LOOPED, EVALUATION, FROZEN, ALONE)


def row(schedule: Schedule, rank: int = 0) -> str:
    return " ".join(map(str, schedule.ranks[rank]))


# Rows by chance: any order that respects the data is one.


def rank_of(stage: int, p: int, v_shaped: bool) -> int:
    return 2 * p - 1 - stage if v_shaped and stage >= p else stage % p


def random_rows(p: int, m: int, num_virtual: int, v_shaped: bool, dice: random.Random) -> Schedule:
    """Computations in an order by chance, backwards whole or split by chance, the first stages frozen by chance."""
    last = p * num_virtual - 1
    frozen = dice.choice([0, 0, 0, 1, last + 1])  # that many stages have no backward
    todo = [Action(ActionKind.FORWARD, s, i) for s in range(last + 1) for i in range(m)]
    for s in range(frozen, last + 1):
        for i in range(m):
            split = dice.random() < 0.5
            kinds = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT) if split else (ActionKind.BACKWARD,)
            todo += [Action(kind, s, i) for kind in kinds]
    rows: list[list[Action]] = [[] for _ in range(p)]
    done: set[tuple[str, int, int | None]] = set()

    def is_ready(action: Action) -> bool:
        s, i = action.stage, action.micro_batch
        if action.kind is ActionKind.FORWARD:
            return s == 0 or ("F", s - 1, i) in done
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            return ("B", s, i) in done
        return ("F", s, i) in done and (s == last or ("B", s + 1, i) in done)

    while todo:
        action = dice.choice([each for each in todo if is_ready(each)])
        todo.remove(action)
        rows[rank_of(action.stage, p, v_shaped)].append(action)
        makes = {ActionKind.FORWARD: "F", ActionKind.BACKWARD: "B", ActionKind.BACKWARD_INPUT: "B"}
        done.add((makes.get(action.kind, "W"), action.stage, action.micro_batch))
    return Schedule(tuple(map(tuple, rows)))


@st.composite
def compute_only(draw: st.DrawFn) -> Schedule:
    num_virtual, v_shaped = draw(st.sampled_from([(1, False), (2, False), (2, True), (3, False)]))
    return random_rows(draw(st.integers(1, 4)), draw(st.integers(1, 4)), num_virtual, v_shaped, draw(st.randoms()))


# The oracle.


class WrongRunError(Exception):
    """The run reads what is not there, or moves for nothing."""


@dataclass
class Run:
    """All rows of a lowered schedule on symbolic values."""

    schedule: Schedule
    holder: dict[int, int]
    made: dict[tuple, int] = field(default_factory=dict)
    sent: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    num_posted: Counter = field(default_factory=Counter)
    handles: dict[tuple, tuple[tuple[int, int], int]] = field(default_factory=dict)
    saved: dict[tuple, int] = field(default_factory=dict)
    queued: dict[tuple, int] = field(default_factory=dict)
    states: dict[int, dict] = field(default_factory=dict)

    def outcome(self) -> object:
        """What each stage has in the end; raises WrongRunError, or KeyError where something is not there."""
        for stage in self.holder:
            whole = None if self.schedule.unshard_for_use else stage
            self.states[stage] = {"shard": stage, "full": whole, "used": False, "grads": 0, "reduced": 0}
        at = [0] * len(self.schedule.ranks)
        moves = True
        while moves:
            moves = False
            for rank, actions in enumerate(self.schedule.ranks):
                while at[rank] < len(actions) and self.can_start(rank, actions[at[rank]]):
                    self.start(rank, actions[at[rank]])
                    at[rank] += 1
                    moves = True
        if at != [len(actions) for actions in self.schedule.ranks]:
            raise WrongRunError("deadlock")
        if self.handles or self.saved or self.queued:
            raise WrongRunError("left over")
        if {k: len(v) for k, v in self.sent.items()} != dict(self.num_posted):
            raise WrongRunError("a channel is not empty")
        return self.states, self.made

    def source(self, rank: int, action: Action) -> tuple[int, Payload] | None:
        """The stage on another rank whose payload a computation needs."""
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            return None
        payload = Payload.ACTIVATION if action.kind is ActionKind.FORWARD else Payload.GRADIENT
        stage = action.stage + (-1 if payload is Payload.ACTIVATION else 1)
        return (stage, payload) if self.holder.get(stage, rank) != rank else None

    def can_start(self, rank: int, action: Action) -> bool:
        source = self.source(rank, action) if action.kind in COMPUTATIONS else None
        if source is None:
            return True
        channel, number = self.handles[rank, action.stage, source[1], action.micro_batch]
        return number < len(self.sent.get(channel, []))

    def taken(self, rank: int, action: Action) -> int:
        """The value that comes from the neighbouring stage."""
        source = self.source(rank, action)
        if source is not None:
            channel, number = self.handles.pop((rank, action.stage, source[1], action.micro_batch))
            return self.sent[channel][number]
        payload = Payload.ACTIVATION if action.kind is ActionKind.FORWARD else Payload.GRADIENT
        stage = action.stage + (-1 if payload is Payload.ACTIVATION else 1)
        if stage not in self.holder:  # data, or the loss
            return hash(("edge", action.micro_batch))
        return self.made[stage, payload, action.micro_batch]

    def start(self, rank: int, action: Action) -> None:
        stage, m, state = action.stage, action.micro_batch, self.states[action.stage]
        match action.kind:
            case ActionKind.SEND | ActionKind.RECEIVE:
                self.transfer(rank, action)
            case ActionKind.BACKWARD_WEIGHT:
                self.add(state, self.queued.pop((stage, m)))
            case ActionKind.FORWARD | ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
                self.compute(rank, action, state)
            case ActionKind.UNSHARD:
                self.must(state["full"] != state["shard"])
                state.update(full=state["shard"], used=False)
            case ActionKind.RESHARD:
                self.must(state["full"] is not None and state["used"])
                state["full"] = None
            case ActionKind.REDUCE:
                self.must(state["grads"] and (self.schedule.reduce_each_backward or not state["reduced"]))
                state.update(reduced=state["reduced"] + state["grads"], grads=0)
            case ActionKind.STEP:
                self.must(state["reduced"])
                state.update(shard=hash((state["shard"], state["reduced"])), reduced=0)
                if not (self.schedule.unshard_for_use or self.schedule.unshard_after_step):
                    state["full"] = state["shard"]

    def compute(self, rank: int, action: Action, state: dict) -> None:
        stage, m = action.stage, action.micro_batch
        self.must(state["full"] is not None)
        state["used"] = True
        value = hash((self.taken(rank, action), state["full"]))
        if action.kind is ActionKind.FORWARD:
            self.must((stage, Payload.ACTIVATION, m) not in self.made)
            self.made[stage, Payload.ACTIVATION, m] = value
            trains = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
            if any(a.kind in trains and a.stage == stage for a in self.schedule.ranks[rank]):
                self.saved[stage, m] = value
            return
        value = hash((value, self.saved.pop((stage, m))))
        self.made[stage, Payload.GRADIENT, m] = value
        if action.kind is ActionKind.BACKWARD:
            self.add(state, value)
        else:
            self.queued[stage, m] = value

    def add(self, state: dict, value: int) -> None:
        self.must(not (self.schedule.reduce_each_backward and state["grads"]))
        state["grads"] += value

    def transfer(self, rank: int, action: Action) -> None:
        step = 1 if (action.payload is Payload.ACTIVATION) == (action.kind is ActionKind.SEND) else -1
        peer = self.holder[action.stage + step]
        if action.kind is ActionKind.SEND:
            value = self.made[action.stage, action.payload, action.micro_batch]
            self.sent.setdefault((rank, peer), []).append(value)
            return
        key = rank, action.stage, action.payload, action.micro_batch
        self.must(key not in self.handles)
        self.handles[key] = (peer, rank), self.num_posted[peer, rank]
        self.num_posted[peer, rank] += 1

    @staticmethod
    def must(holds: object) -> None:
        if not holds:
            raise WrongRunError


def outcome(schedule: Schedule, like: Schedule) -> object:
    """What a run leaves, stages placed as in another schedule; None where it goes wrong."""
    holder = {a.stage: rank for rank, actions in enumerate(like.ranks) for a in actions}
    try:
        return Run(schedule, holder).outcome()
    except (WrongRunError, KeyError):
        return None


def flaw_of(schedule: Schedule) -> str | None:
    try:
        verify(schedule)
    except ScheduleError as error:
        return str(error)
    return None


def work(schedule: Schedule) -> set[tuple[str, int | None]]:
    """All stages and all micro-batches."""
    actions = [a for actions in schedule.compute_only().ranks for a in actions]
    return {("stage", a.stage) for a in actions} | {("micro-batch", a.micro_batch) for a in actions}


def check(schedule: Schedule, mutant: Schedule, rank: int) -> None:
    """Hold the verdict on a schedule with another row against the oracle's; a flaw is drawn with an arrow."""
    if str(mutant) == str(schedule):
        return
    is_smaller = work(mutant) != work(schedule)  # a whole stage or micro-batch less
    if is_smaller:
        is_right = outcome(mutant, mutant) is not None
    else:
        is_right = outcome(mutant, schedule) == outcome(schedule, schedule)
    flaw = flaw_of(mutant)
    if flaw is None:
        assert is_right, f"not caught, on rank {rank}:\n{mutant}"
        return
    assert is_smaller or not is_right, f"caught, though right: {flaw}\n{mutant}"
    head, *drawing = flaw.splitlines()
    assert "; " in head, f"no fix in {head!r}"
    assert any("^" in line for line in drawing) or not any(mutant.compute_only().ranks), flaw
    assert len(drawing) <= 8


def mutate(actions: tuple[Action, ...], how: str, i: int, j: int) -> tuple[Action, ...]:
    changed = list(actions)
    if how == "drop":
        del changed[i]
    elif how == "double":
        changed.insert(j, changed[i])
    elif how == "swap":
        changed[i], changed[j] = changed[j], changed[i]
    else:
        changed.insert(j, changed.pop(i))
    return tuple(changed)


def lowered() -> Iterator[Schedule]:
    for text in RECIPES:
        for rules in RULES:
            yield lower(Schedule.parse(text), **rules)


LOWERED = tuple(lowered())


@pytest.mark.parametrize("how", ["drop", "double", "neighbours"])
def test_every_single_mistake_is_caught_unless_the_step_stays_the_same(how: str) -> None:
    for schedule in LOWERED:
        for rank, actions in enumerate(schedule.ranks):
            for i in range(len(actions)):
                j = min(i + 1, len(actions) - 1) if how == "neighbours" else i
                changed = mutate(actions, "swap" if how == "neighbours" else how, i, j)
                ranks = (*schedule.ranks[:rank], changed, *schedule.ranks[rank + 1 :])
                check(schedule, replace(schedule, ranks=ranks), rank)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(compute_only(), st.sampled_from(RULES), st.sampled_from(["drop", "double", "swap", "move"]), st.randoms())
def test_mistakes_in_random_pipelines_are_caught_unless_the_step_stays_the_same(
    schedule: Schedule, rules: dict, how: str, dice: random.Random
) -> None:
    schedule = lower(schedule, **rules)
    assert outcome(schedule, schedule) is not None
    for rank, actions in enumerate(schedule.ranks):
        i, j = dice.randrange(len(actions)), dice.randrange(len(actions))
        ranks = (*schedule.ranks[:rank], mutate(actions, how, i, j), *schedule.ranks[rank + 1 :])
        check(schedule, replace(schedule, ranks=ranks), rank)


# What the passes write.


def test_a_receive_is_posted_one_computation_early() -> None:
    schedule = lower(Schedule.parse(ONE_F_ONE_B), **STAGE_0)
    assert row(schedule, 0) == (
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2 0REDUCE 0STEP"
    )
    assert row(schedule, 1) == (
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2 1REDUCE 1STEP"
    )


def test_stages_on_one_rank_hand_over_directly() -> None:
    schedule = insert_transfers(Schedule.parse(V_SHAPED))
    transfers = {str(a)[:-1] for a in schedule.ranks[1] if a.kind in TRANSFERS}
    assert transfers == {"1RECV_F", "2SEND_F", "2RECV_B", "1SEND_B"}
    assert insert_transfers(Schedule.parse(ALONE)) == Schedule.parse(ALONE)


def test_a_frozen_stage_gets_no_gradients() -> None:
    schedule = lower(Schedule.parse(FROZEN), **STAGE_1)
    assert row(schedule, 0) == "0F0 0SEND_F0 0F1 0SEND_F1"
    assert row(schedule, 1).endswith("1B1 1REDUCE 1STEP 1UNSHARD")


def test_receives_stand_in_the_order_of_sends_where_uses_do_not() -> None:
    """The later payload is used first, so both are posted before it."""
    crossed = insert_transfers(Schedule.parse("rank 0: 0F0 0F1 0F2\nrank 1: 1F2 1F0 1F1"))
    assert row(crossed, 1) == "1RECV_F0 1RECV_F1 1RECV_F2 1F2 1F0 1F1"


def test_replicas_of_a_pipeline_keep_to_themselves() -> None:
    schedule = lower(Schedule.parse("rank 0: 0F0 0B0\nrank 1: 0F0 0B0\nrank 2: 1F0 1B0\nrank 3: 1F0 1B0"), **STAGE_3)
    assert row(schedule, 0) == row(schedule, 1)
    assert row(schedule, 2) == row(schedule, 3) == "1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE 1RESHARD 1STEP"


def test_gathers_of_a_batch() -> None:
    schedule = lower(Schedule.parse(LOOPED), **STAGE_3)
    assert row(schedule, 0) == (
        "0UNSHARD 0F0 0SEND_F0 2UNSHARD 2RECV_F0 0F1 0SEND_F1 2RECV_F1 2F0 2SEND_F0 2RECV_B0 2F1 2SEND_F1 2RECV_B1"
        " 2B0 2SEND_B0 0RECV_B0 2B1 2SEND_B1 2REDUCE 2RESHARD 0RECV_B1 0B0 0B1 0REDUCE 0RESHARD 0STEP 2STEP"
    )


def test_gathers_of_each_micro_batch_spare_the_weight_gradients() -> None:
    schedule = insert_gathers(Schedule.parse("rank 0: 0F0 0F1 0I0 0W0 0B1"), **STAGE_3_EACH)
    assert row(schedule) == (
        "0UNSHARD 0F0 0RESHARD 0UNSHARD 0F1 0RESHARD 0UNSHARD 0I0 0RESHARD 0W0 0REDUCE"
        " 0UNSHARD 0B1 0REDUCE 0RESHARD 0STEP"
    )


def test_a_stage_is_resharded_after_its_last_use_and_reduced_after_its_last_weight_gradient() -> None:
    schedule = insert_gathers(Schedule.parse("rank 0: 0F0 0F1 0I0 0I1 0W0 0W1"), **STAGE_3)
    assert row(schedule) == "0UNSHARD 0F0 0F1 0I0 0I1 0RESHARD 0W0 0W1 0REDUCE 0STEP"


@pytest.mark.parametrize("gather", ["batch", "micro-batch"])
def test_an_evaluation_is_neither_reduced_nor_stepped(gather: str) -> None:
    schedule = lower(Schedule.parse(EVALUATION), **{**STAGE_3, "gather": gather})
    assert {a.kind for actions in schedule.ranks for a in actions} == {
        *(ActionKind.FORWARD, ActionKind.SEND, ActionKind.RECEIVE),
        *(ActionKind.UNSHARD, ActionKind.RESHARD),
    }


def test_offload_of_whole_stages() -> None:
    options = {"fetched": {None}, "evicted": {None}, "stepped": {None}}
    schedule = lower(Schedule.parse("rank 0: 0F0 1F0 1B0 0B0"), **STAGE_3, **options)
    assert row(schedule) == (
        "0FETCH 0UNSHARD 1FETCH 1UNSHARD 0F0 1F0 1B0 1REDUCE 1EVICT 1RESHARD 0B0 0REDUCE 0EVICT 0RESHARD"
        " 0FETCH 0STEP 0EVICT 1FETCH 1STEP 1EVICT"
    )


def test_offload_of_groups_leaves_others_alone() -> None:
    step = data_parallel_step(["root", "b0"], 1, unshard_for_use=True, reduce_each_backward=True)
    moved = insert_offload(step, fetched=["b0"], evicted=["root"], stepped=["b0"])
    moves = [str(a) for a in moved.ranks[0] if a.kind in (ActionKind.FETCH, ActionKind.EVICT)]
    assert moves == ["0FETCH[b0]", "0EVICT[root]", "0FETCH[b0]", "0EVICT[b0]"]
    verify(moved)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(compute_only(), st.sampled_from(RULES), st.booleans())
def test_lowering_keeps_the_computations_and_the_text_form_keeps_all(
    schedule: Schedule, rules: dict, moved: bool
) -> None:
    offload = {"fetched": [None], "evicted": [None], "stepped": [None]} if moved else {}
    whole = lower(schedule, **rules, **offload)
    assert whole.compute_only() == schedule
    assert Schedule.parse(str(whole)) == whole


def in_computations(rank: int, action: Action) -> float:
    return 1.0 if action.kind in COMPUTATIONS else 0.0


@settings(deadline=None, derandomize=True, max_examples=100)
@given(compute_only(), st.sampled_from(RULES[:3]))
def test_lowering_costs_no_time_where_moving_costs_none(schedule: Schedule, rules: dict) -> None:
    assert makespan_s(simulate(lower(schedule, **rules), in_computations)) == makespan_s(
        simulate(schedule, in_computations)
    )


@settings(deadline=None, derandomize=True, max_examples=100)
@given(compute_only())
def test_a_receive_stands_one_computation_before_its_use_or_earlier_for_order(schedule: Schedule) -> None:
    """Between the post and the use stands a computation, wherever there is one to stand there."""
    for actions in insert_transfers(schedule).ranks:
        for index, action in enumerate(actions):
            if action.kind is ActionKind.RECEIVE:
                after = [a for a in actions[index:] if a.kind in COMPUTATIONS]
                uses = (
                    (ActionKind.FORWARD,)
                    if action.payload is Payload.ACTIVATION
                    else (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
                )
                distance = next(
                    i
                    for i, a in enumerate(after)
                    if a.kind in uses and (a.stage, a.micro_batch) == (action.stage, action.micro_batch)
                )
                assert distance >= 1 or len(after) == sum(a.kind in COMPUTATIONS for a in actions)


@pytest.mark.parametrize(
    ("run", "values"),
    [
        (
            lambda s: insert_transfers(insert_transfers(s)),
            ("pass-run-twice", "0SEND_F0 on rank 0", "insert_transfers"),
        ),
        (lambda s: lower(lower(s)), ("pass-run-twice", "0REDUCE on rank 0", "insert_gathers", "compute_only()")),
        (
            lambda s: lower(s, unshard_for_use=True, gather="step"),
            ("gather-unknown", "gather='step'", "batch or micro-batch"),
        ),
        (
            lambda s: lower(s, unshard_for_use=True, unshard_after_step=True),
            ("schedule-rules-contradict", "unshard_for_use=True"),
        ),
    ],
)
def test_refusals(run: Callable[[Schedule], Schedule], values: tuple[str, ...]) -> None:
    with refused(*values):
        run(Schedule.parse(GPIPE))
