"""Describes a sequence that is split over ranks, in lines of text: how even their work is, and what they send.

It imports torch, which `shardwise.cli.attention` does not before it knows that the question is right.

>>> from shardwise.attention.dense import dense_layout
>>> layout, sizes = dense_layout(4096, causal=True), AttentionSizes(samples=1, num_heads=4, num_kv_heads=4, head_dim=64)
>>> print("\\n".join(figures_of_ranks(layout, sizes, ContextConfig(), degree=4)))
ranks        cp=4, 1,024 tokens of a sequence each
token layout   most work    keys that are sent
  contiguous   1.75 x mean  50 % of other ranks'
  zigzag       1.00 x mean  75 % of other ranks', taken by auto
  balanced     1.00 x mean  75 % of other ranks'
sent         by a rank, a layer and micro-batch
  ring         forward 2.25 MiB, backward 6.75 MiB (all-gather the same)
  ulysses      forward 1.50 MiB, backward 1.50 MiB
"""

from __future__ import annotations

from shardwise.attention.block_layout import BlockLayout
from shardwise.config.resolve import ConfigError, ContextConfig
from shardwise.context.load_balance import balance_table, choose_split
from shardwise.context.traffic import AttentionSizes, bytes_of_attention
from shardwise.context.ulysses import check_heads, check_team
from shardwise.layout.token_ranges import TokenSplit, contiguous
from shardwise.runtime.format import format_bytes

_INDENT = "  "


def figures_of_ranks(layout: BlockLayout, sizes: AttentionSizes, section: ContextConfig, degree: int) -> list[str]:
    """Describe each token layout's balance, and the bytes that each transport sends, as means over ranks.

    Keys are sent between ranks, or between teams of `heads_over` ranks where the section has some. Ulysses has no token
    layout to choose, so its table is that of a ring, and says so.

    Args:
        layout: the attention's layout for the whole sequence and all heads.
        sizes: the sizes of one rank's attention.
        section: the config's section `context`.
        degree: the ranks of the `cp` axis.

    Raises:
        ConfigError: the sequence does not divide over the ranks, or the ranks not into teams.
    """
    check_team(section, degree)
    is_even = section.transport == "ulysses"
    size = 1 if is_even else section.heads_over or 1
    chosen = choose_split(section.token_layout, layout, degree, size)
    by = "auto" if section.token_layout == "auto" else "the config"
    of_teams = f", {degree // size} teams of {size} ranks" if size > 1 else ""
    others = "other teams'" if size > 1 else "other ranks'"
    lines = [
        f"ranks        cp={degree}, {chosen.own_size:,} tokens of a sequence each{of_teams}",
        f"token layout   most work    keys that are sent{' in a ring; even by ulysses, with any' if is_even else ''}",
    ]
    for kind, work, traffic in balance_table(layout, degree, size):
        line = f"{_INDENT}{kind:<13}{f'{work:.2f} x mean':<13}{100 * traffic:.3g} % of {others}"
        lines.append(f"{line}, taken by {by}" if kind == chosen.kind and not is_even else line)
    lines.append("sent         by a rank, a layer and micro-batch")
    if size > 1:
        lines.append(_sent(f"{size} x {section.transport}", layout, chosen, sizes, size))
        lines.append(_sent("ring", layout, choose_split(section.token_layout, layout, degree), sizes))
    else:
        lines.append(f"{_sent('ring', layout, chosen, sizes)} (all-gather the same)")
    return [*lines, _sent("ulysses", layout, contiguous(chosen.num_tokens, degree), sizes, degree)]


def _sent(name: str, layout: BlockLayout, split: TokenSplit, sizes: AttentionSizes, size: int = 1) -> str:
    """Return a line that says what a transport sends, or why it cannot be used."""
    head = f"{_INDENT}{name:<13}"
    section = ContextConfig(transport="ulysses") if size == split.degree else ContextConfig(heads_over=size)
    try:
        check_heads(sizes.num_heads, sizes.num_kv_heads, section, split.degree)
    except ConfigError as error:
        return f"{head}{error}"
    ranks = range(split.degree)
    sent = [bytes_of_attention(layout, split, rank, sizes, heads_over=size) for rank in ranks]
    forward, backward = (format_bytes(sum(each) // split.degree) for each in zip(*sent, strict=True))
    return f"{head}forward {forward}, backward {backward}"
