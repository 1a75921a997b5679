"""Collectives: what they sum, in which dtype, what they count, and what they say when a peer is gone."""

from __future__ import annotations

import os
import signal
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from harness.pool import RankError, WorkerPool
from harness.refusals import refusal_of
from shardwise.comm.backends import NcclComm, process_group_comm
from shardwise.comm.collectives import Comm, CommResources, RankPlace
from shardwise.runtime.buffer_pool import BufferPool

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def make_comm(timeout_s: float = 20.0, pool: BufferPool | None = None) -> Comm:
    device = torch.device("cpu")
    return process_group_comm(dist.group.WORLD, "dp_shard", CommResources.alone(device, timeout_s, pool))


def gather(rank: int, world_size: int, dtype: torch.dtype) -> list[float]:
    full = torch.full((world_size * 3,), -1.0, dtype=dtype)
    full[rank * 3 : rank * 3 + 3] = rank + 1
    make_comm().all_gather(full, "test").wait()
    return full.tolist()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_gather_fills_every_slice(ranks: WorkerPool, num_ranks: int, dtype: torch.dtype) -> None:
    expected = [float(rank + 1) for rank in range(num_ranks) for _ in range(3)]
    assert ranks(num_ranks).run(gather, dtype) == [expected] * num_ranks


def reduce(rank: int, world_size: int, wire: torch.dtype, total: torch.dtype, accumulate: bool) -> list[float]:
    comm = make_comm()
    source = torch.arange(world_size * 2, dtype=torch.float32).add(10 * rank).to(wire)
    out = torch.full((2,), 100.0, dtype=total)
    comm.reduce_scatter(source, out, accumulate=accumulate, name="test").wait()
    return out.tolist()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("wire", "total"),
    [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float64, torch.float64)],
)
def test_reduce_scatter_leaves_the_own_slice(
    ranks: WorkerPool, num_ranks: int, accumulate: bool, wire: torch.dtype, total: torch.dtype
) -> None:
    base = 100.0 if accumulate else 0.0
    others = 10.0 * sum(range(num_ranks))
    for rank, out in enumerate(ranks(num_ranks).run(reduce, wire, total, accumulate)):
        assert out == [base + others + num_ranks * (2 * rank + i) for i in range(2)]


def sum_close_numbers(rank: int, world_size: int) -> tuple[float, float]:
    """1 + 2^-9 is 1 in bf16: the sum must have run in fp32, and only the result may be rounded."""
    comm = make_comm()
    source = torch.full((2,), 1.0 if rank == 0 else 2.0**-9, dtype=torch.bfloat16)
    out = torch.zeros(1)
    comm.reduce_scatter(source, out, accumulate=False, name="test").wait()
    buffer = torch.full((2,), 1.0 if rank == 0 else 2.0**-9)
    comm.all_reduce(buffer, torch.bfloat16, "test").wait()
    return out.item(), buffer[0].item()


def test_bf16_is_summed_in_fp32(ranks: WorkerPool) -> None:
    assert ranks(2).run(sum_close_numbers) == [(1.0 + 2.0**-9, 1.0)] * 2


def all_reduce(rank: int, world_size: int, dtype: torch.dtype, wire: torch.dtype) -> tuple[list[float], int]:
    pool = BufferPool(torch.device("cpu"))
    comm = make_comm(pool=pool)
    buffer = torch.arange(world_size * 2, dtype=dtype).add(rank)
    comm.all_reduce(buffer, wire, "test").wait()
    return buffer.tolist(), pool.live_bytes


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "wire"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
def test_all_reduce_gives_all_ranks_the_sum(
    ranks: WorkerPool, num_ranks: int, dtype: torch.dtype, wire: torch.dtype
) -> None:
    expected = [float(num_ranks * i + sum(range(num_ranks))) for i in range(2 * num_ranks)]
    assert ranks(num_ranks).run(all_reduce, dtype, wire) == [(expected, 0)] * num_ranks


def sum_activations(
    rank: int, world_size: int, dtype: torch.dtype
) -> tuple[list[float], list[float], list[float], list[float], int]:
    pool = BufferPool(torch.device("cpu"))
    comm = make_comm(pool=pool)
    source = torch.arange(world_size * 2, dtype=dtype).add(10 * rank)
    buffer, out, own = source.clone(), torch.full_like(source, -1), torch.full((2,), -1, dtype=dtype)
    comm.sum_in_place(buffer, "test")
    comm.start_sum(source, out, "test", stream=None).wait()
    comm.scatter_sum(source, own, "test", stream=None).wait()
    return buffer.tolist(), out.tolist(), own.tolist(), source.tolist(), pool.live_bytes


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_activations_are_summed(ranks: WorkerPool, num_ranks: int, dtype: torch.dtype) -> None:
    total = [float(num_ranks * i + 10 * sum(range(num_ranks))) for i in range(2 * num_ranks)]
    for rank, results in enumerate(ranks(num_ranks).run(sum_activations, dtype)):
        source = [float(i + 10 * rank) for i in range(2 * num_ranks)]
        assert results == (total, total, total[2 * rank : 2 * rank + 2], source, 0)


def count(rank: int, world_size: int) -> tuple[dict[tuple[str, str], tuple[int, int]], list[str]]:
    comm = make_comm()
    full = torch.zeros(world_size * 4)
    comm.all_gather(full, "first").wait()
    comm.all_gather(full, "second").wait()
    comm.reduce_scatter(full, torch.zeros(4), accumulate=False, name="third").wait()
    comm.sum_scalars(torch.ones(1, dtype=torch.float64), "fourth", known=[True, 2.0])
    return {key: (each.num_calls, each.wire_bytes) for key, each in comm.comm_log.counts.items()}, [
        str(call) for call in comm.comm_log.recent
    ]


def test_collectives_are_counted_and_named(ranks: WorkerPool) -> None:
    counts, names = ranks(4).run(count)[0]
    assert counts == {
        ("dp_shard", "all_gather"): (2, 2 * 3 * 16),
        ("dp_shard", "reduce_scatter"): (1, 3 * 16),
        ("dp_shard", "all_reduce_scalars"): (1, 2 * 3 * 24 // 4),
    }
    assert names[0] == "all_gather #1 of first over dp_shard (4 ranks)"
    assert names[3].startswith("all_reduce_scalars #4 of fourth")


def as_nccl(rank: int, world_size: int, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """A gather and a reduction as on NCCL, which is not here: gloo has the functions of the same names."""
    comm = NcclComm(RankPlace(rank, world_size, "dp_shard"), CommResources.alone(CPU, 20.0), dist.group.WORLD)
    full, out = torch.full((world_size * 3,), float(rank + 1), dtype=dtype), torch.zeros(2, dtype=dtype)
    source = torch.arange(world_size * 2).add(10 * rank).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comm.all_gather(full, "test").wait()
        comm.reduce_scatter(source, out, accumulate=False, name="test").wait()
    return full.tolist(), out.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nccl_s_functions_of_this_torch_give_no_warnings(ranks: WorkerPool, dtype: torch.dtype) -> None:
    for rank, (full, out) in enumerate(ranks(2).run(as_nccl, dtype)):
        assert full == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
        assert out == [10.0 + 4 * rank, 12.0 + 4 * rank]


@pytest.mark.parametrize("names", [("all_gather_single",), ("all_gather_into_tensor",)])
def test_any_torch_s_name_of_a_gather_is_called(names: tuple[str, ...]) -> None:
    called = []
    c10d = SimpleNamespace(**{name: lambda full, own, group, name=name: called.append(name) for name in names})
    comm = NcclComm(RankPlace(0, 2, "dp_shard"), CommResources.alone(CPU, 20.0), None, c10d)
    comm.all_gather(torch.zeros(4), "test").wait()
    assert called == list(names)


def test_one_rank_asks_no_back_end_for_its_own_numbers() -> None:
    """On NCCL that would make a communicator, which takes seconds and memory of the GPU."""
    nothing = SimpleNamespace()  # has no collectives
    comm = NcclComm(RankPlace(0, 1, "dp_shard"), CommResources.alone(CPU, 20.0), None, nothing)
    comm.is_simulated = False
    values = torch.tensor([1.5, -2.0], dtype=torch.float64)
    assert comm.sum_scalars(values, "sums", [3.0]) == [1.5, -2.0, 3.0]
    assert comm.max_scalars(values, "largest") == [1.5, -2.0]


def wait_for_the_dead(rank: int, world_size: int) -> str:
    comm = make_comm(timeout_s=15.0)
    comm.sum_scalars(torch.zeros(1, dtype=torch.float64), "meet")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.reduce_scatter(torch.zeros(8), torch.zeros(4), accumulate=False, name="blocks.3").wait()
    return "not reached"


def test_dead_peer_is_named_by_the_collective(ranks: WorkerPool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(wait_for_the_dead)
    has_died = (caught.value.rank, caught.value.kind) == (1, "died")
    assert has_died or "rank 0 failed in reduce_scatter #2 of blocks.3" in str(caught.value)


def wait_too_long(rank: int, world_size: int) -> tuple[str, str]:
    comm = make_comm(timeout_s=0.5)
    if rank == 1:
        return "", ""
    return refusal_of(lambda: comm.all_gather(torch.zeros(4), "blocks.0").wait())


def test_timeout_is_short_and_named(ranks: WorkerPool) -> None:
    code, message = ranks(2).run(wait_too_long)[0]
    assert code == "collective-failed"
    assert "rank 0 failed in all_gather #1 of blocks.0 over dp_shard (2 ranks)" in message
