"""Swap folders: a dead run's goes, what is living or not ours stays, and a run leaves none."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shardwise.offload import nvme as files
from shardwise.offload.nvme import SwapFolder

# The forked children touch nothing but files.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def stay(root: Path, rank: int) -> tuple[int, Path]:
    """A forked process that has a swap folder with a file until it is killed: its id, and the folder."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            folder = SwapFolder.open(root, rank)
            folder.allocate("states", 100)
            os.write(writer, os.fsencode(folder.path))
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        return child, Path(os.fsdecode(pipe.read1()))


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_killed_runs_folder_goes_and_a_living_ones_stays(tmp_path: Path) -> None:
    living, living_path = stay(tmp_path, 0)
    dead, dead_path = stay(tmp_path, 1)
    try:
        kill(dead)
        assert {living_path, dead_path} == set(tmp_path.iterdir())
        own = SwapFolder.open(tmp_path, 0)
        beside = SwapFolder.open(tmp_path, 0)  # of another engine of this process
        assert {living_path, own.path, beside.path} == set(tmp_path.iterdir())
        assert len(list(living_path.iterdir())) == 2
        own.close()
        beside.close()
    finally:
        kill(living)
    SwapFolder.check_free_space(tmp_path, 1)  # counts what dead runs hold as free
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "swap", tmp_path / "elsewhere"
    name = f"shardwise-swap-{socket.gethostname()}"
    others = [f"shardwise-swap-x{socket.gethostname()}-1-rank-0", f"{name}-1-1-rank-0", f"{name}-1-rank-0.old", "model"]
    for path in (elsewhere, *(root / each for each in others)):
        path.mkdir(parents=True)
        (path / "lock").touch()
    (root / f"{name}-2-rank-0").symlink_to(elsewhere)
    (root / f"{name}-3-rank-0").mkdir()
    (root / f"{name}-3-rank-0" / "unlocked").touch()
    (root / f"{name}-4-rank-0").touch()
    if os.geteuid() == 0:
        (root / f"{name}-5-rank-0").mkdir()
        (root / f"{name}-5-rank-0" / "lock").touch()
        os.chown(root / f"{name}-5-rank-0", 12345, 12345)
    (root / f"{name}-6-rank-0-1").mkdir()  # killed between making it and locking it
    before = set(tmp_path.rglob("*"))
    SwapFolder.open(root, 0).close()
    assert set(tmp_path.rglob("*")) == before - {root / f"{name}-6-rank-0-1"}


def test_where_there_are_no_locks_nothing_is_taken_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, flags: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    first = SwapFolder.open(tmp_path, 0)
    second = SwapFolder.open(tmp_path, 0)
    assert {first.path, second.path} == set(tmp_path.iterdir())
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_removed_before_it_was_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, num_calls = files._lock, 0

    def late(path: Path, is_new: bool = False) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            path.rmdir()
        return lock(path, is_new)

    monkeypatch.setattr(files, "_lock", late)
    folder = SwapFolder.open(tmp_path, 0)
    assert folder.path.name.endswith("-rank-0-1")
    assert num_calls == 2
    folder.close()


def test_a_lock_that_was_replaced_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(descriptor: int, flags: int) -> None:
        (tmp_path / "lock").unlink()
        (tmp_path / "lock").touch()

    (tmp_path / "lock").touch()
    (tmp_path / "hold").hardlink_to(tmp_path / "lock")  # else the new one may get the inode of the old one
    monkeypatch.setattr(fcntl, "flock", replace)
    with pytest.raises(FileNotFoundError):
        files._lock(tmp_path)


def test_a_forked_process_removes_nothing(tmp_path: Path) -> None:
    folder = SwapFolder.open(tmp_path, 0)
    child = os.fork()
    if child == 0:
        folder._remover()
        os._exit(0)
    os.waitpid(child, 0)
    beside = SwapFolder.open(tmp_path, 1)
    assert folder.path.is_dir()
    for each in (folder, beside):
        each.close()


def test_a_file_keeps_its_folder_and_both_go_with_the_last(tmp_path: Path) -> None:
    file = SwapFolder.open(tmp_path, 0).allocate("states", 10)
    file.read(0, torch.empty(10, dtype=torch.uint8)).result()
    del file
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("warm_python")
def test_a_plain_exit_leaves_nothing(tmp_path: Path) -> None:
    code = f"""
import torch
from pathlib import Path
from shardwise.offload.nvme import SwapFolder
folder = SwapFolder.open(Path({str(tmp_path)!r}), 0)
folder.allocate("states", 2**20).write(0, torch.ones(2**20, dtype=torch.uint8))
print(len(list(folder.path.iterdir())))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("2\n", "")
    assert list(tmp_path.iterdir()) == []
