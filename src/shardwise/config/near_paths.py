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
    there = next((each for each in wanted.parents if each.is_dir()), None)
    if there is None or os.path.lexists(wanted):
        return ""
    name, *inner = wanted.relative_to(there).parts
    stems: dict[str, list[str]] = {}  # an ending that many names have says nothing
    try:
        for each in sorted(os.listdir(there)):
            stems.setdefault(Path(each).stem.lower(), []).append(each)
    except OSError:
        return ""
    close = [
        each for stem in get_close_matches(Path(name).stem.lower(), stems, n=3, cutoff=0.7) for each in stems[stem]
    ]
    found = next((path for each in close if (path := there.joinpath(each, *inner)).exists()), None)
    return "" if found is None else f"; did you mean {found}?"
