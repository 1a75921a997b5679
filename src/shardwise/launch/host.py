"""Find the cores and the memory that this process may use, and a rank's share of the cores. No torch.

>>> share_of_cores(range(8), num_local_ranks=3, local_rank=1)
(2, 3, 4)
>>> places = {core: CorePlace(node=0, physical=core % 4) for core in range(8)}     # 0 and 4 are one core's two threads
>>> share_of_cores(range(8), num_local_ranks=2, local_rank=0, places=places)
(0, 1, 4, 5)
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

import psutil

from shardwise.config.errors import ConfigError

ROOT: Final = Path("/")
# cgroup v1 writes "no limit" as a number near 2**63.
_NO_LIMIT_BYTES: Final = 1 << 60


class CorePlace(NamedTuple):
    """Says where a core is: its NUMA node, and the first of the hardware threads of its physical core."""

    node: int
    physical: int


_NO_PLACES: Final[Mapping[int, CorePlace]] = MappingProxyType({})


def usable_cores() -> tuple[int, ...]:
    """Return the cores this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def num_cores(root: Path = ROOT) -> int:
    """Count the cores' work this process may do at once: those it may run on, no more than its cgroup gives time for.

    Args:
        root: where proc and sys are found.
    """
    return max(1, int(min(len(usable_cores()), quota_cores(root) or float("inf"))))


def quota_cores(root: Path = ROOT) -> float | None:
    """Return how many cores' time this process's cgroup allows; None for no limit, or where there are no cgroups."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def cgroup_limit_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes that this process's cgroup may use; None for no limit, or where there are no cgroups."""
    names = ("memory.max", "memory.limit_in_bytes")
    texts = (_text(folder / name) for folder in _cgroup_folders(root, "memory") for name in names)
    limits = [int(text) for text in texts if text.isdigit()]
    return min((limit for limit in limits if limit < _NO_LIMIT_BYTES), default=None)


def usable_bytes(root: Path = ROOT) -> int:
    """Return the bytes of memory that the processes here may use together: the host's, or what the cgroup allows."""
    return min(psutil.virtual_memory().total, cgroup_limit_bytes(root) or _NO_LIMIT_BYTES)


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of all above it; a container may not show all of them."""
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mount / controllers if controllers else mount
        if controllers and not top.is_dir():
            top = mount / controller
        folder = top / path.lstrip("/")
        yield from (folder, *(parent for parent in folder.parents if parent.is_relative_to(top)))


def machine_name(root: Path = ROOT) -> str:
    """Return one name for all processes that run on the same cores, in any container: this boot of the kernel."""
    return _text(root / "proc/sys/kernel/random/boot_id") or socket.gethostname()


def read_places(cores: Iterable[int], root: Path = ROOT) -> dict[int, CorePlace]:
    """Read where each core is; one that the system does not place is a core of its own on node 0."""
    node_of: dict[int, int] = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        node_of |= dict.fromkeys(parse_list(_text(folder / "cpulist")), int(folder.name.removeprefix("node")))
    places = {}
    for core in cores:
        threads = parse_list(_text(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"))
        places[core] = CorePlace(node_of.get(core, 0), min(threads, default=core))
    return places


def share_of_cores(
    usable: Sequence[int], num_local_ranks: int, local_rank: int, places: Mapping[int, CorePlace] = _NO_PLACES
) -> tuple[int, ...]:
    """Return the cores that one of the ranks of a machine keeps to, in ascending order.

    Every core goes to one rank, and the ranks' numbers of cores differ by one at most. A node's cores follow each
    other, and so do the hardware threads of a core, so that few ranks are on two nodes or halve a core. Where there are
    fewer cores than ranks, each gets one, and ranks share.

    Args:
        usable: cores that all ranks of the machine may use.
        places: of cores; those without one are taken by number.
    """
    ordered = sorted(set(usable), key=lambda core: (places.get(core, CorePlace(0, core)), core))
    start = local_rank * len(ordered) // num_local_ranks
    stop = (local_rank + 1) * len(ordered) // num_local_ranks
    return tuple(sorted(ordered[start : max(stop, start + 1)]))


def check_cores(cores: Sequence[int], usable: Sequence[int]) -> None:
    """Refuse cores that this process may not use.

    Raises:
        ConfigError: it names them, and those that may be used.
    """
    missing = sorted(set(cores) - set(usable))
    if not cores or missing:
        which = f"{show_list(missing)} of them may not be used by this process" if missing else "names no core"
        raise ConfigError(
            "cores-not-usable",
            f"tiers.cores={list(cores)}: {which}; choose from {show_list(usable)}, or set tiers.bind_cores=true",
        )


def parse_list(text: str) -> tuple[int, ...]:
    """Parse a list of cores in the kernel's form.

    >>> parse_list("0-2,8")
    (0, 1, 2, 8)
    """
    runs = re.findall(r"(\d+)(?:-(\d+))?", text)
    return tuple(core for first, last in runs for core in range(int(first), int(last or first) + 1))


def show_list(cores: Sequence[int]) -> str:
    """Format a list of cores in the kernel's form.

    >>> show_list([8, 0, 1, 2])
    '0-2,8'
    """
    ordered = sorted(set(cores))
    breaks = [0, *(at for at, (left, right) in enumerate(pairwise(ordered), 1) if right != left + 1), len(ordered)]
    runs = [ordered[start:stop] for start, stop in pairwise(breaks)]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs if run)


def _text(path: Path) -> str:
    """Return a file's text; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
