"""Which combinations of options are tested together: all of them, or few that still contain every pair.

`cover` is what tests use: all combinations as pytest parameters, those outside the pairwise cover marked
`full`, so that `make test` runs the cover and `make test-full` everything.

@pytest.mark.parametrize("options", cover({"stage": [0, 1, 2, 3], "accumulation": [1, 4], "num_ranks": [1, 2,
3, 4]}))
    def test_parity(ranks, options): ...

>>> for row in pairwise({"stage": [0, 3], "clip": [None, 1.0], "overlap": [False, True]}):
...     print(combination_id(row))
stage=0-clip=None-overlap=False
stage=0-clip=1.0-overlap=True
stage=3-clip=None-overlap=True
stage=3-clip=1.0-overlap=False
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

Combination = dict[str, Any]
Predicate = Callable[[Combination], bool]
_Place = tuple[str, int]  # a factor and the index of its value, which need not be hashable


def product(factors: Mapping[str, Sequence[Any]], where: Predicate | None = None) -> list[Combination]:
    """Every combination of the factors' values that `where` allows, the last factor changing fastest."""
    rows = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    return [row for row in rows if where is None or where(row)]


def pairwise(factors: Mapping[str, Sequence[Any]], where: Predicate | None = None) -> list[Combination]:
    """Few combinations in which every pair of values of two factors occurs that occurs in any allowed
    combination.

    Greedy over the whole product and deterministic: always the first combination with the most pairs not yet
    covered. Meant for products up to some thousands of combinations. With a single factor: all its values.
    """
    allowed = product(factors, where)
    return _greedy(allowed, [_pairs(factors, row) for row in allowed])


def each_value(factors: Mapping[str, Sequence[Any]], rows: Sequence[Combination]) -> list[Combination]:
    """Those few of some combinations in which every value occurs that occurs in any: the first with most new ones.

    >>> [combination_id(row) for row in each_value({"a": [1, 2], "b": [3, 4]}, product({"a": [1, 2], "b": [3, 4]}))]
    ['a=1-b=3', 'a=2-b=4']
    """
    return _greedy(rows, [_values(factors, [row]) for row in rows])


def _greedy(rows: Sequence[Combination], covered: Sequence[set[Any]]) -> list[Combination]:
    """Those rows that cover together what all do: always the first one with the most that is not yet covered."""
    missing = set[Any]().union(*covered)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(covered[index] & missing))
        missing -= covered[best]
        chosen.append(rows[best])
    return chosen


def cover(
    factors: Mapping[str, Sequence[Any]],
    where: Predicate | None = None,
    quick: Predicate | None = None,
    has_pairs: bool = True,
) -> list[Any]:
    """All allowed combinations as pytest parameters; those outside the pairwise cover are marked `full`.

    `quick` says of an allowed combination whether the cover may have it: with it, `make test` shows the pairs
    that occur in such combinations, and at least every value. For factors of many values, whose pairs are many.
    Without `has_pairs`, each value occurs and not each pair: for factors whose pairs another test shows.

    Raises:
        ValueError: a value that `where` allows occurs in no combination that `quick` allows.
    """
    rows = product(factors, where)
    quick_rows = pairwise(factors, lambda row: (where is None or where(row)) and (quick is None or quick(row)))
    quick_rows = quick_rows if has_pairs else each_value(factors, quick_rows)
    lost = _values(factors, rows) - _values(factors, quick_rows)
    if lost:
        raise ValueError(f"`quick` leaves out {sorted(f'{name}={factors[name][index]}' for name, index in lost)}")
    chosen = {combination_id(row) for row in quick_rows}
    parameters = []
    for row in rows:
        name = combination_id(row)
        parameters.append(pytest.param(row, id=name, marks=() if name in chosen else pytest.mark.full))
    return parameters


def combination_id(combination: Combination) -> str:
    """The id of a combination: `stage=3-clip=None`."""
    return "-".join(f"{name}={value}" for name, value in combination.items())


def _values(factors: Mapping[str, Sequence[Any]], rows: Sequence[Combination]) -> set[_Place]:
    return {(name, values.index(row[name])) for row in rows for name, values in factors.items()}


def _pairs(factors: Mapping[str, Sequence[Any]], row: Combination) -> set[tuple[_Place, _Place]]:
    places = [(name, values.index(row[name])) for name, values in factors.items()]
    if len(places) == 1:  # no second factor: a value pairs with itself
        places *= 2
    return set(itertools.combinations(places, 2))
