"""Buffers that come and go with parameters and gradients: what is gathered, and what reductions need.

Which buffers a reduction takes and when it gives them back is told by `shardwise.zero.grads`, `shardwise.zero.driver`
and `shardwise.comm`. The engine's own pool is asked how much memory that is, so its classes of sizes and what it keeps
idle count too: a walk through a step's reductions with tensors that have no memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from shardwise.layout.activations import FP32_BYTES
from shardwise.layout.layout import Layout
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.layout.skeleton import ROOT
from shardwise.layout.stages import Placement
from shardwise.planner.folded import RankFolds
from shardwise.planner.job import Job, Strategy
from shardwise.pool import BufferPool, size_class_bytes

NUM_TELLING: Final = 4
"""Blocks of a stage behind which each reduction finds the same buffers as the one before."""

NUM_ROUNDS_TELLING: Final = 3
"""Micro-batches behind which reductions of each find the same buffers as those of the one before."""

_MOST_GROUPS: Final = 1000
"""Of a stage, by which groups are numbered."""

RING_BYTES: Final = 2**20
"""Of a sum over two ranks, from which on it needs no buffer on a CPU: `shardwise.comm`."""


@dataclass(frozen=True)
class Buffers:
    """Bytes of a rank's buffers at the moments of a step.

    Attributes:
        resting: of those that are there when no gradient has come.
        with_root: when gradients of what is in no block have come.
        filling: while a block's gradients come; by the blocks behind it that are done, the last entry for all further.
        reducing: as its reduction starts; likewise.
        last: as that of what is in no block starts, behind all others.
    """

    resting: float
    with_root: float
    filling: tuple[float, ...]
    reducing: tuple[float, ...]
    last: float


@dataclass(frozen=True)
class Gathered:
    """Parameters that are unsharded for use.

    Attributes:
        root, block, rank: elements of what is in no block, of the largest block, of all.
        param_bytes: of an element; 0 where parameters rest whole.
        is_whole: all of the rank is unsharded for a batch.
    """

    root: int
    block: int
    rank: int
    param_bytes: int
    is_whole: bool

    @classmethod
    def of(cls, strategy: Strategy, folds: RankFolds) -> Gathered:
        """Of a rank's folded groups."""
        is_gathered = folds.layout.stage.params is Placement.SHARD
        is_gathered &= not all(fold.group.rests_whole for fold in folds.folds)
        return cls(
            root=sum(fold.group.padded_numel for fold in folds.folds if fold.group.unit == ROOT),
            block=max(block_numels(folds), default=0),
            rank=folds.numel,
            param_bytes=DTYPE_BYTES[strategy.param] if is_gathered else 0,
            is_whole=strategy.pp > 1 and strategy.gather == "batch",
        )

    def num_bytes(self, num_blocks: int) -> float:
        """Of the unsharded root and of so many blocks."""
        return self.param_bytes * (self.rank if self.is_whole else min(self.rank, self.root + num_blocks * self.block))


def block_numels(folds: RankFolds) -> list[int]:
    """Elements of each kind of block, its experts included."""
    blocks: dict[str, int] = {}
    for fold in folds.folds:
        if fold.group.unit != ROOT:
            blocks[fold.group.unit] = blocks.get(fold.group.unit, 0) + fold.group.padded_numel
    return list(blocks.values())


def buffers_of(job: Job, strategy: Strategy, folds: RankFolds, summed_bytes: float, share: float = 1.0) -> Buffers:
    """Of a rank's folded groups.

    Args:
        summed_bytes: of the buffer in which a tensor-parallel sum arrives; 0 where there is none.
        share: of a block's elements that one reduction moves.
    """
    walk = _Walk(job, strategy, folds.layout)
    walk.touch(summed_bytes)
    resting = walk.num_bytes
    if strategy.pp > 1:
        return walk.pipelined(_by_stage(folds), summed_bytes, walk.tied_bytes(folds))
    root = sum(fold.group.padded_numel for fold in folds.folds if fold.group.unit == ROOT)
    num_blocks = sum(
        fold.count for fold in folds.folds if fold.group.unit != ROOT and fold.group.name == fold.group.unit
    )
    block = int(share * max(block_numels(folds), default=0))
    of_root = walk.bucket(root)
    with_root = walk.num_bytes
    filling, reducing = [], []
    for _ in range(min(num_blocks, NUM_TELLING)):
        bucket = walk.bucket(block)
        filling.append(walk.num_bytes)
        walk.reduce(block, bucket, len(filling))
        reducing.append(walk.num_bytes)
    walk.reduce(root, of_root, 0)
    last = max(walk.num_bytes, reducing[-1] if reducing else 0.0)
    return Buffers(resting, with_root, tuple(filling) or (with_root,), tuple(reducing) or (with_root,), last)


def _by_stage(folds: RankFolds) -> list[list[tuple[int, int]]]:
    """Elements of each group and how many there are of it, in the order of their reductions; by stage, the last first.

    What several stages hold is reduced with the last of them.
    """
    pipeline = folds.layout.pipeline
    held = sorted(pipeline.held, reverse=True) if pipeline is not None else [0]
    found: list[list[tuple[int, int]]] = [[] for _ in held]
    for fold in folds.folds:
        own = [held.index(stage) for stage in fold.group.stages if stage in held]
        place = found[max(own, default=0)]
        entry = (fold.group.padded_numel, fold.count)
        if fold.group.unit == ROOT:
            place.append(entry)
        else:
            place.insert(0, entry)
    return found


class _Counted:
    """A pool of exact sizes, which keeps what was once in use at the same time."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._leased_bytes = 0

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Lease `numel` elements."""
        self._leased_bytes += numel * dtype.itemsize
        self.reserved_bytes = max(self.reserved_bytes, self._leased_bytes)
        return torch.empty(numel, dtype=dtype, device="meta")

    def release(self, tensor: Tensor) -> None:
        """Give them back."""
        self._leased_bytes -= tensor.numel() * tensor.element_size()


def _own_pool() -> BufferPool:
    """The engine's, of memory that is not there."""
    return BufferPool("meta", allocate=partial(torch.empty, dtype=torch.uint8, device="meta"))


class _Walk:
    """Takes and gives back buffers as the engine does."""

    def __init__(self, job: Job, strategy: Strategy, layout: Layout) -> None:
        s, stage, precision, mesh = strategy, layout.stage, layout.precision, layout.mesh
        practice = job.practice
        self._pool: BufferPool | _Counted = _own_pool() if practice.is_own else _Counted()
        self._in_flight: deque[list[Tensor]] = deque()
        self._groups: deque[int] = deque()
        self._numels: dict[int, int] = {}  # of reductions whose sum over replicas is still to come
        self._is_sharded = stage.grads is Placement.SHARD and practice.trains_all
        self._is_replicated = stage.optimizer is Placement.REPLICATE
        self._num_shards = mesh.dp_shard * mesh.cp
        num_ranks = self._num_shards * (mesh.dp_replicate if self._is_replicated else 1)
        is_split = num_ranks > 1 and practice.trains_all
        self._wire_bytes = DTYPE_BYTES[precision.reduce]
        self._rest_bytes = DTYPE_BYTES[precision.accumulate]
        self._bucket_bytes = self._rest_bytes if s.pp > 1 else self._wire_bytes
        is_same = (self._bucket_bytes if self._is_sharded else self._rest_bytes) == self._wire_bytes
        in_place = practice.reduces_in_place or (self._is_replicated and is_same)
        self._copies = is_split and not is_same and not practice.reduces_in_place
        self._receives = is_split and (self._is_sharded or not in_place)
        is_summed_again = mesh.dp_replicate > 1 and not self._is_replicated and practice.is_own
        self._widens_sums = is_summed_again and self._rest_bytes != self._wire_bytes
        # What NCCL sums arrives as a slice; others copy all gradients of a group together before they send them.
        self._sums_on_arrival = practice.is_own and job.cluster.gpu.name != "cpu" and self._wire_bytes >= FP32_BYTES
        self._is_on_host = job.cluster.gpu.name == "cpu"
        self._lands = s.grads_tier != "device"
        self._is_once = s.gather == "batch"
        self._num_rounds = min(NUM_ROUNDS_TELLING, s.num_micro_batches)

    @property
    def num_bytes(self) -> float:
        """That the pool holds now."""
        return float(self._pool.reserved_bytes)

    def touch(self, num_bytes: float) -> None:
        """A buffer that comes and goes at once."""
        if num_bytes:
            self._pool.release(self._take(int(num_bytes), 1))

    def bucket(self, numel: int) -> Tensor | None:
        """What a backward puts gradients in, where these rest as shards."""
        return self._take(numel, self._bucket_bytes) if self._is_sharded and numel else None

    def reduce(self, numel: int, bucket: Tensor | None, group: int) -> None:
        """Start a reduction: the one before ends what it sends, and the one before that ends; so does the group's last.

        Args:
            group: its number.
        """
        if group in self._groups:
            index = 2 * self._groups.index(group)
            self._release(self._in_flight[index])
            self._release(self._in_flight[index + 1])
            self._in_flight[index], self._in_flight[index + 1] = [], []
        held = [] if bucket is None else [bucket]
        kept = []
        if self._copies:
            held.append(self._take(numel, self._wire_bytes))
            if self._is_replicated:
                kept.append(held.pop())
        if self._lands:
            kept.append(self._take(numel // self._num_shards, self._rest_bytes))
        if self._receives:
            is_slice = self._sums_on_arrival
            received = self._take(numel // self._num_shards if is_slice else numel, self._wire_bytes)
            if self._is_on_host:
                held.append(received)
            else:
                self._pool.release(received)
        while len(self._in_flight) > 2:
            self._release(self._in_flight.popleft())
            self._release(self._in_flight.popleft())
            self._groups.popleft()
        if self._in_flight:
            self._advance(len(self._in_flight) - 2)
        self._in_flight += (held, kept)
        self._numels[group] = numel
        self._groups.append(group)

    def _advance(self, index: int) -> None:
        """End what a reduction sends within the shard group; a sum over replicas that is wider than at rest begins."""
        group = self._groups[index // 2]
        self._release(self._in_flight[index])
        self._in_flight[index] = []
        if self._widens_sums and group in self._numels:
            numel = self._numels.pop(group) // self._num_shards
            self._in_flight[index + 1] += [self._take(numel, self._wire_bytes) for _ in ("sent", "received")]

    def finish(self) -> None:
        """End all reductions."""
        while self._in_flight:
            self._advance(0)
            self._release(self._in_flight.popleft())
            self._release(self._in_flight.popleft())
            self._groups.popleft()

    def pipelined(self, stages: Sequence[Sequence[tuple[int, int]]], summed_bytes: float, tied_bytes: float) -> Buffers:
        """Of a pipeline's second step: its pool keeps what the first has made."""
        for _ in self._step(stages):
            pass
        self.finish()
        self.touch(tied_bytes)
        self.touch(summed_bytes)
        resting = self.num_bytes
        peaks = list(self._step(stages))
        more = self._unseen(stages)
        filled, last = max(peaks[::2], default=resting) + more, max(peaks, default=resting) + more
        return Buffers(resting + more, filled, (filled,), (last,), last)

    def tied_bytes(self, folds: RankFolds) -> int:
        """Of the buffer in which the sum of what two stages share arrives; a large one is summed where it is."""
        shared = [fold.group for fold in folds.folds if len(folds.layout.holders(fold.group)) == 2]
        slices = [group.padded_numel if self._is_replicated else group.shard_numel for group in shared]
        num_bytes = sum(slices) * FP32_BYTES
        return num_bytes if num_bytes < RING_BYTES else 0

    def _step(self, stages: Sequence[Sequence[tuple[int, int]]]) -> Iterator[float]:
        """Bytes when all gradients of a reduction have come and behind it, in turn."""
        groups = [[numel for numel, count in stage for _ in range(min(count, NUM_TELLING))] for stage in stages]
        if self._is_sharded and not self._is_once:
            for _ in range(self._num_rounds):
                for number, stage in enumerate(groups):
                    yield from self._reduced(stage, [self.bucket(numel) for numel in stage], number)
            return
        buckets = [[self.bucket(numel) for numel in stage] for stage in groups]
        for number, (stage, own) in enumerate(zip(groups, buckets, strict=True)):
            yield from self._reduced(stage, own, number)

    def _reduced(self, numels: Sequence[int], buckets: Sequence[Tensor | None], stage: int) -> Iterator[float]:
        yield self.num_bytes
        highest = self.num_bytes
        for number, (numel, bucket) in enumerate(zip(numels, buckets, strict=True)):
            self.reduce(numel, bucket, _MOST_GROUPS * stage + number)
            highest = max(highest, self.num_bytes)
        yield highest

    def _unseen(self, stages: Sequence[Sequence[tuple[int, int]]]) -> float:
        """Buckets of the blocks that were left out."""
        if not self._is_sharded:
            return 0.0
        each = [
            sum(max(0, count - NUM_TELLING) * self._size(numel * self._bucket_bytes) for numel, count in stage)
            for stage in stages
        ]
        return float(sum(each) if self._is_once else max(each))

    def _size(self, num_bytes: int) -> int:
        return num_bytes if isinstance(self._pool, _Counted) else size_class_bytes(num_bytes)

    def _take(self, numel: int, element_bytes: int) -> Tensor:
        return self._pool.acquire(numel * element_bytes, torch.uint8)

    def _release(self, buffers: Sequence[Tensor]) -> None:
        for buffer in buffers:
            self._pool.release(buffer)
