"""Turn the tables of a layout into tensors and numbers of a plan and back; choose widths by head size and dtype.

This module is separate from `launch`, so that planning needs no Triton.

>>> from shardwise.attention.block_layout import BlockLayout
>>> layout = BlockLayout.from_blocks(torch.eye(2), block=64)
>>> plan = plan_of(layout, HeadGroups(4, 4), head_dim=64, dtype=torch.bfloat16, device=torch.device("cpu"))
>>> queries, keys = tables_in(plan)
>>> queries.tile, keys.tile, queries.num_items
(64, 64, 2)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwise.attention.backends import BackendPlan
from shardwise.attention.block_layout import BlockLayout
from shardwise.attention.triton.lut import ITEM_HEAD, HeadGroups, TileSide, best_width, tables_of


@dataclass(frozen=True, eq=False)
class DeviceLut:
    """Holds the tables of one side (`lut.Lut`) on the device, int32; a spare row at the end allows an early load."""

    items: Tensor
    full: Tensor
    partial: Tensor
    merges: Tensor
    tile: int
    entry: int
    run: int
    sub_block: int
    num_slots: int

    @property
    def num_items(self) -> int:
        return self.items.shape[1]

    @property
    def num_merges(self) -> int:
        return self.merges.shape[1]

    @property
    def num_lists(self) -> int:
        return (self.items.shape[2] - ITEM_HEAD) // 4


def plan_of(
    layout: BlockLayout,
    heads: HeadGroups,
    *,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    limit: int | None = None,
) -> BackendPlan:
    """Make the tables of queries, then those of keys."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    for of_queries in (True, False):
        width = best_width(layout, of_queries, *widest(head_dim, dtype, of_queries))
        tables = tables_of(layout, TileSide(of_queries, width), heads, limit)
        full, partial = (np.pad(table, ((0, 1), (0, 0))) for table in (tables.full, tables.partial))
        arrays = (tables.items, full, partial, tables.merges)
        tensors += [torch.from_numpy(array).to(device, torch.int32) for array in arrays]
        numbers += [width.tile, width.entry, tables.run, tables.sub_block, tables.num_slots]
    return BackendPlan(tuple(tensors), tuple(numbers))


def tables_in(plan: BackendPlan) -> tuple[DeviceLut, DeviceLut]:
    """Return the tables of queries and those of keys."""
    return _table(plan.tensors[:4], plan.numbers[:5]), _table(plan.tensors[4:], plan.numbers[5:])


def _table(tensors: tuple[Tensor, ...], numbers: tuple[int, ...]) -> DeviceLut:
    items, full, partial, merges = tensors
    tile, entry, run, sub_block, num_slots = numbers
    return DeviceLut(items, full, partial, merges, tile, entry, run, sub_block, num_slots)


def widest(head_dim: int, dtype: torch.dtype, of_queries: bool) -> tuple[int, int]:
    """Return the tokens of an entry, and the most tokens of a tile, that registers hold without spilling.

    Args:
        of_queries: tiles are of queries, else of keys.
    """
    if dtype == torch.float32:
        return (32, 64) if head_dim <= 64 else (16, 32) if head_dim <= 128 else (16, 16)
    if of_queries:
        return (64, 128) if head_dim <= 128 else (32, 64)
    return (32, 128) if head_dim <= 128 else (16, 64)


def warps_and_stages(tile: int, wide_head_dim: int, dtype: torch.dtype, of_keys: bool = False) -> tuple[int, int]:
    """Return the warps of a program and the stages of its loop that spill least (`ptxas` for sm_90).

    Args:
        wide_head_dim: the head size, rounded up to a power of two.
        of_keys: tiles are of keys, else of queries.
    """
    if dtype == torch.float32:  # products without matrix instructions
        return 8, 2
    is_wide = tile >= 128 or wide_head_dim > 128 or (of_keys and tile >= 64 and wide_head_dim > 64)
    return 8 if is_wide else 4, 3 if wide_head_dim <= 128 else 2
