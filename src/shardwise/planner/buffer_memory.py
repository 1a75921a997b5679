"""Count buffers that come and go with parameters and gradients: what is gathered, and what reductions need.

`shardwise.zero.grad_buckets`, `shardwise.zero.sharding_state` and `shardwise.comm.collectives` decide which buffers a
reduction takes and when it returns them. This module walks through a step's reductions with tensors that have no
memory and asks the engine's own pool how many bytes that takes, so size classes and idle buffers count too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import torch
from torch import Tensor

from shardwise.layout.activation_bytes import FP32_BYTES
from shardwise.layout.layout import Layout
from shardwise.layout.mesh_shape import RING_BYTES
from shardwise.layout.param_groups import ROOT
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.layout.zero_stages import Placement
from shardwise.planner.compact_layout import LayerCount, RankLayerCounts
from shardwise.planner.job import PlanJob, Strategy
from shardwise.runtime.buffer_pool import BufferPool, size_class_bytes
from shardwise.runtime.precision import SCRATCH_NUMEL

NUM_TELLING: Final = 4
"""After so many blocks of a stage, each reduction finds the same buffers as the one before."""

_MOST_GROUPS: Final = 1000
"""More groups than any stage has; groups are numbered by stage times this number."""


@dataclass(frozen=True)
class Buffers:
    """Hold the bytes of a rank's buffers at the moments of a step.

    Attributes:
        idle: those that exist when no gradient has come.
        with_root: when gradients of what is in no block have come.
        opening: before a block's gradients come; by the number of blocks that are done, the last entry for all further.
        filling: while they come; indexed as `opening`.
        reducing: as the block's reduction starts; indexed as `opening`.
        last: as the reduction of what is in no block starts, after all others.
        stepping: when all reductions have ended.
        scratch: outside the pool, in which a reduction sums.
    """

    idle: float
    with_root: float
    opening: tuple[float, ...]
    filling: tuple[float, ...]
    reducing: tuple[float, ...]
    last: float
    stepping: float
    scratch: int


@dataclass(frozen=True)
class GatheredUnits:
    """Count the elements of parameters that are unsharded for use.

    Attributes:
        root, block, whole: elements of what is in no block, of the largest block, of all.
        param_bytes: bytes of an element; 0 where parameters are stored whole.
        is_whole: whether all is unsharded for a batch.
    """

    root: int
    block: int
    whole: int
    param_bytes: int
    is_whole: bool

    @classmethod
    def of(cls, strategy: Strategy, folds: RankLayerCounts, index: int = 0) -> GatheredUnits:
        """Return what a rank unshards while one of its stages computes.

        Args:
            strategy: its dtypes, and whether a pipeline gathers once a batch.
            folds: the rank's folded groups.
            index: the stage's index among the rank's own.
        """
        used: Sequence[LayerCount] = [fold for fold in folds.folds if not fold.group.is_stored_whole]
        is_gathered = folds.layout.stage.params is Placement.SHARD and bool(used)
        is_whole = strategy.pp > 1 and strategy.gather == "batch"
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
        """Return the bytes of the unsharded root and of `num_blocks` blocks."""
        return self.param_bytes * (
            self.whole if self.is_whole else min(self.whole, self.root + num_blocks * self.block)
        )


def block_numels(folds: Iterable[LayerCount]) -> list[int]:
    """Return the elements of each kind of block, its experts included."""
    blocks: dict[str, int] = {}
    for fold in folds:
        if fold.group.unit != ROOT:
            blocks[fold.group.unit] = blocks.get(fold.group.unit, 0) + fold.group.padded_numel
    return list(blocks.values())


class BufferTable:
    """Find the buffers of a job's strategies, and keep those that were asked for."""

    def __init__(self, job: PlanJob) -> None:
        self.job = job
        self._known: dict[tuple[object, ...], list[Buffers]] = {}

    def of(
        self,
        strategy: Strategy,
        folds: RankLayerCounts,
        sums_bytes: Sequence[float] = (),
        reductions: Sequence[tuple[int, bool]] = (),
        backward_bytes: Sequence[float] = (),
    ) -> list[Buffers]:
        """Return the buffers of each stage of a rank, the last first.

        Args:
            strategy: how the job is split.
            folds: the rank's folded groups.
            sums_bytes: bytes of the buffers that a tensor-parallel sum needs at once.
            reductions: where each micro-batch is reduced, as `InFlightTable.reductions` returns it.
            backward_bytes: bytes of the buffers that such a sum needs while gradients come.
        """
        rules = _Rules.of(self.job, strategy, folds.layout)
        scratch_bytes = rules.scratch_bytes(folds)
        if strategy.pp == 1:
            units = _Units.of(folds, self._block_numel(folds))
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

    def _block_numel(self, folds: RankLayerCounts) -> int:
        """Return the elements of a block that one reduction moves: those of the largest."""
        return max(block_numels(folds.folds), default=0)


def _sums_ahead(folds: RankLayerCounts) -> bool:
    """Say whether forwards of a pipeline rank sum over the tensor-parallel group: a head alone does not."""
    pipeline, has_blocks = folds.layout.pipeline, any(fold.group.unit != ROOT for fold in folds.folds)
    return has_blocks or (pipeline is not None and 0 in pipeline.held)


def _table_buffers(strategy: Strategy, folds: RankLayerCounts) -> tuple[int, ...]:
    """Return the bytes of each buffer in which small sums of a step arrive from another rank, one after the other."""
    shared = shared_bytes(strategy, folds) if strategy.tp == 2 else 0
    return tuple(num_bytes for num_bytes in (shared, tied_bytes(folds)) if 0 < num_bytes < RING_BYTES)


@dataclass(frozen=True)
class _Units:
    """Count the elements to reduce where no pipeline splits the model: of what is in no block, and of each block."""

    root: int
    block: int
    num_blocks: int

    @classmethod
    def of(cls, folds: RankLayerCounts, block_numel: int) -> _Units:
        """Count one rank's groups; `block_numel` elements of a block are moved at once."""
        return cls(
            root=sum(fold.group.padded_numel for fold in folds.folds if fold.group.unit == ROOT),
            block=block_numel,
            num_blocks=sum(
                fold.count for fold in folds.folds if fold.group.unit != ROOT and fold.group.name == fold.group.unit
            ),
        )


def _unpipelined(
    rules: _Rules, units: _Units, sums_bytes: Sequence[float], backward_bytes: Sequence[float], scratch_bytes: int
) -> Buffers:
    walk = _Walk(rules, backward_bytes)
    walk.touch(sums_bytes)
    idle = walk.num_bytes
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
    # After a backward that reduces, the engine's pool frees idle buffers.
    return Buffers(idle, with_root, opened, filled, reduced, last, 0.0, scratch_bytes)


class _Counted:
    """Act as a pool of exact sizes, which keeps what was once in use at the same time."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._leased_bytes = 0

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Lease `numel` elements."""
        self._leased_bytes += numel * dtype.itemsize
        self.reserved_bytes = max(self.reserved_bytes, self._leased_bytes)
        return cast(Tensor, _Bytes(numel * dtype.itemsize))

    def release(self, tensor: Tensor) -> None:
        """Return the elements of a leased tensor to the pool."""
        self._leased_bytes -= tensor.numel() * tensor.element_size()


class _Bytes:
    """Stand in for a tensor: say how many bytes it has and what it is a slice of."""

    __slots__ = ("_num_bytes", "_whole")

    def __init__(self, num_bytes: int, whole: _Bytes | None = None) -> None:
        self._num_bytes, self._whole = num_bytes, whole

    def __getitem__(self, part: slice) -> _Bytes:
        return _Bytes(part.stop, self)

    def view(self, dtype: torch.dtype) -> _Bytes:
        """Return itself: a view as another dtype has the same bytes."""
        return self

    def untyped_storage(self) -> _Bytes:
        """Return the buffer that this is a slice of."""
        return self._whole or self

    def numel(self) -> int:
        """Return the number of bytes."""
        return self._num_bytes

    def element_size(self) -> int:
        """Return 1: an element is a byte."""
        return 1


def _own_pool() -> BufferPool:
    """Return the engine's own pool over buffers without memory."""
    return BufferPool("meta", allocate=cast(Callable[[int], Tensor], _Bytes))


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """Say which buffers a reduction takes, apart from the sizes of gradients."""

    has_own_pool: bool
    is_sharded: bool
    is_replicated: bool
    num_shards: int
    wire_bytes: int
    accumulate_bytes: int
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
        """Derive the rules from a rank's layout."""
        s, stage, precision, mesh = strategy, layout.stage, layout.precision, layout.mesh
        traits = job.traits
        is_sharded = stage.grads is Placement.SHARD and job.trains_all
        is_replicated = stage.optimizer is Placement.REPLICATE
        num_shards = mesh.dp_shard * mesh.cp
        num_ranks = num_shards * (mesh.dp_replicate if is_replicated else 1)
        is_split = num_ranks > 1 and job.trains_all
        wire_bytes, accumulate_bytes = DTYPE_BYTES[precision.reduce], DTYPE_BYTES[precision.accumulate]
        bucket_bytes = accumulate_bytes if s.pp > 1 else wire_bytes
        is_same = (bucket_bytes if is_sharded else accumulate_bytes) == wire_bytes
        in_place = traits.reduces_in_place or (is_replicated and is_same)
        is_summed_again = mesh.dp_replicate > 1 and not is_replicated and traits.is_own
        is_once = s.gather == "batch"
        return cls(
            has_own_pool=traits.is_own,
            is_sharded=is_sharded,
            is_replicated=is_replicated,
            num_shards=num_shards,
            wire_bytes=wire_bytes,
            accumulate_bytes=accumulate_bytes,
            bucket_bytes=bucket_bytes,
            copies=is_split and not is_same and not traits.reduces_in_place,
            receives=is_split and (is_sharded or not in_place),
            widens_sums=is_summed_again and accumulate_bytes != wire_bytes,
            # What NCCL sums arrives as a slice; others copy all gradients of a group together before they send them.
            sums_on_arrival=traits.is_own and not job.cluster.gpu.is_cpu and wire_bytes >= FP32_BYTES,
            is_on_host=job.cluster.gpu.is_cpu,
            lands=s.grads_tier != "device",
            is_once=is_once,
        )

    def scratch_bytes(self, folds: RankLayerCounts) -> int:
        """Return the bytes in which a CPU sums what a reduction has received; 0 where it needs none."""
        if not self.receives or not self.is_on_host or not self.has_own_pool:
            return 0
        return FP32_BYTES * min(SCRATCH_NUMEL, max(fold.group.shard_numel for fold in folds.folds))


class _Walk:
    """Walk through a step, and take and return buffers as the engine does."""

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
        """Return the bytes that the pool holds now."""
        return float(self._pool.reserved_bytes)

    def touch(self, buffers_bytes: Sequence[float]) -> None:
        """Take buffers of these sizes at once and return them."""
        self._release([self._take(int(num_bytes), 1) for num_bytes in buffers_bytes if num_bytes])

    def run_backward(self) -> None:
        """Take and return the buffers of sums in a block's backward, while its buckets are full."""
        if self._backward_bytes:
            self.touch(self._backward_bytes)

    def bucket(self, numel: int) -> Tensor | None:
        """Take the bucket for a backward's gradients where they are stored as shards; None where it needs none."""
        return self._take(numel, self._rules.bucket_bytes) if self._rules.is_sharded and numel else None

    def reduce(self, numel: int, bucket: Tensor | None, group: int) -> None:
        """Start a reduction.

        The one before it ends what it sends. The one before that ends, and so does the group's last.

        Args:
            numel: elements of the group's gradients.
            bucket: the buffer that they are in; None where they are stored whole.
            group: the group's number.
        """
        self._end(group)
        held = [] if bucket is None else [bucket]
        kept = []
        if self._rules.copies:
            held.append(self._take(numel, self._rules.wire_bytes))
            if self._rules.is_replicated:
                kept.append(held.pop())
        if self._rules.lands:
            kept.append(self._take(numel // self._rules.num_shards, self._rules.accumulate_bytes))
        if self._rules.receives:
            is_slice = self._rules.sums_on_arrival
            received = self._take(numel // self._rules.num_shards if is_slice else numel, self._rules.wire_bytes)
            if self._rules.is_on_host:
                held.insert(0, received)  # the first to be released
            else:
                self._pool.release(received)
        self._sent[group], self._kept[group], self._numels[group] = held, kept, numel
        while len(self._under_way) > 1:
            self._end(self._under_way.popleft())
        for other in self._under_way:  # the group itself, where it is reduced twice on end
            self._advance(other)
        self._under_way.append(group)

    def _advance(self, group: int) -> None:
        """End what a reduction sends within the shard group, and begin its sum over replicas if that is widened."""
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
        """Return the buffers of each stage in a pipeline's second step, whose pool keeps what the first step made.

        Args:
            stages: for each stage, elements of its groups and how many there are of each.
            sums_bytes: bytes of the buffers that a sum in forwards needs at once.
            tables_bytes: bytes of the buffers that sums of the step need, one after the other.
            reductions: the order in which stages get gradients and are reduced, where that is not once.
        """
        order = reductions or [(stage, is_reduced) for is_reduced in (False, True) for stage in range(len(stages))]
        for _ in self._step(stages, order):
            pass
        self.finish()
        for num_bytes in tables_bytes:
            self.touch((num_bytes,))
        self.touch(sums_bytes)
        idle = self.num_bytes
        before, full, last = [idle] * len(stages), [idle] * len(stages), idle
        for stage, opened, filled, reduced in self._step(stages, order):
            before[stage], full[stage] = max(before[stage], opened), max(full[stage], filled)
            last = max(last, filled, reduced)
        self.finish()
        stepping, more = self.num_bytes, self._unseen(stages)
        return [
            Buffers(
                idle=idle + more,
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
        """Yield each stage as it is reduced, and the bytes before its gradients come, with all of them, and at most
        after.
        """
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
        """Return the bytes of the buckets of the blocks that the walk left out."""
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
    """Return the bytes of each buffer that tensor-parallel sums on a CPU have at once.

    Sources: `shardwise.comm.collectives` and `tensor.collectives`. Two ranks exchange what they have: a sum in place
    receives into a second buffer, and a large fp32 tensor goes round in a ring. More ranks widen narrow tensors, send
    them as they were, and receive all parts of a slice.

    Args:
        strategy: its tensor-parallel size and dtype.
        whole_bytes: bytes of the residual stream, its sequences unsplit.
        folds: the rank's groups: blocks sum in place; embedding and head do not, and they sum whole sequences.
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
    """Return those buffers of `sums_of` that backwards of blocks need while their gradients come.

    Gradients of the blocks' inputs are summed outside their own storage, which two ranks do without a buffer. A product
    that is recomputed is summed in place before gradients of its block come, but a pipeline has those of other
    micro-batches by then.

    Args:
        strategy: its tensor-parallel and pipeline sizes, and its recomputation.
        whole_bytes: bytes of the residual stream, its sequences unsplit.
        folds: the rank's groups.
    """
    s = strategy
    if s.tp == 2 and (s.pp == 1 or s.recompute != "full"):
        return ()
    of_blocks = tuple(fold for fold in folds.folds if fold.group.unit != ROOT)
    return sums_of(s, whole_bytes, replace(folds, folds=of_blocks))


def tied_bytes(folds: RankLayerCounts) -> int:
    """Return the bytes of the table in which a step sums gradients that two pipeline ranks share.

    Source: `shardwise.zero.grad_buckets`. A small table also has a buffer in which the other rank's arrives; a large
    one is summed in place.
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
