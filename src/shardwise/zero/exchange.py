"""Small exchanges among ranks: a tensor put together from parts, and every rank's text."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.comm import Comm


def merge_parts(comm: Comm, part: Tensor | None, start: int, numel: int, dtype: torch.dtype, name: str) -> Tensor:
    """A flat tensor of `numel` elements from the ranks' parts, which do not overlap; this rank's begins at `start`.

    The bits are summed as integers, where all but one rank have zeros: exact in every dtype, and one collective.
    """
    words = torch.zeros(-(-numel * dtype.itemsize // 8), dtype=torch.int64, device=comm.device)
    flat = words.view(dtype)[:numel]
    if part is not None:
        flat[start : start + part.numel()].copy_(part.reshape(-1))
    if numel > 0:
        comm.all_reduce(words, words.dtype, name).wait()
    return flat


def exchange_texts(comm: Comm, text: str, name: str) -> list[str]:
    """Every rank's text, in rank order."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=comm.device)
    length = torch.tensor([float(own.numel())], dtype=torch.float64, device=comm.device)
    (longest,) = comm.max_scalars(length, name)
    table = torch.full((comm.world_size, int(longest)), ord(" "), dtype=torch.uint8, device=comm.device)  # [n, bytes]
    table[comm.rank, : own.numel()] = own
    comm.all_gather(table.view(-1), name).wait()
    return [bytes(row.tolist()).decode() for row in table]
