"""Where the queries and keys of a pattern lie among its blocks: some of its tokens, in runs that may cut blocks.

>>> is_there(((1, 3), (5, 6)), num_blocks=3, block=2).int().tolist()
[[0, 1], [1, 0], [0, 1]]
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.layout.runs import Runs


def is_there(runs: Runs, num_blocks: int, block: int) -> Tensor:
    """Whether each token of a pattern is among some, bool [num_blocks, block]; none behind the last token is."""
    there = torch.zeros(num_blocks * block, dtype=torch.bool)
    for start, stop in runs:
        there[start:stop] = True
    return there.view(num_blocks, block)


def cut(blocks: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Some rows and columns of blocks [heads, num_blocks, num_blocks]: a view where both are neighbours.

    Args:
        blocks: of a pattern.
        rows: indices, ascending.
        columns: likewise.
    """
    if all(len(each) and int(each[-1] - each[0]) == len(each) - 1 for each in (rows, columns)):
        return blocks[:, int(rows[0]) : int(rows[-1]) + 1, int(columns[0]) : int(columns[-1]) + 1]
    return blocks[:, rows[:, None], columns]
