"""Price what is stored off the device: moves over PCIe, through the host's memory and to disks, and a step on the host.

Devices of a node share its memory and its disks; each has its own PCIe link, both directions at once. What moves in a
pass may be hidden by what the pass computes. A step waits for all gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, cast

from shardwise.config.resolve import ResolvedConfig, Tier
from shardwise.layout.layout import TIERS, Layout
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.planner.collectives import PLAIN_HOST_BYTES_PER_S
from shardwise.planner.comm_time import HIDDEN_SHARE, Moment, OverlapTimes
from shardwise.planner.folded_layout import FoldedLayouts, LayerCount
from shardwise.planner.hardware import CPU
from shardwise.planner.job import PlanJob, param_of

HOST_STEP_SHARE: Final = 0.4
"""Share of the host's memory bandwidth that a vectorised optimizer's step reaches: tens of GB/s of a socket's 100 to
200 in what DeepSpeed publishes of its CPU Adam (blog deepspeed-zenflow: 4 s for 7 B parameters)."""
PLAIN_DISK_READ_BYTES_PER_S: Final = 3e9
PLAIN_DISK_WRITE_BYTES_PER_S: Final = 1.5e9
"""Bandwidths of one NVMe disk, where none are given."""


@dataclass(frozen=True)
class TierTransfer:
    """Count the bytes that a rank moves from a memory to the next one, `count` times in a pass of a step."""

    source: Tier
    target: Tier
    num_bytes: int
    moment: Moment
    count: int = 1


class OffloadTimeModel:
    """Time what the candidates of a job move between memories.

    Args:
        layouts: the job's folded layouts, where others have them too; None builds them.
    """

    def __init__(self, job: PlanJob, layouts: FoldedLayouts | None = None) -> None:
        self.job = job
        self.layouts = layouts or FoldedLayouts(job)
        cluster, host = job.cluster, job.cluster.host
        num_sharing = max(1, min(cluster.gpus_per_node, cluster.num_gpus))
        self._host_memory_bytes_per_s = host.memory_bytes_per_s / num_sharing
        pcie = min(cluster.gpu.host_bytes_per_s or PLAIN_HOST_BYTES_PER_S, self._host_memory_bytes_per_s)
        self._bytes_per_s: dict[tuple[Tier, Tier], float] = {
            ("device", "host"): pcie,
            ("host", "device"): pcie,
            ("nvme", "host"): (host.nvme_read_bytes_per_s or PLAIN_DISK_READ_BYTES_PER_S) / num_sharing,
            ("host", "nvme"): (host.nvme_write_bytes_per_s or PLAIN_DISK_WRITE_BYTES_PER_S) / num_sharing,
        }
        self._host_step_bytes_per_s = HOST_STEP_SHARE * self._host_memory_bytes_per_s
        self._hidden_share = HIDDEN_SHARE
        self._times: dict[tuple[object, ...], OverlapTimes] = {}
        self._take_measured()

    def times(self, config: ResolvedConfig, pipeline_rank: int = 0) -> OverlapTimes:
        """Return the times of one rank at a place of the pipeline; all are 0 where everything is on the device."""
        s = config
        if all(tier == "device" for tier in (s.tiers.params, s.tiers.grads, s.tiers.optimizer, s.tiers.activations)):
            return OverlapTimes()
        of_inputs = (s.batch.micro_size, s.tensor.sequence_parallel, s.recompute.every)
        key = self.layouts.key(s, pipeline_rank), s.batch.accumulation, s.tiers.activations == "host" and of_inputs
        if key not in self._times:
            self._times[key] = self._times_of(s, pipeline_rank)
        return self._times[key]

    def _times_of(self, s: ResolvedConfig, pipeline_rank: int) -> OverlapTimes:
        moves, away = self.moves(s, pipeline_rank), self._away(s, pipeline_rank)
        step_s = max(self._moved_s(moves, "step"), sum(self._host_step_s(layout, fold) for layout, fold in away))
        return OverlapTimes(
            forward_s=self._moved_s(moves, "forward"),
            backward_s=self._moved_s(moves, "backward"),
            first_forward_s=self._moved_s(moves, "first forward"),
            last_backward_s=self._moved_s(moves, "last backward"),
            step_s=step_s,
            num_micro_batches=s.batch.accumulation,
            hidden_share=HIDDEN_SHARE
            if "nvme" in (s.tiers.params, s.tiers.grads, s.tiers.optimizer)
            else self._hidden_share,  # a disk takes no core
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
        through_memory = self._host_memory_bytes_per_s
        crossed_bytes = sum(seconds[way] * self._bytes_per_s[way] for way in seconds)
        return max(seconds["device", "host"], seconds["host", "device"], disk_s, crossed_bytes / through_memory)

    def _host_step_s(self, layout: Layout, fold: LayerCount) -> float:
        """Return the seconds to read and write all states, read the gradient and write the parameter: 30 bytes each
        under Adam.
        """
        group = fold.group
        if group.tiers.optimizer == "device" or not group.trainable:
            return 0.0
        widths = layout.precision
        kept_states = [state for state in layout.states if state.role == "optimizer" and state.is_kept_by(group)]
        each_bytes = 2 * sum(DTYPE_BYTES[state.dtype_in(group)] for state in kept_states)
        each_bytes += DTYPE_BYTES[widths.accumulate] + DTYPE_BYTES[widths.param]
        return fold.count * group.shard_numel * each_bytes / self._host_step_bytes_per_s

    def _take_measured(self) -> None:
        """Use measured bandwidths where there are any; measured with all ranks at work, they are a rank's share."""
        profile = self.job.cluster.profile
        if profile is None:
            return
        measured = {way: profile.copy_bytes_per_s(*way) for way in (("device", "host"), ("host", "device"))}
        measured |= {("nvme", "host"): profile.disk_read_bytes_per_s, ("host", "nvme"): profile.disk_write_bytes_per_s}
        self._bytes_per_s |= {cast(tuple[Tier, Tier], way): speed for way, speed in measured.items() if speed}
        if profile.device == CPU:  # what copies there takes the cores that compute, as a gather does
            self._host_step_bytes_per_s = profile.step_bytes_per_s or self._host_step_bytes_per_s
            self._hidden_share = HIDDEN_SHARE if profile.hidden_share is None else profile.hidden_share


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
    kept_states = [state for state in layout.states if state.role == "optimizer" and state.is_kept_by(group)]
    kept_bytes = numel * sum(DTYPE_BYTES[state.dtype_in(group)] for state in kept_states)
    yield from _way(tiers.grads, steps_on, grad_bytes, "step", times)
    yield from _way(tiers.optimizer, steps_on, kept_bytes, "step", times)
    yield from _way(steps_on, tiers.optimizer, kept_bytes, "step", times)
    if not any(state.name == "master" for state in kept_states):
        yield from _way(tiers.params, steps_on, param_bytes, "step", times)
    yield from _way(steps_on, tiers.params, param_bytes, "step", times)


def _way(source: Tier, target: Tier, num_bytes: int, moment: Moment, count: int) -> Iterator[TierTransfer]:
    """Yield one move for each border on the way; between device and NVMe the way goes through the host."""
    first, last = TIERS.index(source), TIERS.index(target)
    step = 1 if first <= last else -1
    if count:
        for one, other in pairwise(TIERS[index] for index in range(first, last + step, step)):
            yield TierTransfer(one, other, num_bytes, moment, count)
