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

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from shardwise.comm.collectives import AsyncWork, Comm
from shardwise.comm.encoded import EncodedSum
from shardwise.config.resolve import ConfigError
from shardwise.layout.grad_sums import GradSum, SumRanks
from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import GroupSpec
from shardwise.layout.zero_stages import Placement
from shardwise.offload.storage import StateStorage, loaded
from shardwise.offload.worker import Task
from shardwise.runtime.memory_tracker import Category
from shardwise.runtime.precision import add_widened, torch_dtype
from shardwise.runtime.state_shards import FlatState
from shardwise.zero.resources import ShardingResources
from shardwise.zero.shared_grads import SharedGradRanges, square_sum


class GradBucket:
    """Holds the buffers of a group's gradients, and tracks what is in them.

    Args:
        spec: the group's spec.
        layout: gives stage and precision.
        resources: shared by the engine's groups.
    """

    def __init__(self, spec: GroupSpec, layout: Layout, resources: ShardingResources) -> None:
        stage, policy, comms = layout.stage_of(spec), layout.precision_of(spec), resources.comms
        self.spec = spec
        self._comms = comms
        self._device = comms.data.device
        self._pool = resources.pool
        self._tracker = resources.tracker
        self._errors = resources.codec_errors
        self._tiers = resources.tiers
        self._is_stored_whole = stage.grads is Placement.PARTIAL
        self._is_replicated = stage.optimizer is Placement.REPLICATE
        self._wire_dtype = torch_dtype(policy.reduce)  # of what is not encoded
        self._sums = layout.sums_of(spec)
        self._residuals: list[Tensor] = []
        self._over = {over: self._summing(over, each) for over, each in self._sums.items()}
        self._dtype = torch_dtype(policy.accumulate)
        self._master_dtype = torch_dtype(policy.master)
        self._own = slice(*spec.held_range(stage.optimizer, comms.shards.rank))
        self._sharing = SharedGradRanges.of(spec, self._own, comms.tensor.rank, comms.tensor.world_size)
        self._counted_range = self._own
        if self._is_replicated:
            numel = spec.padded_numel // comms.data.world_size
            self._counted_range = slice(comms.data.rank * numel, (comms.data.rank + 1) * numel)
        self._counted = SharedGradRanges.of(spec, self._counted_range, comms.tensor.rank, comms.tensor.world_size)
        self._away: StateStorage | None = None
        if spec.tiers.grads != "device":
            self._away = self._tiers.place(
                spec.tiers.grads, f"{spec.name}.grad", spec.shard_numel, self._dtype, Category.GRADIENTS
            )
        self.taking: Task | None = None  # moves the last gradient to where gradients are stored
        self._square: Tensor | None = None
        self._is_squared_at_once = False  # on the device, not by the worker thread
        self._may_be_narrow = self._is_stored_whole and self._wire_dtype != self._dtype and comms.data.world_size > 1
        self._narrow: Tensor | None = None  # gradients as they are sent, where they are stored whole and wider
        self._bucket: Tensor | None = None
        self._accumulator: Tensor | None = None
        self._stashed: Tensor | None = None
        self._steps: Iterator[None] | None = None  # of the reduction under way
        self._holds_sum = False
        self._is_partial = False
        self._is_written = [False] * len(spec.params)
        self._has_arrived = [False] * len(spec.params)
        self._num_missing = len(spec.params)
        self._was_used = [False] * len(spec.params)

    def _summing(self, over: SumRanks, summed: GradSum) -> Comm | EncodedSum:
        """Return what runs a sum."""
        comms: dict[SumRanks, Comm] = {
            "data": self._comms.data,
            "shards": self._comms.reductions,
            "replicas": self._comms.replicas,
        }
        if summed.codec is None:
            return comms[over]
        kept = [self._residual(numel) if numel else None for numel in summed.residual_numels]
        return EncodedSum(comms[over], summed.codec, self._pool, summed.node_size, kept, self._errors)

    def _residual(self, numel: int) -> Tensor:
        residual = torch.zeros(numel, dtype=self._wire_dtype, device=self._device)
        self._tracker.track(residual, Category.GRADIENTS)
        self._residuals.append(residual)
        return residual

    def count(self, names: Collection[str]) -> None:
        """Count the gradients of these parameters alone in the norm: those that the optimizer holds."""
        left_out = [(place.offset, place.offset + place.numel) for place in self.spec.params if place.name not in names]
        tensor, held = self._comms.tensor, self._counted_range
        self._counted = SharedGradRanges.of(self.spec, held, tensor.rank, tensor.world_size, left_out)

    @property
    def residuals(self) -> tuple[Tensor, ...]:
        """Return what encodings have rounded off, which the next ones add (`precision.reduce_feedback`)."""
        return tuple(self._residuals)

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
        narrow, self._narrow = self._narrow, None
        if self._is_replicated:
            total = self._persistent_bucket()
            self._steps = self._settle_replicated(
                self._over["data"].all_reduce(total, self._wire_dtype, name, wire=narrow)
            )
            return
        borrowed = []
        if not self._is_stored_whole:
            self._bucket = None
        if bucket is narrow or not self._is_stored_whole:
            borrowed.append(bucket)
        wire, summing = bucket, self._sums["shards"]
        if bucket.dtype != self._wire_dtype and summing.num_ranks > 1 and summing.codec is None:
            wire = self._pool.acquire(bucket.numel(), self._wire_dtype)
            wire.copy_(bucket)
            borrowed.append(wire)
        if self._away is not None:
            into, accumulate = self._pool.acquire(self.spec.shard_numel, self._dtype), False
        else:
            has_replicas = self._comms.replicas.world_size > 1
            if has_replicas and self._holds_sum and not self._is_partial:
                self._stash_sum(self._open_accumulator())
            into, accumulate = self._open_accumulator(), self._holds_sum and not self._is_stored_whole
        summed = self._over["shards"].reduce_scatter(wire, into, accumulate=accumulate, name=name)
        self._steps = (self._settle if self._away is None else self._settle_away)(summed, into, borrowed, is_last)

    def _settle_replicated(self, summed: AsyncWork) -> Iterator[None]:
        summed.advance()
        yield
        summed.wait()
        self._note_sum(is_partial=False)

    def _settle(self, summed: AsyncWork, total: Tensor, borrowed: list[Tensor], is_last: bool) -> Iterator[None]:
        """Finish the sum over the shard group; with the last one before the step, sum over the replicas."""
        has_replicas = self._comms.replicas.world_size > 1
        summed.wait()
        self._note_sum(is_partial=has_replicas)
        for buffer in borrowed:
            self._pool.release(buffer)
        if has_replicas and is_last:
            yield from self._sum_replicas()

    def _settle_away(self, summed: AsyncWork, total: Tensor, borrowed: list[Tensor], is_last: bool) -> Iterator[None]:
        """Finish the sum over the shard group, sum over the replicas, and move the sum off the device."""
        summed.wait()
        for buffer in borrowed:
            self._pool.release(buffer)
        over_all = self._over["replicas"].all_reduce(total, self._wire_dtype, f"reduce {self.spec.name} over replicas")
        yield
        over_all.advance()
        yield
        over_all.wait()
        self._evict(total, is_last)

    def _sum_replicas(self) -> Iterator[None]:
        name = f"reduce {self.spec.name} over replicas"
        summed = self._over["replicas"].all_reduce(self._open_accumulator(), self._wire_dtype, name)
        yield
        summed.advance()
        yield
        summed.wait()
        self._note_sum(is_partial=False)

    def _evict(self, landing: Tensor, is_last: bool) -> None:
        """Move a finished sum to where gradients are stored."""
        adds = self._holds_sum
        if not adds:
            self.await_taken()  # of gradients that were given up: the worker thread may still be adding to them
        self._holds_sum, self._square = True, None
        if self._away is None:
            return

        def note(gradient: Tensor) -> None:
            self._square = self.square_of(gradient.to(self._master_dtype))

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
                self._square = self.square_of(gradient.to(self._master_dtype))
        return self._square

    def square_of(self, gradient: Tensor) -> Tensor:
        """Return the sum of the squares of this rank's gradients, fp64 and 0-d.

        Where all data ranks hold the same gradients, each counts a slice of them. What tensor-parallel ranks share
        counts on its owner alone.
        """
        return square_sum(self._counted, gradient[self._counted_range] if self._is_replicated else gradient)

    def reduce_replicas(self) -> None:
        """Start to sum over the replicas what no last reduction has summed."""
        self.finish_reduce()
        self._steps = self._sum_replicas()
        self.advance_reduce()

    def advance_reduce(self) -> None:
        """Finish the collective of the reduction that is under way, and start the one that follows it, if any."""
        if self._steps is not None:
            next(self._steps, None)

    def finish_reduce(self) -> None:
        """Wait for the reduction under way, if there is one, and free its buffers."""
        steps, self._steps = self._steps, None
        for _ in steps or ():
            pass

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
        held = (self._bucket, self._narrow, self._accumulator, self._stashed)
        return [each for each in held if each is not None]

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
        if self._narrow is not None:
            self._pool.release(self._narrow)
            self._narrow = None
        if not self._is_stored_whole and self._bucket is not None:
            self._pool.release(self._bucket)
            self._bucket = None

    def close(self) -> None:
        """Free what is stored off the device."""
        if self._away is not None:
            self._away.close()

    def _note_sum(self, is_partial: bool) -> None:
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
        if self._narrow is not None:
            return self._narrow
        bucket = self._persistent_bucket()
        if not any(self._is_written):
            self.finish_reduce()
            if will_reduce and self._may_be_narrow and not self._holds_sum:
                # The only backward of the step: nothing is added to its gradients before they are sent.
                self._narrow = self._pool.acquire(self.spec.padded_numel, self._wire_dtype)
                return self._narrow
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
