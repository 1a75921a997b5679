"""Rows that ranks exchange by their numbers: what a simulated rank counts, and what one rank alone does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.moe import DispatchedLayer, make_experts
from harness.refusals import refused
from shardwise.comm.backends import GlooComm, simulated_comm
from shardwise.comm.collectives import Comm, CommResources, RankPlace
from shardwise.comm.tokens import exchange_counts, exchange_tokens
from shardwise.experts.dispatch import ExpertDispatch
from shardwise.runtime.torch_private import FakeTensorMode

CPU = torch.device("cpu")


def one_rank() -> Comm:
    return GlooComm(RankPlace(0, 1, "ep"), CommResources.alone(CPU, 20.0), None)


def simulated(rank: int, world_size: int, backend: str) -> Comm:
    return simulated_comm(RankPlace(rank, world_size, "ep"), CommResources.alone(CPU, 20.0), backend)


def test_one_rank_has_all_rows_and_calls_nothing() -> None:
    comm = one_rank()
    rows = exchange_counts(comm, torch.tensor([[3, 0, 2]]), 5, "layers.0")
    assert (rows.sent, rows.received, rows.by_part) == ([5], [5], [3, 0, 2])
    assert exchange_tokens(comm, torch.ones(5, 2), rows.sent, rows.received, "layers.0").shape == (5, 2)
    assert not comm.comm_log.counts


def test_rows_that_no_rank_is_to_get_are_refused() -> None:
    with refused("rows-without-rank", "layers.0", "2 of 7 rows", "from 0 to 2"):
        exchange_counts(one_rank(), torch.tensor([[3, 0, 2]]), 7, "layers.0")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("skew", [1.0, 1.7])
def test_simulated_ranks_send_as_many_rows_as_there_are(backend: str, skew: float) -> None:
    comm = simulated(2, 4, backend)
    rows = exchange_counts(comm, torch.zeros(4, 3, dtype=torch.int32), 10, "layers.0", skew)
    come = 10 if skew == 1.0 else 17
    assert (sum(rows.sent), sum(rows.received), sum(rows.by_part)) == (10, come, come)
    assert (len(rows.sent), len(rows.received), len(rows.by_part)) == (4, 4, 3)
    assert max(rows.sent) - min(rows.sent) <= 1
    assert exchange_tokens(comm, torch.ones(10, 2), rows.sent, rows.received, "layers.0").shape == (come, 2)
    count = comm.comm_log.counts["ep", "exchange"]
    assert (count.num_calls, count.wire_bytes) == (2, 4 * 3 * 3 + 4 * 2 * (10 - rows.sent[2]))


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_one_of_4096_ranks_runs_a_layer_without_values(family: str) -> None:
    comm = simulated(4095, 4096, "nccl")
    dispatch = ExpertDispatch(comm, skew=1.5)
    with FakeTensorMode():
        experts: nn.Module = make_experts(family, torch.bfloat16)
        hidden = torch.randn(6000, 8, dtype=torch.bfloat16, requires_grad=True)
        index = torch.randint(0, 8 * 4096, (6000, 2))
        out = DispatchedLayer(experts, dispatch)(hidden, index, torch.rand(6000, 2, dtype=torch.bfloat16))
        out.sum().backward()
    assert out.shape == hidden.shape
    assert hidden.grad is not None
    assert all(each.grad is not None and each.grad.shape == each.shape for each in experts.parameters())
    # Of 12,000 rows each rank gets 2 or 3, this one its own; 18,000 come, of which 4 or 5 are its own.
    sent, returned = 12_000 - 3, 18_000 - 5
    count = comm.comm_log.counts["ep", "exchange"]
    assert (count.num_calls, count.wire_bytes) == (5, 4095 * 8 * 4 + 2 * 16 * (sent + returned))
    dispatch.close()
