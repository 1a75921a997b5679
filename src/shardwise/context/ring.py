"""Run the loop over the steps of an attention, forward and backward, for every transport and token layout.

While a step is computed, the data of the next one are in flight, and so are the answers. In the forward a rank sends
keys with their values, and queries that are answered with partial results. In the backward it sends the same again
(received keys are not kept), adds their output and its gradient to the queries, and gradients in the wide dtype come
back.

So a rank holds, besides its own keys, those of the step that it computes and of the next one. The plan alone gives the
order of sums, so they are bitwise repeatable.

Shapes: B samples, H query heads, K key and value heads, n tokens of this rank, D head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
        q: [B, H, n, D].
        k: [B, K, n, D].
        v: [B, K, n, D].
        extras: what acts on the scores of the whole sequence.
        ring_plan: the steps.
    """
    found = MergedOutput(q)
    for step, arrival in _arrivals((q,), None, k, v, ring_plan):
        answers = None
        if step.is_answered:
            answers = PushedOutputs(step, q, ring_plan)
            if step.pushed is not None:
                (queries,) = arrival.queries()
                k_own, v_own = arrival.own_keys(step.pushed)
                answers.add(step.pushed, *_attend(queries, k_own, v_own, extras, step.pushed))
                del queries
            answers.start()
        if step.pulled is not None:
            rows = local(step.pulled.queries, ring_plan.own)
            k_here, v_here = arrival.keys(step.pulled)
            found.merge(rows, *_attend(take(q, rows), k_here, v_here, extras, step.pulled))
            del k_here, v_here
        arrival.drop()
        if answers is not None:
            for rows, part_out, part_lse in answers.wait():
                found.merge(rows, part_out, part_lse)
    return found.result()


def differentiate_in_steps(
    grad_out: Tensor, saved: SavedForBackward, extras: ScoreModifiers, ring_plan: RingPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's q, k and v, in the wide dtype.

    Args:
        grad_out: [B, H, n, D].
        saved: inputs and outputs of `attend_in_steps`.
        extras: as there.
        ring_plan: as there.
    """
    grads = LocalGrads(saved)
    with_queries = (saved.q, grad_out, saved.out)
    before: GradReturn | None = None
    for step, arrival in _arrivals(with_queries, saved.lse, saved.k, saved.v, ring_plan):
        grad_there = grad_here = None
        if step.pushed is not None:
            q, grad, out = arrival.queries()
            k, v = arrival.own_keys(step.pushed)
            grad_there = _differentiate(grad, SavedForBackward(q, k, v, out, arrival.lses()), extras, step.pushed)
            del q, k, v, grad, out
        if step.pulled is not None:
            rows = local(step.pulled.queries, ring_plan.own)
            q, grad, out = (take(each, rows) for each in with_queries)
            k, v = arrival.keys(step.pulled)
            grad_here = _differentiate(grad, SavedForBackward(q, k, v, out, take(saved.lse, rows)), extras, step.pulled)
            del q, k, v, grad, out
        arrival.drop()
        if before is not None:
            before.wait(grads)
        before = GradReturn(step, saved.q, saved.k, ring_plan)
        if step.pushed is not None and grad_there is not None:
            grads.add_own_keys(step.pushed, ring_plan.own, *grad_there[1:])
            before.send_queries(step.pushed, grad_there[0])
        if step.pulled is not None and grad_here is not None:
            grads.add_queries(local(step.pulled.queries, ring_plan.own), grad_here[0])
            grads.add_own_keys(step.pulled, ring_plan.own, *grad_here[1:])
            before.send_keys(step.pulled, *grad_here[1:])
        del grad_there, grad_here
        before.start()
    if before is not None:
        before.wait(grads)
    return grads.result()


def _attend(q: Tensor, k: Tensor, v: Tensor, extras: ScoreModifiers, piece: AttentionTile) -> tuple[Tensor, Tensor]:
    here = _part(extras, piece)
    return attention_forward_partial(q, k, v, here, piece.layout, partial_backend(piece.layout, q, here))


def _differentiate(
    grad_out: Tensor, saved: SavedForBackward, extras: ScoreModifiers, piece: AttentionTile
) -> tuple[Tensor, Tensor, Tensor]:
    here = _part(extras, piece)
    backend = partial_backend(piece.layout, saved.q, here)
    grads = attention_backward_partial(grad_out, saved, here, piece.layout, backend)
    return grads.q, grads.k, grads.v


def _part(extras: ScoreModifiers, piece: AttentionTile) -> ScoreModifiers:
    """Return the part of `extras` that acts on a piece's scores."""
    padding = None if extras.key_padding is None else take(extras.key_padding, piece.keys, dim=1)
    draw = extras.draw
    if draw is not None:
        factors, offsets = (take(each, piece.queries) for each in (draw.factors, draw.offsets))
        draw = Draw(factors, offsets, take(draw.columns, piece.keys, dim=0), draw.p)
    return ScoreModifiers(extras.scale, padding, None, draw)


def _arrivals(
    with_queries: Sequence[Tensor], lse: Tensor | None, k: Tensor, v: Tensor, ring_plan: RingPlan
) -> Iterator[tuple[RingStep, KVReceive]]:
    """Yield each step with its received data, while the data of the next one are in flight."""
    coming: KVReceive | None = None
    for step, following in zip(ring_plan.steps, [*ring_plan.steps[1:], None], strict=True):
        arrival = coming or KVReceive(step, with_queries, lse, k, v, ring_plan)
        coming = None if following is None else KVReceive(following, with_queries, lse, k, v, ring_plan)
        arrival.wait()
        yield step, arrival


Messages = dict[int, list[Tensor]]


@dataclass(frozen=True, eq=False)
class RingPlan:
    """Says what a rank does for one attention, with the ranks that have the same heads, one of each team.

    Attributes:
        comm: over the `cp` axis.
        ranks: of `comm`, by team.
        own: the tokens that this rank has.
        steps: of this rank.
    """

    comm: Comm
    ranks: tuple[int, ...]
    own: Runs
    steps: tuple[RingStep, ...]

    def exchange(self, sends: Messages, receives: Messages, name: str) -> AsyncWork:
        """Start to exchange messages by team; all ranks call it.

        Args:
            sends: by team, the messages for it.
            receives: by team, the buffers for its messages.
            name: for counts and messages.
        """
        there, back = ({self.ranks[team]: each for team, each in by_team.items()} for by_team in (sends, receives))
        return self.comm.exchange(there, back, f"context {name}")


class KVReceive:
    """Receives the data that one step needs from other ranks; they are in flight from construction on.

    Args:
        step: to compute.
        with_queries: the tensors whose rows are sent for a query, [B, H, n, D] each.
        lse: [B, H, n], sent with them; None in the forward.
        k: [B, K, n, D], this rank's.
        v: [B, K, n, D], this rank's.
        ring_plan: of the attention.
    """

    def __init__(
        self,
        step: RingStep,
        with_queries: Sequence[Tensor],
        lse: Tensor | None,
        k: Tensor,
        v: Tensor,
        ring_plan: RingPlan,
    ) -> None:
        self._own, self._own_kv = ring_plan.own, (k, v)
        self._landings: dict[str, RecvBuffer] = {}
        self._pending: AsyncWork | None = None
        if not step.is_moving:
            return
        column = () if lse is None else (lse.unsqueeze(-1),)  # [B, H, n, 1]
        sends: Messages = {team: [pack((k, v), local(runs, ring_plan.own))] for team, runs in step.sent_keys.items()}
        for team, runs in step.sent_queries.items():
            rows = local(runs, ring_plan.own)
            sends.setdefault(team, []).extend(pack(each, rows) for each in (with_queries, column) if each)
        if step.pulled is not None and step.received_keys:
            self._landings["keys"] = _recv_buffer((k, v), step.pulled.keys, step.received_keys)
        if step.pushed is not None:
            self._landings["queries"] = _recv_buffer(with_queries, step.pushed.queries, step.received_queries)
            if column:
                self._landings["lses"] = _recv_buffer(column, step.pushed.queries, step.received_queries)
        receives: Messages = {}
        for recv_buffer in self._landings.values():
            for team, buffer in recv_buffer.buffers.items():
                receives.setdefault(team, []).append(buffer)
        self._pending = ring_plan.exchange(sends, receives, "keys")

    def wait(self) -> None:
        """Wait until all data have arrived."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def keys(self, piece: AttentionTile) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, K, nk, D] of a pulled piece."""
        if "keys" not in self._landings:
            return self.own_keys(piece)
        whole = self._landings["keys"].assemble()
        for run in intersect(piece.keys, self._own):  # each is one run among both
            ((first, _),), ((start, stop),) = local((run,), piece.keys), local((run,), self._own)
            copy_run(whole, first, self._own_kv, start, stop)
        k, v = unpack(whole)
        return k, v

    def own_keys(self, piece: AttentionTile) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, K, nk, D] of a piece that are this rank's."""
        rows = local(piece.keys, self._own)
        k, v = (take(each, rows) for each in self._own_kv)
        return k, v

    def queries(self) -> list[Tensor]:
        """Return the tensors that came for queries, [B, H, nq, D] each."""
        return unpack(self._landings["queries"].assemble())

    def lses(self) -> Tensor:
        """Return the log-sum-exps of these queries, [B, H, nq]."""
        return unpack(self._landings["lses"].assemble())[0].squeeze(-1)

    def drop(self) -> None:
        """Free the received data."""
        self._landings.clear()


class PushedOutputs:
    """Sends back the results of received queries, and receives those of sent queries.

    Args:
        step: in which the queries moved.
        q: [B, H, n, D], this rank's.
        ring_plan: of the attention.
    """

    def __init__(self, step: RingStep, q: Tensor, ring_plan: RingPlan) -> None:
        self._step, self._ring_plan = step, ring_plan
        self._sends: Messages = {}
        wide = wide_dtype(q.dtype)
        self._receives: Messages = {
            team: [blank(q, count_tokens(runs)), blank(q, count_tokens(runs), head_dim=1, dtype=wide)]
            for team, runs in step.sent_queries.items()
        }
        self._pending: AsyncWork | None = None

    def add(self, piece: AttentionTile, out: Tensor, lse: Tensor) -> None:
        """Add the results `out` [B, H, nq, D] and `lse` [B, H, nq] of `piece`, the queries pushed to this rank."""
        for team, runs in self._step.received_queries.items():
            rows = local(runs, piece.queries)
            self._sends[team] = [pack((out,), rows), pack((lse.unsqueeze(-1),), rows)]

    def start(self) -> None:
        """Start to exchange them."""
        self._pending = self._ring_plan.exchange(self._sends, self._receives, "answers")
        self._sends = {}

    def wait(self) -> Iterator[tuple[Runs, Tensor, Tensor]]:
        """Yield rows of this rank's queries, each with an output [B, H, rows, D] and log-sum-exp [B, H, rows]."""
        if self._pending is not None:
            self._pending.wait()
        for team, (out, lse) in sorted(self._receives.items()):
            rows = local(self._step.sent_queries[team], self._ring_plan.own)
            yield rows, unpack(out)[0], unpack(lse)[0].squeeze(-1)


class GradReturn:
    """Sends back the gradients of a step's received data, and receives those of its sent data.

    Args:
        step: in which the data moved.
        q: [B, H, n, D], this rank's.
        k: [B, K, n, D], this rank's.
        ring_plan: of the attention.
    """

    def __init__(self, step: RingStep, q: Tensor, k: Tensor, ring_plan: RingPlan) -> None:
        self._step, self._ring_plan = step, ring_plan
        self._q, self._k = q.detach(), k.detach()
        self._keys: dict[int, Tensor] = {}
        self._queries: dict[int, Tensor] = {}
        self._pending: AsyncWork | None = None

    def send_keys(self, piece: AttentionTile, grad_k: Tensor, grad_v: Tensor) -> None:
        """Pack for each owner of a piece's keys its part of `grad_k` and `grad_v` [B, K, nk, D], in the wide dtype."""
        for team, runs in self._step.received_keys.items():
            self._keys[team] = pack((grad_k, grad_v), local(runs, piece.keys))

    def send_queries(self, piece: AttentionTile, grad_q: Tensor) -> None:
        """Pack for each owner of a piece's queries its part of `grad_q` [B, H, nq, D]."""
        for team, runs in self._step.received_queries.items():
            self._queries[team] = pack((grad_q,), local(runs, piece.queries))

    def start(self) -> None:
        """Start to exchange them."""
        if not self._step.is_moving:
            return
        wide = wide_dtype(self._q.dtype)
        sends = _by_team(self._keys, self._queries)
        self._keys = {
            team: blank(self._k, count_tokens(runs), num=2, dtype=wide) for team, runs in self._step.sent_keys.items()
        }
        self._queries = {
            team: blank(self._q, count_tokens(runs), dtype=wide) for team, runs in self._step.sent_queries.items()
        }
        self._pending = self._ring_plan.exchange(sends, _by_team(self._keys, self._queries), "gradients")

    def wait(self, sums: LocalGrads) -> None:
        """Wait until they have arrived, and add them in the order of the ranks."""
        if self._pending is None:
            return
        self._pending.wait()
        for team, message in sorted(self._keys.items()):
            sums.add_keys(local(self._step.sent_keys[team], self._ring_plan.own), *unpack(message))
        for team, message in sorted(self._queries.items()):
            sums.add_queries(local(self._step.sent_queries[team], self._ring_plan.own), *unpack(message))


def _by_team(*several: Mapping[int, Tensor]) -> Messages:
    found: Messages = {}
    for messages in several:
        for team, message in messages.items():
            found.setdefault(team, []).append(message)
    return found


def _recv_buffer(tensors: Sequence[Tensor], tokens: Runs, by_team: Mapping[int, Runs]) -> RecvBuffer:
    """Return the buffer for messages of such tensors, [B, H, n, D] each."""
    return RecvBuffer(blank(tensors[0], count_tokens(tokens), num=len(tensors)), tokens, by_team)


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
    """Holds the sums of the gradients of this rank's q, k and v.

    Args:
        saved: this rank's tensors.
    """

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

    def add_own_keys(self, piece: AttentionTile, own: Runs, grad_k: Tensor, grad_v: Tensor) -> None:
        """Add `grad_k` and `grad_v` [B, K, nk, D] of those of a `piece`'s keys that are `own`, this rank's tokens."""
        kept = intersect(piece.keys, own)
        if kept:
            among = local(kept, piece.keys)
            self.add_keys(local(kept, own), take(grad_k, among), take(grad_v, among))

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._sums
        return q, k, v
