"""A simulated rank of a tensor-parallel group is a real one, byte for byte and call for call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.combinations import cover
from harness.models import ModelCase
from harness.pool import WorkerPool
from harness.simulated import Measured, measure_steps, simulated
from harness.tensor import make_case, step_batches
from harness.training import make_config
from shardwise import Simulation, initialize, simulate

NUM_MEASURED_STEPS = 3


def measure(rank: int, world_size: int, name: str, overrides: dict[str, Any]) -> Measured:
    """The same batch in all steps."""
    case = make_case(name)
    engine = initialize(case.build(torch.float32), make_config(1, overrides), loss_fn=case.loss)
    return measure_steps(engine, [step_batches(case, 0, 1)[:1]] * (1 + NUM_MEASURED_STEPS))


def simulate_case(case: ModelCase, overrides: dict[str, Any], rank: int, world_size: int) -> Simulation:
    batch, *_ = step_batches(case, 0, 1)
    return simulate(
        case.build(torch.float32),
        make_config(1, overrides),
        lambda: batch,
        loss_fn=case.loss,
        rank=rank,
        world_size=world_size,
    )


@pytest.mark.parametrize(
    "options",
    cover(
        {
            "model": ["decoder", "llama"],
            "mesh": [(2, 1), (4, 1), (2, 2)],
            "sequence_parallel": [False, True],
            "stage": [0, 1, 2, 3],
            "recompute": ["none", "selective", "full"],
            "precision": ["fp32", "bf16"],
        }
    ),
)
def test_simulated_ranks_are_real_ones(ranks: WorkerPool, options: dict[str, Any]) -> None:
    if options["model"] != "decoder":
        pytest.importorskip("transformers")
    tp, num_data_ranks = options["mesh"]
    world_size = tp * num_data_ranks
    overrides = {
        "mesh": {"tp": tp},
        "tensor": {"sequence_parallel": options["sequence_parallel"]},
        "zero": {"stage": options["stage"]},
        "recompute": {"mode": options["recompute"]},
        "precision": {"param": options["precision"]},
    }
    case = make_case(options["model"])
    for rank, real in enumerate(ranks(world_size).run(measure, options["model"], overrides)):
        simulation = simulate_case(case, overrides, rank, world_size)
        assert simulated(simulation) == real
        assert simulation.states_bytes == simulation.layout.bytes_at_rest(rank // tp)
