"""Search a zero-bubble schedule for given times and memory: walk through time and give each free rank its best action.

The recipes of `pipelines` are written for any times. A deferred gradient of weights holds less memory than a
micro-batch in flight; where the times and this share are known, more of these gradients can fill the bubble.
Qi et al. 2023 (arXiv 2401.10241), section 3.1, use a heuristic of the same kind and run it a few times.

>>> from shardwise.schedule.simulate import OpTimes
>>> print(zero_bubble_searched(2, 3, OpTimes(), max_held=3))
rank 0: 0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
rank 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import product

from shardwise.schedule.actions import Action, ActionKind, Schedule, ScheduleError
from shardwise.schedule.simulate import OpTimes

_F, _I, _W = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT

# Relative difference that sums of equal times in different orders may have.
_ROUNDING = 1e-9


def zero_bubble_searched(
    num_ranks: int, num_micro_batches: int, times: OpTimes, *, max_held: float, deferred_share: float = 1.0
) -> Schedule:
    """Return the best of a few greedy schedules with one stage a rank: the one whose longest span of a rank is least.

    Args:
        num_ranks: ranks of the pipeline.
        num_micro_batches: micro-batches of a step.
        times: seconds of a micro-batch on each rank.
        max_held: activations that a rank may hold, each of one micro-batch.
        deferred_share: share of an activation that the gradient of weights still needs after that of the input.

    Raises:
        ScheduleError: a count or `max_held` is below 1.
    """
    for name, count in (("num_ranks", num_ranks), ("num_micro_batches", num_micro_batches), ("max_held", max_held)):
        if count < 1:
            raise ScheduleError(
                "count-below-one", f"{name}={count} is below 1; a pipeline has a rank, a step a micro-batch, both held"
            )
    walks = [
        _walk([_Rank() for _ in range(num_ranks)], num_micro_batches, times, _Policy(max_held, deferred_share, *flags))
        for flags in product((False, True), repeat=2)
    ]
    best = min(walks, key=lambda ranks: max(rank.span_s for rank in ranks))
    return Schedule(tuple(_numbered(stage, rank.kinds) for stage, rank in enumerate(best)))


@dataclass(frozen=True)
class _Policy:
    """Say what a rank may do.

    Attributes:
        max_held: activations that a rank may hold.
        deferred_share: share of an activation that a deferred gradient of weights holds.
        is_eager: whether a forward may delay the first backward.
        fills_short_gaps: whether the rank that has waited longest may begin a gradient of weights that ends after
            the gap.
    """

    max_held: float
    deferred_share: float
    is_eager: bool
    fills_short_gaps: bool


@dataclass
class _Rank:
    """Hold the state of a rank in the walk: what it has done, and when its inputs from other ranks arrive."""

    kinds: list[ActionKind] = field(default_factory=list)
    done: dict[ActionKind, int] = field(default_factory=lambda: {_F: 0, _I: 0, _W: 0})
    arrivals: dict[ActionKind, list[float]] = field(default_factory=lambda: {_F: [], _I: []})
    start_s: float = 0.0
    free_s: float = 0.0
    idle_s: float = 0.0
    is_asleep: bool = False
    last: ActionKind = _I  # the latest forward or backward

    @property
    def span_s(self) -> float:
        return self.free_s - self.start_s

    def arrival_s(self, kind: ActionKind) -> float | None:
        """Return when the next action of that kind can begin; None where that is not known yet."""
        arrived = self.arrivals[kind]
        return arrived[self.done[kind]] if self.done[kind] < len(arrived) else None

    def can_hold_another(self, policy: _Policy) -> bool:
        in_flight, deferred = self.done[_F] - self.done[_I], self.done[_I] - self.done[_W]
        return in_flight + policy.deferred_share * deferred + 1 <= policy.max_held + _ROUNDING


def _walk(ranks: list[_Rank], num_micro_batches: int, times: OpTimes, policy: _Policy) -> list[_Rank]:
    """Take the rank that is free first, choose its next action, and set when the result arrives at its neighbour."""
    seconds = {_F: times.forward_s, _I: times.backward_input_s, _W: times.backward_weight_s}
    ranks[0].arrivals[_F] = [0.0] * num_micro_batches
    free = [(0.0, index) for index in range(len(ranks))]
    while free:
        now_s, index = heapq.heappop(free)
        rank = ranks[index]
        until_s = _next_arrival_s(rank, now_s, num_micro_batches, policy)
        kind = _choice(rank, ranks, now_s, until_s, num_micro_batches, times, policy)
        if kind is None:
            if until_s is None:
                rank.is_asleep = True
            else:
                rank.idle_s += until_s - now_s if rank.done[_I] else 0.0
                heapq.heappush(free, (until_s, index))
            continue
        if not rank.kinds:
            rank.start_s = now_s
        rank.free_s = now_s + seconds[kind]
        rank.kinds.append(kind)
        rank.done[kind] += 1
        rank.last = rank.last if kind is _W else kind
        heapq.heappush(free, (rank.free_s, index))
        for receiver, what, delay_s in _unblocked(index, kind, len(ranks), times.transfer_s):
            other = ranks[receiver]
            other.arrivals[what].append(rank.free_s + delay_s)
            if other.is_asleep:
                other.is_asleep = False
                heapq.heappush(free, (rank.free_s + delay_s, receiver))
    return ranks


def _unblocked(index: int, kind: ActionKind, num_ranks: int, transfer_s: float) -> list[tuple[int, ActionKind, float]]:
    """Return which rank can run which kind with the result, and after what delay."""
    if kind is _F:
        return [(index + 1, _F, transfer_s)] if index + 1 < num_ranks else [(index, _I, 0.0)]
    return [(index - 1, _I, transfer_s)] if kind is _I and index else []


def _next_arrival_s(rank: _Rank, now_s: float, num_micro_batches: int, policy: _Policy) -> float | None:
    """Return when the next forward or backward that cannot begin now can begin; None where there is none."""
    kinds = [_F, _I] if rank.done[_F] < num_micro_batches and rank.can_hold_another(policy) else [_I]
    known = [arrival_s for kind in kinds if (arrival_s := rank.arrival_s(kind)) is not None]
    return min((each for each in known if each > now_s + _ROUNDING * now_s), default=None)


def _choice(
    rank: _Rank,
    ranks: list[_Rank],
    now_s: float,
    until_s: float | None,
    num_micro_batches: int,
    times: OpTimes,
    policy: _Policy,
) -> ActionKind | None:
    """Choose what a free rank does; None where it waits."""

    def is_here(kind: ActionKind) -> bool:
        arrival_s = rank.arrival_s(kind)
        return arrival_s is not None and arrival_s <= now_s + _ROUNDING * now_s

    can_forward = is_here(_F) and rank.can_hold_another(policy)
    backward_s = rank.arrival_s(_I)
    if rank.done[_I] == 0:  # until the first backward, as many forwards as memory allows
        if is_here(_I):
            return _I
        delays = backward_s is not None and now_s + times.forward_s > backward_s + _ROUNDING * backward_s
        return _F if can_forward and (policy.is_eager or not delays) else None
    if is_here(_I) and (rank.last is _F or rank.done[_F] == num_micro_batches):
        return _I
    if can_forward and rank.last is _I:
        return _F
    has_weights = rank.done[_W] < rank.done[_I]
    is_full = rank.done[_F] < num_micro_batches and not rank.can_hold_another(policy)
    if has_weights and is_full and rank.last is _I:
        return _W
    if is_here(_I) and rank.arrival_s(_F) is None:
        return _I
    gap_s = times.backward_weight_s if until_s is None else until_s - now_s
    waits_longest = rank.idle_s + gap_s > max(each.idle_s for each in ranks)
    fills = gap_s >= times.backward_weight_s * (1 - _ROUNDING) or (policy.fills_short_gaps and waits_longest)
    return _W if has_weights and fills else None


def _numbered(stage: int, kinds: list[ActionKind]) -> tuple[Action, ...]:
    num_before = dict.fromkeys((_F, _I, _W), 0)
    row = []
    for kind in kinds:
        row.append(Action(kind, stage, num_before[kind]))
        num_before[kind] += 1
    return tuple(row)
