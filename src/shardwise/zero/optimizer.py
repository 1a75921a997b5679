"""Step the sharded optimizer, which sees one 1-D view for each parameter piece in this rank's slices."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config.resolve import ConfigError
from shardwise.offload.step_pipeline import StepChunk
from shardwise.offload.storage import StateStorage
from shardwise.offload.worker import Task
from shardwise.optim.muon import MOMENTUM, MuonWithAdamW
from shardwise.optim.optimizers import lacks_some_momentum, scale_in_step, stepped_unfused
from shardwise.optim.rules import refuse_without_rule, rule_of, rule_of_kind
from shardwise.runtime.memory_tracker import Category
from shardwise.runtime.optimizer_probe import StepScope
from shardwise.runtime.state_shards import FlatState, TensorFlatState
from shardwise.runtime.timeline import Timeline
from shardwise.runtime.torch_private import note_step
from shardwise.schedule.actions import ActionKind
from shardwise.zero.grad_buckets import GradBucket
from shardwise.zero.group_step import GroupStep
from shardwise.zero.lent_states import LentStates
from shardwise.zero.matrix_step import MatrixPieces, MatrixStep
from shardwise.zero.optimizer_plan import (
    NamedGroup,
    OptimizerPlan,
    follow_calls,
    inner_groups,
    make_first_states,
)
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.resources import ShardingResources
from shardwise.zero.shared_grads import SharedGradRanges, sum_over_sharers, sum_over_stages
from shardwise.zero.step_hooks import StepHooks
from shardwise.zero.stored_state import ParamPiece, pieces_of, place_state
from shardwise.zero.whole_states import odd_states
from shardwise.zero.whole_step import WholeStep


class ShardedOptimizer:
    """Steps an optimizer over the pieces that this rank holds, or over the whole parameters that it owns.

    Args:
        plan: makes the optimizer from parameter groups, or adopts a given one.

    Attributes:
        whole: steps whole parameters, where the optimizer is not element-wise and ranks hold pieces; else None.
        pieces: what this rank has of each parameter that is trained.
        names: all parameters that are trained, on any rank.
        optimizer: torch's optimizer over the pieces' views.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        named_groups: Sequence[NamedGroup],
        plan: OptimizerPlan,
        resources: ShardingResources,
    ) -> None:
        self._plan = plan
        self._resources = resources
        self._holders: dict[ParamGroup, tuple[int, ...]] = {}  # of what several stages of the pipeline hold
        self._options_of: dict[str, int] = {}  # the index of the optimizer's group, by a parameter's name
        self._own_steps: dict[ParamGroup, GroupStep] = {}  # of states off the device, or encoded
        self._matrix_step: MatrixStep | None = None
        self.whole: WholeStep | None = None
        self._inner_groups: list[tuple[dict[str, Any], list[str]]] = []
        self._has_shapes = False  # the pieces, which are whole, have the parameters' shapes
        self._gradients: dict[ParamGroup, Tensor] = {}
        self._groups: list[ParamGroup] = []
        self.pieces: list[ParamPiece] = []
        # torch refuses an optimizer without parameters, but a rank may own nothing except padding.
        self._placeholder = nn.Parameter(torch.empty(0))
        self._named_groups: tuple[NamedGroup, ...] = ()
        self._choose_step([group for group in groups if group.grads is not None])
        self._take(groups)
        self.optimizer = plan.factory(self._param_groups(named_groups))
        self._inner_groups = inner_groups(self.optimizer, plan, self.views())
        if self._inner_groups:
            self._param_groups(named_groups)
        self._has_states_at_once = bool(self.optimizer.state or plan.first_states)  # such as Adagrad's
        self._make_first_states(self.views())
        self._take_own_steps()
        self.is_stepping = False
        this = weakref.ref(self)
        self.hooks = StepHooks(self.optimizer, lambda: (own := this()) is None or own.is_stepping)
        self._own_methods = follow_calls(self.optimizer, self.add_group, self.change_weights, self._clear_by_script)

    def regroup(self, groups: Sequence[ParamGroup], named_groups: Sequence[NamedGroup]) -> None:
        """Step other groups from now on; pieces that are in both keep their states, the others start without any.

        Args:
            named_groups: as many as before.
        """
        before = {id(piece) for piece in self.pieces}
        views_before = set(self.views())
        self._take(groups)
        for options, group in zip(self.optimizer.param_groups, self._param_groups(named_groups), strict=True):
            options["params"] = group["params"]
        self._take_own_steps()
        views = self.views()
        known = {id(view) for view in views.values()} | {id(self._placeholder)}
        for view in [each for each in self.optimizer.state if isinstance(each, Tensor) and id(each) not in known]:
            del self.optimizer.state[view]
        self.forget_states([piece for piece in self.pieces if id(piece) not in before])
        if self.whole is not None:
            self._make_first_states({name: view for name, view in views.items() if name not in views_before})

    def forget_states(self, pieces: Sequence[ParamPiece]) -> None:
        """Reset these pieces to the optimizer's states before its first step: mostly none."""
        for piece in pieces:
            if (keeper := self._own(piece)) is not None:
                keeper.forget_states(piece)
        views = {piece.name: piece.view for piece in pieces if self._own(piece) is None and self.whole is None}
        self._reset(views)

    def _make_first_states(self, views: Mapping[str, nn.Parameter]) -> None:
        make_first_states(self._plan, self.optimizer, views, self._has_states_at_once)

    def forget_whole(self, names: Collection[str]) -> None:
        """Reset parameters that this rank steps whole to the states before the first step."""
        self._reset({name: view for name, view in self.views().items() if name in names})

    def _reset(self, views: Mapping[str, nn.Parameter]) -> None:
        for view in views.values():
            self.optimizer.state.pop(view, None)
        self._make_first_states(views)

    def views(self) -> dict[str, nn.Parameter]:
        """Return what the optimizer steps on this rank, by name of the parameter."""
        if self.whole is not None:
            return dict(self.whole.views)
        return {piece.name: piece.view for piece in self.pieces}

    def states_of(self, piece: ParamPiece) -> Mapping[str, Any]:
        """Return what the optimizer keeps of a piece now, by name: flat states as long as the piece, numbers, other."""
        if (own := self._own(piece)) is not None:
            return own.states_of(piece)
        shape, states = piece.view.shape, self.optimizer.state.get(piece.view, {})
        # Of a piece of one element, a count in a tensor of one element looks like a flat state.
        odd = self.odd_names() if shape.numel() == 1 else ()
        return {
            name: TensorFlatState(value.detach().view(-1))
            if isinstance(value, Tensor) and value.dim() and value.shape == shape and name not in odd
            else value
            for name, value in states.items()
        }

    def odd_names(self) -> set[str]:
        """Return the names of states that are tensors of another shape than one of the pieces of this rank."""
        states = self.optimizer.state
        return {name for view in self.views().values() for name, _ in odd_states(states.get(view, {}), view)}

    def write_state(self, piece: ParamPiece, state: str, value: Tensor | float) -> None:
        """Write one state of a piece; make it if it is not there.

        Args:
            state: the optimizer's name of the state.
            value: a number, or 1-D and as long as the piece.
        """
        if (own := self._own(piece)) is not None:
            own.write_state(piece, state, value)
        else:
            place_state(self.optimizer, piece.view, state, value)

    def expect_states(self, piece: ParamPiece, numbers: Mapping[str, float], filled: Collection[str]) -> None:
        """Reset the states of a piece for which `keeps_states` is true.

        Args:
            numbers: the states that are numbers, by name.
            filled: the tensor states that the caller will write whole; the others are as before the first step.
        """
        if (own := self._own(piece)) is not None:
            own.forget_states(piece, filled)
            own.expect_states(piece, numbers)

    def take_changes(self) -> None:
        """Take over what a user has changed in `optimizer.state` of what is stored off the device, or encoded."""
        for own in self._own_steps.values():
            own.take_changes()

    def keeps_states(self, piece: ParamPiece) -> bool:
        """Say whether the piece's states are stored here, off the device or encoded, and not in torch's optimizer."""
        return self._own(piece) is not None

    def _own(self, piece: ParamPiece) -> GroupStep | None:
        return self._own_steps.get(piece.group)

    def stored_names(self, piece: ParamPiece) -> frozenset[str]:
        """Return the names of the states that have storage, of a piece for which `keeps_states` is true."""
        own = self._own(piece)
        return frozenset(["step", *(own.states if own is not None else ())])

    def storages(self) -> list[StateStorage]:
        """Return what stores the optimizer's states that are off the device or encoded."""
        return [storage for own in self._own_steps.values() for storage in own.storages()]

    def kept_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that torch's optimizer keeps itself."""
        for state in self.optimizer.state.values():
            if isinstance(state, dict) and not isinstance(state, LentStates):
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def track_states(self) -> None:
        """Report new states to the memory tracker."""
        for value in self.kept_tensors():
            self._resources.tracker.track(value, Category.OPTIMIZER)

    def _take(self, groups: Sequence[ParamGroup]) -> None:
        kept: dict[ParamGroup, list[ParamPiece]] = {}
        for piece in self.pieces:
            kept.setdefault(piece.group, []).append(piece)
        self._groups = [group for group in groups if group.grads is not None]
        self._holders = {group: group.holders for group in self._groups if len(group.holders) > 1}
        self.names = [place.name for group in self._groups for place in group.spec.params]
        self.pieces = []
        for group in self._groups:
            self.pieces += kept.get(group) or pieces_of(group, has_shapes=self._has_shapes)

    def _choose_step(self, groups: Sequence[ParamGroup]) -> None:
        """Choose whether the optimizer sees pieces, or whole parameters: of its own, or at their owners.

        Raises:
            ConfigError: states off the device or encoded need a rule of the optimizer; or its step of a parameter
                depends on those of other stages of the pipeline.
        """
        scope, kind = self._plan.scope, self._plan.kind
        tiers = {group.spec.tiers.optimizer for group in groups}
        is_stored = tiers > {"device"} or "device" not in tiers or self._resources.states_dtype != "master"
        if scope is StepScope.ELEMENT and (not groups or not is_stored or rule_of_kind(kind) is not None):
            return
        if is_stored and (self._resources.states_dtype != "master" or "nvme" in tiers):
            refuse_without_rule(kind, is_element_wise=scope is StepScope.ELEMENT)
        if scope is StepScope.JOINT and self._resources.comms.pipeline.world_size > 1:
            raise ConfigError(
                "optimizer-joint-step",
                f"the step of a parameter by {kind.__name__} depends on all other parameters, which the stages of a "
                "pipeline do not share; use mesh.pp=1, or an optimizer that steps each tensor by itself",
            )
        is_here = all(group.shard_stop - group.shard_start == group.spec.padded_numel for group in groups)
        self._has_shapes = is_here and not is_stored and self._resources.comms.tensor.world_size == 1
        self.whole = None if self._has_shapes else WholeStep(self._resources.comms, at_one=scope is StepScope.JOINT)

    def _take_own_steps(self) -> None:
        """Allocate the states of groups that torch's optimizer does not step: off the device, or encoded."""
        if self.whole is not None:
            return
        has_codes = self._resources.states_dtype != "master"
        wanted = [group for group in self._groups if has_codes or group.spec.tiers.optimizer != "device"]
        for group in [group for group in self._own_steps if group not in wanted]:
            self._own_steps.pop(group).close()
        # While others are regrouped, those that were there may have pieces without options: what is to be frozen next.
        for group in [group for group in wanted if group not in self._own_steps]:
            pieces = [piece for piece in self.pieces if piece.group is group]
            rule, at_once = rule_of(self.optimizer, is_matrix=group.spec.is_matrix), self._has_states_at_once
            for piece in pieces:  # such as Adagrad's, made in its constructor
                self.optimizer.state.pop(piece.view, None)
            dtype, errors = self._resources.states_dtype, self._resources.codec_errors
            found = GroupStep(group, pieces, rule, self._resources.tiers, dtype, at_once, errors, self.optimizer)
            self._own_steps[group] = found
            found.prepare(self.options_of)
        if isinstance(self.optimizer, MuonWithAdamW):
            self._matrix_step = MatrixStep(self._groups, self.pieces, self._resources.comms)

    def _is_offloaded(self, group: ParamGroup) -> bool:
        """Say whether the host steps the group."""
        return group in self._own_steps and self._own_steps[group].is_away

    def options_of(self, piece: ParamPiece) -> Mapping[str, Any] | None:
        """Return the optimizer's parameter group that a piece is in, with its options; None where it is in none."""
        index = self._options_of.get(piece.name)
        return None if index is None else self.optimizer.param_groups[index]

    def _param_groups(self, named_groups: Sequence[NamedGroup]) -> list[dict[str, Any]]:
        self._named_groups = tuple(named_groups)
        self._options_of = {name: index for index, named in enumerate(named_groups) for name in named.names}
        for group in self._groups:
            if group.grads is not None:
                group.grads.norm.count(self._options_of)
        if self.whole is not None:
            self.whole.follow(self._groups, self.pieces, self._options_of)
        views = self.views()
        param_groups = [
            {**named.options, "params": [views[name] for name in named.names if name in views]}
            for named in named_groups
        ]
        for inner, names in self._inner_groups:
            inner["params"] = [views[name] for name in names if name in views]
        if not any(group["params"] for group in param_groups):
            param_groups[0]["params"] = [self._placeholder]
        return param_groups

    def add_group(self, group: Mapping[str, Any]) -> None:
        """Add a parameter group whose parameters are the model's; those that are frozen follow once they are not.

        Args:
            group: as torch's `add_param_group` takes it.
        """
        named = self._plan.add(group, self._options_of)
        index = len(self.optimizer.param_groups)
        self._options_of |= dict.fromkeys(named.names, index)
        type(self.optimizer).add_param_group(self.optimizer, {**named.options, "params": []})
        param_groups = self._param_groups([*self._named_groups, named])
        self.optimizer.param_groups[index]["params"] = param_groups[index]["params"]
        self.optimizer.param_groups[0]["params"] = param_groups[0]["params"]  # no placeholder any more
        views, own = self.views(), set(named.names)
        self._make_first_states({name: view for name, view in views.items() if name in own})
        for piece in self.pieces:
            if piece.name in own and (keeper := self._own(piece)) is not None:
                keeper.train(piece, self.optimizer.param_groups[index])

    def change_weights(self, change: Callable[[], object]) -> None:
        """Call a method of the optimizer that writes parameters, such as for evaluation. All ranks call it."""
        for group in self._groups:
            group.finish_update()
        change() if self.whole is None else self.whole.run(change, {}, lambda piece: piece.view)
        for group in self._groups:
            group.adopt_master()

    def _clear_by_script(self) -> None:
        if not self.is_stepping:
            self._resources.events.zero_grad()

    def used(self) -> list[bool]:
        """Return for each of `names` whether it has got a gradient on this rank since the last step."""
        return [flag for group in self._groups if group.grads for flag in group.grads.arrivals.used]

    def square_sums(self) -> list[Tensor]:
        """Prepare the gradients for the step, and return for each group's slice the sum of its squares.

        These are fp64 and 0-d, on the device; what ranks of the tensor-parallel group share counts on one of them.
        """
        held = [(group, group.grads) for group in self._groups if group.grads is not None and group.grads.holds_sum]
        for group, grads in held:
            if not self._is_offloaded(group) and not grads.is_away and (gradient := grads.gradient()) is not None:
                self._gradients[group] = gradient
        shared: list[tuple[SharedGradRanges, FlatState]] = []
        for group, grads in held:
            if grads.norm.sharing.summed:
                shared.append((grads.norm.sharing, self._flat_of(group, grads)))
        if shared:
            sum_over_sharers(shared, self._resources.comms.tensor)
        self._sum_over_stages([(group, grads) for group, grads in held if group in self._holders])
        squares, stage = [], self._resources.comms.pipeline.rank
        for group, grads in held:
            if self._holders.get(group, (stage,))[0] != stage:
                continue  # another stage counts it
            whole = self._gradients.get(group)
            square = grads.square() if whole is None else grads.norm.square_of(whole)
            squares.append(square.to(self._resources.comms.tensor.device, non_blocking=True))
        return squares

    def _sum_over_stages(self, tied: Sequence[tuple[ParamGroup, GradBucket]]) -> None:
        by_holders: dict[tuple[int, ...], list[FlatState]] = {}
        for group, grads in tied:
            by_holders.setdefault(self._holders[group], []).append(self._flat_of(group, grads))
            grads.forget_square()
        sum_over_stages(by_holders, self._resources.comms.tied)

    def _flat_of(self, group: ParamGroup, grads: GradBucket) -> FlatState:
        """Return a group's gradients, final and where they are now."""
        grads.await_taken()
        whole = self._gradients.get(group)
        return grads.storage if whole is None else TensorFlatState(whole)

    def step(self, factor: float, used: Mapping[str, bool], timeline: Timeline) -> dict[ParamGroup, Task]:
        """Update the masters with `factor` times the gradients; off the device this happens in the background.

        Args:
            factor: turns accumulated sums into the clipped mean gradient.
            used: whether each parameter, by name, got a gradient on some rank; the others stay, as in plain torch.

        Returns:
            the groups whose update is under way.
        """
        stepping: dict[ParamGroup, Task] = {}
        used = dict(used)
        with timeline.span(ActionKind.STEP, None):
            self._step_matrices(factor, used)
            self._step_whole(factor, used)
            if self._own_steps and self.hooks.are_there:
                self._show_to_hooks(factor, used)
            self._step_on_device(self._gradients, used, factor)
            self._gradients.clear()
            stepping.update(self._step_pipeline(factor, used))
            for group in self._groups:
                grads = group.grads
                if self._is_offloaded(group) or self._is_whole(group) or grads is None or not grads.is_away:
                    continue
                if (brought := grads.gradient()) is not None:
                    self._step_on_device({group: brought}, used, factor)
        self.track_states()
        self.hooks.end_step()
        self._clear_gradients()
        return stepping

    def _show_to_hooks(self, factor: float, used: dict[str, bool]) -> None:
        """Let hooks see the gradients of what torch's optimizer does not step, in its step."""
        flats = {
            group: self._flat_of(group, group.grads)
            for group in self._own_steps
            if group.grads is not None and group.grads.holds_sum
        }
        self.hooks.show(self.pieces, flats, factor, used)

    def _step_pipeline(self, factor: float, used: Mapping[str, bool]) -> dict[ParamGroup, Task]:
        """Start to update all offloaded groups, each in time for the next forward.

        Chunks that are still in memory from the last pass over NVMe come first, since the others would push them out.
        """
        chunks = [
            (group, chunk)
            for group in self._groups
            if self._is_offloaded(group) and not self._is_whole(group)
            for chunk in self._chunks(group, factor, used)
        ]
        stepping = self._submit(sorted(chunks, key=lambda each: not each[1].is_at_hand))
        for group in filter(self._is_offloaded, self._own_steps):
            if group not in stepping and not self._is_whole(group):
                stepping[group] = self._resources.tiers.worker.submit(lambda: None)
        return stepping

    def _submit(self, chunks: Sequence[tuple[ParamGroup, StepChunk]]) -> dict[ParamGroup, Task]:
        """Submit chunks in this order; return for each group the end of its update."""
        num_left = Counter(group for group, _ in chunks)
        ends: dict[ParamGroup, Task] = {}
        for group, chunk in chunks:
            task = self._resources.tiers.step_pipeline.submit(chunk)
            num_left[group] -= 1
            if not num_left[group]:
                ends[group] = self._own_steps[group].end(task)
        return ends

    def _chunks(self, group: ParamGroup, factor: float, used: Mapping[str, bool]) -> list[StepChunk]:
        holds = group.grads is not None and group.grads.holds_sum
        factor = self.hooks.factor(group, factor)
        return self._own_steps[group].chunks(factor, used, self.options_of) if holds else []

    def _is_whole(self, group: ParamGroup) -> bool:
        """Say whether the group's parameters are stepped whole, by their owners."""
        return self.whole is not None or (self._matrix_step is not None and group.spec.is_matrix)

    def _step_matrices(self, factor: float, used: Mapping[str, bool]) -> None:
        """Step the groups of matrices; what is stored off the device is brought there, and written back."""
        if self._matrix_step is None:
            return
        self.hooks.refuse()
        gradient_of = self._final_gradients(factor)
        self._matrix_step.step(used, MatrixPieces(gradient_of, self._momentum_of, self.options_of))
        for group in [group for group in self._gradients if group.spec.is_matrix]:
            del self._gradients[group]  # of which no parameter was used

    def _step_whole(self, factor: float, used: Mapping[str, bool]) -> None:
        """Step all parameters at their owners; what is stored off the device is brought there, and written back."""
        if self.whole is None:
            return
        for group in self._groups:
            group.await_step()
        # One that steps all together may not take none; the others count their steps in their groups.
        steps = bool(self.whole.views) or self._plan.scope is not StepScope.JOINT
        act = self._call_step if steps else partial(note_step, self.optimizer)
        self.whole.run(act, used, self._final_gradients(factor))
        self._gradients.clear()

    def _final_gradients(self, factor: float) -> Callable[[ParamPiece], Tensor]:
        """Return what gives a piece's gradient, `factor` times the sum; it takes those that are on the device."""
        gradients: dict[ParamGroup, Tensor] = {}

        def gradient_of(piece: ParamPiece) -> Tensor:
            group = piece.group
            if group not in gradients:
                group.await_step()
                found = self._gradients.pop(group, None)
                if found is None and group.grads is not None:
                    found = group.grads.gradient()
                assert found is not None, "a parameter that was used on some rank has a gradient on all"
                gradients[group] = found.mul_(factor)
            return gradients[group][piece.start : piece.stop]

        return gradient_of

    def _momentum_of(self, piece: ParamPiece) -> FlatState:
        if (own := self._own(piece)) is not None:
            own.expect_states(piece, {})
            stored = own.states_of(piece)[MOMENTUM]
            assert not isinstance(stored, Tensor), "momentum is no number"
            return stored
        state = self.optimizer.state[piece.view]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(piece.view, requires_grad=False)
        return TensorFlatState(state[MOMENTUM])

    def _step_on_device(self, gradients: Mapping[ParamGroup, Tensor], used: Mapping[str, bool], factor: float) -> None:
        if self.whole is not None:
            return
        encoded = {group: each for group, each in gradients.items() if group in self._own_steps}
        gradients = {group: each for group, each in gradients.items() if group not in encoded}
        stepped = [piece.view for piece in self.pieces if used[piece.name] and piece.group in gradients]
        is_mixed = lacks_some_momentum(self.optimizer, stepped)
        is_scaled = not (is_mixed or self.hooks.are_there) and scale_in_step(self.optimizer, factor)
        if not is_scaled:
            for gradient in gradients.values():
                gradient.mul_(factor)
        for piece in self.pieces:
            if piece.group in self._own_steps:
                continue  # it has what hooks are shown
            slices = gradients.get(piece.group) if used[piece.name] else None
            piece.view.grad = slices[piece.start : piece.stop].view(piece.view.shape) if slices is not None else None
        try:
            with stepped_unfused(self.optimizer) if is_mixed else nullcontext():
                self._call_step()
        finally:
            if is_scaled:
                del self.optimizer.grad_scale  # type: ignore[attr-defined]
        for piece in self.pieces:
            piece.view.grad = None
        for group, gradient in encoded.items():
            self._own_steps[group].step(gradient, self.hooks.factor(group, factor), used, self.options_of)

    def _call_step(self) -> None:
        self.is_stepping = True
        try:
            with self.hooks.late_ones_held():
                self.optimizer.step()
        finally:
            self.is_stepping = False

    def clear(self) -> None:
        """Forget the gradients."""
        self._gradients.clear()
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        for group in self._groups:
            if group.grads is not None:
                group.grads.clear()

    def close(self) -> None:
        """Forget all states; the optimizer's groups get back the model's own parameters that it trained."""
        self.clear()
        self.hooks.close()
        for name in self._own_methods:
            delattr(self.optimizer, name)
        self._own_methods = ()
        parameters = {
            place.name: parameter
            for group in self._groups
            for place, parameter in zip(group.spec.params, group.parameters, strict=True)
        }
        for group in self.optimizer.param_groups:
            group["params"] = []
        for group, named in zip(self.optimizer.param_groups, self._named_groups, strict=False):
            group["params"] = [parameters[name] for name in named.names if name in parameters]
        self.optimizer.state.clear()
        self._matrix_step = None
        if self.whole is not None:
            self.whole.close()
        self.pieces.clear()
        self._groups.clear()
        self._holders.clear()
        for own in self._own_steps.values():
            own.close()
        self._own_steps.clear()
