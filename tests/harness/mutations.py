"""What a campaign of mutations needs: forged manifests, and a watch over the files that are opened."""

from __future__ import annotations

import json
import sys
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
