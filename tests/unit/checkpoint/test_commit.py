"""What is on disk after saves, deletions and renames, and what is said of what is damaged or not there."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checkpoint_folders import (
    FILES,
    check_all,
    check_whole,
    content,
    latest,
    manifest_of,
    save,
    steps_of,
    write_files,
)
from harness.refusals import refused
from shardwise.checkpoint import commit as folder
from shardwise.checkpoint.commit import (
    begin,
    candidates,
    check_free_space,
    check_tag,
    clean,
    commit,
    discard,
    read_manifest,
    rename_later,
    retain,
    step_folders,
    step_name,
    steps_to_delete,
    sync_folder,
)
from shardwise.checkpoint.manifest import (
    DamagedError,
    Manifest,
    StoredChunk,
    StoredState,
    StoredTensor,
)
from shardwise.layout.slicing import Rect

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
    assert candidates(tmp_path) == [tmp_path / "best"]


def test_a_root_without_checkpoints_has_no_candidates(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert candidates(tmp_path) == []
    clean(tmp_path / "none")
    assert step_folders(tmp_path / "none") == rename_later(tmp_path / "none", 0) == []


def test_a_path_that_is_not_there_says_what_is(tmp_path: Path) -> None:
    for step in (50, 100):
        save(tmp_path / "llama-a", step)
    there = f"{tmp_path}/llama-a"
    listed = "latest, step-00000050, step-00000100"
    with refused("no-such-path", f"{there}/step-00000101", f"{there} has {listed}", "mean step-00000100"):
        candidates(tmp_path / "llama-a" / "step-00000101")
    with refused("no-such-path", "mean llama-a?"):
        candidates(tmp_path / "lama-a" / "step-00000100")
    with refused("not-a-folder", "llama-a/latest"):
        candidates(tmp_path / "llama-a" / "latest")


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_free_space(Path("runs/a"), 1)
    save(Path("runs/a"), 100)
    assert check_all(Path("runs/a")) == [100]
    with refused("no-such-path", "runz", f"{tmp_path} has runs", "mean runs"):
        candidates(Path("runz"))


# Tags.


def save_tagged(root: Path, step: int, tag: str) -> Path:
    temporary = begin(root, step, tag)
    write_files(temporary, step)
    return commit(temporary, root, manifest_of(step), tag)


def test_a_tag_names_the_folder_and_may_be_used_again(tmp_path: Path) -> None:
    assert save_tagged(tmp_path, 10, "best") == tmp_path / "best"
    save_tagged(tmp_path, 20, "best")
    assert latest(tmp_path) == "best\n"
    assert read_manifest(tmp_path / "best").step == 20
    assert sorted(each.name for each in tmp_path.iterdir()) == ["best", "latest"]


def test_latest_says_which_tag_is_the_newest(tmp_path: Path) -> None:
    for step, tag in ((8, "global_step8"), (12, "global_step12"), (9, "best")):
        save_tagged(tmp_path, step, tag)
    save(tmp_path, 10)
    names = ["step-00000010", "global_step12", "global_step8", "best"]
    assert [each.name for each in candidates(tmp_path)] == names
    save_tagged(tmp_path, 7, "global_step7")
    assert [each.name for each in candidates(tmp_path)] == ["global_step7", *names]
    assert step_folders(tmp_path) == [tmp_path / "step-00000010"]


def test_what_else_has_the_name_of_a_tag_stays(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "mine").touch()
    with refused("checkpoint-exists", "best"):
        begin(tmp_path, 10, "best")


def test_a_checkpoint_that_is_being_replaced_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tagged(tmp_path, 10, "best")
    temporary = begin(tmp_path, 20, "best")
    write_files(temporary, 20)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder, "_rename", stop)
    with pytest.raises(KeyboardInterrupt):
        commit(temporary, tmp_path, manifest_of(20), "best")
    clean(tmp_path)
    assert [read_manifest(each).step for each in tmp_path.iterdir() if each.is_dir()] == [10]


@pytest.mark.parametrize("tag", ["../best", "a/b", "latest", "step-00000001", ".best", "a b", "x" * 200])
def test_a_tag_that_cannot_name_a_folder_is_refused(tag: str) -> None:
    with refused("tag-invalid"):
        check_tag(tag, keeps_all=True)


def test_a_tag_excludes_the_deletion_of_older_ones() -> None:
    check_tag("", keeps_all=False)
    with refused("tag-keeps-all", "best"):
        check_tag("best", keeps_all=False)


# Damage.


def test_damage_is_named(tmp_path: Path) -> None:
    step_folder = save(tmp_path, 100)
    torn, whole = step_folder / FILES[1], content(100, FILES[1])
    torn.write_bytes(whole[:-1])
    with refused("file-torn", str(torn), "299", "300"):
        read_manifest(step_folder)
    torn.unlink()
    with refused("file-torn", str(torn)):
        read_manifest(step_folder)
    torn.mkdir()
    with refused("file-unreadable", str(torn), os.strerror(errno.EISDIR)):
        read_manifest(step_folder)
    torn.rmdir()
    torn.write_bytes(whole)
    assert check_whole(step_folder) == 100


def test_a_checkpoint_under_another_steps_name_is_damage(tmp_path: Path) -> None:
    folder = save(tmp_path, 100)
    wrong = folder.rename(tmp_path / step_name(200))
    with refused("folder-step-differs", "step-00000200/manifest.json", "step 100", "step-00000100"):
        read_manifest(wrong)
    # A name that says no step may be any.
    assert read_manifest(wrong.rename(tmp_path / "best")).step == 100


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
        with refused("manifest-torn", str(path)):
            read_manifest(path.parent)
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(DamagedError):
            read_manifest(path.parent)
    path.unlink()
    with refused("no-manifest", "step-00000100", "manifest.json"):
        read_manifest(path.parent)
    with refused("no-manifest", "step-00000200"):
        read_manifest(tmp_path / "step-00000200")


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "..", "", "sub/a.safetensors"])
def test_a_manifest_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    manifest = Manifest(step=1, tensors=(), files={name: 1})
    (tmp_path / "manifest.json").write_text(manifest.to_text())
    with refused("manifest-malformed", repr(name)):
        read_manifest(tmp_path)
    piece = StoredChunk(Rect((0,), (4,)), name, 0)
    tensor = StoredTensor("up.weight", (), (4,), {"param": StoredState("F32", (piece,))})
    (tmp_path / "manifest.json").write_text(Manifest(step=1, tensors=(tensor,), files={}).to_text())
    with refused("manifest-malformed", "up.weight", repr(name)):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.EIO, "file-unreadable"), (errno.EUCLEAN, "file-unreadable"), (errno.EMFILE, "read-refused")],
)
def test_only_what_the_disk_lost_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    step_folder = save(tmp_path, 100)

    def refuse(path: Path, *arguments: object) -> bytes:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(folder, "read_bytes", refuse)
    with refused(code, "step-00000100/manifest.json", os.strerror(number)) as caught:
        read_manifest(step_folder)
    assert isinstance(caught.value, DamagedError) == (code == "file-unreadable")


# Commit.


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    late = begin(tmp_path, 100)
    write_files(late, 100, 200)
    save(tmp_path, 100)
    with refused("checkpoint-exists", "step-00000100"):
        begin(tmp_path, 100)
    with refused("checkpoint-exists", "step-00000100"):
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
    with refused("checkpoint-exists", "step-00000100"):
        commit(late, tmp_path, manifest_of(100, 200))
    assert check_all(tmp_path) == [100]


def test_a_file_that_rank_0_does_not_see_is_named(tmp_path: Path) -> None:
    temporary = begin(tmp_path, 100)
    (temporary / FILES[0]).write_bytes(content(100, FILES[0]))
    with refused("folder-not-shared", FILES[1]):
        commit(temporary, tmp_path, manifest_of(100))
    (temporary / FILES[1]).write_bytes(b"short")
    with refused("folder-not-shared", FILES[1], "5 bytes", "300"):
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


# Deleting and renaming.


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


@given(st.lists(st.integers(0, 60), unique=True), st.integers(1, 6) | st.none(), st.integers(1, 12) | st.none())
def test_what_is_kept(steps: list[int], keep_last: int | None, keep_every: int | None) -> None:
    going = steps_to_delete(steps, keep_last, keep_every)
    assert going == sorted(set(going) & set(steps))
    newest = sorted(steps)[-keep_last:] if keep_last else steps
    for step in steps:
        is_kept = step in newest or (keep_every is not None and step % keep_every == 0)
        assert is_kept == (step not in going)
    assert steps_to_delete(set(steps) - set(going), keep_last, keep_every) == []


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "named"),
    [(0, None, "keep_last=0"), (-1, None, "keep_last=-1"), (3, 0, "keep_every=0")],
)
def test_keeping_less_than_one_is_refused(keep_last: int, keep_every: int | None, named: str) -> None:
    with refused("keep-positive", named):
        steps_to_delete([1, 2], keep_last, keep_every)


def test_a_run_resumed_from_before_saves_these_steps_again(tmp_path: Path) -> None:
    for step in (50, 100, 150):
        save(tmp_path, step)
    renamed = ["step-00000150.aside-1", "step-00000100.aside-1"]
    assert [each.name for each in rename_later(tmp_path, 50)] == renamed
    assert check_all(tmp_path) == [50]
    assert latest(tmp_path) == "step-00000050\n"
    save(tmp_path, 100)
    assert check_all(tmp_path) == [100, 50]
    assert [each.name for each in rename_later(tmp_path, 50)] == ["step-00000100.aside-2"]
    assert rename_later(tmp_path, 50) == []
    assert read_manifest(tmp_path / "step-00000100.aside-1") == manifest_of(100)
    assert retain(tmp_path, 1, None) == []


def test_renaming_all_leaves_no_latest(tmp_path: Path) -> None:
    for step in (50, 100):
        save(tmp_path, step)
    (tmp_path / step_name(50) / FILES[0]).unlink()
    rename_later(tmp_path, 50)
    assert not (tmp_path / "latest").exists()  # for what is left is damaged
    assert steps_of(candidates(tmp_path)) == [50]


def test_clean_removes_leftovers_alone(tmp_path: Path) -> None:
    save(tmp_path, 50)
    dead = begin(tmp_path, 100)
    write_files(dead, 100)
    leftovers = [dead, tmp_path / "step-00000020.77ab3c10.deleted", tmp_path / "latest.0123abcd.partial"]
    leftovers[1].mkdir()
    leftovers[2].write_text("step-000")
    strangers = {"step-00000020.aside-1", "mine.partial", "step-00000020.deleted", "download.0a1b2c3d.partial"}
    for name in strangers:
        (tmp_path / name).mkdir()
    clean(tmp_path)
    assert not [each for each in leftovers if each.exists()]
    assert check_all(tmp_path) == [50]
    assert strangers == {each.name for each in tmp_path.iterdir()} - {"latest", step_name(50)}
