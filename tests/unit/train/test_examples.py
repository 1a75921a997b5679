"""The configs in `examples/`: each key is known, the job is one that this machine can start, and the docs name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.paths import ROOT
from shardwise.planner.hardware import parse_cluster
from shardwise.train.setup import check_job, job_config, tiers_line

CLUSTER = ROOT / "examples" / "cluster.toml"
EXAMPLES = sorted(set((ROOT / "examples").glob("*.toml")) - {CLUSTER})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_a_job(path: Path) -> None:
    assert f"shardwise train examples/{path.name}" in path.read_text()
    config = job_config(path, ["run.device=cpu"])
    resolved, layout = check_job(config, world_size=config.run.num_procs or 2)
    splits = max(resolved.mesh.pp, resolved.mesh.cp, resolved.mesh.ep) > 1
    shown = tiers_line(layout) or splits or resolved.attention.kind != "dense"
    assert shown, "these show states off the device, stages, split sequences, divided experts, or sparse attention"


def test_the_example_of_a_cluster_is_one() -> None:
    assert "examples/cluster.toml" in CLUSTER.read_text()
    assert parse_cluster(str(CLUSTER)).num_gpus > 1
