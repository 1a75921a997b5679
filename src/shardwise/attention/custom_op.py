"""Block-sparse attention is a pair of registered ops, so that torch's tools see one op in place of many.

Autograd keeps q, k, v, the output, the log-sum-exp and the extras that are given. Selective recomputation saves the
op's results, fake tensors pass through it without a plan, and compiled code holds it as one op. Gradients of gradients
raise an error.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from shardwise.attention.backends import (
    AttentionGrads,
    Backend,
    BackendPlan,
    Draw,
    SavedForBackward,
    ScoreModifiers,
    wide_dtype,
)
from shardwise.attention.block_layout import BlockLayout
from shardwise.runtime.op_registry import LIBRARY
from shardwise.runtime.torch_private import is_fake

BACKENDS: Final[Mapping[str, tuple[str, str | None]]] = {
    "cpu": ("shardwise.attention.cpu", "CpuBackend"),
    "dense": ("shardwise.attention.dense", "DenseBackend"),
    "triton": ("shardwise.attention.triton.backend", None),
}
"""The back ends of the ops: a module and a class in it, or a module that is one; imported when first used."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, extras: ScoreModifiers, layout: BlockLayout, backend: str
) -> tuple[Tensor, Tensor]:
    """Compute the output [B, H, Nq, D] and the log-sum-exp [B, H, Nq] of checked arguments; differentiable once.

    Args:
        q: [B, H, Nq, D]; k and v are [B, K, Nk, D].
        layout: of Nq queries and Nk keys, and 1 or H heads.
    """
    out, lse = torch.ops.shardwise.block_sparse_attention(q, k, v, *_given(q, k, extras, layout, backend))
    return out, lse


def attention_forward_partial(
    q: Tensor, k: Tensor, v: Tensor, extras: ScoreModifiers, layout: BlockLayout, backend: str
) -> tuple[Tensor, Tensor]:
    """Compute `attend` without autograd, for callers that have a backward of their own.

    The arguments q, k, v, extras, layout and backend are those of `attend`.
    """
    with torch.no_grad():
        return attend(q, k, v, extras, layout, backend)


def attention_backward_partial(
    grad_out: Tensor, saved: SavedForBackward, extras: ScoreModifiers, layout: BlockLayout, backend: str
) -> AttentionGrads:
    """Compute the gradients of q, k and v of attention over some of the keys, in the dtype in which sums run.

    With the output and log-sum-exp of all keys, the result is exactly what these keys add to the gradients: their
    probabilities are exp(score - lse), and the term subtracted from the gradients of probabilities is sum(out *
    grad_out) of the whole (Dao et al., FlashAttention, 2022, algorithm 4). So the results of several parts are summed.

    Args:
        grad_out: [B, H, Nq, D], of the whole.
        saved: the keys and values of the part; the output and the log-sum-exp of the whole.
        extras: modifiers of the scores of the part; its bias gets no gradient.
        layout: of the queries and the part's keys.
    """
    extra = _given(saved.q, saved.k, extras, layout, backend)
    tensors = (saved.q, saved.k, saved.v, saved.out, saved.lse)
    with torch.no_grad():
        q, k, v, _ = torch.ops.shardwise.block_sparse_attention_backward(grad_out, None, *tensors, *extra, False, True)
    return AttentionGrads(q, k, v, None)


def backend_named(name: str) -> Backend:
    """Import and return the back end of a name of `BACKENDS`."""
    module, attribute = BACKENDS[name]
    module_of_backend: Any = importlib.import_module(module)
    backend: Backend = module_of_backend if attribute is None else getattr(module_of_backend, attribute)()
    return backend


def _given(q: Tensor, k: Tensor, extras: ScoreModifiers, layout: BlockLayout, backend: str) -> _Extra:
    tensors, numbers = _planned(layout, q, k, backend)
    draw = extras.draw
    return _Extra(
        extras.key_padding,
        extras.bias,
        None if draw is None else draw.factors,
        None if draw is None else draw.offsets,
        None if draw is None else draw.columns,
        tensors,
        numbers,
        extras.scale,
        0.0 if draw is None else draw.p,
        backend,
    )


_Planned = tuple[tuple[Tensor, ...], tuple[int, ...]]


def _planned(layout: BlockLayout, q: Tensor, k: Tensor, backend: str) -> _Planned:
    """Return the tensors and numbers of a layout's plan, which the layout keeps."""
    if q.is_meta or (not torch.compiler.is_compiling() and is_fake(q)):
        return (), ()  # fake tensors need no plan
    sizes = map(operator.index, (q.shape[1], k.shape[1], q.shape[3]))  # compiled code fixes them
    plan_key = (backend, *sizes, q.dtype, q.device)
    return layout.cached(plan_key, functools.partial(_plan, plan_key))


def _plan(place: tuple[Any, ...], layout: BlockLayout) -> _Planned:
    backend, num_heads, num_kv_heads, head_dim, dtype, device = place
    one = torch.empty((), dtype=dtype, device=device)
    q = one.expand(1, num_heads, layout.num_queries, head_dim)
    k = one.expand(1, num_kv_heads, layout.num_keys, head_dim)
    plan = backend_named(backend).plan(layout, q, k)
    return plan.tensors, plan.numbers


class _Extra(NamedTuple):
    """Holds the arguments of the ops after the tensors of attention, in the schemas' order."""

    key_padding: Tensor | None
    bias: Tensor | None
    factors: Tensor | None
    offsets: Tensor | None
    columns: Tensor | None
    plan: Sequence[Tensor]
    numbers: Sequence[int]
    scale: float
    p: float
    backend: str

    def extras(self) -> ScoreModifiers:
        draw = None
        if self.factors is not None and self.offsets is not None and self.columns is not None:
            draw = Draw(self.factors, self.offsets, self.columns, self.p)
        return ScoreModifiers(self.scale, self.key_padding, self.bias, draw)


def _forward(q: Tensor, k: Tensor, v: Tensor, *extra: Any) -> tuple[Tensor, Tensor]:
    extra_inputs = _Extra(*extra)
    plan = BackendPlan(tuple(extra_inputs.plan), tuple(extra_inputs.numbers))
    with _without_autocast(q.device.type):
        out, lse = backend_named(extra_inputs.backend).forward(q, k, v, extra_inputs.extras(), plan)
    return _in_form(out, _empty_output(q.to("meta"))), lse.contiguous()


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *extra: Any) -> tuple[Tensor, Tensor]:
    return _empty_output(q), q.new_empty(q.shape[:3], dtype=wide_dtype(q.dtype))


def _backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *extra: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *rest, needs_bias, is_wide = extra
    extra_inputs = _Extra(*rest)
    plan = BackendPlan(tuple(extra_inputs.plan), tuple(extra_inputs.numbers))
    saved = SavedForBackward(q, k, v, out, lse)
    with _without_autocast(q.device.type):
        backend = backend_named(extra_inputs.backend)
        grads = backend.backward(grad_out, grad_lse, saved, extra_inputs.extras(), plan, needs_bias, is_wide)
    grad_bias = (
        q.new_empty(0) if extra_inputs.bias is None or grads.bias is None else _like(grads.bias, extra_inputs.bias)
    )
    return _like(grads.q, q, is_wide), _like(grads.k, k, is_wide), _like(grads.v, v, is_wide), grad_bias


def _backward_fake(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *extra: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *rest, needs_bias, is_wide = extra
    bias = _Extra(*rest).bias
    grad_bias = q.new_empty(0) if bias is None or not needs_bias else torch.empty_like(bias)
    dq, dk, dv = (torch.empty_like(tensor, dtype=_grad_dtype(tensor, is_wide)) for tensor in (q, k, v))
    return dq, dk, dv, grad_bias


def _empty_output(q: Tensor) -> Tensor:
    """Return an empty [B, H, Nq, D], in memory [B, Nq, H, D]: the projection that follows then needs no copy."""
    samples, heads, queries, head_dim = q.shape
    return q.new_empty(samples, queries, heads, head_dim).transpose(1, 2)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Turn autocast off inside the context: `autocast` has cast q, k and v already."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _grad_dtype(of: Tensor, is_wide: bool) -> torch.dtype:
    return wide_dtype(of.dtype) if is_wide else of.dtype


def _like(found: Tensor, like: Tensor, is_wide: bool = False) -> Tensor:
    return _in_form(found, torch.empty_like(like, dtype=_grad_dtype(like, is_wide), device="meta"))


def _in_form(found: Tensor, form: Tensor) -> Tensor:
    """Return `found` in the dtype and with the strides of `form`, which fake tensors get as well."""
    pairs = zip(found.stride(), form.stride(), found.shape, strict=True)
    if found.dtype == form.dtype and all(stride == other for stride, other, size in pairs if size > 1):
        return found
    return torch.empty_like(form, device=found.device).copy_(found)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *extra = inputs
    extra_inputs = _Extra(*extra)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *extra_inputs[:5])
    ctx.others = extra_inputs[5:]  # the layout keeps the plan


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *extra = ctx.saved_tensors
    plan, numbers, *_ = ctx.others
    needs_bias = bool(ctx.needs_input_grad[4])
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = torch.ops.shardwise.block_sparse_attention_backward(
        grad_out, grad_lse, q, k, v, out, lse, *extra, *ctx.others, needs_bias, False
    )
    grad_bias = grads[3] if needs_bias else None
    # The result has the structure of the inputs; torch takes an empty list of numbers for a list of tensors.
    lists: tuple[Any, Any] = ([None] * len(plan), None if numbers else [])
    return (*grads[:3], None, grad_bias, None, None, None, *lists, None, None, None)


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "the gradient of a gradient of block-sparse attention does not exist; leave out create_graph=True, or use "
        "dense attention"
    )


_EXTRA: Final = (
    "Tensor? key_padding, Tensor? bias, Tensor? factors, Tensor? offsets, Tensor? columns, "
    "Tensor[] plan, int[] numbers, float scale, float p, str backend"
)
LIBRARY.define(f"block_sparse_attention(Tensor q, Tensor k, Tensor v, {_EXTRA}) -> (Tensor, Tensor)")
LIBRARY.define(
    "block_sparse_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, {_EXTRA}, bool needs_bias, bool is_wide) -> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.impl("block_sparse_attention", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("block_sparse_attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("shardwise::block_sparse_attention", _forward_fake, lib=LIBRARY)
torch.library.register_fake("shardwise::block_sparse_attention_backward", _backward_fake, lib=LIBRARY)
torch.library.register_autograd("shardwise::block_sparse_attention", _differentiate, setup_context=_keep, lib=LIBRARY)
torch.library.register_autograd("shardwise::block_sparse_attention_backward", _refuse, lib=LIBRARY)
