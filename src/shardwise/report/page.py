"""Write a run, a plan, or several of them as one self-contained HTML page of at most 2 MB, without the network.

A source is what the page shows of one run or plan: a dict of sections, as `assets/report.js` reads them. A section that
has nothing to show says why.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from shardwise.config.resolve import Config
from shardwise.config.written_files import write_whole
from shardwise.report.packing import packed_timeline
from shardwise.report.panel import TerminalPanel

MAX_BYTES: Final = 2_000_000
"""The size of a page; what would be larger is aggregated."""
_ASSETS_BYTES: Final = 150_000
_STYLES: Final = ("uPlot.min.css", "report.css")
_SCRIPTS: Final = ("uPlot.iife.min.js", "decode.js", "curves.js", "timeline.js", "report.js")

Source = dict[str, Any]


def share_of(num_sources: int) -> int:
    """Return the bytes that each source of a page may take."""
    return (MAX_BYTES - _ASSETS_BYTES) // max(1, num_sources)


def draw(sources: Sequence[Source]) -> str:
    """Return the page."""
    assets = files("shardwise.report") / "assets"

    def read(names: Iterable[str]) -> str:
        return "\n".join((assets / name).read_text(encoding="utf-8") for name in names)

    written, own_version = time.strftime("%Y-%m-%d %H:%M:%S"), installed("shardwise") or ""
    values = {"written": written, "version": own_version, "sources": sources}
    # A script element ends at the first "</script", in a string too.
    text = json.dumps(values, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = read(["page.html"])
    for mark, content in (("/*STYLES*/", read(_STYLES)), ("/*SCRIPTS*/", read(_SCRIPTS)), ("/*DATA*/", text)):
        page = page.replace(mark, content, 1)
    return page


def write(path: Path, sources: Sequence[Source]) -> None:
    """Write the page into a run's folder, as `write_whole` does."""
    write_whole(path, draw(sources))


def installed(package: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def source(name: str, what: str, why: str) -> Source:
    """Return a source of which nothing is known yet.

    Args:
        why: as in `absent`, for each section.
    """
    sections = ("curves", "memory", "parts", "experts", "wire", "timelines", "config", "environment")
    return {"name": name, "what": what, "facts": [], **{section: absent(why) for section in sections}}


def absent(why: str) -> dict[str, Any]:
    """Return a section that has nothing to show: `why` says where it would come from; "" leaves the section out."""
    return {"absent": why}


def fact(label: str, value: str, note: str = "") -> dict[str, str]:
    """Return one figure of the page's head: its `label`, its `value`, and a `note` on it in small print."""
    return {"label": label, "value": value, "note": note}


def timelines(panels: Sequence[TerminalPanel], notes: Sequence[str] = (), max_bytes: int | None = None) -> Source:
    """Return the section of timelines, drawn under each other.

    Args:
        panels: the timelines; together they take at most `max_bytes`.
        notes: sentences about them, or about those that are missing.
        max_bytes: None takes the share of one source.
    """
    share = (max_bytes or share_of(1)) // max(1, len(panels))
    return {"panels": [packed_timeline(panel, share) for panel in panels], "notes": list(notes)}


def config_section(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of a config: its keys as text, and which of them are not the defaults."""
    defaults = flat(Config().model_dump(mode="json"))
    keys = flat(values)
    return {"keys": keys, "set": [key for key in keys if keys[key] != defaults.get(key)]}


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by dotted key."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def flat(values: Mapping[str, Any]) -> dict[str, str]:
    """Return nested values as text, by dotted key."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in leaves(values)}
