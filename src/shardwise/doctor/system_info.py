"""Collects versions, devices, memory, cores, limits and the environment variables that matter. Nothing is timed.

>>> from pathlib import Path
>>> facts = gather_facts({"OMP_NUM_THREADS": "2", "HOME": "/root"}, Path("runs"))
>>> facts.environ
{'OMP_NUM_THREADS': '2'}
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sysconfig
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.launch.cpu_affinity import quota_cores, usable_cores
from shardwise.launch.host_memory import cgroup_limit_bytes
from shardwise.launch.local import ALLOC_CONF_NAMES
from shardwise.runtime.memory_tracker import first_line
from shardwise.train.setup import has_fast_bf16

RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The only variables that are looked at and shown: others may hold secrets.
ENVIRON_NAMES = (
    *RANK_NAMES,
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "OMP_NUM_THREADS",
    *ALLOC_CONF_NAMES,
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "TORCH_DISTRIBUTED_DEBUG",
)
_SMI_TIMEOUT_S = 5.0
# These bits of nvidia-smi's reasons for reduced clocks mean that something is wrong; an idle GPU sets other bits.
_SLOWDOWNS: Mapping[int, str] = {0x08: "hardware", 0x20: "software thermal", 0x40: "thermal", 0x80: "power brake"}


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
class SwapInfo:
    """Holds the disk of a folder for states on NVMe, and the bytes that the local ranks need there; None if unknown."""

    disk: DiskInfo
    needed_bytes: int | None = None


@dataclass(frozen=True)
class SystemInfo:
    """Holds facts about this machine that need no measurement; `swap` is None unless states are to be on NVMe."""

    software: SoftwareInfo
    cpu: CpuInfo
    cpu_has_fast_bf16: bool
    memory: MemoryInfo
    gpus: tuple[GpuInfo, ...]
    gpus_reach_each_other: bool | None
    network: NetworkInfo
    disk: DiskInfo
    open_files_limit: int | None
    environ: Mapping[str, str]
    swap: SwapInfo | None = None


def gather_facts(environ: Mapping[str, str], folder: Path, swap: SwapInfo | None = None) -> SystemInfo:
    """Look at this machine.

    Args:
        environ: the process's environment; only `ENVIRON_NAMES` are kept.
        folder: the folder of the runs, which need not exist yet.
        swap: what is known about the folder for states on NVMe; None without one.
    """
    gpus = _gpus()
    return SystemInfo(
        software=_software(environ),
        cpu=read_cpu(),
        cpu_has_fast_bf16=has_fast_bf16(),
        memory=read_memory(),
        gpus=gpus,
        gpus_reach_each_other=_reach_each_other(len(gpus)),
        network=read_network(),
        disk=read_disk(folder),
        open_files_limit=open_files_limit(),
        environ={name: environ[name] for name in ENVIRON_NAMES if name in environ},
        swap=swap,
    )


def parse_smi(text: str) -> dict[str, tuple[int | None, tuple[str, ...]]]:
    """Return ECC errors and slowdowns by the GPU's uuid, from nvidia-smi's lines `uuid, errors, reasons`.

    >>> parse_smi("GPU-5a, 0, 0x0000000000000041\\nGPU-5b, [N/A], 0x0000000000000000")
    {'5a': (0, ('thermal',)), '5b': (None, ())}
    """
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and re.fullmatch("0x[0-9a-fA-F]+", cells[2]):
            bits = int(cells[2], 16)
            num_errors = int(cells[1]) if cells[1].isdigit() else None
            found[cells[0].removeprefix("GPU-")] = (num_errors, tuple(_SLOWDOWNS[b] for b in _SLOWDOWNS if bits & b))
    return found


def _software(environ: Mapping[str, str]) -> SoftwareInfo:
    compilers = [environ["CXX"]] if environ.get("CXX") else ["g++", "clang++"]
    return SoftwareInfo(
        shardwise=version("shardwise"),
        python=platform.python_version(),
        platform=platform.platform(),
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        triton=_version_of("triton"),
        nvidia_driver=_nvidia_driver(),
        has_gloo=dist.is_available() and dist.is_gloo_available(),
        has_nccl=dist.is_available() and dist.is_nccl_available(),
        cxx_path=next((path for name in compilers if (path := shutil.which(name.split()[0]))), None),
        has_python_headers=Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
    )


def _version_of(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:  # under another name, such as pytorch-triton
        return "of unknown version"


def _nvidia_driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "of unknown version" if Path("/dev/nvidiactl").exists() else None
    match = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return match[0] if match else "of unknown version"


def _gpus() -> tuple[GpuInfo, ...]:
    if torch.version.cuda is None or not torch.cuda.is_available():
        return ()
    health = parse_smi(_ask_smi())
    gpus = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        error, free_bytes = None, 0
        try:
            free_bytes, _ = torch.cuda.mem_get_info(index)
        except RuntimeError as failure:  # in exclusive use by others, or broken
            error = first_line(failure)
        num_ecc_errors, slowdowns = health.get(str(getattr(device, "uuid", "")), (None, ()))
        gpus.append(
            GpuInfo(
                name=device.name,
                total_bytes=device.total_memory,
                free_bytes=free_bytes,
                capability=f"{device.major}.{device.minor}",
                has_bf16=device.major >= 8,
                num_ecc_errors=num_ecc_errors,
                slowdowns=slowdowns,
                error=error,
            )
        )
    return tuple(gpus)


def _ask_smi() -> str:
    smi = shutil.which("nvidia-smi")
    # The second is the name in newer drivers.
    for reasons in ("clocks_throttle_reasons.active", "clocks_event_reasons.active") if smi else ():
        query = f"--query-gpu=uuid,ecc.errors.uncorrected.volatile.total,{reasons}"
        try:
            done = subprocess.run(
                [str(smi), query, "--format=csv,noheader"], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        if done.returncode == 0:
            return done.stdout
    return ""


def _reach_each_other(num_gpus: int) -> bool | None:
    if num_gpus < 2:
        return None
    pairs = ((one, other) for one in range(num_gpus) for other in range(num_gpus) if one != other)
    return all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)


RESOLVE_TIMEOUT_S = 2.0
_ROOT = Path("/")


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

    @property
    def num_at_once(self) -> int:
        """Return how many cores a process may keep busy all the time; `shardwise train` uses this number."""
        return self.num_usable if self.quota_cores is None else max(1, min(self.num_usable, int(self.quota_cores)))


@dataclass(frozen=True)
class MemoryInfo:
    """Holds the host's memory in bytes; `limit_bytes` is the cgroup's, `shm_bytes` the size of /dev/shm."""

    total_bytes: int
    available_bytes: int | None
    limit_bytes: int | None
    swap_used_bytes: int | None
    shm_bytes: int | None
    shm_free_bytes: int | None


@dataclass(frozen=True)
class NetworkInfo:
    """Holds the host's name, its addresses, and the interfaces; `error` says why the name does not resolve."""

    hostname: str
    addresses: tuple[str, ...]
    error: str | None
    interfaces: tuple[str, ...]


@dataclass(frozen=True)
class DiskInfo:
    """Describes the disk of a folder; `path` is the folder, or its nearest parent that exists."""

    path: str
    writable: bool
    free_bytes: int
    total_bytes: int
    filesystem: str | None


def read_cpu(root: Path = _ROOT) -> CpuInfo:
    """Read the cores; `root` is the folder that holds proc and sys."""
    num_machine = os.cpu_count() or 1
    match = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo") or "", re.MULTILINE)
    name = match[1] if match else platform.processor() or platform.machine()
    return CpuInfo(name, num_machine, min(len(usable_cores()), num_machine), quota_cores(root), os.getloadavg()[0])


def read_memory(root: Path = _ROOT) -> MemoryInfo:
    """Read the memory; `root` is the folder that holds proc, sys and dev."""
    kib = {name: int(value) for name, value in re.findall(r"(\w+):\s+(\d+) kB", _text(root / "proc/meminfo") or "")}
    total_bytes = kib["MemTotal"] * 1024 if "MemTotal" in kib else _sysconf_bytes()
    shm = _usage(root / "dev/shm")
    return MemoryInfo(
        total_bytes=total_bytes,
        available_bytes=kib["MemAvailable"] * 1024 if "MemAvailable" in kib else None,
        limit_bytes=cgroup_limit_bytes(root),
        swap_used_bytes=(kib["SwapTotal"] - kib["SwapFree"]) * 1024 if {"SwapTotal", "SwapFree"} <= set(kib) else None,
        shm_bytes=shm[0] if shm else None,
        shm_free_bytes=shm[1] if shm else None,
    )


def read_network(timeout_s: float = RESOLVE_TIMEOUT_S) -> NetworkInfo:
    """Read the host's name and interfaces; a name server that does not answer within `timeout_s` counts as an error."""
    hostname = socket.gethostname()
    found: list[str] = []
    failed: list[str] = []

    def resolve() -> None:
        try:
            found.extend(sorted({str(info[4][0]) for info in socket.getaddrinfo(hostname, None)}))
        except OSError as error:
            failed.append(error.strerror or str(error))

    # A look-up cannot be interrupted; in a daemon thread it does not keep the process from ending.
    thread = threading.Thread(target=resolve, name="resolve", daemon=True)
    thread.start()
    thread.join(timeout_s)
    error = failed[0] if failed else None if found else f"no answer within {timeout_s:g} s"
    return NetworkInfo(hostname, tuple(found), error, tuple(name for _, name in socket.if_nameindex()))


def read_disk(folder: Path, root: Path = _ROOT) -> DiskInfo:
    """Read the disk that holds `folder`, or would hold it."""
    path = folder.expanduser().absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    total_bytes, free_bytes = _usage(path) or (0, 0)
    return DiskInfo(str(path), os.access(path, os.W_OK | os.X_OK), free_bytes, total_bytes, _filesystem(path, root))


def open_files_limit() -> int | None:
    """Return how many files and sockets a process may hold open; None for any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _filesystem(path: Path, root: Path) -> str | None:
    """Return the type of the file system at the longest mount point above `path`."""
    mounts = [line.split() for line in (_text(root / "proc/self/mounts") or "").splitlines()]
    fitting = [(len(point), kind) for _, point, kind, *_ in mounts if path.is_relative_to(point)]
    return max(fitting)[1] if fitting else None


def _usage(path: Path) -> tuple[int, int] | None:
    """Return (total, free) bytes of a file system; None where it cannot be read."""
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
