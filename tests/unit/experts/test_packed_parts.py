"""What unpacks one rank's experts, against packing by hand: one scale for each block, and scales of scales."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.refusals import refused
from shardwise.construction.experts import part_of_packed


def state_of(shape: tuple[int, ...], blocksize: int, nested: int | None = None) -> Any:
    num_scales = torch.Size(shape).numel() // blocksize
    scales = torch.arange(float(num_scales))
    of_scales = None if nested is None else SimpleNamespace(absmax=scales[::nested] / 2, blocksize=nested, state2=None)
    return SimpleNamespace(shape=torch.Size(shape), absmax=scales, blocksize=blocksize, state2=of_scales)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_each_rank_has_the_scales_of_its_experts(ep: int) -> None:
    state = state_of((4, 8, 16), 64, nested=2)
    parts = [part_of_packed(state, "experts.down_proj", ep, rank) for rank in range(ep)]
    assert {tuple(part.shape) for part in parts} == {(4 // ep, 8, 16)}
    assert torch.cat([part.absmax for part in parts]).equal(state.absmax)
    assert torch.cat([part.state2.absmax for part in parts]).equal(state.state2.absmax)
    assert tuple(state.shape) == (4, 8, 16)


@pytest.mark.parametrize(("blocksize", "nested", "words"), [(48, None, "blocks of 48"), (64, 4, "blocks of 4")])
def test_blocks_that_experts_share_are_refused(blocksize: int, nested: int | None, words: str) -> None:
    with refused("opaque-over-ep", "mesh.ep=2", "layers.0.down_proj", words):
        part_of_packed(state_of((6, 8, 16), blocksize, nested), "layers.0.down_proj", 2, 0)
