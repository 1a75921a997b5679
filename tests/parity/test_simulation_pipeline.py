"""A simulated rank of a pipeline is a real one, byte for byte, message for message and action for action."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.combinations import cover
from harness.pool import WorkerPool
from harness.refusals import refused
from harness.simulated import Measured, measure_steps, simulated
from harness.tensor import DEEP_MODELS, MICRO_SIZE, make_case
from harness.training import Overrides, make_config
from shardwise import Simulation, initialize, simulate
from shardwise.runtime.memory_tracker import Category
from shardwise.schedule import RECIPES, max_in_flight

pytestmark = pytest.mark.begin

NUM_STEPS = 3
PP = 4


def measure(rank: int, world_size: int, name: str, num_micro_batches: int, overrides: Overrides) -> Measured:
    case = make_case(name)
    batch = case.batch(0, MICRO_SIZE, torch.float64)
    engine = initialize(case.build(torch.float32), make_config(num_micro_batches, overrides), loss_fn=case.loss)
    return measure_steps(engine, [[batch] * num_micro_batches] * NUM_STEPS)


def simulate_case(
    name: str, num_micro_batches: int, overrides: Overrides, rank: int, world_size: int, **options: Any
) -> Simulation:
    case = make_case(name)
    batch = case.batch(0, MICRO_SIZE, torch.float64)
    return simulate(
        case.build(torch.float32),
        make_config(num_micro_batches, overrides),
        lambda: batch,
        loss_fn=case.loss,
        rank=rank,
        world_size=world_size,
        **options,
    )


def virtual_stages_of(schedule: str) -> int:
    return RECIPES[schedule].min_virtual_stages


def check_ranks(ranks: WorkerPool, num_ranks: int, *arguments: Any) -> None:
    """Compare one rank of each place in the pipeline, with the last of its replicas; they lie next to each other."""
    reals = ranks(num_ranks).run(measure, *arguments)
    num_replicas = num_ranks // arguments[-1]["mesh"]["pp"]
    for rank in range(num_replicas - 1, num_ranks, num_replicas):
        found = simulated(simulate_case(*arguments, rank, num_ranks))
        assert found.actions == reals[rank].actions
        assert found.calls == reals[rank].calls
        assert found == reals[rank]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "options",
    cover(
        {
            "schedule": sorted(RECIPES),
            "stage": [1, 3],
            "pp": [2, 4],
            "model": list(DEEP_MODELS),
            "recompute": ["none", "full"],
        },
        # Stages 1 and 3 differ in what a schedule's gathers and reductions are lowered to: two schedules show it.
        lambda options: options["stage"] == 3 or options["schedule"] in ("1f1b", "zb-v"),
        # The same two show each length, model and recomputation; the others, what differs most from the first.
        lambda options: (
            options["schedule"] in ("1f1b", "zb-v")
            or (options["pp"], options["model"], options["recompute"]) == (4, "deep-tied", "full")
        ),
    ),
)
def test_simulated_ranks_are_real_ones(ranks: WorkerPool, options: dict[str, Any]) -> None:
    """Of two replicas of the pipeline, or of a longer one."""
    overrides = {
        "mesh": {"pp": options["pp"]},
        "zero": {"stage": options["stage"]},
        "precision": {"param": "fp32"},
        "recompute": {"mode": options["recompute"]},
        "pipeline": {"schedule": options["schedule"], "virtual_stages": virtual_stages_of(options["schedule"])},
    }
    check_ranks(ranks, 4, options["model"], 3, overrides)


@pytest.mark.full
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "overrides",
    [
        {"mesh": {"pp": 2}, "zero": {"stage": 0}},
        {"mesh": {"pp": 2}, "zero": {"stage": 2}, "pipeline": {"schedule": "gpipe"}},
        {"mesh": {"pp": 2}, "zero": {"stage": 3}, "pipeline": {"gather": "micro-batch"}},
        {"mesh": {"pp": 2, "tp": 2}, "tensor": {"sequence_parallel": True}, "recompute": {"mode": "full"}},
        {"mesh": {"pp": 2, "tp": 2}, "pipeline": {"schedule": "zb-v", "virtual_stages": 2}},
    ],
)
def test_simulated_ranks_are_real_ones_on_every_axis(ranks: WorkerPool, overrides: dict[str, Any]) -> None:
    check_ranks(ranks, 4, "deep-tied", 2, {"precision": {"param": "bf16"}, **overrides})


def held_activations(schedule: str, num_micro_batches: int, rank: int = 0) -> int:
    pipeline = {"schedule": schedule, "virtual_stages": virtual_stages_of(schedule)}
    overrides = {"mesh": {"pp": PP}, "pipeline": pipeline}
    peak = simulate_case("deep", num_micro_batches, overrides, rank, PP).peak
    return peak.peak_live_bytes[Category.ACTIVATIONS]


@pytest.mark.full
def test_the_peak_shows_the_micro_batches_in_flight() -> None:
    """Beside what one micro-batch leaves on rank 0 a peak holds the little that is at work."""
    all_forward = {num: held_activations("gpipe", num) for num in (2, 2 * PP)}
    of_one = (all_forward[2 * PP] - all_forward[2]) / (2 * PP - 2)

    def num_held(schedule: str, num_micro_batches: int, rank: int = 0) -> int:
        return round(held_activations(schedule, num_micro_batches, rank) / of_one)

    assert {num: round(num_bytes / of_one) for num, num_bytes in all_forward.items()} == {2: 2, 2 * PP: 2 * PP}
    assert [num_held("1f1b", num) for num in (2, PP, 2 * PP)] == [2, PP, PP]
    assert num_held("1f1b", 2 * PP, rank=2) == 2
    assert num_held("zb-h1", 2 * PP) == PP
    assert num_held("zb-h2", 2 * PP) == max_in_flight("zb-h2", PP, 2 * PP, 1, rank=0) == 2 * PP - 1


def test_what_a_stage_receives_must_be_known() -> None:
    case = make_case("deep")
    batches = iter([case.batch(0, size, torch.float64) for size in (2, 3, 2, 2)])
    with refused("simulated-batch-shapes"):
        simulate(
            case.build(torch.float32),
            make_config(2, {"mesh": {"pp": 2}}),
            lambda: next(batches),
            loss_fn=case.loss,
            rank=1,
            world_size=2,
        )
