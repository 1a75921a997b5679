"""Cases of context parallelism and what one process computes for them, for tests of attention over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.attention import reference_attention
from shardwise.attention.backends import Draw
from shardwise.attention.block_layout import BlockLayout, pack
from shardwise.attention.structures import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
)
from shardwise.config.resolve import ContextConfig
from shardwise.context.load_balance import choose_split, work_per_rank
from shardwise.context.plan import RingStep, find_moves, plan_steps
from shardwise.context.visibility import VisibilityIndex
from shardwise.dropout import probability_hashes
from shardwise.layout.token_ranges import Runs, TokenSplit, count_tokens

SAMPLES, HEADS, TOKENS, HEAD_DIM, BLOCK, RATE = 2, 8, 96, 8, 8, 0.25

KV_HEADS = {"mha": 8, "pairs": 4, "fours": 2, "mqa": 1}
TRANSPORTS: Mapping[str, ContextConfig] = {
    "ring": ContextConfig(transport="ring"),
    "all-gather": ContextConfig(transport="all-gather"),
    "ulysses": ContextConfig(transport="ulysses"),
    "ring over pairs": ContextConfig(transport="ring", heads_over=2),
    "all-gather over pairs": ContextConfig(transport="all-gather", heads_over=2),
}
_STRUCTURES: Mapping[str, SparsityConfig] = {
    "fixed": FixedSparsityConfig(HEADS, BLOCK, num_local_blocks=3, attention="unidirectional"),
    "window": LocalSlidingWindowSparsityConfig(HEADS, BLOCK, num_sliding_window_blocks=3),
    "bigbird": BigBirdSparsityConfig(HEADS, BLOCK, num_random_blocks=1, num_sliding_window_blocks=3),
    "longformer": BSLongformerSparsityConfig(HEADS, 4, num_sliding_window_blocks=1, global_block_indices=(10,)),
    "per head": BigBirdSparsityConfig(
        HEADS, BLOCK, different_layout_per_head=True, num_random_blocks=2, num_sliding_window_blocks=1
    ),
}


def layout_of(structure: str) -> BlockLayout:
    """The layout of a structure, over 96 tokens."""
    if structure.startswith("dense"):
        num_blocks = TOKENS // 16
        return BlockLayout.from_blocks(torch.ones(num_blocks, num_blocks), 16, causal=structure == "dense causal")
    if structure == "documents":
        return pack([_STRUCTURES["fixed"].layout(length) for length in (37, 19, 40)])
    if structure == "blind":  # all but the first tokens see nothing, and few keys are seen
        blocks = torch.zeros(12, 12)
        blocks[:3, 2] = 1
        return BlockLayout.from_blocks(blocks, BLOCK)
    return _STRUCTURES[structure].layout(TOKENS)


@dataclass(frozen=True)
class Inputs:
    """Of one process, in float64: q, grad_out [B, H, N, D]; k, v [B, K, N, D]; padding [B, N]."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    padding: Tensor | None


def inputs_of(num_kv_heads: int, extra: str) -> Inputs:
    """The same on every process."""
    generator = torch.Generator().manual_seed(7)

    def draw(num_heads: int) -> Tensor:
        return torch.randn(SAMPLES, num_heads, TOKENS, HEAD_DIM, generator=generator, dtype=torch.float64)

    padding = None
    if extra == "padding":  # all of the last tokens, which are one rank's where the split is contiguous
        padding = torch.ones(SAMPLES, TOKENS, dtype=torch.bool)
        padding[:, 72:] = False
        padding[0, 45:] = False
        padding[1, :50] = False
    return Inputs(draw(HEADS), draw(num_kv_heads), draw(num_kv_heads), draw(HEADS), padding)


def expected(case: Mapping[str, Any]) -> list[Tensor]:
    """Output and gradients of q, k and v of the whole sequence on one process."""
    given = inputs_of(KV_HEADS[case["heads"]], case["extra"])
    q, k, v = (each.clone().requires_grad_() for each in (given.q, given.k, given.v))
    draw = None
    if case["extra"] == "dropout":
        torch.manual_seed(11)
        shape = (SAMPLES, HEADS, TOKENS)
        hashes = probability_hashes((*shape, TOKENS), q.device)
        draw = Draw(hashes.factors.view(shape), hashes.offsets.view(shape), hashes.columns, RATE)
    allowed = layout_of(case["structure"]).allowed()
    out, _ = reference_attention(q, k, v, allowed, key_padding=given.padding, draw=draw)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), given.grad_out)]


def tokens_of(runs: Runs) -> Tensor:
    """Their indices [n]."""
    return torch.tensor([token for run in runs for token in range(*run)], dtype=torch.int64)


class Balance(NamedTuple):
    """How evenly a split spreads a layout.

    Attributes:
        work: the most of any rank, over the mean.
        traffic: of the tokens of other ranks, the share whose keys a rank needs; the mean over ranks.
    """

    token_layout: str
    work: float
    traffic: float


def balance_table(layout: BlockLayout, degree: int, heads_over: int = 1) -> list[Balance]:
    """Work and traffic of each token layout."""
    rows = []
    for name in ("contiguous", "zigzag", "balanced"):
        teams = choose_split(name, layout, degree).teams(heads_over)
        work = work_per_rank(layout, teams)
        received = sum(find_moves(VisibilityIndex.of(layout), teams).tokens_received())
        remote = teams.degree * (teams.num_tokens - teams.own_size)
        rows.append(Balance(name, max(work) * len(work) / sum(work), received / remote if remote else 0.0))
    return rows


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


def bytes_of_attention(
    layout: BlockLayout,
    split: TokenSplit,
    rank: int,
    sizes: AttentionSizes,
    *,
    heads_over: int = 1,
    one_by_one: bool = True,
) -> ContextTraffic:
    """Count the bytes that a rank sends in one attention.

    Args:
        one_by_one: whether keys come in steps, as in a ring; the bytes are the same in one step.

    Raises:
        ConfigError: the split is not of the layout's tokens.
    """
    exchanged = bytes_of_heads(split.own_size, heads_over, sizes)
    steps = plan_steps(layout, split.teams(heads_over), rank // heads_over, one_by_one=one_by_one)
    own = replace(sizes, num_heads=sizes.num_heads // heads_over, num_kv_heads=max(1, sizes.num_kv_heads // heads_over))
    stepped = bytes_of_steps(steps, own)
    return ContextTraffic(exchanged.forward + stepped.forward, exchanged.backward + stepped.backward)


def bytes_of_steps(steps: Sequence[RingStep], sizes: AttentionSizes) -> ContextTraffic:
    """Count the bytes that a rank sends in steps: keys with their values in the forward; in the backward the same
    again, and gradients of those that it received.

    Args:
        sizes: with the heads that the rank has in them.
    """
    sent, received = (
        sum(count_tokens(runs) for runs in several)
        for several in (
            [runs for step in steps for runs in step.sent_keys.values()],
            [runs for step in steps for runs in step.received_keys.values()],
        )
    )
    of_key = 2 * sizes.samples * sizes.num_kv_heads * sizes.head_dim  # numbers of a token: its key and its value
    moved = sent * of_key * sizes.element_bytes
    return ContextTraffic(moved, moved + received * of_key * sizes.wide_bytes)
