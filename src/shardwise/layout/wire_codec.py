"""Encode what a collective sends in fewer bits: a pure value that says how many bytes it takes, and turns values into
bytes and back. `CODES` has a row for each codec; `precision.gather` and `precision.reduce` name those they may use.

Each block of 256 elements has a scale of its own: its largest magnitude over the largest code. A slice that is sent is
a whole number of blocks (`GroupSpec.alignment`), and its bytes are the codes of all of them, then the scales. So a
parameter's blocks are the same in every layout, and with them its decoded bits.

A block with an infinity or a NaN decodes to no finite value, so that an overflow is seen on the other side. One whose
magnitudes are below about 1e-36 decodes to zeros.

>>> codec = WireCodec("int4")
>>> values = torch.zeros(512)
>>> values[:3] = torch.tensor([1.0, -0.5, 0.02])
>>> sent = codec.encode(values)
>>> sent.numel() == codec.num_bytes(512) == 512 // 2 + 2 * 4
True
>>> codec.decode(sent, values)[:3]
tensor([ 1.0000, -0.4286,  0.0000])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Final, Literal

import torch
from torch import Tensor

from shardwise.layout.precision import BLOCK_NUMEL, SCALE_BYTES

PART_NUMEL: Final = 2**18
"""Elements that are encoded or decoded at a time on a CPU, whose cache holds them; more take several times as long."""
DEVICE_PART_NUMEL: Final = 2**22
"""The same elsewhere, where each part costs some launches."""


@dataclass(frozen=True)
class CodeRule:
    """Describe the codes of a codec.

    Attributes:
        bits: of a code, at most 8; the codes of a block are whole bytes.
        largest: the code of a block's largest magnitude.
        max_error: the most that a value changes, as a share of its block's largest magnitude.
        to_codes: turns fp32 [n, s] values between -largest and largest, which it may change, into uint8 codes
            [n, s * bits / 8].
        to_values: turns such codes into [n, s] values of any dtype.
        gpu_kernel: the case of the Triton kernels that knows the codes: "even" ones are the nearest whole numbers, of 4
            or 8 bits. "" where torch's operations make them on a GPU too.
    """

    bits: int
    largest: float
    max_error: float
    to_codes: Callable[[Tensor], Tensor]
    to_values: Callable[[Tensor], Tensor]
    gpu_kernel: Literal["even", "fp8", ""] = ""


@dataclass(frozen=True)
class WireCodec:
    """Say how a collective's values are encoded; the name is one of `CODES`."""

    name: str

    @property
    def rule(self) -> CodeRule:
        """Return the row of the codec."""
        return CODES[self.name]

    def at_once(self, device: torch.device) -> int:
        """Return the elements that it encodes or decodes at a time, for which it takes memory."""
        return part_numel(device)

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of `numel` values, a multiple of 256."""
        return numel * self.rule.bits // 8 + numel // BLOCK_NUMEL * SCALE_BYTES

    def encode(
        self, values: Tensor, out: Tensor | None = None, start: int = 0, residual: Tensor | None = None
    ) -> Tensor:
        """Encode values.

        Args:
            values: [..., s] of a floating dtype; s is a multiple of 256, and so is `start`.
            out: uint8 [..., num_bytes(t)], contiguous, to write into: rows of t values, of which these are
                [start, start + s).
            residual: [..., s], added before, and replaced by what is rounded off; 0 where that is not finite, as an
                overflow is never part of a step. None for none.

        Returns:
            `out`, or a new tensor.
        """
        if out is None:
            out = self.empty(values)
        if residual is not None:
            exact = values.float().add_(residual) if values.dtype != torch.float32 else values + residual
            exact = exact.contiguous()
            self.encode(exact, out, start)
            exact.sub_(self.decode(out, torch.empty_like(exact), start))
            residual.copy_(exact.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))
            return out
        rows = values.reshape(-1, values.shape[-1])
        sent = out.view(rows.shape[0], out.shape[-1])
        for high, wide in _parts(rows):
            codes, scales = self.fields(sent, start, high, wide)
            self._encode(rows[high, wide], codes, scales)
        return out

    def empty(self, values: Tensor) -> Tensor:
        """Return memory for what `encode` makes of values [..., s]."""
        shape = (*values.shape[:-1], self.num_bytes(values.shape[-1]))
        return torch.empty(shape, dtype=torch.uint8, device=values.device)

    def decode(self, sent: Tensor, out: Tensor, start: int = 0) -> Tensor:
        """Decode what `encode` has returned, uint8 [..., num_bytes(t)].

        Args:
            out: [..., s] of a floating dtype, contiguous, to write the values [start, start + s) of each row into;
                `start` is a multiple of 256.

        Returns:
            `out`.
        """
        rows = out.view(-1, out.shape[-1])
        received = sent.view(rows.shape[0], sent.shape[-1])
        for high, wide in _parts(rows):
            codes, scales = self.fields(received, start, high, wide)
            self._decode(codes, scales, rows[high, wide])
        return out

    def fields(self, sent: Tensor, start: int, high: slice, wide: slice) -> tuple[Tensor, Tensor]:
        """Return the codes, uint8, and the scales, fp32, of some rows of values, or of a part of one: `wide` counts
        from `start`.
        """
        bits, first, last = self.rule.bits, start + wide.start, start + wide.stop
        num_codes = sent.shape[1] * BLOCK_NUMEL // self.num_bytes(BLOCK_NUMEL) * bits // 8
        codes = slice(first * bits // 8, last * bits // 8)
        scales = slice(first // BLOCK_NUMEL, last // BLOCK_NUMEL)
        return sent[high, codes], sent[high, num_codes:].view(torch.float32)[:, scales]

    def _encode(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Encode [rows, s] values into their fields."""
        blocks = values.unflatten(1, (-1, BLOCK_NUMEL)).float()
        largest = blocks.abs().amax(2).div_(self.rule.largest)
        largest.masked_fill_(largest < torch.finfo(torch.float32).tiny, 0)  # such a scale is too coarse for its codes
        scales.copy_(largest)
        shares = blocks.div(largest.where(largest != 0, 1).unsqueeze(2)).flatten(1)
        codes.copy_(self.rule.to_codes(shares))

    def _decode(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Decode fields into [rows, s] values."""
        blocks = self.rule.to_values(codes).unflatten(1, (-1, BLOCK_NUMEL)).float()
        out.unflatten(1, (-1, BLOCK_NUMEL)).copy_(blocks.mul_(scales.unsqueeze(2)))


def _packed(codes: Tensor) -> Tensor:
    """Return codes [n, s] of 4 bits as uint8 [n, s / 2], the first of two in the low half: two at a time are an int16.

    Other ways take strided steps, and three times as long on a CPU.
    """
    pairs = codes.view(torch.int16)
    return pairs.bitwise_and(0x0F).bitwise_or_(pairs.bitwise_right_shift(4).bitwise_and_(0xF0)).to(torch.uint8)


def _unpacked(packed: Tensor) -> Tensor:
    """Return int8 [n, 2 * s] of what `_packed` has returned, as int8; shifting to the right extends the sign."""
    pairs = packed.to(torch.int16)
    low = pairs.bitwise_left_shift(12).bitwise_right_shift_(12).bitwise_and_(0xFF)
    return pairs.bitwise_right_shift_(4).bitwise_left_shift_(8).bitwise_or_(low).view(torch.int8)


def _from_fp8(codes: Tensor) -> Tensor:
    if codes.device.type != "cpu":
        return codes.view(torch.float8_e4m3fn)
    # Ten times as fast as torch's conversion.
    return torch.index_select(_fp8_values(), 0, codes.flatten().int()).view(codes.shape)


@cache
def _fp8_values() -> Tensor:
    """Return the value of each code."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


# Of evenly spaced codes a value is off by half their distance.
CODES: Final[Mapping[str, CodeRule]] = MappingProxyType(
    {
        "int8": CodeRule(
            8,
            127.0,
            0.5 / 127,
            lambda values: values.round_().to(torch.int8).view(torch.uint8),
            lambda codes: codes.view(torch.int8),
            "even",
        ),
        "int4": CodeRule(
            4,
            7.0,
            0.5 / 7,
            lambda values: _packed(values.round_().to(torch.int8)),
            lambda codes: _unpacked(codes.view(torch.int8)),
            "even",
        ),
        # float8_e4m3fn, which is finer near 0.
        "fp8": CodeRule(
            8,
            448.0,
            16 / 448,
            lambda values: values.to(torch.float8_e4m3fn).view(torch.uint8),
            _from_fp8,
            "fp8",
        ),
    }
)
"""The codecs by name."""


def part_numel(device: torch.device) -> int:
    """Return the elements that are encoded or decoded at a time."""
    return PART_NUMEL if device.type == "cpu" else DEVICE_PART_NUMEL


def _parts(rows: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of [n, s] values, some at a time: what is made of them on the way is then small."""
    num_rows, numel = rows.shape
    most = part_numel(rows.device)
    for row in range(0, num_rows, max(1, most // max(1, numel))):
        for start in range(0, numel, most):
            yield slice(row, row + max(1, most // max(1, numel))), slice(start, min(start + most, numel))
