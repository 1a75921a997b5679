"""Gradients of one group go through a bucket that a backward fills, a reduction, and the accumulator of this rank.

Where gradients are stored whole (stages 0 and 1), the bucket lives as long as the group and the accumulator is a view
of it. Where they are stored as shards, each backward takes a bucket from the pool, and reducing adds it to the
accumulator.

Under hybrid sharding the reduction is hierarchical: a reduce-scatter over the shard group in every backward that
reduces, and once a step an all-reduce of the accumulator over the replicas, which carries 1/n of the bytes.

Gradients that are stored off the device leave it as each reduction ends; their sum over the replicas comes before that,
so it runs in every backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from shardwise.comm.collectives import AsyncWork, Comm
from shardwise.config.resolve import ConfigError
from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import GroupSpec
from shardwise.layout.tp_sharding import TpShard
from shardwise.layout.zero_stages import Placement
from shardwise.offload.storage import StateStorage, loaded
from shardwise.offload.worker import Task
from shardwise.runtime.memory_tracker import Category
from shardwise.runtime.precision import add_widened, torch_dtype
from shardwise.runtime.state_shards import FlatState
from shardwise.zero.resources import ShardingResources


class GroupGrads:
    """Holds the buffers of a group's gradients, and tracks what is in them.

    Args:
        spec: the group's spec.
        layout: gives stage and precision.
        resources: shared by the engine's groups.
    """

    def __init__(self, spec: GroupSpec, layout: Layout, resources: ShardingResources) -> None:
        stage, policy, comms = layout.stage, layout.precision_of(spec), resources.comms
        self.spec = spec
        self._comms = comms
        self._device = comms.data.device
        self._pool = resources.pool
        self._tracker = resources.tracker
        self._tiers = resources.tiers
        self._is_stored_whole = stage.grads is Placement.PARTIAL
        self._is_replicated = stage.optimizer is Placement.REPLICATE
        self._wire_dtype = torch_dtype(policy.reduce)
        self._dtype = torch_dtype(policy.accumulate)
        self._master_dtype = torch_dtype(policy.master)
        self._own = slice(*spec.held_range(stage.optimizer, comms.shards.rank))
        self._sharing = SharedGradRanges.of(spec, self._own, comms.tensor.rank, comms.tensor.world_size)
        self._away: StateStorage | None = None
        if spec.tiers.grads != "device":
            self._away = self._tiers.place(
                spec.tiers.grads, f"{spec.name}.grad", spec.shard_numel, self._dtype, Category.GRADIENTS
            )
        self.taking: Task | None = None  # moves the last gradient to where gradients are stored
        self._square: Tensor | None = None
        self._is_squared_at_once = False  # on the device, not by the worker thread
        self._bucket: Tensor | None = None
        self._accumulator: Tensor | None = None
        self._stashed: Tensor | None = None
        self._pending: AsyncWork | None = None
        self._holds_sum = False
        self._is_partial = False
        self._is_written = [False] * len(spec.params)
        self._has_arrived = [False] * len(spec.params)
        self._num_missing = len(spec.params)
        self._was_used = [False] * len(spec.params)

    @property
    def is_complete(self) -> bool:
        """Say whether the current backward has given every parameter its gradient."""
        return self._num_missing == 0

    @property
    def is_partial(self) -> bool:
        """Say whether the accumulator's sum is yet to be summed over the replicas."""
        return self._is_partial

    @property
    def was_used(self) -> tuple[bool, ...]:
        """Return for each parameter whether it got a gradient on this rank since the last step."""
        return tuple(self._was_used)

    def add(self, index: int, gradient: Tensor, will_reduce: bool) -> None:
        """Add one parameter's gradient to the bucket.

        Args:
            index: of the parameter in `spec.params`.
            gradient: of the parameter's shape, any floating dtype.
            will_reduce: the bucket is reduced at the end of this backward, so it may be in the wire's dtype.
        """
        place = self.spec.params[index]
        if gradient.is_sparse:
            raise ConfigError(
                "sparse-gradient",
                f"the gradient of {place.name} is sparse but shards are dense; build the embedding with sparse=False",
            )
        if self._has_arrived[index]:
            raise ConfigError(
                "gradient-twice",
                f"the gradient of {place.name} came twice in one backward, as reentrant checkpointing does; "
                "pass use_reentrant=False to torch.utils.checkpoint",
            )
        target = self._open_bucket(will_reduce)[place.offset : place.offset + place.numel]
        if self._is_written[index]:
            add_widened(target, gradient.reshape(-1))
        else:
            target.view(place.shape).copy_(gradient)
        self._num_missing -= 1
        self._is_written[index] = self._has_arrived[index] = self._was_used[index] = True

    def end_backward(self) -> None:
        """Expect a gradient of every parameter again."""
        self._has_arrived = [False] * len(self.spec.params)
        self._num_missing = len(self.spec.params)

    def reduce(self, is_last: bool) -> None:
        """Start to sum the bucket over the shard group; an unused parameter counts as zero.

        Args:
            is_last: whether this is the last one before the step, so that the sum over the replicas follows.
        """
        self.finish_reduce()
        bucket = self._open_bucket(will_reduce=True)
        for start, stop in self._unwritten_ranges():
            bucket[start:stop].zero_()
        self._is_written = [False] * len(self.spec.params)
        name = f"reduce {self.spec.name}"
        if self._is_replicated:
            summed = self._comms.data.all_reduce(bucket, self._wire_dtype, name)
            self._pending = AsyncWork(
                summed.advance, lambda: AsyncWork(lambda: self._finish_sum(summed, is_partial=False))
            )
            return
        borrowed = []
        if not self._is_stored_whole:
            self._bucket = None
            borrowed.append(bucket)
        wire = bucket
        if bucket.dtype != self._wire_dtype and self._comms.reductions.world_size > 1:
            wire = self._pool.acquire(bucket.numel(), self._wire_dtype)
            wire.copy_(bucket)
            borrowed.append(wire)
        has_replicas = self._comms.replicas.world_size > 1
        if self._away is not None:
            self._pending = self._reduce_away(wire, borrowed, is_last)
            return
        if has_replicas and self._holds_sum and not self._is_partial:
            self._stash_sum(self._open_accumulator())
        accumulate = self._holds_sum and not self._is_stored_whole
        summed = self._comms.reductions.reduce_scatter(wire, self._open_accumulator(), accumulate=accumulate, name=name)

        def finish() -> None:
            self._finish_sum(summed, is_partial=has_replicas)
            for buffer in borrowed:
                self._pool.release(buffer)

        self._pending = AsyncWork(finish, self._sum_replicas if has_replicas and is_last else None)

    def _reduce_away(self, wire: Tensor, borrowed: list[Tensor], is_last: bool) -> AsyncWork:
        """Sum over the shard group, then over the replicas, and move the sum off the device."""
        name, replicas = f"reduce {self.spec.name}", self._comms.replicas
        landing = self._pool.acquire(self.spec.shard_numel, self._dtype)
        summed = self._comms.reductions.reduce_scatter(wire, landing, accumulate=False, name=name)

        def finish_scatter() -> None:
            summed.wait()
            for buffer in borrowed:
                self._pool.release(buffer)

        def sum_replicas() -> AsyncWork:
            total = replicas.all_reduce(landing, self._wire_dtype, f"{name} over replicas")
            return AsyncWork(total.advance, lambda: AsyncWork(lambda: self._evict(total, landing, is_last)))

        return AsyncWork(finish_scatter, sum_replicas)

    def _evict(self, total: AsyncWork, landing: Tensor, is_last: bool) -> None:
        total.wait()
        adds = self._holds_sum
        if not adds:
            self.await_taken()  # of gradients that were given up: the worker thread may still be adding to them
        self._holds_sum, self._square = True, None
        if self._away is None:
            return

        def note(gradient: Tensor) -> None:
            self._square = square_sum(self._sharing, gradient.to(self._master_dtype))

        # What ranks share is summed before it counts in the norm.
        is_counted = is_last and not self._sharing.summed
        self._is_squared_at_once = is_counted and not adds
        if self._is_squared_at_once:
            note(landing)
        self.taking = self._away.take(landing, self._pool, note if is_counted else None, adds)

    @property
    def storage(self) -> StateStorage:
        """Return the storage of this rank's summed gradients, 1-D."""
        return self._away or self._tiers.on_device(self._open_accumulator())

    @property
    def is_away(self) -> bool:
        """Say whether the gradients are stored off the device."""
        return self._away is not None

    @property
    def holds_sum(self) -> bool:
        """Say whether a reduction has reached the gradients since the last step."""
        return self._holds_sum

    @property
    def sharing(self) -> SharedGradRanges:
        """Return what this rank's slice has in common with its tensor-parallel group."""
        return self._sharing

    def await_taken(self) -> None:
        """Return once the gradients are where they are stored."""
        taking, self.taking = self.taking, None
        if taking is not None:
            taking.wait()

    def forget_square(self) -> None:
        """Forget the sum of squares, because the stored gradients are about to change."""
        self._square, self._is_squared_at_once = None, False

    def square(self) -> Tensor:
        """Return the sum of the squares of what the step will use, fp64 and 0-d."""
        if self._square is None or not self._is_squared_at_once:
            self.await_taken()
        if self._square is None:
            with loaded(self.storage) as gradient:
                self._square = square_sum(self._sharing, gradient.to(self._master_dtype))
        return self._square

    def reduce_replicas(self) -> None:
        """Start to sum over the replicas what no last reduction has summed."""
        self.finish_reduce()
        self._pending = self._sum_replicas()

    def advance_reduce(self) -> None:
        """Start the next collective of the reduction under way, if there is one."""
        if self._pending is not None:
            self._pending.advance()

    def finish_reduce(self) -> None:
        """Wait for the reduction under way, if there is one, and free its buffers."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def gradient(self) -> Tensor | None:
        """Return this rank's summed gradients, 1-D, in the master's dtype; None if no backward has reached the group.

        Gradients that are stored off the device are copied to it.
        """
        if not self._holds_sum:
            return None
        if self._away is None:
            return self._open_accumulator().to(self._master_dtype)
        self.await_taken()
        brought = torch.empty(self._away.numel, dtype=self._dtype, device=self._device)
        self._away.fetch(brought).wait()
        return brought.to(self._master_dtype)

    def accumulated(self) -> FlatState | None:
        """Return the stored sum itself, in its own dtype; None as for `gradient`. What is written to it counts."""
        self.await_taken()
        self._square = None
        return self.storage if self._holds_sum else None

    def mark_used(self, index: int) -> None:
        """Count a parameter as one that got a gradient."""
        self._was_used[index] = True

    @property
    def has_gradients(self) -> bool:
        """Say whether the buffers hold gradients."""
        return self._holds_sum or self._stashed is not None or any(self._is_written)

    def buffers(self) -> list[Tensor]:
        """Return the buffers that are allocated; two may share a storage."""
        return [each for each in (self._bucket, self._accumulator, self._stashed) if each is not None]

    def drop(self) -> int:
        """Free the buffers, which hold no gradients; the next backward makes new ones. Returns the freed bytes."""
        storages = {id(storage): storage.nbytes() for storage in (each.untyped_storage() for each in self.buffers())}
        self._bucket = self._accumulator = None
        return sum(storages.values())

    def clear(self) -> None:
        """Forget the gradients, after the step; buffers that outlive a backward stay allocated."""
        self.finish_reduce()
        self.await_taken()  # what is still to be added must not be added to what comes next
        self._holds_sum = self._is_partial = False
        self._stashed = self._square = None
        self._is_written = [False] * len(self.spec.params)
        self._was_used = [False] * len(self.spec.params)
        if not self._is_stored_whole and self._bucket is not None:
            self._pool.release(self._bucket)
            self._bucket = None

    def close(self) -> None:
        """Free what is stored off the device."""
        if self._away is not None:
            self._away.close()

    def _sum_replicas(self) -> AsyncWork:
        name = f"reduce {self.spec.name} over replicas"
        summed = self._comms.replicas.all_reduce(self._open_accumulator(), self._wire_dtype, name)
        return AsyncWork(summed.advance, lambda: AsyncWork(lambda: self._finish_sum(summed, is_partial=False)))

    def _finish_sum(self, summed: AsyncWork, is_partial: bool) -> None:
        summed.wait()
        self._holds_sum, self._is_partial = True, is_partial
        if self._stashed is not None and not is_partial:
            self._open_accumulator().add_(self._stashed)
            self._stashed = None

    def _stash_sum(self, total: Tensor) -> None:
        """Keep the finished sum of earlier backwards apart: it is added once the new one is finished too."""
        self._stashed = total.clone() if self._stashed is None else self._stashed.add_(total)
        self._tracker.track(self._stashed, Category.GRADIENTS)
        self._holds_sum = False

    def _open_bucket(self, will_reduce: bool) -> Tensor:
        """Return the bucket to write into; a persistent one that holds the sum so far moves that out first."""
        if not self._is_stored_whole:
            if self._bucket is None:
                dtype = self._wire_dtype if will_reduce else self._dtype
                self._bucket = self._pool.acquire(self.spec.padded_numel, dtype)
            return self._bucket
        bucket = self._persistent_bucket()
        if not any(self._is_written):
            self.finish_reduce()
            if self._holds_sum:
                # A backward after a reduction: its own slice of the bucket is the accumulator, so that moves out.
                self._stash_sum(bucket[self._own])
        return bucket

    def _persistent_bucket(self) -> Tensor:
        if self._bucket is None:
            self._bucket = self._allocate(self.spec.padded_numel)
        return self._bucket

    def _open_accumulator(self) -> Tensor:
        if self._accumulator is None:
            whole = self._is_stored_whole
            self._accumulator = self._persistent_bucket()[self._own] if whole else self._allocate(self.spec.shard_numel)
        return self._accumulator

    def _allocate(self, numel: int) -> Tensor:
        buffer = torch.empty(numel, dtype=self._dtype, device=self._device)
        self._tracker.track(buffer, Category.GRADIENTS)
        return buffer

    def _unwritten_ranges(self) -> list[tuple[int, int]]:
        unused = [
            (place.offset, place.offset + place.numel)
            for place, written in zip(self.spec.params, self._is_written, strict=True)
            if not written
        ]
        return [*self.spec.gaps, *unused]


Range = tuple[int, int]


@dataclass(frozen=True)
class SharedGradRanges:
    """Says what one rank shares of a group's flat buffer, as ranges of this rank's slice.

    Attributes:
        summed: by number of sharers, the ranges where each has a part of the gradient.
        owned: the ranges that this rank counts; None for all.
    """

    summed: Mapping[int, tuple[Range, ...]]
    owned: tuple[Range, ...] | None

    @classmethod
    def of(cls, spec: GroupSpec, held: slice, tp_index: int, degree: int) -> Self:
        """Return the shared ranges of a rank's slice of a group.

        Args:
            spec: the group's spec.
            held: the range of the group's flat buffer that the rank holds, in elements.
            tp_index: the rank's index in its tensor-parallel group.
            degree: the size of that group.
        """
        if degree == 1:
            return cls({}, None)
        start, stop = held.start, held.stop
        summed: dict[int, list[Range]] = {}
        owned: list[Range] = []
        position = 0
        for low, high, share in _shared(spec, tp_index):
            if share.is_summed:
                summed.setdefault(share.num_sharers, []).append((low, high))
            if not share.is_owned_by(tp_index):
                owned.append((position, low))
                position = high
        owned.append((position, spec.padded_numel))
        within = {num_sharers: tuple(_within(ranges, start, stop)) for num_sharers, ranges in summed.items()}
        return cls(within, tuple(_within(owned, start, stop)))


def sum_over_sharers(gradients: Sequence[tuple[SharedGradRanges, FlatState]], comm: Comm) -> None:
    """Sum, in place, the gradients of which each rank has a part: one collective for each number of sharers.

    Neighbours that share heads use one row of a table; the other rows belong to other neighbours.

    Args:
        gradients: for each group what this rank shares, and its slice.
        comm: the tensor-parallel group.
    """
    by_sharers: dict[int, list[FlatState]] = {}
    for sharing, gradient in gradients:
        for num_sharers, ranges in sharing.summed.items():
            by_sharers.setdefault(num_sharers, []).extend(gradient.part(low, high) for low, high in ranges)
    for num_sharers, parts in sorted(by_sharers.items()):
        row = comm.rank // num_sharers
        _sum_parts(parts, comm, row, comm.world_size // num_sharers, f"gradients that {num_sharers} ranks share")


def sum_over_stages(
    gradients: Mapping[tuple[int, ...], Sequence[FlatState]], comms: Mapping[tuple[int, ...], Comm]
) -> None:
    """Sum, in place, the gradients of parameters that several stages of a pipeline hold: equal bits on all of them.

    Args:
        gradients: this rank's slices, by the ranks of the pipeline that hold them.
        comms: the groups of those ranks.
    """
    for holders, parts in sorted(gradients.items()):
        _sum_parts(parts, comms[holders], 0, 1, f"gradients of stages' tied parameters on {holders}")


def _sum_parts(parts: Sequence[FlatState], comm: Comm, row: int, num_rows: int, name: str) -> None:
    """Sum flat parts in one collective, each rank in its row of a table."""
    numels = [part.numel for part in parts]
    if not parts:
        return
    dtype = max((part.dtype for part in parts), key=lambda each: each.itemsize)
    table = torch.zeros(num_rows, sum(numels), dtype=dtype, device=comm.device)  # [rows, elements]
    own = table[row]
    for part, place in zip(parts, own.split(numels), strict=True):
        place.copy_(part.read(0, part.numel))
    comm.sum_in_place(table.view(-1), name)
    for part, summed in zip(parts, own.split(numels), strict=True):
        part.write(0, summed)


def square_sum(sharing: SharedGradRanges, gradient: Tensor) -> Tensor:
    """Return the sum of the squares of a gradient slice, fp64 and 0-d; what ranks share counts on its owner alone."""
    parts = [gradient] if sharing.owned is None else [gradient[low:high] for low, high in sharing.owned]
    squares = [torch.linalg.vector_norm(part).double().square() for part in parts]
    return torch.stack(squares).sum() if squares else gradient.new_zeros((), dtype=torch.float64)


def _shared(spec: GroupSpec, tp_index: int) -> Iterator[tuple[int, int, TpShard]]:
    """Yield what a rank shares with others, as ranges of the flat buffer, in order."""
    for param in spec.params:
        found = [
            (param.offset + low, param.offset + high, share)
            for share in param.split.shares(tp_index)
            if share.num_sharers > 1
            for low, high in share.flat_ranges(param.shape)
        ]
        yield from sorted(found, key=lambda each: each[0])


def _within(ranges: Sequence[Range], start: int, stop: int) -> Iterator[Range]:
    """Yield the parts of ranges that are in [start, stop), counted from `start`."""
    for low, high in ranges:
        if max(low, start) < min(high, stop):
            yield max(low, start) - start, min(high, stop) - start
