"""Layers of experts over several ranks equal one process that has the tokens of all: outputs, gradients, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.moe import (
    CASES,
    FAMILIES,
    HIDDEN,
    NUM_EXPERTS,
    DispatchedLayer,
    Tokens,
    gradients_of,
    make_experts,
    make_tokens,
    part_of,
    poisoned,
)
from harness.pool import WorkerPool
from harness.refusals import refusal_of
from harness.wire_bytes import WireBytes, ring_equivalent_bytes
from shardwise.comm.backends import GlooComm, process_group_comm
from shardwise.comm.collectives import Comm, CommResources, RankPlace
from shardwise.experts.dispatch import ExpertDispatch
from shardwise.runtime.float64 import float64_throughout
from shardwise.runtime.recompute import recompute_forward

CPU = torch.device("cpu")
Found = dict[str, Tensor]
WORLD = [2, 4]


def make_comm(ep: int | None = None) -> Comm:
    """The ranks that share experts: all, or `ep` neighbours."""
    group: Any = dist.group.WORLD
    if ep is not None:
        groups = [dist.new_group(list(range(first, first + ep))) for first in range(0, dist.get_world_size(), ep)]
        group = groups[dist.get_rank() // ep]
    return process_group_comm(group, "ep", CommResources.alone(CPU, 20.0))


def run_cases(rank: int, world_size: int, names: Sequence[tuple[str, str]], ep: int | None = None) -> list[Found]:
    comm = make_comm(ep)
    dispatch = ExpertDispatch(comm)
    found = []
    with float64_throughout(), poisoned():
        for family, case in names:
            experts = part_of(make_experts(family), comm.rank, comm.world_size)
            found.append(gradients_of(experts, make_tokens(case, rank), DispatchedLayer(experts, dispatch)))
    dispatch.close()
    return found


def one_process(family: str, case: str, num_ranks: int, *, own_forward: bool) -> Found:
    """The tokens of all ranks in one process: through the family's own forward, or a dispatch of one rank."""
    one_rank = ExpertDispatch(GlooComm(RankPlace(0, 1, "ep"), CommResources.alone(CPU, 20.0), None))
    experts = make_experts(family)
    tokens = Tokens.join(make_tokens(case, rank) for rank in range(num_ranks))
    with float64_throughout():
        return gradients_of(experts, tokens, experts if own_forward else DispatchedLayer(experts, one_rank))


def join(by_rank: Sequence[Found], ep: int) -> Found:
    """What one process would have: rows of all ranks, stacks of all experts, sums of what ranks share."""
    joined = {}
    for name in by_rank[0]:
        values = [each[name] for each in by_rank]
        if name in ("out", "hidden", "weights"):
            joined[name] = torch.cat(values)
        elif values[0].dim() > 1:  # a stack: of the ranks with the same experts the sum
            joined[name] = torch.cat([torch.stack(values[first::ep]).sum(0) for first in range(ep)])
        else:
            joined[name] = torch.stack(values).sum(0)
    return joined


ALL = [(family, case) for family in sorted(FAMILIES) for case in CASES]


@pytest.mark.parametrize("num_ranks", WORLD)
def test_ranks_equal_one_process(ranks: WorkerPool, num_ranks: int) -> None:
    found = ranks(num_ranks).run(run_cases, ALL)
    for number, (family, case) in enumerate(ALL):
        joined = join([each[number] for each in found], num_ranks)
        same_order = one_process(family, case, num_ranks, own_forward=False)
        for name, value in same_order.items():
            if name == "post_expert_norm.weight":  # of no expert: ranks sum what they have, in another order
                assert torch.allclose(joined[name], value, rtol=1e-12, atol=1e-12)
            else:
                assert torch.equal(joined[name], value), (family, case, name)
        if family != "privacy_filter":  # it adds into float32 whatever its dtype
            for name, value in one_process(family, case, num_ranks, own_forward=True).items():
                difference = (joined[name] - value).abs().max()
                assert difference <= 1e-12 * value.abs().max(), (family, case, name)


def test_experts_that_two_groups_have_sum_their_gradients(ranks: WorkerPool) -> None:
    names = [("gpt_oss", "plain"), ("muse_spark", "two ranks without"), ("nemotron_h", "few")]
    found = ranks(4).run(run_cases, names, 2)
    for number, (family, case) in enumerate(names):
        joined = join([each[number] for each in found], 2)
        for name, value in one_process(family, case, 4, own_forward=True).items():
            assert (joined[name] - value).abs().max() <= 1e-12 * value.abs().max(), (family, case, name)


def count_bytes(rank: int, world_size: int, case: str, dtype: torch.dtype) -> tuple[int, int, int, float]:
    comm = make_comm()
    dispatch = ExpertDispatch(comm)
    experts = part_of(make_experts("mixtral", dtype), rank, world_size)
    layer = DispatchedLayer(experts, dispatch)
    with WireBytes() as wire:
        out = layer(*inputs(make_tokens(case, rank, dtype)))
        forward_bytes = comm.comm_log.counts["ep", "exchange"].wire_bytes
        out.sum().backward()
    counted = comm.comm_log.counts["ep", "exchange"]
    return counted.num_calls, forward_bytes, counted.wire_bytes, float(ring_equivalent_bytes(wire.calls))


def inputs(tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    return tokens.hidden, tokens.index, tokens.weights


@pytest.mark.quick(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bf16"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_ranks", WORLD)
def test_a_row_is_sent_only_if_its_expert_is_elsewhere(
    ranks: WorkerPool, num_ranks: int, case: str, dtype: torch.dtype
) -> None:
    owners = [make_tokens(case, rank).index // (NUM_EXPERTS // num_ranks) for rank in range(num_ranks)]
    for rank, found in enumerate(ranks(num_ranks).run(count_bytes, case, dtype)):
        routed, local = owners[rank].numel(), int((owners[rank] == rank).sum())
        returned = sum(int((owners[other] == rank).sum()) for other in range(num_ranks) if other != rank)
        rows = HIDDEN * dtype.itemsize * (routed - local + returned)
        numbers = 4 * (num_ranks - 1) * (NUM_EXPERTS // num_ranks)
        # Numbers of rows, rows, results; backwards the gradients of results and of rows.
        assert found == (5, rows + numbers, 2 * rows + numbers, float(2 * rows))


def count_calls(rank: int, world_size: int, mode: str) -> tuple[bool, list[str], list[str]]:
    comm = make_comm()
    dispatch = ExpertDispatch(comm)
    experts, tokens = part_of(make_experts("gpt_oss"), rank, world_size), make_tokens("two ranks without", rank)
    layer = DispatchedLayer(experts, dispatch)
    expected = gradients_of(experts, tokens, layer)
    recompute_forward(layer, mode)
    before = comm.comm_log.num_calls
    out = layer(*inputs(tokens))
    forwards = comm.comm_log.num_calls - before
    leaves = {"hidden": tokens.hidden, "weights": tokens.weights, **dict(experts.named_parameters())}
    grads = torch.autograd.grad(out, list(leaves.values()), tokens.grad)
    is_equal = all(torch.equal(grad, expected[name]) for name, grad in zip(leaves, grads, strict=True))
    calls = list(comm.comm_log.recent)[before:]
    return is_equal, [str(call.wire_bytes) for call in calls[:forwards]], [str(call.op) for call in calls[forwards:]]


@pytest.mark.parametrize(("mode", "num_again"), [("full", 2), ("selective", 0)])
def test_a_recomputation_exchanges_no_counts(ranks: WorkerPool, mode: str, num_again: int) -> None:
    for is_equal, forward, backward in ranks(2).run(count_calls, mode):
        assert is_equal
        assert len(forward) == 3
        assert backward == ["exchange"] * (2 + num_again)


def replace_kernel(rank: int, world_size: int) -> tuple[bool, int, int, tuple[str, str]]:
    comm = make_comm()
    dispatch = ExpertDispatch(comm)
    experts, tokens = part_of(make_experts("mixtral"), rank, world_size), make_tokens("plain", rank)
    layer = DispatchedLayer(experts, dispatch)
    expected = gradients_of(experts, tokens, layer)
    num_bytes = comm.comm_log.counts["ep", "exchange"].wire_bytes
    num_rows = []

    def kernel(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
        num_rows.append(len(rows))
        parts = [rows.new_empty((number, rows.shape[1])) for number in received]
        works = []
        for peer, (part, own) in enumerate(zip(parts, rows.split(list(sent)), strict=True)):
            if peer == rank:
                part.copy_(own)
                continue
            works += [dist.isend(own.contiguous(), group_dst=peer, group=group)] if len(own) else []
            works += [dist.irecv(part, group_src=peer, group=group)] if len(part) else []
        for work in works:
            work.wait()
        return torch.cat(parts)

    comm.register_token_exchange(kernel)
    found = gradients_of(experts, tokens, layer)
    is_equal = all(torch.equal(found[name], value) for name, value in expected.items())
    is_counted = comm.comm_log.counts["ep", "exchange"].wire_bytes - 2 * num_bytes
    comm.register_token_exchange(lambda rows, sent, received, group: rows.new_empty((0, 3)))
    return is_equal, len(num_rows), is_counted, refusal_of(lambda: layer(*inputs(tokens)))


def test_another_kernel_may_send_the_rows(ranks: WorkerPool) -> None:
    for is_equal, num_calls, uncounted, (code, message) in ranks(2).run(replace_kernel):
        assert is_equal
        assert (num_calls, uncounted) == (4, 0)
        assert code == "token-exchange-result"
        assert message.startswith("layers.0: ")
