"""Draws the tables of a dry run: what one rank holds and sends, or several ranks side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from rich.table import Table

from shardwise.config.resolve import Config, Tier
from shardwise.layout.mesh_shape import SHARD_AXES
from shardwise.runtime.format import format_bytes, format_count
from shardwise.runtime.memory_tracker import Category
from shardwise.verify.few_micro_batches import RankFigures

_ROLES: Final[Mapping[str, str]] = MappingProxyType(
    {"param": "parameters", "grad": "gradients", "optimizer": "optimizer"}
)
_TIER_NAMES: Final[Mapping[Tier, str]] = MappingProxyType({"device": "device", "host": "host", "nvme": "NVMe"})
_SHORT_ROLES: Final[Mapping[str, str]] = MappingProxyType(
    {"param": "params", "grad": "grads", "optimizer": "optimizer"}
)
_SHORT_CATEGORIES: Final[Mapping[Category, str]] = MappingProxyType(
    {Category.PARAMETERS: "params", Category.GRADIENTS: "grads", Category.ACTIVATIONS: "activ."}
)
_UNITS: Final = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_TEXTS: Final = ("collective", "to", "stages", "in")


def rank_tables(figures: RankFigures, config: Config) -> list[Table]:
    """Return the tables of one rank: memory, tiers and traffic; `config` is resolved."""
    return [_memory_table(figures), *_tier_tables(figures, config), _wire_table(figures)]


def ranks_tables(ranks: Sequence[RankFigures]) -> list[Table]:
    """Return tables of several ranks, with a row for each."""
    return [_at_rest_of_ranks(ranks), _peaks_of_ranks(ranks), _wires_of_ranks(ranks)]


def _memory_table(figures: RankFigures) -> Table:
    table = _table(f"rank {figures.rank:,}'s device", "at rest", "at the peak", min_width=12)
    at_rest, peak = figures.at_rest, figures.peak
    for category in Category:
        if at_rest[category] or peak[category]:
            table.add_row(category.value, _bytes(at_rest[category]), _bytes(peak[category]))
    table.add_row("total", _bytes(sum(at_rest.values())), _bytes(sum(peak.values())), style="bold")
    return table


def _tier_tables(figures: RankFigures, config: Config) -> Iterator[Table]:
    """Yield tables of where states are stored and what moves in a step; none where all are stored on the device."""
    by_tier = _bytes_by_tier(figures)
    if set(by_tier) == {"device"}:
        return
    at_rest = _table("at rest in", *_ROLES.values(), "total", min_width=12)
    for tier, totals in by_tier.items():
        row_bytes = [*(totals[role] for role in _ROLES), sum(totals.values())]
        at_rest.add_row(_TIER_NAMES[tier], *map(_bytes, row_bytes))
    yield at_rest
    moves = _table("a step moves from", "to", "bytes", min_width=12)
    for (source, target), num_bytes in figures.layout.bytes_across(config.batch.accumulation or 1).items():
        moves.add_row(_TIER_NAMES[source], _TIER_NAMES[target], _bytes(num_bytes))
    yield moves


def _wire_table(figures: RankFigures) -> Table:
    table = _table("a step sends over", "collective", "calls", "bytes", min_width=12)
    for (axis, op), num_bytes in figures.wire_bytes.items():
        table.add_row(axis, _op(op), f"{figures.num_calls[axis, op]:,}", _bytes(num_bytes))
    total_bytes = sum(figures.wire_bytes.values())
    table.add_row("total", "", f"{sum(figures.num_calls.values()):,}", _bytes(total_bytes), style="bold")
    return table


def _at_rest_of_ranks(ranks: Sequence[RankFigures]) -> Table:
    """Return a table of stages, parameters and states, with a row for each memory that stores any."""
    by_tiers = [_bytes_by_tier(each) for each in ranks]
    totals = [sum(sum(held.values()) for held in by_tier.values()) for by_tier in by_tiers]
    has_tiers = any(set(by_tier) != {"device"} for by_tier in by_tiers)
    unit, to_unit = _unit(totals)
    table = _table(
        f"at rest, {unit}", "stages", "held", *(["in"] if has_tiers else []), *_SHORT_ROLES.values(), "total"
    )
    for each, by_tier in zip(ranks, by_tiers, strict=True):
        labels = [f"rank {each.rank:,}", _stages(each), format_count(each.layout.numel)]
        for tier, held in by_tier.items():
            cells = [_TIER_NAMES[tier]] if has_tiers else []
            table.add_row(*labels, *cells, *map(to_unit, [*(held[role] for role in _SHORT_ROLES), sum(held.values())]))
            labels = ["", "", ""]
    table.add_row("largest", *[""] * (len(table.columns) - 2), to_unit(max(totals)), style="bold")
    return table


def _peaks_of_ranks(ranks: Sequence[RankFigures]) -> Table:
    """Return a table of the device's memory at its peak, by category."""
    peaks = [each.peak for each in ranks]
    used = [category for category in Category if any(peak[category] for peak in peaks)]
    rows = [[*(peak[category] for category in used), sum(peak.values())] for peak in peaks]
    unit, to_unit = _unit([row[-1] for row in rows])
    table = _table(f"peak, {unit}", *(_SHORT_CATEGORIES.get(each, each.value) for each in used), "total")
    for each, row in zip(ranks, rows, strict=True):
        table.add_row(f"rank {each.rank:,}", *map(to_unit, row))
    table.add_row("largest", *(to_unit(max(column)) for column in zip(*rows, strict=True)), style="bold")
    return table


def _wires_of_ranks(ranks: Sequence[RankFigures]) -> Table:
    """Return a table, by axis and collective, of the least and the most that a rank sends."""
    table = _table("a step sends over", "collective", "calls", "least", "most", "by rank")
    kinds = dict.fromkeys(kind for each in ranks for kind in each.wire_bytes)
    for axis, op in sorted(kinds):
        most = max(ranks, key=lambda each: (each.wire_bytes.get((axis, op), 0), -each.rank))
        sizes = [each.wire_bytes.get((axis, op), 0) for each in ranks]
        calls = f"{most.num_calls[axis, op]:,}"
        table.add_row(axis, _op(op), calls, _bytes(min(sizes)), _bytes(max(sizes)), f"{most.rank:,}")
    return table


def _stages(figures: RankFigures) -> str:
    pipeline = figures.layout.pipeline
    return "-" if pipeline is None else ", ".join(map(str, sorted(pipeline.held)))


def _bytes_by_tier(figures: RankFigures) -> Mapping[Tier, Mapping[str, int]]:
    layout = figures.layout
    return layout.bytes_by_tier(layout.mesh.index_along(SHARD_AXES, figures.rank))


def _table(*columns: str, min_width: int = 0) -> Table:
    table = Table(box=None, padding=(0, 3 if min_width else 2, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        is_text = column in (columns[0], *_TEXTS)
        table.add_column(column, justify="left" if is_text else "right", min_width=min_width, no_wrap=True)
    return table


def _op(op: str) -> str:
    return op.replace("_", "-")


def _bytes(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def _unit(totals: Sequence[int]) -> tuple[str, Callable[[int], str]]:
    """Return one unit for a table with these totals, and the function that writes a number in it."""
    name, unit_bytes = next((each for each in _UNITS if max(totals) >= each[1]), _UNITS[-1])
    return name, lambda num_bytes: f"{num_bytes / unit_bytes:,.2f}" if num_bytes else "-"
