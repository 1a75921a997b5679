"""Meshes are folded to few ranks, and every axis that is in use stays so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.config.resolve import Config
from shardwise.layout.mesh_shape import AXES, MeshShape
from shardwise.verify.job import MOST_PROCESSES, fold_mesh, fold_micro_batches, make_job, small_layout

SIZES = st.integers(1, 64)
MESHES = st.builds(MeshShape, pp=SIZES, dp_replicate=SIZES, dp_shard=SIZES, tp=SIZES)


@given(MESHES, st.none() | st.integers(1, 32))
def test_every_axis_of_several_ranks_keeps_several(mesh, num_kv_heads):
    folded = fold_mesh(mesh, num_kv_heads)
    assert folded.world_size <= MOST_PROCESSES
    for axis, size, folded_size in zip(AXES, mesh.sizes, folded.sizes, strict=True):
        assert (folded_size > 1) == (size > 1), axis
        assert folded_size <= size


@pytest.mark.parametrize(
    ("mesh", "num_kv_heads", "expected"),
    [
        (MeshShape(dp_shard=512), None, (1, 1, 2, 1, 1)),
        (MeshShape(pp=3, tp=2), 8, (3, 1, 1, 1, 2)),
        (MeshShape(pp=16, dp_shard=4, tp=8), 8, (4, 1, 2, 1, 2)),
        (MeshShape(pp=16, dp_replicate=2, dp_shard=4, tp=8), 8, (2, 2, 2, 1, 2)),
        # Of four ranks two share each of two KV heads.
        (MeshShape(tp=8), 4, (1, 1, 1, 1, 4)),
        (MeshShape(tp=8), 1, (1, 1, 1, 1, 2)),
        (MeshShape(pp=4, tp=8), 2, (4, 1, 1, 1, 4)),
        # First the KV heads become one, then the pipeline shorter.
        (MeshShape(pp=4, dp_shard=2, tp=8), 2, (4, 1, 2, 1, 2)),
        (MeshShape(pp=2, dp_shard=2, cp=2, tp=2, dp_replicate=2), None, (2, 1, 2, 2, 2)),
    ],
)
def test_how_meshes_fold(mesh, num_kv_heads, expected):
    assert fold_mesh(mesh, num_kv_heads).sizes == expected


def test_fewer_processes_make_the_pipeline_shorter_but_drop_no_axis():
    mesh = MeshShape(pp=8, dp_shard=8, tp=8)
    assert fold_mesh(mesh, most=12).sizes == (3, 1, 2, 1, 2)
    assert fold_mesh(mesh, most=8).sizes == (2, 1, 2, 1, 2)
    with refused("too-few-processes", "6 processes", "= 8"):
        fold_mesh(mesh, most=6)
    with refused("too-few-processes", "8 processes", "= 16"):
        fold_mesh(MeshShape(pp=2, dp_replicate=2, dp_shard=2, tp=2), most=8)


@given(st.integers(1, 300), st.integers(1, 32))
def test_micro_batches_reach_the_steady_state_and_stay_even_or_odd(num_micro_batches, num_ranks):
    folded_ranks = min(num_ranks, 4)
    folded = fold_micro_batches(num_micro_batches, num_ranks, folded_ranks)
    assert min(num_micro_batches, 2 * folded_ranks + 1) <= folded <= min(num_micro_batches, 4 * folded_ranks)
    assert folded % 2 == num_micro_batches % 2


def test_multiples_of_the_ranks_stay_multiples():
    assert fold_micro_batches(64, 8, 4) == 12
    assert fold_micro_batches(63, 8, 4) == 9
    assert fold_micro_batches(62, 8, 4) == 10
    assert fold_micro_batches(1, 1, 1) == 1


@pytest.mark.parametrize("gather", ["param", "int8"])
def test_codecs_do_not_keep_the_copy_whole(gather):
    values = {"zero": {"stage": 3, "secondary_shard": 3}, "precision": {"gather": gather, "states": "int8"}}
    job = make_job(Config.from_dict({**values, "mesh": {"dp_shard": 6, "cp": 2}}), 12)
    assert all(not group.is_replicated and group.num_shards == 4 for group in small_layout(job).groups)
    assert ("precision.gather int8 -> param" in job.replaced) == (gather == "int8")
    assert "zero.secondary_shard 3 -> 1" in job.replaced
