"""Encoded values that are written in parts have the codes of values that are written at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout.codec import codec_of
from shardwise.layout.precision import BLOCK_NUMEL
from shardwise.runtime.state_shards import TensorFlatState
from shardwise.zero.stored_state import EncodedValues

NUMEL = 3 * BLOCK_NUMEL + 100


def empty(states: str, numel: int = NUMEL) -> tuple[EncodedValues, list[torch.Tensor]]:
    """Encoded zeros, and their codes and scales."""
    codec = codec_of("exp_avg", states)
    assert codec is not None
    stored = codec.empty(numel, torch.device("cpu"))
    scales = None if stored.scales is None else TensorFlatState(stored.scales)
    tensors = [stored.codes] if stored.scales is None else [stored.codes, stored.scales]
    return EncodedValues(codec, TensorFlatState(stored.codes), scales), tensors


def values_of(seed: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("states", ["int8", "bf16"])
@given(data=st.data())
def test_parts_in_any_order_have_the_codes_of_the_whole(states: str, data: st.DataObject) -> None:
    values, before = values_of(0), values_of(1)
    whole, expected = empty(states)
    whole.write(0, values)
    found, codes = empty(states)
    found.write(0, before)  # other values, with other scales
    cuts = sorted({0, NUMEL, *data.draw(st.lists(st.integers(0, NUMEL), max_size=8))})
    ranges = data.draw(st.permutations(list(pairwise(cuts))))
    for number, (start, stop) in enumerate(ranges):
        found.write(start, values[start:stop])
        for low, high in ranges[: number + 1]:  # what was written can be read before its blocks are complete
            assert (found.read(low, high) - values[low:high]).abs().max() <= 0.02 * values.abs().max()
    for each, other in zip(codes, expected, strict=True):
        assert torch.equal(each, other)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, NUMEL), st.integers(0, NUMEL))))
    assert torch.equal(found.read(start, stop), whole.read(0, NUMEL)[start:stop])


def test_what_was_written_of_a_part_of_a_block_counts_once_it_is_settled() -> None:
    found, (codes, scales) = empty("int8")
    found.write(0, values_of(1))
    before = [codes.clone(), scales.clone()]
    found.write(300, torch.full((20,), 7.0))
    assert torch.equal(codes, before[0])
    found.settle()
    assert not torch.equal(codes, before[0])
    assert (scales != before[1]).nonzero().flatten().tolist() == [1]
    assert torch.equal(found.read(300, 320), torch.full((20,), 7.0))
    after = codes.clone()
    found.settle()
    assert torch.equal(codes, after)
