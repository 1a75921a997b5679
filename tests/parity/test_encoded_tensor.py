"""Codes on the wire beside a tensor axis: its ranks encode whole blocks, so it changes no bit."""

from __future__ import annotations

from typing import Any, Final

import pytest

from harness.exact import assert_equal_bits, train
from harness.pool import WorkerPool

CODES: Final[list[dict[str, Any]]] = [
    {"reduce": "int8"},
    {"reduce": "int4", "reduce_feedback": True},
    {"gather": "int8"},
    {"gather": "fp8"},
]


@pytest.mark.parametrize("precision", CODES, ids=str)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_tensor_axis_changes_no_bit(ranks: WorkerPool, precision: dict[str, Any], stage: int) -> None:
    """Sums of codes depend on the number of data ranks, which is two here."""
    sections = {"precision": precision, "zero": {"stage": stage}}
    (exact, *_), *_ = ranks(2).run(train, "adamw", "master", {"zero": {"stage": stage}}, ("", ""), True)
    (expected, *_), *_ = ranks(2).run(train, "adamw", "master", sections, ("", ""), True)
    with pytest.raises(AssertionError):
        assert_equal_bits(expected, exact)
    for actual, *_ in ranks(4).run(train, "adamw", "master", {**sections, "mesh": {"tp": 2}}, ("", ""), True):
        assert_equal_bits(actual, expected)
