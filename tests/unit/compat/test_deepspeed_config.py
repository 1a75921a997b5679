"""DeepSpeed's JSON: each of its keys is in one class, and a config means the same here."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from harness.deepspeed_page import reference_page
from harness.paths import DATA, DOCS
from harness.refusals import refused
from shardwise.cli import main as cli
from shardwise.compat.deepspeed.config import read_config, translate
from shardwise.compat.deepspeed.keys import CLASSES, KEYS, key_of, nearest, usual_path
from shardwise.config.resolve import Config, all_keys

# Names of keys alone: those of DeepSpeed 0.19.8's classes and constants, those that it refuses, and older ones.
NAMES: dict[str, list[str]] = json.loads((DATA / "deepspeed_keys.json").read_text())
ZERO_3 = {
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu"},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "stage3_param_persistence_threshold": 1e4,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_clipping": 0.5,
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "wall_clock_breakdown": False,
}


def settings_of(values: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The settings by dotted key, without those that every translation has."""
    config = translate(values, **options).config
    settings = {f"{section}.{leaf}": value for section, leaves in config.items() for leaf, value in leaves.items()}
    always = {"zero.stage": 0, "optimizer.clip_norm": 1.0, "run.on_nonfinite": "skip"}
    return {key: value for key, value in settings.items() if always.get(key, ...) != value}


def test_every_key_of_deepspeed_is_in_exactly_one_class() -> None:
    used = set()
    for name in [*NAMES["0.19.8"], *NAMES["dropped"], *NAMES["older"]]:
        key = key_of(usual_path(name))
        assert key is not None, name
        assert key.kind in CLASSES
        assert (key.kind == "X") == (name in NAMES["dropped"]), name
        used.add(key.path)
    for type_name in NAMES["optimizers"]:
        used.add(key_of("optimizer.type", type_name).path)
    of_values = {path for path in KEYS if "=" in path}
    assert set(KEYS) - of_values - used == set()
    assert {"optimizer.type=adam", "optimizer.type=lamb", "optimizer.type=muon"} <= used


def test_what_a_key_means_is_there() -> None:
    for key in KEYS.values():
        if key.action == "M" and re.match(r"[a-z]+\.[a-z_]+(:|$)", key.text):
            assert key.target in all_keys(), key


def test_a_usual_config_of_stage_3() -> None:
    before = deepcopy(ZERO_3)
    found = translate(ZERO_3, world_size=4)
    assert before == ZERO_3
    config = Config.from_dict(found.config)
    assert settings_of(ZERO_3) == {
        "precision.param": "bf16",
        "zero.stage": 3,
        "zero.overlap": True,
        "zero.keep_whole_below": 10_001,
        "zero.lockstep": "auto",
        "tiers.optimizer": "host",
        "tiers.params": "host",
        "tiers.grads": "host",
        "tiers.pin_memory": True,
        "optimizer.name": "adamw",
        "optimizer.lr": 1e-4,
        "optimizer.betas": [0.9, 0.95],
        "optimizer.eps": 1e-8,
        "optimizer.momentum": 0.0,
        "optimizer.weight_decay": 0.1,
        "optimizer.decay_1d": True,
        "optimizer.clip_norm": 0.5,
        "batch.global_size": 16,
        "batch.micro_size": 2,
    }
    assert config.resolve(4).batch.accumulation == 2
    assert found.refused == ()
    (note,) = found.notes
    assert "contiguous_gradients, zero_optimization.reduce_bucket_size" in note
    assert "wall_clock_breakdown" not in note
    assert found.given["zero_optimization.stage3_gather_16bit_weights_on_model_save"] is True
    assert found.section("scheduler") == {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        (
            {"zero_optimization": {"stage": 3}},
            {"zero.stage": 3, "zero.keep_whole_below": 100_001, "zero.lockstep": "auto"},
        ),
        ({"zero_optimization": True}, {"zero.stage": 1}),
        ({"zero_optimization": {"stage": 2, "stage3_param_persistence_threshold": 5}}, {"zero.stage": 2}),
        ({"zero_optimization": {"stage": "auto"}}, {}),
        ({"gradient_clipping": 0}, {"optimizer.clip_norm": None}),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, {"precision.param": "fp16"}),
        (
            {"bfloat16": {"enabled": True, "check_grad_overflow": False}},
            {"precision.param": "bf16", "run.on_nonfinite": "ignore"},
        ),
        (
            {
                "fp16": {
                    "enabled": True,
                    "loss_scale": 0,
                    "initial_scale_power": 8,
                    "loss_scale_window": 5,
                    "min_loss_scale": 2,
                }
            },
            {
                "precision.param": "fp16",
                "precision.loss_scale": "dynamic",
                "precision.initial_loss_scale": 256.0,
                "precision.loss_scale_window": 5,
                "precision.min_loss_scale": 2,
            },
        ),
        ({"fp16": {"enabled": True, "hysteresis": 4}}, {"precision.param": "fp16"}),
        (
            {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}},
            {"precision.param": "fp16", "zero.stage": 1, "precision.loss_scale_hysteresis": 2},
        ),
        (
            {
                "fp16": {"enabled": True, "hysteresis": 4, "consecutive_hysteresis": True},
                "zero_optimization": {"stage": 2},
            },
            {
                "precision.param": "fp16",
                "zero.stage": 2,
                "precision.loss_scale_hysteresis": 4,
                "precision.consecutive_hysteresis": True,
            },
        ),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, {"precision.param": "fp16", "precision.loss_scale": 128}),
        (
            {
                "data_types": {"grad_accum_dtype": "bf16", "buffer_dtype": "torch.float32"},
                "communication_data_type": "fp32",
            },
            {"precision.accumulate": "param", "precision.buffers": "keep", "precision.reduce": "fp32"},
        ),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True}},
            {"zero.stage": 2, "tiers.optimizer": "host", "tiers.grads": "host"},
        ),
        (
            {"zero_optimization": {"stage": 1, "cpu_offload": True, "offload_optimizer": {"device": "none"}}},
            {"zero.stage": 1, "tiers.optimizer": "device"},
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "ratio": 0.75}}},
            {
                "zero.stage": 1,
                "tiers.optimizer": "nvme",
                "tiers.grads": "host",
                "tiers.optimizer_on_device": 0.25,
                "tiers.nvme_path": "/local_nvme",
            },
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu", "nvme_path": "/a"}}},
            {"zero.stage": 2, "tiers.params": "device"},
        ),
        ({"zero_optimization": {"mics_shard_size": -1}}, {}),
        ({"zero_optimization": {"mics_shard_size": 8}}, {"mesh.dp_shard": 8}),
        ({"sequence_parallel_size": 1}, {"mesh.cp": 1}),
        ({"sequence_parallel_size": 2}, {"mesh.cp": 2, "context.transport": "ulysses"}),
        ({"tensor_parallel": {"autotp_size": 0}}, {"mesh.tp": 1}),
        (
            {"tensor_parallel": {"tensor_parallel": {"tp_size": 2}, "tp_overlap_comm": True}},
            {"mesh.tp": 2, "tensor.overlap_chunks": 2},
        ),
        ({"expert_parallel": {"enabled": True, "autoep_size": 4, "expert_tensor_parallel_size": 1}}, {"mesh.ep": 4}),
        ({"expert_parallel": {"enabled": False, "autoep_size": 4}}, {}),
        ({"pipeline": {"activation_checkpoint_interval": 1}}, {"recompute.mode": "full"}),
        ({"compile": {"deepcompile": True}}, {"compile.enabled": True}),
        (
            {
                "sparse_attention": {
                    "mode": "bigbird",
                    "num_random_blocks": 2,
                    "num_local_blocks": 4,
                    "attention": "bidirectional",
                }
            },
            {"attention.kind": "bigbird", "attention.num_random_blocks": 2, "attention.block": 16},
        ),
        ({"sparse_attention": {"block": 32}}, {"attention.kind": "fixed", "attention.block": 32}),
        ({"gradient_allreduce_op": "SUM", "zero_optimization": {"zero_hpz_partition_size": 1}}, {}),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8, "zero_quantized_weights": True}},
            {
                "zero.stage": 3,
                "zero.keep_whole_below": 100_001,
                "zero.lockstep": "auto",
                "zero.secondary_shard": 8,
                "precision.gather": "int8",
            },
        ),
        ({"zero_optimization": {"stage": 2, "zero_quantized_weights": True}}, {"zero.stage": 2}),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
            {
                "zero.stage": 3,
                "zero.keep_whole_below": 100_001,
                "zero.lockstep": "auto",
                "precision.reduce": "int4",
            },
        ),
        ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, {"zero.stage": 2}),
        ({"elasticity": {"enabled": False, "max_train_batch_size": 2000}, "amp": {"enabled": False}}, {}),
        ({"zero_optimization.stage": 1, "zero_optimization": {"stage": 3}}, {"zero.stage": 1}),
        ({"shardwise": {"mesh": {"tp": 2}, "zero": {"stage": 1}}}, {"mesh.tp": 2, "zero.stage": 1}),
    ],
)
def test_what_a_config_means(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert settings_of(values) == expected
    Config.from_dict(translate(values).config).resolve(16)


@pytest.mark.parametrize(
    ("section", "name", "says"),
    [
        ({"type": "Adam"}, "adamw", True),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "adam", False),
        ({"type": "AdamW", "params": {"torch_adam": True}}, "adamw", False),
        ({"type": "Lion"}, "lion", False),
        ({"type": "SGD"}, "sgd", False),
    ],
)
def test_adam_is_adamw_as_in_deepspeed_and_says_so(section: dict[str, Any], name: str, says: bool) -> None:
    found = translate({"optimizer": section})
    assert found.config["optimizer"]["name"] == name
    assert any("adam_w_mode=false" in note for note in found.notes) == says


def test_what_has_no_effect_is_said_once_with_its_reason() -> None:
    found = translate(
        {
            "steps_per_print": 10,
            "tensorboard": {"enabled": False, "output_path": "x"},
            "csv_monitor": {"enabled": True, "output_path": "x"},
            "fp16": {"enabled": False, "hysteresis": 2},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "sub_group_size": 1e9},
            "train_batch_size": "auto",
        }
    )
    assert found.notes[0] == 'left "auto", so taken as absent: zero_optimization.reduce_bucket_size, train_batch_size'
    assert [note.partition(" (")[0] for note in found.notes[1:]] == [
        "no effect here: steps_per_print, csv_monitor.enabled, csv_monitor.output_path",
        "no effect here: zero_optimization.sub_group_size",
    ]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("train_batch", "train_batch_size"),
        ("zero_optimisation.stage", "zero_optimization.stage"),
        ("zero_optimization.ofload_param.device", "zero_optimization.offload_param.device"),
        ("zero_optimization.overlap_com", "zero_optimization.overlap_comm"),
        ("comms_config.enabled", "comms_logger.enabled"),
        ("stage3_prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"),
        ("xyzzy", None),
    ],
)
def test_an_unknown_key_is_said_and_fails_nothing(written: str, meant: str | None) -> None:
    assert nearest(written) == meant
    (note,) = translate({written: 1}).notes
    assert note.startswith(f"{written} is not a key of DeepSpeed's")
    assert ("did you mean" in note) == (meant is not None)


@pytest.mark.parametrize(
    ("values", "code", "named"),
    [
        ({"optimizer": {"type": "OneBitAdam"}}, "deepspeed-key-refused", "optimizer.type='OneBitAdam'"),
        (
            {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
            "deepspeed-key-refused",
            "gradient_clipping",
        ),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "deepspeed-key-refused", "bias"),
        ({"gradient_allreduce_op": "max"}, "deepspeed-value", "gradient_allreduce_op='max'"),
        ({"gradient_allreduce_op": True}, "deepspeed-value", "mean or sum"),
        ({"zero_optimization": {"zero_quantized_nontrainable_weights": True}}, "deepspeed-key-refused", "weights=True"),
        ({"elasticity": {"enabled": True}, "amp": {"enabled": True}}, "deepspeed-key-refused", "(and 1 more)"),
        ({"autotuning": {"enabled": True}}, "deepspeed-key-refused", "shardwise plan"),
        (
            {"expert_parallel": {"enabled": True, "autoep_size": 2, "expert_tensor_parallel_size": 2}},
            "deepspeed-key-refused",
            "expert_parallel.expert_tensor_parallel_size=2",
        ),
        ({"zero_optimization": {"stage": 4}}, "out-of-range", "zero_optimization.stage: zero.stage=4"),
        ({"zero_optimization": {"stage": True}}, "wrong-type", "zero_optimization.stage: zero.stage=True"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "deepspeed-value", "device='gpu'"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "deepspeed-two-dtypes", "bf16 and fp16"),
        ({"bf16": True}, "deepspeed-section", "bf16=True"),
        ({"zero_optimization": 3}, "deepspeed-section", "zero_optimization=3"),
        ({"shardwise": 3}, "deepspeed-section", "shardwise=3"),
        ({"train_batch_size": -1}, "out-of-range", "train_batch_size: batch.global_size=-1"),
        ({"gradient_clipping": "x"}, "wrong-type", "gradient_clipping: optimizer.clip_norm='x'"),
        ({"fp16": {"initial_scale_power": 9999}}, "deepspeed-value", "initial_scale_power=9999"),
        ({"shardwise": {"mesh": {"pp": 2}}}, "deepspeed-pipeline", "mesh.pp=2"),
        ({"shardwise": {"mesh": {"tq": 2}}}, "unknown-key", "mesh.tp"),
        ({f"k{number}": 1 for number in range(1001)}, "deepspeed-too-many-keys", "1,001"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(values: dict[str, Any], code: str, named: str) -> None:
    with refused(code, named) as error:
        translate(values)
    assert len(str(error.value).splitlines()) == 1


def test_all_that_is_refused_is_listed_where_nothing_starts() -> None:
    found = translate({"elasticity": {"enabled": True}, "amp": {"enabled": True}}, refuse=False)
    assert [line.partition("=")[0] for line in found.refused] == ["elasticity.enabled", "amp.enabled"]


def test_the_batch_is_an_equation_in_deepspeeds_words() -> None:
    batch = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    translate(batch, world_size=4)
    with refused(
        "batch-equation",
        "train_batch_size=32",
        "train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x 2 data-parallel ranks = 16",
    ):
        translate(batch, world_size=2)
    # Ranks that share a sequence or a layer see the same samples.
    translate({**batch, "sequence_parallel_size": 2}, world_size=8)
    with refused("batch-multiple", "train_batch_size=30"):
        translate({"train_batch_size": 30}, world_size=4)


def test_a_batch_of_one_rank_among_several_says_what_the_trainer_needs() -> None:
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    translate(batch, world_size=1)
    with refused("batch-equation", "train_batch_size=8", "use_cpu=True"):
        translate(batch, world_size=2)
    with refused("batch-equation") as error:
        translate({**batch, "train_batch_size": 32}, world_size=2)
    assert "use_cpu" not in str(error.value)


def test_a_config_is_a_path_or_a_mapping(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO_3))
    assert read_config(path) == read_config(str(path)) == ZERO_3
    assert read_config(ZERO_3) is ZERO_3
    with refused("file-unreadable", "none.json"):
        read_config("none.json")
    path.write_text("[]")
    with refused("deepspeed-section", "ds.json"):
        read_config(path)


def test_the_page_of_keys_is_up_to_date() -> None:
    page = (DOCS / "deepspeed-config.md").read_text()
    assert page == f"{reference_page()}\n"
    for path in KEYS:
        assert f"`{path.partition('.')[2] or path}`" in page


def test_a_config_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "ds.json", tmp_path / "own.toml"
    scheduler = {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 100, "warmup_num_steps": 10, "warmup_max_lr": 2e-4},
    }
    path.write_text(json.dumps(ZERO_3 | {"scheduler": scheduler, "amp": {"enabled": True}, "gradient_clipping": 0}))
    assert cli.main(["convert", str(path), "--out", str(out), "--world-size", "4"]) == 0
    config = Config.from_toml(out)
    assert (config.zero.stage, config.tiers.grads, config.optimizer.lr) == (3, "host", 2e-4)
    assert (config.scheduler.name, config.scheduler.total_steps, config.scheduler.final_ratio) == ("linear", 100, 0.0)
    comments = [line for line in out.read_text().splitlines() if line.startswith("#")]
    for words in ("refused in a run: amp.enabled=True", "no effect here", "warm-up", "optimizer.clip_norm=none"):
        assert any(words in line for line in comments), words
    capsys.readouterr()
    path.write_text(json.dumps({"scheduler": {"type": "OneCycle"}}))
    assert cli.main(["convert", str(path)]) == 0
    assert "OneCycle is no schedule of a config" in capsys.readouterr().out
    assert cli.main(["convert", str(tmp_path / "none.json")]) == 2
    assert cli.main(["convert"]) == 2
    assert cli.main(["convert", str(path), "--out", str(tmp_path)]) == 2
