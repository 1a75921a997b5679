"""The mesh's ranks and groups against NumPy's own row-major index arithmetic."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.config.resolve import Config
from shardwise.layout.mesh_shape import AXES, DATA_AXES, GRADIENT_AXES, SHARD_AXES, Coordinate, MeshShape

MESHES = st.builds(MeshShape, *[st.integers(1, 3)] * len(AXES))
AXIS_SETS = st.lists(st.sampled_from(AXES), unique=True).map(tuple)


def grid(mesh: MeshShape) -> np.ndarray:
    """Every rank at its coordinate: one dim an axis."""
    return np.arange(np.prod(mesh.sizes)).reshape(mesh.sizes)


@given(MESHES)
def test_a_rank_is_the_row_major_index_of_its_coordinate_and_back(mesh: MeshShape) -> None:
    for indices, rank in np.ndenumerate(grid(mesh)):
        assert mesh.coordinate(rank) == indices
        assert mesh.rank_of(Coordinate(*indices)) == rank


@given(MESHES, AXIS_SETS)
def test_groups_are_the_lines_of_the_grid_along_their_axes(mesh: MeshShape, axes: tuple[str, ...]) -> None:
    dims = sorted(AXES.index(axis) for axis in axes)
    lines = np.moveaxis(grid(mesh), dims, range(len(AXES) - len(dims), len(AXES)))
    expected = lines.reshape(-1, mesh.size_along(axes)).tolist()  # (groups, ranks of one)
    assert [list(group) for group in mesh.groups_along(axes)] == expected


@given(MESHES, AXIS_SETS)
def test_groups_partition_the_world_and_agree_with_each_rank(mesh: MeshShape, axes: tuple[str, ...]) -> None:
    groups = mesh.groups_along(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    for group in groups:
        for index, rank in enumerate(group):
            assert mesh.ranks_along(axes, rank) == group
            assert mesh.index_along(axes, rank) == index


@given(MESHES)
def test_one_cell_gets_one_micro_batch_and_cells_differ(mesh: MeshShape) -> None:
    cells = mesh.groups_along(("pp", "cp", "tp"))
    data_indices = [{mesh.data_index(rank) for rank in cell} for cell in cells]
    assert all(len(indices) == 1 for indices in data_indices)
    assert set().union(*data_indices) == set(range(mesh.num_data_ranks))
    assert mesh.num_data_ranks == len(cells)


def test_purposes_of_the_axes_follow_the_design() -> None:
    mesh = MeshShape(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2)
    assert mesh.size_along(SHARD_AXES) == 3 * 2
    assert mesh.size_along(GRADIENT_AXES) == 2 * 3 * 2
    assert mesh.size_along(DATA_AXES) == mesh.num_data_ranks == 2 * 3
    assert mesh.ranks_along(("tp",), 0) == (0, 1)
    assert mesh.ranks_along(("pp",), 0) == (0, 24)


def test_from_config_takes_the_resolved_mesh() -> None:
    assert MeshShape.from_config(Config().resolve(world_size=4).mesh) == MeshShape(dp_shard=4)
    with refused("config-not-resolved", "mesh.dp_shard", "config.resolve"):
        MeshShape.from_config(Config().mesh)


def test_ranks_axes_and_sizes_outside_the_mesh_are_refused() -> None:
    mesh = MeshShape(dp_shard=2, tp=2)
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=f"rank {rank} "):
            mesh.coordinate(rank)
        with pytest.raises(ValueError, match=f"rank {rank} "):
            mesh.ranks_along(("tp",), rank)
    for index in (-1, 2):
        with pytest.raises(ValueError, match=f"tp index {index} "):
            mesh.rank_of(Coordinate(tp=index))
    with pytest.raises(ValueError, match=r"'dp'.* dp_replicate"):
        mesh.groups_along(("dp",))
    with refused("mesh-axis-empty", "mesh.cp=0"):
        MeshShape(cp=0)
