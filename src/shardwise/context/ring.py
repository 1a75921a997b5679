"""Run the loop over the steps of an attention, forward and backward, for every transport and token layout.

While a step is computed, the keys and values of the next one are in flight. In the backward a rank sends them again
(received keys are not kept), and gradients in the wide dtype come back.

So a rank holds, besides its own keys, those of the step that it computes and of the next one. The plan alone gives the
order of sums, so they are bitwise repeatable.

Shapes: B samples, H query heads, K key and value heads, n tokens of this rank, D head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.attention.backends import Draw, SavedForBackward, ScoreModifiers, wide_dtype
from shardwise.attention.custom_op import attention_backward_partial, attention_forward_partial
from shardwise.attention.dense import merge_partial, partial_backend
from shardwise.comm.backends import AsyncWork
from shardwise.comm.collectives import Comm
from shardwise.context.messages import RecvBuffer, add, blank, copy_run, pack, take, unpack
from shardwise.context.plan import AttentionTile, RingStep
from shardwise.layout.token_ranges import Runs, count_tokens, intersect, local


def attend_in_steps(
    q: Tensor, k: Tensor, v: Tensor, extras: ScoreModifiers, ring_plan: RingPlan
) -> tuple[Tensor, Tensor]:
    """Return output [B, H, n, D], in memory [B, n, H, D], and log-sum-exp [B, H, n] of this rank's queries.

    Args:
        q: [B, H, n, D]; k and v are [B, K, n, D].
        extras: what acts on the scores of the whole sequence.
    """
    found = MergedOutput(q)
    for step, arrival in _arrivals(k, v, ring_plan):
        if step.tile is not None:
            rows = local(step.tile.queries, ring_plan.own)
            k_here, v_here = arrival.keys(step.tile)
            found.merge(rows, *_attend(take(q, rows), k_here, v_here, extras, step.tile))
            del k_here, v_here
        arrival.drop()
    return found.result()


def differentiate_in_steps(
    grad_out: Tensor, saved: SavedForBackward, extras: ScoreModifiers, ring_plan: RingPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's q, k and v, in the wide dtype, from `grad_out` [B, H, n, D]."""
    grads = LocalGrads(saved)
    before: GradReturn | None = None
    for step, arrival in _arrivals(saved.k, saved.v, ring_plan):
        here = None
        if step.tile is not None:
            rows = local(step.tile.queries, ring_plan.own)
            q, grad, out = (take(each, rows) for each in (saved.q, grad_out, saved.out))
            k, v = arrival.keys(step.tile)
            here = _differentiate(grad, SavedForBackward(q, k, v, out, take(saved.lse, rows)), extras, step.tile)
            del q, k, v, grad, out
        arrival.drop()
        if before is not None:
            before.wait(grads)
        before = GradReturn(step, saved.k, ring_plan)
        if step.tile is not None and here is not None:
            grads.add_queries(local(step.tile.queries, ring_plan.own), here[0])
            grads.add_own_keys(step.tile, ring_plan.own, *here[1:])
            before.pack(step.tile, *here[1:])
        del here
        before.start()
    if before is not None:
        before.wait(grads)
    return grads.result()


def _attend(q: Tensor, k: Tensor, v: Tensor, extras: ScoreModifiers, tile: AttentionTile) -> tuple[Tensor, Tensor]:
    here = _part(extras, tile)
    return attention_forward_partial(q, k, v, here, tile.layout, partial_backend(tile.layout, q, here))


def _differentiate(
    grad_out: Tensor, saved: SavedForBackward, extras: ScoreModifiers, tile: AttentionTile
) -> tuple[Tensor, Tensor, Tensor]:
    here = _part(extras, tile)
    backend = partial_backend(tile.layout, saved.q, here)
    grads = attention_backward_partial(grad_out, saved, here, tile.layout, backend)
    return grads.q, grads.k, grads.v


def _part(extras: ScoreModifiers, tile: AttentionTile) -> ScoreModifiers:
    """Return the part of `extras` that acts on a tile's scores."""
    padding = None if extras.key_padding is None else take(extras.key_padding, tile.keys, dim=1)
    draw = extras.draw
    if draw is not None:
        factors, offsets = (take(each, tile.queries) for each in (draw.factors, draw.offsets))
        draw = Draw(factors, offsets, take(draw.columns, tile.keys, dim=0), draw.p)
    return ScoreModifiers(extras.scale, padding, None, draw)


def _arrivals(k: Tensor, v: Tensor, ring_plan: RingPlan) -> Iterator[tuple[RingStep, KVReceive]]:
    """Yield each step with its received data, while the data of the next one are in flight."""
    coming: KVReceive | None = None
    for step, following in zip(ring_plan.steps, [*ring_plan.steps[1:], None], strict=True):
        arrival = coming or KVReceive(step, k, v, ring_plan)
        coming = None if following is None else KVReceive(following, k, v, ring_plan)
        arrival.wait()
        yield step, arrival


Messages = Mapping[int, Tensor]


@dataclass(frozen=True, eq=False)
class RingPlan:
    """Says what a rank does for one attention, with the ranks that have the same heads, one of each team.

    Attributes:
        ranks: of each team, the rank of `comm` that has these heads.
        own: the tokens that this rank has.
    """

    comm: Comm
    ranks: tuple[int, ...]
    own: Runs
    steps: tuple[RingStep, ...]

    def exchange(self, sends: Messages, receives: Messages, name: str) -> AsyncWork:
        """Start to exchange messages by team; all ranks call it.

        Args:
            sends: by team, the message for it.
            receives: by team, the buffer for its message.
        """
        there, back = ({self.ranks[team]: [each] for team, each in by_team.items()} for by_team in (sends, receives))
        return self.comm.exchange(there, back, f"context {name}")


class KVReceive:
    """Receives the keys and values that one step needs from other ranks; they are in flight from construction on.

    Args:
        k: [B, K, n, D], this rank's.
        v: [B, K, n, D], this rank's.
    """

    def __init__(self, step: RingStep, k: Tensor, v: Tensor, ring_plan: RingPlan) -> None:
        self._own, self._own_kv = ring_plan.own, (k, v)
        self._received: RecvBuffer | None = None
        self._pending: AsyncWork | None = None
        if not step.is_moving:
            return
        sends = {team: pack((k, v), local(runs, ring_plan.own)) for team, runs in step.sent_keys.items()}
        if step.tile is not None and step.received_keys:
            whole = blank(k, count_tokens(step.tile.keys), num=2)
            self._received = RecvBuffer(whole, step.tile.keys, step.received_keys)
        self._pending = ring_plan.exchange(sends, self._received.buffers if self._received else {}, "keys")

    def wait(self) -> None:
        """Wait until all data have arrived."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def keys(self, tile: AttentionTile) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, K, nk, D] of the step's tile."""
        if self._received is None:
            rows = local(tile.keys, self._own)
            k, v = (take(each, rows) for each in self._own_kv)
            return k, v
        whole = self._received.assemble()
        for run in intersect(tile.keys, self._own):  # each is one run among both
            ((first, _),), ((start, stop),) = local((run,), tile.keys), local((run,), self._own)
            copy_run(whole, first, self._own_kv, start, stop)
        k, v = unpack(whole)
        return k, v

    def drop(self) -> None:
        """Free the received data."""
        self._received = None


class GradReturn:
    """Sends back the gradients of a step's received keys, and receives those of its sent keys.

    Args:
        k: [B, K, n, D], this rank's.
    """

    def __init__(self, step: RingStep, k: Tensor, ring_plan: RingPlan) -> None:
        self._step, self._ring_plan = step, ring_plan
        self._k = k.detach()
        self._messages: dict[int, Tensor] = {}
        self._pending: AsyncWork | None = None

    def pack(self, tile: AttentionTile, grad_k: Tensor, grad_v: Tensor) -> None:
        """Pack for each owner of a tile's keys its part of `grad_k` and `grad_v` [B, K, nk, D], in the wide dtype."""
        for team, runs in self._step.received_keys.items():
            self._messages[team] = pack((grad_k, grad_v), local(runs, tile.keys))

    def start(self) -> None:
        """Start to exchange them."""
        if not self._step.is_moving:
            return
        sends, wide = self._messages, wide_dtype(self._k.dtype)
        self._messages = {
            team: blank(self._k, count_tokens(runs), num=2, dtype=wide) for team, runs in self._step.sent_keys.items()
        }
        self._pending = self._ring_plan.exchange(sends, self._messages, "gradients")

    def wait(self, sums: LocalGrads) -> None:
        """Wait until they have arrived, and add them in the order of the ranks."""
        if self._pending is None:
            return
        self._pending.wait()
        for team, message in sorted(self._messages.items()):
            sums.add_keys(local(self._step.sent_keys[team], self._ring_plan.own), *unpack(message))


class MergedOutput:
    """Holds the merged results over the keys so far.

    Args:
        q: [B, H, n, D], of all rows.
    """

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._found: tuple[Tensor, Tensor] | None = None

    def merge(self, rows: Runs, out: Tensor, lse: Tensor) -> None:
        """Merge a result over other keys: `out` [B, H, rows, D] and `lse` [B, H, rows], which may be reused."""
        is_whole = rows == ((0, self._q.shape[2]),) and out.transpose(1, 2).is_contiguous()
        if self._found is None and is_whole:
            self._found = out, lse  # already the result if no other step follows
            return
        whole_out, whole_lse = self._found = self._wide()
        before = 0
        for start, stop in rows:
            here = slice(before, before + stop - start)
            merge_partial(whole_out[:, :, start:stop], whole_lse[:, :, start:stop], out[:, :, here], lse[:, :, here])
            before += stop - start

    def result(self) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp as `attend_in_steps` does."""
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


class LocalGrads:
    """Holds the sums of the gradients of this rank's q, k and v."""

    def __init__(self, saved: SavedForBackward) -> None:
        # In the strides of q, k and v, so that the ops that made them read their gradients without a copy.
        self._sums = [torch.zeros_like(each, dtype=wide_dtype(each.dtype)) for each in (saved.q, saved.k, saved.v)]

    def add_queries(self, rows: Runs, grad_q: Tensor) -> None:
        """Add the gradient of some rows of q, [B, H, rows, D]."""
        add(self._sums[0], rows, grad_q)

    def add_keys(self, rows: Runs, grad_k: Tensor, grad_v: Tensor) -> None:
        """Add `grad_k` and `grad_v` [B, K, rows, D] of some `rows`."""
        add(self._sums[1], rows, grad_k)
        add(self._sums[2], rows, grad_v)

    def add_own_keys(self, tile: AttentionTile, own: Runs, grad_k: Tensor, grad_v: Tensor) -> None:
        """Add `grad_k` and `grad_v` [B, K, nk, D] of those of a `tile`'s keys that are `own`, this rank's tokens."""
        kept = intersect(tile.keys, own)
        if kept:
            among = local(kept, tile.keys)
            self.add_keys(local(kept, own), take(grad_k, among), take(grad_v, among))

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._sums
        return q, k, v
