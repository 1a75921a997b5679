"""Attention over ranks equals one process's, whatever transport, token layout and kernel; its bytes, memory and ops."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.combinations import combination_id, pairwise, product
from harness.context import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    RATE,
    SAMPLES,
    TOKENS,
    TRANSPORTS,
    AttentionSizes,
    bytes_of_attention,
    expected,
    inputs_of,
    layout_of,
    tokens_of,
)
from harness.live_bytes import LiveBytes
from harness.pool import WorkerPool
from harness.refusals import refused
from harness.split_model import make_comm
from harness.wire_bytes import WireBytes, ring_equivalent_bytes
from shardwise.attention.api import attention_backend
from shardwise.attention.block_layout import BlockLayout
from shardwise.attention.dense import dense_layout
from shardwise.comm.backends import simulated_comm
from shardwise.comm.collectives import Comm, CommResources, RankPlace
from shardwise.context import plan_cache as kept_plans
from shardwise.context import ring as loop
from shardwise.context.attention import ContextAttention
from shardwise.context.load_balance import choose_split
from shardwise.context.ulysses import team_size
from shardwise.layout.token_ranges import TokenSplit, contiguous
from shardwise.runtime.recompute import run_forward
from shardwise.runtime.torch_private import fake_tensors

STRUCTURES = [
    "dense causal",
    "dense",
    "fixed",
    "window",
    "bigbird",
    "longformer",
    "per head",
    "documents",
    "blind",
]
FACTORS = {
    "transport": list(TRANSPORTS),
    "token_layout": ["contiguous", "zigzag", "balanced"],
    "structure": STRUCTURES,
    "heads": list(KV_HEADS),
    "extra": ["none", "padding", "dropout"],
}


def fits(num_ranks: int) -> Any:
    return lambda case: num_ranks == 4 or "pairs" not in case["transport"]


def compute(rank: int, world_size: int, cases: list[dict[str, Any]]) -> list[list[Tensor]]:
    """Of each case, this rank's output and gradients in their places of the whole sequence."""
    comm, results = make_comm(), []
    for case in cases:
        attention = ContextAttention(comm, TRANSPORTS[case["transport"]])
        out, grads, own = attend(attention, rank, world_size, case)
        results.append([_in_place(each, own) for each in (out, *grads)])
        attention.close()
    return results


def attend(
    attention: ContextAttention, rank: int, num_ranks: int, case: dict[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """This rank's output, gradients and tokens."""
    layout = layout_of(case["structure"])
    split = choose_split(case["token_layout"], layout, num_ranks, team_size(TRANSPORTS[case["transport"]], num_ranks))
    given, own = inputs_of(KV_HEADS[case["heads"]], case["extra"]), tokens_of(split.shares[rank])
    q, k, v = (each[:, :, own].to(dtype).requires_grad_() for each in (given.q, given.k, given.v))
    torch.manual_seed(11)
    dropout = RATE if case["extra"] == "dropout" else 0.0
    out = attention(q, k, v, layout, split, key_padding=given.padding, dropout=dropout)
    grads = torch.autograd.grad(out, (q, k, v), given.grad_out[:, :, own].to(dtype))
    return out.detach(), grads, own


def _in_place(own: Tensor, tokens: Tensor) -> Tensor:
    whole = own.new_zeros(*own.shape[:2], TOKENS, HEAD_DIM)
    whole[:, :, tokens] = own
    return whole


def compare(cases: list[dict[str, Any]], results: list[list[list[Tensor]]]) -> list[str]:
    wrong = []
    for index, case in enumerate(cases):
        shares = zip(*(each[index] for each in results), strict=True)
        for name, want, have in zip(("out", "q", "k", "v"), expected(case), shares, strict=True):
            error = (torch.stack(have).sum(0) - want).abs().max().item()
            if not error <= 1e-10:
                wrong.append(f"{combination_id(case)}: {name} is off by {error}")
    return wrong


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_equals_one_process(ranks: WorkerPool, num_ranks: int) -> None:
    cases = pairwise(FACTORS, fits(num_ranks))
    assert compare(cases, ranks(num_ranks).run(compute, cases)) == []


@pytest.mark.full
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_combination_equals_one_process(ranks: WorkerPool, num_ranks: int, structure: str) -> None:
    cases = product({**FACTORS, "structure": [structure]}, fits(num_ranks))
    assert compare(cases, ranks(num_ranks).run(compute, cases, timeout_s=200)) == []


MOVING = [
    {"transport": transport, "token_layout": token_layout, "structure": structure, "heads": heads, "extra": "none"}
    for transport, token_layout, structure, heads in (
        ("ring", "zigzag", "dense causal", "pairs"),
        ("ring", "contiguous", "longformer", "mha"),
        ("all-gather", "balanced", "longformer", "fours"),
        ("all-gather", "zigzag", "fixed", "mqa"),
        ("ulysses", "contiguous", "dense causal", "mha"),
        ("ulysses", "balanced", "bigbird", "mqa"),
        ("ulysses", "zigzag", "window", "fours"),
        ("ring over pairs", "contiguous", "longformer", "mqa"),
        ("all-gather over pairs", "zigzag", "dense", "pairs"),
    )
]


def planned_bytes(case: dict[str, Any], rank: int, num_ranks: int, element_bytes: int, wide_bytes: int) -> int:
    layout, section = layout_of(case["structure"]), TRANSPORTS[case["transport"]]
    size = team_size(section, num_ranks)
    split = choose_split(case["token_layout"], layout, num_ranks, size)
    sizes = AttentionSizes(SAMPLES, HEADS, KV_HEADS[case["heads"]], HEAD_DIM, element_bytes, wide_bytes)
    one_by_one = section.transport == "ring"
    return sum(bytes_of_attention(layout, split, rank, sizes, heads_over=size, one_by_one=one_by_one))


def booked_bytes(comm: Comm) -> int:
    return sum(count.wire_bytes for count in comm.comm_log.counts.values())


def move(rank: int, world_size: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        comm = make_comm()
        attention = ContextAttention(comm, TRANSPORTS[case["transport"]])
        with WireBytes() as wire:
            out, grads, _ = attend(attention, rank, world_size, case)
        sent = booked_bytes(comm)
        again, grads_again, _ = attend(attention, rank, world_size, case)
        narrow, grads_narrow, _ = attend(attention, rank, world_size, case, torch.bfloat16)
        pairs = list(zip((out, *grads), (again, *grads_again), strict=True))
        of_bf16 = list(zip((out, *grads), (narrow, *grads_narrow), strict=True))
        results.append(
            {
                "on the wire": int(ring_equivalent_bytes(wire.calls)),
                "booked": sent,
                "booked in bf16": booked_bytes(comm) - 2 * sent,
                "is repeated": all(torch.equal(*pair) for pair in pairs),
                "in bf16": max(float((wide - small).abs().max() / wide.abs().max()) for wide, small in of_bf16),
            }
        )
        attention.close()
    return results


def test_bytes_are_those_planned_and_results_repeat_to_the_bit(ranks: WorkerPool) -> None:
    results = ranks(4).run(move, MOVING)
    for rank, of_rank in enumerate(results):
        for case, found in zip(MOVING, of_rank, strict=True):
            error = found.pop("in bf16")
            assert found == {
                "on the wire": planned_bytes(case, rank, 4, 8, 8),
                "booked": planned_bytes(case, rank, 4, 8, 8),
                "booked in bf16": planned_bytes(case, rank, 4, 2, 4),
                "is repeated": True,
            }, combination_id(case)
            assert error < 0.03, combination_id(case)


def simulated(rank: int, num_ranks: int) -> Comm:
    device = torch.device("cpu")
    return simulated_comm(RankPlace(rank, num_ranks, "cp"), CommResources.alone(device, 5.0), "gloo")


@pytest.mark.parametrize("case", MOVING, ids=combination_id)
def test_simulated_ranks_count_the_same_bytes_with_fake_tensors(case: dict[str, Any]) -> None:
    for rank in range(4):
        comm = simulated(rank, 4)
        attention = ContextAttention(comm, TRANSPORTS[case["transport"]])
        layout = layout_of(case["structure"])
        split = choose_split(case["token_layout"], layout, 4, team_size(TRANSPORTS[case["transport"]], 4))
        num_kv_heads = KV_HEADS[case["heads"]]
        with fake_tensors():
            q, k, v = (
                torch.empty(SAMPLES, num, split.own_size, HEAD_DIM, requires_grad=True)
                for num in (HEADS, num_kv_heads, num_kv_heads)
            )
            out = attention(q, k, v, layout, split)
            grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert out.shape == q.shape
        assert [grad.shape for grad in grads] == [each.shape for each in (q, k, v)]
        assert booked_bytes(comm) == planned_bytes(case, rank, 4, 4, 4)
        attention.close()


def hold(num_ranks: int, tokens_of_rank: int) -> tuple[float, float]:
    """Peak bytes of a ring's forward and backward beside its arguments, in keys and values of a rank."""
    comm = simulated(1, num_ranks)
    attention = ContextAttention(comm, TRANSPORTS["ring"])
    layout = dense_layout(num_ranks * tokens_of_rank, causal=False)
    split = contiguous(num_ranks * tokens_of_rank, num_ranks)
    q, k, v = (torch.zeros(1, 1, tokens_of_rank, 64, requires_grad=True) for _ in range(3))
    grad_out = torch.zeros(1, 1, tokens_of_rank, 64)
    attention(q, k, v, layout, split).backward(grad_out)  # what is planned is made
    q.grad = k.grad = v.grad = None
    with LiveBytes() as live:
        live.mark((q, k, v, grad_out))
        before = live.live_bytes()
        live.reset_peak()
        out = attention(q, k, v, layout, split)
        forward = live.peak_bytes() - before
        live.reset_peak()
        out.backward(grad_out)
        backward = live.peak_bytes() - before
    attention.close()
    unit = k.nbytes + v.nbytes
    return forward / unit, backward / unit


def test_a_ring_holds_its_own_keys_and_those_of_two_others() -> None:
    """In units of a rank's keys and values: one on its way out, two that came, and half for the output in the forward.

    In the backward also gradients: the sums, those of a step, and on their way back those of others and its own.
    """
    forward, backward = zip(*(hold(num_ranks, 256) for num_ranks in (4, 8)), strict=True)
    assert forward[0] == forward[1] < 3.6
    assert backward[0] == backward[1] < 8.1


@pytest.mark.parametrize(
    ("transport", "structure", "forward"),
    [
        ("ring", "dense", ["keys", "compute", "keys", "compute", "keys", "compute", "compute"]),
        ("all-gather", "dense", ["keys", "compute"]),
        ("ulysses", "dense", ["heads", "compute", "tokens"]),
        ("ring over pairs", "dense", ["heads", "keys", "compute", "compute", "tokens"]),
    ],
)
def test_what_the_next_step_needs_is_sent_while_one_is_computed(
    monkeypatch: pytest.MonkeyPatch, transport: str, structure: str, forward: list[str]
) -> None:
    comm, seen = simulated(0, 4), []
    attention_forward_partial, exchange = loop.attention_forward_partial, comm.exchange

    def compute_seen(*args: Any) -> Any:
        seen.append("compute")
        return attention_forward_partial(*args)

    def exchange_seen(sends: Any, receives: Any, name: str) -> Any:
        seen.append(name.removeprefix("context "))
        return exchange(sends, receives, name)

    monkeypatch.setattr(loop, "attention_forward_partial", compute_seen)
    monkeypatch.setattr(comm, "exchange", exchange_seen)
    q, k, v = torch.randn(3, 1, HEADS, TOKENS // 4, HEAD_DIM)
    ContextAttention(comm, TRANSPORTS[transport])(q, k, v, layout_of(structure), contiguous(TOKENS, 4))
    assert seen == forward


def change(rank: int, world_size: int, cases: list[dict[str, Any]]) -> list[dict[str, bool]]:
    """Compiled and recomputed, against plain."""
    results = []
    for case in cases:
        comm = make_comm()
        attention = ContextAttention(comm, TRANSPORTS[case["transport"]])
        layout = layout_of(case["structure"])
        size = team_size(TRANSPORTS[case["transport"]], world_size)
        split = choose_split(case["token_layout"], layout, world_size, size)
        given, own = inputs_of(KV_HEADS[case["heads"]], case["extra"]), tokens_of(split.shares[rank])
        inputs = tuple(each[:, :, own].requires_grad_() for each in (given.q, given.k, given.v))

        def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q * 2, k * 1, v, layout, split) * 3  # noqa: B023

        def run(forward: Any) -> tuple[list[Tensor], int, int]:
            comm.comm_log.counts.clear()  # noqa: B023
            out = forward(*inputs)  # noqa: B023
            there = booked_bytes(comm)  # noqa: B023
            grads = torch.autograd.grad(out, inputs, given.grad_out[:, :, own])  # noqa: B023
            return [out, *grads], there, booked_bytes(comm)  # noqa: B023

        plain, *moved = run(block)
        compiled, *moved_by_compiled = run(torch.compile(block, backend="aot_eager", fullgraph=True))
        recomputed, *moved_by_selective = run(lambda *given: run_forward(block, "selective", given, {}))
        again, *moved_by_full = run(lambda *given: run_forward(block, "full", given, {}))
        results.append(
            {
                "compiled": all(map(torch.equal, plain, compiled)) and moved == moved_by_compiled,
                "selective": all(map(torch.equal, plain, recomputed)) and moved == moved_by_selective,
                "full": all(map(torch.equal, plain, again)) and moved_by_full[1] == moved[1] + moved[0],
            }
        )
        attention.close()
    return results


def test_compiled_code_and_recomputation_see_one_op(ranks: WorkerPool) -> None:
    for of_rank in ranks(2).run(change, [MOVING[1], MOVING[5]]):
        assert of_rank == [{"compiled": True, "selective": True, "full": True}] * 2


def attention_and_inputs(
    transport: str = "ring",
    num_ranks: int = 2,
    num_heads: int = HEADS,
    num_kv_heads: int = 2,
    comm: Comm | None = None,
) -> tuple[ContextAttention, list[Tensor], BlockLayout, TokenSplit]:
    layout, split = layout_of("dense causal"), contiguous(TOKENS, num_ranks)
    tensors = [
        torch.randn(1, num, split.own_size, HEAD_DIM, requires_grad=True) for num in (num_heads, *[num_kv_heads] * 2)
    ]
    return ContextAttention(comm or simulated(0, num_ranks), TRANSPORTS[transport]), tensors, layout, split


def test_what_does_not_fit_is_said_before_anything_moves() -> None:
    two, eight = simulated(0, 2), simulated(0, 8)
    attention, (q, k, v), layout, split = attention_and_inputs(comm=two)
    for refusal, given in (
        (("cp-split-degree", "cp=4", "mesh.cp=2"), (q, k, v, layout, contiguous(TOKENS, 4))),
        (("cp-own-tokens", "47 queries", "48 keys", "48 tokens"), (q[:, :, 1:], k, v, layout, split)),
        (("layout-length", "48 queries and 48 keys"), (q, k, v, dense_layout(48, causal=True), split)),
        (
            ("layout-heads", "8 heads", "2 query heads", "1 or 2"),
            (q[:, :2], k, v, layout_of("per head"), split),
        ),
        (("qkv-shapes",), (q, k, v[:, :1], layout, split)),
        (("qkv-empty",), (q[..., :0], k[..., :0], v[..., :0], layout, split)),
        (("qkv-dtype-device", "torch.float64"), (q, k, v.double(), layout, split)),
        (("kv-heads-divide-heads", "3 KV", "8 query", "1, 2, 4, 8"), (q, *[k[:, [0, 1, 1]]] * 2, layout, split)),
    ):
        with refused(*refusal):
            attention(*given)
    with refused("cp-whole-padding", "torch.float32", "(1, 48)"):
        attention(q, k, v, layout, split, key_padding=torch.ones(1, 48))
    with refused("dropout-rate", "dropout=1.0", "0.99"):
        attention(q, k, v, layout, split, dropout=1.0)
    assert attention(q[:0], k[:0], v[:0], layout, split).shape == q[:0].shape  # which moves nothing either
    with refused("cp-flex"), attention_backend("flex"):
        attention(q, k, v, layout, split)
    ulysses, (q, k, v), layout, split = attention_and_inputs("ulysses", 8, num_heads=4, comm=eight)
    with refused("cp-query-heads", "mesh.cp=8", "4 query", "legal: 4"):
        ulysses(q, k, v, layout, split)
    assert two.comm_log.num_calls == eight.comm_log.num_calls == 0


def test_graphs_keep_their_plans_but_do_not_outlive_their_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_plans, "_MAX_PLANS", 2)
    attention, (q, k, v), layout, split = attention_and_inputs()
    layouts = [weakref.ref(layout)]
    outs = [attention(q, k, v, layout, split)]
    for _ in range(3):
        layout = layout_of("dense causal")
        layouts.append(weakref.ref(layout))
        outs.append(attention(q, k, v, layout, split))
    for out in outs[:3]:
        out.sum().backward()
    del out, outs[:3]
    assert [each() is None for each in layouts] == [True, True, False, False]
    attention.close()
    with refused("engine-closed", "context_attention_backward"):
        outs[0].sum().backward()


def test_a_gradient_of_a_gradient_raises() -> None:
    attention, (q, k, v), layout, split = attention_and_inputs()
    with pytest.raises(NotImplementedError, match="leave out create_graph=True"):
        torch.autograd.grad(attention(q, k, v, layout, split).sum(), q, create_graph=True)
