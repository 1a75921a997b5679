"""Small checkpoints, each byte of which is known; messages; a forked process to be killed or refused in."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

from shardwise.checkpoint.commit import begin, candidates, commit, read_manifest, step_name
from shardwise.checkpoint.manifest import Manifest

FILES = ("rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors")


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
