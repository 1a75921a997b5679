"""Which blocks each pipeline stage of a strategy has, and where embedding, norm and head are.

>>> from shardwise.planner.hardware import Cluster, Gpu
>>> from shardwise.models.presets import preset
>>> gpu = Gpu(name="h100", memory_bytes=80 * 2**30, memory_bytes_per_s=3e12, peak_flops_per_s={"bf16": 989e12})
>>> cluster = Cluster(gpu=gpu, num_gpus=16, gpus_per_node=8, nic_bytes_per_s=5e10)
>>> job = Job(shape=ModelShape.of_decoder(preset("llama-3-8b")), seq_len=8192, global_batch=16, cluster=cluster)
>>> StageTable(job).of(Strategy(pp=4, num_micro_batches=8)).layers
(7, 9, 9, 7)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from shardwise.config import ConfigError
from shardwise.layout.stage_costs import UnitCost
from shardwise.layout.stage_cut import cut_stages
from shardwise.layout.stage_units import StageUnit
from shardwise.planner.job import Job, Strategy
from shardwise.planner.shape import ModelShape
from shardwise.planner.skeleton import SkeletonParam, block_params, embedding_params, head_params, norm_params
from shardwise.schedule.placement import StagePlacement
from shardwise.schedule.recipes import placement_of


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline; without one there is a single stage of everything.

    Attributes:
        placement: which rank of the pipeline has which stages.
        layers: blocks of each stage, in order.
        num_dense: of all blocks those at the front whose feed-forward is not experts.
        norm_stage: that has the norm behind the blocks; the last has the head, the first the embedding.
    """

    placement: StagePlacement
    layers: tuple[int, ...]
    num_dense: int
    norm_stage: int

    @property
    def head_stage(self) -> int:
        """The last."""
        return len(self.layers) - 1

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first block of each stage."""
        return tuple(accumulate(self.layers[:-1], initial=0))

    @cached_property
    def kinds(self) -> tuple[tuple[int, int], ...]:
        """For each stage, how many of its blocks are dense and how many have experts."""
        ends = tuple(accumulate(self.layers))
        dense = [max(0, min(end, self.num_dense) - end + num) for end, num in zip(ends, self.layers, strict=True)]
        return tuple((each, num - each) for each, num in zip(dense, self.layers, strict=True))

    @cached_property
    def _held(self) -> dict[int, tuple[tuple[tuple[int, int], bool, bool, bool], ...]]:
        marked = [
            (kinds, stage == 0, stage == self.norm_stage, stage == self.head_stage)
            for stage, kinds in enumerate(self.kinds)
        ]
        ranks = range(self.placement.num_ranks)
        return {rank: tuple(marked[stage] for stage in self.placement.stages_of(rank)) for rank in ranks}

    def held_by(self, rank: int) -> tuple[tuple[tuple[int, int], bool, bool, bool], ...]:
        """Of each stage of a rank: its dense blocks and those with experts; whether it has embedding, norm, head."""
        return self._held[rank]

    def layers_on(self, rank: int) -> int:
        """Blocks of all stages of a rank of the pipeline."""
        return sum(self.layers[stage] for stage in self.placement.stages_of(rank))


class StageTable:
    """The stages of a job's strategies; those that are cut alike are cut once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._stages: dict[tuple[object, ...], Stages] = {}
        self._cuts: dict[StagePlacement, tuple[tuple[int, ...], int]] = {}  # several schedules have one placement

    def of(self, strategy: Strategy) -> Stages:
        """The stages of a strategy: its own, or as `shardwise.layout.cut` cuts our decoder, or evenly.

        Raises:
            ConfigError: the schedule has no such stages, there are more stages than units, or the strategy's own are
                not of all blocks.
        """
        s = strategy
        key = (s.pp, s.schedule, s.virtual_stages, s.stage_layers) if s.pp > 1 else ()
        found = self._stages.get(key)
        if found is None:
            found = self._stages[key] = self._cut(s)
        return found

    def _cut(self, s: Strategy) -> Stages:
        shape = self.job.shape
        num_dense = shape.num_layers - shape.num_expert_layers
        if s.pp == 1:
            return Stages(StagePlacement(1), (shape.num_layers,), num_dense, 0)
        placement = placement_of(s.schedule, s.pp, s.virtual_stages)
        if s.stage_layers is not None:
            _check_layers(s.stage_layers, placement, shape)
            return Stages(placement, s.stage_layers, num_dense, placement.num_stages - 1)
        if self.job.practice.cuts_evenly:
            layers = even_layers(shape.num_layers, placement.num_stages)
            return Stages(placement, layers, num_dense, placement.num_stages - 1)
        if placement not in self._cuts:
            self._cuts[placement] = cut_by_cost(shape, placement)
        layers, norm_stage = self._cuts[placement]
        return Stages(placement, layers, num_dense, norm_stage)


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """As many blocks in each stage; what is left over goes to the stages in the middle.

    >>> even_layers(14, 4)
    (3, 4, 4, 3)
    """
    each, left = divmod(num_layers, num_stages)
    middle_first = sorted(range(num_stages), key=lambda stage: (abs(2 * stage - num_stages + 1), stage))
    extra = set(middle_first[:left])
    return tuple(each + (stage in extra) for stage in range(num_stages))


def cut_by_cost(shape: ModelShape, placement: StagePlacement) -> tuple[tuple[int, ...], int]:
    """Blocks of each stage where `shardwise.layout.stage_cut` cuts, and the stage of the norm behind them.

    Raises:
        ConfigError: there are more stages than units.
    """
    chosen = None if shape.experts is None else shape.experts.num_chosen / shape.experts.num_experts
    num_dense = shape.num_layers - shape.num_expert_layers
    kinds = {has: _Unit.of(block_params(shape, has_experts=has), chosen) for has in (False, True)}
    head = head_params(shape)
    units = [("embed", _Unit(0.0, _Unit.of(embedding_params(shape)).numel))]
    units += [(f"blocks.{index}", kinds[index >= num_dense]) for index in range(shape.num_layers)]
    units += [("norm", _Unit.of(norm_params(shape))), ("head", _Unit.of(head))]
    entry = head[0].entry("head")
    cut = cut_stages(
        [StageUnit(name, (name,), (entry,), name != "blocks.0" or not shape.num_positions) for name, _ in units],
        [UnitCost(name, unit.flops, unit.numel) for name, unit in units],
        placement.num_stages,
        placement=[placement.rank_of(stage) for stage in range(placement.num_stages)],
    )
    names = [[unit.name for unit in stage] for stage in cut.stages]
    layers = tuple(sum(name.startswith("blocks.") for name in stage) for stage in names)
    return layers, next(index for index, stage in enumerate(names) if "norm" in stage)


@dataclass(frozen=True)
class _Unit:
    flops: float
    numel: float

    @classmethod
    def of(cls, params: tuple[SkeletonParam, ...], share_of_experts: float | None = None) -> _Unit:
        flops = numel = 0.0
        for param in params:
            size = float(math.prod(param.shape))
            numel += size
            if len(param.shape) > 1:
                flops += 2.0 * size * (share_of_experts or 1.0 if param.is_of_experts else 1.0)
        return cls(flops, numel)


def _check_layers(layers: tuple[int, ...], placement: StagePlacement, shape: ModelShape) -> None:
    if len(layers) != placement.num_stages or sum(layers) != shape.num_layers:
        raise ConfigError(
            f"stage_layers of {len(layers)} stages and {sum(layers)} blocks, but there are {placement.num_stages} "
            f"stages and {shape.num_layers} blocks; give each stage its number of blocks"
        )
