"""Which prices no other beats in everything: the front of step time against free memory.

>>> pareto([(1.0, 5.0), (2.0, 9.0), (3.0, 7.0)])
[0, 1]
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.planner.results import Price


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats, in order of their first number.

    Args:
        points: of each a number that is better small, and one that is better large.
    """
    found: list[int] = []
    for index in sorted(range(len(points)), key=lambda each: (points[each][0], -points[each][1])):
        if not found or points[index][1] > points[found[-1]][1]:
            found.append(index)
    return found


def front(prices: Sequence[Price]) -> tuple[Price, ...]:
    """The prices that no other beats in both step time and free memory of the device, the fastest first."""
    return tuple(prices[index] for index in pareto([(each.time.step_s, each.margin_bytes) for each in prices]))


def cost_per_step(price: Price) -> float | None:
    """In dollars, of all devices for one step; None where their price is not known."""
    cluster = price.job.cluster
    if not cluster.gpu.price_per_hour:
        return None
    return cluster.gpu.price_per_hour * cluster.num_gpus * price.time.step_s / 3600
