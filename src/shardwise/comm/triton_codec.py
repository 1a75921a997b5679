"""Encode and decode what collectives send by Triton kernels, in one pass each: the bits are those of `WireCodec`.

A kernel takes blocks of 256 elements, some a program, and what it takes and makes is as fast memory allows: it reads
values, and what earlier encodings have rounded off, and writes codes and scales; or reads the codes of all ranks, and
writes their sum.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.layout.codec import BLOCK_NUMEL
from shardwise.layout.wire_codec import WireCodec
from shardwise.runtime.kernels import KernelLaunch

_PROGRAM_BLOCKS: Final = 8
_NUM_WARPS: Final = 4
_BLOCK = tl.constexpr(BLOCK_NUMEL)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_INFINITY = tl.constexpr(float("inf"))
# 1.5 * 2^23: in a sum with it the last bits are the nearest whole number, ties to even.
_ROUNDING = tl.constexpr(12582912.0)


class ValueRows(NamedTuple):
    """Holds a pointer to rows of values that are contiguous, and the strides of an outer and an inner index of rows."""

    at: Any
    outer: int
    inner: int


class CodeRows(NamedTuple):
    """Holds pointers to the codes and scales of rows, and the strides between rows: of bytes, and of scales."""

    codes: Any
    scales: Any
    codes_stride: int
    scales_stride: int


class BlockCounts(NamedTuple):
    """Counts all blocks, those of a row, and the rows of an inner index."""

    num_blocks: int
    in_row: int
    num_inner: int


class CodeShape(NamedTuple):
    """Holds what a kernel is compiled for; `BLOCKS` is of one program.

    Attributes:
        ADDS: values have a residual; or a sum is added to what is there.
    """

    CODES: str
    LARGEST: float
    BITS: int
    BLOCKS: int
    ADDS: bool
    IS_WIDE: bool = False


def encode_launch(codec: WireCodec, values: Tensor, sent: Tensor, start: int, residual: Tensor | None) -> KernelLaunch:
    """Return the launch of `KernelCodec.encode`; the arguments are those, and `sent` is what it writes."""
    rows = _three_dims(values)
    outer, inner, numel = rows.shape
    residual_rows = rows if residual is None else _three_dims(residual)
    arguments = (
        ValueRows(rows, *rows.stride()[:2]),
        ValueRows(residual_rows, *residual_rows.stride()[:2]),
        _code_rows(codec, sent.view(outer * inner, -1), start, numel),
        _counts(outer * inner, numel, inner),
        _shape(codec, adds=residual is not None),
    )
    return _launch(_encode_blocks, arguments, outer * inner * numel)


def decode_launch(codec: WireCodec, sent: Tensor, out: Tensor, start: int) -> KernelLaunch:
    """Return the launch of `KernelCodec.decode`, whose arguments these are."""
    rows = out.view(-1, out.shape[-1])
    num_rows, numel = rows.shape
    coded = _code_rows(codec, sent.view(num_rows, -1), start, numel)
    return _launch(_decode_blocks, (coded, rows, _counts(num_rows, numel, 1), _shape(codec)), rows.numel())


def sum_launch(codec: WireCodec, sent: Tensor, out: Tensor, accumulate: bool) -> KernelLaunch:
    """Return the launch that decodes rows, and sums them in their order; `out` [s] is contiguous."""
    num_rows, numel = sent.shape[0], out.numel()
    counts = _counts(num_rows, numel, 1)._replace(num_blocks=numel // BLOCK_NUMEL)
    shape = _shape(codec, adds=accumulate, is_wide=out.dtype == torch.float64)
    return _launch(_sum_blocks, (_code_rows(codec, sent, 0, numel), out, num_rows, counts, shape), numel)


def _launch(kernel: Any, arguments: tuple[Any, ...], numel: int) -> KernelLaunch:
    grid = (triton.cdiv(numel, _PROGRAM_BLOCKS * BLOCK_NUMEL), 1, 1)
    return KernelLaunch(kernel, grid, arguments, _NUM_WARPS, 1, fuses=False)


def _three_dims(values: Tensor) -> Tensor:
    """View [..., s] as [outer, inner, s]."""
    return values.view((1,) * (3 - values.ndim) + values.shape)


def _code_rows(codec: WireCodec, sent: Tensor, start: int, numel: int) -> CodeRows:
    codes, scales = codec.fields(sent, start, slice(None), slice(0, numel))
    return CodeRows(codes, scales, codes.stride(0), scales.stride(0))


def _counts(num_rows: int, numel: int, num_inner: int) -> BlockCounts:
    return BlockCounts(num_rows * numel // BLOCK_NUMEL, numel // BLOCK_NUMEL, num_inner)


def _shape(codec: WireCodec, *, adds: bool = False, is_wide: bool = False) -> CodeShape:
    return CodeShape(codec.rule.gpu_kernel, codec.rule.largest, codec.rule.bits, _PROGRAM_BLOCKS, adds, is_wide)


@triton.jit
def _encode_blocks(values: tl.tuple, residual: tl.tuple, sent: tl.tuple, counts: tl.tuple, shape: tl.constexpr) -> None:
    """Encode the blocks of a program; with a residual, add it first, and keep in it what is rounded off."""
    blocks = tl.program_id(0).to(tl.int64) * shape.BLOCKS + tl.arange(0, shape.BLOCKS)
    is_there = (blocks < counts.num_blocks)[:, None]
    row, column = blocks // counts.in_row, blocks % counts.in_row
    outer, inner = row // counts.num_inner, row % counts.num_inner
    in_block = tl.arange(0, _BLOCK)[None, :]
    values_at = values.at + (outer * values.outer + inner * values.inner + column * _BLOCK)[:, None] + in_block
    exact = tl.load(values_at, mask=is_there, other=0.0).to(tl.float32)
    residual_at = residual.at + (outer * residual.outer + inner * residual.inner + column * _BLOCK)[:, None] + in_block
    if shape.ADDS:
        exact += tl.load(residual_at, mask=is_there, other=0.0).to(tl.float32)
    # As whole numbers, magnitudes have the same order, and a NaN is above them all.
    largest = tl.max(exact.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    scales = tl.div_rn(largest, tl.full([shape.BLOCKS], shape.LARGEST, tl.float32))
    scales = tl.where(scales < _TINY, 0.0, scales)  # such a scale is too coarse for its codes
    shares = tl.div_rn(exact, tl.where(scales != 0, scales, 1.0)[:, None])
    codes = _fp8_codes(shares) if shape.CODES == "fp8" else (shares + _ROUNDING).to(tl.int32, bitcast=True)
    tl.store(sent.scales + row * sent.scales_stride + column, scales, mask=blocks < counts.num_blocks)
    _store_codes(codes, sent, row, column, is_there, shape)
    if shape.ADDS:
        rounded = exact - _values_of(codes, shape) * scales[:, None]
        # An overflow is never part of a step.
        rounded = tl.where(tl.abs(rounded) < _INFINITY, rounded, 0.0)
        tl.store(residual_at, rounded.to(residual.at.dtype.element_ty), mask=is_there)


@triton.jit
def _decode_blocks(sent: tl.tuple, out: tl.tensor, counts: tl.tuple, shape: tl.constexpr) -> None:
    """Decode the blocks of a program into rows that follow each other."""
    blocks = tl.program_id(0).to(tl.int64) * shape.BLOCKS + tl.arange(0, shape.BLOCKS)
    is_there = (blocks < counts.num_blocks)[:, None]
    values = _decoded(sent, blocks // counts.in_row, blocks % counts.in_row, is_there, shape)
    at = out + blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    tl.store(at, values.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _sum_blocks(sent: tl.tuple, out: tl.tensor, num_rows: tl.tensor, counts: tl.tuple, shape: tl.constexpr) -> None:
    """Sum blocks over the rows, in fp32 or wider, and add what `out` has where shape.ADDS."""
    wide: tl.constexpr = tl.float64 if shape.IS_WIDE else tl.float32
    blocks = tl.program_id(0).to(tl.int64) * shape.BLOCKS + tl.arange(0, shape.BLOCKS)
    is_there = (blocks < counts.num_blocks)[:, None]
    total = _decoded(sent, blocks * 0, blocks, is_there, shape).to(wide)
    for row in range(1, num_rows):
        total += _decoded(sent, blocks * 0 + row, blocks, is_there, shape).to(wide)
    at = out + blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    if shape.ADDS:
        total += tl.load(at, mask=is_there, other=0.0).to(wide)
    tl.store(at, total.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _store_codes(
    codes: tl.tensor, sent: tl.tuple, row: tl.tensor, column: tl.tensor, is_there: tl.tensor, shape: tl.constexpr
) -> None:
    """Store the last bits of codes [blocks, 256]; of 4 bits two are a byte, the first in the low half."""
    num_bytes: tl.constexpr = _BLOCK * shape.BITS // 8
    at = sent.codes + (row * sent.codes_stride + column * num_bytes)[:, None] + tl.arange(0, num_bytes)[None, :]
    if shape.BITS == 4:
        first, second = tl.split(tl.reshape(codes, [shape.BLOCKS, num_bytes, 2]))
        codes = (first & 0x0F) | ((second & 0x0F) << 4)
    tl.store(at, (codes & 0xFF).to(tl.uint8), mask=is_there)


@triton.jit
def _decoded(sent: tl.tuple, row: tl.tensor, column: tl.tensor, is_there: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Return the values of blocks [blocks, 256] in fp32."""
    num_bytes: tl.constexpr = _BLOCK * shape.BITS // 8
    at = sent.codes + (row * sent.codes_stride + column * num_bytes)[:, None] + tl.arange(0, num_bytes)[None, :]
    codes = tl.load(at, mask=is_there, other=0).to(tl.int32)
    if shape.BITS == 4:
        codes = tl.interleave(codes, codes >> 4)
    first = sent.scales + row * sent.scales_stride + column
    return _values_of(codes, shape) * tl.load(first[:, None], mask=is_there, other=0.0)


@triton.jit
def _values_of(codes: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Return the numbers that the last bits of int32 codes stand for, in fp32."""
    if shape.CODES == "fp8":
        magnitude = codes & 0x7F
        # Below 8 it counts steps of 2^-9; above, its exponent has another bias than that of fp32.
        small = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
        bits = tl.where(magnitude < 8, small, (magnitude << 20) + (120 << 23))
        bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits) | ((codes & 0x80) << 24)
        value = bits.to(tl.float32, bitcast=True)
    else:
        value = ((codes << (32 - shape.BITS)) >> (32 - shape.BITS)).to(tl.float32)  # the shift keeps the sign
    return value


@triton.jit
def _fp8_codes(shares: tl.tensor) -> tl.tensor:
    """Return the codes of the nearest float8_e4m3fn, ties to even, as int32: GPUs before sm_89 have no instruction."""
    bits = shares.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # In a sum with 2^14 the last bits count steps of 2^-9, the distance of the numbers below 2^-6.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    large = (magnitude + ((magnitude >> 20) & 1) + 0x7FFFF - (120 << 23)) >> 20
    code = tl.where(magnitude < (121 << 23), small, large)
    code = tl.where(magnitude >= (1087 << 20), 0x7F, code)
    return code | ((bits >> 24) & 0x80)
