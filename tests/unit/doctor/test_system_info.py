"""What the doctor reads of a machine: limits of both kinds of cgroup, names that do not resolve, no secrets."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from shardwise.doctor import system_info as host
from shardwise.doctor.system_info import ENVIRON_NAMES, gather_facts, parse_smi

MEMINFO = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB\n"
V2 = {
    "proc/self/cgroup": "0::/jobs/one",
    "sys/fs/cgroup/jobs/cpu.max": "150000 100000",
    "sys/fs/cgroup/jobs/memory.max": "700000",
    "sys/fs/cgroup/jobs/one/cpu.max": "max 100000",
    "sys/fs/cgroup/jobs/one/memory.max": "max",
}
V1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/jobs\n4:memory:/jobs\n1:name=systemd:/jobs",
    "sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_quota_us": "150000",
    "sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": "700000",
}
UNLIMITED = {
    "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
}


@pytest.mark.parametrize(
    ("files", "quota_cores", "limit_bytes"),
    [(V2, 1.5, 700_000), (V1, 1.5, 700_000), (UNLIMITED, None, None), ({}, None, None)],
    ids=["v2", "v1", "unlimited", "none"],
)
def test_cgroups_limit_cores_and_memory(tmp_path, files, quota_cores, limit_bytes) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert host.read_cpu(tmp_path).quota_cores == quota_cores
    assert host.read_memory(tmp_path).limit_bytes == limit_bytes


def test_memory_is_what_proc_says_and_the_systems_word_where_there_is_no_proc(tmp_path) -> None:
    without = host.read_memory(tmp_path)
    assert without.total_bytes > 2**20
    assert (without.available_bytes, without.swap_used_bytes, without.shm_bytes) == (None, None, None)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    (tmp_path / "dev/shm").mkdir(parents=True)
    memory = host.read_memory(tmp_path)
    assert (memory.total_bytes, memory.available_bytes, memory.swap_used_bytes) == (1_024_000, 614_400, 30_720)
    assert memory.shm_bytes >= memory.shm_free_bytes > 0


def test_a_hostname_that_does_not_resolve_is_said_and_waited_for_only_so_long(monkeypatch) -> None:
    def refuse(*arguments: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert host.read_network().error == "Name or service not known"
    answer = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments: answer.wait(60) and [])
    network = host.read_network(timeout_s=0.05)
    answer.set()
    assert (network.error, network.addresses) == ("no answer within 0.05 s", ())
    assert network.interfaces


def test_the_disk_is_that_of_the_nearest_folder_there_is(tmp_path) -> None:
    disk = host.read_disk(tmp_path / "not" / "yet" / "there")
    assert disk.path == str(tmp_path)
    assert disk.writable
    assert 0 < disk.free_bytes <= disk.total_bytes


def test_only_variables_that_matter_are_kept() -> None:
    environ = dict.fromkeys(ENVIRON_NAMES, "1") | {"API_TOKEN": "secret"}
    facts = gather_facts(environ, Path("runs"))
    assert set(facts.environ) == set(ENVIRON_NAMES)
    assert "secret" not in repr(facts)


def test_smis_lines_that_make_no_sense_are_left_out() -> None:
    assert parse_smi("") == {}
    assert parse_smi("Failed to initialize NVML\nGPU-1, 0, [N/A]\n") == {}
    assert parse_smi("GPU-1, 2, 0x00000000000000E8") == {
        "1": (2, ("hardware", "software thermal", "thermal", "power brake"))
    }
