"""What the stages of one rank compute and hand on: the handlers of forwards, backwards and transfers.

What a micro-batch leaves at a stage between its forward and its backward is the graph, what was received and wants a
gradient, and the edges of the graph at which the gradients of what was sent come in: not what was sent itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shardwise.pipeline.channel import leaves_with_gradient
from shardwise.pipeline.execution import Handler
from shardwise.pipeline.parts import StageForward
from shardwise.pipeline.ports import Port
from shardwise.pipeline.weight_queue import WeightQueue
from shardwise.schedule.actions import Action, Kind, Payload
from shardwise.timeline import Timeline


class StageEvents(Protocol):
    """What surrounds the computations of a stage: data and loss, states, records."""

    def forward(self, stage: int, micro_batch: int) -> Any:
        """Run the model's forward on a micro-batch; on the last stage return the mean loss."""

    def before_backward(self, stage: int, micro_batch: int) -> None:
        """A backward is about to begin."""

    def before_weight_gradients(self, stage: int, micro_batch: int) -> None:
        """The weights' gradients, which a backward has left, are about to be computed."""

    def after_backward(self, stage: int, micro_batch: int) -> None:
        """Either is over."""

    def loss_weight(self, loss: Tensor) -> Tensor:
        """The gradient of a loss that `forward` returned."""


@dataclass
class _InFlight:
    """What a stage keeps of a micro-batch between forward and backward."""

    received: list[Tensor]
    roots: list[Any]  # the loss, or edges of the graph
    output: Any = None  # until it is sent
    gradients: list[Tensor | None] = field(default_factory=list)  # of what was received, until they are sent


class StageCompute:
    """Computes the stages of a rank.

    Args:
        forward: runs one stage of the model.
        num_stages: of all ranks.
        inlets: by stage, from the stage before; none for the first.
        outlets: by stage, to the next one; none for the last.
        timeline: of the engine.
        queue: where the schedule splits backwards.
    """

    def __init__(
        self,
        forward: StageForward,
        num_stages: int,
        inlets: Mapping[int, Port],
        outlets: Mapping[int, Port],
        timeline: Timeline,
        queue: WeightQueue | None,
    ) -> None:
        self._forward = forward
        self._last = num_stages - 1
        self._inlets = inlets
        self._outlets = outlets
        self._timeline = timeline
        self._queue = queue
        self._in_flight: dict[tuple[int, int], _InFlight] = {}

    def handlers(self, events: StageEvents) -> dict[Kind, Handler]:
        """What to do for each kind of action; `events` is told of computations."""

        def run_backward(action: Action) -> None:
            self.run_backward(*_place(action), events)

        return {
            Kind.FORWARD: lambda action: self.run_forward(*_place(action), events),
            Kind.BACKWARD: run_backward,
            Kind.BACKWARD_INPUT: run_backward,
            Kind.BACKWARD_WEIGHT: lambda action: self.run_backward_weight(*_place(action), events),
            Kind.SEND: self.send,
            Kind.RECEIVE: self.receive,
        }

    def run_forward(self, stage: int, micro_batch: int, events: StageEvents) -> None:
        """Run a stage's forward of a micro-batch."""
        inlet, outlet = self._inlets.get(stage), self._outlets.get(stage)
        received = None
        if inlet is not None:
            received = inlet.take(micro_batch)
            self._timeline.restart()
        self._forward.begin(stage, received)
        try:
            with self._splitting():
                output = events.forward(stage, micro_batch)
        finally:
            self._forward.end()
        flight = _InFlight(leaves_with_gradient(received), [], output)
        if torch.is_grad_enabled():
            self._in_flight[stage, micro_batch] = flight
            if stage == self._last:
                flight.roots = [output]
            else:
                flight.roots = [get_gradient_edge(leaf) for leaf in leaves_with_gradient(output)]
        elif stage != self._last:
            self._in_flight[stage, micro_batch] = flight  # until it is sent
        if outlet is not None and outlet.is_local:
            self._send_output(stage, micro_batch, outlet)

    def run_backward(self, stage: int, micro_batch: int, events: StageEvents) -> None:
        """Run a stage's backward of a micro-batch; where backwards are split, but for the gradients of weights."""
        flight, inlet, outlet = self._in_flight[stage, micro_batch], self._inlets.get(stage), self._outlets.get(stage)
        gradients: Sequence[Tensor | None] = ()
        if outlet is not None:
            gradients = outlet.take_gradients(micro_batch)
            self._timeline.restart()
        events.before_backward(stage, micro_batch)
        if outlet is None:
            (loss,) = flight.roots
            assert isinstance(loss, Tensor), "of the last stage"
            gradients = [events.loss_weight(loss).to(loss.dtype).reshape(loss.shape)]
        given = [
            (root, gradient) for root, gradient in zip(flight.roots, gradients, strict=True) if gradient is not None
        ]
        flight.roots = []
        if given:
            with self._splitting():
                torch.autograd.backward([root for root, _ in given], [gradient for _, gradient in given])
        del given, gradients
        events.after_backward(stage, micro_batch)
        if self._queue is not None:
            self._queue.collect((stage, micro_batch))
        flight.gradients = [leaf.grad for leaf in flight.received]
        flight.received = []
        if inlet is None:
            del self._in_flight[stage, micro_batch]
        elif inlet.is_local:
            self._send_gradients(stage, micro_batch, inlet)

    def run_backward_weight(self, stage: int, micro_batch: int, events: StageEvents) -> None:
        """Compute the gradients of weights that the backward of a micro-batch has left."""
        assert self._queue is not None, "only schedules that split backwards have these"
        events.before_weight_gradients(stage, micro_batch)
        self._queue.drain((stage, micro_batch))
        events.after_backward(stage, micro_batch)

    def send(self, action: Action) -> None:
        """Start to send what a stage has computed of a micro-batch."""
        stage, micro_batch = _place(action)
        if action.payload is Payload.ACTIVATION:
            self._send_output(stage, micro_batch, self._outlets[stage])
        else:
            self._send_gradients(stage, micro_batch, self._inlets[stage])

    def receive(self, action: Action) -> None:
        """Be ready to receive what a stage needs of a micro-batch; it is waited for where it is used."""
        stage, micro_batch = _place(action)
        on_end = self._timeline.leave_open()
        if action.payload is Payload.ACTIVATION:
            self._inlets[stage].post(micro_batch, on_end)
        else:
            self._outlets[stage].post_gradients(micro_batch, on_end)

    def check_done(self) -> None:
        """Make sure that every gradient has been computed.

        Raises:
            RuntimeError: the schedule has left some.
        """
        if self._queue is not None:
            self._queue.check_empty()

    def finish(self) -> None:
        """Wait until all that was sent is through."""
        for port in (*self._inlets.values(), *self._outlets.values()):
            port.finish()

    def close(self) -> None:
        """Give the channels up."""
        self.abandon()
        for port in (*self._inlets.values(), *self._outlets.values()):
            port.close()

    def abandon(self) -> None:
        """Forget what is under way."""
        self._in_flight.clear()
        self._forward.end()
        if self._queue is not None:
            self._queue.clear()

    def _send_output(self, stage: int, micro_batch: int, outlet: Port) -> None:
        flight = self._in_flight[stage, micro_batch]
        outlet.send(micro_batch, flight.output)
        flight.output = None
        if not torch.is_grad_enabled():
            del self._in_flight[stage, micro_batch]

    def _send_gradients(self, stage: int, micro_batch: int, inlet: Port) -> None:
        inlet.send_gradients(micro_batch, self._in_flight.pop((stage, micro_batch)).gradients)

    def _splitting(self) -> AbstractContextManager[Any]:
        is_split = self._queue is not None and torch.is_grad_enabled()
        return self._queue.splitting() if is_split and self._queue is not None else nullcontext()


def _place(action: Action) -> tuple[int, int]:
    assert action.micro_batch is not None, "computations and transfers belong to a micro-batch"
    return action.stage, action.micro_batch
