"""Send tokens to the ranks of their experts, multiply them there, and sum what comes back.

A layer's experts are spread over the ranks of a group, in the order of the ranks; a token is dispatched by one rank.

1. The choices of the tokens (k of each) are sorted by expert, and the ranks exchange how many go to which.
2. Each choice's row is sent to the rank of its expert. No row is dropped or padded.
3. There the rows are put in the order of the experts, and each expert multiplies its own.
4. The results are sent back the same way, and each token sums its k, weighted, in the order of its choices.

The backward of every step is another of them, so gradients may be differentiated again. None adds into rows by index,
which has no fixed order on a GPU.

[Note: Ranks and experts without tokens]
A rank that has no tokens, or whose experts get none, runs the same functions over no rows. Nothing may be skipped:
the backward of an exchange is an exchange, in which all ranks must take part, and an expert without tokens has a
gradient of zeros, which is summed over other ranks.

[Note: Order of the rows of an expert]
By rank, and by token on it. Where the ranks of a group are in the order of the data, one process would have the rows
in that order; so products that sum over rows, the gradients of weights, have the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardwise.attention.api import autocast
from shardwise.comm.collectives import Comm
from shardwise.comm.tokens import RowCounts, exchange_counts, exchange_tokens
from shardwise.config.errors import EngineError
from shardwise.models.grouped_experts import run_experts
from shardwise.runtime.forward_state import is_repeatable, same_again
from shardwise.runtime.op_registry import Op, OpRegistry
from shardwise.runtime.torch_private import is_fake, unseen_by_op_modes

# N tokens of this rank, k choices of each, R rows that its experts get, E experts in all, L of this rank, H features

# Where each row of a new order is in the old one, and the inverse of that.
Permutation = tuple[Tensor, Tensor]


class ExpertDispatch:
    """Computes layers of experts that are spread over the ranks of a group; `close` removes the registered ops.

    Args:
        skew: of simulated ranks: the rows that this rank's experts get over those that its tokens send.
    """

    def __init__(self, comm: Comm, skew: float = 1.0) -> None:
        self.comm = comm
        self._skew = skew
        register = OpRegistry(comm.is_simulated)
        self.close = register.close
        self._exchange = register(
            "exchange_tokens(Tensor rows, int[] sent, int[] received, str name) -> Tensor",
            lambda rows, sent, received, name: exchange_tokens(comm, rows, sent, received, name),
            lambda rows, sent, received, name: rows.new_empty((sum(received), rows.shape[1])),
        )

    def forward(
        self, experts: Any, hidden: Tensor, index: Tensor, weights: Tensor, name: str, is_same_again: bool = False
    ) -> Tensor:
        """Return what a layer's experts make of this rank's tokens, summed over the choices of each: [N, H].

        Args:
            experts: a module with the flags of transformers' interface of experts; its stacks are this rank's experts.
            hidden: [N, H]; the index of the chosen experts, among those of all ranks, and their weights are [N, k].
            name: of the layer, in counts and messages.
            is_same_again: whether a recomputation is certain to get the same index.

        Raises:
            CommError: an index names no expert.
            EngineError: a recomputation has chosen other experts than its forward.
        """
        num_local, num_choices = len(experts.down_proj), index.shape[1]
        chosen, order = index.reshape(-1).sort(stable=True)
        by_expert = _with_inverse(order)
        counts = self._exchange_counts(index, chosen, num_local, name, is_same_again)
        # Received rows are put into the order of the experts, unless they are in it.
        arrange = _arrangement(counts.on_device, sum(counts.received))
        ends = counts.on_device.sum(0).cumsum(0, dtype=torch.int32)
        rows = _take(hidden.to(autocast(experts.down_proj).dtype), by_expert, num_choices)
        rows = self._send(rows, counts.sent, counts.received, name)
        rows = run_experts(experts, _take(rows, arrange), ends, counts.by_part)
        rows = self._send(_take(rows, arrange and arrange[::-1]), counts.received, counts.sent, name)
        # [Note: The norm after an expert]
        # Its weight is no expert's: all have the same. So it runs where the token is, and the gradient of its weight
        # is of this rank's tokens, as that of any weight outside of the experts.
        rows = experts.post_expert_norm(rows) if experts.has_post_expert_norm else rows
        results = _take(rows, by_expert[::-1]).view(*index.shape, hidden.shape[1])
        return (results * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _exchange_counts(
        self, index: Tensor, chosen: Tensor, num_local: int, name: str, is_same_again: bool
    ) -> RowCounts:
        """Exchange how many of the sorted choices go to which expert; a recomputation has them from its forward."""
        num_experts = num_local * self.comm.world_size

        def exchange() -> RowCounts:
            bounds = torch.arange(num_experts + 1, dtype=chosen.dtype, device=chosen.device)
            counts = torch.searchsorted(chosen, bounds, out_int32=True).diff().view(-1, num_local)
            with unseen_by_op_modes():
                return exchange_counts(self.comm, counts, index.numel(), name, self._skew)

        # [Note: A recomputation sends the same rows]
        # It exchanges no counts and reads no sizes. With other experts than those of the forward, its rows would not
        # fit the sizes, or the gradients not the output.
        rows = same_again("rows of experts", exchange)
        if not is_same_again and is_repeatable():
            narrow = index.to(torch.int16 if num_experts < 2**15 else torch.int32)
            saved = same_again("experts of rows", lambda: narrow)
            if saved is not narrow and not (is_fake(index) or torch.equal(saved, narrow)):
                raise EngineError(
                    "routing-changed",
                    f"{name}: the recomputation sends tokens to other experts than the forward did; make the router "
                    "deterministic, let it choose by topk, or set recompute.mode=none",
                )
        return rows

    def _send(self, rows: Tensor, sent: list[int], received: list[int], name: str) -> Tensor:
        return rows if self.comm.world_size == 1 else _Exchange.apply(self._exchange, rows, sent, received, name)


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
    run_of = torch.searchsorted(runs.cumsum(0), places, right=True)  # no wait of the host, as `repeat_interleave` may
    return _with_inverse(places + distances[run_of])


def _take(rows: Tensor, order: Permutation | None, num_copies: int = 1) -> Tensor:
    """Return rows, each so many times in succession, in another order."""
    return rows if order is None else _Take.apply(rows, *order, num_copies)


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
        return op(rows.contiguous(), sent, received, name)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op, sent, received, name = ctx.given
        return None, _Exchange.apply(op, gradients[0], received, sent, name), None, None, None
