"""Show a priced strategy to people: how fast, whether it fits, what it holds, what it costs; from 80 columns on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Final

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.config.resolve import Tier
from shardwise.planner.cost import cost_words
from shardwise.planner.format import batch_words, layout_words
from shardwise.planner.hardware import GIB, Host, cluster_words
from shardwise.planner.job import PlanJob
from shardwise.planner.memory_limit import held_on_node
from shardwise.planner.results import MEMORY_CATEGORIES, TIME_PARTS, Estimate, RankMemory
from shardwise.runtime.format import format_bytes, format_count, format_s, format_span_s

# Of docs/planner-accuracy.md, where `tests/unit/planner/test_planner_page.py` looks for them.
VALIDATION: Final = (
    "10.4 % off on average of 300 published runs that nothing is fitted to; "
    "its first choice in 10 comparisons of layouts was 1.5 % slower than the best"
)
_BAR_WIDTH: Final = 60
_MOST_STAGES: Final = 8
_NARROW: Final = 100
_LEAST_SHARE: Final = 0.01
_LIMITS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "compute": ("compute",),
        "links": ("tensor", "context", "experts", "data"),
        "memory": ("recompute", "offload", "step"),
        "pipeline": ("bubble",),
    }
)
# As many as 80 columns can show.
_STAGE_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "params": ("params",),
        "grads": ("grads",),
        "optim": ("optimizer",),
        "gathered": ("gathered",),
        "buckets": ("buckets",),
        "activ": ("activations",),
        "logits": ("logits",),
        "work": ("workspace",),
        "other": ("overhead", "rounding"),
    }
)
# A sign for each, and a colour that the eight of every terminal have, or near to one.
Marks = Mapping[str, tuple[str, str]]
MEMORY_MARKS: Final[Marks] = MappingProxyType(
    {
        "params": ("p", "blue"),
        "grads": ("g", "green"),
        "optimizer": ("o", "magenta"),
        "gathered": ("u", "bright_blue"),
        "buckets": ("b", "bright_green"),
        "activations": ("a", "yellow"),
        "logits": ("l", "red"),
        "workspace": ("w", "cyan"),
        "overhead": ("c", "white"),
        "rounding": ("r", "bright_black"),
    }
)
TIME_MARKS: Final[Marks] = MappingProxyType(
    {
        "compute": ("c", "blue"),
        "recompute": ("r", "bright_blue"),
        "tensor": ("t", "magenta"),
        "context": ("x", "bright_magenta"),
        "experts": ("e", "bright_cyan"),
        "bubble": ("b", "white"),
        "data": ("d", "yellow"),
        "offload": ("o", "red"),
        "step": ("s", "green"),
        "other": ("·", "bright_black"),
    }
)
Rows = Sequence[tuple[str, RenderableType]]


def facts(rows: Rows) -> Table:
    """Show labels and what they are about in two columns."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", width=9)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(label, Text(value) if isinstance(value, str) else value)
    return grid


def bare_table(*columns: str, texts: Sequence[str] = ()) -> Table:
    """Return a table without lines: columns of texts are on the left and fold, those of numbers on the right."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for name in columns:
        is_text = name in texts
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return table


def blocks(*parts: RenderableType) -> RenderableType:
    """Put an empty line between parts."""
    return Group(*(Padding(part, (1, 1, 0, 1), expand=False) for part in parts))


def job_rows(job: PlanJob, notes: Sequence[str] = ()) -> list[tuple[str, RenderableType]]:
    """Describe the model, the batch and the cluster."""
    shape = job.shape
    words = f"{shape.name}, {format_count(shape.num_params)} parameters, "
    words += f"{shape.num_layers} layers of {shape.hidden_size:,}"
    if shape.experts is not None:
        words += f", {shape.experts.num_chosen} of {shape.experts.num_experts} experts"
    rows: list[tuple[str, RenderableType]] = [("model", Text(words, style="bold")), ("batch", batch_words(job))]
    rows.append(("cluster", cluster_words(job.cluster)))
    return rows + [("note", Text(note, style="yellow")) for note in notes]


def price_rows(price: Estimate, *, is_coloured: bool, label: str = "best") -> list[tuple[str, RenderableType]]:
    """Describe one strategy: its layout, speed, memory on the worst rank, and cost.

    Args:
        price: of the strategy.
        is_coloured: whether the terminal shows colours.
        label: of the first row.
    """
    worst, gpu = price.memory.worst, price.job.cluster.gpu
    unit, name = _memory_unit([worst])
    sizes = {category: size / unit for category, size in worst.peak.items()}
    rows: list[tuple[str, RenderableType]] = [
        (label, Text(layout_words(price.strategy), style="bold green" if price.margin_bytes >= 0 else "bold red")),
        ("step", speed_words(price)),
        *([] if gpu.is_cpu else [("checked", VALIDATION)]),
        ("limit", limit_words(price)),
        ("memory", memory_words(price)),
        ("", memory_bar(worst, gpu.memory_bytes, _BAR_WIDTH, is_coloured=is_coloured)),
        ("", _legend(sizes, MEMORY_MARKS, is_coloured, digits=1 if name == "GiB" else 0)),
    ]
    return rows + [("cost", words) for words in (cost_words(price),) if words]


def limit_words(price: Estimate) -> str:
    """Say what limits a step most: computing, links, what memory costs in time, or the pipeline's bubble."""
    parts = price.time.parts
    shares = {name: sum(parts.get(each, 0.0) for each in of) / price.time.step_s for name, of in _LIMITS.items()}
    first, *others = sorted(shares, key=lambda name: -shares[name])
    words = [f"{each} {100 * shares[each]:.0f} %" for each in others if shares[each] >= _LEAST_SHARE]
    return f"{first}, {100 * shares[first]:.0f} % of a step{'; ' if words else ''}{', '.join(words)}"


def speed_words(price: Estimate) -> str:
    """Write the time of a step with its interval, and what follows from it."""
    time = price.time
    words = f"{format_s(time.step_s)} ({format_span_s(time.low_s, time.high_s)})"
    words += f", {price.tokens_per_s_per_gpu:,.0f} tokens/s a {_device_word(price.job)}"
    mfu, halved = price.mfu(), price.mfu(is_causal_halved=True)
    if mfu is None or halved is None:
        return words
    dtype = price.strategy.product_dtype
    return f"{words}, MFU {100 * mfu:.1f} % of {dtype} ({100 * halved:.1f} % with causal attention halved)"


def memory_words(price: Estimate) -> str:
    """Write the worst rank's peak against the device's memory, and what is stored elsewhere."""
    worst, strategy, cluster = price.memory.worst, price.strategy, price.job.cluster
    where = f" on pipeline rank {worst.pipeline_rank} of {strategy.pp}" if strategy.pp > 1 else ""
    margin = price.margin_bytes
    fits = f"{format_bytes(margin)} left" if margin >= 0 else f"out of memory by {format_bytes(-margin)}"
    about = "" if worst.is_simulated else "about "
    words = f"{about}{format_bytes(worst.peak_bytes)} of {format_bytes(cluster.gpu.memory_bytes)}{where}: {fits}"
    away = []
    memories: tuple[tuple[Tier, float], ...] = (("host", cluster.host.memory_bytes), ("nvme", cluster.host.nvme_bytes))
    for tier, node_bytes in memories:
        if worst.elsewhere.get(tier, 0.0) > 0:
            is_assumed = cluster.host == Host() and tier == "host"
            size = f"{'an assumed ' if is_assumed else ''}{format_bytes(node_bytes)} on {tier}"
            ranks = ", all ranks of a node" if cluster.gpus_per_node > 1 else ""
            key = " (host_memory_gib in a cluster's file)" if is_assumed else ""
            away.append(f"{format_bytes(held_on_node(price.memory, cluster, tier))} of {size}{ranks}{key}")
    return f"{words}; {' and '.join(away)}" if away else words


def price_table(
    prices: Sequence[Estimate], *, width: int, is_coloured: bool, beside: Mapping[str, Estimate] = MappingProxyType({})
) -> Table:
    """Show the best few strategies, one below the other, and others by name below them, such as the user's own.

    Args:
        prices: of the best, in order.
        width: of the terminal, in characters; a wide one has bars of memory too.
        is_coloured: whether the terminal shows colours.
        beside: prices of others, by name.
    """
    unit, unit_name = _memory_unit([price.memory.worst for price in prices])
    table = bare_table("#")
    table.add_column("layout", overflow="fold", min_width=24)
    for name in ("step", f"tok/s/{_device_word(prices[0].job)}", "MFU %", unit_name):
        table.add_column(name, justify="right", no_wrap=True)
    if width >= _NARROW:
        table.add_column("memory of the worst rank", no_wrap=True)
    rows = [(f"{number}", price) for number, price in enumerate(prices, 1)]
    for label, price in (*rows, *beside.items()):
        mfu, worst = price.mfu(), price.memory.worst
        cells: list[RenderableType] = [label, Text(layout_words(price.strategy)), format_s(price.time.step_s)]
        cells += [f"{price.tokens_per_s_per_gpu:,.0f}", "-" if mfu is None else f"{100 * mfu:.1f}"]
        about = "" if worst.is_simulated else "~"
        cells.append(f"{about}{worst.peak_bytes / unit:,.{1 if unit == GIB else 0}f}")
        if width >= _NARROW:
            cells.append(memory_bar(worst, price.job.cluster.gpu.memory_bytes, 24, is_coloured=is_coloured))
        table.add_row(*cells)
    return table


def stage_table(price: Estimate, *, is_coloured: bool) -> Table:
    """Show the memory of each pipeline rank by category; of a long pipeline only some ranks, the worst among them."""
    ranks = list(price.memory.ranks)
    if len(ranks) > _MOST_STAGES:
        shown = {0, 1, len(ranks) // 2, len(ranks) - 1, ranks.index(price.memory.worst)}
        ranks = [ranks[place] for place in sorted(shown)]
    unit, unit_name = _memory_unit(ranks)
    columns = [
        (name, parts) for name, parts in _STAGE_COLUMNS.items() if any(r.bytes_of(*parts) >= unit / 20 for r in ranks)
    ]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(f"{unit_name}, rank", no_wrap=True)
    for name in (*(name for name, _ in columns), "all"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in ranks:
        cells = [f"{rank.bytes_of(*parts) / unit:,.1f}" for _, parts in columns]
        is_worst = rank is price.memory.worst and len(ranks) > 1
        total = Text(f"{rank.peak_bytes / unit:,.1f}", style="bold" if is_worst and is_coloured else "")
        table.add_row(f"{rank.pipeline_rank}{' worst' if is_worst else ''}", *cells, total)
    return table


def time_rows(price: Estimate, *, is_coloured: bool) -> list[tuple[str, RenderableType]]:
    """Show where a step's time goes."""
    time = price.time
    unit, name = (1.0, "s") if time.step_s >= 1 else (1e-3, "ms")
    parts = {part: seconds / unit for part, seconds in time.parts.items()}
    rows: list[tuple[str, RenderableType]] = [
        ("time", time_bar(time.parts, _BAR_WIDTH, is_coloured=is_coloured)),
        (f"in {name}", _legend(parts, TIME_MARKS, is_coloured, digits=2)),
    ]
    if time.bubble_rate is not None and price.strategy.pp > 1:
        rows.append(("bubble", f"{100 * time.bubble_rate:.1f} % of a rank's time in the pipeline"))
    return rows


def memory_bar(rank: RankMemory, capacity_bytes: float, width: int, *, is_coloured: bool = False) -> Text:
    """Draw what one rank holds at its peak; what exceeds the device's memory comes after a `|`.

    Args:
        rank: its bytes by category.
        capacity_bytes: of the device.
        width: of the whole bar, in characters.
        is_coloured: whether categories differ by colour and not by sign.
    """
    sizes = {name: rank.peak.get(name, 0.0) for name in MEMORY_CATEGORIES}
    return bar_of(sizes, MEMORY_MARKS, capacity_bytes, width, is_coloured=is_coloured)


def bar_of(sizes: Mapping[str, float], marks: Marks, capacity: float, width: int, *, is_coloured: bool = False) -> Text:
    """Draw parts in a container; what exceeds it comes after a `|`.

    Args:
        sizes: of the parts, by name.
        marks: sign and colour of each part, by name.
        capacity: of the container, in the unit of the sizes.
        width: of the whole bar, in characters.
        is_coloured: whether parts differ by colour and not by sign.
    """
    whole = sum(sizes.values())
    if whole <= capacity:
        filled = _filled(sizes.items(), marks, width * whole / capacity, is_coloured=is_coloured)
        return filled.append("·" * (width - len(filled)), style="dim")
    filled = _filled(sizes.items(), marks, width - 1, is_coloured=is_coloured)
    edge = round((width - 1) * capacity / whole)
    return Text.assemble(filled[:edge], ("|", "bold red"), filled[edge:])


def time_bar(parts: Mapping[str, float], width: int, *, is_coloured: bool = False) -> Text:
    """Draw a step by its parts.

    Args:
        parts: seconds by part, as `TIME_PARTS`.
        width: of the whole bar, in characters.
        is_coloured: whether parts differ by colour and not by sign.
    """
    return _filled([(name, parts.get(name, 0.0)) for name in TIME_PARTS], TIME_MARKS, width, is_coloured=is_coloured)


def _filled(sizes: Iterable[tuple[str, float]], marks: Marks, width: float, *, is_coloured: bool) -> Text:
    """Draw parts in proportion, with rounded ends, so that all together have the given width."""
    pairs = list(sizes)
    total = sum(size for _, size in pairs) or 1.0
    ends = [round(width * end / total) for end in accumulate(size for _, size in pairs)]
    text = Text()
    for (name, _), start, end in zip(pairs, [0, *ends], ends, strict=False):
        sign, colour = marks[name]
        text.append(("█" if is_coloured else sign) * (end - start), style=colour if is_coloured else "")
    return text


def _legend(sizes: Mapping[str, float], marks: Marks, is_coloured: bool, *, digits: int) -> RenderableType:
    """List the parts that do not round to 0, by name and size; lines break only between parts."""
    items = []
    for name, (mark, colour) in marks.items():
        size = sizes.get(name, 0.0)
        if round(size, digits) > 0:
            sign = ("■", colour) if is_coloured else (mark, "bold")
            items.append(Text.assemble(sign, f" {name} {size:,.{digits}f}"))
    return Columns(items, padding=(0, 2))


def _device_word(job: PlanJob) -> str:
    return "rank" if job.cluster.gpu.is_cpu else "GPU"


def _memory_unit(ranks: Sequence[RankMemory]) -> tuple[int, str]:
    """Return the unit, in bytes and by name, in which the peaks of all these ranks are easy to read."""
    is_large = max(rank.peak_bytes for rank in ranks) >= GIB
    return (GIB, "GiB") if is_large else (2**20, "MiB")
