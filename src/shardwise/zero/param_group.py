"""A parameter group at run time: its flat buffer, what is stepped, its gradients, and what steps and writes change.

`ParamWrites` finds what other code writes into the parameters, of which their master and shard know nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property

import torch
from torch import Tensor, nn

from shardwise.comm.consistency import hash_of_bits
from shardwise.comm.mesh import CommGroups
from shardwise.config.errors import ConfigError
from shardwise.construction.opaque import as_bytes
from shardwise.construction.shards import make_plain
from shardwise.construction.values import ParamInitializer
from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import GroupSpec, ParamSpec
from shardwise.offload.step_pipeline import CHUNK_NUMEL
from shardwise.offload.storage import StateStorage, loaded
from shardwise.offload.worker import Task
from shardwise.runtime.memory_tracker import Category, trim_host_memory
from shardwise.runtime.module_hooks import GradientEvents, GradientHandle, hook_gradient
from shardwise.runtime.param_guard import ParameterClasses
from shardwise.runtime.precision import torch_dtype
from shardwise.runtime.torch_private import plain_torch_functions, set_data, version, versions
from shardwise.schedule.actions import ActionKind
from shardwise.zero.flat_buffer import FlatBuffer, ParamState
from shardwise.zero.grad_buckets import make_bucket
from shardwise.zero.resources import ShardingResources
from shardwise.zero.tp_params import gather_param, shard_param, whole_parameter


class ParamWrites:
    """Says whether the parameters of a group were written: in place by their versions, else where `data` was read."""

    def __init__(self, spec: GroupSpec, parameters: Sequence[nn.Parameter], full: Tensor) -> None:
        self._spec = spec
        self._parameters = parameters
        self._full = full
        self._versions = versions(parameters)
        self._is_refused = False  # the new versions are
        self._hashes: dict[int, Tensor | None] = {}  # of the parameters whose `data` was read

    def note_data(self, index: int, value: Tensor | None, is_held: bool) -> None:
        """Note that a present parameter's `data` is read, or set it: no version counts what is written there.

        Args:
            value: what it is set to; None where it is read.
            is_held: the parameter is inside `gathered`, at whose end what was written is asked for.
        """
        if index not in self._hashes:
            self._hashes[index] = self._hash(index) if is_held else None
        if value is not None:
            self._assign(index, value)

    def check(self) -> None:
        """Raise where the engine cannot follow what other code has done to a parameter.

        Raises:
            ConfigError: a parameter was moved since the engine was made, or a trained one was written inside
                `gathered` that takes nothing over; names the parameter.
        """
        storage = self._full.untyped_storage()
        with plain_torch_functions():
            for index, (parameter, place) in enumerate(zip(self._parameters, self._spec.params, strict=True)):
                if parameter.untyped_storage() is not storage and not self._adopt(index):
                    raise ConfigError(
                        "parameter-moved",
                        f"parameter {place.name} was moved or converted after initialize (model.to, model.half, "
                        "p.data = ...), but the engine keeps it in a buffer of its own; convert the model before "
                        "initialize, and set precision.param",
                    )
                if self._is_refused and version(parameter) != self._versions[index]:
                    raise ConfigError(
                        "parameter-written",
                        f"parameter {place.name} was written inside engine.gathered(), but the engine trains a master "
                        "of its own; write inside `with engine.gathered(write=True):`",
                    )

    @property
    def are_followed(self) -> bool:
        """Say whether a parameter may have been written in a way that the engine follows."""
        return not self._is_refused and (bool(self._hashes) or self._has_new_version)

    @property
    def are_there(self) -> bool:
        """Say whether a parameter was written in place since the engine was made, or in `data` inside `gathered`."""
        return self._has_new_version or self.written_data is not None

    @property
    def written_data(self) -> str | None:
        """Return the name of a parameter that was written through its `data` inside `gathered`; None for none."""
        for index, before in self._hashes.items():
            if before is not None and not torch.equal(before, self._hash(index)):
                return self._spec.params[index].name
        return None

    def refuse_new(self) -> None:
        """Let `check` refuse what has been written into trained parameters, which are not taken over."""
        self._is_refused = self._spec.trainable and self._has_new_version

    def forget_data(self) -> None:
        """Take over nothing of what has been written through `data`."""
        self._hashes.clear()

    def accept(self, index: int | None = None) -> None:
        """Accept values as they are, of one parameter or of all: they were written on purpose, the master with them."""
        if index is None:
            self._hashes.clear()
            self._is_refused = False
        for position in range(len(self._parameters)) if index is None else (index,):
            self._versions[position] = version(self._parameters[position])

    @property
    def _has_new_version(self) -> bool:
        with plain_torch_functions():
            return versions(self._parameters) != self._versions

    def _assign(self, index: int, value: Tensor) -> None:
        """Set a parameter's `data`; where nothing trains it, its values go where they are stored."""
        parameter = self._parameters[index]
        with plain_torch_functions(), torch.no_grad():
            if self._spec.trainable or not _is_like(value, parameter):
                set_data(parameter, value)
            elif value.data_ptr() != parameter.data_ptr():
                parameter.view_as(parameter).copy_(value)

    def _adopt(self, index: int) -> bool:
        """Put a frozen parameter's new data where its values are stored; say whether it could be."""
        parameter, place = self._parameters[index], self._spec.params[index]
        if self._spec.trainable or self._spec.is_opaque or self._full.untyped_storage().nbytes() == 0:
            return False
        view = self._full[place.offset : place.offset + place.numel].view(place.shape)
        if not _is_like(parameter, view):
            return False
        with torch.no_grad():
            view.copy_(parameter)
        set_data(parameter, view)
        return True

    def _hash(self, index: int) -> Tensor:
        """Return a number that changes with the parameter's bits."""
        place = self._spec.params[index]
        return hash_of_bits(self._full[place.offset : place.offset + place.numel])


def _is_like(value: Tensor, target: Tensor) -> bool:
    return (value.shape, value.dtype, value.device) == (target.shape, target.dtype, target.device)


class ParamGroup(FlatBuffer):
    """Holds one group of parameters with what they are stepped by, and takes over what steps and other code write.

    Args:
        parameters: the module's parameters in the order of `spec.params`; their data moves into `full`.
        classes: of parameters whose storage is freed, and of those whose writes are watched.

    Attributes:
        master: the slice in the optimizer's precision and tier; `shard` itself where these are the same. Frozen
            parameters that are stored whole and decoded have one too.
        grads: the gradients; None where the group is frozen.
        writes: what other code writes into the parameters.
    """

    def __init__(
        self,
        spec: GroupSpec,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        resources: ShardingResources,
        classes: ParameterClasses,
    ) -> None:
        super().__init__(spec, layout, parameters, resources, classes)
        stage, policy, tiers = layout.stage_of(spec), layout.precision_of(spec), resources.tiers
        self.holders = layout.holders(spec)
        self.gradient_handles: list[GradientHandle] = []
        self._stepping: Task | None = None
        self._gather_updates: Callable[[], None] | None = None
        self._reduce_start_s: float | None = None
        self.shard_start, self.shard_stop = spec.held_range(stage.optimizer, resources.comms.shards.rank)
        self._keeps_exact = self.transport.is_encoded and not self.is_released_between_uses
        self._is_gathered_after_step = spec.trainable and (stage.unshard_after_step or self._keeps_exact)
        # The views are made while `full` has memory; they outlive that, see [Note: Why a storage is resized and not
        # replaced].
        views, numel = self._views(), self.shard_stop - self.shard_start
        self.shard: StateStorage = tiers.on_device(self.full[self.shard_start : self.shard_stop])
        if self.is_released_between_uses:
            self._tracker.resize(self.full, 0)  # before the values come: they go into the shard, never into the group
            name, dtype = f"{spec.name}.param", self.full.dtype
            self.shard = tiers.place(spec.tiers.params, name, numel, dtype, Category.PARAMETERS)
        master_dtype = torch_dtype(policy.master)
        self.master = self._place_master(policy.keeps_master, master_dtype)
        self._fill(resources.values, master_dtype)
        if self.is_released_between_uses or self.master is not self.shard:
            # They are not what is stored, so writes must be followed.
            self._present_kinds = tuple(map(classes.present, self._kinds))
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.grad = None
            set_data(parameter, view)
        trim_host_memory()  # of the values that went into the shards
        self.writes = ParamWrites(spec, self.parameters, self.full)
        self.grads = make_bucket(spec, layout, resources) if spec.trainable else None
        self._set_classes(self._present_kinds)
        self._free()

    @property
    def comms(self) -> CommGroups:
        """Return the groups of ranks over which the parameters are split and sharded."""
        return self._resources.comms

    def _place_master(self, is_copy: bool, dtype: torch.dtype) -> StateStorage:
        spec, tiers, numel = self.spec, self._resources.tiers, self.shard.numel
        if spec.trainable and (is_copy or spec.tiers.params != spec.tiers.optimizer):
            return tiers.place(spec.tiers.optimizer, f"{spec.name}.master", numel, dtype, Category.OPTIMIZER)
        if self._keeps_exact:
            return tiers.place("device", f"{spec.name}.exact", numel, self.full.dtype, Category.PARAMETERS)
        return self.shard

    def hook_gradients(self, receiver: Callable[[], GradientEvents | None]) -> None:
        """Hand the parameters' gradients to a receiver, after the hooks of users; see `hook_gradient`."""
        comms, this = self._resources.comms, weakref.ref(self)

        def make_present() -> None:
            group = this()
            if group is not None:
                group.wait()

        self.gradient_handles = [
            hook_gradient(parameter, receiver, whole_parameter(param, comms.tensor, comms.context, make_present))
            for parameter, param in zip(self.parameters, self.spec.params, strict=True)
        ]

    def prefetch(self) -> None:
        """Start what `unshard` would have to wait for on the host, if the last step is over."""
        is_stepping = self._stepping is not None and not self._stepping.is_done
        if self.is_released and not is_stepping:
            self.shard.prefetch()

    def refresh(self) -> None:
        """Take over the optimizer's update; where parameters are stored whole, start to gather them."""
        # Asked first, as it says what was UNSHARDED, and `_take_over` ends that.
        is_aliased = self.is_aliased
        if self._take_over(is_narrowed=False):
            self.unshard()
            if is_aliased:
                self.wait()
        self._show_if_pinned()

    @property
    def is_always_whole(self) -> bool:
        """Say whether the parameters are whole at all times: no use waits for a gather or a step in the background."""
        moves = self.is_released_between_uses or self._is_gathered_after_step or self.transport.is_encoded
        return not moves and self.spec.tiers.optimizer == "device"

    @property
    def is_aliased(self) -> bool:
        """Say whether a tensor of the user's shares the memory of parameters that are stored whole.

        No class reports when it is read, so an update must have come when the step returns.
        """
        is_whole = self.state is ParamState.UNSHARDED and not self.is_released_between_uses
        return is_whole and self._is_shared(len(self.parameters) + self._num_pieces)

    # [Note: Steps that go on in the background]
    # A step returns while the host still steps some groups, so that the next forward begins earlier. Until its task
    # ends, such a group is STEPPING: its shard changes, so `unshard` waits for the task before it gathers. Where
    # parameters are stored whole, their gather follows the task in the order of all ranks, see [Note: Gathers after the
    # step].
    def refresh_in_background(self, stepping: Task, gather_updates: Callable[[], None] | None) -> None:
        """Take over an update that is under way on the host; the next use of the parameters waits for it.

        Args:
            gather_updates: called before the parameters are used, if they are stored whole: gathers groups up to this
                one in the order of all ranks.
        """
        self._gather_updates = gather_updates if self._take_over(is_narrowed=True) else None
        self._stepping = stepping
        self.enter(ParamState.STEPPING)
        self._show_if_pinned()

    def await_step(self) -> None:
        """Return once no update of the group is under way on the host."""
        stepping, self._stepping = self._stepping, None
        if stepping is not None:
            stepping.wait()

    def gather_update(self) -> None:
        """Take over an update from the host; where parameters are stored whole, start to gather them."""
        self.await_step()
        if self.state is ParamState.STEPPING:
            self.enter(ParamState.SHARDED)
            if self._gather_updates is not None:
                self._gather_updates = None
                self.unshard()

    def finish_update(self) -> None:
        if self._gather_updates is not None:
            self._gather_updates()
        self.gather_update()

    def adopt_master(self) -> None:
        """Take over values that were written into `master` on every rank, frozen or not. All ranks call it."""
        self.finish_update()
        self._drop_gathered(is_narrowed=False)
        if not self.is_released_between_uses:
            if self.shard.numel < self.full.numel() or self._keeps_exact:
                self._set_state(ParamState.SHARDED)
                self.wait()
            self.writes.accept()
        self._show_if_pinned()

    def take_written(self) -> None:
        """Take over this rank's slice of the present parameters, as other code has written them, everywhere.

        A master keeps its precision where its parameter is unchanged.
        """
        written, has_copies = self.full[self.shard_start : self.shard_stop], self.transport.has_copies
        if self.master is not self.shard or has_copies:
            for start in range(0, written.numel(), CHUNK_NUMEL):
                chunk = written[start : start + CHUNK_NUMEL]
                master = self.master.read(start, start + chunk.numel()).to(chunk.device)
                is_changed = chunk != self.transport.shown(master, chunk.dtype)
                self.master.write(start, torch.where(is_changed, chunk.to(master.dtype), master))
        if has_copies:
            self.transport.forget()
            if self.master is not self.shard and self.is_released_between_uses:
                self._narrow()
        elif self.is_released_between_uses:
            self.shard.write(0, written)
        self.writes.accept()

    def follow_writes(self) -> None:
        if self.state is ParamState.UNSHARDED and self.writes.are_followed:
            with torch.no_grad():
                self.take_written()

    def trains(self) -> list[bool]:
        """Return the current `requires_grad` of each parameter."""
        with plain_torch_functions():
            return [parameter.requires_grad for parameter in self.parameters]

    def release(self, keep_values: bool = True, at_once: bool = True) -> None:
        """Give the parameters plain, whole tensors of their own again; the group cannot be used afterwards.

        Args:
            keep_values: False leaves the parameters on meta, and gathers nothing.
            at_once: free memory that the optimizer's pieces view; otherwise it dies with the last of them.
        """
        if keep_values:
            self.wait()
        else:
            self.await_step()
        self._work.wait()
        self._part_type = None
        self._set_classes(self._kinds)
        for parameter, param in zip(self.parameters, self.spec.params, strict=True):
            if keep_values:
                tensor, name = self._resources.comms.tensor, f"whole {param.name}"
                parameter.data = gather_param(param.split, parameter.detach(), tensor, name)
            else:
                shape = parameter.shape if self.spec.is_opaque else param.global_shape
                set_data(parameter, torch.empty(shape, dtype=parameter.dtype, device="meta"))
        if self.transport.secondary is not None:
            self._tracker.resize(self.transport.secondary.values, 0)
        if not self._is_shared(self._num_pieces if at_once else 1):  # otherwise it dies with the last of its views
            self._tracker.resize(self.full, 0)
        for storage in {self.shard, self.master}:
            storage.close()
        if self.grads is not None:
            self.grads.close()

    def begin_reduce(self) -> None:
        """Prepare for a reduction of the gradients, and for the update after it."""
        self._reduce_start_s = self._timeline.now()
        self.await_step()  # it reads the buffer into which the new gradients go
        # Where only other ranks use the unit, nothing here has waited for its gather since the last update, which may
        # still read the slice that the optimizer writes next.
        self._work.wait()

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
        self._drop_gathered(is_narrowed)
        if self._is_gathered_after_step or (is_narrowed and not self.is_released_between_uses):
            self._set_state(ParamState.SHARDED)
        return self.state is ParamState.SHARDED and not self.is_released_between_uses

    def _drop_gathered(self, is_narrowed: bool) -> None:
        """Forget all that other ranks have sent, and round the master to the shard unless that is done elsewhere."""
        # After a step only this rank's slice is new. What other ranks have sent before, in `full` and in the secondary
        # shard, is of the old parameters: it is forgotten here, so that the next gather asks all ranks.
        self._work.wait()  # see [Note: Freed after its last reader]
        self.transport.forget()
        if self.master is not self.shard and not is_narrowed:
            self._narrow()
        self.writes.forget_data()
        self._free()

    def _narrow(self) -> None:
        """Round the master to the shard."""
        master = self.master.tensor
        if self.spec.tiers.optimizer == "device" and master is not None:
            self.shard.put(master, self._resources.pool)
            return
        for start in range(0, self.master.numel, CHUNK_NUMEL):
            self.shard.write(start, self.master.read(start, min(start + CHUNK_NUMEL, self.master.numel)))

    @cached_property
    def _num_pieces(self) -> int:
        """Return how many tensors share the memory of `full` beside the parameters: the shard, and what is stepped."""
        if self.is_released_between_uses:
            return 0
        return 1 + len(self.spec.slots(self.shard_start, self.shard_stop)) * (self.master is self.shard)

    def _show_if_pinned(self) -> None:
        if self.is_pinned:  # inside `gathered`
            self.show()

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
        if not self.is_released_between_uses:
            self.transport.recode(self.full)

    def _initial(self, place: ParamSpec, values: ParamInitializer, dtype: torch.dtype, is_held: bool) -> Tensor:
        """Return a parameter's local values, 1-D: rank 0's, or the same on all ranks; empty where none are needed."""
        ranks, shape = self._resources.comms.model, place.global_shape
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
        return shard_param(place.split, self._resources.comms.tensor.rank, whole).reshape(-1)
