"""Kernels on a CUDA device: they step encoded states as torch's operations would; codes and dropouts are the CPU's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.comm.encoded import KernelCodec, codec_on, encode_rows, sum_rows
from shardwise.dropout.hash_rng import Samples, grid_of, keyed_dropout
from shardwise.layout.codec import Encoded, codec_of
from shardwise.layout.precision import BLOCK_NUMEL
from shardwise.layout.wire_codec import CODES, WireCodec
from shardwise.offload.cpu_optimizer import StepPiece, step_pieces
from shardwise.optim.rules import rule_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NUMEL = 64 * BLOCK_NUMEL + 77


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_that_of_torchs_operations(dtype: torch.dtype) -> None:
    triton_step = pytest.importorskip("shardwise.zero.triton_step")
    device = torch.device("cuda")
    ours, plain = (torch.linspace(-1, 1, NUMEL, device=device) for _ in range(2))
    optimizer = torch.optim.AdamW([nn.Parameter(plain)], lr=1e-2, weight_decay=0.1)
    options, rule = optimizer.param_groups[0], rule_of(optimizer)
    kept = {name: codec_of(name, "int8").empty(NUMEL, device) for name in ("exp_avg", "exp_avg_sq")}  # type: ignore[union-attr]
    for step in range(3):
        found = {name: Encoded(state.codec, state.codes.clone(), state.scales.clone()) for name, state in kept.items()}
        grad = torch.randn(NUMEL, device=device).to(dtype)
        ours.copy_(plain)
        triton_step.step_piece(rule.kind, StepPiece(options, ours, grad, found, float(step), step == 0, None), 0.5)
        step_pieces(rule, [StepPiece(options, plain, grad, kept, float(step), step == 0, None)], 0.5)
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
        for name, state in kept.items():
            assert (found[name].codes.int() - state.codes.int()).abs().max() <= 1


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_values_and_sums_have_the_bits_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(4, 64 * BLOCK_NUMEL, generator=generator).to(dtype)
    before = torch.randn(exact.shape, generator=generator).mul(1e-2)
    found = []
    for device in (torch.device("cuda"), torch.device("cpu")):
        codec, values, kept = codec_on(device, WireCodec(name)), exact.to(device), before.to(device, copy=True)
        assert isinstance(codec, KernelCodec) == (device.type == "cuda")
        sent = codec.empty(values)
        encode_rows(codec, values, sent, kept)
        total = torch.ones(exact.shape[1], device=device)
        sum_rows(codec, sent, total, accumulate=True)
        found.append([each.cpu() for each in (sent, kept, codec.decode(sent, torch.empty_like(values)), total)])
    for on_device, on_cpu in zip(*found, strict=True):
        assert torch.equal(on_device, on_cpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropouts_have_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    exact = torch.randn(4, 33, 130, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = []
    for device in (torch.device("cuda"), torch.device("cpu")):
        values = exact.to(device).requires_grad_()
        dropped = keyed_dropout(values, grid_of(exact.shape, None, Samples(6, 4), device), 2**62 + 12345, 0.3)
        found.append([dropped.detach().cpu(), torch.autograd.grad(dropped, values, dropped.detach())[0].cpu()])
    for on_device, on_cpu in zip(*found, strict=True):
        assert torch.equal(on_device, on_cpu)
