"""The Triton kernels send the bits that torch's operations send, and compile for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from harness.kernel_programs import spilled_by
from shardwise.comm.encoded import KernelCodec, codec_on, encode_rows, sum_rows
from shardwise.layout.codec import BLOCK_NUMEL
from shardwise.layout.wire_codec import CODES, WireCodec

pytest.importorskip("triton")

from harness.interpreter import rounding_to_nearest

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCKS = 11  # two programs, the last of which has few blocks


@pytest.fixture(autouse=True)
def rounded() -> Iterator[None]:
    with rounding_to_nearest():
        yield


def values_of(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Blocks of many magnitudes: zeros, ties, numbers too small for a scale, and an overflow among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator).view(-1, BLOCK_NUMEL)
    values *= torch.randn(len(values), 1, generator=generator).mul(3).exp()
    values[1] = 0.0
    values[2] = torch.arange(BLOCK_NUMEL) / 2 - 64  # half of them are ties in int8, at a largest of 127
    values[2, 0] = 127.0
    values[3] *= 1e-41
    return values.view(shape).to(dtype)


def equal_bits(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_codes_and_values_have_the_bits_of_torchs_operations(name: str, dtype: torch.dtype) -> None:
    plain, ours = WireCodec(name), KernelCodec(name)
    values = values_of(2, BLOCKS * BLOCK_NUMEL, dtype=dtype)
    sent = plain.encode(values)
    assert torch.equal(ours.encode(values), sent)
    assert equal_bits(ours.decode(sent, torch.empty_like(values)), plain.decode(sent, torch.empty_like(values)))


@pytest.mark.parametrize("name", CODES)
def test_each_code_has_the_value_of_torchs_operations(name: str) -> None:
    codec = WireCodec(name)
    sent = torch.arange(codec.num_bytes(2 * BLOCK_NUMEL)).to(torch.uint8)
    sent[-8:].view(torch.float32).copy_(torch.tensor([1.0, 0.3]))
    found, expected = (each.decode(sent, torch.empty(2 * BLOCK_NUMEL)) for each in (KernelCodec(name), codec))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CODES)
def test_rows_that_do_not_follow_each_other_and_parts_of_rows_are_coded(name: str) -> None:
    plain, ours = WireCodec(name), KernelCodec(name)
    values = values_of(3, 2, 4 * BLOCK_NUMEL).transpose(0, 1)
    sent = plain.encode(values)
    assert torch.equal(ours.encode(values), sent)
    start = BLOCK_NUMEL
    found = torch.zeros_like(sent)
    ours.encode(values[..., :start], found)
    ours.encode(values[..., start:], found, start)
    assert torch.equal(found, sent)
    part = ours.decode(sent, torch.empty(2, 3, 2 * BLOCK_NUMEL), start)
    assert torch.equal(part, plain.decode(sent, torch.empty(2, 3, 4 * BLOCK_NUMEL))[..., start : 3 * start])


@pytest.mark.quick(7)
@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept_dtype", [torch.float32, torch.bfloat16])
def test_what_is_rounded_off_is_kept_as_torchs_operations_keep_it(
    name: str, dtype: torch.dtype, kept_dtype: torch.dtype
) -> None:
    values = values_of(2, BLOCKS * BLOCK_NUMEL, dtype=dtype)
    values[1, 5] = float("inf")
    before = values_of(2, BLOCKS * BLOCK_NUMEL, seed=1).mul(1e-2).to(kept_dtype)
    sent, kept = [], []
    for codec in (WireCodec(name), KernelCodec(name)):
        sent.append(torch.empty(2, codec.num_bytes(values.shape[1]), dtype=torch.uint8))
        kept.append(before.clone())
        encode_rows(codec, values, sent[-1], kept[-1])
    assert torch.equal(*kept)
    assert kept[0].isfinite().all()
    decoded = [WireCodec(name).decode(each, torch.empty(values.shape)) for each in sent]
    assert torch.equal(*(each.isfinite() for each in decoded))
    assert torch.equal(*(each.nan_to_num(0.0, 0.0, 0.0) for each in decoded))


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_block_with_an_overflow_has_no_finite_value(name: str, bad: float) -> None:
    values, codec = values_of(BLOCKS * BLOCK_NUMEL), KernelCodec(name)
    values[7 + 5 * BLOCK_NUMEL] = bad
    blocks = codec.decode(codec.encode(values), torch.empty_like(values)).view(-1, BLOCK_NUMEL)
    assert not blocks[5].isfinite().all()
    assert blocks[[*range(5), *range(6, BLOCKS)]].isfinite().all()


@pytest.mark.quick(19)
@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_sums_have_the_bits_of_torchs_operations(
    name: str, accumulate: bool, dtype: torch.dtype, num_rows: int
) -> None:
    rows = WireCodec(name).encode(values_of(num_rows, BLOCKS * BLOCK_NUMEL))
    sums = []
    for codec in (WireCodec(name), KernelCodec(name)):
        sums.append(torch.linspace(-1, 1, BLOCKS * BLOCK_NUMEL).to(dtype))
        sum_rows(codec, rows, sums[-1], accumulate)
    assert equal_bits(sums[1], sums[0])


def test_a_machine_without_triton_and_a_cpu_work_by_torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, device = WireCodec("int8"), torch.device("cuda", 0)
    assert isinstance(codec_on(device, codec), KernelCodec)
    assert codec_on(torch.device("cpu"), codec) is codec
    monkeypatch.setattr("shardwise.runtime.kernels.find_spec", lambda name: None)
    assert codec_on(device, codec) is codec


@pytest.mark.full
def test_the_kernels_compile_for_an_h100_without_one() -> None:
    kernels = [
        f"{name}, {kernel}" for name in CODES for kernel in ("encode", "encode with a residual", "decode", "sum")
    ]
    dropouts = [f"dropout, torch.{dtype}" for dtype in ("float32", "bfloat16", "float64")]
    assert spilled_by("compiled_codec.py") == dict.fromkeys([*kernels, *dropouts], 0)
