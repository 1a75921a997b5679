"""Whichever of the threads is late, training computes the same bits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from harness.models import CASES, make_batches
from harness.pool import WorkerPool
from harness.training import make_config
from shardwise import Engine, initialize
from shardwise.offload import io_threads
from shardwise.offload import worker as host_worker
from shardwise.offload.nvme_storage import NvmeStorage, _NvmeView
from shardwise.offload.storage import DeviceStorage, HostStorage

pytestmark = pytest.mark.begin

CASE = CASES["residual-mlp"]
NUM_STEPS, NUM_MICRO_BATCHES = 4, 2
MOST_SLEEP_S = 0.08
STATES = ("param", "master", "exp_avg", "exp_avg_sq")

# What the engine's thread, its worker and the threads of its files come to.
LATE: tuple[tuple[Any, str], ...] = (
    (host_worker, "_do"),
    (io_threads._IoTransfer, "move"),
    *((kind, name) for kind in (HostStorage, NvmeStorage, DeviceStorage) for name in ("take", "fetch", "open")),
    (_NvmeView, "close"),
    (NvmeStorage, "prefetch"),
    (NvmeStorage, "forget"),
)


@contextmanager
def sleeping(seed: int) -> Iterator[None]:
    """Let every third call or so of `LATE` begin late, some by longer than a forward and a backward take."""
    draws, lock = random.Random(seed), threading.Lock()

    def late(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                sleep_s = draws.choice((0, 0, 1)) * MOST_SLEEP_S * draws.random() ** 6
            time.sleep(sleep_s)
            return real(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for place, name in LATE:
            stack.enter_context(patch.object(place, name, late(getattr(place, name))))
        yield


def use(engine: Engine, batches: list[Any]) -> list[Any]:
    """All that can overtake something else: gradients dropped midway, evaluations, reads, writes, odd backwards."""
    seen: list[Any] = []
    for step, micro_batches in enumerate(batches):
        for batch in (*micro_batches, micro_batches[0])[: step + 2]:
            engine.backward(engine(batch))
        engine.zero_grad()
        seen.append(engine.train_step(micro_batches).loss)
        seen.append(engine.eval_step(micro_batches[:1]).loss)
        for batch in (*micro_batches, micro_batches[0]):
            engine.backward(engine(batch))
        seen.append(engine.read("blocks.0.first.weight", "grad"))
        seen.append(engine.step().grad_norm)
        if step == 1:
            engine.write("head.weight", torch.full_like(engine.read("head.weight"), 0.1))
            with engine.gathered(write=True) as model, torch.no_grad():
                model.blocks[0].first.weight.mul_(0.5)
    return seen


def train(rank: int, world_size: int, overrides: dict[str, Any], seed: int | None) -> tuple[list[Any], list[Any]]:
    config = make_config(NUM_MICRO_BATCHES, overrides)
    steps = make_batches(CASE, num_steps=NUM_STEPS, world_size=world_size, num_micro_batches=NUM_MICRO_BATCHES)
    with ExitStack() as stack:
        if seed is not None:
            stack.enter_context(sleeping(seed + rank))
        engine = stack.enter_context(initialize(CASE.build(torch.float32), config, loss_fn=CASE.loss))
        seen = use(engine, [step[rank] for step in steps])
        names = [place.name for group in engine.layout.groups for place in group.params]
        return seen, [engine.read(name, state) for name in names for state in STATES]


def equal(found: list[Any], wanted: list[Any]) -> bool:
    return len(found) == len(wanted) and all(
        torch.equal(one, other) if isinstance(one, Tensor) else one == other
        for one, other in zip(found, wanted, strict=True)
    )


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("tiers", "clip_norm"),
    [
        pytest.param(
            tiers,
            clip_norm,
            id="-".join(f"{state}-{tier}" for state, tier in tiers.items()) + f"-{clip_norm}",
            marks=() if clip_norm == usual else pytest.mark.full,
        )
        for tiers, usual in (
            ({"optimizer": "host", "grads": "host"}, 0.1),
            ({"optimizer": "nvme", "grads": "nvme"}, None),
            ({"optimizer": "nvme", "grads": "nvme", "params": "nvme"}, 0.1),
            ({"optimizer": "host", "grads": "nvme", "params": "host"}, None),
        )
        for clip_norm in (None, 0.1)
    ],
)
def test_sleeps_anywhere_change_no_bit(
    ranks: WorkerPool, tmp_path: Path, tiers: dict[str, str], clip_norm: float | None, request: pytest.FixtureRequest
) -> None:
    common = {
        "precision": {"param": "bf16"},
        "optimizer": {"clip_norm": clip_norm},
        "zero": {"stage": 3 if "params" in tiers else 2},
    }
    path = {"nvme_path": str(tmp_path)} if "nvme" in tiers.values() else {}
    expected = ranks(2).run(train, common, None)
    seeds = range(0, 40, 2) if request.config.getoption("--full") else range(0, 2, 2)
    for seed in seeds:
        actual = ranks(2).run(train, {**common, "tiers": {**tiers, **path}}, seed)
        for found, wanted in zip(actual, expected, strict=True):
            assert equal(found[0], wanted[0]), (seed, found[0], wanted[0])
            assert equal(found[1], wanted[1]), seed
