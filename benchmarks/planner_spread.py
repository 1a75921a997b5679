"""How far measured step times are from predicted ones, by what a prediction comes from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from planner_scores import Scored
from shardwise.planner.step_time import SHARES, Kind, kind_of


def within_interval(rows: Sequence[Scored]) -> float:
    """Return the share of runs whose measured time is in the interval that was predicted."""
    off = [_off(each) <= SHARES[kind] for kind, some in kinds(rows).items() for each in some]
    return sum(off) / len(off) if off else math.nan


def kinds(rows: Sequence[Scored]) -> dict[Kind, list[Scored]]:
    """Group rows whose time was measured by what their prediction comes from."""
    found: dict[Kind, list[Scored]] = {kind: [] for kind in SHARES}
    for each in rows:
        if each.time_ratio is not None and each.prediction.price is not None:
            found[kind_of(each.prediction.price.job, each.prediction.price.strategy)].append(each)
    return found


def width(rows: Sequence[Scored], counts: Mapping[str, int]) -> float | None:
    """The share, to each side, within which four of five measured times lie, each source by the root of its rows.

    Args:
        counts: of each source, its rows of any kind.
    """
    off = sorted((_off(each), counts[each.case.group] ** -0.5) for each in rows)
    left = 0.8 * sum(weight for _, weight in off)
    for share, weight in off:
        left -= weight
        if left <= 0:
            return share
    return None


def held_by_others(rows: Sequence[Scored], counts: Mapping[str, int]) -> float | None:
    """The share of rows that lie within the width that the other sources tell."""
    found: list[bool] = []
    for source in {each.case.group for each in rows}:
        others = width([each for each in rows if each.case.group != source], counts)
        if others is not None:
            found += [_off(each) <= others for each in rows if each.case.group == source]
    return sum(found) / len(found) if found else None


def spread_lines(rows: Sequence[Scored]) -> list[str]:
    """Of each kind of prediction, how wide it is by these rows and how wide it is said to be."""
    found = []
    some_of = kinds(rows)
    counts = Counter(each.case.group for some in some_of.values() for each in some)
    for kind, some in some_of.items():
        shares = [width(some, counts), within_interval(some) if some else None, held_by_others(some, counts)]
        own, held, others = ("–" if share is None else f"{share:.1%}" for share in shares)
        words = f"four of five within {own:>6}  predicted {SHARES[kind]:.0%}, holds {held:>6}"
        found.append(f"{kind:<9} n {len(some):>3}  {words}  by other sources alone {others:>6}")
    return [*found, f"within the predicted interval: {within_interval(rows):.1%}"]


def _off(each: Scored) -> float:
    return abs(1 / (each.time_ratio or math.inf) - 1)
