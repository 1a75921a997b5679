"""Drop by a key in one Triton kernel: it hashes, compares and scales in one pass, and stores no mask.

The bits are those of `shardwise.dropout.hash_rng`, and so are those of the result.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from shardwise.dropout.hash_rng import FIRST, SECOND, keep_threshold
from shardwise.runtime.kernels import KernelLaunch

_PROGRAM_NUMEL: Final = 4096
_MOST_COLUMNS: Final = 256
_NUM_WARPS: Final = 4
_FIRST = tl.constexpr(FIRST)
_SECOND = tl.constexpr(SECOND)


class Table(NamedTuple):
    """Holds pointers to values [rows, columns] that are contiguous, to the result, and to the hashes of the indices."""

    source: Any
    out: Any
    row_hashes: Any
    column_hashes: Any
    num_rows: int
    num_columns: int


class Tile(NamedTuple):
    """Counts the rows and columns of a program, for which the kernel is compiled."""

    ROWS: int
    COLUMNS: int


def drop_launch(values: Tensor, out: Tensor, rows: Tensor, columns: Tensor, key: int, p: float) -> KernelLaunch:
    """Return the launch that writes into `out` what a dropout of rate p keeps of `values`, scaled; both are contiguous.

    Args:
        rows: int64 hashes of all indices but the last, and `columns`, int32, those of the last one.
    """
    num_rows, num_columns = rows.numel(), columns.numel()
    width = min(triton.next_power_of_2(num_columns), _MOST_COLUMNS)
    tile = Tile(_PROGRAM_NUMEL // width, width)
    table = Table(values, out, rows, columns, num_rows, num_columns)
    # The kernel takes a double by its bits: as a float argument it would be rounded to fp32.
    (scale,) = struct.unpack("<q", struct.pack("<d", 1.0 / (1.0 - p)))
    grid = (triton.cdiv(num_rows, tile.ROWS) * triton.cdiv(num_columns, tile.COLUMNS), 1, 1)
    return KernelLaunch(_drop, grid, (table, key, keep_threshold(p), scale, tile), _NUM_WARPS, 1)


@triton.jit(do_not_specialize=["key", "threshold", "scale"])
def _drop(table: tl.tuple, key: tl.tensor, threshold: tl.tensor, scale: tl.tensor, tile: tl.constexpr) -> None:
    """Drop a tile of a program."""
    in_row = tl.cdiv(table.num_columns, tile.COLUMNS)
    rows = (tl.program_id(0) // in_row).to(tl.int64) * tile.ROWS + tl.arange(0, tile.ROWS)
    columns = tl.program_id(0) % in_row * tile.COLUMNS + tl.arange(0, tile.COLUMNS)
    is_row, is_column = rows < table.num_rows, columns < table.num_columns
    factors, offsets = _row_hashes(tl.load(table.row_hashes + rows, mask=is_row, other=0), key)
    hashes = tl.load(table.column_hashes + columns, mask=is_column, other=0)
    x = factors[:, None] * hashes[None, :] + offsets[:, None]
    kept = x * (2 * x + 1) < threshold
    is_there = is_row[:, None] & is_column[None, :]
    at = rows[:, None] * table.num_columns + columns[None, :]
    values = tl.load(table.source + at, mask=is_there, other=0.0)
    wide: tl.constexpr = tl.float64 if values.dtype == tl.float64 else tl.float32
    # A product, as in torch's own dropout: what is not finite stays so, and a zero keeps its sign.
    values = values.to(wide) * kept.to(wide) * scale.to(tl.float64, bitcast=True).to(wide)
    tl.store(table.out + at, values.to(table.out.dtype.element_ty), mask=is_there)


@triton.jit
def _row_hashes(rows: tl.tensor, key: tl.tensor) -> tl.tuple:
    """Return the factor and the offset of each row, int32, as `hash_rng` does."""
    mixed = (rows ^ key) * _FIRST
    upper = (mixed >> 32).to(tl.int32)
    lower = mixed.to(tl.int32) ^ upper
    mixed = ((upper.to(tl.int64) << 32) | (lower.to(tl.int64) & 0xFFFFFFFF)) * _SECOND
    upper = (mixed >> 32).to(tl.int32)
    return upper | 1, mixed.to(tl.int32) ^ upper
