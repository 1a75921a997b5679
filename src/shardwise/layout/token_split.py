"""Which tokens of a sequence each rank of the `cp` axis computes: a value that transports and kernels know alike.

Every rank has equally many tokens, so that all but attention is balanced; it holds them ascending. The tokens' places
in the sequence (positions) go with them, so rotary embeddings, masks and dropout are those of the whole sequence. Of 16
tokens over cp=4:

    contiguous   0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3
    zigzag       0 0 1 1 2 2 3 3 3 3 2 2 1 1 0 0      the first chunks of causal attention cost least, the last most

>>> split = zigzag(16, degree=4)
>>> split.shares[1]
((2, 4), (12, 14))
>>> split.teams(2).shares                              # two ranks that exchange heads have the tokens of both
(((0, 4), (12, 16)), ((4, 12),))
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config import ConfigError
from shardwise.layout.runs import Runs, count_tokens, join


@dataclass(frozen=True)
class TokenSplit:
    """A sequence's tokens, each with the one rank that computes it.

    Attributes:
        kind: contiguous, zigzag or balanced.
        num_tokens: of the sequence.
        shares: the tokens of each rank of the axis, equally many.
    """

    kind: str
    num_tokens: int
    shares: tuple[Runs, ...]

    def __post_init__(self) -> None:
        sizes = {count_tokens(share) for share in self.shares}
        if (
            len(sizes) != 1
            or join(self.shares) != ((0, self.num_tokens),)
            or self.own_size * self.degree != (self.num_tokens)
        ):
            raise ValueError(f"shares {self.shares} are no split of {self.num_tokens} tokens")

    @property
    def degree(self) -> int:
        """Ranks of the axis."""
        return len(self.shares)

    @property
    def own_size(self) -> int:
        """Tokens of each rank."""
        return count_tokens(self.shares[0])

    def teams(self, size: int) -> TokenSplit:
        """The split over teams of `size` neighbouring ranks, each with all tokens of its ranks."""
        if size == 1:
            return self
        shares = (join(self.shares[first : first + size]) for first in range(0, self.degree, size))
        return TokenSplit(self.kind, self.num_tokens, tuple(shares))


def contiguous(length: int, degree: int) -> TokenSplit:
    """Rank i has the i-th part.

    Raises:
        ConfigError: the length does not divide.
    """
    _check(length, degree, degree, "contiguous")
    size = length // degree
    return TokenSplit("contiguous", length, tuple(((i * size, (i + 1) * size),) for i in range(degree)))


def zigzag(length: int, degree: int) -> TokenSplit:
    """Rank i has the i-th chunk and the i-th from the end, of twice as many chunks as ranks.

    Raises:
        ConfigError: the length does not divide.
    """
    _check(length, 2 * degree, degree, "zigzag")
    size, last = length // (2 * degree), 2 * degree - 1
    shares = (
        join([((i * size, (i + 1) * size),), (((last - i) * size, (last - i + 1) * size),)]) for i in range(degree)
    )
    return TokenSplit("zigzag", length, tuple(shares))


def _check(length: int, divisor: int, degree: int, kind: str) -> None:
    if length % divisor or not length:
        below = length // divisor * divisor
        legal = ", ".join(str(each) for each in (below, below + divisor) if each)
        named = "" if kind == "contiguous" else f" with context.token_layout={kind}"  # all others need as much
        raise ConfigError(
            f"mesh.cp={degree}{named} does not divide a sequence of {length} tokens into {divisor} equal parts; "
            f"nearest legal: {legal}"
        )
