"""What a rank's own queries, keys and values have got so far, step by step: an output, and gradients.

Shapes: B samples, H query heads, K key and value heads, n tokens of this rank, D head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.attention.backends import Saved, wide_dtype
from shardwise.attention.merge import merge_partial
from shardwise.context.messages import add, take
from shardwise.context.steps import Piece
from shardwise.layout.runs import Runs, intersect, local


class Output:
    """The merged results over the keys so far.

    Args:
        q: [B, H, n, D], of all rows.
    """

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._found: tuple[Tensor, Tensor] | None = None

    def merge(self, rows: Runs, out: Tensor, lse: Tensor) -> None:
        """A result [B, H, rows, D] and [B, H, rows] over other keys, which may be merged into."""
        is_whole = rows == ((0, self._q.shape[2]),) and out.transpose(1, 2).is_contiguous()
        if self._found is None and is_whole:
            self._found = out, lse  # which is the result where nothing follows
            return
        whole_out, whole_lse = self._found = self._wide()
        before = 0
        for start, stop in rows:
            here = slice(before, before + stop - start)
            merge_partial(whole_out[:, :, start:stop], whole_lse[:, :, start:stop], out[:, :, here], lse[:, :, here])
            before += stop - start

    def result(self) -> tuple[Tensor, Tensor]:
        """As `attend_in_steps` returns it."""
        out, lse = self._found or self._wide()
        return out.to(self._q.dtype), lse

    def _wide(self) -> tuple[Tensor, Tensor]:
        wide = wide_dtype(self._q.dtype)
        if self._found is not None:
            out, lse = self._found
            return out.to(wide), lse
        samples, heads, num_queries, head_dim = self._q.shape
        out = self._q.new_zeros(samples, num_queries, heads, head_dim, dtype=wide).transpose(1, 2)
        return out, self._q.new_full((samples, heads, num_queries), -torch.inf, dtype=wide)


class OwnGrads:
    """The sums of the gradients of this rank's q, k and v.

    Args:
        saved: this rank's tensors.
    """

    def __init__(self, saved: Saved) -> None:
        # In the forms of q, k and v, in which what has made them reads their gradients without a copy.
        self._sums = [torch.zeros_like(each, dtype=wide_dtype(each.dtype)) for each in (saved.q, saved.k, saved.v)]

    def add_queries(self, rows: Runs, grad_q: Tensor) -> None:
        """Of some rows [B, H, rows, D]."""
        add(self._sums[0], rows, grad_q)

    def add_keys(self, rows: Runs, grad_k: Tensor, grad_v: Tensor) -> None:
        """Of some rows [B, K, rows, D]."""
        add(self._sums[1], rows, grad_k)
        add(self._sums[2], rows, grad_v)

    def add_own_keys(self, piece: Piece, own: Runs, grad_k: Tensor, grad_v: Tensor) -> None:
        """Of those of a piece's keys [B, K, nk, D] that are this rank's."""
        kept = intersect(piece.keys, own)
        if kept:
            among = local(kept, piece.keys)
            self.add_keys(local(kept, own), take(grad_k, among), take(grad_v, among))

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._sums
        return q, k, v
