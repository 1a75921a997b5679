"""Plan what each rank of the `cp` axis sends, receives and computes, from the layout and the split alone.

Every rank plans for all ranks, so they agree on what moves without communication. A rank receives the keys that its
queries see and no others.

>>> import torch
>>> from shardwise.layout.token_ranges import contiguous
>>> layout = BlockLayout.from_blocks(torch.tensor([[1, 0], [1, 1]]), block=8, causal=True)
>>> own, second = plan_steps(layout, contiguous(16, 2), rank=1, one_by_one=True)
>>> own.is_moving, second.received_keys, second.sent_keys
(False, {0: ((0, 8),)}, {})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.attention.block_layout import BlockLayout
from shardwise.config.errors import ConfigError
from shardwise.context.visibility import VisibilityIndex
from shardwise.layout.token_ranges import Runs, TokenSplit, count_tokens, intersect, join


@dataclass(frozen=True)
class ExchangePlan:
    """Says, for all ranks, which tokens' keys each rank needs from which other.

    Attributes:
        keys: `keys[rank][source]`, the source's tokens whose keys the queries of the rank see.
    """

    keys: tuple[tuple[Runs, ...], ...]

    def tokens_received(self) -> tuple[int, ...]:
        """Count the tokens whose keys and values each rank receives."""
        return tuple(
            sum(count_tokens(runs) for source, runs in enumerate(sources) if source != rank)
            for rank, sources in enumerate(self.keys)
        )

    def is_moving(self, distances: Sequence[int]) -> bool:
        """Say whether anything moves between ranks so many places apart."""
        degree = len(self.keys)
        return any(
            self.keys[rank][(rank - distance) % degree] for distance in distances if distance for rank in range(degree)
        )


def plan_steps(layout: BlockLayout, split: TokenSplit, rank: int, *, one_by_one: bool) -> tuple[RingStep, ...]:
    """Return the steps of one attention, kept with the layout. All ranks have equally many and exchange them together.

    The first step has the rank's own keys, and exists even if nothing is seen.

    Args:
        layout: of the whole sequence, documents one after another.
        one_by_one: if true (a ring), a step with the own keys, in which nothing moves, comes first, then one step for
            each other rank: at step t a rank sends to the rank t places on. A step in which nothing moves between any
            ranks is left out. If false, all keys come in one step, with the own ones.

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
    """Find which ranks need which keys of which others."""
    seen = [visibility.keys_seen(queries) for queries in split.shares]
    return ExchangePlan(tuple(tuple(intersect(each, share) for share in split.shares) for each in seen))


def _plan(layout: BlockLayout, split: TokenSplit, rank: int, one_by_one: bool) -> tuple[RingStep, ...]:
    visibility = VisibilityIndex.of(layout)
    moves = find_moves(visibility, split)
    all_distances = range(split.degree)
    steps = [(distance,) for distance in all_distances] if one_by_one else [tuple(all_distances)]
    return tuple(
        _step(layout, split, visibility, moves, rank, distances)
        for distances in steps
        if 0 in distances or moves.is_moving(distances)
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
    received = {source: runs for source in sources if (runs := moves.keys[rank][source])}
    sent = {target: runs for target in targets if (runs := moves.keys[target][rank])}
    keys = join([*received.values(), *([split.shares[rank]] if 0 in distances else [])])
    tile = _tile(layout, visibility, split.shares[rank], keys)
    return RingStep(sent, received, tile, moves.is_moving(distances))


def _tile(layout: BlockLayout, visibility: VisibilityIndex, queries: Runs, keys: Runs) -> AttentionTile | None:
    """Return the tile of the queries that see any key: of each run, those from the first to the last (a view)."""
    seeing = visibility.queries_seeing(keys, among=queries)
    parts = [part for run in queries if (part := intersect(seeing, (run,)))]
    hull = tuple((part[0][0], part[-1][1]) for part in parts)
    return AttentionTile(hull, keys, layout.select(hull, keys)) if hull else None


@dataclass(frozen=True, eq=False)
class AttentionTile:
    """Describes a part of the attention that a rank computes at once.

    Attributes:
        queries: the tokens whose queries take part; some may see nothing here.
        keys: the tokens whose keys and values take part.
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
        tile: own queries over received keys, and over own keys in the step that has them; None where nothing is seen,
            so never where keys are received.
        is_moving: whether anything moves between any ranks; the same on all of them.
    """

    sent_keys: Mapping[int, Runs]
    received_keys: Mapping[int, Runs]
    tile: AttentionTile | None
    is_moving: bool
