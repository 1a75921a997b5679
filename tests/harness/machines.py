"""Machines for the doctor to judge: a sound one, what differs on one with GPUs, and measurements with nothing slow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.doctor.calibrate import Measurements
from shardwise.doctor.system_info import CpuInfo, DiskInfo, GpuInfo, MemoryInfo, NetworkInfo, SoftwareInfo, SystemInfo
from shardwise.offload.disk_bench import SwapSpeed
from shardwise.planner.profile import CollectiveTime, MatmulTime, Profile

GIB = 2**30
GPU = GpuInfo("NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB, "9.0", has_bf16=True, num_ecc_errors=0)
SOUND_ENVIRON = {"OMP_NUM_THREADS": "4"}
SOUND = SystemInfo(
    software=SoftwareInfo(
        shardwise="0.1.0",
        python="3.11.7",
        platform="Linux",
        torch="2.13.0+cpu",
        torch_cuda=None,
        triton=None,
        nvidia_driver=None,
        has_gloo=True,
        has_nccl=False,
        cxx_path="/usr/bin/g++",
        has_python_headers=True,
    ),
    cpu=CpuInfo("a CPU", num_machine=8, num_usable=8, quota_cores=None, load=0.1, has_fast_bf16=True),
    memory=MemoryInfo(64 * GIB, 60 * GIB, limit_bytes=None, swap_used_bytes=0, shm_bytes=32 * GIB),
    gpus=(),
    gpus_reach_each_other=None,
    network=NetworkInfo("node1", ("10.0.0.7",), error=None, interfaces=("lo", "eth0")),
    disk=DiskInfo("/data/runs", writable=True, free_bytes=500 * GIB, total_bytes=1000 * GIB, filesystem="ext4"),
    open_files_limit=65536,
    environ=SOUND_ENVIRON,
)
ON_GPUS = {
    "software.torch": "2.13.0+cu130",
    "software.torch_cuda": "13.0",
    "software.triton": "3.6.0",
    "software.nvidia_driver": "580.1",
    "software.has_nccl": True,
    "gpus": (GPU, GPU),
    "gpus_reach_each_other": True,
    "environ": SOUND_ENVIRON | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
}


def rank(
    device: str = "cpu", seconds: float = 1e-4, flops_per_s: dict[str, float] | None = None, **fields: Any
) -> Profile:
    """What a glance finds on one of two ranks.

    Args:
        device: its name.
        seconds: each collective's time.
        flops_per_s: by dtype.
        fields: further fields of the profile.
    """
    rates = {"fp32": 4e11, "bf16": 16e11} if flops_per_s is None else flops_per_s
    matmuls = tuple(MatmulTime(dtype=each, m=1024, n=1024, k=1024, seconds=2**31 / rates[each]) for each in rates)
    collectives = tuple(
        CollectiveTime(op=op, num_ranks=2, num_bytes=size, seconds=seconds)
        for size in (4096, 2**20)
        for op in ("all_gather", "all_reduce")
    )
    speeds = {"copies_bytes_per_s": (("host->host", 2e10),), "memory_bytes": 64.0 * GIB} | fields
    return Profile(device=device, num_ranks=2, num_threads=4, matmuls=matmuls, collectives=collectives, **speeds)


FAST = Measurements((rank(), rank()), disk=SwapSpeed("/data/runs", 2**27, True, 3e9, 2e9))


def changed(changes: dict[str, Any]) -> SystemInfo:
    """The sound machine with some fields, named with dots, changed."""
    facts = SOUND
    for key, value in changes.items():
        part, _, name = key.partition(".")
        facts = replace(facts, **{part: replace(getattr(facts, part), **{name: value}) if name else value})
    return facts
