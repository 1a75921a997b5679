"""Conjugate pairs: values and gradients, also of gradients; memory of what is shared; registered ops and their end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from harness.pool import WorkerPool
from harness.refusals import refused
from harness.split_model import make_comm
from shardwise.comm.backends import simulated_comm
from shardwise.comm.collectives import Comm, CommResources, RankPlace
from shardwise.comm.records import CommLog
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.device import StreamName, Streams
from shardwise.runtime.torch_private import fake_copy, fake_tensors
from shardwise.tensor import collectives
from shardwise.tensor.mappings import TpMappings

Pair = Callable[[TpMappings, Tensor], Tensor]

PAIRS: tuple[tuple[str, Pair], ...] = (
    ("copy_to_tp", lambda ops, x: ops.copy_to_tp(x, "t")),
    ("reduce_from_tp", lambda ops, x: ops.reduce_from_tp(x, "t")),
    ("gather_sequence", lambda ops, x: ops.gather_sequence(x, "t")),
    ("scatter_sequence", lambda ops, x: ops.scatter_sequence(x, "t")),
    ("split", lambda ops, x: ops.split(x, -1, "t")),
    ("gather", lambda ops, x: ops.gather(x, -1, "t")),
)


def pull(rank: int, world_size: int, pair: str, dtype: torch.dtype) -> list[Tensor]:
    """A pair's output, its gradient for an upstream of this rank, and its gradient's gradient."""
    run, n = dict(PAIRS)[pair], world_size
    is_equal = pair == "split"  # its input is the same on all ranks
    x = (torch.arange(2.0 * n * 3 * n).view(2, 3 * n, n) + (0 if is_equal else 100 * rank)).to(dtype).requires_grad_()
    ops = TpMappings(make_comm())
    y = run(ops, x)
    upstream = torch.linspace(0, 1, y.numel(), dtype=dtype).view_as(y)
    upstream = (upstream if pair in ("reduce_from_tp", "gather") else upstream + rank).requires_grad_()
    (grad,) = torch.autograd.grad(y, x, upstream, create_graph=True)
    (second,) = torch.autograd.grad(grad, upstream, x.detach())
    return [y.detach(), grad.detach(), second]


def expected(pair: str, rank: int, n: int, xs: list[Tensor]) -> Tensor:
    if pair == "copy_to_tp":
        return xs[rank]
    if pair == "reduce_from_tp":
        return sum(xs[1:], xs[0])
    if pair == "gather_sequence":
        return torch.cat(xs, dim=1)
    if pair == "scatter_sequence":
        return sum(xs[1:], xs[0]).chunk(n, dim=1)[rank]
    return xs[rank].chunk(n, dim=-1)[rank] if pair == "split" else torch.cat(xs, dim=-1)


CONJUGATE = {
    "copy_to_tp": "reduce_from_tp",
    "reduce_from_tp": "copy_to_tp",
    "gather_sequence": "scatter_sequence",
    "scatter_sequence": "gather_sequence",
    "split": "gather",
    "gather": "split",
}


@pytest.mark.parametrize("pair", CONJUGATE)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_pairs(ranks: WorkerPool, pair: str, num_ranks: int, dtype: torch.dtype) -> None:
    n = num_ranks
    results = ranks(n).run(pull, pair, dtype)
    base = torch.arange(2.0 * n * 3 * n).view(2, 3 * n, n)
    xs = [(base + (0 if pair == "split" else 100 * rank)).to(dtype) for rank in range(n)]
    shape = results[0][0].shape
    line = torch.linspace(0, 1, shape.numel(), dtype=dtype).view(shape)
    upstreams = [line if pair in ("reduce_from_tp", "gather") else line + rank for rank in range(n)]
    for rank, (y, grad, second) in enumerate(results):
        tolerance = 0.02 if dtype == torch.bfloat16 else 1e-12
        torch.testing.assert_close(y, expected(pair, rank, n, xs), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(grad, expected(CONJUGATE[pair], rank, n, upstreams), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(second, expected(pair, rank, n, xs), rtol=tolerance, atol=tolerance)


def tensors_of(num_bytes: int) -> set[int]:
    """Return the ids of the tensors whose storage has that many bytes."""
    tensors = [each for each in gc.get_objects() if type(each) is Tensor]
    return {id(each) for each in tensors if each.untyped_storage().nbytes() == num_bytes}


def share(rank: int, world_size: int) -> dict[str, bool]:
    gc.disable()  # what is in no cycle goes at once
    try:
        return find_shared()
    finally:
        gc.enable()


def find_shared() -> dict[str, bool]:
    ops = TpMappings(make_comm())
    results = {}
    x = torch.randn(2, 4, requires_grad=True) * 1
    results["one tensor is copied once"] = ops.copy_to_tp(x, "t") is ops.copy_to_tp(x, "t")
    other = TpMappings(ops.comm)
    results["engines do not share"] = other.copy_to_tp(x, "t") is not ops.copy_to_tp(x, "t")
    held = weakref.ref(x)
    del x
    results["a copy is not held"] = held() is None
    leaf = torch.randn(2, 4, requires_grad=True)
    copied = ops.copy_to_tp(leaf, "t")
    held = weakref.ref(leaf)
    del leaf, copied
    results["a leaf neither"] = held() is None

    # k gets no gradient, the graph is kept, and the input needs none: the whole sequence must go all the same
    for needs_grad in (False, True):
        others = tensors_of(64)
        x_local = torch.randn(1, 2, 4, requires_grad=needs_grad) * 1
        whole = ops.gather_sequence(x_local, "t")
        assert whole.untyped_storage().nbytes() == 64
        q, k = (ops.column(whole, torch.randn(3, 4, requires_grad=True), None) for _ in range(2))
        del whole
        q.sum().backward(retain_graph=True)
        results[f"dropped, input {needs_grad}"] = k is not None and not tensors_of(64) - others
    return results


def test_what_is_shared_and_when_it_goes(ranks: WorkerPool) -> None:
    for results in ranks(2).run(share):
        assert results == dict.fromkeys(results, True)


def use_twice(rank: int, world_size: int) -> list[str]:
    ops = TpMappings(make_comm())
    x_local = torch.randn(1, 2, 4, requires_grad=True) * 1
    whole = ops.gather_sequence(x_local, "t")
    first, second = (ops.column(whole, torch.randn(3, 4, requires_grad=True), None) for _ in range(2))
    (first * second).sum().backward()
    return [call.op for call in ops.comm.comm_log.recent]


def test_siblings_gather_once(ranks: WorkerPool) -> None:
    assert ranks(2).run(use_twice)[0] == ["all_gather", "all_gather", "reduce_scatter"]


def change_in_place(rank: int, world_size: int) -> list[bool]:
    """What has changed since it was copied or gathered is another tensor."""
    ops = TpMappings(make_comm())
    results = []
    for is_sequence in (False, True):
        x = torch.randn(1, 2, 4, dtype=torch.float64) * 1
        source = x.clone().requires_grad_()
        weight = torch.randn(3, 4, dtype=torch.float64).requires_grad_()
        copied = ops.gather_sequence(source * 1, "t") if is_sequence else source * 1
        frozen = ops.column(copied if is_sequence else ops.copy_to_tp(copied, "t"), weight.detach(), None)
        copied.mul_(source.detach().mean())
        y = ops.column(copied if is_sequence else ops.copy_to_tp(copied, "t"), weight, None)
        y = y.mul_(2).div_(2)  # as of any linear layer
        (grad,) = torch.autograd.grad(y.sum() + 0 * frozen.sum(), weight)
        whole = collectives.all_gather(ops.comm, x, 1, "t") if is_sequence else x
        expected = (whole * x.mean()).sum((0, 1)).expand(3, 4)
        results.append(torch.allclose(grad, expected, rtol=1e-12, atol=1e-12))
    return results


def test_tensors_changed_in_place_are_seen(ranks: WorkerPool) -> None:
    assert ranks(2).run(change_in_place) == [[True, True]] * 2


def simulated() -> Comm:
    device = torch.device("cpu")
    return simulated_comm(RankPlace(1, 4, "tp"), CommResources.alone(device, 5.0), "gloo")


@pytest.mark.parametrize("chunks", [1, 2])
def test_fake_tensors_are_counted_where_links_are_simulated(chunks: int) -> None:
    with fake_tensors():
        ops = TpMappings(simulated(), chunks)
        x = fake_copy(torch.empty(2, 8, 16, requires_grad=True)) * 1
        weight = torch.empty(16, 16, requires_grad=True)
        shapes = [
            ops.row(x, weight, None, True, "t").shape,
            ops.row(x, weight, None, False, "t").shape,
            ops.gather_sequence(x, "t").shape,
            ops.split(x, 1, "t").shape,
            ops.gather(x, -1, "t").shape,
        ]
    assert shapes == [(2, 2, 16), (2, 8, 16), (2, 32, 16), (2, 2, 16), (2, 8, 64)]
    counts = {op: count.num_calls for (_, op), count in ops.comm.comm_log.counts.items()}
    assert counts == {"reduce_scatter": chunks, "all_reduce": chunks, "all_gather": 2}


class ListedStreams(Streams):
    """Streams that keep the names by which they were asked for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.asked: list[str | None] = []

    def side_stream(self, name: StreamName | None) -> AbstractContextManager[None]:
        self.asked.append(name)
        return super().side_stream(name)


def test_what_is_waited_for_at_once_stays_on_the_current_stream() -> None:
    """On NCCL it would queue after the gathers and reductions of a data group; the whole for the backward overlaps."""
    streams, device = ListedStreams(), torch.device("cpu")
    resources = CommResources(device, 5.0, streams, BufferPool(device), CommLog())
    comm = simulated_comm(RankPlace(1, 2, "tp"), resources, "nccl")
    with fake_tensors():
        ops = TpMappings(comm)
        x = fake_copy(torch.empty(1, 4, 8, requires_grad=True)) * 1
        weight = torch.empty(8, 8, requires_grad=True)
        y = ops.row(ops.column(ops.gather_sequence(x, "t"), weight, None), weight, None, True, "t")
        y = y + ops.row(ops.copy_to_tp(x, "t"), weight, None, False, "t")[:, :4]
        y.sum().backward()
    assert [name for name in streams.asked if name is not None] == ["tensor"]
    assert len(streams.asked) == len(comm.comm_log.recent) == 7


def names() -> set[str]:
    return {name for name in dir(torch.ops.shardwise) if name.startswith("row_product_")}


def test_ops_are_taken_back() -> None:
    gc.collect()  # engines of other tests that were dropped and not closed
    before = names()
    first, second = TpMappings(simulated()), TpMappings(simulated())
    assert len(names() - before) == 2
    first.close()
    assert len(names() - before) == 1
    second.close()
    assert names() == before


def test_a_graph_of_a_closed_engine_raises() -> None:
    """An op that is not registered any more would read freed memory."""
    ops = TpMappings(simulated())
    y = ops.gather_sequence(torch.ones(1, 2, 4, requires_grad=True), "t")
    ops.close()
    with refused("engine-closed", "scatter_sequence"):
        y.sum().backward()
