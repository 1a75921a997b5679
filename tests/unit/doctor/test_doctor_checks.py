"""What the doctor says of a machine: nothing of a sound one, and of each fault its value, the rule and a fix."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

import pytest

from harness.machines import FAST, GIB, GPU, ON_GPUS, SOUND, SOUND_ENVIRON, changed
from harness.paths import ROOT
from shardwise.doctor import Diagnosis
from shardwise.doctor.checks import MIN_TORCH, list_findings
from shardwise.doctor.measure import CollectiveSpeed, CopySpeed, DiskSpeed, MatmulSpeed, ProbeFailure
from shardwise.doctor.system_info import SwapInfo
from shardwise.offload.disk_bench import SwapSpeed


def environ(**variables: str) -> dict[str, Any]:
    return {"environ": SOUND_ENVIRON | variables}


def gpu(**fields: Any) -> dict[str, Any]:
    return ON_GPUS | {"gpus": (replace(GPU, **fields),)}


def swap(needed_bytes: int | None = None, **fields: Any) -> dict[str, Any]:
    return {"swap": SwapInfo(replace(SOUND.disk, path="/nvme", **fields), needed_bytes)}


@pytest.mark.parametrize("changes", [{}, ON_GPUS], ids=["cpu", "gpus"])
def test_nothing_is_said_of_a_sound_machine(changes) -> None:
    assert list_findings(changed(changes), FAST) == []
    assert list_findings(changed(changes), None) == []


@pytest.mark.parametrize(
    ("changes", "name", "level", "part"),
    [
        ({"software.torch": "2.10.1"}, "torch-too-old", "error", "torch 2.10.1 is older than 2.11; pip install"),
        ({"software.has_gloo": False}, "gloo-missing", "error", "no gloo"),
        (ON_GPUS | {"software.has_nccl": False}, "nccl-missing", "error", "no NCCL"),
        (ON_GPUS | {"software.triton": None}, "triton-missing", "warning", "pip install triton"),
        ({"software.cxx_path": None}, "compiler-missing", "warning", "apt install g++"),
        ({"software.has_python_headers": False}, "python-headers-missing", "warning", "python3-dev"),
        ({"software.nvidia_driver": "580.1"}, "torch-without-cuda", "error", "2.13.0+cpu is a build for the CPU only"),
        (ON_GPUS | {"gpus": ()}, "gpus-not-seen", "error", "for CUDA 13.0 sees no GPU; update the driver"),
        (
            ON_GPUS | {"gpus": ()} | environ(CUDA_VISIBLE_DEVICES=""),
            "gpus-hidden",
            "warning",
            "CUDA_VISIBLE_DEVICES='' hides every GPU",
        ),
        (ON_GPUS | {"gpus_reach_each_other": False}, "no-peer-access", "warning", "NCCL goes through the host's"),
        (gpu(free_bytes=0, error="CUDA error: busy"), "gpu-fails", "error", "GPU 0 cannot be used: CUDA error: busy"),
        (gpu(free_bytes=40 * GIB), "gpu-in-use", "warning", "40.00 GiB of GPU 0's 80.00 GiB are in use by others"),
        (gpu(slowdowns=("thermal",)), "gpu-throttled", "warning", "GPU 0 is throttled (thermal)"),
        (gpu(num_ecc_errors=3), "gpu-memory-errors", "error", "GPU 0 counts 3 uncorrected memory errors"),
        (gpu(name="NVIDIA H100 MIG 1g.10gb"), "gpu-is-slice", "warning", "NCCL does not connect slices"),
        (gpu(has_bf16=False, capability="7.5"), "gpu-without-bf16", "note", "use precision.param=fp16"),
        (environ(WORLD_SIZE="2"), "rank-environment", "error", "RANK is not; start with torchrun"),
        (environ(MASTER_ADDR="node7"), "rank-environment-left", "warning", "unset MASTER_ADDR"),
        (
            environ(RANK="0", WORLD_SIZE="4", LOCAL_RANK="0", MASTER_ADDR="node7", MASTER_PORT="29500"),
            "rank-environment-left",
            "warning",
            "waits for 4 ranks to meet; unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT unless",
        ),
        ({"environ": {}}, "threads-not-set", "note", "set OMP_NUM_THREADS=4 where you start with torchrun"),
        (environ(OMP_NUM_THREADS="8"), "threads-oversubscribed", "warning", "8 times 2 ranks is more than 8 cores"),
        (environ(OMP_NUM_THREADS="1"), "threads-too-few", "warning", "leaves most of 8 cores idle"),
        (ON_GPUS | environ(), "alloc-conf-not-set", "note", "export PYTORCH_ALLOC_CONF=expandable_segments:True"),
        (
            ON_GPUS | environ(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:512"),
            "alloc-conf-fragments",
            "warning",
            "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512 is without expandable_segments:True",
        ),
        (environ(CUDA_LAUNCH_BLOCKING="1"), "slow-setting", "warning", "unset CUDA_LAUNCH_BLOCKING"),
        (environ(TORCH_DISTRIBUTED_DEBUG="detail"), "slow-setting", "warning", "unset TORCH_DISTRIBUTED_DEBUG"),
        ({"memory.limit_bytes": 8 * GIB}, "memory-limited", "warning", "8.00 GiB of the machine's 64.00 GiB"),
        ({"memory.swap_used_bytes": 2 * GIB}, "swap-in-use", "warning", "2.00 GiB of swap are in use"),
        ({"memory.shm_bytes": 2**26}, "shm-small", "warning", "/dev/shm has 64.00 MiB"),
        ({"open_files_limit": 256}, "open-files-low", "warning", "ulimit -n 1024"),
        (ON_GPUS | {"open_files_limit": 1024}, "open-files-low", "warning", "ulimit -n 4096"),
        ({"disk.writable": False}, "disk-not-writable", "error", "/data/runs cannot be written to"),
        ({"disk.free_bytes": GIB // 2}, "disk-full", "error", "/data/runs has 512.00 MiB free"),
        ({"disk.free_bytes": 5 * GIB}, "disk-full", "warning", "/data/runs has 5.00 GiB free"),
        ({"disk.filesystem": "nfs4"}, "disk-on-network", "note", "data.cache_dir"),
        (
            swap(writable=False),
            "swap-not-writable",
            "error",
            "/nvme cannot be written to, and states on NVMe are stored",
        ),
        (swap(900 * GIB), "swap-full", "error", "/nvme has 500.00 GiB free and the states on NVMe need 900.00 GiB"),
        (swap(free_bytes=5 * GIB), "swap-full", "warning", "/nvme has 5.00 GiB free for states on NVMe"),
        (swap(filesystem="tmpfs"), "swap-in-memory", "warning", "/nvme is in memory (tmpfs)"),
        (swap(filesystem="lustre"), "swap-on-network", "warning", "--nvme-path, to a folder on a local NVMe disk"),
        (
            {"cpu.quota_cores": 3.5} | environ(OMP_NUM_THREADS="1"),
            "cores-throttled",
            "warning",
            "3.5 cores' time to 8 cores; more threads are stalled; raise the CPU limit, or start no more than 3",
        ),
        ({"cpu.num_usable": 8, "cpu.num_machine": 64}, "cores-limited", "note", "8 of 64 cores"),
        ({"cpu.load": 7.0}, "machine-busy", "note", "is 7.0 on 8 cores"),
        ({"cpu_has_fast_bf16": False}, "cpu-without-bf16", "note", "leave precision.param=fp32"),
        (
            {"network.error": "Name or service not known", "network.addresses": ()},
            "hostname-unresolved",
            "warning",
            "the hostname node1 does not resolve (Name or service not known)",
        ),
        ({"network.addresses": ("127.0.1.1",)}, "hostname-is-loopback", "note", "node1 resolves to 127.0.1.1 only"),
        (environ(GLOO_SOCKET_IFNAME="eth9"), "interface-missing", "error", "GLOO_SOCKET_IFNAME names eth9"),
        (environ(NCCL_SOCKET_IFNAME="ib"), "interface-missing", "error", "use one of lo, eth0"),
    ],
)
def test_a_fault_is_found_by_itself(changes, name, level, part) -> None:
    (finding,) = list_findings(changed(changes), FAST)
    assert (finding.name, finding.level) == (name, level)
    assert part in str(finding)
    assert finding.fix
    assert "\n" not in str(finding)


@pytest.mark.parametrize(
    "changes",
    [
        environ(GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="^docker"),
        environ(NCCL_SOCKET_IFNAME="=eth0"),
        environ(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="n", MASTER_PORT="1", TORCHELASTIC_RUN_ID="x"),
        ON_GPUS | environ(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:512, expandable_segments: True"),
        {"memory.limit_bytes": 64 * GIB, "cpu.quota_cores": 8.0, "open_files_limit": None},
        gpu(total_bytes=4 * GIB, free_bytes=3.5 * GIB),
        swap(499 * GIB),
        swap(4 * GIB, free_bytes=5 * GIB),
        {"memory.swap_used_bytes": None, "memory.shm_bytes": None, "memory.available_bytes": None},
    ],
)
def test_what_is_right_or_not_known_is_no_fault(changes) -> None:
    assert list_findings(changed(changes), FAST) == []


@pytest.mark.parametrize(
    ("measured", "changes", "name", "level", "part"),
    [
        (
            {"matmuls": (MatmulSpeed("cuda:0", "bfloat16", 8192, 1, 2e14, 9.9e14),)},
            ON_GPUS,
            "gpu-slow",
            "warning",
            "cuda:0 multiplies bfloat16 at 20% of its data sheet's speed",
        ),
        (
            {
                "matmuls": (
                    MatmulSpeed("cpu", "float32", 1, 1, 2e9, None),
                    MatmulSpeed("cpu", "bfloat16", 1, 1, 1e9, None),
                )
            },
            {},
            "cpu-bf16-slow",
            "warning",
            "bf16 runs at 0.50 of fp32's speed",
        ),
        ({"copies": (CopySpeed("cpu", "cuda:0", True, 1, 3e9),)}, ON_GPUS, "host-link-slow", "warning", "3.0 GB/s"),
        (
            {"collectives": (CollectiveSpeed("gloo", 2, "all_reduce", 4096, 0.04, 1),)},
            {},
            "gloo-slow",
            "warning",
            "40.0 ms",
        ),
        ({"disk": DiskSpeed("/d", 1, True, 3e7, 1e9, 1e-4)}, {}, "disk-slow", "warning", "/d takes 30 MB/s"),
        ({"disk": DiskSpeed("/d", 1, True, 1e9, 1e9, 0.2)}, {}, "disk-sync-slow", "warning", "takes 200 ms"),
        (
            {"swap": SwapSpeed("/nvme", 1, True, 9e9, 5.9e9)},
            ON_GPUS,
            "swap-slow",
            "warning",
            "/nvme moves 5.90 GB/s, less than 6 GB/s (3 a GPU); steps with NVMe wait for it",
        ),
        ({"swap": SwapSpeed("/nvme", 1, True, 9e7, 1e9)}, {}, "swap-slow", "warning", "less than 0.1 GB/s; steps"),
        ({"swap": SwapSpeed("/nvme", 1, False, 9e9, 9e9)}, {}, "swap-through-cache", "note", "O_DIRECT: ext4, xfs"),
        (
            {"failures": (ProbeFailure("gloo between 2 processes", "did not end within 60 s"),)},
            {},
            "probe-failed",
            "error",
            "measuring gloo between 2 processes failed: did not end within 60 s; if this machine has several networks",
        ),
    ],
)
def test_what_is_slow_or_fails_is_found(measured, changes, name, level, part) -> None:
    (finding,) = list_findings(changed(changes), replace(FAST, **measured))
    assert (finding.name, finding.level) == (name, level)
    assert part in str(finding)


def test_the_oldest_torch_is_the_one_that_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={'.'.join(map(str, MIN_TORCH))}" in project["dependencies"]


def test_a_busy_machine_is_not_told_which_dtype_is_fast() -> None:
    slow_bf16 = (MatmulSpeed("cpu", "float32", 1, 1, 2e9, None), MatmulSpeed("cpu", "bfloat16", 1, 1, 1e9, None))
    (finding,) = list_findings(changed({"cpu.load": 7.0}), replace(FAST, matmuls=slow_bf16))
    assert finding.name == "machine-busy"


def test_the_worst_comes_first_and_only_errors_count() -> None:
    findings = list_findings(changed({"disk.writable": False, "memory.shm_bytes": 0, "cpu.load": 9.0}), None)
    assert [finding.level for finding in findings] == ["error", "warning", "note"]
    assert Diagnosis(SOUND, None, tuple(findings)).exit_code == 1
    assert Diagnosis(SOUND, None, tuple(findings[1:])).exit_code == 0
