"""Register context-parallel attention as a few ops and one autograd function, so that torch's tools see few ops.

Selective recomputation saves their results, fake tensors follow them, and compiled code contains them whole. Autograd
keeps the loop's inputs and outputs; where heads are exchanged these are of this rank's heads, so nothing of the forward
is exchanged again. Gradients of gradients raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function

from shardwise.attention.backends import Draw, SavedForBackward, ScoreModifiers, wide_dtype
from shardwise.context.plan_cache import PlanCache, RankPlan
from shardwise.context.ring import attend_in_steps, differentiate_in_steps
from shardwise.context.ulysses import HeadGroup, heads_of
from shardwise.layout.token_ranges import count_tokens
from shardwise.runtime.op_registry import Op, OpRegistry

_EXTRA: Final = (
    "Tensor? key_padding, Tensor? factors, Tensor? offsets, Tensor? columns, int num_heads, int plan, float scale, "
    "float p"
)


class ContextCustomOps:
    """Holds the ops of one engine; `close` removes them.

    Args:
        plans: finds the plan of the number that an op is given.
        runs_on_fakes: whether the other ranks are simulated.
    """

    def __init__(self, plans: PlanCache, runs_on_fakes: bool) -> None:
        self.plans = plans
        register = self._registry = OpRegistry(runs_on_fakes)
        self.attend_in_steps: Op = register(
            f"context_attention(Tensor q, Tensor k, Tensor v, {_EXTRA}) -> (Tensor, Tensor)",
            functools.partial(_attend, plans),
            _attend_fake,
        )
        self.differentiate_in_steps: Op = register(
            "context_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
            f"{_EXTRA}, bool is_kv_wide) -> (Tensor, Tensor, Tensor)",
            functools.partial(_differentiate, plans),
            _differentiate_fake,
        )
        self.to_heads: Op = register(
            "context_to_heads(Tensor[] parts, int plan) -> Tensor",
            lambda parts, plan: plans.find(plan).team.to_heads(parts),
            lambda parts, plan: _to_heads_fake(plans.find(plan).team, parts),
        )
        self.to_tokens: Op = register(
            "context_to_tokens(Tensor[] parts, int[] num_heads, int plan) -> Tensor",
            lambda parts, num_heads, plan: plans.find(plan).team.to_tokens(parts, num_heads),
            lambda parts, num_heads, plan: _to_tokens_fake(plans.find(plan).team, parts, num_heads),
        )
        self.attend: Callable[..., Tensor] = _function(self)

    def close(self) -> None:
        """Remove the ops; graphs through them raise from now on."""
        self._registry.close()


def _function(ops: ContextCustomOps) -> Callable[..., Tensor]:
    class ContextAttentionFunction(Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
            num_heads = [q.shape[1], k.shape[1], k.shape[1]]
            *tensors, size, plan, scale, p = others  # key padding, and of dropout factors, offsets and columns
            extra = (*tensors, num_heads[0], plan, scale, p)
            if size > 1:
                q, k, v = _unpacked(ops.to_heads([q, k, v], plan), [_own(num, size) for num in num_heads])
            out, lse = ops.attend_in_steps(q, k, v, *extra)
            ctx.save_for_backward(q, k, v, out, lse, *tensors)
            ctx.others, ctx.num_heads, ctx.size = extra[4:], num_heads, size
            if not torch.compiler.is_compiling():  # whose plans are kept for good
                ctx.planned = ops.plans.find(plan)
            if size > 1:
                out = ops.to_tokens([out], num_heads[:1], plan).transpose(1, 2)
            return out.detach()  # not a view to autograd, which could not be changed in place

        @staticmethod
        def backward(ctx: Any, grad_out: Tensor) -> Any:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise NotImplementedError(
                    "the gradient of a gradient of context-parallel attention does not exist; leave out "
                    "create_graph=True"
                )
            *tensors, key_padding, factors, offsets, columns = ctx.saved_tensors
            num_heads, size, plan, dtype = ctx.num_heads, ctx.size, ctx.others[1], tensors[0].dtype
            if size > 1:
                (grad_out,) = _unpacked(ops.to_heads([grad_out], plan), [_own(num_heads[0], size)])
            is_shared = num_heads[1] < size  # KV heads by several ranks, whose gradients are summed
            extra = (key_padding, factors, offsets, columns, *ctx.others)
            grads = ops.differentiate_in_steps(grad_out, *tensors, *extra, is_shared)
            if size > 1:
                found: list[Tensor] = []
                for of_dtype in (slice(0, 1), slice(1, 3)) if is_shared else (slice(0, 3),):
                    packed = ops.to_tokens(list(grads[of_dtype]), num_heads[of_dtype], plan)
                    found += packed.split(num_heads[of_dtype], dim=2)
                grads = [each.to(dtype).transpose(1, 2) for each in found]
            return (*grads, *[None] * 8)

    return ContextAttentionFunction.apply


def _own(num_heads: int, size: int) -> int:
    return heads_of(num_heads, size, 0)[1]


def _unpacked(packed: Tensor, num_heads: Sequence[int]) -> list[Tensor]:
    """Return views [B, H, N, D] of [N, B, all heads, D]."""
    return [each.permute(1, 2, 0, 3) for each in packed.split(list(num_heads), dim=2)]


def _whole_extras(
    planned: RankPlan, num_heads: int, extra: tuple[Tensor | None, ...], scale: float, p: float
) -> ScoreModifiers:
    """Return what acts on the scores of this rank's heads."""
    key_padding, factors, offsets, columns = extra
    draw = None
    if factors is not None and offsets is not None and columns is not None:
        first, num = heads_of(num_heads, len(planned.team.shares), planned.team.index)
        here = slice(first, first + num)
        draw = Draw(factors[:, here], offsets[:, here], columns, p)
    return ScoreModifiers(scale, key_padding, None, draw)


def _attend(plans: PlanCache, q: Tensor, k: Tensor, v: Tensor, *extra: Any) -> tuple[Tensor, Tensor]:
    *tensors, num_heads, plan, scale, p = extra
    planned = plans.find(plan)
    extras = _whole_extras(planned, num_heads, tuple(tensors), scale, p)
    out, lse = attend_in_steps(q, k, v, extras, planned.ring_plan_of(num_heads))
    return out, lse.contiguous()


def _attend_fake(q: Tensor, k: Tensor, v: Tensor, *extra: Any) -> tuple[Tensor, Tensor]:
    samples, heads, queries, head_dim = q.shape
    out = q.new_empty(samples, queries, heads, head_dim).transpose(1, 2)
    return out, q.new_empty(q.shape[:3], dtype=wide_dtype(q.dtype))


def _differentiate(plans: PlanCache, grad_out: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse, *tensors, num_heads, plan, scale, p, is_kv_wide = given
    planned = plans.find(plan)
    extras = _whole_extras(planned, num_heads, tuple(tensors), scale, p)
    saved = SavedForBackward(q, k, v, out, lse)
    grad_q, *grad_kv = differentiate_in_steps(grad_out, saved, extras, planned.ring_plan_of(num_heads))
    grad_k, grad_v = grad_kv if is_kv_wide else (each.to(k.dtype) for each in grad_kv)
    return grad_q.to(q.dtype), grad_k, grad_v


def _differentiate_fake(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, ...]:
    dtype = wide_dtype(k.dtype) if given[-1] else k.dtype
    return torch.empty_like(q), torch.empty_like(k, dtype=dtype), torch.empty_like(v, dtype=dtype)


def _to_heads_fake(team: HeadGroup, parts: Sequence[Tensor]) -> Tensor:
    samples, _, num_tokens, head_dim = parts[0].shape
    size = len(team.shares)
    heads = sum(_own(part.shape[1], size) for part in parts)
    return parts[0].new_empty(num_tokens * size, samples, heads, head_dim)


def _to_tokens_fake(team: HeadGroup, parts: Sequence[Tensor], num_heads: Sequence[int]) -> Tensor:
    samples, _, _, head_dim = parts[0].shape
    return parts[0].new_empty(samples, count_tokens(team.shares[0]), sum(num_heads), head_dim)
