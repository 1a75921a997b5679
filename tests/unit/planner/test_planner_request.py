"""What a user leaves open is taken from files and devices, and what is given goes before both; and what fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.refusals import refused
from shardwise.config.resolve import Config, ResolvedConfig
from shardwise.models.presets import preset
from shardwise.models.shape import ModelShape, ModelSource
from shardwise.planner.fit import CHUNK_TOKENS, family_shape, fit, setups
from shardwise.planner.hardware import FittedConstants, Host, find_gpu, parse_cluster
from shardwise.planner.job import BASE, PlanJob, changed, param_of
from shardwise.planner.memory import MemoryModel
from shardwise.planner.profile import Profile
from shardwise.planner.request import Question, is_split, read_model, usual_batch, usual_dtype
from shardwise.planner.results import missing_memory
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
    with refused("unknown-preset", "nothing-like-it", "config.json"):
        read_model("nothing-like-it")


def test_a_file_that_describes_no_model_is_not_said_to_be_missing(tmp_path: Path) -> None:
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"GGUF")
    with refused("model-kind-unknown", str(weights), "config.json"):
        read_model(str(weights))


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


@pytest.mark.parametrize(("gpu", "settings"), [("t4", ()), ("t4", ("precision.param=bf16",)), ("h100", ())])
def test_a_device_without_bf16_is_said_to_have_none(gpu: str, settings: tuple[str, ...]) -> None:
    asked = Question(read_model("25m"), parse_cluster(f"{gpu}:1"), None, 8, settings).ask()
    assert any("bf16" in note and "precision.param=fp16" in note for note in asked.notes) is (gpu == "t4")


@pytest.mark.parametrize("seq_len", [8192, 8193])
def test_sequences_longer_than_the_models_longest_are_said(seq_len: int) -> None:
    notes = Question(read_model("llama-3-8b"), NODE, seq_len, 8).ask().notes
    assert any("8,193" in note and "8,192" in note for note in notes) is (seq_len > 8192)


def test_setups_are_split_as_their_names_say() -> None:
    whole = changed(BASE, {"mesh.dp_shard": 16})
    saving = changed(whole, {"zero.stage": 3, "recompute.mode": "full"})
    host = changed(saving, {"tiers.optimizer": "host"})
    away = changed(
        host, {"tiers.params": "host", "tiers.grads": "host", "tiers.activations": "host", "context.chunk_tokens": 1024}
    )
    cluster = replace(parse_cluster("h100:16"), host=Host(nvme_bytes=1.0))
    assert CHUNK_TOKENS == 1024
    assert {each.name: each.config for each in setups(cluster)} == {
        "DDP": whole,
        "ZeRO-1": changed(whole, {"zero.stage": 1}),
        "ZeRO-2": changed(whole, {"zero.stage": 2}),
        "ZeRO-3": changed(whole, {"zero.stage": 3}),
        "... recompute full": saving,
        "... TP 8+SP": changed(saving, {"mesh.tp": 8, "mesh.dp_shard": 2, "tensor.sequence_parallel": True}),
        "... CP 8": changed(saving, {"mesh.cp": 8, "mesh.dp_shard": 2}),
        "... in chunks": changed(saving, {"context.chunk_tokens": 1024}),
        "... optimizer on host": host,
        "... chunks, all on host": away,
        "... chunks, states on NVMe": changed(
            away, {"tiers.params": "nvme", "tiers.grads": "nvme", "tiers.optimizer": "nvme"}
        ),
    }
    alone = [each.name for each in setups(parse_cluster("h100:1"))]
    assert alone == [
        "on the device", "recompute full", "... in chunks", "... optimizer on host", "... chunks, all on host",
    ]  # fmt: skip
    racks = [each.name for each in setups(parse_cluster("gb200:72"))]
    assert "... TP 4+SP" in racks  # of a node
    wide = [each.name for each in setups(parse_cluster("h100:2x16"))]
    assert "... TP 8+SP" in wide


def test_a_family_is_as_deep_as_it_has_heads() -> None:
    assert family_shape(12) == ModelShape(
        num_layers=12, hidden_size=1536, num_heads=12, num_kv_heads=4, head_dim=128, ffn_size=5376, vocab_size=128_256,
        name="12 layers of 1,536",
    )  # fmt: skip
    assert family_shape(32).num_kv_heads == 8


def test_setups_are_those_that_a_cluster_can_run() -> None:
    def names(gpus: str, **facts: Any) -> list[str]:
        return [each.name for each in setups(replace(parse_cluster(gpus), **facts))]

    assert names("h100:1")[0] == "on the device"
    assert not any("TP" in name for name in names("h100:1x12"))
    assert not any("NVMe" in name for name in names("h100:8"))
    assert names("h100:8", host=Host(nvme_bytes=1e12))[-1].endswith("NVMe")
    pairs = replace(find_gpu("h100"), link_domain=2)
    assert "... TP 2+SP" in names("h100:8", gpu=pairs)
    assert {param_of(each.config) for each in setups(NODE, "fp32")} == {"fp32"}


def test_one_more_of_what_fits_does_not() -> None:
    cluster = replace(NODE, gpu=replace(NODE.gpu, memory_bytes=4 * 2**30))
    narrow = replace(SHAPE, num_heads=12, num_kv_heads=4)  # that 8 ranks cannot split
    found = {each.name: each for each in fit(cluster, seq_len=512, shape=narrow, margin_share=0.25)}
    assert found["... TP 8+SP"].micro_size is None
    stage_3 = found["ZeRO-3"]
    assert stage_3.micro_size is not None
    assert stage_3.seq_len is not None
    assert stage_3.seq_len % 1024 == 0

    def fits(seq_len: int, micro_size: int) -> bool:
        config = changed(stage_3.config, {"batch.micro_size": micro_size})
        job = PlanJob(shape=narrow, seq_len=seq_len, global_batch=config.batch.global_size, cluster=cluster)
        return missing_memory(MemoryModel(job).estimate(config), cluster, 0.25) is None

    assert stage_3.shape is not None
    heads = stage_3.shape.num_heads
    assert heads % 4 == 0
    job = PlanJob(shape=stage_3.shape, seq_len=512, global_batch=8, cluster=cluster)
    assert missing_memory(MemoryModel(job).estimate(stage_3.config), cluster, 0.25) is None
    larger = replace(job, shape=family_shape(heads + 4))
    assert missing_memory(MemoryModel(larger).estimate(stage_3.config), cluster, 0.25) is not None
    assert next(fit(cluster, seq_len=512)).micro_size is None
    assert fits(512, stage_3.micro_size)
    assert not fits(512, stage_3.micro_size + 1)
    assert fits(stage_3.seq_len, 1)
    assert not fits(stage_3.seq_len + 1024, 1)


def test_sizes_end_where_none_fits() -> None:
    endless = replace(NODE, gpu=replace(NODE.gpu, memory_bytes=1e24))
    found = next(fit(endless, seq_len=512, shape=SHAPE))
    assert found.shape is not None
    assert (found.shape.num_heads, found.micro_size, found.seq_len) == (512, 4096, 2**24)
    nothing = next(fit(replace(NODE, gpu=replace(NODE.gpu, memory_bytes=1.0)), seq_len=512, shape=SHAPE))
    assert (nothing.shape, nothing.micro_size, nothing.seq_len) == (None, None, None)


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
    assert interval_s(kind_of(job, config), 10.0) == pytest.approx((10 / (1 + share), 10 * (1 + share)))


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
