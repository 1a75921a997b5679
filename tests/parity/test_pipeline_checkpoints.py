"""What one pipeline saves, any other layout loads, bit for bit; and training goes on as if nothing had happened."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoints import load
from harness.huggingface import VOCAB_SIZE
from harness.pool import WorkerPool
from harness.states import States, assert_same_bits
from harness.tensor import make_case
from shardwise import Engine, initialize
from shardwise.checkpoint.folder import read_manifest, step_name
from shardwise.models import Decoder, lm_loss
from shardwise.models.decoder import DecoderConfig

Layout = Mapping[str, Any]

NUM_SAMPLES = 8
NUM_STEPS = 2  # before the save, and behind it

ONE: Layout = {"mesh": {}}
LAYOUTS: Mapping[str, Layout] = {
    "pp2 dp2 tp2": {"mesh": {"pp": 2, "dp_shard": 2, "tp": 2}, "zero": {"stage": 1}},
    "pp2 dp2": {"mesh": {"pp": 2, "dp_shard": 2}, "zero": {"stage": 3}, "pipeline": {"schedule": "gpipe"}},
    "pp2 v2 dp2": {
        "mesh": {"pp": 2, "dp_replicate": 2},
        "pipeline": {"schedule": "interleaved", "virtual_stages": 2},
    },
    "pp4": {"mesh": {"pp": 4}, "pipeline": {"schedule": "zb-h1"}},
    "zb-v": {"mesh": {"pp": 2}, "zero": {"stage": 2}, "pipeline": {"schedule": "zb-v", "virtual_stages": 2}},
    "pp2 tp2": {"mesh": {"pp": 2, "tp": 2}, "zero": {"stage": 3}},
}


def num_ranks_of(layout: Layout) -> int:
    return math.prod(layout["mesh"].values())


def make_engine(layout: Layout, *, is_tied: bool, precision: str = "fp64", optimizer: str = "adamw") -> Engine:
    config = {
        "precision": {"param": precision},
        "optimizer": {"name": optimizer, "lr": 0.01, "clip_norm": 1.0},
        "scheduler": {"name": "linear", "total_steps": 20, "warmup_steps": 3},
        "batch": {"global_size": NUM_SAMPLES, "micro_size": 1},
        "run": {"device": "cpu", "seed": 3, "timeout_s": 30.0},
        **layout,
    }
    return initialize(make_model(is_tied), config, loss_fn=lambda logits, batch: lm_loss(logits.double(), batch[1]))


def make_model(is_tied: bool) -> Decoder:
    sizes = {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "ffn_size": 24}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = DecoderConfig(vocab_size=VOCAB_SIZE, num_layers=4, max_seq_len=32, tie_embeddings=is_tied, **sizes)
        return Decoder(config).to(torch.float64)


def train(engine: Engine, num_steps: int = NUM_STEPS) -> list[float]:
    """Steps over samples that depend on the step's number alone."""
    mesh, case = engine.layout.mesh, make_case("decoder")
    losses = []
    for _ in range(num_steps):
        first = engine.num_steps * NUM_SAMPLES
        samples = range(first + mesh.data_index(engine.comm.rank), first + NUM_SAMPLES, mesh.num_data_ranks)
        losses.append(engine.train_step([case.batch(each, 1, torch.float64) for each in samples]).loss)
    return losses


def stored(root: Path, step: int) -> States:
    """All that a checkpoint has of parameters and optimizer, by the public library; numbers as tensors."""
    folder = root / step_name(step)
    numbers = {
        (tensor.name, state): torch.tensor(stored.value)
        for tensor in read_manifest(folder).tensors
        for state, stored in tensor.states.items()
        if stored.value is not None
    }
    return numbers | {key: value for key, value in load(folder).items() if not key[0].startswith("rank-")}


def save_halfway(rank: int, world_size: int, root: Path, make: Mapping[str, Any], wait: bool) -> list[float]:
    """Save, train on and save again; returns the losses of the steps in between."""
    with make_engine(**make) as engine:
        train(engine)
        engine.save(root, wait=wait)
        losses = train(engine)
        engine.save(root)
        return losses


def go_on(rank: int, world_size: int, source: Path, root: Path, make: Mapping[str, Any]) -> list[float]:
    """Load, save a copy, and go on as `save_halfway` does."""
    with make_engine(**make) as engine:
        assert engine.load(source / step_name(NUM_STEPS)).step == NUM_STEPS
        engine.save(root)
        losses = train(engine)
        engine.save(root)
        return losses


CHAINS = [
    ("pp2 dp2 tp2", "pp4", True, "fp64", "adamw"),
    ("pp2 dp2", "zb-v", False, "fp64", "adamw"),
    ("pp2 v2 dp2", "pp2 dp2", True, "bf16", "sgd"),
    ("zb-v", "pp2 tp2", True, "fp64", "adagrad"),
    ("pp4", "pp2 v2 dp2", False, "fp64", "lion"),
]


@pytest.mark.parametrize(("first", "last", "is_tied", "precision", "optimizer"), CHAINS)
def test_pipelines_load_what_other_layouts_have_saved(
    ranks: WorkerPool, tmp_path: Path, first: str, last: str, is_tied: bool, precision: str, optimizer: str
) -> None:
    options = {"is_tied": is_tied, "precision": precision, "optimizer": optimizer}
    layout = LAYOUTS[first]
    source = tmp_path / "source"
    losses = ranks(num_ranks_of(layout)).run(save_halfway, source, {**options, "layout": layout}, not is_tied)[0]
    saved, end = (stored(source, step) for step in (NUM_STEPS, 2 * NUM_STEPS))
    chain = {"again": layout, "one": ONE, "last": LAYOUTS[last]}
    for name, each in chain.items():
        root = tmp_path / name
        for resumed_losses in ranks(num_ranks_of(each)).run(go_on, source, root, {**options, "layout": each}):
            if name == "again":
                assert resumed_losses == losses
            elif precision == "fp64":
                assert resumed_losses == pytest.approx(losses, rel=1e-9)
        assert_same_bits(stored(root, NUM_STEPS), saved)
        resumed = stored(root, 2 * NUM_STEPS)
        if name == "again":
            assert_same_bits(resumed, end)
        elif precision == "fp64":
            for key, value in end.items():
                torch.testing.assert_close(resumed[key], value, rtol=1e-9, atol=1e-9)
        source = root
