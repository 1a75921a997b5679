"""Convert between whole parameters and the parts of them that ranks of a tensor-parallel group hold.

Everything follows from a parameter's `ParamSplit`: here its rectangles become slices of tensors.

A matrix of 3 rows over 2 ranks, padded to 4:

>>> from shardwise.layout.tp_sharding import FusedPart
>>> split = ParamSplit((3, 2), degree=2, dim=0, parts=(FusedPart(3, is_padded=True),))
>>> [shard_param(split, rank, torch.arange(6).view(3, 2)).tolist() for rank in range(2)]
[[[0, 1], [2, 3]], [[4, 5], [0, 0]]]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.collectives import Comm
from shardwise.layout.param_groups import ParamSpec
from shardwise.layout.slicing import Rect
from shardwise.layout.tp_sharding import ParamSplit


def shard_param(split: ParamSplit, index: int, whole: Tensor) -> Tensor:
    """Return the local tensor of one rank of the tensor-parallel group; zero where it is padding.

    Args:
        index: of the rank in the group.
    """
    if split.is_whole:
        return whole
    local = whole.new_zeros(split.local_shape)
    for share in split.shares(index):
        _view(local, share.target).copy_(_view(whole, share.source))
    return local


def gather_param(split: ParamSplit, local: Tensor, comm: Comm, name: str, *, is_gradient: bool = False) -> Tensor:
    """Return the whole tensor on every rank, from the ranks' local ones. All ranks of the group call it.

    Args:
        local: this rank's tensor, or a gradient of it, of shape `split.local_shape`.
        is_gradient: whether to sum what ranks share, where their gradients are parts of one.
    """
    shares = split.shares(comm.rank)
    if comm.world_size == 1 or (split.is_whole and not (is_gradient and split.is_partial)):
        return local.clone()
    numel = math.prod(split.global_shape)
    # Bits are summed as integers, where all but the owner have zeros: exact in every dtype.
    words = torch.zeros(-(-numel * local.element_size() // 8), dtype=torch.int64, device=local.device)
    whole = words.view(local.dtype)[:numel].view(split.global_shape)
    for share in shares:
        if (is_gradient and share.is_summed) or share.is_owned_by(comm.rank):
            _view(whole, share.source).copy_(_view(local, share.target))
    is_summed = is_gradient and any(share.is_summed for share in shares)
    comm.sum_in_place(whole.view(-1) if is_summed else words, name)
    return whole if whole.nbytes == words.nbytes else whole.clone()  # with a storage of its own size


def synchronize_shares(split: ParamSplit, local: Tensor, comm: Comm, name: str) -> None:
    """Make a local tensor that was written consistent across the group, in place. All ranks of the group call it.

    What ranks share becomes what its owner has, and padding becomes zero.

    Args:
        local: this rank's tensor, of shape `split.local_shape`.
    """
    if comm.world_size == 1 or local.numel() == 0:
        return
    if split.is_whole:
        comm.broadcast(local.view(-1), name)
    elif any(part.num_sharers(split.degree) > 1 for part in split.parts):
        local.copy_(shard_param(split, comm.rank, gather_param(split, local, comm, name)))
    else:
        held = torch.zeros_like(local)
        for share in split.shares(comm.rank):
            _view(held, share.target).copy_(_view(local, share.target))
        local.copy_(held)


def owned_part(split: ParamSplit, index: int, local: Tensor) -> Tensor:
    """Return a local gradient with zeros where the sum of the sharers' gradients counts on another rank.

    Args:
        index: of the rank in the tensor-parallel group.
    """
    shares = [share for share in split.shares(index) if share.is_summed and not share.is_owned_by(index)]
    if not shares:
        return local
    owned = local.clone()
    for share in shares:
        _view(owned, share.target).zero_()
    return owned


def whole_parameter(
    place: ParamSpec, tensor: Comm, context: Comm, make_present: Callable[[], None]
) -> WholeSampleParameter | None:
    """Return what shows users' hooks the whole of a parameter; None where this rank's gradient is its sample's.

    Args:
        tensor: the ranks that have parts of the matrices.
        context: those that have parts of the tokens.
        make_present: gathers the values of this rank's parameter.
    """
    split = place.split
    if context.world_size == 1 and (tensor.world_size == 1 or (split.is_whole and not split.is_partial)):
        return None
    return WholeSampleParameter(place.name, split, tensor, context, make_present)


@dataclass(frozen=True)
class WholeSampleParameter:
    """Shows all of a parameter, and its gradient of a micro-batch: what one process has of the same samples."""

    name: str
    placement: ParamSplit
    tensor: Comm
    context: Comm
    make_present: Callable[[], None]

    def gather(self, gradient: Tensor) -> Tensor:
        """Return the whole gradient: the matrix's parts joined, the tokens' parts summed."""
        name = f"gradient of {self.name} for its hooks"
        whole = gather_param(self.placement, gradient, self.tensor, name, is_gradient=True)
        if self.context.world_size > 1:
            self.context.sum_in_place(whole.view(-1), name)
        return whole

    def split(self, gradient: Tensor) -> Tensor:
        """Return this rank's part; what several ranks add up, the first of them has."""
        if self.context.rank > 0:
            return gradient.new_zeros(self.placement.local_shape)
        return owned_part(self.placement, self.tensor.rank, shard_param(self.placement, self.tensor.rank, gradient))

    def gather_values(self, parameter: Tensor) -> Tensor:
        """Return the whole parameter's values."""
        self.make_present()
        return gather_param(self.placement, parameter.detach(), self.tensor, f"values of {self.name} for its hooks")


def _view(tensor: Tensor, rect: Rect) -> Tensor:
    return tensor[rect.slices_in(Rect.whole(tuple(tensor.shape)))]
