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
from triton.compiler import ASTSource

from shardwise.attention.backends import Draw, Extras
from shardwise.attention.block_layout import BlockLayout
from shardwise.attention.kernels import backward
from shardwise.attention.kernels.launches import (
    Launch,
    forward_launches,
    key_launches,
    prepare_launch,
    query_launches,
    rows_of,
)
from shardwise.attention.kernels.plans import plan_of, tables_in
from shardwise.attention.kernels.tiles import Heads

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.bool: "i1"}
NUM_TOKENS = 1024


def launches_of(head_dim: int, block: int, dtype: torch.dtype, extras: str, is_split: bool) -> list[Launch]:
    """All launches of a forward and a backward of a causal layout, 4 heads on 2."""
    size = NUM_TOKENS // block
    layout = BlockLayout.from_blocks(torch.ones(size, size), block, causal=True)
    limit = 2 if is_split else NUM_TOKENS**2
    device = torch.device("cpu")
    plan = plan_of(layout, Heads(4, 2), head_dim=head_dim, dtype=dtype, device=device, limit=limit)
    queries, keys = tables_in(plan)

    def rows(heads: int) -> Tensor:  # [1, heads, N, D]
        return torch.empty(1, NUM_TOKENS, heads, head_dim, dtype=dtype).transpose(1, 2)

    bits = torch.empty(1, 4, NUM_TOKENS, dtype=torch.int32)
    given = Extras(
        0.1,
        torch.empty(1, NUM_TOKENS, dtype=torch.bool) if "p" in extras else None,
        torch.empty(1, 4, NUM_TOKENS, NUM_TOKENS, dtype=dtype) if "b" in extras else None,
        Draw(bits, bits, bits[0, 0], 0.1) if "d" in extras else None,
    )
    inputs, lse = (rows(4), rows(2), rows(2)), torch.empty(1, 4, NUM_TOKENS)
    incoming = backward.Incoming(rows_of(rows(4)), lse, lse)
    return [
        *forward_launches(inputs, given, queries, (rows(4), lse)),
        prepare_launch(inputs, (rows(4), lse, lse), incoming),
        *query_launches(inputs, incoming, given, queries, (rows(4), given.bias)),
        *key_launches(inputs, incoming, given, keys, (rows(2), rows(2))),
    ]


def spilled_bytes(launch: Launch) -> int:
    """Bytes of stack a thread, of the machine code that a launch would run."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, (parameter, value) in enumerate(zip(launch.kernel.params, launch.arguments, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        else:
            signature[parameter.name] = type_of(value, (index,), constants, attributes)
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    (stack,), (local,) = (re.findall(rf"{name}:(\d+)", told.stdout) for name in ("STACK", "LOCAL"))
    return int(stack) + int(local)


def type_of(value: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any]) -> Any:
    """The type of an argument as a launch would tell it, with constants and divisibility noted by path."""
    if isinstance(value, tuple):
        parts = [type_of(each, (*path, i), constants, attributes) for i, each in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if value is None or (isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, Tensor) or value % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    return f"*{TYPES[value.dtype]}" if isinstance(value, Tensor) else "i32"


if __name__ == "__main__":
    torch.set_num_threads(1)
    found: dict[Any, dict[str, int]] = {}
    for variant in ast.literal_eval(sys.argv[1]):
        head_dim, block, dtype, extras, is_split = variant
        found[variant] = {}
        for each in launches_of(head_dim, block, getattr(torch, dtype), extras, is_split):
            name = each.kernel.__name__
            found[variant][name] = max(spilled_bytes(each), found[variant].get(name, 0))
    print(found)
