"""Say where experts that are split over ranks (`mesh.ep`) would be faster, which the engine does not run yet.

Experts are Shard(0) over `ep`, inside `dp_shard`; ZeRO shards them over the other data ranks. It is a file of its own
since the search lists only what the engine runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from shardwise.planner.candidates import divisors
from shardwise.planner.memory_limit import missing_memory
from shardwise.planner.pricer import Pricing
from shardwise.planner.results import TIE_SHARE, Estimate
from shardwise.planner.search import SearchResult
from shardwise.runtime.format import format_s

_NUM_TRIED: Final = 10


def best_with_experts_split(found: SearchResult, pricing: Pricing) -> Estimate | None:
    """Return the fastest of the found layouts with their experts split over data ranks; None where none is faster."""
    experts, winner = found.job.shape.experts, found.winner
    if experts is None or winner is None:
        return None
    best, least_s = None, winner.time.step_s * (1 - TIE_SHARE)
    tried = dict.fromkeys(each.strategy for each in (*found.best[:_NUM_TRIED], *found.runners_up))
    for strategy in tried:
        for ep in divisors(strategy.dp_shard)[1:]:
            # States of which each rank has fewer may need less sharding.
            for stage in {1, strategy.zero_stage} if experts.num_experts % ep == 0 else ():
                split = replace(strategy, ep=ep, zero_stage=stage)
                time = pricing.time.estimate(split)
                if time.step_s >= least_s:
                    continue
                memory = pricing.memory.estimate(split)
                if missing_memory(memory, found.job.cluster, found.limits.margin_share) is None:
                    best, least_s = Estimate(job=found.job, strategy=split, memory=memory, time=time), time.step_s
    return best


def expert_notes(found: SearchResult, pricing: Pricing) -> tuple[str, ...]:
    """Return a note for people where a layout with experts split over ranks is faster than the winner."""
    best = best_with_experts_split(found, pricing)
    if best is None or found.winner is None:
        return ()
    s, times = best.strategy, found.winner.time.step_s / best.time.step_s
    return (
        f"experts over {s.ep} ranks (EP {s.ep}) with ZeRO-{s.zero_stage} would take {format_s(best.time.step_s)}, "
        f"{times:.1f} times as fast: an estimate, with {found.job.traits.expert_imbalance:g} times the mean tokens on "
        "the fullest rank; our engine does not run mesh.ep yet",
    )
