"""Finds what is wrong with a machine, from its facts and measurements, with pure functions that yield findings.

>>> for finding in list_findings(facts, measurements):          # doctest: +SKIP
...     print(finding)
warning: /dev/shm has 0.06 GiB and NCCL and data loaders want 1 GiB; start the container with --shm-size=8g
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.config.resolve import ConfigError
from shardwise.doctor.measure import MatmulSpeed, Measurements
from shardwise.doctor.system_info import RANK_NAMES, GpuInfo, SwapInfo, SystemInfo
from shardwise.launch.environment import detect
from shardwise.launch.local import ALLOC_CONF_NAMES, EXPANDABLE_SEGMENTS
from shardwise.offload.disk_bench import USEFUL_BYTES_PER_S, SwapSpeed
from shardwise.runtime.format import format_bytes

Level = Literal["error", "warning", "note"]

MIN_TORCH = (2, 11)
_LEVELS: tuple[Level, ...] = ("error", "warning", "note")
_MIN_FREE_BYTES, _LOW_FREE_BYTES = 2**30, 10 * 2**30
_MIN_SHM_BYTES = 2**30
_SWAPPED_BYTES = 256 * 2**20
# A rank opens a connection to each other rank, its data and its logs.
_MIN_OPEN_FILES, _MIN_OPEN_FILES_WITH_GPUS = 1024, 4096
_BUSY_SHARE = 0.1
# CUDA takes so much for this process itself.
_CONTEXT_BYTES = 2**30
_BUSY_LOAD = 0.5
_MIN_SHARE_OF_PEAK = 0.5
_MIN_PINNED_BYTES_PER_S = 6e9
_MIN_DISK_BYTES_PER_S = 100e6
_MAX_SYNC_S = 0.05
_MAX_SMALL_CALL_S = 2e-3
_NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "lustre", "beegfs", "ceph", "gpfs"}
)
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs"})
# Debugging switches that are often left on, and what each costs.
_SLOW_SETTINGS: Mapping[str, tuple[str, str]] = {
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "every tensor is a call to the driver"),
    "NCCL_P2P_DISABLE": ("1", "GPUs talk through the host's memory"),
    "NCCL_SHM_DISABLE": ("1", "GPUs talk over the network stack"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked by another"),
}


@dataclass(frozen=True)
class Finding:
    """Names a problem: `what` gives the value and the rule it breaks, `fix` what helps. `name` never changes."""

    level: Level
    name: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.level}: {self.what}; {self.fix}"


def list_findings(facts: SystemInfo, measured: Measurements | None) -> list[Finding]:
    """List all findings, the worst first.

    Args:
        facts: this machine's facts.
        measured: its measurements; None where nothing was measured.
    """
    findings = [*_on_software(facts), *_on_gpus(facts), *_on_environ(facts), *_on_host(facts), *_on_network(facts)]
    findings += _on_swap(facts.swap) if facts.swap is not None else []
    if measured is not None:
        findings += [*_on_failures(measured), *_on_speed(facts, measured)]
    return sorted(findings, key=lambda finding: _LEVELS.index(finding.level))


def num_train_ranks(facts: SystemInfo) -> int:
    """Return how many ranks `shardwise train` starts here."""
    return len(facts.gpus) or min(2, facts.cpu.num_at_once)


def _on_software(facts: SystemInfo) -> Iterator[Finding]:
    software = facts.software
    oldest = ".".join(map(str, MIN_TORCH))
    release = tuple(int(number) for number in re.findall(r"\d+", software.torch)[:2])
    if release < MIN_TORCH:
        what = f"torch {software.torch} is older than {oldest}"
        yield Finding("error", "torch-too-old", what, f"pip install 'torch>={oldest}'")
    if not software.has_gloo:
        what = "this build of torch has no gloo, over which ranks meet"
        yield Finding("error", "gloo-missing", what, "install a build of torch from pytorch.org")
    if facts.gpus and not software.has_nccl:
        what = "this build of torch has no NCCL, which carries collectives between GPUs"
        yield Finding("error", "nccl-missing", what, "install a CUDA build of torch from pytorch.org")
    if facts.gpus and software.triton is None:
        what = "triton is missing; torch.compile needs it on GPUs"
        yield Finding("warning", "triton-missing", what, "pip install triton")
    if software.cxx_path is None:
        what = "no C++ compiler is on the PATH (g++, clang++, or CXX); torch.compile builds kernels with one"
        yield Finding("warning", "compiler-missing", what, "install g++ (Debian: apt install g++)")
    elif not software.has_python_headers:
        what = "Python.h is missing; torch.compile and triton build against it"
        yield Finding("warning", "python-headers-missing", what, "install python3-dev, or a Python with its headers")


def _on_gpus(facts: SystemInfo) -> Iterator[Finding]:
    software, hidden = facts.software, facts.environ.get("CUDA_VISIBLE_DEVICES")
    if software.nvidia_driver is not None and not facts.gpus:
        what = f"the NVIDIA driver is here ({software.nvidia_driver}), but torch"
        if software.torch_cuda is None:
            what += f" {software.torch} is a build for the CPU only"
            yield Finding("error", "torch-without-cuda", what, "install a CUDA build of torch from pytorch.org")
        elif hidden is not None:
            what = f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU from torch"
            yield Finding("warning", "gpus-hidden", what, "unset it to train on GPUs")
        else:
            what += f" for CUDA {software.torch_cuda} sees no GPU"
            fix = "update the driver to one for that CUDA, and see what nvidia-smi says"
            yield Finding("error", "gpus-not-seen", what, fix)
    for index, gpu in enumerate(facts.gpus):
        yield from _on_gpu(index, gpu)
    if facts.gpus_reach_each_other is False:
        what = "some GPUs cannot reach each other's memory, so NCCL goes through the host's"
        yield Finding(
            "warning", "no-peer-access", what, "turn off ACS and the IOMMU in the firmware, if NVLink is not there"
        )


def _on_gpu(index: int, gpu: GpuInfo) -> Iterator[Finding]:
    if gpu.error is not None:
        what = f"GPU {index} cannot be used: {gpu.error}"
        yield Finding("error", "gpu-fails", what, "see what nvidia-smi says, or choose others by CUDA_VISIBLE_DEVICES")
    used_bytes = gpu.total_bytes - gpu.free_bytes
    if gpu.error is None and used_bytes > max(_CONTEXT_BYTES, _BUSY_SHARE * gpu.total_bytes):
        what = f"{format_bytes(used_bytes)} of GPU {index}'s {format_bytes(gpu.total_bytes)} are in use by others"
        yield Finding(
            "warning", "gpu-in-use", what, "end what nvidia-smi lists, or choose others by CUDA_VISIBLE_DEVICES"
        )
    if gpu.slowdowns:
        what = f"GPU {index} is throttled ({', '.join(gpu.slowdowns)}), and the slowest rank sets the pace"
        yield Finding("warning", "gpu-throttled", what, "check cooling and power: nvidia-smi -q -d PERFORMANCE")
    if gpu.num_ecc_errors:
        what = f"GPU {index} counts {gpu.num_ecc_errors} uncorrected memory errors since its last reset; any corrupts"
        yield Finding("error", "gpu-memory-errors", what, "reset it (nvidia-smi -r) and replace it if they come back")
    if "MIG" in gpu.name:
        what = f"GPU {index} is a slice ({gpu.name}); NCCL does not connect slices"
        yield Finding("warning", "gpu-is-slice", what, "train with one rank, or turn MIG off (nvidia-smi -mig 0)")
    if not gpu.has_bf16:
        what = f"GPU {index} ({gpu.name}, {gpu.capability}) has no bf16 in hardware, which starts with 8.0"
        yield Finding("note", "gpu-without-bf16", what, "use precision.param=fp16")


def _on_environ(facts: SystemInfo) -> Iterator[Finding]:
    environ, num_ranks, num_cores = facts.environ, num_train_ranks(facts), facts.cpu.num_at_once
    yield from _on_rank_environ(environ)
    share = max(1, num_cores // num_ranks)
    num_threads = environ.get("OMP_NUM_THREADS")
    if num_threads is None:
        if not facts.gpus and share > 1:
            what = f"OMP_NUM_THREADS is not set: `shardwise train` gives each rank {share}, but torchrun 1"
            yield Finding("note", "threads-not-set", what, f"set OMP_NUM_THREADS={share} where you start with torchrun")
    elif num_threads.isdigit() and int(num_threads) > share:
        what = f"OMP_NUM_THREADS={num_threads} times {num_ranks} ranks is more than {num_cores} cores"
        yield Finding("warning", "threads-oversubscribed", what, f"unset it, or set it to {share}")
    elif num_threads.isdigit() and int(num_threads) * 2 <= share and not facts.gpus:
        what = f"OMP_NUM_THREADS={num_threads} times {num_ranks} ranks leaves most of {num_cores} cores idle"
        yield Finding("warning", "threads-too-few", what, f"unset it, or set it to {share}")
    if facts.gpus:
        yield from _on_alloc_conf(environ)
    for name, (slow, cost) in _SLOW_SETTINGS.items():
        if environ.get(name, "").upper() == slow:
            yield Finding("warning", "slow-setting", f"{name}={environ[name]} is set: {cost}", f"unset {name}")


def _on_rank_environ(environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        env = detect(environ)
    except ConfigError as error:
        what, _, fix = str(error).partition("; ")
        yield Finding("error", "rank-environment", what, fix)
        return
    left = [name for name in RANK_NAMES if name in environ]
    if env is not None and env.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in environ:
        what = f"RANK={env.rank} and the like are set, so `shardwise train` waits for {env.world_size} ranks to meet"
        yield Finding("warning", "rank-environment-left", what, f"unset {' '.join(left)} unless a launcher set them")
    elif env is None and left:
        what = f"{' and '.join(left)} are left set without RANK; ranks that srun starts would meet there"
        yield Finding("warning", "rank-environment-left", what, f"unset {' '.join(left)}")


def _on_alloc_conf(environ: Mapping[str, str]) -> Iterator[Finding]:
    given = next((name for name in ALLOC_CONF_NAMES if name in environ), None)
    setting = f"{ALLOC_CONF_NAMES[0]}={EXPANDABLE_SEGMENTS}"
    if given is None:
        what = (
            f"{ALLOC_CONF_NAMES[0]} is not set: `shardwise train` sets expandable segments for its ranks, torchrun not"
        )
        yield Finding("note", "alloc-conf-not-set", what, f"export {setting} where you start with torchrun")
    elif EXPANDABLE_SEGMENTS.lower() not in environ[given].lower().replace(" ", ""):
        what = f"{given}={environ[given]} is without {EXPANDABLE_SEGMENTS}, so memory is lost to fragments"
        yield Finding("warning", "alloc-conf-fragments", what, f"add {EXPANDABLE_SEGMENTS} to it, or unset it")


def _on_host(facts: SystemInfo) -> Iterator[Finding]:
    yield from _on_cores(facts)
    memory, disk = facts.memory, facts.disk
    if memory.limit_bytes is not None and memory.limit_bytes < memory.total_bytes:
        limit, total = format_bytes(memory.limit_bytes), format_bytes(memory.total_bytes)
        what = f"this cgroup may use {limit} of the machine's {total}; the kernel kills what uses more"
        yield Finding("warning", "memory-limited", what, "start the container or job with a higher memory limit")
    if (memory.swap_used_bytes or 0) > _SWAPPED_BYTES:
        what = f"{format_bytes(memory.swap_used_bytes or 0)} of swap are in use; a swapped state slows every step"
        yield Finding("warning", "swap-in-use", what, "free memory, then swapoff -a && swapon -a")
    if memory.shm_bytes is not None and memory.shm_bytes < _MIN_SHM_BYTES:
        what = (
            f"/dev/shm has {format_bytes(memory.shm_bytes)}; NCCL and data loaders want {format_bytes(_MIN_SHM_BYTES)}"
        )
        yield Finding("warning", "shm-small", what, "start the container with --shm-size=8g or --ipc=host")
    needed = _MIN_OPEN_FILES_WITH_GPUS if facts.gpus else _MIN_OPEN_FILES
    if facts.open_files_limit is not None and facts.open_files_limit < needed:
        what = f"a process may open {facts.open_files_limit} files and sockets; ranks want {needed}"
        yield Finding("warning", "open-files-low", what, f"ulimit -n {needed}")
    if not disk.writable:
        what = f"{disk.path} cannot be written to, and runs are kept there"
        yield Finding("error", "disk-not-writable", what, "set run.dir, or give --dir, to a folder you may write to")
    elif disk.free_bytes < _LOW_FREE_BYTES:
        level: Level = "error" if disk.free_bytes < _MIN_FREE_BYTES else "warning"
        what = f"{disk.path} has {format_bytes(disk.free_bytes)} free; runs want {format_bytes(_LOW_FREE_BYTES)}"
        yield Finding(level, "disk-full", what, "free some, or set run.dir to another disk")
    if disk.filesystem in _NETWORK_FILESYSTEMS:
        what = f"{disk.path} is on a network file system ({disk.filesystem}), which all ranks share"
        yield Finding("note", "disk-on-network", what, "keep data.cache_dir on a local disk")


def _on_swap(swap: SwapInfo) -> Iterator[Finding]:
    disk = swap.disk
    elsewhere = "set tiers.nvme_path, or give --nvme-path, to a folder"
    if not disk.writable:
        what = f"{disk.path} cannot be written to, and states on NVMe are stored there"
        yield Finding("error", "swap-not-writable", what, f"{elsewhere} you may write to")
    elif swap.needed_bytes is not None and disk.free_bytes < swap.needed_bytes:
        needed, free = format_bytes(swap.needed_bytes), format_bytes(disk.free_bytes)
        what = f"{disk.path} has {free} free and the states on NVMe need {needed}"
        yield Finding("error", "swap-full", what, f"free some, or {elsewhere} on another disk")
    elif swap.needed_bytes is None and disk.free_bytes < _LOW_FREE_BYTES:
        what = f"{disk.path} has {format_bytes(disk.free_bytes)} free for states on NVMe"
        yield Finding("warning", "swap-full", what, f"free some, or {elsewhere} on another disk")
    if disk.filesystem in _MEMORY_FILESYSTEMS:
        what = f"{disk.path} is in memory ({disk.filesystem}), so states on NVMe take what the host has"
        yield Finding("warning", "swap-in-memory", what, f"{elsewhere} on a disk, or use the host tier")
    elif disk.filesystem in _NETWORK_FILESYSTEMS:
        what = f"{disk.path} is on a network file system ({disk.filesystem}), and every step reads and writes it"
        yield Finding("warning", "swap-on-network", what, f"{elsewhere} on a local NVMe disk")


def _on_cores(facts: SystemInfo) -> Iterator[Finding]:
    cpu = facts.cpu
    if cpu.quota_cores is not None and cpu.quota_cores < cpu.num_usable:
        what = f"this cgroup gives {cpu.quota_cores:g} cores' time to {cpu.num_usable} cores; more threads are stalled"
        fix = f"raise the CPU limit, or start no more than {cpu.num_at_once} threads, as `shardwise train` does"
        yield Finding("warning", "cores-throttled", what, fix)
    if cpu.num_usable < cpu.num_machine:
        what = f"this process may run on {cpu.num_usable} of {cpu.num_machine} cores"
        yield Finding("note", "cores-limited", what, "ask the scheduler, taskset or the container for more")
    if _is_busy(facts):
        what = f"the load of the last minute is {cpu.load:.1f} on {cpu.num_machine} cores; speeds are what others leave"
        yield Finding("note", "machine-busy", what, "measure again when it is idle")
    if not facts.gpus and not facts.cpu_has_fast_bf16:
        what = "this CPU has no bf16 in hardware, so it computes faster in fp32"
        yield Finding("note", "cpu-without-bf16", what, "leave precision.param=fp32")


def _is_busy(facts: SystemInfo) -> bool:
    return facts.cpu.load > _BUSY_LOAD * facts.cpu.num_machine


def _on_network(facts: SystemInfo) -> Iterator[Finding]:
    network, environ = facts.network, facts.environ
    asked = environ.get("GLOO_SOCKET_IFNAME")
    if network.error is not None and asked is None:
        what = f"the hostname {network.hostname} does not resolve ({network.error}); gloo connects by it"
        fix = "add it to /etc/hosts, or name an interface in GLOO_SOCKET_IFNAME"
        yield Finding("warning", "hostname-unresolved", what, fix)
    elif network.addresses and asked is None and all(_is_loopback(address) for address in network.addresses):
        address = network.addresses[0]
        what = f"the hostname {network.hostname} resolves to {address} only, which other machines cannot reach"
        fix = "for runs on several machines name the interface in GLOO_SOCKET_IFNAME"
        yield Finding("note", "hostname-is-loopback", what, fix)
    missing = [name for name in (asked or "").split(",") if name and name not in network.interfaces]
    if missing:
        yield _interface_missing("GLOO_SOCKET_IFNAME", missing[0], network.interfaces)
    # NCCL takes prefixes; `^` excludes names and `=` asks for an exact name.
    wanted = environ.get("NCCL_SOCKET_IFNAME", "")
    prefixes = [] if wanted.startswith("^") else [name for name in wanted.removeprefix("=").split(",") if name]
    if prefixes and not any(name.startswith(tuple(prefixes)) for name in network.interfaces):
        yield _interface_missing("NCCL_SOCKET_IFNAME", wanted, network.interfaces)


def _interface_missing(variable: str, name: str, interfaces: tuple[str, ...]) -> Finding:
    what = f"{variable} names {name}, which is no interface of this machine"
    return Finding("error", "interface-missing", what, f"unset it, or use one of {', '.join(interfaces)}")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _on_failures(measured: Measurements) -> Iterator[Finding]:
    fixes = {
        "gloo": "if this machine has several networks, name one that is up in GLOO_SOCKET_IFNAME",
        "nccl": "run with NCCL_DEBUG=WARN to see why, and name the network in NCCL_SOCKET_IFNAME",
        "swap": "set tiers.nvme_path, or give --nvme-path, to a folder with space that you may write to",
        "disk": "set run.dir, or give --dir, to a folder with space that you may write to",
    }
    for failure in measured.failures:
        fix = fixes.get(failure.probe.split()[0], "see whether a plain torch script does the same here")
        yield Finding("error", "probe-failed", f"measuring {failure.probe} failed: {failure.reason}", fix)


def _on_speed(facts: SystemInfo, measured: Measurements) -> Iterator[Finding]:
    for matmul in measured.matmuls:
        if matmul.peak_flops_per_s and matmul.flops_per_s < _MIN_SHARE_OF_PEAK * matmul.peak_flops_per_s:
            share = matmul.flops_per_s / matmul.peak_flops_per_s
            what = f"{matmul.device} multiplies {matmul.dtype} at {share:.0%} of its data sheet's speed"
            fix = "see what else runs there, its clocks and its power limit: nvidia-smi -q -d PERFORMANCE"
            yield Finding("warning", "gpu-slow", what, fix)
    # On busy cores threads wait for each other, more so in short products, so no ratio can be trusted.
    if not facts.gpus and facts.cpu_has_fast_bf16 and not _is_busy(facts):
        yield from _on_cpu_dtypes({matmul.dtype: matmul for matmul in measured.matmuls})
    for copy in measured.copies:
        if copy.pinned and copy.bytes_per_s < _MIN_PINNED_BYTES_PER_S:
            speed = f"{copy.bytes_per_s / 1e9:.1f} GB/s"
            what = f"copies from {copy.source} to {copy.target} run at {speed}, less than 6"
            fix = "check the link's width (nvidia-smi -q) and that the process runs on the GPU's NUMA node"
            yield Finding("warning", "host-link-slow", what, fix)
    for collective in measured.collectives:
        is_small = collective.backend == "gloo" and collective.op == "all_reduce" and collective.num_bytes <= 4096
        if is_small and collective.call_s > _MAX_SMALL_CALL_S:
            what = f"a small all-reduce over gloo takes {collective.call_s * 1e3:.1f} ms, more than 2 ms"
            yield Finding(
                "warning", "gloo-slow", what, "see what else uses the cores; set GLOO_SOCKET_IFNAME=lo to compare"
            )
    yield from _on_disk_speed(measured)
    if measured.swap is not None:
        yield from _on_swap_speed(measured.swap, len(facts.gpus))


def _on_cpu_dtypes(by_dtype: Mapping[str, MatmulSpeed]) -> Iterator[Finding]:
    if {"float32", "bfloat16"} <= set(by_dtype):
        ratio = by_dtype["bfloat16"].flops_per_s / by_dtype["float32"].flops_per_s
        if ratio < 1:
            what = f"bf16 runs at {ratio:.2f} of fp32's speed here, though the CPU has it in hardware"
            yield Finding("warning", "cpu-bf16-slow", what, "use precision.param=fp32")


def _on_swap_speed(speed: SwapSpeed, num_gpus: int) -> Iterator[Finding]:
    slowest_bytes_per_s = min(speed.read_bytes_per_s, speed.write_bytes_per_s)
    # A CPU takes so long for a step that any disk keeps up.
    least_bytes_per_s = num_gpus * USEFUL_BYTES_PER_S if num_gpus else _MIN_DISK_BYTES_PER_S
    if slowest_bytes_per_s < least_bytes_per_s:
        wanted = f"{least_bytes_per_s / 1e9:g} GB/s" + (f" ({USEFUL_BYTES_PER_S / 1e9:g} a GPU)" if num_gpus else "")
        what = (
            f"{speed.path} moves {slowest_bytes_per_s / 1e9:.2f} GB/s, less than {wanted}; steps with NVMe wait for it"
        )
        fix = "set tiers.nvme_path to a faster disk or several as one (RAID 0), or store states on the host"
        yield Finding("warning", "swap-slow", what, fix)
    if not speed.direct:
        what = f"files in {speed.path} go through the page cache, which is memory that states on NVMe should not take"
        yield Finding(
            "note", "swap-through-cache", what, "set tiers.nvme_path to a file system with O_DIRECT: ext4, xfs"
        )


def _on_disk_speed(measured: Measurements) -> Iterator[Finding]:
    disk = measured.disk
    if disk is None:
        return
    if disk.write_bytes_per_s < _MIN_DISK_BYTES_PER_S:
        what = f"{disk.path} takes {disk.write_bytes_per_s / 1e6:.0f} MB/s, less than 100; checkpoints wait for it"
        yield Finding("warning", "disk-slow", what, "set run.dir to a faster disk")
    if disk.sync_s > _MAX_SYNC_S:
        what = f"a small synced write to {disk.path} takes {disk.sync_s * 1e3:.0f} ms, more than 50"
        yield Finding("warning", "disk-sync-slow", what, "set run.dir to a local disk")
