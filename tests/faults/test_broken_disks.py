"""Full, read-only and broken disks: each is said on every rank, with file, reason and fix, and nothing is lost."""

from __future__ import annotations

import errno
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from harness.faults import (
    KEEP_LAST,
    NUM_RANKS,
    NUM_STEPS,
    SAVE_EVERY,
    Ended,
    Moment,
    OnCall,
    When,
    Whole,
    check_tidy,
    make_engine,
    once_at,
    run_to_end,
    stored,
    take_step,
    watching,
)
from harness.pool import WorkerPool
from harness.small_disk import SmallDisk, small_disk
from shardwise.checkpoint.commit import read_manifest, step_folders, step_name, step_of
from shardwise.checkpoint.manifest import CheckpointError

# The save that fails, and the one before it.
STEP, BEFORE = 3 * SAVE_EVERY, 2 * SAVE_EVERY
# A checkpoint has 1.4 MB.
DISK_BYTES = 2**24

FILE, MANIFEST, PARTIAL, FINAL = "rank-*", "manifest.json", "step-*.partial", "step-????????"
ROOT = "checkpoints"


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a save.

    Attributes:
        kind: "full" or "read-only", the disk from the moment on; else the name of an error that the call raises.
        moment: of the save; None is before it.
        rank: at whose call.
        said: a pattern of the message.
        code: of the error.
        can_reserve: whether the file system gives files their blocks beforehand.
    """

    kind: str
    moment: Moment | None
    rank: int
    said: str
    code: str
    can_reserve: bool = True

    def __str__(self) -> str:
        return f"{self.kind}-{self.moment or 'before'}-rank{self.rank}{'' if self.can_reserve else '-unreserved'}"

    @property
    def is_named(self) -> bool:
        """Whether the checkpoint has its name by then."""
        call = self.moment.call if self.moment else ""
        return call == "replace" or (self.moment is not None and self.moment.target in (ROOT, "latest.partial"))

    @property
    def is_at_begin(self) -> bool:
        """Whether the save cannot begin: the call itself raises that, also where it would return before the end."""
        return self.moment is None or self.moment.call == "mkdir"


def save_into(rank: int, world_size: int, root: Path, is_background: bool, fault: Fault, disk: SmallDisk | None) -> Any:
    """Train up to the save that fails; fix what is wrong, and train on to the end with the same engine.

    Returns:
        What was said of the save, by which call, whether anything was said a second time; and the last loss.
    """
    engine = make_engine()
    for _ in range(STEP):
        take_step(engine, rank)
        if engine.num_steps % SAVE_EVERY == 0 and engine.num_steps < STEP:
            engine.save(root, wait=not is_background, keep_last=KEEP_LAST)
    engine.finish_saves()
    if fault.moment is None and rank == 0:
        break_disk(fault, disk)
    dist.barrier()
    said = ("", "")
    with watching(on_call_of(fault, rank, disk)):
        try:
            engine.save(root, wait=not is_background, keep_last=KEEP_LAST)
            while engine.checkpoints.saver.is_saving:
                time.sleep(0.01)
        except CheckpointError as error:
            said = ("save", f"{error.code}: {error}")
    dist.barrier()
    if is_background:
        try:
            take_step(engine, rank)
        except CheckpointError as error:
            said = ("step", f"{error.code}: {error}")
    found = [step_of(each) for each in step_folders(root) if read_manifest(each)]
    dist.barrier()
    if disk is not None and rank == 0:
        fix(fault, disk)
    dist.barrier()
    loss = 0.0
    while engine.num_steps < NUM_STEPS:
        loss = take_step(engine, rank)
        if engine.num_steps % SAVE_EVERY == 0:
            engine.save(root.with_name("later"), wait=not is_background, keep_last=KEEP_LAST)
    engine.finish_saves()
    return *said, found, loss


def on_call_of(fault: Fault, rank: int, disk: SmallDisk | None) -> OnCall:
    at = once_at(fault.moment, lambda: break_disk(fault, disk)) if fault.moment is not None else None

    def on_call(call: str, target: str, when: When) -> None:
        if call == "posix_fallocate" and not fault.can_reserve:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        if at is not None and rank == fault.rank:
            at(call, target, when)

    return on_call


def break_disk(fault: Fault, disk: SmallDisk | None) -> None:
    if disk is None:
        number = getattr(errno, fault.kind)
        raise OSError(number, os.strerror(number))
    if fault.kind == "full":
        disk.fill()
    else:
        disk.remount(read_only=True)


def fix(fault: Fault, disk: SmallDisk) -> None:
    if fault.kind == "full":
        disk.make_space()
    else:
        disk.remount(read_only=False)


def check_failed(
    ranks: WorkerPool, root: Path, is_background: bool, fault: Fault, disk: SmallDisk | None, whole_run: Whole
) -> None:
    results = ranks(NUM_RANKS).run(save_into, root, is_background, fault, disk)
    assert results[0] == results[1]
    call, text, found, loss = results[0]
    assert call == ("step" if is_background and not fault.is_at_begin else "save")
    assert re.fullmatch(rf"{fault.code}: checkpoint of step {STEP} failed on rank {fault.rank}: .*{fault.said}.*", text)
    expected = [STEP, BEFORE, BEFORE - SAVE_EVERY] if fault.is_named else [BEFORE, BEFORE - SAVE_EVERY]
    assert found == expected
    # The engine whose save has failed goes on, and so does another, from the checkpoint before.
    assert loss == whole_run.end.loss
    assert stored(root.with_name("later")) == whole_run.stored
    assert not list(root.glob("*.partial")) or fault.kind == "read-only"
    ended = ranks(NUM_RANKS).run(run_to_end, root, is_background)
    assert ended == [Ended(expected[0], whole_run.end.loss)] * NUM_RANKS
    assert stored(root) == whole_run.stored
    check_tidy(root)


NO_SPACE, READ_ONLY = "No space left on device", "Read-only file system"
FULL = [
    Fault("full", None, 0, rf"{ROOT} has \d+ bytes free .* 1\.\d\d MiB", "too-little-space"),
    Fault("full", Moment("posix_fallocate", FILE), 0, rf"/rank-00000-of-00002.\w+: {NO_SPACE};", "disk-full"),
    Fault("full", Moment("posix_fallocate", FILE), 1, rf"/rank-00001-of-00002.\w+: {NO_SPACE};", "disk-full"),
    Fault("full", Moment("writev", FILE, nth=4), 1, rf"{NO_SPACE};", "disk-full", False),
    Fault("full", Moment("writev", FILE), 0, rf"{NO_SPACE};", "disk-full", False),
    Fault("full", Moment("write_text", MANIFEST), 0, rf"cannot write .*/manifest.json: {NO_SPACE}", "disk-full"),
    Fault("full", Moment("write_text", "latest.partial"), 0, rf"cannot name .* in .*latest: {NO_SPACE}", "disk-full"),
    Fault("read-only", None, 0, rf"cannot make a folder in .*{ROOT}: {READ_ONLY}", "folder-refused"),
    Fault(
        "read-only", Moment("write_text", MANIFEST), 0, rf"cannot write .*/manifest.json: {READ_ONLY}", "folder-refused"
    ),
]


def marked(faults: list[Fault], quick: tuple[int, ...]) -> list[Any]:
    return [
        pytest.param(fault, is_background, id=f"{fault}-{'background' if is_background else 'sync'}", marks=marks)
        for number, fault in enumerate(faults)
        for is_background in (False, True)
        for is_quick in [number in quick and (is_background == bool(number % 2) or fault.moment is None)]
        for marks in [() if is_quick else pytest.mark.full]
    ]


@pytest.mark.parametrize(("fault", "is_background"), marked(FULL, quick=(0, 3)))
def test_a_save_that_the_disk_refuses(
    ranks: WorkerPool, tmp_path: Path, whole_run: Whole, fault: Fault, is_background: bool
) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    with small_disk(place, DISK_BYTES) as disk:
        check_failed(ranks, disk.root / ROOT, is_background, fault, disk, whole_run)


IO = "Input/output error"
BROKEN = [
    Fault("EIO", Moment("fsync", FILE), 0, rf"/rank-00000-of-00002.safetensors: {IO};", "write-refused"),
    Fault("EIO", Moment("fsync", FILE), 1, rf"/rank-00001-of-00002.safetensors: {IO};", "write-refused"),
    Fault("EIO", Moment("fsync", MANIFEST), 0, rf"cannot write .*/manifest.json: {IO}", "folder-refused"),
    Fault("EIO", Moment("fsync", ROOT), 0, rf"cannot make .*/{step_name(STEP)}: {IO}", "folder-refused"),
    Fault("EIO", Moment("fsync", PARTIAL), 0, rf"cannot write .*/manifest.json: {IO}", "folder-refused"),
    Fault("EIO", Moment("fsync", "latest.partial"), 0, rf"cannot name .* in .*/latest: {IO}", "folder-refused"),
    Fault("EIO", Moment("fsync", ROOT, nth=1), 0, rf"cannot name .* in .*/latest: {IO}", "folder-refused"),
    Fault("EIO", Moment("writev", FILE, nth=3), 0, rf"{IO};", "write-refused"),
    Fault("EIO", Moment("writev", FILE, nth=7), 1, rf"{IO};", "write-refused"),
    Fault("EIO", Moment("posix_fallocate", FILE), 1, rf"/rank-00001-of-00002.safetensors: {IO}", "write-refused"),
    Fault("EIO", Moment("mkdir", PARTIAL), 0, rf"cannot make a folder in .*/{ROOT}: {IO}", "folder-refused"),
    Fault("EIO", Moment("rename", FINAL), 0, rf"cannot make .*/{step_name(STEP)}: {IO}", "folder-refused"),
    Fault("EIO", Moment("replace", "latest"), 0, rf"cannot name .* in .*/latest: {IO}", "folder-refused"),
    Fault("EDQUOT", Moment("writev", FILE, nth=2), 1, "Disk quota exceeded;", "disk-full"),
    Fault("ESTALE", Moment("fsync", FILE), 1, "Stale file handle;", "write-refused"),
]


@pytest.mark.parametrize(("fault", "is_background"), marked(BROKEN, quick=(1, 3)))
def test_a_save_on_a_broken_disk(
    ranks: WorkerPool, tmp_path: Path, whole_run: Whole, fault: Fault, is_background: bool
) -> None:
    check_failed(ranks, tmp_path / ROOT, is_background, fault, None, whole_run)


DELETED = "step-*.deleted"


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, id=str(moment), marks=() if moment.call == "unlink" else pytest.mark.full)
        for moment in (
            Moment("rename", DELETED), Moment("fsync", ROOT, nth=2), Moment("unlink", FILE), Moment("rmdir", DELETED)
        )
    ],
)  # fmt: skip
def test_a_deletion_on_a_broken_disk_leaves_the_new_checkpoint_whole(
    ranks: WorkerPool, tmp_path: Path, whole_run: Whole, moment: Moment
) -> None:
    fault, root = Fault("EIO", moment, 0, "", ""), tmp_path / ROOT
    for call, text, found, loss in ranks(NUM_RANKS).run(save_into, root, False, fault, None):
        assert (call, text, loss) == ("", "", whole_run.end.loss)
        assert found[:2] == [STEP, BEFORE]
    assert ranks(NUM_RANKS).run(run_to_end, root, False) == [Ended(STEP, whole_run.end.loss)] * NUM_RANKS
    assert stored(root) == whole_run.stored
    check_tidy(root)
