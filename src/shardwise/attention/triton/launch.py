"""Describes kernel launches of a forward and a backward as values: tests compile them for GPUs that are not present."""

from __future__ import annotations

from collections.abc import Sequence
from math import e, log2

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from shardwise.attention.backends import ScoreModifiers
from shardwise.attention.triton import backward, forward
from shardwise.attention.triton.common import (
    KernelInputs,
    KernelScalars,
    KernelShape,
    LutPointers,
    ModifierArgs,
    SplitTiles,
    StridedRows,
)
from shardwise.attention.triton.plan import DeviceLut, warps_and_stages
from shardwise.runtime.kernels import KernelLaunch

NO_BIAS_STRIDES = (0, 0, 0, 0)


def rows_of(tensor: Tensor) -> StridedRows:
    sample, head, token, _ = tensor.stride()
    return StridedRows(tensor, sample, head, token)


def forward_launches(
    inputs: Sequence[Tensor], extras: ScoreModifiers, table: DeviceLut, results: Sequence[Tensor]
) -> list[KernelLaunch]:
    """Return the launches of the forward's kernel, and of the merge of split tiles if there are any.

    Args:
        results: out [B, H, Nq, D] and lse [B, H, Nq], to be written.
    """
    q, out, lse = inputs[0], *results
    shape, numbers, extra = _shape(inputs, extras, table), _numbers(inputs, extras, table), _given(extras)
    samples, heads = q.shape[:2]
    sums = _slots(q, heads, table, (table.tile, shape.WIDE_D))
    most, total = (_slots(q, heads, table, (table.tile,)) for _ in range(2))
    attended = forward.ForwardOutputs(rows_of(out), lse, sums, most, total)
    arguments = (KernelInputs(*map(rows_of, inputs)), attended, _lists(table), extra, numbers, shape)
    warps, stages = warps_and_stages(table.tile, shape.WIDE_D, q.dtype)
    registers = _registers(shape, warps, q.dtype)
    launches = [KernelLaunch(forward.forward, (table.num_items, heads, samples), arguments, warps, stages, registers)]
    if table.num_slots:
        grid = (table.num_merges, heads, samples)
        launches.append(KernelLaunch(forward.merge_softmax, grid, (attended, _merges(table), numbers, shape), 8, 2))
    return launches


def prepare_launch(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], incoming: backward.OutputGrad
) -> KernelLaunch:
    """Return the launch of `prepare`, which writes delta and the log-sum-exp in base 2 into `incoming`.

    Args:
        outputs: out, lse, and the gradient of lse or None.
        incoming: gradient of the output; its lse and delta are written.
    """
    q = inputs[0]
    out, lse, grad_lse = outputs
    assert out is not None
    shape = _bare_shape(inputs, 32)
    prepared = backward.RowInputs(rows_of(out), lse, grad_lse)
    arguments = (prepared, incoming, _bare_numbers(inputs), grad_lse is not None, shape)
    return KernelLaunch(backward.prepare, (triton.cdiv(q.shape[2], 32), q.shape[1], q.shape[0]), arguments, 4, 2)


def query_launches(
    inputs: Sequence[Tensor],
    incoming: backward.OutputGrad,
    extras: ScoreModifiers,
    table: DeviceLut,
    grads: tuple[Tensor, Tensor | None],
) -> list[KernelLaunch]:
    """Return the launches for dQ, and for the gradient of the bias if it is needed.

    A bias broadcast over samples or heads takes one launch for each of them, which adds to the result so far.

    Args:
        incoming: the output's gradient, with the lse and delta that `prepare` wrote.
        grads: of q, to be written; of the bias, zeros in its shape, or None for no gradient.
    """
    q, (grad, grad_bias) = inputs[0], grads
    shape, numbers, extra = _shape(inputs, extras, table), _numbers(inputs, extras, table), _given(extras)
    samples, heads = q.shape[:2]
    sums = _slots(q, heads, table, (table.tile, shape.WIDE_D))
    out = backward.GradOfQueries(rows_of(grad), sums, grad_bias, *_bias_strides(grad_bias), 0, 0)
    over = (samples, heads) if grad_bias is None else grad_bias.shape[:2]  # of one launch
    mode = 0 if grad_bias is None else 1 + (tuple(over) != (samples, heads))
    warps, stages = warps_and_stages(table.tile, shape.WIDE_D, q.dtype)
    registers = None if mode else _registers(shape, warps, q.dtype)
    launches = []
    for sample in range(0, samples, over[0]):
        for head in range(0, heads, over[1]):
            tile_out = out._replace(sample=sample, head=head)
            arguments = (
                KernelInputs(*map(rows_of, inputs)), incoming, tile_out, _lists(table), extra, numbers, mode, shape
            )  # fmt: skip
            grid = (table.num_items, over[1], over[0])
            launches.append(KernelLaunch(backward.backward_queries, grid, arguments, warps, stages, registers))
    if table.num_slots:
        grid = (table.num_merges, heads, samples)
        launches.append(
            KernelLaunch(backward.merge_sums, grid, (sums, rows_of(grad), _merges(table), numbers, shape), 8, 2)
        )
    return launches


def key_launches(
    inputs: Sequence[Tensor],
    incoming: backward.OutputGrad,
    extras: ScoreModifiers,
    table: DeviceLut,
    grads: tuple[Tensor, Tensor],
) -> list[KernelLaunch]:
    """Return the launches for dK and dV.

    Args:
        grads: of k and v, to be written.
    """
    q, k, _ = inputs
    shape, numbers, extra = (
        _shape(inputs, extras, table, of_keys=True),
        _numbers(inputs, extras, table),
        _given(extras),
    )
    samples, heads = k.shape[:2]
    sums = [_slots(q, heads, table, (table.tile, shape.WIDE_D)) for _ in range(2)]
    out = backward.GradOfKeys(*map(rows_of, grads), *sums)
    arguments = (KernelInputs(*map(rows_of, inputs)), incoming, out, _lists(table), extra, numbers, shape)
    warps, stages = warps_and_stages(table.tile, shape.WIDE_D, q.dtype, of_keys=True)
    launches = [KernelLaunch(backward.backward_keys, (table.num_items, heads, samples), arguments, warps, stages)]
    if table.num_slots:
        grid = (table.num_merges, heads, samples)
        for total, grad in zip(sums, grads, strict=True):
            merged = (total, rows_of(grad), _merges(table), numbers, shape)
            launches.append(KernelLaunch(backward.merge_sums, grid, merged, 8, 2))
    return launches


def _registers(shape: KernelShape, warps: int, dtype: torch.dtype) -> int | None:
    """Limit a thread's registers so that two programs run on a multiprocessor, where almost none spill; else None."""
    is_apart = shape.SUB < shape.ENTRY or dtype == torch.float32  # gathered, or without matrix instructions
    is_light = not (shape.HAS_BIAS or shape.HAS_DROPOUT or shape.HAS_PADDING or is_apart)
    return 65_536 // (2 * 32 * warps) if is_light and shape.WIDE_D <= 64 and warps > 4 else None


def _slots(like: Tensor, heads: int, table: DeviceLut, sizes: tuple[int, ...]) -> Tensor:
    """Allocate the partial sums of split tiles, fp32 [B, heads, slots, *sizes]."""
    return torch.empty(like.shape[0], heads, table.num_slots, *sizes, dtype=torch.float32, device=like.device)


def _lists(table: DeviceLut) -> LutPointers:
    return LutPointers(table.items, table.full, table.partial, _group_stride(table.items))


def _merges(table: DeviceLut) -> SplitTiles:
    return SplitTiles(table.merges, _group_stride(table.merges))


def _group_stride(tensor: Tensor) -> int:
    """Return the stride between the tables of two heads; 0 where all share one."""
    return tensor.stride(0) if tensor.shape[0] > 1 else 0


def _given(extras: ScoreModifiers) -> ModifierArgs:
    draw = extras.draw
    parts = (None, None, None, 0) if draw is None else (draw.factors, draw.offsets, draw.columns, draw.threshold)
    return ModifierArgs(extras.key_padding, extras.bias, *_bias_strides(extras.bias), *parts)


def _bias_strides(bias: Tensor | None) -> tuple[int, int, int, int]:
    if bias is None:
        return NO_BIAS_STRIDES
    strides = [stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.stride(), strict=True)]
    return strides[0], strides[1], strides[2], strides[3]


def _bare_numbers(inputs: Sequence[Tensor]) -> KernelScalars:
    q, k, _ = inputs
    return KernelScalars(q.shape[1], k.shape[1], q.shape[2], k.shape[2], 0, 1.0, 1.0, 1.0)


def _numbers(inputs: Sequence[Tensor], extras: ScoreModifiers, table: DeviceLut) -> KernelScalars:
    kept_scale = 1.0 if extras.draw is None else 1.0 / (1.0 - extras.draw.p)
    return _bare_numbers(inputs)._replace(
        num_slots=table.num_slots,
        scale=extras.scale,
        scale_log2=extras.scale * log2(e),
        kept_scale=kept_scale,
    )


def _bare_shape(inputs: Sequence[Tensor], tile: int) -> KernelShape:
    q, k, _ = inputs
    return KernelShape(
        D=q.shape[3],
        WIDE_D=max(16, triton.next_power_of_2(q.shape[3])),
        TILE=tile,
        ENTRY=16,
        RUN=tile,
        SUB=16,
        GROUP=q.shape[1] // k.shape[1],
        LISTS=1,
        HAS_PADDING=False,
        HAS_BIAS=False,
        HAS_DROPOUT=False,
        IS_SPLIT=False,
        IS_PLAIN=True,
        IS_AHEAD=True,
        UPCAST=not isinstance(forward.forward, JITFunction),
    )


def _shape(inputs: Sequence[Tensor], extras: ScoreModifiers, table: DeviceLut, of_keys: bool = False) -> KernelShape:
    is_heavy = extras.bias is not None or extras.draw is not None
    return _bare_shape(inputs, table.tile)._replace(
        ENTRY=table.entry,
        RUN=table.run,
        SUB=table.sub_block,
        LISTS=table.num_lists,
        HAS_PADDING=extras.key_padding is not None,
        HAS_BIAS=extras.bias is not None,
        HAS_DROPOUT=extras.draw is not None,
        IS_SPLIT=table.num_slots > 0,
        IS_PLAIN=extras.scale >= 0,
        IS_AHEAD=not (is_heavy or (of_keys and table.sub_block < table.entry)),
    )
