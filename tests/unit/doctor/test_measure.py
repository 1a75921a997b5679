"""Probes: positive, in the units they name, within the calls that their time allows, and nothing left."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from harness.machines import FAST, SOUND, changed
from shardwise.doctor import _measure
from shardwise.doctor import measure as probes
from shardwise.doctor.measure import call_times_s, measure_disk, measure_host_copy, measure_matmul
from shardwise.doctor.system_info import SwapInfo


class Clock:
    """A clock that only work moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_calls = 0

    def __call__(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> None:
        self.now_s += seconds
        self.num_calls += 1


@pytest.mark.parametrize(("call_s", "budget_s", "num_calls"), [(1.0, 5.0, 5), (3.0, 5.0, 2), (9.0, 5.0, 1)])
def test_calls_end_with_their_time(call_s, budget_s, num_calls) -> None:
    clock = Clock()
    times_s = call_times_s(lambda: clock.work(call_s), budget_s, clock)
    assert clock.num_calls == num_calls
    assert times_s == [call_s] * max(1, num_calls - 1), "the warm-up counts only where it is all there is"


def test_fast_calls_are_not_repeated_for_ever() -> None:
    clock = Clock()
    assert len(call_times_s(lambda: clock.work(0.0), 5.0, clock)) == 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matmuls_speed_follows_from_its_time(monkeypatch, dtype) -> None:
    monkeypatch.setattr(probes, "call_times_s", lambda run, budget_s: run() or [0.25, 0.5])
    matmul = measure_matmul(torch.device("cpu"), dtype, budget_s=0.0)
    assert (matmul.device, matmul.dtype, matmul.size) == ("cpu", str(dtype).removeprefix("torch."), 256)
    assert matmul.flops_per_s == 2 * 256**3 / 0.25
    assert matmul.peak_flops_per_s is None
    assert matmul.num_threads == torch.get_num_threads()


@pytest.mark.parametrize(
    ("first_s", "speed_flops_per_s", "size"),
    [
        (0.0, 2 * 256**3 / 1.0, 256),
        (0.0, 2 * 512**3 / 0.4, 512),
        (9.0, 2 * 512**3 / 0.4, 512),
        (0.0, 2 * 1024**3 / 0.2, 1024),
        (0.0, 1e18, 8192),
    ],
    ids=["slow", "two-of-512-fit", "libraries-start-slowly", "two-of-1024-fit", "very-fast"],
)
def test_the_faster_a_device_the_larger_its_matrices(monkeypatch, first_s, speed_flops_per_s, size) -> None:
    """Of the next size two products must fit into what is left of the second."""
    clock = Clock()
    starting_s = iter([first_s])

    def multiply(_device, _dtype, size, _budget_s) -> float:
        product_s = 2 * size**3 / speed_flops_per_s
        clock.work(product_s + next(starting_s, 0.0))
        return product_s

    monkeypatch.setattr(probes, "_time_matmul", multiply)
    matmul = measure_matmul(torch.device("cpu"), torch.float32, budget_s=1.0, clock=clock)
    assert matmul.size == size
    assert matmul.flops_per_s == pytest.approx(speed_flops_per_s)


def test_a_copys_speed_follows_from_its_time(monkeypatch) -> None:
    monkeypatch.setattr(probes, "call_times_s", lambda run, budget_s: run() is None or [0.5])
    copy = measure_host_copy(num_bytes=2**20)
    assert (copy.source, copy.target, copy.num_bytes, copy.bytes_per_s) == ("cpu", "cpu", 2**20, 2**21)


def test_the_disk_is_measured_and_left_as_it_was(tmp_path) -> None:
    disk = measure_disk(tmp_path, budget_s=0.1, num_bytes=8 * 2**20)
    assert list(tmp_path.iterdir()) == []
    assert disk.num_bytes in (4 * 2**20, 8 * 2**20)
    assert min(disk.write_bytes_per_s, disk.read_bytes_per_s, disk.sync_s) > 0


def test_a_disk_without_direct_io_is_measured_through_the_cache(tmp_path, monkeypatch) -> None:
    real_open = os.open

    def refuse_direct(path, flags, mode=0o777, **options):
        fd = real_open(path, flags & ~os.O_DIRECT, mode, **options)  # the file is made, and then refused
        if flags & os.O_DIRECT:
            os.close(fd)
            raise OSError(22, "Invalid argument")
        return fd

    monkeypatch.setattr(os, "open", refuse_direct)
    disk = measure_disk(tmp_path, budget_s=0.1, num_bytes=4 * 2**20)
    assert not disk.direct
    assert min(disk.write_bytes_per_s, disk.read_bytes_per_s, disk.sync_s) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_an_error(tmp_path) -> None:
    with pytest.raises(OSError, match="No such file"):
        measure_disk(tmp_path / "nowhere")


def test_a_probe_that_fails_is_noted_and_the_others_go_on(tmp_path, monkeypatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("illegal instruction\nand much more")

    doing: list[str] = []
    monkeypatch.setattr("shardwise.doctor.measure_matmul", fail)
    monkeypatch.setattr("shardwise.doctor.measure_host_copy", lambda: FAST.copies[0])
    monkeypatch.setattr("shardwise.doctor.measure_collectives", lambda *arguments: ((), "did not end"))
    swap = SwapInfo(replace(SOUND.disk, path=str(tmp_path)))
    monkeypatch.setattr("shardwise.doctor.measure_swap", lambda path: path)
    measured = _measure(changed({"disk.path": str(tmp_path), "swap": swap}), {}, doing.append)
    assert measured.swap == tmp_path
    assert [(failure.probe, failure.reason) for failure in measured.failures] == [
        ("matmul in float32 on cpu", "illegal instruction"),
        ("matmul in bfloat16 on cpu", "illegal instruction"),
        ("matmul in float16 on cpu", "illegal instruction"),
        ("gloo between 2 processes", "did not end"),
    ]
    assert measured.copies == FAST.copies
    assert measured.disk is not None
    assert doing[0] == "measuring matmul in float32 on cpu"
