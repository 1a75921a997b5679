"""Heads for tokens among the ranks of a team, and back (Ulysses; Jacobs et al. 2023, arXiv 2309.14509).

Shapes: B samples, n tokens of a rank, N tokens of its team, D head; each tensor has heads of its own, of which a rank
gets its part (`shardwise.context.heads`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm import Comm
from shardwise.context.heads import heads_of
from shardwise.context.messages import put
from shardwise.layout.runs import Runs, count_tokens, join, local


@dataclass(frozen=True, eq=False)
class Team:
    """Neighbouring ranks that exchange heads for tokens.

    Attributes:
        comm: over the `cp` axis.
        shares: the tokens of each rank of the team.
        index: of this rank in the team.
    """

    comm: Comm
    shares: tuple[Runs, ...]
    index: int

    @property
    def _first_rank(self) -> int:
        return self.comm.rank - self.index

    def to_heads(self, parts: Sequence[Tensor]) -> Tensor:
        """This rank's heads of all the team's tokens, [N, B, heads of all parts, D].

        Args:
            parts: [B, heads, n, D] each, of one dtype.
        """
        size = len(self.shares)
        tokens = join(self.shares)
        messages = [_of_heads(parts, size, index) for index in range(size)]  # [n, B, heads, D] each
        own = messages[self.index]
        whole = own.new_empty(count_tokens(tokens), *own.shape[1:])
        sends, receives, later = {}, {}, []
        for index, message in enumerate(messages):
            rows = local(self.shares[index], tokens)
            if index == self.index:
                put(whole, rows, own)
                continue
            sends[self._first_rank + index] = [message]
            if len(rows) == 1:
                buffer = whole[rows[0][0] : rows[0][1]]
            else:
                buffer = torch.empty_like(message)
                later.append((rows, buffer))
            receives[self._first_rank + index] = [buffer]
        self.comm.exchange(sends, receives, "context heads").wait()
        for rows, buffer in later:
            put(whole, rows, buffer)
        return whole

    def to_tokens(self, parts: Sequence[Tensor], num_heads: Sequence[int]) -> Tensor:
        """All heads of this rank's tokens, [B, n, heads of all parts, D]; what several ranks have is summed.

        Args:
            parts: [B, heads of this rank, N, D] each, of one dtype.
            num_heads: of each part in all.
        """
        size = len(self.shares)
        tokens = join(self.shares)
        messages = [_of_tokens(parts, local(share, tokens)) for share in self.shares]  # [B, n, heads, D] each
        others = [index for index in range(size) if index != self.index]
        sends = {self._first_rank + index: [messages[index]] for index in others}
        buffers = {index: torch.empty_like(messages[index]) for index in others}
        receives = {self._first_rank + index: [buffer] for index, buffer in buffers.items()}
        self.comm.exchange(sends, receives, "context tokens").wait()
        buffers[self.index] = messages[self.index]
        samples, num_tokens, _, head_dim = buffers[self.index].shape
        whole = parts[0].new_empty(samples, num_tokens, sum(num_heads), head_dim)
        for index in range(size):  # in this order on every rank, so that sums are repeatable
            own = before = 0
            for num in num_heads:
                first, count = heads_of(num, size, index)
                here = whole[:, :, before + first : before + first + count]
                values = buffers[index][:, :, own : own + count]
                is_again = index > 0 and heads_of(num, size, index - 1)[0] == first
                here.add_(values) if is_again else here.copy_(values)
                own, before = own + count, before + num
        return whole


def _of_heads(parts: Sequence[Tensor], size: int, index: int) -> Tensor:
    """What a rank of the team gets, [n, B, heads, D]."""
    samples, _, num_tokens, head_dim = parts[0].shape
    ranges = [heads_of(part.shape[1], size, index) for part in parts]
    message = parts[0].new_empty(num_tokens, samples, sum(num for _, num in ranges), head_dim)
    before = 0
    for part, (first, num) in zip(parts, ranges, strict=True):
        message[:, :, before : before + num].copy_(part[:, first : first + num].permute(2, 0, 1, 3))
        before += num
    return message


def _of_tokens(parts: Sequence[Tensor], rows: Runs) -> Tensor:
    """What a rank of the team gets, [B, n, heads, D]."""
    samples, _, _, head_dim = parts[0].shape
    message = parts[0].new_empty(samples, count_tokens(rows), sum(part.shape[1] for part in parts), head_dim)
    before = 0
    for start, stop in rows:
        heads = 0
        for part in parts:
            here = message[:, before : before + stop - start, heads : heads + part.shape[1]]
            here.copy_(part[:, :, start:stop].transpose(1, 2))
            heads += part.shape[1]
        before += stop - start
    return message
