"""Time an optimizer step, by part: what ranks compute and exchange, composed along the pipeline's schedule.

Every stage has its forward and backward of one micro-batch, exposed exchanges included; the schedule that the runtime
executes puts them in order, so what is left of the span is the bubble. The gathers and reductions of the data axes,
the moves between memories and the optimizer's step come on top, as far as nothing hides them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final, Literal

from shardwise.config.resolve import ResolvedConfig
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.layout.zero_stages import STAGES, Placement
from shardwise.planner.calibration import PassTimes
from shardwise.planner.comm_time import BlockComm, CommTimeModel
from shardwise.planner.compute_time import ComputeTimeModel
from shardwise.planner.folded_layout import FoldedLayout, FoldedLayouts, StageLayouts
from shardwise.planner.hardware import FittedConstants
from shardwise.planner.host_time import NO_HOST, HostCosts, OffloadTimeModel, queued_s
from shardwise.planner.job import PlanJob, SectionNumbers, num_data_ranks, product_dtype, trains_all
from shardwise.planner.results import TIME_PARTS, TimeEstimate
from shardwise.schedule.actions import ScheduleError
from shardwise.schedule.formulas import bubble_s, least_bubble_share
from shardwise.schedule.pipelines import recipe_of
from shardwise.schedule.simulate import OpTimes, PipelineSimulator

_NO_TIME: Final = PassTimes()
_Bubble = Literal["least", "quick", "exact"]
"""Of equal stages at least; of a closed form, where there is one; of the schedule, which is simulated."""

STRAGGLING: Final = 0.008
"""The spread of nodes' step times, a share of it: the slowest of many decides (Jiang et al. 2024, arXiv 2402.15627,
section 6.3: 0.5 % of machines were about 10 % slower)."""


_InStages = tuple[Mapping[str, float], int, tuple[float, float], float | None]
"""The parts that are of the stages of the rank that is busy longest, that rank, the seconds of its forward and backward
of a micro-batch, and the bubble's rate."""


@dataclass(frozen=True)
class _Stage:
    """Hold one micro-batch of one stage, by part of `TIME_PARTS`.

    Attributes:
        launching_s: of the host, forward and backward; a pipeline's pass takes no less, as passes of its micro-batches
            alternate.
    """

    forward: Mapping[str, float]
    backward_input: Mapping[str, float]
    backward_weight_s: float
    launching_s: tuple[float, float] = (0.0, 0.0)

    @cached_property
    def times(self) -> OpTimes:
        forward_s, input_s = sum(self.forward.values()), sum(self.backward_input.values())
        return OpTimes(
            forward_s=max(forward_s, self.launching_s[0]),
            backward_input_s=max(input_s, self.launching_s[1] - self.backward_weight_s),
            backward_weight_s=self.backward_weight_s,
        )

    def parts(self, num_micro_batches: int) -> dict[str, float]:
        working_s = sum(self.forward.values()) + sum(self.backward_input.values()) + self.backward_weight_s
        waiting_s = self.times.total_s - working_s
        found = {"compute": (self.backward_weight_s + waiting_s) * num_micro_batches}
        for each in (self.forward, self.backward_input):
            for part, seconds in each.items():
                found[part] = found.get(part, 0.0) + seconds * num_micro_batches
        return found


class TimeModel:
    """Time a job's candidates, and keep what several of them share."""

    def __init__(self, job: PlanJob, layouts: FoldedLayouts | None = None) -> None:
        self.job = job
        self.layouts = layouts or FoldedLayouts(job)
        self.compute = ComputeTimeModel(job)
        self.communication = CommTimeModel(job, self.layouts)
        self.offload = OffloadTimeModel(job, self.layouts)
        self.pipelines = PipelineSimulator()
        self._numbers = SectionNumbers()
        self._known_units: dict[tuple[object, ...], tuple[_Stage, _Stage, _Stage]] = {}
        self._known_ends: dict[tuple[object, ...], tuple[_Stage, _Stage]] = {}
        self._known_stages: dict[tuple[object, ...], dict[tuple[int, bool, bool], _Stage]] = {}
        self._hosts: dict[tuple[object, ...], HostCosts] = {}
        self._steps: dict[tuple[object, ...], float] = {}
        self._known_passes: dict[tuple[object, ...], _InStages] = {}

    def estimate(self, config: ResolvedConfig, *, is_quick: bool = False) -> TimeEstimate:
        """Estimate the time of one optimizer step.

        Args:
            is_quick: whether the bubble is that of a closed form, where there is one, rather than of the schedule.
        """
        in_stages, worst, passes, bubble_rate = self._in_stages(config, "quick" if is_quick else "exact")
        parts = dict(in_stages)
        parts["data"] = self.communication.data(config, worst).exposed_s(*passes)
        parts["offload"] = self.offload.times(config, worst).exposed_s(*passes)
        host = self._host(config)
        parts["step"] = self._step_s(config, host, worst)
        moved_s = (parts["data"] + parts["offload"]) / config.batch.accumulation
        launches_s = self._launches_s(config, host)
        parts["compute"] += self._waiting_s(config, host, launches_s, (passes[0], passes[1] + moved_s))
        parts["other"] = self._straggling_s(sum(parts.values()))
        step_s = sum(parts.values())
        kind = kind_of(self.job, config, sum(launches_s) * config.batch.accumulation / step_s)
        low_s, high_s = interval_s(kind, step_s)
        return TimeEstimate(step_s=step_s, low_s=low_s, high_s=high_s, parts=parts, bubble_rate=bubble_rate, kind=kind)

    def stages_s(self, config: ResolvedConfig) -> float:
        """Return the least seconds of a step without what depends on where states are stored: nothing is simulated."""
        stages_s = sum(self._in_stages(config, "least")[0].values())
        return stages_s + self._straggling_s(stages_s)

    def _in_stages(self, config: ResolvedConfig, bubble: _Bubble) -> _InStages:
        cut, s = self.layouts.stages.of(config), config
        schedule = s.pipeline.schedule, s.pipeline.virtual_stages, s.batch.accumulation, s.mesh.pp
        # The next stage is so far away.
        key = (self._units_key(s), cut.layers, schedule, num_data_ranks(s), bubble)
        if key not in self._known_passes:
            self._known_passes[key] = self._passes(s, cut, bubble)
        return self._known_passes[key]

    def _passes(self, config: ResolvedConfig, cut: StageLayouts, bubble: _Bubble) -> _InStages:
        stages = self._stages(config, cut)
        totals = {id(stage): stage.times.total_s for stage in stages}
        totals_s = [totals[id(stage)] for stage in stages]
        busy = [config.batch.accumulation * sum([totals_s[each] for each in rank]) for rank in cut.of_ranks]
        worst = busy.index(max(busy))
        worst_stages = [stages[each] for each in cut.of_ranks[worst]]
        parts = dict.fromkeys(TIME_PARTS, 0.0)
        for stage in worst_stages:
            for part, seconds in stage.parts(config.batch.accumulation).items():
                parts[part] += seconds
        span_s, bubble_rate = self._span(config, stages, busy, bubble)
        parts["bubble"] = max(span_s - busy[worst], 0.0)
        forward_s = sum(stage.times.forward_s for stage in worst_stages)
        backward_s = sum(stage.times.total_s - stage.times.forward_s for stage in worst_stages)
        return parts, worst, (forward_s, backward_s), bubble_rate

    def _waiting_s(
        self, s: ResolvedConfig, host: HostCosts, launches_s: tuple[float, float], passes_s: tuple[float, float]
    ) -> float:
        """Return by how much a step of one stage takes longer than its device's passes, as they wait for launches."""
        if s.mesh.pp > 1:
            return 0.0
        count, alone_s = s.batch.accumulation, self.job.shape.num_layers * (host.slowness * host.alone_s)
        span_s = queued_s(passes_s, launches_s, num_micro_batches=count, alone_s=alone_s, reads_loss=host.reads_loss)
        return max(0.0, span_s - count * sum(passes_s))

    def _launches_s(self, s: ResolvedConfig, host: HostCosts) -> tuple[float, float]:
        """Return what the host takes for a micro-batch of a rank, forward and backward."""
        num_blocks, (first_s, last_s) = self.job.shape.num_layers / s.mesh.pp, host.ends_s
        return num_blocks * host.forward_s + first_s, num_blocks * host.backward_s + last_s

    def busy_s(self, config: ResolvedConfig) -> float:
        """Return the mean seconds of a step that a rank computes and exchanges in its stages: no step takes less."""
        block_s, first_s, last_s = (unit.times.total_s for unit in self._units(config))
        whole_s = config.batch.accumulation * (self.job.shape.num_layers * block_s + first_s + last_s)
        return whole_s / config.mesh.pp + self._straggling_s(whole_s / config.mesh.pp)

    def op_times(self, config: ResolvedConfig) -> OpTimes:
        """Return the mean times of one micro-batch on a rank, from which the bubble of equal stages follows."""
        stages = self._stages(config, self.layouts.stages.of(config))
        means_s = _means_of_ranks([stage.times for stage in stages], config.mesh.pp)
        return OpTimes(*means_s, transfer_s=self.communication.transfer_s(config))

    def _stages(self, s: ResolvedConfig, cut: StageLayouts) -> list[_Stage]:
        """Return the stages of a config; equal ones are one object, shared by configs that compute the same in them."""
        known = self._known_stages.setdefault(self._units_key(s), {})
        for content in set(cut.contents) - known.keys():
            known[content] = self._stage(s, *content)
        return [known[content] for content in cut.contents]

    def _units_key(self, s: ResolvedConfig) -> tuple[object, ...]:
        """Return all of a config that the times of blocks and ends depend on, those of a pipeline's host with them."""
        number = self._numbers.of
        mesh = (s.mesh.tp, s.mesh.cp, s.mesh.ep, s.mesh.pp > 1, num_data_ranks(s) > 1)
        batch = (s.batch.micro_size, s.batch.accumulation > 1)
        sections = number(s.tensor), number(s.context), number(s.recompute), number(s.precision), number(s.lora)
        return *mesh, *batch, s.zero.stage, s.compile.enabled, s.experts.skew, *sections

    def _stage(self, s: ResolvedConfig, num_blocks: int, is_first: bool, is_last: bool) -> _Stage:
        block, first, last = self._units(s)
        ends = [first] * is_first + [last] * is_last
        host = self._host(s) if s.mesh.pp > 1 else NO_HOST
        return _Stage(
            _added(block.forward, num_blocks, [unit.forward for unit in ends]),
            _added(block.backward_input, num_blocks, [unit.backward_input for unit in ends]),
            sum((unit.backward_weight_s for unit in ends), block.backward_weight_s * num_blocks),
            (num_blocks * host.forward_s, num_blocks * host.backward_s),
        )

    def _units(self, s: ResolvedConfig) -> tuple[_Stage, _Stage, _Stage]:
        """Return a block, the embedding, and the head with its loss."""
        key = self._units_key(s)
        if key not in self._known_units:
            block = self._unit(self.compute.block(s), self.communication.block(s), self.compute.attention(s))
            self._known_units[key] = block, *self._ends(s)
        return self._known_units[key]

    def _ends(self, s: ResolvedConfig) -> tuple[_Stage, _Stage]:
        """Return the embedding and the head, which do not depend on how blocks exchange contexts and recompute."""
        number = self._numbers.of
        work = s.mesh.tp, s.mesh.cp, s.batch.micro_size, s.batch.accumulation > 1, s.zero.stage
        key = *work, number(s.tensor), number(s.precision), number(s.lora), s.compile.enabled
        if key not in self._known_ends:
            self._known_ends[key] = (
                self._unit(self.compute.embedding(s), self.communication.embedding(s)),
                self._unit(self.compute.head(s), self.communication.head(s)),
            )
        return self._known_ends[key]

    def _unit(self, times: PassTimes, exchange: BlockComm, attention: PassTimes = _NO_TIME) -> _Stage:
        """Add to a unit's compute the part of its exchanges that the same pass's compute does not hide."""
        forward = {"compute": times.forward_s, **exchange.forward.exposed(times.forward_s, attention.forward_s)}
        backward = exchange.backward.exposed(times.backward_s, attention.backward_s)
        again = exchange.recompute.exposed(times.recompute_s, min(attention.forward_s, times.recompute_s))
        backward = {part: seconds + again[part] for part, seconds in backward.items()}
        backward |= {"compute": times.backward_input_s, "recompute": times.recompute_s}
        return _Stage(forward, backward, times.backward_weight_s)

    def _span(
        self, s: ResolvedConfig, stages: Sequence[_Stage], busy: Sequence[float], bubble: _Bubble
    ) -> tuple[float, float | None]:
        """Return the seconds of the pipeline, and the rate of its bubble."""
        if s.mesh.pp == 1:
            return busy[0], None
        transfer_s = self.communication.transfer_s(s)
        name, v, count = s.pipeline.schedule, s.pipeline.virtual_stages, s.batch.accumulation
        mean_s = sum(busy) / len(busy)
        quick_s = None if bubble == "exact" else quick_bubble_s(s, [stage.times for stage in stages])
        if quick_s is not None:
            span_s = max(busy) + quick_s + 2 * (len(stages) - 1) * transfer_s
            return span_s, 1.0 - mean_s / span_s
        if bubble == "least":
            return max(*busy, mean_s * (1 + least_bubble_share(name, s.mesh.pp, count, v))), None
        distinct = {id(stage): stage for stage in stages}  # equal stages are one object
        timed = {key: replace(stage.times, transfer_s=transfer_s) for key, stage in distinct.items()}
        span = self.pipelines.span(name, s.mesh.pp, v, count, [timed[id(stage)] for stage in stages])
        return span.step_s, span.bubble_rate

    def _host(self, s: ResolvedConfig) -> HostCosts:
        number = self._numbers.of
        mesh = (s.mesh.ep, num_data_ranks(s) > 1)
        key = (s.zero.stage, *mesh, s.batch.accumulation, number(s.recompute), number(s.compile), number(s.lora))
        if key not in self._hosts:
            self._hosts[key] = self.compute.host(s)
        return self._hosts[key]

    def _step_s(self, s: ResolvedConfig, host: HostCosts, pipeline_rank: int) -> float:
        """Return the seconds of the optimizer where its states are on the device; elsewhere they count as offload."""
        key = self.layouts.key(s, pipeline_rank), self._numbers.of(s.compile)
        if key not in self._steps:
            rank, is_near = self.layouts.rank(s, pipeline_rank), s.tiers.optimizer == "device"
            trained = [fold for fold in rank.folds if fold.group.trainable]
            numel = sum(
                fold.count * fold.group.padded_numel
                for fold in trained
                if is_near or fold.group.tiers.optimizer == "device"
            )
            num_params = sum(fold.count * len(fold.group.params) for fold in trained)
            launching_s = host.slowness * host.param_s * num_params * (numel > 0)
            on_device_s = self.compute.step_s(s, numel / self._num_optimizer_shards(s))
            self._steps[key] = max(launching_s, on_device_s) + self._matrices_s(s, rank)
        return self._steps[key]

    def _matrices_s(self, s: ResolvedConfig, rank: FoldedLayout) -> float:
        """Return the seconds in which owners orthogonalize whole matrices, and get them and give them back."""
        owned_s = longest_s = sent_numel = 0.0
        for each in rank.folds:
            if each.group.is_matrix and each.group.trainable:
                times = [self.compute.orthogonalize_s(place.global_shape) for place in each.group.params]
                owned_s += each.count * sum(times) / (each.group.num_shards * s.mesh.tp)
                longest_s = max(longest_s, *times)
                sent_numel += each.count * rank.layout.exchanged_numel(each.group)
        num_owners = s.mesh.dp_shard * s.mesh.cp * s.mesh.tp
        owned_s = max(owned_s, longest_s)  # of more ranks than matrices some have none
        if not sent_numel:
            return owned_s
        # There and back; an all-to-all keeps its n-th at home.
        num_bytes = sent_numel / 2 * DTYPE_BYTES["bf16"] * num_owners / (num_owners - 1)
        return owned_s + 2 * self.communication.network.collective_s("all_to_all", num_bytes, num_owners)

    def _num_optimizer_shards(self, s: ResolvedConfig) -> int:
        return s.mesh.dp_shard * s.mesh.cp if STAGES[s.zero.stage].optimizer is Placement.SHARD else 1

    def _straggling_s(self, step_s: float) -> float:
        """Return the delay by the slowest node: the largest of n normal deviates is about sqrt(2 ln n)."""
        num_nodes = math.ceil(self.job.cluster.num_gpus / self.job.cluster.gpus_per_node)
        return step_s * STRAGGLING * math.sqrt(2 * math.log(num_nodes))


def quick_bubble_s(s: ResolvedConfig, stages: Sequence[OpTimes]) -> float | None:
    """Return the bubble of equal ranks; None with so few micro-batches that only the schedule itself shows it.

    Where a formula needs W <= F <= B, as ZB-V's, a B that is shorter than F waits until F would end, and the part of W
    that is longer fills no more.
    """
    forward_s, backward_s, weight_s = _means_of_ranks(stages, s.mesh.pp)
    bubble = recipe_of(s.pipeline.schedule).bubble
    if bubble is not None and bubble.needs_ordered_costs:
        backward_s, weight_s = max(backward_s, forward_s), min(weight_s, forward_s)
    shape = s.pipeline.schedule, s.mesh.pp, s.batch.accumulation, s.pipeline.virtual_stages
    try:
        return bubble_s(*shape, forward_s, backward_s, weight_s)
    except ScheduleError:
        return None


def _means_of_ranks(stages: Sequence[OpTimes], num_ranks: int) -> tuple[float, float, float]:
    """Return a rank's mean times of forward, and of backward by inputs and by weights, over all its stages."""
    return (
        sum([stage.forward_s for stage in stages]) / num_ranks,
        sum([stage.backward_input_s for stage in stages]) / num_ranks,
        sum([stage.backward_weight_s for stage in stages]) / num_ranks,
    )


def _added(of_block: Mapping[str, float], num_blocks: int, of_ends: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {part: sum((end[part] for end in of_ends), seconds * num_blocks) for part, seconds in of_block.items()}


Kind = Literal["measured", "fitted", "unfitted", "adapters", "experts", "launches"]
"""What a prediction comes from: a profile of the machine; constants that are fitted to published runs on its devices;
constants that are not; and kinds of jobs for which fewer runs are known: adapters, experts, and steps that wait for the
host."""

SHARES: Final[Mapping[Kind, float]] = MappingProxyType(
    {"measured": 0.12, "fitted": 0.39, "unfitted": 0.55, "adapters": 0.46, "experts": 0.53, "launches": 0.86}
)
"""By what share a step is longer than its price, or shorter, in four of five runs of an unknown source. Only sources
count to which nothing is fitted, each with the same weight, as `benchmarks/planner_accuracy.py` writes them: `fitted`
is the conformal quantile over 24 of these and `adapters` over seven. `experts` have six, and `unfitted` and `launches`
two, too few for that quantile: `experts` is it over all twelve sources, `launches` what holds four fifths of runs, and
`unfitted` covers three sources. `measured` holds the twelve runs of `benchmarks/planner_machine.py`
(docs/benchmarks.md)."""

WITHOUT_EVIDENCE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "experts": "six sources tell how far off a price of experts is",
        "launches": "two sources tell how far off a step is that waits for the host",
        "unfitted": "three sources tell how far off a price is on a device that no runs are fitted to",
    }
)
"""Of kinds for which too few runs are known, the words that say so."""

LAUNCHING_SHARE: Final = 0.7
"""Share of a step from which on what the host launches decides it."""


def kind_of(job: PlanJob, config: ResolvedConfig, launching_share: float = 0.0) -> Kind:
    """Return what a prediction of a config comes from, of whose step the host is busy for a share."""
    if job.cluster.profile is not None:
        return "measured"
    if launching_share > LAUNCHING_SHARE:
        return "launches"
    if job.shape.experts is not None:
        return "experts"
    if not trains_all(config):
        return "adapters"
    is_fitted = job.cluster.gpu.fitted != FittedConstants() and product_dtype(config) not in ("fp64", "fp32", "tf32")
    return "fitted" if is_fitted else "unfitted"


def interval_s(kind: Kind, step_s: float) -> tuple[float, float]:
    """Return the least and the most seconds of a step that four of five runs predicted at `step_s` should take."""
    factor = 1 + SHARES[kind]
    return step_s / factor, step_s * factor
