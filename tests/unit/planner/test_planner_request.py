"""What a user leaves open is taken from files and devices, and what is given goes before both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.refusals import refused
from shardwise.config.resolve import Config, ResolvedConfig
from shardwise.models.presets import preset
from shardwise.planner.hardware import FittedConstants, parse_cluster
from shardwise.planner.job import BASE, ModelShape, ModelSource, PlanJob, changed
from shardwise.planner.profile import Profile
from shardwise.planner.request import Question, is_split, read_model, usual_batch, usual_dtype
from shardwise.planner.step_time import SHARES, interval_s, kind_of

NODE = parse_cluster("h100:8")
SHAPE = ModelShape.of_decoder(preset("25m"), "25m")
FILE = """
[model]
preset = "25m"
[batch]
global_size = 16
[data]
seq_len = 512
[precision]
reduce = "fp32"
accumulate = "param"
[context]
chunk_tokens = 128
"""


def test_what_is_given_goes_before_what_a_file_says(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    model = read_model(str(path))
    own, given = Question(model, NODE).ask(), Question(model, NODE, 256, 8).ask()
    assert (own.job.seq_len, own.job.global_batch) == (512, 16)
    assert (given.job.seq_len, given.job.global_batch) == (256, 8)
    base = own.job.base
    assert (base.precision.param, base.precision.reduce, base.precision.accumulate) == ("bf16", "fp32", "param")
    assert base.context.chunk_tokens == 128
    assert Question(model, NODE, settings=("precision.param=fp32",)).ask().job.base.precision.param == "fp32"
    assert not is_split(model)  # a batch, a precision and chunks are any layout's
    path.write_text(FILE + "[mesh]\ntp = 2\n")
    assert is_split(read_model(str(path)))
    path.write_text(FILE.replace("seq_len = 512", 'tokenizer = "bytes"'))
    assert read_model(str(path)).seq_len is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("meta-llama/Llama-3.1-70B", "llama-3-70b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3-70b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-7b"),
        ("meta-llama/Llama-3.1-405B", "llama-405b"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "1b"),
    ],
)
def test_the_hubs_name_of_a_model_is_that_of_a_preset(text: str, name: str) -> None:
    found = read_model(text)
    assert found.shape == ModelShape.of_decoder(preset(name), name)
    (note,) = found.notes
    assert f"preset {name}" in note
    assert read_model(name).notes == ()


def test_what_no_preset_is_like_is_refused_with_the_nearest_names() -> None:
    with refused("model-not-local", "Qwen/Qwen2.5-7B"):
        read_model("Qwen/Qwen2.5-7B")
    with refused("unknown-preset", "70b", "llama-70b or llama-3-70b"):
        read_model("70b")


@pytest.mark.parametrize("num_gpus", [1, 6, 8, 96, 512, 16_384])
@pytest.mark.parametrize("seq_len", [512, 5000, 8192, 131_072])
def test_the_usual_batch_grows_with_the_gpus_and_divides_among_them(num_gpus: int, seq_len: int) -> None:
    batch = usual_batch(num_gpus, seq_len)
    assert batch % num_gpus == 0 or num_gpus % batch == 0
    assert batch == 1 or batch * seq_len <= 2**24
    asked = Question(read_model("llama-7b"), replace(NODE, num_gpus=num_gpus), seq_len).ask()
    assert asked.job.global_batch == batch
    assert any(f"{batch:,} sequences" in note and "--global-batch" in note for note in asked.notes)


def test_windows_of_a_model_or_of_the_attention_that_replaces_it() -> None:
    windowed = ModelSource(shape=replace(SHAPE, window=100), longest=4096)
    assert Question(windowed, NODE, global_batch=8).ask().job.shape.window == 100
    sliding = Config.from_dict({"attention": {"kind": "sliding-window", "block": 64}})
    assert Question(replace(windowed, config=sliding), NODE, global_batch=8).ask().job.shape.window == 128


def test_the_job_has_the_keys_of_zero_that_the_config_sets() -> None:
    zero = {"keep_whole_below": 50, "secondary_shard": 4, "replicate_frozen": True}
    model = replace(read_model("llama-7b"), config=Config.from_dict({"zero": zero}))
    job = Question(model, NODE, global_batch=8).ask().job
    assert {key: getattr(job.base.zero, key) for key in zero} == zero


def test_the_usual_dtype_is_faster_than_fp32() -> None:
    def device(**peaks: float) -> Any:
        return replace(NODE, gpu=replace(NODE.gpu, peak_flops_per_s=peaks))

    assert usual_dtype(device(fp32=1.0, fp16=2.0, bf16=2.0)) == "bf16"
    assert usual_dtype(device(fp32=1.0, fp16=2.0, bf16=1.0)) == "fp16"
    assert usual_dtype(device(fp32=1.0, fp16=1.0)) == "fp32"


@pytest.mark.parametrize(
    ("bf16", "param", "is_said"), [(0.01, "bf16", True), (2.0, "bf16", False), (0.01, "fp32", False)]
)
def test_a_dtype_that_the_machine_multiplies_slowly_is_said(bf16: float, param: str, is_said: bool) -> None:
    slow = replace(NODE, gpu=replace(NODE.gpu, peak_flops_per_s={"fp32": 1.0, "bf16": bf16}))
    notes = Question(read_model("25m"), slow, None, 8, (f"precision.param={param}",)).ask().notes
    assert any("100 times as slow" in note and "precision.param=fp32" in note for note in notes) is is_said


@pytest.mark.parametrize(
    ("config", "facts", "kind"),
    [
        (BASE, {}, "fitted"),
        (changed(BASE, {"precision.linears": "fp8", "zero.stage": 3}), {}, "fitted"),
        (changed(BASE, {"precision.param": "fp32"}), {}, "unfitted"),
        (changed(BASE, {"precision.param": "fp32", "precision.linears": "tf32"}), {}, "unfitted"),
        (changed(BASE, {"precision.param": "fp32"}), {"fitted": FittedConstants()}, "unfitted"),
    ],
)
def test_how_well_a_time_is_known(config: ResolvedConfig, facts: dict[str, Any], kind: str) -> None:
    job = PlanJob(shape=SHAPE, seq_len=512, global_batch=8, cluster=replace(NODE, gpu=replace(NODE.gpu, **facts)))
    assert kind_of(job, config) == kind
    assert kind_of(job, config, launching_share=0.9) == "launches"
    profile = Profile(device="cpu", num_ranks=1, num_threads=1, memory_bytes=1.0)
    assert kind_of(replace(job, cluster=replace(job.cluster, profile=profile)), config) == "measured"
    share = SHARES[kind_of(job, config)]
    assert interval_s(kind_of(job, config), 10.0) == pytest.approx((10 - 10 * share, 10 + 10 * share))


def test_a_model_in_the_hubs_cache_is_read_by_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = pytest.importorskip("huggingface_hub.file_download")
    folder = tmp_path / "models--some--one"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("1" * 40)
    snapshot = folder / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 99}
    (snapshot / "config.json").write_text(json.dumps(sizes | {"intermediate_size": 256}))
    monkeypatch.setattr(download.constants, "HF_HUB_CACHE", str(tmp_path))
    assert read_model("some/one").shape.num_layers == 3
    with refused("model-not-local", "some/other"):
        read_model("some/other")
