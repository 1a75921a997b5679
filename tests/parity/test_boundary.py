"""Boundaries between stages: any pytree arrives as it was sent, whatever came before, in as many bytes as planned."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.pool import RankError, WorkerPool
from harness.refusals import refusal_of, refused
from harness.time_outs import fail_after
from harness.waiting import PATIENCE_S
from shardwise.comm.backends import ProcessGroupFactory, SimulatedFactory
from shardwise.comm.mesh import Mesh
from shardwise.comm.p2p import P2PChannel, P2PChannels
from shardwise.comm.records import CommLog
from shardwise.layout.mesh_shape import MeshShape
from shardwise.pipeline import boundary
from shardwise.pipeline.boundary import Key, LocalEnd, RemoteEnd, leaves_with_gradient
from shardwise.pipeline.pytree_codec import take_apart
from shardwise.runtime.device import Streams
from shardwise.runtime.torch_private import fake_tensors, pytree

CPU = torch.device("cpu")
WORD_BYTES = 8
STEP = 5  # micro-batches of a step
Counts = dict[str, tuple[int, int]]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
SHAPES = [(), (0,), (3,), (2, 3), (4, 0, 2), (5, 1, 2)]


class Pair(NamedTuple):
    left: Any
    right: Any


class OneLine(P2PChannels):
    """As on NCCL: tensors from one rank to another pass in one order, without tags."""

    def open(self, ends: tuple[int, int], name: str, tag: int, on_host: bool = False) -> P2PChannel:
        return super().open(ends, name, tag if on_host else 10_000 + ends[0], on_host)


def nothing() -> None:
    pass


def keys(sizes: Iterable[int]) -> list[Key]:
    """Of micro-batches of one tensor with so many elements."""
    return [(True, ((size,),)) for size in sizes]


def post(end: RemoteEnd, micro_batch: int) -> None:
    end.post(micro_batch, nothing)


def receive(end: RemoteEnd, micro_batch: int) -> Any:
    post(end, micro_batch)
    return end.take(micro_batch)


@contextmanager
def none_packed() -> Iterator[None]:
    """Inside no value is small enough for one message."""
    with patch.object(boundary, "PACKED_BYTES", -1):
        yield


def make_pipes(
    world_size: int, kind: type[P2PChannels] = P2PChannels, timeout_s: float = 20.0
) -> tuple[P2PChannels, CommLog]:
    shape = MeshShape(pp=world_size)
    network = ProcessGroupFactory(Mesh(shape, timeout_s))
    comm_log = CommLog(network.rank)
    return kind(network, shape, CPU, timeout_s, Streams(CPU), comm_log), comm_log


def random_tensor(rng: random.Random) -> Tensor:
    dtype, shape = rng.choice(DTYPES), rng.choice(SHAPES)
    generator = torch.Generator().manual_seed(rng.randrange(2**30))
    tensor = torch.randint(-9, 9, shape, generator=generator).to(dtype)
    if tensor.dim() > 1 and rng.random() < 0.3:
        tensor = tensor.transpose(0, 1)
    if dtype.is_complex and rng.random() < 0.5:
        tensor = tensor.conj()
    return tensor.requires_grad_((dtype.is_floating_point or dtype.is_complex) and rng.random() < 0.5)


def random_tree(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(12 if depth < 3 else 6)
    if kind < 4:
        return random_tensor(rng)
    if kind < 6:
        return rng.choice([None, True, 3, -0.5, float("inf"), "text", torch.float16, torch.Size([2, 3])])
    children = [random_tree(rng, depth + 1) for _ in range(rng.randrange(1, 4))]
    if kind == 6:
        return children
    if kind == 7:
        return tuple(children)
    if kind == 8:
        return Pair(children[0], children[-1])
    if kind == 9:
        return OrderedDict((f"key{index}", child) for index, child in enumerate(children))
    if kind == 10:
        return defaultdict(list, {(index, "x"): child for index, child in enumerate(children)})
    return dict(enumerate(children))


def refilled(value: Any, rng: random.Random) -> Any:
    """The same tree with other numbers, and perhaps another plain value."""

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return torch.full_like(leaf, rng.randrange(2), requires_grad=leaf.requires_grad)
        return rng.randrange(9) if type(leaf) is int else leaf

    return pytree.tree_map(fill, value)


def random_values(seed: int, num_values: int) -> list[Any]:
    """Trees that stay the same for a while."""
    rng = random.Random(seed)
    values = [random_tree(rng)]
    old = [values[0]]
    while len(values) < num_values:
        fate = rng.random()
        if fate < 0.6:
            values.append(refilled(values[-1], rng))
        elif fate < 0.75:
            values.append(refilled(rng.choice(old), rng))
        else:
            values.append(random_tree(rng))
            old.append(values[-1])
    return values


def difference(received: Any, sent: Any) -> str:
    """What is not as it was sent; empty if nothing."""
    if type(received) is not type(sent):
        return f"{type(received)} for {type(sent)}"
    spec, its_spec = take_apart(received)[0], take_apart(sent)[0]
    if spec != its_spec:
        return f"{spec} for {its_spec}"
    for leaf, its_leaf in zip(pytree.tree_leaves(received), pytree.tree_leaves(sent), strict=True):
        if not isinstance(leaf, Tensor):
            if type(leaf) is not type(its_leaf) or leaf != its_leaf:
                return f"{leaf!r} for {its_leaf!r}"
        elif leaf.dtype != its_leaf.dtype or leaf.shape != its_leaf.shape or not torch.equal(leaf, its_leaf):
            return f"{leaf} for {its_leaf}"
        elif leaf.requires_grad != its_leaf.requires_grad or not leaf.is_leaf:
            return f"requires_grad={leaf.requires_grad} for {its_leaf.requires_grad}"
    return ""


def keys_of(values: list[Any], seed: int) -> list[Key]:
    """Keys of which each stands for many values, or for few."""
    specs = [take_apart(value)[0] for value in values]
    return keys(len(spec.tensors) % 3 if seed % 2 else sum(map(ord, spec.tree)) for spec in specs)


def exchange(rank: int, world_size: int, seed: int) -> list[str]:
    """Send 50 values and receive 50 others, in steps, at an own pace."""
    pipes, _ = make_pipes(world_size)
    ends = [RemoteEnd(pipes, index, (index, 1 - index), [Pair]) for index in range(2)]
    out, back = ends[rank], ends[1 - rank]
    pace = random.Random(100 * seed + rank)
    values, awaited = random_values(seed + rank, 50), random_values(seed + 1 - rank, 50)
    differences: list[str] = []
    for start in range(0, 50, STEP):
        given, expected = values[start : start + STEP], awaited[start : start + STEP]
        out.begin_step(keys_of(given, seed))
        back.begin_step(keys_of(expected, seed))
        num_sent = num_posted = num_taken = 0
        while num_taken < STEP:
            fate = pace.random()
            if fate < 0.4 and num_sent < STEP:
                out.send(num_sent, given[num_sent])
                num_sent += 1
            elif fate < 0.7 and num_posted < STEP:
                post(back, num_posted)
                num_posted += 1
            elif num_taken < num_posted and (num_sent == STEP or num_sent > num_taken):
                differences.append(difference(back.take(num_taken), expected[num_taken]))
                num_taken += 1
        out.finish()
    return [f"{index}: {text}" for index, text in enumerate(differences) if text]


def exchange_unpacked(rank: int, world_size: int, seed: int) -> list[str]:
    with none_packed():
        return exchange(rank, world_size, seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("how", [exchange, exchange_unpacked])
def test_any_values_pass_both_ways_at_any_pace(ranks: WorkerPool, how: Any, seed: int) -> None:
    assert ranks(2).run(how, 10 * seed + seed % 2) == [[], []]


def pass_in_one_line(rank: int, world_size: int, seed: int) -> list[str]:
    """Values of two boundaries from rank 0 to rank 1, in an order that both know, as NCCL demands."""
    pipes, _ = make_pipes(world_size, OneLine)
    ends = [RemoteEnd(pipes, index, (0, 1), [Pair]) for index in range(2)]
    values = [random_values(seed + index, 30) for index in range(2)]
    rng, differences = random.Random(seed), []
    for start in range(0, 30, STEP):
        for end, each in zip(ends, values, strict=True):
            end.begin_step(keys_of(each[start : start + STEP], seed))
        which = [index for index in range(2) for _ in range(STEP)]
        rng.shuffle(which)
        turns = [(index, which[:place].count(index)) for place, index in enumerate(which)]
        if rank == 0:
            for index, micro_batch in turns:
                ends[index].send(micro_batch, values[index][start + micro_batch])
            for end in ends:
                end.finish()
            continue
        for index, micro_batch in turns:
            post(ends[index], micro_batch)
        rng.shuffle(turns)
        for index, micro_batch in turns:
            received = ends[index].take(micro_batch)
            differences.append(difference(received, values[index][start + micro_batch]))
        rng = random.Random(seed + start)
    return [text for text in differences if text]


@pytest.mark.parametrize("seed", range(3))
def test_boundaries_share_a_line_without_tags(ranks: WorkerPool, seed: int) -> None:
    assert ranks(2).run(pass_in_one_line, seed) == [[], []]


def train_three_stages(rank: int, world_size: int) -> list[Any]:
    """y = 3 (2 x + 1), of which the middle stage passes on a part that gets no gradient."""
    pipes, _ = make_pipes(world_size)
    before = RemoteEnd(pipes, rank - 1, (rank - 1, rank)) if rank > 0 else None
    after = RemoteEnd(pipes, rank, (rank, rank + 1)) if rank < 2 else None
    results: list[Any] = []
    for step in range(4):
        for end in (before, after):
            if end is not None:
                end.begin_step(keys([2 + step // 2]))
        x = torch.full((2 + step // 2,), float(step), requires_grad=True)
        given = {"x": x, "unused": torch.ones(1, requires_grad=True)} if before is None else receive(before, 0)
        if after is None:
            (3 * given["x"]).sum().backward()
        else:
            output = {"x": 2 * given["x"] + rank, "unused": given["unused"] * 1}
            after.send(0, output)
            leaves, gradients = leaves_with_gradient(output), receive(after, 0)
            results.append([None if each is None else each.tolist() for each in gradients])
            pairs = [(leaf, each) for leaf, each in zip(leaves, gradients, strict=True) if each is not None]
            torch.autograd.backward([leaf for leaf, _ in pairs], [each for _, each in pairs])
        if before is not None:
            before.send(0, [leaf.grad for leaf in leaves_with_gradient(given)])
            before.finish()
        results.append(given["x"].tolist())
    return results


def test_gradients_are_sent_back_and_none_stays_none(ranks: WorkerPool) -> None:
    first, middle, last = ranks(3).run(train_three_stages)
    sizes = [2, 2, 3, 3]
    assert first[::2] == [[[6.0] * size, None] for size in sizes]
    assert middle[::2] == [[[3.0] * size, None] for size in sizes]
    assert last == [[2 * 2.0 * step + 1] * size for step, size in enumerate(sizes)]


def count_bytes(rank: int, world_size: int, steps: list[list[int]], is_packed: bool = True) -> Counts:
    """Of steps whose micro-batches have so many rows; all have one key."""
    pipes, comm_log = make_pipes(world_size)
    end = RemoteEnd(pipes, 0, (0, 1))
    with patch.object(boundary, "PACKED_BYTES", 2**18 if is_packed else -1):
        for sizes in steps:
            end.begin_step(keys([0] * len(sizes)))
            for micro_batch, size in enumerate(sizes):
                value = {"hidden": torch.ones(size, 4), "step": 1}
                if rank == 0:
                    end.send(micro_batch, value)
                else:
                    receive(end, micro_batch)
            end.finish()
    return counts_of(comm_log)


def counts_of(comm_log: CommLog) -> Counts:
    return {op: (count.num_calls, count.wire_bytes) for (_, op), count in comm_log.counts.items()}


# Agreed after a step in which all were equal: the second step's last value is another, and the third's are not agreed.
STEPS = [[3, 3], [3, 3, 5], [5, 5], [5, 5]]


def expected_bytes() -> tuple[int, int]:
    text = json.dumps(
        [json.dumps(["builtins.dict", ["list", ["hidden", "step"]], [0, [1]]]), [[[3, 4], "float32", False]]]
    )
    num_values, unagreed, wasted = 9, [3, 3, 5, 5, 5], [3]
    agreed = [3, 3, 5, 5]
    num_calls = num_values + 2 * len(unagreed)
    tensor_bytes = 16 * sum(unagreed + wasted + agreed)
    return num_calls, WORD_BYTES * num_values + len(text) * len(unagreed) + tensor_bytes


def test_bytes_are_counted_exactly(ranks: WorkerPool) -> None:
    num_calls, num_bytes = expected_bytes()
    assert ranks(2).run(count_bytes, STEPS) == [{"send": (num_calls, num_bytes)}, {"receive": (num_calls, 0)}]
    num_calls += 5  # what is agreed is a message of its own
    assert ranks(2).run(count_bytes, STEPS, False) == [{"send": (num_calls, num_bytes)}, {"receive": (num_calls, 0)}]


def drop_and_close(rank: int, world_size: int) -> tuple[list[int], int]:
    """What is not taken is received all the same, and nothing stays."""
    pipes, _ = make_pipes(world_size)
    gc.collect()
    before = num_tensors()
    end = RemoteEnd(pipes, 0, (0, 1))
    end.begin_step(keys(range(6)))
    wanted = []
    for micro_batch in range(6):
        if rank == 0:
            end.send(micro_batch, [torch.full((2,), micro_batch)])
        else:
            post(end, micro_batch)
            if micro_batch == 3:
                wanted.append(int(end.take(micro_batch)[0][0]))
    end.close()
    del end
    gc.collect()
    return wanted, num_tensors() - before


def num_tensors() -> int:
    return sum(isinstance(each, Tensor) for each in gc.get_objects())


def test_what_is_not_taken_ends_and_nothing_stays(ranks: WorkerPool) -> None:
    assert ranks(2).run(drop_and_close) == [([], 0), ([3], 0)]


def drop_what_is_posted(rank: int, world_size: int) -> bool:
    """The other rank sends nothing until the receive is gone: a destructor that waited for it would fail."""
    pipes, comm_log = make_pipes(world_size)
    end = RemoteEnd(pipes, 0, (0, 1))
    if rank == 1:
        fail_after(comm_log, 0.5)
        end.begin_step(keys([0]))
        post(end, 0)
        del end
        gc.collect()
    dist.barrier()
    return not comm_log.has_failed


def test_nothing_waits_in_a_destructor(ranks: WorkerPool) -> None:
    assert ranks(2).run(drop_what_is_posted) == [True, True]


def change_lengths(rank: int, world_size: int) -> tuple[list[int], Counts]:
    """Lengths that are new in a step, after one in which another was described."""
    pipes, comm_log = make_pipes(world_size)
    end, received = RemoteEnd(pipes, 0, (0, 1)), []
    for lengths in ([7], [9, 11], [7, 9, 13]):
        end.begin_step([(True, ((2, length), (2, length))) for length in lengths])
        for micro_batch, length in enumerate(lengths):
            if rank == 0:
                end.send(micro_batch, (torch.full((2, length, 4), length), torch.zeros(4)))
            else:
                received.append(int(receive(end, micro_batch)[0].sum()) // 8)
        end.finish()
    return received, counts_of(comm_log)


def test_a_new_sequence_length_is_one_message(ranks: WorkerPool) -> None:
    (_, sent), (received, _) = ranks(2).run(change_lengths)
    assert received == [length**2 for length in (7, 9, 11, 7, 9, 13)]
    assert sent["send"][0] == 6 + 2  # the first is described


def use_many_specs(rank: int, world_size: int) -> bool:
    """More than are kept: both ends forget them, and agree again."""
    pipes, _ = make_pipes(world_size)
    end = RemoteEnd(pipes, 0, (0, 1))
    is_right = True
    with patch.object(boundary, "MAX_SPECS", 3):
        for sizes in ([1, 2], [1, 3], [4, 5], [1, 4], [1, 1], [1, 4]):
            end.begin_step(keys(sizes))
            for micro_batch, size in enumerate(sizes):
                if rank == 0:
                    end.send(micro_batch, torch.full((size,), size))
                else:
                    is_right &= torch.equal(receive(end, micro_batch), torch.full((size,), size))
            end.finish()
    return is_right


def test_specs_are_forgotten_on_both_ends(ranks: WorkerPool) -> None:
    assert ranks(2).run(use_many_specs) == [True, True]


def change_in_place(rank: int, world_size: int) -> bool:
    """Tensors of one message are as independent as those that were sent: a change of one leaves others alone."""
    pipes, _ = make_pipes(world_size)
    end = RemoteEnd(pipes, 0, (0, 1))
    for _ in range(2):
        end.begin_step(keys([0]))
        if rank == 0:
            end.send(0, [torch.ones(3, requires_grad=True), torch.zeros(3)])
            end.finish()
            continue
        x, other = receive(end, 0)
        y = x * x
        other.add_(1)
        y.sum().backward()
        assert x.grad.tolist() == [2.0] * 3
    return True


def test_received_tensors_may_be_changed_in_place(ranks: WorkerPool) -> None:
    assert ranks(2).run(change_in_place) == [True, True]


def lose_a_neighbour(rank: int, world_size: int, how: str) -> tuple[str, str]:
    pipes, comm_log = make_pipes(world_size)
    end = RemoteEnd(pipes, 0, (0, 1))
    end.begin_step(keys(range(3)))
    if rank == 0:
        end.send(0, torch.ones(2))
        end.finish()
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return "", ""
    receive(end, 0)
    fail_after(comm_log, 0.5 if how == "hangs" else PATIENCE_S)
    if how == "dies":
        receive(end, 1)
    return refusal_of(lambda: receive(end, 1))


def test_neighbour_that_dies_or_hangs_is_named(ranks: WorkerPool) -> None:
    words = "rank 1 failed in receive #4 of stage 0 to 1 values over pp (2 ranks): "
    with pytest.raises(RankError) as caught:
        ranks(2).run(lose_a_neighbour, "dies", grace_s=PATIENCE_S)
    assert (caught.value.rank, caught.value.kind) == (0, "died")
    assert words in str(caught.value)
    code, message = ranks(2).run(lose_a_neighbour, "hangs")[1]
    assert code == "collective-failed"
    assert words in message


def receive_unknown(rank: int, world_size: int) -> str:
    pipes, _ = make_pipes(world_size)
    end = RemoteEnd(pipes, 0, (0, 1))
    end.begin_step(keys([0]))
    if rank == 0:
        end.send(0, Pair(torch.ones(1), None))
        end.finish()
        return ""
    with refused("boundary-type-unknown") as caught:
        receive(end, 0)
    return str(caught.value)


def test_unknown_type_is_named(ranks: WorkerPool) -> None:
    assert f"{Pair.__module__}.Pair" in ranks(2).run(receive_unknown)[1]


def test_a_local_boundary_hands_over_detached_values() -> None:
    before, after = LocalEnd.pair()
    values = random_values(3, 20)
    for index, value in enumerate(values):
        before.send(index, value)
    assert [difference(after.take(index), value) for index, value in enumerate(values)] == [""] * 20
    x = torch.ones(2, requires_grad=True) * 2
    before.send(0, [x])
    received = after.take(0)
    assert received[0].data_ptr() == x.data_ptr()
    after.send(0, [None, torch.ones(2)])
    assert [each is None for each in before.take(0)] == [True, False]
    with refused("boundary-value-type", "builtins.set"):
        before.send(1, {1, 2})


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_simulated_boundary_counts_what_a_real_one_sends(ranks: WorkerPool, is_packed: bool) -> None:
    real = ranks(2).run(count_bytes, STEPS, is_packed)
    for rank in range(2):
        comm_log, shape = CommLog(rank), MeshShape(pp=2)
        pipes = P2PChannels(SimulatedFactory(shape, rank, "gloo"), shape, CPU, 1.0, Streams(CPU), comm_log)
        with fake_tensors(), patch.object(boundary, "PACKED_BYTES", 2**18 if is_packed else -1):
            values = [{"hidden": torch.ones(size, 4), "step": 1} for sizes in STEPS for size in sizes]
            end = RemoteEnd(pipes, 0, (0, 1), describe=iter(values).__next__)
            for start, stop in ((0, 2), (2, 5), (5, 7), (7, 9)):
                end.begin_step(keys([0] * (stop - start)))
                for index, value in enumerate(values[start:stop]):
                    if rank == 0:
                        end.send(index, value)
                    else:
                        assert receive(end, index)["hidden"].shape == value["hidden"].shape
        assert counts_of(comm_log) == real[rank]


def test_simulated_gradients_are_those_of_what_was_sent() -> None:
    shape = MeshShape(pp=2)
    pipes = P2PChannels(SimulatedFactory(shape, 0, "gloo"), shape, CPU, 1.0, Streams(CPU), CommLog(0))
    with fake_tensors():
        end = RemoteEnd(pipes, 0, (0, 1))
        end.begin_step(keys([0]))
        end.send(0, [torch.ones(2, 3, requires_grad=True), torch.ones(4)])
        gradients = receive(end, 0)
    assert [tuple(each.shape) for each in gradients] == [(2, 3)]
    pipes = P2PChannels(SimulatedFactory(shape, 1, "gloo"), shape, CPU, 1.0, Streams(CPU), CommLog(1))
    with pytest.raises(ValueError, match="give `describe`"):
        RemoteEnd(pipes, 1, (0, 1))
