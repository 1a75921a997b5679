"""Simulates a rank with as few micro-batches as show all that more would: a dry run of hundreds takes seconds.

A step holds most once its pipeline is full, and from then on each further micro-batch does what the one before did.
So the counts of the schedule say how many micro-batches are needed, and what each one more adds is linear: a message, a
gather, and the bytes of a sent gradient, which is held until the step ends. `tests/parity/test_few_micro_batches.py`
compares the figures with those of all micro-batches, byte for byte.

>>> few_micro_batches("1f1b", 8, 1, 128), few_micro_batches("zb-v", 8, 2, 128), few_micro_batches("gpipe", 8, 1, 128)
(9, 17, 128)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from shardwise.config.resolve import ResolvedConfig
from shardwise.layout.layout import Layout
from shardwise.layout.mesh_shape import MeshShape
from shardwise.runtime.format import format_s
from shardwise.runtime.memory_tracker import Category
from shardwise.runtime.torch_private import fake_tensors
from shardwise.schedule.formulas import moments_in_flight
from shardwise.verify.simulate import RankJob, Simulation, build_rank, meter_step, values_refused

# Two points of a line, and one that a rank without a pipeline needs: a first micro-batch, a last one and one between.
_LEAST = 3
_SHORT = 2


@dataclass(frozen=True)
class RankFigures:
    """Holds what one rank holds and sends in a step.

    Attributes:
        at_rest: bytes of the device between the last backward and the update, by category.
        peak: bytes of the device at the peak.
        num_calls, wire_bytes: collectives of a step and what this rank sends by them, by axis and op.
        num_simulated: the micro-batches that were simulated; the figures are of all.
    """

    rank: int
    layout: Layout
    at_rest: Mapping[Category, int]
    peak: Mapping[Category, int]
    num_calls: Mapping[tuple[str, str], int]
    wire_bytes: Mapping[tuple[str, str], int]
    num_simulated: int

    @property
    def peak_bytes(self) -> int:
        """Return the bytes of the device at the peak, all categories."""
        return sum(self.peak.values())


def few_micro_batches(
    recipe_name: str, num_ranks: int, virtual_stages: int, num_micro_batches: int, *, rank: int = 0
) -> int:
    """Return the fewest micro-batches with which a rank of a pipeline holds as many at once as with all of them.

    Args:
        num_ranks: of the pipeline; 1 for none.
    """
    if num_ranks == 1:
        return min(_LEAST, num_micro_batches)

    def peaks(number: int) -> tuple[int, ...]:
        """Return the most in flight and deferred of each stage, and of all together."""
        moments = moments_in_flight(recipe_name, num_ranks, number, virtual_stages, rank)
        counts = [in_flight for _, *in_flight in moments]
        return (*map(max, zip(*counts, strict=True)), max(map(sum, counts)))

    full = peaks(num_micro_batches)
    shown = (number for number in range(_LEAST - 1, num_micro_batches) if peaks(number) == full)
    # The second of these: then one micro-batch begins as another ends, with what arrives and what is sent.
    return next(islice(shown, 1, None), num_micro_batches)


def rank_figures(job: RankJob, announce: Callable[[str], None] = lambda doing: None) -> RankFigures:
    """Simulate a rank with few micro-batches, and return what it holds and sends with all of them.

    Args:
        job: the rank's, with all micro-batches in its config.
        announce: called with a few words, among them how long the longest part may take.
    """
    config, start_s = job.config, time.perf_counter()
    num_all, schedule = config.batch.accumulation or 1, config.pipeline
    with_pipeline = schedule.schedule, config.mesh.pp, schedule.virtual_stages
    stage = MeshShape.from_config(config.mesh).coordinate(job.rank).pp
    few = few_micro_batches(*with_pipeline, num_all, rank=stage)
    with fake_tensors(), values_refused():
        engine, make_step = build_rank(replace(job, config=_with_micro_batches(config, few)))
        # The first step makes the optimizer's states, learns the order of the blocks and fills the pool of buffers, so
        # it is as long as the one that counts: one of another length leaves other buffers.
        short = min(_SHORT, few)
        lengths = (few, few, short)
        first_s = time.perf_counter()
        engine.runner.accumulate(make_step(lengths[0]))
        engine.runner.step()
        left_s = (time.perf_counter() - first_s) * sum(lengths[1:]) / lengths[0]
        of_all = "" if few == num_all else f" of {num_all:,}"
        announce(f"{few:,}{of_all} micro-batches, about {format_s(left_s)} more")
        steps = {number: meter_step(engine, make_step(number), start_s) for number in lengths[1:]}
    return _extrapolated(steps[short], steps[few], num_all - few, few)


def _extrapolated(first: Simulation, found: Simulation, num_more: int, few: int) -> RankFigures:
    """Return the figures of `num_more` micro-batches more than `found` has, by what one adds since `first`."""

    def longer(before: Mapping[Any, int], after: Mapping[Any, int]) -> dict[Any, int]:
        if not num_more:
            return dict(after)
        return {key: size + num_more * (size - before.get(key, 0)) // (few - _SHORT) for key, size in after.items()}

    # Of what is at rest only sent gradients grow, and the peak has them too.
    kept_bytes = found.at_rest.live_bytes
    sent = {Category.ACTIVATIONS: first.at_rest.live_bytes[Category.ACTIVATIONS]}
    at_rest = longer({**kept_bytes, **sent}, kept_bytes)
    peak = found.peak.peak_live_bytes
    return RankFigures(
        rank=found.rank,
        layout=found.layout,
        at_rest=at_rest,
        peak={category: size + at_rest[category] - kept_bytes[category] for category, size in peak.items()},
        num_calls=longer(_num_calls(first), _num_calls(found)),
        wire_bytes=longer(first.wire_bytes, found.wire_bytes),
        num_simulated=few,
    )


def _num_calls(simulation: Simulation) -> Counter[tuple[str, str]]:
    return Counter((call.axis, call.op) for call in simulation.calls)


def _with_micro_batches(config: ResolvedConfig, number: int) -> ResolvedConfig:
    batch = config.batch
    size = None if batch.global_size is None else batch.global_size // (batch.accumulation or 1) * number
    changed = batch.model_copy(update={"accumulation": number, "global_size": size})
    return config.model_copy(update={"batch": changed})
