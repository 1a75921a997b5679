"""What one layout saves, any other loads, bit for bit; and training goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

OPTIMIZERS = ("adamw", "sgd", "adagrad")
LONE = LayoutSpec(1, 1, 1, 0)
# Shrinking an example that fails would start processes for minutes.
QUICK_TO_FAIL = settings(
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def make_engine(
    model: ModelSpec, layout: LayoutSpec, precision: str, optimizer: str, *, seed: int = 0, master: str = "wide"
) -> Engine:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = RandomModel(model).to(torch.float64)
    config = {
        **layout.sections(),
        "precision": {"param": precision},
        "optimizer": {"name": optimizer, "lr": 0.05},
        "scheduler": {"name": "linear", "total_steps": 20, "warmup_steps": 3},
        "batch": {"global_size": 8, "micro_size": 1},
        "run": {"device": "cpu", "seed": 3},
    }
    plan = PLAN if layout.tp > 1 else None
    return initialize(module, config, plan=plan, loss_fn=token_loss)


def token_loss(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
    targets = batch[1]  # [b, s]
    return F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten(), reduction="sum"), targets.numel()


def train(engine: Engine, num_steps: int) -> list[float]:
    """Steps over 8 samples that depend on the step's number alone."""
    mesh = engine.layout.mesh
    index, num_data_ranks = mesh.data_index(engine.comm.rank), mesh.num_data_ranks
    losses = []
    for _ in range(num_steps):
        generator = torch.Generator().manual_seed(engine.num_steps)
        tokens = torch.randint(NUM_WORDS, (8, 1, 5), generator=generator)  # [samples, 1, s]
        own = [tokens[number] for number in range(index, 8, num_data_ranks)]
        losses.append(engine.train_step([(each[:, :-1], each[:, 1:]) for each in own]).loss)
    return losses


def save(rank: int, world_size: int, root: Path, make: Mapping[str, Any], num_steps: int, wait: bool) -> States:
    with make_engine(**make) as engine:
        train(engine, num_steps)
        engine.save(root, extra={"note": "saved"}, wait=wait)
        states = whole_states(engine)
        engine.finish_saves()
        return states


def load(rank: int, world_size: int, root: Path, make: Mapping[str, Any], num_steps: int) -> tuple[States, int, Any]:
    with make_engine(**make, seed=1) as engine:
        train(engine, num_steps)  # what a load overwrites
        report = engine.load(root)
        return whole_states(engine), engine.num_steps, report.extra


@settings(QUICK_TO_FAIL, max_examples=4)
@given(data=st.data())
def test_any_layout_loads_what_any_other_has_saved(
    ranks: WorkerPool, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_any_to_any(ranks, tmp_path_factory.mktemp("any"), data)


@pytest.mark.full
@settings(QUICK_TO_FAIL, max_examples=300)
@given(data=st.data())
def test_many_layouts_load_what_many_others_have_saved(
    ranks: WorkerPool, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_any_to_any(ranks, tmp_path_factory.mktemp("many"), data)


def check_any_to_any(ranks: WorkerPool, root: Path, data: st.DataObject) -> None:
    model = data.draw(specs, "model")
    before, after = data.draw(layouts, "saved under"), data.draw(layouts, "loaded under")
    precision = data.draw(st.sampled_from(["fp32", "bf16", "fp64"]), "precision")
    optimizer = data.draw(st.sampled_from(OPTIMIZERS), "optimizer")
    num_steps, wait = data.draw(st.integers(0, 2), "steps"), data.draw(st.booleans(), "wait")
    num_before_load = data.draw(st.integers(0, 1), "steps before the load")
    make = {"model": model, "precision": precision, "optimizer": optimizer}
    saved = ranks(before.num_ranks).run(save, root, {**make, "layout": before}, num_steps, wait)[0]
    results = ranks(after.num_ranks).run(load, root, {**make, "layout": after}, num_before_load)
    for loaded, step, extra in results:
        assert (step, extra) == (num_steps, {"note": "saved"})
        assert_same_bits(loaded, saved)


def save_halfway(rank: int, world_size: int, root: Path, make: Mapping[str, Any]) -> tuple[list[float], States]:
    with make_engine(**make) as engine:
        train(engine, 3)
        engine.save(root)
        losses = train(engine, 3)
        return losses, whole_states(engine)


def go_on(rank: int, world_size: int, root: Path, make: Mapping[str, Any]) -> tuple[list[float], States]:
    with make_engine(**make, seed=1) as engine:
        engine.load(root)
        losses = train(engine, 3)
        return losses, whole_states(engine)


MODEL = ModelSpec(width=5, num_blocks=2, is_tied=True, has_frozen=True, has_buffer=False)
FACTORS = {
    "layout": [LayoutSpec(2, 1, 1, stage) for stage in range(4)] + [LayoutSpec(1, 2, 2, 3), LayoutSpec(2, 2, 1, 2)],
    "precision": ["fp32", "bf16", "fp16"],
    "optimizer": ["adamw", "sgd"],
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("options", cover(FACTORS))
def test_training_goes_on_bitwise_on_the_same_layout(
    ranks: WorkerPool, tmp_path: Path, options: Mapping[str, Any]
) -> None:
    make = {"model": MODEL, **options}
    num_ranks = options["layout"].num_ranks
    losses, states = ranks(num_ranks).run(save_halfway, tmp_path, make)[0]
    resumed_losses, resumed = ranks(num_ranks).run(go_on, tmp_path, make)[0]
    assert resumed_losses == losses
    assert_same_bits(resumed, states)


@pytest.mark.parametrize("layout", FACTORS["layout"], ids=str)
def test_training_goes_on_within_summation_order_on_another_layout(
    ranks: WorkerPool, tmp_path: Path, layout: LayoutSpec
) -> None:
    make = {"model": MODEL, "precision": "fp64", "optimizer": "adamw"}
    losses, states = ranks(layout.num_ranks).run(save_halfway, tmp_path, {**make, "layout": layout})[0]
    resumed_losses, resumed = ranks(1).run(go_on, tmp_path, {**make, "layout": LONE})[0]
    assert resumed_losses == pytest.approx(losses, rel=1e-12)
    for key, value in states.items():
        torch.testing.assert_close(resumed[key], value, rtol=1e-9, atol=1e-12)
