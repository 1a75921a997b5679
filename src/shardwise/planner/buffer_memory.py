"""Buffers that come and go with parameters and gradients: what is gathered, and what reductions need.

Which buffers a reduction takes and when it gives them back is told by `shardwise.zero.grad_buckets`,
`shardwise.zero.sharding_state` and `shardwise.comm.collectives`. The engine's own pool is asked how much memory that
is, so its classes of sizes and what it keeps idle count too: a walk through a step's reductions with tensors that have
no memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import torch
from torch import Tensor

from shardwise.comm.backends import RING_BYTES
from shardwise.layout.activation_bytes import FP32_BYTES
from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import ROOT
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.layout.zero_stages import Placement
from shardwise.planner.compact_layout import LayerCount, RankLayerCounts
from shardwise.planner.job import PlanJob, Strategy
from shardwise.runtime.buffer_pool import BufferPool, size_class_bytes
from shardwise.runtime.precision import SCRATCH_NUMEL

NUM_TELLING: Final = 4
"""Blocks of a stage behind which each reduction finds the same buffers as the one before."""

_MOST_GROUPS: Final = 1000
"""Of a stage, by which groups are numbered."""


@dataclass(frozen=True)
class Buffers:
    """Bytes of a rank's buffers at the moments of a step.

    Attributes:
        resting: of those that are there when no gradient has come.
        with_root: when gradients of what is in no block have come.
        opening: before a block's gradients come; by the blocks behind it that are done, the last entry for all further.
        filling: while they come; likewise.
        reducing: as its reduction starts; likewise.
        last: as that of what is in no block starts, behind all others.
        stepping: when all reductions have ended.
        scratch: beside the pool, in which a reduction sums.
    """

    resting: float
    with_root: float
    opening: tuple[float, ...]
    filling: tuple[float, ...]
    reducing: tuple[float, ...]
    last: float
    stepping: float
    scratch: int


@dataclass(frozen=True)
class GatheredUnits:
    """Parameters that are unsharded for use.

    Attributes:
        root, block, whole: elements of what is in no block, of the largest block, of all.
        param_bytes: of an element; 0 where parameters rest whole.
        is_whole: all is unsharded for a batch.
    """

    root: int
    block: int
    whole: int
    param_bytes: int
    is_whole: bool

    @classmethod
    def of(cls, strategy: Strategy, folds: RankLayerCounts, index: int = 0) -> GatheredUnits:
        """Of a rank's folded groups, while the stage of this index among its own computes."""
        is_gathered = folds.layout.stage.params is Placement.SHARD
        is_gathered &= not all(fold.group.rests_whole for fold in folds.folds)
        is_whole = strategy.pp > 1 and strategy.gather == "batch"
        used: Sequence[LayerCount] = folds.folds
        if folds.layout.pipeline is not None and not is_whole:
            stage = folds.layout.pipeline.placement.stages_of(folds.layout.pipeline.index)[index]
            used = [fold for fold in used if stage in fold.group.stages]
        return cls(
            root=sum(fold.group.padded_numel for fold in used if fold.group.unit == ROOT),
            block=max(block_numels(used), default=0),
            whole=sum(fold.count * fold.group.padded_numel for fold in used),
            param_bytes=DTYPE_BYTES[strategy.param] if is_gathered else 0,
            is_whole=is_whole,
        )

    def num_bytes(self, num_blocks: int) -> float:
        """Of the unsharded root and of so many blocks."""
        return self.param_bytes * (
            self.whole if self.is_whole else min(self.whole, self.root + num_blocks * self.block)
        )


def block_numels(folds: Iterable[LayerCount]) -> list[int]:
    """Elements of each kind of block, its experts included."""
    blocks: dict[str, int] = {}
    for fold in folds:
        if fold.group.unit != ROOT:
            blocks[fold.group.unit] = blocks.get(fold.group.unit, 0) + fold.group.padded_numel
    return list(blocks.values())


class BufferTable:
    """The buffers of a job's strategies; keeps those that it was asked for."""

    def __init__(self, job: PlanJob) -> None:
        self.job = job
        self._known: dict[tuple[object, ...], list[Buffers]] = {}

    def of(
        self,
        strategy: Strategy,
        folds: RankLayerCounts,
        sums_bytes: Sequence[float] = (),
        reductions: Sequence[tuple[int, bool]] = (),
        share: float = 1.0,
        backward_bytes: Sequence[float] = (),
    ) -> list[Buffers]:
        """Of each stage of a rank, the last first.

        Args:
            sums_bytes: of the buffers that a tensor-parallel sum needs at once.
            reductions: where each micro-batch is reduced, as `Flights.reductions`.
            share: of a block's elements that one reduction moves.
            backward_bytes: of the buffers that such a sum needs while gradients come.
        """
        rules = _Rules.of(self.job, strategy, folds.layout)
        scratch_bytes = rules.scratch_bytes(folds)
        if strategy.pp == 1:
            units = _Units.of(folds, share)
            key: tuple[object, ...] = (rules, sums_bytes, scratch_bytes, backward_bytes, units)
            if key not in self._known:
                self._known[key] = [_unpipelined(rules, units, sums_bytes, backward_bytes, scratch_bytes)]
            return self._known[key]
        stages, ahead = folds.reduced_numels, tuple(sums_bytes) if _sums_ahead(folds) else ()
        tables = _table_buffers(strategy, folds) if rules.is_on_host else ()
        if not rules.is_sharded or rules.is_once:
            reductions = ()
        key = (rules, sums_bytes, scratch_bytes, stages, ahead, tables, reductions, backward_bytes)
        if key not in self._known:
            walk = _Walk(rules, backward_bytes)
            walk.touch(sums_bytes)
            each = walk.pipelined(stages, ahead, tables, reductions)
            self._known[key] = [replace(one, scratch=scratch_bytes) for one in each]
        return self._known[key]


def _sums_ahead(folds: RankLayerCounts) -> bool:
    """Whether forwards of a rank of a pipeline sum over the tensor-parallel group: a head alone does not."""
    pipeline, has_blocks = folds.layout.pipeline, any(fold.group.unit != ROOT for fold in folds.folds)
    return has_blocks or (pipeline is not None and 0 in pipeline.held)


def _table_buffers(strategy: Strategy, folds: RankLayerCounts) -> tuple[int, ...]:
    """Bytes of the buffers in which small sums of a step arrive from another rank, one behind the other."""
    shared = shared_bytes(strategy, folds) if strategy.tp == 2 else 0
    return tuple(num_bytes for num_bytes in (shared, tied_bytes(folds)) if 0 < num_bytes < RING_BYTES)


@dataclass(frozen=True)
class _Units:
    """What is reduced where no pipeline splits the model: elements of what is in no block, and of each block."""

    root: int
    block: int
    num_blocks: int

    @classmethod
    def of(cls, folds: RankLayerCounts, share: float) -> _Units:
        """Of the one rank's groups; `share` of a block's elements is moved at once."""
        return cls(
            root=sum(fold.group.padded_numel for fold in folds.folds if fold.group.unit == ROOT),
            block=int(share * max(block_numels(folds.folds), default=0)),
            num_blocks=sum(
                fold.count for fold in folds.folds if fold.group.unit != ROOT and fold.group.name == fold.group.unit
            ),
        )


def _unpipelined(
    rules: _Rules, units: _Units, sums_bytes: Sequence[float], backward_bytes: Sequence[float], scratch_bytes: int
) -> Buffers:
    walk = _Walk(rules, backward_bytes)
    walk.touch(sums_bytes)
    resting = walk.num_bytes
    of_root = walk.bucket(units.root)
    with_root = walk.num_bytes
    opening, filling, reducing = [], [], []
    for _ in range(min(units.num_blocks, NUM_TELLING)):
        opening.append(walk.num_bytes)
        bucket = walk.bucket(units.block)
        walk.run_backward()
        filling.append(walk.num_bytes)
        walk.reduce(units.block, bucket, len(filling))
        reducing.append(walk.num_bytes)
    walk.reduce(units.root, of_root, 0)
    last = max(walk.num_bytes, reducing[-1] if reducing else 0.0)
    opened, filled, reduced = (tuple(each) or (with_root,) for each in (opening, filling, reducing))
    # Behind a backward that reduces, the engine's pool lets go of what is idle.
    return Buffers(resting, with_root, opened, filled, reduced, last, 0.0, scratch_bytes)


class _Counted:
    """A pool of exact sizes, which keeps what was once in use at the same time."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._leased_bytes = 0

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Lease `numel` elements."""
        self._leased_bytes += numel * dtype.itemsize
        self.reserved_bytes = max(self.reserved_bytes, self._leased_bytes)
        return cast(Tensor, _Bytes(numel * dtype.itemsize))

    def release(self, tensor: Tensor) -> None:
        """Give them back."""
        self._leased_bytes -= tensor.numel() * tensor.element_size()


class _Bytes:
    """So much of a tensor as a pool asks for: how many bytes it has, and what it is a part of."""

    __slots__ = ("_num_bytes", "_whole")

    def __init__(self, num_bytes: int, whole: _Bytes | None = None) -> None:
        self._num_bytes, self._whole = num_bytes, whole

    def __getitem__(self, part: slice) -> _Bytes:
        return _Bytes(part.stop, self)

    def view(self, dtype: torch.dtype) -> _Bytes:
        """Of bytes."""
        return self

    def untyped_storage(self) -> _Bytes:
        """What it is a part of."""
        return self._whole or self

    def numel(self) -> int:
        """Bytes."""
        return self._num_bytes

    def element_size(self) -> int:
        """Of a byte."""
        return 1


def _own_pool() -> BufferPool:
    """The engine's, of memory that is not there."""
    return BufferPool("meta", allocate=cast(Callable[[int], Tensor], _Bytes))


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """What decides which buffers a reduction takes, beside the sizes of gradients."""

    has_own_pool: bool
    is_sharded: bool
    is_replicated: bool
    num_shards: int
    wire_bytes: int
    rest_bytes: int
    bucket_bytes: int
    copies: bool
    receives: bool
    widens_sums: bool
    sums_on_arrival: bool
    is_on_host: bool
    lands: bool
    is_once: bool

    @classmethod
    def of(cls, job: PlanJob, strategy: Strategy, layout: Layout) -> _Rules:
        """Of a rank's layout."""
        s, stage, precision, mesh = strategy, layout.stage, layout.precision, layout.mesh
        traits = job.traits
        is_sharded = stage.grads is Placement.SHARD and traits.trains_all
        is_replicated = stage.optimizer is Placement.REPLICATE
        num_shards = mesh.dp_shard * mesh.cp
        num_ranks = num_shards * (mesh.dp_replicate if is_replicated else 1)
        is_split = num_ranks > 1 and traits.trains_all
        wire_bytes, rest_bytes = DTYPE_BYTES[precision.reduce], DTYPE_BYTES[precision.accumulate]
        bucket_bytes = rest_bytes if s.pp > 1 else wire_bytes
        is_same = (bucket_bytes if is_sharded else rest_bytes) == wire_bytes
        in_place = traits.reduces_in_place or (is_replicated and is_same)
        is_summed_again = mesh.dp_replicate > 1 and not is_replicated and traits.is_own
        is_once = s.gather == "batch"
        return cls(
            has_own_pool=traits.is_own,
            is_sharded=is_sharded,
            is_replicated=is_replicated,
            num_shards=num_shards,
            wire_bytes=wire_bytes,
            rest_bytes=rest_bytes,
            bucket_bytes=bucket_bytes,
            copies=is_split and not is_same and not traits.reduces_in_place,
            receives=is_split and (is_sharded or not in_place),
            widens_sums=is_summed_again and rest_bytes != wire_bytes,
            # What NCCL sums arrives as a slice; others copy all gradients of a group together before they send them.
            sums_on_arrival=traits.is_own and not job.cluster.gpu.is_cpu and wire_bytes >= FP32_BYTES,
            is_on_host=job.cluster.gpu.is_cpu,
            lands=s.grads_tier != "device",
            is_once=is_once,
        )

    def scratch_bytes(self, folds: RankLayerCounts) -> int:
        """In which a CPU sums what a reduction has received."""
        if not self.receives or not self.is_on_host or not self.has_own_pool:
            return 0
        return FP32_BYTES * min(SCRATCH_NUMEL, max(fold.group.shard_numel for fold in folds.folds))


class _Walk:
    """Takes and gives back buffers as the engine does."""

    def __init__(self, rules: _Rules, backward_bytes: Sequence[float]) -> None:
        self._rules = rules
        self._backward_bytes = backward_bytes
        self._pool: BufferPool | _Counted = _own_pool() if rules.has_own_pool else _Counted()
        self._under_way: deque[int] = deque()  # groups, in the order of their reductions
        self._sent: dict[int, list[Tensor]] = {}  # what a group's reduction holds within the shard group
        self._kept: dict[int, list[Tensor]] = {}  # and until its end
        self._numels: dict[int, int] = {}  # of reductions whose sum over replicas is still to come

    @property
    def num_bytes(self) -> float:
        """That the pool holds now."""
        return float(self._pool.reserved_bytes)

    def touch(self, buffers_bytes: Sequence[float]) -> None:
        """Buffers that come and go together, at once."""
        self._release([self._take(int(num_bytes), 1) for num_bytes in buffers_bytes if num_bytes])

    def run_backward(self) -> None:
        """Sum as backwards of blocks do, beside the buckets that they fill."""
        if self._backward_bytes:
            self.touch(self._backward_bytes)

    def bucket(self, numel: int) -> Tensor | None:
        """What a backward puts gradients in, where these rest as shards."""
        return self._take(numel, self._rules.bucket_bytes) if self._rules.is_sharded and numel else None

    def reduce(self, numel: int, bucket: Tensor | None, group: int) -> None:
        """Start a reduction: the one before ends what it sends, and the one before that ends; so does the group's last.

        Args:
            group: its number.
        """
        self._end(group)
        held = [] if bucket is None else [bucket]
        kept = []
        if self._rules.copies:
            held.append(self._take(numel, self._rules.wire_bytes))
            if self._rules.is_replicated:
                kept.append(held.pop())
        if self._rules.lands:
            kept.append(self._take(numel // self._rules.num_shards, self._rules.rest_bytes))
        if self._rules.receives:
            is_slice = self._rules.sums_on_arrival
            received = self._take(numel // self._rules.num_shards if is_slice else numel, self._rules.wire_bytes)
            if self._rules.is_on_host:
                held.insert(0, received)  # the first to be given back
            else:
                self._pool.release(received)
        self._sent[group], self._kept[group], self._numels[group] = held, kept, numel
        while len(self._under_way) > 1:
            self._end(self._under_way.popleft())
        for other in self._under_way:  # the group itself, where it is reduced twice on end
            self._advance(other)
        self._under_way.append(group)

    def _advance(self, group: int) -> None:
        """End what a reduction sends within the shard group; a sum over replicas that is wider than at rest begins."""
        self._release(self._sent.pop(group, ()))
        if self._rules.widens_sums and group in self._numels:
            numel = self._numels.pop(group) // self._rules.num_shards
            self._kept[group] += [self._take(numel, self._rules.wire_bytes) for _ in ("sent", "received")]

    def _end(self, group: int) -> None:
        self._advance(group)
        self._release(self._kept.pop(group, ()))
        self._numels.pop(group, None)

    def finish(self) -> None:
        """End all reductions."""
        while self._under_way:
            self._end(self._under_way.popleft())

    def pipelined(
        self,
        stages: Sequence[Sequence[tuple[int, int]]],
        sums_bytes: Sequence[float],
        tables_bytes: Sequence[float],
        reductions: Sequence[tuple[int, bool]],
    ) -> list[Buffers]:
        """Of each stage, in a pipeline's second step: its pool keeps what the first has made.

        Args:
            sums_bytes: of the buffers that a sum in forwards needs at once.
            tables_bytes: of the buffers that sums of the step need, one behind the other.
            reductions: in which order stages get gradients and are reduced, where that is not once.
        """
        order = reductions or [(stage, is_reduced) for is_reduced in (False, True) for stage in range(len(stages))]
        for _ in self._step(stages, order):
            pass
        self.finish()
        for num_bytes in tables_bytes:
            self.touch((num_bytes,))
        self.touch(sums_bytes)
        resting = self.num_bytes
        before, full, last = [resting] * len(stages), [resting] * len(stages), resting
        for stage, opened, filled, reduced in self._step(stages, order):
            before[stage], full[stage] = max(before[stage], opened), max(full[stage], filled)
            last = max(last, filled, reduced)
        self.finish()
        stepping, more = self.num_bytes, self._unseen(stages)
        return [
            Buffers(
                resting=resting + more,
                with_root=filled + more,
                opening=(opened + more, filled + more),
                filling=(filled + more,),
                reducing=(last + more,),
                last=last + more,
                stepping=stepping + more,
                scratch=0,
            )
            for opened, filled in zip(before, full, strict=True)
        ]

    def _step(
        self, stages: Sequence[Sequence[tuple[int, int]]], order: Sequence[tuple[int, bool]]
    ) -> Iterator[tuple[int, float, float, float]]:
        """Stages as they are reduced; bytes before their gradients come, with all of them, and at most behind that."""
        groups = [[numel for numel, count in stage for _ in range(min(count, NUM_TELLING))] for stage in stages]
        buckets: dict[int, list[Tensor | None]] = {}
        opened = dict.fromkeys(range(len(stages)), self.num_bytes)
        for stage, is_reduced in order:
            if not is_reduced:
                if stage not in buckets:
                    opened[stage] = self.num_bytes
                    buckets[stage] = [self.bucket(numel) for numel in groups[stage]]
                self.run_backward()
                continue
            own = buckets.pop(stage, None) or [self.bucket(numel) for numel in groups[stage]]
            filled = highest = self.num_bytes
            for number, (numel, bucket) in enumerate(zip(groups[stage], own, strict=True)):
                self.reduce(numel, bucket, _MOST_GROUPS * stage + number)
                highest = max(highest, self.num_bytes)
            yield stage, opened[stage], filled, highest

    def _unseen(self, stages: Sequence[Sequence[tuple[int, int]]]) -> float:
        """Buckets of the blocks that were left out."""
        if not self._rules.is_sharded:
            return 0.0
        each = [
            sum(max(0, count - NUM_TELLING) * self._size(numel * self._rules.bucket_bytes) for numel, count in stage)
            for stage in stages
        ]
        return float(sum(each) if self._rules.is_once else max(each))

    def _size(self, num_bytes: int) -> int:
        return num_bytes if isinstance(self._pool, _Counted) else size_class_bytes(num_bytes)

    def _take(self, numel: int, element_bytes: int) -> Tensor:
        return self._pool.acquire(numel * element_bytes, torch.uint8)

    def _release(self, buffers: Iterable[Tensor]) -> None:
        for buffer in buffers:
            self._pool.release(buffer)


def sums_of(strategy: Strategy, whole_bytes: float, folds: RankLayerCounts) -> tuple[float, ...]:
    """Bytes of the buffers that tensor-parallel sums on a CPU have at once: `shardwise.comm.collectives` and
    `tensor.collectives`.

    Two ranks exchange what they have: what is summed where it stands is received beside it, a large tensor in fp32
    goes round in a ring. More ranks widen narrow tensors, send them as they were, and receive all parts of a slice.

    Args:
        whole_bytes: of the residual stream, its sequences unsplit.
        folds: of the rank: blocks sum where it stands, embedding and head do not, and they sum whole sequences.
    """
    s, size = strategy, DTYPE_BYTES[strategy.param]
    has_blocks = any(fold.group.unit != ROOT for fold in folds.folds)
    has_ends = any(fold.group.unit == ROOT for fold in folds.folds)
    if s.tp == 2:
        is_exchanged = has_blocks and not s.sequence_parallel and (whole_bytes < RING_BYTES or size < FP32_BYTES)
        return (whole_bytes,) if is_exchanged else ()
    if s.tp > 1 and size < FP32_BYTES and (has_ends or not s.sequence_parallel):
        return (whole_bytes / size * FP32_BYTES, whole_bytes, whole_bytes)
    return (whole_bytes,) if s.tp > 1 and s.sequence_parallel and has_blocks else ()


def sums_in_backward(strategy: Strategy, whole_bytes: float, folds: RankLayerCounts) -> tuple[float, ...]:
    """Of those buffers, what backwards of blocks need while their gradients come.

    Gradients of the blocks' inputs are summed beside where they stand, which two ranks do without a buffer. A product
    that is recomputed is summed where it stands, before gradients of its block come; but a pipeline has those of other
    micro-batches by then.
    """
    s = strategy
    if s.tp == 2 and (s.pp == 1 or s.recompute != "full"):
        return ()
    of_blocks = tuple(fold for fold in folds.folds if fold.group.unit != ROOT)
    return sums_of(s, whole_bytes, replace(folds, folds=of_blocks))


def tied_bytes(folds: RankLayerCounts) -> int:
    """Of the table in which a step sums gradients of what two ranks of a pipeline share: `shardwise.zero.grad_buckets`.

    A small one has a buffer too, in which the other's arrives; a large one is summed where it is.
    """
    shared = [fold.group for fold in folds.folds if len(folds.layout.holders(fold.group)) == 2]
    is_replicated = folds.layout.stage.optimizer is Placement.REPLICATE
    return FP32_BYTES * sum(group.padded_numel if is_replicated else group.shard_numel for group in shared)


def shared_bytes(strategy: Strategy, folds: RankLayerCounts) -> int:
    """Return the bytes of the table in which a step sums gradients of norms that saw parts of sequences."""
    if not strategy.sequence_parallel:
        return 0
    is_replicated = folds.layout.stage.optimizer is Placement.REPLICATE
    numels = [
        fold.count * param.numel // (1 if is_replicated else fold.group.num_shards)
        for fold in folds.folds
        for param in fold.group.params
        if len(param.shape) == 1
    ]
    return FP32_BYTES * sum(numels)
