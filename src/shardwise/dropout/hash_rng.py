"""Draws the bits of a mask: hashes of a key and of an element's indices in the unsplit tensor.

All but the last index go into a 64-bit hash for each row; the last is combined with it in three operations on int32, so
that a mask costs little more than writing it. Overflow wraps, on every device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from shardwise.layout.token_ranges import Runs, count_tokens, part
from shardwise.runtime.kernels import has_kernels


@dataclass(frozen=True)
class ShardRegion:
    """Says which part of a split tensor a rank holds.

    Attributes:
        dim: along which the tensor is split; it may be negative.
        degree: number of parts, of equal sizes.
    """

    dim: int
    index: int
    degree: int


@dataclass(frozen=True)
class Samples:
    """Counts the samples that a forward computes, of all samples in the step: `num` from number `first` on."""

    first: int
    num: int


@dataclass(frozen=True)
class Tokens:
    """Says which part of a sequence, dim 1, a forward is called with: `num` of `total` from number `first` on."""

    first: int
    num: int
    total: int


@dataclass(frozen=True)
class HashGrid:
    """Holds hashes of the indices of a tensor, common to all draws for it.

    Attributes:
        rows: of all indices but the last, flat; [number of rows], int64.
        columns: of the last index; [columns], int32.
    """

    rows: Tensor
    columns: Tensor


@dataclass(frozen=True, eq=False)
class Hashes:
    """Holds a key's hashes for a tensor; `keyed_mask` defines which elements they keep.

    Attributes:
        factors: int32 [number of rows], all odd; `offsets` are int32 [number of rows], and `columns` int32 [columns].
    """

    factors: Tensor
    offsets: Tensor
    columns: Tensor


def grid_of(
    shape: Sequence[int],
    zone: ShardRegion | None,
    samples: Samples,
    device: torch.device,
    first_row: int = 0,
    tokens: Tokens | None = None,
    held: Runs | None = None,
) -> HashGrid:
    """Hash the indices of a tensor by its place in the unsplit tensor of the whole batch.

    Args:
        shape: of the tensor; dim 0 is of samples. Where it is a multiple n of their number, each has n rows in a run.
        zone: this rank's part of the tensor; None where the tensor is whole.
        first_row: index of the first row of the last dim but one, as when only a sequence's last queries are computed.
        tokens: the part of the zone's tokens that dim 1 holds; None where it holds all.
        held: the tokens of the sequence that dim 1 has, over all parts, if there are 3 or more dims and that many
            tokens; None for all.
    """
    sizes = list(shape) + [1] * max(0, 2 - len(shape))
    starts = [0] * len(sizes)
    num_rows = sizes[0]
    if zone is not None:
        dim = zone.dim % max(1, len(shape))
        starts[dim] = zone.index * (sizes[dim] if dim != 1 or tokens is None else tokens.total)
        num_rows *= zone.degree if dim == 0 else 1
    starts[-2] += first_row
    if tokens is not None:
        starts[1] += tokens.first
    is_per_sample = num_rows % samples.num == 0
    starts[0] += samples.first * (num_rows // samples.num if is_per_sample else 1)
    ranges: list[Runs] = [((start, start + size),) for start, size in zip(starts, sizes, strict=True)]
    degree = 1 if zone is None or zone.dim % max(1, len(shape)) != 1 else zone.degree
    num_held = (sizes[1] if tokens is None else tokens.total) * degree
    if held is not None and len(shape) >= 3 and count_tokens(held) == num_held:
        ranges[1] = part(held, starts[1], starts[1] + sizes[1])
    return hash_grid(ranges, device)


def hash_grid(ranges: Sequence[Runs], device: torch.device) -> HashGrid:
    """Hash the indices of a tensor whose dims, at least two, have the indices of `ranges` in the unsplit tensor."""
    rows, last = hash_rows(ranges, device)
    return HashGrid(rows, mix(last).view(torch.int32)[1::2].contiguous())


def hash_rows(ranges: Sequence[Runs], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the hashes of all indices but the last, flat, and what the last one adds; of at least two dims."""
    spans = [
        torch.cat([torch.arange(start + 1, stop + 1, device=device) for start, stop in runs]).mul_(GOLDEN)
        for runs in ranges
    ]
    rows = mix(spans[0])
    for span in spans[1:-1]:
        rows = mix(rows[:, None] + span).reshape(-1)  # [rows so far, size], then flat
    return rows, spans[-1]


def keyed_mask(grid: HashGrid, key: int, p: float) -> Tensor:
    """Draw the elements that a dropout keeps, in one op: selective checkpointing asks its policy about each op.

    A row's hash gives an odd factor a and an offset b; an element with the hash e has x = a * e + b and the number
    x (2 x + 1), a permutation of the 32-bit numbers whose upper bits depend on all of x (Rivest et al. 1998, RC6).

    Args:
        key: of 63 bits; names the draw.
        p: the rate; between 0 and 1.

    Returns:
        [rows, columns] of bools, True with probability 1 - p.
    """
    mask: Tensor = torch.ops.shardwise.keyed_mask(grid.rows, grid.columns, key, p)
    return mask


def keyed_dropout(values: Tensor, grid: HashGrid, key: int, p: float) -> Tensor:
    """Drop values by the mask of `keyed_mask`, and scale what is kept; no mask is stored.

    Args:
        values: of the shape that the grid is of.
        key: of 63 bits; names the draw.
        p: the rate; between 0 and 1.
    """
    dropped: Tensor = Dropped.apply(values, grid.rows, grid.columns, key, p)
    return dropped


def keyed_hashes(grid: HashGrid, key: int) -> Hashes:
    """Return the hashes by which `keyed_mask` draws, for callers that make no mask.

    Args:
        key: of 63 bits; names the draw.
    """
    factors, offsets = torch.ops.shardwise.keyed_hashes(grid.rows, key)
    return Hashes(factors, offsets, grid.columns)


def keep_threshold(p: float) -> int:
    """Return the signed 32-bit number below which a drawn number means that the element is kept."""
    return min(round((1.0 - p) * 2.0**32) - 2**31, 2**31 - 1)


def _row_hashes(rows: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Return factors and offsets, [rows, 1] each: views of one tensor."""
    mixed = (rows ^ key).mul_(FIRST)
    halves = mixed.view(torch.int32).view(-1, 2)  # [rows, 2]: the lower and the upper bits
    lower, upper = halves[:, :1], halves[:, 1:]  # [rows, 1] each
    lower ^= upper
    mixed.mul_(SECOND)
    lower ^= upper
    return upper | 1, lower


def _keyed_hashes(rows: Tensor, key: int) -> tuple[Tensor, Tensor]:
    factors, offsets = _row_hashes(rows, key)
    return factors.view(-1), offsets.reshape(-1).clone()


def _keyed_mask(rows: Tensor, columns: Tensor, key: int, p: float) -> Tensor:
    mask = torch.empty(rows.numel(), columns.numel(), dtype=torch.bool, device=rows.device)  # [rows, columns]
    for chunk, numbers in _drawn_numbers(rows, columns, key):
        torch.lt(numbers, keep_threshold(p), out=mask[chunk])
    return mask


def _drawn_numbers(rows: Tensor, columns: Tensor, key: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield some rows at a time and their numbers, int32 [rows, columns], in the same memory each time."""
    num_rows, num_columns, device = rows.numel(), columns.numel(), rows.device
    factors, offsets = _row_hashes(rows, key)  # [rows, 1] each
    num_elements = _CHUNK_ELEMENTS if device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
    step = max(1, min(num_rows, num_elements // num_columns))
    space = torch.empty(step, num_columns, dtype=torch.int32, device=device)  # [rows of a chunk, columns]
    for first in range(0, num_rows, step):
        chunk = slice(first, first + step)
        numbers = space[: num_rows - first]  # [rows of this chunk, columns]
        torch.mul(columns, factors[chunk], out=numbers)
        yield chunk, numbers.add_(offsets[chunk]).addcmul_(numbers, numbers, value=2)


def _keyed_dropout(values: Tensor, rows: Tensor, columns: Tensor, key: int, p: float) -> Tensor:
    close = values.contiguous()
    dropped = torch.empty_like(close)
    if has_kernels(values.device) and values.is_floating_point():
        from shardwise.dropout import triton_dropout  # it needs Triton

        triton_dropout.drop_launch(close, dropped, rows, columns, key, p).run()
    else:
        source, result = (tensor.view(rows.numel(), columns.numel()) for tensor in (close, dropped))
        for chunk, numbers in _drawn_numbers(rows, columns, key):
            # A product with 0 or 1 and one with the scale, as in torch's own dropout: a zero keeps its sign.
            torch.mul(source[chunk], numbers.lt_(keep_threshold(p)), out=result[chunk]).mul_(1.0 / (1.0 - p))
    return dropped if close is values else torch.empty_like(values).copy_(dropped)


_LIBRARY: Final = torch.library.Library("shardwise", "FRAGMENT")
_LIBRARY.define("keyed_mask(Tensor rows, Tensor columns, int key, float p) -> Tensor")
_LIBRARY.impl("keyed_mask", _keyed_mask, "CompositeExplicitAutograd")
_LIBRARY.define("keyed_dropout(Tensor values, Tensor rows, Tensor columns, int key, float p) -> Tensor")
_LIBRARY.impl("keyed_dropout", _keyed_dropout, "CompositeExplicitAutograd")
_LIBRARY.define("keyed_hashes(Tensor rows, int key) -> (Tensor, Tensor)")
_LIBRARY.impl("keyed_hashes", _keyed_hashes, "CompositeExplicitAutograd")


@torch.library.register_fake("shardwise::keyed_dropout", lib=_LIBRARY)
def _fake_dropout(values: Tensor, rows: Tensor, columns: Tensor, key: int, p: float) -> Tensor:
    return torch.empty_like(values)


@torch.library.register_fake("shardwise::keyed_hashes", lib=_LIBRARY)
def _fake_hashes(rows: Tensor, key: int) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape, dtype=torch.int32), rows.new_empty(rows.shape, dtype=torch.int32)


_CHUNK_ELEMENTS: Final = 1 << 16  # on the CPU: 256 KiB of int32, which stay in the cache of a core
_DEVICE_CHUNK_ELEMENTS: Final = 1 << 26  # elsewhere: bounds the memory that a mask takes while it is drawn
# The odd constants of splitmix64 (Steele et al. 2014), as signed numbers.
GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)
FIRST: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND: Final = 0x94D049BB133111EB - (1 << 64)


def mix(numbers: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64 (Steele et al. 2014, figure 17) in place; int64, arithmetic modulo 2^64."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        numbers ^= (numbers >> shift) & ((1 << (64 - shift)) - 1)
        numbers *= factor
    numbers ^= (numbers >> 31) & ((1 << 33) - 1)
    return numbers


class Masked(torch.autograd.Function):
    """Computes values * mask * scale, and keeps only the mask for the backward: one byte for each element."""

    @staticmethod
    def forward(values: Tensor, mask: Tensor, scale: float) -> Tensor:
        masked: Tensor = torch.ops.aten.native_dropout_backward(values, mask, scale)
        return masked

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        _, mask, ctx.scale = inputs
        ctx.save_for_backward(mask)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return Masked.apply(gradients[0], mask, ctx.scale), None, None


class Dropped(torch.autograd.Function):
    """Computes a keyed dropout, of which the backward draws the mask again: it keeps the grid, which draws share."""

    @staticmethod
    def forward(values: Tensor, rows: Tensor, columns: Tensor, key: int, p: float) -> Tensor:
        dropped: Tensor = torch.ops.shardwise.keyed_dropout(values, rows, columns, key, p)
        return dropped

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int, float], output: Tensor) -> None:
        _, rows, columns, ctx.key, ctx.p = inputs
        ctx.save_for_backward(rows, columns)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return Dropped.apply(gradients[0], *ctx.saved_tensors, ctx.key, ctx.p), None, None, None, None


def probability_hashes(shape: Sequence[int], device: torch.device, first_row: int = 0) -> Hashes:
    """Return the hashes by which attention without a mask drops probabilities: those of a site, or new ones.

    New ones come from torch's generator for the CPU, which checkpoints restore for recomputations. Modes that act on
    torch's functions can act on this one (`torch.overrides`).

    Args:
        shape: [samples, heads, queries, keys]; none of them is 0.
        first_row: the position of the first query.
    """
    # Dropout in compiled blocks is torch's own, and its keys are drawn where it runs.
    if not torch.compiler.is_compiling() and has_torch_function((None,)):
        hashes: Hashes = handle_torch_function(probability_hashes, (), shape, device, first_row)
        return hashes
    key = torch.randint(2**62, (), device="cpu")
    grid = grid_of(shape, None, Samples(0, shape[0]), device, first_row)
    return keyed_hashes(HashGrid(grid.rows ^ key, grid.columns), 0)
