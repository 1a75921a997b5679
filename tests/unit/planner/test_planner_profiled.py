"""What was measured on a machine is what the planner says of it, at the measured shapes and between them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.profiles import BLOCKS, PROFILE, SHAPES
from shardwise.config.resolve import ResolvedConfig
from shardwise.models.shape import ExpertsShape, ModelShape
from shardwise.planner.calibration import LogInterpolator
from shardwise.planner.comm_time import CommTimeModel
from shardwise.planner.compute_time import ComputeTimeModel
from shardwise.planner.hardware import cluster_of
from shardwise.planner.job import BASE, PlanJob, changed
from shardwise.planner.profile import Profile


def job(hidden: int, ffn: int, heads: int, seq_len: int, profile: Profile = PROFILE) -> PlanJob:
    shape = ModelShape(
        num_layers=2,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=64,
        ffn_size=ffn,
        vocab_size=4096,
    )
    return PlanJob(shape=shape, seq_len=seq_len, global_batch=2, cluster=cluster_of(profile))


@pytest.mark.parametrize("measured", BLOCKS)
def test_a_measured_block_takes_what_was_measured(measured):
    model = ComputeTimeModel(job(measured.hidden_size, measured.ffn_size, measured.num_heads, measured.seq_len))
    times = model.block(changed(BASE, {"precision.param": "fp32"}))
    assert times.forward_s == pytest.approx(measured.forward_s)
    assert times.backward_s == pytest.approx(measured.backward_s)


def test_two_samples_of_half_the_tokens_are_near_one_of_all():
    whole = ComputeTimeModel(job(*SHAPES[1], 512)).block(changed(BASE, {"precision.param": "fp32"}))
    halves = ComputeTimeModel(job(*SHAPES[1], 256)).block(
        changed(BASE, {"precision.param": "fp32", "batch.micro_size": 2})
    )
    assert halves.forward_s == pytest.approx(whole.forward_s, rel=0.2)


def test_a_measured_head_takes_what_was_measured():
    times = ComputeTimeModel(job(*SHAPES[0], 128)).head(changed(BASE, {"precision.param": "fp32"}))
    assert times.forward_s == pytest.approx(0.02)
    assert times.backward_s == pytest.approx(0.05)


def test_full_recompute_takes_a_measured_forward_again_and_selective_less():
    model = ComputeTimeModel(job(*SHAPES[0], 128))
    assert model.block(
        changed(BASE, {"precision.param": "fp32", "recompute.mode": "full"})
    ).recompute_s == pytest.approx(BLOCKS[0].forward_s)
    selective_s = model.block(changed(BASE, {"precision.param": "fp32", "recompute.mode": "selective"})).recompute_s
    assert 0 <= selective_s < BLOCKS[0].forward_s


def test_measured_products_and_attention_of_their_own_dtype_count():
    kernels = replace(PROFILE, blocks=(), heads=())
    model = ComputeTimeModel(job(256, 768, 4, 128, kernels))
    assert model.attention(changed(BASE, {"precision.param": "fp32"})).forward_s == pytest.approx(0.001)
    assert model.attention(changed(BASE, {"precision.param": "bf16"})).backward_s == pytest.approx(0.3)
    twice = replace(kernels, matmuls=tuple(replace(each, seconds=2 * each.seconds) for each in kernels.matmuls))
    slower = ComputeTimeModel(job(256, 768, 4, 128, twice))
    assert (
        slower.block(changed(BASE, {"precision.param": "fp32"})).forward_s
        > 1.3 * model.block(changed(BASE, {"precision.param": "fp32"})).forward_s
    )


def test_what_is_compiled_is_not_corrected_by_what_was_not():
    plain = job(*SHAPES[0], 128)
    kernels = replace(plain, cluster=cluster_of(replace(PROFILE, blocks=(), heads=())))
    config = changed(BASE, {"precision.param": "fp32", "compile.enabled": True})
    assert ComputeTimeModel(plain).block(config) == ComputeTimeModel(kernels).block(config)


def test_what_a_machine_does_not_hide_shows():
    config = changed(BASE, {"mesh.dp_shard": 2, "zero.stage": 3, "precision.param": "fp32"})
    exposed = []
    for hidden_share in (1.0, 0.5, 0.0):
        measured = job(*SHAPES[0], 128, replace(PROFILE, hidden_share=hidden_share))
        data = CommTimeModel(measured).data(config)
        exposed.append(data.exposed_s(10.0, 10.0))
    assert exposed == sorted(exposed)
    assert exposed[2] == pytest.approx(data.total_s)
    assert exposed[0] < exposed[1] < exposed[2]


POINTS = st.lists(
    st.tuples(st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)), st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))),
    min_size=1,
    max_size=8,
    unique_by=lambda point: point[0],
)


@given(POINTS, st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)))
def test_an_interpolation_stays_between_its_points(points, where):
    values = LogInterpolator(points).at(*where)
    for index, value in enumerate(values):
        known = [point[1][index] for point in points]
        assert min(known) * (1 - 1e-9) <= value <= max(known) * (1 + 1e-9)


@given(POINTS)
def test_an_interpolation_goes_through_its_points(points):
    far = [
        point
        for point in points
        if all(abs(point[0][0] / other[0][0] - 1) > 1e-3 for other in points if other != point)
    ]
    for where, values in far:
        assert LogInterpolator(points).at(*where) == pytest.approx(values)


def test_near_points_weigh_more_by_the_fourth_power_of_their_distance():
    interpolator = LogInterpolator([((1.0,), (1.0,)), ((math.exp(3.0),), (math.e,))])
    # 1 and 2 away: weights 16 to 1.
    assert interpolator.at(math.e) == pytest.approx((math.exp(1 / 17),))


def test_a_split_block_is_corrected_as_a_whole_one_of_as_many_weights():
    split = changed(BASE, {"precision.param": "fp32", "mesh.tp": 4})
    small, large = job(*SHAPES[0], 128), job(*SHAPES[1], 128)  # of a fourth of the weights

    def factor(of: PlanJob, config: ResolvedConfig) -> float:
        kernels = replace(of, cluster=cluster_of(replace(PROFILE, blocks=(), heads=())))
        return ComputeTimeModel(of).block(config).forward_s / ComputeTimeModel(kernels).block(config).forward_s

    assert factor(large, split) == pytest.approx(factor(small, changed(BASE, {"precision.param": "fp32"})))
    assert factor(large, split) != pytest.approx(factor(large, changed(BASE, {"precision.param": "fp32"})), rel=0.05)
    experts = replace(large, shape=replace(large.shape, experts=ExpertsShape(num_experts=4, num_chosen=1, ffn_size=64)))
    assert factor(experts, changed(BASE, {"precision.param": "fp32"})) == 1.0  # no block with experts was measured


def test_heads_of_two_sizes_take_what_was_measured_of_each():
    wide = replace(PROFILE.heads[0], vocab_size=65536, forward_s=1.0)
    profile = replace(PROFILE, heads=(*PROFILE.heads, wide))
    plain = job(*SHAPES[0], 128, profile)
    larger = replace(plain, shape=replace(plain.shape, vocab_size=65536))
    assert ComputeTimeModel(plain).head(changed(BASE, {"precision.param": "fp32"})).forward_s == pytest.approx(0.02)
    assert ComputeTimeModel(larger).head(changed(BASE, {"precision.param": "fp32"})).forward_s == pytest.approx(1.0)
