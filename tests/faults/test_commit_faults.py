"""What is on disk after saves, deletions and renames that were killed, refused, or ran out of space."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.checkpoint_folders import check_all, forked, latest, manifest_of, save, steps_of, write_files
from harness.refusals import refused
from harness.small_disk import MS_RDONLY, MS_REMOUNT, mount, mount_alone
from shardwise.checkpoint import commit as folder
from shardwise.checkpoint.commit import (
    begin,
    check_free_space,
    clean,
    commit,
    discard,
    read_manifest,
    rename_later,
    retain,
    step_folders,
    step_name,
)
from shardwise.checkpoint.manifest import CheckpointError

# The forked children touch nothing but files.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


# Killed before and after each call, and while writing.

CALLS = ("mkdir", "open", "fsync", "rename", "replace", "unlink", "rmdir")


@pytest.fixture
def no_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has written outlives its kill without `fsync`, whose waits would be nine tenths of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def kill_at(number: int, when: str) -> None:
    """Have this process kill itself before or after the n-th of the calls that matter, or half through a text."""
    count = 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(original: Callable[..., object], is_text: bool = False) -> Callable[..., object]:
        def wrapper(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            mine = count
            if mine == number and when == "before":
                if is_text:
                    path, text = args
                    Path(str(path)).write_text(str(text)[: len(str(text)) // 2])
                die()
            result = original(*args, **kwargs)
            if mine == number:
                die()
            return result

        return wrapper

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    folder.write_text = counted(folder.write_text, is_text=True)  # type: ignore[attr-defined]


def kill_everywhere(tmp_path: Path, prepare: Callable[[Path], object], act: Callable[[Path], object]) -> Iterator[Path]:
    """What kills leave: roots prepared, and acted on by a process killed at its n-th call, for all n until it lives."""
    for when in ("before", "after"):
        for number in range(1, 1000):
            root = tmp_path / f"{when}-{number}"
            prepare(root)

            def killed(root: Path = root, number: int = number, when: str = when) -> None:
                kill_at(number, when)
                act(root)

            code, text = forked(killed)
            assert code in (0, -signal.SIGKILL), text
            yield root
            if code == 0:
                assert number > len(CALLS), "the calls are not the ones that are counted"
                break


def save_two(root: Path) -> None:
    save(root, 10)
    save(root, 20)


def save_three(root: Path) -> None:
    save_two(root)
    save(root, 30)


def recover(root: Path, then: int) -> None:
    """A next run cleans, saves, deletes, and nothing is left over."""
    clean(root)
    save(root, then)
    retain(root, 1, None)
    assert check_all(root) == [then]
    assert {each.name for each in root.iterdir() if ".aside-" not in each.name} == {"latest", step_name(then)}


@pytest.mark.usefixtures("no_waits_for_the_disk")
def test_killed_in_a_save(tmp_path: Path) -> None:
    seen = set()
    for root in kill_everywhere(tmp_path, save_two, lambda root: save(root, 30)):
        steps = check_all(root)
        assert steps[-2:] == [20, 10]
        seen.add((steps[0], latest(root).strip()))
        recover(root, 40)
    # The middle one is what `latest` alone would lose.
    assert seen == {(20, step_name(20)), (30, step_name(20)), (30, step_name(30))}


@pytest.mark.usefixtures("no_waits_for_the_disk")
def test_killed_in_the_first_save(tmp_path: Path) -> None:
    seen = set()
    for root in kill_everywhere(tmp_path, lambda root: None, lambda root: save(root / "new" / "root", 30)):
        root = root / "new" / "root"
        seen.add((tuple(check_all(root)), (root / "latest").exists()))
        recover(root, 40)
    assert seen == {((), False), ((30,), False), ((30,), True)}


@pytest.mark.full
@pytest.mark.usefixtures("no_waits_for_the_disk")
def test_killed_in_deleting(tmp_path: Path) -> None:
    seen = set()
    for root in kill_everywhere(tmp_path, save_three, lambda root: retain(root, 1, None)):
        steps = check_all(root)
        leftovers = [each for each in root.iterdir() if each.name.endswith(".deleted")]
        seen.add((tuple(steps), len(leftovers)))
        recover(root, 40)
    assert seen == {((30, 20, 10), 0), ((30, 20), 1), ((30, 20), 0), ((30,), 1), ((30,), 0)}


@pytest.mark.usefixtures("no_waits_for_the_disk")
def test_killed_while_renaming(tmp_path: Path) -> None:
    seen = set()
    for root in kill_everywhere(tmp_path, save_three, lambda root: rename_later(root, 10)):
        seen.add((tuple(check_all(root)), latest(root).strip()))
        rename_later(root, 10)
        assert check_all(root) == [10]
        assert sum(".aside-" in each.name for each in root.iterdir()) == 2
        recover(root, 40)
    newest_first = [(30, 20, 10), (20, 10), (10,)]
    assert seen == {(newest_first[0], step_name(30)), *((steps, step_name(10)) for steps in newest_first)}


@pytest.mark.usefixtures("no_waits_for_the_disk")
def test_killed_in_cleaning(tmp_path: Path) -> None:
    def prepare(root: Path) -> None:
        save_two(root)
        write_files(begin(root, 30), 30)
        write_files(begin(root, 30), 30)

    for root in kill_everywhere(tmp_path, prepare, clean):
        assert check_all(root) == [20, 10]
        recover(root, 30)


@pytest.mark.parametrize("num_kills", [20, pytest.param(200, marks=pytest.mark.full)])
def test_killed_at_any_moment(tmp_path: Path, num_kills: int) -> None:
    """A run that saves and deletes without end, killed again and again, each time going on from what is there."""
    moments = random.Random(0)

    def run(report: int) -> None:
        clean(tmp_path)
        step = (steps_of(step_folders(tmp_path)) or [0])[0]
        while True:
            step += 1
            save(tmp_path, step, num_bytes=100_000)
            os.write(report, b".")
            retain(tmp_path, 2, 50)

    for _ in range(num_kills):
        before = (check_all(tmp_path) or [0])[0]
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                run(writer)
            finally:
                os._exit(1)
        os.close(writer)
        # Some saves, however long the machine takes, and then any moment of what follows.
        num_saved = sum(len(os.read(reader, 1)) for _ in range(moments.randrange(4)))
        time.sleep(moments.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        with os.fdopen(reader, "rb") as file:
            num_saved += len(file.read())
        # What was reported is there, and at most one more that was not.
        assert (check_all(tmp_path) or [0])[0] - before - num_saved in (0, 1)
    clean(tmp_path)
    assert all(re.fullmatch(r"step-\d{8}|latest", each.name) for each in tmp_path.iterdir())


# Refused by the system.


def on_small_disk(tmp_path: Path, num_bytes: int, function: Callable[[Path], object]) -> None:
    """Run this, in a forked process, with a file system of this size of its own; skip where one cannot be mounted."""

    def run() -> str:
        try:
            mount_alone(tmp_path, num_bytes)
        except OSError as error:
            return f"no file system can be mounted here: {error}"
        function(tmp_path)
        return ""

    code, text = forked(run)
    assert code == 0, text
    if text:
        pytest.skip(text)
    assert list(tmp_path.iterdir()) == []  # so it did run there


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    def fill_up(root: Path) -> None:
        save(root, 10, num_bytes=40_000)
        with refused("too-little-space", f"{root} has ", "KiB free", "2.00 GiB"):
            check_free_space(root, 2 * 2**30)
        system = os.statvfs(root)
        check_free_space(root / "new", system.f_bavail * system.f_bsize)
        with refused("too-little-space", f"{root}/new", "KiB free"):
            check_free_space(root / "new", system.f_bavail * system.f_bsize + 1)
        temporary = begin(root, 20)
        write_files(temporary, 20, 40_000)
        with refused("disk-full", f"{temporary}/manifest.json"):
            commit(temporary, root, manifest_of(20, 40_000, extra="long" * 50_000))
        assert check_all(root) == [10]
        # Its space is free again.
        discard(temporary)
        save(root, 30, num_bytes=80_000)
        assert check_all(root) == [30, 10]

    on_small_disk(tmp_path, 2**18, fill_up)


def test_a_disk_that_fills_up_at_any_moment(tmp_path: Path) -> None:
    def fill_up(root: Path) -> None:
        save(root, 1)
        seen = set()
        for num_pages in range(12):
            step, ballast = 10 + num_pages, root / "ballast"
            system = os.statvfs(root)
            ballast.write_bytes(b"x" * (system.f_bavail - num_pages) * system.f_frsize)
            before = check_all(root)
            temporary, message, code = root / "none", "", ""
            try:
                temporary = begin(root, step)
                write_files(temporary, step)
                commit(temporary, root, manifest_of(step))
            except OSError:
                message = "no space for files"
            except CheckpointError as error:
                message, code = str(error), error.code
            seen.add(message.split(str(root))[0].replace(step_name(step), "step"))
            assert (code == "disk-full") == message.startswith("cannot")
            assert message or latest(root).strip() == step_name(step)
            discard(temporary)
            assert check_all(root) in (before, [step, *before])
            assert not list(root.glob("*.partial"))
            ballast.unlink()
            retain(root, 1, None)
        assert {"", "no space for files", "cannot write ", "cannot name step, which is whole, in "} <= seen

    on_small_disk(tmp_path, 2**18, fill_up)


def test_a_read_only_disk(tmp_path: Path) -> None:
    def read_only(root: Path) -> None:
        save_two(root)
        temporary = begin(root, 30)
        write_files(temporary, 30)
        mount(root, "tmpfs", MS_REMOUNT | MS_RDONLY)
        why = os.strerror(errno.EROFS)
        with refused("folder-refused", f"make a folder in {root}: {why}"):
            begin(root, 40)
        with refused("folder-refused", f"make a folder in {root}/new: {why}"):
            begin(root / "new", 40)
        with refused("folder-refused", f"write {temporary}/manifest.json: {why}"):
            commit(temporary, root, manifest_of(30))
        with refused("folder-refused", f"delete {root}/{step_name(10)}: {why}"):
            retain(root, 1, None)
        with refused("folder-refused", step_name(10), f"{root}/latest: {why}"):
            rename_later(root, 10)
        with refused("folder-refused", f"remove {temporary}: {why}"):
            clean(root)
        discard(temporary)
        assert check_all(root) == [20, 10]

    on_small_disk(tmp_path, 2**18, read_only)


def test_a_root_that_is_a_file_or_within_one(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    for root in (taken, taken / "runs"):
        with refused("folder-refused", f"make a folder in {root}: {os.strerror(errno.ENOTDIR)}"):
            begin(root, 1)
    dangling = tmp_path / "link"
    dangling.symlink_to(tmp_path / "gone")
    with refused("folder-refused", f"make a folder in {dangling}: {os.strerror(errno.EEXIST)}"):
        begin(dangling, 1)
    with refused("folder-refused", f"list {taken}: {os.strerror(errno.ENOTDIR)}"):
        clean(taken)


def test_a_folder_of_another_user(tmp_path: Path) -> None:
    save_two(tmp_path)

    def as_another_user() -> None:
        root = Path()
        os.chdir(tmp_path)
        (root / step_name(20) / "manifest.json").chmod(0)
        root.chmod(0o555)
        if os.getuid() == 0:  # whom nothing is refused
            os.setuid(65534)
        with refused("folder-refused", f"make a folder in .: {os.strerror(errno.EACCES)}"):
            begin(root, 30)
        # No damage: with the right to read it, it is whole.
        with refused("read-refused", f"{step_name(20)}/manifest.json: {os.strerror(errno.EACCES)}") as caught:
            read_manifest(root / step_name(20))
        assert type(caught.value) is CheckpointError

    code, text = forked(as_another_user)
    tmp_path.chmod(0o755)
    assert code == 0, text
