"""What the doctor reads of a machine: cores, memory, disks, names that do not resolve, no secrets."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil

from shardwise.doctor.system_info import ENVIRON_NAMES, gather_facts, parse_smi, read_disk, read_network


def test_a_hostname_that_does_not_resolve_is_said(monkeypatch) -> None:
    def refuse(*arguments: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    network = read_network()
    assert (network.error, network.addresses) == ("Name or service not known", ())
    assert network.interfaces


def test_the_disk_is_that_of_the_nearest_folder_there_is(tmp_path) -> None:
    disk = read_disk(tmp_path / "not" / "yet" / "there")
    assert disk.path == str(tmp_path)
    assert disk.writable
    assert 0 < disk.free_bytes <= disk.total_bytes


def test_only_variables_that_matter_are_kept() -> None:
    environ = dict.fromkeys(ENVIRON_NAMES, "1") | {"API_TOKEN": "secret"}
    facts = gather_facts(environ, Path("runs"))
    assert set(facts.environ) == set(ENVIRON_NAMES)
    assert "secret" not in repr(facts)


def test_a_machine_is_what_the_system_says(tmp_path) -> None:
    facts = gather_facts({}, tmp_path)
    assert 1 <= facts.cpu.num_at_once <= facts.cpu.num_usable <= facts.cpu.num_machine == psutil.cpu_count()
    assert 2**20 < facts.memory.available_bytes <= facts.memory.total_bytes == psutil.virtual_memory().total
    assert facts.disk.filesystem


def test_smis_lines_that_make_no_sense_are_left_out() -> None:
    assert parse_smi("") == parse_smi("Failed to initialize NVML\nGPU-1, 580.1, 0, [N/A]\n") == (None, {})
    assert parse_smi("GPU-1, 580.1, 2, 0x00000000000000E8") == (
        "580.1",
        {"1": (2, ("hardware", "software thermal", "thermal", "power brake"))},
    )
