"""A program that compiles the kernels of codecs and dropout for sm_90, without a GPU, and prints what each spills."""

from __future__ import annotations

import torch
from triton.runtime import driver

from harness.compiled_kernels import NoGpu, spilled_bytes
from shardwise.comm.triton_codec import decode_launch, encode_launch, sum_launch
from shardwise.dropout.triton_dropout import drop_launch
from shardwise.layout.wire_codec import CODES, WireCodec
from shardwise.runtime.kernels import KernelLaunch

NUMEL = 1024
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def launches_of(name: str) -> dict[str, KernelLaunch]:
    """All launches of a codec, for two ranks in bf16."""
    codec, values = WireCodec(name), torch.empty(2, NUMEL, dtype=torch.bfloat16)
    sent, residual = codec.empty(values), torch.empty(2, NUMEL)
    return {
        f"{name}, encode": encode_launch(codec, values, sent, 0, None),
        f"{name}, encode with a residual": encode_launch(codec, values, sent, 0, residual),
        f"{name}, decode": decode_launch(codec, sent, values, 0),
        f"{name}, sum": sum_launch(codec, sent, residual[0], True),
    }


def dropouts() -> dict[str, KernelLaunch]:
    rows, columns = torch.zeros(64, dtype=torch.int64), torch.zeros(NUMEL, dtype=torch.int32)
    values = [torch.empty(64, NUMEL, dtype=dtype) for dtype in DTYPES]
    return {f"dropout, {each.dtype}": drop_launch(each, each, rows, columns, 2**62 + 1, 0.1) for each in values}


if __name__ == "__main__":
    torch.set_num_threads(1)
    driver.set_active(NoGpu())
    launches = dropouts()
    for each in CODES:
        launches |= launches_of(each)
    print({name: spilled_bytes(launch) for name, launch in launches.items()})
