"""A program that compiles attention's kernels for sm_90, where there need be no GPU, and prints what each spills."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from shardwise.attention.backends import Draw, ScoreModifiers
from shardwise.attention.block_layout import BlockLayout
from shardwise.attention.triton import backward
from shardwise.attention.triton.launch import (
    forward_launches,
    key_launches,
    prepare_launch,
    query_launches,
    rows_of,
)
from shardwise.attention.triton.lut import HeadGroups
from shardwise.attention.triton.plan import plan_of, tables_in
from shardwise.runtime.kernels import KernelLaunch

NUM_TOKENS = 1024


def launches_of(head_dim: int, block: int, dtype: torch.dtype, extras: str, is_split: bool) -> list[KernelLaunch]:
    """All launches of a forward and a backward of a causal layout, 4 heads on 2."""
    size = NUM_TOKENS // block
    layout = BlockLayout.from_blocks(torch.ones(size, size), block, causal=True)
    limit = 2 if is_split else NUM_TOKENS**2
    device = torch.device("cpu")
    plan = plan_of(layout, HeadGroups(4, 2), head_dim=head_dim, dtype=dtype, device=device, limit=limit)
    queries, keys = tables_in(plan)

    def rows(heads: int, dtype: torch.dtype = dtype) -> Tensor:  # [1, heads, N, D]
        return torch.empty(1, NUM_TOKENS, heads, head_dim, dtype=dtype).transpose(1, 2)

    grads = [rows(heads, torch.float32 if "w" in extras else dtype) for heads in (4, 2, 2)]

    bits = torch.empty(1, 4, NUM_TOKENS, dtype=torch.int32)
    given = ScoreModifiers(
        0.1,
        torch.empty(1, NUM_TOKENS, dtype=torch.bool) if "p" in extras else None,
        torch.empty(1, 4, NUM_TOKENS, NUM_TOKENS, dtype=dtype) if "b" in extras else None,
        Draw(bits, bits, bits[0, 0], 0.1) if "d" in extras else None,
    )
    inputs, lse = (rows(4), rows(2), rows(2)), torch.empty(1, 4, NUM_TOKENS)
    incoming = backward.OutputGrad(rows_of(rows(4)), lse, lse)
    return [
        *forward_launches(inputs, given, queries, (rows(4), lse)),
        prepare_launch(inputs, (rows(4), lse, lse), incoming),
        *query_launches(inputs, incoming, given, queries, (grads[0], given.bias)),
        *key_launches(inputs, incoming, given, keys, (grads[1], grads[2])),
    ]


class NoGpu:
    """Triton's driver of an H100 or H200 that is not there, by which kernels are specialised as for a launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def spilled_bytes(launch: KernelLaunch) -> int:
    """Bytes of stack a thread, of the machine code that a launch would run."""
    compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        listed = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    (stack,), (local,) = (re.findall(rf"{name}:(\d+)", listed.stdout) for name in ("STACK", "LOCAL"))
    return int(stack) + int(local)


if __name__ == "__main__":
    torch.set_num_threads(1)
    driver.set_active(NoGpu())
    found: dict[Any, dict[str, int]] = {}
    for variant in ast.literal_eval(sys.argv[1]):
        head_dim, block, dtype, extras, is_split = variant
        found[variant] = {}
        for each in launches_of(head_dim, block, getattr(torch, dtype), extras, is_split):
            name = each.kernel.__name__
            found[variant][name] = max(spilled_bytes(each), found[variant].get(name, 0))
    print(found)
