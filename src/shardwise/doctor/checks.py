"""Find what is wrong with a machine, from its facts and measurements.

`findings.txt` has the level, the problem and the fix of each code; functions yield a code and the values of its text.

>>> print(_finding("gloo-slow", 40.0))
warning: a small all-reduce takes 40.0 ms, more than 2 ms; set GLOO_SOCKET_IFNAME=lo to compare
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from shardwise.config.errors import ConfigError
from shardwise.doctor.calibrate import Measurements
from shardwise.doctor.system_info import RANK_NAMES, SLOW_SETTINGS, DiskInfo, GpuInfo, NetworkInfo, SystemInfo
from shardwise.launch.environment import detect
from shardwise.launch.local import ALLOC_CONF_NAMES, EXPANDABLE_SEGMENTS
from shardwise.offload.disk_bench import USEFUL_BYTES_PER_S, SwapSpeed
from shardwise.planner.hardware import reached_flops_per_s
from shardwise.runtime.format import format_bytes
from shardwise.train.loop import peak_flops

Found = Iterator[tuple[Any, ...]]
"""Yields a code of `findings.txt` and the values that its text takes."""

MIN_TORCH: Final = (2, 11)
_LEVELS: Final = ("error", "warning", "note")
_MIN_FREE_BYTES, _LOW_FREE_BYTES, _MIN_SHM_BYTES = 2**30, 10 * 2**30, 2**30
_SWAPPED_BYTES: Final = 256 * 2**20
# A rank opens a connection to each other rank, its data and its logs.
_MIN_OPEN_FILES, _MIN_OPEN_FILES_WITH_GPUS = 1024, 4096
# CUDA takes so much for this process itself.
_CONTEXT_BYTES: Final = 2**30
_BUSY_SHARE, _BUSY_LOAD, _MIN_SHARE_OF_PEAK = 0.1, 0.5, 0.5
_MIN_PINNED_BYTES_PER_S, _MIN_DISK_BYTES_PER_S = 6e9, 100e6
_SMALL_BYTES, _MAX_SMALL_CALL_S = 4096, 2e-3
_NETWORK_FILESYSTEMS: Final = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "lustre", "beegfs", "ceph", "gpfs")

_TEXTS: Final = Path(__file__).with_name("findings.txt").read_text(encoding="utf-8")
_RULES: Final[Mapping[str, tuple[Any, str, str]]] = {
    code: (level, what, fix) for code, level, what, fix in re.findall(r"(?m)^(\S+): (\w+): (.+); (.+)$", _TEXTS)
}


@dataclass(frozen=True)
class Finding:
    """Names a problem: `what` gives the value and the rule it breaks, `fix` what helps. `name` never changes."""

    level: Literal["error", "warning", "note"]
    name: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.level}: {self.what}; {self.fix}"


def list_findings(facts: SystemInfo, measured: Measurements | None) -> list[Finding]:
    """List all findings, the worst first.

    Args:
        measured: its measurements; None where nothing was measured.
    """
    findings = [*_on_software(facts), *_on_environ(facts), *_on_host(facts), *_on_network(facts.network, facts.environ)]
    findings += [finding for index, gpu in enumerate(facts.gpus) for finding in _on_gpu(index, gpu)]
    findings += _on_swap(facts.swap) if facts.swap is not None else []
    findings += _on_speed(facts, measured) if measured is not None else []
    return sorted((_finding(*finding) for finding in findings), key=lambda finding: _LEVELS.index(finding.level))


def _finding(name: str, *values: object) -> Finding:
    level, what, fix = _RULES[name]
    return Finding(level, name, what.format(*values), fix.format(*values))


def _on_software(facts: SystemInfo) -> Found:
    software, hidden = facts.software, facts.environ.get("CUDA_VISIBLE_DEVICES")
    if tuple(int(number) for number in re.findall(r"\d+", software.torch)[:2]) < MIN_TORCH:
        yield "torch-too-old", software.torch, ".".join(map(str, MIN_TORCH))
    if not software.has_gloo:
        yield ("gloo-missing",)
    if facts.gpus and not software.has_nccl:
        yield ("nccl-missing",)
    if facts.gpus and software.triton is None:
        yield ("triton-missing",)
    if software.cxx_path is None:
        yield ("compiler-missing",)
    elif not software.has_python_headers:
        yield ("python-headers-missing",)
    if software.nvidia_driver is not None and not facts.gpus:
        if software.torch_cuda is None:
            yield "torch-without-cuda", software.nvidia_driver, software.torch
        elif hidden is not None:
            yield "gpus-hidden", hidden
        else:
            yield "gpus-not-seen", software.nvidia_driver, software.torch_cuda
    if facts.gpus_reach_each_other is False:
        yield ("no-peer-access",)


def _on_gpu(index: int, gpu: GpuInfo) -> Found:
    used_bytes = gpu.total_bytes - gpu.free_bytes
    if gpu.error is not None:
        yield "gpu-fails", index, gpu.error
    elif used_bytes > max(_CONTEXT_BYTES, _BUSY_SHARE * gpu.total_bytes):
        yield "gpu-in-use", index, format_bytes(used_bytes), format_bytes(gpu.total_bytes)
    if gpu.slowdowns:
        yield "gpu-throttled", index, ", ".join(gpu.slowdowns)
    if gpu.num_ecc_errors:
        yield "gpu-memory-errors", index, gpu.num_ecc_errors
    if "MIG" in gpu.name:
        yield "gpu-is-slice", index, gpu.name
    if not gpu.has_bf16:
        yield "gpu-without-bf16", index, gpu.name, gpu.capability


def _on_environ(facts: SystemInfo) -> Found:
    environ, num_ranks, num_cores = facts.environ, facts.num_train_ranks, facts.cpu.num_at_once
    yield from _on_rank_environ(environ)
    share = max(1, num_cores // num_ranks)
    text = environ.get("OMP_NUM_THREADS")
    num_threads = int(text) if text is not None and text.isdigit() else share
    if text is None and not facts.gpus and share > 1:
        yield "threads-not-set", share
    if num_threads > share:
        yield "threads-oversubscribed", num_threads, num_ranks, num_cores, share
    elif num_threads * 2 <= share and not facts.gpus:
        yield "threads-too-few", num_threads, num_ranks, num_cores, share
    variable = next((name for name in ALLOC_CONF_NAMES if name in environ), None)
    if facts.gpus and variable is None:
        yield "alloc-conf-not-set", ALLOC_CONF_NAMES[0], EXPANDABLE_SEGMENTS
    elif facts.gpus and variable and EXPANDABLE_SEGMENTS.lower() not in environ[variable].lower().replace(" ", ""):
        yield "alloc-conf-fragments", variable, environ[variable], EXPANDABLE_SEGMENTS
    for name, (slow, cost) in SLOW_SETTINGS.items():
        if environ.get(name, "").upper() == slow:
            yield "slow-setting", name, environ[name], cost


def _on_rank_environ(environ: Mapping[str, str]) -> Found:
    try:
        env = detect(environ)
    except ConfigError as error:
        what, _, fix = str(error).partition("; ")
        yield "rank-environment", what, fix
        return
    left = [name for name in RANK_NAMES if name in environ]
    is_torchruns = env is not None and env.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in environ
    if left and (env is None or is_torchruns):
        yield "rank-environment-left", f"{' and '.join(left)} {'is' if len(left) == 1 else 'are'}", " ".join(left)


def _on_host(facts: SystemInfo) -> Found:
    cpu, memory, disk = facts.cpu, facts.memory, facts.disk
    if cpu.quota_cores is not None and cpu.quota_cores < cpu.num_usable:
        yield "cores-throttled", cpu.quota_cores, cpu.num_usable, cpu.num_at_once
    if not (facts.gpus or cpu.has_fast_bf16):
        yield ("cpu-without-bf16",)
    if _is_busy(facts):
        yield "machine-busy", cpu.load, cpu.num_machine
    if memory.limit_bytes is not None and memory.limit_bytes < memory.total_bytes:
        yield "memory-limited", format_bytes(memory.limit_bytes), format_bytes(memory.total_bytes)
    if memory.swap_used_bytes > _SWAPPED_BYTES:
        yield "swap-in-use", format_bytes(memory.swap_used_bytes)
    if memory.shm_bytes is not None and memory.shm_bytes < _MIN_SHM_BYTES:
        yield "shm-small", format_bytes(memory.shm_bytes), format_bytes(_MIN_SHM_BYTES)
    needed = _MIN_OPEN_FILES_WITH_GPUS if facts.gpus else _MIN_OPEN_FILES
    if facts.open_files_limit is not None and facts.open_files_limit < needed:
        yield "open-files-low", facts.open_files_limit, needed
    if not disk.writable:
        yield "disk-not-writable", disk.path
    elif disk.free_bytes < _LOW_FREE_BYTES:
        code = "disk-full" if disk.free_bytes < _MIN_FREE_BYTES else "disk-low"
        yield code, disk.path, format_bytes(disk.free_bytes), format_bytes(_LOW_FREE_BYTES)
    if disk.filesystem in _NETWORK_FILESYSTEMS:
        yield "disk-on-network", disk.path, disk.filesystem


def _on_swap(disk: DiskInfo) -> Found:
    free = format_bytes(disk.free_bytes)
    if not disk.writable:
        yield "swap-not-writable", disk.path
    elif disk.needed_bytes is not None and disk.free_bytes < disk.needed_bytes:
        yield "swap-full", disk.path, free, format_bytes(disk.needed_bytes)
    elif disk.needed_bytes is None and disk.free_bytes < _LOW_FREE_BYTES:
        yield "swap-low", disk.path, free
    if disk.filesystem in ("tmpfs", "ramfs"):
        yield "swap-in-memory", disk.path, disk.filesystem
    elif disk.filesystem in _NETWORK_FILESYSTEMS:
        yield "swap-on-network", disk.path, disk.filesystem


def _is_busy(facts: SystemInfo) -> bool:
    return facts.cpu.load > _BUSY_LOAD * facts.cpu.num_machine


def _on_network(network: NetworkInfo, environ: Mapping[str, str]) -> Found:
    asked = environ.get("GLOO_SOCKET_IFNAME")
    if network.error is not None and asked is None:
        yield "hostname-unresolved", network.hostname, network.error
    elif network.addresses and asked is None and all(re.match(r"127\.|::1$", address) for address in network.addresses):
        yield "hostname-is-loopback", network.hostname, network.addresses[0]
    interfaces = ", ".join(network.interfaces)
    for name in (asked or "").split(","):
        if name and name not in network.interfaces:
            yield "interface-missing", "GLOO_SOCKET_IFNAME", name, interfaces
    # NCCL takes prefixes; `^` excludes names and `=` asks for an exact name.
    wanted = environ.get("NCCL_SOCKET_IFNAME", "")
    prefixes = tuple(name for name in wanted.removeprefix("=").split(",") if name)
    if prefixes and not wanted.startswith("^") and not any(name.startswith(prefixes) for name in network.interfaces):
        yield "interface-missing", "NCCL_SOCKET_IFNAME", wanted, interfaces


def _on_speed(facts: SystemInfo, measured: Measurements) -> Found:
    for probe, reason in measured.failures.items():
        yield "probe-failed", probe, reason
    for index, rank in enumerate(measured.ranks):
        reached, peak = reached_flops_per_s(rank), peak_flops(rank.device)
        dtype = "bf16" if "bf16" in reached else "fp16"
        if peak is not None and 0 < reached.get(dtype, 0.0) < _MIN_SHARE_OF_PEAK * peak:
            yield "gpu-slow", index, dtype, reached[dtype] / peak
        for way, speed in rank.copies_bytes_per_s:
            if way in ("host->device", "device->host") and speed < _MIN_PINNED_BYTES_PER_S:
                yield "host-link-slow", index, way.replace("->", " to "), speed / 1e9
        # On busy cores threads wait for each other, more so in short products, so no ratio can be trusted.
        if (
            facts.cpu.has_fast_bf16
            and not (facts.gpus or index or _is_busy(facts))
            and {"fp32", "bf16"} <= set(reached)
        ):
            ratio = reached["bf16"] / reached["fp32"]
            if ratio < 1:
                yield "cpu-bf16-slow", ratio
    small = [
        collective
        for rank in measured.ranks[:1]
        for collective in rank.collectives
        if collective.num_bytes <= _SMALL_BYTES
    ]
    for collective in small:
        if collective.op == "all_reduce" and not facts.gpus and collective.seconds > _MAX_SMALL_CALL_S:
            yield "gloo-slow", 1e3 * collective.seconds
    if measured.disk is not None and measured.disk.write_bytes_per_s < _MIN_DISK_BYTES_PER_S:
        yield "disk-slow", measured.disk.path, measured.disk.write_bytes_per_s / 1e6
    if measured.swap is not None:
        yield from _on_swap_speed(measured.swap, len(facts.gpus))


def _on_swap_speed(speed: SwapSpeed, num_gpus: int) -> Found:
    slowest_bytes_per_s = min(speed.read_bytes_per_s, speed.write_bytes_per_s)
    # A CPU takes so long for a step that any disk keeps up.
    least_bytes_per_s = num_gpus * USEFUL_BYTES_PER_S or _MIN_DISK_BYTES_PER_S
    if slowest_bytes_per_s < least_bytes_per_s:
        yield "swap-slow", speed.path, slowest_bytes_per_s / 1e9, least_bytes_per_s / 1e9
    if not speed.direct:
        yield "swap-through-cache", speed.path
