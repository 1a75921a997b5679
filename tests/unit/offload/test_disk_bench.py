"""The disk's speed as it is measured at the start: what was moved by the time it took, and nothing is left."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import torch

from harness.refusals import refused
from shardwise.offload import disk_bench as speed
from shardwise.offload.disk_bench import measure_swap

MIB = 2**20


def test_nothing_stays_and_the_file_is_no_larger_than_said(tmp_path) -> None:
    measured = measure_swap(tmp_path / "nvme", budget_s=0.06, num_bytes=16 * MIB)
    assert measured.num_bytes in (8 * MIB, 16 * MIB)
    assert measured.path == str(tmp_path / "nvme")
    assert min(measured.read_bytes_per_s, measured.write_bytes_per_s) > 0
    assert list((tmp_path / "nvme").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said_by_its_name(tmp_path) -> None:
    (tmp_path / "file").touch()
    with refused("swap-refused", f"{tmp_path}/file"):
        measure_swap(tmp_path / "file" / "nvme")


class Clocked:
    """A file that takes a second for each chunk, the first time two."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls: list[tuple[str, int]] = []

    def move(self, kind: str, offset_bytes: int) -> Future[None]:
        self.now_s += 1.0 if ("write", offset_bytes) in self.calls else 2.0
        self.calls.append((kind, offset_bytes))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def write(self, offset_bytes: int, source: torch.Tensor) -> Future[None]:
        return self.move("write", offset_bytes)

    def read(self, offset_bytes: int, target: torch.Tensor) -> Future[None]:
        return self.move("read", offset_bytes)


def test_the_first_writing_does_not_count_and_the_time_ends_the_others(tmp_path, monkeypatch) -> None:
    file = Clocked()
    monkeypatch.setattr(speed.SwapFolder, "allocate", lambda self, name, num_bytes: file)
    monkeypatch.setattr(speed.time, "perf_counter", lambda: file.now_s)
    monkeypatch.setattr(speed, "_CHUNK_BYTES", MIB)
    measured = measure_swap(Path(tmp_path), budget_s=18.0, num_bytes=8 * MIB)
    assert file.calls[:3] == [("write", 0), ("write", MIB), ("write", 2 * MIB)], "six seconds"
    assert measured.num_bytes == 3 * MIB
    assert [kind for kind, _ in file.calls[3:]] == ["write"] * 6 + ["read"] * 6
    assert {offset for _, offset in file.calls} == {0, MIB, 2 * MIB}
    assert measured.write_bytes_per_s == measured.read_bytes_per_s == MIB
