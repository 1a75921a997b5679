"""Send rows of tokens as messages: cut them out of tensors, receive them in place where possible, and put them back.

A message is token-major, so that neighbouring tokens from one rank arrive where they are needed without a copy.
Shapes: B samples, H heads, n tokens, D head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.layout.token_ranges import Runs, count_tokens, local


def blank(like: Tensor, num_rows: int, *, num: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return a message [num_rows, num, B, H, D] without values.

    Args:
        like: [B, H, n, D], whose dtype a message has where `dtype` is None.
    """
    samples, heads, _, head_dim = like.shape
    return like.new_empty(num_rows, num, samples, heads, head_dim, dtype=dtype)


def pack(tensors: Sequence[Tensor], rows: Runs) -> Tensor:
    """Copy rows of several tensors into one message [rows, tensors, B, H, D].

    Args:
        tensors: [B, H, n, D] each, of one shape and dtype.
    """
    message = blank(tensors[0], count_tokens(rows), num=len(tensors))
    before = 0
    for start, stop in rows:
        copy_run(message, before, tensors, start, stop)
        before += stop - start
    return message


def copy_run(message: Tensor, first: int, tensors: Sequence[Tensor], start: int, stop: int) -> None:
    """Copy rows [start, stop) of tensors [B, H, n, D] to a message [rows, tensors, B, H, D], from row `first` on."""
    for index, tensor in enumerate(tensors):
        message[first : first + stop - start, index].copy_(tensor[:, :, start:stop].permute(2, 0, 1, 3))


def unpack(message: Tensor) -> list[Tensor]:
    """Return the tensors of a message as views [B, H, rows, D]."""
    return [each.permute(1, 2, 0, 3) for each in message.unbind(1)]


def put(into: Tensor, rows: Runs, values: Tensor) -> None:
    """Copy values [rows, ...] into these rows of `into` [n, ...]."""
    before = 0
    for start, stop in rows:
        into[start:stop].copy_(values[before : before + stop - start])
        before += stop - start


def add(into: Tensor, rows: Runs, values: Tensor) -> None:
    """Add values [B, H, rows, D] to these rows of `into` [B, H, n, D]."""
    before = 0
    for start, stop in rows:
        into[:, :, start:stop] += values[:, :, before : before + stop - start]
        before += stop - start


def take(tensor: Tensor, rows: Runs, dim: int = 2) -> Tensor:
    """Return `rows` of a `tensor` along `dim`: a view where they are neighbours."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


class RecvBuffer:
    """Receives rows from several ranks; together they are the rows of one tensor.

    Args:
        whole: [rows, ...]; the caller fills in rows that no rank sends.
        by_rank: the tokens that each rank sends.

    Attributes:
        buffers: by rank, the memory that it fills; a part of the whole where its rows are neighbours there.
    """

    def __init__(self, whole: Tensor, tokens: Runs, by_rank: Mapping[int, Runs]) -> None:
        self._whole = whole
        self.buffers: dict[int, Tensor] = {}
        self._later: list[tuple[Runs, Tensor]] = []
        for rank, runs in by_rank.items():
            rows = local(runs, tokens)
            if len(rows) == 1:
                self.buffers[rank] = whole[rows[0][0] : rows[0][1]]
            else:
                self.buffers[rank] = whole.new_empty(count_tokens(rows), *whole.shape[1:])
                self._later.append((rows, self.buffers[rank]))

    def assemble(self) -> Tensor:
        """Return the whole, after all rows have arrived."""
        self.buffers.clear()
        while self._later:
            put(self._whole, *self._later.pop())
        return self._whole
