"""Checkpoints of states on a CUDA device: staged through pinned memory, written beside training, loaded anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.random_models import NUM_WORDS, ModelSpec, RandomModel
from shardwise import Engine, initialize

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SPEC = ModelSpec(width=8, num_blocks=2, is_tied=True, has_frozen=True, has_buffer=True)


def make_engine(device: str, seed: int = 0, states: str = "master") -> Engine:
    torch.manual_seed(seed)
    precision = {"param": "bf16", "states": states}
    config = {"run": {"device": device}, "precision": precision, "optimizer": {"lr": 0.05}}
    return initialize(RandomModel(SPEC), config, loss_fn=lambda logits, batch: logits.float().square().mean())


def take_steps(engine: Engine, num_steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(engine.num_steps)
    return [engine.train_step([torch.randint(NUM_WORDS, (2, 5), generator=generator)]).loss for _ in range(num_steps)]


def whole_states(engine: Engine) -> dict[tuple[str, str], Tensor]:
    found: dict[tuple[str, str], Any] = {}
    for name, _ in engine.model.named_parameters():
        for state in engine.states_of(name):
            value = engine.read(name, state) if state != "grad" else None
            if value is not None:
                found[name, state] = value.cpu()
    return found


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("device", "states"), [("cuda", "master"), ("cpu", "master"), ("cuda", "int8"), ("cuda", "bf16")]
)
def test_what_a_gpu_saves_loads_on_any_device(tmp_path: Path, wait: bool, device: str, states: str) -> None:
    with make_engine("cuda", states=states) as engine:
        take_steps(engine, 2)
        engine.save(tmp_path, wait=wait)
        saved = whole_states(engine)
        losses = take_steps(engine, 2)  # a copy that the next step overtook would show these
        engine.finish_saves()
    with make_engine(device, seed=1, states=states) as other:
        other.load(tmp_path)
        loaded = whole_states(other)
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[key], value) for key, value in saved.items())
        if device == "cuda":
            assert take_steps(other, 2) == losses
