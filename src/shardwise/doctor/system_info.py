"""Collect versions, devices, memory, cores, limits and the environment variables that matter. Nothing is timed.

>>> gather_facts({"OMP_NUM_THREADS": "2", "HOME": "/root"}, Path("runs")).environ
{'OMP_NUM_THREADS': '2'}
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import permutations
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from shardwise.config.errors import ConfigError
from shardwise.launch.host import cgroup_limit_bytes, quota_cores, usable_cores
from shardwise.launch.local import ALLOC_CONF_NAMES
from shardwise.runtime.memory_tracker import first_line
from shardwise.train.setup import has_fast_bf16

RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Debugging switches that are often left on, and what each costs.
SLOW_SETTINGS: Mapping[str, tuple[str, str]] = {
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "every tensor is a call to the driver"),
    "NCCL_P2P_DISABLE": ("1", "GPUs talk through the host's memory"),
    "NCCL_SHM_DISABLE": ("1", "GPUs talk over the network stack"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked by another"),
}
# The only variables that are looked at and shown: others may hold secrets.
ENVIRON_NAMES = (
    *(*RANK_NAMES, "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "OMP_NUM_THREADS", *ALLOC_CONF_NAMES, *SLOW_SETTINGS),
    *("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
)
_SMI_TIMEOUT_S = 2.0
# These bits of nvidia-smi's reasons for reduced clocks mean that something is wrong; an idle GPU sets other bits.
_SLOWDOWNS: Mapping[int, str] = {0x08: "hardware", 0x20: "software thermal", 0x40: "thermal", 0x80: "power brake"}

Health = Mapping[str, tuple[int | None, tuple[str, ...]]]
"""Holds the number of uncorrected memory errors, and why the clocks are reduced, by the uuid of a GPU."""


@dataclass(frozen=True)
class SoftwareInfo:
    """Holds versions, and what torch.compile needs to build kernels; what is missing is None."""

    shardwise: str
    python: str
    platform: str
    torch: str
    torch_cuda: str | None
    triton: str | None
    nvidia_driver: str | None
    has_gloo: bool
    has_nccl: bool
    cxx_path: str | None
    has_python_headers: bool


@dataclass(frozen=True)
class GpuInfo:
    """Describes a GPU that torch sees; `slowdowns` says why it is throttled now, `error` why it cannot be used."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: str
    has_bf16: bool
    num_ecc_errors: int | None = None
    slowdowns: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class CpuInfo:
    """Counts the cores, those that this process may run on, and how many cores' time its cgroup allows.

    `load` is how many processes of the whole machine ran or wanted to, on average over the last minute.
    """

    name: str
    num_machine: int
    num_usable: int
    quota_cores: float | None
    load: float
    has_fast_bf16: bool

    @property
    def num_at_once(self) -> int:
        """Return how many cores a process may keep busy all the time; `shardwise train` uses this number."""
        return max(1, int(min(self.num_usable, self.quota_cores or float("inf"))))


@dataclass(frozen=True)
class MemoryInfo:
    """Holds the host's memory in bytes; `limit_bytes` is the cgroup's, `shm_bytes` the size of /dev/shm."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    swap_used_bytes: int
    shm_bytes: int | None


@dataclass(frozen=True)
class NetworkInfo:
    """Holds the host's name, its addresses, and the interfaces; `error` says why the name does not resolve."""

    hostname: str
    addresses: tuple[str, ...]
    error: str | None
    interfaces: tuple[str, ...]


@dataclass(frozen=True)
class DiskInfo:
    """Describes the disk of a folder; `path` is the folder, or its nearest parent that exists.

    `needed_bytes` is what the local ranks will store there; None if unknown.
    """

    path: str
    writable: bool
    free_bytes: int
    total_bytes: int
    filesystem: str | None
    needed_bytes: int | None = None


@dataclass(frozen=True)
class SystemInfo:
    """Holds facts about this machine that need no measurement; `swap` is None unless states are to be on NVMe."""

    software: SoftwareInfo
    cpu: CpuInfo
    memory: MemoryInfo
    gpus: tuple[GpuInfo, ...]
    gpus_reach_each_other: bool | None
    network: NetworkInfo
    disk: DiskInfo
    open_files_limit: int | None
    environ: Mapping[str, str]
    swap: DiskInfo | None = None

    @property
    def num_train_ranks(self) -> int:
        """Return how many ranks `shardwise train` starts here."""
        return len(self.gpus) or min(2, self.cpu.num_at_once)


def gather_facts(environ: Mapping[str, str], folder: Path, swap: DiskInfo | None = None) -> SystemInfo:
    """Look at this machine.

    Args:
        environ: the process's environment; only `ENVIRON_NAMES` are kept.
        folder: the folder of the runs, which need not exist yet.
        swap: what is known about the folder for states on NVMe; None without one.
    """
    driver, health = _ask_smi()
    gpus = _gpus(health)
    reach = [torch.cuda.can_device_access_peer(*pair) for pair in permutations(range(len(gpus)), 2)]
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return SystemInfo(
        software=_software(environ, driver),
        cpu=_cpu(),
        memory=_memory(),
        gpus=gpus,
        gpus_reach_each_other=all(reach) if reach else None,
        network=read_network(),
        disk=read_disk(folder),
        open_files_limit=None if open_files == resource.RLIM_INFINITY else open_files,
        environ={name: environ[name] for name in ENVIRON_NAMES if name in environ},
        swap=swap,
    )


def parse_smi(text: str) -> tuple[str | None, Health]:
    """Return the driver, and the health of each GPU.

    >>> parse_smi("GPU-5a, 580.1, 0, 0x0000000000000041\\nGPU-5b, 580.1, [N/A], 0x0000000000000000")
    ('580.1', {'5a': (0, ('thermal',)), '5b': (None, ())})

    Args:
        text: nvidia-smi's lines `uuid, driver, errors, reasons`.
    """
    rows = re.findall(r"^GPU-(.+), (.+), (.+), (0x[0-9a-fA-F]+)$", text, re.MULTILINE)
    health = {}
    for uuid, _, errors, reasons in rows:
        slowdowns = tuple(name for bit, name in _SLOWDOWNS.items() if bit & int(reasons, 16))
        health[uuid] = (int(errors) if errors.isdigit() else None, slowdowns)
    return (rows[0][1] if rows else None), health


def _ask_smi() -> tuple[str | None, Health]:
    # The second is the name in newer drivers.
    for reasons in ("clocks_throttle_reasons.active", "clocks_event_reasons.active"):
        query = f"--query-gpu=uuid,driver_version,ecc.errors.uncorrected.volatile.total,{reasons}"
        try:
            command = ["nvidia-smi", query, "--format=csv,noheader"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            break
        if done.returncode == 0:
            return parse_smi(done.stdout)
    return ("of unknown version" if Path("/dev/nvidiactl").exists() else None), {}


def _software(environ: Mapping[str, str], driver: str | None) -> SoftwareInfo:
    compilers = [environ["CXX"].split()[0]] if environ.get("CXX") else ["g++", "clang++"]
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return SoftwareInfo(
        shardwise=version("shardwise"),
        python=platform.python_version(),
        platform=platform.platform(),
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        triton=triton,
        nvidia_driver=driver,
        has_gloo=dist.is_available() and dist.is_gloo_available(),
        has_nccl=dist.is_available() and dist.is_nccl_available(),
        cxx_path=next((path for name in compilers if (path := shutil.which(name))), None),
        has_python_headers=Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
    )


def _gpus(health: Health) -> tuple[GpuInfo, ...]:
    gpus = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        error, free_bytes = None, 0
        try:
            free_bytes, _ = torch.cuda.mem_get_info(index)
        except RuntimeError as failure:  # in exclusive use by others, or broken
            error = first_line(failure)
        state = health.get(str(getattr(device, "uuid", "")), (None, ()))
        capability = f"{device.major}.{device.minor}"
        gpus.append(
            GpuInfo(device.name, device.total_memory, free_bytes, capability, device.major >= 8, *state, error=error)
        )
    return tuple(gpus)


def _cpu() -> CpuInfo:
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    name = match[1] if match else platform.processor() or platform.machine()
    num_machine = psutil.cpu_count() or 1
    num_usable = min(len(usable_cores()), num_machine)
    return CpuInfo(name, num_machine, num_usable, quota_cores(), psutil.getloadavg()[0], has_fast_bf16())


def _memory() -> MemoryInfo:
    memory, shm = psutil.virtual_memory(), Path("/dev/shm")
    return MemoryInfo(
        total_bytes=memory.total,
        available_bytes=memory.available,
        limit_bytes=cgroup_limit_bytes(),
        swap_used_bytes=psutil.swap_memory().used,
        shm_bytes=psutil.disk_usage(str(shm)).total if shm.exists() else None,
    )


def read_network() -> NetworkInfo:
    """Read the host's name, what it resolves to, and the interfaces."""
    hostname, addresses, problem = socket.gethostname(), set(), None
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(hostname, None)}
    except OSError as error:
        problem = error.strerror or str(error)
    return NetworkInfo(hostname, tuple(sorted(addresses)), problem, tuple(psutil.net_if_addrs()))


def read_disk(folder: Path) -> DiskInfo:
    """Read the disk that holds `folder`, or would hold it.

    Raises:
        ConfigError: there is something else than a folder.
    """
    path = folder.expanduser().absolute()
    while not path.is_dir() and path != path.parent:
        if os.path.lexists(path):
            raise ConfigError("not-a-folder", f"{path} is no folder; give one on the disk that is meant")
        path = path.parent
    # The longest mount point above the folder is its own.
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    filesystem = max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else None
    usage = psutil.disk_usage(str(path))
    return DiskInfo(str(path), os.access(path, os.W_OK | os.X_OK), usage.free, usage.total, filesystem)
