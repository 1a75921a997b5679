"""Files are written whole, under names that no one guesses, and through no link."""

from __future__ import annotations

import ast
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shardwise
from shardwise.config.written_files import create, open_end, write_asked, write_whole

WRITERS: tuple[Callable[[Path, str], None], ...] = (write_whole, write_asked)


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A file elsewhere, which stays as it is."""
    path = tmp_path / "secret"
    path.write_text("secret")
    yield path
    assert path.read_text() == "secret"


@pytest.mark.parametrize("write", WRITERS)
def test_a_link_is_replaced(write: Callable[[Path, str], None], tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name, target in {"a": secret, "b": Path("nowhere"), "c": Path("c")}.items():
        (folder / name).symlink_to(target)
        write(folder / name, "ü")
        assert not (folder / name).is_symlink()
        assert (folder / name).read_text(encoding="utf-8") == "ü"
    (folder / "d").hardlink_to(secret)
    write(folder / "d", "new")
    assert sorted(each.name for each in folder.iterdir()) == ["a", "b", "c", "d"]


def test_a_pipe_in_a_run_folder_is_replaced_and_one_that_the_user_names_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_asked(tmp_path / "pipe", "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    write_whole(tmp_path / "pipe", "text")
    assert (tmp_path / "pipe").read_text() == "text"


def test_names_that_are_guessed_by_the_process_number_do_no_harm(tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (f".report.html.{os.getpid()}", f"report.html.{os.getpid()}", "report.html.tmp", ".report.html.tmp"):
        (folder / name).symlink_to(secret)
    write_whole(folder / "report.html", "page")
    with pytest.raises(FileExistsError):
        create(folder / "report.html.tmp")


@pytest.mark.parametrize("is_new", [False, True])
def test_the_end_of_a_link_or_a_pipe_is_not_written_to(tmp_path: Path, secret: Path, is_new: bool) -> None:
    (tmp_path / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=str(tmp_path / name)):
            open_end(tmp_path / name, is_new=is_new)
    os.close(reader)
    with pytest.raises(OSError, match="pipe"):  # that no one reads
        open_end(tmp_path / "pipe")


def test_the_end_of_a_file_is_written_to(tmp_path: Path) -> None:
    for is_new in (True, False):
        with open_end(tmp_path / "lines", is_new=is_new) as lines:
            lines.write(b"a\n")
    assert (tmp_path / "lines").read_text() == "a\na\n"


@pytest.mark.parametrize("write", WRITERS)
def test_an_error_names_the_file(write: Callable[[Path, str], None], tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="folder"):
        write(tmp_path / "folder", "a")
    with pytest.raises(FileNotFoundError, match="none/a"):
        write(tmp_path / "none" / "a", "a")

    def full(descriptor: int, mode: str) -> None:
        os.close(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match=r"No space left.*/a'"):
        write(tmp_path / "a", "a")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_files_of_a_folder_that_takes_no_others_are_written_in_place(tmp_path: Path, secret: Path, monkeypatch) -> None:
    (tmp_path / "a").write_text("longer")
    (tmp_path / "link").symlink_to(secret)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    write_asked(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"
    with pytest.raises(OSError, match="link"):
        write_asked(tmp_path / "link", "new")


# Into a folder that was just made, under a name that no one can guess or that no one else may write to.
IN_NEW_FOLDERS = {
    "checkpoint/hf/packer.py": 2, "checkpoint/hf/exporter.py": 2, "verify/run.py": 1,
    "config/written_files.py": 1, "checkpoint/commit.py": 1,
    "compat/deepspeed/profiler.py": 1, "__main__.py": 2, "doctor/calibrate.py": 1,
}  # fmt: skip


def test_nothing_is_written_but_through_the_one_place() -> None:
    root = Path(shardwise.__file__).parent
    found: dict[str, int] = {}
    for path in root.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            is_method = isinstance(call.func, ast.Attribute)
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            texts = [each.value for each in call.args if isinstance(each, ast.Constant)]
            writes = name == "open" and any(text in ("w", "wb", "a", "ab", "w+", "w+b") for text in texts)
            if name in ("write_bytes", "FileHandler") or writes or (name == "write_text" and is_method):
                own = path.relative_to(root).as_posix()
                found[own] = found.get(own, 0) + 1
    assert all(number <= IN_NEW_FOLDERS.get(name, 0) for name, number in found.items()), found
