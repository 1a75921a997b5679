"""Make tensors of the model whole on some ranks, a bucket at a time: each rank sends what it has in one exchange.

What is sent is in the dtype that is asked for, and comes from where it is stored: what a rank computes with, or for
another dtype the more precise values of the optimizer. No parameter is unsharded for it. The extra memory is the bucket
on the ranks that get it, and messages.

A rectangle that is contiguous in the whole tensor, and not small, is received in its place; the others share a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from shardwise.layout.layout import Layout
from shardwise.layout.mesh_shape import Coordinate
from shardwise.layout.param_blocks import Block, GroupRoutes, blocks_of
from shardwise.layout.param_groups import GroupSpec, ParamSpec
from shardwise.layout.slicing import Rect, Shape, rect_to_flat_ranges
from shardwise.layout.zero_stages import Placement
from shardwise.offload.storage import StateStorage
from shardwise.runtime.precision import torch_dtype
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.state_access import EngineState

_ALIGNMENT_BYTES: Final = 64  # of rectangles in a message
_DIRECT_BYTES: Final = 2**15
_WINDOW_NUMEL: Final = 2**22  # elements that are read from a file at a time


@dataclass(frozen=True)
class ModelTensor:
    """Describes a tensor of the model that is handed over.

    Attributes:
        dtype: in which it is handed over.
        place: of a parameter: its group, and its spec there; None for a buffer.
        source: of a buffer: the rank whose values count.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    place: tuple[GroupSpec, ParamSpec] | None = None
    source: int = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Piece:
    """Is a rectangle of a tensor that one rank has; `block` says where, and is None for a buffer, which is whole."""

    tensor: ModelTensor
    rect: Rect
    block: Block | None

    @cached_property
    def flat_start(self) -> int | None:
        """Return its first element in the whole tensor, if it is contiguous there and not small."""
        if self.rect.numel * self.tensor.dtype.itemsize < _DIRECT_BYTES:
            return None
        start, stop = next(rect_to_flat_ranges(self.rect, Rect.whole(self.tensor.shape)))
        return start if stop - start == self.rect.numel else None


class WeightReader:
    """Reads what this rank has of parameters and buffers, and gathers them over all ranks.

    Args:
        states: of the engine, once no update is under way.
        buffers: of the model, by name.
    """

    def __init__(self, states: EngineState, layout: Layout, buffers: Mapping[str, Tensor]) -> None:
        self._layout = layout
        self._comm = states.comms.all
        self._groups = {group.spec.name: group for group in states.sharding.groups}
        self._buffers = buffers
        self._places: dict[bool, list[Coordinate]] = {}

    def held(self, tensor: ModelTensor, *, once: bool) -> Iterator[tuple[Rect, Tensor]]:
        """Yield the rectangles of a tensor that this rank has, as views of what is stored where that is in memory.

        Args:
            once: leave out what another rank yields too, so that all ranks together have each element once.
        """
        rank = self._comm.rank
        if tensor.place is None:
            if not once or rank == tensor.source:
                yield Rect.whole(tensor.shape), self._buffers[tensor.name].detach()
            return
        spec, param = tensor.place
        if (group := self._groups.get(spec.name)) is None:
            return
        _make_present(group)
        routes, place = self._routes(tensor), self._coordinates(spec)[rank]
        start, stop = routes.written(place) if once else routes.held(place)
        start, stop = max(start, param.offset), min(stop, param.offset + param.numel)
        step = max(stop - start, 1)
        if _storage(group, self._is_exact(tensor, spec)).tensor is None:  # it is in a file
            step = min(step, _WINDOW_NUMEL)
        for low in range(start, stop, step):
            for block in blocks_of(param, (low, min(low + step, stop)), place.tp, owned_only=once):
                yield block.rect, self._values(_Piece(tensor, block.rect, block))

    def gather(self, tensors: Sequence[ModelTensor], receivers: Sequence[int]) -> dict[str, Tensor] | None:
        """Return tensors whole, by name, on the ranks that receive them, else None. All ranks call it."""
        comm, rank = self._comm, self._comm.rank
        for name in dict.fromkeys(each.place[0].name for each in tensors if each.place is not None):
            if name in self._groups:
                _make_present(self._groups[name])
        whole: dict[str, Tensor] | None = None
        if rank in receivers:
            whole = {each.name: torch.empty(each.shape, dtype=each.dtype, device=comm.device) for each in tensors}
        sends, packed = dict[int, list[Tensor]](), dict[tuple[tuple[str, Rect], ...], list[Tensor]]()
        for receiver in receivers:
            pieces = list(self._pieces(tensors, rank, receiver))
            if receiver == rank and whole is not None:
                for piece in pieces:
                    _part(whole, piece).copy_(self._values(piece))
            elif pieces:
                key = tuple((piece.tensor.name, piece.rect) for piece in pieces)
                if key not in packed:
                    packed[key] = self._pack(pieces)
                sends[receiver] = packed[key]
        arrivals: list[Callable[[], None]] = []
        receives = dict[int, list[Tensor]]()
        for source in range(comm.world_size) if whole is not None else ():
            pieces = [] if source == rank else list(self._pieces(tensors, source, rank))
            if pieces and whole is not None:
                receives[source], unpack = _receive(pieces, whole, comm.device)
                arrivals.append(unpack)
        if comm.world_size > 1:
            comm.exchange(sends, receives, f"weights from {tensors[0].name} on", stream=None).wait()
        for unpack in arrivals:
            unpack()
        return whole

    def _coordinates(self, group: GroupSpec) -> list[Coordinate]:
        """Return the coordinate of every rank on the mesh of a group."""
        mesh = self._layout.mesh.experts if group.is_experts else self._layout.mesh
        if group.is_experts not in self._places:
            self._places[group.is_experts] = [mesh.coordinate(rank) for rank in range(mesh.world_size)]
        return self._places[group.is_experts]

    def _is_exact(self, tensor: ModelTensor, group: GroupSpec) -> bool:
        """Say whether values come from the optimizer's copy: for another dtype, or where parameters are decoded."""
        stage, policy = self._layout.stage_of(group), self._layout.precision_of(group)
        is_released = stage.unshard_for_use and not group.is_stored_whole
        is_decoded = self._layout.gather_codec(group) is not None and not is_released
        return tensor.dtype != torch_dtype(policy.param) or is_decoded

    def _routes(self, tensor: ModelTensor) -> GroupRoutes:
        assert tensor.place is not None, "a buffer has no group"
        group, stage = tensor.place[0], self._layout.stage_of(tensor.place[0])
        if self._is_exact(tensor, group):
            is_whole = stage.optimizer is Placement.REPLICATE
        else:
            is_whole = group.is_stored_whole or not stage.unshard_for_use
        return GroupRoutes.of(self._layout, group, is_whole)

    def _pieces(self, tensors: Sequence[ModelTensor], source: int, receiver: int) -> Iterator[_Piece]:
        """Yield what one rank sends another one, in the order of the message."""
        for tensor in tensors:
            if tensor.place is None:
                if source == tensor.source and 0 not in tensor.shape:
                    yield _Piece(tensor, Rect.whole(tensor.shape), None)
                continue
            group, param = tensor.place
            routes, places = self._routes(tensor), self._coordinates(group)
            if routes.sends(param, places[source], places[receiver]):
                held, owned_only = routes.held(places[source]), not param.split.is_whole
                for block in blocks_of(param, held, places[source].tp, owned_only=owned_only):
                    yield _Piece(tensor, block.rect, block)

    def _values(self, piece: _Piece) -> Tensor:
        """Return the values of this rank's piece, as they are stored."""
        if piece.block is None or piece.tensor.place is None:
            return self._buffers[piece.tensor.name].detach()
        block, spec = piece.block, piece.tensor.place[0]
        group = self._groups[spec.name]
        flat = _flat(group, block.offset, block.box.numel, self._is_exact(piece.tensor, spec))
        return flat.view(block.box.shape)[block.inside.slices_in(block.box)]

    def _pack(self, pieces: Sequence[_Piece]) -> list[Tensor]:
        """Return what is sent: pieces that are received in their place, and a message with the others."""
        sent, device = [], self._comm.device
        for piece in pieces:
            if piece.flat_start is not None:
                sent.append(self._values(piece).to(device, piece.tensor.dtype).reshape(-1))
        message, views = _message(pieces, device)
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


def _part(whole: Mapping[str, Tensor], piece: _Piece) -> Tensor:
    return whole[piece.tensor.name][piece.rect.slices_in(Rect.whole(piece.tensor.shape))]


def _message(pieces: Sequence[_Piece], device: torch.device) -> tuple[Tensor, list[tuple[_Piece, Tensor]]]:
    """Return a message with space for the pieces that are not received in their place, each with its view of it."""
    small = [piece for piece in pieces if piece.flat_start is None]
    num_bytes = [piece.rect.numel * piece.tensor.dtype.itemsize for piece in small]
    sizes = [-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in num_bytes]
    message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    views = [
        (piece, part[:size].view(piece.tensor.dtype).view(piece.rect.shape))
        for piece, part, size in zip(small, message.split(sizes), num_bytes, strict=True)
    ]
    return message, views


def _receive(
    pieces: Sequence[_Piece], whole: Mapping[str, Tensor], device: torch.device
) -> tuple[list[Tensor], Callable[[], None]]:
    """Return what one rank's pieces are received into, and what brings those of the message to their places."""
    placed = []
    for piece in pieces:
        if (start := piece.flat_start) is not None:
            placed.append(whole[piece.tensor.name].view(-1)[start : start + piece.rect.numel])
    message, views = _message(pieces, device)

    def unpack() -> None:
        for piece, view in views:
            _part(whole, piece).copy_(view)

    return ([*placed, message] if message.numel() else placed), unpack
