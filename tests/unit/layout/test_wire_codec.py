"""Codecs of collectives: exact bytes, bounded errors, blocks that do not depend on how they are cut."""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config.sections import Gather, Reduce
from shardwise.layout import wire_codec
from shardwise.layout.precision import BLOCK_NUMEL
from shardwise.layout.wire_codec import CODES, WireCodec


def _values(num_blocks: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(num_blocks, 1, generator=generator).mul(8).exp()
    return (torch.randn(num_blocks, BLOCK_NUMEL, generator=generator) * sizes).flatten().to(dtype)


@pytest.mark.parametrize("name", CODES)
@given(num_blocks=st.integers(1, 6), seed=st.integers(0, 99), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=20, deadline=None)
def test_errors_are_at_most_what_the_row_says(name, num_blocks, seed, dtype):
    values = _values(num_blocks, seed, dtype)
    codec = WireCodec(name)
    sent = codec.encode(values)
    assert sent.dtype == torch.uint8
    assert sent.numel() == codec.num_bytes(values.numel())
    decoded = codec.decode(sent, torch.empty(values.numel(), dtype=torch.float32))
    blocks = values.float().view(-1, BLOCK_NUMEL)
    error = (decoded.view_as(blocks) - blocks).abs().amax(1) / blocks.abs().amax(1)
    assert error.max() <= CODES[name].max_error * 1.001


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("num_slices", [2, 3, 6])
def test_slices_decode_to_the_bits_of_the_whole(name, num_slices):
    values, codec = _values(6, seed=1), WireCodec(name)
    whole = codec.decode(codec.encode(values), torch.empty_like(values))
    rows = values.view(num_slices, -1)
    assert torch.equal(codec.decode(codec.encode(rows), torch.empty_like(rows)).flatten(), whole)


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize(("num_rows", "num_blocks"), [(1, 11), (3, 5), (9, 1), (7, 2)])
def test_values_that_are_coded_in_parts_are_the_same(name, num_rows, num_blocks, monkeypatch):
    values, codec = _values(num_rows * num_blocks, seed=4).view(num_rows, -1), WireCodec(name)
    sent = codec.encode(values)
    whole = codec.decode(sent, torch.empty_like(values))
    monkeypatch.setattr(wire_codec, "PART_NUMEL", 4 * BLOCK_NUMEL)
    assert torch.equal(codec.encode(values), sent)
    assert torch.equal(codec.decode(sent, torch.empty_like(values)), whole)


@pytest.mark.parametrize("name", CODES)
def test_what_is_decoded_decodes_to_the_same_codes(name):
    values, codec = _values(4, seed=2), WireCodec(name)
    once = codec.decode(codec.encode(values), torch.empty_like(values))
    twice = codec.decode(codec.encode(once), torch.empty_like(values))
    torch.testing.assert_close(once, twice, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_block_with_an_overflow_has_no_finite_value(name, bad):
    values, codec = _values(2, seed=3), WireCodec(name)
    values[7] = bad
    decoded = codec.decode(codec.encode(values), torch.empty_like(values))
    assert not decoded[:BLOCK_NUMEL].isfinite().all()
    assert decoded[BLOCK_NUMEL:].isfinite().all()


@pytest.mark.parametrize("name", CODES)
def test_zeros_stay_zeros_and_one_outlier_hides_one_block_only(name):
    values, codec = torch.zeros(3 * BLOCK_NUMEL), WireCodec(name)
    values[BLOCK_NUMEL], values[2 * BLOCK_NUMEL :] = 1e30, 1.0
    assert torch.equal(codec.decode(codec.encode(values), torch.empty_like(values)), values)


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("magnitude", [1e-36, 9.6e-43, 2.49e-43])
def test_values_too_small_for_a_scale_do_not_grow(name, magnitude):
    values, codec = torch.linspace(-1, 1, BLOCK_NUMEL) * magnitude, WireCodec(name)
    decoded = codec.decode(codec.encode(values), torch.empty_like(values))
    assert ((decoded - values).abs() <= values.abs()).all()


@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("int4", 7)])
def test_evenly_spaced_codes_are_whole_numbers_of_a_scale(name, largest):
    values, codec = _values(4, seed=5), WireCodec(name)
    scales = values.view(-1, BLOCK_NUMEL).abs().amax(1, keepdim=True) / largest
    expected = (values.view(-1, BLOCK_NUMEL) / scales).round() * scales
    assert torch.equal(codec.decode(codec.encode(values), torch.empty_like(values)), expected.flatten())


@pytest.mark.parametrize("name", sorted({*get_args(Gather), *get_args(Reduce)} - {"param", "fp32"}))
def test_what_the_config_names_is_a_codec(name: str) -> None:
    assert WireCodec(name).num_bytes(BLOCK_NUMEL) < 2 * BLOCK_NUMEL
