"""Put together on every rank what the ranks of a group have: parts of a tensor, or texts."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.comm.collectives import Comm
from shardwise.runtime.device import numbers_on


def merge_parts(comm: Comm, part: Tensor | None, start: int, numel: int, dtype: torch.dtype, name: str) -> Tensor:
    """Return a 1-D tensor on every rank from the ranks' parts, which do not overlap.

    The bits are summed as integers, where all but one rank have zeros: exact in every dtype, and one collective.

    Args:
        part: this rank's elements; None if it has none.
        start: the position of `part` in the result.
        dtype: of the result and the parts.
    """
    words = torch.zeros(-(-numel * dtype.itemsize // 8), dtype=torch.int64, device=comm.device)
    flat = words.view(dtype)[:numel]
    if part is not None:
        flat[start : start + part.numel()].copy_(part.reshape(-1))
    if numel > 0:
        comm.all_reduce(words, words.dtype, name).wait()
    return flat


def exchange_texts(comm: Comm, text: str, name: str) -> list[str]:
    """Return every rank's text, in rank order."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=comm.device)
    length = numbers_on(comm.device, [float(own.numel())])
    (longest,) = comm.max_scalars(length, name)
    table = torch.full((comm.world_size, int(longest)), ord(" "), dtype=torch.uint8, device=comm.device)  # [n, bytes]
    table[comm.rank, : own.numel()] = own
    comm.all_gather(table.view(-1), name).wait()
    return [bytes(row.tolist()).decode() for row in table]
