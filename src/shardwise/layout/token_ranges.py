"""Write sets of tokens of a sequence as runs [start, stop): ascending, not touching and not empty. Integers only.

A rank's tensors hold the tokens of its runs one run after the other, so in ascending order. All arithmetic of tokens is
here; that of parameters is in `shardwise.layout.slicing`.

>>> own, needed = ((0, 4), (12, 16)), ((2, 14),)
>>> intersect(own, needed), count_tokens(own)
(((2, 4), (12, 14)), 8)
>>> local(((12, 14),), own)                       # where tokens 12 and 13 are among those of `own`
((4, 6),)
>>> join([((0, 4),), ((12, 16),), ((4, 6),)])
((0, 6), (12, 16))
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.config.errors import ConfigError

Runs = tuple[tuple[int, int], ...]


def count_tokens(runs: Runs) -> int:
    """Count the tokens of all runs."""
    return sum(stop - start for start, stop in runs)


def intersect(first: Runs, second: Runs) -> Runs:
    """Return the tokens that are in both."""
    found: list[tuple[int, int]] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, stop = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < stop:
            found.append((start, stop))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def join(several: Iterable[Runs]) -> Runs:
    """Return the tokens that are in any of several sets; runs that touch become one."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(run for runs in several for run in runs):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


def shift(runs: Runs, offset: int) -> Runs:
    """Move every token by `offset`."""
    return tuple((start + offset, stop + offset) for start, stop in runs)


def part(runs: Runs, first: int, last: int) -> Runs:
    """Return the tokens of `runs` with the numbers [first, last), counted within `runs` from 0.

    >>> part(((0, 4), (12, 16)), 2, 6)
    ((2, 4), (12, 14))
    """
    found: list[tuple[int, int]] = []
    before = 0
    for start, stop in runs:
        lower, upper = max(first - before, 0), min(last - before, stop - start)
        if lower < upper:
            found.append((start + lower, start + upper))
        before += stop - start
    return tuple(found)


def local(runs: Runs, held: Runs) -> Runs:
    """Return the positions of the tokens of `runs` among those of `held`, which must contain them all.

    Raises:
        ValueError: some are not held.
    """
    found: list[tuple[int, int]] = []
    before = 0
    for start, stop in held:
        found += [(first - start + before, last - start + before) for first, last in intersect(runs, ((start, stop),))]
        before += stop - start
    if count_tokens(tuple(found)) != count_tokens(runs):
        raise ValueError(f"tokens {runs} are not all among {held}")
    return join([tuple(found)])


@dataclass(frozen=True)
class TokenSplit:
    """Assign each token of a sequence to the one rank that computes it.

    Attributes:
        kind: how tokens were assigned: contiguous, zigzag or balanced.
        shares: the tokens of each rank of the axis, the same number for each.
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
        """Return the number of ranks of the axis."""
        return len(self.shares)

    @property
    def own_size(self) -> int:
        """Return the number of tokens of each rank."""
        return count_tokens(self.shares[0])

    def teams(self, size: int) -> TokenSplit:
        """Return the split over teams of `size` neighbouring ranks, each with all tokens of its ranks."""
        if size == 1:
            return self
        shares = (join(self.shares[first : first + size]) for first in range(0, self.degree, size))
        return TokenSplit(self.kind, self.num_tokens, tuple(shares))


def contiguous(length: int, degree: int) -> TokenSplit:
    """Split a sequence so that rank i has the i-th of equal parts.

    Raises:
        ConfigError: the length does not divide.
    """
    _check(length, degree, degree, "contiguous")
    size = length // degree
    return TokenSplit("contiguous", length, tuple(((i * size, (i + 1) * size),) for i in range(degree)))


def zigzag(length: int, degree: int) -> TokenSplit:
    """Split a sequence into 2 x `degree` chunks so that rank i has the i-th chunk and the i-th from the end.

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
        legal = ", ".join(str(length) for length in (below, below + divisor) if length)
        named = "" if kind == "contiguous" else f" with context.token_layout={kind}"  # the others need as many
        raise ConfigError(
            "cp-divides-tokens",
            f"mesh.cp={degree}{named} does not divide a sequence of {length} tokens into {divisor} equal parts; "
            f"nearest legal: {legal}",
        )


def pack(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Return which documents share a sequence, by best-fit decreasing; none is longer than `seq_len`.

    >>> pack([3, 6, 5, 2, 1], seq_len=8)
    [[1, 3], [2, 0], [4]]
    """
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}
    spaces: list[int] = []  # the keys of `by_space`, rising
    for document in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[document]
        fit = bisect.bisect_left(spaces, length)
        if fit == len(spaces):
            row, space = len(rows), seq_len
            rows.append([])
        else:
            space = spaces[fit]
            row = by_space[space].pop(0)
            if not by_space[space]:
                del by_space[space], spaces[fit]
        rows[row].append(document)
        if left := space - length:
            if left not in by_space:
                by_space[left] = []
                bisect.insort(spaces, left)
            by_space[left].append(row)
    return rows
