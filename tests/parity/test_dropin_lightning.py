"""Lightning Fabric's DeepSpeed strategy, through the drop-in: it trains as one plain process does, saves and loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning_fabric", reason="lightning-fabric is not installed")

from harness import lightning_run
from harness.paths import SOURCE


def test_fabric_trains_saves_and_loads_by_its_strategy(tmp_path: Path) -> None:
    start = [sys.executable, "-m", "shardwise", "run", "--as-deepspeed", "--", "python", "-m", "torch.distributed.run"]
    run = [*start, "--standalone", "--nproc-per-node", "2", lightning_run.__file__, str(tmp_path)]
    path = os.pathsep.join([str(SOURCE.parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run(run, env={**os.environ, "PYTHONPATH": path}, check=True)
    model, optimizer = lightning_run.make()
    losses, weights = [], {}
    for step, whole in enumerate(lightning_run.batches(0, lightning_run.NUM_STEPS + lightning_run.NUM_MORE)):
        if step == lightning_run.NUM_STEPS:
            weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        loss = model(whole).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # DeepSpeed's default
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for stage in (1, 2, 3):
        found = torch.load(tmp_path / f"stage-{stage}.pt")
        assert found["losses"] + found["on"] == pytest.approx(losses, rel=1e-5), stage
        assert found["loaded"] == found["on"]
        assert found["epoch"] == 7
        torch.testing.assert_close(found["weights"], weights, rtol=1e-5, atol=1e-7)
