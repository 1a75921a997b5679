"""Read a machine's profile as functions of shape: rates of products and attention, corrections of blocks and heads.

Tables of products, attention and streams leave out what no table has: autograd's own work, caches that one kernel
leaves warm or cold for the next, memory that is allocated and returned. A block and a head, measured whole at a few
shapes, say how much that is; between those shapes it is interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from shardwise.config.resolve import Dtype, ResolvedConfig
from shardwise.models.shape import ModelShape
from shardwise.planner.job import BASE, PlanJob, changed, param_of, product_dtype
from shardwise.planner.profile import AttentionTime, BlockTime, MatmulTime


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
_Unit = Literal["dense", "head"]

_SMALLEST = ModelShape(
    num_layers=1, hidden_size=1, num_heads=1, num_kv_heads=1, head_dim=1, ffn_size=1, vocab_size=1
)  # fmt: skip


class Corrections:
    """Scale a job's priced blocks and heads, by dtype, to their measured times.

    Args:
        job: whose cluster's profile has the measured times.
        price_block: gives the priced seconds of a block's passes.
        price_head: gives those of the head with its loss.
    """

    def __init__(self, job: PlanJob, price_block: Price, price_head: Price) -> None:
        self._job = job
        self._prices: dict[_Unit, Price] = {"dense": price_block, "head": price_head}
        self._factors = cache(self._measured_factors)

    def block(self, times: PassTimes, config: ResolvedConfig, tokens: float) -> PassTimes:
        """Return the corrected `times` of a block under a candidate, for `tokens` of a micro-batch on a rank."""
        is_other = self._job.shape.experts is not None or product_dtype(config) != param_of(config)
        return times if is_other else self._scaled("dense", times, config, tokens)

    def head(self, times: PassTimes, config: ResolvedConfig, tokens: float) -> PassTimes:
        """Return the corrected `times` of the last norm, the head and the loss; the arguments are those of `block`."""
        return self._scaled("head", times, config, tokens)

    def _scaled(self, unit: _Unit, times: PassTimes, config: ResolvedConfig, tokens: float) -> PassTimes:
        # What is compiled has other kernels than those that were measured.
        factors = None if config.compile.enabled else self._factors(unit, param_of(config))
        if factors is None:
            return times
        width = self._job.shape.matmul_numel(unit) / config.mesh.tp
        forward, backward = factors.at(tokens, width**0.5)
        return PassTimes(
            times.forward_s * forward, times.backward_input_s * backward, times.backward_weight_s * backward,
            times.recompute_s,
        )  # fmt: skip

    def _measured_factors(self, unit: _Unit, dtype: Dtype) -> LogInterpolator | None:
        """Fit measured over priced seconds of each pass, over tokens and the side of a square of as many weights."""
        measured, points = self._job.cluster.measured, []
        cluster = replace(self._job.cluster, profile=replace(measured, blocks=(), heads=()))  # priced by kernels alone
        for row in measured.blocks if unit == "dense" else measured.heads:
            if row.dtype == dtype:
                sizes = {name: size for name, size in vars(row).items() if hasattr(_SMALLEST, name)}
                tokens = row.seq_len if isinstance(row, BlockTime) else row.num_tokens
                shape = replace(_SMALLEST, **sizes)
                job = replace(self._job, shape=shape, seq_len=tokens, global_batch=1, cluster=cluster)
                priced = self._prices[unit](job, changed(BASE, {"precision.param": dtype}))
                over = row.forward_s / priced.forward_s, row.backward_s / priced.backward_s
                points.append(((tokens, shape.matmul_numel(unit) ** 0.5), over))
        return LogInterpolator(points) if points else None


def matmul_rates(table: Iterable[MatmulTime], dtype: str) -> LogInterpolator | None:
    """Fit FLOPs a second over m, n and k; None where the table has no row of this dtype."""
    rows = [row for row in table if row.dtype == dtype]
    points = [((row.m, row.n, row.k), (2.0 * row.m * row.n * row.k / row.seconds,)) for row in rows]
    return LogInterpolator(points) if points else None


def attention_rates(table: Iterable[AttentionTime], dtype: str) -> LogInterpolator | None:
    """Fit the forward's FLOPs by the seconds of each pass, over keys, and tokens times the heads' elements."""
    points = []
    for row in table:
        if row.dtype == dtype:
            width = row.seq_len * row.num_heads * row.head_dim
            flops = 4.0 * width * row.seq_len
            points.append(((row.seq_len, width), (flops / row.forward_s, flops / row.backward_s)))
    return LogInterpolator(points) if points else None


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
