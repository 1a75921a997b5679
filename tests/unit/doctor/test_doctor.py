"""`shardwise doctor` as a user meets it: text, JSON with keys that stay, exit codes, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from harness.machines import FAST, GPU, ON_GPUS, SOUND, changed, rank
from harness.waiting import PATIENCE_S, is_running, wait_until
from shardwise.cli import main as cli
from shardwise.doctor import Diagnosis, diagnose
from shardwise.doctor.checks import list_findings
from shardwise.doctor.show import render
from shardwise.models import PRESETS, Decoder
from shardwise.offload.disk_bench import SwapSpeed
from shardwise.tensor.plan_layout import plan_layout
from shardwise.train.setup import job_config

pytestmark = pytest.mark.usefixtures("warm_python")

ON_H100 = rank(GPU.name, flops_per_s={"fp32": 5e13, "bf16": 7e14}, copies_bytes_per_s=(("host->device", 5e10),))
MEASURED = replace(FAST, ranks=(ON_H100, ON_H100), swap=SwapSpeed("/nvme", 2**27, True, 7e9, 6e9))


def test_quick_looks_and_measures_nothing(capsys, monkeypatch) -> None:
    monkeypatch.setattr("shardwise.doctor._measure", lambda *arguments: pytest.fail("measured"))
    assert cli.main(["doctor", "--quick"]) in (0, 1)
    printed = capsys.readouterr()
    assert "gloo yes" in printed.out
    assert "\x1b" not in printed.out + printed.err, "no colours in a pipe"
    assert printed.err == ""
    cli.main(["doctor", "--quick", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["measurements"] is None
    assert found["facts"]["cpu"]["num_usable"] >= 1


@pytest.mark.parametrize(("variable", "exit_code"), [("WORLD_SIZE", 1), ("MASTER_ADDR", 0)])
def test_an_error_is_exit_code_1_and_a_warning_0(capsys, monkeypatch, tmp_path, variable, exit_code) -> None:
    monkeypatch.setattr("shardwise.doctor.gather_facts", lambda environ, folder, swap: replace(SOUND, environ=environ))
    monkeypatch.setattr(cli.os, "environ", {variable: "2"})
    assert cli.main(["doctor", "--quick", "--dir", str(tmp_path)]) == exit_code
    assert variable in capsys.readouterr().out


def test_a_job_says_which_folder_is_looked_at_and_what_it_needs(capsys, tmp_path) -> None:
    job = ["model.preset=tiny", "run.device=cpu", "run.num_procs=2", f"run.dir={tmp_path / 'runs'}"]
    nvme = ["tiers.optimizer=nvme", f"tiers.nvme_path={tmp_path / 'nvme'}"]
    cli.main(["doctor", "--quick", "--json", *job, *nvme])
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert facts["swap"]["path"] == facts["disk"]["path"] == str(tmp_path)
    layout = plan_layout(Decoder(PRESETS["tiny"], device="meta"), job_config(None, [*job, *nvme]).resolve(2))
    expected = 2 * layout.bytes_by_tier()["nvme"]["optimizer"]
    assert abs(facts["swap"]["needed_bytes"] / expected - 1) < 0.05, "but for the length of positions"
    cli.main(["doctor", "--quick", "--json", *job])
    assert json.loads(capsys.readouterr().out)["facts"]["swap"] is None
    cli.main(["doctor", "--quick", "--json", "--nvme-path", str(tmp_path)])
    assert json.loads(capsys.readouterr().out)["facts"]["swap"]["needed_bytes"] is None
    assert cli.main(["doctor", "--quick", "zero.stge=1"]) == 2
    assert "zero.stge" in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 120])
def test_the_text_fits_its_width_and_cuts_nothing(width) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    nvme = replace(SOUND.disk, path="/nvme", needed_bytes=90 * 2**30)
    facts = changed(ON_GPUS | {"gpus": (GPU,), "memory.shm_bytes": 2**26, "swap": nvme})
    console.print(render(Diagnosis(facts, MEASURED, tuple(list_findings(facts, MEASURED)))))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_ctrl_c_in_the_middle_leaves_no_trace_and_no_process(tmp_path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwise.cli", "doctor", "--dir", str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    children: list[int] = []

    def has_started() -> bool:
        children[:] = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
        return len(children) == 2 or process.poll() is not None

    wait_until(has_started)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert len(children) == 2, "the ranks"
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1:] == ["shardwise: stopped by Ctrl-C"], "after lines of progress on a slow machine"
    assert wait_until(lambda: not any(map(is_running, children)))
    assert list(tmp_path.iterdir()) == []


def test_a_diagnosis_is_a_value_that_json_holds() -> None:
    measured = replace(MEASURED, failures={"with 2 ranks at work at once": "hung"})
    diagnosis = Diagnosis(changed(ON_GPUS), measured, tuple(list_findings(changed(ON_GPUS), measured)))
    found = json.loads(json.dumps(diagnosis.to_dict()))
    assert [each["name"] for each in found["findings"]] == ["probe-failed"]
    assert found["measurements"]["ranks"][1]["device"] == GPU.name
    assert diagnosis.exit_code == 1


def test_a_disk_that_fails_leaves_a_reason_and_the_ranks(monkeypatch, tmp_path) -> None:
    def fail(path: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("shardwise.doctor.glance", lambda *arguments: ((rank(),), "rank 1 died"))
    monkeypatch.setattr("shardwise.doctor.measure_swap", fail)
    monkeypatch.setattr("shardwise.doctor.gather_facts", lambda *arguments: SOUND)
    diagnosis = diagnose({}, tmp_path)
    assert diagnosis.measurements.ranks == (rank(),)
    assert diagnosis.measurements.failures == {
        "with 2 ranks at work at once": "rank 1 died",
        SOUND.disk.path: "no space left",
    }
