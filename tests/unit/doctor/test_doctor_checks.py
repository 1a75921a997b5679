"""What the doctor says of a machine: nothing of a sound one, and of each fault its value, the rule and a fix."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

import pytest

from harness.machines import FAST, GIB, GPU, ON_GPUS, SOUND, SOUND_ENVIRON, changed, rank
from harness.paths import ROOT
from harness.snapshots import Snapshots
from shardwise.doctor import Diagnosis
from shardwise.doctor.checks import MIN_TORCH, list_findings
from shardwise.offload.disk_bench import SwapSpeed


def environ(**variables: str) -> dict[str, Any]:
    return {"environ": SOUND_ENVIRON | variables}


def gpu(**fields: Any) -> dict[str, Any]:
    return ON_GPUS | {"gpus": (replace(GPU, **fields),)}


def swap(needed_bytes: int | None = None, **fields: Any) -> dict[str, Any]:
    return {"swap": replace(SOUND.disk, path="/nvme", needed_bytes=needed_bytes, **fields)}


@pytest.mark.parametrize("changes", [{}, ON_GPUS], ids=["cpu", "gpus"])
def test_nothing_is_said_of_a_sound_machine(changes) -> None:
    assert list_findings(changed(changes), FAST) == []
    assert list_findings(changed(changes), None) == []


FAULTS = [
    ({"software.torch": "2.10.1"}, "torch-too-old", "error"),
    ({"software.has_gloo": False}, "gloo-missing", "error"),
    (ON_GPUS | {"software.has_nccl": False}, "nccl-missing", "error"),
    (ON_GPUS | {"software.triton": None}, "triton-missing", "warning"),
    ({"software.cxx_path": None}, "compiler-missing", "warning"),
    ({"software.has_python_headers": False}, "python-headers-missing", "warning"),
    ({"software.nvidia_driver": "580.1"}, "torch-without-cuda", "error"),
    (ON_GPUS | {"gpus": ()}, "gpus-not-seen", "error"),
    (ON_GPUS | {"gpus": ()} | environ(CUDA_VISIBLE_DEVICES=""), "gpus-hidden", "warning"),
    (ON_GPUS | {"gpus_reach_each_other": False}, "no-peer-access", "warning"),
    (gpu(free_bytes=0, error="CUDA error: busy"), "gpu-fails", "error"),
    (gpu(free_bytes=40 * GIB), "gpu-in-use", "warning"),
    (gpu(slowdowns=("thermal",)), "gpu-throttled", "warning"),
    (gpu(num_ecc_errors=3), "gpu-memory-errors", "error"),
    (gpu(name="NVIDIA H100 MIG 1g.10gb"), "gpu-is-slice", "warning"),
    (gpu(has_bf16=False, capability="7.5"), "gpu-without-bf16", "note"),
    (environ(WORLD_SIZE="2"), "rank-environment", "error"),
    (environ(MASTER_ADDR="node7"), "rank-environment-left", "warning"),
    (
        environ(RANK="0", WORLD_SIZE="4", LOCAL_RANK="0", MASTER_ADDR="node7", MASTER_PORT="29500"),
        "rank-environment-left",
        "warning",
    ),
    ({"environ": {}}, "threads-not-set", "note"),
    (environ(OMP_NUM_THREADS="8"), "threads-oversubscribed", "warning"),
    (environ(OMP_NUM_THREADS="1"), "threads-too-few", "warning"),
    (ON_GPUS | environ(), "alloc-conf-not-set", "note"),
    (ON_GPUS | environ(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:512"), "alloc-conf-fragments", "warning"),
    (environ(CUDA_LAUNCH_BLOCKING="1"), "slow-setting", "warning"),
    (environ(TORCH_DISTRIBUTED_DEBUG="detail"), "slow-setting", "warning"),
    ({"memory.limit_bytes": 8 * GIB}, "memory-limited", "warning"),
    ({"memory.swap_used_bytes": 2 * GIB}, "swap-in-use", "warning"),
    ({"memory.shm_bytes": 2**26}, "shm-small", "warning"),
    ({"open_files_limit": 256}, "open-files-low", "warning"),
    (ON_GPUS | {"open_files_limit": 1024}, "open-files-low", "warning"),
    ({"disk.writable": False}, "disk-not-writable", "error"),
    ({"disk.free_bytes": GIB // 2}, "disk-full", "error"),
    ({"disk.free_bytes": 5 * GIB}, "disk-low", "warning"),
    ({"disk.filesystem": "nfs4"}, "disk-on-network", "note"),
    (swap(writable=False), "swap-not-writable", "error"),
    (swap(900 * GIB), "swap-full", "error"),
    (swap(free_bytes=5 * GIB), "swap-low", "warning"),
    (swap(filesystem="tmpfs"), "swap-in-memory", "warning"),
    (swap(filesystem="lustre"), "swap-on-network", "warning"),
    ({"cpu.quota_cores": 3.5} | environ(OMP_NUM_THREADS="1"), "cores-throttled", "warning"),
    ({"cpu.load": 7.0}, "machine-busy", "note"),
    ({"cpu.has_fast_bf16": False}, "cpu-without-bf16", "note"),
    ({"network.error": "Name or service not known", "network.addresses": ()}, "hostname-unresolved", "warning"),
    ({"network.addresses": ("127.0.1.1",)}, "hostname-is-loopback", "note"),
    (environ(GLOO_SOCKET_IFNAME="eth9"), "interface-missing", "error"),
    (environ(NCCL_SOCKET_IFNAME="ib"), "interface-missing", "error"),
]


@pytest.mark.parametrize(("changes", "name", "level"), FAULTS)
def test_a_fault_is_found_by_itself(changes, name, level) -> None:
    (finding,) = list_findings(changed(changes), FAST)
    assert (finding.name, finding.level) == (name, level)
    assert finding.fix
    assert "\n" not in str(finding)
    assert "{" not in str(finding)


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
        {"memory.shm_bytes": None},
        {"cpu.num_usable": 8, "cpu.num_machine": 64},
        ON_GPUS | {"cpu.has_fast_bf16": False},
    ],
)
def test_what_is_right_or_not_known_is_no_fault(changes) -> None:
    assert list_findings(changed(changes), FAST) == []


H100 = GPU.name
SLOW = [
    ({"ranks": (rank(), rank(H100, flops_per_s={"bf16": 2e14}))}, ON_GPUS, "gpu-slow", "warning"),
    ({"ranks": (rank(flops_per_s={"fp32": 2e9, "bf16": 1e9}),)}, {}, "cpu-bf16-slow", "warning"),
    (
        {"ranks": (rank(H100, flops_per_s={}, copies_bytes_per_s=(("host->device", 3e9),)),)},
        ON_GPUS,
        "host-link-slow",
        "warning",
    ),
    ({"ranks": (rank(seconds=0.04),)}, {}, "gloo-slow", "warning"),
    ({"disk": SwapSpeed("/d", 1, True, 1e9, 3e7)}, {}, "disk-slow", "warning"),
    ({"swap": SwapSpeed("/nvme", 1, True, 9e9, 5.9e9)}, ON_GPUS, "swap-slow", "warning"),
    ({"swap": SwapSpeed("/nvme", 1, True, 9e7, 1e9)}, {}, "swap-slow", "warning"),
    ({"swap": SwapSpeed("/nvme", 1, False, 9e9, 9e9)}, {}, "swap-through-cache", "note"),
    ({"failures": {"with 2 ranks at work at once": "did not end within 60 s"}}, {}, "probe-failed", "error"),
]


@pytest.mark.parametrize(("measured", "changes", "name", "level"), SLOW)
def test_what_is_slow_or_fails_is_found(measured, changes, name, level) -> None:
    (finding,) = list_findings(changed(changes), replace(FAST, **measured))
    assert (finding.name, finding.level) == (name, level)


def test_findings_say_the_value_the_rule_and_the_fix(snapshots: Snapshots) -> None:
    cases = [*(({}, *case) for case in FAULTS), *SLOW]
    found = [list_findings(changed(changes), replace(FAST, **measured))[0] for measured, changes, *_ in cases]
    snapshots.check("doctor-findings", "".join(f"{each.name}: {each}\n" for each in found))


def test_the_oldest_torch_is_the_one_that_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={'.'.join(map(str, MIN_TORCH))}" in project["dependencies"]


def test_a_busy_machine_does_not_learn_which_dtype_is_fast() -> None:
    slow_bf16 = (rank(flops_per_s={"fp32": 2e9, "bf16": 1e9}),)
    (finding,) = list_findings(changed({"cpu.load": 7.0}), replace(FAST, ranks=slow_bf16))
    assert finding.name == "machine-busy"


def test_the_worst_comes_first_and_only_errors_count() -> None:
    findings = list_findings(changed({"disk.writable": False, "memory.shm_bytes": 0, "cpu.load": 9.0}), None)
    assert [finding.level for finding in findings] == ["error", "warning", "note"]
    assert Diagnosis(SOUND, None, tuple(findings)).exit_code == 1
    assert Diagnosis(SOUND, None, tuple(findings[1:])).exit_code == 0
