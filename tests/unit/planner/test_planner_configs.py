"""Configs into jobs and candidates, and back."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.config.resolve import Config, ResolvedConfig
from shardwise.config.toml_text import to_toml
from shardwise.models.presets import PRESETS, decoder_config, preset
from shardwise.models.shape import ExpertsShape, ModelShape
from shardwise.planner.candidates import SearchSpace, candidates, placements
from shardwise.planner.folded_layout import StageTable
from shardwise.planner.hardware import Cluster, find_gpu
from shardwise.planner.job import BASE, PlanJob, changed, world_size
from shardwise.planner.request import ALWAYS_WRITTEN, base_of, job_of, pins_of, split_as, written
from shardwise.schedule import RECIPES
from shardwise.train.setup import check_job

SHAPE = ModelShape(
    num_layers=6,
    hidden_size=128,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    ffn_size=256,
    vocab_size=512,
    name="small",
)


def job(num_gpus: int, global_batch: int, shape: ModelShape = SHAPE) -> PlanJob:
    cluster = Cluster(gpu=find_gpu("h100"), num_gpus=num_gpus, gpus_per_node=8, nic_bytes_per_s=50e9)
    return PlanJob(shape=shape, seq_len=64, global_batch=global_batch, cluster=cluster)


@st.composite
def legal_strategies(draw: st.DrawFn) -> ResolvedConfig:
    """That our engine runs on the small shape."""
    tp, cp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    schedules = [(name, recipe.min_virtual_stages) for name, recipe in RECIPES.items()]
    pp = draw(st.sampled_from([1, 2, 3]))
    schedule, virtual_stages = draw(st.sampled_from(schedules)) if pp > 1 else ("1f1b", 1)
    stage = draw(st.integers(0, 3))
    gather = draw(st.sampled_from(["batch", "micro-batch"])) if pp > 1 and stage == 3 else "batch"
    transport = draw(st.sampled_from(["ring", "all-gather"] + ["ulysses"] * (cp * tp <= 4))) if cp > 1 else "ring"
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    tiers = draw(st.sampled_from(["device", "host", "nvme"])) if stage else "device"
    return changed(
        BASE,
        {
            "mesh.pp": pp,
            "mesh.dp_replicate": draw(st.integers(1, 2)),
            "mesh.dp_shard": draw(st.integers(1, 3)),
            "mesh.cp": cp,
            "mesh.tp": tp,
            "zero.stage": stage,
            "batch.micro_size": draw(st.integers(1, 2)),
            "batch.accumulation": draw(st.integers(1, 4)),
            "pipeline.schedule": schedule,
            "pipeline.virtual_stages": virtual_stages,
            "pipeline.gather": gather,
            "tensor.sequence_parallel": tp > 1 and draw(st.booleans()),
            "context.transport": transport,
            "context.heads_over": 2 if cp == 4 and tp <= 2 and transport != "ulysses" and draw(st.booleans()) else None,
            "recompute.mode": recompute,
            "recompute.every": draw(st.integers(1, 3)) if recompute != "none" else 1,
            "tiers.optimizer": tiers,
            "tiers.nvme_path": "nvme" if tiers == "nvme" else None,
            "tiers.grads": "host" if tiers != "device" and draw(st.booleans()) else "device",
            "tiers.params": "host" if tiers != "device" and stage == 3 and draw(st.booleans()) else "device",
            "tiers.activations": "host" if recompute != "none" and draw(st.booleans()) else "device",
            "precision.param": draw(st.sampled_from(["bf16", "fp32"])),
        },
    )


@settings(max_examples=60, deadline=None)
@given(legal_strategies())
def test_a_candidate_is_what_its_config_resolves_to_and_can_be_trained(config: ResolvedConfig) -> None:
    whole = job(world_size(config), config.batch.global_size)
    plain = written(whole, config)
    assert split_as(plain.resolve(world_size(config)), config) == plain.resolve(world_size(config))
    assert replace(job_of(plain, whole.cluster).shape, name="small") == whole.shape
    assert Config.from_dict(tomllib.loads(to_toml(plain))) == plain
    assert Config.from_dict(tomllib.loads(to_toml(plain, ALWAYS_WRITTEN))) == plain
    resolved, _ = check_job(plain, world_size(config))
    assert resolved.batch.accumulation == config.batch.accumulation


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_found_again(name: str) -> None:
    shape = ModelShape.of_decoder(preset(name), name="of my own")
    config = written(job(1, 1, shape), BASE)
    assert replace(job_of(config, job(1, 1).cluster).shape, name="of my own") == shape
    given = config.model.model_dump(exclude_none=True)
    assert given == {"preset": given["preset"], "trust_remote_code": False}


def test_what_the_planner_does_not_choose_stays() -> None:
    base = Config.from_dict(
        {"optimizer": {"lr": 1e-5, "name": "lion"}, "tiers": {"optimizer": "nvme", "nvme_path": "/fast"}}
    )
    whole = replace(job(2, 2), base=base_of(base))
    on_disk, on_device = (
        next(
            changed(candidate, placement)
            for candidate in candidates(whole, space)
            for placement in placements(whole, space, candidate)
        )
        for space in (SearchSpace(pins={"tiers.optimizer": (tier,)}) for tier in ("nvme", "device"))
    )
    config = written(whole, on_disk)
    assert (config.optimizer.lr, config.optimizer.name, config.tiers.nvme_path) == (1e-5, "lion", "/fast")
    assert written(whole, on_device).tiers.nvme_path is None


def test_experts_are_written_as_keys_of_the_model() -> None:
    experts = ExpertsShape(num_experts=4, num_chosen=1, ffn_size=8, num_shared=2)
    model = written(job(1, 1, replace(SHAPE, experts=experts)), BASE).model
    assert (model.num_experts, model.num_chosen, model.expert_size, model.num_shared_experts) == (4, 1, 8, 2)
    assert ModelShape.of_decoder(decoder_config(model)).experts == experts


@pytest.mark.parametrize(
    ("shape", "config", "code", "value"),
    [
        (
            replace(SHAPE, experts=ExpertsShape(num_experts=4, num_chosen=1, ffn_size=8, num_dense_layers=1)),
            BASE,
            "model-plan-only",
            "dense layers before its experts",
        ),
        (replace(SHAPE, ffn="plain"), BASE, "model-plan-only", "two matrices"),
        (replace(SHAPE, has_biases=True), BASE, "model-plan-only", "biases"),
        (replace(SHAPE, head_dim=8), BASE, "model-plan-only", "head_dim=8"),
        (SHAPE, changed(BASE, {"precision.linears": "fp4"}), "unknown-choice", "fp4"),
    ],
)
def test_what_cannot_be_trained_is_refused(shape: ModelShape, config: ResolvedConfig, code: str, value: str) -> None:
    with refused(code, value):
        written(job(1, 1, shape), config)


def test_none_that_toml_cannot_say_is_refused() -> None:
    with refused("none-in-toml", "optimizer.clip_norm"):
        to_toml(Config().override(["optimizer.clip_norm=none"]))


def test_pins_are_read_as_the_config_reads_them() -> None:
    assert pins_of(["mesh.tp=2,4", "pipeline.schedule=zb-h1"]) == {"mesh.tp": (2, 4), "pipeline.schedule": ("zb-h1",)}
    assert pins_of(["context.heads_over=none"]) == {"context.heads_over": (None,)}
    with refused("out-of-range", "zero.stage=7"):
        pins_of(["zero.stage=7"])


def test_base_and_shape_are_those_of_the_config() -> None:
    config = Config.from_dict(
        {
            "compile": {"enabled": True},
            "zero": {"overlap": False},
            "tensor": {"overlap_chunks": 4},
            "optimizer": {"name": "lion"},
            "data": {"seq_len": 2048},
            "attention": {"kind": "sliding-window", "block": 64, "num_sliding_window_blocks": 5},
        }
    )
    cluster = job(1, 1).cluster
    found, usual = job_of(config, cluster), job_of(Config(), cluster)
    assert (found.base.compile.enabled, found.base.zero.overlap, found.base.tensor.overlap_chunks) == (True, False, 4)
    assert (found.base.optimizer.name, found.seq_len) == ("lion", 2048)
    assert found.shape.window == 3 * 64  # of five blocks in a row around a query its own and two before it
    assert usual.shape.window is None


def test_what_a_user_splits_is_free_and_what_no_plan_chooses_stays() -> None:
    values = {"tiers": {"optimizer": "host", "optimizer_on_device": 0.5}, "optimizer": {"name": "lion"}}
    base = base_of(Config.from_dict({**values, "mesh": {"tp": 4}, "context": {"chunk_tokens": 16}}))
    assert (base.mesh.tp, base.tiers.optimizer, base.tiers.optimizer_on_device) == (1, "device", 0.0)
    assert (base.optimizer.name, base.context.chunk_tokens) == ("lion", 16)


def test_a_tied_model_is_never_taken_for_one_that_is_not() -> None:
    for name in PRESETS:
        shape = ModelShape.of_decoder(preset(name), name=name)
        other = replace(shape, is_tied=not shape.is_tied)
        config = written(job(1, 1, other), BASE)
        assert job_of(config, job(1, 1).cluster).shape.is_tied == other.is_tied
        assert config.model.tie_embeddings == other.is_tied


def test_of_two_presets_of_one_shape_that_of_its_name_is_written() -> None:
    for name in PRESETS:
        shape = ModelShape.of_decoder(preset(name), name=name)
        assert written(job(1, 1, shape), BASE).model.preset == name


def test_pins_may_have_spaces_and_files_no_none() -> None:
    assert pins_of(["mesh.tp=2, 4"]) == {"mesh.tp": (2, 4)}
    text = to_toml(Config(), {"optimizer.lr", "batch.global_size"})  # of which the second has none by default
    assert set(tomllib.loads(text)) == {"optimizer"}


def test_a_cut_of_the_config_is_priced() -> None:
    config = changed(BASE, {"mesh.pp": 2, "pipeline.cut": ("blocks.2",), "batch.accumulation": 4})
    assert StageTable(job(2, 4)).of(config).layers == (2, 4)
