"""When a model's groups unshard, reshard and reduce, driven by the hooks of its units.

A unit is unsharded before its forward and its backward, and the next one in order is unsharded ahead. The order is
only a hint, taken from the last forward: a wrong guess costs a wait or some memory for a while, never an error.
Reductions start in one fixed order, from the last unit to the root, so that ranks whose models take different paths
still meet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shardwise._torch_private import in_backward, on_backward_end
from shardwise.hooks import ReleasedParameterError, claim, hook_gradient, hook_unit, released_type
from shardwise.layout.layout import Layout
from shardwise.layout.skeleton import ROOT
from shardwise.schedule.actions import Kind
from shardwise.zero.group import ParamGroup, Resources


class Unit:
    """The groups of one module, and its events.

    Args:
        name: of the module.
        groups: its trainable and its frozen parameters'.
        driver: of the engine.
    """

    def __init__(self, name: str, groups: Sequence[ParamGroup], driver: ZeroDriver) -> None:
        self.name = name
        self.groups = tuple(groups)
        self._driver = driver
        self._forward_start_s = 0.0
        self._backward_start_s: float | None = None
        self._num_awaited_inputs = 0
        self._has_all_inputs = False
        self._has_untracked_forward = False

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward has begun and not ended."""
        return self._backward_start_s is not None

    def wait(self) -> None:
        """Have the parameters present."""
        for group in self.groups:
            group.wait()

    def unshard(self) -> None:
        """Start to gather the parameters."""
        for group in self.groups:
            group.unshard()

    def reshard(self) -> None:
        """Release the parameters where they rest as shards."""
        for group in self.groups:
            group.reshard()

    def before_forward(self) -> None:
        """Have the parameters present, and the next unit's on their way."""
        self.wait()
        self._driver.on_forward(self)
        self._forward_start_s = self._driver.timeline.now()

    def after_forward(self, outputs: Sequence[Tensor], backward_follows: bool | None) -> None:
        """Release what the backward does not follow on at once."""
        self._driver.timeline.add(Kind.FORWARD, self.name, self._forward_start_s)
        for group in self.groups:
            if group.params.is_viewed_by(outputs):
                self._driver.keep_until_backward(group)
        self._driver.on_forward_end(self, backward_follows)

    def expect_input_gradients(self, are_tracked: bool) -> None:
        """The backward is not over before the inputs of this forward have their gradients, if that can be told."""
        self._num_awaited_inputs += are_tracked
        self._has_untracked_forward |= not are_tracked

    def before_backward(self) -> None:
        """Have the parameters present, and the previous unit's on their way."""
        self.wait()
        if self._backward_start_s is None:
            self._backward_start_s = self._driver.timeline.now()
            self._driver.on_backward(self)

    def after_input_gradients(self) -> None:
        """The inputs of one forward have their gradients."""
        self._num_awaited_inputs -= 1
        self._has_all_inputs = self._num_awaited_inputs == 0 and not self._has_untracked_forward
        if self._has_all_inputs:
            self._driver.on_inputs_done(self)
        self.close_if_done()

    def close_if_done(self) -> None:
        """End the backward once nothing can need the data.

        That is when the inputs of all forwards have their gradients, since autograd runs the newest nodes first; where
        inputs cannot be watched, when every parameter has its gradient and none of them is frozen.
        """
        is_complete = all(group.grads is not None and group.grads.is_complete for group in self.groups)
        if self.name != ROOT and (self._has_all_inputs or (is_complete and self._num_awaited_inputs <= 0)):
            self.close_backward()

    def close_backward(self) -> None:
        """Release the parameters and record the backward, if one has begun."""
        if self._backward_start_s is not None:
            self._driver.timeline.add(Kind.BACKWARD, self.name, self._backward_start_s)
            self._backward_start_s = None
        self._num_awaited_inputs = 0
        self._has_all_inputs = self._has_untracked_forward = False
        self.reshard()
        self._driver.on_backward_end(self)


class ZeroDriver:
    """Drives a model's groups through forwards and backwards.

    Args:
        model: its parameters move into the groups' buffers.
        layout: of the model.
        resources: shared by the groups.
    """

    def __init__(self, model: nn.Module, layout: Layout, resources: Resources) -> None:
        self._release_claim = claim(model)
        self.timeline = resources.timeline
        self.will_reduce = True
        self._pool = resources.pool
        self._place_of: dict[int, tuple[ParamGroup, str]] = {}
        self._in_backward = False
        self._is_forwarding = False
        parameters = dict(model.named_parameters(remove_duplicate=False))
        this = weakref.ref(self)
        released = released_type(lambda parameter: _use_released(this(), parameter))
        self.groups = []
        for spec in layout.groups:
            members = [parameters[place.name] for place in spec.params]
            group = ParamGroup(spec, layout, members, resources, released)
            self.groups.append(group)
            self._place_of.update(
                {id(each): (group, place.name) for each, place in zip(members, spec.params, strict=True)}
            )
        self.units = [
            Unit(name, [group for group in self.groups if group.spec.unit == name], self)
            for name in (ROOT, *layout.units)
        ]
        # Of the blocks; learnt anew in each forward.
        self._order: list[Unit] = self.units[1:]
        self._seen: list[Unit] = []
        self._reduce_order = [
            group for unit in reversed(self.units) for group in unit.groups if group.grads is not None
        ]
        self._num_reduced = 0
        self._done: set[int] = set()
        self._ahead: Sequence[Unit] = ()
        self._late: list[ParamGroup] = []
        self._unannounced: list[ParamGroup] = []
        self._holds_unreduced = False
        self._is_held = False
        self._reducing: ParamGroup | None = None
        self._handles = []
        for unit in self.units:
            module = model if unit.name == ROOT else model.get_submodule(unit.name)
            self._handles += hook_unit(module, unit)
        for group in self.groups:
            for index, parameter in enumerate(group.params.parameters if group.grads is not None else ()):
                self._handles.append(hook_gradient(parameter, self._on_gradient(group, index)))

    def on_forward(self, unit: Unit) -> None:
        """A unit's forward begins."""
        if in_backward():
            return
        if unit is self.units[0]:
            self._is_forwarding = True
            self.timeline.is_recording = torch.is_grad_enabled()
            self._in_backward = False  # an exception may have left it set
            self._seen = []
            self._ahead = self._order[:1]
        else:
            self._seen.append(unit)
            self._ahead = self._after(unit, self._order)
        self._unshard_ahead()

    def on_forward_end(self, unit: Unit, backward_follows: bool | None) -> None:
        """A unit's forward has ended; release what is not needed before its backward."""
        if unit is self.units[0]:
            self._is_forwarding = False
            self._order = self._seen or self._order
            if backward_follows is False:
                self.reshard_all()
            else:
                for unused in set(self.units[1:]).difference(self._seen):
                    unused.reshard()
            return
        if backward_follows is None:
            for group in unit.groups:
                self.keep_until_backward(group)
        is_last = bool(self._order) and unit is self._order[-1]
        if backward_follows is False or (backward_follows and not is_last):
            unit.reshard()

    def on_backward(self, unit: Unit) -> None:
        """A unit's backward begins; the previous unit is unsharded ahead once the next one has been released."""
        self._begin_backward()
        is_root = unit is self.units[0]
        is_alone = not any(other.is_in_backward for other in self.units[1:] if other is not unit)
        if is_root and not is_alone:
            return  # the model's output is a block's, whose backward has begun already
        self._ahead = self._order[-1:] if is_root else self._after(unit, self._order[::-1])
        if is_alone:
            self._unshard_ahead()

    def on_inputs_done(self, unit: Unit) -> None:
        """Every node of a unit's backward has run: parameters without a gradient have none on this rank."""
        if unit is not self.units[0]:
            self._done.update(id(group) for group in unit.groups)
            self._reduce_done()

    def on_backward_end(self, unit: Unit) -> None:
        """A unit's backward has ended."""
        if self._in_backward:
            self._unshard_ahead()

    def finish(self) -> None:
        """Reduce what backwards have left unreduced, so that a step may follow."""
        if self._holds_unreduced:
            self._num_reduced = 0
            self._reduce_all()

    def prepare_backward(self) -> None:
        """Have present what no hook asks for in the backward: an evaluation in between may have released it."""
        self.units[0].wait()
        for group in self._unannounced:
            group.wait()
            group.is_pinned = True

    def keep_until_backward(self, group: ParamGroup) -> None:
        """Keep a group whose use no hook ends until the end of the backward, or of an evaluation's forward."""
        group.is_pinned = True
        if group not in self._unannounced:
            self._unannounced.append(group)

    def abandon_forward(self) -> None:
        """Leave a forward that did not reach its end."""
        self._is_forwarding = False

    def abandon(self) -> None:
        """Leave a backward that did not reach its end."""
        self._in_backward = self._is_forwarding = self._holds_unreduced = False
        self._late.clear()
        self._finish_reduce()
        self._end_units()
        self._pool.trim()

    def unshard_all(self) -> None:
        """Have every parameter present, and keep it so until `reshard_all`."""
        for group in self.groups:
            group.unshard()
        for group in self.groups:
            group.wait()
            group.is_pinned = True
        self._is_held = True

    def reshard_all(self, release_held: bool = False) -> None:
        """Release every parameter that rests as a shard, but not inside `unshard_all` unless `release_held`."""
        self._is_held = self._is_held and not release_held
        for group in self.groups:
            group.is_pinned = self._is_held
            group.reshard()

    def close(self) -> None:
        """Remove the hooks and give the parameters whole tensors of their own."""
        for handle in self._handles:
            handle.remove()
        for group in self.groups:
            group.params.release()
        self.groups.clear()
        self._release_claim()

    def _unshard_ahead(self) -> None:
        for unit in self._ahead:
            unit.unshard()
        self._ahead = ()

    def _after(self, unit: Unit, order: Sequence[Unit]) -> Sequence[Unit]:
        if unit not in order:
            return ()
        position = order.index(unit)
        return order[position + 1 : position + 2]

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._num_reduced = 0
            self._done.clear()
            on_backward_end(self._end_backward)

    def _on_gradient(self, group: ParamGroup, index: int) -> Callable[[Tensor], None]:
        # C++ holds a parameter's hooks: strong references from there back to it could never be collected.
        this, unit_of_group = weakref.ref(self), weakref.ref(self._unit_of(group))
        its_group = weakref.ref(group)

        def add(gradient: Tensor) -> None:
            driver, unit, group = this(), unit_of_group(), its_group()
            if driver is not None and unit is not None and group is not None:
                driver.on_gradient(unit, group, index, gradient)

        return add

    def on_gradient(self, unit: Unit, group: ParamGroup, index: int, gradient: Tensor) -> None:
        """A parameter has its gradient."""
        self._begin_backward()
        if group in self._reduce_order[: self._num_reduced] and group not in self._late:
            # Used outside its unit, before it: what comes now is reduced at the end, once more.
            self._late.append(group)
        if group.add_gradient(index, gradient, self.will_reduce):
            unit.close_if_done()
            self._done.add(id(group))
            self._reduce_done()

    def _unit_of(self, group: ParamGroup) -> Unit:
        return next(unit for unit in self.units if group in unit.groups)

    def _reduce_done(self) -> None:
        if not self.will_reduce:
            return
        position = self._num_reduced
        while position < len(self._reduce_order) and id(self._reduce_order[position]) in self._done:
            position += 1
        self._reduce_until(position)

    def _reduce_until(self, position: int) -> None:
        """Start the reductions up to `position` in the fixed order, one under way at a time."""
        for group in self._reduce_order[self._num_reduced : position]:
            self._finish_reduce()
            group.reduce()
            self._reducing = group
        self._num_reduced = max(self._num_reduced, position)

    def _finish_reduce(self) -> None:
        if self._reducing is not None:
            self._reducing.finish_reduce()
            self._reducing = None

    def _end_backward(self) -> None:
        self._in_backward = False
        self._holds_unreduced = True
        if self.will_reduce:
            self._reduce_all()
        self._end_units()

    def _end_units(self) -> None:
        for unit in self.units:
            unit.close_backward()
        for group in self._reduce_order:
            group.end_backward()
        self.reshard_all()

    def _reduce_all(self) -> None:
        self._reduce_until(len(self._reduce_order))
        for group in self._reduce_order:
            if group in self._late:
                self._finish_reduce()
                group.reduce()
                self._reducing = group
        self._late.clear()
        self._finish_reduce()
        self._holds_unreduced = False
        self._pool.trim()

    def on_released_use(self, parameter: nn.Parameter) -> None:
        """A parameter whose data is not present is used: have it present, or say how to."""
        group, name = self._place_of[id(parameter)]
        if group.params.is_unsharding:
            group.wait()
            return
        if not (self._is_forwarding or self._in_backward):
            raise ReleasedParameterError(
                f"parameter {name} is released: under ZeRO-3 it is whole only inside the model's forward; "
                "read it inside `with engine.gathered():`"
            )
        group.wait()
        self.keep_until_backward(group)


def _use_released(driver: ZeroDriver | None, parameter: nn.Parameter) -> None:
    if driver is None:
        raise ReleasedParameterError(
            f"a parameter of shape {tuple(parameter.shape)} is released and its engine is gone; "
            "call engine.close() before the engine is dropped, so that parameters become whole"
        )
    driver.on_released_use(parameter)
