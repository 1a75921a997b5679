"""Training with the inputs of recomputed blocks in host memory is bitwise training with them on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from harness.combinations import cover
from harness.pool import WorkerPool
from harness.reference import Trace
from harness.tensor import make_case, step_batches
from harness.training import make_config, own_gradients
from shardwise import initialize

pytest.importorskip("transformers")

OUT, BACK = ("device", "host"), ("host", "device")
NUM_STEPS = 2


@dataclass(frozen=True)
class Trained:
    """What a rank saw, and the bytes that left and came back."""

    trace: Trace
    moved_bytes: tuple[int, int]


def train(rank: int, world_size: int, options: dict[str, Any], activations: str) -> Trained:
    tp, accumulation = options["tp"], options["accumulation"]
    data_rank, num_data_ranks = rank // tp, world_size // tp
    sections = {
        "mesh": {"tp": tp},
        "tensor": {"sequence_parallel": tp > 1},
        "zero": {"stage": options["stage"]},
        "recompute": {"mode": options["recompute"], "every": options["every"]},
        "compile": {"enabled": options.get("compile", False), "backend": "aot_eager"},
        "tiers": {"activations": activations},
    }
    case = make_case(options["model"])
    model = case.build(torch.float64, seed=0)
    losses, norms, gradients = [], [], {}
    with initialize(model, make_config(accumulation, sections), loss_fn=case.loss) as engine:
        for step in range(NUM_STEPS):
            batches = step_batches(case, step, num_data_ranks)[data_rank::num_data_ranks][:accumulation]
            for batch in batches:
                engine.backward(engine(batch))
            gradients = {name: value.clone() for name, value in own_gradients(engine).items()}
            result = engine.step()
            engine.eval_step(batches)
            losses.append(result.loss)
            norms.append(result.grad_norm)
        moved = engine.parts.activations._traffic.moved_bytes if engine.parts.activations is not None else {}
        parameters = {name: engine.read(name) for name, _ in model.named_parameters()}
    return Trained(Trace(losses, norms, gradients, parameters), (moved.get(OUT, 0), moved.get(BACK, 0)))


def check(ranks: WorkerPool, options: dict[str, Any]) -> None:
    """All models drop but the decoder, so recomputation has masks to draw again."""
    num_ranks, traces = 2, {}
    for activations in ("device", "host"):
        trained = ranks(num_ranks).run(train, options, activations)
        traces[activations] = [each.trace for each in trained]
        for each in trained:
            out, back = each.moved_bytes
            assert out == back
            assert (out > 0) == (activations == "host")
    for found, expected in zip(traces["host"], traces["device"], strict=True):
        assert found.losses == expected.losses
        assert found.grad_norms == expected.grad_norms
        for theirs, ours in ((expected.gradients, found.gradients), (expected.parameters, found.parameters)):
            assert theirs.keys() == ours.keys()
            assert theirs
            assert all(torch.equal(ours[name], value) for name, value in theirs.items())


FACTORS = {
    "model": ["decoder", "gpt2", "llama", "t5"],
    "stage": [0, 1, 2, 3],
    "recompute": ["full", "selective"],
    "accumulation": [1, 2],
    "tp": [1, 2],
    "every": [1, 2],
}


def is_quick(options: dict[str, Any]) -> bool:
    """Stages 0, 1 and 2 move activations in one way, which one model shows; the others show what they add to inputs."""
    return options["stage"] in (0, 3) or (options["model"], options["recompute"]) == ("decoder", "full")


@pytest.mark.parametrize("options", cover(FACTORS, quick=is_quick))
def test_offload_is_bitwise_no_offload(ranks: WorkerPool, options: dict[str, Any]) -> None:
    check(ranks, options)


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["selective", pytest.param("full", marks=pytest.mark.full)])
def test_compiled_blocks_too(ranks: WorkerPool, recompute: str) -> None:
    options = {"model": "decoder", "stage": 3, "recompute": recompute, "accumulation": 2, "tp": 1, "every": 1}
    check(ranks, {**options, "compile": True})
