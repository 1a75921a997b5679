"""The folded Layout says to the byte what the whole model's does."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, Tier, ZeroConfig
from shardwise.config.sections import Gather
from shardwise.layout.layout import Layout
from shardwise.layout.precision import StatesDtype
from shardwise.models import Decoder, DecoderConfig
from shardwise.models.presets import preset
from shardwise.planner.compact_layout import CompactLayout
from shardwise.planner.hardware import Cluster, GpuSpec
from shardwise.planner.job import Experts, ModelShape, PlanJob, Strategy
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
def strategies(draw: st.DrawFn) -> Strategy:
    schedule, virtual = draw(st.sampled_from(SCHEDULES))
    params, grads, optimizer = draw(st.sampled_from(TIERS))

    def share(tier: str) -> float:
        return 0.0 if tier == "device" else draw(st.sampled_from((0.0, 0.3, 0.5, 0.8)))

    return Strategy(
        pp=draw(st.sampled_from((1, 2, 3))),
        dp_replicate=draw(st.sampled_from((1, 2))),
        dp_shard=draw(st.sampled_from((1, 3, 4))),
        cp=draw(st.sampled_from((1, 2))),
        tp=draw(st.sampled_from((1, 2))),
        sequence_parallel=draw(st.booleans()),
        zero_stage=draw(st.sampled_from((0, 1, 2, 3))),
        num_micro_batches=draw(st.sampled_from((1, 4))),
        schedule=schedule,
        virtual_stages=virtual,
        gather=draw(st.sampled_from(("batch", "micro-batch"))),
        params_tier=params,
        grads_tier=grads,
        optimizer_tier=optimizer,
        params_on_device=share(params),
        grads_on_device=share(grads),
        optimizer_on_device=share(optimizer),
        param=draw(st.sampled_from(("fp32", "bf16"))),
        reduce=draw(st.sampled_from(("param", "fp32", "int8"))),
        accumulate=draw(st.sampled_from(("param", "fp32"))),
    )


def config_of(s: Strategy, keep_whole_below: int = 0, states: str = "master", optimizer: str = "adamw") -> Config:
    mesh = {"pp": s.pp, "dp_replicate": s.dp_replicate, "dp_shard": s.dp_shard, "cp": s.cp, "tp": s.tp}
    tiers: dict[str, object] = {"params": s.params_tier, "grads": s.grads_tier, "optimizer": s.optimizer_tier}
    tiers |= {f"{state}_on_device": getattr(s, f"{state}_on_device") for state in ("params", "grads", "optimizer")}
    if "nvme" in tiers.values():
        tiers["nvme_path"] = "/nvme"
    sections = {
        "mesh": mesh,
        "optimizer": {"name": optimizer},
        "zero": {"stage": s.zero_stage, "keep_whole_below": keep_whole_below},
        "tiers": tiers,
        "tensor": {"sequence_parallel": s.sequence_parallel},
        "batch": {"accumulation": s.num_micro_batches},
        "precision": {"param": s.param, "reduce": s.reduce, "accumulate": s.accumulate, "states": states},
        "pipeline": {"schedule": s.schedule, "virtual_stages": s.virtual_stages, "gather": s.gather},
    }
    return Config.from_dict(sections).resolve(s.num_ranks)


def layout_or_none(shape: DecoderConfig, s: Strategy, keep_whole_below: int, optimizer: str) -> Layout | None:
    try:
        return plan_layout(Decoder(shape, device="meta"), config_of(s, keep_whole_below, optimizer=optimizer))
    except ConfigError:
        return None


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    shape=decoders(),
    strategy=strategies(),
    below=st.sampled_from((0, 50, 10**6)),
    optimizer=st.sampled_from(("adamw", "muon")),
)
def test_folded_bytes_are_those_of_the_whole_model(
    shape: DecoderConfig, strategy: Strategy, below: int, optimizer: str
) -> None:
    # The planner cuts stages by their elements, of which those of Muon's matrices have fewer bytes than the others.
    assume(strategy.pp == 1 or optimizer != "muon")
    layout = layout_or_none(shape, strategy, below, optimizer)
    assume(layout is not None)
    assert layout is not None
    model = ModelShape.of_decoder(shape)
    job = PlanJob(shape=model, seq_len=16, global_batch=8, cluster=CLUSTER, zero=ZeroConfig(keep_whole_below=below))
    folded = CompactLayout(replace(job, optimizer=optimizer))
    for rank in range(strategy.pp):
        own = layout.of_pipeline_rank(rank)
        assert folded.at_rest(strategy, rank) == own.bytes_at_rest()
        assert folded.by_tier(strategy, rank) == own.bytes_by_tier()
        assert folded.on_wire(strategy, rank) == own.bytes_on_wire(strategy.num_micro_batches)


@pytest.mark.parametrize("states", ["bf16", "int8"])
@pytest.mark.parametrize("tp", [1, 2])
def test_encoded_states_are_counted_to_the_byte(states: StatesDtype, tp: int) -> None:
    shape = replace(preset("tiny"), hidden_size=512, ffn_size=1024, num_layers=3, num_heads=8, num_kv_heads=8)
    shape = replace(shape, head_dim=64, vocab_size=1000)
    job = PlanJob(shape=ModelShape.of_decoder(shape), seq_len=16, global_batch=8, cluster=CLUSTER, states=states)
    strategy = Strategy(dp_shard=4, tp=tp, zero_stage=2)
    own = plan_layout(Decoder(shape, device="meta"), config_of(strategy, states=states))
    assert CompactLayout(job).at_rest(strategy) == own.bytes_at_rest()
    plain = CompactLayout(replace(job, states="master")).at_rest(strategy)
    assert CompactLayout(job).at_rest(strategy)["optimizer"] < 0.8 * plain["optimizer"]


@pytest.mark.parametrize("gather", get_args(Gather))
@pytest.mark.parametrize(("tp", "stage", "near"), [(1, 0, 0), (1, 1, 0), (2, 2, 0), (1, 3, 0), (2, 3, 2), (1, 3, 1)])
def test_encoded_gathers_and_secondary_shards_are_counted_to_the_byte(
    gather: Gather, tp: int, stage: int, near: int
) -> None:
    shape = replace(preset("tiny"), hidden_size=512, ffn_size=1024, num_layers=3, num_heads=8, num_kv_heads=8)
    shape = replace(shape, head_dim=64, vocab_size=1000)
    job = PlanJob(shape=ModelShape.of_decoder(shape), seq_len=16, global_batch=8, cluster=CLUSTER)
    strategy = Strategy(dp_shard=4, tp=tp, zero_stage=stage, num_micro_batches=2, param="bf16")
    config = config_of(strategy)
    zero, precision = config.zero.model_dump(), config.precision.model_dump()
    sections = {"zero": {**zero, "secondary_shard": near}, "precision": {**precision, "gather": gather}}
    own = plan_layout(Decoder(shape, device="meta"), Config.from_dict({**config.model_dump(), **sections}))
    folded = CompactLayout(replace(job, gather_codec=gather, zero=ZeroConfig(secondary_shard=near)))
    assert folded.at_rest(strategy) == own.bytes_at_rest()
    assert folded.on_wire(strategy) == own.bytes_on_wire(2)
    if gather == "param" and not near:
        return
    plain = CompactLayout(job)
    if gather != "param" and stage:
        assert folded.on_wire(strategy)["all_gather"] < 0.6 * plain.on_wire(strategy)["all_gather"]
    if near:
        assert folded.at_rest(strategy)["param"] > plain.at_rest(strategy)["param"]
        assert folded.on_wire(strategy)["all_gather"] < 0.4 * plain.on_wire(strategy)["all_gather"]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("axes", "node"), [({"dp_shard": 4}, 0), ({"dp_shard": 8}, 2), ({"dp_shard": 2, "dp_replicate": 2, "pp": 2}, 0)]
)
def test_encoded_gradients_are_counted_to_the_byte(zero_stage: int, axes: dict[str, int], node: int) -> None:
    shape = replace(preset("tiny"), num_layers=3, vocab_size=1000)
    strategy = Strategy(zero_stage=zero_stage, reduce="int4", param="bf16", num_micro_batches=2, **axes)  # type: ignore[arg-type]
    config = config_of(strategy)
    config = config.model_copy(
        update={
            "precision": config.precision.model_copy(update={"reduce_feedback": True}),
            "zero": config.zero.model_copy(update={"secondary_shard": node}),
        }
    )
    own = plan_layout(Decoder(shape, device="meta"), config)
    job = PlanJob(shape=ModelShape.of_decoder(shape), seq_len=16, global_batch=8, cluster=CLUSTER)
    folded = CompactLayout(replace(job, reduce_feedback=True, zero=ZeroConfig(secondary_shard=node)))
    plain = CompactLayout(replace(job, zero=ZeroConfig(secondary_shard=node)))
    for rank in range(strategy.pp):
        found = folded.at_rest(strategy, rank)
        assert found == own.of_pipeline_rank(rank).bytes_at_rest()
        assert folded.on_wire(strategy, rank) == own.of_pipeline_rank(rank).bytes_on_wire(2)
        assert found["grad"] > plain.at_rest(strategy, rank)["grad"]


def test_experts_are_spread_over_fewer_ranks() -> None:
    shape = ModelShape(
        num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn_size=128, vocab_size=256,
        experts=Experts(num_experts=8, num_chosen=2, ffn_size=32, num_shared=1, num_dense_layers=1),
    )  # fmt: skip
    job = PlanJob(shape=shape, seq_len=16, global_batch=8, cluster=CLUSTER)
    plain = Strategy(dp_shard=1, param="bf16")
    assert CompactLayout(job).at_rest(plain)["param"] == 2 * shape.num_params
    spread = replace(plain, dp_shard=4, ep=4)
    experts = 2 * 2 * 8 * 3 * 64 * 32  # bytes of both layers' experts
    assert CompactLayout(job).at_rest(spread)["param"] == 2 * shape.num_params - experts * 3 // 4


def test_biases_and_learned_positions_are_held() -> None:
    shape = ModelShape(
        num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn_size=256, vocab_size=256,
        ffn="plain", is_tied=True, has_biases=True, num_positions=128,
    )  # fmt: skip
    job = PlanJob(shape=shape, seq_len=16, global_batch=8, cluster=CLUSTER)
    assert CompactLayout(job).at_rest(Strategy(param="bf16"))["param"] == 2 * shape.num_params


@pytest.mark.parametrize("num_layers", [8, 80])
def test_no_more_groups_for_more_layers(num_layers: int) -> None:
    shape = ModelShape(
        num_layers=num_layers, hidden_size=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn_size=256, vocab_size=256
    )
    job = PlanJob(shape=shape, seq_len=16, global_batch=8, cluster=CLUSTER)
    assert len(CompactLayout(job).rank(Strategy(pp=2, num_micro_batches=4), 1).folds) == 2
