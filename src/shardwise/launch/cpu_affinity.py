"""This module finds the cores that this process may use, their NUMA nodes, and this rank's share of them. No torch.

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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from shardwise.config.resolve import ConfigError

_ROOT = Path("/")
_NO_PLACES: Mapping[int, CorePlace] = MappingProxyType({})


@dataclass(frozen=True, order=True)
class CorePlace:
    """Says where a core is: its NUMA node, and the first of the hardware threads of its physical core."""

    node: int
    physical: int


def usable_cores() -> tuple[int, ...]:
    """Return the cores this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def num_cores(root: Path = _ROOT) -> int:
    """Count the cores' work this process may do at once: those it may run on, no more than its cgroup gives time for.

    Args:
        root: where proc and sys are found.
    """
    quota = quota_cores(root)
    num_usable = len(usable_cores())
    return num_usable if quota is None else max(1, min(num_usable, int(quota)))


def quota_cores(root: Path = _ROOT) -> float | None:
    """Return how many cores' time this process's cgroup allows; None for no limit, or where there are no cgroups."""
    quotas = []
    for folder in cgroup_folders(root, "cpu"):
        quota, _, period = (_text(folder / "cpu.max") or "").partition(" ")
        if not quota:
            quota, period = _text(folder / "cpu.cfs_quota_us") or "", _text(folder / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.strip().isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of all above it; those that a container does not show are left
    out.
    """
    mount = root / "sys/fs/cgroup"
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mount / controllers if controllers else mount
        if controllers and not top.is_dir():
            top = mount / controller
        folder = top / path.lstrip("/")
        while folder != top:
            yield folder
            folder = folder.parent
        yield top


def machine_name(root: Path = _ROOT) -> str:
    """Return one name for all processes that run on the same cores, in any container: this boot of the kernel."""
    return _text(root / "proc/sys/kernel/random/boot_id") or socket.gethostname()


def read_places(cores: Iterable[int], root: Path = _ROOT) -> dict[int, CorePlace]:
    """Read where each core is; one that the system does not place is a core of its own on node 0."""
    node_of: dict[int, int] = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        node_of |= dict.fromkeys(parse_list(_text(folder / "cpulist") or ""), int(folder.name.removeprefix("node")))
    topology = root / "sys/devices/system/cpu"
    places = {}
    for core in cores:
        threads = parse_list(_text(topology / f"cpu{core}/topology/thread_siblings_list") or "")
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
        num_local_ranks: ranks on this machine.
        local_rank: of this rank, from 0.
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
    cores: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cores += range(int(first), int(last or first) + 1)
    return tuple(cores)


def show_list(cores: Sequence[int]) -> str:
    """Format a list of cores in the kernel's form.

    >>> show_list([8, 0, 1, 2])
    '0-2,8'
    """
    ordered = sorted(set(cores))
    breaks = [0, *(at for at, (left, right) in enumerate(pairwise(ordered), 1) if right != left + 1), len(ordered)]
    runs = [ordered[start:stop] for start, stop in pairwise(breaks)]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs if run)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
