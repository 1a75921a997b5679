"""Ranks that hang in a save, come to it at different steps, save twice at once, or end while it is under way."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from harness.faults import (
    NUM_RANKS,
    NUM_STEPS,
    Moment,
    OnCall,
    Whole,
    make_engine,
    once_at,
    stored,
    take_step,
    watching,
)
from harness.pool import WorkerPool
from harness.time_outs import give_up_after
from harness.waiting import PATIENCE_S
from shardwise.checkpoint.commit import read_manifest, step_folders, step_of
from shardwise.checkpoint.manifest import CheckpointError

pytestmark = pytest.mark.usefixtures("warm_python")

FILE = "rank-*"
ROOT = "checkpoints"
SHORT_S = 4.0  # longer than a machine may stall


def stop_in_save(rank: int, world_size: int, root: Path, stopped: int, place: Path) -> tuple[str, float]:
    """A rank is stopped as a debugger or a hanging mount would, until the other has given it up."""
    engine = make_engine(PATIENCE_S)
    take_step(engine, rank)
    engine.save(root)
    take_step(engine, rank)
    if rank == stopped:
        place.write_text(str(os.getpid()))
    dist.barrier()
    give_up_after(engine, SHORT_S)
    at = once_at(Moment("writev", FILE, nth=2), lambda: os.kill(os.getpid(), signal.SIGSTOP))
    with watching(at if rank == stopped else lambda *_: None):
        said = ""
        try:
            engine.save(root)
        except CheckpointError as error:
            said = f"{error.code}: {error}"
        finally:
            if rank != stopped:
                os.kill(int(place.read_text()), signal.SIGCONT)
    dist.barrier()
    give_up_after(engine, PATIENCE_S)
    loss = 0.0
    while engine.num_steps < NUM_STEPS:
        loss = take_step(engine, rank)
    engine.save(root)
    return said, loss


@pytest.mark.parametrize("stopped", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_rank_that_hangs_in_a_save_is_given_up_and_named(
    ranks: WorkerPool, tmp_path: Path, whole_run: Whole, stopped: int
) -> None:
    root = tmp_path / ROOT
    results = ranks(NUM_RANKS).run(stop_in_save, root, stopped, tmp_path / "pid")
    said, loss = results[1 - stopped]
    assert said.startswith(f"rank-absent: checkpoint of step 2 failed on rank {stopped}: ")
    assert f"{SHORT_S:g} s" in said
    assert loss == whole_run.end.loss
    # Rank 0 decides what is a checkpoint: where it wakes up, and all have written, this one is.
    assert results[stopped] == ("" if stopped == 0 else said, whole_run.end.loss)
    steps = [step_of(each) for each in step_folders(root) if read_manifest(each)]
    assert steps == ([NUM_STEPS, 2, 1] if stopped == 0 else [NUM_STEPS, 1])
    assert stored(root) == whole_run.stored


def save_two_engines(rank: int, world_size: int, root: Path) -> list[float]:
    """Both save beside the training, at once; and both go on from what they have saved."""
    engines = [make_engine(), make_engine()]
    for step in range(NUM_STEPS - 1):
        for number, engine in enumerate(engines):
            if step >= number:
                take_step(engine, rank)
    for number, engine in enumerate(engines):
        engine.save(root / str(number), wait=False)
    losses = [take_step(engine, rank) for engine in engines]
    for engine in engines:
        engine.close()
    for number, loss in enumerate(losses):
        with make_engine() as engine:
            assert engine.load(root / str(number)).step == NUM_STEPS - 1 - number
            assert take_step(engine, rank) == loss
    return losses


def test_two_engines_save_at_once(ranks: WorkerPool, tmp_path: Path, whole_run: Whole) -> None:
    results = ranks(NUM_RANKS).run(save_two_engines, tmp_path)
    assert results[0] == results[1]
    assert results[0][0] == whole_run.end.loss != results[0][1]


def save_at_different_steps(rank: int, world_size: int, root: Path, is_background: bool) -> tuple[str, float]:
    engine = make_engine()
    take_step(engine, rank)
    engine.parts.state.num_steps += rank
    said = ""
    try:
        engine.save(root, wait=not is_background)
        engine.finish_saves()
    except CheckpointError as error:
        said = f"{error.code}: {error}"
    engine.parts.state.num_steps = 1
    engine.save(root, wait=not is_background)
    loss = 0.0
    while engine.num_steps < NUM_STEPS:
        loss = take_step(engine, rank)
    engine.save(root)  # finishes the one before
    return said, loss


@pytest.mark.parametrize("is_background", [True, pytest.param(False, marks=pytest.mark.full)])
def test_ranks_that_save_different_steps(
    ranks: WorkerPool, tmp_path: Path, whole_run: Whole, is_background: bool
) -> None:
    results = ranks(NUM_RANKS).run(save_at_different_steps, tmp_path / ROOT, is_background)
    assert results[0] == results[1]
    said, loss = results[0]
    assert re.fullmatch(
        "save-steps-differ: checkpoint of step [12] failed on rank 0: rank 1 saves step 2, not 1.*", said
    )
    assert loss == whole_run.end.loss
    assert [step_of(each) for each in step_folders(tmp_path / ROOT)] == [NUM_STEPS, 1]


def fail_on_rank_1(rank: int) -> OnCall:
    def fail() -> None:
        if rank == 1:
            raise OSError(errno.EIO, "Input/output error")

    return once_at(Moment("fsync", FILE), fail)


def close_while_saving(rank: int, world_size: int, root: Path, fails: bool) -> tuple[list[bool], str, list[int | None]]:
    """Save, train, save again, close: each while the save before is held up; the last may fail."""
    engine, gate = make_engine(), threading.Event()
    held = once_at(Moment("fsync", FILE), lambda: gate.wait(20))
    were_saving, said = [], ""
    with watching(held):
        take_step(engine, rank)
        engine.save(root, wait=False)
        take_step(engine, rank)
        were_saving.append(engine.checkpoints.saver.is_saving)
        threading.Timer(0.1, gate.set).start()
        engine.save(root, wait=False)
    engine.finish_saves()
    with watching(fail_on_rank_1(rank) if fails else lambda *_: None):
        take_step(engine, rank)
        engine.save(root, wait=False)
        try:
            engine.close()
        except CheckpointError as error:
            said = f"{error.code}: {error}"
    were_saving.append(engine.checkpoints.saver.is_saving)
    model = engine.model
    assert all(parameter.shape.numel() for parameter in model.parameters())  # given back, whole
    return were_saving, said, [step_of(each) for each in step_folders(root)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_close_finishes_the_save_under_way_or_says_why_not(ranks: WorkerPool, tmp_path: Path, fails: bool) -> None:
    results = ranks(NUM_RANKS).run(close_while_saving, tmp_path / ROOT, fails)
    were_saving, said, steps = results[0]
    assert were_saving == [True, False]
    assert steps == ([2, 1] if fails else [3, 2, 1])
    message = "write-refused: checkpoint of step 3 failed on rank 1: .*/rank-00001-of-00002.safetensors: .*"
    assert re.fullmatch(message if fails else "", said)
    assert [each[:2] for each in results] == [([True, False], said)] * NUM_RANKS


SCRIPT = """
import sys, time
from pathlib import Path
from harness.faults import Moment, make_engine, once_at, take_step, watching
import torch.distributed as dist
rank = int(sys.argv[2])
engine = make_engine()
take_step(engine, rank)
# Held up until after the main thread has ended, for a while.
once = watching(once_at(Moment("fsync", "rank-*"), lambda: time.sleep(0.5)))
once.__enter__()
engine.save(Path(sys.argv[1]), wait=False)
print("end of the main thread", engine.checkpoints.saver.is_saving)
"""


@pytest.mark.full
def test_programs_that_end_have_their_checkpoint(tmp_path: Path) -> None:
    """Rank 0 holds the store, and may end before the others have heard how the save went."""
    root = tmp_path / ROOT
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    programs = []
    for rank in range(NUM_RANKS):
        given = {
            "RANK": rank,
            "WORLD_SIZE": NUM_RANKS,
            "LOCAL_RANK": rank,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        environment = os.environ | {name: str(value) for name, value in given.items()}
        environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SCRIPT, str(root), str(rank)]
        programs.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    for program in programs:
        out, err = program.communicate(timeout=PATIENCE_S)
        assert (program.returncode, out) == (0, "end of the main thread True\n"), err
        assert "Traceback" not in err
    assert [read_manifest(each).step for each in step_folders(root)] == [1]
