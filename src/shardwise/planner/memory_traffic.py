"""Count the passes that a block's kernels make over tensors, forward and backward; nothing here is fitted.

A pass is one read or one write of a tensor in the parameters' dtype; a kernel that works in fp32 takes two for each.

>>> NORM_PASSES < NORM_IN_FP32_PASSES and FUSED_GATE_PASSES < GATE_PASSES
True
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

Passes = tuple[float, float]
"""Passes of a forward, and of a backward."""

NORM_PASSES: Final[Passes] = (2.0, 3.5)
"""In one kernel: the input is read and the output written; input and gradient are read and a gradient is written, and
the weight's is summed up in pieces."""
NORM_IN_FP32_PASSES: Final[Passes] = (18.0, 42.0)
"""In kernels of their own over a widened copy: cast 3, square 4, mean 2, scale 4, cast back 3, weigh 2; backward the
gradients of weight and input 6, of casts 6, of both factors of the scale 12, of the square 12, and their sum 6."""
SUM_PASSES: Final[Passes] = (3.0, 3.0)
"""The residual sum: two are read, one is written."""
DROPOUT_PASSES: Final = 2.5
"""A read, a write, and a mask of one byte, either way."""
FUSED_GATE_PASSES: Final[Passes] = (3.0, 5.0)
"""Gate and other half are read and the product written; both and a gradient are read, two gradients written."""
GATE_PASSES: Final[Passes] = (5.0, 8.0)
"""The same as an activation and a product, each a kernel."""
FUSED_ACTIVATION_PASSES: Final[Passes] = (2.0, 3.0)
"""The activation of a plain feed-forward, the bias with it."""
ACTIVATION_PASSES: Final[Passes] = (4.0, 6.0)
"""The same as two kernels."""
FUSED_ROTATION_PASSES: Final = 2.0
"""The positions' rotation of queries and keys, either way."""
ROTATION_PASSES: Final = 10.0
"""The same written out: halves are swapped and joined, two products, a sum."""
FUSED_SOFTMAX_PASSES: Final[Passes] = (5.0, 6.0)
"""Passes over attention's scores: one kernel scales, masks and normalises between two batched products."""
SOFTMAX_PASSES: Final[Passes] = (14.0, 15.0)
"""The same written out: scale, mask, widen, softmax and narrow, each a kernel, half of them in fp32."""
WIDE_SOFTMAX_PASSES: Final[Passes] = (9.0, 10.0)
"""The same for scores in fp32: in addition to what one kernel does, scale and mask read and write once each."""
EXPERTS_PASSES: Final[Passes] = (6.0, 8.0)
"""Passes over what is copied for experts: tokens are sorted and copied, results copied back, weighed and summed."""
FUSED_EXPERTS_PASSES: Final[Passes] = (4.0, 4.0)
"""The same in one kernel each way, where the experts' activation applies the weights."""
EMBEDDING_PASSES: Final[Passes] = (2.0, 4.0)
"""Rows are looked up; their gradients are added to what is there."""

LOSS_BYTES: Final[Passes] = (8.0, 16.0)
"""Bytes of each logit in fp32: read and written by the log-softmax; read with the gradient and written by its backward,
twice as the sum over the vocabulary comes first. What is narrower is read or written besides."""
STEP_BYTES: Final = 28.0
"""Bytes of an element that Adam steps: gradient, master and two moments are read, the last three written, in fp32."""
STEP_CAST_BYTES: Final = 2.0
"""Bytes of the parameter that is written from the master."""

NUM_KERNELS: Final = 40.0
"""Kernels that a block's forward launches, operation by operation; the backward of its input launches no fewer."""
NUM_COMPILED_KERNELS: Final = 14.0
"""The same where element-wise ones are fused: products, attention, and what stands between them."""
NUM_SOFTMAX_KERNELS: Final = 6.0
"""Additional kernels where attention is written out."""
WEIGHT_KERNELS_SHARE: Final = 1 / 3
"""Kernels of the backward of the weights alone, as a share of a forward's: a product for each."""


@dataclass(frozen=True)
class PassTimes:
    """Hold the seconds of one micro-batch on one rank; `recompute_s` is part of none of the others."""

    forward_s: float = 0.0
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    recompute_s: float = 0.0

    @property
    def backward_s(self) -> float:
        """Return the seconds of both gradients."""
        return self.backward_input_s + self.backward_weight_s

    @property
    def total_s(self) -> float:
        """Return the seconds of all passes."""
        return self.forward_s + self.backward_s + self.recompute_s

    def times(self, factor: float) -> PassTimes:
        """Multiply all times by `factor`."""
        return PassTimes(
            self.forward_s * factor,
            self.backward_input_s * factor,
            self.backward_weight_s * factor,
            self.recompute_s * factor,
        )

    def plus(self, other: PassTimes) -> PassTimes:
        """Add the times of two units that run one after the other."""
        return PassTimes(
            self.forward_s + other.forward_s,
            self.backward_input_s + other.backward_input_s,
            self.backward_weight_s + other.backward_weight_s,
            self.recompute_s + other.recompute_s,
        )
