"""Checkpoints of states that rest on the host or on NVMe: any tiers save, any others load, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from harness.pool import WorkerPool
from harness.random_models import NUM_WORDS, PLAN, LayoutSpec, ModelSpec, RandomModel, layouts, specs
from harness.states import States, assert_same_bits, whole_states
from shardwise import Engine, initialize
from shardwise.checkpoint import spans
from shardwise.zero import params, streamed

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"name": "adamw"},
    "momentum": {"name": "sgd", "momentum": 0.9},
    "sgd": {"name": "sgd"},
    "adagrad": {"name": "adagrad"},
    "lion": {"name": "lion"},
}
# Shrinking an example that fails would start processes for minutes.
QUICK_TO_FAIL = settings(
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class TierSpec:
    """Where states rest, and the share of each that stays on the device."""

    params: str = "device"
    grads: str = "device"
    optimizer: str = "device"
    share: float = 0.0

    def section(self, swap: Path) -> dict[str, Any]:
        """Of a config."""
        tiers = {"params": self.params, "grads": self.grads, "optimizer": self.optimizer}
        shares = {f"{state}_on_device": self.share for state, tier in tiers.items() if tier != "device"}
        return {**tiers, **shares, **({"nvme_path": str(swap)} if "nvme" in tiers.values() else {})}


@dataclass(frozen=True)
class Side:
    """What saves, or what loads."""

    layout: LayoutSpec
    tiers: TierSpec
    precision: str = "fp32"
    optimizer: str = "adamw"
    chunk_numel: int = 4 * 2**20  # of what is stepped at a time; whole blocks of a file
    window_bytes: int = 16 * 2**20  # of what is loaded at a time


tiers_there_are = st.sampled_from(["device", "host", "nvme"])


@st.composite
def sides(draw: st.DrawFn) -> Side:
    layout = draw(layouts)
    anywhere = tiers_there_are if layout.stage else st.just("device")
    where = TierSpec(
        params=draw(tiers_there_are) if layout.stage == 3 else "device",
        grads=draw(anywhere),
        optimizer=draw(anywhere),
        share=draw(st.sampled_from([0.0, 0.0, 0.3, 0.7])),
    )
    chunk_numel, window_bytes = draw(st.sampled_from([2048, 4 * 2**20])), draw(st.sampled_from([64, 1000, 2**24]))
    return Side(layout, where, chunk_numel=chunk_numel, window_bytes=window_bytes)


@contextmanager
def engine_of(model: ModelSpec, side: Side, swap: Path, seed: int = 0) -> Iterator[Engine]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = RandomModel(model).to(torch.float64)
    config = {
        **side.layout.sections(),
        "precision": {"param": side.precision},
        "optimizer": {**OPTIMIZERS[side.optimizer], "lr": 0.05},
        "scheduler": {"name": "linear", "total_steps": 20, "warmup_steps": 3},
        "batch": {"global_size": 12, "micro_size": 1},
        "tiers": side.tiers.section(swap),
        "run": {"device": "cpu", "seed": 3},
    }
    plan = PLAN if side.layout.tp > 1 else None
    with (
        mock.patch.object(streamed, "CHUNK_NUMEL", side.chunk_numel),
        mock.patch.object(params, "CHUNK_NUMEL", side.chunk_numel),
        mock.patch.object(spans, "WINDOW_BYTES", side.window_bytes),
        initialize(module, config, plan=plan, loss_fn=token_loss) as engine,
    ):
        yield engine


def token_loss(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
    targets = batch[1]  # [b, s]
    return F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten(), reduction="sum"), targets.numel()


def train(engine: Engine, num_steps: int) -> list[float]:
    """Steps over 12 samples that depend on the step's number alone."""
    mesh = engine.layout.mesh
    index, num_data_ranks = mesh.data_index(engine.comm.rank), mesh.num_data_ranks
    losses = []
    for _ in range(num_steps):
        generator = torch.Generator().manual_seed(engine.num_steps)
        tokens = torch.randint(NUM_WORDS, (12, 1, 5), generator=generator)  # [samples, 1, s]
        own = [tokens[number] for number in range(index, 12, num_data_ranks)]
        losses.append(engine.train_step([(each[:, :-1], each[:, 1:]) for each in own]).loss)
    return losses


def save(
    rank: int, world_size: int, root: Path, swap: Path, model: ModelSpec, side: Side, num_steps: int, wait: bool
) -> States:
    """What was saved; while it is being written, training goes on."""
    with engine_of(model, side, swap) as engine:
        train(engine, num_steps)
        engine.save(root, extra={"note": "saved"}, wait=wait)
        states = whole_states(engine)
        train(engine, 1)
        engine.finish_saves()
        return states


def load(
    rank: int, world_size: int, root: Path, swap: Path, model: ModelSpec, side: Side, num_steps: int, name: str
) -> tuple[States, int, Any]:
    with engine_of(model, side, swap, seed=1) as engine:
        train(engine, num_steps)  # what a load overwrites
        report = engine.load(root / name)
        return whole_states(engine), engine.num_steps, report.extra


def check_any_to_any(ranks: WorkerPool, root: Path, data: st.DataObject) -> None:
    model = data.draw(specs | specs.map(lambda spec: replace(spec, width=24)), "model")
    common = {
        "precision": data.draw(st.sampled_from(["fp32", "bf16", "fp16", "fp64"]), "precision"),
        "optimizer": data.draw(st.sampled_from(sorted(OPTIMIZERS)), "optimizer"),
    }
    before = replace(data.draw(sides(), "saved under"), **common)
    after = replace(data.draw(sides(), "loaded under"), **common)
    num_steps, wait = data.draw(st.integers(0, 2), "steps"), data.draw(st.booleans(), "wait")
    num_before_load = data.draw(st.integers(0, 1), "steps before the load")
    swap = root / "swap"
    saved = ranks(before.layout.num_ranks).run(save, root, swap, model, before, num_steps, wait)[0]
    name = f"step-{num_steps:08d}"
    results = ranks(after.layout.num_ranks).run(load, root, swap, model, after, num_before_load, name)
    for loaded, step, extra in results:
        assert (step, extra) == (num_steps, {"note": "saved"})
        assert_same_bits(loaded, saved)
    assert not swap.exists() or not list(swap.iterdir())


@settings(QUICK_TO_FAIL, max_examples=20)
@given(data=st.data())
def test_any_tiers_load_what_any_others_have_saved(
    ranks: WorkerPool, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_any_to_any(ranks, tmp_path_factory.mktemp("any"), data)


@pytest.mark.full
@settings(QUICK_TO_FAIL, max_examples=300)
@given(data=st.data())
def test_many_tiers_load_what_many_others_have_saved(
    ranks: WorkerPool, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_any_to_any(ranks, tmp_path_factory.mktemp("many"), data)
