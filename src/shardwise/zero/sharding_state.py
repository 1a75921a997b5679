"""Decides when a model's groups unshard, reshard and reduce, from the hooks of its units.

A unit is unsharded before its forward and its backward, and the next one in order is prefetched. The order is
only a hint, taken from the last forward: a wrong guess costs a wait or some memory for a while, never an error.
Reductions start in one fixed order (`shardwise.zero.order`), so that ranks whose models take different paths
still meet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import ROOT, GroupSpec
from shardwise.offload.storage import NUM_PREFETCHED
from shardwise.offload.worker import Task
from shardwise.runtime.module_hooks import claim, deferred, hook_unit, read_with
from shardwise.runtime.torch_private import on_backward_end, parameter_ids
from shardwise.schedule.actions import ActionKind
from shardwise.zero.grad_buckets import GradState
from shardwise.zero.order import (
    LockstepError,
    Names,
    PrefetchOrder,
    RecordedOrder,
    ReductionOrder,
    StaticOrder,
)
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.resources import ShardingResources
from shardwise.zero.unit import (
    LEGAL,
    BackwardPass,
    GradientWatch,
    HostUpdates,
    LentGroups,
    Phase,
    RemoteParams,
    ShownParts,
    Unit,
    check_members,
)


class ShardingState:
    """Takes a model's groups through forwards and backwards.

    Args:
        model: the model; its parameters move into the groups' buffers.

    Attributes:
        phase: what the engine does with the model; `LEGAL` has the transitions.
        is_serving: the engine runs the model, or reads the loss of its output.
        has_foreign_gradients: a backward that the engine did not start has given gradients.
        backward: the backward that is under way, or was the last one.
        kept: groups that stay whole until a schedule reshards them.
        held: groups that stay whole inside `gathered`.
        reductions: the order in which groups are reduced, and how far this backward has come in it.
        watch: of what other code does to gradients.
    """

    def __init__(self, model: nn.Module, layout: Layout, resources: ShardingResources) -> None:
        self._undo = [claim(model)]  # hooks too
        self.phase = Phase.IDLE
        self.is_serving = self.has_foreign_gradients = False
        self.backward = BackwardPass()
        self.groups: list[ParamGroup] = []
        self.units = [Unit(name) for name in (ROOT, *layout.held_units)]
        may_differ = layout.stage.unshard_for_use and layout.pipeline is None and resources.comms.shards.world_size > 1
        in_lockstep = resources.lockstep is True or (resources.lockstep == "auto" and may_differ)
        self.order: PrefetchOrder = (StaticOrder if in_lockstep else RecordedOrder)(layout.held_units)
        self.kept: set[ParamGroup] = set()
        self.held: set[ParamGroup] = set()
        self.reductions: ReductionOrder[ParamGroup] = ReductionOrder()
        self._model = model
        self._resources = resources
        resources.timeline.is_recording = False  # until the model runs
        self._place_of: dict[int, tuple[ParamGroup, int]] = {}
        self._unit_of = {unit.name: unit for unit in self.units}
        self._updates = HostUpdates()
        self._lent = LentGroups()
        self.watch = GradientWatch(model, weakref.ref(self), resources.events.zero_grad)
        self.parts = ShownParts()
        try:
            for unit in self.units:
                self.regroup(unit.name, layout)
        except Exception:
            self._undo[0]()
            raise
        held_stages = layout.pipeline.held if layout.pipeline is not None else ()
        self.absent = RemoteParams(model, layout, sorted(held_stages))
        blocks = {unit: model.get_submodule(unit.name) for unit in self.units if not unit.is_root}
        handles = hook_unit(model, self, self.units[0], inner=map(model.get_submodule, layout.units))
        # [Note: Blocks without hooks]
        # A pipeline's schedule says what is reduced and recorded. Where parameters are whole at all times, too, there
        # is nothing to do around a block, whose hooks would cost more than all that the schedule does.
        is_followed = layout.pipeline is None or layout.tensor is not None
        for unit, module in blocks.items():
            if is_followed or not all(group.is_always_whole for group in unit.groups):
                handles += hook_unit(module, self, unit)
        self._undo += [handle.remove for handle in handles]

    def regroup(self, unit_name: str, layout: Layout) -> None:
        """Replace a unit's groups by those of `layout`; those that differ give their parameters back."""
        unit = self._unit_of[unit_name]
        specs = [spec for spec in layout.groups if spec.unit == unit_name]
        groups = {group.spec: group for group in unit.groups}
        try:
            for spec, group in list(groups.items()):
                if spec not in specs:
                    for handle in group.gradient_handles:
                        handle.remove()
                    group.release()
                    del groups[spec]
                    self._lent.forget(group)
            for spec in specs:
                if spec not in groups:
                    groups[spec] = self._make_group(spec, layout)
        finally:  # where this fails half way, `close` gives back the groups that there are, and no others
            unit.groups = tuple(groups[spec] for spec in dict.fromkeys([*specs, *groups]) if spec in groups)
            self.groups = [group for unit in self.units for group in unit.groups]
            self.reductions.set_groups(
                group for unit in reversed(self.units) for group in unit.groups if group.grads is not None
            )

    def _make_group(self, spec: GroupSpec, layout: Layout) -> ParamGroup:
        members = [self._model.get_parameter(place.name) for place in spec.params]
        group = ParamGroup(spec, layout, members, self._resources.for_group(spec), self.watch.classes)
        self._place_of.update({id(parameter): (group, index) for index, parameter in enumerate(members)})
        if group.grads is not None:
            group.hook_gradients(weakref.ref(self))
        return group

    def check_model(self) -> None:
        """Raise if the model's parameters are not those it had, or have been moved or written.

        Raises:
            ConfigError: names the parameter.
        """
        if parameter_ids(self._model) != self._place_of.keys() | self.absent.names.keys():
            known = {key: group.spec.params[index].name for key, (group, index) in self._place_of.items()}
            check_members(self._model, known | self.absent.names)
        for group in self.groups:
            group.writes.check()
            group.follow_writes()

    def is_as_trainable(self, may_pause: bool) -> bool:
        """Say whether groups agree with `requires_grad`; with `may_pause` trained groups may have frozen parameters."""
        own = ((group.spec, trains) for group in self.groups for trains in group.trains())
        return all(
            trains == spec.trainable or (may_pause and spec.trainable) for spec, trains in (*own, *self.absent.trains())
        )

    def watch_gradients(self, is_on: bool = True) -> None:
        """Watch reads of a parameter's `grad` from a backward to its step, to warn that the engine has it; or stop."""
        self.watch.turn(is_on, self.reductions.groups)

    def pre_forward(self, unit: Unit, is_recomputed: bool) -> None:
        """Make a unit's parameters available, and start to gather the next unit's."""
        if not is_recomputed:
            self._enter_forward(unit)
        for group in unit.used_groups:
            group.unshard()  # where no prefetch has started that
            group.wait()
            if not is_recomputed and group not in self.held:
                self._lent.claim(group)
            group.unguard()
        self.parts.enter(unit)
        if not is_recomputed:
            self._prefetch_units()  # before the unit's own work is enqueued: see [Note: Gathers on a side stream]
        unit.forward_start_s = self._resources.timeline.now()

    def _enter_forward(self, unit: Unit) -> None:
        if not unit.is_root:
            self._enter_block(unit, self.order.enter_forward)
            return
        self.watch.pause(self.reductions.groups)
        if torch.is_grad_enabled() and any(unit.awaits_backward for unit in self.units):
            self._leave_lockstep()  # in a backward through two forwards, blocks are reached again
        self._enter(Phase.FORWARD)
        self._resources.timeline.is_recording = torch.is_grad_enabled()
        self._resources.events.before_model()
        self.parts.show(self.groups)
        self.order.start_forward()

    def post_forward(self, unit: Unit, outputs: Sequence[Tensor], backward_follows: bool | None) -> None:
        """Release after a unit's forward what is not needed before its backward.

        Args:
            backward_follows: True if hooks will report one, False if none can follow, None if one may follow unseen.
        """
        self._resources.timeline.add(ActionKind.FORWARD, unit.name, unit.forward_start_s)
        if backward_follows is False and (waiting := deferred(outputs)):
            # Within an engine's call they are left to the loss; otherwise they are computed while parameters are there.
            backward_follows = None if self.is_serving else False
            for output in () if self.is_serving else waiting:
                output.compute(for_good=True)
        read = read_with(outputs)
        for group in unit.groups:
            if group.is_viewed_by(read):
                self._lent.keep(group)
                group.share()
            if not group.is_pinned or group in self.held:
                group.guard()
        self.parts.leave(unit)
        if unit.is_root:
            self._end_forward(backward_follows)
            return
        if backward_follows is None:
            for group in unit.groups:
                self._lent.keep(group)
        # The backward begins with the last unit, so to free that would only gather it again. If another one was the
        # last, this one stays whole until its backward.
        elif not backward_follows or not self.order.is_last(unit.name):
            unit.reshard(keeps_views=not backward_follows)

    def _end_forward(self, backward_follows: bool | None) -> None:
        self.parts.show(self.groups, False)
        self._updates.gather()  # see [Note: Gathers after the step]
        for name in self.order.unused():
            self._unit_of[name].reshard()
        self._pass(self.order.end_forward())
        self.watch.resume(self.reductions.groups)
        self._enter(Phase.IDLE)
        if backward_follows is False:
            self.reshard_all(keeps_views=True)

    def expect_input_gradients(self, unit: Unit, are_tracked: bool) -> None:
        unit.expect_inputs(are_tracked)

    def pre_backward(self, unit: Unit) -> None:
        """Make a unit's parameters available, and start to gather the previous unit's."""
        begins = unit.backward_start_s is None
        if begins:
            if self.phase is not Phase.BACKWARD:
                self._begin_backward()
            if not unit.is_root:
                self._enter_block(unit, self.order.enter_backward)
        if torch.is_grad_enabled():
            for group in unit.used_groups:  # a graph through this backward is being built, and will need the data again
                self._lent.keep(group)
        for group in unit.used_groups:
            group.unshard()
            group.wait()
            group.unguard()  # to a recomputation, which runs inside the module's own hooks
        if not begins:
            return
        unit.backward_start_s = self._resources.timeline.now()
        self._reduce_before(unit)
        # The root's backward may begin after that of a block whose output is the model's.
        if self.backward.count_units(not unit.is_root) == 0:
            self._prefetch_units()

    def on_input_gradients(self, unit: Unit) -> None:
        """Note that the inputs of one forward have their gradients."""
        if unit.note_inputs() and not unit.is_root:
            # Every node of its backward has run: parameters without a gradient have none on this rank.
            self.reductions.mark_done(*unit.groups)
            for group in self._ready():
                self._reduce(group)
        if self._is_over(unit):
            self._close_backward(unit)
            if self.phase is Phase.BACKWARD:
                self._prefetch_units()

    def on_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a parameter's gradient to its group, and reduce what is complete.

        Args:
            gradient: of the parameter's shape, any floating dtype.
        """
        group, index = self._place_of[id(parameter)]
        assert group.grads is not None, "the parameter is trained"
        if self.phase is not Phase.BACKWARD:
            self._begin_backward()
        self.has_foreign_gradients |= self.backward.began_in is not Phase.PRE_BACKWARD
        self.reductions.note_gradient(group)
        if group.grads.add(index, gradient, self.backward.will_reduce):
            unit = self._unit_of[group.spec.unit]
            if self._is_over(unit):
                self._close_backward(unit)
                self._prefetch_units()
            self.reductions.mark_done(group)  # see [Note: One order of reductions]
            for ready in self._ready():
                self._reduce(ready)

    def _is_over(self, unit: Unit) -> bool:
        """Say whether nothing can need a unit's parameters in this backward.

        That is when the inputs of all forwards have their gradients, since autograd runs the newest nodes first. Where
        inputs cannot be watched, it is when every parameter has its gradient and none of them is frozen.
        """
        if unit.is_root or unit.has_all_inputs or unit.num_awaited_inputs > 0:
            return unit.has_all_inputs and not unit.is_root
        return all(group.grads is not None and group.grads.arrivals.num_missing == 0 for group in unit.groups)

    def _close_backward(self, unit: Unit) -> None:
        """Release a unit's parameters and record its backward, if one has begun."""
        if (start_s := unit.end_backward()) is not None:
            self._resources.timeline.add(ActionKind.BACKWARD, unit.name, start_s)
            self.backward.count_units(-(not unit.is_root))
        unit.reshard()

    def _enter(self, phase: Phase) -> None:
        if phase not in LEGAL[self.phase]:
            raise RuntimeError(f"the engine cannot go from {self.phase.name} to {phase.name}; end that first")
        self.phase = phase

    def finish(self) -> None:
        """Reduce what backwards have left unreduced, so that a step may follow."""
        self.reductions.expect(is_last=True)
        if self.reductions.has_unreduced:
            self.reductions.start_backward()
            self._reduce_all()
        if self.reductions.running.groups:
            self.reductions.running.finish()  # what a schedule has started: it goes on over the replicas by itself
        for group in self.reductions.groups:
            if group.grads is not None and group.grads.state is GradState.PARTIAL:
                group.begin_reduce()
                group.grads.reduce_replicas()
                self.reductions.running.add(group)
        if self.reductions.running.groups:
            self.reductions.running.finish()

    def reduce(self, groups: Collection[ParamGroup], is_last: bool) -> None:
        """Start to reduce groups at a schedule's request; `is_last` if they get no more gradients before the step."""
        self.reductions.expect(is_last)
        for group in self.reductions.groups:
            if group in groups:
                self._reduce(group)
                if is_last:
                    self.reductions.final.add(group)
        self.reductions.leave(self.reductions.has_open)

    def refresh(self, stepping: Mapping[ParamGroup, Task], at_once: bool) -> None:
        """Make every group take over its update; `stepping` are those under way on the host, `at_once` awaits them."""
        self._enter(Phase.STEPPING)
        for group in self.groups:
            if group in stepping:
                self._updates.start(group, stepping[group])  # see [Note: Gathers after the step]
            elif group.grads is not None:
                group.refresh()
        if at_once:
            self._updates.finish()

    def drain(self) -> None:
        """Return once no update is under way, and every rank has it."""
        self._updates.gather()
        for group in self.groups:
            group.await_step()

    def expect_gradients(self) -> None:
        """Expect gradients of the engine's own backward, until `expect_no_gradients`."""
        self._enter(Phase.PRE_BACKWARD)

    def expect_no_gradients(self) -> None:
        """Note that a backward of the engine is over: gradients from now on are none of its own."""
        if self.phase is Phase.PRE_BACKWARD:
            self._enter(Phase.IDLE)

    def prepare_backward(self, is_last: bool, will_reduce: bool) -> None:
        """Make available what no hook asks for in the backward: an evaluation in between may have released it.

        Args:
            is_last: it is the last before the step.
        """
        self.reductions.expect(is_last)
        self.backward.will_reduce = will_reduce
        self.expect_gradients()
        for group in self.units[0].used_groups:
            group.wait()
        for group in self._lent.unannounced:
            group.wait()
            group.pin()

    def end_step(self) -> None:
        """Reset after a step: no graph outlives it, and its gradients are no longer final."""
        self._enter(Phase.IDLE)
        self._lent.unannounced.clear()
        self.reductions.final.clear()
        self.watch_gradients(False)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve the engine's call of the model, and the reading of its loss, inside the context."""
        self.is_serving = True
        try:
            yield
        except BaseException:
            self._enter(Phase.IDLE)  # of a forward that did not reach its end
            raise
        finally:
            self.is_serving = False
            if not torch.is_grad_enabled() and self.phase is Phase.IDLE:  # not in a hook of a backward, which goes on
                self.reshard_all(keeps_views=True)  # what the loss has read

    def abandon(self) -> None:
        """Leave a pass that did not reach its end."""
        self._enter(Phase.IDLE)
        self.has_foreign_gradients = False
        self.reductions.leave(has_unreduced=False)
        self.reductions.late.clear()
        self.reductions.final.clear()
        self.kept.clear()
        self.reductions.running.finish()
        self._end_units()
        self.reshard_all()
        # Collectives that end give their buffers back to the pool, which then frees them.
        self._resources.comms.drain()
        self._resources.pool.trim()

    def hold(self, groups: Iterable[ParamGroup]) -> list[ParamGroup]:
        """Make groups present, and keep them so while they are in `held`; return those that were not."""
        new = [group for group in groups if group not in self.held]
        for group in new:
            group.unshard()
        for group in new:
            group.show()
            group.pin()
        self.held.update(new)
        return new

    def reshard_all(self, groups: Iterable[ParamGroup] | None = None, keeps_views: bool = False) -> None:
        """Release parameters that are stored as shards, except in `held`; `keeps_views` as for `ParamGroup.reshard`."""
        for group in self.groups if groups is None else groups:
            group.pin(group in self.held or group in self.kept)
            group.reshard(keeps_views)

    def close(self, keep_values: bool = True) -> None:
        """Remove the hooks and give the parameters whole tensors of their own; a pass may have stopped midway.

        Args:
            keep_values: False leaves the parameters without values, on meta.
        """
        self.abandon()
        release_claim, *remove_hooks = self._undo
        for remove in remove_hooks:
            remove()
        for handle in [handle for group in self.groups for handle in group.gradient_handles]:
            handle.remove()
        for unit in self.units:
            for group in unit.groups:
                group.release(keep_values, at_once=False)  # a script may have the optimizer's pieces
            unit.groups = ()
        self.absent.close()
        self.groups.clear()
        self.reductions.set_groups(())
        self._place_of.clear()
        self._lent.unannounced.clear()
        self._updates = HostUpdates()
        release_claim()

    def _prefetch_units(self) -> None:
        for name in self.order.next_units():
            for group in self._unit_of[name].used_groups:
                group.unshard()
        for name in self.order.upcoming(NUM_PREFETCHED):
            for group in self._unit_of[name].groups:
                if group.spec.tiers.params != "device":
                    group.prefetch()

    def _enter_block(self, unit: Unit, enter: Callable[[str], Names]) -> None:
        """Take part in the gathers of the blocks before this one."""
        try:
            self._pass(enter(unit.name))
        except LockstepError:
            if self._resources.lockstep is True:
                raise
            if self.phase in (Phase.FORWARD, Phase.BACKWARD):  # otherwise it is called outside the model's forward
                self._leave_lockstep()

    def _leave_lockstep(self) -> None:
        """Follow the model from now on, under "auto": all ranks do so at the same place, or they would not meet."""
        if self.order.is_lockstep and self._resources.lockstep == "auto":
            self.order = RecordedOrder([unit.name for unit in self.units if not unit.is_root])

    def _pass(self, names: Names) -> None:
        """Take part in the gathers of blocks that run on other ranks only."""
        for name in names:
            unit = self._unit_of[name]
            for group in unit.used_groups:
                group.wait()
            is_backward = self.phase is Phase.BACKWARD
            if is_backward:
                self._reduce_before(unit)
            if is_backward or not self.order.is_last(name):
                unit.reshard()

    def _begin_backward(self) -> None:
        # One that a forward or a loss runs, or through which another is to run: not the one that gives gradients.
        is_inner = self.phase is Phase.FORWARD or self.is_serving or torch.is_grad_enabled()
        is_own = self.phase is not Phase.IDLE or is_inner
        after = None if is_own else self._resources.events.before_backward()
        began_in = self.phase
        for group in self.groups:
            group.follow_writes()  # before a step in this backward
        # What is frozen around another engine's step has no gradients to reduce.
        has_gradients = began_in is Phase.PRE_BACKWARD or any(any(group.trains()) for group in self.reductions.groups)
        self.backward.begin(began_in, is_inner, has_gradients, after)
        self._enter(Phase.BACKWARD)
        self.reductions.start_backward()
        self.order.start_backward()
        on_backward_end(self._end_backward)

    def _reduce_before(self, unit: Unit) -> None:
        """Reduce, in lockstep, what comes before a unit when its backward begins, so that all ranks use one order."""
        if self.order.is_lockstep and self.backward.reduces and not unit.is_root:
            for group in self.reductions.take_before(unit.groups):
                self._reduce(group)

    def _ready(self) -> Sequence[ParamGroup]:
        """Return the groups to reduce now; in lockstep none, as units decide."""
        return () if self.order.is_lockstep or not self.backward.reduces else self.reductions.take_ready()

    def _reduce(self, group: ParamGroup) -> None:
        group.begin_reduce()
        if group.grads is not None:
            group.grads.reduce(self.reductions.is_last)
        if not self._resources.overlap:
            group.finish_reduce()
        self.reductions.running.add(group)

    def _end_backward(self) -> None:
        # What `_pass` reduces and releases depends on the phase, so it comes before the phase ends. What was to be
        # called after the backward may begin the next pass, so it comes last.
        self._pass(self.order.end_backward())
        self._enter(self.backward.began_in)
        self.reductions.leave(self.reductions.has_open)
        if self.backward.reduces:
            self._reduce_all()
        self._end_units()
        if not self.backward.is_inner:
            self.reshard_all()
        if (after := self.backward.take_after()) is not None:
            after()

    def _end_units(self) -> None:
        for unit in self.units:
            self._close_backward(unit)
        for group in self.reductions.groups:
            if group.grads is not None:
                group.grads.arrivals.end_backward()

    def _reduce_all(self) -> None:
        for group in self.reductions.take_all():
            self._reduce(group)
        late = self.reductions.late
        if self.order.is_lockstep:  # until the last backward, what came late waits in its bucket for the next one
            late = self.reductions.late_on_any(self._resources.comms.hosts) if self.reductions.is_last else []
        for group in self.reductions.groups:
            if group in late:
                self._reduce(group)
        self.reductions.late.clear()
        self.reductions.running.finish()
        self.reductions.leave(self.order.is_lockstep and not self.reductions.is_last)
        self._resources.pool.trim()  # the next forward needs the memory, that of gradients too that still leave

    def on_released_use(self, parameter: nn.Parameter) -> Tensor:
        """Gather a parameter that is used where no unit has announced it; return the tensor to use in its place."""
        group, index = self._place_of[id(parameter)]
        is_inside = self.is_serving or self.phase in (Phase.FORWARD, Phase.BACKWARD)
        if group.is_released_between_uses and (group in self.held or not is_inside):
            alias = self._lent.lend(group, index, stays=group in self.units[0].groups)
            if alias is not None:
                return alias
        group.wait()
        if group.is_released_between_uses:
            self._lent.keep(group)
            group.unguard()
        return parameter

    def on_data(self, parameter: nn.Parameter, value: Tensor | None) -> Tensor:
        used = self.on_released_use(parameter)
        group, index = self._place_of[id(parameter)]
        group.share()
        group.writes.note_data(index, value, group in self.held)
        return used

    def on_save(self, parameter: nn.Parameter) -> Tensor | None:
        group, index = self._place_of[id(parameter)]
        return group.placeholder(index) if group.is_released else None
