"""A small run that saves often, and what may happen: a rank is killed, or refused by the system, at a named moment.

A `Moment` is a call, to the system or of the training, that the ranks of a run come to; see `watching` for which are
seen. Everything acts in worker processes of the pool, on two ranks.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise import Engine, initialize
from shardwise.checkpoint import commit as folder
from shardwise.checkpoint.async_saver import StagingMemory
from shardwise.checkpoint.commit import LATEST_NAME, candidates, read_manifest, rename_later, step_folders, step_of
from shardwise.checkpoint.manifest import MANIFEST_NAME, CheckpointError, Manifest, StoredTensor

NUM_STEPS, SAVE_EVERY, KEEP_LAST = 10, 2, 2
NUM_RANKS = 2
WIDTH = 192
# A call to write gets this much done: so a file is many calls, of which any may be the last.
WRITE_BYTES = 2**16

SYSTEM_CALLS = ("mkdir", "posix_fallocate", "writev", "fsync", "rename", "replace", "unlink", "rmdir")

Window = Literal["step", "save", "rename", "latest"]
When = Literal["before", "half", "after"]
OnCall = Callable[[str, str, When], None]


@dataclass(frozen=True)
class Moment:
    """A call, by its name and the name of the file or folder that it is about, or of the module.

    Attributes:
        call: of the system, as in `os`; or forward, backward, optimizer, staging, save (all of it).
        target: a pattern; without the random part of names.
        when: before or after it; or with half of a text written.
        nth: of the calls of that name and target since the moment was awaited, from 0.
    """

    call: str
    target: str = "*"
    when: When = "before"
    nth: int = 0

    def __str__(self) -> str:
        number = f"-{self.nth}" if self.nth else ""
        return f"{self.when}-{self.call}-{self.target}{number}".replace("*", "").strip("-")


class Model(nn.Module):
    """Three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))  # [b, WIDTH]
        return x


def make_engine(timeout_s: float = 20.0) -> Engine:
    # Their states are saved too, and the pool seeds torch's alone.
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    config = {"zero": {"stage": 3}, "optimizer": {"lr": 1e-2}, "run": {"device": "cpu", "timeout_s": timeout_s}}
    return initialize(Model(), config, loss_fn=lambda output, batch: (output - batch.roll(1, 0)).square().mean())


def take_step(engine: Engine, rank: int) -> float:
    generator = torch.Generator().manual_seed(1000 * (engine.num_steps + 1) + rank)
    return engine.train_step([torch.randn(4, WIDTH, generator=generator)]).loss


@dataclass(frozen=True)
class Ended:
    """Of a run that has come to its end.

    Attributes:
        first_step: from which it went on.
        loss: of the last step.
        damaged: what the load said of checkpoints that it did not use.
    """

    first_step: int
    loss: float
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Whole:
    """A run to which nothing has happened.

    Attributes:
        end: of it.
        stored: by its last save.
    """

    end: Ended
    stored: tuple[StoredTensor, ...]


def run_to_end(
    rank: int, world_size: int, root: Path, is_background: bool, kill: Kill | None = None, last_step: int = NUM_STEPS
) -> Ended:
    """Go on from what is there, if anything, as `shardwise train --resume auto` does, and save every second step."""
    engine = make_engine()
    damaged: tuple[str, ...] = ()
    if root.exists() and candidates(root):
        damaged = resume(engine, rank, root)
    first_step, loss = engine.num_steps, float("nan")
    with ExitStack() as stack:
        for step in range(first_step + 1, last_step + 1):
            if kill is not None and kill.step == step and kill.window == "step":
                engine.finish_saves()  # else the disk would show the window of that save
                stack.enter_context(awaiting(kill, rank, root))
            loss = take_step(engine, rank)
            if step % SAVE_EVERY == 0:
                if kill is not None and kill.step == step and kill.window != "step":
                    engine.finish_saves()
                    stack.enter_context(awaiting(kill, rank, root))
                engine.save(root, wait=not is_background, keep_last=KEEP_LAST)
    engine.finish_saves()
    return Ended(first_step, loss, damaged)


def resume(engine: Engine, rank: int, root: Path) -> tuple[str, ...]:
    """Load the newest whole checkpoint and rename later ones; returns what was said of these."""
    report = engine.load(root)
    if rank == 0:
        rename_later(root, report.step)
    return report.damaged


def stored(root: Path) -> tuple[StoredTensor, ...]:
    """What the last step's checkpoint has, with the checksums of all: of two equal runs it is equal."""
    return read_manifest(root / folder.step_name(NUM_STEPS)).tensors


def check_tidy(root: Path) -> None:
    """Nothing is left over, the step folders are whole, and `latest` names the newest."""
    assert not [each.name for each in root.iterdir() if each.name.endswith((".partial", ".deleted"))]
    assert [step_of(each) for each in step_folders(root)] == [NUM_STEPS, NUM_STEPS - SAVE_EVERY]
    assert [read_manifest(each).step for each in step_folders(root)] == [NUM_STEPS, NUM_STEPS - SAVE_EVERY]
    assert (root / LATEST_NAME).read_text().strip() == folder.step_name(NUM_STEPS)


# Moments.


@contextmanager
def watching(on_call: OnCall) -> Iterator[None]:
    """Let `on_call` hear of the calls of this process; what it raises comes out of the call."""
    with ExitStack() as stack:
        for name in SYSTEM_CALLS:
            stack.enter_context(patch.object(os, name, _heard(name, getattr(os, name), on_call)))
        stack.enter_context(patch.object(folder, "write_text", _half_heard(folder.write_text, on_call)))
        stack.enter_context(patch.object(StagingMemory, "copy", _heard("staging", StagingMemory.copy, on_call)))
        for handle in _training_hooks(on_call):
            stack.callback(handle.remove)
        yield


def _heard(name: str, real: Callable[..., Any], on_call: OnCall) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        target = _target(args)
        on_call(name, target, "before")
        if name == "writev":
            descriptor, buffers = args
            args = (descriptor, [memoryview(buffers[0])[:WRITE_BYTES]])
        result = real(*args, **kwargs)
        on_call(name, target, "after")
        return result

    return call


def _half_heard(real: Callable[[Path, str], None], on_call: OnCall) -> Callable[[Path, str], None]:
    def write_text(path: Path, text: str) -> None:
        on_call("write_text", _plain(path.name), "before")
        path.write_text(text[: len(text) // 2])
        on_call("write_text", _plain(path.name), "half")
        real(path, text)

    return write_text


def _training_hooks(on_call: OnCall) -> Iterator[Any]:
    def after_forward(module: nn.Module, args: Any, output: Tensor) -> None:
        on_call("forward", type(module).__name__, "after")
        if output.requires_grad:
            output.register_hook(lambda _: on_call("backward", type(module).__name__, "before"))

    yield torch.nn.modules.module.register_module_forward_hook(after_forward)
    yield register_optimizer_step_pre_hook(lambda *_: on_call("optimizer", "", "before"))
    yield register_optimizer_step_post_hook(lambda *_: on_call("optimizer", "", "after"))


def _target(args: tuple[Any, ...]) -> str:
    """The name of what a call is about; of a rename, the new one."""
    if isinstance(args[0], int):
        return _plain(Path(os.readlink(f"/proc/self/fd/{args[0]}")).name)
    paths = [Path(each) for each in args[:2] if isinstance(each, str | Path)]
    return _plain(paths[-1].name) if paths else ""


def _plain(name: str) -> str:
    return re.sub(r"\.[0-9a-f]{8}(?=\.(partial|deleted)$)", "", name)


def once_at(moment: Moment, act: Callable[[], object]) -> OnCall:
    """Act when the moment comes."""
    num_calls, lock = 0, threading.Lock()

    def on_call(call: str, target: str, when: When) -> None:
        nonlocal num_calls
        if (call, when) == (moment.call, moment.when) and fnmatch(target, moment.target):
            with lock:
                number, num_calls = num_calls, num_calls + 1
            if number == moment.nth:
                act()

    return on_call


# Kills.


@dataclass(frozen=True)
class Kill:
    """Which rank dies when.

    Attributes:
        window: of the run.
        moment: that it dies at, in the step or in the save after it.
        actor: the rank that comes to the moment; where that is not the victim, it waits there until the victim is dead.
        victim: the rank that dies.
        step: of the run.
        is_background: whether saves run beside the training.
        survivor_s: for how long the other outlives it, before the launcher ends it too; None if it is not ended.
    """

    window: Window
    moment: Moment
    actor: int
    victim: int
    step: int
    is_background: bool
    survivor_s: float | None

    def __str__(self) -> str:
        saving = "background" if self.is_background else "sync"
        where = f"at-{self.moment}-of-rank{self.actor}"
        return f"{self.window}-rank{self.victim}-step{self.step}-{where}-{saving}"


@contextmanager
def awaiting(kill: Kill, rank: int, root: Path) -> Iterator[None]:
    """Die at the moment; the survivor ends too, after a while."""
    lock_file, marker = _beside(root, "lock"), _beside(root, "seen")
    if rank == kill.victim:
        # Held for as long as this process lives.
        fcntl.flock(os.open(lock_file, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
        _beside(root, "armed").touch()
    else:
        while not _beside(root, "armed").exists():
            time.sleep(0.001)
    if rank == kill.actor:
        with watching(once_at(kill.moment, lambda: _doom(kill, rank, root))):
            if kill.survivor_s is not None and rank != kill.victim:
                _follow(lock_file, kill.survivor_s)
            yield
        return
    if rank == kill.victim:
        _in_background(lambda: _die_at(marker))
    elif kill.survivor_s is not None:
        _follow(lock_file, kill.survivor_s)
    yield


def _doom(kill: Kill, rank: int, root: Path) -> None:
    """Note what is on the disk, let the victim die, and go no further before it has."""
    _note_stage(kill, root)
    if rank == kill.victim:
        die()
    _await_death(_beside(root, "lock"))
    _note_stage(kill, root)


def _note_stage(kill: Kill, root: Path) -> None:
    note = _beside(root, "note")
    note.write_text(stage_on_disk(root, kill.step))
    note.rename(_beside(root, "seen"))


def _die_at(marker: Path) -> None:
    while not marker.exists():
        time.sleep(0.001)
    die()


def _follow(lock_file: Path, after_s: float) -> None:
    def wait() -> None:
        _await_death(lock_file)
        time.sleep(after_s)
        die()

    _in_background(wait)


def _await_death(lock_file: Path) -> None:
    """Return when its holder is dead."""
    with lock_file.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def _in_background(function: Callable[[], object]) -> None:
    threading.Thread(target=function, daemon=True).start()


def _beside(root: Path, what: str) -> Path:
    return root.with_name(f"{root.name}.{what}")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


Stage = Literal["nothing", "files", "manifest", "renamed", "latest", "deleting"]

WINDOWS: dict[Stage, Window] = {
    "nothing": "step",
    "files": "save",
    "manifest": "rename",
    "renamed": "latest",
    "latest": "latest",
    "deleting": "latest",
}


def stage_on_disk(root: Path, step: int) -> Stage:
    """How far the save of this step has come, from what is there."""
    names = [each.name for each in root.iterdir()] if root.exists() else []
    if any(name.endswith(".deleted") for name in names):
        return "deleting"
    for name in names:
        if name.startswith("step-") and name.endswith(".partial"):
            return "manifest" if _is_readable(root / name / MANIFEST_NAME) else "files"
    newest = next(iter(step_folders(root)), None)
    if newest is None or step_of(newest) != step:
        return "nothing"
    latest = (root / LATEST_NAME).read_text().strip() if LATEST_NAME in names else ""
    return "latest" if latest == newest.name else "renamed"


def _is_readable(manifest: Path) -> bool:
    try:
        Manifest.from_text(manifest.read_text(), str(manifest))
    except (CheckpointError, FileNotFoundError):
        return False
    return True
