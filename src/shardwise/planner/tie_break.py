"""Count what a strategy does beyond the simplest one: of two that are equally fast, the simpler one is better.

Predicted times are exact to some per cent at best, and each additional mechanism can fail or be tuned badly.

>>> from shardwise.planner.job import Strategy
>>> num_extras(Strategy(dp_shard=8, zero_stage=3)), num_extras(Strategy(pp=4, tp=2, schedule="interleaved"))
(0, 3)
>>> num_extras(Strategy(cp=16, dp_shard=4)), num_extras(Strategy(pp=4, schedule="interleaved", virtual_stages=8))
(4, 4)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from shardwise.planner.job import Strategy
from shardwise.planner.results import Estimate

TIE_SHARE: Final = 0.02
"""Share of a step's time by which a simpler strategy may be slower than the fastest and still be preferred."""


def num_extras(strategy: Strategy) -> int:
    """Count axes beyond the data-parallel one, schedules beyond 1F1B, memories beyond the device, and the like.

    Each doubling of a context axis counts, and of virtual stages beyond two.
    """
    return sum(_extras(strategy).values())


def extras_words(strategy: Strategy, simpler: Strategy) -> str:
    """Name what a strategy does beyond a simpler one.

    >>> extras_words(Strategy(pp=4, schedule="zb-v", tp=2), Strategy(pp=4, tp=2))
    'schedule'
    """
    other = _extras(simpler)
    return ", ".join(words for words, number in _extras(strategy).items() if number > other[words])


def _extras(s: Strategy) -> dict[str, int]:
    tiers = (s.params_tier, s.grads_tier, s.optimizer_tier, s.activations_tier)
    return {
        "pipeline": int(s.pp > 1),
        "tensor axis": int(s.tp > 1),
        "context axis": (s.cp - 1).bit_length() + (s.cp > 1 and (s.heads_over is not None or s.transport != "ring")),
        "schedule": (s.pp > 1 and s.schedule != "1f1b") + s.schedule.startswith("zb-"),
        "virtual stages": max(0, (s.virtual_stages - 1).bit_length() - 1),
        "recomputation of some blocks": int(s.recompute_every > 1),
        "offload": sum(tier != "device" for tier in tiers) + tiers.count("nvme"),
        "shares of states": int(max(s.params_on_device, s.grads_on_device, s.optimizer_on_device) > 0),
    }


def simplest(prices: Iterable[Estimate]) -> Estimate:
    """Return the simplest of those within `TIE_SHARE` of the fastest, and of equally simple ones the fastest."""
    every = list(prices)
    least_s = min(price.time.step_s for price in every)
    tied = [price for price in every if price.time.step_s <= (1 + TIE_SHARE) * least_s]
    return min(tied, key=lambda price: (num_extras(price.strategy), price.time.step_s))
