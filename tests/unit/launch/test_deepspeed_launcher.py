"""The program `deepspeed`: hostfiles, filters, and ranks that torchrun starts, over a stand-in for ssh too."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.paths import SOURCE
from shardwise.config.errors import ConfigError
from shardwise.launch.as_deepspeed import deepspeed_environment
from shardwise.launch.deepspeed import main, select_slots
from shardwise.launch.hosts import read_hostfile

HOSTS = st.from_regex(r"[abcxyz0189][abcxyz0189.-]{0,7}", fullmatch=True)
POOLS = st.dictionaries(HOSTS, st.integers(1, 5), min_size=1, max_size=4)
SCRIPT = """
import os, sys, time
names = ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "FROM_ENV_FILE", "HF_TOKEN")
os.write(1, " ".join([*(os.environ.get(name, "-") for name in names), *sys.argv[1:], chr(10)]).encode())
if "--fail" in sys.argv and os.environ["RANK"] == "1":
    sys.exit(1)
if "--fail" in sys.argv:
    time.sleep(600)
if "--meet" in sys.argv:
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
"""
# Runs here what ssh would run there.
SSH = """#!/bin/sh
echo "$*" >> argv
while [ "${1#-}" != "$1" ]; do case "$1" in -o|-p) shift 2;; *) shift;; esac; done
[ "$1" = none ] && exit 255
shift
[ "$*" = "hostname -I" ] && echo 127.0.0.1 && exit
exec sh -c "$*"
"""


@st.composite
def pools_and_specs(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Hosts with their slots, and some of them, each with slots or with none, which means all."""
    pool = draw(POOLS)
    hosts = draw(st.lists(st.sampled_from(sorted(pool)), min_size=1, unique=True))
    return pool, {host: draw(st.lists(st.integers(0, pool[host] - 1), max_size=4)) for host in hosts}


def text_of(spec: Mapping[str, list[int]]) -> str:
    return "@".join(host + (":" + ",".join(map(str, slots)) if slots else "") for host, slots in spec.items())


@given(POOLS, st.lists(st.sampled_from(["", "  ", "# a comment", "#x slots=3"]), max_size=3))
def test_a_hostfile_is_read_in_its_order(pool: dict[str, int], noise: list[str]) -> None:
    lines = [*noise, *(f" {host}\t slots={count} \n" for host, count in pool.items())]
    assert list(read_hostfile(lines).items()) == list(pool.items())


@given(pools_and_specs())
def test_include_and_exclude_share_out_all_slots(case: tuple[dict[str, int], dict[str, list[int]]]) -> None:
    pool, spec = case
    included, excluded = select_slots(pool, include=text_of(spec)), select_slots(pool, exclude=text_of(spec))
    wanted = {host: sorted(set(spec[host])) or list(range(pool[host])) for host in pool if host in spec}
    assert list(included.items()) == list(wanted.items())
    for host, count in pool.items():
        assert sorted(included.get(host, []) + excluded.get(host, [])) == list(range(count))
    assert [] not in excluded.values()
    assert list(excluded) == [host for host in pool if host in excluded]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("-H file -i a -e b", "include-and-exclude"),
        ("-H file -i c", "host-not-in-file"),
        ("-H file -i a:2", "no-such-slot"),
        ("-H file -e a:0,x", "slots-not-read"),
        ("-H file -i a --num_gpus 1", "hosts-said-twice"),
        ("-H twice", "hostfile-host-twice"),
        ("-H odd", "hostfile-line"),
        ("-H empty", "hostfile-empty"),
        ("-H nowhere --num_nodes 2", "no-hostfile"),
        ("-H file --launcher openmpi", "launcher-not-known"),
        ("--autotuning tune", "no-autotuning"),
        ("-H file --no_ssh", "no-ssh-needs-rank"),
        ("-H file -i none@a", "host-unreachable"),
    ],
)
def test_refusals(
    options: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("none slots=1\na slots=2\nb slots=1")
    for name, text in {"twice": "a slots=1\na slots=2", "odd": "a slots", "empty": "#"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{stand_in_for_ssh(tmp_path)}{os.pathsep}{os.environ['PATH']}")
    assert main([*options.split(), "train.py"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith(f"[{code}]")


def test_an_option_of_hosts_that_has_no_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="write a:0,1"):
        select_slots({"a": 2}, include="a:")


def stand_in_for_ssh(folder: Path) -> Path:
    """Write a program `ssh` that stays on this machine; return its folder."""
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(0o755)
    return program.parent


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the program `deepspeed` as a user's shell finds it."""
    (folder / "train.py").write_text(SCRIPT)
    environ = {**os.environ, **deepspeed_environment({**os.environ, "PYTHONPATH": str(SOURCE.parent)})}
    environ |= {"HOME": str(folder)}
    environ["PATH"] = f"{stand_in_for_ssh(folder)}{os.pathsep}{environ['PATH']}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["deepspeed", f"--master_port={port}", *options]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (["train.py", "--x", "a b"], "--local_rank={} --x a b"),
        (["--no_local_rank", "train.py", "--x"], "--x"),
        (["--module", "train"], "--local_rank={}"),
        (["--no_python", sys.executable, "train.py"], None),
    ],
    ids=["script", "no local rank", "module", "program"],
)
def test_two_ranks_here(options: list[str], arguments: str | None, tmp_path: Path) -> None:
    result = run(tmp_path, "--num_gpus=2", *options)
    if arguments is None:  # the program gets --local_rank first, and Python knows no such option
        assert "unknown option --local_rank" in result.stderr
        return
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    assert lines == [f"{rank} 2 0,1 - - {arguments.format(rank)} " for rank in range(2)]


def test_two_hosts_by_ssh(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("one slots=4\ntwo slots=4\n")
    (tmp_path / ".deepspeed_env").write_text("FROM_ENV_FILE=a b=c\nHF_TOKEN=hunter2\n")
    result = run(tmp_path, "-H", "hosts", "-i", "one:3@two:1", "train.py", "--meet", "it's")
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    assert lines == [
        f"{rank} 2 {device} a b=c hunter2 --local_rank=0 --meet it's " for rank, device in ((0, 3), (1, 1))
    ]
    assert "hunter2" not in (tmp_path / "argv").read_text()
    assert not list(tmp_path.glob(".shardwise-*"))


def test_a_failure_on_one_host_ends_all(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("one slots=1\ntwo slots=1\n")
    assert run(tmp_path, "-H", "hosts", "train.py", "--fail").returncode == 1
