"""From a rate of dropout to the draw that back ends take."""

from __future__ import annotations

from torch import Tensor

from shardwise.attention.backends import Draw
from shardwise.attention.block_layout import BlockLayout
from shardwise.config import ConfigError
from shardwise.dropout import probability_hashes


def drawn(q: Tensor, layout: BlockLayout, p: float) -> Draw:
    """The draw of one dropout: keyed in an engine's forward, by torch's generator for the CPU elsewhere.

    Queries behind cached keys draw by their true positions; those of several documents count through.

    Args:
        q: [B, H, Nq, D].
        layout: of the attention.
        p: the rate; more than 0 and less than 1.

    Raises:
        ConfigError: the layout is of other queries or keys than all, or than the last queries of one document.
    """
    num_samples, num_heads, num_queries, _ = q.shape
    first = _first_position(layout)
    hashes = probability_hashes((num_samples, num_heads, num_queries, layout.num_keys), q.device, first)
    shape = (num_samples, num_heads, num_queries)
    return Draw(hashes.factors.view(shape), hashes.offsets.view(shape), hashes.columns, p)


def _first_position(layout: BlockLayout) -> int:
    """That of the first query; those behind it follow."""
    num_tokens = sum(pattern.num_tokens for pattern in layout.patterns)
    first = num_tokens - layout.num_queries
    is_last = layout.patterns[0].query_runs == ((first, num_tokens),)
    if layout.num_keys != num_tokens or (first and not is_last):
        raise ConfigError(
            f"dropout over {layout.num_queries} queries and {layout.num_keys} keys of {num_tokens} tokens has no "
            "positions to draw by; give a Draw of these queries and keys, or all keys and the last queries"
        )
    return first
