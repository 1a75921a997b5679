"""Param groups say in which ranges of a flat buffer a unit's parameters are stored, gathered and reduced.

A group puts its parameters one after the other into one flat buffer, each at an aligned offset. The buffer is padded so
that the ranks of the shard group hold equal shards. For two parameters of 5 and 9 elements over 2 ranks (`.` is
padding):

    offset   0    5  8         17                    32
             |aaaaa..bbbbbbbbb......................|
    shard    |------ rank 0 -------|--- rank 1 -----|     16 elements each

>>> a, b = ParamSpec("a", (), (5,), 0), ParamSpec("b", (), (3, 3), 8)
>>> group = GroupSpec("root", "root", (a, b), True, num_ranks=2, num_shards=2)
>>> group.numel, group.padded_numel, group.shard_range(1)
(14, 32, (16, 32))
>>> [(slot.param.name, slot.start, slot.stop, slot.offset) for slot in group.slots(*group.shard_range(1))]
[('b', 8, 9, 0)]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Final

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Tier
from shardwise.layout.facts import FusedDim, ParamEntry
from shardwise.layout.mesh_shape import GRADIENT_AXES, SHARD_AXES, MeshShape
from shardwise.layout.precision import BLOCK_NUMEL, SMALL_NUMEL, PrecisionPolicy, is_encoded
from shardwise.layout.slicing import Chunk, intersect
from shardwise.layout.tp_sharding import ParamSplit
from shardwise.layout.zero_stages import STAGES, Placement, ZeroStage

# 16 bytes in the narrowest dtype: the alignment that vectorised kernels and NCCL want for parameters and shards.
ALIGNMENT_NUMEL: Final = 8
# The same for opaque parameters, whose elements are bytes; what unpacks them on a GPU reads 16 at once.
ALIGNMENT_BYTES: Final = 128
ROOT: Final = "root"


@dataclass(frozen=True)
class ParamSpec:
    """Describe a parameter and its place in its group.

    Attributes:
        name: the first of its names; `aliases` are the others, where it is tied.
        shape: of this rank's tensor, the same on every rank of the tensor-parallel group.
        offset: its first element in the flat buffer.
        over_tp: how the whole parameter is split over that group; None for one rank.
        fused: the matrices that it is made of, where it is stepped as several.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    offset: int
    over_tp: ParamSplit | None = None
    fused: FusedDim | None = None

    @cached_property
    def numel(self) -> int:
        """Count the elements of this rank's local tensor."""
        return math.prod(self.shape)

    @cached_property
    def split(self) -> ParamSplit:
        """Return how the whole parameter is split over the tensor-parallel group."""
        return self.over_tp or ParamSplit(self.shape)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        return self.split.global_shape


@dataclass(frozen=True)
class ParamSlice:
    """Hold the part [start, stop) of a flattened parameter, stored at `offset` in a range of the flat buffer."""

    param: ParamSpec
    start: int
    stop: int
    offset: int

    def pieces(self, tp_index: int = 0) -> tuple[Chunk, ...]:
        """Return the rectangles of the whole parameter that tensor-parallel rank `tp_index` has in this slice.

        Their offsets count from the slice's first element.
        """
        return intersect(self.param.split.local(tp_index), self.start, self.stop)


@dataclass(frozen=True)
class GroupTiers:
    """Hold the tiers in which a group's states are stored."""

    params: Tier = "device"
    grads: Tier = "device"
    optimizer: Tier = "device"

    @property
    def are_away(self) -> bool:
        """Say whether any state is stored off the device."""
        return not self.params == self.grads == self.optimizer == "device"


@dataclass(frozen=True)
class GroupSpec:
    """Describe a group of parameters that are gathered and reduced together.

    Attributes:
        name: the unit's name, with `:experts` for the group of its experts where they have a mesh of their own, `:fp32`
            for that of its wide parameters, `:frozen` for that of frozen ones, `:bytes` for that of opaque ones,
            `:matrix` for that of matrices and `:whole` for that of small ones.
        unit: the module whose forward uses them; `root` for parameters that are in no block.
        params: in the order in which the flat buffer has them.
        trainable: whether the group has gradients and optimizer states.
        num_ranks: ranks that average the gradients; the flat buffer divides evenly among them in every stage.
        num_shards: ranks that share the sharded states.
        is_replicated: every rank holds the parameters whole on its device in every stage.
        stages: of the pipeline that use it; several where a parameter is tied across a cut, and each holds it.
        is_wide: whether all its states are in fp32 although `precision.param` is narrower.
        alignment: elements; each parameter and each shard begins at a multiple.
        is_opaque: whether its parameters are bytes, which are never cast; see `construction/opaque.py`.
        is_matrix: whether the optimizer steps its parameters as whole matrices.
        is_small: whether its parameters have too few elements to be gathered for use, or to be encoded for collectives.
        is_experts: whether its parameters are placed by the mesh of experts; see `MeshShape.experts`.
        num_parts: ranks that hold different parts of each parameter, before ZeRO shards them: tp, or ep.
    """

    name: str
    unit: str
    params: tuple[ParamSpec, ...]
    trainable: bool
    num_ranks: int
    num_shards: int
    is_replicated: bool = False
    tiers: GroupTiers = GroupTiers()
    stages: tuple[int, ...] = (0,)
    is_wide: bool = False
    alignment: int = ALIGNMENT_NUMEL
    is_opaque: bool = False
    is_matrix: bool = False
    is_small: bool = False
    is_experts: bool = False
    num_parts: int = 1

    @property
    def is_stored_whole(self) -> bool:
        """Say whether the device stores the parameters whole in every stage: no other rank or tier holds a part."""
        return self.is_replicated or (self.num_shards == 1 and self.tiers.params == "device")

    @property
    def is_encodable(self) -> bool:
        """Say whether its parameters may be sent as codes: those that stay in fp32 on purpose, and bytes, may not."""
        return not (self.is_small or self.is_wide or self.is_opaque)

    @cached_property
    def numel(self) -> int:
        """Count the elements of the parameters, without padding."""
        return sum(param.numel for param in self.params)

    @cached_property
    def has_large(self) -> bool:
        """Say whether a parameter is large enough for its states to be encoded."""
        return any(is_encoded(param.global_shape) for param in self.params)

    @cached_property
    def padded_numel(self) -> int:
        """Count the elements of the flat buffer, padding included."""
        last = self.params[-1]
        return _round_up(last.offset + last.numel, self.alignment * math.lcm(self.num_ranks, self.num_shards))

    @cached_property
    def shard_numel(self) -> int:
        """Count the elements of one rank's shard."""
        return self.padded_numel // self.num_shards

    def shard_range(self, index: int) -> tuple[int, int]:
        """Return the first and the last-plus-one element of shard `index`."""
        return index * self.shard_numel, (index + 1) * self.shard_numel

    def stage_in(self, stage: ZeroStage) -> ZeroStage:
        """Return the placements of the group's states in a run of `stage`."""
        if self.is_experts and stage.secondary_shard:
            stage = replace(stage, secondary_shard=0, node_size=1)
        if not self.is_replicated:
            return stage
        return replace(stage, params=Placement.REPLICATE) if self.trainable else STAGES[0]

    def held_range(self, placement: Placement, index: int) -> tuple[int, int]:
        """Return the range of the flat buffer that the holder of shard `index` has under a placement."""
        return self.shard_range(index) if placement is Placement.SHARD else (0, self.padded_numel)

    def written_range(self, shard: int, replica: int) -> tuple[int, int]:
        """Return the range that the holder of shard `shard` in replica `replica` writes into a checkpoint.

        That rank holds the range in every stage, and the ranges of all ranks that average gradients cover the buffer.
        """
        numel = self.padded_numel // self.num_ranks
        start = (shard * (self.num_ranks // self.num_shards) + replica) * numel
        return start, start + numel

    def slots(self, start: int, stop: int) -> tuple[ParamSlice, ...]:
        """Return the parts of parameters in the range [start, stop) of the flat buffer, in order, without padding."""
        return tuple(self._slots(start, stop))

    def _slots(self, start: int, stop: int) -> Iterator[ParamSlice]:
        for param in self.params:
            first, last = max(start, param.offset), min(stop, param.offset + param.numel)
            if first < last:
                yield ParamSlice(param, first - param.offset, last - param.offset, first - start)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges of the flat buffer that are padding."""
        ends = [0, *(param.offset + param.numel for param in self.params)]
        starts = [*(param.offset for param in self.params), self.padded_numel]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)


def build_groups(
    entries: Sequence[ParamEntry],
    units: Sequence[str],
    mesh: MeshShape,
    replicate_frozen: bool = False,
    splits: Mapping[str, ParamSplit] | None = None,
    stages_of: Mapping[str, tuple[int, ...]] | None = None,
    keep_whole_below: int = 0,
) -> tuple[GroupSpec, ...]:
    """Build one group per unit, trainability, dtype and size: the root's first, then the units' in module order.

    Under pipeline parallelism the root has a group for each stage and for each set of stages that share parameters.

    Args:
        replicate_frozen: every rank keeps frozen parameters whole, so that they are never gathered.
        splits: how each parameter is split over the ranks of tp, or of ep, by its name; None for one rank.
        stages_of: the stages that use a parameter, by its name; None without a pipeline.
        keep_whole_below: every rank keeps parameters of fewer elements whole.

    Raises:
        ConfigError: a block is on several stages.
    """
    order = {unit: index for index, unit in enumerate((ROOT, *units))}

    def stages(entry: ParamEntry) -> tuple[int, ...]:
        return (0,) if stages_of is None else stages_of[entry.name]

    def key(entry: ParamEntry) -> tuple[int, tuple[int, ...], tuple[bool, ...]]:
        is_frozen = not entry.requires_grad
        is_small = math.prod(entry.shape) < keep_whole_below
        is_matrix = entry.is_matrix and not is_frozen
        is_experts = entry.experts is not None and mesh.divides_experts
        kinds = (is_experts, is_frozen, entry.is_wide, entry.is_opaque, is_matrix, is_small)
        return order[entry.unit], stages(entry), kinds

    groups: list[GroupSpec] = []
    keyed = sorted(((key(entry), entry) for entry in entries), key=itemgetter(0))
    for (index, held_by, kinds), members in groupby(keyed, key=itemgetter(0)):
        is_experts, is_frozen, is_wide, is_bytes, is_matrix, is_small = kinds
        unit = (ROOT, *units)[index]
        if unit != ROOT and groups and groups[-1].unit == unit and groups[-1].stages != held_by:
            both = " and ".join(str(stage) for stage in sorted({*groups[-1].stages, *held_by}))
            raise ConfigError(
                "block-on-two-stages",
                f"block {unit} is on stages {both}, but its parameters are gathered together; name modules within "
                "one stage in zero.blocks, or move pipeline.cut",
            )
        place = unit if unit != ROOT or stages_of is None else f"{unit}@{'+'.join(map(str, held_by))}"
        kind = ":bytes" if is_bytes else ":fp32" * is_wide + ":frozen" * is_frozen + ":matrix" * is_matrix
        name = place + ":experts" * is_experts + kind + ":whole" * is_small
        is_replicated = is_small or (replicate_frozen and is_frozen)
        params = tuple(_place((entry for _, entry in members), splits or {}))
        own = mesh.experts if is_experts else mesh
        num_ranks, num_shards = own.size_along(GRADIENT_AXES), own.size_along(SHARD_AXES)
        spec = GroupSpec(
            name, unit, params, not is_frozen, num_ranks, num_shards, is_replicated, stages=held_by, is_wide=is_wide,
            is_opaque=is_bytes, is_matrix=is_matrix, is_small=is_small, is_experts=is_experts, num_parts=own.tp,
        )  # fmt: skip
        groups.append(aligned(spec, ALIGNMENT_BYTES) if is_bytes else spec)
    return tuple(groups)


def _place(entries: Iterator[ParamEntry], splits: Mapping[str, ParamSplit]) -> Iterator[ParamSpec]:
    offset = 0
    for entry in entries:
        split = splits.get(entry.name)
        shape = entry.shape if split is None else split.local_shape
        spec = ParamSpec(entry.name, entry.aliases, shape, offset, split, entry.fused)
        yield spec
        offset = _round_up(offset + spec.numel, ALIGNMENT_NUMEL)


def aligned(group: GroupSpec, alignment: int) -> GroupSpec:
    """Return a group whose parameters and shards begin at multiples of `alignment` elements."""
    params, offset = [], 0
    for place in group.params:
        params.append(replace(place, offset=offset))
        offset = _round_up(offset + place.numel, alignment)
    return replace(group, params=tuple(params), alignment=alignment)


def whole_below(given: int, stage: ZeroStage, policy: PrecisionPolicy) -> int:
    """Return the elements below which parameters are in groups of their own, which are stored whole.

    Args:
        given: `zero.keep_whole_below`, which counts in stage 3.
        policy: where it encodes collectives, small parameters are left out in every stage: they save nothing.
    """
    return max(given, SMALL_NUMEL) if policy.encodes_collectives else given if stage.unshard_for_use else 0


def aligned_to_blocks(groups: Iterable[GroupSpec], policy: PrecisionPolicy) -> tuple[GroupSpec, ...]:
    """Return the groups; those of which states or collectives are encoded begin and end at block borders."""
    return tuple(
        aligned(group, BLOCK_NUMEL)
        if policy.states == "int8" or (policy.encodes_collectives and not group.is_small)
        else group
        for group in groups
    )


def check_blocks(splits: Mapping[str, ParamSplit], axis: str, key: str) -> None:
    """Refuse a degree of tp or ep that cuts blocks of codes, which then would depend on the layout.

    Args:
        splits: how each parameter is split along `axis`, by its name.
        key: the config's key that lays the blocks, with its value.

    Raises:
        ConfigError: it does.
    """
    for name, split in splits.items():
        if split.dim is None or not is_encoded(split.global_shape):
            continue
        inner = math.prod(split.global_shape[split.dim + 1 :])
        sizes = {inner * size for part in split.parts for size in (part.size, part.local_size(split.degree))}
        if any(size % BLOCK_NUMEL for size in sizes):
            raise ConfigError(
                f"block-over-{axis}",
                f"{key} has blocks of {BLOCK_NUMEL} elements, and mesh.{axis}={split.degree} cuts them in {name}, "
                f"{list(split.global_shape)} along dim {split.dim}; take a smaller mesh.{axis}, or leave the key out",
            )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
