"""Exchanges of tensors of any number and size between the ranks of a group, and the group over which sequences lie."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.pool import WorkerPool
from harness.refusals import refusal_of
from harness.training import make_config
from harness.wire_bytes import WireBytes, ring_equivalent_bytes
from shardwise.comm.backends import ProcessGroupFactory, process_group_comm, simulated_comm
from shardwise.comm.collectives import Comm, CommResources, RankPlace
from shardwise.comm.consistency import CallCheck, divergence, hash_of_bits
from shardwise.comm.mesh import Mesh, connect, open_store
from shardwise.comm.records import CommLog
from shardwise.layout.mesh_shape import MeshShape
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.device import Streams

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64)


def make_comm(timeout_s: float = 20.0) -> Comm:
    return process_group_comm(dist.group.WORLD, "cp", CommResources.alone(CPU, timeout_s))  # type: ignore[arg-type]


def make_simulated(rank: int, world_size: int, backend: Any) -> Comm:
    return simulated_comm(RankPlace(rank, world_size, "cp"), CommResources.alone(CPU, 20.0), backend)


def message(source: int, to: int, salt: int) -> list[Tensor]:
    """What one rank sends another: some tensors of several sizes and dtypes, or none."""
    generator = torch.Generator().manual_seed(1000 * source + 10 * to + salt)
    num = (source + 2 * to + salt) % 4
    tensors = []
    for index in range(num):
        shape = (1 + (source + index) % 3, 1 + 5 * to + index)
        values = torch.randint(0, 100, shape, generator=generator)
        tensors.append(values.to(DTYPES[(source + to + index) % len(DTYPES)]))
    return tensors


def messages(rank: int, world_size: int, salt: int) -> tuple[dict[int, list[Tensor]], dict[int, list[Tensor]]]:
    others = [each for each in range(world_size) if each != rank]
    sends = {each: message(rank, each, salt) for each in others}
    receives = {each: [torch.zeros_like(sent) for sent in message(each, rank, salt)] for each in others}
    return sends, {each: tensors for each, tensors in receives.items() if tensors}


def is_there(receives: dict[int, list[Tensor]], rank: int, salt: int) -> bool:
    return all(
        torch.equal(found, sent)
        for source, tensors in receives.items()
        for found, sent in zip(tensors, message(source, rank, salt), strict=True)
    )


def exchange_twice_beside_a_gather(rank: int, world_size: int) -> tuple[bool, bool, list[float], int, float]:
    comm = make_comm()
    full = torch.full((world_size * 3,), -1.0)
    full[rank * 3 : rank * 3 + 3] = rank + 1
    both = [messages(rank, world_size, salt) for salt in (1, 2)]
    with WireBytes() as wire:
        first = comm.exchange(*both[0], "first")
        gathered = comm.all_gather(full, "between")
        second = comm.exchange(*both[1], "second")
        second.wait()
        gathered.wait()
        first.wait()
    counted = sum(each.wire_bytes for each in comm.comm_log.counts.values())
    found = [is_there(receives, rank, salt) for salt, (_, receives) in zip((1, 2), both, strict=True)]
    return found[0], found[1], full.tolist(), counted, float(ring_equivalent_bytes(wire.calls))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_tensor_comes_whole_whatever_else_is_sent(ranks: WorkerPool, num_ranks: int) -> None:
    gathered = [float(rank + 1) for rank in range(num_ranks) for _ in range(3)]
    for first, second, full, counted, sent in ranks(num_ranks).run(exchange_twice_beside_a_gather):
        assert first
        assert second
        assert full == gathered
        assert counted == sent


def exchange_once(rank: int, world_size: int) -> tuple[int, int, str]:
    comm = make_comm()
    sends = {0: [torch.ones(5, dtype=torch.bfloat16), torch.ones(2, 3)]} if rank == 2 else {}
    receives = {2: [torch.zeros(5, dtype=torch.bfloat16), torch.zeros(2, 3)]} if rank == 0 else {}
    comm.exchange(sends, receives, "some").wait()
    comm.exchange({}, {}, "nothing").wait()
    assert all(bool(each.all()) for tensors in receives.values() for each in tensors)
    count = comm.comm_log.counts["cp", "exchange"]
    return count.num_calls, count.wire_bytes, str(comm.comm_log.recent[0].note())


def test_each_rank_counts_what_it_sends(ranks: WorkerPool) -> None:
    assert ranks(3).run(exchange_once) == [
        (2, 0, "exchange #1 of some (0 bytes sent over cp)"),
        (2, 0, "exchange #1 of some (0 bytes sent over cp)"),
        (2, 34, "exchange #1 of some (34 bytes sent over cp)"),
    ]


def exchange_checked(rank: int, world_size: int, names: Sequence[str]) -> tuple[str, str]:
    comm = make_comm()
    store = open_store()
    assert store is not None
    comm.comm_log.check = CallCheck(store, rank, 20.0)

    def run() -> None:
        for name in names[rank].split():
            sends, receives = messages(rank, world_size, 1)
            comm.exchange(sends, receives, name).wait()
            assert is_there(receives, rank, 1)

    return refusal_of(run)


def test_checked_exchanges_may_differ_in_size_but_not_in_name(ranks: WorkerPool) -> None:
    assert ranks(3).run(exchange_checked, ["keys values"] * 3) == [("", "")] * 3
    refusals = ranks(3).run(exchange_checked, ["keys values", "keys grads", "keys values"])
    assert len(set(refusals)) == 1
    code, message = refusals[0]
    assert code == "collectives-differ"
    assert message.startswith("rank 1 is at exchange #2 of grads (")
    assert "ranks 0, 2 at exchange #2 of values (" in message


def test_logs_distinguish_exchanges_of_other_sizes_from_other_calls() -> None:
    logs = [CommLog(rank) for rank in range(2)]
    groups = [each.open_group("cp", (0, 1)) for each in logs]
    notes = {rank: logs[rank].add_exchange("keys", groups[rank], 10 * rank).note() for rank in range(2)}
    assert divergence(notes) == ""
    other = {0: notes[0], 1: logs[1].add("all_gather", "keys", groups[1], torch.zeros(2), passes=1).note()}
    assert "exchange #1 of keys" in divergence(other)


def lose_a_rank(rank: int, port: int, answers: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    comm = make_comm(timeout_s=15.0)
    comm.sum_scalars(torch.zeros(1, dtype=torch.float64), "meet")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    answers.send(refusal_of(lambda: comm.exchange({1: [torch.ones(3)]}, {1: [torch.ones(3)]}, "blocks.3.keys").wait()))
    os._exit(0)


def test_a_killed_rank_is_named_by_the_exchange() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    processes = [context.Process(target=lose_a_rank, args=(rank, store.port, theirs)) for rank in range(2)]
    for process in processes:
        process.start()
    assert ours.poll(30)
    code, message = ours.recv()
    for process in processes:
        process.join(10)
    assert code == "collective-failed"
    assert message.startswith("rank 0 failed in exchange #2 of blocks.3.keys over cp (2 ranks): another rank died")


def wait_too_long(rank: int, world_size: int) -> tuple[str, str]:
    comm = make_comm(timeout_s=0.5)
    if rank == 1:
        return "", ""
    return refusal_of(lambda: comm.exchange({}, {1: [torch.zeros(4)]}, "blocks.0").wait())


def test_a_late_rank_is_named_by_the_exchange(ranks: WorkerPool) -> None:
    code, message = ranks(2).run(wait_too_long)[0]
    assert code == "collective-failed"
    assert "rank 0 failed in exchange #1 of blocks.0 over cp (2 ranks)" in message


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_simulated_ranks_send_nothing_but_it_is_counted(backend: Any) -> None:
    comm = make_simulated(1, 4, backend)
    received = torch.full((2,), 7.0)
    comm.exchange({3: [torch.ones(4)]}, {0: [received]}, "keys").wait()
    assert received.tolist() == [7.0, 7.0]
    assert comm.comm_log.counts["cp", "exchange"].wire_bytes == 16


def test_one_rank_exchanges_nothing() -> None:
    comm = make_simulated(0, 1, "gloo")
    comm.exchange({}, {}, "keys").wait()
    assert not comm.comm_log.counts


@pytest.mark.parametrize(
    ("sends", "peer"),
    [
        ({1: [torch.ones(2)]}, "rank 1"),
        ({2: [torch.ones(2)]}, "rank 2"),
        ({0: [torch.ones(2), torch.ones(0)]}, "and 0"),
        ({0: [torch.ones(2, 3).T]}, "and 0"),
    ],
)
def test_what_is_no_exchange_is_refused(sends: dict[int, list[Tensor]], peer: str) -> None:
    comm = make_simulated(1, 2, "gloo")
    with pytest.raises(ValueError, match=peer):
        comm.exchange(sends, {}, "keys")
    assert not comm.comm_log.counts


def context_of(rank: int, world_size: int, cp: int) -> tuple[tuple[int, ...], bool, list[float]]:
    shape = MeshShape(dp_shard=world_size // cp, cp=cp)
    config = make_config(1, {"mesh": {"dp_shard": world_size // cp}}).resolve(world_size // cp)
    mesh = Mesh(shape, 20.0)
    comms = connect(ProcessGroupFactory(mesh), shape, config, CPU, Streams(CPU), BufferPool(CPU))
    got = torch.zeros(1)
    context = comms.context
    context.sum_scalars(torch.zeros(1, dtype=torch.float64), "meet")
    assert context.process_group is not None
    ranks = tuple(dist.get_process_group_ranks(context.process_group))
    # The sum of one rank makes no collective.
    assert [call.group.ranks for call in context.comm_log.recent] == [ranks] * (context.world_size > 1)
    if context.world_size > 1:
        right, left = (context.rank + 1) % cp, (context.rank - 1) % cp
        context.exchange({right: [torch.tensor([float(rank)])]}, {left: [got]}, "keys").wait()
    is_own = all(context is not each for each in (comms.data, comms.shards, comms.all, comms.model))
    dist.barrier()
    mesh.close()
    return ranks, is_own, got.tolist()


def test_the_ranks_of_a_sequence_have_a_group_of_their_own(ranks: WorkerPool) -> None:
    assert ranks(4).run(context_of, 2) == [
        ((0, 1), True, [1.0]),
        ((0, 1), True, [0.0]),
        ((2, 3), True, [3.0]),
        ((2, 3), True, [2.0]),
    ]
    assert [found[:2] for found in ranks(2).run(context_of, 2)] == [((0, 1), True)] * 2
    assert [found[0] for found in ranks(2).run(context_of, 1)] == [(0,), (1,)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_hashes_tell_values_apart_that_a_weighted_sum_does_not(dtype: torch.dtype) -> None:
    values = (0, 1, 2, 64)
    found = {int(hash_of_bits(torch.full((2**21,), value, dtype=dtype))) % 2**53 for value in values}
    swapped = torch.arange(2**21).remainder(7).to(dtype)
    found |= {int(hash_of_bits(each)) % 2**53 for each in (swapped, swapped.flip(0))}
    assert len(found) == 6
