"""The seam to accelerators: which calls each kind of device gets, and that what it lacks is not asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.fake_device import FREE_BYTES, TOTAL_BYTES, FakeDevice
from harness.refusals import refused
from shardwise import initialize
from shardwise.config.resolve import TiersConfig
from shardwise.config.sections import RunConfig
from shardwise.launch.environment import RankEnv
from shardwise.launch.process_group import start_process_group
from shardwise.runtime import device as seam
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.device import (
    KINDS,
    AllocatorStats,
    Event,
    P2PStreamKey,
    Streams,
    backends_of,
    choose_kind,
    current_device,
    device_of_backends,
    kind_of,
    wanted_kind,
)
from shardwise.runtime.memory_tracker import MemoryTracker
from shardwise.runtime.pinned_memory import ALIGNMENT_BYTES, host_pages, host_zeros

ACCELERATORS = tuple(name for name in KINDS if name != "cpu")
WITH_STREAMS = tuple(name for name in ACCELERATORS if KINDS[name].queues == "streams")
CPU = torch.device("cpu")


@pytest.fixture
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    made = FakeDevice(request.param)
    made.install(monkeypatch)
    return made


def of_kinds(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fake", names, indirect=True)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without accelerators."""
    FakeDevice("cuda", num_devices=0).install(monkeypatch)


@of_kinds(*ACCELERATORS)
def test_a_kind_that_is_there_is_used(fake: FakeDevice) -> None:
    kind = choose_kind(RunConfig.model_validate({"device": fake.name}).device)
    assert (kind, seam.num_devices(kind)) == (KINDS[fake.name], 1)
    if fake.name != "npu":  # of which this torch makes no device
        assert current_device(kind) == fake.device
    seam.use_device(fake.device)
    assert fake.calls[-1] == ("set_device_index", (fake.device,))


@of_kinds(*ACCELERATORS)
def test_auto_takes_what_can_train_with_other_ranks(fake: FakeDevice) -> None:
    assert choose_kind("auto").name == (fake.name if fake.name != "mps" else "cpu")


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_kind_that_is_not_there_is_refused(name: Any) -> None:
    with refused("no-gpu", f"run.device={name}"):
        choose_kind(name)
    assert wanted_kind(name) is KINDS[name]  # a dry run simulates it
    assert choose_kind("auto").is_cpu


def test_back_ends_are_c10d_s_defaults() -> None:
    for name in set(ACCELERATORS) - {"npu"}:  # whose package names its own
        assert KINDS[name].backend == dist.get_default_backend_for_device(name)


@pytest.mark.parametrize(
    ("name", "backends"), [("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl"), ("npu", "cpu:gloo,npu:hccl")]
)
def test_ranks_meet_over_gloo_and_the_device_s_back_end(name: str, backends: str) -> None:
    assert backends_of(KINDS[name]) == backends


@of_kinds("cuda", "xpu")
def test_the_device_of_a_process_group_is_its_back_end_s(fake: FakeDevice) -> None:
    assert device_of_backends(backends_of(KINDS[fake.name])) == fake.device
    assert device_of_backends(f"{fake.name}:{KINDS[fake.name].backend}") == fake.device  # started without gloo
    assert device_of_backends(f"cpu:gloo,{fake.name}:gloo") == CPU


@of_kinds(*WITH_STREAMS)
def test_a_side_stream_waits_and_is_left_again(fake: FakeDevice) -> None:
    streams = Streams(fake.device)
    with streams.side_stream("gather"):
        event = Event.record(fake.device)
    event.wait()
    event.wait_on_host()
    assert event.is_reached()
    names = [name for name in fake.names() if name != "current_stream"]
    assert names == ["wait_stream", "set_stream", "record_event", "set_stream", "wait", "event synchronize"]
    before = len(fake.calls)
    with Streams(fake.device, overlap=False).side_stream("gather"):
        pass
    assert len(fake.calls) == before
    with Streams(fake.device, overlap=False).side_stream(P2PStreamKey("send", 1)):  # messages always have their own
        pass
    assert fake.names()[before:].count("set_stream") == 2


@of_kinds("mps")
def test_a_device_with_one_queue_has_no_side_streams(fake: FakeDevice) -> None:
    streams = Streams(fake.device)
    for name in ("gather", P2PStreamKey("send", 1)):
        with streams.side_stream(name):
            event = Event.record(fake.device)
    event.wait()
    assert (fake.calls, event.is_reached()) == ([], False)
    pool = BufferPool(fake.device, allocate=lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
    pool.release(pool.acquire(100, torch.float32))
    assert fake.calls == []
    event.wait_on_host()
    assert fake.calls == [("synchronize", (fake.device,))]


@of_kinds(*ACCELERATORS)
@pytest.mark.parametrize("asked", [True, False])
def test_host_memory_is_pinned_as_the_device_can(fake: FakeDevice, asked: bool) -> None:
    if fake.name == "cuda":  # see test_host_memory.py
        return
    pinned_for = fake.device if asked and TiersConfig().pin_memory else None
    pages, zeros = host_pages(5000, pinned_for), host_zeros(7, torch.float32, pinned_for)
    assert (pages.numel(), pages.data_ptr() % ALIGNMENT_BYTES, zeros.tolist()) == (8192, 0, [0.0] * 7)
    assert fake.names() == ["pin_memory"] * 2 * (asked and fake.name != "mps")


@of_kinds("mps", "npu")
def test_no_fp64_is_asked_of_a_device_without(fake: FakeDevice) -> None:
    assert seam.number_dtype(fake.device) == torch.float32


@pytest.mark.parametrize("has_fp64", [True, False])
def test_what_depends_on_the_product_is_asked_of_it(monkeypatch: pytest.MonkeyPatch, has_fp64: bool) -> None:
    fake = FakeDevice("xpu", has_fp64=has_fp64)
    fake.install(monkeypatch)
    assert seam.number_dtype(fake.device) == (torch.float64 if has_fp64 else torch.float32)
    assert seam.number_dtype(torch.device("cuda", 0)) == seam.number_dtype(CPU) == torch.float64


@of_kinds(*ACCELERATORS)
def test_memory_figures(fake: FakeDevice) -> None:
    assert seam.total_bytes(fake.device) == TOTAL_BYTES
    assert seam.free_bytes(fake.device) == (TOTAL_BYTES - 4 if fake.name == "mps" else FREE_BYTES + 3)
    if kind_of(fake.device).counts_memory:
        assert seam.allocator_stats(fake.device) == AllocatorStats(5, 9, 20)
        seam.reset_peak(fake.device)
        assert fake.calls[-1] == ("reset_peak_memory_stats", (fake.device,))
    else:  # the tracker counts by itself
        assert MemoryTracker(fake.device).snapshot().total_bytes == 0
    seam.empty_cache(fake.device)
    assert fake.names()[-2:] == ["synchronize", "empty_cache"]


@of_kinds(*ACCELERATORS)
def test_generators_are_restored(fake: FakeDevice) -> None:
    with seam.forked_rng(fake.device, seed=3):
        torch.rand(1)
    place = () if fake.name == "mps" else (fake.device,)
    names = ["get_rng_state", "enter device", "manual_seed", "leave device", "set_rng_state"]
    assert fake.names() == names
    assert fake.calls[0][1] == place
    assert fake.calls[2][1] == (3,)
    assert fake.calls[4][1][1:] == place


def test_a_cpu_asks_nothing_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDevice("cuda")
    fake.install(monkeypatch)
    seam.use_device(CPU)
    seam.synchronize(CPU)
    seam.empty_cache(CPU)
    event = Event.record(CPU)
    event.wait()
    event.wait_on_host()
    with Streams(CPU).side_stream("gather"), seam.forked_rng(CPU, seed=1):
        pass
    assert (seam.rng_state(CPU), seam.free_bytes(CPU), seam.num_devices(KINDS["cpu"])) == (None, None, 0)
    assert host_zeros(3, torch.float32, CPU).tolist() == [0.0] * 3
    assert fake.calls == []


@of_kinds("mps")
def test_a_dtype_that_a_device_lacks_is_refused_before_ranks_meet(fake: FakeDevice) -> None:
    with refused("device-without-fp64", "precision.param=fp64", "run.device=mps"):
        initialize(torch.nn.Linear(2, 2), {"run": {"device": "mps"}, "precision": {"param": "fp64"}})


@of_kinds("mps", "xpu")
def test_ranks_without_a_device_of_their_own_are_refused(fake: FakeDevice) -> None:
    env = RankEnv(1, 1, 2, 2, "127.0.0.1", 29500, attempt=0, launcher="torchrun")
    with refused("rank-without-gpu", "local rank 1", "1 GPUs"):
        start_process_group(env, KINDS[fake.name].name, timeout_s=1.0)
