"""Keyed dropout, and codes for the wire, on one GPU: by one Triton kernel, and by torch's operations.

`ms` is the GPU's time a call, `host` that until all of it is enqueued. `GB/s` is what one pass over bf16 values must
read and write, over the time.

    python benchmarks/gpu_passes.py --json gpu_passes.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from gpu_optimizer import DEVICE, Measured, report
from shardwise.comm.encoded import KernelCodec, encode_rows, sum_rows
from shardwise.dropout import hash_rng
from shardwise.dropout.hash_rng import Samples, grid_of, keyed_dropout
from shardwise.layout.wire_codec import CODES, WireCodec

NUM_RANKS = 8
COLUMNS = 4096
BF16_BYTES, FP32_BYTES = 2, 4


def dropouts(numel: int) -> Iterator[Measured]:
    """Dropout by the kernel and by torch's operations, forward and backward."""
    values = torch.ones(1, numel // COLUMNS, COLUMNS, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    grid = grid_of(values.shape, None, Samples(0, 1), DEVICE)
    num_bytes = 2 * BF16_BYTES * values.numel()
    for how, has_kernels in (("kernel", True), ("torch", False)):
        with mock.patch.object(hash_rng, "has_kernels", return_value=has_kernels):
            yield f"dropout, {how}", 1, num_bytes, lambda: keyed_dropout(values, grid, 2**62 + 1, 0.1)
            dropped, gradient = keyed_dropout(values, grid, 2**62 + 1, 0.1), torch.ones_like(values)
            yield (
                f"dropout's backward, {how}",
                1,
                num_bytes,
                lambda dropped=dropped, gradient=gradient: torch.autograd.grad(
                    dropped, values, gradient, retain_graph=True
                ),
            )


def codings(numel: int) -> Iterator[Measured]:
    """The same of codecs; rows are of as many ranks."""
    values = torch.randn(NUM_RANKS, numel // NUM_RANKS, device=DEVICE).bfloat16()
    kept, total = torch.zeros_like(values, dtype=torch.float32), torch.zeros(numel // NUM_RANKS, device=DEVICE)
    for name in CODES:
        for how, codec in (("kernel", KernelCodec(name)), ("torch", WireCodec(name))):
            sent = codec.encode(values)
            in_codes, in_values = sent.numel(), BF16_BYTES * values.numel()
            yield (
                f"{name} encode, {how}",
                1,
                in_values + in_codes,
                lambda codec=codec, sent=sent: codec.encode(values, sent),
            )
            yield (
                f"{name} encode with feedback, {how}",
                1,
                in_values + in_codes + 2 * FP32_BYTES * kept.numel(),
                lambda codec=codec, sent=sent: encode_rows(codec, values, sent, kept),
            )
            yield (
                f"{name} decode, {how}",
                1,
                in_values + in_codes,
                lambda codec=codec, sent=sent: codec.decode(sent, values),
            )
            yield (
                f"{name} sum, {how}",
                1,
                in_codes + FP32_BYTES * total.numel(),
                lambda codec=codec, sent=sent: sum_rows(codec, sent, total, False),
            )


def main() -> None:
    """Measure dropout and codecs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=2**28)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report((calls(options.numel) for calls in (dropouts, codings)), options)


if __name__ == "__main__":
    main()
