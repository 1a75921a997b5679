"""What the campaigns of faults compare with."""

from __future__ import annotations

import pytest

from harness.faults import NUM_RANKS, Whole, run_to_end, stored
from harness.pool import WorkerPool


@pytest.fixture(scope="session")
def whole_run(ranks: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A run to which nothing happens."""
    root = tmp_path_factory.mktemp("whole") / "checkpoints"
    return Whole(ranks(NUM_RANKS).run(run_to_end, root, False)[0], stored(root))
