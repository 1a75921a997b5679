"""Exchange heads for tokens between ranks (Ulysses; Jacobs et al. 2023, arXiv 2309.14509).

Neighbouring ranks of the `cp` axis, `heads_over` of them, make a team: each sends the others their heads of its own
tokens, and receives its own heads of all the team's tokens. Where there are fewer KV heads than ranks, several ranks
get the same one, and their gradients are summed.

>>> [heads_of(8, 4, index) for index in range(4)], [heads_of(2, 4, index) for index in range(4)]
([(0, 2), (2, 2), (4, 2), (6, 2)], [(0, 1), (0, 1), (1, 1), (1, 1)])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.collectives import Comm
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import ContextConfig
from shardwise.context.messages import RecvBuffer, put
from shardwise.layout.token_ranges import Runs, count_tokens, join, local


def team_size(section: ContextConfig, degree: int) -> int:
    """Return the number of neighbouring ranks of the `cp` axis of `degree` that exchange heads; 1 where none do."""
    return section.heads_over or (degree if section.transport == "ulysses" else 1)


def heads_of(num_heads: int, size: int, index: int) -> tuple[int, int]:
    """Return the first head and the number of heads of a rank, for query heads or for key and value heads.

    Args:
        index: of the rank in its team.
    """
    if num_heads < size:
        return index * num_heads // size, 1
    return index * (num_heads // size), num_heads // size


def check_team(section: ContextConfig, degree: int) -> None:
    """Raise unless the `degree` ranks of the `cp` axis make teams.

    Raises:
        ConfigError: `heads_over` does not divide them, or is not all of them for ulysses.
    """
    size = team_size(section, degree)
    if section.transport == "ulysses" and size != degree:
        raise ConfigError(
            "heads-over-in-ulysses",
            f"context.heads_over={size} with transport=ulysses is not all ranks of mesh.cp={degree}; leave it out, or "
            "set transport=ring for teams that exchange heads inside a ring",
        )
    if degree % size:
        legal = [each for each in range(1, degree + 1) if degree % each == 0]
        raise ConfigError(
            "heads-over-divides-cp",
            f"context.heads_over={size} does not divide mesh.cp={degree}; nearest legal: {_nearest(size, legal)}",
        )


def check_heads(num_heads: int, num_kv_heads: int, section: ContextConfig, degree: int, tp: int = 1) -> None:
    """Raise unless a model's heads can be exchanged over the `degree` ranks of the `cp` axis.

    Args:
        num_heads: query heads of the whole model.
        num_kv_heads: key and value heads of the whole model.
        tp: tensor-parallel ranks, each of which has its part of the heads.

    Raises:
        ConfigError: the teams do not divide the query heads, or they and the KV heads do not divide each other.
    """
    check_team(section, degree)
    size = team_size(section, degree)
    own, own_kv = num_heads // tp, max(1, num_kv_heads // tp)
    if _fits(own, own_kv, size):
        return
    is_all = section.transport == "ulysses"
    legal = [each for each in range(1, own + 1) if _fits(own, own_kv, each) and (is_all or degree % each == 0)]
    name = "mesh.cp" if is_all else "context.heads_over"
    of_rank = f" of each of tp={tp} ranks" if tp > 1 else ""
    if own % size:
        code, rule = "cp-query-heads", f"does not divide {own} query heads{of_rank}"
    else:
        code, rule = "cp-kv-heads", f"and {own_kv} KV heads{of_rank} do not divide each other"
    other = "; or set context.transport=ring, which exchanges no heads" if is_all else ""
    raise ConfigError(code, f"{name}={size} {rule}; nearest legal: {_nearest(size, legal)}{other}")


def _fits(num_heads: int, num_kv_heads: int, size: int) -> bool:
    return num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


def _nearest(given: int, legal: list[int]) -> str:
    """Return the nearest legal number on each side."""
    below, above = [each for each in legal if each < given], [each for each in legal if each > given]
    return ", ".join(map(str, below[-1:] + above[:1]))


@dataclass(frozen=True, eq=False)
class HeadGroup:
    """Exchanges heads for tokens among neighbouring ranks (a team).

    Attributes:
        shares: the tokens of each rank of the team.
        index: of this rank in the team.
    """

    comm: Comm
    shares: tuple[Runs, ...]
    index: int

    def to_heads(self, parts: Sequence[Tensor]) -> Tensor:
        """Return this rank's heads of all the team's tokens, [N, B, heads of all parts, D].

        Args:
            parts: [B, heads, n, D] each, of one dtype.
        """
        size, tokens = len(self.shares), join(self.shares)
        messages = [_of_heads(parts, size, index) for index in range(size)]  # [n, B, heads, D] each
        whole = messages[0].new_empty(count_tokens(tokens), *messages[0].shape[1:])
        recv_buffer = RecvBuffer(whole, tokens, {index: self.shares[index] for index in self._others})
        self._exchange(messages, recv_buffer.buffers, "heads")
        put(whole, local(self.shares[self.index], tokens), messages[self.index])
        return recv_buffer.assemble()

    def to_tokens(self, parts: Sequence[Tensor], num_heads: Sequence[int]) -> Tensor:
        """Return all heads of this rank's tokens, [B, n, heads of all parts, D]; heads that several ranks have are
        summed.

        Args:
            parts: [B, heads of this rank, N, D] each, of one dtype.
            num_heads: of each part, over all ranks of the team.
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
    """Return the message with a rank's heads, [n, B, heads, D]."""
    samples, _, num_tokens, head_dim = parts[0].shape
    ranges = [heads_of(part.shape[1], size, index) for part in parts]
    message = parts[0].new_empty(num_tokens, samples, sum(num for _, num in ranges), head_dim)
    before = 0
    for part, (first, num) in zip(parts, ranges, strict=True):
        message[:, :, before : before + num].copy_(part[:, first : first + num].permute(2, 0, 1, 3))
        before += num
    return message


def _of_tokens(parts: Sequence[Tensor], rows: Runs) -> Tensor:
    """Return the message with a rank's tokens, [B, n, heads, D]."""
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
