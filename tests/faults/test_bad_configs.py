"""Configs that cannot work: each is refused in one line, at once, and leaves nothing; or it is one that resolves."""

import itertools
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.mutations import ended_after
from harness.refusals import refused
from harness.waiting import PATIENCE_S
from shardwise.cli import main as cli
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, all_keys
from shardwise.train.prepare import INDEX_NAME, TOKENIZER_NAME, TOKENS_NAME
from shardwise.train.setup import job_config, prepare_job_data, resolve_job

MAX_LINE = 700
WORDS = [
    "",
    "nope",
    "-",
    "none",
    "NaN",
    "inf",
    "a b",
    "a\nb",
    "a\x1b[31mb",
    "a\0b",
    "é" * 300,
    "x" * 5000,
    "\ud800",
    "../..",
]
NUMBERS = [-1, 0, 1, 2, 3, 7, 10**4, 10**6, 10**9, 10**12, 10**30, 10**5000, -(10**20), 0.5, 1.5, 1e-300, 1e300, -0.0]
OTHERS: list[Any] = [True, False, [], {}, [[]], [1, 2, 3], ["a", 1], {"a": 1}, [-1], [9999], [1.0, 1.0], [10**30]]
PLACES = ["pipe", "/dev/zero", "/dev/null", "/etc/passwd", "../..", "new/folder", "bytes", "~none/a"]

Accepted = tuple[dict[str, dict[str, Any]], Config]


def bad_values(num: int, seed: int) -> Iterator[dict[str, dict[str, Any]]]:
    """One to three keys of the config, each with a value that is likely to be wrong for it."""
    draw = random.Random(seed)
    keys = all_keys()
    for number in range(num):
        values: dict[str, dict[str, Any]] = {}
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            section, _, leaf = (keys[number % len(keys)] if not values else draw.choice(keys)).partition(".")
            values.setdefault(section, {})[leaf] = draw.choice(draw.choice([WORDS, NUMBERS, OTHERS]))
        yield values


def outcome(values: dict[str, dict[str, Any]], world_size: int) -> tuple[Config | None, str]:
    """The config, and no line; or none, and the line with which it is refused."""
    try:
        config = job_config(None, ["run.device=cpu"], base=values)
        resolve_job(config, world_size, num_local_ranks=1)
    except ConfigError as error:
        return None, str(error)
    return config, ""


def preparation(config: Config, values: dict[str, dict[str, Any]], text: Path) -> str:
    """The line with which a config's data is refused; empty where it is prepared.

    It is of the text where the values name no data: Python's library takes too long for each of many.
    """
    try:
        prepare_job_data(config if "path" in values.get("data", {}) else config.override([f"data.path={text}"]))
    except ConfigError as error:
        return str(error)
    return ""


@contextmanager
def at_once(values: dict[str, dict[str, Any]]) -> Iterator[None]:
    """No user waits: 5 s of the processor, however many others want it."""
    start_s = time.process_time()
    with ended_after(PATIENCE_S):
        yield
    assert time.process_time() - start_s < 5, f"{str(values)[:200]} keeps a user waiting"


def check_line(line: str) -> None:
    assert line.isprintable(), f"{line!r} is not one plain line"
    assert 10 < len(line) < MAX_LINE, line


def resolved(all_values: Iterable[dict[str, dict[str, Any]]], world_size: int) -> Iterator[Accepted]:
    """Those that are accepted, with their configs; the others are refused in a line."""
    for values in all_values:
        with at_once(values):
            config, line = outcome(values, world_size)
        if config is None:
            check_line(line)
        else:
            yield values, config


def check_preparations(tmp_path: Path, accepted: list[Accepted], monkeypatch) -> int:
    """Prepare the data of each in a folder of its own, which has a pipe; return how many are refused."""
    text, refused = tmp_path / "text.txt", 0
    text.write_text("".join(f"line {number} of a text\n" for number in range(3000)))
    for number, (values, config) in enumerate(accepted):
        place = tmp_path / str(number) / "a" / "b"  # "../.." leads to what is this test's own
        place.mkdir(parents=True)
        os.mkfifo(place / "pipe")
        monkeypatch.chdir(place)
        with at_once(values):
            line = preparation(config, values, text)
        if line:
            refused += 1
            check_line(line)
    left = {each.name for each in tmp_path.rglob("*") if each.is_file()} - {text.name}
    assert left <= {TOKENS_NAME, TOKENIZER_NAME, INDEX_NAME}
    return refused


@pytest.mark.parametrize(("num", "seed"), [(120, 1), pytest.param(600, 2, marks=pytest.mark.full)])
def test_bad_values_are_refused_in_one_line_at_once(tmp_path, monkeypatch, num, seed) -> None:
    """And the data of those that are accepted is prepared, or refused too; nothing but the cache is left."""
    monkeypatch.chdir(tmp_path)
    accepted = list(resolved(bad_values(num, seed), world_size=random.Random(seed).choice([1, 2, 8])))
    assert len(accepted) < num // 2
    assert list(tmp_path.iterdir()) == []
    check_preparations(tmp_path, accepted[:20], monkeypatch)


@pytest.mark.parametrize(("num", "seed"), [(20, 1), pytest.param(100, 2, marks=pytest.mark.full)])
def test_data_is_prepared_or_refused_in_one_line_at_once(tmp_path, monkeypatch, num, seed) -> None:
    draw = random.Random(seed)
    keys = [key.partition(".")[2] for key in all_keys() if key.startswith("data.")]
    values = [{"data": {key: draw.choice([*PLACES, *WORDS, *NUMBERS])}} for key in keys for _ in range(10 * num)]
    draw.shuffle(values)
    accepted = list(itertools.islice(resolved(values, world_size=1), num))
    assert 0 < check_preparations(tmp_path, accepted, monkeypatch) < num


@pytest.mark.parametrize("key", ["run.dir", "checkpoint.path", "data.path", "data.tokenizer", "data.cache_dir"])
def test_paths_of_unknown_users_and_endless_ones_are_refused_by_their_key(key) -> None:
    for value, code in (("~no such user/a", "home-unknown"), ("x" * 4096, "text-too-long")):
        with refused(code, key, value[:12]):
            resolve_job(job_config(None, [f"{key}={value}", "run.device=cpu"]), 1, num_local_ranks=1)
    resolve_job(job_config(None, [f"{key}=~/a", "run.device=cpu"]), 1, num_local_ranks=1)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 3000,
        "run.steps = " + "1" * 5000,
        "a" * 70_000,
        ".".join("a" * 2000) + " = 1",
        "[zero]\nstage = 3\nstage = 2",
        "zero = 3",
        "[zero]\n[zero]",
        "\x00",
        "zero.stage = nan",
        "run.name = 'a\tb'",
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, text, capsys) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    assert cli.main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error[:-1].isprintable()
    assert len(error) < MAX_LINE
    assert [each.name for each in tmp_path.iterdir()] == ["bad.toml"]


PLAN = ["plan", "--model", "25m", "--cluster", "h100:4", "--global-batch", "16"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--prepared", "/nowhere", "/nowhere"],
        ["train", "tiers.cores=[9999]"],
        ["train", "compile.enabled=true", "compile.backend=nope"],
        ["train", "--dry-run", "--world-size", "99999999999"],
        ["train", "batch.global_size=1000000000000"],
        ["train", "run.name=a/b"],
        ["timeline", "mesh.pp=1000000"],
        ["timeline", "mesh.pp=2", "batch.accumulation=1000000"],
        ["timeline", "mesh.pp=2", "--transfer-s", "1e308"],
        [*PLAN, "--seq", "99999999999999"],
        [*PLAN, "--seq", "9" * 5000],
        [*PLAN, "--cluster", "h100:" + "9" * 5000],
        ["plan", "--dry-run", "--ranks", "9" * 5000],
    ],
)
def test_commands_refuse_in_one_line_and_leave_nothing(tmp_path, monkeypatch, capsys, arguments) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwise.cli.train.install_stop_signal", lambda: None)
    monkeypatch.setattr("shardwise.launch.process_group.leave", lambda code: code)
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        *(["timeline", "mesh.pp=2", flag] for flag in ("--html", "--chrome-trace")),
        *([*PLAN, flag] for flag in ("--json", "--write")),
    ],
)
def test_a_folder_where_a_file_is_to_be_written_is_refused_with_a_fix(tmp_path, monkeypatch, capsys, arguments) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert cli.main([*arguments, "folder"]) in (1, 2)
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert "folder" in captured.err
    assert "; give" in captured.err
    assert list(tmp_path.rglob("*")) == [tmp_path / "folder"]


def shardwise(tmp_path: Path, before: str, *arguments: str, after: str = "") -> subprocess.CompletedProcess[str]:
    """Run the program in a shell whose state is not what programs expect."""
    command = f"{before}; exec {shlex.quote(sys.executable)} -m shardwise {shlex.join(arguments)} {after}"
    return subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=300)


def test_shells_that_allow_too_little_say_so_in_one_line(tmp_path) -> None:
    gone = shardwise(tmp_path, "mkdir gone; cd gone; rmdir ../gone", "train")
    assert (gone.returncode, gone.stderr.count("\n")) == (2, 1)
    closed = shardwise(tmp_path, ":", "timeline", "mesh.pp=2", "--html", "plan.html", after="<&- >&- 2>&-")
    assert closed.returncode == 0
    assert "1f1b" in (tmp_path / "plan.html").read_text()


def test_a_config_comes_back_from_what_it_wrote_whatever_its_text_holds(tmp_path: Path) -> None:
    config = Config.from_dict({"run": {"dir": 'quotes " and \\ and 世界'}})
    assert Config.from_json(json.dumps(json.loads(config.to_json()))) == config
