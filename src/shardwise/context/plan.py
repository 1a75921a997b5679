"""Plan what each rank of the `cp` axis sends, receives and computes, from the layout and the split alone.

Every rank plans for all ranks, so they agree on what moves without communication. A rank receives the keys that its
queries see and no others. A few rows that see nearly all keys would bring nearly all keys to their rank. Such rows are
pushed instead: each rank computes them over its own keys, which also spreads their work.

>>> import torch
>>> from shardwise.layout.token_ranges import contiguous
>>> layout = BlockLayout.from_blocks(torch.tensor([[1, 0], [1, 1]]), block=8, causal=True)
>>> (own, second) = plan_steps(layout, contiguous(16, 2), rank=1, one_by_one=True)
>>> own.is_moving, second.received_keys, second.sent_keys
(False, {0: ((0, 8),)}, {})
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardwise.attention.block_layout import BlockLayout
from shardwise.config.resolve import ConfigError
from shardwise.context.visibility import VisibilityIndex
from shardwise.layout.token_ranges import Runs, TokenSplit, count_tokens, intersect, join

PUSHED_SHARE: Final = 0.75
"""A row of blocks that sees so much of its document may be pushed."""

PUSHED_COST: Final = 4
"""Pushing a query to one rank costs as much as pulling so many keys with their values. With H query and K key heads of
D, in elements: a key and its value are sent twice and two gradients in the wide dtype, each as large as two, come back,
8 K D; a query is sent twice, its output three times (result, and with its gradient for the backward) and a wide
gradient comes back, 7 H D. So 4 stands for models of H / K up to 4."""


@dataclass(frozen=True)
class ExchangePlan:
    """Says, for all ranks, which tokens' keys and queries each rank needs from which other.

    Attributes:
        local: the queries of each rank that see all their keys there.
        keys: `keys[rank][source]`, the source's tokens whose keys the local queries of the rank see.
        queries: `queries[rank][source]`, the source's pushed tokens that see keys of the rank; none of its own.
    """

    local: tuple[Runs, ...]
    keys: tuple[tuple[Runs, ...], ...]
    queries: tuple[tuple[Runs, ...], ...]

    @property
    def is_pushing(self) -> bool:
        return any(runs for sources in self.queries for runs in sources)

    def tokens_pulled(self) -> tuple[int, ...]:
        """Count the tokens whose keys and values each rank receives."""
        return tuple(_without_own(sources, rank) for rank, sources in enumerate(self.keys))

    def tokens_pushed(self) -> tuple[int, ...]:
        """Count the tokens whose queries each rank receives."""
        return tuple(_without_own(sources, rank) for rank, sources in enumerate(self.queries))


def plan_steps(layout: BlockLayout, split: TokenSplit, rank: int, *, one_by_one: bool) -> tuple[RingStep, ...]:
    """Return the steps of one attention, kept with the layout. All ranks have equally many and exchange them together.

    The first step has the rank's own keys, and exists even if nothing is seen.

    Args:
        layout: of the whole sequence, documents one after another.
        split: of the sequence's tokens.
        rank: of the split.
        one_by_one: if true (a ring), a step with the own keys, in which nothing moves, comes first, then one step for
            each other rank: at step t a rank sends to the rank t places on. A step in which nothing moves between any
            ranks is left out. If false, all keys come in one step, with the own ones unless queries are pushed.

    Raises:
        ConfigError: the split is of another number of tokens, or the layout is not of a whole sequence.
    """
    require_whole(layout, split)
    key = ("context steps", split, rank, one_by_one)
    return layout.cached(key, lambda whole: _plan(whole, split, rank, one_by_one))


def require_whole(layout: BlockLayout, split: TokenSplit) -> None:
    """Raise unless the layout has the queries and keys of all tokens of the split.

    Raises:
        ConfigError: it has not.
    """
    num_tokens = sum(pattern.num_tokens for pattern in layout.patterns)
    if not layout.num_queries == layout.num_keys == num_tokens == split.num_tokens:
        raise ConfigError(
            "layout-length",
            f"a layout of {layout.num_queries} queries and {layout.num_keys} keys is not that of a sequence of "
            f"{split.num_tokens} tokens split over cp={split.degree}; give that of the whole sequence",
        )


def find_moves(visibility: VisibilityIndex, split: TokenSplit) -> ExchangePlan:
    """Find which ranks need which keys of which others, with rows pushed where that is worth it."""
    plain = _moves(visibility, split, ())
    pushed = visibility.rows_seeing_most(PUSHED_SHARE)
    if not pushed:
        return plain
    moves = _moves(visibility, split, pushed)
    saved = sum(plain.tokens_pulled()) - sum(moves.tokens_pulled())
    return moves if saved > PUSHED_COST * sum(moves.tokens_pushed()) else plain


def _moves(visibility: VisibilityIndex, split: TokenSplit, pushed: Runs) -> ExchangePlan:
    kept = _others(pushed, split.num_tokens)
    local = tuple(intersect(share, kept) for share in split.shares)
    seen = [visibility.keys_seen(queries) for queries in local]
    keys = tuple(tuple(intersect(each, share) for share in split.shares) for each in seen)
    sent = [intersect(share, pushed) for share in split.shares]
    queries = tuple(
        tuple(
            visibility.queries_seeing(share, among=sent[source]) if source != rank and sent[source] else ()
            for source in range(split.degree)
        )
        for rank, share in enumerate(split.shares)
    )
    return ExchangePlan(local, keys, queries)


def _plan(layout: BlockLayout, split: TokenSplit, rank: int, one_by_one: bool) -> tuple[RingStep, ...]:
    visibility = VisibilityIndex.of(layout)
    moves = find_moves(visibility, split)
    degree = split.degree
    if one_by_one:
        steps: list[tuple[int, ...]] = [(distance,) for distance in range(degree)]
    elif moves.is_pushing:  # Pushed rows see own keys alone here, others all.
        steps = [(0,), tuple(range(1, degree))]
    else:
        steps = [tuple(range(degree))]
    return tuple(
        _step(layout, split, visibility, moves, rank, distances)
        for distances in steps
        if 0 in distances or any(_moving(moves, distances))
    )


def _step(
    layout: BlockLayout,
    split: TokenSplit,
    visibility: VisibilityIndex,
    moves: ExchangePlan,
    rank: int,
    distances: Sequence[int],
) -> RingStep:
    """Return the step in which ranks so many places apart exchange."""
    degree = split.degree
    sources = sorted((rank - distance) % degree for distance in distances if distance)
    targets = sorted((rank + distance) % degree for distance in distances if distance)
    received_keys = _filled((source, moves.keys[rank][source]) for source in sources)
    received_queries = _filled((source, moves.queries[rank][source]) for source in sources)
    is_own = 0 in distances
    keys = join([*received_keys.values(), *([split.shares[rank]] if is_own else [])])
    pushed = join(received_queries.values())
    keys_move, queries_move = _moving(moves, distances)
    return RingStep(
        sent_keys=_filled((target, moves.keys[target][rank]) for target in targets),
        received_keys=received_keys,
        sent_queries=_filled((target, moves.queries[target][rank]) for target in targets),
        received_queries=received_queries,
        pulled=_piece(layout, visibility, split.shares[rank] if is_own else moves.local[rank], keys),
        pushed=_piece(layout, visibility, pushed, split.shares[rank]),
        is_moving=keys_move or queries_move,
        is_answered=queries_move,
    )


def _piece(layout: BlockLayout, visibility: VisibilityIndex, queries: Runs, keys: Runs) -> AttentionTile | None:
    """Return the tile of the queries that see any key: of each run, those from the first to the last (a view)."""
    seeing = visibility.queries_seeing(keys, among=queries)
    parts = [part for run in queries if (part := intersect(seeing, (run,)))]
    hull = tuple((part[0][0], part[-1][1]) for part in parts)
    return AttentionTile(hull, keys, layout.select(hull, keys)) if hull else None


def _moving(moves: ExchangePlan, distances: Sequence[int]) -> tuple[bool, bool]:
    """Return whether any keys, and whether any queries, move between ranks so many places apart."""
    degree = len(moves.local)
    pairs = [(rank, (rank - distance) % degree) for distance in distances if distance for rank in range(degree)]
    keys = any(moves.keys[rank][source] for rank, source in pairs)
    return keys, any(moves.queries[rank][source] for rank, source in pairs)


def _filled(of_ranks: Iterable[tuple[int, Runs]]) -> dict[int, Runs]:
    return {rank: runs for rank, runs in of_ranks if runs}


def _without_own(sources: Sequence[Runs], rank: int) -> int:
    return sum(count_tokens(runs) for source, runs in enumerate(sources) if source != rank)


def _others(runs: Runs, num_tokens: int) -> Runs:
    """Return the tokens that are in none of the runs."""
    bounds = [0, *(bound for run in runs for bound in run), num_tokens]
    return tuple((start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if start < stop)


@dataclass(frozen=True, eq=False)
class AttentionTile:
    """Describes a part of the attention that a rank computes at once.

    Attributes:
        queries: the tokens whose queries take part; some may see nothing here.
        keys: the tokens whose keys and values take part.
        layout: of exactly these.
    """

    queries: Runs
    keys: Runs
    layout: BlockLayout


@dataclass(frozen=True, eq=False)
class RingStep:
    """Describes one exchange and the computation that uses it. Empty messages are not sent: runs are never empty.

    Attributes:
        sent_keys: by target rank, the own tokens whose keys and values are sent.
        received_keys: by source rank, its tokens whose keys and values are received.
        sent_queries: by target rank, the own tokens whose queries are sent; it answers with partial results.
        received_queries: by source rank, its tokens whose queries are received.
        pulled: own queries over received keys, and over own keys in the step that has them; None where nothing is seen,
            so never where keys are received.
        pushed: all received queries, ascending over all ranks, over own keys; None where there are none.
        is_moving: whether anything moves between any ranks; the same on all of them.
        is_answered: whether any queries move between any ranks.
    """

    sent_keys: Mapping[int, Runs]
    received_keys: Mapping[int, Runs]
    sent_queries: Mapping[int, Runs]
    received_queries: Mapping[int, Runs]
    pulled: AttentionTile | None
    pushed: AttentionTile | None
    is_moving: bool
    is_answered: bool
