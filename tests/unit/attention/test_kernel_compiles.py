"""The kernels compile for an H100 or H200 without one, down to machine code that hardly spills.

One child process does it, since Triton in this one runs its interpreter. Resources are those of `cuobjdump`, which
Triton brings along: bytes of STACK a thread are spilled registers.
"""

from __future__ import annotations

import pytest

from harness.kernel_programs import spilled_by

pytestmark = pytest.mark.begin

pytest.importorskip("triton")

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
    return spilled_by("compiled_kernels.py", repr(variants))


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
