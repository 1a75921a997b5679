"""What a rank of the `cp` axis sends, receives and computes for one attention: a value that all transports share.

Keys and values come to the queries that see them (pulled): only those that are needed, in one step from all ranks
(all-gather) or in a step from each (ring), which are computed as they come. Rows that see nearly all keys, as of global
tokens, go the other way (pushed): the queries travel to the keys, and partial results come back. The backward has the
same steps: gradients of what was received go back where it came from.

Ranks here are those of the axis, or teams of them where heads are exchanged first (`TokenSplit.teams`).

Over dp_shard=2 x cp=2, ranks (0, 1) share the tokens of one batch and (2, 3) those of another. Of 8 tokens under causal
attention, ranks 0 and 2, the first of their `cp` axis, have the first and the last chunk of a zigzag. In a ring they
compute those alone first; then the other rank's keys come, for the queries that see them:

>>> from shardwise.attention.dense import dense_layout
>>> from shardwise.context.plan import plan_steps
>>> from shardwise.layout.token_split import zigzag
>>> split = zigzag(8, degree=2)
>>> split.shares[0]
((0, 2), (6, 8))
>>> own, second = plan_steps(dense_layout(8, causal=True), split, rank=0, one_by_one=True)
>>> own.is_moving, second.received_keys, second.pulled.queries, second.sent_keys
(False, {1: ((2, 6),)}, ((6, 8),), {1: ((0, 2),)})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.attention.block_layout import BlockLayout
from shardwise.layout.runs import Runs


@dataclass(frozen=True, eq=False)
class Piece:
    """Attention that a rank computes at once.

    Attributes:
        queries: the tokens whose queries take part; some see nothing here, perhaps.
        keys: the tokens whose keys and values take part.
        layout: of exactly these.
    """

    queries: Runs
    keys: Runs
    layout: BlockLayout


@dataclass(frozen=True, eq=False)
class Step:
    """One exchange and what is computed with it. Nothing is sent where there is nothing: runs are never empty.

    Attributes:
        sent_keys: by rank, the own tokens whose keys and values it gets.
        received_keys: by rank, its tokens whose keys and values come from it.
        sent_queries: by rank, the own tokens whose queries it gets, and answers with partial results.
        received_queries: by rank, its tokens whose queries come from it.
        pulled: own queries over received keys, and over own ones in the step that has them; None where nothing is seen,
            and so never where keys are received.
        pushed: all received queries, ascending over all ranks, over own keys; None where there are none.
        is_moving: whether anything moves between any ranks; all of them know alike.
        is_answered: whether any queries move.
    """

    sent_keys: Mapping[int, Runs]
    received_keys: Mapping[int, Runs]
    sent_queries: Mapping[int, Runs]
    received_queries: Mapping[int, Runs]
    pulled: Piece | None
    pushed: Piece | None
    is_moving: bool
    is_answered: bool
