"""What a campaign of mutations needs: hostile values and files, and a watch over what it takes to read them."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PREFIX, _MIDDLE, _SUFFIX = '{"crc32":"', '","manifest":\n', "}\n"
_opened: list[list[str]] = []  # of those who watch now: an audit hook stays for ever


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a manifest says, and give it the checksum of that."""
    path = folder / "manifest.json"
    values = json.loads(path.read_text())["manifest"]
    change(values)
    body = json.dumps(values, separators=(",", ":"))
    path.write_text(f"{_PREFIX}{zlib.crc32(body.encode()):08x}{_MIDDLE}{body}{_SUFFIX}")


@contextmanager
def opened_paths() -> Iterator[list[str]]:
    """The paths of all that this process opens inside."""
    if not hasattr(sys, "_shardwise_watches_opens"):
        sys._shardwise_watches_opens = True  # type: ignore[attr-defined]
        sys.addaudithook(_note)
    paths: list[str] = []
    _opened.append(paths)
    try:
        yield paths
    finally:
        _opened.remove(paths)


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened and isinstance(arguments[0], str | bytes | Path):
        for paths in _opened:
            paths.append(str(arguments[0]))


HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 2**31, 2**63, 2**70, 10**30, 10**400, 1.5, -0.0, 1e308, float("nan"), float("inf"), "",
    "x", "1", "\x1b[31mred\n", "../../etc/passwd", "/etc/passwd", "[/bold]", "\u202e", "a" * 5000, "\ud800", [], [[]],
    {}, {"a": {"a": 1}}, [1, "a", None], [-1], [2**63], [10**9, 10**9], ["x"], "F64", "I8", "int", "auto",
)  # fmt: skip


def mutated(values: Any, draw: random.Random) -> Any:
    """The values of a JSON file with one of them, at any depth, replaced, left out or doubled."""
    copy = json.loads(json.dumps(values))
    holder, key = draw.choice(list(_places(copy)))
    action = draw.random()
    if action < 0.1:
        del holder[key]
    elif action < 0.2 and isinstance(holder, list):
        holder.append(holder[key])
    elif action < 0.3 and isinstance(holder, dict):
        holder[draw.choice(["x", "\x1b]0;a\x07", "", "a.b"])] = holder.pop(key)
    elif action < 0.4 and isinstance(holder[key], int):
        holder[key] += draw.choice([-1, 1, 8, 2**20])
    else:
        holder[key] = draw.choice(HOSTILE)
    return copy


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in list(items):
        yield values, key
        yield from _places(value)


def mutate_text(path: Path, draw: random.Random) -> None:
    """Cut, flip, double or stuff the bytes of a file."""
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data))
    stuff = [
        b"[" * 2000,
        b'"',
        b"\xff\xfe",
        b"\x00",
        b"9" * 5000,
        b"$A$A${A",
        b"\x1b[2J",
        b"{" * 70,
        b"=",
        b"a." * 5000,
        b"-",
    ]
    action = draw.randrange(4)
    if action == 0:
        del data[at:]
    elif action == 1:
        data[at] ^= 1 << draw.randrange(8)
    elif action == 2:
        data[at:at] = draw.choice(stuff)
    else:
        data[at:at] = data[at : at + 200] * 50
    path.write_bytes(bytes(data))


def replace_file(path: Path, draw: random.Random) -> None:
    """Put something else in the place of a file: nothing, a pipe, a folder, a link out of it, a part of it."""
    action = draw.randrange(6)
    size = path.stat().st_size
    if action == 0:
        os.truncate(path, draw.randrange(size))
        return
    path.unlink()
    if action == 1:
        os.mkfifo(path)
    elif action == 2:
        path.mkdir()
    elif action == 3:
        path.symlink_to("/etc/passwd")
    elif action == 4:
        path.symlink_to("/dev/zero")


def spared(folder: Path, read: Callable[[], object], errors: tuple[type[Exception], ...]) -> str:
    """Read what was mutated: what the library says against it in one line; empty if it is read.

    Raises:
        AssertionError: it takes long, or much memory, or opens a file elsewhere, or says more than a line.
        Exception: it is none of the library's own.
    """
    num_bytes = sum(path.lstat().st_size for path in folder.rglob("*"))
    start_s, said = time.process_time(), ""
    tracemalloc.start()
    try:
        with opened_paths() as opened:
            try:
                read()
            except errors as error:
                said = str(error)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not said or said.isprintable(), said
    assert len(said) < 3000
    assert time.process_time() - start_s < 5
    assert most < 3 * num_bytes + 32 * 2**20
    assert not {"/etc/passwd", "/dev/zero"} & set(opened)
    return said


def fresh(source: Path, place: Path) -> Path:
    """A copy of a folder at a place that is cleared for it."""
    if place.exists():
        shutil.rmtree(place)
    shutil.copytree(source, place)
    return place
