"""Draws the numbers of torch's distributions by keys: a hash of 64 bits for each element of the unsplit tensor.

A tensor's dims are given as runs of indices in the unsplit tensor, so that a rank with some tokens, a chunk of them or
a part of the features draws what one process draws there.

>>> whole = draw_uniform(number_grid([((0, 2),), ((0, 8),)], torch.device("cpu")), 7, torch.float64)
>>> part = draw_uniform(number_grid([((0, 2),), ((2, 4), (6, 8))], torch.device("cpu")), 7, torch.float64)
>>> torch.equal(part, whole[:, [2, 3, 6, 7]])
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from shardwise.dropout.hash_rng import Samples, ShardRegion, Tokens, hash_rows, mix
from shardwise.layout.token_ranges import Runs, count_tokens, part, shift
from shardwise.runtime.torch_private import in_fake_mode

_CHUNK_ELEMENTS: Final = 1 << 15  # on the CPU: the hashes stay in the cache of a core
_DEVICE_CHUNK_ELEMENTS: Final = 1 << 25
_LARGEST: Final = (1 << 63) - 1


@dataclass(frozen=True)
class SequencePart:
    """Says which tokens of a sequence a forward computes."""

    tokens: Runs
    length: int


@dataclass(frozen=True, eq=False)
class NumberGrid:
    """Holds what the indices of a tensor's elements add to their hashes.

    Attributes:
        rows: of all indices but the last, flat; [rows], int64.
        columns: of the last index; [columns], int64.
    """

    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class TensorPlace:
    """Says where a tensor is in the unsplit one.

    Attributes:
        spans: of each dim, the indices there; at least two dims.
        token_dim: that has tokens of which this rank has not all, also where dim 0 has those of all samples; else None.
    """

    spans: tuple[Runs, ...]
    token_dim: int | None
    sizes: tuple[int, ...]


def place_of(
    shape: Sequence[int],
    zone: ShardRegion | None,
    samples: Samples,
    sequence: SequencePart | None,
    chunk: Tokens | None = None,
) -> TensorPlace:
    """Find the place of a tensor that a forward draws: by its sizes, since nothing else says which dim has tokens.

    Args:
        zone: this rank's part of the tensors of the module that draws; None where they are whole. A dim of size 1 is
            whole, and so is one of all tokens.
        samples: that the forward computes. Where dim 0 is a multiple n of their number, each has n rows in a run.
        sequence: the tokens that the forward computes; None where they are not known.
        chunk: the part of them with which the module is called.
    """
    sizes = [*shape] + [1] * max(0, 2 - len(shape))
    spans: list[Runs] = [((0, size),) for size in sizes]
    split_dim = None if zone is None else zone.dim % max(1, len(shape))
    if sequence is None and chunk is not None:
        total = chunk.total * (zone.degree if zone is not None and zone.dim == 1 else 1)
        sequence = SequencePart(((0, total),), total)
    tokens: Runs = ()
    token_dim, is_flat, is_cut = None, False, False
    for tokens, is_zoned in _candidates(zone, sequence, chunk):
        num = count_tokens(tokens)
        token_dim, is_flat = _token_dim(shape, samples.num, num)
        if token_dim is not None and sequence is not None:
            is_cut = num < sequence.length
            split_dim = None if is_zoned or split_dim == token_dim else split_dim
            break
    if token_dim is not None and sequence is not None:
        spans[token_dim], sizes[token_dim] = tokens, sequence.length
    elif sequence is not None and zone is not None and zone.dim == 1 and len(shape) < 3:
        split_dim = None  # it has no tokens, as one number for each sample
    if zone is not None and split_dim is not None and sizes[split_dim] > 1:
        start = zone.index * sizes[split_dim]
        spans[split_dim] = shift(spans[split_dim], start)
        sizes[split_dim] *= zone.degree
    if is_flat:
        places = range(samples.first, samples.first + samples.num)
        spans[0] = tuple(run for sample in places for run in shift(tokens, sample * sizes[0]))
        sizes[0] *= samples.num
    else:
        is_per_sample = sizes[0] % samples.num == 0
        spans[0] = shift(spans[0], samples.first * (sizes[0] // samples.num if is_per_sample else sizes[0]))
    return TensorPlace(tuple(spans), token_dim if is_cut else None, tuple(sizes))


def _candidates(
    zone: ShardRegion | None, sequence: SequencePart | None, chunk: Tokens | None
) -> list[tuple[Runs, bool]]:
    """Return the tokens that a tensor may have, and whether the zone has been taken into account."""
    if sequence is None:
        return []
    slices = [(sequence.tokens, False)]
    num, remainder = divmod(count_tokens(sequence.tokens), 1 if zone is None else zone.degree)
    if zone is not None and zone.dim == 1 and not remainder:
        slices.insert(0, (part(sequence.tokens, zone.index * num, (zone.index + 1) * num), True))
    if chunk is not None:
        slices = [(part(tokens, chunk.first, chunk.first + chunk.num), zoned) for tokens, zoned in slices] + slices
    return slices


def _token_dim(shape: Sequence[int], num_samples: int, num: int) -> tuple[int | None, bool]:
    """Return the dim that has `num` tokens; True where dim 0 has those of all samples, one after the other."""
    if num <= 1:
        return None, False
    if len(shape) > 2 and shape[1] == num:
        return 1, False
    if len(shape) > 0 and shape[0] == num_samples * num:
        return 0, True
    if len(shape) > 1 and shape[1] == num:
        return 1, False
    return next((dim for dim, size in enumerate(shape) if size == num), None), False


def number_grid(spans: Sequence[Runs], device: torch.device) -> NumberGrid:
    """Hash the indices of a tensor whose dims have the indices of `spans`."""
    return NumberGrid(*hash_rows(spans, device))


def draw_bits(grid: NumberGrid, key: int) -> Tensor:
    """Draw whole numbers from 0 on, of 63 bits; [rows, columns], int64."""
    return _draw(grid, key, torch.int64, lambda words: words & _LARGEST)


def draw_uniform(grid: NumberGrid, key: int, dtype: torch.dtype) -> Tensor:
    """Draw from 0 up to below 1, [rows, columns].

    Args:
        key: of 63 bits; names the draw.
        dtype: of the numbers, which have as many bits as it has.
    """
    return _draw(grid, key, dtype, partial(_to_uniform, dtype=dtype))


def draw_normal(grid: NumberGrid, key: int, dtype: torch.dtype) -> Tensor:
    """Draw with mean 0 and deviation 1 (Box and Muller 1958); the arguments are those of `draw_uniform`."""
    return _draw(grid, key, dtype, partial(_to_normal, dtype=_computed(dtype)))


def draw_exponential(grid: NumberGrid, key: int, dtype: torch.dtype) -> Tensor:
    """Draw with mean 1, above 0; the arguments are those of `draw_uniform`."""
    return _draw(grid, key, dtype, partial(_to_exponential, dtype=_computed(dtype)))


def _draw(grid: NumberGrid, key: int, dtype: torch.dtype, transform: Callable[[Tensor], Tensor]) -> Tensor:
    num_rows, num_columns, device = grid.rows.numel(), grid.columns.numel(), grid.rows.device
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=device)
    if in_fake_mode() or device.type == "meta" or not out.numel():
        return out
    rows = mix(grid.rows ^ key)
    num_elements = _CHUNK_ELEMENTS if device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
    step = max(1, min(num_rows, num_elements // num_columns))
    for first in range(0, num_rows, step):
        chunk = slice(first, first + step)
        out[chunk] = transform(mix(rows[chunk, None] + grid.columns))  # [rows of a chunk, columns]
    return out


def _to_uniform(words: Tensor, dtype: torch.dtype) -> Tensor:
    bits = MANTISSA_BITS[dtype]
    return _upper(words, bits).to(dtype).mul_(2.0**-bits)


def _to_normal(words: Tensor, dtype: torch.dtype) -> Tensor:
    radius = _upper(words, 32).to(dtype).add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).clamp_min_(0.0).sqrt_()
    return (words & 0xFFFFFFFF).to(dtype).mul_(2.0 * math.pi * 2.0**-32).cos_().mul_(radius)


def _to_exponential(words: Tensor, dtype: torch.dtype) -> Tensor:
    bits = MANTISSA_BITS[dtype] - 1  # with the half that is added a number has as many bits as the dtype
    return _upper(words, bits).to(dtype).add_(0.5).mul_(2.0**-bits).log_().neg_()


def _upper(words: Tensor, bits: int) -> Tensor:
    return (words >> (64 - bits)) & ((1 << bits) - 1)


def _computed(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


MANTISSA_BITS: Final[Mapping[torch.dtype, int]] = {
    torch.float64: 53,
    torch.float32: 24,
    torch.float16: 11,
    torch.bfloat16: 8,
}
