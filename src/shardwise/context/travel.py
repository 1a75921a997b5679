"""What travels for one step of an attention: keys and queries there, results and gradients back.

Shapes: B samples, H query heads, K key and value heads, n tokens of this rank, D head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwise.attention.backends import wide_dtype
from shardwise.comm import Comm
from shardwise.context.messages import Landing, blank, copy_run, pack, take, unpack
from shardwise.context.steps import Piece, Step
from shardwise.context.sums import OwnGrads
from shardwise.layout.runs import Runs, count_tokens, intersect, local
from shardwise.pending import Pending

Messages = dict[int, list[Tensor]]


@dataclass(frozen=True, eq=False)
class Course:
    """What a rank does for one attention, and with whom: with the ranks that have the same heads, one of each team.

    Attributes:
        comm: over the `cp` axis.
        ranks: of `comm`, by team.
        own: the tokens that this rank has.
        steps: of this rank.
    """

    comm: Comm
    ranks: tuple[int, ...]
    own: Runs
    steps: tuple[Step, ...]

    def exchange(self, sends: Messages, receives: Messages, name: str) -> Pending:
        """Start to move messages by team; all ranks do so."""
        there, back = ({self.ranks[team]: each for team, each in by_team.items()} for by_team in (sends, receives))
        return self.comm.exchange(there, back, f"context {name}")


class Arrival:
    """What one step needs of other ranks, on its way from the beginning.

    Args:
        step: to compute.
        with_queries: what travels with a query, [B, H, n, D] each.
        lse: [B, H, n], which travels with it too.
        k: [B, K, n, D], this rank's.
        v: [B, K, n, D], this rank's.
        course: of the attention.
    """

    def __init__(
        self, step: Step, with_queries: Sequence[Tensor], lse: Tensor | None, k: Tensor, v: Tensor, course: Course
    ) -> None:
        self._own, self._own_kv = course.own, (k, v)
        self._landings: dict[str, Landing] = {}
        self._pending: Pending | None = None
        if not step.is_moving:
            return
        column = () if lse is None else (lse.unsqueeze(-1),)  # [B, H, n, 1]
        sends: Messages = {team: [pack((k, v), local(runs, course.own))] for team, runs in step.sent_keys.items()}
        for team, runs in step.sent_queries.items():
            rows = local(runs, course.own)
            sends.setdefault(team, []).extend(pack(each, rows) for each in (with_queries, column) if each)
        if step.pulled is not None and step.received_keys:
            self._landings["keys"] = _landing((k, v), step.pulled.keys, step.received_keys)
        if step.pushed is not None:
            self._landings["queries"] = _landing(with_queries, step.pushed.queries, step.received_queries)
            if column:
                self._landings["lses"] = _landing(column, step.pushed.queries, step.received_queries)
        receives: Messages = {}
        for landing in self._landings.values():
            for team, buffer in landing.buffers.items():
                receives.setdefault(team, []).append(buffer)
        self._pending = course.exchange(sends, receives, "keys")

    def wait(self) -> None:
        """Until all is there."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def keys(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, nk, D] of what is pulled."""
        if "keys" not in self._landings:
            return self.own_keys(piece)
        whole = self._landings["keys"].settle()
        for run in intersect(piece.keys, self._own):  # each is one run among both
            ((first, _),), ((start, stop),) = local((run,), piece.keys), local((run,), self._own)
            copy_run(whole, first, self._own_kv, start, stop)
        k, v = unpack(whole)
        return k, v

    def own_keys(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, nk, D] of a piece that are this rank's."""
        rows = local(piece.keys, self._own)
        k, v = (take(each, rows) for each in self._own_kv)
        return k, v

    def queries(self) -> list[Tensor]:
        """What came with queries, [B, H, nq, D] each."""
        return unpack(self._landings["queries"].settle())

    def lses(self) -> Tensor:
        """Their log-sum-exps [B, H, nq]."""
        return unpack(self._landings["lses"].settle())[0].squeeze(-1)

    def drop(self) -> None:
        """Free what came."""
        self._landings.clear()


class Answers:
    """Results of queries that came, on their way back, and those of queries that went.

    Args:
        step: in which they moved.
        q: [B, H, n, D], this rank's.
        course: of the attention.
    """

    def __init__(self, step: Step, q: Tensor, course: Course) -> None:
        self._step, self._course = step, course
        self._sends: Messages = {}
        wide = wide_dtype(q.dtype)
        self._receives: Messages = {
            team: [blank(q, count_tokens(runs)), blank(q, count_tokens(runs), head_dim=1, dtype=wide)]
            for team, runs in step.sent_queries.items()
        }
        self._pending: Pending | None = None

    def add(self, piece: Piece, out: Tensor, lse: Tensor) -> None:
        """The results [B, H, nq, D] and [B, H, nq] of what was pushed to this rank."""
        for team, runs in self._step.received_queries.items():
            rows = local(runs, piece.queries)
            self._sends[team] = [pack((out,), rows), pack((lse.unsqueeze(-1),), rows)]

    def start(self) -> None:
        """Start to move them."""
        self._pending = self._course.exchange(self._sends, self._receives, "answers")
        self._sends = {}

    def wait(self) -> Iterator[tuple[Runs, Tensor, Tensor]]:
        """Rows of this rank's queries, each with a result [B, H, rows, D] and [B, H, rows]."""
        if self._pending is not None:
            self._pending.wait()
        for team, (out, lse) in sorted(self._receives.items()):
            rows = local(self._step.sent_queries[team], self._course.own)
            yield rows, unpack(out)[0], unpack(lse)[0].squeeze(-1)


class Returns:
    """Gradients of what came for a step, on their way back, and those of what went.

    Args:
        step: in which it moved.
        q: [B, H, n, D], this rank's.
        k: [B, K, n, D], this rank's.
        course: of the attention.
    """

    def __init__(self, step: Step, q: Tensor, k: Tensor, course: Course) -> None:
        self._step, self._course = step, course
        self._q, self._k = q.detach(), k.detach()
        self._keys: dict[int, Tensor] = {}
        self._queries: dict[int, Tensor] = {}
        self._pending: Pending | None = None

    def send_keys(self, piece: Piece, grad_k: Tensor, grad_v: Tensor) -> None:
        """To those of whom a piece's keys came, their part of its gradients [B, K, nk, D], in the wide dtype."""
        for team, runs in self._step.received_keys.items():
            self._keys[team] = pack((grad_k, grad_v), local(runs, piece.keys))

    def send_queries(self, piece: Piece, grad_q: Tensor) -> None:
        """To those of whom a piece's queries came, their part of its gradient [B, H, nq, D]."""
        for team, runs in self._step.received_queries.items():
            self._queries[team] = pack((grad_q,), local(runs, piece.queries))

    def start(self) -> None:
        """Start to move them."""
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
        self._pending = self._course.exchange(sends, _by_team(self._keys, self._queries), "gradients")

    def wait(self, sums: OwnGrads) -> None:
        """Until they are there; add them in the order of the ranks."""
        if self._pending is None:
            return
        self._pending.wait()
        for team, message in sorted(self._keys.items()):
            sums.add_keys(local(self._step.sent_keys[team], self._course.own), *unpack(message))
        for team, message in sorted(self._queries.items()):
            sums.add_queries(local(self._step.sent_queries[team], self._course.own), *unpack(message))


def _by_team(*several: Mapping[int, Tensor]) -> Messages:
    found: Messages = {}
    for messages in several:
        for team, message in messages.items():
            found.setdefault(team, []).append(message)
    return found


def _landing(tensors: Sequence[Tensor], tokens: Runs, by_team: Mapping[int, Runs]) -> Landing:
    """Of messages of such tensors, [B, H, n, D] each."""
    return Landing(blank(tensors[0], count_tokens(tokens), num=len(tensors)), tokens, by_team)
