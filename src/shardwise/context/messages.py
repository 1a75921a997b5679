"""Rows of tokens as messages: cut out of tensors, received in place where they may be, put back.

A message is token-major, so that what neighbouring tokens' owner sends lands where it is needed without a copy. Shapes:
B samples, H heads, n tokens, D head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.layout.runs import Runs, count_tokens, local


def pack(tensors: Sequence[Tensor], rows: Runs) -> Tensor:
    """Rows of several tensors in one message [rows, tensors, B, H, D].

    Args:
        tensors: [B, H, n, D] each, of one shape and dtype.
        rows: of the n.
    """
    samples, heads, _, head_dim = tensors[0].shape
    message = tensors[0].new_empty(count_tokens(rows), len(tensors), samples, heads, head_dim)
    before = 0
    for start, stop in rows:
        for index, tensor in enumerate(tensors):
            message[before : before + stop - start, index].copy_(tensor[:, :, start:stop].permute(2, 0, 1, 3))
        before += stop - start
    return message


def unpack(message: Tensor) -> list[Tensor]:
    """The tensors of a message as views [B, H, rows, D]."""
    return [each.permute(1, 2, 0, 3) for each in message.unbind(1)]


def put(into: Tensor, rows: Runs, values: Tensor) -> None:
    """Copy rows.

    Args:
        into: [n, ...].
        rows: of the n.
        values: [rows, ...].
    """
    before = 0
    for start, stop in rows:
        into[start:stop].copy_(values[before : before + stop - start])
        before += stop - start


def add(into: Tensor, rows: Runs, values: Tensor) -> None:
    """Add rows.

    Args:
        into: [B, H, n, D].
        rows: of the n.
        values: [B, H, rows, D].
    """
    before = 0
    for start, stop in rows:
        into[:, :, start:stop] += values[:, :, before : before + stop - start]
        before += stop - start


def take(tensor: Tensor, rows: Runs, dim: int = 2) -> Tensor:
    """Rows of a tensor, along `dim`: a view where they are neighbours."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


@dataclass(eq=False)
class Landing:
    """Where rows of several ranks arrive, which together are those of one tensor.

    Attributes:
        whole: [rows, ...].
        buffers: by rank, what it fills; a part of `whole` where its rows are neighbours there.
    """

    whole: Tensor
    buffers: dict[int, Tensor]
    _later: list[tuple[Runs, Tensor]] = field(default_factory=list)

    @staticmethod
    def like(tensors: Sequence[Tensor], tokens: Runs, by_rank: Mapping[int, Runs]) -> Landing:
        """For messages of such tensors; rows that come of nobody are the caller's to fill in.

        Args:
            tensors: [B, H, n, D] each, of one shape and dtype.
            tokens: of the whole.
            by_rank: those that come of each rank.
        """
        samples, heads, _, head_dim = tensors[0].shape
        whole = tensors[0].new_empty(count_tokens(tokens), len(tensors), samples, heads, head_dim)
        landing = Landing(whole, {})
        for rank, runs in by_rank.items():
            rows = local(runs, tokens)
            if len(rows) == 1:
                landing.buffers[rank] = whole[rows[0][0] : rows[0][1]]
            else:
                landing.buffers[rank] = whole.new_empty(count_tokens(rows), *whole.shape[1:])
                landing._later.append((rows, landing.buffers[rank]))
        return landing

    def settle(self) -> Tensor:
        """The whole, once all has arrived."""
        self.buffers.clear()
        while self._later:
            put(self.whole, *self._later.pop())
        return self.whole
