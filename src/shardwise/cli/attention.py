"""Run the command `shardwise attention show`: it draws a config's block layout and says what that saves.

With `mesh.cp` it also says how evenly ranks share the work; for dense attention only that. Nothing is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from shardwise.cli.command import as_written, settings, split
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config
from shardwise.report.console import Terminal

if TYPE_CHECKING:
    from shardwise.attention.block_layout import BlockLayout

_SHADES, _MOST_CELLS, _MAX_BLOCKS = "·░▒▓█", 40, 2**15


@click.group()
def attention() -> None:
    """Draw which blocks of keys each block of queries sees."""


@attention.command(epilog=as_written("example:\n  shardwise attention show attention.kind=bigbird --seq-len 16384"))
@settings()
@click.option("--seq-len", type=int, help="tokens of the sequence (default: data.seq_len)")
@click.option("--bidirectional", is_flag=True, help="as in an encoder, where tokens look both ways")
def show(settings: Sequence[str], seq_len: int | None, bidirectional: bool) -> int:
    """Draw the block layout of a config's attention, and say what it leaves of dense attention."""
    from shardwise.models import decoder_config
    from shardwise.train.setup import job_config

    config = job_config(*split(settings))
    seq_len, num_heads = config.data.seq_len if seq_len is None else seq_len, decoder_config(config.model).num_heads
    layout = _layout(config, seq_len, num_heads, causal=not bidirectional)
    ways = "both ways" if bidirectional else "causal"
    lines = [f"{config.attention.kind}, {ways}: {seq_len:,} tokens, query heads: {num_heads}"]
    lines += [] if config.attention.kind == "dense" else [*_drawing(layout), *_figures(layout)]
    lines += _ranks(config, layout) if config.mesh.cp > 1 else []
    Terminal(highlight=False).print("\n".join(lines), soft_wrap=True, markup=False)
    return 0


def _layout(config: Config, seq_len: int, num_heads: int, *, causal: bool) -> BlockLayout:
    from shardwise.attention.dense import dense_layout
    from shardwise.attention.from_config import structure_of

    structure = structure_of(config.attention, num_heads, causal=causal)
    if structure is None and config.mesh.cp == 1:
        raise ConfigError(
            "attention-has-no-blocks",
            "attention.kind=dense has no blocks to draw; set another kind, or mesh.cp to see what ranks share",
        )
    most = _MAX_BLOCKS * (64 if structure is None else structure.block)  # more take some GiB
    if not 1 <= seq_len <= most:
        raise ConfigError("tokens-to-draw", f"seq_len={seq_len:,} cannot be drawn; give 1 to {most:,} tokens")
    return dense_layout(seq_len, causal=causal) if structure is None else structure.layout(seq_len)


def _drawing(layout: BlockLayout) -> Iterator[str]:
    """Yield a row for each block of queries, or for several, shaded by the share of blocks that its heads see."""
    from torch.nn.functional import avg_pool2d

    pattern = layout.patterns[0]
    size = -(-pattern.blocks.shape[-1] // _MOST_CELLS)
    shares = avg_pool2d(pattern.blocks.float().mean(0, keepdim=True), size, ceil_mode=True)[0].tolist()
    for number, row in enumerate(shares, 1):
        shown = row[:number] if pattern.causal else row
        yield "".join(
            2 * _SHADES[0 if density <= 0 else 4 if density >= 1 else 1 + min(2, int(3 * density))] for density in shown
        )
    if size > 1:
        yield f"a cell is {size} x {size} blocks, darker as more of all heads' are visible"


def _figures(layout: BlockLayout) -> Iterator[str]:
    from shardwise.attention.block_layout import BlockLayout

    pattern, num_blocks = layout.patterns[0], layout.patterns[0].blocks.shape[-1]
    half = f", {100 * layout.causal_density:.3g} % of the causal half" if pattern.causal else ""
    per_head = int(pattern.blocks.sum()) / layout.num_heads
    yield f"blocks       {per_head:,.0f} of {num_blocks**2:,} a head, of {pattern.block} tokens"
    yield f"visible      {100 * layout.density:.3g} % of all pairs{half}"
    dense_blocks = pattern.blocks.new_ones(num_blocks, num_blocks)
    dense = BlockLayout.from_blocks(dense_blocks, pattern.block, causal=pattern.causal, num_tokens=pattern.num_tokens)
    for tile in (64, 128) if layout.density else ():
        computed, of_dense = (block_layout.tile_density(tile, tile) for block_layout in (layout, dense))
        yield f"tiles of {tile:<4}{100 * computed:.3g} % computed: up to {of_dense / computed:.1f} times dense's speed"


def _ranks(config: Config, layout: BlockLayout) -> Iterator[str]:
    """Yield by token layout how even the work of the `cp` axis is, and which share of the others' keys a rank needs."""
    from shardwise.context.load_balance import balance_table, choose_split

    chosen = choose_split(config.context.token_layout, layout, config.mesh.cp).kind
    yield f"token layout most work of {config.mesh.cp} ranks, keys sent in a ring (ulysses is even with any)"
    for balance, work, sent in balance_table(layout, config.mesh.cp):
        yield f"  {balance:<11}{work:.2f} x mean, {100 * sent:.3g} % of others'{', taken' if balance == chosen else ''}"
