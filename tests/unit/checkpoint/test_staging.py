"""Staging: the copy that a save writes from has what the rank writes, all of it and nothing else."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.checkpoint.async_saver import StagingMemory
from shardwise.layout.slicing import Chunk, LocalTensor, Rect, intersect
from shardwise.runtime.state_shards import StateShard, TensorFlatState

CPU = torch.device("cpu")
DTYPES = [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.float64]


@st.composite
def state_shards(draw: st.DrawFn) -> StateShard:
    """Ranges of a buffer in which a tensor comes after some padding; some of its pieces are written."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    whole = LocalTensor.whole(shape)
    start, stop = sorted(draw(st.tuples(*[st.integers(0, whole.numel)] * 2)))
    padding = draw(st.integers(0, 3))
    pieces = [piece.shifted(padding) for piece in intersect(whole, start, stop)]
    values = torch.randint(0, 100, (padding + stop - start + 2,)).to(draw(st.sampled_from(DTYPES)))
    written = tuple(piece for piece in pieces if draw(st.booleans()))
    return StateShard("up", ("tied",), "param", shape, TensorFlatState(values), tuple(pieces), written)


def values_of(state_shard: StateShard, piece: Chunk) -> torch.Tensor:
    return state_shard.flat.read(piece.local_offset, piece.local_stop)


@given(st.lists(state_shards(), max_size=5))
def test_copies_have_what_is_written_and_nothing_else(held: list[StateShard]) -> None:
    staging = StagingMemory(CPU)
    copies = staging.copy(held)
    assert staging.num_bytes == sum(state_shard.num_written_bytes for state_shard in held)
    assert len(copies) == len(held)
    for copy, state_shard in zip(copies, held, strict=True):
        assert copy.flat.dtype == state_shard.flat.dtype
        assert copy.flat.numel == sum(piece.rect.numel for piece in state_shard.written)
        assert copy.pieces == copy.written
        assert [piece.rect for piece in copy.written] == [piece.rect for piece in state_shard.written]
        for piece, original in zip(copy.written, state_shard.written, strict=True):
            assert torch.equal(values_of(copy, piece), values_of(state_shard, original))


def make_state_shard(numel: int) -> StateShard:
    pieces = (Chunk(Rect((0,), (numel,)), 0),)
    return StateShard("up", (), "param", (numel,), TensorFlatState(torch.ones(numel)), pieces, written=pieces)


def test_memory_is_used_again() -> None:
    staging = StagingMemory(CPU)
    copies = (staging.copy([make_state_shard(numel)])[0] for numel in (1000, 1000, 10))
    places = [copy.flat.read(0, 1).data_ptr() for copy in copies]
    assert len(set(places)) == 1
    assert staging.num_bytes == 4000
    staging.copy([make_state_shard(1001)])
    assert staging.num_bytes == 4004


def test_parameters_are_copied_without_a_graph() -> None:
    pieces = LocalTensor.whole((3,)).pieces
    held = StateShard("up", (), "param", (3,), TensorFlatState(torch.ones(3, requires_grad=True)), pieces, pieces)
    (copy,) = StagingMemory(CPU).copy([held])
    assert not copy.flat.read(0, 3).requires_grad


def test_too_little_memory_has_a_fix() -> None:
    pieces = (Chunk(Rect((0,), (2**58,)), 0),)
    held = StateShard("up", (), "param", (2**58,), TensorFlatState(torch.ones(1).expand(2**58)), pieces, pieces)
    with refused("no-copy-memory", f"{2**60} bytes"):
        StagingMemory(CPU).copy([held])
