"""Price runs of other frameworks: the planner's models, with what `PublishedTraits` says of the code that ran."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from planner_eval.traits import PublishedTraits
from shardwise.config.resolve import ResolvedConfig, Tier
from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import GroupSpec
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.layout.zero_stages import Placement
from shardwise.planner.calibration import PassTimes
from shardwise.planner.comm_time import CommTimeModel, OverlapTimes, PricedCollective
from shardwise.planner.compact_layout import CompactLayout, LayerCount, RankLayerCounts
from shardwise.planner.compute_time import ComputeTimeModel, alignment_share
from shardwise.planner.job import ModelShape, PlanJob, param_of, product_dtype, trains_all
from shardwise.planner.memory import MemoryModel
from shardwise.planner.pricer import Pricer
from shardwise.planner.stages import StageLayouts, StageTable
from shardwise.planner.step_time import TimeModel
from shardwise.schedule.pipelines import placement_of

FIRST_FLASH_SHARE: Final = 0.5
"""The first FlashAttention's rate as a share of the second's (Dao 2023, abstract: about twice as fast)."""
GRAPHED_KERNEL_S: Final = 1.5e-6
"""Seconds that a kernel of a graph takes on a device beyond its work."""
BATCHED_SHARE: Final = 0.6
"""Share of a large product's rate that the batched products of attention reach where its scores are stored."""

# Reads and writes of a tensor in the parameters' dtype, forward and backward, as in `planner/compute_time.py`: over
# scores (scale, mask, widen, softmax, narrow, half of them in fp32), the same where scores are fp32, and fused; beyond
# a fused norm's (cast 3, square 4, mean 2, scale 4, cast back 3, weigh 2; backward as much for each); of a dropout (a
# read, a write, a mask of one byte); and of a plain activation that a code with a fused softmax fuses, too.
SOFTMAX, WIDE_SOFTMAX, FUSED_SOFTMAX = (14.0, 15.0), (9.0, 10.0), (5.0, 6.0)
NORM_IN_FP32, DROPOUT, FUSED_ACTIVATION = (16.0, 38.5), 2.5, (-2.0, -3.0)


def published_traits(job: PlanJob) -> PublishedTraits:
    """Return the traits of a job; those that it does not have are our library's."""
    return job.traits if isinstance(job.traits, PublishedTraits) else PublishedTraits()


class PublishedStages(StageTable):
    """Give all stages the same number of blocks; the library cuts by cost."""

    def _cut(self, s: ResolvedConfig) -> StageLayouts:
        if s.mesh.pp == 1 or s.pipeline.cut is not None:
            return super()._cut(s)
        shape, placement = self.job.shape, placement_of(s.pipeline.schedule, s.mesh.pp, s.pipeline.virtual_stages)
        layers = even_layers(shape.num_layers, placement.num_stages)
        return StageLayouts(placement, layers, shape.num_layers - shape.num_expert_layers, placement.num_stages - 1)


class PublishedLayout(CompactLayout):
    """Shard the optimizer's states over another number of ranks, where the code does."""

    def __init__(self, job: PlanJob) -> None:
        super().__init__(job, PublishedStages(job))

    def _bytes_at_rest(self, config: ResolvedConfig, pipeline_rank: int, tier: Tier | None) -> dict[str, int]:
        totals = super()._bytes_at_rest(config, pipeline_rank, tier)
        num_shards = published_traits(self.job).optimizer_shards
        if num_shards is None:
            return totals
        rank = self.rank(config, pipeline_rank)
        states = tuple(dataclasses.replace(each, placement=Placement.SHARD) for each in rank.layout.states)
        layout = dataclasses.replace(rank.layout, states=states)
        resharded = rank.total(
            lambda group: layout.group_bytes_at_rest(dataclasses.replace(group, num_shards=num_shards), 0, tier)
        )
        return {**totals, "optimizer": resharded["optimizer"]}


class PublishedMemoryModel(MemoryModel):
    """Count states as other code stores them, and what it gathers and keeps."""

    def __init__(self, job: PlanJob, compact: CompactLayout | None = None) -> None:
        super().__init__(job, compact or PublishedLayout(job))

    def _sums(
        self, folds: Iterable[LayerCount], width_of: Callable[[GroupSpec], int] = lambda group: 1
    ) -> tuple[int, int, int]:
        root, block, whole = super()._sums(folds, width_of)
        share = largest_share(self.job.shape) if published_traits(self.job).moves_tensors else 1.0
        return root, int(block * share), whole

    def _keeps_sent(self) -> bool:
        return not published_traits(self.job).frees_outputs

    def _states(self, config: ResolvedConfig, rank: int, here: Mapping[str, int]) -> dict[str, float]:
        traits, states = published_traits(self.job), super()._states(config, rank, here)
        numel, shape = self.compact.rank(config, rank).numel, self.job.shape
        states["params"] *= traits.params_share
        states["optimizer"] *= traits.optimizer_share
        if trains_all(config) and traits.unsharded_grad_bytes:
            waits = traits.reduces_once and config.zero.stage >= 2  # until the last micro-batch there are no others
            states["grads"] = (0.0 if waits else states["grads"]) + traits.unsharded_grad_bytes * numel
        more = (1 - 1 / config.mesh.tp) * shape.vocab_size * shape.hidden_size if traits.whole_embedding else 0.0
        return {name: size * (1 + more / numel) for name, size in states.items()}

    def _step_bytes(self, config: ResolvedConfig, folds: RankLayerCounts) -> float:
        return super()._step_bytes(config, folds) if published_traits(self.job).widens_grads else 0.0


class PublishedComputeModel(ComputeTimeModel):
    """Time kernels of graphs, attention of other generations, and norms and dropout that are not fused."""

    def attention(self, s: ResolvedConfig) -> PassTimes:
        """Price scores that are stored: batched products, and what passes over the scores."""
        shape, traits = self.job.shape, published_traits(self.job)
        if traits.attention == "flash":
            return super().attention(s)
        scores = self._tokens(s) * self._num_keys * shape.num_heads / s.mesh.tp
        width, forward = DTYPE_BYTES[param_of(s)], 4.0 * scores * shape.head_dim
        written_out = WIDE_SOFTMAX if param_of(s) == "fp32" else SOFTMAX
        passes = FUSED_SOFTMAX if traits.attention == "fused-softmax" else written_out
        rate = (
            BATCHED_SHARE
            * self._rate("bf16" if width <= 2 else product_dtype(s))
            * min(shape.head_dim / 128, 1.0) ** 0.5
        )
        rate *= alignment_share(shape.head_dim, shape.head_dim, width)
        around = self._streamed(scores * width, [each + DROPOUT * traits.has_dropout for each in passes])
        return PassTimes(forward / rate, 2 * forward / rate).plus(around)

    def _block(self, s: ResolvedConfig) -> PassTimes:
        found = super()._block(s)
        if s.recompute.mode != "selective" or published_traits(self.job).attention == "flash":
            return found
        return dataclasses.replace(found, recompute_s=self.attention(s).forward_s / s.recompute.every)

    def _streams(self, s: ResolvedConfig) -> PassTimes:
        shape, traits, width = self.job.shape, published_traits(self.job), DTYPE_BYTES[param_of(s)]
        more = 2 * DROPOUT * traits.has_dropout  # after attention and after the feed-forward
        norm = NORM_IN_FP32 if traits.saves_norm_in_fp32 and not traits.is_compiled else (0.0, 0.0)
        hidden = self._tokens(s) / (s.mesh.tp if s.tensor.sequence_parallel else 1) * shape.hidden_size
        times = super()._streams(s).plus(self._streamed(hidden * width, [2 * each + more for each in norm]))
        if shape.ffn == "gated" or traits.is_compiled or traits.attention != "fused-softmax":
            return times
        return times.plus(self._streamed(self._tokens(s) / s.mesh.tp * self._ffn_width() * width, FUSED_ACTIVATION))

    def _launches_s(self, s: ResolvedConfig) -> float:
        return 0.0 if published_traits(self.job).is_graphed else super()._launches_s(s)

    @property
    def _kernel_s(self) -> float:
        return GRAPHED_KERNEL_S if published_traits(self.job).is_graphed else super()._kernel_s

    def _flash_rate(self, rate: float) -> float:
        traits = published_traits(self.job)
        found = rate if traits.has_tuned_attention else super()._flash_rate(rate)
        return found * FIRST_FLASH_SHARE if traits.has_first_flash else found


class PublishedCommModel(CommTimeModel):
    """Gather after the step, reduce once, or over other ranks, where the code does."""

    def data(self, config: ResolvedConfig, pipeline_rank: int = 0) -> OverlapTimes:
        found = super().data(config, pipeline_rank)
        if config.zero.stage not in (1, 2) or published_traits(self.job).defers_gathers:
            return found
        step_s = found.step_s + found.first_forward_s
        return dataclasses.replace(found, step_s=step_s, first_forward_s=0.0, alone_forward_s=0.0)

    def _calls_of(
        self, s: ResolvedConfig, layout: Layout, fold: LayerCount, *, is_first: bool
    ) -> Iterator[PricedCollective]:
        traits, group = published_traits(self.job), fold.group
        shards = traits.optimizer_shards
        if shards is not None and layout.stage.unshard_after_step and group.num_ranks % shards == 0:
            fold = dataclasses.replace(fold, group=dataclasses.replace(group, num_shards=min(shards, group.num_ranks)))
        for call in super()._calls_of(s, layout, fold, is_first=is_first):
            if traits.reduces_once and call.op == "reduce_scatter":
                yield dataclasses.replace(call, moment="last backward")
            else:
                yield call


class PublishedTimeModel(TimeModel):
    """Time steps with the models above."""

    def __init__(self, job: PlanJob, compact: CompactLayout | None = None) -> None:
        super().__init__(job, compact or PublishedLayout(job))
        self.compute = PublishedComputeModel(job)
        self.communication = PublishedCommModel(job, self.compact)

    def _num_optimizer_shards(self, s: ResolvedConfig) -> int:
        shards = published_traits(self.job).optimizer_shards
        return shards if shards and s.zero.stage else super()._num_optimizer_shards(s)


def largest_share(shape: ModelShape) -> float:
    """Return the share of a dense block's elements that its largest weight has."""
    num_matrices = 3 if shape.ffn == "gated" else 2
    attention = 2 * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    return shape.ffn_size / (attention + num_matrices * shape.ffn_size)


class PublishedPricer(Pricer):
    """Price the candidates of a published run's job."""

    def __init__(self, job: PlanJob) -> None:
        self.job = job
        compact = PublishedLayout(job)
        self.memory = PublishedMemoryModel(job, compact)
        self.time = PublishedTimeModel(job, compact)


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Spread blocks evenly over stages; what is left over goes to the stages in the middle.

    >>> even_layers(14, 4)
    (3, 4, 4, 3)
    """
    each, left = divmod(num_layers, num_stages)
    middle_first = sorted(range(num_stages), key=lambda stage: (abs(2 * stage - num_stages + 1), stage))
    extra = set(middle_first[:left])
    return tuple(each + (stage in extra) for stage in range(num_stages))
