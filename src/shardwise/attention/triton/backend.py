"""Implements the Triton back end: this module is a `backends.Backend`.

It is deterministic, and takes fp32, fp16 and bf16 and head sizes up to 256.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from shardwise.attention.backends import AttentionGrads, BackendPlan, Draw, SavedForBackward, ScoreModifiers
from shardwise.attention.block_layout import BlockLayout
from shardwise.attention.triton.lut import HeadGroups
from shardwise.attention.triton.plan import plan_of, tables_in
from shardwise.config.errors import ConfigError

MOST_HEAD_DIM: Final = 256


def plan(layout: BlockLayout, q: Tensor, k: Tensor) -> BackendPlan:
    """Make the look-up tables of a layout, for tensors like q and k; the caller keeps them.

    Raises:
        ConfigError: the kernels do not serve this dtype or head size, or heads differ in number.
    """
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError("triton-dtype", f"dtype={q.dtype} has no Triton kernel; use float32, float16 or bfloat16")
    if q.shape[3] > MOST_HEAD_DIM:
        raise ConfigError(
            "triton-head-size", f"head size {q.shape[3]} has no Triton kernel; nearest legal: {MOST_HEAD_DIM}"
        )
    heads = HeadGroups(q.shape[1], k.shape[1])
    if layout.num_heads not in (1, heads.query):
        raise ConfigError(
            "layout-heads", f"the layout has {layout.num_heads} heads and the queries {heads.query}; give 1 or as many"
        )
    return plan_of(layout, heads, head_dim=q.shape[3], dtype=q.dtype, device=q.device)


def forward(q: Tensor, k: Tensor, v: Tensor, extras: ScoreModifiers, plan: BackendPlan) -> tuple[Tensor, Tensor]:
    """Compute the output [B, H, Nq, D], in memory [B, Nq, H, D], and the log-sum-exp [B, H, Nq] in fp32."""
    inputs = [_last_dim_contiguous(tensor) for tensor in (q, k, v)]
    samples, heads, tokens, head_dim = q.shape
    out = q.new_empty(samples, tokens, heads, head_dim).transpose(1, 2)  # [B, H, Nq, D]
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)  # [B, H, Nq]
    queries, _ = tables_in(plan)
    with torch.cuda.device_of(q):
        for launch in _launches().forward_launches(inputs, _contiguous(extras), queries, (out, lse)):
            launch.run()
    return out, lse


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    saved: SavedForBackward,
    extras: ScoreModifiers,
    plan: BackendPlan,
    needs_bias: bool,
    is_wide: bool = False,
) -> AttentionGrads:
    """Compute the gradients, with the strides of their inputs; that of a broadcast bias is summed in fp32."""
    make = _launches()
    inputs = [_last_dim_contiguous(tensor) for tensor in (saved.q, saved.k, saved.v)]
    grads = [torch.empty_like(tensor, dtype=torch.float32 if is_wide else None) for tensor in inputs]
    extras = _contiguous(extras)
    grad_bias = _bias_gradient(saved.q, extras.bias) if needs_bias else None
    out, grad_out = _last_dim_contiguous(saved.out), _last_dim_contiguous(grad_out)
    grad_lse = None if grad_lse is None else grad_lse.float().contiguous()
    rows = [
        torch.empty(saved.lse.shape, dtype=torch.float32, device=saved.q.device) for _ in range(2)
    ]  # [B, H, Nq] each
    incoming = make.backward.OutputGrad(make.rows_of(grad_out), *rows)
    queries, keys = tables_in(plan)
    with torch.cuda.device_of(saved.q):
        make.prepare_launch(inputs, (out, saved.lse.contiguous(), grad_lse), incoming).run()
        for launch in make.query_launches(inputs, incoming, extras, queries, (grads[0], grad_bias)):
            launch.run()
        for launch in make.key_launches(inputs, incoming, extras, keys, (grads[1], grads[2])):
            launch.run()
    if grad_bias is not None and extras.bias is not None:
        grad_bias = grad_bias.to(extras.bias.dtype)
    return AttentionGrads(grads[0], grads[1], grads[2], grad_bias)


def _launches() -> ModuleType:
    """Import the module that needs Triton, when its kernels are first used."""
    try:
        from shardwise.attention.triton import launch
    except ImportError as error:
        raise ConfigError(
            "triton-missing", "attention backend 'triton' needs the package triton; pip install 'triton>=3.6'"
        ) from error
    return launch


def _bias_gradient(q: Tensor, bias: Tensor | None) -> Tensor | None:
    """Make zeros for the gradient of a bias: in its own dtype where each element is written once, else in fp32."""
    if bias is None:
        return None
    is_whole = bias.shape[:2] == q.shape[:2]
    return torch.zeros(bias.shape, dtype=bias.dtype if is_whole else torch.float32, device=q.device)


def _last_dim_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _contiguous(extras: ScoreModifiers) -> ScoreModifiers:
    """Make the extras contiguous, as the kernels index them; the bias keeps its strides."""
    draw = extras.draw
    if draw is not None:
        draw = Draw(draw.factors.contiguous(), draw.offsets.contiguous(), draw.columns.contiguous(), draw.p)
    padding = None if extras.key_padding is None else extras.key_padding.contiguous()
    return ScoreModifiers(extras.scale, padding, extras.bias, draw)
