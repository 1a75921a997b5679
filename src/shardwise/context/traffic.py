"""Count the bytes that a rank sends in one dense attention over the ranks of the `cp` axis.

Both ways the counts are those of the papers (c ranks, n tokens of each, B samples, H query and K
key heads of D, e bytes an element and w of the wide dtype; u ranks that exchange heads):

| transport | forward | backward |
|---|---|---|
| ring, all-gather (Liu et al. 2023, arXiv 2310.01889) | (c - 1) 2 n B K D e | (c - 1) 2 n B K D (e + w) |
| heads for tokens (Jacobs et al. 2023, arXiv 2309.14509) | (u - 1) / u  n B (2 H + 2 K) D e | the same |

The backward of a ring moves keys and values again, and their gradients in the wide dtype. For causal attention a
contiguous split moves half of that, the mean over ranks, and a zigzag 3/4: a rank needs one chunk of every other rank,
and the second one too of those whose second chunk is before its own. Where there are fewer KV heads than ranks that
exchange heads, each rank gets one, so K is u there, and their gradients come back in the wide dtype, since they are
summed.

>>> sizes = AttentionSizes(samples=1, num_heads=8, num_kv_heads=2, head_dim=64)
>>> bytes_of_heads(128, team_size=2, sizes=sizes)
ContextTraffic(forward=163840, backward=163840)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class AttentionSizes:
    """Gives the sizes of one attention on a rank, before any heads are exchanged.

    Attributes:
        element_bytes: of q, k, v and the output.
        wide_bytes: of log-sum-exps, and of gradients that are summed.
    """

    samples: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int = 2
    wide_bytes: int = 4


class ContextTraffic(NamedTuple):
    """Counts the bytes that a rank sends."""

    forward: int
    backward: int


def bytes_of_heads(num_tokens: int, team_size: int, sizes: AttentionSizes) -> ContextTraffic:
    """Count the bytes that a rank sends to exchange heads for tokens and back: q, k, v and then the output in the
    forward; the output's gradient and then theirs in the backward.

    Args:
        team_size: ranks that exchange heads; 1 where none do.
    """
    query_heads, kv_heads = sizes.num_heads // team_size, max(1, sizes.num_kv_heads // team_size)
    of_head = (team_size - 1) * num_tokens * sizes.samples * sizes.head_dim
    kv_bytes = sizes.wide_bytes if sizes.num_kv_heads < team_size else sizes.element_bytes
    queries = 2 * query_heads * of_head * sizes.element_bytes
    keys = 2 * kv_heads * of_head
    return ContextTraffic(queries + keys * sizes.element_bytes, queries + keys * kv_bytes)


def bytes_of_ring(num_tokens: int, num_ranks: int, sizes: AttentionSizes) -> ContextTraffic:
    """Count the bytes that a rank sends where all ranks see all keys, as in the table above; for causal attention over
    a zigzag split these are the bytes of the rank that sends most, for which the others wait.

    Args:
        sizes: with the heads that the rank has in it.
    """
    of_keys = (num_ranks - 1) * 2 * num_tokens * sizes.samples * sizes.num_kv_heads * sizes.head_dim
    return ContextTraffic(of_keys * sizes.element_bytes, of_keys * (sizes.element_bytes + sizes.wide_bytes))
