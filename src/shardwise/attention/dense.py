"""Computes dense attention among some tokens of a sequence on the CPU, by the fewest calls of torch's flash attention.

A rank's queries and the keys that it has at a time are runs of tokens. In causal attention, neighbouring queries see
one rectangle of keys, and perhaps a triangle after it: each is one call, and results are merged where queries are in
both.

>>> layout = dense_layout(8, causal=True)
>>> for band in bands_of(layout.select(queries=((0, 2), (6, 8)), keys=((2, 4), (6, 8)))):
...     print(band)
Band(queries=slice(2, 4, None), keys=slice(0, 2, None), diagonal_queries=slice(2, 4, None), \
diagonal_keys=slice(2, 4, None))
>>> [len(bands_of(layout.select(share, share))) for share in (((0, 8),), ((0, 2), (6, 8)))]
[1, 1]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from shardwise.attention.api import backend_for
from shardwise.attention.backends import AttentionGrads, BackendPlan, SavedForBackward, ScoreModifiers, wide_dtype
from shardwise.attention.block_layout import BlockLayout, Pattern, pack
from shardwise.config.errors import ConfigError
from shardwise.layout.token_ranges import Runs
from shardwise.runtime.torch_private import cpu_flash_attention, cpu_flash_attention_backward, has_cpu_flash_attention

CausalMask = Literal["causal"] | None

_BLOCK: Final = 128
_MOST_BLOCKS: Final = 4096


def dense_layout(num_tokens: int, *, causal: bool) -> BlockLayout:
    """Return the layout in which each token sees all tokens, or all up to itself.

    Args:
        causal: a token sees none after it.

    Raises:
        ConfigError: there is no token.
    """
    return dense_layout_of_documents([num_tokens], causal=causal)


def dense_layout_of_documents(lengths: Sequence[int], *, causal: bool) -> BlockLayout:
    """Return the layout of packed documents in which a token sees its own document, or all of it up to itself.

    Args:
        lengths: tokens of each document, in the order in which they are packed.
        causal: a token sees none after it.

    Raises:
        ConfigError: there is no document, or one has no token.
    """
    block = _BLOCK
    while max(lengths, default=0) > block * _MOST_BLOCKS:
        block *= 2
    layouts = {
        length: BlockLayout.from_blocks(
            torch.ones(-(-length // block), -(-length // block), dtype=torch.bool),
            block,
            causal=causal,
            num_tokens=length,
        )
        for length in set(lengths)
    }
    return pack([layouts[length] for length in lengths])


def is_dense(layout: BlockLayout) -> bool:
    """Say whether each token sees its whole document, or all of it up to itself."""
    return layout.cached("is_dense", lambda whole: all(map(_is_dense, whole.patterns)))


def partial_backend(layout: BlockLayout, q: Tensor, extras: ScoreModifiers) -> str:
    """Choose the back end, one of `custom_op.BACKENDS` or "flex", for q [B, H, Nq, D] over some of the keys."""
    fits = q.device.type == "cpu" and has_cpu_flash_attention() and _is_bare(extras) and is_dense(layout)
    return backend_for(q.device.type, "dense" if fits else None)


class Band(NamedTuple):
    """Names neighbouring queries and the keys that they see; all are slices of indices into the tensors.

    Attributes:
        keys: those that all queries of the band see; may be empty.
        diagonal_queries: the last queries of the band, which see more; may be empty.
        diagonal_keys: those right after `keys`: the first of the diagonal's queries sees one of them, each further
            query one more, until it sees all of them.
    """

    queries: slice
    keys: slice
    diagonal_queries: slice
    diagonal_keys: slice

    def rectangles(self) -> Iterator[tuple[slice, slice, CausalMask]]:
        """Yield the queries, the keys and the mask of each call."""
        if self.keys.start < self.keys.stop:
            yield self.queries, self.keys, None
        if self.diagonal_keys.start < self.diagonal_keys.stop:
            yield self.diagonal_queries, self.diagonal_keys, "causal"


def bands_of(layout: BlockLayout) -> list[Band]:
    """Return the bands of a dense layout, ascending; queries that see no key are in none.

    Raises:
        ConfigError: the layout is not dense.
    """
    if not is_dense(layout):
        raise ConfigError(
            "dense-layout",
            "the dense back end computes layouts in which every block, or every one up to the diagonal, is seen; "
            "leave the choice of the back end to the library",
        )
    bands, queries, keys = [], 0, 0
    for pattern in layout.patterns:
        make = _causal_bands if pattern.causal else _whole_band
        bands += [rectangle_band.band() for rectangle_band in make(pattern, queries, keys)]
        queries, keys = queries + pattern.num_queries, keys + pattern.num_keys
    return bands


@dataclass(frozen=True)
class _Edges:
    """Gives the start of a band, the start of its diagonal, and its end, in queries and in keys."""

    q_start: int
    q_diagonal: int
    q_stop: int
    k_start: int
    k_diagonal: int
    k_stop: int

    @property
    def has_diagonal(self) -> bool:
        return self.k_diagonal < self.k_stop

    @property
    def is_square(self) -> bool:
        """Say whether the next query may see one key more than the last one."""
        return self.q_stop - self.q_diagonal == self.k_stop - self.k_diagonal

    def band(self) -> Band:
        return Band(
            slice(self.q_start, self.q_stop),
            slice(self.k_start, self.k_diagonal),
            slice(self.q_diagonal, self.q_stop),
            slice(self.k_diagonal, self.k_stop),
        )


def _whole_band(pattern: Pattern, query: int, key: int) -> list[_Edges]:
    last_query, last_key = query + pattern.num_queries, key + pattern.num_keys
    sees_any = query < last_query and key < last_key
    return [_Edges(query, last_query, last_query, key, last_key, last_key)] if sees_any else []


def _causal_bands(pattern: Pattern, query: int, key: int) -> list[_Edges]:
    """Make the bands token by token; a stretch with queries extends the last band while it sees all keys so far."""
    first_key = key
    bands: list[_Edges] = []
    for size, has_queries, has_keys in _stretches(pattern.query_runs, pattern.key_runs):
        next_query, next_key = query + size * has_queries, key + size * has_keys
        if has_queries and next_key > first_key:  # the others see none
            if not bands or bands[-1].k_stop != key or (has_keys and not bands[-1].is_square):
                bands.append(_Edges(query, query, query, first_key, key, key))
            band = bands[-1]
            if not band.has_diagonal:
                band = replace(band, q_diagonal=query if has_keys else next_query)
            bands[-1] = replace(band, q_stop=next_query, k_stop=next_key)
        query, key = next_query, next_key
    return bands


def _stretches(queries: Runs, keys: Runs) -> Iterator[tuple[int, bool, bool]]:
    """Yield the size of each stretch of tokens between two edges of runs, and whether its queries and keys exist."""
    starts = [{start for start, _ in runs} for runs in (queries, keys)]
    stops = [{stop for _, stop in runs} for runs in (queries, keys)]
    has = [False, False]
    for start, stop in pairwise(sorted(set().union(*starts, *stops))):
        has = [start in starts[i] or (has[i] and start not in stops[i]) for i in range(2)]
        yield stop - start, has[0], has[1]


class DenseBackend:
    """Implements `Backend` for dense layouts on the CPU; of the extras it takes the scale only."""

    def plan(self, layout: BlockLayout, q: Tensor, k: Tensor) -> BackendPlan:
        """Plan the bands of a layout, as eight numbers each; they are the same for all q and k."""
        return BackendPlan(
            (), tuple(edge for band in bands_of(layout) for run in band for edge in (run.start, run.stop))
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, extras: ScoreModifiers, plan: BackendPlan
    ) -> tuple[Tensor, Tensor]:
        """Compute the output [B, H, Nq, D], in memory [B, Nq, H, D], and the log-sum-exp [B, H, Nq]."""
        _require_bare(extras)
        q, k, v = map(_with_close_rows, (q, k, v))
        wide = wide_dtype(q.dtype)
        out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        for band in _unfold(plan) if q.numel() else ():
            (queries, keys, mask), *second = band.rectangles()
            attended = _flash(q[:, :, queries], k[:, :, keys], v[:, :, keys], extras.scale, mask)
            for queries, keys, mask in second:
                attended = attended[0].to(wide), attended[1]
                second_attended = _flash(q[:, :, queries], k[:, :, keys], v[:, :, keys], extras.scale, mask)
                num_before = queries.start - band.queries.start
                merge_partial(attended[0][:, :, num_before:], attended[1][:, :, num_before:], *second_attended)
            out[:, :, band.queries], lse[:, :, band.queries] = attended
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        saved: SavedForBackward,
        extras: ScoreModifiers,
        plan: BackendPlan,
        needs_bias: bool,
        is_wide: bool = False,
    ) -> AttentionGrads:
        """Compute the gradients, in the shapes and strides of q, k and v."""
        _require_bare(extras)
        if grad_lse is not None:
            raise ConfigError(
                "dense-lse-gradient",
                "the dense back end has no gradient of the log-sum-exp; use attention_backend('cpu')",
            )
        wide = wide_dtype(saved.q.dtype)
        grads = [torch.zeros_like(tensor, dtype=wide) for tensor in (saved.q, saved.k, saved.v)]
        # torch's kernel returns gradients in the dtype of its inputs.
        dtype = wide if is_wide else saved.q.dtype
        tensors = (tensor.to(dtype) for tensor in (grad_out, saved.q, saved.k, saved.v, saved.out))
        grad_out, q, k, v, out = map(_with_close_rows, tensors)
        for band in _unfold(plan) if q.numel() else ():
            for queries, keys, mask in band.rectangles():
                own_q, own_out, own_lse = (tensor[:, :, queries] for tensor in (q, out, saved.lse))
                saved_of_band = SavedForBackward(own_q, k[:, :, keys], v[:, :, keys], own_out, own_lse)
                parts = _flash_backward(grad_out[:, :, queries], saved_of_band, extras.scale, mask)
                for grad, partial_grad, where in zip(grads, parts, (queries, keys, keys), strict=True):
                    grad[:, :, where] += partial_grad
        dq, dk, dv = (grad.to(dtype) for grad in grads)
        return AttentionGrads(dq, dk, dv, None)


def _unfold(plan: BackendPlan) -> list[Band]:
    edges = iter(plan.numbers)
    slices = iter([slice(start, stop) for start, stop in zip(edges, edges, strict=True)])
    return [Band(*four) for four in zip(slices, slices, slices, slices, strict=True)]


def _is_dense(pattern: Pattern) -> bool:
    seen = pattern.blocks
    if not pattern.causal:
        return bool(seen.all())
    return bool((seen | torch.ones_like(seen[0]).triu(1)).all())


def _is_bare(extras: ScoreModifiers) -> bool:
    return extras.key_padding is None and extras.bias is None and extras.draw is None


def _require_bare(extras: ScoreModifiers) -> None:
    if not _is_bare(extras):
        raise ConfigError(
            "dense-operands",
            "the dense back end has no key padding, bias or dropout; leave the choice of the back end to the library",
        )


def _with_close_rows(tensor: Tensor) -> Tensor:
    """Copy [B, H, N, D] unless torch's kernel can read it: rows must be contiguous and must not overlap."""
    is_read = tensor.stride(-1) == 1 and tensor.stride(-2) >= tensor.shape[-1]
    return tensor if is_read else tensor.contiguous()


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: CausalMask) -> tuple[Tensor, Tensor]:
    """Compute the output [B, H, Nq, D] and log-sum-exp [B, H, Nq] of queries and of keys [B, K, Nk, D]."""
    heads = _Heads(q.shape[1], k.shape[1])
    if heads.group == 1:
        return cpu_flash_attention(q, k, v, mask, scale)
    by_sample = [
        cpu_flash_attention(heads.of_queries(q[i]), heads.of_keys(k[i]), heads.of_keys(v[i]), mask, scale)
        for i in range(len(q))
    ]
    out, lse = (torch.stack(samples).flatten(1, 2) for samples in zip(*by_sample, strict=True))
    return out, lse


def _flash_backward(
    grad_out: Tensor, saved: SavedForBackward, scale: float, mask: CausalMask
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of q, k and v, from an output and log-sum-exp that may be of more keys; shapes as above."""
    q, k, v, out, lse = saved.q, saved.k, saved.v, saved.out, saved.lse
    heads, wide = _Heads(q.shape[1], k.shape[1]), wide_dtype(q.dtype)
    if heads.group == 1:
        return cpu_flash_attention_backward(grad_out, q, k, v, out, lse, mask, scale)
    by_sample = []
    for i in range(len(q)):
        own_grad_out, own_q, own_out, own_lse = (heads.of_queries(tensor[i]) for tensor in (grad_out, q, out, lse))
        own_k, own_v = heads.of_keys(k[i]), heads.of_keys(v[i])
        dq, dk, dv = cpu_flash_attention_backward(own_grad_out, own_q, own_k, own_v, own_out, own_lse, mask, scale)
        by_sample.append((dq.flatten(0, 1), dk.sum(1, dtype=wide), dv.sum(1, dtype=wide)))
    dq, dk, dv = (torch.stack(samples) for samples in zip(*by_sample, strict=True))
    return dq, dk, dv


@dataclass(frozen=True)
class _Heads:
    """The numbers of query heads and KV heads; methods view one sample so that it has as many KV heads as query heads.

    Only the newest versions of torch's kernel read fewer KV heads themselves.
    """

    num_heads: int
    num_kv_heads: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def of_queries(self, tensor: Tensor) -> Tensor:
        """View [H, ...] as [K, H / K, ...]."""
        return tensor.unflatten(0, (self.num_kv_heads, self.group))

    def of_keys(self, tensor: Tensor) -> Tensor:
        """View [K, Nk, D] as [K, H / K, Nk, D]."""
        return tensor.unsqueeze(1).expand(-1, self.group, -1, -1)


@torch.no_grad()
def merge_partial(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge into `out` and `lse`, in place, a partial result of the same queries over other keys.

    With w = sigmoid(part_lse - lse), out becomes (1 - w) out + w part_out, and lse becomes log(exp(lse) +
    exp(part_lse)), each shifted by the maximum. That is Section 3.1 of FlashAttention (Dao et al. 2022), as Ring
    Attention (Liu et al. 2023) uses it, with both sums divided through by the larger; where neither side has seen a
    key, w is 0 and not NaN. A side that has seen none leaves the other as it is, to the bit.

    Args:
        out: [B, H, n, D], in the wide dtype; may be a view. 0 where nothing has been seen.
        lse: [B, H, n], in the wide dtype; may be a view. -inf where nothing has been seen.
        part_out: [B, H, n, D], in any floating dtype; finite also where the partial result has seen no key.
        part_lse: [B, H, n], in the dtype of `lse`; -inf where the partial result has seen no key.
    """
    weight = torch.sub(part_lse, lse).sigmoid_()  # [B, H, n]
    weight.masked_fill_(part_lse == -torch.inf, 0.0)
    out.lerp_(part_out.to(out.dtype), weight.unsqueeze_(-1))
    torch.logaddexp(lse, part_lse, out=lse)
