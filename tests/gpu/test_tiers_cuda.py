"""States on the host and on NVMe beside a CUDA device: bits, pinned memory, waits, and what is left at the end.

The device's optimizer kernels and the host's differ in the last bits, so tiers are compared with each other where the
host steps, and with no offload where the device does; between the two, within a tolerance.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.models import CASES, make_batches
from harness.training import make_config
from shardwise import Engine, initialize

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NUM_STEPS = 4
HOST = {"params": "host", "grads": "host", "optimizer": "host"}
NVME = {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}


def make_engine(tiers: dict[str, Any], stage: int, accumulation: int = 1, **sections: dict[str, Any]) -> Engine:
    torch.manual_seed(0)
    case = CASES["transformer"]
    overrides = {
        "run": {"device": "cuda"},
        "zero": {"stage": stage},
        "precision": {"param": "bf16"},
        "tiers": tiers,
        **sections,
    }
    return initialize(case.build(torch.float32), make_config(accumulation, overrides), loss_fn=case.loss)


def train(
    tiers: dict[str, Any], stage: int, accumulation: int = 1, **sections: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and masters at the end."""
    batches = make_batches(
        CASES["transformer"], num_steps=NUM_STEPS, world_size=1, num_micro_batches=accumulation, dtype=torch.float32
    )
    with make_engine(tiers, stage, accumulation, **sections) as engine:
        losses = [engine.train_step(step[0]).loss for step in batches]
        names = [place.name for group in engine.layout.groups for place in group.params]
        return losses, {name: engine.read(name, "master").cpu() for name in names}


def placed(tiers: dict[str, Any], path: Path) -> dict[str, Any]:
    return {**tiers, "nvme_path": str(path)} if "nvme" in tiers.values() else tiers


def check_bitwise(
    found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]
) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_host_and_nvme_compute_the_same_bits(tmp_path: Path, clip_norm: float | None, accumulation: int) -> None:
    sections = {"optimizer": {"clip_norm": clip_norm}}
    on_host = train(HOST, 3, accumulation, **sections)
    check_bitwise(train(placed(NVME, tmp_path), 3, accumulation, **sections), on_host)
    check_bitwise(train({**HOST, "pin_memory": False}, 3, accumulation, **sections), on_host)
    check_bitwise(train(HOST, 3, accumulation, zero={"stage": 3, "overlap": False}, **sections), on_host)
    on_device = train({}, 3, accumulation, **sections)
    assert on_host[0] == pytest.approx(on_device[0], rel=1e-3)
    for name, value in on_device[1].items():
        torch.testing.assert_close(on_host[1][name], value, rtol=1e-3, atol=1e-4)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_optimizer_on_the_host_steps_parameters_of_the_device(stage: int) -> None:
    """Windows on the device's parameters and gradients, at every stage."""
    check_bitwise(train({"optimizer": "host"}, stage), train(HOST, 3))


@pytest.mark.parametrize("tiers", [{"params": "host"}, {"params": "host", "grads": "host"}, {"params": "nvme"}])
def test_where_the_device_steps_the_bits_are_those_of_no_offload(tmp_path: Path, tiers: dict[str, Any]) -> None:
    check_bitwise(train(placed(tiers, tmp_path), 3, 2), train({}, 3, 2))


def test_inputs_of_blocks_and_states_share_the_streams() -> None:
    recompute = {"mode": "full"}
    check_bitwise(train({**HOST, "activations": "host"}, 3, 2, recompute=recompute), train(HOST, 3, 2))


def test_what_crosses_is_pinned_and_what_does_not_is_not() -> None:
    with make_engine(HOST, 3) as engine:
        for group in engine.parts.sharding.groups:
            assert group.shard.tensor is not None
            assert group.shard.tensor.is_pinned()
            assert group.grads is None or group.grads.storage.tensor.is_pinned()
            assert not group.master.tensor.is_pinned()
        assert engine.tiers.buffers.acquire(100).is_pinned()


@contextmanager
def no_waits() -> Iterator[None]:
    """Inside, whatever waits for the device is an error; what waits for an event is not seen."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("tiers", "stage"),
    [({"optimizer": "host"}, 2), ({"optimizer": "host", "grads": "host"}, 2), (HOST, 3), (NVME, 3)],
)
def test_a_step_waits_for_the_norm_alone(
    tmp_path: Path, tiers: dict[str, Any], stage: int, accumulation: int, clip_norm: float | None
) -> None:
    """Which it reads after an event; nothing else in it stops the device, nor copies from memory that is not pinned.

    The first steps make memory and learn what is used.
    """
    batches = make_batches(
        CASES["transformer"], num_steps=NUM_STEPS, world_size=1, num_micro_batches=accumulation, dtype=torch.float32
    )
    with make_engine(placed(tiers, tmp_path), stage, accumulation, optimizer={"clip_norm": clip_norm}) as engine:
        for step in batches[:2]:
            engine.train_step(step[0])
        with no_waits():
            for step in batches[2:]:
                engine.train_step(step[0])
            engine.tiers.wait_idle()
        assert engine.num_steps == NUM_STEPS


def test_nothing_is_left_when_an_engine_is_closed(tmp_path: Path) -> None:
    def held() -> tuple[int, int, int]:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), len(os.listdir("/proc/self/fd")), resident_mib()

    for tiers in (HOST, NVME):
        train(placed(tiers, tmp_path), 3)
        before = held()
        for _ in range(3):
            train(placed(tiers, tmp_path), 3)
        after = held()
        assert after[:2] == before[:2]
        assert after[2] < before[2] + 32
    assert not list(tmp_path.iterdir())


def resident_mib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024
