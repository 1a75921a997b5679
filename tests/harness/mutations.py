"""What a campaign of mutations needs: hostile values and files, and a watch over what it takes to read them."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PREFIX, _MIDDLE, _SUFFIX = '{"crc32":"', '","manifest":\n', "}\n"
# Of the processor; the wall's clock also counts a wait for what never comes, and for other processes.
_CPU_S, _WALL_S = 5.0, 60.0
# Beside three times the files: buffers of a few blocks, and what the system's allocator and new threads keep.
_PYTHON_BYTES, _RESIDENT_BYTES = 4 * 2**20, 32 * 2**20
_opened: list[list[str]] = []  # of those who watch now: an audit hook stays for ever


class LimitError(AssertionError):
    """What was read took longer, or more memory, than it may."""


@dataclass(frozen=True)
class Measured:
    """What one call of `spared` has measured: seconds, the most bytes, and what was said."""

    wall_s: float
    cpu_s: float
    num_bytes: int
    said: str


measured: list[Measured] = []
"""Of the calls of `spared`; who wants figures clears it first."""


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
        path, flags = os.fsdecode(arguments[0]), arguments[2]
        follows = not (isinstance(flags, int) and flags & os.O_NOFOLLOW)
        for paths in _opened:
            paths.append(os.path.realpath(path) if follows else path)


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
        holder[draw.choice(["x", "\x1b]0;a\x07", "", "a.b", "a\nb"])] = holder.pop(key)
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


def mutate_header(path: Path, draw: random.Random) -> None:
    """Change what a safetensors file says of itself, with its length."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    text = json.dumps(mutated(json.loads(data[8:start]), draw), separators=(",", ":"))
    header = text.encode().ljust(start - 8)  # what is shorter leaves the tensors where they are
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[start:])


def mutate_pickle(path: Path, draw: random.Random) -> None:
    """Change the pickle in a file of `torch.save`: a byte, a part of it, or a value; the archive stays right."""
    records = records_of(path)
    name = next(name for name in records if name.endswith("data.pkl"))
    data = bytearray(records[name])
    at, action = draw.randrange(2, len(data)), draw.randrange(6)
    if action == 0:
        data[at] ^= 1 << draw.randrange(8)
    elif action == 1:
        del data[at : at + draw.randrange(1, 9)]
    elif action == 2:
        data[at:at] = data[at : at + 40] * draw.choice([1, 50])
    elif action == 3:
        data[at:at] = draw.choice([b"]" * 3000, b"]q\x00h\x00a", b"(" * 300, b"0", b"N", b"K\x07", b"}", b")\x85\x85"])
    elif action == 4:  # another number
        places = [place for place in range(len(data) - 3) if data[place] in b"KMJ"]
        place = draw.choice(places)
        data[place + 1] = draw.choice([0, 1, 7, 255])
    else:  # another word of the same length
        places = [found.start() for found in re.finditer(rb"X.\0\0\0", bytes(data), re.DOTALL)]
        place = draw.choice(places)
        data[place + 5 : place + 5 + data[place + 1]] = b"x" * data[place + 1]
    records[name] = bytes(data)
    with zipfile.ZipFile(path, "w") as file:
        for each, content in records.items():
            file.writestr(each, content)


def records_of(path: Path) -> dict[str, bytes]:
    """The records of a file of `torch.save`, as far as they can be read; without a look at their checksums."""
    try:
        with zipfile.ZipFile(path) as file:
            data = path.read_bytes()
            return {
                each.filename: data[start : start + each.file_size]
                for each in file.infolist()
                for head in [each.header_offset + 26]
                for start in [head + 4 + sum(int.from_bytes(data[at : at + 2], "little") for at in (head, head + 2))]
            }
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return {}


def tensors_of(path: Path) -> tuple[object, bytes]:
    """What a safetensors file says of its tensors, and their bytes; not its metadata, which is not read."""
    if path.is_symlink() or not path.is_file():
        return None, b""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8:start])
    except ValueError:
        return None, data
    return {key: each for key, each in header.items() if key != "__metadata__"}, data[start:]


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


class _TooLateError(BaseException):
    """No code that catches what the library raises catches it."""


@contextmanager
def ended_after(limit_s: float) -> Iterator[None]:
    """Interrupt what runs inside, be it blocked in an `open`, and let an alarm that was set before go on after it."""

    def ring(number: int, frame: object) -> None:
        raise _TooLateError

    start_s = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    except _TooLateError:
        raise LimitError(f"it is not done after {limit_s:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left_s - (time.monotonic() - start_s)))


def _resident_bytes(name: str) -> int:
    """What the system says of this process: VmRSS, its memory now, or VmHWM, the most since that was reset."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


@contextmanager
def taken_bytes() -> Iterator[list[int]]:
    """The most memory that what runs inside takes: as Python allocates it, and, on Linux, as the system gives it."""
    most: list[int] = []
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")
    before = _resident_bytes("VmRSS") if reset.exists() else 0
    tracemalloc.start()
    try:
        yield most
        most.append(tracemalloc.get_traced_memory()[1])
        most.append(_resident_bytes("VmHWM") - before if reset.exists() else 0)
    finally:
        tracemalloc.stop()


def spared(
    folder: Path,
    read: Callable[[], object],
    errors: tuple[type[Exception], ...],
    *,
    cpu_s: float = _CPU_S,
    more_bytes: int = 0,
) -> str:
    """Read what was mutated: what the library says against it in one line; empty if it is read.

    Args:
        folder: of the files.
        read: reads them.
        errors: that the library may raise.
        cpu_s: seconds of the processor that it may take.
        more_bytes: of memory that it may take, beside some for the files.

    Raises:
        AssertionError: it takes long, or much memory, or opens a file elsewhere, or says more than a line.
        Exception: it is none of the library's own.
    """
    num_bytes = sum(path.lstat().st_size for path in folder.rglob("*"))
    start_s, start_cpu_s, said = time.monotonic(), time.process_time(), ""
    with opened_paths() as opened, taken_bytes() as taken, ended_after(_WALL_S):
        try:
            read()
        except errors as error:
            said = str(error)
    by_python, of_system = taken
    took_s = time.process_time() - start_cpu_s
    measured.append(Measured(time.monotonic() - start_s, took_s, max(taken), said))
    assert not said or said.isprintable(), said
    assert len(said) < 3000
    if took_s >= cpu_s:
        raise LimitError(f"it took {took_s:.1f} s of the processor")
    for found, most, of_whom in ((by_python, _PYTHON_BYTES, "Python's"), (of_system, _RESIDENT_BYTES, "the system's")):
        if found >= 3 * num_bytes + most + more_bytes:
            raise LimitError(f"{found} bytes of {of_whom} for files of {num_bytes}")
    outside = {"/etc/passwd", "/dev/zero"} & set(opened)
    assert not outside, f"{outside} is opened"
    return said


def printed(show: Callable[[], object]) -> list[str]:
    """The lines that a command prints, none of which steers a terminal."""
    with redirect_stdout(io.StringIO()) as text:
        show()
    lines = text.getvalue().splitlines()
    assert all(line.isprintable() for line in lines), lines
    return lines


def fresh(source: Path, place: Path) -> Path:
    """A copy of a folder at a place that is cleared for it."""
    if place.exists():
        shutil.rmtree(place)
    shutil.copytree(source, place)
    return place
