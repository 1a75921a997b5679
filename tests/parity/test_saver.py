"""The saver: a checkpoint is whole on all ranks or on none, training is not in its way, and errors are heard."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open

from harness.pool import WorkerPool
from harness.refusals import refused
from harness.waiting import PATIENCE_S, wait_until
from shardwise.checkpoint import commit as folder
from shardwise.checkpoint import writer as writing
from shardwise.checkpoint.async_saver import Saver, SaveRequest, StagingMemory
from shardwise.checkpoint.commit import read_manifest, step_folders
from shardwise.checkpoint.manifest import CheckpointError, Manifest
from shardwise.comm.mesh import open_store
from shardwise.layout.slicing import LocalTensor, intersect
from shardwise.runtime.state_shards import ScalarState, StateShard, TensorFlatState

SHAPE, NUMEL = (4, 6), 24
SHORT_S = 4.0  # longer than a machine may stall
ENTRY = re.compile(r"up\.weight(?:\[(\d+):(\d+), (\d+):(\d+)\])?")


def make_saver(rank: int, world_size: int, timeout_s: float = 60.0) -> Saver:
    return Saver(open_store(), rank, world_size, timeout_s, torch.device("cpu"))


def make_request(rank: int, world_size: int, root: Path, step: int = 100) -> SaveRequest:
    """A weight of the elements 0 to 23, of which each rank holds a flat range; and a bias that rank 0 writes."""
    start, stop = (NUMEL * each // world_size for each in (rank, rank + 1))
    pieces = intersect(LocalTensor.whole(SHAPE), start, stop)
    bias = LocalTensor.whole((3,)).pieces
    state_shards = (
        StateShard(
            "up.weight", (), "param", SHAPE, TensorFlatState(torch.arange(float(start), float(stop))), pieces, pieces
        ),
        StateShard(
            "up.bias", (), "param", (3,), TensorFlatState(torch.ones(3)), bias, written=bias if rank == 0 else ()
        ),
    )
    manifest = Manifest(step=step, tensors=(), files={}, extra={"epochs": [1]})
    return SaveRequest(root, manifest, state_shards, (ScalarState("up.weight", "step", 3.0, "float32"),))


def start(saver: Saver, request: SaveRequest, wait: bool) -> None:
    saver.start(request.manifest.step, lambda: request, wait)


def saved_weight(step_folder: Path) -> list[float]:
    """All of the weight, read with the public library alone."""
    whole = torch.full(SHAPE, -1.0)
    for path in step_folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118, it is no mapping
                if found := ENTRY.fullmatch(key):
                    first, last, left, right = map(int, found.groups()) if found[1] else (0, SHAPE[0], 0, SHAPE[1])
                    whole[first:last, left:right] = file.get_tensor(key)
    return whole.flatten().tolist()


VALUES = [float(each) for each in range(NUMEL)]


def steps_in(root: Path) -> list[str]:
    return sorted(each.name for each in root.iterdir() if each.is_dir())


@contextmanager
def writing_by(before: Callable[[], object]) -> Iterator[list[tuple[StateShard, ...]]]:
    """Run `before` in front of each write; gives the state shards that were written."""
    write, written = writing.write_state_shards, []

    def wrapped(path: Path, file: str, state_shards: tuple[StateShard, ...], *args: Any, **kwargs: Any) -> Any:
        before()
        written.append(state_shards)
        return write(path, file, state_shards, *args, **kwargs)

    with patch.object(writing, "write_state_shards", wrapped):
        yield written


def error_of(call: Callable[[], object]) -> CheckpointError | None:
    try:
        call()
    except CheckpointError as error:
        return error
    return None


def poll_until_error(saver: Saver) -> CheckpointError | None:
    """As a training loop would come to it."""
    errors: list[CheckpointError] = []
    wait_until(lambda: bool(errors.extend(filter(None, [error_of(saver.poll)])) or errors))
    return errors[0] if errors else None


def save(rank: int, world_size: int, root: Path, wait: bool) -> str:
    saver = make_saver(rank, world_size)
    start(saver, make_request(rank, world_size, root), wait)
    committed = saver.last_committed if wait else saver.wait()
    saver.close()
    return committed.name if committed else ""


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("wait", [True, False])
def test_a_checkpoint_has_the_parts_of_all_ranks(ranks: WorkerPool, tmp_path: Path, num_ranks: int, wait: bool) -> None:
    assert ranks(num_ranks).run(save, tmp_path, wait) == ["step-00000100"] * num_ranks
    assert steps_in(tmp_path) == ["step-00000100"]
    manifest = read_manifest(tmp_path / "step-00000100")
    assert sorted(manifest.files) == [f"rank-{r:05d}-of-{num_ranks:05d}.safetensors" for r in range(num_ranks)]
    assert (manifest.step, manifest.extra) == (100, {"epochs": [1]})
    assert {tensor.name for tensor in manifest.tensors} == {"up.weight", "up.bias"}
    assert manifest.saved_at.endswith("+00:00")
    assert manifest.library[0].isdigit()
    assert saved_weight(tmp_path / "step-00000100") == VALUES


def save_and_train_on(rank: int, world_size: int, root: Path) -> tuple[int, int, bool]:
    """Overwrite what is saved before anything is written; returns the bytes written, those due, and what it was."""
    saver, gate = make_saver(rank, world_size), threading.Event()
    request = make_request(rank, world_size, root)
    with writing_by(lambda: gate.wait(PATIENCE_S)) as written:
        start(saver, request, wait=False)
        is_saving = saver.is_saving
        for state_shard in request.state_shards:
            state_shard.flat.write(0, torch.full((state_shard.flat.numel,), -1.0))
        gate.set()
        saver.wait()
    num_bytes = written[0][0].flat.tensor.untyped_storage().nbytes()
    return num_bytes, sum(each.num_written_bytes for each in request.state_shards), is_saving and not saver.is_saving


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_changes_after_the_start_is_not_saved(ranks: WorkerPool, tmp_path: Path, num_ranks: int) -> None:
    results = ranks(num_ranks).run(save_and_train_on, tmp_path)
    assert saved_weight(tmp_path / "step-00000100") == VALUES
    weight_bytes = NUMEL // num_ranks * 4
    expected = [(size, size, True) for size in (weight_bytes + (12 if rank == 0 else 0) for rank in range(num_ranks))]
    assert results == expected


@dataclass(frozen=True)
class Failed:
    text: str
    cause: str
    said_again: bool
    committed: str


def fail_to_write(rank: int, world_size: int, root: Path, failing: int, wait: bool) -> Failed:
    """Save step 100; fail at step 200 on one rank; save step 300."""
    saver = make_saver(rank, world_size)
    start(saver, make_request(rank, world_size, root, 100), wait)
    saver.wait()

    def fail() -> None:
        if rank == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with writing_by(fail):
        error = error_of(lambda: start(saver, make_request(rank, world_size, root, 200), wait))
        error = error if wait else poll_until_error(saver)
    names = steps_in(root)
    said_again = error_of(saver.wait) is not None
    start(saver, make_request(rank, world_size, root, 300), wait)
    committed = saver.wait()
    assert committed is not None
    return Failed(
        f"{getattr(error, 'code', '')}: {error}",
        repr(error.__cause__) if error else "",
        said_again,
        f"{names} {committed.name}",
    )


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(("num_ranks", "failing"), [(1, 0), (3, 0), (3, 1)])
def test_an_error_on_one_rank_reaches_all(
    ranks: WorkerPool, tmp_path: Path, num_ranks: int, failing: int, wait: bool
) -> None:
    results = ranks(num_ranks).run(fail_to_write, tmp_path, failing, wait)
    assert len({failed.text for failed in results}) == 1
    assert re.fullmatch(
        f"rank-failed: checkpoint of step 200 failed on rank {failing}: .*{os.strerror(errno.ENOSPC)}.*",
        results[0].text,
    )
    assert [failed.cause != "None" for failed in results] == [rank == failing for rank in range(num_ranks)]
    assert not any(failed.said_again for failed in results)
    # The folder of the step that failed is gone, at the latest when rank 0 has said so.
    assert results[0].committed == "['step-00000100'] step-00000300"
    assert steps_in(tmp_path) == ["step-00000100", "step-00000300"]
    assert saved_weight(tmp_path / "step-00000100") == VALUES


def fail_to_begin(rank: int, world_size: int, root: Path, what: str) -> str:
    saver = make_saver(rank, world_size)
    request = make_request(rank, world_size, root)
    if what == "taken" and rank == 0:
        (root / "step-00000100").mkdir()
    elif what == "another root" and rank == 1:
        request = replace(request, root=root / "of rank 1")
    elif what == "another step" and rank == 1:
        request = replace(request, manifest=replace(request.manifest, step=90))
    elif what == "no space" and rank == 1:
        elements = LocalTensor.whole((2**58,)).pieces
        huge = StateShard("up", (), "param", (2**58,), TensorFlatState(torch.ones(1).expand(2**58)), elements, elements)
        request = replace(request, state_shards=(huge,))
    with patch("shardwise.checkpoint.commit._FOLDER_S", 0.5 if what == "another root" else PATIENCE_S):
        error = error_of(lambda: start(saver, request, wait=False)) or error_of(saver.wait)
    return f"{getattr(error, 'code', '')}: {error}"


@pytest.mark.parametrize(
    ("what", "code", "text"),
    [
        ("taken", "checkpoint-exists", "rank 0: .*step-00000100"),
        ("another root", "folder-not-shared", "rank 1: .*of rank 1/step-00000100"),
        ("another step", "save-steps-differ", "rank 0: rank 1 saves step 90, not 100"),
        ("no space", "no-copy-memory", "rank 1: "),
    ],
)
def test_a_save_that_cannot_begin_fails_on_all_ranks(
    ranks: WorkerPool, tmp_path: Path, what: str, code: str, text: str
) -> None:
    results = ranks(2).run(fail_to_begin, tmp_path, what)
    assert len(set(results)) == 1
    assert re.match(f"{code}: checkpoint of step 100 failed on {text}", results[0]), results[0]
    assert steps_in(tmp_path) == (["step-00000100"] if what == "taken" else [])


def start_twice(rank: int, world_size: int, root: Path) -> list[str]:
    saver, names = make_saver(rank, world_size), []
    gate = threading.Event()
    with writing_by(lambda: gate.wait(PATIENCE_S)):
        start(saver, make_request(rank, world_size, root, 100), wait=False)
        threading.Timer(0.1, gate.set).start()
        start(saver, make_request(rank, world_size, root, 200), wait=False)
        assert saver.last_committed is not None
        names.append(saver.last_committed.name)
        saver.close()
        names.append(saver.last_committed.name)
    return names


def test_a_save_waits_for_the_one_before_and_close_for_the_last(ranks: WorkerPool, tmp_path: Path) -> None:
    assert ranks(2).run(start_twice, tmp_path) == [["step-00000100", "step-00000200"]] * 2


def break_down() -> None:
    raise SystemExit("of a thread")


def test_an_error_that_was_not_raised_yet_comes_before_the_next_save(tmp_path: Path) -> None:
    saver = make_saver(0, 1)
    with writing_by(break_down):
        start(saver, make_request(0, 1, tmp_path, 100), wait=False)
        assert wait_until(lambda: not saver.is_saving)
    with refused("save-failed", "step 100", "SystemExit: of a thread") as caught:
        start(saver, make_request(0, 1, tmp_path, 200), wait=False)
    assert isinstance(caught.value.__cause__, SystemExit)
    saver.poll()
    start(saver, make_request(0, 1, tmp_path, 200), wait=False)
    assert saver.wait() == tmp_path / "step-00000200"


def test_close_raises_what_was_not_raised_yet_and_nothing_twice(tmp_path: Path) -> None:
    saver = make_saver(0, 1)
    with writing_by(break_down):
        start(saver, make_request(0, 1, tmp_path), wait=False)
        with refused("save-failed", "of a thread"):
            saver.close()
    saver.close()


def test_close_gives_the_memory_of_copies_back(tmp_path: Path) -> None:
    memory = StagingMemory(torch.device("cpu"))
    with patch("shardwise.checkpoint.async_saver.StagingMemory", lambda device: memory):
        saver = make_saver(0, 1)
    start(saver, make_request(0, 1, tmp_path), wait=False)
    num_bytes = memory.num_bytes
    saver.close()
    assert (num_bytes > 0, memory.num_bytes) == (True, 0)


def hang(rank: int, world_size: int, root: Path) -> tuple[str, list[str]]:
    """Rank 1 is stuck in its write for as long as rank 0 waits for it."""
    saver, store = make_saver(rank, world_size, timeout_s=SHORT_S), open_store()
    assert store is not None

    def wait_for_others() -> None:
        while rank == 1 and not store.check(["given up"]):
            time.sleep(0.02)

    with writing_by(wait_for_others):
        start(saver, make_request(rank, world_size, root), wait=False)
        if rank == 0:
            error = poll_until_error(saver)
            store.set("given up", "")
        else:
            error = poll_until_error(saver)
    return str(error), steps_in(root)


def test_a_rank_that_hangs_is_named_and_nothing_is_committed(ranks: WorkerPool, tmp_path: Path) -> None:
    (text, names), (text_of_hanging, _) = ranks(2).run(hang, tmp_path)
    assert text == f"checkpoint of step 100 failed on rank 1: it has shown no progress for {SHORT_S:g} s; see its log"
    assert text_of_hanging == text
    assert names == []
    assert step_folders(tmp_path) == []


def test_old_checkpoints_go_once_the_new_one_is_there(tmp_path: Path) -> None:
    saver, seen = make_saver(0, 1), []
    for step in (100, 200, 300):
        with writing_by(lambda: seen.append(len(step_folders(tmp_path)))):
            request = replace(make_request(0, 1, tmp_path, step), keep_last=1, keep_every=200)
            start(saver, request, wait=True)
    assert steps_in(tmp_path) == ["step-00000200", "step-00000300"]
    assert seen == [0, 1, 1]


def test_what_retention_meets_is_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = make_saver(0, 1)
    with patch.object(folder, "retain", side_effect=CheckpointError("a folder is read-only")):
        start(saver, make_request(0, 1, tmp_path), wait=False)
        assert saver.wait() == tmp_path / "step-00000100"
    saver.poll()
    assert "a folder is read-only" in caplog.text


SCRIPT = """
import sys, threading, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from shardwise.checkpoint import writer as writing
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.async_saver import Saver, SaveRequest
from shardwise.runtime.state_shards import TensorFlatState
from shardwise.runtime.state_shards import StateShard
from shardwise.layout.slicing import LocalTensor

write = writing.write_state_shards
def slow(*args, **kwargs):
    threading.main_thread().join()  # the main thread ends first
    time.sleep(0.1)
    return write(*args, **kwargs)
writing.write_state_shards = slow
pieces = LocalTensor.whole((3,)).pieces
held = StateShard("up.bias", (), "param", (3,), TensorFlatState(torch.ones(3)), pieces, pieces)
saver = Saver(None, 0, 1, 20.0, torch.device("cpu"))
saver.start(7, lambda: SaveRequest(Path(sys.argv[1]), Manifest(7, (), {}), (held,)), wait=False)
"""


@pytest.mark.usefixtures("warm_python")
def test_a_program_that_ends_has_its_checkpoint(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert steps_in(tmp_path) == ["step-00000007"]
