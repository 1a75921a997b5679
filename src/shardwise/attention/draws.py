"""From a rate of dropout to the draw that back ends take."""

from __future__ import annotations

from torch import Tensor

from shardwise.attention.backends import Draw
from shardwise.attention.block_layout import BlockLayout
from shardwise.dropout import probability_hashes


def drawn(q: Tensor, layout: BlockLayout, p: float) -> Draw:
    """The draw of one dropout: keyed in an engine's forward, by torch's generator for the CPU elsewhere.

    Queries behind cached keys draw by their true positions; those of several documents count through.

    Args:
        q: [B, H, Nq, D].
        layout: of the attention.
        p: the rate; more than 0 and less than 1.
    """
    num_samples, num_heads, num_queries, _ = q.shape
    first = layout.patterns[0].first_query if len(layout.patterns) == 1 else 0
    hashes = probability_hashes((num_samples, num_heads, num_queries, layout.num_keys), q.device, first)
    shape = (num_samples, num_heads, num_queries)
    return Draw(hashes.factors.view(shape), hashes.offsets.view(shape), hashes.columns, p)
