"""Folders of runs that were made to hurt: pipes, devices, long numbers, deep and long lines; and what is no run."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.mutations import ended_after
from harness.refusals import refused
from harness.run_folders import write_run
from shardwise.cli.main import main
from shardwise.config.errors import ConfigError
from shardwise.doctor.system_info import read_disk
from shardwise.report import page, run_folder
from shardwise.report.run_folder import is_run, run_source

OTHERS = ("memory.json", "prediction.json", "environment.json", "wire.json", "timeline.json")
NAMES = ("metrics.jsonl", "config.json", *OTHERS)
DEEP = "[" * 100_000 + "]" * 100_000
LONG = "9" * 400


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def bounds() -> Iterator[None]:
    """Ten seconds and 1 GiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start_s = time.monotonic()
    with ended_after(60.0):
        yield
    assert time.monotonic() - start_s < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def huge(path: Path) -> None:
    os.truncate(path, 2**40)  # which takes no space


HARMS: dict[str, Callable[[Path], object]] = {
    "pipe": pipe,
    "device": device,
    "folder": folder,
    "huge": huge,
    "deep": lambda path: path.write_text(DEEP),
    "long": lambda path: path.write_text(f'{{"step": {LONG}, "limit_bytes": {LONG}}}\n'),
    "digits": lambda path: path.write_text(f'{{"step": {"9" * 5000}}}\n'),
    "list": lambda path: path.write_text("[1, 2]\n"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "steering": lambda path: path.write_text('{"a\\u001b[2J": "\\u202e", "step": 1}\n'),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("harm", HARMS)
def test_a_run_is_shown_without_what_cannot_be_read(
    run: Path, harm: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if (harm, name) == ("huge", "metrics.jsonl"):
        pytest.skip("has a test of its own")
    HARMS[harm](run / name)
    assert main(["report", str(run)]) == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    if name in OTHERS:
        assert (name in printed.err) == (harm not in ("long", "steering"))
    assert (run / "report.html").stat().st_size < page.MAX_BYTES


LINES = (
    f'{{"step": {LONG}}}', '{"step": 1e308}', '{"step": -1}', '{"step": 1.5}', '{"step": NaN}', '{"step": Infinity}',
    '{"step": "1"}', '{"step": true}', '{"loss": 1}', "[]", "1", "null", f'{{"step": 5, "x": {DEEP}}}',
    '{"step": 5, "x": ' + "[" * 2000 + "}", '{"step": 5, "x": "' + "x" * 2**21 + '"}', "\x00",
    '{"step": ' + "9" * 5000 + "}",
)  # fmt: skip


def test_lines_of_no_step_are_left_out_and_counted(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in LINES)
        file.write('{"step": 22, "loss": 1.25}\n')
    found = run_source(run, page.share_of(1))
    curves = found["curves"]
    assert curves["num_steps"] == 22
    assert len(LINES) <= curves["num_damaged"] <= len(LINES) + 2  # of a line that is too long there are parts
    assert found["facts"][0]["value"] == "22"


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e308", LONG, f"-{LONG}", '"x"', "[1]", "{}", "true"]
)
def test_numbers_that_are_none_are_gaps(run: Path, value: str) -> None:
    keys = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "step_s", "eval_loss")
    line = ", ".join(f'"{key}": {value}' for key in keys)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 22, {line}, "peak_bytes": {{"a": {value}}}}}\n')
    (run / "memory.json").write_text(
        f'{{"step": {value}, "limit_bytes": {value}, "ranks": [{{"a": {value}}}, {value}]}}'
    )
    (run / "wire.json").write_text(f'{{"axes": [{{"axis": {value}, "op": {value}, "bytes": {value}}}, {value}]}}')
    parts = f'{{"peak": {{"a": {value}}}, "parts": {{"a": {value}}}}}'
    (run / "prediction.json").write_text(f'{{"predicted": {parts}, "measured": {parts}}}')
    assert main(["report", str(run)]) == 0
    found = run_source(run, page.share_of(1))
    assert found["curves"]["num_steps"] == 22
    assert all(len(fact["value"]) < 60 for fact in found["facts"])
    page.draw([found])


def test_of_long_metrics_some_pieces_are_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_MAX_METRICS_BYTES", 1 << 14)
    monkeypatch.setattr(run_folder, "_PIECE_BYTES", 1 << 10)
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 5001)]
    (run / "metrics.jsonl").write_text("".join(lines))
    found = run_source(run, page.share_of(1))
    assert 300 < found["curves"]["num_steps"] < 1000
    assert found["curves"]["num_damaged"] == 0
    assert "metrics.jsonl beyond every" in found["what"]


def test_metrics_of_a_terabyte_take_seconds(run: Path) -> None:
    os.truncate(run / "metrics.jsonl", 2**40)
    assert main(["report", str(run)]) == 0


@pytest.mark.parametrize("values", [None, {}, {"model_type": "llama"}, [1], {"run": 1, "model": 2, "data": 3}])
def test_a_folder_of_no_run_is_refused(tmp_path: Path, values: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as one of Hugging Face's, which has a config.json too."""
    if values is not None:
        (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "metrics.jsonl").write_text("no step\n")
    assert not is_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    assert "[not-a-run]" in capsys.readouterr().err
    os.unlink(tmp_path / "metrics.jsonl")
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert main(["report", str(tmp_path)]) == 2


def test_a_full_disk_names_the_page(run: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def full(*_: object) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shardwise.config.written_files.create", full)
    assert main(["report", str(run)]) == 1
    assert capsys.readouterr().err == f"shardwise: {run / 'report.html'}: No space left on device [disk-full]\n"


def test_a_page_is_written_through_no_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for name in ("report.html", f".report.html.{os.getpid()}"):
        (run / name).symlink_to(tmp_path / "mine")
    assert main(["report", str(run)]) == 0
    assert (tmp_path / "mine").read_text() == "mine"
    assert "<html" in (run / "report.html").read_text()
    os.unlink(run / "report.html")
    os.mkfifo(run / "report.html")  # which no one reads
    assert main(["report", str(run)]) == 0


@pytest.mark.parametrize("name", ["rank", "lane", "start_s", "end_s", "action"])
@pytest.mark.parametrize("value", [10**400, 1e308, float("nan"), float("inf"), -1, "9" * 5000, [], None, {}, 2**40])
def test_actions_of_no_run_are_refused(run: Path, name: str, value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trace = json.loads((run / "timeline.json").read_text())
    event = next(each for each in trace["traceEvents"] if "action" in each.get("args", {}))
    event["args"][name] = f"{value}F{value}" if name == "action" and isinstance(value, int) else value
    (run / "timeline.json").write_text(json.dumps(trace))
    assert main(["report", str(run)]) == 0
    code = main(["timeline", "--recorded", str(run / "timeline.json")])
    assert code == (0 if name == "lane" or (name, value) == ("start_s", -1) else 2)
    assert all(len(line) < 3000 for line in capsys.readouterr().err.splitlines())


def test_a_trace_of_many_streams_is_refused(run: Path) -> None:
    trace = json.loads((run / "timeline.json").read_text())
    event = next(each for each in trace["traceEvents"] if "action" in each.get("args", {}))
    trace["traceEvents"] = [{"args": {**event["args"], "lane": str(number)}} for number in range(200)]
    (run / "timeline.json").write_text(json.dumps(trace))
    assert main(["timeline", "--recorded", str(run / "timeline.json")]) == 2
    assert main(["report", str(run)]) == 0


@pytest.mark.parametrize("place", ["/etc/passwd", "/etc/passwd/below", "/dev/null", "/dev/null/below"])
def test_what_is_no_folder_has_no_disk(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    with refused("not-a-folder", "/etc/passwd" if "etc" in place else "/dev/null"):
        read_disk(Path(place))
    for flag in ("--nvme-path", "--dir"):
        assert main(["doctor", "--quick", flag, place]) == 2
        assert "is not a folder" in capsys.readouterr().err


def test_a_link_to_nothing_has_no_disk(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(ConfigError):
            read_disk(tmp_path / name)
    assert read_disk(tmp_path / "none" / "below").path == str(tmp_path)
