"""A parameter group at run time: the buffers of its parameters, their state, and the actions on them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import Enum
from itertools import starmap

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import AsyncWork
from shardwise.construction.shards import make_plain
from shardwise.construction.values import ParamInitializer
from shardwise.layout.layout import Layout
from shardwise.layout.opaque import as_bytes
from shardwise.layout.param_groups import GroupSpec, ParamSpec
from shardwise.offload.step_pipeline import CHUNK_NUMEL
from shardwise.offload.storage import StateStorage, loaded
from shardwise.offload.tiers import Tiers
from shardwise.offload.worker import Task
from shardwise.runtime.gradient_hooks import GradientEvents, GradientHandle, hook_gradient
from shardwise.runtime.memory_tracker import Category, trim_host_memory
from shardwise.runtime.param_guard import ParameterClasses, ReleasedParameterError, set_parameter_class
from shardwise.runtime.precision import torch_dtype
from shardwise.runtime.torch_private import (
    has_views,
    is_fake,
    parameter_class,
    plain_torch_functions,
    set_data,
    set_unsharded_storage,
)
from shardwise.schedule.actions import ActionKind
from shardwise.zero.grad_buckets import make_bucket
from shardwise.zero.group_gather import GroupGather
from shardwise.zero.param_writes import ParamWrites
from shardwise.zero.resources import ShardingResources
from shardwise.zero.tp_params import gather_param, shard_param, whole_parameter


class ParamState(Enum):
    """Says which part of `full` is valid.

    SHARDED -> UNSHARDING -> UNSHARDED -> SHARDED is legal, and so are changes from and to OFFLOADED.
    """

    SHARDED = "only this rank's slice is valid; where parameters are stored as shards, the storage is freed"
    UNSHARDING = "the all-gather is under way"
    UNSHARDED = "all of it is valid"
    OFFLOADED = "nothing is: what this rank stores has been moved out"


class ParamGroup:
    """Holds one group of parameters, and offers idempotent actions on it: unshard, wait, reshard.

    Args:
        spec: the group's spec.
        layout: gives stage and precision.
        parameters: the module's parameters in the order of `spec.params`; their data moves into `full`.
        resources: shared by the engine's groups.
        classes: of parameters whose storage is freed, and of those whose writes are watched.

    Attributes:
        full: the whole group, 1-D; the parameters are views of it.
        shard: this rank's slice in the dtype of computing, in its tier.
        master: the slice in the optimizer's precision and tier; `shard` itself where these are the same. Frozen
            parameters that are stored whole and decoded have one too.
        grads: the gradients; None where the group is frozen.
        state: which part of `full` is valid.
        is_pinned: the parameters stay present until they are unpinned.
        gradient_handles: what takes the parameters' gradients.
        writes: what other code writes into the parameters.
        is_lent: graphs or views outside of the unit may share the memory of `full`. It dies with them: it is never
            freed in their presence.
    """

    def __init__(
        self,
        spec: GroupSpec,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        resources: ShardingResources,
        classes: ParameterClasses,
    ) -> None:
        stage, policy, comms, tiers = layout.stage_of(spec), layout.precision_of(spec), resources.comms, resources.tiers
        tracker = resources.tracker
        self.spec = spec
        self.holders = layout.holders(spec)
        self.parameters = tuple(parameters)
        self.is_released_between_uses = stage.unshard_for_use and not spec.is_stored_whole
        self.state = ParamState.UNSHARDED
        self.is_pinned = self.is_lent = False
        self.gradient_handles: list[GradientHandle] = []
        self._comms = comms
        self._tracker = tracker
        self._pool = resources.pool
        self._timeline = resources.timeline
        self._overlap = resources.overlap
        self._gather = AsyncWork()
        self._stepping: Task | None = None
        self._gather_updates: Callable[[], None] | None = None
        self._unshard_start_s = 0.0
        self._reduce_start_s: float | None = None

        self.shard_start, self.shard_stop = spec.held_range(stage.optimizer, comms.shards.rank)
        dtype, device = torch_dtype(policy.param), comms.data.device
        allocate = torch.empty if self.is_released_between_uses else torch.zeros  # padding that is read is zero
        self.full = allocate(spec.padded_numel, dtype=dtype, device=device)
        self._full_bytes = self.full.untyped_storage().nbytes()
        tracker.track(self.full, Category.GATHERED if self.is_released_between_uses else Category.PARAMETERS)
        views = self._views()
        numel, where = self.shard_stop - self.shard_start, spec.tiers
        self.gathering = GroupGather(spec, layout, resources, self.full)
        self._is_decoded = self.gathering.codec is not None and not self.is_released_between_uses
        self._is_gathered_after_step = spec.trainable and (stage.unshard_after_step or self._is_decoded)
        self.shard: StateStorage = tiers.on_device(self.full[self.shard_start : self.shard_stop])
        if self.is_released_between_uses:
            tracker.resize(self.full, 0)  # before the values come: they go into the shard, never into all of the group
            self.shard = tiers.place(where.params, f"{spec.name}.param", numel, dtype, Category.PARAMETERS)
        master_dtype = torch_dtype(policy.master)
        self.master = self._place_master(tiers, policy.keeps_master, master_dtype)
        self._fill(resources.values, master_dtype)
        self._kinds = tuple(parameter_class(parameter) for parameter in parameters)
        self._released = tuple(map(classes.released, self._kinds))
        # Where they are not what is stored, writes must be followed.
        self._follows_writes = self.is_released_between_uses or self.master is not self.shard
        self._present = tuple(map(classes.present, self._kinds)) if self._follows_writes else self._kinds
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.grad = None
            set_data(parameter, view)
        trim_host_memory()  # of the values that went into the shards
        self.writes = ParamWrites(spec, self.parameters, self.full)
        self.grads = make_bucket(spec, layout, resources) if spec.trainable else None
        self._set_classes()
        self._free()

    def _place_master(self, tiers: Tiers, is_copy: bool, dtype: torch.dtype) -> StateStorage:
        spec, where, numel = self.spec, self.spec.tiers, self.shard_stop - self.shard_start
        if spec.trainable and (is_copy or where.params != where.optimizer):
            return tiers.place(where.optimizer, f"{spec.name}.master", numel, dtype, Category.OPTIMIZER)
        if self._is_decoded:
            return tiers.place("device", f"{spec.name}.exact", numel, self.full.dtype, Category.PARAMETERS)
        return self.shard

    def hook_gradients(self, receiver: Callable[[], GradientEvents | None]) -> list[GradientHandle]:
        """Hand the parameters' gradients to a receiver, after the hooks of users; see `hook_gradient`."""
        comms, this = self._comms, weakref.ref(self)

        def make_present() -> None:
            group = this()
            if group is not None:
                group.wait()

        self.gradient_handles = [
            hook_gradient(parameter, receiver, whole_parameter(place, comms.tensor, comms.context, make_present))
            for parameter, place in zip(self.parameters, self.spec.params, strict=True)
        ]
        return self.gradient_handles

    @property
    def is_released(self) -> bool:
        """Say whether the data is neither present nor being gathered."""
        return self.state is ParamState.SHARDED and self.is_released_between_uses

    def shaped(self, index: int, flat: Tensor) -> Tensor:
        """Return a parameter's elements as they are in the group, 1-D, in its local shape; bytes in its dtype too."""
        parameter, place = self.parameters[index], self.spec.params[index]
        return flat.view(parameter.dtype).view(parameter.shape) if self.spec.is_opaque else flat.view(place.shape)

    def _views(self) -> list[Tensor]:
        """Return the parameters' places in `full`, which is not freed."""
        places = [self.full[place.offset : place.offset + place.numel] for place in self.spec.params]
        return list(starmap(self.shaped, enumerate(places)))

    def unshard(self) -> None:
        """Start to make all of `full` valid; does nothing where it is valid or an all-gather is under way.

        Raises:
            ReleasedParameterError: the parameters are offloaded.
            EngineError: this backward has stepped them already.
        """
        self.finish_update()
        if self.state is ParamState.OFFLOADED:
            raise ReleasedParameterError(
                "states-offloaded", f"the parameters of {self.spec.name} are offloaded; call engine.reload() first"
            )
        if self.state is not ParamState.SHARDED:
            return
        self._unshard_start_s = self._timeline.now()
        name = f"unshard {self.spec.name}"
        if self.gathering.has_copies:
            self._gather = self._start_copying()
        elif self.is_released_between_uses:
            self._tracker.resize(self.full, self._full_bytes)
            fetched = self.shard.fetch(self.full[self.shard_start : self.shard_stop])
            gathered = self._comms.shards.all_gather(self.full, name)
            self._gather = AsyncWork(fetched.wait, lambda: gathered)
        else:
            self._gather = self._comms.shards.all_gather(self.full, name)
        self.state = ParamState.UNSHARDING
        if not self._overlap:
            self.wait()

    def _start_copying(self) -> AsyncWork:
        """Start a gather that is encoded, or of which a secondary shard is kept."""
        if self.is_released_between_uses:
            return self.gathering.start(self.shard, lambda: self._tracker.resize(self.full, self._full_bytes))
        if self.shard.numel < self.full.numel():
            return self.gathering.start(None, lambda: None)
        self.gathering.recode()
        return AsyncWork()

    def wait(self) -> None:
        """Make the parameters usable on the current stream; unshard them now if no prefetch has started that."""
        if self.state is not ParamState.UNSHARDING:
            self.unshard()
        if self.state is ParamState.UNSHARDED:
            return
        self._gather.wait()
        self._set_state(ParamState.UNSHARDED)
        if self.is_released_between_uses and self.shard.tier != "device":
            self._timeline.add(ActionKind.FETCH, self.spec.name, self._unshard_start_s)
        self._timeline.add(ActionKind.UNSHARD, self.spec.name, self._unshard_start_s)

    def reshard(self, keeps_views: bool = False) -> None:
        """Free `full` after its last use, if the parameters are stored as shards and not pinned.

        Args:
            keeps_views: no graph will ask for the parameters again, so other tensors that share their memory keep it.
        """
        start_s = self._timeline.now()
        if not self.is_pinned and self._free(keeps_views):
            self._timeline.add(ActionKind.RESHARD, self.spec.name, start_s)

    def prefetch(self) -> None:
        """Start what `unshard` would have to wait for on the host, if the last step is over."""
        is_stepping = self._stepping is not None and not self._stepping.is_done
        if self.is_released and not is_stepping:
            self.shard.prefetch()

    def pin(self) -> None:
        """Make the parameters present, and keep them so; their uses are reported."""
        self.wait()
        self.guard()
        self.is_pinned = True

    def lend(self, index: int) -> Tensor | None:
        """Return a present parameter as a view of its own: a graph keeps this one, and its memory with it.

        None where the parameter's class computes in its own way, as quantised ones do: no view does that.
        """
        self.is_lent = True
        parameter = self.parameters[index]
        if self._kinds[index] is not nn.Parameter:
            return None
        with plain_torch_functions():
            return parameter.view_as(parameter)

    def claim(self) -> None:
        """Give the unit memory that is its own alone, as it is freed and gathered again while graphs share it."""
        if self.is_lent and self.is_released_between_uses and self._is_shared(len(self.parameters)):
            self._replace_memory(keeps_values=True)
        self.is_lent = False

    def unguard(self) -> None:
        """Make the parameters plain: all uses from now on are known to need them."""
        if self.is_released_between_uses:
            self._set_classes()

    def guard(self) -> None:
        """Report every further use of the parameters."""
        if self.is_released_between_uses:
            self._guard_all()

    def watch(self, watched: type[nn.Parameter] | None) -> None:
        """Give parameters that are stored whole the class `watched`, which reports some uses; None for their own."""
        if not self._follows_writes and self.state is ParamState.UNSHARDED:
            self._set_classes(watched)

    def refresh(self) -> None:
        """Take over the optimizer's update; where parameters are stored whole, start to gather them."""
        if self._take_over(is_narrowed=False):
            self.unshard()
        self._show_if_pinned()

    def refresh_in_background(self, stepping: Task, gather_updates: Callable[[], None] | None) -> None:
        """Take over an update that is under way on the host; the next use of the parameters waits for it.

        Args:
            stepping: the update.
            gather_updates: called before the parameters are used, if they are stored whole: gathers groups up to this
                one in the order of all ranks.
        """
        self._stepping = stepping
        if self._take_over(is_narrowed=True):
            self._gather_updates = gather_updates
        self._show_if_pinned()

    def await_step(self) -> None:
        """Return once no update of the group is under way on the host."""
        stepping, self._stepping = self._stepping, None
        if stepping is not None:
            stepping.wait()

    def gather_update(self) -> None:
        """Start to gather an update from the host; does nothing where parameters are not stored whole."""
        self.await_step()
        if self._gather_updates is not None:
            self._gather_updates = None
            self.unshard()

    def finish_update(self) -> None:
        """Finish the last update of the parameters, and start its gather where they are stored whole."""
        if self._gather_updates is not None:
            self._gather_updates()
        self.await_step()

    def adopt_master(self) -> None:
        """Take over values that were written into `master` on every rank, frozen or not. All ranks call it."""
        self.finish_update()
        self._gather.wait()
        self.gathering.forget()
        if self.master is not self.shard:
            self._narrow()
        self.writes.forget_data()
        self._free()
        if not self.is_released_between_uses:
            if self.shard.numel < self.full.numel() or self._is_decoded:
                self._set_state(ParamState.SHARDED)
                self.wait()
            self.writes.accept()
        self._show_if_pinned()

    def is_viewed_by(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether one of the tensors is a view of the parameters."""
        storage = self.full.untyped_storage()
        return any(tensor.untyped_storage() is storage for tensor in tensors)

    def take_written(self) -> None:
        """Take over this rank's slice of the present parameters, as other code has written them, everywhere.

        A master keeps its precision where its parameter is unchanged.
        """
        own = self.full[self.shard_start : self.shard_stop]
        has_copies = self.gathering.has_copies
        for start in range(0, own.numel(), CHUNK_NUMEL) if self.master is not self.shard or has_copies else ():
            written = own[start : start + CHUNK_NUMEL]
            master = self.master.read(start, start + written.numel()).to(own.device)
            is_changed = written != self.gathering.shown(master)
            self.master.write(start, torch.where(is_changed, written.to(master.dtype), master))
        if has_copies:
            self.gathering.forget()
            if self.master is not self.shard and self.is_released_between_uses:
                self._narrow()
        elif self.is_released_between_uses:
            self.shard.write(0, own)
        self.writes.accept()

    def check_unchanged(self) -> None:
        """Take over what other code has written into the parameters; raise where the engine cannot follow.

        Raises:
            ConfigError: as `ParamWrites.check`.
        """
        self.writes.check()
        self.follow_writes()

    def follow_writes(self) -> None:
        """Take over what has been written into the present parameters since they were gathered, if something has."""
        if self.state is ParamState.UNSHARDED and self.writes.are_followed:
            with torch.no_grad():
                self.take_written()

    def trains(self) -> list[bool]:
        """Return the current `requires_grad` of each parameter."""
        with plain_torch_functions():
            return [parameter.requires_grad for parameter in self.parameters]

    def release(self, keep_values: bool = True) -> None:
        """Give the parameters plain, whole tensors of their own again; the group cannot be used afterwards.

        Args:
            keep_values: False leaves the parameters on meta, and gathers nothing.
        """
        if keep_values:
            self.wait()
        else:
            self.await_step()
        self._gather.wait()
        for parameter, kind in zip(self.parameters, self._kinds, strict=True):
            set_parameter_class(parameter, kind)
        for parameter, place in zip(self.parameters, self.spec.params, strict=True):
            if keep_values:
                parameter.data = gather_param(
                    place.split, parameter.detach(), self._comms.tensor, f"whole {place.name}"
                )
            else:
                shape = parameter.shape if self.spec.is_opaque else place.global_shape
                set_data(parameter, torch.empty(shape, dtype=parameter.dtype, device="meta"))
        if self.gathering.secondary is not None:
            self._tracker.resize(self.gathering.secondary, 0)
        if not self._is_shared(self._num_pieces()):  # otherwise it dies with the last of its views
            self._tracker.resize(self.full, 0)
        for storage in {self.shard, self.master}:
            storage.close()
        if self.grads is not None:
            self.grads.close()

    def begin_reduce(self) -> None:
        """Prepare for a reduction of the gradients."""
        self._reduce_start_s = self._timeline.now()
        self.await_step()  # it reads the buffer into which the new gradients go

    def finish_reduce(self) -> None:
        """Wait for the reduction under way."""
        if self.grads is not None and self._reduce_start_s is not None:
            self.grads.finish_reduce()
            self._timeline.add(ActionKind.REDUCE, self.spec.name, self._reduce_start_s)
            if self.grads.is_away:
                self._timeline.add(ActionKind.EVICT, self.spec.name, self._reduce_start_s)
            self._reduce_start_s = None

    def _take_over(self, is_narrowed: bool) -> bool:
        """Note that the optimizer has written into `master`; the other ranks' slices are stale from now on.

        Args:
            is_narrowed: the optimizer writes the shard itself, and has perhaps not done so yet.

        Returns:
            whether the parameters, which are stored whole, must be gathered from the ranks.
        """
        self._gather.wait()  # which no forward has waited for
        self.gathering.forget()
        if self.master is not self.shard and not is_narrowed:
            self._narrow()
        self.writes.forget_data()
        self._free()
        if self._is_gathered_after_step or (is_narrowed and not self.is_released_between_uses):
            self._set_state(ParamState.SHARDED)
        return self.state is ParamState.SHARDED and not self.is_released_between_uses

    def _narrow(self) -> None:
        """Round the master to the shard."""
        master = self.master.tensor
        if self.spec.tiers.optimizer == "device" and master is not None:
            self.shard.put(master, self._pool)
            return
        for start in range(0, self.master.numel, CHUNK_NUMEL):
            self.shard.write(start, self.master.read(start, min(start + CHUNK_NUMEL, self.master.numel)))

    def _free(self, keeps_views: bool = False) -> bool:
        """Free `full` where parameters are stored as shards; say whether there was something to free."""
        if not self.is_released_between_uses or self.state in (ParamState.SHARDED, ParamState.OFFLOADED):
            return False
        self._gather.wait()
        self.follow_writes()
        if self._is_shared(len(self.parameters) if keeps_views or self.is_lent else None):
            self._replace_memory(keeps_values=False)
        else:
            self._tracker.resize(self.full, 0)
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

    def _num_pieces(self) -> int:
        """Return how many tensors share the memory of `full` beside the parameters: the shard, and what is stepped."""
        if self.is_released_between_uses:
            return 0
        return 1 + len(self.spec.slots(self.shard_start, self.shard_stop)) * (self.master is self.shard)

    # [Note: memory that is lent]
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

    def refuse_if_released(self, index: int) -> None:
        """Raise where a parameter has no values, but is to be saved.

        Raises:
            ReleasedParameterError: names the parameter.
        """
        if self.is_released:
            raise ReleasedParameterError(
                "parameter-released",
                f"parameter {self.spec.params[index].name} is released: under ZeRO-3 a state dict has values inside "
                "`with engine.gathered():`, which all ranks enter; engine.save and engine.export_weights need none",
            )

    def _show_if_pinned(self) -> None:
        if self.is_pinned:  # inside `gathered`
            self.wait()
            self.guard()

    def _set_state(self, state: ParamState) -> None:
        self.state = state
        if state is not ParamState.UNSHARDED:
            self._guard_all()
        elif not self.is_released_between_uses:
            self._set_classes()

    def _set_classes(self, watched: type[nn.Parameter] | None = None) -> None:
        for parameter, kind in zip(self.parameters, self._present, strict=True):
            set_parameter_class(parameter, kind if watched is None or kind is not nn.Parameter else watched)

    def _guard_all(self) -> None:
        """Report every use of the parameters: nothing else says how long their data is needed."""
        for parameter, kind in zip(self.parameters, self._released, strict=True):
            set_parameter_class(parameter, kind)

    def _fill(self, values: ParamInitializer, dtype: torch.dtype) -> None:
        """Copy the initial values to where they are stored, one parameter at a time and rounded to `dtype` first."""
        own = self.spec.slots(self.shard_start, self.shard_stop)
        with ExitStack() as stack:
            if self.is_released_between_uses:
                resident = stack.enter_context(loaded(self.shard, write=True)), own
            else:
                resident = self.full, self.spec.slots(0, self.spec.padded_numel)
            targets = [resident]
            if self.master is not self.shard:
                targets.append((stack.enter_context(loaded(self.master, write=True)), own))
            for parameter, place in zip(self.parameters, self.spec.params, strict=True):
                if values.has_values:
                    held = [(buffer, slot) for buffer, slots in targets for slot in slots if slot.param is place]
                    initial = self._initial(place, values, dtype, is_held=bool(held))
                    for buffer, slot in held:
                        target = buffer[slot.offset : slot.offset + slot.stop - slot.start]
                        target.copy_(initial[slot.start : slot.stop])
                make_plain(parameter)  # which frees its slice
        if self._is_decoded:
            self.gathering.recode()

    def _initial(self, place: ParamSpec, values: ParamInitializer, dtype: torch.dtype, is_held: bool) -> Tensor:
        """Return a parameter's local values, 1-D: rank 0's, or the same on all ranks; empty where none are needed."""
        ranks, shape = self._comms.model, place.global_shape
        is_sent = ranks.world_size > 1 and place.numel > 0 and not values.is_same_everywhere(place.name)
        if not (is_sent or is_held or values.is_sharded(place.name)):
            return torch.empty(0, dtype=dtype, device=ranks.device)
        if ranks.rank == 0 or not is_sent:
            given = values.read(place.name)
            given = as_bytes(given) if self.spec.is_opaque else given
            whole = given.reshape(shape).to(ranks.device, dtype)
        else:
            whole = torch.empty(shape, dtype=dtype, device=ranks.device)
        if is_sent:
            whole = whole.contiguous()
            ranks.broadcast(whole.view(-1), f"initial values of {place.name}")
        return shard_param(place.split, self._comms.tensor.rank, whole).reshape(-1)
