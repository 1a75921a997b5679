"""The Triton kernel drops to the bits of torch's operations, in a forward and in its backward."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shardwise.dropout import hash_rng
from shardwise.dropout.hash_rng import Samples, grid_of, keyed_dropout

pytest.importorskip("triton")

from harness.interpreter import rounding_to_nearest

KEY = 2**62 + 12345
SHAPES = [(4, 3, 100), (4, 300), (2, 5000), (2, 8, 7, 1), (16, 3, 3)]


@pytest.fixture(autouse=True)
def rounded() -> Iterator[None]:
    with rounding_to_nearest():
        yield


def dropped(values: Tensor, p: float, by_kernel: bool, monkeypatch: pytest.MonkeyPatch, key: int = KEY) -> list[Tensor]:
    """The result, and the gradient of a sum weighted by the values."""
    monkeypatch.setattr(hash_rng, "has_kernels", lambda device: by_kernel)
    grid = grid_of(values.shape, None, Samples(0, values.shape[0]), values.device)
    leaf = values.clone().requires_grad_()
    out = keyed_dropout(leaf, grid, key, p)
    (grad,) = torch.autograd.grad(out, leaf, values)
    return [out.detach(), grad]


@pytest.mark.quick(13)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_bits_are_those_of_torchs_operations(
    shape: tuple[int, ...], dtype: torch.dtype, p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[0, 0], values[0, 1], values[1, 1] = 0.0, math.inf, math.nan
    for ours, expected in zip(
        dropped(values, p, True, monkeypatch), dropped(values, p, False, monkeypatch), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(ours.signbit() & ~ours.isnan(), expected.signbit() & ~expected.isnan())


@pytest.mark.parametrize("key", [0, 1, 2**31, 2**63 - 1])
def test_any_key_draws_the_same(key: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.ones(4, 300)
    assert torch.equal(
        dropped(values, 0.3, True, monkeypatch, key)[0], dropped(values, 0.3, False, monkeypatch, key)[0]
    )


def test_strides_have_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(30, 8, 4).permute(2, 1, 0)
    found, expected = (dropped(values, 0.3, by_kernel, monkeypatch)[0] for by_kernel in (True, False))
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
