"""Executes a rank's row of a schedule: the handlers of forwards, backwards and transfers.

Between the forward and the backward of a micro-batch a stage keeps the graph, the received tensors that require a
gradient, and the edges of the graph at which the gradients of the sent tensors enter. It keeps no sent tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shardwise.config.resolve import ResolvedConfig
from shardwise.layout.layout import Layout
from shardwise.layout.pipeline_layout import PipelineLayout
from shardwise.pipeline.boundary import BoundaryEnd, Shapes, leaves_with_gradient
from shardwise.pipeline.split_backward import WeightGradQueue
from shardwise.pipeline.stage_module import StageForward
from shardwise.runtime.timeline import Timeline
from shardwise.schedule.actions import Action, ActionKind, Payload, Schedule
from shardwise.schedule.lower import lower
from shardwise.schedule.pipelines import pipeline_evaluation, pipeline_step


class StageEvents(Protocol):
    """Calls that the executor makes around a stage's computations: for data and loss, states, records.

    Attributes:
        shapes: of each micro-batch's tensors; all ranks of the pipeline have the same.
    """

    shapes: Sequence[Shapes]

    def forward(self, stage: int, micro_batch: int) -> Any:
        """Run the model's forward on a micro-batch; on the last stage return the mean loss."""

    def before_backward(self, stage: int, micro_batch: int) -> None:
        """Prepare for a backward, which is about to begin."""

    def before_weight_gradients(self, stage: int, micro_batch: int) -> None:
        """Prepare for the deferred gradients of weights, which are about to be computed."""

    def after_backward(self, stage: int, micro_batch: int) -> None:
        """Follow up a backward, or deferred gradients of weights, that has ended."""

    def loss_weight(self, loss: Tensor) -> Tensor:
        """Return the gradient of a loss that `forward` returned."""


@dataclass
class _MicrobatchState:
    """Holds what a stage keeps of a micro-batch between forward and backward."""

    received: list[Tensor]
    roots: list[Any]  # the loss, or edges of the graph
    output: Any = None  # kept until it is sent
    gradients: list[Tensor | None] = field(default_factory=list)  # of the received tensors, kept until they are sent


@dataclass(eq=False)
class StageCompute:
    """Computes the stages of a rank.

    Attributes:
        stage_forward: runs one stage of the model.
        last: the last stage of the whole pipeline.
        inlets: by stage, the boundary to the stage before; the first stage has none.
        outlets: by stage, the boundary to the next stage; the last stage has none.
        queue: of deferred weight gradients, where the schedule splits backwards; else None.
    """

    stage_forward: StageForward
    last: int
    inlets: Mapping[int, BoundaryEnd]
    outlets: Mapping[int, BoundaryEnd]
    timeline: Timeline
    queue: WeightGradQueue | None
    _in_flight: dict[tuple[int, int], _MicrobatchState] = field(default_factory=dict)

    def handlers(self, events: StageEvents) -> dict[ActionKind, Handler]:
        """Begin a step, or an evaluation, of the micro-batches of `events`; return what does each kind of action."""
        # Without gradients a value does not say that it requires one.
        keys = [(torch.is_grad_enabled(), shape) for shape in events.shapes]
        for end in self._ends():
            end.begin_step(keys)

        def run_backward(action: Action) -> None:
            self.run_backward(*_place(action), events)

        return {
            ActionKind.FORWARD: lambda action: self.run_forward(*_place(action), events),
            ActionKind.BACKWARD: run_backward,
            ActionKind.BACKWARD_INPUT: run_backward,
            ActionKind.BACKWARD_WEIGHT: lambda action: self.run_backward_weight(*_place(action), events),
            ActionKind.SEND: self.send,
            ActionKind.RECEIVE: self.receive,
        }

    def run_forward(self, stage: int, micro_batch: int, events: StageEvents) -> None:
        """Run a stage's forward of a micro-batch."""
        inlet, outlet = self.inlets.get(stage), self.outlets.get(stage)
        received = None
        if inlet is not None:
            received = inlet.take(micro_batch)  # see [Note: Receives are posted ahead]
            self.timeline.restart()
        self.stage_forward.begin(stage, received)
        try:
            with self._splitting():
                output = events.forward(stage, micro_batch)
        finally:
            self.stage_forward.end()
        # [Note: Edges in place of outputs]
        # A backward begins at the output's place in the graph, and needs none of its values. A stage holds several
        # micro-batches between forward and backward, and tensors would hold the memory of their outputs; an edge holds
        # the graph alone. The output lives until it has been sent.
        is_last, has_graph = stage == self.last, torch.is_grad_enabled()
        edges = [get_gradient_edge(leaf) for leaf in leaves_with_gradient(output)] if has_graph and not is_last else []
        if has_graph or not is_last:
            record = _MicrobatchState(leaves_with_gradient(received), [output] if is_last else edges, output)
            self._in_flight[stage, micro_batch] = record
        if outlet is not None and outlet.is_local:
            self._send_output(stage, micro_batch, outlet)

    def run_backward(self, stage: int, micro_batch: int, events: StageEvents) -> None:
        """Run a stage's backward of a micro-batch; where backwards are split, without the gradients of weights.

        Args:
            micro_batch: its number in the step; its forward has run.
            events: called before and after, and for the gradient of the loss.
        """
        record, inlet, outlet = self._in_flight[stage, micro_batch], self.inlets.get(stage), self.outlets.get(stage)
        gradients: Sequence[Tensor | None] = ()
        if outlet is not None:
            gradients = outlet.take(micro_batch)
            self.timeline.restart()
        events.before_backward(stage, micro_batch)
        if outlet is None:
            (loss,) = record.roots
            assert isinstance(loss, Tensor), "of the last stage"
            gradients = [events.loss_weight(loss).to(loss.dtype).reshape(loss.shape)]
        given = [
            (root, gradient) for root, gradient in zip(record.roots, gradients, strict=True) if gradient is not None
        ]
        record.roots.clear()
        if given:
            with self._splitting():
                torch.autograd.backward([root for root, _ in given], [gradient for _, gradient in given])
        del given, gradients
        events.after_backward(stage, micro_batch)
        if self.queue is not None:
            self.queue.collect((stage, micro_batch))  # see [Note: Weight gradients and reductions]
        record.gradients.extend(leaf.grad for leaf in record.received)
        record.received.clear()
        if inlet is None:
            del self._in_flight[stage, micro_batch]
        elif inlet.is_local:
            self._send_gradients(stage, micro_batch, inlet)

    def run_backward_weight(self, stage: int, micro_batch: int, events: StageEvents) -> None:
        """Compute the gradients of weights that the backward of a micro-batch has deferred.

        Args:
            micro_batch: its number in the step; its `run_backward` has run.
        """
        assert self.queue is not None, "only schedules that split backwards have these"
        events.before_weight_gradients(stage, micro_batch)
        self.queue.drain((stage, micro_batch))
        events.after_backward(stage, micro_batch)

    def send(self, action: Action) -> None:
        """Start to send a stage's output of a micro-batch, or the gradients of what it received."""
        stage, micro_batch = _place(action)
        if action.payload is Payload.ACTIVATION:
            self._send_output(stage, micro_batch, self.outlets[stage])
        else:
            self._send_gradients(stage, micro_batch, self.inlets[stage])

    def receive(self, action: Action) -> None:
        """Post the receive of what a stage needs of a micro-batch; it is waited for where it is used."""
        stage, micro_batch = _place(action)
        on_end = self.timeline.leave_open()
        ends = self.inlets if action.payload is Payload.ACTIVATION else self.outlets
        # [Note: Receives are posted ahead]
        # The schedule posts a receive one computation before its use (`insert_transfers`), so the message is under way
        # while that computes. Neither posting nor sending waits: a rank waits in `take`, and in `finish` after its row.
        # Both ends post in the order of the channel, and `verify` has found that the rows can run beside each other, so
        # what a rank waits for is sent.
        ends[stage].post(micro_batch, on_end)

    def check_done(self) -> None:
        """Make sure that every gradient has been computed.

        Raises:
            RuntimeError: the schedule has left some uncomputed.
        """
        if self.queue is not None:
            self.queue.check_empty()

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for end in self._ends():
            end.finish()

    def close(self) -> None:
        """Abandon the step, and end what is under way between the stages."""
        self.abandon()
        for end in self._ends():
            end.close()

    def abandon(self) -> None:
        """Forget the micro-batches in flight and the deferred gradients."""
        self._in_flight.clear()
        self.stage_forward.end()
        if self.queue is not None:
            self.queue.clear()

    def _send_output(self, stage: int, micro_batch: int, outlet: BoundaryEnd) -> None:
        record = self._in_flight[stage, micro_batch]
        outlet.send(micro_batch, record.output)
        record.output = None
        if not torch.is_grad_enabled():
            del self._in_flight[stage, micro_batch]

    def _send_gradients(self, stage: int, micro_batch: int, inlet: BoundaryEnd) -> None:
        inlet.send(micro_batch, self._in_flight.pop((stage, micro_batch)).gradients)

    def _ends(self) -> Iterable[BoundaryEnd]:
        return (*self.inlets.values(), *self.outlets.values())

    def _splitting(self) -> AbstractContextManager[Any]:
        is_split = self.queue is not None and torch.is_grad_enabled()
        return self.queue.splitting() if is_split and self.queue is not None else nullcontext()


def _place(action: Action) -> tuple[int, int]:
    assert action.micro_batch is not None, "computations and transfers belong to a micro-batch"
    return action.stage, action.micro_batch


Handler = Callable[[Action], None]
Handlers = Mapping[ActionKind, Handler]


def execute(row: Sequence[Action], handlers: Handlers, timeline: Timeline) -> None:
    """Perform the actions of a row in their order.

    Args:
        handlers: one for each kind of action in the row.
    """
    for action in row:
        with timeline.perform(action):
            handlers[action.kind](action)


def step_schedule(config: ResolvedConfig, layout: Layout) -> Schedule:
    """Build the schedule of one optimizer step for all ranks of the pipeline, and verify it.

    Args:
        layout: of the run; it has a pipeline.

    Raises:
        ConfigError: there is no schedule of this name, or it does not support this number of stages.
        ScheduleError: the schedule cannot run.
    """
    pipeline, stage, tiers = pipeline_of(layout), layout.stage, config.tiers
    section = config.pipeline
    computations = pipeline_step(
        section.schedule, layout.mesh.pp, config.batch.accumulation or 1, section.virtual_stages
    )
    return lower(
        computations,
        unshard_for_use=stage.unshard_for_use,
        reduce_each_backward=stage.reduce_each_backward and not pipeline.gathers_once,
        unshard_after_step=stage.unshard_after_step,
        gather=section.gather,
        fetched=(None,) if tiers.params != "device" else (),
        evicted=(None,) if tiers.grads != "device" else (),
        stepped=(None,) if tiers.optimizer != "device" else (),
    )


def evaluation_schedule(config: ResolvedConfig, layout: Layout, num_batches: int) -> Schedule:
    """Build the schedule that runs the forwards of some batches, and verify it.

    Args:
        layout: of the run; it has a pipeline.
    """
    computations = pipeline_evaluation(pipeline_of(layout).placement, num_batches)
    return lower(
        computations,
        unshard_for_use=layout.stage.unshard_for_use,
        gather=config.pipeline.gather,
        fetched=(None,) if config.tiers.params != "device" else (),
    )


def pipeline_of(layout: Layout) -> PipelineLayout:
    """Return the pipeline of a layout.

    Raises:
        ValueError: the layout has none.
    """
    if layout.pipeline is None:
        raise ValueError("a layout without a pipeline has no schedule; set mesh.pp to more than 1")
    return layout.pipeline
