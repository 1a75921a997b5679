"""Suggest an existing path for a missing one, for the errors of all who are given a path."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path


def near(path: str | Path) -> str:
    """Return a question after the existing path that a missing one is most like; empty where there is none.

    >>> near("/ect/hosts.txt")
    ''
    >>> near("/ur/bin")
    '; did you mean /usr/bin?'
    """
    wanted = Path(path).expanduser()
    parent = next((folder for folder in wanted.parents if folder.is_dir()), None)
    if parent is None or os.path.lexists(wanted):
        return ""
    name, *inner = wanted.relative_to(parent).parts
    stems: dict[str, list[str]] = {}  # an ending that many names have says nothing
    try:
        for entry in sorted(os.listdir(parent)):
            stems.setdefault(Path(entry).stem.lower(), []).append(entry)
    except OSError:
        return ""
    close = [
        entry for stem in get_close_matches(Path(name).stem.lower(), stems, n=3, cutoff=0.7) for entry in stems[stem]
    ]
    nearest = next((path for entry in close if (path := parent.joinpath(entry, *inner)).exists()), None)
    return "" if nearest is None else f"; did you mean {nearest}?"
