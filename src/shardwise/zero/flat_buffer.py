"""The parameters of a group in one flat buffer: whole while they are used, this rank's shard in between.

The parameters are views of the buffer, so an all-gather lands in them and nothing is copied out. What is sent is the
transport's: the shard as it is (`Gather`) or codes of it (`EncodedGather`), from all ranks or from the few that share a
`SecondaryShard`.

With `precision.gather`, ranks send codes, and each decodes all slices, its own too: so every rank computes with the
same bits, in every stage. The shard, or the master, keeps the exact values.

With `zero.secondary_shard = k`, a rank keeps a k-th of what it has gathered. Until the parameters change, they are
gathered again among the k ranks that have all of them: inside a node, where the first gather crosses nodes. Here 4
ranks have a shard each, and k = 2:

    first gather    ranks 0 1 2 3   each sends its shard
                    ranks 0 and 2 keep the first half, ranks 1 and 3 the second
    later gathers   ranks 0 1       each sends its half, and so do ranks 2 3 among each other
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import starmap
from typing import Final

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import AsyncWork, Comm
from shardwise.comm.encoded import codec_on
from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import GroupSpec
from shardwise.layout.precision import BLOCK_NUMEL
from shardwise.layout.wire_codec import WireCodec
from shardwise.layout.zero_stages import Placement
from shardwise.offload.step_pipeline import CHUNK_NUMEL
from shardwise.offload.storage import StateStorage
from shardwise.runtime.device import Event
from shardwise.runtime.memory_tracker import Category
from shardwise.runtime.param_guard import (
    ParameterClasses,
    Placeholder,
    ReleasedParameterError,
    without_parts,
)
from shardwise.runtime.precision import torch_dtype
from shardwise.runtime.torch_private import (
    has_views,
    is_fake,
    parameter_class,
    plain_torch_functions,
    set_data,
    set_parameter_class,
    set_parameter_classes,
    set_unsharded_storage,
)
from shardwise.schedule.actions import ActionKind
from shardwise.zero.resources import ShardingResources

AllGather = Callable[[Tensor, str], AsyncWork]
MOST_DECODING: Final = 2
"""Groups whose codes are under way at once, after a step or where all are gathered: more would take memory alone."""


class ParamState(Enum):
    """Says which part of `full` is valid."""

    SHARDED = "only this rank's slice is valid; where parameters are stored as shards, the storage is freed"
    STEPPING = "as SHARDED, and the host is stepping the slice"
    UNSHARDING = "the all-gather is under way"
    UNSHARDED = "all of it is valid"
    OFFLOADED = "nothing is: what this rank stores has been moved out"


LEGAL: Final[Mapping[ParamState, frozenset[ParamState]]] = {
    ParamState.SHARDED: frozenset(
        {ParamState.SHARDED, ParamState.STEPPING, ParamState.UNSHARDING, ParamState.OFFLOADED}
    ),
    ParamState.STEPPING: frozenset({ParamState.STEPPING, ParamState.SHARDED}),
    # A step may follow a gather that no forward has waited for.
    ParamState.UNSHARDING: frozenset({ParamState.UNSHARDED, ParamState.SHARDED}),
    ParamState.UNSHARDED: frozenset({ParamState.SHARDED, ParamState.OFFLOADED}),
    ParamState.OFFLOADED: frozenset({ParamState.SHARDED, ParamState.UNSHARDED}),
}


class SecondaryShard:
    """Keeps this rank's part of what was gathered, as it was sent, until the parameters change."""

    def __init__(self, values: Tensor, near: Comm) -> None:
        self.values = values
        self.near = near
        self.is_current = False

    def keep(self, wire: Tensor) -> None:
        """Take this rank's part of what was gathered from all ranks."""
        if not self.is_current:
            self.values.copy_(self.near.own_slice(wire))
            self.is_current = True


class Gather:
    """Gathers the shards of a flat buffer as they are; what is sent is the buffer itself.

    Attributes:
        secondary: what is kept of a gather, for the next ones; None for nothing.
    """

    is_encoded = False

    def __init__(self, spec: GroupSpec, layout: Layout, resources: ShardingResources) -> None:
        self.secondary: SecondaryShard | None = None
        self._shards = resources.comms.shards
        self._is_stored_away = spec.tiers.params != "device"
        num_bytes, near = layout.secondary_bytes(spec), resources.comms.secondary
        if num_bytes and near is not None:
            dtype = torch.uint8 if self.is_encoded else torch_dtype(layout.precision_of(spec).param)
            values = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=resources.pool.device)
            resources.tracker.track(values, Category.PARAMETERS)
            self.secondary = SecondaryShard(values, near)

    @property
    def has_copies(self) -> bool:
        """Say whether what is written into `full` or the shard alone does not count: it exists in another form too."""
        return self.is_encoded or self.secondary is not None

    def forget(self) -> None:
        """Note that the parameters have changed: the next gather is from all ranks."""
        if self.secondary is not None:
            self.secondary.is_current = False

    def send(self, buffer: FlatBuffer) -> tuple[Tensor, AllGather, Event | None]:
        """Start to write this rank's slice; return what is gathered, by what, and when the slice is written.

        That is None where it is written in the order of the current stream.
        """
        wire, secondary = self._open(buffer), self.secondary
        if secondary is None or not secondary.is_current:
            return wire, self._shards.all_gather, self._write(buffer, self._shards.own_slice(wire))
        secondary.near.own_slice(wire).copy_(secondary.values)
        return wire, secondary.near.all_gather, None

    def receive(self, buffer: FlatBuffer, wire: Tensor, written: Event | None, gathered: AsyncWork) -> AsyncWork:
        """Return the work that ends with a valid flat buffer."""

        def finish() -> None:
            if written is not None:
                written.wait()
            gathered.wait()
            if self.secondary is not None:
                self.secondary.keep(wire)
            self._land(buffer, wire)

        return AsyncWork(finish)

    def _open(self, buffer: FlatBuffer) -> Tensor:
        """Return what is gathered, a slice for each rank."""
        buffer.allocate()
        return buffer.full

    def _write(self, buffer: FlatBuffer, sent: Tensor) -> Event | None:
        """Start to write this rank's slice of what is gathered; a shard that is a part of the buffer is there."""
        if not buffer.is_released_between_uses:
            return None
        if self._is_stored_away:
            return buffer.shard.fetch(sent)
        stored = buffer.shard.tensor
        assert stored is not None, "what is stored on the device is a tensor"
        # On the compute stream, which the gather begins after anyway: on another one, each write of a shard, by a step,
        # a load or a user, would have to wait for this copy of a few microseconds.
        sent.copy_(stored)
        return None

    def _land(self, buffer: FlatBuffer, wire: Tensor) -> None:
        """Make the flat buffer valid by what was gathered."""

    def recode(self, full: Tensor) -> None:
        """Round a flat buffer, which has exact values, as a gather would."""

    def shown(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return values, 1-D, of one parameter or of the buffer from a block's border on, as the model computes."""
        return values.to(dtype)


class EncodedGather(Gather):
    """Gathers codes, in a buffer of the pool, and decodes all of them."""

    is_encoded = True

    def __init__(self, spec: GroupSpec, layout: Layout, resources: ShardingResources, codec: WireCodec) -> None:
        super().__init__(spec, layout, resources)
        self._codec = codec_on(resources.pool.device, codec)
        self._num_bytes = layout.gather_bytes(spec) * spec.num_shards
        self._is_simulated = self._shards.is_simulated  # then codecs take memory, and need not work on all of it
        self._pool = resources.pool
        self._decoding = resources.decoding

    # [Note: Memory of codes]
    # The flat buffer gets its storage only when the codes are there, so that both are whole for as short as can be. For
    # the same reason few groups' codes are under way: the oldest gather is waited for, and its codes go to the pool.
    #
    # They are decoded on the stream that waits for them, and not on that of the gather. There a prefetched unit would
    # need its flat buffer with its codes, a unit more than a gather of plain values needs. Where the buffer is whole
    # anyway, after a step, the compute stream decodes one group while the next is gathered.
    def receive(self, buffer: FlatBuffer, wire: Tensor, written: Event | None, gathered: AsyncWork) -> AsyncWork:
        work = super().receive(buffer, wire, written, gathered)
        self._decoding.append(work)
        while len(self._decoding) > MOST_DECODING:
            self._decoding.popleft().wait()
        return work

    def recode(self, full: Tensor) -> None:
        for part in full.split(CHUNK_NUMEL):
            self._codec.decode(self._codec.encode(part), part)
            if self._is_simulated:
                return  # one is as large as another

    def _open(self, buffer: FlatBuffer) -> Tensor:
        return self._pool.acquire(self._num_bytes, torch.uint8)

    def _write(self, buffer: FlatBuffer, sent: Tensor) -> None:
        shard = buffer.shard
        is_here = shard.tier == "device"
        exact = shard.read(0, shard.numel) if is_here else self._pool.acquire(shard.numel, shard.dtype)
        if not is_here:
            shard.fetch(exact).wait()
        numel = self._num_coded(exact)
        self._codec.encode(exact[:numel], sent[: self._codec.num_bytes(numel)])
        # The codes are written on the current stream, and the stream of the gather begins after it: there is no other
        # event to wait for.
        if not is_here:
            self._pool.release(exact)

    def _land(self, buffer: FlatBuffer, wire: Tensor) -> None:
        buffer.allocate()
        full, num_shards = buffer.full, self._shards.world_size
        if self._is_simulated:
            numel = self._num_coded(full)
            self._codec.decode(wire[: self._codec.num_bytes(numel)], full[:numel])
        else:
            self._codec.decode(wire.view(num_shards, -1), full.view(num_shards, -1))
        self._pool.release(wire)

    def shown(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        rounded = values.to(dtype)
        padded = torch.nn.functional.pad(rounded, (0, -rounded.numel() % BLOCK_NUMEL))
        return self._codec.decode(self._codec.encode(padded), torch.empty_like(padded))[: rounded.numel()]

    def _num_coded(self, values: Tensor) -> int:
        """Return how many values a codec is given: where there are none in fact, as many as it takes at a time."""
        return min(values.numel(), self._codec.at_once(values.device)) if self._is_simulated else values.numel()


class Recoding(EncodedGather):
    """Rounds a flat buffer that every rank steps whole: nothing is sent."""

    def send(self, buffer: FlatBuffer) -> tuple[Tensor, AllGather, Event | None]:
        return buffer.full, lambda wire, name: AsyncWork(), None

    def _land(self, buffer: FlatBuffer, wire: Tensor) -> None:
        self.recode(wire)


def make_gather(spec: GroupSpec, layout: Layout, resources: ShardingResources, is_released: bool) -> Gather:
    """Return what gathers a group, whose parameters are stored as shards if they are released between uses."""
    codec, stage = layout.gather_codec(spec), layout.stage_of(spec)
    if codec is None:
        return Gather(spec, layout, resources)
    steps_all = stage.optimizer is Placement.REPLICATE or spec.num_shards == 1
    kind = Recoding if steps_all and not is_released else EncodedGather
    return kind(spec, layout, resources, codec)


PartType = Callable[[type[nn.Parameter]], type[nn.Parameter]]
"""Returns the class of a parameter of a class while code that reads it needs the whole of it."""


class FlatBuffer(ABC):
    """Holds one group's parameters, and offers idempotent actions on them: unshard, wait, reshard.

    Args:
        parameters: the module's parameters in the order of `spec.params`.
        classes: of parameters whose storage is freed, and of those whose writes are watched.

    Attributes:
        full: the whole group, 1-D; the parameters are views of it.
        shard: this rank's slice in the dtype of computing, in its tier.
        transport: how the shards of all ranks come into `full`.
        state: which part of `full` is valid; `LEGAL` has the transitions.
        is_pinned: the parameters stay present until they are unpinned. That is a wish of their users, and no state: a
            step makes pinned parameters stale, and they are gathered again at once.
        is_lent: graphs or views outside of the unit may share the memory of `full`. It dies with them: it is never
            freed in their presence.
    """

    shard: StateStorage

    def __init__(
        self,
        spec: GroupSpec,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        resources: ShardingResources,
        classes: ParameterClasses,
    ) -> None:
        self.spec = spec
        self.parameters = tuple(parameters)
        self.is_released_between_uses = layout.stage_of(spec).unshard_for_use and not spec.is_stored_whole
        self.state = ParamState.UNSHARDED
        self.is_pinned = self.is_lent = False
        self._resources = resources
        self._tracker = resources.tracker
        self._timeline = resources.timeline
        self._work = AsyncWork()  # the last gather
        self._unshard_start_s = 0.0
        allocate = torch.empty if self.is_released_between_uses else torch.zeros  # padding that is read is zero
        dtype, device = torch_dtype(layout.precision_of(spec).param), resources.pool.device
        self.full = allocate(spec.padded_numel, dtype=dtype, device=device)
        self._tracker.track(self.full, Category.GATHERED if self.is_released_between_uses else Category.PARAMETERS)
        self._kinds = tuple(map(parameter_class, parameters))
        self._released_kinds = tuple(map(classes.released, self._kinds))
        self._present_kinds = self._kinds
        # Experts are used by their own module alone, each rank's by itself: nothing there asks for whole ones.
        known = layout.tensor.splits if layout.tensor is not None else {}
        self._parts = [
            index
            for index, param in enumerate(spec.params)
            if param.name in known and (param.split.is_partial or not param.split.is_whole)
        ]
        self._part_type: PartType | None = None
        self.transport = make_gather(spec, layout, resources, self.is_released_between_uses)

    @abstractmethod
    def finish_update(self) -> None:
        """Finish the last update of the parameters, and start its gather where they are stored whole."""

    @abstractmethod
    def follow_writes(self) -> None:
        """Take over what has been written into the present parameters since they were gathered, if something has."""

    @property
    def is_sharded(self) -> bool:
        """Say whether only this rank's slice is valid, or will be once it is stepped."""
        return self.state in (ParamState.SHARDED, ParamState.STEPPING)

    @property
    def is_released(self) -> bool:
        """Say whether the data is neither present nor being gathered."""
        return self.is_released_between_uses and self.is_sharded

    # [Note: Why a storage is resized and not replaced]
    # A graph saves more than the parameter: a product saves the transpose of its weight, a view that shares the
    # storage. Other memory in `parameter.data` would leave the old one to such views, and nothing would be freed. A
    # storage that is resized to 0 is freed under all of them, and the next gather makes them valid again for the
    # backward. In between no view may be read: `guard` gives the parameters a class that reports every use.
    def allocate(self) -> None:
        """Give `full` its storage back, where that is freed between uses."""
        if self.is_released_between_uses:
            self._tracker.resize(self.full, self.full.nbytes)

    def shaped(self, index: int, flat: Tensor) -> Tensor:
        """Return a parameter's elements as they are in the group, 1-D, in its local shape; bytes in its dtype too."""
        parameter, param = self.parameters[index], self.spec.params[index]
        if self.spec.is_opaque:
            return flat.view(parameter.dtype).view(-1, *parameter.shape[1:])  # of experts those of this rank
        return flat.view(param.shape)

    def _views(self) -> list[Tensor]:
        """Return the parameters' places in `full`, which is not freed."""
        flats = [self.full[param.offset : param.offset + param.numel] for param in self.spec.params]
        return list(starmap(self.shaped, enumerate(flats)))

    # [Note: Gathers on a side stream]
    # On NCCL a gather runs on the side stream "gather", beside the computation. Its memory is allocated in the order of
    # the compute stream, whose kernels may still read what was freed there last. So the side stream begins after all
    # that the compute stream holds when the gather is started, and a prefetch is started before the work of the current
    # unit is enqueued: after it, it would wait for that too. `wait` makes the compute stream wait for the gather, and
    # the host goes on; on gloo the host waits.
    def unshard(self) -> None:
        """Start to make all of `full` valid; does nothing where it is valid or an all-gather is under way.

        Raises:
            ReleasedParameterError: the parameters are offloaded.
        """
        if self.state is ParamState.STEPPING:
            self.finish_update()  # see [Note: Steps that go on in the background]
        if self.state is ParamState.OFFLOADED:
            raise ReleasedParameterError(
                "states-offloaded", f"the parameters of {self.spec.name} are offloaded; call engine.reload() first"
            )
        if self.state is not ParamState.SHARDED:
            return
        self._unshard_start_s = self._timeline.now()
        wire, all_gather, written = self.transport.send(self)
        gathered = all_gather(wire, f"unshard {self.spec.name}")
        self._work = self.transport.receive(self, wire, written, gathered)
        self.enter(ParamState.UNSHARDING)
        if not self._resources.overlap:
            self.wait()

    def wait(self) -> None:
        """Make the parameters usable on the current stream; unshard them now if no prefetch has started that."""
        if self.state not in (ParamState.UNSHARDING, ParamState.UNSHARDED):
            self.unshard()
        if self.state is ParamState.UNSHARDED:
            return
        self._work.wait()
        self._set_state(ParamState.UNSHARDED)
        if self.is_released_between_uses and self.shard.tier != "device":
            self._timeline.add(ActionKind.FETCH, self.spec.name, self._unshard_start_s)
        self._timeline.add(ActionKind.UNSHARD, self.spec.name, self._unshard_start_s)

    def reshard(self, keeps_views: bool = False) -> None:
        """Free `full` after its last use, if the parameters are stored as shards and not pinned.

        With `keeps_views` no graph will ask for the parameters again: other tensors that share their memory keep it.
        """
        if self.is_pinned or self.is_sharded or not self.is_released_between_uses:
            return
        start_s = self._timeline.now()
        if self._free(keeps_views):
            self._timeline.add(ActionKind.RESHARD, self.spec.name, start_s)

    def pin(self, stays: bool = True) -> None:
        """Keep the parameters once they are present, until they are unpinned by False."""
        self.is_pinned = stays

    def show(self) -> None:
        """Make the parameters present; their uses are reported."""
        self.wait()
        self.guard()

    def share(self) -> None:
        """Note that graphs or views outside of the unit may share the memory of `full`."""
        self.is_lent = True

    def lend(self, index: int) -> Tensor | None:
        """Return a present parameter as a view of its own: a graph keeps this one, and its memory with it.

        None where the parameter's class computes in its own way, as quantised ones do: no view does that.
        """
        self.share()
        parameter = self.parameters[index]
        if self._kinds[index] is not nn.Parameter:
            return None
        with plain_torch_functions():
            return parameter.view_as(parameter)

    def claim(self) -> None:
        """Give the unit memory that is its own alone, as it is freed and gathered again while graphs share it."""
        if self.is_lent and self.is_released_between_uses and self._is_shared(len(self.parameters)):
            self._replace_memory(keeps_values=True)  # see [Note: Memory that is lent]
        self.is_lent = False

    def is_viewed_by(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether one of the tensors is a view of the parameters."""
        storage = self.full.untyped_storage()
        return any(tensor.untyped_storage() is storage for tensor in tensors)

    def unguard(self) -> None:
        """Make the parameters plain: all uses from now on are known to need them."""
        if self.is_released_between_uses:
            self._set_classes(self._present_kinds)

    def guard(self) -> None:
        """Report every further use of the parameters: nothing else says how long their data is needed."""
        if self.is_released_between_uses:
            self._set_classes(self._released_kinds)

    def watch(self, watched: type[nn.Parameter] | None) -> None:
        """Give parameters that are stored whole the class `watched`, which reports some uses; None for their own."""
        if self._present_kinds is self._kinds and self.state is ParamState.UNSHARDED:
            self._set_classes([watched if watched and kind is nn.Parameter else kind for kind in self._kinds])

    def show_parts(self, part_type: PartType | None) -> None:
        """Give parameters of which this rank has a part the classes that `part_type` makes of theirs; None ends that.

        A change of their state keeps it.
        """
        self._part_type = part_type
        for index in self._parts:
            parameter = self.parameters[index]
            own_type = without_parts(parameter_class(parameter))
            set_parameter_class(parameter, own_type if part_type is None else part_type(own_type))

    def placeholder(self, index: int) -> Tensor:
        """Return what stands for a released parameter in a state dict, whose values are refused by its name."""
        return Placeholder.of(
            self.parameters[index],
            f"parameter {self.spec.params[index].name} is released: under ZeRO-3 a state dict has values inside "
            "`with engine.gathered():` or deepspeed.zero.GatheredParameters, which all ranks enter; engine.save, "
            "engine.export_weights, save_checkpoint and Trainer.save_model need none",
        )

    def enter(self, state: ParamState) -> None:
        """Go to a state; raise `RuntimeError` if that is not legal."""
        if state not in LEGAL[self.state]:
            before, after = self.state.name, state.name
            raise RuntimeError(f"the parameters of {self.spec.name} cannot go from {before} to {after}")
        self.state = state

    def _set_state(self, state: ParamState) -> None:
        self.enter(state)
        if state is not ParamState.UNSHARDED:
            self._set_classes(self._released_kinds)
        elif not self.is_released_between_uses:
            self._set_classes(self._present_kinds)

    def _set_classes(self, kinds: Sequence[type[nn.Parameter]]) -> None:
        set_parameter_classes(self.parameters, kinds)
        if self._part_type is not None:
            self.show_parts(self._part_type)

    def _free(self, keeps_views: bool = False) -> bool:
        """Free `full` where parameters are stored as shards; say whether there was something to free."""
        if not self.is_released_between_uses or self.state not in (ParamState.UNSHARDING, ParamState.UNSHARDED):
            return False
        # [Note: Freed after its last reader]
        # The host frees memory while kernels that read it are still queued. For the compute stream that is safe: memory
        # is given out again in its order. A gather that no forward has waited for may still write here, on its side
        # stream, so the compute stream waits for it first. What other code has written into the parameters is taken
        # over before it is gone.
        self._work.wait()
        self.follow_writes()
        if self._is_shared(len(self.parameters) if keeps_views or self.is_lent else None):
            self._replace_memory(keeps_values=False)
        else:
            self._tracker.resize(self.full, 0)  # see [Note: Why a storage is resized and not replaced]
        self.is_lent = False
        self._set_state(ParamState.SHARDED)
        return True

    def _is_shared(self, num_known: int | None) -> bool:
        """Say whether others may use the memory of `full`: it has more than the known views, or NumPy had it.

        Args:
            num_known: its views; None to ask for no others.
        """
        if is_fake(self.full):
            return False
        is_viewed = num_known is not None and has_views(self.full, num_known)
        return is_viewed or not self.full.untyped_storage().resizable()

    # [Note: Memory that is lent]
    # A storage can be freed while tensors share it, and so it is between a unit's forward and its backward: the graph
    # of the unit shares it, and reads it only after it is gathered again. Nothing tells other graphs and views when to
    # read, so they keep the storage, which dies with the last of them, and the parameters go on in another one.
    def _replace_memory(self, keeps_values: bool) -> None:
        with torch.inference_mode(False), torch.no_grad():
            memory = torch.empty_like(self.full)
            if keeps_values:
                memory.copy_(self.full)
            self.full.set_(memory.untyped_storage(), 0, memory.shape, (1,))  # the tensor stays, as others have it
            for parameter, view in zip(self.parameters, self._views(), strict=True):
                set_data(parameter, view)
            if not keeps_values:
                set_unsharded_storage(memory.untyped_storage(), 0)
            self._tracker.track(self.full, Category.GATHERED)
