"""Walks over the tables of attention's kernels, as the kernels do."""

from __future__ import annotations

import numpy as np

from shardwise.attention.triton.lut import ITEM_HEAD, HeadGroups, Lut, TileSide


def visits(tables: Lut, side: TileSide, shape: tuple[int, int, int], heads: HeadGroups) -> np.ndarray:
    """How often each pair is visited, [heads or 1, Nq, Nk], walking the tables as the kernels do."""
    times = np.zeros(shape, dtype=int)
    lists = (tables.items.shape[2] - ITEM_HEAD) // 4
    num_subs = tables.full.shape[1]
    for group, items in enumerate(tables.items):
        for origin, begin, end, shift, _, *ranges in items:
            for each in range(lists):
                head = group * lists + each
                full0, full1, partial0, partial1 = ranges[4 * each : 4 * each + 4]
                tile = np.arange(origin, origin + side.width.tile)
                exists = (tile >= begin) & (tile < end)
                for entry in range(full0, full1):
                    others = (tables.full[entry][:, None] + np.arange(tables.sub_block)).reshape(-1)
                    _add(times[head], tile[exists], others, np.ones((exists.sum(), len(others)), bool), side)
                for entry in range(partial0, partial1):
                    row = tables.partial[entry]
                    others = (row[:num_subs, None] + np.arange(tables.sub_block)).reshape(-1)
                    real = others < row[num_subs : 2 * num_subs].repeat(tables.sub_block)
                    bits = row[2 * num_subs :].repeat(tables.run)[:, None]
                    seen = (bits >> np.arange(num_subs).repeat(tables.sub_block)) & 1 > 0
                    queries, keys = (tile[:, None], others) if side.of_queries else (others, tile[:, None])
                    seen &= keys <= queries + shift
                    _add(times[head], tile[exists], others[real], seen[exists][:, real], side)
    return times


def _add(times: np.ndarray, tile: np.ndarray, others: np.ndarray, seen: np.ndarray, side: TileSide) -> None:
    assert len(set(others)) == len(others)
    times[np.ix_(tile, others) if side.of_queries else np.ix_(others, tile)] += seen if side.of_queries else seen.T


def require_complete(tables: Lut, width: int, num_tokens: int) -> None:
    """Each token is of one tile, and each slot of partial sums of one item and one merge."""
    for items, merges in zip(tables.items, tables.merges, strict=True):
        written = np.zeros(num_tokens, dtype=int)
        slots = []
        for origin, begin, end, _, slot in items[:, :ITEM_HEAD]:
            assert origin <= begin
            assert end <= origin + width
            if begin < end and slot < 0:
                written[begin:end] += 1
            slots += [slot] if begin < end and slot >= 0 else []
        merged = []
        for _, begin, end, first, num in merges:
            written[begin:end] += 1
            merged += range(first, first + num)
        assert (written == 1).all()
        assert sorted(slots) == sorted(merged) == list(range(len(slots)))
        assert len(slots) <= tables.num_slots
