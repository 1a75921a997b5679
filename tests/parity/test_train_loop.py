"""The loop of a rank: what it trains on depends on no layout, what it says is measured, and ranks stop together."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.config.resolve import Config
from shardwise.engine.types import EvalResult
from shardwise.runtime.memory_tracker import Category
from shardwise.train import job_model, loop
from shardwise.train.loop import METER_EVERY, Trainer, build_trainer, peak_flops
from shardwise.train.prepare import open_data, prepare_data

TEXT = "".join(f"def double_{number}(x):\n    return {2 * number} * x\n\n" for number in range(400))
MODEL = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 64}


@pytest.fixture
def values(tmp_path) -> dict:
    (tmp_path / "text.txt").write_text(TEXT)
    return {
        "model": MODEL,
        "data": {
            "path": str(tmp_path / "text.txt"),
            "seq_len": 16,
            "tokenizer": "bytes",
            "cache_dir": str(tmp_path / "cache"),
        },
        "batch": {"global_size": 4},
        "optimizer": {"lr": 1e-2},
        "run": {"steps": 4, "device": "cpu", "eval_batches": 2, "sample_tokens": 8},
    }


def make_trainer(values: dict, tmp_path: Path) -> Trainer:
    config = Config.from_dict(values)
    return build_trainer(config, prepare_data(config, tmp_path / "cache"))


def never() -> bool:
    return False


def take(trainer: Trainer, should_stop=never) -> list:
    return list(trainer.steps(should_stop, lambda activity: None))


def test_steps_are_counted_and_learn(values, tmp_path):
    values["run"] |= {"steps": 20, "eval_every": 8}
    trainer = make_trainer(values, tmp_path)
    records = take(trainer)
    assert [record.step for record in records] == list(range(1, 21))
    assert {record.count for record in records} == {4 * 16}
    assert all(record.tokens_per_s == record.count / record.step_s for record in records)
    assert records[-1].loss < records[0].loss - 1
    assert [record.step for record in records if record.eval_loss is not None] == [8, 16, 20]
    assert math.log(257) - 0.5 < records[0].loss < math.log(257) + 0.5


def test_memory_is_measured_in_sampled_steps(values, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "METER_EVERY", 3)
    trainer = make_trainer(values | {"run": values["run"] | {"steps": 7}}, tmp_path)
    records = take(trainer)
    assert [record.step for record in records if record.peak_bytes] == [1, 2, 3, 6]
    assert METER_EVERY >= 50, "a meter slows the steps it is on in"
    peak = records[1].peak_bytes
    assert peak["optimizer"] > 8 * sum(parameter.numel() for parameter in trainer.engine.model.parameters())
    assert peak["activations"] > 4 * 16 * 257 * 4, "the logits alone take more"
    assert sum(peak.values()) > sum(records[1].memory_bytes.values())
    assert trainer.peak is not None


def states_of(trainer: Trainer) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes of each state between steps, as the layout predicts and as the memory tracker counts them."""
    live, engine = trainer.engine.memory.snapshot().live_bytes, trainer.engine
    roles = {"param": Category.PARAMETERS, "grad": Category.GRADIENTS, "optimizer": Category.OPTIMIZER}
    return engine.layout.bytes_at_rest(engine.comm.rank), {role: live[category] for role, category in roles.items()}


def test_memory_at_rest_is_as_predicted(values, tmp_path):
    values["optimizer"] |= {"name": "sgd"}
    trainer = make_trainer(values, tmp_path)
    take(trainer)
    predicted, measured = states_of(trainer)
    assert measured == predicted
    assert min(predicted.values()) > 0


def test_every_step_sees_the_next_samples(values, tmp_path, monkeypatch):
    trainer = make_trainer(values, tmp_path)
    seen, train_step = [], trainer.engine.train_step
    monkeypatch.setattr(trainer.engine, "train_step", lambda batches: seen.append(batches[0][0]) or train_step(batches))
    take(trainer)
    rows = torch.cat(seen).tolist()  # [steps * global batch, S]
    assert len({tuple(row) for row in rows}) == 4 * 4, "no sample twice within an epoch"


def test_a_stop_ends_the_run_after_the_step_without_evaluation(values, tmp_path):
    values["run"] |= {"eval_every": 2}
    trainer = make_trainer(values, tmp_path)
    asked = iter([False, True])
    records = take(trainer, lambda: next(asked))
    assert [record.step for record in records] == [1, 2]
    assert trainer.was_stopped
    assert records[-1].eval_loss is None


def test_a_stop_in_the_last_step_changes_nothing(values, tmp_path):
    trainer = make_trainer(values, tmp_path)
    records = take(trainer, lambda: trainer.engine.num_steps == 4)
    assert not trainer.was_stopped
    assert records[-1].eval_loss is not None


def run_on_rank(rank: int, world_size: int, values: dict, shard: Path, stopping_rank: int) -> tuple:
    """Losses of every step, the held-out one, the sample's text and how many steps were taken."""
    trainer = build_trainer(Config.from_dict(values), open_data(shard, Config.from_dict(values)))
    # Asked within a step, the ranks agree in that step: here in the second.
    records = take(trainer, lambda: rank == stopping_rank and trainer.engine.num_steps == 1)
    losses = [record.loss for record in records]
    sample = trainer.sample()
    return losses, trainer.evaluate(), sample.prompt + sample.text, trainer.was_stopped


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"mesh": {"tp": 2}},
        {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}, "recompute": {"mode": "selective"}},
    ],
)
def test_every_layout_trains_on_the_same_text(values, tmp_path, ranks, layout):
    values |= {"precision": {"param": "fp64"}, "zero": {"stage": 3}}
    shard = prepare_data(Config.from_dict(values), tmp_path / "cache").path
    ((alone, alone_held_out, alone_text, _),) = ranks(1).run(run_on_rank, values, shard, -1)
    for losses, held_out, text, _ in ranks(2).run(run_on_rank, values | layout, shard, -1):
        assert losses == pytest.approx(alone, rel=1e-9)
        assert held_out == pytest.approx(alone_held_out, rel=1e-9)
        assert text == alone_text


def measure_on_rank(rank: int, world_size: int, values: dict, shard: Path) -> tuple:
    """Tokens of every step, and the states between steps."""
    trainer = build_trainer(Config.from_dict(values), open_data(shard, Config.from_dict(values)))
    return [record.count for record in take(trainer)], states_of(trainer)


def test_ranks_that_share_a_layer_count_tokens_once_and_hold_what_is_predicted(values, tmp_path, ranks):
    values |= {"mesh": {"tp": 2}, "zero": {"stage": 3}, "precision": {"param": "bf16"}}
    values["optimizer"] |= {"name": "sgd"}  # Adam counts its steps, too
    shard = prepare_data(Config.from_dict(values), tmp_path / "cache").path
    for counts, (predicted, measured) in ranks(2).run(measure_on_rank, values, shard):
        assert counts == [4 * 16] * 4
        assert measured == predicted
        assert min(predicted.values()) > 0


def test_all_ranks_stop_when_one_is_asked_to(values, tmp_path, ranks):
    shard = prepare_data(Config.from_dict(values), tmp_path / "cache").path
    outcomes = ranks(2).run(run_on_rank, values, shard, 1)
    assert [(len(losses), was_stopped) for losses, _, _, was_stopped in outcomes] == [(2, True), (2, True)]


def evaluated_targets(trainer: Trainer, monkeypatch) -> np.ndarray:
    seen = []
    monkeypatch.setattr(trainer.engine, "eval_step", lambda batches: seen.extend(batches) or EvalResult(0.0, 1.0))
    trainer.evaluate()
    return np.concatenate([targets.numpy() for _, targets in seen])  # [sequences, S]


def test_little_held_out_text_is_evaluated_without_repeats(values, tmp_path, monkeypatch):
    values["data"] |= {"val_fraction": 0.01}
    values["run"] |= {"eval_batches": 1000}
    trainer = make_trainer(values, tmp_path)
    there_are = trainer.data.val.num_sequences(16)
    targets = evaluated_targets(trainer, monkeypatch)
    assert 4 < there_are < 100
    assert len(targets) == there_are // 4 * 4


def test_a_sample_continues_held_out_text_and_is_the_same_again(values, tmp_path):
    trainer = make_trainer(values, tmp_path)
    sample = trainer.sample()
    assert sample == trainer.sample()
    assert sample.prompt in TEXT
    assert sample.text


def test_states_too_large_for_the_memory_are_said_before_the_first_step(values, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        torch.empty(2**56, dtype=torch.uint8)

    monkeypatch.setattr(job_model, "initialize", fail)
    with pytest.raises(torch.OutOfMemoryError, match=r"^out of memory before the first step.*; use a smaller model"):
        make_trainer(values, tmp_path)


def test_peaks_of_known_devices():
    assert peak_flops("NVIDIA H100 PCIe") < peak_flops("NVIDIA H100 80GB HBM3")
    assert peak_flops("NVIDIA L40S") > peak_flops("NVIDIA L4")
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA RTX A4000") is None
    assert peak_flops("a GPU of tomorrow") is None
