"""The pipeline runner takes an engine's steps through a pipeline: it says what a schedule's actions do with the
engine's parts.

A table of handlers executes a schedule (`shardwise.pipeline.executor`). The pipeline itself has the handlers of
computations and transfers. This module has those that touch the states (unshard, reduce, step), and what surrounds a
computation: data, random numbers, loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardwise.comm.loss import LossAccumulator, LossSum
from shardwise.comm.p2p import P2PChannels
from shardwise.comm.records import CommError
from shardwise.config.errors import EngineError
from shardwise.engine.parts import EngineParts
from shardwise.engine.runner import RankBatch, run_model
from shardwise.engine.step import before_model, begin_backward, update
from shardwise.engine.types import StepResult
from shardwise.layout.layout import Layout
from shardwise.pipeline.boundary import Shapes, open_boundaries
from shardwise.pipeline.carried_calls import RecordedOutputs
from shardwise.pipeline.executor import Handlers, StageCompute, evaluation_schedule, execute, pipeline_of, step_schedule
from shardwise.pipeline.split_backward import WeightGradQueue
from shardwise.pipeline.stage_module import StageForward
from shardwise.runtime.precision import torch_dtype
from shardwise.runtime.torch_private import pytree
from shardwise.schedule.actions import Action, ActionKind
from shardwise.schedule.pipelines import recipe_of
from shardwise.zero.order import PrefetchOrder, RecordedOrder
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.sharding_state import ShardingState


def make_stages(model: nn.Module, layout: Layout, device: torch.device, is_simulated: bool) -> StageForward | None:
    """Make the object that runs one stage of a model; call it while the model's modules are as the user built them.

    Args:
        layout: says which units each stage has.
        is_simulated: all tensors are fake, and the other ranks are not there.

    Returns:
        None without a pipeline.
    """
    pipeline = layout.pipeline
    if pipeline is None:
        return None
    dtypes = {
        id(model.get_parameter(place.name)): torch_dtype(layout.precision_of(group).param)
        for group in layout.model_groups
        for place in group.params
        if not group.is_opaque
    }
    return StageForward(model, pipeline.units, sorted(pipeline.held), device, is_simulated, dtypes)


class PipelineRunner:
    """Executes the schedule of a layout's pipeline.

    Args:
        parts: of an engine whose layout has a pipeline.
        forward: runs one stage of the model.

    Attributes:
        schedule: of a step, for all ranks of the pipeline.
    """

    def __init__(self, parts: EngineParts, forward: StageForward, pipes: P2PChannels) -> None:
        config, layout = parts.config, parts.layout
        pipeline = pipeline_of(layout)
        self.schedule = step_schedule(config, layout)
        self._parts = parts
        self._pipeline = pipeline
        self._rows = {config.batch.accumulation or 1: self.schedule.ranks[pipeline.index]}
        self._forward = forward
        self._groups = PipelineAdapter(parts.sharding, layout)
        self._pipes = pipes
        parts.timeline.is_scheduled = True
        describe = None if pipes.examples is None else pipes.examples.__getitem__
        inlets, outlets = open_boundaries(
            pipes, pipeline.placement, pipeline.index, (RecordedOutputs, *forward.types), describe
        )
        queue = WeightGradQueue() if recipe_of(config.pipeline.schedule).splits_backward else None
        self._compute = StageCompute(forward, pipeline.num_stages - 1, inlets, outlets, parts.timeline, queue)
        self._evaluations: dict[int, Sequence[Action]] = {}
        self._is_out_of_step = False
        self._accumulated: _Execution | None = None  # whose gradients await the step

    def check_direct(self, call: str) -> NoReturn:
        """Raise, because a rank has some of the layers only.

        Raises:
            EngineError: always.
        """
        raise EngineError(
            "pipeline-rank-alone",
            f"{call} cannot run alone under mesh.pp={self._parts.layout.mesh.pp}, where each rank has some of the "
            "layers; call engine.train_step(batches) or engine.eval_step(batches)",
        )

    def accumulate(self, batches: Sequence[Any]) -> None:
        parts = self._parts
        self._check_in_step(may_add=True)
        before_model(parts)  # here: after the first stage's forward has begun, a rank would wait in vain
        row = self._row_of(len(batches))
        execution = self._prepare(row, batches, parts.losses)
        parts.state.batches.extend(batches)
        parts.timeline.is_recording = True
        parts.status.begin_backward()
        try:
            with parts.state.without_sync():  # the schedule alone says when to reduce
                self._perform(execution, row[: _first_step(row)], self._compute.handlers(execution))
        except BaseException:
            parts.timeline.close_step()
            raise
        parts.status.end_backward()
        self._accumulated = execution

    def step(self) -> StepResult:
        execution, self._accumulated = self._accumulated, None
        if execution is None or self._parts.state.num_backwards == 0:
            self.check_direct("engine.step")
        try:
            self._perform(execution, execution.row[_first_step(execution.row) :], {}, is_last=True)
        finally:
            self._parts.timeline.close_step()  # after what follows the step in the schedule
        if execution.result is None:
            raise RuntimeError("the schedule has no STEP; add one")
        return execution.result

    def _row_of(self, num_batches: int) -> Sequence[Action]:
        """Return this rank's row of a step; not all steps have as many micro-batches as the config says."""
        if num_batches not in self._rows:
            config = self._parts.config
            batch = config.batch.model_copy(update={"accumulation": num_batches})
            schedule = step_schedule(config.model_copy(update={"batch": batch}), self._parts.layout)
            self._rows[num_batches] = schedule.ranks[self._pipeline.index]
        return self._rows[num_batches]

    def evaluate(self, batches: Sequence[Any], losses: LossAccumulator) -> None:
        parts = self._parts
        parts.status.check(params_suffice=True)
        self._check_in_step()
        if not batches:
            return
        if len(batches) not in self._evaluations:  # mostly as many each time
            schedule = evaluation_schedule(parts.config, parts.layout, len(batches))
            self._evaluations[len(batches)] = schedule.ranks[self._pipeline.index]
        execution = self._prepare(self._evaluations[len(batches)], batches, losses)
        parts.timeline.is_recording = False
        self._perform(execution, execution.row, self._compute.handlers(execution), is_last=True)

    def end_evaluation(self) -> None:
        """Compare what the stages' units have left, once all ranks have come to the evaluation's sum."""
        self._forward.compare_left(self._parts.check_batch.agreement)

    def forward(self, batch: Any) -> LossSum | None:
        self.evaluate([batch], LossAccumulator(self._parts.comms))
        return None

    def close(self) -> None:
        """Close the channels."""
        self._compute.close()

    def _check_in_step(self, may_add: bool = False) -> None:
        """End the schedule whose gradients `zero_grad` has dropped, or to which others are added; raise where one has
        not reached its end, and messages between stages may be left over.

        Args:
            may_add: the micro-batches to come add to the gradients of those before, if there are any.

        Raises:
            EngineError: it has not.
        """
        if self._is_out_of_step:
            raise EngineError(
                "stages-out-of-step",
                "an exception has ended a step or an evaluation amid its schedule, so the stages are no longer at the "
                "same message; call engine.close() on every rank, or start again from a checkpoint",
            )
        if self._accumulated is None:
            return
        if self._parts.state.num_backwards > 0 and not may_add:
            raise EngineError(
                "pipeline-awaits-step",
                "the stages have run the micro-batches of a step, whose update is missing; call engine.step(), or "
                "engine.zero_grad() to drop the gradients",
            )
        self._accumulated = None
        self._compute.finish()
        self._forward.end_step()
        self._groups.end_step()

    def _prepare(self, row: Sequence[Action], batches: Sequence[Any], losses: LossAccumulator) -> _Execution:
        self._forward.begin_step()
        taken: list[RankBatch] = []
        state = self._parts.state
        for batch in batches:
            taken.append(RankBatch.of(self._parts, batch, state.num_samples, state.num_forwards))
            state.take_forward(taken[-1].num_samples, self._parts.model.training)
        means = self._parts, self._forward, self._groups, self._compute
        return _Execution(*means, row, taken, losses, self.forward)

    def _perform(self, execution: _Execution, row: Sequence[Action], compute: Handlers, is_last: bool = False) -> None:
        """Execute a part of a row, the last one or not; where it fails, note why for the ranks that wait for this one.

        Args:
            compute: the handlers of computations and transfers; none where the part has only actions on states.
        """
        parts = self._parts
        try:
            execute(row, {**compute, **execution.handlers()}, parts.timeline)
            if is_last:
                self._compute.finish()
                self._forward.end_step()
        except BaseException as error:
            self._forward.end_step()
            self._is_out_of_step |= not execution.is_stepping
            self._compute.abandon()
            self._groups.end_step()
            if isinstance(error, Exception) and not isinstance(error, CommError):
                # The other stages wait for this one in vain, and their errors quote this text.
                parts.note_failure(f"{type(error).__name__}: {error}")
            if not execution.is_stepping:
                self._pipes.hang_up()
                if not torch.is_grad_enabled():
                    # The first stages have sent all that they have, and wait in the evaluation's sum.
                    parts.comms.all.hang_up()
            raise


class _Execution:
    """Executes one row over some batches: does what surrounds their computations, and the actions that touch states."""

    def __init__(
        self,
        parts: EngineParts,
        forward: StageForward,
        groups: PipelineAdapter,
        compute: StageCompute,
        row: Sequence[Action],
        taken: Sequence[RankBatch],
        losses: LossAccumulator,
        evaluate: Callable[[Any], object],
    ) -> None:
        self.row = row
        self.result: StepResult | None = None
        self.is_stepping = False  # all messages between stages are over
        self._parts = parts
        self._stage_forward = forward
        self._groups = groups
        self._compute = compute
        self._taken = taken
        self._losses = losses
        self._evaluate = evaluate
        self.shapes: Sequence[Shapes] = [_shapes_of(batch.share.inputs) for batch in taken]
        pipeline = pipeline_of(parts.layout)
        self._last = pipeline.num_stages - 1
        self._keeps = parts.layout.stage.unshard_for_use and pipeline.gathers_once
        self._num_reduces = Counter(action.stage for action in row if action.kind is ActionKind.REDUCE)

    def forward(self, stage: int, micro_batch: int) -> Any:
        self._groups.select_stage(stage)
        self._groups.wait(stage)
        taken = self._taken[micro_batch]
        output = run_model(self._parts, taken, lambda output: self._read(output, taken, stage))
        if torch.is_grad_enabled():
            self._groups.save_record(stage, micro_batch)
        return output

    def before_backward(self, stage: int, micro_batch: int) -> None:
        self._groups.select_stage(stage)
        self._groups.wait(stage)
        self._groups.restore_record(stage, micro_batch)
        begin_backward(self._parts)

    def before_weight_gradients(self, stage: int, micro_batch: int) -> None:
        """Expect gradients; no parameter is needed for them."""
        self._groups.select_stage(stage)
        self._parts.sharding.expect_gradients()

    def after_backward(self, stage: int, micro_batch: int) -> None:
        """Stop expecting gradients: all of them are there."""
        self._parts.sharding.expect_no_gradients()

    def loss_weight(self, loss: Tensor) -> Tensor:
        return self._losses.close(loss) * self._parts.scaler.scale

    def _read(self, output: Any, taken: RankBatch, stage: int) -> Any:
        if stage != self._last:
            return output
        total = self._stage_forward.read_loss(lambda: taken.loss(self._parts, output))
        if torch.is_grad_enabled():
            return self._losses.open(total)
        self._losses.add(total)
        return None

    def handlers(self) -> Handlers:
        """Return the function that handles each kind of action."""
        return {
            ActionKind.UNSHARD: self._unshard,
            ActionKind.RESHARD: self._reshard,
            ActionKind.REDUCE: self._reduce,
            ActionKind.STEP: self._step,
            ActionKind.FETCH: self._fetch,
            ActionKind.EVICT: _nothing,  # gradients leave as their reduction ends, states as their step does
        }

    def _unshard(self, action: Action) -> None:
        """Unshard a stage where one gather serves the whole step; otherwise its units unshard themselves."""
        if self._keeps:
            self._groups.unshard(action.stage)

    def _reshard(self, action: Action) -> None:
        self._groups.reshard(action.stage)

    def _reduce(self, action: Action) -> None:
        self._num_reduces[action.stage] -= 1
        self._groups.reduce(action.stage, is_last=self._num_reduces[action.stage] == 0)

    def _step(self, action: Action) -> None:
        """Take the step of all stages of this rank at the first STEP action: one norm clips them all."""
        if self.result is None:
            self._compute.check_done()
            self.is_stepping = True
            self._stage_forward.end_step(self._parts.check_batch.agreement)
            self.result = update(self._parts, self._evaluate)
            self._compute.abandon()
            self._groups.end_step()

    def _fetch(self, action: Action) -> None:
        if self.result is None:
            self._groups.prefetch(action.stage)


def _first_step(row: Sequence[Action]) -> int:
    """Return the index of the first STEP of a row, after which there are only actions on states."""
    return next((index for index, action in enumerate(row) if action.kind is ActionKind.STEP), len(row))


def _shapes_of(inputs: Any) -> Shapes:
    """Return the shapes of the tensors that a model is given."""
    return tuple(tuple(leaf.shape) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))


def _nothing(action: Action) -> None:
    pass


class PipelineAdapter:
    """Drives the groups of this rank's stages.

    Args:
        sharding: the sharding state of the engine's groups.
    """

    def __init__(self, sharding: ShardingState, layout: Layout) -> None:
        pipeline = layout.pipeline
        assert pipeline is not None, "only a pipeline has a schedule"
        self._sharding = sharding
        self._held = pipeline.held
        self._reduced_stages: set[int] = set()
        self._kept_for: dict[ParamGroup, set[int]] = {}
        stage_of_unit = {group.unit: group.stages[0] for group in layout.groups}
        units = {
            stage: [unit for unit in layout.held_units if stage_of_unit.get(unit) == stage] for stage in self._held
        }
        self._orders: Mapping[int, PrefetchOrder] = {stage: RecordedOrder(names) for stage, names in units.items()}
        self._records: dict[tuple[int, int], list[tuple[int, bool]]] = {}

    def unshard(self, stage: int) -> None:
        """Start to gather a stage's parameters, which stay whole until `reshard`."""
        for group in self._groups_of(stage):
            group.unshard()
            self._kept_for.setdefault(group, set()).add(stage)

    def wait(self, stage: int) -> None:
        """Wait for the parameters that `unshard` has asked for."""
        for group in self._groups_of(stage):
            if stage in self._kept_for.get(group, ()) and group not in self._sharding.kept:
                group.show()
                group.pin()
                self._sharding.kept.add(group)

    def reshard(self, stage: int) -> None:
        """Release a stage's parameters that no other stage keeps."""
        for group in self._groups_of(stage):
            keepers = self._kept_for.get(group, set())
            keepers.discard(stage)
            if not keepers:
                self._sharding.kept.discard(group)
                group.pin(group in self._sharding.held)
                group.reshard()

    def prefetch(self, stage: int) -> None:
        """Start what gathering a stage's parameters would have to wait for on the host."""
        for group in self._groups_of(stage):
            group.prefetch()

    def reduce(self, stage: int, is_last: bool) -> None:
        """Start to reduce a stage's gradients.

        With `is_last`, a group that several stages of this rank add to is reduced with the last of these stages.
        """
        self._reduced_stages.add(stage)
        groups = [
            group
            for group in self._groups_of(stage)
            if not is_last or self._reduced_stages.issuperset(self._held.intersection(group.spec.stages))
        ]
        self._sharding.reduce(groups, is_last)

    def select_stage(self, stage: int) -> None:
        """Prepare a stage's computation: select its order of blocks, and the root's parameters that it uses."""
        self._sharding.order = self._orders[stage]
        self._sharding.units[0].stage = stage

    def save_record(self, stage: int, micro_batch: int) -> None:
        """Keep what units remember of a forward whose backward comes after those of other forwards."""
        self._records[stage, micro_batch] = [unit.save_record() for unit in self._sharding.units]

    def restore_record(self, stage: int, micro_batch: int) -> None:
        """Restore what `save_record` has kept, before the backward of that forward."""
        for unit, record in zip(self._sharding.units, self._records.pop((stage, micro_batch), ()), strict=False):
            unit.restore_record(record)  # but for a second half of the backward

    def end_step(self) -> None:
        """Forget what was under way."""
        self._records.clear()
        self._reduced_stages.clear()
        self._sharding.reductions.final.clear()
        self._kept_for.clear()
        self._sharding.units[0].stage = None

    def _groups_of(self, stage: int) -> list[ParamGroup]:
        return [group for group in self._sharding.groups if stage in group.spec.stages]
