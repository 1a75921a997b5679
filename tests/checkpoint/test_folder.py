"""What is on disk after saves, deletions and set-asides, and after each was killed, refused or ran out of room."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint import folder
from shardwise.checkpoint.folder import (
    begin,
    candidates,
    check_room,
    clean,
    commit,
    discard,
    read_manifest,
    retain,
    set_aside,
    step_folders,
    step_name,
    steps_to_delete,
    sync_folder,
)
from shardwise.checkpoint.manifest import (
    CheckpointError,
    DamagedError,
    Manifest,
    StoredPiece,
    StoredState,
    StoredTensor,
)
from shardwise.layout.pieces import Rect

FILES = ("rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors")
# The forked children touch nothing but files.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def content(step: int, name: str, num_bytes: int = 300) -> bytes:
    return (f"{step} {name} ".encode() * num_bytes)[:num_bytes]


def manifest_of(step: int, num_bytes: int = 300, extra: str = "") -> Manifest:
    return Manifest(step=step, tensors=(), files=dict.fromkeys(FILES, num_bytes), extra=extra)


def write_files(temporary: Path, step: int, num_bytes: int = 300) -> None:
    for name in FILES:
        (temporary / name).write_bytes(content(step, name, num_bytes))


def save(root: Path, step: int, num_bytes: int = 300, extra: str = "") -> Path:
    temporary = begin(root, step)
    write_files(temporary, step, num_bytes)
    return commit(temporary, root, manifest_of(step, num_bytes, extra))


def steps_of(folders: list[Path]) -> list[int]:
    return [int(each.name.removeprefix("step-")) for each in folders]


def latest(root: Path) -> str:
    return (root / "latest").read_text()


def check_whole(step_folder: Path) -> int:
    """The step of a checkpoint, all of whose bytes are as they were written."""
    manifest = read_manifest(step_folder)
    assert step_folder.name == step_name(manifest.step)
    for name, num_bytes in manifest.files.items():
        assert (step_folder / name).read_bytes() == content(manifest.step, name, num_bytes)
    return manifest.step


def check_all(root: Path) -> list[int]:
    """The steps found, newest first: each whole, and `latest` names one of them."""
    steps = [check_whole(each) for each in candidates(root)] if root.exists() else []
    if (root / "latest").exists():
        assert latest(root) in {f"{step_name(step)}\n" for step in steps}
    return steps


def forked(function: Callable[[], object]) -> tuple[int, str]:
    """Run this in a forked process: its exit code, or minus the signal that ended it, and what it gave or raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            result, code = str(function()), 0
        except BaseException:
            result, code = traceback.format_exc(), 1
        os.write(writer, result.encode()[-60_000:])
        os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


# Names, and what is a checkpoint.


def test_a_checkpoint_is_found_under_its_name(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "a"
    assert save(root, 100) == root / "step-00000100"
    assert sorted(each.name for each in root.iterdir()) == ["latest", "step-00000100"]
    assert check_all(root) == [100]
    assert latest(root) == "step-00000100\n"
    assert candidates(root / "step-00000100") == [root / "step-00000100"]
    assert read_manifest(root / "step-00000100") == manifest_of(100)


def test_candidates_are_newest_first_by_number_and_nothing_else(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 5):
        save(tmp_path, step)
    for name in ("step-00000200.0a1b.partial", "step-00000200.0a1b.deleted", "step-00000200.aside-1", "step-7", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000000300").mkdir()  # one zero too many: two names of a step would be one too many
    (tmp_path / "step-00000400").write_text("a file")
    assert steps_of(candidates(tmp_path)) == [100_000_000, 99_999_999, 5]
    assert latest(tmp_path) == "step-00000005\n"


def test_a_checkpoint_under_another_name_is_one(tmp_path: Path) -> None:
    save(tmp_path, 100).rename(tmp_path / "best")
    assert candidates(tmp_path / "best") == [tmp_path / "best"]
    assert candidates(tmp_path) == []


def test_a_root_without_checkpoints_has_no_candidates(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert candidates(tmp_path) == []
    assert step_folders(tmp_path / "none") == clean(tmp_path / "none") == set_aside(tmp_path / "none", 0) == []


def test_a_path_that_is_not_there_says_what_is(tmp_path: Path) -> None:
    for step in (50, 100):
        save(tmp_path / "llama-a", step)
    there = re.escape(f"{tmp_path}/llama-a")
    expected = f"{there}/step-00000101 does not exist, {there} has step-00000100, step-00000050, latest; did you mean "
    with pytest.raises(CheckpointError, match=f"^{expected}step-00000100"):
        candidates(tmp_path / "llama-a" / "step-00000101")
    with pytest.raises(CheckpointError, match=r"has llama-a; did you mean llama-a\?$"):
        candidates(tmp_path / "lama-a" / "step-00000100")
    with pytest.raises(CheckpointError, match="llama-a/latest is a file; give the folder of a checkpoint, or the one"):
        candidates(tmp_path / "llama-a" / "latest")


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_room(Path("runs/a"), 1)
    save(Path("runs/a"), 100)
    assert check_all(Path("runs/a")) == [100]
    with pytest.raises(CheckpointError, match=f"runz does not exist, {tmp_path} has runs; did you mean runs"):
        candidates(Path("runz"))


# Damage.


def test_damage_is_named(tmp_path: Path) -> None:
    step_folder = save(tmp_path, 100)
    torn, whole = step_folder / FILES[1], content(100, FILES[1])
    torn.write_bytes(whole[:-1])
    with pytest.raises(DamagedError, match=rf"^{re.escape(str(torn))} has 299 bytes and the manifest says 300; use an"):
        read_manifest(step_folder)
    torn.unlink()
    with pytest.raises(DamagedError, match=rf"^{re.escape(str(torn))} is missing; use an older checkpoint$"):
        read_manifest(step_folder)
    torn.mkdir()
    with pytest.raises(DamagedError, match=rf"^cannot read {re.escape(str(torn))}: Is a directory; use an older"):
        read_manifest(step_folder)
    torn.rmdir()
    torn.write_bytes(whole)
    assert check_whole(step_folder) == 100


def test_a_torn_or_changed_manifest_is_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 100) / "manifest.json"
    whole = path.read_bytes()
    for changed in (
        b"",
        whole[:1],
        whole[:-1],
        whole + b"\n",
        whole[: len(whole) // 2],
        b"\xff" + whole[1:],
        b"\0" * 9,
    ):
        path.write_bytes(changed)
        with pytest.raises(DamagedError, match=rf"^{re.escape(str(path))} does not match its checksum; use an older"):
            read_manifest(path.parent)
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(DamagedError):
            read_manifest(path.parent)
    path.unlink()
    with pytest.raises(DamagedError, match=r"step-00000100 is no whole checkpoint: it has no manifest\.json; use an"):
        read_manifest(path.parent)
    with pytest.raises(DamagedError, match="is no whole checkpoint"):
        read_manifest(tmp_path / "step-00000200")


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "..", "", "sub/a.safetensors"])
def test_a_manifest_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    manifest = Manifest(step=1, tensors=(), files={name: 1})
    (tmp_path / "manifest.json").write_text(manifest.to_text())
    with pytest.raises(DamagedError, match=f"lists {name!r}, which is not the name of a file in its folder"):
        read_manifest(tmp_path)
    piece = StoredPiece(Rect((0,), (4,)), name, 0)
    tensor = StoredTensor("up.weight", (), (4,), {"param": StoredState("F32", (piece,))})
    (tmp_path / "manifest.json").write_text(Manifest(step=1, tensors=(tensor,), files={}).to_text())
    with pytest.raises(DamagedError, match=f"says up.weight is in {name!r}, and lists no such file"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(("number", "is_damage"), [(errno.EIO, True), (errno.EUCLEAN, True), (errno.EMFILE, False)])
def test_only_what_the_disk_lost_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_damage: bool
) -> None:
    step_folder = save(tmp_path, 100)

    def refuse(path: Path) -> bytes:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CheckpointError, match=f"step-00000100/manifest.json: {os.strerror(number)}; ") as caught:
        read_manifest(step_folder)
    assert isinstance(caught.value, DamagedError) == is_damage


# Commit.


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    late = begin(tmp_path, 100)
    write_files(late, 100, 200)
    save(tmp_path, 100)
    message = "step-00000100 exists and a checkpoint is never overwritten; resume from it, move it away, or use another"
    with pytest.raises(CheckpointError, match=message):
        begin(tmp_path, 100)
    with pytest.raises(CheckpointError, match=message):
        commit(late, tmp_path, manifest_of(100, 200))
    discard(late)
    assert check_all(tmp_path) == [100]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "step-00000100"]


def test_a_checkpoint_made_in_between_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = begin(tmp_path, 100)
    write_files(late, 100, 200)
    rename = os.rename

    def rename_after_another(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        save(tmp_path, 100)
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_after_another)
    with pytest.raises(CheckpointError, match="step-00000100 exists and a checkpoint is never overwritten"):
        commit(late, tmp_path, manifest_of(100, 200))
    assert check_all(tmp_path) == [100]


def test_a_file_that_rank_0_does_not_see_is_named(tmp_path: Path) -> None:
    temporary = begin(tmp_path, 100)
    (temporary / FILES[0]).write_bytes(content(100, FILES[0]))
    with pytest.raises(CheckpointError, match=f"{FILES[1]} is missing; save to one folder that all ranks share, not"):
        commit(temporary, tmp_path, manifest_of(100))
    (temporary / FILES[1]).write_bytes(b"short")
    with pytest.raises(CheckpointError, match=f"{FILES[1]} has 5 bytes and the manifest says 300; save to one"):
        commit(temporary, tmp_path, manifest_of(100))
    assert candidates(tmp_path) == []
    (temporary / FILES[1]).write_bytes(content(100, FILES[1]))
    commit(temporary, tmp_path, manifest_of(100))
    assert check_all(tmp_path) == [100]


def test_each_thing_is_on_disk_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def noted(name: str) -> None:
        original = getattr(os, name)

        def wrapper(*args: object) -> object:
            paths = [os.readlink(f"/proc/self/fd/{each}") if isinstance(each, int) else str(each) for each in args]
            short = [os.path.relpath(each, tmp_path) for each in paths]
            calls.append(re.sub(r"\.[0-9a-f]{8}\.partial", "~", " ".join([name, *short])))
            return original(*args)

        monkeypatch.setattr(os, name, wrapper)

    for name in ("fsync", "rename", "replace"):
        noted(name)
    temporary = begin(tmp_path / "a" / "b", 100)
    write_files(temporary, 100)
    assert calls == ["fsync .", "fsync a"]
    calls.clear()
    commit(temporary, tmp_path / "a" / "b", manifest_of(100))
    assert calls == [
        "fsync a/b/step-00000100~/manifest.json",
        "fsync a/b/step-00000100~",
        "rename a/b/step-00000100~ a/b/step-00000100",
        "fsync a/b",
        "fsync a/b/latest~",
        "replace a/b/latest~ a/b/latest",
        "fsync a/b",
    ]


def test_folders_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> None:
        def fsync(_: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    open_before = len(os.listdir("/proc/self/fd"))
    for number in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
        refuse(number)
        sync_folder(tmp_path)
    refuse(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == open_before


# Deleting and setting aside.


def test_retain_keeps_the_last_and_the_milestones(tmp_path: Path) -> None:
    for step in range(50, 350, 50):
        save(tmp_path, step)
    assert steps_of(retain(tmp_path, 2, 100)) == [50, 150]
    assert check_all(tmp_path) == [300, 250, 200, 100]
    assert retain(tmp_path, 2, 100) == retain(tmp_path, None, None) == retain(tmp_path, None, 1000) == []
    assert steps_of(retain(tmp_path, 1, None)) == [100, 200, 250]
    assert check_all(tmp_path) == [300]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "step-00000300"]


def test_damaged_checkpoints_are_neither_counted_nor_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    (tmp_path / step_name(2) / FILES[0]).unlink()
    (tmp_path / step_name(4) / "manifest.json").unlink()
    (tmp_path / step_name(5) / "manifest.json").write_text("{")
    assert steps_of(retain(tmp_path, 1, None)) == [1]
    assert steps_of(candidates(tmp_path)) == [5, 4, 3, 2]
    assert check_whole(tmp_path / step_name(3)) == 3


def test_what_latest_names_is_not_deleted(tmp_path: Path) -> None:
    for step in (100, 200, 60):
        save(tmp_path, step)
    assert steps_of(retain(tmp_path, 1, None)) == [100]
    assert check_all(tmp_path) == [200, 60]


def test_a_link_is_deleted_and_not_what_it_leads_to(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    save(tmp_path / "a", 1).rename(elsewhere)
    (tmp_path / "a" / step_name(1)).symlink_to(elsewhere)
    save(tmp_path / "a", 2)
    assert check_all(tmp_path / "a") == [2, 1]
    assert steps_of(retain(tmp_path / "a", 1, None)) == [1]
    assert check_all(tmp_path / "a") == [2]
    assert (elsewhere / FILES[0]).read_bytes() == content(1, FILES[0])


@given(
    st.lists(st.integers(0, 60), unique=True),
    st.integers(1, 6) | st.none(),
    st.integers(1, 12) | st.none(),
)
def test_what_is_kept(steps: list[int], keep_last: int | None, keep_every: int | None) -> None:
    going = steps_to_delete(steps, keep_last, keep_every)
    assert going == sorted(set(going) & set(steps))
    newest = sorted(steps)[-keep_last:] if keep_last else steps
    for step in steps:
        is_kept = step in newest or (keep_every is not None and step % keep_every == 0)
        assert is_kept == (step not in going)
    assert steps_to_delete(set(steps) - set(going), keep_last, keep_every) == []


@pytest.mark.parametrize(("keep_last", "keep_every"), [(0, None), (-1, None), (3, 0)])
def test_keeping_less_than_one_is_refused(keep_last: int, keep_every: int | None) -> None:
    with pytest.raises(
        CheckpointError, match=r"keep_(last|every)=(0|-1) is less than 1; give a positive number, or None"
    ):
        steps_to_delete([1, 2], keep_last, keep_every)


def test_a_run_resumed_from_before_saves_these_steps_again(tmp_path: Path) -> None:
    for step in (50, 100, 150):
        save(tmp_path, step)
    aside = ["step-00000150.aside-1", "step-00000100.aside-1"]
    assert [each.name for each in set_aside(tmp_path, 50)] == aside
    assert check_all(tmp_path) == [50]
    assert latest(tmp_path) == "step-00000050\n"
    save(tmp_path, 100)
    assert check_all(tmp_path) == [100, 50]
    assert [each.name for each in set_aside(tmp_path, 50)] == ["step-00000100.aside-2"]
    assert set_aside(tmp_path, 50) == []
    assert read_manifest(tmp_path / "step-00000100.aside-1") == manifest_of(100)
    assert retain(tmp_path, 1, None) == clean(tmp_path) == []


def test_setting_all_aside_leaves_no_latest(tmp_path: Path) -> None:
    for step in (50, 100):
        save(tmp_path, step)
    (tmp_path / step_name(50) / FILES[0]).unlink()
    set_aside(tmp_path, 50)
    assert not (tmp_path / "latest").exists()  # for what is left is damaged
    assert steps_of(candidates(tmp_path)) == [50]


def test_clean_removes_leftovers_alone(tmp_path: Path) -> None:
    save(tmp_path, 50)
    live, dead = begin(tmp_path, 100), begin(tmp_path, 100)
    write_files(live, 100)
    write_files(dead, 100)
    leftovers = [dead, tmp_path / "step-00000020.77ab3c10.deleted", tmp_path / "latest.0123abcd.partial"]
    leftovers[1].mkdir()
    leftovers[2].write_text("step-000")
    strangers = {"step-00000020.aside-1", "mine.partial", "step-00000020.deleted", "download.0a1b2c3d.partial"}
    for name in strangers:
        (tmp_path / name).mkdir()
    assert sorted(clean(tmp_path, keep=[live])) == sorted(leftovers)
    commit(live, tmp_path, manifest_of(100))
    assert check_all(tmp_path) == [100, 50]
    assert strangers == {each.name for each in tmp_path.iterdir()} - {"latest", step_name(50), step_name(100)}


# Killed before and after each call, and while writing.

CALLS = ("mkdir", "open", "fsync", "rename", "replace", "unlink", "rmdir")


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


def test_killed_in_a_save(tmp_path: Path) -> None:
    seen = set()
    for root in kill_everywhere(tmp_path, save_two, lambda root: save(root, 30)):
        steps = check_all(root)
        assert steps[-2:] == [20, 10]
        seen.add((steps[0], latest(root).strip()))
        recover(root, 40)
    # The middle one is what `latest` alone would lose.
    assert seen == {(20, step_name(20)), (30, step_name(20)), (30, step_name(30))}


def test_killed_in_the_first_save(tmp_path: Path) -> None:
    seen = set()
    for root in kill_everywhere(tmp_path, lambda root: None, lambda root: save(root / "new" / "root", 30)):
        root = root / "new" / "root"
        seen.add((tuple(check_all(root)), (root / "latest").exists()))
        recover(root, 40)
    assert seen == {((), False), ((30,), False), ((30,), True)}


def test_killed_in_deleting(tmp_path: Path) -> None:
    seen = set()
    for root in kill_everywhere(tmp_path, save_three, lambda root: retain(root, 1, None)):
        steps = check_all(root)
        leftovers = [each for each in root.iterdir() if each.name.endswith(".deleted")]
        seen.add((tuple(steps), len(leftovers)))
        recover(root, 40)
    assert seen == {((30, 20, 10), 0), ((30, 20), 1), ((30, 20), 0), ((30,), 1), ((30,), 0)}


def test_killed_in_setting_aside(tmp_path: Path) -> None:
    seen = set()
    for root in kill_everywhere(tmp_path, save_three, lambda root: set_aside(root, 10)):
        seen.add((tuple(check_all(root)), latest(root).strip()))
        set_aside(root, 10)
        assert check_all(root) == [10]
        assert sum(".aside-" in each.name for each in root.iterdir()) == 2
        recover(root, 40)
    newest_first = [(30, 20, 10), (20, 10), (10,)]
    assert seen == {(newest_first[0], step_name(30)), *((steps, step_name(10)) for steps in newest_first)}


def test_killed_in_cleaning(tmp_path: Path) -> None:
    def prepare(root: Path) -> None:
        save_two(root)
        write_files(begin(root, 30), 30)
        write_files(begin(root, 30), 30)

    for root in kill_everywhere(tmp_path, prepare, clean):
        assert check_all(root) == [20, 10]
        recover(root, 30)


@pytest.mark.parametrize("num_kills", [20, pytest.param(400, marks=pytest.mark.full)])
def test_killed_at_any_moment(tmp_path: Path, num_kills: int) -> None:
    """A run that saves and deletes without end, killed again and again, each time going on from what is there."""
    moments = random.Random(0)
    acknowledged = 0

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
        time.sleep(moments.uniform(0.001, 0.04))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        with os.fdopen(reader, "rb") as file:
            num_saved = len(file.read())
        acknowledged += num_saved
        # What was reported is there, and at most one more that was not.
        assert (check_all(tmp_path) or [0])[0] - before - num_saved in (0, 1)
    assert acknowledged > 0
    clean(tmp_path)
    assert all(re.fullmatch(r"step-\d{8}|latest", each.name) for each in tmp_path.iterdir())


# Refused by the system.

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_REC_PRIVATE = 1, 32, 0x4000 | (1 << 18)


def mount(place: Path | str, kind: str, flags: int, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", str(place).encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()):
        raise OSError(ctypes.get_errno(), f"mount {kind}: {os.strerror(ctypes.get_errno())}")


def on_small_disk(tmp_path: Path, num_bytes: int, function: Callable[[Path], object]) -> None:
    """Run this, in a forked process, with a file system of this size of its own; skip where one cannot be mounted."""

    def run() -> str:
        libc = ctypes.CDLL(None, use_errno=True)
        user, group = os.getuid(), os.getgid()
        try:
            if libc.unshare(CLONE_NEWNS):
                if libc.unshare(CLONE_NEWNS | CLONE_NEWUSER):
                    raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
                Path("/proc/self/setgroups").write_text("deny")
                Path("/proc/self/uid_map").write_text(f"0 {user} 1")
                Path("/proc/self/gid_map").write_text(f"0 {group} 1")
            mount("/", "", MS_REC_PRIVATE)
            mount(tmp_path, "tmpfs", 0, f"size={num_bytes}")
        except OSError as error:
            return f"no file system can be mounted here: {error}"
        function(tmp_path)
        return ""

    code, text = forked(run)
    assert code == 0, text
    if text:
        pytest.skip(text)
    assert list(tmp_path.iterdir()) == []  # so it did run there


@contextmanager
def refused(*parts: str) -> Iterator[pytest.ExceptionInfo[CheckpointError]]:
    """Expect a message of one line with these parts."""
    with pytest.raises(CheckpointError) as caught:
        yield caught
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    def fill_up(root: Path) -> None:
        save(root, 10, num_bytes=40_000)
        with refused(f"{root} has 0.00", "GiB free and the checkpoint needs 2.000 GiB; free some room, keep fewer"):
            check_room(root, 2 * 2**30)
        room = os.statvfs(root)
        check_room(root / "new", room.f_bavail * room.f_bsize)
        with refused("GiB free and the checkpoint needs"):
            check_room(root / "new", room.f_bavail * room.f_bsize + 1)
        temporary = begin(root, 20)
        write_files(temporary, 20, 40_000)
        with refused(f"cannot write {temporary}/manifest.json: No space left on device; free some room, keep fewer"):
            commit(temporary, root, manifest_of(20, 40_000, extra="long" * 50_000))
        assert check_all(root) == [10]
        # Its room is there again.
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
            room = os.statvfs(root)
            ballast.write_bytes(b"x" * (room.f_bavail - num_pages) * room.f_frsize)
            before = check_all(root)
            temporary, message = root / "none", ""
            try:
                temporary = begin(root, step)
                write_files(temporary, step)
                commit(temporary, root, manifest_of(step))
            except OSError:
                message = "no room for files"
            except CheckpointError as error:
                message = str(error)
            seen.add(message.split(str(root))[0].replace(step_name(step), "step"))
            assert ("No space left on device; free some room" in message) == message.startswith("cannot")
            assert message or latest(root).strip() == step_name(step)
            discard(temporary)
            assert check_all(root) in (before, [step, *before])
            assert not list(root.glob("*.partial"))
            ballast.unlink()
            retain(root, 1, None)
        assert {"", "no room for files", "cannot write ", "cannot name step, which is whole, in "} <= seen

    on_small_disk(tmp_path, 2**18, fill_up)


def test_a_read_only_disk(tmp_path: Path) -> None:
    def read_only(root: Path) -> None:
        save_two(root)
        temporary = begin(root, 30)
        write_files(temporary, 30)
        mount(root, "tmpfs", MS_REMOUNT | MS_RDONLY)
        why = "Read-only file system; mount it for writing, or use another folder"
        with refused(f"cannot make a folder in {root}: {why}"):
            begin(root, 40)
        with refused(f"cannot make a folder in {root}/new: {why}"):
            begin(root / "new", 40)
        with refused(f"cannot write {temporary}/manifest.json: {why}"):
            commit(temporary, root, manifest_of(30))
        with refused(f"cannot delete {root}/{step_name(10)}: {why}"):
            retain(root, 1, None)
        with refused(f"cannot name {step_name(10)}, which is whole, in {root}/latest: {why}"):
            set_aside(root, 10)
        with refused(f"cannot remove {temporary}: {why}"):
            clean(root)
        discard(temporary)
        assert check_all(root) == [20, 10]

    on_small_disk(tmp_path, 2**18, read_only)


def test_a_root_that_is_a_file_or_within_one(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    for root in (taken, taken / "runs"):
        with refused(f"cannot make a folder in {root}: Not a directory; a file stands where a folder must be: move it"):
            begin(root, 1)
    dangling = tmp_path / "link"
    dangling.symlink_to(tmp_path / "gone")
    with refused(f"cannot make a folder in {dangling}: File exists; a file stands where"):
        begin(dangling, 1)
    with refused(f"cannot list {taken}: Not a directory"):
        clean(taken)


def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    save_two(tmp_path)

    def as_somebody() -> None:
        root = Path()
        os.chdir(tmp_path)
        (root / step_name(20) / "manifest.json").chmod(0)
        root.chmod(0o555)
        if os.getuid() == 0:  # whom nothing is refused
            os.setuid(65534)
        with refused("cannot make a folder in .: Permission denied; give this user the right to, or use another"):
            begin(root, 30)
        # No damage: with the right to read it, it is whole.
        with refused(f"cannot read {step_name(20)}/manifest.json: Permission denied; mend that, or") as caught:
            read_manifest(root / step_name(20))
        assert type(caught.value) is CheckpointError

    code, text = forked(as_somebody)
    tmp_path.chmod(0o755)
    assert code == 0, text
