"""Step groups in the backward, as soon as their last reduction has ended: those whose states are off the device."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.config.resolve import Config
from shardwise.layout.layout import Layout
from shardwise.zero.optimizer import ShardedOptimizer
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.sharding_state import ShardingState


def may_step_in_backward(config: Config, layout: Layout) -> bool:
    """Say whether the config lets groups be stepped before the backward has ended, and any can be."""
    is_offloaded = any(group.tiers.optimizer != "device" for group in layout.groups if group.trainable)
    is_scaled = config.precision.param == "fp16" and config.precision.loss_scale == "dynamic"
    is_split = layout.tensor is not None or layout.pipeline is not None
    clips = config.optimizer.clip_norm is not None
    may_skip = config.run.on_nonfinite == "skip"
    return config.tiers.step_in_backward and is_offloaded and not (clips or is_scaled or is_split or may_skip)


class StepInBackward:
    """Steps groups as soon as their last reduction has ended, from `begin` to `end` of a backward.

    Args:
        sharding: reports when reductions end.
        sharded: the optimizer that steps.
        is_allowed: whether `begin` may be called at all.
    """

    def __init__(self, sharding: ShardingState, sharded: ShardedOptimizer, is_allowed: bool) -> None:
        self.is_allowed = is_allowed
        self.is_armed = False
        self._sharding = sharding
        self._sharded = sharded
        self._steady: set[ParamGroup] = set()
        self._factor: float | None = None
        self._read_factor: Callable[[], float | None] | None = None

    def begin(self, read_factor: Callable[[], float | None]) -> None:
        """Step groups from now on.

        Args:
            read_factor: waits for the factor from accumulated sums to the mean gradient; None if no step may follow.
        """
        self._read_factor = read_factor
        self._sharding.reducing.on_reduced = self._step

    def end(self) -> None:
        """Leave the other groups to the step, and note which groups can be stepped in the next backward."""
        if self._read_factor is not None:
            self._read_factor()  # no group needed it, but the collective must be waited for
        self._sharding.reducing.on_reduced = self._read_factor = self._factor = None
        self.is_armed = False
        streamed = filter(self._sharded.can_step_alone, self._sharding.groups)
        held = [group for group in streamed if group.grads is not None and group.grads.holds_sum]
        self._steady = set(filter(_is_complete, held)) - self._sharding.reductions.ever_late

    def close(self) -> None:
        """Forget the groups."""
        self._steady.clear()

    def _step(self, group: ParamGroup) -> None:
        grads = group.grads
        if group not in self._steady or not _is_complete(group) or grads is None or grads.is_partial:
            return
        if self._read_factor is not None:
            self._factor, self._read_factor = self._read_factor(), None
        if self._factor is not None:
            group.is_stepped = True
            self._sharded.step_in_backward(group, self._factor)


def _is_complete(group: ParamGroup) -> bool:
    """Say whether every parameter has got a gradient here: then no other rank is needed to know that it was used."""
    return group.grads is not None and all(group.grads.was_used)
