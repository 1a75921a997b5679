"""Encode what a collective sends in fewer bits: a pure value that says how many bytes it takes, and turns values into
bytes and back.

Each block of 256 elements has a scale of its own: its largest magnitude over the largest code. A slice that is sent is
a whole number of blocks (`GroupSpec.alignment`), and its bytes are the codes of all of them, then the scales. So a
parameter's blocks are the same in every layout, and with them its decoded bits.

A block with an infinity or a NaN decodes to no finite value, so that an overflow is seen on the other side.

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

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import torch
from torch import Tensor

from shardwise.layout.codec import BLOCK_NUMEL, SCALE_BYTES

WireCodecName = Literal["int8", "int4", "fp8"]
_BITS: Final[Mapping[str, int]] = MappingProxyType({"int8": 8, "int4": 4, "fp8": 8})
_LARGEST: Final[Mapping[str, float]] = MappingProxyType({"int8": 127.0, "int4": 7.0, "fp8": 448.0})


@dataclass(frozen=True)
class WireCodec:
    """Say how a collective's values are encoded.

    Attributes:
        name: "int8" or "int4" for evenly spaced codes; "fp8" for float8_e4m3fn, which is finer near 0.
    """

    name: WireCodecName

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of `numel` values, a multiple of 256."""
        return numel * _BITS[self.name] // 8 + numel // BLOCK_NUMEL * SCALE_BYTES

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """Encode values.

        Args:
            values: [..., s] of a floating dtype, contiguous; s is a multiple of 256.
            out: uint8 [..., num_bytes(s)], contiguous, to write into.

        Returns:
            `out`, or a new tensor.
        """
        rows = values.view(-1, values.shape[-1])
        num_codes = rows.shape[1] * _BITS[self.name] // 8
        if out is None:
            shape = (*values.shape[:-1], self.num_bytes(rows.shape[1]))
            out = torch.empty(shape, dtype=torch.uint8, device=values.device)
        sent = out.view(rows.shape[0], -1)
        blocks = rows.unflatten(1, (-1, BLOCK_NUMEL)).float()
        scales = blocks.abs().amax(2).div_(_LARGEST[self.name])
        sent[:, num_codes:].view(torch.float32).copy_(scales)
        shares = blocks.div(scales.where(scales != 0, 1).unsqueeze(2)).flatten(1)
        if self.name == "fp8":
            sent[:, :num_codes].view(torch.float8_e4m3fn).copy_(shares)
            return out
        codes = shares.round_().to(torch.int8)
        if self.name == "int4":
            codes = codes[:, 0::2].bitwise_and(15).bitwise_or_(codes[:, 1::2].bitwise_left_shift(4))
        sent[:, :num_codes].view(torch.int8).copy_(codes)
        return out

    def decode(self, sent: Tensor, out: Tensor) -> Tensor:
        """Decode what `encode` has returned.

        Args:
            sent: uint8 [..., num_bytes(s)], contiguous.
            out: [..., s] of a floating dtype, contiguous, to write into.

        Returns:
            `out`.
        """
        rows = out.view(-1, out.shape[-1])
        sent = sent.view(rows.shape[0], -1)
        num_codes = rows.shape[1] * _BITS[self.name] // 8
        codes = sent[:, :num_codes].view(torch.float8_e4m3fn if self.name == "fp8" else torch.int8)
        if self.name == "int4":  # the low half first; shifting back to the right extends its sign
            low = codes.bitwise_left_shift(4).bitwise_right_shift_(4)
            codes = torch.stack([low, codes.bitwise_right_shift(4)], 2).flatten(1)
        scales = sent[:, num_codes:].view(torch.float32).unsqueeze(2)
        rows.unflatten(1, (-1, BLOCK_NUMEL)).copy_(codes.unflatten(1, (-1, BLOCK_NUMEL)).float().mul_(scales))
        return out
