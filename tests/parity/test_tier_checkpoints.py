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

from harness.combinations import cover
from harness.pool import WorkerPool
from harness.random_models import NUM_WORDS, PLAN, LayoutSpec, ModelSpec, RandomModel, layouts, specs
from harness.states import States, assert_same_bits, whole_states
from shardwise import Engine, initialize
from shardwise.checkpoint import file_ranges as spans
from shardwise.offload import tiers
from shardwise.optim.rules import RULES
from shardwise.zero import param_group as params
from shardwise.zero import stored_step as streamed

pytestmark = pytest.mark.begin

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    **{rule.name: {"name": rule.name} for rule in RULES if rule.kernel and not rule.matrix_states},
    "momentum": {"name": "sgd", "momentum": 0.9},
}
# Shrinking an example that fails would start processes for minutes.
QUICK_TO_FAIL = settings(
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class TierSpec:
    """Where states are stored, and the share of each that stays on the device."""

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


@settings(QUICK_TO_FAIL, max_examples=1)
@given(data=st.data())
def test_any_tiers_load_what_any_others_have_saved(
    ranks: WorkerPool, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_any_to_any(ranks, tmp_path_factory.mktemp("any"), data)


@pytest.mark.full
@pytest.mark.timeout(1800)
@settings(QUICK_TO_FAIL, max_examples=300)
@given(data=st.data())
def test_many_tiers_load_what_many_others_have_saved(
    ranks: WorkerPool, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_any_to_any(ranks, tmp_path_factory.mktemp("many"), data)


def train_through(
    rank: int, world_size: int, root: Path, swap: Path, side: Side, wait: bool
) -> tuple[list[float], States]:
    """The last three steps of six, and all states at the end; the third is saved."""
    with engine_of(MODEL, side, swap) as engine:
        train(engine, 3)
        engine.save(root, wait=wait)
        losses = train(engine, 3)
        engine.finish_saves()
        return losses, whole_states(engine)


def go_on(rank: int, world_size: int, root: Path, swap: Path, side: Side) -> tuple[list[float], States]:
    with engine_of(MODEL, side, swap, seed=1) as engine:
        train(engine, 1)
        engine.load(root)
        return train(engine, 3), whole_states(engine)


MODEL = ModelSpec(width=24, num_blocks=2, is_tied=True, has_frozen=True, has_buffer=True)
WHERE = {
    "device": TierSpec(),
    "host": TierSpec("host", "host", "host", share=0.3),
    "nvme": TierSpec("nvme", "nvme", "nvme"),
    "apart": TierSpec("device", "host", "nvme"),
}
FACTORS = {
    "before": list(WHERE),
    "after": list(WHERE),
    "precision": ["fp32", "bf16", "fp16"],
    "optimizer": list(OPTIMIZERS),
    "wait": [True, False],
}


def is_quick(options: Mapping[str, Any]) -> bool:
    """Each way to and from files, and each place to itself; states of all optimizers through files."""
    places = {options["before"], options["after"]}
    if options["optimizer"] not in ("adamw", "momentum"):
        return places == {"nvme"} and options["precision"] == "bf16" and options["wait"]
    return "nvme" in places or len(places) == 1


@pytest.mark.parametrize("options", cover(FACTORS, quick=is_quick))
def test_training_goes_on_bitwise_on_the_same_tiers_and_on_others(
    ranks: WorkerPool, tmp_path: Path, options: Mapping[str, Any]
) -> None:
    before, after = (
        Side(LayoutSpec(2, 1, 1, 3), WHERE[options[side]], options["precision"], options["optimizer"], chunk_numel=2048)
        for side in ("before", "after")
    )
    swap = tmp_path / "swap"
    losses, states = ranks(2).run(train_through, tmp_path, swap, before, options["wait"])[0]
    resumed_losses, resumed = ranks(2).run(go_on, tmp_path, swap, after)[0]
    assert resumed_losses == losses
    assert_same_bits(resumed, states)


def save_parts(rank: int, world_size: int, root: Path, swap: Path, side: Side) -> list[States]:
    with engine_of(MODEL, side, swap) as engine:
        found = []
        for contents in ("weights", "trainable", "all"):
            train(engine, 1)
            engine.save(root, contents=contents, keep_last=3)
            found.append(whole_states(engine))
        return found


def load_parts(rank: int, world_size: int, root: Path, swap: Path, side: Side) -> list[tuple[States, States]]:
    """What there was before and after a load: of weights, of what is trainable, and of the weights of all."""
    found = []
    for step, options in ((1, {}), (2, {"strict": False}), (3, {"weights_only": True})):
        with engine_of(MODEL, side, swap, seed=step) as engine:
            train(engine, 1)
            before = whole_states(engine)
            engine.load(root / f"step-{step:08d}", **options)
            found.append((before, whole_states(engine)))
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize(("before", "after"), [("nvme", "host"), ("host", "apart"), ("apart", "nvme")])
def test_parts_of_the_states_are_saved_and_loaded(ranks: WorkerPool, tmp_path: Path, before: str, after: str) -> None:
    sides = [Side(LayoutSpec(2, 1, 1, 3), WHERE[each], "bf16") for each in (before, after)]
    saved = ranks(2).run(save_parts, tmp_path, tmp_path / "swap", sides[0])[0]
    weights, trainable, all_weights = ranks(2).run(load_parts, tmp_path, tmp_path / "swap", sides[1])[0]
    for (own, loaded), source in ((weights, saved[0]), (all_weights, saved[2])):
        for key, value in loaded.items():
            assert torch.equal(value, (source if key[1] in ("param", "master", "buffer") else own)[key]), key
    own, loaded = trainable
    trained = {name for name, state in saved[1] if state == "exp_avg"}
    assert {name for name, _ in saved[1]} > trained
    for (name, state), value in loaded.items():
        assert torch.equal(value, (saved[1] if name in trained else own)[name, state]), (name, state)


MIB = 2**20


def measure_buffers(rank: int, world_size: int, root: Path, swap: Path) -> tuple[int, list[int], list[int]]:
    """Bytes of the states in files; of a save and a load, what the host's buffers took at most, and bytes written."""
    config = {
        "zero": {"stage": 3},
        "tiers": {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme_path": str(swap)},
        "run": {"device": "cpu"},
    }
    layers = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
    peaks, written = [], []
    with (
        mock.patch.object(spans, "WINDOW_BYTES", MIB // 2),
        mock.patch.object(spans, "RUN_BYTES", MIB // 2),
        mock.patch.object(tiers, "CHUNK_NUMEL", 2**15),  # which bounds the buffers that are kept
        mock.patch.object(streamed, "CHUNK_NUMEL", 2**15),
        mock.patch.object(params, "CHUNK_NUMEL", 2**15),
        initialize(layers, config, loss_fn=lambda output, _: output.square().mean()) as engine,
    ):
        engine.train_step([torch.ones(1, 512)])
        for work in (lambda: engine.save(root), lambda: engine.load(root)):
            engine.tiers.wait_idle()
            engine.tiers.trim()
            engine.tiers.memory.reset_peak()
            before_bytes = sum(engine.tiers.memory.snapshot().live_bytes.values())
            moved_bytes = engine.tiers.traffic.moved_bytes["host", "nvme"]
            work()
            written.append(engine.tiers.traffic.moved_bytes["host", "nvme"] - moved_bytes)
            peaks.append(engine.tiers.memory.snapshot().peak_bytes - before_bytes)
        return sum(engine.layout.bytes_by_tier()["nvme"].values()), peaks, written


def test_states_in_files_are_saved_and_loaded_through_a_few_buffers(ranks: WorkerPool, tmp_path: Path) -> None:
    ((in_files, (saving, loading), (written, loaded)),) = ranks(1).run(
        measure_buffers, tmp_path / "ck", tmp_path / "swap"
    )
    assert in_files > 31 * MIB
    assert saving < 4 * MIB
    assert loading < 4 * MIB
    assert written == 0
    assert 0.74 * in_files < loaded < 0.8 * in_files  # each state once, but for gradients; parts share blocks
