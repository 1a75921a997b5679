"""What happens to the disk of states on NVMe ends in one clear message, and the last checkpoint goes on bit for bit."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from harness.models import CASES, make_batches
from harness.pool import RankError, WorkerPool
from harness.refusals import refused
from harness.small_disk import small_disk
from harness.time_outs import give_up_after
from harness.training import make_config
from shardwise import Engine, initialize
from shardwise.offload.nvme import SwapError
from shardwise.offload.worker import HostWorkError

CASE = CASES["residual-mlp"]
NUM_STEPS, SAVED_AT, FAILS_AT = 6, 2, 3
ON_NVME = {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}

Fault = Literal["ENOSPC", "EIO", "short"]
States = dict[tuple[str, str], Tensor | None]


def make_engine(folder: Path, timeout_s: float = 60.0, **tiers: Any) -> Engine:
    overrides: dict[str, Any] = {
        "zero": {"stage": 3},
        "optimizer": {"clip_norm": 0.5},
        "tiers": {**(tiers or ON_NVME), "nvme_path": str(folder)},
        "run": {"device": "cpu", "timeout_s": timeout_s},
    }
    return initialize(CASE.build(torch.float64), make_config(1, overrides), loss_fn=CASE.loss)


def batches_of(rank: int, world_size: int) -> list[Any]:
    steps = make_batches(CASE, num_steps=NUM_STEPS, world_size=world_size, num_micro_batches=1)
    return [step[rank] for step in steps]


def go_on(engine: Engine, rank: int, world_size: int, last_step: int = NUM_STEPS) -> None:
    for batches in batches_of(rank, world_size)[engine.num_steps : last_step]:
        engine.train_step(batches)


def all_states(engine: Engine) -> States:
    names = [place.name for group in engine.layout.groups for place in group.params]
    return {(name, state): engine.read(name, state) for name in names for state in ("master", "exp_avg", "exp_avg_sq")}


def same(found: States, expected: States) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


@contextmanager
def failing(call: str, nth: int, fault: Fault) -> Iterator[list[str]]:
    """Let the `nth` call of `os.preadv` or `os.pwritev` go wrong; yields the paths of the files that it was about."""
    real, paths, lock, num_calls = getattr(os, call), [], threading.Lock(), 0

    def move(descriptor: int, views: Any, offset: int) -> int:
        nonlocal num_calls
        with lock:
            number, num_calls = num_calls, num_calls + 1
        if number != nth:
            return real(descriptor, views, offset)
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if fault == "short":
            return 0
        code = getattr(errno, fault)
        raise OSError(code, os.strerror(code))

    with patch.object(os, call, move):
        yield paths


CODES = {"ENOSPC": "disk-full", "EIO": "swap-refused", "short": "swap-file-cut"}


def error_of(action: Callable[[], object]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


@pytest.mark.quick(2)
@pytest.mark.parametrize("same_engine", [True, False])
@pytest.mark.parametrize(
    ("call", "nth", "fault"),
    [("pwritev", 0, "ENOSPC"), ("pwritev", 9, "EIO"), ("preadv", 12, "EIO"), ("preadv", 5, "short")],
)
def test_training_goes_on_from_the_checkpoint(
    tmp_path: Path, call: str, nth: int, fault: Fault, same_engine: bool
) -> None:
    swap, saved = tmp_path / "swap", tmp_path / "saved"
    with make_engine(swap) as engine:
        go_on(engine, 0, 1)
        expected = all_states(engine)
    engine = make_engine(swap)
    go_on(engine, 0, 1, SAVED_AT)
    engine.save(saved)
    with failing(call, nth, fault) as paths:
        error = error_of(lambda: go_on(engine, 0, 1))
        assert isinstance(error, HostWorkError | SwapError)
        assert error.code == CODES[fault]
        assert Path(paths[0]).name in str(error)
        assert Path(paths[0]).parent.parent == swap
    if isinstance(error, HostWorkError):
        uses = [
            lambda: go_on(engine, 0, 1),
            lambda: engine.eval_step(batches_of(0, 1)[0]),
            lambda: engine.save(tmp_path / "mixed"),
            lambda: engine.read("head.weight"),
            lambda: engine.gathered().__enter__(),
        ]
        assert [str(error_of(use)) for use in uses] == [str(error)] * len(uses)
        assert not (tmp_path / "mixed").exists()
    if not same_engine:
        engine.close()
        assert list(swap.iterdir()) == []
        engine = make_engine(swap)
    assert engine.load(saved).step == SAVED_AT
    go_on(engine, 0, 1)
    assert same(all_states(engine), expected)
    engine.close()
    assert list(swap.iterdir()) == []


def test_a_failure_of_the_last_step_is_raised_by_close(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, optimizer="nvme")
    go_on(engine, 0, 1, 1)
    engine.tiers.wait_idle()
    with failing("preadv", 0, "EIO"):
        go_on(engine, 0, 1, 2)
        engine.tiers.worker.submit(lambda: None).end()
    with pytest.raises(HostWorkError) as caught:
        engine.close()
    assert caught.value.code == "swap-refused"
    assert re.search("exp_avg|master", str(caught.value))
    assert list(tmp_path.iterdir()) == []
    assert all(parameter.detach().isfinite().all() for parameter in engine.model.parameters())  # given back, whole


def test_a_load_that_fails_leaves_an_engine_that_refuses(tmp_path: Path) -> None:
    with make_engine(tmp_path / "swap", optimizer="nvme") as engine:
        with failing("preadv", 0, "EIO"), pytest.raises(HostWorkError):
            go_on(engine, 0, 1)
        with refused("no-such-path", "none"):
            engine.load(tmp_path / "none")
        with refused("states-mixed"):
            go_on(engine, 0, 1)


def run_whole(rank: int, world_size: int, root: Path) -> States:
    with make_engine(root / "swap") as engine:
        go_on(engine, rank, world_size)
        return all_states(engine)


def fail_on_one_rank(rank: int, world_size: int, root: Path, call: str, nth: int) -> tuple[str, str]:
    """The error of the step, and that of a load into the same engine."""
    engine = make_engine(root / "swap")
    go_on(engine, rank, world_size, SAVED_AT)
    engine.save(root / "saved")
    give_up_after(engine, 5.0)
    with failing(call, nth if rank == 1 else -1, "EIO"):
        error = error_of(lambda: go_on(engine, rank, world_size))
    again = error_of(lambda: engine.load(root / "saved"))
    error_of(engine.close)  # to which the others do not come
    return f"{type(error).__name__}: {error}", f"{type(again).__name__}: {again}"


def resume(rank: int, world_size: int, root: Path) -> States:
    with make_engine(root / "swap") as engine:
        engine.load(root / "saved")
        go_on(engine, rank, world_size)
        return all_states(engine)


@pytest.mark.parametrize(("call", "nth"), [("pwritev", 9)])
def test_the_other_ranks_end_with_a_message(ranks: WorkerPool, tmp_path: Path, call: str, nth: int) -> None:
    expected = ranks(2).run(run_whole, tmp_path)
    (other, others_load), (failed, load) = ranks(2).run(fail_on_one_rank, tmp_path, call, nth)
    file = r"shardwise-swap-\S+-rank-1/\d+-\S+: Input/output error; check the disk"
    assert re.search(rf"^(SwapError|HostWorkError): cannot write \d+ bytes at \d+ of \S+{file}", failed)
    assert re.search(rf"^CommError: rank 0 failed in .* rank 1 has failed: cannot write .*{file}", other)
    assert "start all ranks again and load there" in others_load
    assert "rank 0" in load
    assert list((tmp_path / "swap").iterdir()) == []
    for found, wanted in zip(ranks(2).run(resume, tmp_path), expected, strict=True):
        assert same(found, wanted)


def start_beside_another(rank: int, world_size: int, folders: list[Path]) -> str:
    engine: Engine | None = None

    def start() -> None:
        nonlocal engine
        engine = make_engine(folders[rank])
        go_on(engine, rank, world_size, 2)

    error = error_of(start)
    if engine is not None:
        engine.close()
    return f"{type(error).__name__} {getattr(error, 'code', '')}: {error}" if error is not None else ""


def test_where_one_rank_has_no_space_none_starts(ranks: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    other = tmp_path / "large"
    with small_disk(tmp_path / "small", 48 * 1024) as disk:
        first, second = ranks(2).run(start_beside_another, [other, disk.root])
        said = r"CommError [a-z-]+: rank 1 failed in shardwise.initialize: cannot"
        assert re.match(rf"{said} allocate ", first)
        assert re.match(r"SwapError disk-full: cannot allocate [\d.]+ \w+ in \S+-rank-1/\d+-\S+: ", second)
        assert list(other.iterdir()) == list(disk.root.iterdir()) == []
    (tmp_path / "enough").mkdir()
    with small_disk(tmp_path / "enough", 2**20) as disk:  # a tmpfs, so past no page cache
        assert ranks(2).run(start_beside_another, [other, disk.root]) == ["", ""]
        disk.remount(read_only=True)
        first, second = ranks(2).run(start_beside_another, [other, disk.root])
        assert re.match(rf"{said} make a swap folder", first)
        assert second.startswith("SwapError swap-refused: ")
        assert os.strerror(errno.EROFS) in second


def test_a_file_in_the_folders_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with refused("swap-refused", f"make a swap folder in {folder}"):
            make_engine(folder)


def die_midway(rank: int, world_size: int, root: Path) -> None:
    engine = make_engine(root / "swap")
    go_on(engine, rank, world_size, SAVED_AT)
    engine.save(root / "saved")
    engine.train_step(batches_of(rank, world_size)[SAVED_AT])
    if rank == 1:  # in the middle of its step on the host
        os.kill(os.getpid(), signal.SIGKILL)
    go_on(engine, rank, world_size)


def test_the_next_run_removes_what_a_killed_rank_has_left(ranks: WorkerPool, tmp_path: Path) -> None:
    expected = ranks(2).run(run_whole, tmp_path)
    with pytest.raises(RankError) as caught:
        ranks(2).run(die_midway, tmp_path)
    assert (caught.value.rank, caught.value.kind) == (1, "died")
    # A number follows where the other rank, as it started, took this one's folder, not yet locked, for a dead one.
    (left,) = [path for path in (tmp_path / "swap").iterdir() if re.search(r"-rank-1(-\d+)?$", path.name)]
    for found, wanted in zip(ranks(2).run(resume, tmp_path), expected, strict=True):
        assert same(found, wanted)
    assert not left.exists()
    assert list((tmp_path / "swap").iterdir()) == []
