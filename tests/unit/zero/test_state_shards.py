"""What ranks hold and write of groups: together each element once, padding never, and only what they hold."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout.facts import ParamEntry
from shardwise.layout.mesh_shape import MeshShape
from shardwise.layout.param_groups import ROOT, GroupSpec, build_groups
from shardwise.layout.slicing import Rect
from shardwise.layout.tp_sharding import FusedPart, ParamSplit
from shardwise.layout.zero_stages import STAGES, ZeroStage
from shardwise.zero.checkpoint_state import parts_of

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def splits(draw: st.DrawFn, degree: int) -> ParamSplit:
    """Whole on every rank, or split along a dim: evenly, in heads that ranks share, or with padding."""
    shape = draw(SHAPES)
    if not shape or draw(st.booleans()):
        return ParamSplit(shape, degree)
    shares = [number for number in range(1, degree + 1) if degree % number == 0]
    part = draw(
        st.sampled_from(
            [FusedPart(2 * degree), FusedPart(draw(st.integers(1, 9)), is_padded=True)]
            + [FusedPart(3 * number, num_units=number) for number in shares]
        )
    )
    dim = draw(st.integers(0, len(shape) - 1))
    return ParamSplit((*shape[:dim], part.size, *shape[dim + 1 :]), degree, dim, (part,))


@st.composite
def groups(draw: st.DrawFn) -> tuple[GroupSpec, ZeroStage, int]:
    """A group, the stage it is in, and how many tensor-parallel ranks there are."""
    degree, num_shards = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4))
    mesh = MeshShape(dp_replicate=draw(st.integers(1, 3)), dp_shard=num_shards)
    by_name = {f"p{index}": draw(splits(degree)) for index in range(draw(st.integers(1, 5)))}
    entries = [ParamEntry(name, (), ROOT, split.global_shape, draw(st.booleans())) for name, split in by_name.items()]
    made = build_groups(entries, (), mesh, draw(st.booleans()), by_name)
    return draw(st.sampled_from(made)), draw(st.sampled_from(STAGES)), degree


@given(groups())
def test_all_ranks_together_write_each_element_once_and_only_what_they_hold(
    drawn: tuple[GroupSpec, ZeroStage, int],
) -> None:
    group, stage, degree = drawn
    times = {param.name: np.zeros(param.global_shape, dtype=int) for param in group.params}
    for shard in range(group.num_shards):
        for replica in range(group.num_ranks // group.num_shards):
            for tp_index in range(degree):
                held = group.held_range(stage.optimizer, shard)
                parts = list(parts_of(group, held, group.written_range(shard, replica), tp_index))
                assert [part.spec for part in parts] == list(group.params)
                for part in parts:
                    has = held_elements(part.pieces, part.spec.global_shape, part.stop - part.start)
                    writes = held_elements(part.written, part.spec.global_shape, part.stop - part.start)
                    assert writes.items() <= has.items()
                    for index in writes:
                        times[part.spec.name].reshape(-1)[index] += 1
    assert all((each == 1).all() for each in times.values())


def held_elements(pieces: tuple, shape: tuple[int, ...], num_held: int) -> dict[int, int]:
    """Elements of the flattened whole tensor, each with its place in the buffer."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    found: dict[int, int] = {}
    for piece in pieces:
        indices = numbers[piece.rect.slices_in(Rect.whole(shape))].reshape(-1)
        places = range(piece.local_offset, piece.local_stop)
        assert places.start >= 0
        assert places.stop <= num_held
        assert not set(places) & set(found.values())
        found |= dict(zip(indices.tolist(), places, strict=True))
    return found
