"""Multiply rows that are grouped by expert, whose weights are stacks with the flags of transformers' interface.

The product of groups is a registered op, so compiled code holds it as one, fake tensors pass through it, and selective
recomputation saves its results. Its backward is the same op, so gradients may be differentiated again.

R rows of L groups, one group after the other; `ends` are int32 [L], `counts` the same on the host, where it knows them.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.attention.api import autocast
from shardwise.runtime.device import kind_of
from shardwise.runtime.op_registry import LIBRARY

_GATE: Final = "_apply_gate"  # of transformers' interface, whose name it is


def run_experts(experts: Any, rows: Tensor, ends: Tensor, counts: list[int] | None) -> Tensor:
    """Return what a module with transformers' flags of experts makes of their rows [R, H]."""
    rows = _multiply(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, ends, counts)
    rows = getattr(experts, _GATE)(rows) if experts.has_gate else experts.act_fn(rows)
    return _multiply(experts, "down_proj", rows, ends, counts)


def _multiply(experts: Any, stack: str, rows: Tensor, ends: Tensor, counts: list[int] | None) -> Tensor:
    weight = autocast(getattr(experts, stack))
    bias = autocast(getattr(experts, f"{stack}_bias")) if experts.has_bias else None
    matrices = weight if experts.is_transposed else weight.mT
    return grouped_product(rows.to(weight.dtype), matrices, bias, ends, counts)


def grouped_product(left: Tensor, right: Tensor, bias: Tensor | None, ends: Tensor, counts: list[int] | None) -> Tensor:
    """Multiply the rows [R, p] of each group by its matrix, right [L, p, q], and add its bias [L, q]; or return of
    [p, R] and right [R, q] the product of each group, [L, p, q].
    """
    out: Tensor = torch.ops.shardwise.grouped_product(left, right, bias, ends, counts)
    return out


def _product(left: Tensor, right: Tensor, bias: Tensor | None, ends: Tensor, counts: list[int] | None) -> Tensor:
    over_rows = right.dim() == 2
    # The gradient of a sum has strides of 0, which no kernel takes.
    left, right = (left.T.contiguous().T, right.contiguous()) if over_rows else (left.contiguous(), right)
    has_kernel = _has_kernel(left.T if over_rows else left, right)
    if has_kernel:
        out = F.grouped_mm(left, right, offs=ends)
    else:
        counts = _counts_of(ends).tolist() if counts is None else counts  # the host waits for the device
        out = _product_fake(left, right, bias, ends, counts)
        tensors = (left.T if over_rows else left, right, out)
        by_group = zip(*(tensor if tensor.dim() == 3 else tensor.split(counts) for tensor in tensors), strict=True)
        for rows, factor, result in by_group:
            if len(rows):
                torch.mm(rows.T if over_rows else rows, factor, out=result)
    if over_rows:
        _fill_empty(out, ends, counts)
    if bias is not None:
        places = torch.arange(len(left), dtype=ends.dtype, device=ends.device)
        out += bias[torch.searchsorted(ends, places, right=True)]
    return out


def _product_fake(left: Tensor, right: Tensor, bias: Tensor | None, ends: Tensor, counts: list[int] | None) -> Tensor:
    shape = (left.shape[0], right.shape[-1])
    return left.new_empty((ends.shape[0], *shape) if right.dim() == 2 else shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    left, right, _, ends, ctx.counts = inputs
    ctx.save_for_backward(left, right, ends)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    left, right, ends = ctx.saved_tensors
    of_left = of_right = of_bias = None
    if ctx.needs_input_grad[0]:
        if right.dim() == 3:
            of_left = grouped_product(grad, right.mT, None, ends, ctx.counts)
        else:
            of_left = grouped_product(right, grad.mT, None, ends, ctx.counts).T
    if ctx.needs_input_grad[1]:
        of_right = grouped_product(left.T, grad, None, ends, ctx.counts)
    if ctx.needs_input_grad[2]:
        of_bias = grouped_product(grad.new_ones((1, grad.shape[0])), grad, None, ends, ctx.counts).squeeze(1)
    return of_left, of_right, of_bias, None, None


def _counts_of(ends: Tensor) -> Tensor:
    return ends.diff(prepend=ends.new_zeros(1))


def _fill_empty(out: Tensor, ends: Tensor, counts: list[int] | None) -> None:
    """Zero the matrices [L, p, q] of groups without rows, which no product has written."""
    if counts is None:  # so that the host does not wait, the device passes over all of them
        out.masked_fill_((_counts_of(ends) == 0).view(-1, 1, 1), 0)
    for group, number in enumerate(counts or ()):
        if number == 0:
            out[group].zero_()


def _has_kernel(rows: Tensor, other: Tensor) -> bool:
    """Say whether torch's product of groups takes these: it wants rows, and all strides in steps of 16 bytes."""
    if rows.dtype not in kind_of(rows.device).grouped_dtypes or len(rows) == 0:
        return False
    strides = (rows.shape[1], *other.shape[1:], rows.storage_offset(), other.storage_offset())
    is_dense = other.is_contiguous() or other.mT.is_contiguous()
    return is_dense and all(number * rows.element_size() % 16 == 0 for number in strides)


LIBRARY.define("grouped_product(Tensor left, Tensor right, Tensor? bias, Tensor ends, int[]? counts) -> Tensor")
LIBRARY.impl("grouped_product", _product, "CompositeExplicitAutograd")
torch.library.register_fake("shardwise::grouped_product", _product_fake, lib=LIBRARY)
torch.library.register_autograd("shardwise::grouped_product", _differentiate, setup_context=_keep, lib=LIBRARY)
