"""What there is: versions, devices, memory, cores, limits and the environment variables that matter. Nothing is timed.

>>> from pathlib import Path
>>> facts = gather_facts({"OMP_NUM_THREADS": "2", "HOME": "/root"}, Path("runs"))
>>> facts.environ
{'OMP_NUM_THREADS': '2'}
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.doctor.host import (
    Cpu,
    Disk,
    Memory,
    Network,
    open_files_limit,
    read_cpu,
    read_disk,
    read_memory,
    read_network,
)
from shardwise.launch.local import ALLOC_CONF_NAMES
from shardwise.memory import first_line
from shardwise.train.job import has_fast_bf16

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
# Bits of nvidia-smi's reasons for clocks below the highest that say that something is wrong; an idle GPU sets others.
_SLOWDOWNS: Mapping[int, str] = {0x08: "hardware", 0x20: "software thermal", 0x40: "thermal", 0x80: "power brake"}


@dataclass(frozen=True)
class Software:
    """Versions, and what torch.compile needs to build kernels; None for what is not there."""

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
class Gpu:
    """One GPU that torch sees; `slowdowns` are reasons for which it is throttled now, `error` why it cannot be used."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: str
    has_bf16: bool
    num_ecc_errors: int | None = None
    slowdowns: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Swap:
    """The disk of a folder for states on NVMe, and what the ranks of this machine need there, if that is known."""

    disk: Disk
    needed_bytes: int | None = None


@dataclass(frozen=True)
class Facts:
    """All that is known of this machine without measuring; `swap` where states are to rest on NVMe."""

    software: Software
    cpu: Cpu
    cpu_has_fast_bf16: bool
    memory: Memory
    gpus: tuple[Gpu, ...]
    gpus_reach_each_other: bool | None
    network: Network
    disk: Disk
    open_files_limit: int | None
    environ: Mapping[str, str]
    swap: Swap | None = None


def gather_facts(environ: Mapping[str, str], folder: Path, swap: Swap | None = None) -> Facts:
    """Look at this machine.

    Args:
        environ: of the process; only `ENVIRON_NAMES` are kept.
        folder: of the runs, there already or not.
        swap: what is known of the folder for states on NVMe.
    """
    gpus = _gpus()
    return Facts(
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
    """ECC errors and slowdowns by the GPU's uuid, from nvidia-smi's lines `uuid, errors, reasons`.

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


def _software(environ: Mapping[str, str]) -> Software:
    compilers = [environ["CXX"]] if environ.get("CXX") else ["g++", "clang++"]
    return Software(
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


def _gpus() -> tuple[Gpu, ...]:
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
            Gpu(
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
