"""A unit at run time holds the parameter groups of one module and reacts to the module's hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shardwise.layout.param_groups import ROOT
from shardwise.runtime.module_hooks import DeferredTensor, deferred, read_with
from shardwise.runtime.timeline import Timeline
from shardwise.schedule.actions import ActionKind
from shardwise.zero.param_group import ParamGroup


class UnitObserver(Protocol):
    """Receives a unit's events; implemented by `shardwise.zero.sharding_state.ShardingState`."""

    timeline: Timeline
    is_serving: bool
    num_in_backward: int

    def enter_forward(self, unit: Unit) -> None: ...

    def on_forward(self) -> None: ...

    def on_forward_end(self, unit: Unit, backward_follows: bool | None) -> None: ...

    def enter_backward(self, unit: Unit) -> None: ...

    def on_backward(self, unit: Unit) -> None: ...

    def on_inputs_done(self, unit: Unit) -> None: ...

    def on_backward_end(self, unit: Unit) -> None: ...

    def pin_until_backward(self, group: ParamGroup) -> None: ...


class Unit:
    """Holds the groups of one module, and handles the module's events.

    Args:
        name: the module's name.
        sharding: the engine's sharding state; it sets `groups`, those of the trainable and of the frozen parameters.
    """

    def __init__(self, name: str, sharding: UnitObserver) -> None:
        self.name = name
        self.groups: tuple[ParamGroup, ...] = ()
        self.stage: int | None = None  # of a pipeline, which computes now; None for all that the module belongs to
        self._sharding = sharding
        self._forward_start_s = 0.0
        self._backward_start_s: float | None = None
        self._num_awaited_inputs = 0
        self._has_all_inputs = False
        self._has_untracked_forward = False

    @property
    def is_in_backward(self) -> bool:
        """Say whether a backward has begun and not ended."""
        return self._backward_start_s is not None

    @property
    def used_groups(self) -> tuple[ParamGroup, ...]:
        """Return the groups whose parameters the computing stage uses."""
        if self.stage is None:
            return self.groups
        return tuple(group for group in self.groups if self.stage in group.spec.stages)

    def wait(self) -> None:
        """Make the parameters available."""
        for group in self.used_groups:
            group.wait()

    def start_unshard(self) -> None:
        """Start to gather the parameters, which are likely to be needed next."""
        for group in self.used_groups:
            if not group.is_stepped:
                group.unshard()

    def prefetch(self) -> None:
        """Start what gathering the parameters would have to wait for on the host."""
        for group in self.groups:
            group.prefetch()

    def reshard(self) -> None:
        """Release the parameters that are stored as shards."""
        for group in self.groups:
            group.reshard()

    def before_forward(self) -> None:
        """Make the parameters available, and start to gather the next unit's."""
        self._sharding.enter_forward(self)
        self.wait()
        for group in self.used_groups:
            group.unguard()
        self._sharding.on_forward()
        self._forward_start_s = self._sharding.timeline.now()

    def after_forward(self, outputs: Sequence[Tensor], backward_follows: bool | None) -> None:
        """Release the parameters unless the backward follows at once."""
        self._sharding.timeline.add(ActionKind.FORWARD, self.name, self._forward_start_s)
        if backward_follows is False:
            backward_follows = self._compute_deferred(deferred(outputs))
        read = read_with(outputs)
        for group in self.groups:
            if group.params.is_viewed_by(read):
                self._sharding.pin_until_backward(group)
            group.guard()
        self._sharding.on_forward_end(self, backward_follows)

    def _compute_deferred(self, outputs: Sequence[DeferredTensor]) -> bool | None:
        """Compute deferred outputs while the parameters are present; within an engine's call leave them to the loss.

        Returns:
            the value to use for `backward_follows` from then on.
        """
        if outputs and self._sharding.is_serving:
            return None
        for output in outputs:
            output.compute(for_good=True)
        return False

    def expect_input_gradients(self, are_tracked: bool) -> None:
        """Note a forward: the backward ends only after its inputs have their gradients, if they are tracked."""
        self._num_awaited_inputs += are_tracked
        self._has_untracked_forward |= not are_tracked

    def save_record(self) -> tuple[int, bool]:
        """Forget the forwards so far, whose backwards come later; return what `restore_record` needs before them."""
        record = self._num_awaited_inputs, self._has_untracked_forward
        self._num_awaited_inputs, self._has_untracked_forward = 0, False
        return record

    def restore_record(self, record: tuple[int, bool]) -> None:
        """Expect the backward of the forwards whose record was saved."""
        self._num_awaited_inputs, self._has_untracked_forward = record

    def before_backward(self) -> None:
        """Make the parameters available, and start to gather the previous unit's."""
        begins = not self.is_in_backward
        if begins:
            self._sharding.enter_backward(self)
        if torch.is_grad_enabled():
            for group in self.used_groups:  # a graph through this backward is being built, and will need the data again
                self._sharding.pin_until_backward(group)
        self.wait()
        for group in self.used_groups:
            group.unguard()  # to a recomputation, which runs inside the module's own hooks
        if begins:
            self._backward_start_s = self._sharding.timeline.now()
            self._sharding.on_backward(self)

    def after_input_gradients(self) -> None:
        """Note that the inputs of one forward have their gradients."""
        self._num_awaited_inputs -= 1
        self._has_all_inputs = self._num_awaited_inputs == 0 and not self._has_untracked_forward
        if self._has_all_inputs:
            self._sharding.on_inputs_done(self)
        self.close_if_done()

    def close_if_done(self) -> None:
        """End the backward once nothing can need the data.

        That is when the inputs of all forwards have their gradients, since autograd runs the newest nodes first. Where
        inputs cannot be watched, it is when every parameter has its gradient and none of them is frozen.
        """
        is_complete = all(group.grads is not None and group.grads.is_complete for group in self.groups)
        if self.name != ROOT and (self._has_all_inputs or (is_complete and self._num_awaited_inputs <= 0)):
            self.close_backward()

    def close_backward(self) -> None:
        """Release the parameters and record the backward, if one has begun."""
        if self._backward_start_s is not None:
            self._sharding.timeline.add(ActionKind.BACKWARD, self.name, self._backward_start_s)
            self._backward_start_s = None
            self._sharding.num_in_backward -= self.name != ROOT
        self._num_awaited_inputs = 0
        self._has_all_inputs = self._has_untracked_forward = False
        self.reshard()
        self._sharding.on_backward_end(self)
