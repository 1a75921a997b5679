"""How far measured step times lie from predicted ones, by what a prediction rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner_scores import Scored
from shardwise.planner.interval import SHARES, Kind, kind_of


def within_interval(rows: Sequence[Scored]) -> float:
    """The share of runs whose measured time lies in the interval that was predicted."""
    off = [_off(each) <= SHARES[kind] for kind, some in kinds(rows).items() for each in some]
    return sum(off) / len(off) if off else math.nan


def kinds(rows: Sequence[Scored]) -> dict[Kind, list[Scored]]:
    """Rows whose time was measured, by what their prediction rests on."""
    found: dict[Kind, list[Scored]] = {kind: [] for kind in SHARES}
    for each in rows:
        if each.time_ratio is not None and each.prediction.price is not None:
            found[kind_of(each.prediction.price.job, each.prediction.price.strategy)].append(each)
    return found


def spread_lines(rows: Sequence[Scored]) -> list[str]:
    """Of each kind of prediction the share, to each side, within which four of five measured times lie."""
    found = []
    for kind, some in kinds(rows).items():
        off = sorted(_off(each) for each in some)
        share = f"{off[math.ceil(0.8 * len(off)) - 1]:.1%}" if off else "–"
        found.append(f"{kind:<9} n {len(off):>3}  four of five within {share:>6}  predicted {SHARES[kind]:.0%}")
    return [*found, f"within the predicted interval: {within_interval(rows):.1%}"]


def _off(each: Scored) -> float:
    return abs(1 / (each.time_ratio or math.inf) - 1)
