"""Stepping groups on the host while the backward of the others goes on.

That is possible where nothing of the step depends on gradients to come: without clipping, which needs the norm of all
of them, without a loss scale that an overflow would change, without tensor or pipeline parallelism. What gradients are
divided by is summed over the ranks when the last backward begins, and waited for at the first step.

A group is stepped so from its second step on, and only if all its parameters have had gradients so far, from nowhere
but its unit. A gradient that comes later still, or a gather of what has been stepped, is an error.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwise.config import Config
from shardwise.layout.layout import Layout
from shardwise.zero.driver import ZeroDriver
from shardwise.zero.group import ParamGroup
from shardwise.zero.step import ShardedOptimizer


def may_step_ahead(config: Config, layout: Layout) -> bool:
    """Whether the config lets groups be stepped before the backward has ended, and any can be."""
    is_streamed = any(group.tiers.optimizer != "device" for group in layout.groups if group.trainable)
    is_scaled = config.precision.param == "fp16" and config.precision.loss_scale == "dynamic"
    is_split = layout.tensor is not None or layout.pipeline is not None
    clips = config.optimizer.clip_norm is not None
    return config.tiers.step_in_backward and is_streamed and not (clips or is_scaled or is_split)


class StepAhead:
    """Steps groups as soon as their last reduction has ended, from `begin` to `end` of a backward.

    Args:
        driver: tells of reductions.
        sharded: steps.
        is_allowed: whether `begin` may be called at all.
    """

    def __init__(self, driver: ZeroDriver, sharded: ShardedOptimizer, is_allowed: bool) -> None:
        self.is_allowed = is_allowed
        self.is_armed = False
        self._driver = driver
        self._sharded = sharded
        self._steady: set[ParamGroup] = set()
        self._factor: float | None = None
        self._read_factor: Callable[[], float | None] | None = None

    def begin(self, read_factor: Callable[[], float | None]) -> None:
        """Step groups from now on.

        Args:
            read_factor: waits for what turns accumulated sums into the mean gradient; None where no step may follow.
        """
        self._read_factor = read_factor
        self._driver.on_reduced = self._step

    def end(self) -> None:
        """Leave the rest to the step, and learn which groups can be stepped so the next time."""
        self._driver.on_reduced = self._read_factor = self._factor = None
        self.is_armed = False
        streamed = [group for group in self._driver.groups if group.spec.tiers.optimizer != "device"]
        held = [group for group in streamed if group.grads is not None and group.grads.holds_sum]
        self._steady = {group for group in held if _is_complete(group) and group not in self._driver.ever_late}

    def close(self) -> None:
        """Forget the groups."""
        self._steady.clear()

    def _step(self, group: ParamGroup) -> None:
        if group not in self._steady or not _is_complete(group) or group.awaits_replicas:
            return
        if self._read_factor is not None:
            self._factor, self._read_factor = self._read_factor(), None
        if self._factor is not None:
            group.is_ahead = True
            self._sharded.step_ahead(group, self._factor)


def _is_complete(group: ParamGroup) -> bool:
    """Whether every parameter has got a gradient here: then no other rank is needed to know that it was used."""
    return group.grads is not None and all(group.grads.was_used)
