"""Offers the function of block-sparse attention.

>>> import torch
>>> from shardwise.attention import BlockLayout
>>> layout = BlockLayout.from_blocks(torch.ones(2, 2).tril(), block=16, causal=True)
>>> q = torch.randn(1, 4, 32, 8)
>>> k, v = torch.randn(2, 1, 2, 32, 8)
>>> out = block_sparse_attention(q, k, v, layout)
>>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
>>> torch.allclose(out, expected, atol=1e-6)
True
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.attention.backends import Draw, ScoreModifiers
from shardwise.attention.block_layout import BlockLayout
from shardwise.attention.custom_op import BACKENDS, attend
from shardwise.config.arguments import described
from shardwise.config.errors import ConfigError
from shardwise.dropout import probability_hashes
from shardwise.runtime.device import kind_of
from shardwise.runtime.torch_private import constant_in_graphs, is_transformed

_FLEX: Final = "flex"
# On a device: with the Triton kernels of this library, and where they do not run.
_WITH_KERNELS: Final = "triton"
_WITHOUT: Final = "dense"


@dataclass
class _Forced:
    """Holds the back end that is forced now: in all threads, since a GPU's backward runs on one of autograd's."""

    name: str | None = None


_FORCED: Final = _Forced()


@contextmanager
def attention_backend(name: str) -> Iterator[None]:
    """Run block-sparse attention inside the context on the back end "cpu", "dense", "triton" or "flex".

    It holds in all threads. A recomputation runs during the backward, so the context must be open then, or a forward
    that is recomputed must enter it itself. Compiled code keeps the back end that it was compiled with.

    Raises:
        ConfigError: there is no such back end.
    """
    names = [*BACKENDS, _FLEX]
    if name not in names:
        raise ConfigError("unknown-backend", f"attention backend {name!r} does not exist; there are {', '.join(names)}")
    before, _FORCED.name = _FORCED.name, name
    try:
        yield
    finally:
        _FORCED.name = before


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    key_padding: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float | Draw = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Compute attention over the blocks of a layout: softmax(scale * q k^T + bias) v over the keys that a query sees.

    Rows that see no key give 0, and so do all gradients through them. Under autocast q, k and v are cast.

    Args:
        q: [B, H, Nq, D]: samples, heads, queries, head size.
        k: [B, K, Nk, D]; H is a multiple of K, and query head h reads KV head h // (H / K).
        layout: of Nq queries and Nk keys, with 1 or H heads.
        key_padding: [B, Nk], bool, True for a real token; no query sees the others.
        bias: [1 or B, 1 or H, Nq, Nk], floating, added to the scaled scores; it gets a gradient. -inf is allowed.
        dropout: the rate p, 0 <= p < 1, at which probabilities are dropped, or the draw itself. With a rate, the bits
            are keyed in an engine's forward, and come from torch's generator for the CPU elsewhere.
        scale: factor of the scores; None means 1 / sqrt(D).

    Returns:
        [B, H, Nq, D].

    Raises:
        ConfigError: the arguments do not fit each other.
    """
    return block_sparse_attention_with_lse(
        q, k, v, layout, key_padding=key_padding, bias=bias, dropout=dropout, scale=scale
    )[0]


def block_sparse_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    key_padding: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float | Draw = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `block_sparse_attention` and the log-sum-exp of each row's scores, which has a gradient too.

    The arguments q, k, v, layout, key_padding, bias, dropout and scale are those of `block_sparse_attention`.

    Returns:
        [B, H, Nq, D]; and [B, H, Nq], in fp32 (fp64 for fp64), -inf where a query sees no key.
    """
    _check_kinds(layout, dropout, scale, q=q, k=k, v=v, key_padding=key_padding, bias=bias)
    q, k, v = (autocast(tensor) for tensor in (q, k, v))
    _check_tensors(q, k, v)
    _check_untransformed(q, k, v, bias)
    _check_layout(q, k, layout)
    _check_extras(q, k, key_padding, bias)
    p = dropout.p if isinstance(dropout, Draw) else dropout
    if not 0.0 <= p < 1.0:
        raise ConfigError("dropout-rate", f"dropout={p} is no rate; nearest legal: {0.0 if p < 0 else 0.99}")
    draw = dropout if isinstance(dropout, Draw) else None
    if draw is not None:
        _check_draw(q, k, draw)
    elif p > 0.0 and q.numel() and k.numel():
        draw = drawn(q, layout, p)
    extras = ScoreModifiers(q.shape[-1] ** -0.5 if scale is None else float(scale), key_padding, bias, draw)
    backend = backend_for(q.device.type)
    if backend == _FLEX:
        # Imported when it is first used, since it imports the compiler.
        flex: Any = importlib.import_module("shardwise.attention.flex")
        attended: tuple[Tensor, Tensor] = flex.flex_attention_of(q, k, v, layout, extras)
        return attended
    return attend(q, k, v, extras, layout, backend)


def autocast(tensor: Tensor) -> Tensor:
    """Cast a floating input of attention to autocast's dtype where autocast is on; fp64 stays, as in torch's ops."""
    device_type = tensor.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device_type)) if tensor.is_floating_point() else tensor


@constant_in_graphs
def backend_for(device_type: str, preferred: str | None = None) -> str:
    """Return the back end of a device: the forced one, else the preferred one, else the one measured as faster."""
    row = kind_of(device_type)
    return _FORCED.name or preferred or ("cpu" if row.is_cpu else _WITH_KERNELS if row.has_kernels else _WITHOUT)


def _check_kinds(layout: object, dropout: object, scale: object, **tensors: object) -> None:
    """Refuse arguments of other classes; plain tests, as compiled code passes here."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) and not (tensor is None and name in ("key_padding", "bias")):
            raise ConfigError("attention-tensor", f"{described(name, tensor)}; give a tensor")
    if not isinstance(dropout, int | float | Draw):
        raise ConfigError("dropout-rate", f"{described('dropout', dropout)}; give a rate from 0 to below 1")
    if scale is not None and (not isinstance(scale, int | float) or not math.isfinite(scale)):
        raise ConfigError("attention-scale", f"{described('scale', scale)}; give a finite number, or None")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    names = (("q", q), ("k", k), ("v", v))
    for name, tensor in names:
        if tensor.ndim != 4:
            raise ConfigError(
                "qkv-dims",
                f"{name} of shape {tuple(tensor.shape)} has {tensor.ndim} dims; "
                "give [samples, heads, tokens, head size]",
            )
    if k.shape != v.shape:
        raise ConfigError(
            "k-v-shapes",
            f"k of shape {tuple(k.shape)} and v of shape {tuple(v.shape)} differ; pad the smaller head size with zeros",
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ConfigError(
            "q-k-shapes",
            f"q of shape {tuple(q.shape)} and k of shape {tuple(k.shape)} differ in samples or head size; "
            "make both equal",
        )
    if not q.shape[1] or not q.shape[3]:
        raise ConfigError(
            "qkv-empty", f"q of shape {tuple(q.shape)} has no heads or no head size; give 1 or more of each"
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        legal = [number for number in range(1, q.shape[1] + 1) if q.shape[1] % number == 0]
        raise ConfigError(
            "kv-heads-divide-heads",
            f"{k.shape[1]} KV heads do not divide {q.shape[1]} query heads; legal: {', '.join(map(str, legal))}",
        )
    if not q.is_floating_point():
        raise ConfigError(
            "attention-dtype", f"q is of {q.dtype}; attention needs float16, bfloat16, float32 or float64"
        )
    for name, tensor in names[1:]:
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ConfigError(
                "qkv-dtype-device",
                f"{name} is of {tensor.dtype} on {tensor.device} and q of {q.dtype} on {q.device}; move {name} with "
                f"{name}.to(q)",
            )


def _check_untransformed(*tensors: Tensor | None) -> None:
    if torch.compiler.is_compiling():
        return
    if any(tensor is not None and is_transformed(tensor) for tensor in tensors):
        raise NotImplementedError(
            "block-sparse attention has no rule for torch.func's transforms (vmap, grad, jvp) nor for forward-mode "
            "derivatives; use loss.backward(), more samples in place of vmap, or dense attention"
        )


def _check_layout(q: Tensor, k: Tensor, layout: BlockLayout) -> None:
    if not isinstance(layout, BlockLayout):
        raise ConfigError(
            "layout-type",
            f"layout is of type {type(layout).__name__}, not BlockLayout; give structure.layout(seq_len), or "
            "BlockLayout.from_blocks(blocks, block)",
        )
    if (q.shape[2], k.shape[2]) != (layout.num_queries, layout.num_keys):
        raise ConfigError(
            "layout-length",
            f"{q.shape[2]} queries and {k.shape[2]} keys do not fit a layout of {layout.num_queries} and "
            f"{layout.num_keys}; make the layout for this length, or pad to it",
        )
    if layout.num_heads not in (1, q.shape[1]):
        raise ConfigError(
            "layout-heads",
            f"a layout of {layout.num_heads} heads does not fit {q.shape[1]} query heads; legal: 1 or {q.shape[1]}",
        )


def _check_extras(q: Tensor, k: Tensor, key_padding: Tensor | None, bias: Tensor | None) -> None:
    if key_padding is not None:
        if key_padding.dtype != torch.bool:
            raise ConfigError(
                "padding-bools", f"key_padding is of {key_padding.dtype}; give bools, True for a real token: mask != 0"
            )
        _check_shape("key_padding", key_padding, [(k.shape[0],), (k.shape[2],)])
        _check_device("key_padding", key_padding, q)
    if bias is not None:
        if not bias.is_floating_point():
            raise ConfigError(
                "bias-floats", f"bias is of {bias.dtype}; give floats, -inf where a query must not see a key"
            )
        _check_shape("bias", bias, [(1, q.shape[0]), (1, q.shape[1]), (q.shape[2],), (k.shape[2],)])
        _check_device("bias", bias, q)


def _check_draw(q: Tensor, k: Tensor, draw: Draw) -> None:
    rows = [(size,) for size in q.shape[:3]]
    for name, tensor, shape in (
        ("dropout.factors", draw.factors, rows),
        ("dropout.offsets", draw.offsets, rows),
        ("dropout.columns", draw.columns, [(k.shape[2],)]),
    ):
        _check_shape(name, tensor, shape)
        _check_device(name, tensor, q)
        if tensor.dtype != torch.int32:
            raise ConfigError("draw-int32", f"{name} is of {tensor.dtype}; give int32")


def _check_shape(name: str, tensor: Tensor, legal: Sequence[tuple[int, ...]]) -> None:
    """Raise `ConfigError` unless each dim's size is one of its legal sizes."""
    if tensor.ndim != len(legal) or any(size not in sizes for size, sizes in zip(tensor.shape, legal, strict=True)):
        wanted = ", ".join(" or ".join(map(str, dict.fromkeys(sizes))) for sizes in legal)
        raise ConfigError("operand-shape", f"{name} of shape {tuple(tensor.shape)} does not fit; give [{wanted}]")


def _check_device(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise ConfigError(
            "operand-device", f"{name} is on {tensor.device} and q on {q.device}; move it with {name}.to(q.device)"
        )


def drawn(q: Tensor, layout: BlockLayout, p: float) -> Draw:
    """Draw the bits of one dropout: keyed in an engine's forward, from torch's generator for the CPU elsewhere.

    Queries q [B, H, Nq, D] after cached keys draw by true positions; those of several documents are numbered through.

    Args:
        p: the rate; more than 0 and less than 1.

    Raises:
        ConfigError: the layout is of other queries or keys than all, or than the last queries of one document.
    """
    num_samples, num_heads, num_queries, _ = q.shape
    first = _first_position(layout)
    hashes = probability_hashes((num_samples, num_heads, num_queries, layout.num_keys), q.device, first)
    shape = (num_samples, num_heads, num_queries)
    return Draw(hashes.factors.view(shape), hashes.offsets.view(shape), hashes.columns, p)


def _first_position(layout: BlockLayout) -> int:
    """Return the position of the first query; the other queries follow it."""
    num_tokens = sum(pattern.num_tokens for pattern in layout.patterns)
    first = num_tokens - layout.num_queries
    is_last = layout.patterns[0].query_runs == ((first, num_tokens),)
    if layout.num_keys != num_tokens or (first and not is_last):
        raise ConfigError(
            "draw-positions",
            f"dropout over {layout.num_queries} queries and {layout.num_keys} keys of {num_tokens} tokens has no "
            "positions to draw by; give a Draw of these queries and keys, or all keys and the last queries",
        )
    return first
