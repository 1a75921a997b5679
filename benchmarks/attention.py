"""Seconds of block-sparse attention on the CPU, forward and backward, beside dense attention and FlexAttention.

All ways of one length take turns in one process, in an order that rotates from round to round:

- `dense`: torch's scaled_dot_product_attention, which is flash attention here; `is_causal` in causal cases.
- a density and a block size: a sliding window with one global row and column of blocks, as near to the density as
  whole blocks allow. Density is of the scores that dense attention computes: of half of them in causal cases.
- `flex`: the forward of FlexAttention on the same mask, compiled; it has no backward on CPUs. Beside it in the table
  stands our forward alone.

The speed-up is the median over rounds of dense over sparse; efficiency is density x speed-up: 1 where no time is lost
to sparsity. Both by the CPU time of the process, which other processes disturb less, and by the clock.

    python benchmarks/attention.py --json attention.json            # an hour on one core
    python benchmarks/attention.py --lengths 8192 --densities 0.05,0.1 --threads 2 --no-flex
    python benchmarks/attention.py --quick
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pairs import forget_peak, peak_rss_bytes, rss_bytes
from shardwise.attention.api import block_sparse_attention
from shardwise.attention.block_layout import BlockLayout
from step_time import machine

MB = 1e6
DENSE = "dense"
QUICK: Mapping[str, Any] = {"lengths": [256], "densities": [0.5], "blocks": [16, 64], "rounds": 1}
AIMS: Mapping[float, float] = {0.05: 12.0, 0.11: 6.0}  # speed-up at densities up to these, from `AIM_LENGTH` tokens on
AIM_LENGTH = 8192

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Way:
    """One way to attend, with what was measured of it; times are of rounds: (CPU, clock) each."""

    name: str
    attend: Attend = field(repr=False)
    block: int = 0
    density: float = 1.0
    has_backward: bool = True
    peak_bytes: int = 0
    forward_s: list[tuple[float, float]] = field(default_factory=list)
    total_s: list[tuple[float, float]] = field(default_factory=list)


def windowed_blocks(num_blocks: int, density: float, is_causal: bool) -> Tensor:
    """A sliding window and a global row and column, [num_blocks, num_blocks], bool, of about this density."""
    rows = torch.arange(num_blocks)
    apart = (rows[:, None] - rows).abs()  # [num_blocks, num_blocks]

    def reaching(reach: int) -> Tensor:
        blocks = apart <= reach
        blocks[0] = blocks[:, 0] = True
        return blocks.tril() if is_causal else blocks

    most = num_blocks * (num_blocks + 1) / 2 if is_causal else num_blocks**2
    return min((reaching(reach) for reach in range(num_blocks)), key=lambda it: abs(int(it.sum()) / most - density))


def density_of(blocks: Tensor, block: int, is_causal: bool) -> float:
    """Scores computed over those of dense attention."""
    if not is_causal:
        return blocks.float().mean().item()
    num_tokens = len(blocks) * block
    on_diagonal = int(blocks.diagonal().sum())
    scores = (int(blocks.sum()) - on_diagonal) * block**2 + on_diagonal * block * (block + 1) // 2
    return scores / (num_tokens * (num_tokens + 1) / 2)


def dense_way(is_causal: bool) -> Way:
    return Way(DENSE, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal))


def sparse_ways(num_tokens: int, is_causal: bool, options: argparse.Namespace, console: Console) -> list[Way]:
    """Ours, and FlexAttention's where it runs, at each density and block size that the length allows."""
    found = []
    for block in options.blocks:
        for density in options.densities:
            blocks = windowed_blocks(num_tokens // block, density, is_causal)
            reached = density_of(blocks, block, is_causal)
            layout = BlockLayout.from_blocks(blocks, block, causal=is_causal)

            def attend(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout = layout) -> Tensor:
                return block_sparse_attention(q, k, v, layout)

            found.append(Way(f"block {block}, {density:.0%}", attend, block, reached))
            if options.flex:
                found += flex_way(blocks, block, is_causal, found[-1], console)
    return found


def flex_way(blocks: Tensor, block: int, is_causal: bool, like: Way, console: Console) -> list[Way]:
    """FlexAttention on the same mask; nothing where it cannot be compiled."""

    def is_seen(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = blocks[query // block, key // block]
        return seen & (query >= key) if is_causal else seen

    num_tokens = len(blocks) * block
    mask = create_block_mask(is_seen, None, None, num_tokens, num_tokens, device="cpu", BLOCK_SIZE=block)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            return compiled(q.detach(), k.detach(), v.detach(), block_mask=mask)

    try:
        attend(*(torch.zeros(1, 1, num_tokens, 64) for _ in range(3)))
    except Exception as error:  # it fails in many ways where there is no compiler
        console.print(f"skipped flex: {type(error).__name__}: {str(error)[:200]}", highlight=False, markup=False)
        return []
    return [Way(f"flex, {like.name}", attend, block, like.density, has_backward=False)]


def measure(ways: Sequence[Way], inputs: Sequence[Tensor], num_rounds: int) -> None:
    """Run each way once for its peak, which warms it up, then in turns."""
    for way in ways:
        _return_freed_memory()
        forget_peak()
        before = rss_bytes()
        _take_turn(way, inputs)
        way.peak_bytes = max(0, peak_rss_bytes() - before)
        way.forward_s.clear()
        way.total_s.clear()
    for number in range(num_rounds):
        first = number % len(ways)
        for way in (*ways[first:], *ways[:first]):
            _take_turn(way, inputs)


def _return_freed_memory() -> None:
    """Give what other ways have freed back to the system, or a peak hides in it; only glibc can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _take_turn(way: Way, inputs: Sequence[Tensor]) -> None:
    q, k, v, grad = inputs
    start = _now()
    out = way.attend(q, k, v)
    middle = _now()
    if way.has_backward:
        torch.autograd.grad(out, (q, k, v), grad)
    end = _now()
    way.forward_s.append((middle[0] - start[0], middle[1] - start[1]))
    way.total_s.append((end[0] - start[0], end[1] - start[1]))


def _now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def speed_up(way: Way, dense: Way, clock: int, *, forward: bool = False) -> float:
    """Dense over this: the median of the rounds' ratios; clock 0 is CPU time, 1 the wall's."""
    own, other = (w.forward_s if forward else w.total_s for w in (way, dense))
    return statistics.median(theirs[clock] / mine[clock] for mine, theirs in zip(own, other, strict=True))


def row_of(way: Way, dense: Way) -> dict[str, Any]:
    """A way's row of the table; speed-ups of forward and backward are missing where there is no backward."""
    row = {key: value for key, value in asdict(way).items() if key != "attend"}
    row["forward_speed_up"] = speed_up(way, dense, 0, forward=True)
    row["speed_up"] = speed_up(way, dense, 0) if way.has_backward else None
    row["speed_up_by_clock"] = speed_up(way, dense, 1) if way.has_backward else None
    row["efficiency"] = None if row["speed_up"] is None else row["speed_up"] * way.density
    return row


def table_of(title: str, ways: Sequence[Way], rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("way", title=title)
    headings = ("density", "forward s", "backward s", "forward x", "both x", "both x, clock", "efficiency", "peak MB")
    for heading in headings:
        table.add_column(heading, justify="right")
    for way, row in zip(ways, rows, strict=True):
        forward_s, total_s = (statistics.median(cpu for cpu, _ in times) for times in (way.forward_s, way.total_s))
        figures = (row["forward_speed_up"], row["speed_up"], row["speed_up_by_clock"], row["efficiency"])
        table.add_row(
            way.name,
            f"{way.density:.3f}",
            f"{forward_s:.3f}",
            f"{total_s - forward_s:.3f}" if way.has_backward else "-",
            *("-" if figure is None else f"{figure:.2f}" for figure in figures),
            f"{way.peak_bytes / MB:.0f}",
        )
    return table


def aim_lines(num_tokens: int, ways: Sequence[Way], dense: Way) -> list[str]:
    """What is aimed at beside what was reached, for ways sparse enough."""
    lines = []
    for way in ways if num_tokens >= AIM_LENGTH else ():
        aims = [aim for density, aim in AIMS.items() if way.density <= density + 0.005]
        if aims and way.has_backward and way is not dense:
            reached = speed_up(way, dense, 0)
            verdict = "reached" if reached >= max(aims) else "missed"
            lines.append(f"{way.name}: {reached:.1f}x, aim {max(aims):.0f}x, {verdict}")
    return lines


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; `--quick` changes the defaults, so other flags still count."""

    def integers(text: str) -> list[int]:
        return [int(each) for each in text.split(",")]

    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short sequences, one round: does it run?")
    parser.add_argument("--lengths", type=integers, default=[2048, 4096, 8192, 16384], help="tokens")
    parser.add_argument("--densities", type=lambda it: [float(x) for x in it.split(",")], default=[0.05, 0.1, 0.25])
    parser.add_argument("--blocks", type=integers, default=[16, 64, 128], help="tokens of a block")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--masks", type=lambda it: it.split(","), default=["bidirectional", "causal"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-flex", dest="flex", action="store_false", help="compile nothing")
    parser.add_argument("--json", type=Path, help="where to write everything measured, after each length")
    if parser.parse_args(arguments).quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Measure each length; print its table and the aims, and write the file."""
    options = parse_options(arguments)
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 160)
    facts = machine() | {"threads": str(options.threads)}
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), highlight=False)
    content: dict[str, Any] = {"machine": facts, "arguments": arguments, "results": []}
    for num_tokens in options.lengths:
        shape = (1, options.heads, num_tokens, options.head_size)
        inputs = [torch.randn(shape, requires_grad=index < 3) for index in range(4)]
        for mask in options.masks:
            dense = dense_way(mask == "causal")
            ways = [dense, *sparse_ways(num_tokens, mask == "causal", options, console)]
            measure(ways, inputs, options.rounds)
            rows = [row_of(way, dense) for way in ways]
            title = f"{num_tokens} tokens, {mask}, {options.heads} heads of {options.head_size}, fp32"
            console.print(table_of(title, ways, rows))
            for line in aim_lines(num_tokens, ways, dense):
                console.print(line, highlight=False)
            content["results"].append({"num_tokens": num_tokens, "mask": mask, "ways": rows})
            if options.json:
                options.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
