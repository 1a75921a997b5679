"""Swap files: what is read is what was written, whichever way it goes; what fails says so; nothing is left."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.refusals import refused
from harness.small_disk import small_disk
from harness.waiting import PATIENCE_S, wait_until
from shardwise.offload import io_threads
from shardwise.offload import nvme as files
from shardwise.offload.io_threads import IoThreads, takes_direct_io
from shardwise.offload.nvme import SwapFile, SwapFolder
from shardwise.runtime.pinned_memory import ALIGNMENT_BYTES, host_pages

# The forked children touch nothing but files.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

NUM_BYTES = 10 * ALIGNMENT_BYTES + 123


@pytest.fixture(params=["direct", "plain"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SwapFolder]:
    """A swap folder whose threads take blocks of two pages."""
    if request.param == "plain":
        monkeypatch.setattr(files, "takes_direct_io", lambda path: False)
    made = SwapFolder.open(tmp_path, rank=0)
    if request.param == "direct" and not made.is_direct:
        made.close()
        pytest.skip("this file system has no O_DIRECT")
    made._threads.close()
    made._threads = IoThreads(num_threads=3, block_bytes=2 * ALIGNMENT_BYTES)
    yield made
    made.close()


def buffer(num_bytes: int, shift: int = 0) -> Tensor:
    """Memory that starts so many bytes after a multiple of the alignment."""
    return host_pages(shift + num_bytes)[shift : shift + num_bytes]


def content(file: SwapFile) -> bytes:
    target = torch.full((file.num_bytes,), 255, dtype=torch.uint8)
    file.read(0, target).result()
    return bytes(target.tolist())


def descriptors(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each file that is opened from now on is opened for direct I/O."""
    found: list[bool] = []
    plain_open = os.open

    def opened(path: Any, flags: int, mode: int = 0o777) -> int:
        found.append(bool(flags & os.O_DIRECT))
        return plain_open(path, flags, mode)

    monkeypatch.setattr(os, "open", opened)
    return found


starts = st.one_of(st.integers(0, 10).map(lambda page: page * ALIGNMENT_BYTES), st.integers(0, NUM_BYTES))
shifts = st.sampled_from([0, 0, 1, 512])


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    moves=st.lists(st.tuples(st.booleans(), starts, starts, shifts), min_size=1, max_size=8), seed=st.integers(0, 99)
)
def test_each_read_finds_what_was_written_last(
    folder: SwapFolder, moves: list[tuple[bool, int, int, int]], seed: int
) -> None:
    file = folder.allocate("states", NUM_BYTES)
    there = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    torch.manual_seed(seed)
    for is_write, one, other, shift in moves:
        start, stop = sorted((one, other))
        memory = buffer(stop - start, shift).random_(256)
        if is_write:
            there[start:stop] = memory
            file.write(start, memory).result()
        else:
            file.read(start, memory).result()
            assert memory.tolist() == there[start:stop].tolist()
    assert content(file) == bytes(there.tolist())
    file.free()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.sets(starts, max_size=8), seed=st.integers(0, 99))
def test_writes_side_by_side_and_reads_side_by_side(folder: SwapFolder, cuts: set[int], seed: int) -> None:
    file = folder.allocate("states", NUM_BYTES)
    torch.manual_seed(seed)
    edges = sorted({0, NUM_BYTES, *cuts})
    ranges = list(itertools.pairwise(edges))
    for _ in range(2):
        sources = [buffer(stop - start).random_(256) for start, stop in ranges]
        for future in [file.write(start, source) for (start, _), source in zip(ranges, sources, strict=True)]:
            future.result()
        targets = [buffer(stop - start) for start, stop in ranges]
        for future in [file.read(start, target) for (start, _), target in zip(ranges, targets, strict=True)]:
            future.result()
        assert torch.equal(torch.cat(targets), torch.cat(sources))
    file.free()


def test_what_is_aligned_goes_past_the_page_cache_and_the_rest_through_it(
    folder: SwapFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder.allocate("states", NUM_BYTES)
    opened = descriptors(monkeypatch)
    expected: list[bool] = []

    def check(future: Any, *are_direct: bool) -> None:
        future.result()
        expected.extend(each and folder.is_direct for each in are_direct)

    check(file.write(0, buffer(5 * ALIGNMENT_BYTES)), True)
    check(file.read(ALIGNMENT_BYTES, buffer(ALIGNMENT_BYTES)), True)
    check(file.read(512, buffer(ALIGNMENT_BYTES)), False)
    check(file.read(0, buffer(ALIGNMENT_BYTES, 512)), False)
    assert opened == expected
    file.write(0, buffer(NUM_BYTES)).result()
    assert sorted(opened[4:]) == ([False, True] if folder.is_direct else [False])


def test_a_file_reads_as_zeros_and_has_its_blocks(folder: SwapFolder) -> None:
    file = folder.allocate("states", NUM_BYTES)
    assert content(file) == bytes(NUM_BYTES)
    assert file.path.stat().st_size == NUM_BYTES
    assert file.path.stat().st_blocks * 512 >= NUM_BYTES
    empty = folder.allocate("nothing", 0)
    empty.read(0, buffer(0)).result()
    assert folder.num_bytes == NUM_BYTES
    file.free()
    file.free()
    assert (folder.num_bytes, file.path.exists()) == (0, False)


def test_a_file_system_that_reserves_nothing_gets_files_of_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> int:
        files.ctypes.set_errno(next(codes))
        return -1

    codes = iter([errno.EINTR, errno.EOPNOTSUPP])
    monkeypatch.setattr(
        files.ctypes, "CDLL", lambda *args, **kwargs: type("C", (), {"fallocate": staticmethod(refuse)})
    )
    folder = SwapFolder.open(tmp_path, rank=0)
    assert content(folder.allocate("states", NUM_BYTES)) == bytes(NUM_BYTES)
    assert list(codes) == []
    folder.close()


def test_files_are_no_descriptors(folder: SwapFolder) -> None:
    def num_descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = num_descriptors()
    swapped = [folder.allocate("states", ALIGNMENT_BYTES) for _ in range(20)]
    for file in swapped:
        file.write(0, buffer(ALIGNMENT_BYTES)).result()
    assert num_descriptors() == before


def test_only_the_user_may_enter(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        folder = SwapFolder.open(tmp_path / "made" / "here", rank=3)
        file = folder.allocate("decoder.layers.0/exp_avg", 10)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert [stat.S_IMODE(each.stat().st_mode) for each in folder.path.iterdir()] == [0o600, 0o600]
    assert folder.path == tmp_path / f"made/here/shardwise-swap-{socket.gethostname()}-{os.getpid()}-rank-3"
    assert file.path == folder.path / "00000-decoder.layers.0_exp_avg"
    folder.close()


def test_close_removes_all_and_ends_what_is_under_way(folder: SwapFolder) -> None:
    root, file = folder.path.parent, folder.allocate("states", 2**20)
    futures = [file.write(0, buffer(2**20)) for _ in range(4)]
    folder.close()
    folder.close()
    assert [future.exception(timeout=0) for future in futures] == [None] * 4
    assert list(root.iterdir()) == []
    with refused("swap-folder-closed", str(folder.path), "more"):
        folder.allocate("more", 1)
    with pytest.raises(ValueError, match=re.escape(str(file.path))):
        file.read(0, buffer(1))


# What is refused, and what fails.


def test_what_no_file_takes_is_refused(folder: SwapFolder) -> None:
    file = folder.allocate("states", 100)
    for move, start, named in ((file.read, 99, "read bytes 99 to 101"), (file.write, -1, "write bytes -1 to 1")):
        with pytest.raises(ValueError, match=f"{named} of {re.escape(str(file.path))}: it has 100"):
            move(start, buffer(2))
    for tensor in (
        torch.zeros(2),
        buffer(4).view(2, 2),
        buffer(4)[::2],
        torch.zeros(2, dtype=torch.uint8, device="meta"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"{tensor.dtype} {list(tensor.shape)}")):
            file.write(0, tensor)


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.EIO, "swap-refused"), (errno.ENOSPC, "disk-full"), (errno.EDQUOT, "disk-full")],
)
def test_an_error_names_the_file_and_a_fix(
    folder: SwapFolder, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    def fail(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    file = folder.allocate("states", NUM_BYTES)
    for name, start in (("pwritev", file.write), ("preadv", file.read)):
        monkeypatch.setattr(os, name, fail)
        future = start(2 * ALIGNMENT_BYTES, buffer(ALIGNMENT_BYTES))
        doing = f"{start.__name__} {ALIGNMENT_BYTES} bytes at {2 * ALIGNMENT_BYTES} of {file.path}"
        with refused(code, doing, os.strerror(number), "tiers.nvme_path") as caught:
            future.result()
        assert "\n" not in str(caught.value)


def test_the_future_ends_when_no_block_runs_any_more(folder: SwapFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder.allocate("states", NUM_BYTES)
    go_on, has_failed = threading.Event(), threading.Event()
    pwritev = os.pwritev

    def write(descriptor: int, buffers: Any, offset: int) -> int:
        if offset == 0:
            has_failed.set()
            raise OSError(errno.EIO, "broken")
        go_on.wait()
        return pwritev(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", write)
    future = file.write(0, buffer(4 * ALIGNMENT_BYTES))
    assert has_failed.wait(PATIENCE_S)
    time.sleep(0.02)
    assert not future.done()
    assert not future.cancel()
    go_on.set()
    with refused("swap-refused", "broken"):
        future.result(PATIENCE_S)


@pytest.mark.parametrize("most_bytes", [ALIGNMENT_BYTES, 5000])
def test_short_reads_and_writes_go_on(folder: SwapFolder, monkeypatch: pytest.MonkeyPatch, most_bytes: int) -> None:
    def shortened(move: Callable[..., int]) -> Callable[..., int]:
        def moved(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            num_bytes = min(len(buffers[0]), most_bytes)
            is_direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
            # Past the page cache a sector more than a page is claimed; what follows must start at the page again.
            move(descriptor, [buffers[0][: ALIGNMENT_BYTES if is_direct else num_bytes]], offset)
            return num_bytes

        return moved

    monkeypatch.setattr(os, "pwritev", shortened(os.pwritev))
    monkeypatch.setattr(os, "preadv", shortened(os.preadv))
    file, source = folder.allocate("states", NUM_BYTES), buffer(NUM_BYTES).random_(256)
    file.write(0, source).result()
    assert content(file) == bytes(source.tolist())
    target = buffer(NUM_BYTES)
    file.read(0, target).result()
    assert torch.equal(target, source)


def test_a_file_that_was_cut_is_an_error(folder: SwapFolder) -> None:
    file = folder.allocate("states", NUM_BYTES)
    os.truncate(file.path, ALIGNMENT_BYTES + 10)
    with refused("swap-file-cut", "read 8192 bytes at 0 of", str(file.path)):
        file.read(0, buffer(2 * ALIGNMENT_BYTES)).result()
    file.path.unlink()
    for start in (file.read, file.write):
        with refused("swap-refused", str(file.path), os.strerror(errno.ENOENT)):
            start(0, buffer(ALIGNMENT_BYTES)).result()
    assert not file.path.exists()


def test_a_disk_without_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    with small_disk(place, 2**20) as disk:
        SwapFolder.check_free_space(disk.root / "new" / "folder", 2**19)
        with refused("too-little-space", "1.00 MiB", "2.00 MiB"):
            SwapFolder.check_free_space(disk.root / "new" / "folder", 2**21)
        assert list(disk.root.iterdir()) == []
        folder = SwapFolder.open(disk.root, rank=0)
        folder.allocate("fits", 2**18)
        with refused("disk-full", "2.00 MiB", "00001-large"):
            folder.allocate("large", 2**21)
        assert len(list(folder.path.iterdir())) == 2
        assert folder.num_bytes == 2**18
        monkeypatch.setattr(files, "_reserve", os.ftruncate)
        file = folder.allocate("large", 2**21)
        with refused("disk-full", str(file.path)):
            file.write(0, buffer(2**21)).result()
        folder.close()
        disk.remount(read_only=True)
        with refused("swap-refused", os.strerror(errno.EROFS)):
            SwapFolder.open(disk.root, rank=0)


def test_what_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with refused("swap-refused", f"make a swap folder in {root}:"):
            SwapFolder.open(root, rank=0)


@pytest.mark.parametrize("refused_at", ["open", "pwrite"])
def test_the_probe_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_at: str) -> None:
    call = getattr(os, refused_at)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if refused_at == "open":
            os.close(call(*args, **kwargs))  # tmpfs of old makes the file, and then says no
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, refused_at, refuse)
    assert not takes_direct_io(tmp_path)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


# Threads.


def test_the_kinds_of_a_file_take_turns_in_the_order_they_come() -> None:
    lock, entered = io_threads._DirectIoLock(), []
    kinds = {"direct 1": True, "direct 2": True, "plain": False, "direct 3": True}
    leave = {name: threading.Event() for name in kinds}

    def run(name: str) -> None:
        with lock.hold(kinds[name]):
            entered.append(name)
            leave[name].wait(PATIENCE_S)

    def wait_for(names: list[str]) -> None:
        wait_until(lambda: entered == names)
        time.sleep(0.02)  # for one too many to come
        assert entered == names

    threads = [threading.Thread(target=run, args=(name,)) for name in kinds]
    for index, thread in enumerate(threads):
        thread.start()
        assert wait_until(lambda index=index: lock._num_come > index)
    wait_for(["direct 1", "direct 2"])
    leave["direct 1"].set()
    wait_for(["direct 1", "direct 2"])
    for name, others in (("direct 2", ["plain"]), ("plain", ["plain", "direct 3"])):
        leave[name].set()
        wait_for(["direct 1", "direct 2", *others])
    leave["direct 3"].set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert lock._num_running == 0
