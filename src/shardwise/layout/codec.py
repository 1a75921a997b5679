"""Encode a state in fewer bits: a pure value that says how many bytes it takes, and turns values into codes and back.

Blocks of 256 elements are laid over the whole parameter, in its own order, and each has a scale of its own. A shard's
borders are block borders (`GroupSpec.alignment`), so codes, scales and updates are the same bits in every layout. The
codes are those of dynamic tree quantization (Dettmers et al. 2022, arXiv 2110.02861, section 1.3): 256 values between
-1 and 1, or 0 and 1 for what is never negative, close together near 0, times the block's element of largest magnitude.
So what is decoded and encoded again has the same bits: a checkpoint may hold decoded values.

>>> codec = Codec("int8", is_signed=True)
>>> codec.num_bytes(1000)                                   # 1,000 codes and 4 scales of 4 bytes
1016
>>> values = torch.tensor([1.0, -0.5, 0.0, 1e-4])
>>> encoded = codec.empty(4, values.device)
>>> encoded.encode(values)
>>> encoded.decode()
tensor([ 1.0000e+00, -5.0078e-01,  0.0000e+00,  8.8750e-05])
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

import torch
from torch import Tensor

from shardwise.layout.precision import BLOCK_NUMEL, DTYPE_BYTES, SCALE_BYTES, StatesDtype, StoredDtype
from shardwise.optim.rules import STORED_STATES

NUM_DROPPED: Final = 15
"""Last bits of a float by which no code is found: its sign, exponent and 8 bits of its mantissa tell codes apart."""

_NUM_KEYS: Final = 2**17
_UNSIGNED: Final = frozenset(state.name for state in STORED_STATES if not state.is_signed)


@dataclass(frozen=True)
class Codec:
    """Say how a state is encoded.

    Attributes:
        name: "int8" for codes with a scale a block; "bf16" for rounded values.
    """

    name: Literal["int8", "bf16"]
    is_signed: bool

    @property
    def dtype(self) -> StoredDtype:
        """Return the dtype of the codes; where all are 0, so are the values."""
        return "uint8" if self.name == "int8" else "bf16"

    def num_scales(self, numel: int) -> int:
        """Return the number of scales, which are in fp32, of `numel` values that begin at a block border."""
        return -(-numel // BLOCK_NUMEL) if self.name == "int8" else 0

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of `numel` values that begin at a block border."""
        return numel * DTYPE_BYTES[self.dtype] + self.num_scales(numel) * SCALE_BYTES

    def empty(self, numel: int, device: torch.device) -> Encoded:
        """Return encoded zeros."""
        if self.name == "bf16":
            return Encoded(self, torch.zeros(numel, dtype=torch.bfloat16, device=device), None)
        scales = torch.zeros(self.num_scales(numel), dtype=torch.float32, device=device)
        return Encoded(self, torch.zeros(numel, dtype=torch.uint8, device=device), scales)


@dataclass(frozen=True)
class Encoded:
    """Hold encoded values: 1-D `codes`, and a scale of each block where the codec has scales."""

    codec: Codec
    codes: Tensor
    scales: Tensor | None

    @property
    def numel(self) -> int:
        """Return the number of values."""
        return self.codes.numel()

    def part(self, start: int, stop: int) -> Encoded:
        """Return the values [start, stop), over the same memory; `start` is a block border."""
        blocks = slice(start // BLOCK_NUMEL, -(-stop // BLOCK_NUMEL))
        return Encoded(self.codec, self.codes[start:stop], None if self.scales is None else self.scales[blocks])

    def encode(self, values: Tensor) -> None:
        """Take values, 1-D, fp32 or wider and as many, each as the nearest code; `values` is overwritten."""
        if self.scales is None:
            self.codes.copy_(values)
            return
        for start, stop in self._runs():
            rows = values[start:stop].view(-1, min(BLOCK_NUMEL, stop - start))  # [blocks, 256], or the short last block
            part = self.part(start, stop)
            scale = _largest(rows) if self.codec.is_signed else rows.amax(1)
            part.scales.copy_(scale)  # type: ignore[union-attr]
            rows.div_(scale.where(scale != 0, 1).unsqueeze(1))
            part.codes.copy_(_nearest(values[start:stop], self.codec.is_signed))

    def decode(self) -> Tensor:
        """Return the values in fp32."""
        if self.scales is None:
            return self.codes.float()
        values = _values_of(self.codes, self.codec.is_signed)
        for start, stop in self._runs():
            scales = self.part(start, stop).scales
            values[start:stop].view(-1, min(BLOCK_NUMEL, stop - start)).mul_(scales.unsqueeze(1))  # type: ignore[union-attr]
        return values

    def _runs(self) -> list[tuple[int, int]]:
        """Return the range of the whole blocks, and that of a short last one."""
        whole = self.numel // BLOCK_NUMEL * BLOCK_NUMEL
        return [(start, stop) for start, stop in ((0, whole), (whole, self.numel)) if start < stop]


def codec_of(state: str, dtype: StatesDtype) -> Codec | None:
    """Return the codec of an optimizer's state under `precision.states`; None for none."""
    return None if dtype == "master" else Codec(dtype, is_signed=state not in _UNSIGNED)


def _values_of(codes: Tensor, is_signed: bool) -> Tensor:
    """Look up the values of codes, two at a time where the processor does: a lookup costs as much for either."""
    if codes.device.type != "cpu" or codes.numel() % 2 or codes.storage_offset() % 2:
        return torch.index_select(code_values(is_signed, codes.device), 0, codes.int())
    pairs = codes.view(torch.int16).int().bitwise_and_(2**16 - 1)
    return torch.index_select(pair_values(is_signed), 0, pairs).view(torch.float32)


def _largest(block: Tensor) -> Tensor:
    """Return each row's element of the largest magnitude, with its sign: it is then the code of 1, which is exact."""
    high, low = block.amax(1), block.amin(1)
    return high.where(high >= -low, low)


@cache
def code_values(is_signed: bool, device: torch.device = torch.device("cpu")) -> Tensor:  # noqa: B008 (a constant)
    """Return the values by their codes: 0, what is above it, rising, and then what is below it.

    Above and below they are decades, each cut evenly, twice as finely as the next smaller one.
    """
    found = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not is_signed)) + 1, dtype=torch.float64)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        found += [*middles, *(-middle for middle in middles if is_signed)]
    found.sort(key=lambda each: (each < 0, each))
    return torch.tensor(found, dtype=torch.float64).to(torch.float32).to(device)


@cache
def pair_values(is_signed: bool) -> Tensor:
    """Return the values of each pair of codes, as one number of 64 bits; the first code is the low byte."""
    values = code_values(is_signed)
    return torch.stack([values.repeat(256), values.repeat_interleave(256)], 1).view(torch.float64).flatten()


def _nearest(shares: Tensor, is_signed: bool) -> Tensor:
    """Return the codes of values between -1 and 1, by a table over the first 17 bits of each, rounded."""
    bits = shares.to(torch.float32).view(torch.int32) + (1 << (NUM_DROPPED - 1))
    keys = bits.bitwise_right_shift_(NUM_DROPPED).bitwise_and_(_NUM_KEYS - 1)
    return torch.index_select(code_table(is_signed, shares.device), 0, keys)


@cache
def code_table(is_signed: bool, device: torch.device) -> Tensor:
    """Return the nearest code of each float whose other bits are 0, by its first 17 bits."""
    values, codes_of = code_values(is_signed).sort()
    keys = torch.arange(_NUM_KEYS, dtype=torch.int64) << NUM_DROPPED
    floats = (keys - (keys >> 31 << 32)).to(torch.int32).view(torch.float32)
    codes = codes_of[torch.bucketize(floats.nan_to_num(nan=0.0).clamp(-1, 1), (values[1:] + values[:-1]) / 2)]
    if not is_signed:  # a mean of squares that becomes 0 would make the next update of its element as large as 1 / eps
        codes[1:].clamp_(min=1)
    return codes.to(torch.uint8).to(device)
