"""This module reads how much of the host's memory this process may use. No torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from shardwise.launch.cpu_affinity import cgroup_folders

_ROOT: Final = Path("/")
# cgroup v1 writes "no limit" as a number near 2**63.
_NO_LIMIT_BYTES: Final = 1 << 60


def cgroup_limit_bytes(root: Path = _ROOT) -> int | None:
    """Return the bytes that this process's cgroup may use; None for no limit, or where there are no cgroups."""
    names = ("memory.max", "memory.limit_in_bytes")
    texts = (_text(folder / name) for folder in cgroup_folders(root, "memory") for name in names)
    limits = [int(text) for text in texts if text.isdigit()]
    return min((limit for limit in limits if limit < _NO_LIMIT_BYTES), default=None)


def usable_bytes(root: Path = _ROOT) -> int:
    """Return the bytes of memory that the processes here may use together: the host's, or what the cgroup allows."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit_bytes = cgroup_limit_bytes(root)
    return total_bytes if limit_bytes is None else min(total_bytes, limit_bytes)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
