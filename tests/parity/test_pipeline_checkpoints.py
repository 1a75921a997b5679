"""What one pipeline saves, any other layout loads, bit for bit; and training goes on as if nothing had happened."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.checkpoints import flip, load
from harness.huggingface import VOCAB_SIZE
from harness.pool import WorkerPool
from harness.states import States, assert_same_bits
from harness.tensor import make_case
from shardwise import Engine, init, initialize
from shardwise.checkpoint.commit import read_manifest, step_name
from shardwise.checkpoint.manifest import CheckpointError
from shardwise.checkpoint.show import describe_layout
from shardwise.models import Decoder, lm_loss
from shardwise.models.presets import DecoderConfig

Layout = Mapping[str, Any]

NUM_SAMPLES = 4
NUM_STEPS = 2  # before the save, and after it

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


def make_engine(
    layout: Layout,
    *,
    is_tied: bool,
    precision: str = "fp64",
    optimizer: str = "adamw",
    model: Decoder | None = None,
    weights: Path | None = None,
) -> Engine:
    config = {
        "precision": {"param": precision},
        "optimizer": {"name": optimizer, "lr": 0.01, "clip_norm": 1.0},
        "scheduler": {"name": "linear", "total_steps": 20, "warmup_steps": 3},
        "batch": {"global_size": NUM_SAMPLES, "micro_size": 1},
        "run": {"device": "cpu", "seed": 3, "timeout_s": 30.0},
        **layout,
    }
    return initialize(model or make_model(is_tied), config, loss_fn=token_loss, weights=weights)


def token_loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return lm_loss(logits.double(), batch[1])


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


def go_on(
    rank: int, world_size: int, source: Path, root: Path, make: Mapping[str, Any]
) -> tuple[list[float], int, list[int]]:
    """Load, save a copy, and go on as `save_halfway`; returns losses, bytes read, and the numels of what is held."""
    with make_engine(**make) as engine:
        report = engine.load(source / step_name(NUM_STEPS))
        engine.save(root)
        losses = train(engine)
        engine.save(root)
        held = [place.numel for group in engine.layout.groups for place in group.params]
        return losses, report.num_read_bytes, held


def check_written_once(folder: Path, num_ranks: int, num_in_stage: int) -> None:
    """Each element is in one piece; ranks of a stage write about as much, and nothing of another stage's."""
    manifest = read_manifest(folder)
    num_written = [0] * num_ranks
    for tensor in manifest.tensors:
        pieces_of = {name: state.pieces for name, state in tensor.states.items() if state.value is None}
        writers = {int(piece.file[5:10]) for pieces in pieces_of.values() for piece in pieces}
        if tensor.kind == "parameter":
            assert len({writer // num_in_stage for writer in writers}) == 1, tensor.name
            for pieces in pieces_of.values():
                assert sum(piece.rect.numel for piece in pieces) == math.prod(tensor.shape), tensor.name
                for piece in pieces:
                    num_written[int(piece.file[5:10])] += piece.rect.numel
    for first in range(0, num_ranks, num_in_stage):
        of_stage = num_written[first : first + num_in_stage]
        assert 0 < max(of_stage) <= 1.2 * min(of_stage), of_stage


NUM_STATES = {"adamw": 2, "adagrad": 1, "lion": 1, "sgd": 0}  # as long as the parameter
CHAINS = [
    ("pp2 dp2 tp2", "pp4", True, "fp64", "adamw"),
    ("pp2 dp2", "zb-v", False, "fp64", "adamw"),
    ("pp2 v2 dp2", "pp2 dp2", True, "bf16", "sgd"),
    ("zb-v", "pp2 tp2", True, "fp64", "adagrad"),
    ("pp4", "pp2 v2 dp2", False, "fp64", "lion"),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("first", "last", "is_tied", "precision", "optimizer"), CHAINS)
def test_pipelines_load_what_other_layouts_have_saved(
    ranks: WorkerPool, tmp_path: Path, first: str, last: str, is_tied: bool, precision: str, optimizer: str
) -> None:
    options = {"is_tied": is_tied, "precision": precision, "optimizer": optimizer}
    layout = LAYOUTS[first]
    source = tmp_path / "source"
    losses = ranks(num_ranks_of(layout)).run(save_halfway, source, {**options, "layout": layout}, not is_tied)[0]
    check_written_once(
        source / step_name(NUM_STEPS), num_ranks_of(layout), num_ranks_of(layout) // layout["mesh"]["pp"]
    )
    saved, end = (stored(source, step) for step in (NUM_STEPS, 2 * NUM_STEPS))
    chain = {"again": layout, "one": ONE, "last": LAYOUTS[last]}
    for name, each in chain.items():
        root = tmp_path / name
        results = ranks(num_ranks_of(each)).run(go_on, source, root, {**options, "layout": each})
        for resumed_losses, num_read_bytes, held in results:
            if name == "last" and num_ranks_of(each) == each["mesh"]["pp"]:  # whole tensors of its stages, and no more
                assert num_read_bytes == 8 * (1 + NUM_STATES[optimizer]) * sum(held)
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


PIPELINED = {"layout": LAYOUTS["pp2 dp2"], "is_tied": True}


def fall_back(rank: int, world_size: int, root: Path) -> Any:
    """Only ranks of the second stage read what is damaged."""
    with make_engine(**PIPELINED) as engine:
        train(engine, 1)
        engine.save(root)
        before = engine.read("blocks.3.ffn.up.weight")
        train(engine, 1)
        engine.save(root, wait=False)
        engine.finish_saves()
        if rank == 0:
            flip(root / step_name(2) / "rank-00003-of-00004.safetensors", -9)
        dist.barrier()
        report = engine.load(root)
        assert torch.equal(engine.read("blocks.3.ffn.up.weight"), before)
        return engine.num_steps, len(report.damaged), report.damaged[0].split("rank-")[1][:5]


def test_damage_that_one_stage_sees_makes_all_fall_back(ranks: WorkerPool, tmp_path: Path) -> None:
    assert ranks(4).run(fall_back, tmp_path) == [(1, 1, "00003")] * 4


def load_misfits(rank: int, world_size: int, root: Path) -> Any:
    with make_engine(LAYOUTS["pp4"], is_tied=False) as engine:
        train(engine, 1)
        engine.save(root)
    with make_engine(**PIPELINED) as engine:
        train(engine)
        weight = engine.read("embed.weight", "exp_avg")
        said = ""
        try:
            engine.load(root)
        except CheckpointError as error:
            said = f"{error.code}: {error}"
        unchanged = torch.equal(engine.read("embed.weight", "exp_avg"), weight)
        skipped = engine.load(root, strict=False, weights_only=True).skipped
        kept = torch.equal(engine.read("embed.weight", "exp_avg"), weight), engine.num_steps
        return said, unchanged, skipped, kept, engine.read("blocks.2.ffn.up.weight").clone()


def test_what_does_not_fit_is_the_same_report_on_all_ranks(ranks: WorkerPool, tmp_path: Path) -> None:
    results = ranks(4).run(load_misfits, tmp_path)
    expected = stored(tmp_path, 1)["blocks.2.ffn.up.weight", "param"]
    for said, unchanged, skipped, kept, loaded in results:
        assert said.startswith("model-misfit: ")
        assert "unexpected head.weight (tied to embed.weight in the model)" in said
        assert (said, skipped) == (results[0][0], results[0][2])
        assert skipped == ("unexpected head.weight (tied to embed.weight in the model)",)
        assert (unchanged, kept) == (True, (True, NUM_STEPS))
        assert torch.equal(loaded, expected)


def freeze(engine: Engine) -> None:
    """All of the first stage."""
    for module in (engine.model.embed, *engine.model.blocks[:2]):
        module.requires_grad_(False)


def save_parts(rank: int, world_size: int, root: Path) -> Any:
    """What is trained alone, and the weights alone, by an engine of which one stage is frozen."""
    with make_engine(LAYOUTS["pp2 dp2"], is_tied=False) as engine:
        freeze(engine)
        train(engine)
        engine.save(root / "trainable", contents="trainable")
        engine.save(root / "weights", contents="weights")
        assert all(not group.trainable for group in engine.layout.groups) == (rank < 2)
        names = ("embed.weight", "blocks.0.ffn.up.weight", "blocks.2.ffn.up.weight", "head.weight")
        return {name: engine.read(name) for name in names}


def load_parts(rank: int, world_size: int, root: Path) -> Any:
    with make_engine(LAYOUTS["pp4"], is_tied=False) as engine:
        freeze(engine)
        trainable = engine.load(root / "trainable")
        names = [*(name for name, _ in engine.model.named_parameters())]
        found = {name: engine.read(name) for name in names}
        step = engine.num_steps
        engine.load(root / "weights")
        return trainable.missing, step, found, {name: engine.read(name) for name in names}


def test_parts_of_what_a_pipeline_has_are_saved_and_loaded(ranks: WorkerPool, tmp_path: Path) -> None:
    saved = ranks(4).run(save_parts, tmp_path)[0]
    manifest = read_manifest(tmp_path / "trainable" / step_name(NUM_STEPS))
    assert describe_layout(manifest).startswith(
        "ZeRO-3 over 4 ranks, pp 2 × dp_shard 2, gpipe over 2 stages from embed, blocks.2, fp64"
    )
    there = {tensor.name for tensor in manifest.tensors}
    assert not {"embed.weight", "blocks.0.ffn.up.weight"} & there
    for missing, step, trained, weights in ranks(4).run(load_parts, tmp_path):
        assert (missing, step) == ((), NUM_STEPS)
        for name, value in saved.items():
            assert torch.equal(trained[name], value)
            assert torch.equal(weights[name], value)


TIERS = {"optimizer": "nvme", "params": "host", "grads": "host"}


def save_from_tiers(rank: int, world_size: int, root: Path, swap: Path) -> None:
    layout = {**LAYOUTS["pp2 dp2"], "tiers": {**TIERS, "nvme_path": str(swap)}}
    with make_engine(layout, is_tied=True) as engine:
        train(engine)
        engine.save(root, wait=False)


def load_into_tiers(rank: int, world_size: int, source: Path, root: Path, swap: Path) -> None:
    layout = {**LAYOUTS["zb-v"], "tiers": {"optimizer": "nvme", "params": "nvme", "nvme_path": str(swap)}}
    with make_engine({**layout, "zero": {"stage": 3}}, is_tied=True) as engine:
        engine.load(source)
        engine.save(root)
        train(engine, 1)


def test_a_pipeline_saves_from_tiers_and_loads_into_them(ranks: WorkerPool, tmp_path: Path) -> None:
    ranks(4).run(save_from_tiers, tmp_path / "tiers", tmp_path / "swap")
    ranks(4).run(save_halfway, tmp_path / "device", PIPELINED, True)
    ranks(2).run(load_into_tiers, tmp_path / "tiers", tmp_path / "again", tmp_path / "swap")
    saved = stored(tmp_path / "tiers", NUM_STEPS)
    assert_same_bits(stored(tmp_path / "again", NUM_STEPS), saved)
    for key, value in stored(tmp_path / "device", NUM_STEPS).items():
        torch.testing.assert_close(saved[key], value, rtol=1e-9, atol=1e-12)


def export_trained(rank: int, world_size: int, root: Path) -> None:
    with make_engine(ONE, is_tied=True) as engine:
        engine.export_weights(root / "first", dtype="fp64")
        train(engine, 1)
        engine.export_weights(root / "trained", dtype="fp64")


def export_and_import(rank: int, world_size: int, root: Path, name: str) -> tuple[int, int]:
    """Also build an engine from the folder; returns the bytes that an import reads, and the numel of what is held."""
    layout = LAYOUTS[name]
    with make_engine(layout, is_tied=True) as engine:
        engine.export_weights(root / name / "first", dtype="fp64")
        report = engine.import_weights(root / "trained")
        engine.export_weights(root / name / "imported", dtype="fp64")
        numel = engine.layout.numel
    with init():
        model = make_model(is_tied=True)
    with make_engine(layout, is_tied=True, model=model, weights=root / "trained") as engine:
        engine.export_weights(root / name / "built", dtype="fp64")
    return report.num_read_bytes, numel


@pytest.mark.parametrize("name", ["pp4", "pp2 dp2 tp2", "pp2 v2 dp2"])
def test_a_pipeline_exports_the_bytes_of_one_process_and_imports_them(
    ranks: WorkerPool, tmp_path: Path, name: str
) -> None:
    ranks(1).run(export_trained, tmp_path)
    (tmp_path / name).mkdir()
    for num_read_bytes, numel in ranks(num_ranks_of(LAYOUTS[name])).run(export_and_import, tmp_path, name):
        assert 0 < num_read_bytes <= 8 * numel * LAYOUTS[name]["mesh"].get("tp", 1)
        assert name != "pp4" or num_read_bytes == 8 * numel
    expected = {step: contents(tmp_path / step) for step in ("first", "trained")}
    assert expected["first"] != expected["trained"]
    for folder, step in (("first", "first"), ("imported", "trained"), ("built", "trained")):
        assert contents(tmp_path / name / folder) == expected[step], folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}
