"""The codes are bitsandbytes' own, and a step with them is as near to fp32 as bitsandbytes' on a CPU, or nearer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.layout.codec import codec_of
from shardwise.layout.precision import BLOCK_NUMEL
from shardwise.offload.cpu_optimizer import StepPiece, step_pieces
from shardwise.optim.rules import rule_of

functional = pytest.importorskip("bitsandbytes.functional")

LR, BETAS, EPS = 1e-2, (0.9, 0.95), 1e-8
NUMEL, NUM_STEPS = 16 * BLOCK_NUMEL, 5


def gradients(decades: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    spread = [10 ** (-decades * torch.rand(NUMEL, generator=generator)) for _ in range(NUM_STEPS)]
    return [each * torch.randn(NUMEL, generator=generator) for each in spread]


def stepped_by_theirs(start: Tensor, grads: list[Tensor]) -> Tensor:
    maps = [functional.create_dynamic_map(signed=signed).float() for signed in (True, False)]
    states = [torch.full((NUMEL,), int(each.abs().argmin()), dtype=torch.uint8) for each in maps]
    scales = [torch.zeros(NUMEL // BLOCK_NUMEL) for _ in maps]
    values = start.clone()
    for step, grad in enumerate(grads, 1):
        numbers = (*BETAS, 0.0, 0.0, EPS, step, LR)
        functional.optimizer_update_8bit_blockwise(
            "adam", grad.clone(), values, *states, *numbers, *maps, *scales, 0.0, 1.0, False
        )
    return values


def stepped_by_ours(start: Tensor, grads: list[Tensor], states: str) -> Tensor:
    values = nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([values], lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    if states == "master":
        for grad in grads:
            values.grad = grad.clone()
            optimizer.step()
        return values.detach()
    kept = {name: codec_of(name, "int8").empty(NUMEL, start.device) for name in ("exp_avg", "exp_avg_sq")}
    options, master = optimizer.param_groups[0], values.detach()
    for step, grad in enumerate(grads):
        piece = StepPiece(options, master, grad.clone(), kept, float(step), step == 0, None)
        step_pieces(rule_of(optimizer), [piece], 1.0)
    return master


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_codes_stand_for_the_same_values(name: str) -> None:
    codec = codec_of(name, "int8")
    assert codec is not None
    encoded = codec.empty(256, torch.device("cpu"))
    encoded.codes.copy_(torch.arange(256))
    encoded.scales.fill_(1.0)
    theirs = functional.create_dynamic_map(signed=codec.is_signed).float().sort().values
    assert (encoded.decode().sort().values - theirs).abs().max() <= 1e-7


@pytest.mark.parametrize("decades", [0.0, 3.0])
def test_a_step_is_as_near_to_fp32_as_theirs_or_nearer(decades: float) -> None:
    start, grads = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)), gradients(decades)
    exact, ours = stepped_by_ours(start, grads, "master"), stepped_by_ours(start, grads, "int8")
    theirs = stepped_by_theirs(start, grads)
    size = (exact - start).norm()
    assert (ours - exact).norm() <= 0.05 * size
    assert (ours - exact).norm() <= 1.1 * (theirs - exact).norm()
    assert (ours - theirs).norm() <= 0.1 * size
