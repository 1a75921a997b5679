"""Step the sharded optimizer, which sees one 1-D view for each parameter piece in this rank's slices."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.config.errors import EngineError
from shardwise.config.resolve import Config
from shardwise.layout.layout import Layout
from shardwise.offload.cpu_optimizer import rule_of
from shardwise.offload.step_pipeline import StepChunk
from shardwise.offload.storage import StateStorage
from shardwise.offload.worker import Task
from shardwise.runtime.memory_tracker import Category
from shardwise.runtime.muon import MOMENTUM, MuonWithAdamW
from shardwise.runtime.optimizers import refuse_unless_element_wise, scale_in_step
from shardwise.runtime.state_shards import FlatState, TensorFlatState
from shardwise.runtime.timeline import Timeline
from shardwise.schedule.actions import ActionKind
from shardwise.zero.grad_buckets import GradBucket
from shardwise.zero.group_step import GroupStep
from shardwise.zero.matrix_step import MatrixPieces, MatrixStep
from shardwise.zero.optimizer_plan import NamedGroup, OptimizerFactory, fresh_states
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.resources import ShardingResources
from shardwise.zero.sharding_state import ShardingState
from shardwise.zero.shared_grads import SharedGradRanges, sum_over_sharers, sum_over_stages
from shardwise.zero.stored_state import ParamPiece


class ShardedOptimizer:
    """Steps an element-wise optimizer over the pieces that this rank holds.

    Args:
        groups: all of the engine's groups.
        named_groups: which parameters share which options.
        factory: makes the optimizer from parameter groups, or adopts a given one.
        resources: shared by the engine's groups.

    Attributes:
        pieces: what this rank has of each parameter that is trained.
        names: all parameters that are trained, on any rank.
        optimizer: torch's optimizer over the pieces' views.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        named_groups: Sequence[NamedGroup],
        factory: OptimizerFactory,
        resources: ShardingResources,
    ) -> None:
        self._tracker = resources.tracker
        self._comms = resources.comms
        self._tensor = resources.comms.tensor
        self._tied = resources.comms.tied
        self._pipeline_rank = resources.comms.pipeline.rank
        self._holders: dict[ParamGroup, tuple[int, ...]] = {}  # of what several stages of the pipeline hold
        self._tiers = resources.tiers
        self._options_of: dict[int, int] = {}  # the index of the optimizer's group, by a view's identity
        self._own_steps: dict[ParamGroup, GroupStep] = {}  # of states off the device, or encoded
        self._matrix_step: MatrixStep | None = None
        self._states_dtype = resources.states_dtype
        self._codec_errors = resources.codec_errors
        self._stepped: dict[ParamGroup, Task] = {}  # in the backward, before `step`
        self._gradients: dict[ParamGroup, Tensor] = {}
        self._groups: list[ParamGroup] = []
        self.pieces: list[ParamPiece] = []
        # torch refuses an optimizer without parameters, but a rank may own nothing except padding.
        self._placeholder = nn.Parameter(torch.empty(0))
        self._named_groups: tuple[NamedGroup, ...] = ()
        self._take(groups)
        self.optimizer = factory(self._param_groups(named_groups))
        refuse_unless_element_wise(self.optimizer)
        self._has_states_at_once = bool(self.optimizer.state)  # such as Adagrad's
        self._take_own_steps()
        self.is_stepping = False
        this = weakref.ref(self)
        self._step_guard = self.optimizer.register_step_pre_hook(lambda *_: _refuse_own_step(this()))

    def regroup(self, groups: Sequence[ParamGroup], named_groups: Sequence[NamedGroup]) -> None:
        """Step other groups from now on; pieces that are in both keep their states, the others start without any.

        Args:
            groups: all of the engine's groups.
            named_groups: as many as before.
        """
        before = {id(piece) for piece in self.pieces}
        self._take(groups)
        for options, group in zip(self.optimizer.param_groups, self._param_groups(named_groups), strict=True):
            options["params"] = group["params"]
        self._take_own_steps()
        known = {id(piece.view) for piece in self.pieces} | {id(self._placeholder)}
        for view in [view for view in self.optimizer.state if id(view) not in known]:
            del self.optimizer.state[view]
        self.forget_states([piece for piece in self.pieces if id(piece) not in before])

    def forget_states(self, pieces: Sequence[ParamPiece]) -> None:
        """Reset these pieces to the optimizer's states before its first step: mostly none."""
        for piece in pieces:
            if (keeper := self._own(piece)) is not None:
                keeper.forget_states(piece)
        views = {id(piece.view) for piece in pieces if self._own(piece) is None}
        for piece in pieces:
            self.optimizer.state.pop(piece.view, None)
        if self._has_states_at_once and views:
            groups = [
                {**group, "params": own}
                for group in self.optimizer.param_groups
                if (own := [view for view in group["params"] if id(view) in views])
            ]
            self.optimizer.state.update(fresh_states(self.optimizer, groups))

    def states_of(self, piece: ParamPiece) -> Mapping[str, Any]:
        """Return what the optimizer keeps of a piece now, by name: flat states as long as the piece, numbers, other."""
        if (own := self._own(piece)) is not None:
            return own.states_of(piece)
        numel, states = piece.view.numel(), self.optimizer.state.get(piece.view, {})
        return {
            name: TensorFlatState(value.detach().view(-1))
            if isinstance(value, Tensor) and value.dim() and value.numel() == numel
            else value
            for name, value in states.items()
        }

    def write_state(self, piece: ParamPiece, state: str, value: Tensor | float) -> None:
        """Write one state of a piece; make it if it is not there.

        Args:
            piece: the piece.
            state: the optimizer's name of the state.
            value: a number, or 1-D and as long as the piece.
        """
        if (own := self._own(piece)) is not None:
            own.write_state(piece, state, value)
        else:
            _place_state(self.optimizer, piece.view, state, value)

    def expect_states(self, piece: ParamPiece, numbers: Mapping[str, float], filled: Collection[str]) -> None:
        """Reset the states of a piece for which `keeps_states` is true.

        Args:
            piece: the piece.
            numbers: the states that are numbers, by name.
            filled: the tensor states that the caller will write whole; the others are as before the first step.
        """
        if (own := self._own(piece)) is not None:
            own.forget_states(piece, filled)
            own.expect_states(piece, numbers)

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

    def track_states(self) -> None:
        """Report new states to the memory tracker."""
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self._tracker.track(value, Category.OPTIMIZER)

    def _take(self, groups: Sequence[ParamGroup]) -> None:
        kept: dict[ParamGroup, list[ParamPiece]] = {}
        for piece in self.pieces:
            kept.setdefault(piece.group, []).append(piece)
        self._groups = [group for group in groups if group.grads is not None]
        self._holders = {group: group.holders for group in self._groups if len(group.holders) > 1}
        self.names = [place.name for group in self._groups for place in group.spec.params]
        self.pieces = [piece for group in self._groups for piece in kept.get(group) or _pieces(group)]

    def _take_own_steps(self) -> None:
        """Allocate the states of groups that torch's optimizer does not step: off the device, or encoded."""
        has_codes = self._states_dtype != "master"
        wanted = [group for group in self._groups if has_codes or group.spec.tiers.optimizer != "device"]
        for group in [group for group in self._own_steps if group not in wanted]:
            self._own_steps.pop(group).close()
        # While others are regrouped, those that were there may have pieces without options: what is to be frozen next.
        for group in [group for group in wanted if group not in self._own_steps]:
            pieces = [piece for piece in self.pieces if piece.group is group]
            rule, at_once = rule_of(self.optimizer, is_matrix=group.spec.is_matrix), self._has_states_at_once
            found = GroupStep(group, pieces, rule, self._tiers, self._states_dtype, at_once, self._codec_errors)
            self._own_steps[group] = found
            self._own_steps[group].prepare(self.options_of)
            for piece in pieces:  # such as Adagrad's, made in its constructor
                self.optimizer.state.pop(piece.view, None)
        if isinstance(self.optimizer, MuonWithAdamW):
            self._matrix_step = MatrixStep(self._groups, self.pieces, self._comms)

    def _is_offloaded(self, group: ParamGroup) -> bool:
        """Say whether the host steps the group."""
        return group in self._own_steps and self._own_steps[group].is_away

    def options_of(self, piece: ParamPiece) -> Mapping[str, Any] | None:
        """Return the optimizer's parameter group that a piece is in, with its options; None where it is in none."""
        index = self._options_of.get(id(piece.view))
        return None if index is None else self.optimizer.param_groups[index]

    def _param_groups(self, named_groups: Sequence[NamedGroup]) -> list[dict[str, Any]]:
        self._named_groups = tuple(named_groups)
        by_name: dict[str, list[nn.Parameter]] = {}
        for piece in self.pieces:
            by_name.setdefault(piece.name, []).append(piece.view)
        param_groups = [
            {**named.options, "params": [view for name in named.names for view in by_name.get(name, [])]}
            for named in named_groups
        ]
        self._options_of = {id(view): index for index, group in enumerate(param_groups) for view in group["params"]}
        if not any(group["params"] for group in param_groups):
            param_groups[0]["params"] = [self._placeholder]
        return param_groups

    def used(self) -> list[bool]:
        """Return for each of `names` whether it has got a gradient on this rank since the last step."""
        return [flag for group in self._groups if group.grads for flag in group.grads.was_used]

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
            if grads.sharing.summed:
                shared.append((grads.sharing, self._flat_of(group, grads)))
        sum_over_sharers(shared, self._tensor)
        self._sum_over_stages([(group, grads) for group, grads in held if group in self._holders])
        squares = []
        for group, grads in held:
            if self._holders.get(group, (self._pipeline_rank,))[0] != self._pipeline_rank:
                continue  # another stage counts it
            whole = self._gradients.get(group)
            square = grads.square() if whole is None else grads.square_of(whole)
            squares.append(square.to(self._tensor.device, non_blocking=True))
        return squares

    def _sum_over_stages(self, tied: Sequence[tuple[ParamGroup, GradBucket]]) -> None:
        by_holders: dict[tuple[int, ...], list[FlatState]] = {}
        for group, grads in tied:
            by_holders.setdefault(self._holders[group], []).append(self._flat_of(group, grads))
            grads.forget_square()
        sum_over_stages(by_holders, self._tied)

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
            timeline: records the step.

        Returns:
            the groups whose update is under way.
        """
        stepping: dict[ParamGroup, Task] = {}
        with timeline.span(ActionKind.STEP, None):
            self._step_matrices(factor, used)
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
        self._stepped.clear()
        self._clear_gradients()
        return stepping

    def step_in_backward(self, group: ParamGroup, factor: float) -> None:
        """Start to update a group whose gradients are final before the others' are; all its parameters were used."""
        if self._is_offloaded(group):
            names = (place.name for place in group.spec.params)
            self._stepped |= self._submit(
                [(group, each) for each in self._chunks(group, factor, dict.fromkeys(names, True))]
            )

    @property
    def has_stepped_in_backward(self) -> bool:
        """Say whether groups are stepped, or being stepped, before `step`."""
        return bool(self._stepped)

    def _step_pipeline(self, factor: float, used: Mapping[str, bool]) -> dict[ParamGroup, Task]:
        """Start to update all offloaded groups that are not being updated, each in time for the next forward.

        Chunks that are still in memory from the last pass over NVMe come first, since the others would push them out.
        """
        chunks = [
            (group, chunk)
            for group in self._groups
            if self._is_offloaded(group) and group not in self._stepped and not self._is_whole(group)
            for chunk in self._chunks(group, factor, used)
        ]
        stepping = self._stepped | self._submit(sorted(chunks, key=lambda each: not each[1].is_at_hand))
        for group in filter(self._is_offloaded, self._own_steps):
            if group not in stepping and not self._is_whole(group):
                stepping[group] = self._tiers.worker.submit(lambda: None)
        return stepping

    def _submit(self, chunks: Sequence[tuple[ParamGroup, StepChunk]]) -> dict[ParamGroup, Task]:
        """Submit chunks in this order; return for each group the end of its update."""
        num_left = Counter(group for group, _ in chunks)
        ends: dict[ParamGroup, Task] = {}
        for group, chunk in chunks:
            task = self._tiers.step_pipeline.submit(chunk)
            num_left[group] -= 1
            if not num_left[group]:
                ends[group] = self._own_steps[group].end(task)
        return ends

    def _chunks(self, group: ParamGroup, factor: float, used: Mapping[str, bool]) -> list[StepChunk]:
        holds = group.grads is not None and group.grads.holds_sum
        return self._own_steps[group].chunks(factor, used, self.options_of) if holds else []

    def _is_whole(self, group: ParamGroup) -> bool:
        """Say whether the group's parameters are stepped as whole matrices."""
        return self._matrix_step is not None and group.spec.is_matrix

    def _step_matrices(self, factor: float, used: Mapping[str, bool]) -> None:
        """Step the groups of matrices; what is stored off the device is brought there, and written back."""
        if self._matrix_step is None:
            return
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

        self._matrix_step.step(used, MatrixPieces(gradient_of, self._momentum_of, self.options_of))
        for group in [group for group in self._gradients if group.spec.is_matrix]:
            del self._gradients[group]  # of which no parameter was used

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
        for group, gradient in gradients.items():
            if group in self._own_steps:
                self._own_steps[group].step(gradient, factor, used, self.options_of)
        gradients = {group: each for group, each in gradients.items() if group not in self._own_steps}
        is_scaled = scale_in_step(self.optimizer, factor)
        if not is_scaled:
            for gradient in gradients.values():
                gradient.mul_(factor)
        for piece in self.pieces:
            slices = gradients.get(piece.group) if used[piece.name] else None
            piece.view.grad = slices[piece.start : piece.stop] if slices is not None else None
        self.is_stepping = True
        try:
            self.optimizer.step()
        finally:
            self.is_stepping = False
            if is_scaled:
                del self.optimizer.grad_scale  # type: ignore[attr-defined]
        for piece in self.pieces:
            piece.view.grad = None

    def clear(self) -> None:
        """Forget the gradients."""
        for group, task in self._stepped.items():
            task.wait()
            group.is_stepped = False
        self._stepped.clear()
        self._gradients.clear()
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        for group in self._groups:
            if group.grads is not None:
                group.grads.clear()

    def close(self) -> None:
        """Forget all states; the optimizer's groups get back the model's own parameters that it trained."""
        self.clear()
        self._step_guard.remove()
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
        self.pieces.clear()
        self._groups.clear()
        self._holders.clear()
        for own in self._own_steps.values():
            own.close()
        self._own_steps.clear()


def _refuse_own_step(sharded: ShardedOptimizer | None) -> None:
    if sharded is not None and not sharded.is_stepping:
        raise EngineError(
            "optimizer-step-direct",
            "optimizer.step() has no gradients, which the engine keeps; call engine.step() instead",
        )


def _pieces(group: ParamGroup) -> list[ParamPiece]:
    pieces = []
    for slot in group.spec.slots(group.shard_start, group.shard_stop):
        start, stop = slot.offset, slot.offset + slot.stop - slot.start
        view = torch.empty(0, dtype=group.master.dtype)
        if group.spec.tiers.optimizer == "device":
            view = group.master.read(start, stop)
        pieces.append(ParamPiece(slot.param.name, group, nn.Parameter(view), start, stop))
    return pieces


def _place_state(optimizer: Optimizer, view: nn.Parameter, state: str, value: Tensor | float) -> None:
    of_piece = optimizer.state[view]
    current = of_piece.get(state)
    if isinstance(current, Tensor):
        current.copy_(torch.as_tensor(value))
    elif current is not None:
        of_piece[state] = type(current)(value.item() if isinstance(value, Tensor) else value)
    elif isinstance(value, Tensor):
        options = next(group for group in optimizer.param_groups if any(each is view for each in group["params"]))
        # torch keeps step counts on the host, except for kernels that read them on the device.
        is_on_host = not value.dim() and not (options.get("fused") or options.get("capturable"))
        of_piece[state] = value.detach().to("cpu" if is_on_host else view.device, copy=True)
    else:
        of_piece[state] = value


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
        groups = [group for group in self._sharding.groups if not group.spec.is_matrix]  # all ranks step a matrix
        streamed = [group for group in groups if group.spec.tiers.optimizer != "device"]
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
