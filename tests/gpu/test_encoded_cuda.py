"""Encoded states beside a CUDA device: the kernel takes the steps, as torch's operations would."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.layout.codec import Encoded, codec_of
from shardwise.layout.precision import BLOCK_NUMEL
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
