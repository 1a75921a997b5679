"""The Triton kernel steps encoded states as torch's operations do, and compiles for a GPU that is not there."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from harness.kernel_programs import spilled_by
from shardwise.layout.codec import Encoded, codec_of
from shardwise.layout.precision import BLOCK_NUMEL, StatesDtype
from shardwise.offload.cpu_optimizer import StepPiece, step_pieces
from shardwise.optim.elementwise import Lion
from shardwise.optim.rules import rule_of

pytest.importorskip("triton")

from shardwise.zero import triton_step

NUMEL = 9 * BLOCK_NUMEL + 77  # two programs, and a short last block
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1, maximize=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "nesterov": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, lr_decay=0.1, weight_decay=0.1),
    "lion": lambda params: Lion(params, lr=1e-3, weight_decay=0.1),
}


def states_of(optimizer: torch.optim.Optimizer, numel: int, states: StatesDtype = "int8") -> dict[str, Encoded]:
    names = rule_of(optimizer).first_values(optimizer.param_groups[0])
    codecs = {name: codec_of(name, states) for name in names}
    return {name: codec.empty(numel, torch.device("cpu")) for name, codec in codecs.items() if codec is not None}


@pytest.mark.quick(9)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", ["int8", "bf16"])
def test_a_step_is_that_of_torchs_operations(name: str, dtype: torch.dtype, states: StatesDtype) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(NUMEL, generator=generator)
    optimizer = OPTIMIZERS[name]([nn.Parameter(start)])
    kind, options = type(optimizer), optimizer.param_groups[0]
    ours, plain = start.clone(), start.clone()
    kept = states_of(optimizer, NUMEL, states)
    for step in range(3):
        # Both start from the same codes: a difference in the last bit may change a code, and that more in later steps.
        found = deepcopy(kept)
        grad = torch.randn(NUMEL, generator=generator).mul(torch.logspace(-3, 0, NUMEL)).to(dtype)
        ours.copy_(plain)
        piece = StepPiece(options, ours, grad, found, float(step), step == 0, None)
        assert triton_step.can_step(kind, piece)
        triton_step.step_piece(kind, piece, 0.5)
        step_pieces(rule_of(optimizer), [StepPiece(options, plain, grad, kept, float(step), step == 0, None)], 0.5)
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)
        for each, state in kept.items():
            if state.scales is None:
                torch.testing.assert_close(found[each].codes, state.codes, rtol=2**-7, atol=1e-9)
                continue
            torch.testing.assert_close(found[each].scales, state.scales, rtol=1e-6, atol=0)
            changed = (found[each].codes.int() - state.codes.int()).abs()
            assert changed.max() <= 1
            assert changed.count_nonzero() <= NUMEL // 100


def test_zero_blocks_stay_zero_and_a_nan_stays_in_its_block() -> None:
    optimizer = OPTIMIZERS["adamw"]([nn.Parameter(torch.zeros(NUMEL))])
    found, grad, master = states_of(optimizer, NUMEL), torch.zeros(NUMEL), torch.ones(NUMEL)
    grad[BLOCK_NUMEL] = float("nan")
    options = optimizer.param_groups[0]
    triton_step.step_piece(torch.optim.AdamW, StepPiece(options, master, grad, found, 0.0, True, None), 1.0)
    for state in found.values():
        values = state.decode()
        assert values[BLOCK_NUMEL : 2 * BLOCK_NUMEL].isnan().all()
        assert not values[:BLOCK_NUMEL].any()
        assert not values[2 * BLOCK_NUMEL :].any()


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_other_states_are_left_to_torch(name: str) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(BLOCK_NUMEL))], amsgrad=True)
    names = rule_of(optimizer).first_values(optimizer.param_groups[0])
    kept = {each: codec_of(each, name).empty(BLOCK_NUMEL, torch.device("cpu")) for each in names}  # type: ignore[arg-type, union-attr]
    values = torch.zeros(BLOCK_NUMEL)
    piece = StepPiece(optimizer.param_groups[0], values, values, kept, 0.0, True, None)
    assert not triton_step.can_step(torch.optim.AdamW, piece)


@pytest.mark.full
def test_the_kernel_compiles_for_an_h100_without_one() -> None:
    assert spilled_by("compiled_step.py") == {"Adam": 0, "SGD": 0, "Adagrad": 0, "Lion": 0}
