"""Make tensors of the model whole on some ranks, a bucket at a time: each rank sends what it has in one exchange.

What is sent is in the dtype that is asked for, and comes from where it is stored: what a rank computes with, or for
another dtype the more precise values of the optimizer. No parameter is unsharded for it. The extra memory is the bucket
on the ranks that get it, and messages.

A rectangle that is contiguous in the whole tensor, and not small, is received in its place; the others share a message.

A rank gets a parameter from its own replica: from each shard of it where parameters are stored as shards, else from the
ranks at its own place along the data axes; and of what several ranks of tensor parallelism hold, from the first.

Rank 1 of two has the right half of a (4, 6) matrix, and ZeRO gives it the last 5 of the half's 12 elements:

>>> from shardwise.layout.tp_sharding import FusedPart, ParamSplit
>>> param = ParamSpec("w", (), (4, 3), 0, ParamSplit((4, 6), degree=2, dim=1, parts=(FusedPart(6),)))
>>> [(block.offset, str(block.box), str(block.rect)) for block in blocks_of(param, (7, 12), tp_index=1)]
[(7, '[2:3, 1:3]', '[2:3, 4:6]'), (9, '[3:4, 0:3]', '[3:4, 3:6]')]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add, sub
from typing import Final

import torch
from torch import Tensor

from shardwise.layout.layout import Layout
from shardwise.layout.mesh_shape import SHARD_AXES, Coordinate, MeshShape
from shardwise.layout.param_groups import GroupSpec, ParamSpec
from shardwise.layout.slicing import Rect, Shape, flat_range_to_rects, rect_to_flat_ranges
from shardwise.layout.zero_stages import Placement
from shardwise.offload.storage import StateStorage
from shardwise.runtime.precision import torch_dtype
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.state_access import EngineState

Range = tuple[int, int]
_ALIGNMENT_BYTES: Final = 64  # of rectangles in a message
_DIRECT_BYTES: Final = 2**15
_WINDOW_NUMEL: Final = 2**22  # elements that are read from a file at a time


@dataclass(frozen=True, slots=True)
class Block:
    """Places a rectangle of a whole parameter in a group's flat buffer.

    Attributes:
        offset: the first element of `box`, whose elements are contiguous there.
        box: a rectangle of the rank's local tensor.
        inside: the part of it that is `rect`: without padding, and without what another rank sends.
        rect: the same elements in the whole parameter.
    """

    offset: int
    box: Rect
    inside: Rect
    rect: Rect


def blocks_of(param: ParamSpec, held: Range, tp_index: int, *, owned_only: bool = True) -> Iterator[Block]:
    """Yield what a rank has of a parameter in the range `held` of the flat buffer, in the buffer's order.

    Args:
        tp_index: the rank's index in its tensor-parallel group.
        owned_only: leave out what the rank holds but another one of that group owns.
    """
    low, high = max(held[0] - param.offset, 0), min(held[1] - param.offset, param.numel)
    if low >= high:
        return
    shares = [share for share in param.split.shares(tp_index) if not owned_only or share.is_owned_by(tp_index)]
    for box in flat_range_to_rects(Rect.whole(param.shape), low, high):
        for share in shares:
            inside = box.rect.intersect(share.target)
            if inside is not None:
                shift = tuple(map(sub, share.source.start, share.target.start))
                rect = Rect(tuple(map(add, inside.start, shift)), tuple(map(add, inside.stop, shift)))
                yield Block(param.offset + low + box.local_offset, box.rect, inside, rect)


@dataclass(frozen=True)
class GroupRoutes:
    """Says from which ranks each rank gets the parameters of a group.

    Attributes:
        mesh: on which the group is placed.
        holders: the ranks of the pipeline that hold the group.
        is_whole: every rank that holds it has all of the flat buffer; otherwise its shard.
    """

    group: GroupSpec
    mesh: MeshShape
    holders: tuple[int, ...]
    is_whole: bool

    def sends(self, param: ParamSpec, source: Coordinate, receiver: Coordinate) -> bool:
        """Say whether a rank sends what it has of a parameter to another one, or to itself."""
        stage = receiver.pp if receiver.pp in self.holders else self.holders[0]
        if source.pp != stage or source.dp_replicate != receiver.dp_replicate:
            return False
        if self.is_whole and (source.dp_shard, source.cp) != (receiver.dp_shard, receiver.cp):
            return False
        return not param.split.is_whole or source.tp == receiver.tp

    def held(self, rank: Coordinate) -> Range:
        """Return the range of the flat buffer that a rank has."""
        return (0, self.group.padded_numel) if self.is_whole else self.group.shard_range(self._shard(rank))

    def written(self, rank: Coordinate) -> Range:
        """Return the range that a rank has, so that those of all ranks with the same `tp` are the buffer once."""
        if rank.pp != self.holders[0]:
            return 0, 0
        return self.group.written_range(self._shard(rank), rank.dp_replicate)

    def _shard(self, rank: Coordinate) -> int:
        return self.mesh.index_along(SHARD_AXES, self.mesh.rank_of(rank))


@dataclass(frozen=True)
class ModelTensor:
    """Describes a tensor of the model that is handed over: a parameter, or a buffer, which has no group.

    Attributes:
        dtype: in which it is handed over.
        source: of a buffer: the rank whose values count.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    group: GroupSpec | None = None
    param: ParamSpec | None = None
    source: int = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Piece:
    """Is a rectangle of a tensor that one rank has; a buffer is whole."""

    tensor: ModelTensor
    block: Block

    @property
    def rect(self) -> Rect:
        return self.block.rect

    @property
    def num_bytes(self) -> int:
        return self.rect.numel * self.tensor.dtype.itemsize

    @cached_property
    def flat_start(self) -> int | None:
        """Return its first element in the whole tensor, if it is contiguous there and not small."""
        if self.num_bytes < _DIRECT_BYTES:
            return None
        start, stop = next(rect_to_flat_ranges(self.rect, Rect.whole(self.tensor.shape)))
        return start if stop - start == self.rect.numel else None

    def target(self, gathered: Mapping[str, Tensor]) -> Tensor:
        """Return its part of the whole tensor."""
        return gathered[self.tensor.name][self.rect.slices_in(Rect.whole(self.tensor.shape))]


class WeightReader:
    """Reads what this rank has of parameters and buffers, and gathers them over all ranks.

    Args:
        states: of the engine, once no update is under way.
        buffers: all that a state dict has.
    """

    def __init__(self, states: EngineState, layout: Layout, buffers: Mapping[str, Tensor]) -> None:
        self._layout = layout
        self._comm = states.comms.all
        self._groups = {group.spec.name: group for group in states.sharding.groups}
        self._buffers = buffers
        ranks = range(self._comm.world_size)
        meshes = {False: layout.mesh, True: layout.mesh.experts}
        self._coordinates = {key: [mesh.coordinate(rank) for rank in ranks] for key, mesh in meshes.items()}

    def held(self, tensor: ModelTensor, *, once: bool) -> Iterator[tuple[Rect, Tensor]]:
        """Yield the rectangles of a tensor that this rank has, as views of what is stored where that is in memory.

        Args:
            once: leave out what another rank yields too, so that all ranks together have each element once.
        """
        rank = self._comm.rank
        if tensor.group is None or tensor.param is None:
            if not once or rank == tensor.source:
                yield Rect.whole(tensor.shape), self._buffers[tensor.name].detach()
            return
        group, param = self._groups.get(tensor.group.name), tensor.param
        if group is None:
            return
        _make_present(group)
        routes, coordinate = self._routes(tensor, tensor.group), self._coordinates[tensor.group.is_experts][rank]
        start, stop = routes.written(coordinate) if once else routes.held(coordinate)
        start, stop = max(start, param.offset), min(stop, param.offset + param.numel)
        is_in_file = _storage(group, self._is_exact(tensor, tensor.group)).tensor is None
        step = _WINDOW_NUMEL if is_in_file else max(stop - start, 1)
        for low in range(start, stop, step):
            for block in blocks_of(param, (low, min(low + step, stop)), coordinate.tp, owned_only=once):
                yield block.rect, self._values(_Piece(tensor, block))

    def gather(self, tensors: Sequence[ModelTensor], receivers: Sequence[int]) -> dict[str, Tensor] | None:
        """Return tensors whole, by name, on the ranks that receive them, else None. All ranks call it."""
        comm, rank = self._comm, self._comm.rank
        for name in dict.fromkeys(tensor.group.name for tensor in tensors if tensor.group is not None):
            if name in self._groups:
                _make_present(self._groups[name])
        received = tensors if rank in receivers else ()
        gathered = {
            tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype, device=comm.device) for tensor in received
        }
        for piece in self._pieces(received, rank, rank):
            piece.target(gathered).copy_(self._values(piece))
        sends, packed = dict[int, list[Tensor]](), dict[tuple[tuple[str, Rect], ...], list[Tensor]]()
        for receiver in receivers:
            pieces = [] if receiver == rank else list(self._pieces(tensors, rank, receiver))
            key = tuple((piece.tensor.name, piece.rect) for piece in pieces)
            if pieces:
                packed[key] = sends[receiver] = packed[key] if key in packed else self._pack(pieces)
        views, receives = list[tuple[_Piece, Tensor]](), dict[int, list[Tensor]]()
        for source in range(comm.world_size):
            pieces = [] if source == rank else list(self._pieces(received, source, rank))
            if pieces:
                message, own_views = _message(pieces, comm.device)
                views += own_views
                direct = [piece.target(gathered).view(-1) for piece in pieces if piece.flat_start is not None]
                receives[source] = [*direct, message] if message.numel() else direct
        if comm.world_size > 1:
            comm.exchange(sends, receives, f"weights from {tensors[0].name} on", stream=None).wait()
        for piece, view in views:
            piece.target(gathered).copy_(view)
        return gathered if rank in receivers else None

    def _is_exact(self, tensor: ModelTensor, group: GroupSpec) -> bool:
        """Say whether values come from the optimizer's copy: for another dtype, or where parameters are decoded."""
        stage, policy = self._layout.stage_of(group), self._layout.precision_of(group)
        is_released = stage.unshard_for_use and not group.is_stored_whole
        is_decoded = self._layout.gather_codec(group) is not None and not is_released
        return tensor.dtype != torch_dtype(policy.param) or is_decoded

    def _routes(self, tensor: ModelTensor, group: GroupSpec) -> GroupRoutes:
        stage, mesh = self._layout.stage_of(group), self._layout.mesh
        is_whole = group.is_stored_whole or not stage.unshard_for_use
        if self._is_exact(tensor, group):
            is_whole = stage.optimizer is Placement.REPLICATE
        return GroupRoutes(group, mesh.experts if group.is_experts else mesh, self._layout.holders(group), is_whole)

    def _pieces(self, tensors: Sequence[ModelTensor], source: int, receiver: int) -> Iterator[_Piece]:
        """Yield what one rank sends another one, in the order of the message."""
        for tensor in tensors:
            if tensor.group is None or tensor.param is None:
                if source == tensor.source and 0 not in tensor.shape:
                    rect = Rect.whole(tensor.shape)
                    yield _Piece(tensor, Block(0, rect, rect, rect))
                continue
            routes, coordinates = self._routes(tensor, tensor.group), self._coordinates[tensor.group.is_experts]
            sender: Coordinate = coordinates[source]
            if routes.sends(tensor.param, sender, coordinates[receiver]):
                is_split = not tensor.param.split.is_whole
                for block in blocks_of(tensor.param, routes.held(sender), sender.tp, owned_only=is_split):
                    yield _Piece(tensor, block)

    def _values(self, piece: _Piece) -> Tensor:
        """Return the values of this rank's piece, as they are stored."""
        block, spec = piece.block, piece.tensor.group
        if spec is None:
            return self._buffers[piece.tensor.name].detach()
        flat = _flat(self._groups[spec.name], block.offset, block.box.numel, self._is_exact(piece.tensor, spec))
        return flat.view(block.box.shape)[block.inside.slices_in(block.box)]

    def _pack(self, pieces: Sequence[_Piece]) -> list[Tensor]:
        """Return what is sent: pieces that are received in their place, and a message with the others."""
        direct = [piece for piece in pieces if piece.flat_start is not None]
        sent = [self._values(piece).to(self._comm.device, piece.tensor.dtype).reshape(-1) for piece in direct]
        message, views = _message(pieces, self._comm.device)
        for piece, view in views:
            view.copy_(self._values(piece))
        return [*sent, message] if message.numel() else sent


def _make_present(group: ParamGroup) -> None:
    """Wait for the gather of parameters that are stored whole; all ranks of the group call it."""
    if not group.is_released_between_uses:
        group.wait()


def _flat(group: ParamGroup, start: int, numel: int, is_exact: bool) -> Tensor:
    """Return elements of a group's flat buffer that this rank has."""
    if not is_exact and not group.is_released_between_uses:
        return group.full[start : start + numel].detach()
    first = start - group.shard_start
    return _storage(group, is_exact).read(first, first + numel).detach()


def _storage(group: ParamGroup, is_exact: bool) -> StateStorage:
    return group.master if is_exact else group.shard


def _message(pieces: Sequence[_Piece], device: torch.device) -> tuple[Tensor, list[tuple[_Piece, Tensor]]]:
    """Return a message with space for the pieces that are not received in their place, each with its view of it."""
    small = [piece for piece in pieces if piece.flat_start is None]
    sizes = [-(-piece.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for piece in small]
    message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    views = [
        (piece, span[: piece.num_bytes].view(piece.tensor.dtype).view(piece.rect.shape))
        for piece, span in zip(small, message.split(sizes), strict=True)
    ]
    return message, views
