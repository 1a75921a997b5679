"""Groups: flat buffers in which every element of every parameter has one place, and one owner."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout.facts import ParamEntry
from shardwise.layout.mesh_shape import MeshShape
from shardwise.layout.param_groups import ALIGNMENT_NUMEL, ROOT, GroupSpec, ParamSpec, build_groups
from shardwise.layout.zero_stages import Placement

UNITS = ("blocks.0", "blocks.1")
SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple) | st.lists(st.integers(0, 3), max_size=3).map(tuple)
NUM_RANKS = st.integers(1, 9)


@st.composite
def entries(draw: st.DrawFn) -> list[ParamEntry]:
    members = st.tuples(st.sampled_from([ROOT, *UNITS]), SHAPES, st.booleans())
    return [
        ParamEntry(f"p{index}", (), unit, shape, requires_grad)
        for index, (unit, shape, requires_grad) in enumerate(draw(st.lists(members, min_size=1, max_size=8)))
    ]


@st.composite
def groups(draw: st.DrawFn) -> GroupSpec:
    num_shards = draw(NUM_RANKS)
    num_ranks = draw(st.sampled_from([num_shards, 2 * num_shards]))  # two replicas of the shards
    return draw(
        st.sampled_from(build_groups(draw(entries()), UNITS, MeshShape(1, num_ranks // num_shards, num_shards)))
    )


@given(groups())
def test_shards_hold_each_element_of_each_parameter_exactly_once(group: GroupSpec) -> None:
    owners = {param.name: np.zeros(param.numel, dtype=int) for param in group.params}
    for index in range(group.num_shards):
        start, stop = group.shard_range(index)
        ends = [0]
        for slot in group.slots(start, stop):
            owners[slot.param.name][slot.start : slot.stop] += 1
            assert slot.start < slot.stop
            assert start + slot.offset == slot.param.offset + slot.start
            assert slot.offset >= ends[-1]
            ends.append(slot.offset + slot.stop - slot.start)
        assert ends[-1] <= stop - start
    assert all(np.all(times == 1) for times in owners.values())


@given(groups())
def test_ranks_write_the_whole_buffer_once_and_hold_what_they_write(group: GroupSpec) -> None:
    times = np.zeros(group.padded_numel, dtype=int)
    num_replicas = group.num_ranks // group.num_shards
    for shard in range(group.num_shards):
        ranges = [group.written_range(shard, replica) for replica in range(num_replicas)]
        for start, stop in ranges:
            times[start:stop] += 1
            assert stop - start == group.padded_numel // group.num_ranks
            for placement in Placement:
                low, high = group.held_range(placement, shard)
                assert low <= start <= stop <= high
    assert np.all(times == 1)


@given(groups())
def test_parameters_and_gaps_fill_the_buffer(group: GroupSpec) -> None:
    times = np.zeros(group.padded_numel, dtype=int)
    for param in group.params:
        times[param.offset : param.offset + param.numel] += 1
    for start, stop in group.gaps:
        assert 0 <= start < stop <= group.padded_numel
        times[start:stop] += 1
    assert np.all(times == 1)
    assert group.numel == sum(math.prod(param.shape) for param in group.params)


@given(groups())
def test_parameters_and_shards_begin_aligned(group: GroupSpec) -> None:
    starts = [param.offset for param in group.params]
    starts += [start for index in range(group.num_shards) for start in group.shard_range(index)]
    starts += [index * group.padded_numel // group.num_ranks for index in range(group.num_ranks)]
    assert all(start % ALIGNMENT_NUMEL == 0 for start in starts)


@given(groups())
def test_shards_are_equal_and_the_padding_least(group: GroupSpec) -> None:
    ranges = [group.shard_range(index) for index in range(group.num_shards)]
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == group.padded_numel == group.shard_numel * group.num_shards
    assert len({stop - start for start, stop in ranges}) == 1
    used = max(param.offset + param.numel for param in group.params)
    assert used <= group.padded_numel < used + ALIGNMENT_NUMEL * group.num_ranks
    for before, after in zip(group.params, group.params[1:], strict=False):
        assert 0 <= after.offset - (before.offset + before.numel) < ALIGNMENT_NUMEL


@given(groups(), st.data())
def test_slots_of_any_range_read_what_the_buffer_holds(group: GroupSpec, data: st.DataObject) -> None:
    """Against NumPy: lay out numbered parameters, cut the range, find every slot's numbers at its offset."""
    buffer = np.full(group.padded_numel, -1)
    values = {}
    for number, param in enumerate(group.params):
        values[param.name] = np.arange(param.numel) + 1000 * number
        buffer[param.offset : param.offset + param.numel] = values[param.name]
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, group.padded_numel)] * 2)))
    part, read = buffer[start:stop], np.full(stop - start, -1)
    for slot in group.slots(start, stop):
        read[slot.offset : slot.offset + slot.stop - slot.start] = values[slot.param.name][slot.start : slot.stop]
        shaped = values[slot.param.name].reshape(slot.param.shape)
        for piece in slot.pieces():
            found = part[slot.offset + piece.local_offset : slot.offset + piece.local_stop]
            index = (*map(slice, piece.rect.start, piece.rect.stop), ...)
            np.testing.assert_array_equal(found, shaped[index].ravel())
        assert sum(piece.rect.numel for piece in slot.pieces()) == slot.stop - slot.start
    np.testing.assert_array_equal(read, part)


@given(entries(), NUM_RANKS)
def test_each_parameter_is_in_the_one_group_of_its_unit_and_kind(members: list[ParamEntry], num_shards: int) -> None:
    found = build_groups(members, UNITS, MeshShape(dp_shard=num_shards))
    entry_of = {entry.name: entry for entry in members}
    assert sorted(param.name for group in found for param in group.params) == sorted(entry_of)
    for group in found:
        in_group = [entry_of[param.name] for param in group.params]
        assert {(entry.unit, entry.requires_grad) for entry in in_group} == {(group.unit, group.trainable)}
        assert [param.shape for param in group.params] == [entry.shape for entry in in_group]
        assert in_group == [entry for entry in members if entry in in_group]  # in module order
        assert group.name == group.unit + ("" if group.trainable else ":frozen")
    keys = [((ROOT, *UNITS).index(group.unit), not group.trainable) for group in found]
    assert keys == sorted(set(keys))


def test_drawn_to_scale() -> None:
    a, b = ParamEntry("a", (), ROOT, (5,), True), ParamEntry("b", ("c",), ROOT, (3, 3), True)
    (group,) = build_groups([a, b], (), MeshShape(dp_shard=2))
    assert group.params == (ParamSpec("a", (), (5,), 0), ParamSpec("b", ("c",), (3, 3), 8))
    assert (group.padded_numel, group.gaps) == (32, ((5, 8), (17, 32)))


@pytest.mark.parametrize(("num_ranks", "padded"), [(1, 24), (2, 32), (3, 24), (4, 32), (6, 48)])
def test_the_buffer_divides_among_ranks_and_shards(num_ranks: int, padded: int) -> None:
    entry = ParamEntry("a", (), ROOT, (17,), True)
    assert build_groups([entry], (), MeshShape(dp_replicate=num_ranks))[0].padded_numel == padded
    assert build_groups([entry], (), MeshShape(dp_shard=num_ranks))[0].padded_numel == padded
