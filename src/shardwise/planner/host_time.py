"""Price what the host does for a step: launches and syncs, moves of states that are off the device, and their steps.

It runs ahead of the device until something needs a result, so a step takes the longest way through two queues: for some
piece of it, what the host does up to there and what the device does from there on.

>>> queued_s((4.0, 8.0), (1.0, 2.0), num_micro_batches=2), queued_s((1.0, 2.0), (4.0, 8.0), num_micro_batches=2)
(24.0, 24.0)
>>> queued_s((1.0, 8.0), (4.0, 2.0), num_micro_batches=1)  # it waits for the forward's launches alone
12.0

States move over PCIe, through the host's memory and to disks. Devices of a node share its memory and its disks; each
has its own PCIe link, both directions at once. What moves in a pass may be hidden by what the pass computes. A step
waits for all gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

from shardwise.config.resolve import ResolvedConfig, Tier
from shardwise.layout.layout import TIERS, Layout
from shardwise.layout.param_groups import GroupSpec
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.planner.collectives import PLAIN_HOST_BYTES_PER_S
from shardwise.planner.comm_time import HIDDEN_SHARE, Moment, OverlapTimes
from shardwise.planner.folded_layout import FoldedLayouts, LayerCount
from shardwise.planner.hardware import CPU
from shardwise.planner.job import PlanJob, param_of, trains_all

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

# Seconds of our own code around a block in stages 0 to 3, forward and backward together, and in stages 2 and 3 for each
# parameter (docs/benchmarks.md, `benchmarks/hook_overhead.py`: 62 and 102 us with 2 and 9 parameters, 94 and 141), of
# which a forward has a third, and for each parameter in a step (`benchmarks/host_time.py`: 2,366 to 3,178 us for 146).
_BLOCK_S, _PARAM_S, _FORWARD_PART, _STEP_PARAM_S = (51e-6, 51e-6, 51e-6, 81e-6), 6e-6, 1 / 3, 7e-6
_NUM_BLOCK_PARAMS: Final = 9

HOST_STEP_SHARE: Final = 0.4
"""Share of the host's memory bandwidth that a vectorised optimizer's step reaches: tens of GB/s of a socket's 100 to
200 in what DeepSpeed publishes of its CPU Adam (blog deepspeed-zenflow: 4 s for 7 B parameters)."""
PLAIN_DISK_READ_BYTES_PER_S: Final = 3e9
PLAIN_DISK_WRITE_BYTES_PER_S: Final = 1.5e9
"""Bandwidths of one NVMe disk, where none are given."""


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Hold what a code's host does for each micro-batch, and in a step; usual times are of x86.

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
        experts_share: share of blocks that have experts.
        again_share: share of blocks whose forward runs again in the backward.
        slowness: how much longer this host takes for all of it.
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
    experts_share: float = 0.0
    again_share: float = 0.0
    slowness: float = 1.0

    @cached_property
    def _forward_s(self) -> float:
        launches = self.launches[0] + self.experts_share * self.experts_launches[0]
        return self.block_s[0] + self.launch_s * launches + self.experts_share * self.num_syncs * SYNC_S

    @cached_property
    def forward_s(self) -> float:
        """Return the seconds of a block's forward."""
        return self.slowness * self._forward_s

    @cached_property
    def backward_s(self) -> float:
        """Return the seconds of a block's backward."""
        launches = self.launches[1] + self.experts_share * self.experts_launches[1]
        again_s = self.again_share * (self._forward_s + self.again_s)
        return self.slowness * (self.block_s[1] + self.backward_launch_s * launches + again_s)

    @property
    def ends_s(self) -> tuple[float, float]:
        """Return the seconds of the model's ends, forward and backward."""
        launches_s = self.slowness * self.launch_s, self.slowness * self.backward_launch_s
        return launches_s[0] * ENDS_LAUNCHES[0], launches_s[1] * ENDS_LAUNCHES[1]


NO_HOST: Final = HostCosts(slowness=0.0)
"""Of a host that is the device itself, or of a graph, which launches its own kernels."""


def own_costs(s: ResolvedConfig, num_adapted: int, call_s: float) -> HostCosts:
    """Return the costs of our own code.

    Args:
        num_adapted: layers of a block that have adapters.
        call_s: what `doctor` measures of a product without work, which is its launch; 0 where it did not.
    """
    is_compiled, slower = s.compile.enabled, call_s / LAUNCH_S or 1.0
    forward, backward = COMPILED_LAUNCHES if is_compiled else EAGER_LAUNCHES
    launches = (
        forward + num_adapted * ADAPTER_LAUNCHES[0],
        backward + num_adapted * ADAPTER_LAUNCHES[1] - (0 if trains_all(s) else NUM_PRODUCTS),
    )
    engine_s = _BLOCK_S[s.zero.stage] + _PARAM_S * _NUM_BLOCK_PARAMS * (s.zero.stage > 1)
    return HostCosts(
        launches=launches,
        launch_s=slower * (COMPILED_LAUNCH_S if is_compiled else LAUNCH_S),
        backward_launch_s=slower * (COMPILED_LAUNCH_S if is_compiled else BACKWARD_LAUNCH_S),
        block_s=(_FORWARD_PART * engine_s, (1 - _FORWARD_PART) * engine_s),
        param_s=_STEP_PARAM_S,
        num_syncs=float(s.mesh.ep > 1),  # the numbers of tokens that ranks exchange
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


@dataclass(frozen=True)
class TierTransfer:
    """Count the bytes that a rank moves from a memory to the next one, `count` times in a pass of a step."""

    source: Tier
    target: Tier
    num_bytes: int
    moment: Moment
    count: int = 1


class OffloadTimeModel:
    """Time what the candidates of a job move between memories, by folded layouts that others may have too."""

    def __init__(self, job: PlanJob, layouts: FoldedLayouts | None = None) -> None:
        self.job = job
        self.layouts = layouts or FoldedLayouts(job)
        self._times: dict[tuple[object, ...], OverlapTimes] = {}
        cluster, host, measured = job.cluster, job.cluster.host, job.cluster.measured
        num_sharing = max(1, min(cluster.gpus_per_node, cluster.num_gpus))
        self._host_memory_bytes_per_s = host.memory_bytes_per_s / num_sharing
        pcie = min(cluster.gpu.host_bytes_per_s or PLAIN_HOST_BYTES_PER_S, self._host_memory_bytes_per_s)
        read = (host.nvme_read_bytes_per_s or PLAIN_DISK_READ_BYTES_PER_S) / num_sharing
        write = (host.nvme_write_bytes_per_s or PLAIN_DISK_WRITE_BYTES_PER_S) / num_sharing
        # What was measured was so with all ranks at work: it is a rank's share.
        self._bytes_per_s: dict[tuple[Tier, Tier], float] = {
            ("device", "host"): measured.copy_bytes_per_s("device", "host") or pcie,
            ("host", "device"): measured.copy_bytes_per_s("host", "device") or pcie,
            ("nvme", "host"): measured.disk_read_bytes_per_s or read,
            ("host", "nvme"): measured.disk_write_bytes_per_s or write,
        }
        self._host_step_bytes_per_s = HOST_STEP_SHARE * self._host_memory_bytes_per_s
        self._hidden_share = HIDDEN_SHARE
        if measured.device == CPU:  # what copies there takes the cores that compute, as a gather does
            self._host_step_bytes_per_s = measured.step_bytes_per_s or self._host_step_bytes_per_s
            self._hidden_share = HIDDEN_SHARE if measured.hidden_share is None else measured.hidden_share

    def times(self, s: ResolvedConfig, pipeline_rank: int = 0) -> OverlapTimes:
        """Return the times of one rank at a place of the pipeline; all are 0 where everything is on the device."""
        tiers = (s.tiers.params, s.tiers.grads, s.tiers.optimizer, s.tiers.activations)
        if all(tier == "device" for tier in tiers):
            return OverlapTimes()
        of_inputs = (s.batch.micro_size, s.tensor.sequence_parallel, s.recompute.every)
        key = (self.layouts.key(s, pipeline_rank), s.batch.accumulation, of_inputs if tiers[-1] != "device" else None)
        if key not in self._times:
            self._times[key] = self._times_of(s, pipeline_rank, uses_disk="nvme" in tiers)
        return self._times[key]

    def _times_of(self, s: ResolvedConfig, pipeline_rank: int, *, uses_disk: bool) -> OverlapTimes:
        moves, away = self.moves(s, pipeline_rank), self._away(s, pipeline_rank)
        step_s = max(self._moved_s(moves, "step"), sum(self._host_step_s(layout, fold) for layout, fold in away))
        return OverlapTimes(
            forward_s=self._moved_s(moves, "forward"),
            backward_s=self._moved_s(moves, "backward"),
            first_forward_s=self._moved_s(moves, "first forward"),
            last_backward_s=self._moved_s(moves, "last backward"),
            step_s=step_s,
            num_micro_batches=s.batch.accumulation,
            hidden_share=HIDDEN_SHARE if uses_disk else self._hidden_share,  # a disk takes no core
        )

    def moves(self, config: ResolvedConfig, pipeline_rank: int = 0) -> tuple[TierTransfer, ...]:
        """Return all moves of a step: those that `Layout.bytes_across` counts, and the inputs of recomputed blocks."""
        transfers = [
            move for layout, fold in self._away(config, pipeline_rank) for move in _moves_of(config, layout, fold)
        ]
        if config.tiers.activations == "host":
            transfers += self._moves_of_activations(config, pipeline_rank)
        return tuple(transfers)

    def _away(self, s: ResolvedConfig, pipeline_rank: int) -> list[tuple[Layout, LayerCount]]:
        rank = self.layouts.rank(s, pipeline_rank)
        return [(rank.layout, fold) for fold in rank.folds if fold.group.tiers.are_away]

    def _moves_of_activations(self, s: ResolvedConfig, pipeline_rank: int) -> Iterator[TierTransfer]:
        """Yield the moves of each kept block's input: away in the forward, back in the backward."""
        tokens = self.job.seq_len * s.batch.micro_size // s.mesh.cp
        split = s.mesh.tp if s.tensor.sequence_parallel else 1
        num_bytes = DTYPE_BYTES[param_of(s)] * tokens * self.job.shape.hidden_size // split
        num_kept = self.layouts.stages.of(s).layers_on(pipeline_rank) // s.recompute.every
        yield TierTransfer("device", "host", num_bytes, "forward", num_kept)
        yield TierTransfer("host", "device", num_bytes, "backward", num_kept)

    def _moved_s(self, moves: tuple[TierTransfer, ...], moment: Moment) -> float:
        """Return the seconds of a moment's moves: ways run side by side; a disk either reads or writes."""
        seconds = dict.fromkeys(self._bytes_per_s, 0.0)
        for move in moves:
            if move.moment == moment:
                way = (move.source, move.target)
                seconds[way] += move.count * move.num_bytes / self._bytes_per_s[way]
        disk_s = seconds["nvme", "host"] + seconds["host", "nvme"]
        through_memory_s = sum(seconds[way] * self._bytes_per_s[way] for way in seconds) / self._host_memory_bytes_per_s
        return max(seconds["device", "host"], seconds["host", "device"], disk_s, through_memory_s)

    def _host_step_s(self, layout: Layout, fold: LayerCount) -> float:
        """Return the seconds to read and write all states, read the gradient and write the parameter: 30 bytes each
        under Adam.
        """
        group = fold.group
        if group.tiers.optimizer == "device" or not group.trainable:
            return 0.0
        each_bytes = 2 * sum(_kept_bytes(layout, group).values())
        each_bytes += DTYPE_BYTES[layout.precision.accumulate] + DTYPE_BYTES[layout.precision.param]
        return fold.count * group.shard_numel * each_bytes / self._host_step_bytes_per_s


def _kept_bytes(layout: Layout, group: GroupSpec) -> dict[str, int]:
    """Return the bytes of an element in each state that the optimizer keeps of a group, by the state's name."""
    kept = (state for state in layout.states if state.role == "optimizer" and state.is_kept_by(group))
    return {state.name: DTYPE_BYTES[state.dtype_in(group)] for state in kept}


def _moves_of(s: ResolvedConfig, layout: Layout, fold: LayerCount) -> Iterator[TierTransfer]:
    group, widths, count = fold.group, layout.precision, s.batch.accumulation
    tiers, numel, times = group.tiers, group.shard_numel, fold.count
    param_bytes, grad_bytes = (numel * DTYPE_BYTES[dtype] for dtype in (widths.param, widths.accumulate))
    uses = layout.num_unshards(group, count)
    if uses == 1 and count > 1:
        yield from _way(tiers.params, "device", param_bytes, "first forward", times)
    elif uses:
        back = uses // count // 2
        yield from _way(tiers.params, "device", param_bytes, "forward", times * (uses // count - back))
        yield from _way(tiers.params, "device", param_bytes, "backward", times * back)
    if not group.trainable:
        return
    reduces = layout.num_reduces(count)
    moment: Moment = "backward" if reduces == count > 1 else "last backward"
    yield from _way("device", tiers.grads, grad_bytes, moment, times)
    if tiers.grads == "nvme" and reduces > 1:
        yield TierTransfer("nvme", "host", grad_bytes, "last backward", times * (reduces - 1))
    steps_on: Tier = "device" if tiers.optimizer == "device" else "host"
    kept = _kept_bytes(layout, group)
    kept_bytes = numel * sum(kept.values())
    yield from _way(tiers.grads, steps_on, grad_bytes, "step", times)
    yield from _way(tiers.optimizer, steps_on, kept_bytes, "step", times)
    yield from _way(steps_on, tiers.optimizer, kept_bytes, "step", times)
    if "master" not in kept:
        yield from _way(tiers.params, steps_on, param_bytes, "step", times)
    yield from _way(steps_on, tiers.params, param_bytes, "step", times)


def _way(source: Tier, target: Tier, num_bytes: int, moment: Moment, count: int) -> Iterator[TierTransfer]:
    """Yield one move for each border on the way; between device and NVMe the way goes through the host."""
    first, last = TIERS.index(source), TIERS.index(target)
    step = 1 if first <= last else -1
    if count:
        for one, other in pairwise(TIERS[index] for index in range(first, last + step, step)):
            yield TierTransfer(one, other, num_bytes, moment, count)
