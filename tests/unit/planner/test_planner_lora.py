"""A job of adapters is priced as `shardwise train` builds it: frozen weights at rest, and states of adapters alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.refusals import refused
from shardwise.config.resolve import Config
from shardwise.config.toml_text import to_toml
from shardwise.models.presets import preset
from shardwise.models.shape import ModelShape
from shardwise.planner.comm_time import CommTimeModel
from shardwise.planner.compute_time import ComputeTimeModel
from shardwise.planner.folded_layout import FoldedLayouts
from shardwise.planner.hardware import Cluster, cluster_of, parse_cluster
from shardwise.planner.job import BASE, PlanJob, changed
from shardwise.planner.memory import MemoryModel
from shardwise.planner.plan import plan
from shardwise.planner.profile import MatmulTime, Profile
from shardwise.planner.render import job_rows
from shardwise.planner.request import job_of
from shardwise.planner.step_time import TimeModel
from shardwise.tensor.plan_layout import plan_layout
from shardwise.train import job_model
from shardwise.train.job_model import HuggingFaceModel
from shardwise.verify.finalists import peak_of

EIGHT: Cluster = parse_cluster("a100-80gb:8")
SIZES = {
    "hidden_size": 96, "intermediate_size": 250, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 301, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


JOB = PlanJob(
    shape=ModelShape.of_decoder(preset("llama-3-8b"), "llama-3-8b"), seq_len=2048, global_batch=8, cluster=EIGHT
)


@pytest.mark.quick(8)
@pytest.mark.parametrize(
    ("kind", "lora", "mesh", "is_whole"),
    [
        ("llama", {"rank": 4}, {"dp_shard": 8}, False),
        ("llama", {"rank": 4}, {"dp_shard": 8}, True),
        ("llama", {"rank": 4}, {"dp_shard": 4, "tp": 2}, False),
        ("llama", {"rank": 3, "targets": ["q_proj", "down_proj"]}, {"dp_shard": 4, "dp_replicate": 2}, False),
        ("llama", {"rank": 3, "targets": ["q_proj"]}, {"dp_shard": 8}, False),
        ("qwen3_moe", {"rank": 4}, {"dp_shard": 8}, False),
        ("qwen3_moe", {"rank": 4}, {"dp_shard": 8, "ep": 4}, False),
        ("llama", {"rank": 4, "base": "nf4"}, {"dp_shard": 8}, False),
        ("qwen3_moe", {"rank": 4, "base": "nf4"}, {"dp_shard": 8}, False),
    ],
)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_states_are_those_of_the_model_that_trains(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    lora: dict[str, Any],
    mesh: dict[str, int],
    is_whole: bool,
    stage: int,
) -> None:
    monkeypatch.setattr(job_model, "find_spec", lambda name: name)  # on meta, bitsandbytes is not needed
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 16}
    transformers.AutoConfig.for_model(kind, **SIZES | (experts if kind != "llama" else {})).save_pretrained(tmp_path)
    config = Config.from_dict(
        {
            "model": {"path": str(tmp_path)}, "lora": lora, "mesh": mesh,
            "zero": {"stage": stage, "replicate_frozen": is_whole},
            "data": {"seq_len": 64}, "batch": {"micro_size": 1}, "precision": {"param": "bf16"},
        }
    )  # fmt: skip
    resolved = config.resolve(8)
    layout = plan_layout(HuggingFaceModel.open(config).skeleton(), resolved)
    priced = FoldedLayouts(job_of(config, EIGHT)).at_rest(config.resolve(8))
    built = layout.bytes_at_rest()
    assert priced == pytest.approx(built, rel=0.02)
    assert built["optimizer"] < built["param"]


@pytest.mark.parametrize("rank", [0, 8])
def test_the_peak_of_a_hugging_face_model_is_nearly_the_engine_s_own(tmp_path: Path, rank: int) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    sizes = SIZES | {"hidden_size": 384, "num_hidden_layers": 5, "vocab_size": 2003, "intermediate_size": 1000}
    transformers.LlamaConfig(**sizes).save_pretrained(tmp_path)
    config = Config.from_dict(
        {
            "model": {"path": str(tmp_path)}, "lora": {"rank": rank}, "zero": {"stage": 3}, "run": {"device": "cpu"},
            "data": {"seq_len": 64}, "batch": {"micro_size": 16}, "precision": {"param": "bf16"},
        }
    )  # fmt: skip
    product = MatmulTime(dtype="bf16", m=1, n=1, k=1, seconds=1e-9)
    machine = Profile(device="cpu", num_ranks=2, num_threads=1, memory_bytes=1e10, matmuls=(product,))
    estimate = MemoryModel(job_of(config, cluster_of(machine))).estimate(config.resolve(2))
    simulated = peak_of(config.model_dump_json(), num_ranks=2, rank=0)
    assert estimate.worst.peak_bytes == pytest.approx(sum(simulated.values()), rel=0.03)


def test_70b_with_adapters_fits_where_all_weights_do_not() -> None:
    batch: dict[str, Any] = {"global_batch": 8, "seq_len": 2048}
    tiers = ["tiers.params=device", "tiers.optimizer=device", "tiers.grads=device", "tiers.activations=device"]
    full = plan("llama-3-70b", EIGHT, settings=tiers, **batch)
    lora = plan("llama-3-70b", EIGHT, settings=[*tiers, "lora.rank=16"], **batch)
    assert not full.choices
    assert lora.choices
    assert "LoRA of rank 16" in str(dict(job_rows(lora.result.job))["model"])
    assert "[lora]\nrank = 16" in to_toml(lora.best.config())


def test_a_packed_base_takes_a_quarter_and_is_never_split() -> None:
    batch: dict[str, Any] = {"global_batch": 8, "seq_len": 2048}
    settings = ["lora.rank=16", "tiers.params=device", "tiers.optimizer=device", "tiers.grads=device"]
    alone, eight = (parse_cluster(f"rtx4090:{num_gpus}") for num_gpus in (1, 8))
    assert not plan("llama-13b", alone, settings=settings, **batch).choices
    assert plan("llama-13b", alone, settings=[*settings, "lora.base=nf4"], **batch).choices
    packed = plan("llama-3-70b", eight, settings=[*settings, "lora.base=nf4"], **batch)
    assert {choice.config().mesh.tp for choice in packed.choices} == {1}
    assert 'base = "nf4"' in to_toml(packed.best.config())
    split = {"mesh.dp_shard": 4, "zero.stage": 3, "recompute.mode": "full", "lora.rank": 16}
    wide, narrow = (changed(BASE, {**split, "lora.base": base}) for base in ("keep", "nf4"))
    assert ComputeTimeModel(JOB).block(wide).forward_s < ComputeTimeModel(JOB).block(narrow).forward_s
    sent = [FoldedLayouts(JOB).on_wire(config)["all_gather"] for config in (wide, narrow)]
    assert 0.25 < sent[1] / sent[0] < 0.4  # what is in no block stays bf16


def test_frozen_weights_have_no_gradients_to_compute_or_reduce() -> None:
    full = changed(BASE, {"mesh.dp_shard": 8, "zero.stage": 3})
    lora, compute, time = changed(full, {"lora.rank": 16}), ComputeTimeModel(JOB), TimeModel(JOB)
    # The weights' gradients are a third of a step's products; the adapters' are few.
    assert compute.block(lora).backward_weight_s < 0.1 * compute.block(full).backward_weight_s
    assert compute.block(full).forward_s < compute.block(lora).forward_s
    assert compute.head(lora).backward_weight_s == 0.0
    assert 0.6 < time.estimate(lora).step_s / time.estimate(full).step_s < 1.0
    calls = [CommTimeModel(JOB).data_calls(config) for config in (full, lora)]
    reduced = [sum(call.num_bytes * call.count for call in every if call.op != "all_gather") for every in calls]
    assert 0 < reduced[1] < 0.02 * reduced[0]


def test_adapters_grow_with_their_rank_and_stand_beside_their_targets() -> None:
    def optimizer_bytes(**lora: Any) -> int:
        config = changed(BASE, {"mesh.dp_shard": 8, **{f"lora.{key}": value for key, value in lora.items()}})
        return FoldedLayouts(JOB).at_rest(config)["optimizer"]

    assert optimizer_bytes(rank=32) == pytest.approx(2 * optimizer_bytes(rank=16), rel=0.001)
    # A query's has 16 x (4096 + 4096) elements, of each of 32 blocks, with master and two moments in fp32.
    assert optimizer_bytes(rank=16, targets=("q_proj",)) == 12 * 16 * 8192 * 32
    with refused("lora-targets-unknown", "q_prj", "q_proj"):
        optimizer_bytes(rank=16, targets=("q_prj",))


def test_what_fits_by_adapters_is_suggested_as_a_key() -> None:
    small = replace(EIGHT, host=replace(EIGHT.host, memory_bytes=1e9))
    found = plan("llama-3-70b", small, global_batch=8, seq_len=512, settings=["mesh.pp=1", "mesh.cp=1"])
    assert any("lora.rank=16" in each for each in found.reasons.suggestions)
