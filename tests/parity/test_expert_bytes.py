"""What a whole step with experts stores, sends and calls, by counts that are not the library's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.live_bytes import LiveBytes, settled_bytes
from harness.moe import HIDDEN, NUM_EXPERTS, RoutedModel, routed_rows, square
from harness.pool import WorkerPool
from harness.refusals import refusal_of
from harness.training import make_config
from shardwise import Engine, initialize

pytest.importorskip("transformers")

NUM_LAYERS, NUM_CHOSEN = 2, 2
EXPERT = 3 * 12 * HIDDEN  # elements of one
DENSE = HIDDEN * HIDDEN + NUM_LAYERS * NUM_EXPERTS * HIDDEN
ITEM = 8  # bytes of a float64


LOSS_SUM_BYTES = 16
COUNT_BYTES = 8 * NUM_LAYERS * NUM_EXPERTS  # of the tokens of each expert


def make_engine(mesh: dict[str, int], stage: int, **sections: Any) -> Engine:
    torch.manual_seed(3)
    optimizer = {"name": "sgd", "momentum": 0.9}
    overrides = {"mesh": mesh, "zero": {"stage": stage}, "optimizer": optimizer, **sections}
    return initialize(RoutedModel().double(), make_config(1, overrides), loss_fn=square, plan=None)


# At rest


def at_rest(rank: int, world_size: int, ep: int, stage: int) -> tuple[int, int]:
    rows = routed_rows(rank)
    with LiveBytes() as live:
        live.mark([rows])
        engine = make_engine({"ep": ep}, stage)
        engine.train_step([rows])
        engine.backward(engine(rows))
        found = settled_bytes(live) - rows.nbytes
        by_layout = sum(engine.layout.bytes_at_rest(rank).values())
        engine.step()
    engine.close()
    return found, by_layout


@pytest.mark.quick(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(("num_ranks", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_a_rank_stores_its_experts_and_its_part_of_the_rest(
    ranks: WorkerPool, num_ranks: int, ep: int, stage: int
) -> None:
    experts = NUM_LAYERS * NUM_EXPERTS * EXPERT // ep
    whole = (DENSE + experts) * ITEM
    part = (DENSE // num_ranks + experts // (num_ranks // ep)) * ITEM
    expected = {0: 3 * whole, 2: whole + 2 * part, 3: 3 * part}[stage]  # parameters, gradients, momenta
    assert set(ranks(num_ranks).run(at_rest, ep, stage)) == {(expected + LOSS_SUM_BYTES + COUNT_BYTES, expected)}


# On the wire


def owners_of(num_ranks: int, ep: int) -> list[list[Tensor]]:
    """By layer and rank, which rank of an ep group has the expert of each choice; by a plain model."""
    torch.manual_seed(3)
    model, x = RoutedModel().double(), torch.cat([routed_rows(rank) for rank in range(num_ranks)])
    x, owners = model.dense(x), []
    for layer in model.layers:
        index = layer.route(x)[1]
        owners.append(list((index // (NUM_EXPERTS // ep)).flatten().chunk(num_ranks)))
        x = layer(x)
    return owners


@contextmanager
def exchanges() -> Iterator[list[int]]:
    """The bytes that this rank sends to others in each all-to-all of uneven parts; sums over gloo have even ones."""
    exchange, sent = dist.all_to_all_single, []

    def counted(out: Tensor, rows: Tensor, *sizes: list[int], group: Any = None, **options: Any) -> Any:
        if sizes:
            sent.append(rows.nbytes - sizes[1][dist.get_rank(group)])
        return exchange(out, rows, *sizes, group=group, **options)

    with mock.patch.object(dist, "all_to_all_single", counted):
        yield sent


def on_wire(rank: int, world_size: int, mesh: dict[str, int], mode: str) -> tuple[list[int], int]:
    engine = make_engine(mesh, 2, recompute={"mode": mode})
    with exchanges() as sent:
        engine.train_step([routed_rows(engine.layout.mesh.data_index(rank))])
    counted = engine.comm.comm_log.counts["ep", "exchange"].wire_bytes
    engine.close()
    return sent, counted


@pytest.mark.quick(2)
@pytest.mark.parametrize(("mode", "num_passes"), [("none", 2), ("full", 3), ("selective", 2)])
@pytest.mark.parametrize(("num_ranks", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_a_step_sends_the_rows_of_experts_elsewhere_and_no_others(
    ranks: WorkerPool, num_ranks: int, ep: int, mode: str, num_passes: int
) -> None:
    """Forward, backward, and the forward again where it is recomputed: each sends rows, and sends results back."""
    layers = owners_of(num_ranks, ep)
    for rank, (sent, counted) in enumerate(ranks(num_ranks).run(on_wire, {"ep": ep}, mode)):
        here, first = rank % ep, rank - rank % ep
        expected = 0
        for owners in layers:
            others = [owners[first + other] for other in range(ep) if other != here]
            num_rows = int((owners[rank] != here).sum()) + sum(int((each == here).sum()) for each in others)
            expected += num_passes * num_rows * HIDDEN * ITEM + 4 * (ep - 1) * (NUM_EXPERTS // ep)
        assert (sum(sent), counted) == (expected, expected)
        assert len(sent) == NUM_LAYERS * (1 + 2 * num_passes)


# By a function of the user's


def send_by_messages(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    """The exchange by plain messages."""
    parts = [rows.new_empty((number, rows.shape[1])) for number in received]
    works, here = [], dist.get_rank(group)
    for peer, (part, own) in enumerate(zip(parts, rows.split(list(sent)), strict=True)):
        if peer == here:
            part.copy_(own)
            continue
        works += [dist.isend(own.contiguous(), group=group, group_dst=peer)] if len(own) else []
        works += [dist.irecv(part, group=group, group_src=peer)] if len(part) else []
    for work in works:
        work.wait()
    return torch.cat(parts)


def train_registered(rank: int, world_size: int, mesh: dict[str, int], is_registered: bool) -> tuple[Any, int]:
    num_calls = 0

    def exchange(*arguments: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return send_by_messages(*arguments)

    with make_engine(mesh, 3, recompute={"mode": "full"}) as engine:
        if is_registered:
            engine.register_token_exchange(exchange)
        data_index = engine.layout.mesh.data_index(rank)
        results = [engine.train_step([routed_rows(data_index, step)]) for step in range(2)]
        values = [engine.read(name).tolist() for name in sorted(engine.layout.trained_names)]
        engine.register_token_exchange(None)
        num_before = num_calls
        engine.train_step([routed_rows(data_index)])
        assert num_calls == num_before
    return ([(each.loss, each.grad_norm) for each in results], values), num_calls


@pytest.mark.parametrize(("num_ranks", "mesh"), [(2, {"ep": 2}), (4, {"ep": 2})], ids=str)
def test_a_registered_exchange_gives_the_same_bits(ranks: WorkerPool, num_ranks: int, mesh: dict[str, int]) -> None:
    expected = ranks(num_ranks).run(train_registered, mesh, False)
    for (found, num_calls), (plain, _) in zip(
        ranks(num_ranks).run(train_registered, mesh, True), expected, strict=True
    ):
        assert found == plain
        assert num_calls == 2 * NUM_LAYERS * 6  # of two steps: forward, forward again, backward


def refuse(rank: int, world_size: int, mesh: dict[str, int], register: Callable[..., Tensor]) -> tuple[str, str]:
    with make_engine(mesh, 2) as engine:

        def run() -> None:
            engine.register_token_exchange(register)
            engine.train_step([routed_rows(rank)])

        return refusal_of(run)


def too_few(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    return rows.new_zeros((sum(received) + 1, rows.shape[1]))


@pytest.mark.parametrize(("mesh", "code"), [({"ep": 1}, "no-token-exchange"), ({"ep": 2}, "token-exchange-result")])
def test_an_exchange_that_cannot_be_is_refused(ranks: WorkerPool, mesh: dict[str, int], code: str) -> None:
    for found, message in ranks(2).run(refuse, mesh, too_few):
        assert found == code
        assert ("mesh.ep=1" if mesh["ep"] == 1 else "layers.0") in message
