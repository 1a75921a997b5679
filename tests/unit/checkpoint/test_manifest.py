"""Manifests: the parts of the ranks make one, however many there are, and Python's collector is left as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from shardwise.checkpoint.manifest import (
    DamagedError,
    Manifest,
    RankManifest,
    StoredChunk,
    StoredState,
    StoredTensor,
    merge_parts,
)
from shardwise.layout.slicing import Rect

STEP = StoredState("F32", value=3.0)


def piece(rank: int) -> StoredChunk:
    return StoredChunk(Rect((rank,), (rank + 1,)), f"{rank}", 4, (rank,))


def part(rank: int, *states: str) -> RankManifest:
    """A rank's row of `up`, and of `down` where it is odd; a rank without states has no file."""
    found = {name: StoredState("F32", (piece(rank),)) for name in states}
    names = ["up", "down"] if rank % 2 else ["up"]
    tensors = tuple(StoredTensor(name, (), (8,), found | {"step": STEP}) for name in names)
    return RankManifest(f"{rank}" if states else "", 10 * rank, tensors)


@pytest.fixture(params=[True, False])
def is_collecting(request: pytest.FixtureRequest) -> Iterator[bool]:
    if not request.param:
        gc.disable()
    yield request.param
    gc.enable()


def test_parts_are_put_together() -> None:
    tensors, files = merge_parts(iter([part(0), part(1, "param"), part(2, "param", "exp_avg"), part(3, "exp_avg")]))
    assert files == {"1": 10, "2": 20, "3": 30}
    params, averages = StoredState("F32", (piece(1), piece(2))), StoredState("F32", (piece(2), piece(3)))
    up, down = tensors
    assert up == StoredTensor("up", (), (8,), {"step": STEP, "param": params, "exp_avg": averages})
    assert down.name == "down"
    assert down.states == {
        "step": STEP,
        "param": StoredState("F32", (piece(1),)),
        "exp_avg": StoredState("F32", (piece(3),)),
    }


def test_the_collector_is_left_as_it_was(is_collecting: bool) -> None:
    tensors, files = merge_parts(RankManifest.from_text(part(rank, "param").to_text()) for rank in range(3))
    whole = tuple(replace(tensor, shape=(3,)) for tensor in tensors[:1])
    text = Manifest(step=3, tensors=whole, files={**files, "0": 10, "2": 30}).to_text()
    assert Manifest.from_text(text, "manifest.json").tensors == whole
    with pytest.raises(DamagedError):
        Manifest.from_text(text[:-3], "manifest.json")
    with pytest.raises(KeyError):
        merge_parts({}[rank] for rank in range(3))
    assert gc.isenabled() == is_collecting
