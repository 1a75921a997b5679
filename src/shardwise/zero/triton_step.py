"""Step a piece whose states are encoded by one Triton kernel, which decodes, steps and encodes in one pass.

It takes a step as `shardwise.offload.cpu_optimizer` does, to rounding. An element's result depends on its own block of
256 alone, so that it is the same in every layout here too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch.optim import Optimizer

from shardwise.layout.codec import NUM_DROPPED, Encoded, code_table, code_values
from shardwise.layout.precision import BLOCK_NUMEL
from shardwise.offload.cpu_optimizer import StepPiece
from shardwise.optim.rules import rule_of_kind
from shardwise.runtime.kernels import KernelLaunch

# How many states each case of the kernel steps; `OptimizerRule.gpu_kernel` names the case.
_NUM_STATES: Final[Mapping[str, int]] = MappingProxyType({"adam": 2, "sgd": 1, "adagrad": 1, "lion": 1})
_ROWS: Final = 8
_NUM_WARPS: Final = 8
_BLOCK = tl.constexpr(BLOCK_NUMEL)
_DROPPED = tl.constexpr(NUM_DROPPED)
_HALF = tl.constexpr(1 << (NUM_DROPPED - 1))
_KEYS = tl.constexpr((1 << (32 - NUM_DROPPED)) - 1)


class CodedState(NamedTuple):
    """Holds pointers to a state's codes and scales, to the codes' values, and to the codes by a float's first bits.

    Where it is rounded values, in bf16, all are the pointer to these.
    """

    codes: Any
    scales: Any
    levels: Any
    table: Any


class StepNumbers(NamedTuple):
    """Holds the options as numbers.

    Attributes:
        factor: of the gradient; negative to go up.
        lr: what the update is multiplied by, bias correction included.
        first: beta1 of Adam, or the momentum of SGD.
        second: beta2, or SGD's share of the gradient in its momentum.
        root: by which Adam's root is divided before `eps` is added: its bias correction.
        shrink: what is left of a parameter after decoupled weight decay.
        decay: the share of a parameter that is added to its gradient.
    """

    factor: float
    lr: float
    first: float = 0.0
    second: float = 0.0
    eps: float = 0.0
    root: float = 1.0
    shrink: float = 1.0
    decay: float = 0.0


class StepShape(NamedTuple):
    """Holds what the kernel is compiled for."""

    KIND: str
    IS_FIRST: bool
    IS_NESTEROV: bool
    IS_CODED: bool
    ROWS: int


def can_step(kind: type[Optimizer], piece: StepPiece) -> bool:
    """Say whether the kernel can step a piece: its states are those of the kernel, encoded, and its master is fp32."""
    rule = rule_of_kind(kind)
    num_encoded = sum(isinstance(state, Encoded) for state in piece.states.values())
    is_case = rule is not None and len(piece.states) == _NUM_STATES.get(rule.gpu_kernel)
    return is_case and num_encoded == len(piece.states) and piece.master.dtype == torch.float32


def step_piece(kind: type[Optimizer], piece: StepPiece, factor: float) -> None:
    """Step a piece for which `can_step` is true, in place, with `factor` times its gradient.

    Args:
        factor: turns accumulated sums into the gradient.
    """
    if piece.master.numel():
        launch_of(kind, piece, factor).run()


def launch_of(kind: type[Optimizer], piece: StepPiece, factor: float) -> KernelLaunch:
    """Return the launch that steps a piece; the arguments are those of `step_piece`."""
    states = [state for state in piece.states.values() if isinstance(state, Encoded)]
    rule = rule_of_kind(kind)
    assert rule is not None, "`can_step` was true"
    numbers, is_nesterov = _numbers(rule.gpu_kernel, piece, factor)
    shape = StepShape(rule.gpu_kernel, piece.is_first, is_nesterov, states[0].scales is not None, _ROWS)
    numel = piece.master.numel()
    arguments = (piece.master, piece.grad, *map(_pointers, (states[0], states[-1])), numbers, numel, shape)
    return KernelLaunch(_step_blocks, (triton.cdiv(numel, _ROWS * BLOCK_NUMEL), 1, 1), arguments, _NUM_WARPS, 1)


def _pointers(state: Encoded) -> CodedState:
    is_signed, device = state.codec.is_signed, state.codes.device
    scales = state.scales
    if scales is None:
        return CodedState(state.codes, state.codes, state.codes, state.codes)
    return CodedState(state.codes, scales, code_values(is_signed, device), code_table(is_signed, device))


def _numbers(case: str, piece: StepPiece, factor: float) -> tuple[StepNumbers, bool]:
    options = piece.options
    lr, weight_decay = float(options["lr"]), float(options["weight_decay"])
    factor = -factor if options["maximize"] else factor
    step = piece.step + 1
    if case == "sgd":
        momentum, share = float(options["momentum"]), 1 - float(options["dampening"])
        return StepNumbers(factor, lr, momentum, share, decay=weight_decay), bool(options["nesterov"])
    if case == "adagrad":
        rate = lr / (1 + (step - 1) * float(options["lr_decay"]))
        return StepNumbers(factor, rate, eps=float(options["eps"]), decay=weight_decay), False
    beta1, beta2 = (float(beta) for beta in options["betas"])
    if case == "lion":
        return StepNumbers(factor, lr, beta1, beta2, shrink=1 - lr * weight_decay), False
    is_decoupled = bool(options["decoupled_weight_decay"])
    return StepNumbers(
        factor,
        lr / (1 - beta1**step),
        beta1,
        beta2,
        float(options["eps"]),
        math.sqrt(1 - beta2**step),
        shrink=1 - lr * weight_decay if is_decoupled else 1.0,
        decay=0.0 if is_decoupled else weight_decay,
    ), False


@triton.jit
def _step_blocks(
    master: tl.tensor,
    grad: tl.tensor,
    first: tl.tuple,
    second: tl.tuple,
    numbers: tl.tuple,
    numel: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Step the blocks of a program; `first` and `second` are `CodedState`s, the same one where there is one state."""
    rows = tl.program_id(0).to(tl.int64) * shape.ROWS + tl.arange(0, shape.ROWS)
    at = _elements(rows)
    param = tl.load(master + at, mask=at < numel, other=0.0)
    gradient = tl.load(grad + at, mask=at < numel, other=0.0).to(tl.float32) * numbers.factor + numbers.decay * param
    param *= numbers.shrink
    kept = _decoded(first, rows, numel, shape.IS_CODED)
    if shape.KIND == "adam":
        kept += (gradient - kept) * (1 - numbers.first)
        squares = _decoded(second, rows, numel, shape.IS_CODED)
        squares = squares * numbers.second + gradient * gradient * (1 - numbers.second)
        param -= numbers.lr * tl.div_rn(kept, tl.sqrt_rn(squares) / numbers.root + numbers.eps)
        _encode(squares, second, rows, numel, False, shape.IS_CODED)
        _encode(kept, first, rows, numel, True, shape.IS_CODED)
    elif shape.KIND == "sgd":
        kept = gradient if shape.IS_FIRST else kept * numbers.first + gradient * numbers.second
        param -= numbers.lr * (gradient + kept * numbers.first if shape.IS_NESTEROV else kept)
        _encode(kept, first, rows, numel, True, shape.IS_CODED)
    elif shape.KIND == "lion":
        direction = kept + (gradient - kept) * (1 - numbers.first)
        param -= numbers.lr * ((direction > 0).to(tl.float32) - (direction < 0).to(tl.float32))
        kept += (gradient - kept) * (1 - numbers.second)
        _encode(kept, first, rows, numel, True, shape.IS_CODED)
    else:
        kept += gradient * gradient
        param -= numbers.lr * tl.div_rn(gradient, tl.sqrt_rn(kept) + numbers.eps)
        _encode(kept, first, rows, numel, False, shape.IS_CODED)
    tl.store(master + at, param, mask=at < numel)


@triton.jit
def _elements(rows: tl.tensor) -> tl.tensor:
    """Return the places of the blocks' elements [rows, 256]."""
    return rows[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]


@triton.jit
def _decoded(state: tl.tuple, rows: tl.tensor, numel: tl.tensor, is_coded: tl.constexpr) -> tl.tensor:
    """Return the values of blocks [rows, 256]; those past the end are 0."""
    at = _elements(rows)
    if is_coded:
        codes = tl.load(state.codes + at, mask=at < numel, other=0).to(tl.int32)
        scales = tl.load(state.scales + rows, mask=rows * _BLOCK < numel, other=0.0)
        values = tl.where(at < numel, tl.load(state.levels + codes) * scales[:, None], 0.0)
    else:
        values = tl.load(state.codes + at, mask=at < numel, other=0.0).to(tl.float32)
    return values


@triton.jit
def _encode(
    values: tl.tensor,
    state: tl.tuple,
    rows: tl.tensor,
    numel: tl.tensor,
    is_signed: tl.constexpr,
    is_coded: tl.constexpr,
) -> None:
    """Store blocks [rows, 256] as the nearest codes, and each block's element of largest magnitude as its scale; or
    rounded.
    """
    at = _elements(rows)
    if is_coded:
        values = tl.where(at < numel, values, 0.0)
        scales = tl.max(values, 1)
        if is_signed:
            low = tl.min(values, 1)
            scales = tl.where(scales >= -low, scales, low)
        scales += tl.sum(values * 0.0, 1)  # a NaN or an infinity makes the scale NaN, which a maximum may overlook
        shares = tl.div_rn(values, tl.where(scales != 0, scales, 1.0)[:, None])
        keys = ((shares.to(tl.int32, bitcast=True) + _HALF) >> _DROPPED) & _KEYS
        tl.store(state.codes + at, tl.load(state.table + keys), mask=at < numel)
        tl.store(state.scales + rows, scales, mask=rows * _BLOCK < numel)
    else:
        tl.store(state.codes + at, values.to(tl.bfloat16), mask=at < numel)
