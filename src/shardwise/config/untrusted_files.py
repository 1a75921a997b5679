"""Read files that others made within bounds of kind, size and depth, or refuse them with a message of one line.

A checkpoint, a Hugging Face folder, a config or a trace may come from anywhere, and may be damaged or malicious.
Nothing in it is trusted before it is checked: only regular files are opened, so a pipe cannot block the process; size
and nesting are bounded before anything is parsed; and messages about it are one line that a terminal can show.

This module is below every other one, because configs, checkpoints, the planner and the commands all read such files.

>>> parse_json('{"a": [1, 2.5, null]}', "config.json", "fetch it again")
{'a': [1, 2.5, None]}
>>> parse_json("[" * 100_000, "config.json", "fetch it again")
Traceback (most recent call last):
    ...
shardwise.config.untrusted_files.UntrustedFileError: config.json is nested deeper than 64 levels; fetch it again
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardwise.config.errors import ConfigError, OneLineError
from shardwise.config.near_paths import near

if TYPE_CHECKING:
    from pydantic import ValidationError


MAX_DEPTH: Final = 64
# The limit for a config or a script. Callers that allow larger files pass their own.
MAX_BYTES: Final = 4 * 2**20
# The limit for a file of a tokenizer: those of vocabularies of a quarter of a million tokens have some 35 MB.
MAX_TOKENIZER_BYTES: Final = 256 * 2**20
_MAX_TOML_BYTES: Final = 2**16
# An empty list takes 3 bytes of text and 60 of memory: no tool writes files with many of them in little text.
_BYTES_A_LIST: Final = 12
_MANY_LISTS: Final = 100_000
_KINDS: Final = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))
_NO_BRACKETS: Final = re.compile(r'"(?:[^"\\]++|\\.)*+\\?"?|[^][{}"]++', re.DOTALL)
# A dotted key nests without brackets, and Python takes n cubed steps for n parts.
_DOTTED_KEY: Final = re.compile(rf"(?<![\w'\"-])(?:[\w'\"-]++[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}")


class UntrustedFileError(OneLineError):
    """A file cannot be used; the message names it and says what is wrong and what would help."""


@contextmanager
def as_config_error(code: str | None = None) -> Iterator[None]:
    """Raise a ConfigError in the place of an UntrustedFileError, of the same code where none is given."""
    try:
        yield
    except UntrustedFileError as error:
        raise ConfigError(code or error.code, str(error)) from None


def open_regular(path: str | Path, folder: str | Path | None = None) -> int:
    """Open a regular file for reading, without waiting for a writer, and return its descriptor.

    Args:
        folder: that it must be in, or in a folder of it: no link on the way may lead out of it. The cache of the
            Hugging Face hub may keep the files of its `snapshots` in its `blobs`. None for any place.

    Raises:
        OSError: it is no regular file, or is outside the folder, or the system refuses.
    """
    if folder is not None:
        real, home = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
        is_of_hub = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
        if not real.is_relative_to(home) and not is_of_hub:
            raise OSError(errno.EINVAL, f"it is a link to {real}, out of its folder", str(path))
        # The folder as it was given: another process's root, such as /proc/7/root, has no other name.
        path = Path(folder, real.relative_to(home)) if real.is_relative_to(home) else real
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if folder is None else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            file_kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
            raise OSError(errno.EINVAL, f"it is {file_kind}, not a regular file", str(path))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_bytes(path: str | Path, max_bytes: int = MAX_BYTES, folder: str | Path | None = None) -> bytes:
    """Read a regular file.

    Raises:
        OSError: as `open_regular`, or the file is larger.
    """
    with open(open_regular(path, folder), "rb") as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
        return file.read()


def read_text(path: str | Path, fix: str, *, max_bytes: int = MAX_BYTES, folder: str | Path | None = None) -> str:
    """Read a regular file of UTF-8 text.

    Raises:
        UntrustedFileError: it cannot be opened, is too large, or is not UTF-8 text.
    """
    try:
        return read_bytes(path, max_bytes, folder).decode()
    except OSError as error:
        what = near(path) or f"; {fix}"
        raise UntrustedFileError("file-unreadable", f"cannot read {path}: {error.strerror or error}{what}") from error
    except UnicodeDecodeError:
        raise UntrustedFileError("not-utf8", f"{path} is not UTF-8 text; {fix}") from None


def read_json(path: str | Path, fix: str, *, max_bytes: int = MAX_BYTES, folder: str | Path | None = None) -> Any:
    """Read and parse a JSON file: `path`, `max_bytes` and `folder` as in `read_text`, `fix` as in `parse_json`."""
    return parse_json(read_text(path, fix, max_bytes=max_bytes, folder=folder), str(path), fix)


def parse_json(text: str, where: str, fix: str) -> Any:
    """Parse JSON.

    Raises:
        UntrustedFileError: it is not JSON, is nested too deeply, names a key twice, or has integers of too many digits.
    """
    return _parsed(lambda: json.loads(text, object_pairs_hook=_table), "JSON", text, where, fix)


def read_toml(path: str | Path, fix: str) -> dict[str, Any]:
    """Read and parse a TOML file; see `read_text` and `parse_toml`."""
    return parse_toml(read_text(path, fix, max_bytes=_MAX_TOML_BYTES), str(path), fix)


def parse_toml(text: str, where: str, fix: str) -> dict[str, Any]:
    """Parse TOML; `text`, `where` and `fix` are as in `parse_json`.

    Raises:
        UntrustedFileError: as `parse_json`.
    """
    if _DOTTED_KEY.search(text):
        raise UntrustedFileError("nested-too-deep", f"{where} is nested deeper than {MAX_DEPTH} levels; {fix}")
    values: dict[str, Any] = _parsed(lambda: tomllib.loads(text), "TOML", text, where, fix)
    return values


def mismatch(error: ValidationError) -> str:
    """Return the first value that a schema refuses: its place, and the rule."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))[:200]}: {first['msg']}"


def check_nesting(text: str, where: str, fix: str) -> None:
    """Refuse text whose brackets are too deep, or too many, to be parsed in about as much memory as the text takes.

    Raises:
        UntrustedFileError: the brackets are too deep or too many.
    """
    num_opened = text.count("[") + text.count("{")
    if num_opened > _MANY_LISTS + len(text) // _BYTES_A_LIST:
        raise UntrustedFileError(
            "too-many-lists", f"{where} is made of {num_opened:,} lists and tables, with next to nothing in them; {fix}"
        )
    depth = 0
    for sign in _NO_BRACKETS.sub("", text) if num_opened > MAX_DEPTH else "":
        depth += 1 if sign in "[{" else -1 if sign in "]}" else 0
        if depth > MAX_DEPTH:
            raise UntrustedFileError("nested-too-deep", f"{where} is nested deeper than {MAX_DEPTH} levels; {fix}")


def _parsed(parse: Callable[[], Any], kind: str, text: str, where: str, fix: str) -> Any:
    check_nesting(text, where, fix)
    try:
        return parse()
    except RecursionError:
        raise UntrustedFileError("nested-too-deep", f"{where} is nested too deeply; {fix}") from None
    except ValueError as error:  # of its syntax, and of integers that are too long
        what = str(error).partition("; use sys.")[0]
        raise UntrustedFileError(
            "not-json" if kind == "JSON" else "not-toml", f"{where} is not valid {kind}: {what}; {fix}"
        ) from None


def _table(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} stands twice in one table")
    return values
