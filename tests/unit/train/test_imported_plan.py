"""What is read of a DeepSpeed config that is to be priced; files that cannot be read, and values that mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.refusals import refused
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config
from shardwise.models.huggingface_config import is_deepspeed, read_huggingface, source_of
from shardwise.models.megatron_flags import read_megatron
from shardwise.train.imported_plan import read_deepspeed

DEEPSPEED = {
    "train_batch_size": 512,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "steps_per_print": 10,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": 5e7,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "nvme", "nvme_path": "/scratch"},
    },
}


def test_a_deepspeed_config_is_ours(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DEEPSPEED))
    imported = read_deepspeed(path)
    config = Config().override(imported.assignments)
    assert (config.zero.stage, config.tiers.optimizer, config.tiers.params) == (3, "host", "nvme")
    assert (config.tiers.nvme_path, config.precision.param, config.batch.micro_size) == ("/scratch", "bf16", 4)
    assert imported.global_batch == 512
    assert any("steps_per_print" in note for note in imported.notes)
    assert is_deepspeed(DEEPSPEED)
    assert not is_deepspeed({"hidden_size": 64})


@pytest.mark.parametrize(
    ("values", "code", "named"),
    [
        ({"zero_optimization": {"stage": 4}}, "out-of-range", "stage=4"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "deepspeed-two-dtypes", "bf16 and fp16"),
        ({"bf16": True}, "deepspeed-section", "bf16=True"),
    ],
)
def test_what_deepspeed_would_not_take_is_refused_with_the_files_name(tmp_path, values, code, named):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(values))
    with refused(code, "ds.json: ", named) as error:
        read_deepspeed(path)
    assert len(str(error.value).splitlines()) == 1


def test_what_a_script_does_and_a_run_refuses_is_priced_all_the_same(tmp_path):
    path = tmp_path / "ds.json"
    checkpointing = {"cpu_checkpointing": True}
    zero = {"stage": 3, "zero_quantized_nontrainable_weights": True, "ofload_param": {"device": "cpu"}}
    path.write_text(json.dumps({"zero_optimization": zero, "activation_checkpointing": checkpointing}))
    imported = read_deepspeed(path)
    assert (imported.settings["recompute.mode"], imported.settings["tiers.activations"]) == ("full", "host")
    assert Config().override(imported.assignments).tiers.params == "device"
    for words in ("refused in a run: zero_optimization.zero_quantized_nontrainable_weights=True", "did you mean"):
        assert any(words in note for note in imported.notes)


@pytest.mark.parametrize(
    ("bf16", "fp16", "param"),
    [
        ("auto", "auto", "bf16"),  # as templates have it
        ("auto", True, "fp16"),
        (False, "auto", "fp16"),
        (True, False, "bf16"),
        (False, False, "fp32"),
    ],
)
def test_a_precision_that_is_left_open_is_taken_where_none_is_said(tmp_path, bf16, fp16, param):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"bf16": {"enabled": bf16}, "fp16": {"enabled": fp16}}))
    assert read_deepspeed(path).settings["precision.param"] == param


def test_files_that_cannot_be_read_are_named(tmp_path):
    for read in (read_huggingface, read_deepspeed, read_megatron):
        with refused("file-unreadable", "none.json"):
            read(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with refused("not-json", "broken.json"):
        read_huggingface(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[]")
    with refused("json-not-object", "list.json"):
        read_deepspeed(tmp_path / "list.json")


@pytest.mark.parametrize("value", [10**400, -1, "1\x1b[31m", [1], {"a": 1}, 1e400, True, "x" * 10_000])
@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "train_batch_size", "gradient_clipping", "lr"])
def test_senseless_values_are_refused_in_one_line(tmp_path: Path, key: str, value: object) -> None:
    model = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    model |= {"intermediate_size": 64}
    config = {"zero_optimization": {"stage": 1}, "optimizer": {"params": {key: value}}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**config, key: value}))
    refusals: list[str] = []
    for read in (
        lambda: source_of({**model, key: value}, "config.json"),
        lambda: read_deepspeed(path),
    ):
        try:
            read()
        except ConfigError as error:
            refusals.append(str(error))
    assert all(each.isprintable() and len(each) < 300 for each in refusals)
