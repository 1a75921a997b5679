"""Price what the host does for a step: it launches kernels, runs the engine's code around blocks, and waits at syncs.

The host runs ahead of the device until something needs a result, so a step takes the longest way through two queues:
for some piece of it, what the host does up to there and what the device does from there on.

>>> queued_s((4.0, 8.0), (1.0, 2.0), num_micro_batches=2), queued_s((1.0, 2.0), (4.0, 8.0), num_micro_batches=2)
(24.0, 24.0)
>>> queued_s((1.0, 8.0), (4.0, 2.0), num_micro_batches=1)  # it waits for the forward's launches alone
12.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LAUNCH_S, BACKWARD_LAUNCH_S = 12e-6, 10e-6
"""Seconds to launch a kernel from Python, and from autograd: a Llama of 16 layers with 42 kernels each takes 8.1 ms
without gradients on B200 (stas00/ml-engineering, training/performance), torch's linear layer with autograd 13.5 us on
H100 (NVIDIA/TransformerEngine, issue 2053). Autograd's threads run no Python."""
COMPILED_LAUNCH_S: Final = 14e-6
"""Seconds a kernel that a compiler made, guards and wrappers included (the same table: 3.4 ms for 240 kernels)."""
GRACE_SHARE: Final = 2.6
"""How much longer Python takes on Grace: 33 and 37 us on GH200 and GB200 for those 13.5 (the same issue)."""
SYNC_S: Final = 20e-6
"""Seconds from a result on the device to the next kernel that the host launches after it has read it: two launches."""

EAGER_LAUNCHES, COMPILED_LAUNCHES = (42.0, 78.0), (14.0, 25.0)
"""Kernels of a block forward and backward, as transformers' `modeling_llama.py` has them (two norms 16, products 7,
rotation 10, attention 3, activation 2, sums 2), and where a compiler fuses the element-wise ones."""
NUM_PRODUCTS: Final = 7
"""Products of a block, whose weights' gradients are so many kernels of the backward."""
ADAPTER_LAUNCHES: Final = (4.0, 6.0)
"""More of each adapted layer: two products, a scale and a sum (peft, `tuners/lora/layer.py`)."""
EXPERTS_LAUNCHES: Final = (25.0, 50.0)
"""More of a block with experts: router, sorts, gathers, grouped products (transformers, `integrations/moe.py`)."""
ENDS_LAUNCHES: Final = (25.0, 40.0)
"""Of embedding, head and loss."""


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Hold what a code's host does for each micro-batch, and in a step.

    Attributes:
        launches: kernels of a block, forward and backward.
        experts_launches: more of a block with experts.
        launch_s, backward_launch_s: to launch one kernel in that pass.
        block_s: the engine's own code around a block, forward and backward, without what it launches.
        again_s: around a block that runs again.
        num_syncs: of a block with experts, in each pass, where the host reads what the device computed.
        alone_s: for a block before each micro-batch, in which nothing is launched.
        reads_loss: whether it reads each micro-batch's loss, so that none is launched before the last is done.
        param_s: for each parameter in the optimizer's step.
    """

    launches: tuple[float, float] = EAGER_LAUNCHES
    experts_launches: tuple[float, float] = EXPERTS_LAUNCHES
    launch_s: float = LAUNCH_S
    backward_launch_s: float = BACKWARD_LAUNCH_S
    block_s: tuple[float, float] = (0.0, 0.0)
    again_s: float = 0.0
    num_syncs: float = 0.0
    alone_s: float = 0.0
    reads_loss: bool = False
    param_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """Hold the host's seconds for a block of a micro-batch, for the model's ends, and for each parameter's step; the
    other fields are those of `HostCosts`.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    ends_forward_s: float = 0.0
    ends_backward_s: float = 0.0
    alone_s: float = 0.0
    reads_loss: bool = False
    param_s: float = 0.0


def host_times(costs: HostCosts, *, experts_share: float, again_share: float, speed_share: float = 1.0) -> HostTimes:
    """Return the host's times.

    Args:
        experts_share: share of blocks that have experts.
        again_share: share of blocks whose forward runs again in the backward.
        speed_share: how much longer this host takes.
    """
    extra, (before_s, after_s) = costs.experts_launches, costs.block_s
    forward_s = before_s + costs.launch_s * (costs.launches[0] + experts_share * extra[0])
    backward_s = after_s + costs.backward_launch_s * (costs.launches[1] + experts_share * extra[1])
    forward_s += experts_share * costs.num_syncs * SYNC_S
    backward_s += again_share * (forward_s + costs.again_s)
    return HostTimes(
        forward_s=speed_share * forward_s,
        backward_s=speed_share * backward_s,
        ends_forward_s=speed_share * costs.launch_s * ENDS_LAUNCHES[0],
        ends_backward_s=speed_share * costs.backward_launch_s * ENDS_LAUNCHES[1],
        alone_s=speed_share * costs.alone_s,
        reads_loss=costs.reads_loss,
        param_s=speed_share * costs.param_s,
    )


def queued_s(
    device: tuple[float, float],
    host: tuple[float, float],
    *,
    num_micro_batches: int,
    alone_s: float = 0.0,
    reads_loss: bool = False,
) -> float:
    """Return the seconds of all passes, of each of which device and host take the seconds of a forward and a backward.

    A pass launches its kernels evenly: it ends when the device has done all of it, from when the first is launched, and
    no sooner than the last is. From the third micro-batch on each takes as long as the one before.

    Args:
        alone_s: of the host before each micro-batch, without launches.
        reads_loss: whether it waits for each micro-batch's loss.
    """
    launched_s = done_s = before_s = 0.0
    for _ in range(min(num_micro_batches, 3)):
        before_s = done_s
        launched_s = (max(launched_s, done_s) if reads_loss else launched_s) + alone_s
        for on_device_s, on_host_s in zip(device, host, strict=True):
            done_s = max(max(done_s, launched_s) + on_device_s, launched_s + on_host_s)
            launched_s += on_host_s
    return done_s + max(0, num_micro_batches - 3) * (done_s - before_s)
