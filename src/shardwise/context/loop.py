"""The one loop over the steps of an attention, forwards and backwards, whatever transport and token layout there is.

While a step is computed, what the next one needs travels, and so do the answers to it. In the forward a rank sends keys
with their values, and queries that are answered with partial results; in the backward the same again (keys that came
are not kept), with the queries their output and its gradient, and gradients in the wide dtype come back.

So a rank holds, besides its own keys, those of the step that it computes and of the next. Sums are made in an order
that the plan alone says, so they are bitwise repeatable.

Shapes: B samples, H query heads, K key and value heads, n tokens of this rank, D head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from shardwise.attention.backends import Draw, Extras, Saved
from shardwise.attention.dense import partial_backend
from shardwise.attention.op import attend_partly, differentiate_partly
from shardwise.context.messages import take
from shardwise.context.steps import Piece, Step
from shardwise.context.sums import Output, OwnGrads
from shardwise.context.travel import Answers, Arrival, Course, Returns
from shardwise.layout.runs import local


def attend_in_steps(q: Tensor, k: Tensor, v: Tensor, extras: Extras, course: Course) -> tuple[Tensor, Tensor]:
    """Output [B, H, n, D], in memory [B, n, H, D], and log-sum-exp [B, H, n] of this rank's queries.

    Args:
        q: [B, H, n, D].
        k: [B, K, n, D].
        v: [B, K, n, D].
        extras: of the whole sequence.
        course: what to do.
    """
    found = Output(q)
    for step, arrival in _arrivals((q,), None, k, v, course):
        answers = None
        if step.is_answered:
            answers = Answers(step, q, course)
            if step.pushed is not None:
                (queries,) = arrival.queries()
                k_own, v_own = arrival.own_keys(step.pushed)
                answers.add(step.pushed, *_attend(queries, k_own, v_own, extras, step.pushed))
                del queries
            answers.start()
        if step.pulled is not None:
            rows = local(step.pulled.queries, course.own)
            k_here, v_here = arrival.keys(step.pulled)
            found.merge(rows, *_attend(take(q, rows), k_here, v_here, extras, step.pulled))
            del k_here, v_here
        arrival.drop()
        if answers is not None:
            for rows, part_out, part_lse in answers.wait():
                found.merge(rows, part_out, part_lse)
    return found.result()


def differentiate_in_steps(
    grad_out: Tensor, saved: Saved, extras: Extras, course: Course
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's q, k and v, in the wide dtype.

    Args:
        grad_out: [B, H, n, D].
        saved: what `attend_in_steps` was given and gave.
        extras: as there.
        course: as there.
    """
    grads = OwnGrads(saved)
    with_queries = (saved.q, grad_out, saved.out)
    before: Returns | None = None
    for step, arrival in _arrivals(with_queries, saved.lse, saved.k, saved.v, course):
        grad_there = grad_here = None
        if step.pushed is not None:
            q, grad, out = arrival.queries()
            k, v = arrival.own_keys(step.pushed)
            grad_there = _differentiate(grad, Saved(q, k, v, out, arrival.lses()), extras, step.pushed)
            del q, k, v, grad, out
        if step.pulled is not None:
            rows = local(step.pulled.queries, course.own)
            q, grad, out = (take(each, rows) for each in with_queries)
            k, v = arrival.keys(step.pulled)
            grad_here = _differentiate(grad, Saved(q, k, v, out, take(saved.lse, rows)), extras, step.pulled)
            del q, k, v, grad, out
        arrival.drop()
        if before is not None:
            before.wait(grads)
        before = Returns(step, saved.q, saved.k, course)
        if step.pushed is not None and grad_there is not None:
            grads.add_own_keys(step.pushed, course.own, *grad_there[1:])
            before.send_queries(step.pushed, grad_there[0])
        if step.pulled is not None and grad_here is not None:
            grads.add_queries(local(step.pulled.queries, course.own), grad_here[0])
            grads.add_own_keys(step.pulled, course.own, *grad_here[1:])
            before.send_keys(step.pulled, *grad_here[1:])
        del grad_there, grad_here
        before.start()
    if before is not None:
        before.wait(grads)
    return grads.result()


def _attend(q: Tensor, k: Tensor, v: Tensor, extras: Extras, piece: Piece) -> tuple[Tensor, Tensor]:
    here = _part(extras, piece)
    return attend_partly(q, k, v, here, piece.layout, partial_backend(piece.layout, q, here))


def _differentiate(grad_out: Tensor, saved: Saved, extras: Extras, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
    here = _part(extras, piece)
    backend = partial_backend(piece.layout, saved.q, here)
    grads = differentiate_partly(grad_out, saved, here, piece.layout, backend)
    return grads.q, grads.k, grads.v


def _part(extras: Extras, piece: Piece) -> Extras:
    """What of it acts on a piece's scores."""
    padding = None if extras.key_padding is None else take(extras.key_padding, piece.keys, dim=1)
    draw = extras.draw
    if draw is not None:
        factors, offsets = (take(each, piece.queries) for each in (draw.factors, draw.offsets))
        draw = Draw(factors, offsets, take(draw.columns, piece.keys, dim=0), draw.p)
    return Extras(extras.scale, padding, None, draw)


def _arrivals(
    with_queries: Sequence[Tensor], lse: Tensor | None, k: Tensor, v: Tensor, course: Course
) -> Iterator[tuple[Step, Arrival]]:
    """Each step with what it needs, while that of the next is on its way."""
    coming: Arrival | None = None
    for step, following in zip(course.steps, [*course.steps[1:], None], strict=True):
        arrival = coming or Arrival(step, with_queries, lse, k, v, course)
        coming = None if following is None else Arrival(following, with_queries, lse, k, v, course)
        arrival.wait()
        yield step, arrival
