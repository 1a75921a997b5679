"""With copies as late as streams allow, training computes the same bits, and waits on the host where it says so."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from harness.late_streams import LateDevice
from harness.models import CASES, make_batches
from harness.training import make_config
from shardwise import Engine, initialize

NUM_STEPS = 3
HOST = {"params": "host", "grads": "host", "optimizer": "host"}
PLACES: dict[str, dict[str, Any]] = {
    "all host": HOST,
    "all nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
    "optimizer host": {"optimizer": "host"},
    "optimizer nvme, grads host": {"grads": "host", "optimizer": "nvme"},
    "params host, optimizer device": {"params": "host"},
    "params nvme, optimizer device": {"params": "nvme"},
    "grads host, optimizer device": {"params": "host", "grads": "host"},
    "activations": {"activations": "host"},
    "all host, activations too": {**HOST, "activations": "host"},
    "halves": {**HOST, "params_on_device": 0.5, "grads_on_device": 0.3, "optimizer_on_device": 0.4},
}


def make_engine(overrides: dict[str, dict[str, Any]]) -> Engine:
    torch.manual_seed(0)
    case = CASES["transformer"]
    sections = {"precision": {"param": "bf16"}, "optimizer": {"lr": 1e-2, "clip_norm": None}, **overrides}
    accumulation = sections.get("batch", {}).get("accumulation", 1)
    engine = initialize(case.build(torch.float32), make_config(accumulation, sections), loss_fn=case.loss)
    if engine.parts.activations is not None:
        engine.parts.activations._min_bytes = 1
    return engine


def train(overrides: dict[str, dict[str, Any]]) -> tuple[list[tuple[float, float]], dict[tuple[str, str], Tensor]]:
    """Losses and norms, and the states at the end; half-way a backward is given up, with a worker that lags."""
    accumulation = overrides.get("batch", {}).get("accumulation", 1)
    batches = make_batches(CASES["transformer"], num_steps=NUM_STEPS, world_size=1, num_micro_batches=accumulation)
    with make_engine(overrides) as engine:
        results = []
        for index, step in enumerate(batches):
            if index == 1:
                for number, batch in enumerate(step[0], 1):
                    if number == accumulation:
                        engine.tiers.worker.submit(partial(time.sleep, 0.1))
                    engine.backward(engine(batch))
                engine.zero_grad()
            result = engine.train_step(step[0])
            results.append((result.loss, result.grad_norm))
        names = [place.name for group in engine.layout.groups for place in group.params]
        states = {
            (name, state): engine.read(name, state)
            for name in names
            for state in engine.states_of(name)
            if state != "grad"
        }
        return results, states


@pytest.mark.quick(2)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("where", "stage"), [*((where, 3) for where in PLACES), ("optimizer host", 1), ("optimizer host", 2)]
)
def test_late_copies_change_no_bit(tmp_path: Path, where: str, stage: int, accumulation: int) -> None:
    recompute = {"mode": "full" if "activations" in where else "none"}
    common = {"batch": {"accumulation": accumulation}, "zero": {"stage": stage}, "recompute": recompute}
    expected = train(common)
    has_files = "nvme" in PLACES[where].values()
    tiers = {**PLACES[where], "nvme_path": str(tmp_path) if has_files else None}
    device = LateDevice()
    # Chunks of files are whole blocks.
    with mock.patch("shardwise.zero.stored_step.CHUNK_NUMEL", 2048 if has_files else 256), device.installed():
        found = train({**common, "tiers": tiers})
    assert device.num_late > 0
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][key], value) for key, value in expected[1].items())


@pytest.mark.parametrize("where", ["all host", "optimizer host", "activations", "all host, activations too"])
def test_only_the_worker_waits_for_copies(where: str) -> None:
    """The program itself waits for the worker where it needs what that has stepped, and for no event."""
    device = LateDevice(num_asks=10**9)
    batches = make_batches(CASES["transformer"], num_steps=NUM_STEPS, world_size=1, num_micro_batches=1)
    recompute = {"mode": "full" if "activations" in where else "none"}
    with (
        device.installed(),
        make_engine({"tiers": PLACES[where], "recompute": recompute, "zero": {"stage": 3}}) as engine,
    ):
        for step in batches:
            engine.train_step(step[0])
        waits = list(device.host_waits)
    assert not [name for name in waits if not name.startswith("shardwise")]
    assert waits or where == "activations"


@pytest.mark.parametrize("grads", ["host", "nvme"])
def test_the_norm_is_there_before_the_gradients_are_stored(tmp_path: Path, grads: str) -> None:
    """It is taken on their way out, unless they are added to others there; the worker may have steps to do before."""
    (step,) = make_batches(CASES["transformer"], num_steps=1, world_size=1, num_micro_batches=1)
    tiers = {"grads": grads, "optimizer": "host", "nvme_path": str(tmp_path) if grads == "nvme" else None}
    gate = threading.Event()
    with mock.patch("shardwise.offload.storage.MOST_STAGED", 100), make_engine({"tiers": tiers}) as engine:
        engine.tiers.worker.submit(gate.wait)
        engine.backward(engine(step[0][0]))
        with ThreadPoolExecutor(1) as pool:
            squares = pool.submit(engine.parts.sharded.square_sum)
            try:
                assert squares.result(timeout=100) > 0
            finally:
                gate.set()
        engine.step()
