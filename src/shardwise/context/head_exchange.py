"""Heads for tokens among the ranks of a team, and back (Ulysses; Jacobs et al. 2023, arXiv 2309.14509).

Shapes: B samples, n tokens of a rank, N tokens of its team, D head; each tensor has heads of its own, of which a rank
gets its part (`shardwise.context.heads`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm import Comm
from shardwise.context.heads import heads_of
from shardwise.context.messages import Landing, put
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

    def to_heads(self, parts: Sequence[Tensor]) -> Tensor:
        """This rank's heads of all the team's tokens, [N, B, heads of all parts, D].

        Args:
            parts: [B, heads, n, D] each, of one dtype.
        """
        size, tokens = len(self.shares), join(self.shares)
        messages = [_of_heads(parts, size, index) for index in range(size)]  # [n, B, heads, D] each
        whole = messages[0].new_empty(count_tokens(tokens), *messages[0].shape[1:])
        landing = Landing(whole, tokens, {index: self.shares[index] for index in self._others})
        self._exchange(messages, landing.buffers, "heads")
        put(whole, local(self.shares[self.index], tokens), messages[self.index])
        return landing.settle()

    def to_tokens(self, parts: Sequence[Tensor], num_heads: Sequence[int]) -> Tensor:
        """All heads of this rank's tokens, [B, n, heads of all parts, D]; what several ranks have is summed.

        Args:
            parts: [B, heads of this rank, N, D] each, of one dtype.
            num_heads: of each part in all.
        """
        size, tokens = len(self.shares), join(self.shares)
        messages = [_of_tokens(parts, local(share, tokens)) for share in self.shares]  # [B, n, heads, D] each
        buffers = {index: torch.empty_like(messages[index]) for index in self._others}
        self._exchange(messages, buffers, "tokens")
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

    @property
    def _others(self) -> list[int]:
        return [index for index in range(len(self.shares)) if index != self.index]

    def _exchange(self, messages: Sequence[Tensor], buffers: Mapping[int, Tensor], name: str) -> None:
        """Send each other rank its message, and receive its own; all by index in the team."""
        first = self.comm.rank - self.index
        sends = {first + index: [messages[index]] for index in self._others}
        receives = {first + index: [buffers[index]] for index in self._others}
        self.comm.exchange(sends, receives, f"context {name}").wait()


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
