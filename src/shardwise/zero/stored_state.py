"""Store one of the optimizer's states for a group's slice in its tier: as values, or encoded (`precision.states`).

Codes are stored in the optimizer's tier, one for each element of the slice, so that a chunk of the step opens them as
it opens values. Scales, 1/64 of the bytes of fp32, and the values of parameters of few elements are stored beside them
on the device, or else in host memory. Checkpoints read and write decoded values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.config.resolve import Tier
from shardwise.layout.codec import Codec, Encoded, codec_of
from shardwise.layout.precision import BLOCK_NUMEL, StatesDtype, is_encoded
from shardwise.offload.storage import StateStorage
from shardwise.offload.tiers import Tiers
from shardwise.runtime.memory_tracker import Category
from shardwise.runtime.precision import torch_dtype
from shardwise.runtime.state_shards import FlatSlice, FlatState
from shardwise.zero.param_group import ParamGroup


@dataclass(frozen=True, eq=False)
class ParamPiece:
    """A parameter's piece is its part in this rank's slice of a group.

    Attributes:
        group: the group that it belongs to.
        view: 1-D view of the master, which the optimizer sees; empty where the optimizer is stored off the device.
        start: the first element of the piece, in the slice.
    """

    name: str
    group: ParamGroup
    view: nn.Parameter
    start: int
    stop: int


class EncodedValues:
    """Makes the codes and scales of a piece a `FlatState` of decoded values.

    What is written of a part of a block is kept until all of the block is there, since it is encoded as a whole.

    Args:
        scales: of its blocks; None where the codec has none.
    """

    tensor: Tensor | None = None
    dtype = torch.float32

    def __init__(self, codec: Codec, codes: FlatState, scales: FlatState | None) -> None:
        self.numel = codes.numel
        self._codec = codec
        self._codes = codes
        self._scales = scales
        self._block = 1 if scales is None else BLOCK_NUMEL
        self._partial: dict[int, tuple[Tensor, int]] = {}  # by its start: a block's values, how many were written

    def read(self, start: int, stop: int) -> Tensor:
        """Return the elements [start, stop), decoded."""
        first, last = start // self._block * self._block, self._block_stop(stop)
        scales = None if self._scales is None else self._scales.read(first // self._block, -(-last // self._block))
        values = Encoded(self._codec, self._codes.read(first, last), scales).decode()
        for low, (written, _) in self._partial.items():
            if first <= low < last:
                values[low - first : low - first + written.numel()] = written
        return values[start - first : stop - first]

    def write(self, start: int, values: Tensor) -> None:
        """Replace the elements from `start` on; a block is encoded once as many have been written as it has."""
        stop = start + values.numel()
        first = min(self._block_stop(start), stop)
        last = stop if stop == self.numel else max(first, stop // self._block * self._block)
        if start < first:
            self._write_partial(start, values[: first - start])
        if first < last:
            self._encode(first, values[first - start : last - start])
        if last < stop:
            self._write_partial(last, values[last - start :])

    def part(self, start: int, stop: int) -> FlatState:
        """Return the elements [start, stop)."""
        return FlatSlice(self, start, stop)

    def settle(self) -> None:
        """Encode the blocks of which a part was written; the other elements stay, up to their rounding."""
        for low, (written, _) in list(self._partial.items()):
            self._encode(low, written)

    def _block_stop(self, stop: int) -> int:
        """Return the border of blocks at `stop` or above it."""
        return min(-(-stop // self._block) * self._block, self.numel)

    def _write_partial(self, start: int, values: Tensor) -> None:
        low = start // self._block * self._block
        if low not in self._partial:
            self._partial[low] = (self.read(low, self._block_stop(low + 1)), 0)
        block, num_before = self._partial[low]
        block[start - low : start - low + values.numel()].copy_(values)
        num_written = num_before + values.numel()
        self._partial[low] = (block, num_written)
        if num_written >= block.numel():
            self._encode(low, block)

    def _encode(self, start: int, values: Tensor) -> None:
        stored = self._codes.tensor
        device = torch.device("cpu") if stored is None else stored.device
        encoded = self._codec.empty(values.numel(), device)
        encoded.encode(values.to(device, torch.float32, copy=True))
        self._codes.write(start, encoded.codes)
        if self._scales is not None and encoded.scales is not None:
            self._scales.write(start // self._block, encoded.scales)
        for low in [low for low in self._partial if start <= low < start + values.numel()]:
            del self._partial[low]


class GroupState:
    """Stores one state of a group's pieces.

    Args:
        pieces: the parameters' pieces in this rank's slice.

    Attributes:
        whole: the values or codes of the slice, in the optimizer's tier.
    """

    def __init__(
        self, name: str, group: ParamGroup, pieces: Sequence[ParamPiece], dtype: StatesDtype, tiers: Tiers
    ) -> None:
        spec, numel, values_dtype = group.spec, group.master.numel, group.master.dtype
        self._codec = codec_of(name, dtype) if spec.has_large else None
        tier, where, kind = spec.tiers.optimizer, f"{spec.name}.{name}", Category.OPTIMIZER
        own_dtype = values_dtype if self._codec is None else torch_dtype(self._codec.dtype)
        self.whole: StateStorage = tiers.place(tier, where, numel, own_dtype, kind)
        self._scales: StateStorage | None = None
        self._small: StateStorage | None = None
        self._starts: dict[str, int] = {}  # in `_small`
        if self._codec is not None:
            near: Tier = "device" if tier == "device" else "host"
            if num_scales := self._codec.num_scales(numel):
                self._scales = tiers.place(near, f"{where}.scales", num_scales, torch.float32, kind)
            large = {place.name for place in spec.params if is_encoded(place.global_shape)}
            num_small = 0
            for piece in pieces:
                if piece.name not in large:
                    self._starts[piece.name] = num_small
                    num_small += piece.stop - piece.start
            self._small = tiers.place(near, f"{where}.small", num_small, values_dtype, kind) if num_small else None
        self._flats = {piece.name: self._flat_of(piece) for piece in pieces}

    @property
    def storages(self) -> list[StateStorage]:
        """Return all storages."""
        return [stored for stored in (self.whole, self._scales, self._small) if stored is not None]

    def of_piece(self, piece: ParamPiece) -> FlatState:
        """Return the values of a piece."""
        return self._flats[piece.name]

    def to_step(self, piece: ParamPiece, start: int, stop: int, stored: Tensor) -> Tensor | Encoded:
        """Return what a step updates in place of the range [start, stop) of the slice, which is in the piece.

        Args:
            start: the first element; the border of a block.
            stored: these elements of `whole`, in memory.
        """
        if self._small is not None and piece.name in self._starts:
            shift = self._starts[piece.name] - piece.start
            return self._small.read(start + shift, stop + shift)
        if self._codec is None:
            return stored
        scales = None
        if self._scales is not None:
            scales = self._scales.read(start // BLOCK_NUMEL, -(-stop // BLOCK_NUMEL))
        return Encoded(self._codec, stored, scales)

    def encodes(self, piece: ParamPiece) -> bool:
        """Say whether the values of a piece are encoded."""
        return self._codec is not None and piece.name not in self._starts

    def settle(self, piece: ParamPiece) -> None:
        """Encode what was written of a piece in parts, before it is stepped."""
        flat = self._flats[piece.name]
        if isinstance(flat, EncodedValues):
            flat.settle()

    def close(self) -> None:
        """Free the memory and the file."""
        for storage in self.storages:
            storage.close()

    def _flat_of(self, piece: ParamPiece) -> FlatState:
        start, stop = piece.start, piece.stop
        if self._small is not None and piece.name in self._starts:
            first = self._starts[piece.name]
            return self._small.part(first, first + stop - start)
        if self._codec is None:
            return self.whole.part(start, stop)
        scales = None
        if self._scales is not None:
            scales = self._scales.part(start // BLOCK_NUMEL, -(-stop // BLOCK_NUMEL))
        return EncodedValues(self._codec, self.whole.part(start, stop), scales)


def pieces_of(group: ParamGroup, *, has_shapes: bool) -> list[ParamPiece]:
    """Return the parameters' pieces in this rank's slice of a group.

    Args:
        has_shapes: whether views have the parameters' shapes, of which the rank has all. A parameter of one number
            has a view of one element: a state of no dimension is a number, such as the count of steps.
    """
    pieces = []
    for slot in group.spec.slots(group.shard_start, group.shard_stop):
        start, stop = slot.offset, slot.offset + slot.stop - slot.start
        view = torch.zeros((), dtype=group.master.dtype).expand(stop - start)  # it has a length and one number
        if group.spec.tiers.optimizer == "device":
            view = group.master.read(start, stop)
        shaped = view.view(slot.param.shape or (1,)) if has_shapes else view
        pieces.append(ParamPiece(slot.param.name, group, nn.Parameter(shaped), start, stop))
    return pieces


def place_state(optimizer: Optimizer, view: nn.Parameter, state: str, value: Tensor | float) -> None:
    """Write a state of one of torch's optimizer's parameters, or make it.

    Args:
        value: a number, or a tensor of as many elements as the state.
    """
    of_piece = optimizer.state[view]
    current = of_piece.get(state)
    if isinstance(current, Tensor):
        current.copy_(torch.as_tensor(value).view(current.shape))
    elif current is not None:
        of_piece[state] = type(current)(value.item() if isinstance(value, Tensor) else value)
    elif isinstance(value, Tensor):
        options = next(group for group in optimizer.param_groups if any(param is view for param in group["params"]))
        # torch keeps step counts on the host, except for kernels that read them on the device.
        is_on_host = not value.dim() and not (options.get("fused") or options.get("capturable"))
        kept = value.detach().to("cpu" if is_on_host else view.device, copy=True)
        of_piece[state] = kept.view(view.shape) if kept.dim() and kept.numel() == view.numel() else kept
    else:
        of_piece[state] = value
