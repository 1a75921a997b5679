"""Send tokens to the ranks of their experts, multiply them there, and sum what comes back.

A layer's experts are spread over the ranks of a group, rank by rank in their order. A rank's tokens are its own:
each token is dispatched by one rank.

1. The choices of the tokens (k of each) are sorted by expert. The ranks exchange how many go to which expert.
2. Each choice's row is sent to the rank of its expert. No row is dropped or padded.
3. There the rows are put in the order of the experts, and each expert multiplies its own.
4. The results are sent back the same way, and each token sums its k, weighted, in the order of its choices.

Every step is one autograd function whose backward is another of them, so gradients may be differentiated again. None
adds into rows by index, which has no fixed order on a GPU.

[Note: Ranks and experts without tokens]
A rank that has no tokens, or whose experts get none, runs the same functions over no rows. Nothing may be skipped:
the backward of an exchange is an exchange, in which all ranks must take part, and an expert without tokens has a
gradient of zeros, which is summed over other ranks.

[Note: Order of the rows of an expert]
By rank, and by token on it. Where the ranks of a group are in the order of the data, that is the order in which one
process would have the rows; so the products that sum over rows, the gradients of weights, have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from shardwise.attention.api import autocast
from shardwise.comm.collectives import Comm
from shardwise.comm.tokens import RowCounts, exchange_counts, exchange_tokens
from shardwise.config.errors import EngineError
from shardwise.runtime.device import kind_of
from shardwise.runtime.forward_state import is_recorded, same_again
from shardwise.runtime.op_registry import Op, OpRegistry
from shardwise.runtime.torch_private import is_fake, unseen_by_op_modes

# N tokens of this rank, k choices of each, R rows that its experts get, E experts in all, L of this rank, H features

# Where each row of a new order is in the old one, and the inverse of that.
Permutation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RowGroups:
    """Says how many rows each expert of this rank has, one after the other: on the device and on the host."""

    sizes: Tensor
    counts: list[int]


@dataclass(frozen=True)
class Routing:
    """Says where the rows of one call go.

    Attributes:
        by_expert: sorts the choices [N * k].
        sent: rows for each rank; `received` those from each.
        arrange: puts received rows into the order of the experts; None where they are in it.
        groups: of the rows that this rank's experts get.
    """

    by_expert: Permutation
    sent: list[int]
    received: list[int]
    arrange: Permutation | None
    groups: RowGroups


class ExpertDispatch:
    """Computes layers of experts that are spread over the ranks of a group; `close` removes the registered ops.

    Args:
        skew: of simulated ranks: the rows that this rank's experts get over those that its tokens send.
    """

    def __init__(self, comm: Comm, skew: float = 1.0) -> None:
        self.comm = comm
        self._skew = skew
        self._numbers = count()
        self._saved: dict[int, tuple[Tensor, RowCounts]] = {}
        register = self._registry = OpRegistry(comm.is_simulated)
        self._exchange = register(
            "exchange_tokens(Tensor rows, int[] sent, int[] received, str name) -> Tensor",
            lambda rows, sent, received, name: exchange_tokens(comm, rows, sent, received, name),
            lambda rows, sent, received, name: rows.new_empty((sum(received), rows.shape[1])),
        )
        self._product = register(
            "grouped_product(Tensor rows, Tensor weight, Tensor? bias, Tensor sizes, int[] counts, bool transposed)"
            " -> Tensor",
            _grouped_product,
            _grouped_product,
        )

    def forward(self, experts: Any, hidden: Tensor, index: Tensor, weights: Tensor, name: str) -> Tensor:
        """Return what a layer's experts make of the tokens of this rank, summed over the choices of each: [N, H].

        Args:
            experts: a module with the flags of transformers' interface of experts, whose stacks have the experts of
                this rank alone.
            hidden: [N, H].
            index: [N, k], the experts of each token among those of all ranks.
            weights: [N, k], of the choices.
            name: of the layer, in counts and messages.

        Raises:
            CommError: an index names no expert.
            EngineError: a recomputation has chosen other experts than its forward.
        """
        routing = self._route(index, len(experts.down_proj), name)
        hidden_cast = hidden.to(autocast(experts.down_proj).dtype)
        rows = self._send(_take(hidden_cast, routing.by_expert, index.shape[1]), routing.sent, routing.received, name)
        rows = _take(rows, routing.arrange)
        rows = self._multiply(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, routing.groups)
        rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
        rows = self._multiply(experts, "down_proj", rows, routing.groups)
        rows = _take(rows, routing.arrange and routing.arrange[::-1])
        rows = self._send(rows, routing.received, routing.sent, name)
        # [Note: The norm after an expert]
        # Its weight is no expert's: all have the same. So it runs where the token is, and the gradient of its weight
        # is of this rank's tokens, as that of any weight outside of the experts.
        rows = experts.post_expert_norm(rows) if experts.has_post_expert_norm else rows
        chosen = _take(rows, routing.by_expert[::-1]).view(*index.shape, hidden.shape[1])
        return (chosen * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def forget(self) -> None:
        """Drop what recomputations of the forwards so far would need."""
        self._saved.clear()

    def close(self) -> None:
        """Remove the registered ops."""
        self.forget()
        self._registry.close()

    def _route(self, index: Tensor, num_local: int, name: str) -> Routing:
        num_experts = num_local * self.comm.world_size
        chosen, order = index.reshape(-1).sort(stable=True)
        number = same_again("experts", self._numbers.__next__)
        if number in self._saved:
            # [Note: A recomputation sends the same rows]
            # It exchanges no counts and reads no sizes. With other experts than those of the forward, its rows would
            # not fit the sizes, or the gradients not the output.
            saved, rows = self._saved[number]
            if not torch.equal(saved, index.to(saved.dtype)):
                raise EngineError(
                    "routing-changed",
                    f"{name}: the recomputation sends tokens to other experts than the forward did; make the router "
                    "deterministic, or set recompute.mode=none",
                )
        else:
            bounds = torch.arange(num_experts + 1, dtype=chosen.dtype, device=chosen.device)
            counts = torch.searchsorted(chosen, bounds, out_int32=True).diff().view(self.comm.world_size, num_local)
            with unseen_by_op_modes():
                rows = exchange_counts(self.comm, counts, index.numel(), name, self._skew)
            if is_recorded():
                self._saved[number] = index.to(torch.int16 if num_experts < 2**15 else torch.int32), rows
        groups = RowGroups(rows.on_device.sum(0), [sum(each) for each in zip(*rows.received, strict=True)])
        sent, received = ([sum(each) for each in by_rank] for by_rank in (rows.sent, rows.received))
        return Routing(_with_inverse(order), sent, received, _arrangement(rows.on_device, sum(received)), groups)

    def _send(self, rows: Tensor, sent: list[int], received: list[int], name: str) -> Tensor:
        if self.comm.world_size == 1:
            return rows
        moved: Tensor = _Exchange.apply(self._exchange, rows, sent, received, name)
        return moved

    def _multiply(self, experts: Any, stack: str, rows: Tensor, groups: RowGroups) -> Tensor:
        weight = autocast(getattr(experts, stack))
        bias = autocast(getattr(experts, f"{stack}_bias")) if experts.has_bias else None
        product: Tensor = _Product.apply(self._product, rows, weight, bias, groups, experts.is_transposed)
        return product


def _with_inverse(places: Tensor) -> Permutation:
    inverse = torch.empty_like(places)
    inverse[places] = torch.arange(len(places), dtype=places.dtype, device=places.device)
    return places, inverse


def _arrangement(received: Tensor, num_rows: int) -> Permutation | None:
    """Put rows by rank and expert into the order of expert and rank; their numbers are `received` [ranks, L]."""
    if min(received.shape) == 1:
        return None
    # The rows of a rank and an expert are a run. In the new order it begins where the runs before it end, so all its
    # rows are moved by one distance.
    starts = received.reshape(-1).cumsum(0).view_as(received) - received
    runs = received.t().reshape(-1)
    distances = starts.t().reshape(-1) - (runs.cumsum(0) - runs)
    places = torch.arange(num_rows, device=received.device)
    return _with_inverse(places + distances.repeat_interleave(runs, output_size=num_rows))


def _take(rows: Tensor, order: Permutation | None, num_copies: int = 1) -> Tensor:
    """Return rows, each so many times in succession, in another order."""
    taken: Tensor = rows if order is None else _Take.apply(rows, *order, num_copies)
    return taken


class _Take(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, inverse: Tensor, num_copies: int) -> Tensor:
        ctx.save_for_backward(places, inverse)  # a recomputation makes them again: they are not kept until then
        ctx.shape = rows.shape[0], num_copies, rows.shape[1]
        return rows.index_select(0, places if num_copies == 1 else places // num_copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        places, inverse = ctx.saved_tensors
        grad = _Take.apply(gradients[0], inverse, places, 1)
        return grad if ctx.shape[1] == 1 else grad.view(ctx.shape).sum(1), None, None, None


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, op: Op, rows: Tensor, sent: list[int], received: list[int], name: str) -> Tensor:
        ctx.given = op, sent, received, name
        moved: Tensor = op(rows.contiguous(), sent, received, name)
        return moved

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op, sent, received, name = ctx.given
        return None, _Exchange.apply(op, gradients[0], received, sent, name), None, None, None


class _Product(Function):
    """Multiply the rows [R, in] of each expert by its matrix, [L, out, in] or transposed, and add its bias."""

    @staticmethod
    def forward(
        ctx: Any, op: Op, rows: Tensor, weight: Tensor, bias: Tensor | None, groups: RowGroups, is_transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.given = op, groups, is_transposed
        product: Tensor = op(rows.contiguous(), weight, bias, groups.sizes, groups.counts, is_transposed)
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        op, groups, is_transposed = ctx.given
        grad = gradients[0].contiguous()  # that of a sum has strides of 0, which no kernel for groups takes
        of_rows = of_weight = of_bias = None
        if ctx.needs_input_grad[1]:
            of_rows = _Product.apply(op, grad, weight, None, groups, not is_transposed)
        if ctx.needs_input_grad[2]:
            left, right = (rows, grad) if is_transposed else (grad, rows)
            of_weight = _Outer.apply(op, left, right, groups)
        if ctx.needs_input_grad[3]:
            of_bias = torch.stack([part.sum(0) for part in grad.split(groups.counts)])
        return None, of_rows, of_weight, of_bias, None, None


class _Outer(Function):
    """Return for each expert `left.T @ right` over its rows [R, p] and [R, q]: [L, p, q]."""

    @staticmethod
    def forward(ctx: Any, op: Op, left: Tensor, right: Tensor, groups: RowGroups) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.given = op, groups
        return _grouped_outer(left.contiguous(), right.contiguous(), groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        left, right = ctx.saved_tensors
        op, groups = ctx.given
        of_left = _Product.apply(op, right, gradients[0], None, groups, False)
        return None, of_left, _Product.apply(op, left, gradients[0], None, groups, True), None


def _grouped_product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, sizes: Tensor, counts: Sequence[int], is_transposed: bool
) -> Tensor:
    matrices = weight if is_transposed else weight.transpose(1, 2)
    if _has_kernel(rows, weight):
        out = F.grouped_mm(rows, matrices, offs=sizes.cumsum(0, dtype=torch.int32))
    else:
        out = rows.new_empty((rows.shape[0], matrices.shape[2]))
        if not is_fake(rows):
            for part, matrix, result in zip(rows.split(counts), matrices, out.split(counts), strict=True):
                if len(part):
                    torch.mm(part, matrix, out=result)
    if bias is not None:
        out += bias.repeat_interleave(sizes, 0, output_size=len(rows))
    return out


def _grouped_outer(left: Tensor, right: Tensor, groups: RowGroups) -> Tensor:
    if _has_kernel(left, right):
        out = F.grouped_mm(left.t(), right, offs=groups.sizes.cumsum(0, dtype=torch.int32))
    else:
        out = left.new_empty((len(groups.counts), left.shape[1], right.shape[1]))
        if not is_fake(left):
            parts = (left.split(groups.counts), right.split(groups.counts), out)
            for own_left, own_right, result in zip(*parts, strict=True):
                if len(own_left):
                    torch.mm(own_left.t(), own_right, out=result)
    for expert, number in enumerate(groups.counts):
        if number == 0:
            out[expert].zero_()
    return out


def _has_kernel(rows: Tensor, other: Tensor) -> bool:
    """Say whether torch's product of groups takes these: it wants rows, and all strides in steps of 16 bytes."""
    if rows.dtype not in kind_of(rows.device).grouped_dtypes or is_fake(rows) or len(rows) == 0:
        return False
    strides = (rows.shape[1], *other.shape[1:], rows.storage_offset(), other.storage_offset())
    return other.is_contiguous() and all(number * rows.element_size() % 16 == 0 for number in strides)
