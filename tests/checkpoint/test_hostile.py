"""Checkpoints that were made to hurt: pipes and links for files, names of files elsewhere, values of any type."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints import save, values_of
from harness.mutations import forge, opened_paths
from shardwise.checkpoint.comparing import compare
from shardwise.checkpoint.folder import read_manifest
from shardwise.checkpoint.manifest import MANIFEST_NAME, CheckpointError, DamagedError
from shardwise.checkpoint.offline import reshard, verify
from shardwise.cli import main

FILE = "rank-00000-of-00001.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "a", values_of({"a": (6,)}), num_ranks=1)


@pytest.mark.parametrize("name", [MANIFEST_NAME, FILE])
def test_a_pipe_or_a_link_in_the_place_of_a_file_is_refused_at_once(folder: Path, name: str, tmp_path: Path) -> None:
    other = save(tmp_path / "b", values_of({"a": (6,)}), num_ranks=1)
    for put in (os.mkfifo, lambda path: path.symlink_to(other / name)):
        (folder / name).unlink()
        put(folder / name)
        for read in (
            lambda: read_manifest(folder),
            lambda: compare(folder, other),
            lambda: reshard(folder, tmp_path / "c", 1),
        ):
            with pytest.raises(DamagedError, match=r"it is a (pipe|link)"):
                read()
        (damage,) = verify(folder).damages
        assert "cannot be read: it is a" in str(damage)
        for command in ("show", "verify"):
            assert main(["checkpoint", command, str(folder)]) == 1


def test_latest_may_be_a_pipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "latest").unlink()
    os.mkfifo(folder.parent / "latest")
    assert main(["checkpoint", "show", str(folder.parent)]) == 1
    assert "a pipe" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["/etc/passwd", "../../../../../../etc/passwd", ".."])
def test_no_file_out_of_the_folder_is_opened(folder: Path, file: str) -> None:
    def rename(values: dict[str, Any]) -> None:
        values["files"] = {file: os.stat("/etc/passwd").st_size}
        values["tensors"] = []

    forge(folder, rename)
    with opened_paths() as opened:
        (damage,) = verify(folder).damages
        assert main(["checkpoint", "verify", str(folder)]) == 1
    assert "is not the name of a file" in damage.what
    assert not [path for path in opened if path.endswith("passwd")]


def first(values: dict[str, Any]) -> dict[str, Any]:
    return values["tensors"][0]


def piece(values: dict[str, Any]) -> dict[str, Any]:
    return first(values)["states"]["param"]["pieces"][0]


FORGERIES: dict[str, Callable[[dict[str, Any], Any], object]] = {
    "offset": lambda values, value: piece(values).update(offset=value),
    "file": lambda values, value: piece(values).update(file=value),
    "start": lambda values, value: piece(values).update(start=value),
    "crc32": lambda values, value: piece(values).update(crc32=value),
    "files": lambda values, value: values.update(files=value),
    "step": lambda values, value: values.update(step=value),
    "tensors": lambda values, value: values.update(tensors=value),
    "shape": lambda values, value: first(values).update(shape=value),
    "states": lambda values, value: first(values).update(states=value),
    "dtype": lambda values, value: first(values)["states"]["param"].update(dtype=value),
    "number": lambda values, value: first(values)["states"]["step"].update(value=value),
    "layout": lambda values, value: values.update(layout={"mesh": value, "pipeline": value}),
    "trajectory": lambda values, value: values.update(trajectory={"optimizer": value, "scheduler": [value]}),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_values_of_other_types_are_refused(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (folder / MANIFEST_NAME).read_text()
    for value in ("x", "\x1b[31m", [0], [1.5], ["3"], [3, 3], -1, 2**70, 1.5, True, {"a": {}}, "int", 7):
        (folder / MANIFEST_NAME).write_text(text)
        forge(folder, lambda values, value=value: FORGERIES[name](values, value))
        if (name, value) in (
            ("step", 7),
            ("number", 1.5),
            ("number", -1),
            ("number", 7),
            ("number", True),
            ("offset", 7),
            ("start", [0]),
        ):
            continue  # may be
        with pytest.raises(CheckpointError) as caught:
            read_manifest(folder)
        assert str(caught.value).isprintable()
        for command in ("show", "verify"):
            assert main(["checkpoint", command, str(folder)]) == 1
        assert "\x1b" not in "".join(capsys.readouterr())
