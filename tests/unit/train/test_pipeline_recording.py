"""What a run says of its pipeline, and the timeline that it leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardwise.cli import main as cli

pytestmark = pytest.mark.begin

SETTINGS = (
    "model.num_layers=4 model.hidden_size=32 model.num_heads=2 model.num_kv_heads=1 model.ffn_size=64 data.seq_len=16 "
    "data.tokenizer=bytes data.path=text.txt batch.micro_size=2 batch.accumulation=4 mesh.pp=2 run.device=cpu "
    "run.num_procs=2 run.num_threads=1 run.steps=3 run.eval_batches=1 run.record_timeline=2 precision.param=fp32"
)


@pytest.mark.usefixtures("warm_python")
def test_a_run_shows_the_cut_and_the_bubble_and_leaves_a_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    Path("text.txt").write_text("".join(f"line {number} of some text\n" for number in range(300)))
    assert cli.main(["train", *SETTINGS.split()]) == 0
    said = capfd.readouterr().out
    assert "stage  rank  units" in said
    assert " x the mean time, the last " in said
    equation = "global batch 8 = 2 samples a micro-batch x 4 micro-batches (chunks) x 1 data-parallel ranks"
    assert equation in said
    assert "2 ranks: PP 2 1f1b" in said
    assert re.search(r"bubble of the last step [\d.]+ % of ", said)
    (recorded,) = Path("runs").glob("*/timeline.json")
    actions = [event["name"] for event in json.loads(recorded.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {f"{stage}{kind}{micro_batch}" for stage in (0, 1) for kind in "FB" for micro_batch in range(4)} <= {
        *actions
    }
    assert cli.main(["timeline", "mesh.pp=2", "batch.accumulation=4", "--recorded", str(recorded)]) == 0
    assert f"recorded: {recorded}" in capfd.readouterr().out
