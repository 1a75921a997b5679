"""The parameters of one group: whole in `full`, this rank's slice in `shard`, and the moves between the two."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from shardwise._torch_private import plain_torch_functions, version
from shardwise.comm import Comms, Pending
from shardwise.hooks import wear
from shardwise.layout.groups import GroupSpec
from shardwise.layout.precision import PrecisionPolicy
from shardwise.layout.stages import ZeroStage
from shardwise.memory import Category, Ledger
from shardwise.precision import torch_dtype


class ParamState(Enum):
    """What of `full` is valid. Legal: SHARDED -> UNSHARDING -> UNSHARDED -> SHARDED."""

    SHARDED = "only this rank's slice is valid; where parameters rest as shards, the storage is freed"
    UNSHARDING = "the all-gather is under way"
    UNSHARDED = "all of it is valid"


class GroupParams:
    """Buffers of a group's parameters, and their state.

    Args:
        spec: of the group.
        stage: placements over the shard group.
        policy: dtypes.
        parameters: the module's parameters in the order of `spec.params`; their data moves into `full`.
        comms: the shard group, and the ranks that start from the same values.
        ledger: learns of every buffer.
        released: the class of a parameter whose storage is freed.
    """

    def __init__(
        self,
        spec: GroupSpec,
        stage: ZeroStage,
        policy: PrecisionPolicy,
        parameters: Sequence[nn.Parameter],
        comms: Comms,
        ledger: Ledger,
        released: type[nn.Parameter],
    ) -> None:
        self.spec = spec
        self.parameters = tuple(parameters)
        self.is_released_between_uses = stage.unshard_for_use and not spec.is_replicated
        self.state = ParamState.UNSHARDED
        self._is_gathered_after_step = stage.unshard_after_step and spec.trainable
        self._comms = comms
        self._ledger = ledger
        self._released = released
        self._pending = Pending(None)

        self.shard_start, self.shard_stop = spec.held_range(stage.optimizer, comms.shards.rank)
        wide = self._adopt(torch_dtype(policy.master))
        dtype = torch_dtype(policy.param)
        self.full = wide.to(dtype)
        self._full_bytes = self.full.untyped_storage().nbytes()
        ledger.track(self.full, Category.GATHERED if self.is_released_between_uses else Category.PARAMETERS)
        own = slice(self.shard_start, self.shard_stop)
        self.shard = self.full[own]
        if self.is_released_between_uses:
            self.shard = self.shard.clone()
            ledger.track(self.shard, Category.PARAMETERS)
        self.master = self.shard
        if policy.keeps_master and spec.trainable:
            self.master = wide[own].clone()
            ledger.track(self.master, Category.OPTIMIZER)
        for parameter, place in zip(self.parameters, spec.params, strict=True):
            parameter.grad = None
            parameter.data = self.full[place.offset : place.offset + place.numel].view(place.shape)
        self._versions = [version(parameter) for parameter in self.parameters]
        self.reshard()

    def _adopt(self, master_dtype: torch.dtype) -> Tensor:
        """Lay rank 0's parameter values into one flat buffer of the master's dtype."""
        data = self._comms.data
        wide = torch.zeros(self.spec.padded_numel, dtype=master_dtype, device=data.device)
        for parameter, place in zip(self.parameters, self.spec.params, strict=True):
            wide[place.offset : place.offset + place.numel].copy_(parameter.detach().reshape(-1))
        if data.world_size > 1:
            data.broadcast(wide, f"initial values of {self.spec.name}")
        return wide

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
                        "own; load or change weights before initialize"
                    )

    @property
    def is_as_trainable(self) -> bool:
        """Whether no parameter has been frozen or unfrozen since the group was made."""
        with plain_torch_functions():
            return all(parameter.requires_grad == self.spec.trainable for parameter in self.parameters)

    def unshard(self) -> None:
        """Start to make all of `full` valid; does nothing where it is or is under way."""
        if self.state is not ParamState.SHARDED:
            return
        if self.is_released_between_uses:
            self._ledger.resize(self.full, self._full_bytes)
            self.full[self.shard_start : self.shard_stop].copy_(self.shard)
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
        if not self.is_released_between_uses or self.state is ParamState.SHARDED:
            return False
        self._pending.wait()
        self._ledger.resize(self.full, 0)
        self._enter(ParamState.SHARDED)
        return True

    def refresh(self) -> None:
        """Take over what the optimizer has written into `master`; the other ranks' slices are stale from now on."""
        self._pending.wait()  # of a gather that no forward has waited for
        if self.master is not self.shard:
            self.shard.copy_(self.master)
        self.reshard()
        if self._is_gathered_after_step:
            self._enter(ParamState.SHARDED)
            self.unshard()

    def _enter(self, state: ParamState) -> None:
        self.state = state
        kind = nn.Parameter if state is ParamState.UNSHARDED else self._released
        for parameter in self.parameters:
            wear(parameter, kind)

    def release(self) -> None:
        """Give the parameters plain tensors of their own again, whole; the group is of no use afterwards."""
        self.wait()
        for parameter in self.parameters:
            parameter.data = parameter.detach().clone()
        self._ledger.resize(self.full, 0)
