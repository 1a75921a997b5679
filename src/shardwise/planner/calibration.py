"""Scale the prices of blocks and heads by the measured time of whole units on a machine.

Tables of products, attention and streams leave out what no table has: autograd's own work, caches that one kernel
leaves warm or cold for the next, memory that is allocated and returned. A block and a head, measured whole at a few
shapes, say how much that is; between those shapes it is interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from shardwise.config.resolve import Dtype, ResolvedConfig
from shardwise.models.shape import ModelShape
from shardwise.planner.job import BASE, PlanJob, changed, param_of, product_dtype
from shardwise.planner.profile import BlockTime, HeadTime


@dataclass(frozen=True)
class PassTimes:
    """Hold the seconds of one micro-batch on one rank; `recompute_s` is part of none of the others."""

    forward_s: float = 0.0
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    recompute_s: float = 0.0

    @property
    def backward_s(self) -> float:
        """Return the seconds of both gradients."""
        return self.backward_input_s + self.backward_weight_s

    @property
    def total_s(self) -> float:
        """Return the seconds of all passes."""
        return self.forward_s + self.backward_s + self.recompute_s

    def times(self, factor: float) -> PassTimes:
        """Multiply all times by `factor`."""
        return PassTimes(*(factor * seconds for seconds in self._seconds))

    def plus(self, other: PassTimes) -> PassTimes:
        """Add the times of two units that run one after the other."""
        return PassTimes(*(a + b for a, b in zip(self._seconds, other._seconds, strict=True)))

    @property
    def _seconds(self) -> tuple[float, float, float, float]:
        return self.forward_s, self.backward_input_s, self.backward_weight_s, self.recompute_s


Price = Callable[[PlanJob, ResolvedConfig], PassTimes]
Point = tuple[tuple[float, ...], tuple[float, ...]]


class Corrections:
    """Scale a job's priced blocks and heads, by dtype, to their measured times.

    Args:
        job: whose cluster's profile has the measured times.
        price_block: gives the priced seconds of a block's passes.
        price_head: gives those of the head with its loss.
    """

    def __init__(self, job: PlanJob, price_block: Price, price_head: Price) -> None:
        profile = job.cluster.profile
        self._job = job
        self._profile = profile
        self._price_block, self._price_head = price_block, price_head
        self._block_factors, self._head_factors = cache(self._of_blocks), cache(self._of_heads)

    def block(self, times: PassTimes, config: ResolvedConfig, tokens: float) -> PassTimes:
        """Return the corrected `times` of a block under a candidate, for `tokens` of a micro-batch on a rank."""
        shape, dtype = self._job.shape, param_of(config)
        # What is compiled has other kernels than those that were measured.
        is_other = config.compile.enabled or shape.experts is not None or product_dtype(config) != dtype
        if self._profile is None or is_other:
            return times
        return _scaled(times, self._block_factors(dtype), tokens, shape.matmul_numel("dense") / config.mesh.tp)

    def head(self, times: PassTimes, config: ResolvedConfig, tokens: float) -> PassTimes:
        """Return the corrected `times` of the last norm, the head and the loss; the arguments are those of `block`."""
        if self._profile is None or config.compile.enabled:
            return times
        width = self._job.shape.vocab_size * self._job.shape.hidden_size / config.mesh.tp
        return _scaled(times, self._head_factors(param_of(config)), tokens, width)

    def _of_blocks(self, dtype: Dtype) -> LogInterpolator | None:
        points = []
        for block in () if self._profile is None else self._profile.blocks:
            if block.dtype == dtype:
                shape = _shape(block, block.num_heads, block.num_kv_heads, block.head_dim, block.ffn_size)
                priced = self._price_block(
                    self._measured_job(shape, block.seq_len), changed(BASE, {"precision.param": dtype})
                )
                points.append(_point(block, priced, block.seq_len, shape.matmul_numel("dense")))
        return LogInterpolator(points) if points else None

    def _of_heads(self, dtype: Dtype) -> LogInterpolator | None:
        points = []
        for head in () if self._profile is None else self._profile.heads:
            if head.dtype == dtype:
                shape = _shape(head, 1, 1, head.hidden_size, head.hidden_size, head.vocab_size)
                priced = self._price_head(
                    self._measured_job(shape, head.num_tokens), changed(BASE, {"precision.param": dtype})
                )
                points.append(_point(head, priced, head.num_tokens, head.hidden_size * head.vocab_size))
        return LogInterpolator(points) if points else None

    def _measured_job(self, shape: ModelShape, seq_len: int) -> PlanJob:
        """Return the job that was measured, to be priced by kernels alone."""
        profile = self._job.cluster.profile
        kernels = None if profile is None else replace(profile, blocks=(), heads=())
        cluster = replace(self._job.cluster, profile=kernels)
        return replace(self._job, shape=shape, seq_len=seq_len, global_batch=1, cluster=cluster)


def _point(measured: BlockTime | HeadTime, priced: PassTimes, tokens: int, width: float) -> Point:
    """Return (tokens, side of a square of as many weights), and measured over priced seconds of each pass."""
    return (tokens, width**0.5), (measured.forward_s / priced.forward_s, measured.backward_s / priced.backward_s)


def _scaled(times: PassTimes, factors: LogInterpolator | None, tokens: float, width: float) -> PassTimes:
    if factors is None:
        return times
    forward, backward = factors.at(tokens, width**0.5)
    return PassTimes(
        times.forward_s * forward, times.backward_input_s * backward, times.backward_weight_s * backward,
        times.recompute_s,
    )  # fmt: skip


def _shape(
    each: BlockTime | HeadTime, num_heads: int, num_kv_heads: int, head_dim: int, ffn_size: int, vocab_size: int = 1
) -> ModelShape:
    return ModelShape(
        num_layers=1,
        hidden_size=each.hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=ffn_size,
        vocab_size=vocab_size,
    )


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
        logs = [min(max(value, low), high) for value, low, high in bounds]
        distances = [math.dist(point, logs) ** 2 for point, _ in self._points]
        if min(distances) < 1e-12:
            return tuple(map(math.exp, self._points[distances.index(min(distances))][1]))
        weights = [1 / distance**2 for distance in distances]
        columns = zip(*(values for _, values in self._points), strict=True)
        return tuple(
            math.exp(sum(w * value for w, value in zip(weights, column, strict=True)) / sum(weights))
            for column in columns
        )
