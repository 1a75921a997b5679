"""Run the command `shardwise attention show`: it draws a config's block layout and says what that saves.

With `mesh.cp` it also says how evenly ranks share the work, and what they send; for dense attention only that.

Nothing is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from shardwise.cli.command import OUTPUT, as_written, settings, split, write_file
from shardwise.config.resolve import Config, ConfigError
from shardwise.report import layout_drawing
from shardwise.report.console import Terminal

if TYPE_CHECKING:
    from torch import Tensor

    from shardwise.attention.block_layout import BlockLayout


_TILES = (64, 128)
_MAX_PANELS = 4
_SVG_CELLS = 240
_MAX_BLOCKS = 2**15


@click.group()
def attention() -> None:
    """Draw which blocks of keys each block of queries sees."""


@attention.command(
    epilog=as_written("""
examples:
  shardwise attention show my.toml
  shardwise attention show attention.kind=bigbird attention.block=64 --seq-len 16384
  shardwise attention show my.toml --heads 16 --svg layout.svg
  shardwise attention show my.toml --cp 8 --seq-len 65536
""")
)
@settings()
@click.option("--seq-len", type=int, help="tokens of the sequence (default: data.seq_len)")
@click.option("--heads", type=int, help="query heads (default: the model's)")
@click.option("--cp", type=int, help="ranks that share the sequence (default: mesh.cp)")
@click.option("--bidirectional", is_flag=True, help="as in an encoder, where tokens look both ways")
@click.option("--svg", type=OUTPUT, help="write a picture instead")
def show(
    settings: Sequence[str],
    seq_len: int | None,
    heads: int | None,
    cp: int | None,
    bidirectional: bool,
    svg: Path | None,
) -> int:
    """Draw the block layout of a config's attention, and say what it leaves of dense attention."""
    from shardwise.train.setup import job_config

    path, assignments = split(settings)
    config = job_config(path, assignments if cp is None else [*assignments, f"mesh.cp={cp}"])
    seq_len = config.data.seq_len if seq_len is None else seq_len
    num_heads, layout = _layout(config, seq_len, heads, causal=not bidirectional)
    ranks = _figures_of_ranks(config, layout, num_heads) if config.mesh.cp > 1 else []
    causal = "causal" if layout.patterns[0].causal else "both ways"
    title = f"{config.attention.kind}, {causal}: {seq_len:,} tokens, {num_heads} {_noun(num_heads, 'head')}"
    is_dense = config.attention.kind == "dense"
    lines = [*([] if is_dense else figures(layout)), *ranks]
    if svg is not None:
        drawn = panels(layout, _SVG_CELLS)
        write_file(svg, layout_drawing.svg(drawn, [title, *lines], is_causal=layout.patterns[0].causal))
        print(f"wrote {svg}")
        return 0
    console = Terminal(highlight=False)
    console.print(title, style="bold", soft_wrap=True)
    if not is_dense:
        _draw(console, layout)
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
    return 0


def _draw(console: Console, layout: BlockLayout) -> None:
    cells = layout_drawing.cells_across(console.width, min(layout.num_heads, _MAX_PANELS))
    drawn = panels(layout, cells)
    text = layout_drawing.terminal(drawn, console.width, is_causal=layout.patterns[0].causal)
    console.print(text, soft_wrap=True)
    per_cell = _blocks_per_cell(layout.patterns[0].blocks.shape[-1], cells)
    if per_cell > 1:
        shades = f"{layout_drawing.SHADES[1]} to {layout_drawing.SHADES[-1]}"
        console.print(f"cells        of {per_cell} x {per_cell} blocks, from {shades} as more of them are visible")


def _layout(config: Config, seq_len: int, num_heads: int | None, *, causal: bool) -> tuple[int, BlockLayout]:
    """Return the query heads (the model's where none are given) and the layout."""
    # torch takes seconds to import.
    from shardwise.attention.dense import dense_layout
    from shardwise.attention.from_config import structure_of
    from shardwise.models import decoder_config

    if num_heads is None:
        num_heads = decoder_config(config.model).num_heads
    if seq_len < 1:
        raise ConfigError("seq-len-below-one", f"seq_len={seq_len} has no token; give 1 or more")
    structure = structure_of(config.attention, num_heads, causal=causal)
    if structure is None:
        if config.mesh.cp > 1:
            return num_heads, dense_layout(seq_len, causal=causal)
        raise ConfigError(
            "attention-has-no-blocks",
            "attention.kind=dense has no blocks to draw; set attention.kind=fixed, variable, bigbird, bslongformer or "
            "sliding-window, or mesh.cp to see what ranks share",
        )
    if seq_len > _MAX_BLOCKS * structure.block:  # some GiB of blocks, for a picture
        raise ConfigError(
            "too-many-blocks-to-draw",
            f"{seq_len:,} tokens in blocks of {structure.block} are too many to draw; draw "
            f"{_MAX_BLOCKS * structure.block:,} or fewer, or take a larger attention.block",
        )
    return num_heads, structure.layout(seq_len)


def _figures_of_ranks(config: Config, layout: BlockLayout, num_heads: int) -> list[str]:
    """Say what ranks of the `cp` axis share and send, in the config's model with so many query heads."""
    from shardwise.cli.context_figures import figures_of_ranks
    from shardwise.context.traffic import AttentionSizes
    from shardwise.models import decoder_config
    from shardwise.runtime.precision import torch_dtype

    shape, tp = decoder_config(config.model), config.mesh.tp
    num_kv_heads = shape.num_kv_heads if num_heads % shape.num_kv_heads == 0 else num_heads
    element_bytes = torch_dtype(config.precision.param or "fp32").itemsize
    sizes = AttentionSizes(
        samples=config.batch.micro_size or 1,
        num_heads=max(1, num_heads // tp),
        num_kv_heads=max(1, num_kv_heads // tp),
        head_dim=shape.head_dim,
        element_bytes=element_bytes,
        wide_bytes=max(4, element_bytes),
    )
    return figures_of_ranks(layout, sizes, config.context, config.mesh.cp)


def panels(layout: BlockLayout, max_cells: int) -> list[layout_drawing.LayoutPanel]:
    """Draw the heads whose layouts differ, the first few of them, each under the heads that it shows.

    Args:
        layout: the layout of one sequence.
        max_cells: the most cells of a row; where there are more blocks, a cell shows several.
    """
    heads: dict[bytes, list[int]] = {}
    blocks = layout.patterns[0].blocks  # [heads or 1, num_blocks, num_blocks]
    for head, its in enumerate(blocks):
        heads.setdefault(its.numpy().tobytes(), []).append(head)
    groups = list(heads.values())
    drawn = []
    for group in groups[:_MAX_PANELS]:
        title = "" if len(groups) == 1 else f"{_noun(len(group), 'head')} {', '.join(map(str, group))}"
        drawn.append(layout_drawing.LayoutPanel(title, _shares(blocks[group[0]], max_cells)))
    if len(groups) > _MAX_PANELS:
        last = drawn[-1]
        others = f" and {len(groups) - _MAX_PANELS} more layouts, not drawn"
        drawn[-1] = layout_drawing.LayoutPanel(last.title + others, last.shares)
    return drawn


def _blocks_per_cell(num_blocks: int, max_cells: int) -> int:
    return -(-num_blocks // max_cells)


def _shares(blocks: Tensor, max_cells: int) -> list[list[float]]:
    """Return the share of visible blocks in each cell, in at most so many cells a row."""
    import torch

    num_blocks = len(blocks)
    per_cell = _blocks_per_cell(num_blocks, max_cells)
    index = torch.arange(num_blocks) // per_cell  # [num_blocks]
    num_cells = int(index[-1]) + 1
    by_row = torch.zeros(num_cells, num_blocks).index_add_(0, index, blocks.float())
    cells = torch.zeros(num_cells, num_cells).index_add_(1, index, by_row)
    sizes = index.bincount().float()
    shares: list[list[float]] = (cells / (sizes * sizes[:, None])).tolist()
    return shares


def figures(layout: BlockLayout) -> list[str]:
    """Say in lines of text what share of dense attention a layout leaves, and how much of it a kernel computes."""
    from shardwise.attention.block_layout import BlockLayout, keys_of_rows

    pattern = layout.patterns[0]
    num_blocks, block = pattern.blocks.shape[-1], pattern.block
    per_head = int(pattern.blocks.sum()) / layout.num_heads
    rows = keys_of_rows(pattern).double()  # [heads or 1, num_blocks]
    causal_half = f", {_percent(layout.causal_density)} of the causal half" if pattern.causal else ""
    lines = [
        f"blocks       {per_head:,.0f} of {num_blocks**2:,} a head, of {block} tokens",
        f"visible      {_percent(layout.density)} of all pairs{causal_half}",
    ]
    dense = BlockLayout.from_blocks(
        pattern.blocks.new_ones(num_blocks, num_blocks), block, causal=pattern.causal, num_tokens=pattern.num_tokens
    )
    for tile in _TILES if layout.density else ():
        computed = layout.tile_density(tile, tile)
        times = dense.tile_density(tile, tile) / computed
        lines.append(f"tiles of {tile:<4}{_percent(computed)} computed: at most {times:.1f} times as fast as dense")
    mean = rows.mean().item()
    if mean:
        longest = f"{rows.max().item() / mean:.1f} times the mean row of blocks"
        lines.append(f"longest row  {longest}{'; kernels split it' if rows.max() > 2 * mean else ''}")
    num_empty = int((rows == 0).sum())
    if num_empty:
        lines.append(f"empty rows   {num_empty} of blocks see no key, and give 0")
    hint = _hint(layout, dense)
    return [*lines, f"hint         {hint}"] if hint else lines


def _hint(layout: BlockLayout, dense: BlockLayout) -> str | None:
    tile, block = _TILES[0], layout.block
    if not layout.density:
        return None
    computed = layout.tile_density(tile, tile)
    if block < tile and computed > 1.2 * layout.density:
        return (
            f"tiles of {tile} compute {computed / layout.density:.1f} times what is visible; attention.block={tile} "
            f"wastes less (divide the counts of blocks by {tile / block:.3g} to see as far)"
        )
    if 1.5 * computed > dense.tile_density(tile, tile):
        return f"little is saved at {layout.num_keys:,} tokens; --seq-len shows other lengths"
    return None


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _noun(number: int, noun: str) -> str:
    return noun if number == 1 else noun + "s"
