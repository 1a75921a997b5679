"""Send rows of tokens to the ranks that need them: how many first, then exactly those.

No rank knows how many rows it receives, and they may be none. So their numbers are exchanged first, and the host reads
them once: buffers have as many rows as come, and no row is left unwritten. All ranks of the group make every call,
those too that send and receive nothing; a single rank makes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor

from shardwise.comm.collectives import Comm, TokenExchange
from shardwise.comm.records import Collective, CommError


@dataclass(frozen=True)
class RowCounts:
    """Says how many rows this rank sends and receives.

    Attributes:
        sent: by the rank that receives them, and by part of its data.
        received: by the rank that has sent them, and by part of this rank's data.
        on_device: those received, [ranks, parts].
    """

    sent: tuple[tuple[int, ...], ...]
    received: tuple[tuple[int, ...], ...]
    on_device: Tensor


def exchange_counts(comm: Comm, counts: Tensor, num_rows: int, name: str, skew: float = 1.0) -> RowCounts:
    """Exchange how many rows each rank sends each other one; here the host waits for the device.

    Args:
        counts: integers [ranks, parts]: rows for each part of each rank's data.
        num_rows: their sum.
        skew: of simulated ranks, whose counts have no values: the rows that come over those that are sent.

    Raises:
        CommError: the counts do not add up.
    """
    n, num_parts = counts.shape
    received, call = counts, None
    if n > 1:
        received, call = _exchange(comm, counts, [1] * n, [1] * n, name, None)
    if comm.is_simulated:
        come = _even(ceil(num_rows * skew), n, num_parts)
        return RowCounts(_even(num_rows, n, num_parts), come, received)
    read = comm.comm_log.start_read(torch.stack([counts, received]), comm.device, call)
    sent, come = (tuple(map(tuple, by_rank)) for by_rank in read())
    rows = RowCounts(sent, come, received)
    if sum(map(sum, rows.sent)) != num_rows:
        raise CommError(
            "rows-without-rank",
            f"{name}: {num_rows - sum(map(sum, rows.sent))} of {num_rows} rows go to none of the {n * num_parts} parts "
            f"of the data; give each row an index from 0 to {n * num_parts - 1}",
        )
    return rows


def exchange_tokens(comm: Comm, rows: Tensor, sent: Sequence[int], received: Sequence[int], name: str) -> Tensor:
    """Return the rows [sum(received), h] that the ranks have sent this one, in the order of the ranks.

    They are usable at once: what follows may be any code, which knows of no collective under way.

    Args:
        rows: [sum(sent), h], contiguous, in the order of the ranks that get them.
        sent: rows for each rank; `received` those from each.
    """
    if comm.world_size == 1:
        return rows
    return _exchange(comm, rows, sent, received, name, comm.token_exchange)[0]


def _exchange(
    comm: Comm, rows: Tensor, sent: Sequence[int], received: Sequence[int], name: str, kernel: TokenExchange | None
) -> tuple[Tensor, Collective]:
    row_bytes = prod(rows.shape[1:]) * rows.element_size()
    call = comm.count_exchange(name, (sum(sent) - sent[comm.rank]) * row_bytes)
    shape = (sum(received), *rows.shape[1:])
    with comm.launch(call) as started:
        if kernel is not None:
            out = kernel(rows, sent, received, comm.process_group)
        else:
            out = rows.new_empty(shape)
            # As bytes: a back end takes them whatever the dtype is.
            sizes = ([number * row_bytes for number in each] for each in (received, sent))
            started.add(comm.post_all_to_all(_bytes_of(out), _bytes_of(rows), *sizes))
    started.as_work().wait()
    if out.shape != shape or out.dtype != rows.dtype:
        raise CommError(
            "token-exchange-result",
            f"{name}: the registered exchange of tokens returned {out.dtype} {tuple(out.shape)}, not {rows.dtype} "
            f"{shape}; return the rows that came, by rank",
        )
    return out, call


def _bytes_of(rows: Tensor) -> Tensor:
    # A tensor without an element may have strides that no view of bytes allows.
    return rows.view(-1).view(torch.uint8) if rows.numel() else rows.new_empty(0, dtype=torch.uint8)


def _even(num_rows: int, num_ranks: int, num_parts: int) -> tuple[tuple[int, ...], ...]:
    """Spread rows evenly over the parts of all ranks."""
    each, more = divmod(num_rows, num_ranks * num_parts)
    flat = [each + (index < more) for index in range(num_ranks * num_parts)]
    return tuple(tuple(flat[rank * num_parts : (rank + 1) * num_parts]) for rank in range(num_ranks))
