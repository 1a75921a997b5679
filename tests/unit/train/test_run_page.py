"""The page of a run that goes on: when it is written, by whom, and that nothing of it ends the run."""

import json
import time

from harness.run_folders import write_run
from shardwise.comm.records import CollectiveCount
from shardwise.train.rank0_logger import RunPage


def test_a_process_writes_the_page_once_it_is_due(tmp_path):
    write_run(tmp_path)
    counts = {("dp_shard", "all_gather"): CollectiveCount(1, 1000)}
    page = RunPage(tmp_path, counts, every_s=0.0)
    page.see_step()
    counts["dp_shard", "all_gather"].wire_bytes += 500
    counts["pp", "send"] = CollectiveCount(1, 70)
    page.see_step()
    give_up_s = time.monotonic() + 60
    while not (tmp_path / "report.html").exists() and time.monotonic() < give_up_s:
        time.sleep(0.05)
    assert (tmp_path / "report.html").stat().st_size > 50_000
    counts["dp_shard", "all_gather"].wire_bytes += 300
    page.see_step()
    assert page.finish() == tmp_path / "report.html"
    # Of the steps after the first one.
    assert json.loads((tmp_path / "wire.json").read_text()) == {
        "steps": 2,
        "axes": [
            {"axis": "dp_shard", "op": "all_gather", "bytes": 400.0},
            {"axis": "pp", "op": "send", "bytes": 35.0},
        ],
    }


def test_a_page_that_is_not_due_starts_nothing(tmp_path):
    write_run(tmp_path)
    page = RunPage(tmp_path, {}, every_s=3600.0)
    for _ in range(5):
        page.see_step()
    assert not (tmp_path / "report.html").exists()
    assert page.finish() == tmp_path / "report.html"


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    page = RunPage(tmp_path / "gone", {}, every_s=3600.0)
    page.see_step()
    assert page.finish() is None
    assert "page of this run" in caplog.text
