"""The autograd function of row layers; inside `WeightQueue.splitting` it leaves its weight's gradient to the queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor
from torch.autograd import Function

from shardwise.weight_sinks import WeightSink, parameter_behind, weight_sink

Run = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class Later:
    """Where a row layer leaves the gradient of its weight, which is this parameter, or its transpose."""

    weight: Tensor
    sink: WeightSink
    parameter: Tensor
    is_transposed: bool

    @classmethod
    def of(cls, x: Tensor, weight: Tensor) -> Self | None:
        """None where the gradient is computed at once, or not at all."""
        sink = weight_sink(x) if x.requires_grad else None
        found = None if sink is None else parameter_behind(weight)
        return None if sink is None or found is None else cls(weight, sink, *found)

    def defer(self, grad: Tensor, x: Tensor) -> None:
        """Leave it there: `grad` is that of the whole sum, [..., out], `x` the input, [..., in / tp]."""

        def compute() -> list[Tensor]:
            gradient = weight_gradient(grad, x)
            return [gradient.t() if self.is_transposed else gradient]

        self.sink.defer((self.parameter,), compute, (x, grad))


def row_function(product: Run, enter: Run, gather_sequence: Run) -> Run:
    """Of `TensorOps.row`.

    Args:
        product: the layer's op.
        enter: identity whose gradient is summed.
        gather_sequence: the whole sequence, for a sum that was scattered.

    Returns:
        what takes `TensorOps.row`'s arguments and, where there is a `Later`, None for the weight: it has no gradient.
    """

    class Row(Function):
        @staticmethod
        def forward(
            ctx: Any,
            x: Tensor,
            weight: Tensor | None,
            bias: Tensor | None,
            is_sequence: bool,
            name: str,
            later: Later | None,
        ) -> Tensor:
            needs_x, needs_weight = ctx.needs_input_grad[:2]
            ctx.needs_weight = needs_weight
            if later is not None:
                weight, ctx.needs_weight = later.weight, True
            ctx.save_for_backward(x if ctx.needs_weight else None, weight if needs_x else None)
            ctx.is_sequence, ctx.name, ctx.later = is_sequence, name, later
            return product(x, weight, bias, is_sequence, name)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            grad_bias = rows_of(grad).sum(0) if ctx.needs_input_grad[2] else None
            if ctx.needs_input_grad[0] or ctx.needs_weight:
                grad = gather_sequence(grad, ctx.name, None) if ctx.is_sequence else enter(grad, ctx.name)
            grad_x = grad.matmul(weight) if ctx.needs_input_grad[0] else None
            grad_weight = None
            if ctx.later is not None:
                ctx.later.defer(grad, x)
            elif ctx.needs_weight:
                grad_weight = weight_gradient(grad, x)
            return grad_x, grad_weight, grad_bias, None, None, None

    return Row.apply


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """[out, in] of the gradient of the output, [..., out], and the input, [..., in]."""
    return rows_of(grad).t().mm(rows_of(x))


def rows_of(x: Tensor) -> Tensor:
    """[..., k] to [N, k]."""
    return x.reshape(-1, x.shape[-1])
