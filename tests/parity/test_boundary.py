"""Channels between stages: any pytree arrives as it was sent, whatever came before it, in as many bytes as planned."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
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
from shardwise.pipeline.boundary import (
    Boundary,
    BoundaryChannel,
    BoundaryTransport,
    SameRankChannel,
    leaves_with_gradient,
)
from shardwise.pipeline.boundary_messages import MAX_SPECS
from shardwise.pipeline.pytree_codec import put_together, take_apart
from shardwise.runtime.streams import Streams
from shardwise.runtime.torch_private import fake_tensors

CPU = torch.device("cpu")
HEADER_BYTES = 40
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
SHAPES = [(), (0,), (3,), (2, 3), (4, 0, 2), (5, 1, 2)]


class Pair(NamedTuple):
    left: Any
    right: Any


class OneLinePipes(P2PChannels):
    """As on NCCL: tensors from one rank to another pass in one order, without tags."""

    def open(self, ends: tuple[int, int], name: str, tag: int, on_host: bool = False) -> P2PChannel:
        return super().open(ends, name, tag if on_host else 10_000, on_host)

    def line(self, ends: tuple[int, int]) -> deque[Any]:
        return self._lines.setdefault(ends, deque())


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

    packing, tensors, plain = take_apart(value)
    return put_together(packing, list(map(fill, tensors)), list(map(fill, plain)), [Pair])


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
    packing, tensors, plain = take_apart(received)
    its_packing, its_tensors, its_plain = take_apart(sent)
    if packing != its_packing:
        return f"{packing} for {its_packing}"
    leaves, its_leaves = tensors + plain, its_tensors + its_plain
    for leaf, its_leaf in zip(leaves, its_leaves, strict=True):
        if not isinstance(leaf, Tensor):
            if type(leaf) is not type(its_leaf) or leaf != its_leaf:
                return f"{leaf!r} for {its_leaf!r}"
        elif leaf.dtype != its_leaf.dtype or leaf.shape != its_leaf.shape or not torch.equal(leaf, its_leaf):
            return f"{leaf} for {its_leaf}"
        elif leaf.requires_grad != its_leaf.requires_grad or not leaf.is_leaf:
            return f"requires_grad={leaf.requires_grad} for {its_leaf.requires_grad}"
    return ""


def exchange(rank: int, world_size: int, seed: int) -> list[str]:
    """Send 50 values and receive 50 others, each end at its own pace."""
    pipes, _ = make_pipes(world_size)
    channels = [
        BoundaryChannel(pipes, Boundary(index, (index, 1 - index), f"stage {index}"), [Pair]) for index in range(2)
    ]
    out, back = channels[rank], channels[1 - rank]
    values, awaited = random_values(seed + rank, 50), random_values(seed + 1 - rank, 50)
    pace = random.Random(100 * seed + rank)
    sent: list[Any] = []
    posted: list[Any] = []
    differences: list[str] = []
    while len(differences) < 50:
        fate = pace.random()
        if fate < 0.4 and len(sent) < 50:
            sent.append(out.send(values[len(sent)]))
        elif fate < 0.7 and len(posted) < min(50, len(differences) + 4):
            posted.append(back.post_receive())
        elif len(differences) < len(posted) and (len(sent) == 50 or len(sent) > len(differences)):
            index = len(differences)
            differences.append(difference(posted[index].wait(), awaited[index]))
    for each in sent:
        each.wait()
    return [f"{index}: {text}" for index, text in enumerate(differences) if text] + [
        f"{index} is not done" for index, each in enumerate(sent) if not each.is_done()
    ]


@pytest.mark.parametrize("seed", range(4))
def test_any_values_pass_both_ways_at_any_pace(ranks: WorkerPool, seed: int) -> None:
    assert ranks(2).run(exchange, 10 * seed) == [[], []]


def pass_in_one_line(rank: int, world_size: int, seed: int) -> list[str]:
    """Two channels and their gradients from rank 0 to rank 1, in an order that both know, as NCCL demands."""
    pipes, _ = make_pipes(world_size, OneLinePipes)
    channels = [BoundaryChannel(pipes, Boundary(index, (0, 1), f"stage {index}"), [Pair]) for index in range(2)]
    values = [random_values(seed + index, 30) for index in range(2)]
    rng = random.Random(seed)
    order = [(which, index) for index in range(30) for which in range(2)]
    rng.shuffle(order)
    counts = [0, 0]
    turns = []
    for which, _ in order:
        turns.append((which, counts[which]))
        counts[which] += 1
    if rank == 0:
        for each in [channels[which].send(values[which][index]) for which, index in turns]:
            each.wait()
        return []
    differences, receives = [], deque()
    for which, index in turns:
        receives.append((channels[which].post_receive(), values[which][index]))
        while len(receives) > 5 or (receives and rng.random() < 0.4):
            place = rng.randrange(len(receives))
            receive, value = receives[place]
            del receives[place]
            differences.append(difference(receive.wait(), value))
    differences += [difference(each.wait(), value) for each, value in receives]
    return [text for text in differences if text]


@pytest.mark.parametrize("seed", range(3))
def test_channels_share_a_line_without_tags(ranks: WorkerPool, seed: int) -> None:
    assert ranks(2).run(pass_in_one_line, seed) == [[], []]


def train_three_stages(rank: int, world_size: int) -> list[Any]:
    """y = 3 (2 x + 1), of which the middle stage passes on a part that gets no gradient."""
    pipes, _ = make_pipes(world_size)
    before = BoundaryChannel(pipes, Boundary(rank - 1, (rank - 1, rank), f"cut {rank - 1}")) if rank > 0 else None
    after = BoundaryChannel(pipes, Boundary(rank, (rank, rank + 1), f"cut {rank}")) if rank < 2 else None
    results: list[Any] = []
    for step in range(4):
        x = torch.full((2 + step // 2,), float(step), requires_grad=True)
        given = (
            {"x": x, "unused": torch.ones(1, requires_grad=True)} if before is None else before.post_receive().wait()
        )
        if after is None:
            (3 * given["x"]).sum().backward()
        else:
            output = {"x": 2 * given["x"] + rank, "unused": given["unused"] * 1}
            sent, receive = after.send(output), after.post_gradients()
            leaves = leaves_with_gradient(output)
            gradients = receive.wait()
            results.append([None if each is None else each.tolist() for each in gradients])
            pairs = [(leaf, each) for leaf, each in zip(leaves, gradients, strict=True) if each is not None]
            torch.autograd.backward([leaf for leaf, _ in pairs], [each for _, each in pairs])
            sent.wait()
        if before is not None:
            before.send_gradients([leaf.grad for leaf in leaves_with_gradient(given)]).wait()
        results.append(given["x"].tolist())
    return results


def test_gradients_are_sent_back_and_none_stays_none(ranks: WorkerPool) -> None:
    first, middle, last = ranks(3).run(train_three_stages)
    sizes = [2, 2, 3, 3]
    assert first[::2] == [[[6.0] * size, None] for size in sizes]
    assert middle[::2] == [[[3.0] * size, None] for size in sizes]
    assert last == [[2 * 2.0 * step + 1] * size for step, size in enumerate(sizes)]


def count_bytes(rank: int, world_size: int, shapes: list[int]) -> dict[str, tuple[int, int]]:
    pipes, comm_log = make_pipes(world_size)
    channel = BoundaryChannel(pipes, Boundary(0, (0, 1), "cut"))
    for size in shapes:
        value = {"hidden": torch.ones(size, 4), "step": 1}
        (channel.send(value) if rank == 0 else channel.post_receive()).wait()
    return {op: (count.num_calls, count.wire_bytes) for (_, op), count in comm_log.counts.items()}


def test_bytes_are_counted_exactly(ranks: WorkerPool) -> None:
    # Agreed after two of one spec: the third is early and right, the fourth early and wrong: 16 * 3 bytes are wasted.
    shapes = [3, 3, 3, 5, 5, 5, 3]
    texts = [json.dumps([tree_text, [[[size, 4], "float32", False]]]) for size in (3, 5)] + ["[1]"] * 2
    sent, received = ranks(2).run(count_bytes, shapes)
    tensor_bytes = 16 * (sum(shapes) + 3 + 5)
    num_calls = len(shapes) + len(texts) + len(shapes) + 2
    assert sent == {"send": (num_calls, HEADER_BYTES * len(shapes) + sum(map(len, texts)) + tensor_bytes)}
    assert received == {"receive": (num_calls, 0)}


tree_text = json.dumps(["builtins.dict", ["list", ["hidden", "step"]], ["tensor", "plain"]])


def drop_and_close(rank: int, world_size: int) -> tuple[list[int], int]:
    """Values that no code waits for are received all the same, and nothing stays."""
    pipes, _ = make_pipes(world_size)
    gc.collect()
    before = num_tensors()
    channel: Any = BoundaryChannel(pipes, Boundary(0, (0, 1), "cut"))
    wanted = []
    if rank == 0:
        for index in range(6):
            channel.send([torch.full((2,), index)])  # dropped: it ends all the same
    else:
        for index in range(6):
            receive = channel.post_receive()
            if index % 3 == 0:
                wanted.append(int(receive.wait()[0][0]))
        del receive
        channel.close()
    del channel
    gc.collect()
    return wanted, num_tensors() - before


def num_tensors() -> int:
    return sum(isinstance(each, Tensor) for each in gc.get_objects())


def test_what_is_not_waited_for_ends_and_nothing_stays(ranks: WorkerPool) -> None:
    assert ranks(2).run(drop_and_close) == [([], 0), ([0, 3], 0)]


def use_many_specs(rank: int, world_size: int) -> bool:
    """More than are kept, one of which stays agreed until the one that pushes out the oldest comes."""
    pipes, _ = make_pipes(world_size)
    channel = BoundaryChannel(pipes, Boundary(0, (0, 1), "cut"))
    sizes = [*range(MAX_SPECS), 0, 0, MAX_SPECS, 0, 1, 2, 2, 2, 1]
    if rank == 0:
        for each in [channel.send(torch.full((size + 1,), size)) for size in sizes]:
            each.wait()
        return True
    return all(torch.equal(channel.post_receive().wait(), torch.full((size + 1,), size)) for size in sizes)


def test_specs_are_forgotten_on_both_ends(ranks: WorkerPool) -> None:
    assert ranks(2).run(use_many_specs) == [True, True]


def lose_a_neighbour(rank: int, world_size: int, how: str) -> tuple[str, str]:
    pipes, comm_log = make_pipes(world_size)
    channel = BoundaryChannel(pipes, Boundary(0, (0, 1), "cut"))
    channel.send(torch.ones(2)).wait() if rank == 0 else channel.post_receive().wait()
    if rank == 0:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return "", ""
    fail_after(comm_log, 0.5 if how == "hangs" else PATIENCE_S)
    if how == "dies":
        channel.post_receive().wait()
    return refusal_of(lambda: channel.post_receive().wait())


def test_neighbour_that_dies_or_hangs_is_named(ranks: WorkerPool) -> None:
    words = "rank 1 failed in receive #5 of cut values header over pp (2 ranks): "
    with pytest.raises(RankError) as caught:
        ranks(2).run(lose_a_neighbour, "dies", grace_s=PATIENCE_S)
    assert (caught.value.rank, caught.value.kind) == (0, "died")
    assert words in str(caught.value)
    code, message = ranks(2).run(lose_a_neighbour, "hangs")[1]
    assert code == "collective-failed"
    assert words in message


def receive_unknown(rank: int, world_size: int) -> str:
    pipes, _ = make_pipes(world_size)
    channel = BoundaryChannel(pipes, Boundary(0, (0, 1), "cut"))
    if rank == 0:
        channel.send(Pair(torch.ones(1), None)).wait()
        return ""
    with refused("boundary-type-unknown") as caught:
        channel.post_receive().wait()
    return str(caught.value)


def test_unknown_type_is_named(ranks: WorkerPool) -> None:
    assert f"{Pair.__module__}.Pair" in ranks(2).run(receive_unknown)[1]


def test_local_channel_hands_over_detached_values() -> None:
    channel: BoundaryTransport = SameRankChannel()
    values = random_values(3, 20)
    received_later = [channel.post_receive() for _ in values]
    for value in values:
        assert channel.send(value).is_done()
    assert [difference(each.wait(), value) for each, value in zip(received_later, values, strict=True)] == [""] * 20
    x = torch.ones(2, requires_grad=True) * 2
    channel.send([x])
    received = channel.post_receive().wait()
    assert received[0].data_ptr() == x.data_ptr()
    channel.send_gradients([None, torch.ones(2)])
    assert [each is None for each in channel.post_gradients().wait()] == [True, False]
    with pytest.raises(RuntimeError, match="value 21 "):
        channel.post_receive().wait()
    with refused("boundary-value-type", "builtins.set"):
        channel.send({1, 2})
    channel.close()


def test_simulated_channel_counts_what_a_real_one_sends(ranks: WorkerPool) -> None:
    shapes = [3, 3, 3, 5, 5, 5, 3]
    real = ranks(2).run(count_bytes, shapes)
    for rank in range(2):
        comm_log, shape = CommLog(rank), MeshShape(pp=2)
        pipes = P2PChannels(SimulatedFactory(shape, rank, "gloo"), shape, CPU, 1.0, Streams(CPU), comm_log)
        with fake_tensors():
            values = [{"hidden": torch.ones(size, 4), "step": 1} for size in shapes]
            channel = BoundaryChannel(pipes, Boundary(0, (0, 1), "cut"), describe=iter(values).__next__)
            for value in values:
                arrived = (channel.send(value) if rank == 0 else channel.post_receive()).wait()
                assert rank == 0 or arrived["hidden"].shape == value["hidden"].shape
        assert {op: (count.num_calls, count.wire_bytes) for (_, op), count in comm_log.counts.items()} == real[rank]


def test_simulated_gradients_are_those_of_what_was_sent() -> None:
    shape = MeshShape(pp=2)
    pipes = P2PChannels(SimulatedFactory(shape, 0, "gloo"), shape, CPU, 1.0, Streams(CPU), CommLog(0))
    with fake_tensors():
        channel = BoundaryChannel(pipes, Boundary(0, (0, 1), "cut"))
        channel.send([torch.ones(2, 3, requires_grad=True), torch.ones(4)])
        gradients = channel.post_gradients().wait()
    assert [tuple(each.shape) for each in gradients] == [(2, 3)]
    with pytest.raises(ValueError, match="give `describe`"):
        BoundaryChannel(
            P2PChannels(SimulatedFactory(shape, 1, "gloo"), shape, CPU, 1.0, Streams(CPU), CommLog(1)),
            Boundary(1, (0, 1), "cut"),
        )
