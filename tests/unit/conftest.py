"""What no test of this folder does: start processes that simulate, and print a line because the machine is slow."""

from __future__ import annotations

import math

import pytest


@pytest.fixture(autouse=True)
def is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.verify.finalists.simulate_finalists", lambda prices, *_: list(prices))
    monkeypatch.setattr("shardwise.report.console.EVERY_S", math.inf)
