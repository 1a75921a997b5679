"""The kernels compile for an H100 or H200 without one, down to machine code that hardly spills.

One child process does it, since Triton in this one runs its interpreter. Resources are those of `cuobjdump`, which
Triton brings along: bytes of STACK a thread are spilled registers.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from harness.paths import ROOT

pytestmark = pytest.mark.begin

pytest.importorskip("triton")
HARNESS = ROOT / "tests" / "harness" / "compiled_kernels.py"

# head size, block, dtype, extras (p: padding, b: bias with its gradient, d: dropout, w: wide gradients), is_split ->
# bytes spilled at most
DEFAULTS = {
    (64, 16, "bfloat16", "", False): 0,
    (128, 64, "bfloat16", "p", True): 160,
    (128, 128, "bfloat16", "", False): 96,
}
OTHERS = {
    (64, 64, "bfloat16", "d", False): 0,
    (128, 16, "bfloat16", "", False): 0,
    (128, 16, "bfloat16", "", True): 32,
    (128, 128, "bfloat16", "", True): 96,
    (64, 64, "float32", "", False): 32,
    (64, 128, "bfloat16", "", True): 32,
    (64, 64, "bfloat16", "", False): 32,
    (64, 64, "bfloat16", "w", False): 64,
    (64, 64, "bfloat16", "pbd", True): 96,
    (64, 128, "float16", "p", False): 32,
    (64, 16, "bfloat16", "bd", False): 32,
    (80, 64, "bfloat16", "", False): 160,
    (128, 64, "bfloat16", "", False): 160,
    (128, 128, "bfloat16", "d", False): 32,
    (128, 64, "bfloat16", "w", True): 160,
    (128, 64, "bfloat16", "pbd", True): 1024,
    (128, 128, "float32", "", False): 64,
    (256, 64, "bfloat16", "", False): 256,
    (256, 64, "float32", "", False): 64,
}


def spilled(variants: list[tuple[int, int, str, str, bool]]) -> dict[tuple[int, int, str, str, bool], dict[str, int]]:
    """Bytes that each kernel of each variant spills."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HARNESS.parents[1]), *sys.path])
    command = [sys.executable, str(HARNESS), repr(variants)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[tuple[int, int, str, str, bool], dict[str, int]] = ast.literal_eval(done.stdout)
    return found


def check(ceilings: dict[tuple[int, int, str, str, bool], int]) -> None:
    found = spilled(list(ceilings))
    over = {
        (variant, kernel): num_bytes
        for variant, most in ceilings.items()
        for kernel, num_bytes in found[variant].items()
        if num_bytes > most
    }
    assert not over
    for variant, kernels in found.items():
        wanted = {"forward", "prepare", "backward_queries", "backward_keys"}
        assert set(kernels) == (wanted | {"merge_softmax", "merge_sums"} if variant[4] else wanted)


@pytest.mark.full
def test_default_kernels_hardly_spill() -> None:
    check(DEFAULTS)


@pytest.mark.full
def test_no_kernel_spills_more_than_is_written_here() -> None:
    check(OTHERS)
