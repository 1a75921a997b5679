"""The pipeline runner takes an engine's steps through a pipeline: it says what a schedule's actions do with the
engine's parts.

A table of handlers executes a schedule (`shardwise.pipeline.executor`). The pipeline itself has the handlers of
computations and transfers. This module has those that touch the states (unshard, reduce, step), and what surrounds a
computation: data, random numbers, loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.loss import LossAccumulator, LossSum
from shardwise.comm.p2p import P2PChannels
from shardwise.comm.records import CommError
from shardwise.config.errors import EngineError
from shardwise.engine.step_context import StepContext
from shardwise.engine.steps import RankBatch, run_model
from shardwise.engine.types import StepResult
from shardwise.layout.layout import Layout
from shardwise.pipeline.boundary import Shapes, open_boundaries
from shardwise.pipeline.executor import Handlers, StageCompute, evaluation_schedule, execute, pipeline_of, step_schedule
from shardwise.pipeline.split_backward import WeightGradQueue
from shardwise.pipeline.stage_module import RecordedOutputs, StageForward
from shardwise.runtime.precision import torch_dtype
from shardwise.runtime.torch_private import pytree
from shardwise.schedule.actions import Action, ActionKind
from shardwise.schedule.registry import recipe_of
from shardwise.zero.pipeline_adapter import PipelineAdapter


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
        context: of an engine whose layout has a pipeline.
        forward: runs one stage of the model.

    Attributes:
        schedule: of a step, for all ranks of the pipeline.
    """

    def __init__(self, context: StepContext, forward: StageForward, pipes: P2PChannels) -> None:
        config, layout = context.config, context.layout
        pipeline = pipeline_of(layout)
        self.schedule = step_schedule(config, layout)
        self._context = context
        self._pipeline = pipeline
        self._row = self.schedule.ranks[pipeline.index]
        self._forward = forward
        self._groups = PipelineAdapter(context.sharding, layout)
        self._pipes = pipes
        context.timeline.is_scheduled = True
        describe = None if pipes.examples is None else pipes.examples.__getitem__
        inlets, outlets = open_boundaries(
            pipes, pipeline.placement, pipeline.index, (RecordedOutputs, *forward.types), describe
        )
        queue = WeightGradQueue() if recipe_of(config.pipeline.schedule).splits_backward else None
        self._compute = StageCompute(forward, pipeline.num_stages, inlets, outlets, context.timeline, queue)
        self._evaluations: dict[int, Sequence[Action]] = {}
        self._has_failed = False
        self._is_out_of_step = False

    def check_direct(self, call: str) -> None:
        """Raise, because a rank has some of the layers only.

        Raises:
            EngineError: always.
        """
        raise EngineError(
            "pipeline-rank-alone",
            f"{call} cannot run alone under mesh.pp={self._context.layout.mesh.pp}, where each rank has some of the "
            "layers; call engine.train_step(batches) or engine.eval_step(batches)",
        )

    def train(self, batches: Sequence[Any]) -> StepResult:
        """Take a step as the schedule says."""
        context = self._context
        self._check_in_step()
        context.before_model()  # here: after the first stage's forward has begun, a rank would wait in vain
        execution = self._prepare(self._row_of(len(batches)), batches, context.losses)
        context.batches.extend(batches)
        context.timeline.is_recording = True
        context.status.begin_backward()
        context.syncs = False  # the schedule alone says when to reduce
        try:
            self._perform(execution)
        finally:
            context.syncs = True
            context.timeline.close_step()  # after what follows the step in the schedule
        if execution.result is None:
            raise RuntimeError("the schedule has no STEP; add one")
        return execution.result

    def _row_of(self, num_batches: int) -> Sequence[Action]:
        """Return this rank's row of a step; a simulation also takes steps of fewer micro-batches than the config's."""
        config = self._context.config
        if num_batches == (config.batch.accumulation or 1):
            return self._row
        batch = config.batch.model_copy(update={"accumulation": num_batches})
        schedule = step_schedule(config.model_copy(update={"batch": batch}), self._context.layout)
        return schedule.ranks[self._pipeline.index]

    def evaluate(self, batches: Sequence[Any], losses: LossAccumulator) -> None:
        """Run the forwards as a schedule says; `losses` is given the losses of `batches`."""
        context = self._context
        context.status.check(params_suffice=True)
        self._check_in_step()
        if not batches:
            return
        if len(batches) not in self._evaluations:  # mostly as many each time
            schedule = evaluation_schedule(context.config, context.layout, len(batches))
            self._evaluations[len(batches)] = schedule.ranks[self._pipeline.index]
        execution = self._prepare(self._evaluations[len(batches)], batches, losses)
        context.timeline.is_recording = False
        self._perform(execution)

    def forward(self, batch: Any) -> LossSum | None:
        """Run the forward of one batch through all stages."""
        self.evaluate([batch], LossAccumulator(self._context.comms))
        return None

    def close(self) -> None:
        """Close the channels."""
        self._compute.close()

    def _check_in_step(self) -> None:
        """Raise where messages between stages may be left over from a schedule that has not reached its end.

        Raises:
            EngineError: they may.
        """
        if self._is_out_of_step:
            raise EngineError(
                "stages-out-of-step",
                "an exception has ended a step or an evaluation amid its schedule, so the stages are no longer at the "
                "same message; call engine.close() on every rank, or start again from a checkpoint",
            )

    def _prepare(self, row: Sequence[Action], batches: Sequence[Any], losses: LossAccumulator) -> _Execution:
        self._forward.begin_step()
        taken: list[RankBatch] = []
        num_samples = 0
        for number, batch in enumerate(batches):
            taken.append(RankBatch.of(self._context, batch, num_samples, number))
            num_samples += taken[-1].num_samples
        parts = self._context, self._forward, self._groups, self._compute
        return _Execution(*parts, row, taken, losses, self.forward)

    def _perform(self, execution: _Execution) -> None:
        """Execute a row of the schedule; where it fails, note why for the ranks that wait for this one."""
        context = self._context
        try:
            handlers = {**self._compute.handlers(execution), **execution.handlers()}
            execute(execution.row, handlers, context.timeline)
            self._compute.finish()
            self._forward.end_step()
        except BaseException as error:
            self._forward.end_step()
            self._is_out_of_step |= not execution.is_stepping
            self._compute.abandon()
            self._groups.end_step()
            if isinstance(error, Exception) and not isinstance(error, CommError):
                # The other stages wait for this one in vain, and their errors quote this text.
                context.note_failure(f"{type(error).__name__}: {error}")
                self._has_failed = True
            if not execution.is_stepping:
                self._pipes.hang_up()
                if not torch.is_grad_enabled():
                    # The first stages have sent all that they have, and wait in the evaluation's sum.
                    context.comms.all.hang_up()
            raise
        if self._has_failed:
            context.note_failure("")
            self._has_failed = False


class _Execution:
    """Executes one row over some batches: does what surrounds their computations, and the actions that touch states."""

    def __init__(
        self,
        context: StepContext,
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
        self._context = context
        self._stage_forward = forward
        self._groups = groups
        self._compute = compute
        self._taken = taken
        self._losses = losses
        self._evaluate = evaluate
        self.shapes: Sequence[Shapes] = [_shapes_of(each.share.inputs) for each in taken]
        pipeline = pipeline_of(context.layout)
        self._last = pipeline.num_stages - 1
        self._keeps = context.layout.stage.unshard_for_use and pipeline.gathers_once
        self._num_reduces = Counter(action.stage for action in row if action.kind is ActionKind.REDUCE)

    def forward(self, stage: int, micro_batch: int) -> Any:
        """Run the model's forward on a micro-batch; on the last stage return the mean loss."""
        self._groups.select_stage(stage)
        self._groups.wait(stage)
        taken = self._taken[micro_batch]
        output = run_model(self._context, taken, lambda output: self._read(output, taken, stage))
        if torch.is_grad_enabled():
            self._groups.save_record(stage, micro_batch)
        return output

    def before_backward(self, stage: int, micro_batch: int) -> None:
        """Make the states ready for a backward."""
        self._groups.select_stage(stage)
        self._groups.wait(stage)
        self._groups.restore_record(stage, micro_batch)
        self._context.begin_backward()

    def before_weight_gradients(self, stage: int, micro_batch: int) -> None:
        """Expect gradients; no parameter is needed for them."""
        self._groups.select_stage(stage)
        self._context.sharding.expect_gradients()

    def after_backward(self, stage: int, micro_batch: int) -> None:
        """Stop expecting gradients: all of them are there."""
        self._context.sharding.expect_no_gradients()

    def loss_weight(self, loss: Tensor) -> Tensor:
        """Return the gradient of a loss that `forward` returned."""
        return self._losses.close(loss) * self._context.scaler.scale

    def _read(self, output: Any, taken: RankBatch, stage: int) -> Any:
        if stage != self._last:
            return output
        total = self._stage_forward.read_loss(lambda: taken.loss(self._context, output))
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
            self._context.status.end_backward()
            self.is_stepping = True
            self._stage_forward.end_step(self._context.check_batch)
            self.result = self._context.step(self._evaluate)
            self._compute.abandon()
            self._groups.end_step()

    def _fetch(self, action: Action) -> None:
        if self.result is None:
            self._groups.prefetch(action.stage)


def _shapes_of(inputs: Any) -> Shapes:
    """Return the shapes of the tensors that a model is given."""
    return tuple(tuple(leaf.shape) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))


def _nothing(action: Action) -> None:
    pass
