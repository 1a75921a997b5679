"""A backward leaves gradients of weights that are computed later in a sink, as zero-bubble schedules need it.

A layer with an autograd function of its own asks for the sink in its forward. In its backward it defers to the sink
what it would compute for its weight. It then gives the function a detached weight: an edge to the parameter without a
gradient still fires the parameter's hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from shardwise.runtime.torch_private import view_base


class WeightGradSink(Protocol):
    """Takes gradients to be computed later; `shardwise.pipeline.split_backward.WeightGradQueue` is one."""

    def defer(
        self, parameters: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]], held: Sequence[Tensor]
    ) -> None:
        """Compute the gradients of some parameters later; call this in a backward.

        Args:
            compute: returns their gradients, each of its parameter's shape.
            held: the tensors that `compute` reads, which must not be changed until then.
        """


def weight_sink(x: Tensor) -> WeightGradSink | None:
    """Return the sink of the forward that runs, or None where gradients are computed at once."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not has_torch_function((x,)):
        return None
    # A mode that has a sink answers; every other one, and a subclass, calls this again without itself.
    return handle_torch_function(weight_sink, (x,), x)


def parameter_of_weight(weight: Any) -> tuple[nn.Parameter, bool] | None:
    """Return the parameter that a product's weight is, and whether it is its transpose; None where it is neither.

    Returns:
        a leaf that requires a gradient.
    """
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.requires_grad:
        return None
    base = weight if weight.is_leaf else view_base(weight)
    if not isinstance(base, nn.Parameter) or not base.is_leaf or not base.is_floating_point():
        return None
    if base is weight:
        return base, False
    is_transposed = base.dim() == 2 and (weight.shape, weight.stride()) == (base.shape[::-1], base.stride()[::-1])
    return (base, True) if is_transposed and weight.storage_offset() == base.storage_offset() else None
