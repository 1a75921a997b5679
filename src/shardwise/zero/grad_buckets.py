"""Gradients of one group go through a bucket that a backward fills, a sum over ranks, and the accumulator of this rank.

Where gradients are stored whole (stages 0 and 1), the bucket lives as long as the group and the accumulator is a view
of it. Where they are stored as shards, each backward takes a bucket from the pool, and reducing adds it to the
accumulator.

Under hybrid sharding the reduction is hierarchical: a reduce-scatter over the shard group in every backward that
reduces, and once a step an all-reduce of the accumulator over the replicas, which carries 1/n of the bytes.

Gradients that are stored off the device leave it as each reduction ends; their sum over the replicas comes before that,
so it runs in every backward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Final

import torch
from torch import Tensor

from shardwise.comm.collectives import AsyncWork, Comm
from shardwise.comm.encoded import EncodedSum
from shardwise.config.errors import ConfigError
from shardwise.layout.grad_sums import GradSum, SumRanks
from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import GroupSpec
from shardwise.layout.zero_stages import Placement
from shardwise.offload.storage import StateStorage, loaded
from shardwise.offload.worker import Task
from shardwise.runtime.device import number_dtype
from shardwise.runtime.memory_tracker import Category
from shardwise.runtime.precision import add_widened, torch_dtype
from shardwise.runtime.state_shards import FlatState
from shardwise.runtime.torch_private import add_all, copy_all, norms_of, zero_all
from shardwise.zero.resources import ShardingResources
from shardwise.zero.shared_grads import SharedGradRanges


class NormShare:
    """Says which of a group's gradients this rank counts in the norm, so that each element counts once.

    Args:
        held: the range of the flat buffer whose gradients the rank holds, in elements.
        counted: the range within it that the rank counts: a slice of its own where all data ranks hold the same.

    Attributes:
        sharing: what the held range has in common with the tensor-parallel group.
    """

    def __init__(self, spec: GroupSpec, held: slice, counted: slice, tensor: Comm) -> None:
        self.sharing = SharedGradRanges.of(spec, held, tensor.rank, tensor.world_size)
        self._spec = spec
        self._share = partial(SharedGradRanges.of, spec, counted, tensor.rank, tensor.world_size)
        self._owned = self._share().owned
        self._range = slice(counted.start - held.start, counted.stop - held.start)

    def count(self, names: Collection[str]) -> None:
        """Count the gradients of these parameters alone: those that the optimizer holds."""
        left_out = [
            (param.offset, param.offset + param.numel) for param in self._spec.params if param.name not in names
        ]
        self._owned = self._share(left_out).owned

    def counted_of(self, gradient: Tensor) -> list[Tensor]:
        """Return the parts of this rank's gradients that it counts.

        What tensor-parallel ranks share counts on its owner alone.
        """
        gradient = gradient[self._range]
        return [gradient] if self._owned is None else [gradient[low:high] for low, high in self._owned]

    def square_of(self, gradient: Tensor) -> Tensor:
        """Return the sum of the squares of what this rank counts, 0-d, in the device's dtype of numbers."""
        parts, dtype = self.counted_of(gradient), number_dtype(gradient.device)
        return norms_of(parts).to(dtype).square().sum() if parts else gradient.new_zeros((), dtype=dtype)


class GradState(Enum):
    """Says over which ranks this rank's gradients are summed; what fills the bucket meanwhile is no part of it."""

    EMPTY = "no sum since the last step, or the one there was is kept apart"
    REDUCING = "a sum over ranks is under way"
    PARTIAL = "summed over the shard group, and yet to be summed over the replicas"
    SUMMED = "summed over all ranks that average"


LEGAL: Final[Mapping[GradState, frozenset[GradState]]] = {
    GradState.EMPTY: frozenset({GradState.EMPTY, GradState.REDUCING}),
    # A sum that has failed is given up.
    GradState.REDUCING: frozenset({GradState.PARTIAL, GradState.SUMMED, GradState.EMPTY}),
    GradState.PARTIAL: frozenset({GradState.REDUCING, GradState.EMPTY}),
    GradState.SUMMED: frozenset({GradState.REDUCING, GradState.EMPTY}),
}


class GradArrivals:
    """Notes which parameters of a group have got their gradients.

    Attributes:
        used: for each parameter, whether it got a gradient on this rank since the last step.
        are_there: a gradient was written into the bucket since its last reduction.
        places: of the parameters' gradients in the bucket; none until it is opened.
        num_missing: how many have got none in the current backward.
    """

    def __init__(self, spec: GroupSpec) -> None:
        self._params, self._gaps = spec.params, spec.gaps
        self.used = [False] * len(spec.params)
        self._expect_empty()
        self.end_backward()

    def _expect_empty(self) -> None:
        self._written = [False] * len(self._params)  # into the bucket, since its last reduction
        self.are_there = False
        self.places: list[Tensor] = []

    def end_backward(self) -> None:
        """Expect a gradient of every parameter again."""
        self._arrived = [False] * len(self._params)
        self.num_missing = len(self._params)

    def note(self, index: int) -> bool:
        """Note a parameter's gradient; say whether the bucket has one of it, to which this one is added."""
        if self._arrived[index]:
            raise ConfigError(
                "gradient-twice",
                f"the gradient of {self._params[index].name} came twice in one backward, as reentrant checkpointing "
                "does; pass use_reentrant=False to torch.utils.checkpoint",
            )
        was_written = self._written[index]
        self.num_missing -= 1
        self._written[index] = self._arrived[index] = self.used[index] = self.are_there = True
        return was_written

    def mark_used(self, index: int) -> None:
        """Count a parameter as one that got a gradient."""
        self.used[index] = True

    def open(self, bucket: Tensor) -> list[Tensor]:
        """Return the places of the parameters' gradients in a bucket, which stays the same until it is empty again."""
        self.places = [bucket[at.offset : at.offset + at.numel].view(at.shape) for at in self._params]
        return self.places

    def close_bucket(self, bucket: Tensor) -> None:
        """Put zeros where no gradient was written, and expect an empty bucket again."""
        written = zip(self._params, self._written, strict=True)
        unused = [(at.offset, at.offset + at.numel) for at, was_written in written if not was_written]
        if gaps := [bucket[start:stop] for start, stop in (*self._gaps, *unused)]:
            zero_all(gaps)
        self._expect_empty()

    def clear(self) -> None:
        """Forget the gradients since the last step, but not that this backward has given them."""
        self._expect_empty()
        self.used = [False] * len(self._params)


class GradSums:
    """Sums a group's gradients over ranks: the one place that knows what they are sent in.

    Attributes:
        has_replicas: a sum over the replicas follows that over the shard group.
        over: the transport of each sum, by the ranks that sum: it sends what it gets, or codes.
        residuals: what encodings have rounded off, which the next ones add (`precision.reduce_feedback`).
    """

    def __init__(self, spec: GroupSpec, layout: Layout, resources: ShardingResources) -> None:
        self.dtype = torch_dtype(layout.precision_of(spec).reduce)
        self.residuals: list[Tensor] = []
        self.name = f"reduce {spec.name}"
        self.has_replicas = resources.comms.replicas.world_size > 1
        self._resources = resources
        sums = layout.sums_of(spec)
        self.over = {over: self._transport(over, total) for over, total in sums.items()}
        is_cast = any(total.num_ranks > 1 and total.codec is None for total in sums.values() if not total.is_for_all)
        self._scattered_dtype = self.dtype if is_cast else None  # None for as it is

    def _transport(self, over: SumRanks, total: GradSum) -> Comm | EncodedSum:
        comms = self._resources.comms
        comm = {"data": comms.data, "shards": comms.reductions, "replicas": comms.replicas}[over]
        if total.codec is None:
            return comm
        residuals = [self._residual(numel) if numel else None for numel in total.residual_numels]
        return EncodedSum(comm, total.codec, self._resources.pool, total.node_size, residuals)

    def _residual(self, numel: int) -> Tensor:
        residual = torch.zeros(numel, dtype=self.dtype, device=self._resources.comms.data.device)
        self._resources.tracker.track(residual, Category.GRADIENTS)
        self.residuals.append(residual)
        return residual

    def wire_of(self, bucket: Tensor) -> Tensor:
        """Return a bucket as the shard group sends it: itself, or a buffer of the pool."""
        if self._scattered_dtype in (None, bucket.dtype):
            return bucket
        wire = self._resources.pool.acquire(bucket.numel(), self.dtype)
        wire.copy_(bucket)
        return wire


class GradBucket:
    """Holds the buffers of a group's gradients, which are stored as shards (stages 2 and 3).

    Attributes:
        arrivals: which parameters have got their gradients.
        norm: which of the gradients this rank counts in it.
        state: over which ranks the accumulator is summed; `LEGAL` has the transitions.
        taking: moves the last gradient to where gradients are stored.
    """

    is_away = False  # stored off the device

    def __init__(self, spec: GroupSpec, layout: Layout, resources: ShardingResources) -> None:
        stage, policy, comms = layout.stage_of(spec), layout.precision_of(spec), resources.comms
        self.spec = spec
        self.arrivals = GradArrivals(spec)
        self.sums = GradSums(spec, layout, resources)
        self.state = GradState.EMPTY
        self.taking: Task | None = None
        self._resources = resources
        self._pool = resources.pool
        self._dtype = torch_dtype(policy.accumulate)
        self._master_dtype = torch_dtype(policy.master)
        start, stop = spec.held_range(stage.optimizer, comms.shards.rank)
        counted = slice(start, stop)
        if stage.optimizer is Placement.REPLICATE:  # each data rank counts a slice of what all of them hold
            numel = spec.padded_numel // comms.data.world_size
            counted = slice(comms.data.rank * numel, (comms.data.rank + 1) * numel)
        self.norm = NormShare(spec, slice(start, stop), counted, comms.tensor)
        is_whole = stage.grads is Placement.PARTIAL
        self._stored_numel = spec.padded_numel if is_whole else spec.shard_numel
        self._slice = slice(start, stop) if is_whole else slice(0, spec.shard_numel)  # of what is stored
        self._memory: Tensor | None = None  # of what is stored on the device
        self._sum: Tensor | None = None  # this rank's slice of it
        self._cut: Sequence[Tensor] | None = None  # views of that, for the pieces of the optimizer
        self._leased: Tensor | None = None  # the bucket, where it is the pool's
        # By index, gradients that are not in the bucket yet, and whether they are added there; None where none waits.
        self._waiting: dict[int, tuple[Tensor, bool]] | None = None if comms.data.waits_on_host else {}
        self._stashed: Tensor | None = None
        self._square: Tensor | None = None
        self._work: AsyncWork | None = None  # the reduction under way

    def _enter(self, state: GradState) -> None:
        if state not in LEGAL[self.state]:
            before, after = self.state.name, state.name
            raise RuntimeError(f"the gradients of {self.spec.name} cannot go from {before} to {after}")
        self.state = state

    def add(self, index: int, gradient: Tensor, will_reduce: bool) -> bool:
        """Add one parameter's gradient to the bucket; say whether this backward has given all of the group's.

        Args:
            gradient: of the parameter's shape, any floating dtype.
            will_reduce: the bucket is reduced at the end of this backward, so it may be in the wire's dtype.
        """
        if gradient.is_sparse:
            raise ConfigError(
                "sparse-gradient",
                f"the gradient of {self.spec.params[index].name} is sparse but shards are dense; set sparse=False",
            )
        if self._waiting is None:
            # The bucket is opened before the note: that asks whether something is in it.
            places = self.arrivals.places or self.arrivals.open(self._open_bucket(will_reduce))
            plain = gradient.detach() if gradient.requires_grad else gradient
            (add_widened if self.arrivals.note(index) else Tensor.copy_)(places[index], plain)
            return self.arrivals.num_missing == 0
        if index in self._waiting:  # of the backward before
            self._write_waiting(will_reduce)
        self._expect_gradient(will_reduce)
        self._waiting[index] = gradient, self.arrivals.note(index)
        if self.arrivals.num_missing == 0:
            self._write_waiting(will_reduce)
        return self.arrivals.num_missing == 0

    # [Note: Gradients wait for their group]
    # On a GPU each kernel costs the host some microseconds, and a copy for each gradient would be the most of what is
    # launched beside the model's own kernels. So there the gradients of a group are held until the last one has come,
    # and go into the bucket by one kernel; the bucket is leased then, and not at the first of them. At the end of a
    # unit's backward, when its activations are gone, there are so both. A CPU copies each while the cache has it.
    def _write_waiting(self, will_reduce: bool) -> None:
        """Put the gradients that wait into the bucket."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        places = self.arrivals.places or self.arrivals.open(self._open_bucket(will_reduce))
        for is_there, write in ((False, copy_all), (True, add_all)):
            found = [(index, gradient) for index, (gradient, was_there) in waiting.items() if was_there is is_there]
            if found:
                write([places[index] for index, _ in found], [gradient for _, gradient in found])

    def _expect_gradient(self, will_reduce: bool) -> None:
        """Prepare for a gradient that is not in the bucket yet."""

    def _open_bucket(self, will_reduce: bool) -> Tensor:
        if self._leased is None:
            dtype = self.sums.dtype if will_reduce else self._dtype
            self._leased = self._pool.acquire(self.spec.padded_numel, dtype)
        return self._leased

    def _stored(self) -> Tensor:
        """Return the memory that outlives a backward, 1-D; it is made when it is first needed."""
        if self._memory is None:
            self._memory = torch.empty(self._stored_numel, dtype=self._dtype, device=self._pool.device)
            self._resources.tracker.track(self._memory, Category.GRADIENTS)
        return self._memory

    def _accumulator(self) -> Tensor:
        if self._sum is None:
            self._sum = self._stored()[self._slice]
        return self._sum

    # [Note: A reduction under way]
    # A reduction is one `AsyncWork` of one collective or more: each is started once the one before it has ended.
    # `RunningReductions` advances it when the next group's reduction has been started, so that the second collective of
    # this group comes after the first of the next one, on every rank. What a collective reads or writes goes back to
    # the pool only after `wait` has made the current stream wait for it: `release` marks the end of use in the order
    # of the compute stream, so the next use of the buffer, on any stream, comes after the collective.
    def reduce(self, is_last: bool) -> None:
        """Start to sum the bucket over the ranks; an unused parameter counts as zero.

        Args:
            is_last: whether this is the last one before the step, so that the sum over the replicas follows.
        """
        bucket, leased = self._close_bucket()
        # The wire comes first: making a buffer frees idle ones of the pool, and the accumulator, which outlives the
        # step, then does not come on top of them.
        wire, has_replicas = self.sums.wire_of(bucket), self.sums.has_replicas
        if has_replicas and self.state is GradState.SUMMED:
            self._stash()  # what the replicas have summed must not be summed again
        summed = self.sums.over["shards"].reduce_scatter(
            wire, self._accumulator(), accumulate=self.holds_sum, name=self.sums.name
        )

        def land() -> None:
            summed.wait()
            self._land(GradState.PARTIAL if has_replicas else GradState.SUMMED)
            self._release(leased, None if wire is bucket else wire)

        self._run(AsyncWork(land, self._sum_replicas if has_replicas and is_last else None))

    def _close_bucket(self) -> tuple[Tensor, Tensor | None]:
        """Return the bucket, full, and what of it goes back to the pool."""
        self.finish_reduce()
        self._write_waiting(will_reduce=True)
        bucket = self._open_bucket(will_reduce=True)
        self.arrivals.close_bucket(bucket)
        leased, self._leased = self._leased, None
        return bucket, leased

    def _run(self, work: AsyncWork) -> None:
        self._work = work
        self._enter(GradState.REDUCING)

    def _release(self, *buffers: Tensor | None) -> None:
        for buffer in buffers:
            if buffer is not None:
                self._pool.release(buffer)

    def _sum_replicas(self) -> AsyncWork:
        self._enter(GradState.REDUCING)
        return self._over_replicas(self._accumulator()).followed_by(partial(self._land, GradState.SUMMED))

    def _over_replicas(self, total: Tensor) -> AsyncWork:
        return self.sums.over["replicas"].all_reduce(total, self.sums.dtype, f"{self.sums.name} over replicas")

    def _land(self, state: GradState) -> None:
        self._enter(state)
        if self._stashed is not None and state is GradState.SUMMED:
            self._accumulator().add_(self._stashed)
            self._stashed = None

    def _stash(self) -> None:
        """Keep the finished sum of earlier backwards apart: it is added once the new one is finished too."""
        total = self._accumulator()
        self._stashed = total.clone() if self._stashed is None else self._stashed.add_(total)
        self._resources.tracker.track(self._stashed, Category.GRADIENTS)
        self._enter(GradState.EMPTY)

    def reduce_replicas(self) -> None:
        """Start to sum over the replicas what no last reduction has summed."""
        self.finish_reduce()
        self._work = self._sum_replicas()

    def advance_reduce(self) -> None:
        """Finish the collective of the reduction that is under way, and start the one that follows it, if any."""
        if self._work is not None:
            self._work.advance()

    def finish_reduce(self) -> None:
        """Wait for the reduction under way, if there is one, and free its buffers."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    @property
    def storage(self) -> StateStorage:
        """Return the storage of this rank's summed gradients, 1-D."""
        return self._resources.tiers.on_device(self._accumulator())

    @property
    def holds_sum(self) -> bool:
        """Say whether a reduction has reached the gradients since the last step."""
        return self.state in (GradState.PARTIAL, GradState.SUMMED)

    @property
    def has_gradients(self) -> bool:
        """Say whether the buffers hold gradients."""
        return self.holds_sum or self._stashed is not None or self.arrivals.are_there

    def await_taken(self) -> None:
        """Return once the gradients are where they are stored."""
        taking, self.taking = self.taking, None
        if taking is not None:
            taking.wait()

    def forget_square(self) -> None:
        """Forget the sum of squares, because the stored gradients are about to change."""
        self._square = None

    def square(self) -> Tensor:
        """Return the sum of the squares of what the step will use, fp64 and 0-d."""
        if self._square is None:
            with loaded(self.storage) as gradient:
                self._square = self.norm.square_of(gradient.to(self._master_dtype))
        return self._square

    def gradient(self) -> Tensor | None:
        """Return this rank's summed gradients, 1-D, in the master's dtype; None if no backward has reached the group.

        Gradients that are stored off the device are copied to it.
        """
        return self._on_device().to(self._master_dtype) if self.holds_sum else None

    def cut(self, gradient: Tensor, places: Sequence[tuple[slice, torch.Size]]) -> Sequence[Tensor]:
        """Return views of what `gradient` has returned; those of memory that outlives the step are made once.

        Args:
            places: where the views are and their shapes; the same ones in each call.
        """
        if self._cut is not None and gradient is self._sum:
            return self._cut
        views = [gradient[where].view(shape) for where, shape in places]
        self._cut = views if gradient is self._sum else None
        return views

    def _on_device(self) -> Tensor:
        return self._accumulator()

    def accumulated(self) -> FlatState | None:
        """Return the stored sum itself, in its own dtype; None as for `gradient`. What is written to it counts."""
        self.await_taken()
        self._square = None
        return self.storage if self.holds_sum else None

    def buffers(self) -> list[Tensor]:
        """Return the buffers that are allocated."""
        self._write_waiting(will_reduce=False)
        return [buffer for buffer in (self._memory, self._leased, self._stashed) if buffer is not None]

    def drop(self) -> int:
        """Free the buffers, which hold no gradients; the next backward makes new ones. Returns the freed bytes."""
        memory, self._memory, self._sum, self._cut = self._memory, None, None, None
        return 0 if memory is None else memory.untyped_storage().nbytes()

    def clear(self) -> None:
        """Forget the gradients, after the step; buffers that outlive a backward stay allocated."""
        self.finish_reduce()
        self.await_taken()  # what is still to be added must not be added to what comes next
        self._enter(GradState.EMPTY)
        self._stashed = self._square = None
        if self._waiting:
            self._waiting = {}
        self.arrivals.clear()
        leased, self._leased = self._leased, None
        self._release(leased)

    def close(self) -> None:
        """Free what is stored."""
        self._memory = self._sum = self._cut = None


class WholeBucket(GradBucket):
    """Gradients that are stored whole (stage 1): the accumulator is this rank's slice of the bucket."""

    def __init__(self, spec: GroupSpec, layout: Layout, resources: ShardingResources) -> None:
        super().__init__(spec, layout, resources)
        self._may_be_narrow = self.sums.dtype != self._dtype and resources.comms.data.world_size > 1

    def _expect_gradient(self, will_reduce: bool) -> None:
        self._open_bucket(will_reduce)  # before the note: it asks whether something is in the bucket

    def _open_bucket(self, will_reduce: bool) -> Tensor:
        if self._leased is not None:
            return self._leased
        bucket = self._stored()
        if self.arrivals.are_there:
            return bucket
        # The last reduction may have sent this memory from where it is, so it must have ended before the next gradient
        # is written there.
        self.finish_reduce()
        if will_reduce and self._may_be_narrow and not self.holds_sum:
            # The only backward of the step: nothing is added to its gradients before they are sent.
            return super()._open_bucket(will_reduce)
        if self.holds_sum:
            # A backward after a reduction: its own slice of the bucket is the accumulator, so that moves out.
            self._stash()
        return bucket


class ReplicatedBucket(WholeBucket):
    """Gradients that every rank needs whole (stage 0): they are summed in place, over all ranks at once."""

    def reduce(self, is_last: bool) -> None:
        _, wire = self._close_bucket()  # the sum releases it
        summed = self.sums.over["data"].all_reduce(self._stored(), self.sums.dtype, self.sums.name, wire=wire)
        self._run(summed.followed_by(partial(self._land, GradState.SUMMED)))


class AwayBucket(GradBucket):
    """Gradients that are stored as shards off the device: each sum leaves it as its reduction ends."""

    is_away = True

    def __init__(self, spec: GroupSpec, layout: Layout, resources: ShardingResources) -> None:
        super().__init__(spec, layout, resources)
        tier, name = spec.tiers.grads, f"{spec.name}.grad"
        self._storage = resources.tiers.place(tier, name, spec.shard_numel, self._dtype, Category.GRADIENTS)
        self._is_squared_at_once = False  # on the device, not by the worker thread

    def reduce(self, is_last: bool) -> None:
        bucket, leased = self._close_bucket()
        wire, total = self.sums.wire_of(bucket), self._pool.acquire(self.spec.shard_numel, self._dtype)
        summed = self.sums.over["shards"].reduce_scatter(wire, total, accumulate=False, name=self.sums.name)

        def release() -> None:
            summed.wait()
            self._release(leased, None if wire is bucket else wire)

        # The replicas sum before it is moved out, in every backward: what is stored away, and added to there, would
        # have to come back to be summed.
        evict = partial(self._evict, total, is_last, self.holds_sum)
        self._run(AsyncWork(release, lambda: self._over_replicas(total).followed_by(evict)))

    def _evict(self, total: Tensor, is_last: bool, adds: bool) -> None:
        """Move a finished sum to where gradients are stored; `adds` where one is stored since the last step."""
        if not adds:
            self.await_taken()  # of gradients that were given up: the worker thread may still be adding to them
        self._enter(GradState.SUMMED)
        self._square = None

        def note(gradient: Tensor) -> None:
            self._square = self.norm.square_of(gradient.to(self._master_dtype))

        # [Note: Squares of gradients that leave]
        # Clipping needs the norm of all gradients before the first group is stepped, see [Note: The norm comes before
        # the step]. So a sum is squared on its way: on the device as it leaves, or by the worker thread once that has
        # added it to what is stored. Otherwise all gradients would be read twice. Only the last sum before the step
        # counts.
        # What ranks share is summed before it counts in the norm.
        is_counted = is_last and not self.norm.sharing.summed
        self._is_squared_at_once = is_counted and not adds
        if self._is_squared_at_once:
            note(total)
        self.taking = self._storage.take(total, self._pool, note if is_counted else None, adds)

    @property
    def storage(self) -> StateStorage:
        return self._storage

    def square(self) -> Tensor:
        if self._square is None or not self._is_squared_at_once:
            self.await_taken()
        return super().square()

    def forget_square(self) -> None:
        self._square, self._is_squared_at_once = None, False

    def _on_device(self) -> Tensor:
        self.await_taken()
        gradient = torch.empty(self.spec.shard_numel, dtype=self._dtype, device=self._pool.device)
        self._storage.fetch(gradient).wait()
        return gradient

    def close(self) -> None:
        self._storage.close()


def make_bucket(spec: GroupSpec, layout: Layout, resources: ShardingResources) -> GradBucket:
    """Return the bucket of a trained group, by where its gradients are stored."""
    stage = layout.stage_of(spec)
    kind = AwayBucket if spec.tiers.grads != "device" else GradBucket
    if stage.grads is Placement.PARTIAL:
        kind = ReplicatedBucket if stage.optimizer is Placement.REPLICATE else WholeBucket
    return kind(spec, layout, resources)
