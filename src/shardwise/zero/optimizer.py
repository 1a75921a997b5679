"""Step the sharded optimizer, which sees one 1-D view for each parameter piece in this rank's slices."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config.errors import ConfigError
from shardwise.offload.storage import StateStorage
from shardwise.offload.worker import Task
from shardwise.optim.muon import MuonWithAdamW
from shardwise.optim.rules import LateFactor, refuse_without_rule, rule_of, rule_of_kind
from shardwise.runtime.device import number_dtype, numbers_on
from shardwise.runtime.memory_tracker import Category
from shardwise.runtime.optimizer_probe import StepScope
from shardwise.runtime.state_shards import FlatState
from shardwise.runtime.timeline import Timeline
from shardwise.runtime.torch_private import norms_of
from shardwise.schedule.actions import ActionKind
from shardwise.zero.grad_buckets import GradBucket
from shardwise.zero.group_step import (
    GroupStep,
    HostUpdate,
    OptimizerUpdate,
    StateKeeper,
    StepHooks,
    TorchStep,
    Wanted,
    final_gradient,
)
from shardwise.zero.matrix_step import MatrixStep
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
from shardwise.zero.stored_state import ParamPiece, pieces_of
from shardwise.zero.stored_step import StoredStep
from shardwise.zero.whole_step import WholeParameters, WholeStep


class ShardedOptimizer:
    """Steps an optimizer over the pieces that this rank holds, or over the whole parameters that it owns.

    Args:
        plan: makes the optimizer from parameter groups, or adopts a given one.

    Attributes:
        whole: brings whole parameters to their owners, where the optimizer is not element-wise and ranks hold pieces;
            else None.
        steps: what steps the groups, in this order.
        keepers: what keeps the states of their pieces.
        hooks: of other code on the optimizer's step.
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
        self._options_of: dict[str, int] = {}  # the index of the optimizer's group, by a parameter's name
        self._stored: dict[ParamGroup, StoredStep] = {}  # whose states the library keeps
        self.steps: list[GroupStep] = []
        self.keepers: list[StateKeeper] = []
        self._tracked: dict[int, weakref.ref[Tensor]] = {}  # states that the tracker knows, by identity
        self.whole: WholeParameters | None = None
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
        self._make_steps()
        for keeper in self.keepers:
            keeper.train(self._options_of, self.options_of)
        self.hooks = StepHooks(self.optimizer)
        self._own_methods = follow_calls(self.optimizer, self.add_group, self.change_weights, self._clear_by_script)

    def regroup(self, groups: Sequence[ParamGroup], named_groups: Sequence[NamedGroup]) -> None:
        """Step other groups from now on; pieces that are in both keep their states, the others start without any."""
        before = self.views()
        self._take(groups)
        for options, group in zip(self.optimizer.param_groups, self._param_groups(named_groups), strict=True):
            options["params"] = group["params"]
        self._make_steps()
        views = self.views()
        known = {id(view) for view in views.values()} | {id(self._placeholder)}
        for view in [key for key in self.optimizer.state if isinstance(key, Tensor) and id(key) not in known]:
            del self.optimizer.state[view]
        new = {name for name, view in views.items() if view is not before.get(name)}
        for keeper in self.keepers:
            keeper.train(new, self.options_of)

    def views(self) -> dict[str, nn.Parameter]:
        """Return what the optimizer steps on this rank, by name of the parameter."""
        if self.whole is not None:
            return dict(self.whole.views)
        return {piece.name: piece.view for piece in self.pieces}

    def keeper_of(self, piece: ParamPiece) -> StateKeeper:
        """Return what keeps the states of a piece."""
        return self._keeper(piece.group)

    def _keeper(self, group: ParamGroup) -> StateKeeper:
        return self._stored.get(group, self.keepers[0])

    def prepare_states(self, wanted: Mapping[str, Mapping[str, Wanted]]) -> None:
        """Have exactly the wanted states, by parameter: numbers are set, tensors are ready to be filled."""
        for keeper in self.keepers:
            keeper.prepare(wanted)
        self.track_states()

    def take_changes(self) -> None:
        """Take over what a user has changed in `optimizer.state` of what is stored off the device, or encoded."""
        for keeper in self.keepers:
            keeper.take_changes()

    def storages(self) -> list[StateStorage]:
        """Return what stores the optimizer's states that are off the device or encoded."""
        return [storage for keeper in self.keepers for storage in keeper.storages()]

    def kept_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that torch's optimizer keeps itself."""
        return chain.from_iterable(keeper.kept_tensors() for keeper in self.keepers)

    def track_states(self) -> None:
        """Report new states to the memory tracker."""
        before, self._tracked = self._tracked, {}
        for value in self.kept_tensors():
            known = before.get(id(value))
            if known is None or known() is not value:
                self._resources.tracker.track(value, Category.OPTIMIZER)
                known = weakref.ref(value)
            self._tracked[id(value)] = known

    def _take(self, groups: Sequence[ParamGroup]) -> None:
        kept: dict[ParamGroup, list[ParamPiece]] = {}
        for piece in self.pieces:
            kept.setdefault(piece.group, []).append(piece)
        self._groups = [group for group in groups if group.grads is not None]
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
        self._has_shapes = is_here and not is_stored and all(group.spec.num_parts == 1 for group in groups)
        if not self._has_shapes:
            self.whole = WholeParameters(self._resources.comms, at_one=scope is StepScope.JOINT)

    def _make_steps(self) -> None:
        """Choose what steps each group; states that the library keeps stay with a group that stays."""
        for group in [group for group in self._stored if group not in self._groups]:
            self._stored.pop(group).close()
        first_states = partial(make_first_states, self._plan, self.optimizer, self._has_states_at_once)
        if self.whole is not None:
            whole = WholeStep(self.optimizer, self._groups, self.whole, first_states)
            self.steps, self.keepers = [whole], [whole]
            return
        has_codes, has_matrices = self._resources.states_dtype != "master", type(self.optimizer) is MuonWithAdamW
        for group in self._groups:
            if group not in self._stored and (has_codes or group.spec.tiers.optimizer != "device"):
                self._stored[group] = self._store(group)
        matrices = [group for group in self._groups if has_matrices and group.spec.is_matrix]
        stepped = [group for group in self._groups if group not in self._stored and group not in matrices]
        pieces = [piece for piece in self.pieces if piece.group not in self._stored]
        of_torch = TorchStep(self.optimizer, stepped, pieces, first_states)
        self.keepers = [of_torch, *self._stored.values()]
        self.steps = [of_torch, *(step for group, step in self._stored.items() if group not in matrices)]
        if has_matrices:
            for is_experts in sorted({group.spec.is_experts for group in matrices}):
                own = [group for group in self._groups if group.spec.is_experts == is_experts]
                keepers = {group: self._keeper(group) for group in own if group in matrices}
                self.steps.insert(0, MatrixStep(own, self.pieces, keepers, own[0].comms))

    def _store(self, group: ParamGroup) -> StoredStep:
        """Allocate the states of a group that torch's optimizer does not step."""
        pieces = [piece for piece in self.pieces if piece.group is group]
        rule, resources = rule_of(self.optimizer, is_matrix=group.spec.is_matrix), self._resources
        at_once = self._has_states_at_once
        return StoredStep(group, pieces, rule, resources.tiers, resources.states_dtype, at_once, self.optimizer)

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
        """Add a parameter group whose parameters are the model's; those that are frozen follow once they are not."""
        named = self._plan.add(group, self._options_of)
        index = len(self.optimizer.param_groups)
        self._options_of |= dict.fromkeys(named.names, index)
        type(self.optimizer).add_param_group(self.optimizer, {**named.options, "params": []})
        param_groups = self._param_groups([*self._named_groups, named])
        self.optimizer.param_groups[index]["params"] = param_groups[index]["params"]
        self.optimizer.param_groups[0]["params"] = param_groups[0]["params"]  # no placeholder any more
        for keeper in self.keepers:
            keeper.train(named.names, self.options_of)

    def change_weights(self, change: Callable[[], object]) -> None:
        """Call a method of the optimizer that writes parameters, such as for evaluation. All ranks call it."""
        for group in self._groups:
            group.finish_update()
        for step in self.steps:
            step.change_weights(change)
        for group in self._groups:
            group.adopt_master()

    def _clear_by_script(self) -> None:
        if not self.hooks.is_stepping:
            self._resources.events.zero_grad()

    def used(self) -> list[bool]:
        """Return for each of `names` whether it has got a gradient on this rank since the last step."""
        return [flag for group in self._groups if group.grads for flag in group.grads.arrivals.used]

    def square_sum(self) -> Tensor:
        """Prepare the gradients for the step, and return the sum of their squares, fp64 and 0-d, on the device.

        What ranks of the tensor-parallel group share counts on one of them.
        """
        # [Note: The norm comes before the step]
        # One factor clips all gradients, and it depends on all of them, on all ranks. So every gradient is made final
        # before any group is stepped: first the parts are summed that ranks of a tensor-parallel group share, then
        # those of stages that hold one parameter, and then squares are taken, of each element on one rank; the square
        # of a sum is no sum of squares. The engine sums the squares together with loss and counts (`engine/step.py`).
        # If one of them is not finite, no parameter has changed yet.
        held = [(group, group.grads) for group in self._groups if group.grads is not None and group.grads.holds_sum]
        for group, grads in held:
            if not (grads.is_away or self._keeper(group).reads_stored):
                gradient = grads.gradient()
                if gradient is not None:
                    self._gradients[group] = gradient
        shared: list[tuple[SharedGradRanges, FlatState]] = []
        for group, grads in held:
            if grads.norm.sharing.summed:
                shared.append((grads.norm.sharing, final_gradient(group, self._gradients)))
        if shared:
            sum_over_sharers(shared, self._resources.comms.tensor)
        if tied := [(group, grads) for group, grads in held if len(group.holders) > 1]:
            self._sum_over_stages(tied)
        return self._sum_squares(held)

    def _sum_squares(self, held: Sequence[tuple[ParamGroup, GradBucket]]) -> Tensor:
        """Return the sum of squares over groups: each of its terms is a group's, so kernels are as few as can be."""
        device, stage = self._resources.comms.tensor.device, self._resources.comms.pipeline.rank
        counted = [(group, grads) for group, grads in held if len(group.holders) == 1 or group.holders[0] == stage]
        parts_of = [
            grads.norm.counted_of(whole) if (whole := self._gradients.get(group)) is not None else None
            for group, grads in counted  # what several stages have, one of them counts
        ]
        norms = [part for parts in parts_of if parts is not None for part in parts]
        squares = norms_of(norms).to(number_dtype(device)).square() if norms else numbers_on(device, [])
        if len(norms) == len(counted) and all(parts is not None and len(parts) == 1 for parts in parts_of):
            return squares.sum()
        terms = []
        for (_, grads), parts in zip(counted, parts_of, strict=True):
            own, squares = squares[: len(parts or ())], squares[len(parts or ()) :]
            terms.append(own.sum() if parts is not None else grads.square().to(device, non_blocking=True))
        return torch.stack(terms).sum()

    def _sum_over_stages(self, tied: Sequence[tuple[ParamGroup, GradBucket]]) -> None:
        by_holders: dict[tuple[int, ...], list[FlatState]] = {}
        for group, grads in tied:
            by_holders.setdefault(group.holders, []).append(final_gradient(group, self._gradients))
            grads.forget_square()
        sum_over_stages(by_holders, self._resources.comms.tied)

    @property
    def takes_late_factor(self) -> bool:
        """Say whether a step may be enqueued before the host knows its factor, and whether it is taken.

        Then this rank's gradients say that all parameters are used, and one fused kernel steps all of them.
        """
        is_one = len(self.steps) == 1 and self.steps[0].takes_late_factor(self._gradients)
        return is_one and not self.hooks.are_there and all(self.used())

    def step(self, factor: float | LateFactor, used: Mapping[str, bool], timeline: Timeline) -> dict[ParamGroup, Task]:
        """Update the masters with `factor` times the gradients; off the device this happens in the background.

        Args:
            factor: turns accumulated sums into the clipped mean gradient; a late one if `takes_late_factor`.
            used: whether each parameter, by name, got a gradient on some rank; the others stay, as in plain torch.

        Returns:
            the groups whose update is under way.
        """
        late = factor if isinstance(factor, LateFactor) else None
        known = math.nan if isinstance(factor, LateFactor) else factor
        update = OptimizerUpdate(known, dict(used), self._gradients, self.hooks, self.options_of, late)
        are_settled = all(step.is_settled for step in self.steps)
        with timeline.span(ActionKind.STEP, None):
            if self.hooks.are_there:
                for step in self.steps:
                    step.show(update)
            on_host = [host for step in self.steps for host in step.step(update)]
            self._gradients.clear()
            stepping = self._submit(on_host) if on_host else {}
        if not are_settled:
            self.track_states()
        self._forget_gradients()
        return stepping

    def _submit(self, updates: Sequence[HostUpdate]) -> dict[ParamGroup, Task]:
        """Start updates on the host, each in time for the next forward; return for each group the end of its update.

        Chunks that are still in memory from the last pass over NVMe come first, since the others would push them out.
        """
        # [Note: Order of the host's steps]
        # The worker thread takes tasks in the order of their submission, and updates come in the order in which their
        # groups were made, mostly that of the units. So what the next forward uses first is stepped first, and is
        # gathered while the others are stepped.
        tiers = self._resources.tiers
        chunks = [(update, chunk) for update in updates for chunk in update.chunks]
        num_left = Counter(update.group for update, _ in chunks)
        ends: dict[ParamGroup, Task] = {}
        for update, chunk in sorted(chunks, key=lambda pair: not pair[1].is_at_hand):
            task = tiers.step_pipeline.submit(chunk)
            num_left[update.group] -= 1
            if not num_left[update.group]:
                ends[update.group] = update.end(task)
        for update in updates:
            if update.group not in ends:
                ends[update.group] = tiers.worker.submit(lambda: None)
        return ends

    def clear(self) -> None:
        """Forget the gradients."""
        self._gradients.clear()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        self.hooks.forget()
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
        self.pieces.clear()
        self._groups.clear()
        for keeper in self.keepers:
            keeper.close()
        self.steps.clear()
        self.keepers.clear()
        self._stored.clear()
