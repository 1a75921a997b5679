"""Codes of 8 bits: exact bytes, small errors, the same codes once more, and the same blocks wherever a part begins."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.layout.codec import Codec, code_values, codec_of
from shardwise.layout.param_groups import check_blocks
from shardwise.layout.precision import BLOCK_NUMEL, is_encoded
from shardwise.layout.tp_sharding import FusedPart, ParamSplit

CPU = torch.device("cpu")
SIZES = st.one_of(st.integers(1, 3 * BLOCK_NUMEL), st.sampled_from([BLOCK_NUMEL, 4 * BLOCK_NUMEL]))


def values_of(seed: int, numel: int, is_signed: bool, spread: float) -> torch.Tensor:
    """Values over as many decades as `spread`, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (spread * (torch.rand(numel, generator=generator) - 0.5))
    found = torch.randn(numel, generator=generator) * sizes * (torch.rand(numel, generator=generator) > 0.1)
    return found if is_signed else found.square()


def encoded(codec: Codec, values: torch.Tensor):
    found = codec.empty(values.numel(), CPU)
    found.encode(values.clone())
    return found


@given(st.integers(0, 2**20), SIZES, st.booleans(), st.floats(0, 12))
def test_what_is_decoded_is_near_and_has_the_same_codes_again(seed, numel, is_signed, spread) -> None:
    codec = Codec("int8", is_signed)
    values = values_of(seed, numel, is_signed, spread)
    once = encoded(codec, values)
    found = once.decode()
    again = encoded(codec, found)
    assert torch.equal(again.codes, once.codes)
    assert torch.equal(again.scales, once.scales)
    assert codec.num_bytes(numel) == once.codes.nbytes + once.scales.nbytes
    for start in range(0, numel, BLOCK_NUMEL):
        block, near = values[start : start + BLOCK_NUMEL], found[start : start + BLOCK_NUMEL]
        largest = block.abs().max()
        error = (near - block).abs()
        assert (error <= 0.0095 * largest).all()
        assert (error <= 0.075 * block.abs())[block.abs() >= 0.1 * largest].all()
        assert near.abs().max() == largest


@given(st.integers(0, 2**20), st.integers(1, 6), st.booleans())
def test_a_part_that_begins_at_a_block_has_the_codes_of_the_whole(seed, num_blocks, is_signed) -> None:
    codec, numel = Codec("int8", is_signed), num_blocks * BLOCK_NUMEL + 100
    values = values_of(seed, numel, is_signed, 3.0)
    whole = encoded(codec, values)
    for block in range(num_blocks + 1):
        start, stop = block * BLOCK_NUMEL, min(numel, (block + 1) * BLOCK_NUMEL)
        part = encoded(codec, values[start:stop])
        assert torch.equal(part.codes, whole.part(start, stop).codes)
        assert torch.equal(part.scales, whole.part(start, stop).scales)


@pytest.mark.parametrize("is_signed", [True, False])
def test_zeros_outliers_and_small_squares(is_signed: bool) -> None:
    codec = Codec("int8", is_signed)
    assert torch.equal(codec.empty(300, CPU).decode(), torch.zeros(300))
    assert torch.equal(encoded(codec, torch.zeros(300)).decode(), torch.zeros(300))
    values = torch.full((BLOCK_NUMEL,), 1e-3)
    values[7] = 1e30
    found = encoded(codec, values).decode()
    assert found[7] == values[7]
    assert found.isfinite().all()
    # A square that became 0 would make its element's next update huge.
    assert (found[:7] > 0).all() if not is_signed else (found[:7] == 0).all()


def test_bf16_states_are_rounded() -> None:
    codec = codec_of("exp_avg", "bf16")
    assert codec is not None
    values = torch.randn(1000)
    assert torch.equal(encoded(codec, values).decode(), values.bfloat16().float())
    assert codec.num_bytes(1000) == 2000


def test_small_parameters_keep_their_states_by_their_size_as_a_whole() -> None:
    assert [is_encoded(shape) for shape in ((4095,), (4096,), (64, 63), (64, 64))] == [False, True, False, True]
    assert codec_of("exp_avg", "master") is None
    assert [codec_of(name, "int8").is_signed for name in ("exp_avg", "exp_avg_sq", "sum")] == [True, False, False]


def test_a_tensor_axis_that_cuts_blocks_is_refused() -> None:
    rows = ParamSplit((512, 96), degree=2, dim=0, parts=(FusedPart(512),))
    columns = ParamSplit((64, 512), degree=2, dim=1, parts=(FusedPart(512),))
    check_blocks(
        {"a": rows, "b": columns, "small": ParamSplit((8, 8), 2, 1, (FusedPart(8),))}, 2, "precision.states=int8"
    )
    narrow = ParamSplit((512, 256), degree=2, dim=1, parts=(FusedPart(256),))
    with refused("block-over-tp", "precision.gather=fp8", "mesh.tp=2", "c", "[512, 256]", "256"):
        check_blocks({"c": narrow}, "tp", "precision.gather=fp8")
    assert math.prod(narrow.local_shape) % BLOCK_NUMEL == 0, "the size alone does not tell"


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize(("start", "stop"), [(0, 65536), (0, 511), (256, 1024), (1, 513)])
def test_two_codes_at_a_time_are_looked_up_as_each_is(name: str, start: int, stop: int) -> None:
    codec = codec_of(name, "int8")
    assert codec is not None
    bytes_of = torch.arange(256, dtype=torch.uint8)
    codes = bytes_of.repeat(256) + bytes_of.repeat_interleave(256)
    encoded = codec.empty(stop - start, CPU)
    assert encoded.scales is not None
    encoded.scales.fill_(1.0)
    found = dataclasses.replace(encoded, codes=codes[start:stop]).decode()
    assert torch.equal(found, code_values(codec.is_signed)[codes[start:stop].long()])
