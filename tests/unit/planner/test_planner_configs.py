"""Configs into jobs and strategies, and back."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.config.resolve import Config
from shardwise.models.presets import PRESETS, preset
from shardwise.planner.configs import ALWAYS_WRITTEN, config_of, job_of, pins_of, strategy_of, to_toml
from shardwise.planner.hardware import Cluster, find_gpu
from shardwise.planner.job import Experts, ModelShape, PlanJob, Strategy
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
def legal_strategies(draw: st.DrawFn) -> Strategy:
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
    return Strategy(
        pp=pp,
        dp_replicate=draw(st.integers(1, 2)),
        dp_shard=draw(st.integers(1, 3)),
        cp=cp,
        tp=tp,
        zero_stage=stage,
        micro_size=draw(st.integers(1, 2)),
        num_micro_batches=draw(st.integers(1, 4)),
        schedule=schedule,
        virtual_stages=virtual_stages,
        gather=gather,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        transport=transport,
        heads_over=2 if cp == 4 and tp <= 2 and transport != "ulysses" and draw(st.booleans()) else None,
        recompute=recompute,
        recompute_every=draw(st.integers(1, 3)) if recompute != "none" else 1,
        optimizer_tier=tiers,
        grads_tier="host" if tiers != "device" and draw(st.booleans()) else "device",
        params_tier="host" if tiers != "device" and stage == 3 and draw(st.booleans()) else "device",
        activations_tier="host" if recompute != "none" and draw(st.booleans()) else "device",
        param=draw(st.sampled_from(["bf16", "fp32"])),
    )


@settings(max_examples=60, deadline=None)
@given(legal_strategies())
def test_a_strategy_is_that_of_its_config_and_can_be_trained(strategy: Strategy) -> None:
    whole = job(strategy.num_ranks, strategy.global_batch)
    config = config_of(whole, strategy)
    assert strategy_of(config, strategy.num_ranks) == strategy
    assert replace(job_of(config, whole.cluster).shape, name="small") == whole.shape
    assert Config.from_dict(tomllib.loads(to_toml(config))) == config
    assert Config.from_dict(tomllib.loads(to_toml(config, ALWAYS_WRITTEN))) == config
    resolved, _ = check_job(config, strategy.num_ranks)
    assert resolved.batch.accumulation == strategy.num_micro_batches


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_found_again(name: str) -> None:
    shape = ModelShape.of_decoder(preset(name), name="of my own")
    config = config_of(job(1, 1, shape), Strategy())
    assert replace(job_of(config, job(1, 1).cluster).shape, name="of my own") == shape
    given = config.model.model_dump(exclude_none=True)
    assert given == {"preset": given["preset"], "trust_remote_code": False}


def test_what_the_planner_does_not_choose_stays() -> None:
    base = Config.from_dict(
        {"optimizer": {"lr": 1e-5, "name": "lion"}, "tiers": {"optimizer": "nvme", "nvme_path": "/fast"}}
    )
    whole = replace(job(2, 2), optimizer="lion")
    config = config_of(whole, Strategy(dp_shard=2, zero_stage=3, optimizer_tier="nvme"), base)
    assert (config.optimizer.lr, config.optimizer.name, config.tiers.nvme_path) == (1e-5, "lion", "/fast")
    assert config_of(whole, Strategy(dp_shard=2), base).tiers.nvme_path is None


@pytest.mark.parametrize(
    ("shape", "strategy", "code", "value"),
    [
        (
            replace(SHAPE, experts=Experts(num_experts=4, num_chosen=1, ffn_size=8)),
            Strategy(),
            "model-plan-only",
            "experts",
        ),
        (replace(SHAPE, ffn="plain"), Strategy(), "model-plan-only", "two matrices"),
        (replace(SHAPE, has_biases=True), Strategy(), "model-plan-only", "biases"),
        (replace(SHAPE, head_dim=8), Strategy(), "model-plan-only", "head_dim=8"),
        (SHAPE, Strategy(ep=2), "plan-only", "ep=2"),
        (SHAPE, Strategy(matmul="fp8"), "plan-only", "matmul=fp8"),
        (SHAPE, Strategy(pp=3, stage_layers=(3, 0, 3)), "plan-only", "(3, 0, 3)"),
    ],
)
def test_what_cannot_be_trained_is_refused(shape: ModelShape, strategy: Strategy, code: str, value: str) -> None:
    with refused(code, value):
        config_of(job(1, 1, shape), strategy)


def test_none_that_toml_cannot_say_is_refused() -> None:
    with refused("none-in-toml", "optimizer.clip_norm"):
        to_toml(Config().override(["optimizer.clip_norm=none"]))


def test_pins_are_read_as_the_config_reads_them() -> None:
    assert pins_of(["mesh.tp=2,4", "pipeline.schedule=zb-h1"]) == {"tp": (2, 4), "schedule": ("zb-h1",)}
    assert pins_of(["context.heads_over=none"]) == {"heads_over": (None,)}
    with refused("key-not-planned", "zero.stage"):
        pins_of(["zero.stege=3"])
    with refused("out-of-range", "zero.stage=7"):
        pins_of(["zero.stage=7"])


def test_traits_and_shape_are_those_of_the_config() -> None:
    changed = Config.from_dict(
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
    found, usual = job_of(changed, cluster), job_of(Config(), cluster)
    assert (found.traits.is_compiled, usual.traits.is_compiled) == (True, False)
    assert (found.traits.overlaps_data, usual.traits.overlaps_data) == (False, True)
    assert (found.traits.overlaps_tensor, usual.traits.overlaps_tensor) == (True, False)
    assert (found.optimizer, found.seq_len) == ("lion", 2048)
    assert found.shape.window == 3 * 64  # of five blocks in a row around a query its own and two before it
    assert usual.shape.window is None


def test_what_a_config_leaves_to_the_engine_is_what_the_strategy_says() -> None:
    pipeline = {"mesh": {"pp": 2}, "pipeline": {"schedule": "zb-v"}, "batch": {"global_size": 4, "micro_size": 1}}
    assert strategy_of(Config.from_dict(pipeline), 2).virtual_stages == 2
    context = {"mesh": {"cp": 4}, "context": {"transport": "ulysses"}, "batch": {"global_size": 4, "micro_size": 1}}
    assert strategy_of(Config.from_dict(context), 4).heads_over is None


def test_a_planned_config_has_the_job_s_own_values_and_no_leftovers() -> None:
    base = Config.from_dict({"tiers": {"optimizer": "host", "optimizer_on_device": 0.5}})
    whole = replace(job(2, 4), optimizer="lion")
    config = config_of(whole, Strategy(dp_shard=2, num_micro_batches=2, chunk_tokens=16), base)
    assert (config.data.seq_len, config.optimizer.name, config.context.chunk_tokens) == (64, "lion", 16)
    assert (config.tiers.optimizer, config.tiers.optimizer_on_device) == ("device", 0.0)


def test_a_tied_model_is_never_taken_for_one_that_is_not() -> None:
    for name in PRESETS:
        shape = ModelShape.of_decoder(preset(name), name=name)
        other = replace(shape, is_tied=not shape.is_tied)
        config = config_of(job(1, 1, other), Strategy())
        assert job_of(config, job(1, 1).cluster).shape.is_tied == other.is_tied
        assert config.model.tie_embeddings == other.is_tied


def test_of_two_presets_of_one_shape_that_of_its_name_is_written() -> None:
    for name in PRESETS:
        shape = ModelShape.of_decoder(preset(name), name=name)
        assert config_of(job(1, 1, shape), Strategy()).model.preset == name


def test_pins_may_have_spaces_and_files_no_none() -> None:
    assert pins_of(["mesh.tp=2, 4"]) == {"tp": (2, 4)}
    text = to_toml(Config(), {"optimizer.lr", "batch.global_size"})  # of which the second has none by default
    assert set(tomllib.loads(text)) == {"optimizer"}


def test_a_cut_of_the_config_is_priced() -> None:
    values = {"mesh": {"pp": 2}, "pipeline": {"cut": ["blocks.2"]}, "batch": {"global_size": 4, "micro_size": 1}}
    config = config_of(job(1, 1), Strategy())
    assert strategy_of(Config.from_dict({**config.model_dump(), **values}), 2).stage_layers == (2, 4)
