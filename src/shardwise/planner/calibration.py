"""Correct the prices of blocks and heads by the measured time of whole units on a machine.

Tables of products, attention and streams leave out what no table has: autograd's own work, caches that one kernel
leaves warm or cold for the next, memory that is allocated and returned. A block and a head, measured whole at a few
shapes, say how much that is; between those shapes it is interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.config.resolve import Dtype
from shardwise.planner.job import PlanJob, Strategy
from shardwise.planner.profile import BlockTime, HeadTime, Profile
from shardwise.planner.shape import ModelShape

if TYPE_CHECKING:
    from shardwise.planner.memory_traffic import PassTimes


Price = Callable[[PlanJob, Strategy], "PassTimes"]


class Corrections:
    """Scale a job's priced blocks and heads, by dtype, to their measured times.

    Args:
        job: whose cluster's profile has the measured times.
        price_block: gives the priced seconds of a block's passes.
        price_head: gives those of the head with its loss.
    """

    def __init__(self, job: PlanJob, price_block: Price, price_head: Price) -> None:
        profile = job.cluster.profile
        # What is compiled has other kernels than those that were measured.
        is_measured = profile is not None and not job.traits.is_compiled
        self._profile = profile if is_measured else None
        self._job = job
        self._price_block, self._price_head = price_block, price_head
        self._blocks: dict[str, LogInterpolator | None] = {}
        self._heads: dict[str, LogInterpolator | None] = {}

    def block(self, times: PassTimes, strategy: Strategy, tokens: float) -> PassTimes:
        """Return the corrected times of a block; `recompute_s` stays as it is.

        Args:
            times: the priced seconds of each pass.
            strategy: its dtype and tensor-parallel size.
            tokens: of a micro-batch on a rank.
        """
        shape, dtype = self._job.shape, strategy.param
        if self._profile is None or shape.experts is not None or strategy.matmul not in (None, dtype):
            return times
        if dtype not in self._blocks:
            self._blocks[dtype] = _interpolator(self._block_points(self._profile, dtype))
        return _scaled(times, self._blocks[dtype], tokens, _num_weights(shape) / strategy.tp)

    def head(self, times: PassTimes, strategy: Strategy, tokens: float) -> PassTimes:
        """Return the corrected times of the last norm, the head and the loss.

        Args:
            times: the priced seconds of each pass.
            strategy: its dtype and tensor-parallel size.
            tokens: of a micro-batch on a rank.
        """
        dtype = strategy.param
        if self._profile is None:
            return times
        if dtype not in self._heads:
            self._heads[dtype] = _interpolator(self._head_points(self._profile, dtype))
        width = self._job.shape.vocab_size * self._job.shape.hidden_size / strategy.tp
        return _scaled(times, self._heads[dtype], tokens, width)

    def _block_points(self, profile: Profile, dtype: Dtype) -> list[Point]:
        points = []
        for each in profile.blocks:
            if each.dtype == dtype:
                shape = _block_shape(each)
                priced = self._price_block(self._reference(profile, shape, each.seq_len), Strategy(param=dtype))
                points.append(_point(each, priced, each.seq_len, _num_weights(shape)))
        return points

    def _head_points(self, profile: Profile, dtype: Dtype) -> list[Point]:
        points = []
        for each in profile.heads:
            if each.dtype == dtype:
                reference = self._reference(profile, _head_shape(each), each.num_tokens)
                priced = self._price_head(reference, Strategy(param=dtype))
                points.append(_point(each, priced, each.num_tokens, each.hidden_size * each.vocab_size))
        return points

    def _reference(self, profile: Profile, shape: ModelShape, seq_len: int) -> PlanJob:
        """Return the job that was measured, to be priced by kernels alone."""
        kernels = replace(self._job.cluster, profile=replace(profile, blocks=(), heads=()))
        return replace(self._job, shape=shape, seq_len=seq_len, global_batch=1, cluster=kernels)


def _point(measured: BlockTime | HeadTime, priced: PassTimes, tokens: int, width: float) -> Point:
    """Return (tokens, side of a square of as many weights), and measured over priced seconds of each pass."""
    return (tokens, width**0.5), (measured.forward_s / priced.forward_s, measured.backward_s / priced.backward_s)


def _interpolator(points: Sequence[Point]) -> LogInterpolator | None:
    return LogInterpolator(points) if points else None


def _scaled(times: PassTimes, factors: LogInterpolator | None, tokens: float, width: float) -> PassTimes:
    if factors is None:
        return times
    forward, backward = factors.at(tokens, width**0.5)
    return replace(
        times,
        forward_s=times.forward_s * forward,
        backward_input_s=times.backward_input_s * backward,
        backward_weight_s=times.backward_weight_s * backward,
    )


def _num_weights(shape: ModelShape) -> int:
    """Count the weights in the matrices of a dense block."""
    return shape.attention_params + shape.num_ffn_matrices * shape.hidden_size * shape.ffn_size


def _block_shape(each: BlockTime) -> ModelShape:
    return ModelShape(
        num_layers=1,
        hidden_size=each.hidden_size,
        num_heads=each.num_heads,
        num_kv_heads=each.num_kv_heads,
        head_dim=each.head_dim,
        ffn_size=each.ffn_size,
        vocab_size=1,
    )


def _head_shape(each: HeadTime) -> ModelShape:
    return ModelShape(
        num_layers=1,
        hidden_size=each.hidden_size,
        num_heads=1,
        num_kv_heads=1,
        head_dim=each.hidden_size,
        ffn_size=each.hidden_size,
        vocab_size=each.vocab_size,
    )


Point = tuple[tuple[float, ...], tuple[float, ...]]


class LogInterpolator:
    """Interpolate positive values over positive coordinates; in logarithms, nearer points weigh more.

    Weights fall with the fourth power of the distance (Shepard 1968), so that many far points do not drown a near one.
    A coordinate outside the points' box counts as if it were at the edge of the box.

    Args:
        points: coordinates and values, at least one.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = [(tuple(map(math.log, where)), tuple(map(math.log, values))) for where, values in points]
        columns = list(zip(*(where for where, _ in self._points), strict=True))
        self._low, self._high = [min(column) for column in columns], [max(column) for column in columns]

    def at(self, *where: float) -> tuple[float, ...]:
        """Return the values at some coordinates, between the least and the greatest known."""
        bounds = zip(map(math.log, where), self._low, self._high, strict=True)
        logs = [min(max(each, low), high) for each, low, high in bounds]
        distances = [sum((a - b) ** 2 for a, b in zip(known, logs, strict=True)) for known, _ in self._points]
        if min(distances) < 1e-12:
            return tuple(map(math.exp, self._points[distances.index(min(distances))][1]))
        weights = [1 / distance**2 for distance in distances]
        total = sum(weights)
        sums = zip(
            *([w * value for value in values] for w, (_, values) in zip(weights, self._points, strict=True)),
            strict=True,
        )
        return tuple(math.exp(sum(column) / total) for column in sums)
