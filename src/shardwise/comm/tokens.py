"""Send rows of tokens to the ranks that need them: how many first, then exactly those.

No rank knows how many rows it receives, and they may be none. So their numbers are exchanged first, and the host reads
them once: buffers have as many rows as come, and no row is left unwritten. All ranks of the group make every call,
those too that send and receive nothing; a single rank makes none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.collectives import Comm
from shardwise.comm.records import Collective, CommError

# Takes rows [n, h], how many go to each rank and how many come from each, and the group of these ranks; returns those
# that came, by rank, for use on the current stream. `Engine.register_token_exchange` sets another one than c10d's.
TokenExchange = Callable[[Tensor, Sequence[int], Sequence[int], dist.ProcessGroup | None], Tensor]


@dataclass(frozen=True)
class RowCounts:
    """Says how many rows this rank sends to each rank, receives from each, and receives for each part of its data.

    Attributes:
        on_device: integers [ranks, parts]: rows that come from a rank for a part.
    """

    sent: list[int]
    received: list[int]
    by_part: list[int]
    on_device: Tensor


def exchange_counts(comm: Comm, counts: Tensor, num_rows: int, name: str, skew: float = 1.0) -> RowCounts:
    """Exchange how many rows each rank sends each other one; here the host waits for the device.

    Args:
        counts: integers [ranks, parts], of `num_rows` in all: rows for each part of each rank's data.
        skew: of simulated ranks, whose counts have no values: the rows that come over those that are sent.

    Raises:
        CommError: the counts are not of all rows.
    """
    n, num_parts = counts.shape
    received, call = _exchange(comm, counts, [1] * n, [1] * n, name, None) if n > 1 else (counts, None)
    if comm.is_simulated:
        come = min(ceil(num_rows * skew), num_rows * n)
        return RowCounts(_evenly(num_rows, n), _evenly(come, n), _evenly(come, num_parts), received)
    sums = torch.cat([counts.sum(1), received.sum(1), received.sum(0)])
    numbers = comm.comm_log.start_read(sums, comm.device, call)()
    if sum(numbers[:n]) != num_rows:
        raise CommError(
            "rows-without-rank",
            f"{name}: {num_rows - sum(numbers[:n])} of {num_rows} rows are for no part of the data of any rank; give "
            f"each an index from 0 to {counts.numel() - 1}",
        )
    return RowCounts(numbers[:n], numbers[n : 2 * n], numbers[2 * n :], received)


def exchange_tokens(comm: Comm, rows: Tensor, sent: Sequence[int], received: Sequence[int], name: str) -> Tensor:
    """Send contiguous rows [sum(sent), h], in the order of the ranks, and return those that come, in that order too.

    They are usable at once: what follows may be any code, which knows of no collective under way.
    """
    if comm.world_size == 1:
        return rows
    return _exchange(comm, rows, sent, received, name, comm.token_exchange)[0]


def _exchange(
    comm: Comm, rows: Tensor, sent: Sequence[int], received: Sequence[int], name: str, kernel: TokenExchange | None
) -> tuple[Tensor, Collective]:
    row_bytes = prod(rows.shape[1:]) * rows.element_size()
    shape = (sum(received), *rows.shape[1:])
    call = comm.count_exchange(name, (sum(sent) - sent[comm.rank]) * row_bytes)
    with comm.launch(call) as started:
        if kernel is not None:
            out = kernel(rows, sent, received, comm.process_group)
        else:
            out = rows.new_empty(shape)
            sizes = ([number * row_bytes for number in numbers] for numbers in (received, sent))
            started.add(comm.post_all_to_all(out, rows, *sizes))
    started.as_work().wait()
    if out.shape != shape or out.dtype != rows.dtype:
        raise CommError(
            "token-exchange-result",
            f"{name}: the registered exchange of tokens returned {out.dtype} {tuple(out.shape)}, not {rows.dtype} "
            f"{shape}; return the rows that came, by rank",
        )
    return out, call


def _evenly(num_rows: int, num_parts: int) -> list[int]:
    return [num_rows * (index + 1) // num_parts - num_rows * index // num_parts for index in range(num_parts)]
