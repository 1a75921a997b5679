"""How far measured step times are from predicted ones, by what a prediction comes from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import cast

from planner_scores import Scored
from shardwise.planner.step_time import SHARES, Kind


def within_interval(rows: Sequence[Scored]) -> float:
    """Return the share of runs whose measured time is in the interval that was predicted."""
    off = [_off(each) <= SHARES[kind] for kind, some in kinds(rows).items() for each in some]
    return sum(off) / len(off) if off else math.nan


def kinds(rows: Sequence[Scored]) -> dict[Kind, list[Scored]]:
    """Group rows whose time was measured by what their prediction comes from."""
    found: dict[Kind, list[Scored]] = {kind: [] for kind in SHARES}
    for each in rows:
        if each.time_ratio is not None and each.prediction.price is not None:
            found[cast(Kind, each.prediction.price.time.kind)].append(each)
    return found


def width(rows: Sequence[Scored]) -> float | None:
    """Return by what share, longer or shorter, four of five runs of a further source are off.

    This is the conformal quantile (Vovk et al. 2005) over sources: each has the same weight, and the further one counts
    as off by more than all of them. None where they are too few to say.
    """
    counts = Counter(each.case.group for each in rows)
    left = 0.8 * (len(counts) + 1)
    for share, weight in sorted((_off(each), 1 / counts[each.case.group]) for each in rows):
        left -= weight
        if left <= 1e-9:
            return share
    return None


def held_by_others(rows: Sequence[Scored]) -> float | None:
    """Return the share of sources' rows, each source of equal weight, within the width that the others tell."""
    found = []
    for source in {each.case.group for each in rows}:
        others = width([each for each in rows if each.case.group != source])
        own = [each for each in rows if each.case.group == source]
        if others is not None:
            found.append(sum(_off(each) <= others for each in own) / len(own))
    return sum(found) / len(found) if found else None


def spread_lines(rows: Sequence[Scored]) -> list[str]:
    """Say how wide each kind of prediction is by these rows, how wide it is said to be, and what that holds."""
    lines = []
    for kind, some in kinds(rows).items():
        shares = [width(some), within_interval(some) if some else None, held_by_others(some)]
        own, held, others = ("–" if share is None else f"{share:.1%}" for share in shares)
        words = f"four of five within {own:>6}  predicted {SHARES[kind]:.0%}, holds {held:>6}"
        lines.append(f"{kind:<9} n {len(some):>3}  {words}  by other sources alone {others:>6}")
    return [*lines, f"within the predicted interval: {within_interval(rows):.1%}"]


def _off(each: Scored) -> float:
    ratio = each.time_ratio or math.inf
    return max(ratio, 1 / ratio) - 1
