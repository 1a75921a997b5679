"""What the operating system says of this machine: cores, memory, limits, network, disk. No torch, no measuring.

Where a system has no such file or call (macOS has no `/proc`), the value is None: not known, and not wrong.

>>> cpu = read_cpu()
>>> cpu.num_usable <= cpu.num_machine
True
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

from shardwise.launch.cores import cgroup_folders, quota_cores, usable_cores

RESOLVE_TIMEOUT_S = 2.0
_ROOT = Path("/")
# cgroup v1 writes "no limit" as a number near 2**63.
_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True)
class Cpu:
    """The cores there are, those this process may run on, and how many cores' time its cgroup allows.

    `load` is how many processes of the whole machine ran or wanted to, on average over the last minute.
    """

    name: str
    num_machine: int
    num_usable: int
    quota_cores: float | None
    load: float

    @property
    def num_at_once(self) -> int:
        """How many cores a process may keep busy all the time; what `shardwise train` goes by."""
        return self.num_usable if self.quota_cores is None else max(1, min(self.num_usable, int(self.quota_cores)))


@dataclass(frozen=True)
class Memory:
    """The host's memory in bytes; `limit_bytes` is the cgroup's, `shm_bytes` the size of /dev/shm."""

    total_bytes: int
    available_bytes: int | None
    limit_bytes: int | None
    swap_used_bytes: int | None
    shm_bytes: int | None
    shm_free_bytes: int | None


@dataclass(frozen=True)
class Network:
    """The host's name, the addresses it resolves to, and the interfaces; `error` says why it does not resolve."""

    hostname: str
    addresses: tuple[str, ...]
    error: str | None
    interfaces: tuple[str, ...]


@dataclass(frozen=True)
class Disk:
    """The disk of a folder; `path` is the folder, or the nearest one above it that is there."""

    path: str
    writable: bool
    free_bytes: int
    total_bytes: int
    filesystem: str | None


def read_cpu(root: Path = _ROOT) -> Cpu:
    """The cores; `root` is where proc and sys are found."""
    num_machine = os.cpu_count() or 1
    match = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo") or "", re.MULTILINE)
    name = match[1] if match else platform.processor() or platform.machine()
    return Cpu(name, num_machine, min(len(usable_cores()), num_machine), quota_cores(root), os.getloadavg()[0])


def read_memory(root: Path = _ROOT) -> Memory:
    """The memory; `root` is where proc, sys and dev are found."""
    kib = {name: int(value) for name, value in re.findall(r"(\w+):\s+(\d+) kB", _text(root / "proc/meminfo") or "")}
    total_bytes = kib["MemTotal"] * 1024 if "MemTotal" in kib else _sysconf_bytes()
    shm = _usage(root / "dev/shm")
    return Memory(
        total_bytes=total_bytes,
        available_bytes=kib["MemAvailable"] * 1024 if "MemAvailable" in kib else None,
        limit_bytes=_limit_bytes(root),
        swap_used_bytes=(kib["SwapTotal"] - kib["SwapFree"]) * 1024 if {"SwapTotal", "SwapFree"} <= set(kib) else None,
        shm_bytes=shm[0] if shm else None,
        shm_free_bytes=shm[1] if shm else None,
    )


def read_network(timeout_s: float = RESOLVE_TIMEOUT_S) -> Network:
    """The name and the interfaces; a name server that does not answer within `timeout_s` counts as an error."""
    hostname = socket.gethostname()
    found: list[str] = []
    failed: list[str] = []

    def resolve() -> None:
        try:
            found.extend(sorted({str(info[4][0]) for info in socket.getaddrinfo(hostname, None)}))
        except OSError as error:
            failed.append(error.strerror or str(error))

    # A look-up cannot be interrupted; a daemon thread keeps nobody waiting.
    thread = threading.Thread(target=resolve, name="resolve", daemon=True)
    thread.start()
    thread.join(timeout_s)
    error = failed[0] if failed else None if found else f"no answer within {timeout_s:g} s"
    return Network(hostname, tuple(found), error, tuple(name for _, name in socket.if_nameindex()))


def read_disk(folder: Path, root: Path = _ROOT) -> Disk:
    """The disk on which `folder` lies, or would lie."""
    path = folder.expanduser().absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    total_bytes, free_bytes = _usage(path) or (0, 0)
    return Disk(str(path), os.access(path, os.W_OK | os.X_OK), free_bytes, total_bytes, _filesystem(path, root))


def open_files_limit() -> int | None:
    """How many files and sockets a process may hold open; None for any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _limit_bytes(root: Path) -> int | None:
    names = ("memory.max", "memory.limit_in_bytes")
    texts = (_text(folder / name) or "" for folder in cgroup_folders(root, "memory") for name in names)
    limits = [int(text) for text in texts if text.isdigit()]
    return min((limit for limit in limits if limit < _NO_LIMIT_BYTES), default=None)


def _filesystem(path: Path, root: Path) -> str | None:
    """The type of the file system at the longest mount point above `path`."""
    mounts = [line.split() for line in (_text(root / "proc/self/mounts") or "").splitlines()]
    fitting = [(len(point), kind) for _, point, kind, *_ in mounts if path.is_relative_to(point)]
    return max(fitting)[1] if fitting else None


def _usage(path: Path) -> tuple[int, int] | None:
    """(total, free) bytes of a file system."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total, usage.free


def _sysconf_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
