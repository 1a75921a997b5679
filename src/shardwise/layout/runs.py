"""Sets of tokens of a sequence as runs [start, stop): ascending, apart from each other and not empty. Integers only.

A rank's tensors hold the tokens of its runs one run behind another, so ascending. This is all the arithmetic of tokens
that there is; `shardwise.layout.pieces` is that of parameters.

>>> own, needed = ((0, 4), (12, 16)), ((2, 14),)
>>> intersect(own, needed), count_tokens(own)
(((2, 4), (12, 14)), 8)
>>> local(((12, 14),), own)                       # where tokens 12 and 13 lie among those of `own`
((4, 6),)
>>> join([((0, 4),), ((12, 16),), ((4, 6),)])
((0, 6), (12, 16))
"""

from __future__ import annotations

from collections.abc import Iterable

Runs = tuple[tuple[int, int], ...]


def count_tokens(runs: Runs) -> int:
    """Tokens of all runs."""
    return sum(stop - start for start, stop in runs)


def intersect(first: Runs, second: Runs) -> Runs:
    """The tokens that are in both."""
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
    """The tokens that are in any; runs that touch become one."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(run for runs in several for run in runs):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


def shift(runs: Runs, offset: int) -> Runs:
    """Every token `offset` later."""
    return tuple((start + offset, stop + offset) for start, stop in runs)


def part(runs: Runs, first: int, last: int) -> Runs:
    """Of the tokens, those from the one with number `first` up to and without that with number `last`.

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
    """Where the tokens of `runs`, all of which are in `held`, lie among those.

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
