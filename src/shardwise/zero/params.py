"""The parameters of one group: whole in `full`, this rank's slice in `shard`, and the moves between the two."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from enum import Enum

import torch
from torch import Tensor, nn

from shardwise._torch_private import parameter_class, plain_torch_functions, set_data, version
from shardwise.comm import Pending
from shardwise.deferred import ValueSource
from shardwise.layout.groups import GroupSpec, ParamSpec
from shardwise.layout.layout import Layout
from shardwise.memory import Category, trim_host_memory
from shardwise.precision import torch_dtype
from shardwise.tiers.rests import Rest
from shardwise.tiers.sweep import CHUNK_NUMEL
from shardwise.wearing import ReleasedParameterError, wear
from shardwise.zero.resources import Resources
from shardwise.zero.tensor_parts import cut, join


class ParamState(Enum):
    """What of `full` is valid. Legal: SHARDED -> UNSHARDING -> UNSHARDED -> SHARDED, and OFFLOADED to and fro."""

    SHARDED = "only this rank's slice is valid; where parameters rest as shards, the storage is freed"
    UNSHARDING = "the all-gather is under way"
    UNSHARDED = "all of it is valid"
    OFFLOADED = "nothing is: what rests on this rank has been put aside"


class GroupParams:
    """Buffers of a group's parameters, and their state.

    Args:
        spec: of the group.
        layout: stage and precision.
        parameters: the module's parameters in the order of `spec.params`; their data moves into `full`.
        resources: shared by the engine's groups.
        released: the class of a parameter whose storage is freed.

    Attributes:
        full: the whole group, of which the parameters are views.
        shard: this rank's slice as it is computed with, where it rests.
        master: the slice in the optimizer's precision, and its memory; `shard` itself where these are the same.
    """

    def __init__(
        self,
        spec: GroupSpec,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        resources: Resources,
        released: type[nn.Parameter],
    ) -> None:
        stage, policy, comms, tiers = layout.stage, layout.precision_of(spec), resources.comms, resources.tiers
        ledger = resources.ledger
        self.spec = spec
        self.parameters = tuple(parameters)
        self.is_released_between_uses = stage.unshard_for_use and not spec.rests_whole
        self.state = ParamState.UNSHARDED
        self._is_gathered_after_step = stage.unshard_after_step and spec.trainable
        self._comms = comms
        self._ledger = ledger
        self._pool = resources.pool
        self._released = released
        self._kinds = tuple(parameter_class(parameter) for parameter in parameters)
        self._pending = Pending(None)

        self.shard_start, self.shard_stop = spec.held_range(stage.optimizer, comms.shards.rank)
        dtype, device = torch_dtype(policy.param), comms.data.device
        allocate = torch.empty if self.is_released_between_uses else torch.zeros  # padding that is read is zero
        self.full = allocate(spec.padded_numel, dtype=dtype, device=device)
        self._full_bytes = self.full.untyped_storage().nbytes()
        ledger.track(self.full, Category.GATHERED if self.is_released_between_uses else Category.PARAMETERS)
        views = [self.full[place.offset : place.offset + place.numel].view(place.shape) for place in spec.params]
        numel, where = self.shard_stop - self.shard_start, spec.tiers
        self.shard: Rest = tiers.on_device(self.full[self.shard_start : self.shard_stop])
        if self.is_released_between_uses:
            ledger.resize(self.full, 0)  # before the values come: they go into the shard, never into all of the group
            self.shard = tiers.place(where.params, f"{spec.name}.param", numel, dtype, Category.PARAMETERS)
        self.master = self.shard
        master_dtype = torch_dtype(policy.master)
        if spec.trainable and (policy.keeps_master or where.params != where.optimizer):
            self.master = tiers.place(where.optimizer, f"{spec.name}.master", numel, master_dtype, Category.OPTIMIZER)
        self._fill(resources.values, master_dtype)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.grad = None
            set_data(parameter, view)
        trim_host_memory()  # of the values that went into the shards
        self._versions = [version(parameter) for parameter in self.parameters]
        self.reshard()

    def _fill(self, values: ValueSource, dtype: torch.dtype) -> None:
        """Copy the initial values, one parameter's at a time and rounded to `dtype` first, to where they rest."""
        own = self.spec.slots(self.shard_start, self.shard_stop)
        with ExitStack() as stack:
            if self.is_released_between_uses:
                rest = stack.enter_context(self.shard.loaded(write=True)), own
            else:
                rest = self.full, self.spec.slots(0, self.spec.padded_numel)
            targets = [rest]
            if self.master is not self.shard:
                targets.append((stack.enter_context(self.master.loaded(write=True)), own))
            for place in (each for each in self.spec.params if not values.is_blank(each.name)):
                held = [(buffer, slot) for buffer, slots in targets for slot in slots if slot.param is place]
                initial = self._initial(place, values, dtype, is_held=bool(held))
                for buffer, slot in held:
                    buffer[slot.offset : slot.offset + slot.stop - slot.start].copy_(initial[slot.start : slot.stop])

    def _initial(self, place: ParamSpec, values: ValueSource, dtype: torch.dtype, is_held: bool) -> Tensor:
        """A parameter's local values, flat: rank 0's, unless all ranks have the same; nothing where none are needed."""
        ranks, shape = self._comms.model, place.global_shape
        is_sent = ranks.world_size > 1 and place.numel > 0 and not values.is_same_everywhere(place.name)
        if not is_sent and not is_held:
            return torch.empty(0, dtype=dtype, device=ranks.device)
        if ranks.rank == 0 or not is_sent:
            whole = values.read(place.name).reshape(shape).to(ranks.device, dtype)
        else:
            whole = torch.empty(shape, dtype=dtype, device=ranks.device)
        if is_sent:
            whole = whole.contiguous()
            ranks.broadcast(whole.view(-1), f"initial values of {place.name}")
        return cut(place.split, self._comms.tensor.rank, whole).reshape(-1)

    @property
    def is_released(self) -> bool:
        """Whether the data is neither present nor on its way."""
        return self.state is ParamState.SHARDED and self.is_released_between_uses

    @property
    def is_unsharding(self) -> bool:
        """Whether an all-gather is under way that nobody has waited for."""
        return self.state is ParamState.UNSHARDING

    def is_viewed_by(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of the tensors is a view of the parameters."""
        storage = self.full.untyped_storage()
        return any(tensor.untyped_storage() is storage for tensor in tensors)

    def check_unchanged(self) -> None:
        """Raise where somebody else has moved a parameter, or written into it, since the engine was made.

        Raises:
            ValueError: naming the parameter.
        """
        storage = self.full.untyped_storage()
        with plain_torch_functions():
            for parameter, place, seen in zip(self.parameters, self.spec.params, self._versions, strict=True):
                if parameter.untyped_storage() is not storage:
                    raise ValueError(
                        f"parameter {place.name} was moved or converted after initialize (model.to, model.half, "
                        "p.data = ...), but the engine keeps it in a buffer of its own; convert the model before "
                        "initialize, and set precision.param"
                    )
                if version(parameter) != seen:
                    raise ValueError(
                        f"parameter {place.name} was written after initialize, but the engine trains a master of its "
                        "own; write before initialize, or inside `with engine.gathered(write=True):`"
                    )

    def trains(self) -> list[bool]:
        """What `requires_grad` says of each parameter now."""
        with plain_torch_functions():
            return [parameter.requires_grad for parameter in self.parameters]

    def accept_written(self, index: int) -> None:
        """Take one parameter's values as they are: somebody has written it, and the master with it."""
        self._versions[index] = version(self.parameters[index])

    def unshard(self) -> None:
        """Start to make all of `full` valid; does nothing where it is or is under way.

        Raises:
            ReleasedParameterError: it is offloaded.
        """
        if self.state is ParamState.OFFLOADED:
            raise ReleasedParameterError(
                f"the parameters of {self.spec.name} are offloaded; call engine.reload() first"
            )
        if self.state is not ParamState.SHARDED:
            return
        if self.is_released_between_uses:
            self._ledger.resize(self.full, self._full_bytes)
            fetched = self.shard.fetch(self.full[self.shard_start : self.shard_stop])
            gathered = self._comms.shards.all_gather(self.full, f"unshard {self.spec.name}")
            self._pending = Pending(fetched.wait, lambda: gathered)
        else:
            self._pending = self._comms.shards.all_gather(self.full, f"unshard {self.spec.name}")
        self.state = ParamState.UNSHARDING

    def wait(self) -> bool:
        """Make the parameters usable on the current stream, unsharding them if nobody has; say whether it had to."""
        if self.state is ParamState.UNSHARDED:
            return False
        self.unshard()
        self._pending.wait()
        self._enter(ParamState.UNSHARDED)
        return True

    def reshard(self) -> bool:
        """Free `full` where parameters rest as shards, once nobody uses it; say whether it did."""
        if not self.is_released_between_uses or self.state in (ParamState.SHARDED, ParamState.OFFLOADED):
            return False
        self._pending.wait()
        self._ledger.resize(self.full, 0)
        self._enter(ParamState.SHARDED)
        return True

    def prefetch(self) -> None:
        """Start what gathering the parameters will have to wait for on the host."""
        if self.is_released:
            self.shard.prefetch()

    def refresh(self, is_narrowed: bool = False) -> bool:
        """Take over what the optimizer has written into `master`; the other ranks' slices are stale from now on.

        Args:
            is_narrowed: the optimizer writes the shard itself, and has perhaps not done so yet.

        Returns:
            whether the parameters, which rest whole, are to be gathered from the ranks.
        """
        self._pending.wait()  # of a gather that no forward has waited for
        if self.master is not self.shard and not is_narrowed:
            self._narrow()
        self.reshard()
        if self._is_gathered_after_step or (is_narrowed and not self.is_released_between_uses):
            self._enter(ParamState.SHARDED)
        return self.state is ParamState.SHARDED and not self.is_released_between_uses

    def adopt_master(self) -> None:
        """Take over values that were written into `master` on every rank, frozen or not. All ranks call it."""
        self._pending.wait()
        if self.master is not self.shard:
            self._narrow()
        self.shard.forget()
        self.reshard()
        if not self.is_released_between_uses:
            if self.shard.numel < self.full.numel():
                self._enter(ParamState.SHARDED)
                self.wait()
            for index in range(len(self.parameters)):
                self.accept_written(index)

    def _narrow(self) -> None:
        """Round the master to the shard."""
        self.shard.forget()
        master = self.master.tensor
        if self.spec.tiers.optimizer == "device" and master is not None:
            self.shard.put(master, self._pool)
            return
        for start in range(0, self.master.numel, CHUNK_NUMEL):
            self.shard.write(start, self.master.read(start, min(start + CHUNK_NUMEL, self.master.numel)))

    def expose(self, watched: type[nn.Parameter] | None = None) -> None:
        """Let the parameters be plain, or `watched`: who uses them from now on is known to need them."""
        for parameter, kind in zip(self.parameters, self._kinds, strict=True):
            wear(parameter, kind if watched is None or kind is not nn.Parameter else watched)

    def conceal(self) -> None:
        """Have every use of the parameters reported: nobody else says how long their data is needed."""
        for parameter in self.parameters:
            wear(parameter, self._released)

    def _enter(self, state: ParamState) -> None:
        self.state = state
        if state is not ParamState.UNSHARDED:
            self.conceal()
        elif not self.is_released_between_uses:
            self.expose()

    def release(self, keep_values: bool = True) -> None:
        """Give the parameters plain tensors of their own again, whole; the group is of no use afterwards.

        Args:
            keep_values: False leaves them on meta.
        """
        if keep_values:
            self.wait()
        self._pending.wait()
        self.expose()
        for parameter, place in zip(self.parameters, self.spec.params, strict=True):
            if keep_values:
                parameter.data = join(place.split, parameter.detach(), self._comms.tensor, f"whole {place.name}")
            else:
                set_data(parameter, torch.empty(place.global_shape, dtype=self.full.dtype, device="meta"))
        self._ledger.resize(self.full, 0)
        for rest in {self.shard, self.master}:
            rest.close()
