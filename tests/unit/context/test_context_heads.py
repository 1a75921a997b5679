"""Which heads a rank has, and what cannot be exchanged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.config.resolve import ContextConfig
from shardwise.context.ulysses import check_heads, check_team, heads_of, team_size


@given(st.integers(1, 6), st.integers(1, 8), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_every_query_head_has_the_kv_head_that_it_reads(own: int, group: int, size: int, is_replicated: bool) -> None:
    """As in one process, where query head h reads KV head h // (H / K); so after the exchange too."""
    num_heads = own * size * group
    num_kv_heads = max(1, size // 2) if is_replicated else own * size
    if num_heads % num_kv_heads:
        return
    seen = []
    for index in range(size):
        (first, num), (first_kv, num_kv) = heads_of(num_heads, size, index), heads_of(num_kv_heads, size, index)
        seen += range(first, first + num)
        for place in range(num):
            assert (first + place) // (num_heads // num_kv_heads) == first_kv + place // (num // num_kv)
    assert seen == list(range(num_heads))


def test_teams() -> None:
    assert team_size(ContextConfig(transport="ulysses"), 8) == 8
    assert team_size(ContextConfig(transport="ring"), 8) == 1
    assert team_size(ContextConfig(transport="all-gather", heads_over=4), 8) == 4
    with refused("heads-over-in-ulysses", "heads_over=2", "transport=ulysses", "mesh.cp=4"):
        check_team(ContextConfig(transport="ulysses", heads_over=2), 4)
    with refused("heads-over-divides-cp", "context.heads_over=4", "mesh.cp=6", "3, 6"):
        check_team(ContextConfig(heads_over=4), 6)


def test_heads_that_cannot_be_exchanged() -> None:
    ulysses = ContextConfig(transport="ulysses")
    check_heads(32, 8, ulysses, 4)
    check_heads(32, 2, ulysses, 4)
    check_heads(6, 1, ContextConfig(), 4)
    with refused("cp-query-heads", "mesh.cp=5", "32 query", "4, 8"):
        check_heads(32, 8, ulysses, 5)
    with refused("cp-kv-heads", "mesh.cp=4", "6 KV", "3, 6"):
        check_heads(12, 6, ulysses, 4)
    with refused("cp-query-heads", "context.heads_over=4", "6 query", "legal: 2"):
        check_heads(6, 6, ContextConfig(heads_over=4), 8)
    with refused("cp-query-heads", "cp=4", "2 query", "tp=4", "legal: 2"):
        check_heads(8, 8, ulysses, 4, tp=4)
