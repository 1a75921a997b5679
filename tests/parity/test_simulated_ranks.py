"""A simulated rank of a tensor-parallel group is a real one, byte for byte and call for call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.combinations import cover
from harness.models import ModelCase
from harness.pool import WorkerPool
from harness.simulated import Measured, measure_steps, simulated
from harness.tensor import make_case, step_batches
from harness.training import make_config
from shardwise import Simulation, initialize, simulate
from shardwise.models import Decoder, DecoderConfig, lm_loss
from shardwise.runtime.memory_tracker import Category

pytestmark = pytest.mark.begin

NUM_MEASURED_STEPS = 2


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


@pytest.mark.quick(1)
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
        },
        # Stages 0 and 3 show all there is of recomputation and meshes; 1 and 2, what they do to data ranks.
        quick=lambda options: options["stage"] in (0, 3) or (options["mesh"], options["recompute"]) == ((2, 2), "none"),
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
    reals = ranks(world_size).run(measure, options["model"], overrides)
    for rank in (0, world_size - 1):  # which differ in their place on each axis
        simulation = simulate_case(case, overrides, rank, world_size)
        assert simulated(simulation) == reals[rank]
        assert simulation.states_bytes == simulation.layout.bytes_at_rest(rank // tp)


def logits_peak(tp: int, precision: str) -> int:
    """Bytes of activations at the peak of a model that is little but its head."""
    shape = DecoderConfig(
        vocab_size=8192,
        num_layers=1,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        ffn_size=32,
        max_seq_len=256,
    )
    tokens = torch.zeros(8, 256, dtype=torch.int64)
    simulation = simulate(
        lambda: Decoder(shape),
        make_config(1, {"mesh": {"tp": tp}, "precision": {"param": precision}}),
        lambda: (tokens, tokens),
        loss_fn=lambda logits, batch: lm_loss(logits, batch[1]),
        rank=0,
        world_size=tp,
    )
    return simulation.peak.peak_live_bytes[Category.ACTIVATIONS]


@pytest.mark.parametrize(("precision", "element_bytes"), [("fp32", 4), ("bf16", 2)])
def test_the_peak_holds_no_full_logits(precision: str, element_bytes: int) -> None:
    """One rank has logits and their gradient; of several, none has even its own words' logits of all tokens."""
    logits_bytes = 8 * 256 * 8192 * element_bytes
    assert logits_peak(1, precision) > 2 * logits_bytes
    chunk_bytes = 4 * 2**20  # on the CPU so many logits at a time, in fp32, and as many numbers of their gradient
    for tp in (2, 4):
        assert 2 * chunk_bytes < logits_peak(tp, precision) < 4 * chunk_bytes <= logits_bytes // 2


class Pair(nn.Module):
    """A column and a row layer, with a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.tensor_plan = {"up": "column", "down": "row"}

    def forward(self, x: Tensor) -> Tensor:  # [b, s, 16]
        return self.down(self.up(x).relu())


@pytest.mark.parametrize("model", [Pair, Pair()])
def test_a_simulation_takes_the_models_own_plan(model: Any) -> None:
    simulation = simulate(
        model,
        {"mesh": {"tp": 4}},
        lambda: torch.zeros(2, 3, 16, requires_grad=True),
        loss_fn=lambda y, _: y.square().mean(),
        rank=5,
        world_size=8,
    )
    shapes = {param.name: param.shape for group in simulation.layout.groups for param in group.params}
    assert shapes == {"up.weight": (16, 16), "up.bias": (16,), "down.weight": (16, 16), "down.bias": (16,)}
    assert [call.name for call in simulation.calls if call.op == "all_reduce" and call.axis == "tp"][:1] == ["down"]
