"""Decides when a model's groups unshard, reshard and reduce, from the hooks of its units.

A unit is unsharded before its forward and its backward, and the next one in order is prefetched. The order is
only a hint, taken from the last forward: a wrong guess costs a wait or some memory for a while, never an error.
Reductions start in one fixed order, from the last unit to the root, so that ranks whose models take different paths
still meet.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.config.errors import EngineError
from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import ROOT, GroupSpec
from shardwise.offload.sizing import NUM_PREFETCHED
from shardwise.offload.worker import Task
from shardwise.runtime.module_hooks import claim, hook_gradient, hook_unit
from shardwise.runtime.param_guard import ReleasedParameterError, released_type, watched_type
from shardwise.runtime.torch_private import in_backward, on_backward_end, parameter_class
from shardwise.zero.param_group import ParamGroup, ParamState
from shardwise.zero.prefetch import Names, PrefetchOrder, RecordedOrder, StaticOrder
from shardwise.zero.remote_params import RemoteParams, check_members
from shardwise.zero.resources import ShardingResources
from shardwise.zero.unit import Unit

log = logging.getLogger("shardwise")


class ShardingState:
    """Takes a model's groups through forwards and backwards.

    Args:
        model: the model; its parameters move into the groups' buffers.
        layout: the model's layout.
        resources: what the groups share.
    """

    def __init__(self, model: nn.Module, layout: Layout, resources: ShardingResources) -> None:
        self._release_claim = claim(model)
        self.before_model: Callable[[], Callable[[], None] | None] | None = None
        self.timeline = resources.timeline
        self.will_reduce = self.is_last = True
        self.is_serving = False
        self.is_expecting_gradients = False
        self.has_foreign_gradients = False
        self.num_in_backward = 0
        self.groups: list[ParamGroup] = []
        self._model = model
        self._resources = resources
        self._place_of: dict[int, tuple[ParamGroup, str]] = {}
        self._in_backward = self._is_inner = self._has_gradients = False
        self._is_forwarding = False
        this = weakref.ref(self)
        present = next((parameter_class(parameter) for parameter in model.parameters()), nn.Parameter)
        self._released = released_type(
            lambda parameter: _use_released(this(), parameter), present, lambda: _read_gradient(this())
        )
        self._watched = watched_type(lambda: _read_gradient(this()))
        self._is_watching = self._has_warned = False
        self.units = [Unit(name, self) for name in (ROOT, *layout.held_units)]
        self._unit_of = {unit.name: unit for unit in self.units}
        self.order: PrefetchOrder = (StaticOrder if resources.lockstep else RecordedOrder)(layout.held_units)
        self._reduce_order: list[ParamGroup] = []
        self._reduce_position: dict[ParamGroup, int] = {}
        self._num_reduced = 0
        self._done: set[int] = set()
        self._late: list[ParamGroup] = []
        self._unannounced: list[ParamGroup] = []
        self._holds_unreduced = False
        self._is_held = False
        self.kept: set[ParamGroup] = set()  # whole until a schedule reshards them
        self._final: set[ParamGroup] = set()  # whose gradients a schedule has reduced for the last time before the step
        self._reducing: deque[ParamGroup] = deque()
        self._ungathered: deque[ParamGroup] = deque()  # after an update; the same order on all ranks
        self.on_reduced: Callable[[ParamGroup], None] | None = None
        self.ever_late: set[ParamGroup] = set()
        self._handles: list[RemovableHandle] = []
        self._gradient_handles: dict[ParamGroup, list[RemovableHandle]] = {}
        try:
            for unit in self.units:
                self.regroup(unit.name, layout)
        except Exception:
            self._release_claim()
            raise
        held_stages = layout.pipeline.held if layout.pipeline is not None else ()
        self.absent = RemoteParams(model, layout, sorted(held_stages))
        for unit in self.units:
            module = model if unit.name == ROOT else model.get_submodule(unit.name)
            self._handles += hook_unit(module, unit)

    def regroup(self, unit_name: str, layout: Layout) -> None:
        """Replace a unit's groups by those of `layout`; groups that it had and that differ give their parameters back.

        Args:
            unit_name: the unit's name.
            layout: the new layout.
        """
        unit = self._unit_of[unit_name]
        specs = [spec for spec in layout.groups if spec.unit == unit_name]
        groups = {group.spec: group for group in unit.groups}
        try:
            for spec, group in list(groups.items()):
                if spec not in specs:
                    for handle in self._gradient_handles.pop(group, ()):
                        handle.remove()
                    group.release()
                    del groups[spec]
                    self._unannounced = [other for other in self._unannounced if other is not group]
                    self.ever_late.discard(group)
            for spec in specs:
                if spec not in groups:
                    groups[spec] = self._make_group(spec, layout)
        finally:  # where this fails half way, `close` gives back the groups that there are, and no others
            unit.groups = tuple(groups[spec] for spec in dict.fromkeys([*specs, *groups]) if spec in groups)
            self.groups = [group for each in self.units for group in each.groups]
            self._reduce_order = [
                group for each in reversed(self.units) for group in each.groups if group.grads is not None
            ]
            self._reduce_position = {group: position for position, group in enumerate(self._reduce_order)}

    def _make_group(self, spec: GroupSpec, layout: Layout) -> ParamGroup:
        members = [self._model.get_parameter(place.name) for place in spec.params]
        group = ParamGroup(spec, layout, members, self._resources, self._released)
        self._place_of.update({id(each): (group, place.name) for each, place in zip(members, spec.params, strict=True)})
        if group.grads is not None:
            self._gradient_handles[group] = [
                hook_gradient(parameter, self._on_gradient(group, index)) for index, parameter in enumerate(members)
            ]
        return group

    def check_model(self) -> None:
        """Raise if the model's parameters are not those it had, or have been moved or written.

        Raises:
            ConfigError: names the parameter.
        """
        known = {key: name for key, (_, name) in self._place_of.items()} | self.absent.names
        check_members(self._model, known)
        for group in self.groups:
            group.params.check_unchanged()

    def is_as_trainable(self, may_pause: bool) -> bool:
        """Say whether groups agree with `requires_grad`; with `may_pause` trained groups may have frozen parameters."""
        own = ((group.spec, trains) for group in self.groups for trains in group.params.trains())
        return all(
            trains == spec.trainable or (may_pause and spec.trainable) for spec, trains in (*own, *self.absent.trains())
        )

    def watch_gradients(self, is_on: bool = True) -> None:
        """Watch reads of a parameter's `grad` between a backward and its step, to warn that the engine has it; or stop.

        Parameters that are stored as shards have the guarding class in any case.
        """
        if is_on != self._is_watching:
            self._is_watching = is_on
            for group in self._reduce_order:
                if not group.params.is_released_between_uses and group.params.state is ParamState.UNSHARDED:
                    group.params.unguard(self._watched if is_on else None)

    def on_gradient_read(self) -> None:
        """Warn once that `grad` of a parameter was read while the engine has the gradients."""
        if self._is_watching and not self._has_warned:
            self._has_warned = True
            log.warning(
                "a parameter's grad is None between engine.backward and engine.step: the engine has the gradients, "
                "sharded, and clips them itself; set optimizer.clip_norm, or read them by engine.read(name, 'grad')"
            )

    def enter_forward(self, unit: Unit) -> None:
        """Prepare for a unit's forward; gather and release the units that it skips."""
        if in_backward():
            return
        if unit is self.units[0]:
            self.watch_gradients(False)
            self._is_forwarding = True
            self.timeline.is_recording = torch.is_grad_enabled()
            self._in_backward = False  # an exception may have left it set
            before_model = self.before_model() if self.before_model is not None else None
            if before_model is not None:
                before_model()
            self.order.start_forward()
        else:
            self._pass(self.order.enter_forward(unit.name))

    def on_forward(self) -> None:
        """Start to gather the next unit; this unit's parameters are present."""
        if not in_backward():
            self._prefetch_units()

    def on_forward_end(self, unit: Unit, backward_follows: bool | None) -> None:
        """Release after a unit's forward what is not needed before its backward.

        Args:
            unit: the unit.
            backward_follows: True if hooks will report one, False if none can follow, None if one may follow unseen.
        """
        if unit is self.units[0]:
            self._gather_updates()  # before the backward's reductions: the same order of collectives on all ranks
            for name in self.order.unused():
                self._unit_of[name].reshard()
            self._pass(self.order.end_forward())
            self._is_forwarding = False
            if backward_follows is False:
                self.reshard_all()
            return
        if backward_follows is None:
            for group in unit.groups:
                self.pin_until_backward(group)
        if backward_follows is False or (backward_follows and not self.order.is_last(unit.name)):
            unit.reshard()

    def enter_backward(self, unit: Unit) -> None:
        """Prepare for a unit's backward; gather and release the units that it skips."""
        self._begin_backward()
        if unit is not self.units[0]:
            self._pass(self.order.enter_backward(unit.name))

    def on_backward(self, unit: Unit) -> None:
        """Start to gather the previous unit, once the next one has been released."""
        self._reduce_after(unit)
        # The root's backward may begin after that of a block whose output is the model's.
        if self.num_in_backward == 0:
            self._prefetch_units()
        self.num_in_backward += unit is not self.units[0]

    def on_inputs_done(self, unit: Unit) -> None:
        """Note that every node of a unit's backward has run: parameters without a gradient have none on this rank."""
        if unit is not self.units[0]:
            self._done.update(id(group) for group in unit.groups)
            self._reduce_done()

    def on_backward_end(self, unit: Unit) -> None:
        """Start to gather the previous unit after a unit's backward."""
        if self._in_backward:
            self._prefetch_units()

    def finish(self) -> None:
        """Reduce what backwards have left unreduced, so that a step may follow."""
        self.is_last = True
        if self._holds_unreduced:
            self._num_reduced = 0
            self._reduce_all()
        self._finish_reduce()  # what a schedule has started: it goes on over the replicas by itself
        for group in self._reduce_order:
            if group.awaits_replicas:
                group.reduce_replicas()
                self._track_reduce(group)
        self._finish_reduce()

    def reduce(self, groups: Collection[ParamGroup], is_last: bool) -> None:
        """Start to reduce groups at a schedule's request; `is_last` if they get no more gradients before the step."""
        self.is_last = is_last
        for group in self._reduce_order:
            if group in groups:
                self._reduce(group)
                if is_last:
                    self._final.add(group)
        self._holds_unreduced = any(group not in self._final for group in self._reduce_order)

    def refresh(self, stepping: Mapping[ParamGroup, Task]) -> None:
        """Make every group take over its update.

        Args:
            stepping: the updates that are under way on the host.
        """
        for group in self.groups:
            if group in stepping:
                self._ungathered.append(group)
                group.refresh_in_background(stepping[group], partial(self._gather_updates, group))
            elif group.grads is not None:
                group.refresh()

    def _gather_updates(self, last: ParamGroup | None = None) -> None:
        """Gather what updates on the host have changed, in the order of all ranks, up to `last` or all."""
        while self._ungathered and (last is None or last in self._ungathered):
            self._ungathered[0].gather_update()
            self._ungathered.popleft()

    def drain(self) -> None:
        """Return once no update is under way, and every rank has it."""
        self._gather_updates()
        for group in self.groups:
            group.await_step()

    def prepare_backward(self) -> None:
        """Make available what no hook asks for in the backward: an evaluation in between may have released it."""
        self.is_expecting_gradients = True
        self.units[0].wait()
        for group in self._unannounced:
            group.wait()
            group.is_pinned = True

    def pin_until_backward(self, group: ParamGroup) -> None:
        """Keep a group whose use no hook ends until the end of the backward, or of an evaluation's forward."""
        group.is_pinned = True
        if group not in self._unannounced:
            self._unannounced.append(group)

    def end_step(self) -> None:
        """Reset after a step: no graph outlives it, and its gradients are no longer final."""
        self._unannounced.clear()
        self._final.clear()
        self.watch_gradients(False)

    @property
    def is_held(self) -> bool:
        """Say whether all parameters are kept whole, as inside `gathered`."""
        return self._is_held

    def pin_all_until_backward(self) -> None:
        """Make all parameters present in the next backward: a graph was built while all of them were plain."""
        for group in self.groups:
            if group.params.is_released_between_uses and group not in self._unannounced:
                self._unannounced.append(group)

    def abandon_forward(self) -> None:
        """Leave a forward that did not reach its end."""
        self._is_forwarding = False

    def abandon(self) -> None:
        """Leave a backward that did not reach its end."""
        self.on_reduced = None  # what is left of it shall not be stepped
        self._in_backward = self._is_forwarding = self._holds_unreduced = False
        self.is_expecting_gradients = self.has_foreign_gradients = False
        self._late.clear()
        self._final.clear()
        self.kept.clear()
        self._finish_reduce()
        self._end_units()
        self.reshard_all()
        self._resources.pool.trim()

    def unshard_all(self) -> None:
        """Make every parameter present, and keep it so until `reshard_all`."""
        for group in self.groups:
            group.unshard()
        for group in self.groups:
            group.pin()
        self._is_held = True

    def reshard_all(self, release_held: bool = False) -> None:
        """Release every parameter that is stored as a shard, but not inside `unshard_all` unless `release_held`."""
        self._is_held = self._is_held and not release_held
        for group in self.groups:
            group.is_pinned = self._is_held or group in self.kept
            group.reshard()

    def close(self, keep_values: bool = True) -> None:
        """Remove the hooks and give the parameters whole tensors of their own; a pass may have stopped midway.

        Args:
            keep_values: False leaves the parameters without values, on meta.
        """
        self.abandon()
        for handle in self._handles:
            handle.remove()
        for handles in self._gradient_handles.values():
            for handle in handles:
                handle.remove()
        for unit in self.units:
            for group in unit.groups:
                group.release(keep_values)
            unit.groups = ()
        self.absent.close()
        self.groups.clear()
        self._reduce_order.clear()
        self._reduce_position.clear()
        self._gradient_handles.clear()
        self._place_of.clear()
        self._unannounced.clear()
        self._ungathered.clear()
        self.ever_late.clear()
        self._release_claim()

    def _prefetch_units(self) -> None:
        for name in self.order.next_units():
            self._unit_of[name].start_unshard()
        for name in self.order.upcoming(NUM_PREFETCHED):
            self._unit_of[name].prefetch()

    def _pass(self, names: Names) -> None:
        """Take part in the gathers of blocks that run on other ranks only."""
        for name in names:
            unit = self._unit_of[name]
            unit.wait()
            if self._in_backward:
                self._reduce_after(unit)
            if self._in_backward or not self.order.is_last(name):
                unit.reshard()

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            # One that a forward or a loss runs, or through which another is to run: not the one that gives gradients.
            self._is_inner = self._is_forwarding or self.is_serving or torch.is_grad_enabled()
            # What is frozen around another engine's step has no gradients to reduce.
            self._has_gradients = self.is_expecting_gradients or any(
                any(group.params.trains()) for group in self._reduce_order
            )
            self._num_reduced = 0
            self._done.clear()
            self.order.start_backward()
            on_backward_end(self._end_backward)

    def _on_gradient(self, group: ParamGroup, index: int) -> Callable[[Tensor], None]:
        # C++ holds a parameter's hooks: strong references from there back to it could never be collected.
        this, unit_of_group = weakref.ref(self), weakref.ref(self._unit_of[group.spec.unit])
        its_group = weakref.ref(group)

        def add(gradient: Tensor) -> None:
            sharding, unit, group = this(), unit_of_group(), its_group()
            if sharding is not None and unit is not None and group is not None:
                sharding.on_gradient(unit, group, index, gradient)

        return add

    def on_gradient(self, unit: Unit, group: ParamGroup, index: int, gradient: Tensor) -> None:
        """Add a parameter's gradient to its group, and reduce what is complete.

        Args:
            unit: the parameter's unit.
            group: the parameter's group.
            index: the parameter's index in the group.
            gradient: of the parameter's shape, any floating dtype.
        """
        self.has_foreign_gradients |= not self.is_expecting_gradients
        self._begin_backward()
        if self._reduce_position[group] < self._num_reduced and group not in self._late:
            # Used outside its unit, before it: what comes now is reduced at the end, once more.
            self._late.append(group)
            self.ever_late.add(group)
            if group.is_stepped:
                raise EngineError(
                    "gradient-after-step",
                    f"a parameter of {group.spec.name} got a gradient after its step in this backward, because it is "
                    "used outside its block; set tiers.step_in_backward=false",
                )
        if group.add_gradient(index, gradient, self.will_reduce):
            unit.close_if_done()
            self._done.add(id(group))
            self._reduce_done()

    @property
    def _reduces(self) -> bool:
        """Say whether the backward that has begun reduces gradients."""
        return self.will_reduce and self._has_gradients and not self._is_inner

    def _reduce_after(self, unit: Unit) -> None:
        """Reduce, in lockstep, what comes after a unit when its backward begins, so that all ranks use one order.

        Without lockstep each reduction starts as soon as its gradients are there.
        """
        if self._resources.lockstep and self._reduces and unit is not self.units[0]:
            self._reduce_until(min((self._reduce_position[each] for each in unit.groups if each.grads), default=0))

    def _reduce_done(self) -> None:
        if not self._reduces or self._resources.lockstep:
            return
        position = self._num_reduced
        while position < len(self._reduce_order) and id(self._reduce_order[position]) in self._done:
            position += 1
        self._reduce_until(position)

    def _reduce_until(self, position: int) -> None:
        """Start the reductions up to `position` in the fixed order."""
        for group in self._reduce_order[self._num_reduced : position]:
            if group not in self._final:
                self._reduce(group)
        self._num_reduced = max(self._num_reduced, position)

    def _agree_on_late(self) -> list[ParamGroup]:
        """Return the groups for which any rank has gradients left, in the fixed order."""
        flags = [float(group in self._late) for group in self._reduce_order]
        ranks = self._resources.comms.model
        agreed = ranks.max_scalars(torch.zeros(0, dtype=torch.float64, device=ranks.device), "late gradients", flags)
        return [group for group, flag in zip(self._reduce_order, agreed, strict=True) if flag]

    def _reduce(self, group: ParamGroup) -> None:
        group.reduce(self.is_last)
        self._track_reduce(group)

    def _track_reduce(self, group: ParamGroup) -> None:
        """Keep at most two reductions under way: one may wait for its second collective while the next one starts."""
        while len(self._reducing) > 1:
            self._end_reduce()
        for other in self._reducing:
            other.advance_reduce()
        self._reducing.append(group)

    def _finish_reduce(self) -> None:
        while self._reducing:
            self._end_reduce()

    def _end_reduce(self) -> None:
        group = self._reducing.popleft()
        group.finish_reduce()
        if self.on_reduced is not None:
            self.on_reduced(group)

    def _end_backward(self) -> None:
        self._pass(self.order.end_backward())
        self._in_backward = False
        self._holds_unreduced = any(group not in self._final for group in self._reduce_order)
        if self._reduces:
            self._reduce_all()
        self._end_units()
        if not self._is_inner:
            self.reshard_all()

    def _end_units(self) -> None:
        for unit in self.units:
            unit.close_backward()
        self.num_in_backward = 0
        for group in self._reduce_order:
            group.end_backward()

    def _reduce_all(self) -> None:
        self._reduce_until(len(self._reduce_order))
        late = self._agree_on_late() if self._resources.lockstep else self._late
        for group in self._reduce_order:
            if group in late:
                self._reduce(group)
        self._late.clear()
        self._finish_reduce()
        self._holds_unreduced = False
        self._resources.pool.trim()

    def on_released_use(self, parameter: nn.Parameter) -> None:
        """Gather a parameter that is used while its data is not present, or raise an error that says how to get it."""
        group, name = self._place_of[id(parameter)]
        if not (self._is_forwarding or self.is_serving or self._in_backward):
            if not group.params.is_released:
                group.wait()
                if torch.is_grad_enabled():
                    self.pin_until_backward(group)
                return
            raise ReleasedParameterError(
                "parameter-released",
                f"parameter {name} is released: under ZeRO-3 it is whole only inside the model's forward; "
                "read it inside `with engine.gathered():`",
            )
        group.wait()
        self.pin_until_backward(group)
        group.unguard()


def _read_gradient(sharding: ShardingState | None) -> None:
    if sharding is not None:
        sharding.on_gradient_read()


def _use_released(sharding: ShardingState | None, parameter: nn.Parameter) -> None:
    if sharding is None:
        raise ReleasedParameterError(
            "parameter-without-engine",
            f"a parameter of shape {tuple(parameter.shape)} is released and its engine is gone; "
            "call engine.close() before the engine is dropped, so that parameters become whole",
        )
    sharding.on_released_use(parameter)
