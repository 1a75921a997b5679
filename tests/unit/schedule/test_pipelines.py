"""Pipeline schedules: proved by the verifier, counted and timed against closed forms and against torch's orders."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as theirs

from harness.refusals import refused
from harness.zero_schedules import num_deferred, num_in_flight, peak_held_bytes
from shardwise.schedule import (
    RECIPES,
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
    StagePlacement,
    bubble_s,
    gpipe,
    interleaved,
    makespan_s,
    max_in_flight,
    naive,
    one_f_one_b,
    pipeline_evaluation,
    pipeline_step,
    placement_of,
    rank_bubble_s,
    rank_span_s,
    simulate,
    verify,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from shardwise.schedule.pipelines import ScheduleRows, interleaved_rounds

NUM_RANKS = st.integers(1, 6)
NUM_MICRO_BATCHES = st.integers(1, 20)
SECONDS = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
BACKWARDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)


@st.composite
def settings_of_recipes(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """Name, ranks, micro-batches and virtual stages that go together."""
    recipe = draw(st.sampled_from(sorted(RECIPES.values(), key=lambda recipe: recipe.name)))
    most = 4 if recipe.max_virtual_stages is None else recipe.max_virtual_stages
    virtual_stages = draw(st.integers(recipe.min_virtual_stages, most))
    return recipe.name, draw(NUM_RANKS), draw(NUM_MICRO_BATCHES), virtual_stages


def stepped(schedule: Schedule) -> Schedule:
    """The schedule with what a step of the optimizer needs after its computations."""
    rows = []
    for row in schedule.ranks:
        stages = sorted({action.stage for action in row})
        rows.append((*row, *(Action(kind, stage) for kind in (ActionKind.REDUCE, ActionKind.STEP) for stage in stages)))
    return replace(schedule, ranks=tuple(rows))


def timed_bubbles(schedule: Schedule, seconds: tuple[int, int, int]) -> list[float]:
    """Of each rank, where a micro-batch's forward and both parts of its backward take so long on a rank."""
    forward, backward, weight = seconds
    prices = dict(zip((ActionKind.FORWARD, *BACKWARDS), (forward, backward + weight, backward, weight), strict=True))
    num_stages = len({action.stage for action in schedule.ranks[0]})
    timed = simulate(schedule, lambda rank, action: prices[action.kind])
    return [rank_bubble_s(timed, rank) / num_stages for rank in range(len(schedule.ranks))]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(settings_of_recipes())
def test_every_step_verifies_and_computes_each_micro_batch_once(chosen: tuple[str, int, int, int]) -> None:
    name, num_ranks, num_micro_batches, _ = chosen
    schedule = pipeline_step(*chosen)
    verify(schedule)
    verify(stepped(schedule))
    placement = placement_of(name, num_ranks, chosen[-1])
    kinds = (ActionKind.FORWARD, *(BACKWARDS[1:] if RECIPES[name].splits_backward else BACKWARDS[:1]))
    for rank, row in enumerate(schedule.ranks):
        assert Counter(row) == Counter(
            Action(kind, stage, micro_batch)
            for kind in kinds
            for stage in placement.stages_of(rank)
            for micro_batch in range(num_micro_batches)
        )


@settings(deadline=None, derandomize=True, max_examples=60)
@given(NUM_RANKS, NUM_MICRO_BATCHES, st.integers(1, 4))
def test_an_evaluation_takes_the_shortest_time_in_any_placement(p: int, m: int, v: int) -> None:
    """The last rank starts after p - 1 forwards and is then busy; in a V what it made has p - 1 to go still."""
    for placement in (StagePlacement(p, v), StagePlacement(p, 2, is_v_shaped=True)):
        schedule = pipeline_evaluation(placement, m)
        verify(schedule)
        for rank, row in enumerate(schedule.ranks):
            stages = placement.stages_of(rank)
            assert Counter(row) == Counter(Action(ActionKind.FORWARD, stage, k) for stage in stages for k in range(m))
        seconds = makespan_s(simulate(schedule, lambda rank, action: 1))
        if placement.is_v_shaped:
            assert seconds == 2 * m + 2 * (p - 1)
        elif m >= p:
            assert seconds == v * m + p - 1


@settings(deadline=None, derandomize=True, max_examples=300)
@given(settings_of_recipes(), SECONDS)
def test_the_bubble_equals_the_closed_form(chosen: tuple[str, int, int, int], seconds: tuple[int, int, int]) -> None:
    if chosen[0] == "zb-v":  # else few draws have W <= F <= B
        weight, forward, backward = sorted(seconds)
        seconds = (forward, backward, weight)
    try:
        expected = bubble_s(*chosen, *seconds)
    except ScheduleError:
        assume(False)
    assert max(timed_bubbles(pipeline_step(*chosen), seconds)) == pytest.approx(expected)


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.bubble])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 5])
def test_the_closed_form_is_known_for_a_common_step(name: str, num_ranks: int) -> None:
    """m >= 2p, with equal costs and with those of a transformer, W <= F <= B: it may not refuse."""
    for num_micro_batches in (2 * num_ranks, 4 * num_ranks):
        for virtual_stages in (1,) if RECIPES[name].max_virtual_stages else (2, 3):
            for seconds in ((1, 1, 1), (5, 6, 4)):
                chosen = (name, num_ranks, num_micro_batches, virtual_stages)
                measured = max(timed_bubbles(pipeline_step(*chosen), seconds))
                assert measured == pytest.approx(bubble_s(*chosen, *seconds))


def test_the_bubbles_of_four_ranks_are_those_of_the_papers() -> None:
    """In units of F = B = W, p = 4, m = 8: 9 for 1F1B, a third of it for H1, none for H2 and ZB-V."""
    wanted = {"naive": 72, "gpipe": 9, "1f1b": 9, "interleaved": 4.5, "zb-h1": 3, "zb-h2": 0, "zb-v": 0}
    assert {name: bubble_s(name, 4, 8, RECIPES[name].min_virtual_stages, 1, 1, 1) for name in wanted} == wanted


@settings(deadline=None, derandomize=True, max_examples=200)
@given(settings_of_recipes())
def test_what_is_in_flight_equals_the_closed_form(chosen: tuple[str, int, int, int]) -> None:
    ranks = range(chosen[1])
    assert num_in_flight(pipeline_step(*chosen)) == tuple(max_in_flight(*chosen, rank) for rank in ranks)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(NUM_RANKS, NUM_MICRO_BATCHES, st.integers(1, 9), st.integers(0, 9))
def test_the_split_backward_holds_what_the_paper_says(p: int, m: int, weight_bytes: int, more_bytes: int) -> None:
    """Qi et al. 2023: (p - i)M_B + i M_W and (2p - 2i - 1)M_B + 2i M_W with M_W <= M_B, ranks from 0."""
    assert peak_held_bytes(zero_bubble_h1(p, m).schedule(), 1, 1) == (min(m, p),) * p
    assert peak_held_bytes(zero_bubble_h2(p, m).schedule(), 1, 1) == (min(m, 2 * p - 1),) * p
    assume(m >= 2 * p - 1)
    held_bytes = (weight_bytes + more_bytes, weight_bytes)
    h1 = [(p - i) * held_bytes[0] + i * held_bytes[1] for i in range(p)]
    h2 = [(2 * p - 2 * i - 1) * held_bytes[0] + 2 * i * held_bytes[1] for i in range(p)]
    assert peak_held_bytes(zero_bubble_h1(p, m).schedule(), *held_bytes) == tuple(h1)
    assert peak_held_bytes(zero_bubble_h2(p, m).schedule(), *held_bytes) == tuple(h2)


def test_what_counts_as_in_flight_and_as_deferred() -> None:
    text = "rank 0: 0F0[a] 0F0[b] 0F1[a] 0F1[b] 0I0[b] 0I0[a] 0I1[b] 0I1[a] 0W0[b] 0W0[a] 0F2[a] 0F2[b]"
    schedule = Schedule.parse(text + " 0W1[a] 0W1[b] 0B2[b] 0B2[a]")
    assert num_in_flight(schedule) == num_deferred(schedule) == (2,)
    assert peak_held_bytes(schedule, 3, 2) == (6,)  # two in flight; later two deferred, and one of each
    assert num_in_flight(pipeline_evaluation(StagePlacement(2), 4)) == (1, 1)
    assert num_deferred(one_f_one_b(2, 4).schedule()) == (0, 0)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(NUM_RANKS, NUM_MICRO_BATCHES)
def test_interleaved_with_one_stage_a_rank_has_the_bubble_of_1f1b(num_ranks: int, num_micro_batches: int) -> None:
    schedule = interleaved(num_ranks, num_micro_batches, 1).schedule()
    verify(schedule)
    assert max(timed_bubbles(schedule, (2, 3, 1))) == bubble_s("1f1b", num_ranks, num_micro_batches, 1, 2, 3, 1)


def test_naive_is_one_rank_at_a_time() -> None:
    assert str(naive(2, 1).schedule()) == "rank 0: 0F0 0B0\nrank 1: 1F0 1B0"
    timed = simulate(naive(3, 2).schedule(), lambda rank, action: 1)
    assert makespan_s(timed) == sum(action.duration_s for action in timed) == 12
    assert [rank_span_s(timed, rank) for rank in range(3)] == [12, 10, 8]


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
def test_rounds_of_interleaving_are_even_and_at_least_as_long_as_the_ranks(num_ranks: int) -> None:
    for num_micro_batches in range(1, 50):
        rounds = interleaved_rounds(num_ranks, num_micro_batches)
        assert sum(rounds) == num_micro_batches
        assert max(rounds) - min(rounds) <= 1
        assert min(rounds) >= min(num_ranks, num_micro_batches)
        if num_micro_batches % num_ranks == 0:
            assert set(rounds) == {num_ranks}


def of_ours(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in row] for row in schedule.ranks]


def of_torch(name: str, num_ranks: int, num_micro_batches: int, v: int) -> list[list[str]]:
    """What torch's schedule class writes, as text; a namespace stands for its object, which wants real stages."""
    wanted = getattr(theirs, name)
    num_rounds = max(1, num_micro_batches // num_ranks)
    schedule = SimpleNamespace(
        pp_group_size=num_ranks,
        n_local_stages=v,
        num_stages=num_ranks * v,
        _num_stages=num_ranks * v,
        _n_microbatches=num_micro_batches,
        number_of_rounds=num_rounds,
        microbatches_per_round=num_micro_batches // num_rounds,
    )
    if hasattr(wanted, "_calculate_single_rank_operations"):
        rows = [wanted._calculate_single_rank_operations(schedule, rank) for rank in range(num_ranks)]
    else:
        orders = wanted._get_pipeline_order(schedule)
        rows = [orders[rank] for rank in range(num_ranks)]
    codes = {"F", "B", "I", "W"}
    return [[str(a) for a in row if a is not None and a.computation_type.value in codes] for row in rows]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    ("name", "generate", "counts", "v"),
    [
        ("ScheduleGPipe", gpipe, lambda p: range(1, 17), 1),
        # With fewer than p - 1 micro-batches torch writes forwards of some that are not there.
        ("Schedule1F1B", one_f_one_b, lambda p: range(max(1, p - 1), 17), 1),
        ("ScheduleInterleaved1F1B", lambda p, m: interleaved(p, m, 2), lambda p: range(p, 5 * p, p), 2),
        ("ScheduleInterleaved1F1B", lambda p, m: interleaved(p, m, 3), lambda p: range(p, 5 * p, p), 3),
        # Where rounds are of one length but longer than p, both agree too.
        (
            "ScheduleInterleaved1F1B",
            lambda p, m: interleaved(p, m, 2),
            lambda p: (p - 1 or 1, p + 1, 2 * p + 2),
            2,
        ),
        # With one stage a rank it is H1; torch has no H2.
        ("ScheduleInterleavedZeroBubble", zero_bubble_h1, lambda p: range(1, 17), 1),
        ("ScheduleZBVZeroBubble", zero_bubble_v, lambda p: range(1, 17), 2),
    ],
)
def test_the_order_of_computations_is_torchs(
    name: str, generate: Callable[[int, int], ScheduleRows], counts: Callable[[int], range], v: int, num_ranks: int
) -> None:
    for num_micro_batches in counts(num_ranks):
        ours = of_ours(generate(num_ranks, num_micro_batches).schedule())
        wanted = of_torch(name, num_ranks, num_micro_batches, v)
        if name == "Schedule1F1B":
            # The order that torch draws for its last rank begins with the forward of micro-batch 1, never 0.
            assert wanted.pop()[0] == f"{num_ranks - 1}F1"
            ours.pop()
        assert ours == wanted, num_micro_batches


@pytest.mark.parametrize(
    ("name", "virtual_stages", "code", "value"),
    [
        ("1f1b", 2, "schedule-virtual-stages", "pipeline.virtual_stages=2 for schedule 1f1b"),
        ("zb-h1", 2, "schedule-virtual-stages", "=2 for schedule zb-h1"),
        ("zb-h2", 3, "schedule-virtual-stages", "=3 for schedule zb-h2"),
        ("interleaved", 1, "schedule-virtual-stages", "=1 for schedule interleaved"),
        ("zb-v", 3, "schedule-virtual-stages", "=3 for schedule zb-v"),
        ("gpipe", 0, "schedule-virtual-stages", "=0 for schedule gpipe"),
        ("2f2b", 1, "schedule-unknown", "pipeline.schedule='2f2b'"),
    ],
)
def test_what_a_recipe_does_not_take(name: str, virtual_stages: int, code: str, value: str) -> None:
    for refuses in (
        lambda: placement_of(name, 2, virtual_stages),
        lambda: pipeline_step(name, 2, 4, virtual_stages),
        lambda: bubble_s(name, 2, 4, virtual_stages, 1, 1, 1),
        lambda: max_in_flight(name, 2, 4, virtual_stages, 0),
    ):
        with refused(code, value):
            refuses()


def test_a_v_has_two_stages_by_default() -> None:
    assert (
        pipeline_step("zb-v", 2, 3) == pipeline_step("zb-v", 2, 3, virtual_stages=2) == zero_bubble_v(2, 3).schedule()
    )
    assert placement_of("zb-v", 2) == StagePlacement(2, 2, is_v_shaped=True)


@pytest.mark.parametrize("name", RECIPES)
def test_counts_below_one_are_refused(name: str) -> None:
    virtual_stages = RECIPES[name].min_virtual_stages
    with refused("count-below-one", "num_micro_batches=0"):
        pipeline_step(name, 2, 0, virtual_stages)
    with refused("count-below-one", "num_ranks=0"):
        pipeline_step(name, 0, 1, virtual_stages)
    with refused("rank-out-of-range", "rank=2"):
        max_in_flight(name, 2, 1, virtual_stages, rank=2)
    with refused("count-below-one", "num_micro_batches=0"):
        pipeline_evaluation(placement_of(name, 2, virtual_stages), 0)


@pytest.mark.parametrize(
    ("arguments", "code", "value"),
    [
        (("gpipe", 4, 3, 2, 1, 1, 1), "no-closed-form", "num_micro_batches=3 is below 4"),
        (("interleaved", 4, 3, 2, 1, 1, 1), "no-closed-form", "num_micro_batches=3 is below 4"),
        (("zb-h1", 4, 3, 1, 1, 1, 1), "no-closed-form", "num_micro_batches=3 is below 4"),
        (("zb-h2", 4, 6, 1, 1, 1, 1), "no-closed-form", "num_micro_batches=6 is below 7"),
        (("zb-v", 4, 6, 1, 1, 1, 1), "no-closed-form", "num_micro_batches=6 is below 7"),
        (("zb-v", 4, 8, 1, 1, 1, 2), "no-closed-form", "F=1 s, B=1 s, W=2 s without W <= F <= B"),
        (("zb-v", 4, 8, 1, 2, 1, 1), "no-closed-form", "F=2 s, B=1 s, W=1 s without W <= F <= B"),
        (("1f1b", 4, 0, 1, 1, 1, 1), "no-closed-form", "num_micro_batches=0 is below 1"),
        (("naive", 4, 0, 2, 1, 1, 1), "no-closed-form", "num_micro_batches=0 is below 1"),
    ],
)
def test_closed_forms_say_where_they_do_not_hold(arguments: tuple, code: str, value: str) -> None:
    with refused(code, value):
        bubble_s(*arguments)
