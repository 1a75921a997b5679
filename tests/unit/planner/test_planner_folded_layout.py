"""The folded Layout says to the byte what the whole model's does."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, ResolvedConfig, Tier
from shardwise.config.sections import Gather
from shardwise.layout.layout import Layout
from shardwise.layout.precision import StatesDtype
from shardwise.models import Decoder, DecoderConfig
from shardwise.models.presets import preset
from shardwise.models.shape import ExpertsShape, ModelShape
from shardwise.planner.folded_layout import FoldedLayouts
from shardwise.planner.hardware import Cluster, GpuSpec
from shardwise.planner.job import BASE, PlanJob, changed, world_size
from shardwise.schedule import RECIPES
from shardwise.tensor.plan_layout import plan_layout

GPU = GpuSpec(name="h100", memory_bytes=80 * 2**30, memory_bytes_per_s=3e12, peak_flops_per_s={"bf16": 989e12})
CLUSTER = Cluster(gpu=GPU, num_gpus=8, gpus_per_node=8, nic_bytes_per_s=5e10)
SCHEDULES = (*((name, recipe.min_virtual_stages) for name, recipe in RECIPES.items()), ("gpipe", 2))
TIERS: tuple[tuple[Tier, Tier, Tier], ...] = (
    ("device", "device", "device"),
    ("device", "device", "host"),
    ("device", "host", "host"),
    ("host", "host", "nvme"),
    ("nvme", "nvme", "nvme"),
)


@st.composite
def decoders(draw: st.DrawFn) -> DecoderConfig:
    heads = draw(st.sampled_from((2, 4)))
    return DecoderConfig(
        vocab_size=draw(st.sampled_from((63, 96, 257))),
        num_layers=draw(st.integers(1, 9)),
        hidden_size=draw(st.sampled_from((12, 24, 40))),
        num_heads=heads,
        num_kv_heads=draw(st.sampled_from((1, heads))),
        head_dim=draw(st.sampled_from((2, 6))),
        ffn_size=draw(st.sampled_from((28, 52))),
        max_seq_len=16,
        tie_embeddings=draw(st.booleans()),
    )


@st.composite
def configs(draw: st.DrawFn) -> ResolvedConfig:
    schedule, virtual = draw(st.sampled_from(SCHEDULES))
    params, grads, optimizer = draw(st.sampled_from(TIERS))

    def share(tier: str) -> float:
        return 0.0 if tier == "device" else draw(st.sampled_from((0.0, 0.3, 0.5, 0.8)))

    return changed(
        BASE,
        {
            "mesh.pp": draw(st.sampled_from((1, 2, 3))),
            "mesh.dp_replicate": draw(st.sampled_from((1, 2))),
            "mesh.dp_shard": draw(st.sampled_from((1, 3, 4))),
            "mesh.cp": draw(st.sampled_from((1, 2))),
            "mesh.tp": draw(st.sampled_from((1, 2))),
            "tensor.sequence_parallel": draw(st.booleans()),
            "zero.stage": draw(st.sampled_from((0, 1, 2, 3))),
            "batch.accumulation": draw(st.sampled_from((1, 4))),
            "pipeline.schedule": schedule,
            "pipeline.virtual_stages": virtual,
            "pipeline.gather": draw(st.sampled_from(("batch", "micro-batch"))),
            "tiers.params": params,
            "tiers.grads": grads,
            "tiers.optimizer": optimizer,
            "tiers.params_on_device": share(params),
            "tiers.grads_on_device": share(grads),
            "tiers.optimizer_on_device": share(optimizer),
            "precision.param": draw(st.sampled_from(("fp32", "bf16"))),
            "precision.reduce": draw(st.sampled_from(("param", "fp32", "int8"))),
            "precision.accumulate": draw(st.sampled_from(("param", "fp32"))),
            "tiers.nvme_path": "/nvme" if "nvme" in (params, grads, optimizer) else None,
            "zero.keep_whole_below": draw(st.sampled_from((0, 50, 10**6))),
            "optimizer.name": draw(st.sampled_from(("adamw", "muon"))),
        },
    )


def layout_or_none(shape: DecoderConfig, config: ResolvedConfig) -> Layout | None:
    try:
        Config(**dict(config)).resolve(world_size(config))
        return plan_layout(Decoder(shape, device="meta"), config)
    except ConfigError:
        return None


def folded_of(shape: DecoderConfig) -> FoldedLayouts:
    job = PlanJob(shape=ModelShape.of_decoder(shape), seq_len=16, global_batch=8, cluster=CLUSTER)
    return FoldedLayouts(job)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(shape=decoders(), config=configs())
def test_folded_bytes_are_those_of_the_whole_model(shape: DecoderConfig, config: ResolvedConfig) -> None:
    layout = layout_or_none(shape, config)
    assume(layout is not None)
    assert layout is not None
    folded = folded_of(shape)
    for rank in range(config.mesh.pp):
        own = layout.of_pipeline_rank(rank)
        assert folded.at_rest(config, rank) == own.bytes_at_rest()
        assert folded.by_tier(config, rank) == own.bytes_by_tier()
        assert folded.on_wire(config, rank) == own.bytes_on_wire(config.batch.accumulation)


@pytest.mark.parametrize("states", ["bf16", "int8"])
@pytest.mark.parametrize("tp", [1, 2])
def test_encoded_states_are_counted_to_the_byte(states: StatesDtype, tp: int) -> None:
    shape = replace(preset("tiny"), hidden_size=512, ffn_size=1024, num_layers=3, num_heads=8, num_kv_heads=8)
    shape = replace(shape, head_dim=64, vocab_size=1000)
    plain = changed(BASE, {"mesh.dp_shard": 4, "mesh.tp": tp, "zero.stage": 2})
    config, folded = changed(plain, {"precision.states": states}), folded_of(shape)
    assert folded.at_rest(config) == plan_layout(Decoder(shape, device="meta"), config).bytes_at_rest()
    assert folded.at_rest(config)["optimizer"] < 0.8 * folded.at_rest(plain)["optimizer"]


@pytest.mark.parametrize("gather", get_args(Gather))
@pytest.mark.parametrize(("tp", "stage", "near"), [(1, 0, 0), (1, 1, 0), (2, 2, 0), (1, 3, 0), (2, 3, 2), (1, 3, 1)])
def test_encoded_gathers_and_secondary_shards_are_counted_to_the_byte(
    gather: Gather, tp: int, stage: int, near: int
) -> None:
    shape = replace(preset("tiny"), hidden_size=512, ffn_size=1024, num_layers=3, num_heads=8, num_kv_heads=8)
    shape = replace(shape, head_dim=64, vocab_size=1000)
    plain = changed(BASE, {"mesh.dp_shard": 4, "mesh.tp": tp, "zero.stage": stage, "batch.accumulation": 2})
    config = changed(plain, {"zero.secondary_shard": near, "precision.gather": gather})
    own, folded = plan_layout(Decoder(shape, device="meta"), config), folded_of(shape)
    assert folded.at_rest(config) == own.bytes_at_rest()
    assert folded.on_wire(config) == own.bytes_on_wire(2)
    if gather == "param" and not near:
        return
    if gather != "param" and stage:
        assert folded.on_wire(config)["all_gather"] < 0.6 * folded.on_wire(plain)["all_gather"]
    if near:
        assert folded.at_rest(config)["param"] > folded.at_rest(plain)["param"]
        assert folded.on_wire(config)["all_gather"] < 0.4 * folded.on_wire(plain)["all_gather"]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("axes", "node"),
    [
        ({"mesh.dp_shard": 4}, 0),
        ({"mesh.dp_shard": 8}, 2),
        ({"mesh.dp_shard": 2, "mesh.dp_replicate": 2, "mesh.pp": 2}, 0),
    ],
)
def test_encoded_gradients_are_counted_to_the_byte(zero_stage: int, axes: dict[str, int], node: int) -> None:
    shape = replace(preset("tiny"), num_layers=3, vocab_size=1000)
    base = changed(BASE, {"zero.stage": zero_stage, "zero.secondary_shard": node, "batch.accumulation": 2, **axes})
    plain = changed(base, {"precision.reduce": "int4"})
    config = changed(plain, {"precision.reduce_feedback": True})
    own, folded = plan_layout(Decoder(shape, device="meta"), config), folded_of(shape)
    for rank in range(config.mesh.pp):
        found = folded.at_rest(config, rank)
        assert found == own.of_pipeline_rank(rank).bytes_at_rest()
        assert folded.on_wire(config, rank) == own.of_pipeline_rank(rank).bytes_on_wire(2)
        assert found["grad"] > folded.at_rest(plain, rank)["grad"]


def test_experts_are_spread_over_fewer_ranks() -> None:
    shape = ModelShape(
        num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn_size=128, vocab_size=256,
        experts=ExpertsShape(num_experts=8, num_chosen=2, ffn_size=32, num_shared=1, num_dense_layers=1),
    )  # fmt: skip
    job = PlanJob(shape=shape, seq_len=16, global_batch=8, cluster=CLUSTER)
    plain = changed(BASE, {"mesh.dp_shard": 1, "precision.param": "bf16"})
    assert FoldedLayouts(job).at_rest(plain)["param"] == 2 * shape.num_params
    spread = changed(plain, {"mesh.dp_shard": 4, "mesh.ep": 4})
    experts = 2 * 2 * 8 * 3 * 64 * 32  # bytes of both layers' experts
    assert FoldedLayouts(job).at_rest(spread)["param"] == 2 * shape.num_params - experts * 3 // 4


def test_biases_and_learned_positions_are_held() -> None:
    shape = ModelShape(
        num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn_size=256, vocab_size=256,
        ffn="plain", is_tied=True, has_biases=True, num_positions=128,
    )  # fmt: skip
    job = PlanJob(shape=shape, seq_len=16, global_batch=8, cluster=CLUSTER)
    assert FoldedLayouts(job).at_rest(changed(BASE, {"precision.param": "bf16"}))["param"] == 2 * shape.num_params


@pytest.mark.parametrize("num_layers", [8, 80])
def test_no_more_groups_for_more_layers(num_layers: int) -> None:
    shape = ModelShape(
        num_layers=num_layers, hidden_size=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn_size=256, vocab_size=256
    )
    job = PlanJob(shape=shape, seq_len=16, global_batch=8, cluster=CLUSTER)
    assert len(FoldedLayouts(job).rank(changed(BASE, {"mesh.pp": 2, "batch.accumulation": 4}), 1).folds) == 2
