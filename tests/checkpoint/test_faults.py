"""Killed, torn, flipped, full and read-only: a run that saves often loses what it did since its last save, no more.

A run of two ranks saves every second step. A rank is killed with SIGKILL at a chosen moment; the window in which it
dies is read off the disk; the run is started again, goes on from what it finds, and must end with the loss, to the last
bit, of a run that nothing happened to.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from harness.pool import RankError, WorkerPool
from shardwise import Engine, initialize
from shardwise.checkpoint.folder import LATEST_NAME, candidates, step_folders, step_of
from shardwise.checkpoint.manifest import MANIFEST_NAME

NUM_STEPS, SAVE_EVERY = 10, 2
NUM_RANKS = 2
WINDOWS = ("step", "save", "rename", "latest")
NUM_POINTS = 8

Window = Literal["step", "save", "rename", "latest"]


@dataclass(frozen=True)
class Kill:
    """Which rank dies when.

    Attributes:
        window: of the run.
        victim: the rank.
        step: in which it takes place; for the windows of a save, in the save after it.
        is_late: behind the moment instead of before it.
        place: how far into the window, from 0 to 1, where it has an extent.
        is_background: whether saves run beside the training.
    """

    window: Window
    victim: int
    step: int
    is_late: bool
    place: float
    is_background: bool


def kills(window: Window) -> list[Kill]:
    """`NUM_POINTS` random moments in a window, on each rank in turn."""
    draw = random.Random(window)
    return [
        Kill(
            window,
            victim=number % NUM_RANKS,
            step=SAVE_EVERY * draw.randint(1, NUM_STEPS // SAVE_EVERY - 1) + (window == "step"),
            is_late=bool(number // 2 % 2),
            place=draw.random(),
            is_background=window != "step" and bool(number // 4 % 2),
        )
        for number in range(NUM_POINTS)
    ]


def campaign() -> Iterator[Any]:
    for window in WINDOWS:
        for number, kill in enumerate(kills(window)):
            marks = () if number in (2, 5) else (pytest.mark.full,)
            yield pytest.param(kill, id=f"{window}-{number}", marks=marks)


class Model(nn.Module):
    """Three blocks, large enough for a save of many writes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(192, 192) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))  # [b, 192]
        return x


def make_engine() -> Engine:
    torch.manual_seed(0)
    config = {"zero": {"stage": 3}, "optimizer": {"lr": 1e-2}, "run": {"device": "cpu", "timeout_s": 20.0}}
    return initialize(Model(), config, loss_fn=lambda output, batch: (output - batch.roll(1, 0)).square().mean())


def run_to_end(rank: int, world_size: int, root: Path, kill: Kill | None, is_background: bool) -> tuple[int, float]:
    """Go on from what is there, if anything, to the last step; return where it began, and the last loss."""
    engine = make_engine()
    if root.exists() and candidates(root):
        engine.load(root)
    first_step, loss = engine.num_steps, float("nan")
    for step in range(first_step + 1, NUM_STEPS + 1):
        is_armed = kill is not None and kill.step == step
        with die_in_step(kill, rank) if is_armed and kill.window == "step" else noop():
            loss = take_step(engine, step, rank)
        if step % SAVE_EVERY == 0:
            with die_in_save(kill, rank, root) if is_armed and kill.window != "step" else noop():
                engine.save(root, wait=not is_background, keep_last=3)
                if is_armed:
                    engine.finish_saves()
    engine.finish_saves()
    return first_step, loss


def take_step(engine: Engine, step: int, rank: int) -> float:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return engine.train_step([torch.randn(4, 192, generator=generator)]).loss


@contextmanager
def noop() -> Iterator[None]:
    yield


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def die_in_step(kill: Kill, rank: int) -> Iterator[None]:
    """In one of the gradients of the step, or before or after all of them."""
    if rank != kill.victim:
        yield
        return
    num_calls = itertools.count()
    at = int(kill.place * 6)
    torch.nn.modules.module.register_module_forward_hook(lambda *_: die() if next(num_calls) == at else None)
    yield
    die()


@contextmanager
def die_in_save(kill: Kill, rank: int, root: Path) -> Iterator[None]:
    """At a call to the system: of the victim itself, or of rank 0, which then waits until the victim is dead."""
    marker = root.with_name(f"{root.name}.die")
    if kill.window == "save":
        if rank == kill.victim:
            intercept("writev", at=int(kill.place * 2), is_late=kill.is_late, act=die)
        yield
        return
    if rank == 0:
        name = "rename" if kill.window == "rename" else "replace"
        intercept(name, at=0, is_late=kill.is_late and kill.window == "latest", act=lambda: doom(kill, root, marker))
    elif rank == kill.victim:
        watch_for(marker)
    yield


def doom(kill: Kill, root: Path, marker: Path) -> None:
    """Let the victim die, go no further before it has, and note what is on the disk then."""
    if kill.victim == 0:
        die()
    marker.touch()
    time.sleep(0.3)
    marker.write_text(window_on_disk(root))


def watch_for(marker: Path) -> None:
    def wait() -> None:
        while not marker.exists():
            time.sleep(0.002)
        die()

    threading.Thread(target=wait, daemon=True).start()


def intercept(name: str, at: int, is_late: bool, act: Callable[[], None]) -> None:
    """Act before, or after, a call to the system; calls count from 0."""
    real, num_calls = getattr(os, name), itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        is_here = next(num_calls) == at
        if is_here and not is_late:
            act()
        result = real(*args, **kwargs)
        if is_here and is_late:
            act()
        return result

    setattr(os, name, call)


def window_on_disk(root: Path) -> Window:
    """In which window a rank has died, from what is there."""
    partial = [each for each in root.iterdir() if each.name.endswith(".partial")]
    if any(each.name.startswith(LATEST_NAME) for each in partial):
        return "latest"
    folders = [each for each in partial if each.is_dir()]
    if folders:
        return "rename" if (folders[0] / MANIFEST_NAME).exists() else "save"
    newest = step_folders(root)
    latest = (root / LATEST_NAME).read_text().strip() if (root / LATEST_NAME).exists() else ""
    return "latest" if newest and newest[0].name != latest else "step"


@pytest.fixture(scope="module")
def expected_loss(ranks: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Of a run to which nothing happens."""
    root = tmp_path_factory.mktemp("whole") / "checkpoints"
    return ranks(NUM_RANKS).run(run_to_end, root, None, False)[0][1]


@pytest.mark.parametrize("kill", list(campaign()))
def test_a_killed_run_loses_only_what_came_after_its_last_save(
    ranks: WorkerPool, tmp_path: Path, expected_loss: float, kill: Kill
) -> None:
    root = tmp_path / "checkpoints"
    with pytest.raises(RankError, match="died"):
        ranks(NUM_RANKS).run(run_to_end, root, kill, kill.is_background)
    marker = root.with_name(f"{root.name}.die")
    seen = marker.read_text() if marker.exists() else window_on_disk(root)  # rank 0 outlives another for a while
    has_moved = kill.window == "latest" and kill.is_late
    assert seen == ("step" if has_moved else kill.window)
    committed = [step_of(folder) for folder in step_folders(root)]
    first_step, loss = ranks(NUM_RANKS).run(run_to_end, root, None, kill.is_background)[0]
    assert first_step == max(committed, default=0) >= kill.step - SAVE_EVERY
    assert loss == expected_loss
    assert not [each for each in root.iterdir() if each.name.endswith((".partial", ".deleted"))]
