"""Multiply rows that are grouped by expert, whose weights are stacks with the flags of transformers' interface.

The product of groups is a registered op, so compiled code holds it as one, fake tensors pass through it, and selective
recomputation saves its results. It uses torch's kernel where this serves, or else a loop over the groups. Gradients may
be differentiated again.

R rows, H features of a row, L groups of rows, one after the other: those of the experts whose weights are here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.attention.api import autocast
from shardwise.runtime.device import kind_of
from shardwise.runtime.op_registry import LASTING_OPS

_GATE: Final = "_apply_gate"  # of transformers' interface, whose name it is


def run_experts(experts: Any, rows: Tensor, ends: Tensor, counts: list[int] | None) -> Tensor:
    """Return what experts make of their rows [R, H].

    Args:
        experts: a module with the flags of transformers' interface of experts.
        ends: where the rows of each expert end, as int32 [L].
        counts: how many each has, where the host knows it.
    """
    rows = _multiply(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, ends, counts)
    rows = getattr(experts, _GATE)(rows) if experts.has_gate else experts.act_fn(rows)
    return _multiply(experts, "down_proj", rows, ends, counts)


def ends_of_groups(sorted_index: Tensor, num_groups: int) -> Tensor:
    """Return where each group of rows ends, as int32 [L], from the sorted groups of the rows."""
    groups = torch.arange(num_groups, dtype=sorted_index.dtype, device=sorted_index.device)
    return torch.searchsorted(sorted_index, groups, right=True, out_int32=True)


def _multiply(experts: Any, stack: str, rows: Tensor, ends: Tensor, counts: list[int] | None) -> Tensor:
    weight = autocast(getattr(experts, stack))
    bias = autocast(getattr(experts, f"{stack}_bias")) if experts.has_bias else None
    return grouped_product(rows.to(weight.dtype), weight, bias, ends, counts, experts.is_transposed)


def grouped_product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, counts: list[int] | None, is_transposed: bool
) -> Tensor:
    """Multiply the rows [R, in] of each group by its matrix, weight [L, out, in] or transposed, and add its bias."""
    arguments = rows.contiguous(), weight, bias, ends, counts, is_transposed
    out: Tensor = torch.ops.shardwise.grouped_product(*arguments)
    return out


def _grouped_outer(left: Tensor, right: Tensor, ends: Tensor, counts: list[int] | None) -> Tensor:
    """Return for each group `left.T @ right` over its rows [R, p] and [R, q]: [L, p, q]."""
    out: Tensor = torch.ops.shardwise.grouped_outer(left.contiguous(), right.contiguous(), ends, counts)
    return out


def _product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, counts: list[int] | None, is_transposed: bool
) -> Tensor:
    matrices = weight if is_transposed else weight.transpose(1, 2)
    if _has_kernel(rows, weight):
        out = F.grouped_mm(rows, matrices, offs=ends)
    else:
        out = rows.new_empty((rows.shape[0], matrices.shape[2]))
        for own_rows, matrix, result in _by_group(_on_host(ends, counts), rows, matrices, out):
            torch.mm(own_rows, matrix, out=result)
    if bias is not None:
        places = torch.arange(len(rows), dtype=ends.dtype, device=ends.device)
        out += bias[torch.searchsorted(ends, places, right=True)]
    return out


def _product_fake(
    rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, counts: list[int] | None, is_transposed: bool
) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[2 if is_transposed else 1]))


def _keep_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, _, ends, ctx.counts, ctx.is_transposed = inputs
    ctx.save_for_backward(rows, weight, ends)


def _differentiate_product(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, weight, ends = ctx.saved_tensors
    of_rows = of_weight = of_bias = None
    if ctx.needs_input_grad[0]:
        of_rows = grouped_product(grad, weight, None, ends, ctx.counts, not ctx.is_transposed)
    if ctx.needs_input_grad[1]:
        left, right = (rows, grad) if ctx.is_transposed else (grad, rows)
        of_weight = _grouped_outer(left, right, ends, ctx.counts)
    if ctx.needs_input_grad[2]:
        of_bias = _grouped_outer(grad, grad.new_ones((grad.shape[0], 1)), ends, ctx.counts).squeeze(2)
    return of_rows, of_weight, of_bias, None, None, None


def _outer(left: Tensor, right: Tensor, ends: Tensor, counts: list[int] | None) -> Tensor:
    if _has_kernel(left, right):
        out = F.grouped_mm(left.t(), right, offs=ends)
    else:
        counts = _on_host(ends, counts)
        out = left.new_empty((len(counts), left.shape[1], right.shape[1]))
        for own_left, result, own_right in _by_group(counts, left, out, right):
            torch.mm(own_left.t(), own_right, out=result)
    # Nothing is written for a group without rows. Where the host knows none, the device passes over all once more.
    if counts is None:
        return out.masked_fill_((_counts_of(ends) == 0).view(-1, 1, 1), 0)
    for group, number in enumerate(counts):
        if number == 0:
            out[group].zero_()
    return out


def _outer_fake(left: Tensor, right: Tensor, ends: Tensor, counts: list[int] | None) -> Tensor:
    return left.new_empty((ends.shape[0], left.shape[1], right.shape[1]))


def _keep_outer(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.counts = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_outer(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    left, right, ends = ctx.saved_tensors
    of_left = grouped_product(right, grad, None, ends, ctx.counts, False)
    return of_left, grouped_product(left, grad, None, ends, ctx.counts, True), None, None


def _on_host(ends: Tensor, counts: list[int] | None) -> list[int]:
    """Return how many rows each group has; the host waits for the device where it does not know."""
    return _counts_of(ends).tolist() if counts is None else counts


def _counts_of(ends: Tensor) -> Tensor:
    return ends.diff(prepend=ends.new_zeros(1))


def _by_group(counts: Sequence[int], rows: Tensor, stack: Tensor, other_rows: Tensor) -> Iterator[Sequence[Tensor]]:
    """Yield the rows and the matrix of each group that has rows."""
    by_group = zip(rows.split(counts), stack, other_rows.split(counts), strict=True)
    yield from (tensors for tensors in by_group if len(tensors[0]))


def _has_kernel(rows: Tensor, other: Tensor) -> bool:
    """Say whether torch's product of groups takes these: it wants rows, and all strides in steps of 16 bytes."""
    if rows.dtype not in kind_of(rows.device).grouped_dtypes or len(rows) == 0:
        return False
    strides = (rows.shape[1], *other.shape[1:], rows.storage_offset(), other.storage_offset())
    return other.is_contiguous() and all(number * rows.element_size() % 16 == 0 for number in strides)


LASTING_OPS.define(
    "grouped_product(Tensor rows, Tensor weight, Tensor? bias, Tensor ends, int[]? counts, bool is_transposed)"
    " -> Tensor"
)
LASTING_OPS.define("grouped_outer(Tensor left, Tensor right, Tensor ends, int[]? counts) -> Tensor")
for _name, _kernel, _fake, _keep, _differentiate in (
    ("grouped_product", _product, _product_fake, _keep_product, _differentiate_product),
    ("grouped_outer", _outer, _outer_fake, _keep_outer, _differentiate_outer),
):
    LASTING_OPS.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardwise::{_name}", _fake, lib=LASTING_OPS)
    torch.library.register_autograd(f"shardwise::{_name}", _differentiate, setup_context=_keep, lib=LASTING_OPS)
