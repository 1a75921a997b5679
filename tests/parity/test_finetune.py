"""`shardwise train --model` trains a Hugging Face folder as the same loop in plain transformers, in every layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.hf_folders import FAMILIES, make_folder, write_chats
from harness.pool import WorkerPool
from shardwise.checkpoint.commit import read_manifest
from shardwise.config.resolve import Config
from shardwise.train.dataset import sample_order
from shardwise.train.job_model import HuggingFaceModel
from shardwise.train.loop import build_trainer
from shardwise.train.prepare import PreparedData, open_data, prepare_data
from shardwise.train.setup import check_job

pytestmark = pytest.mark.usefixtures("warm_python")

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 3": {"zero": {"stage": 3}, "batch": {"accumulation": 1}},
    "tp 2": {"mesh": {"tp": 2}, "zero": {"stage": 0}, "batch": {"accumulation": 2}},
    "cp 2": {"mesh": {"cp": 2}, "zero": {"stage": 3}, "batch": {"accumulation": 2}},
    "pp 2": {"mesh": {"pp": 2}, "zero": {"stage": 1}, "batch": {"accumulation": 2}},
}
NUM_STEPS, GLOBAL_SIZE, SEQ_LEN = 4, 2, 64
PROMPT = [1, 40, 41, 42]


def config_of(folder: Path, chats: Path, tmp_path: Path, rank: int, layout: dict[str, Any]) -> Config:
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder)},
        "lora": {"rank": rank},
        "data": {"path": str(chats), "seq_len": SEQ_LEN, "cache_dir": str(tmp_path / "cache")},
        "batch": {"micro_size": 1},
        "precision": {"param": "fp32"},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.0},
        "scheduler": {"name": "constant"},
        "run": {"steps": NUM_STEPS, "device": "cpu", "eval_batches": 1, "sample_tokens": 0},
    }
    return Config.from_dict({name: values.get(name, {}) | layout.get(name, {}) for name in {**values, **layout}})


def train(rank: int, world_size: int, values: str, shard: Path, folder: Path) -> tuple[list[float], float | None]:
    config = Config.from_json(values)
    trainer = build_trainer(config, open_data(shard, config))
    records = list(trainer.steps(lambda: False, lambda doing: None))
    trainer.model.export(trainer.engine, folder)
    trainer.engine.close()
    return [record.loss for record in records], records[-1].eval_loss


def train_plainly(config: Config, data: PreparedData) -> tuple[list[float], Any]:
    """What the same loop in transformers, torch and peft does with the same rows."""
    theirs = HuggingFaceModel.open(config)
    torch.manual_seed(config.run.seed)
    base = transformers.AutoModelForCausalLM.from_pretrained(theirs.folder, dtype=torch.float32, use_cache=False)
    model: Any = theirs._adapted(base)
    own = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(NUM_STEPS):
        numbers = [
            sample_order(config.run.seed, step * GLOBAL_SIZE + place, data.train.num_sequences(SEQ_LEN))
            for place in range(GLOBAL_SIZE)
        ]
        columns = zip(*(data.train.sample(number, SEQ_LEN) for number in numbers), strict=True)
        batch = theirs.batch([torch.stack([torch.from_numpy(row) for row in column]) for column in columns])
        count = int((batch["labels"][:, 1:] != -100).sum())
        loss = model(**batch, num_items_in_batch=count).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def answer(model: Any) -> list[int]:
    found = model.generate(input_ids=torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, use_cache=True)
    return found[0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("lora", [0, 4], ids=["plain", "lora"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick(2)
def test_a_folder_trains_as_in_transformers_and_is_exported(
    ranks: WorkerPool, tmp_path: Path, family: str, layout: str, lora: int
) -> None:
    if (family, layout) == ("gemma3", "cp 2"):
        pytest.skip("its window is refused under cp; see docs/models.md")
    folder, chats = make_folder(family, tmp_path / family), write_chats(tmp_path / "chats.jsonl")
    config, _ = check_job(config_of(folder, chats, tmp_path, lora, LAYOUTS[layout]), 2)  # as before a run starts
    data = prepare_data(config, tmp_path)
    losses, model = train_plainly(config, data)
    for found, eval_loss in ranks(2).run(train, config.to_json(), data.path, tmp_path / "out"):
        assert found == pytest.approx(losses, rel=2e-5)
        assert eval_loss is not None
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert answer(exported) == answer(model)
    assert exported.config.use_cache
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template is not None


def run_command(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.cli", "train", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses_of(run: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records}


@pytest.mark.full
def test_a_run_with_adapters_goes_on_from_their_checkpoint_on_another_number_of_ranks(tmp_path: Path) -> None:
    folder, chats = make_folder("llama", tmp_path / "llama"), write_chats(tmp_path / "chats.jsonl")
    common = ["run.device=cpu", f"run.dir={tmp_path}", f"data.cache_dir={tmp_path}/cache", "precision.param=fp32"]
    common += ["run.num_threads=1", "run.steps=6", "run.sample_tokens=4"]
    job = ["--model", folder, "--data", chats, "--lora", "zero.stage=3", "checkpoint.every=3", *common]
    run_command(*job, "run.num_procs=2", "run.name=whole")
    (whole,) = tmp_path.glob("*-whole")
    saved = whole / "checkpoints" / "step-00000003"
    text = run_command("--resume", saved, *common, "run.num_procs=1", "run.name=again")
    (again,) = tmp_path.glob("*-again")
    assert losses_of(again) == pytest.approx({step: losses_of(whole)[step] for step in (4, 5, 6)}, rel=1e-6)
    assert str(again / "model") in text
    stored = [tensor.name for tensor in read_manifest(saved).tensors]
    assert stored  # the frozen weights are the folder's
    assert not [name for name in stored if name.endswith("weight") and "lora_" not in name]
    for run in (whole, again):
        peft.AutoPeftModelForCausalLM.from_pretrained(run / "model")


def test_a_run_starts_from_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    folder, chats = make_folder("llama", tmp_path / "llama"), write_chats(tmp_path / "chats.jsonl")
    config = config_of(folder, chats, tmp_path, 0, {})
    data = prepare_data(config, tmp_path)
    before = build_trainer(config.resolve(1), data)
    expected = before.evaluate()
    before.engine.save(tmp_path / "saved")
    make_folder("llama", tmp_path / "llama", seed=1)
    trainer = build_trainer(config.resolve(1), data)
    assert trainer.evaluate() != pytest.approx(expected, rel=1e-4)
    started = config.override([f"model.weights={tmp_path / 'saved'}"]).resolve(1)
    assert build_trainer(started, data).evaluate() == pytest.approx(expected)
