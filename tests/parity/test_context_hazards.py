"""What may go wrong around attention over ranks: errors amid its steps, several engines, plans that cannot be made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from harness.context import HEAD_DIM, HEADS, TOKENS, TRANSPORTS, layout_of
from harness.pool import WorkerPool
from harness.refusals import refused
from harness.split_model import make_comm
from shardwise.attention.block_layout import BlockLayout
from shardwise.attention.dense import dense_layout
from shardwise.comm.backends import simulated_comm
from shardwise.comm.collectives import Comm, CommResources, RankPlace
from shardwise.context import ring as loop
from shardwise.context.attention import ContextAttention
from shardwise.context.custom_op import ContextCustomOps
from shardwise.context.plan_cache import PlanCache
from shardwise.context.ring import MergedOutput
from shardwise.layout.token_ranges import TokenSplit, contiguous
from shardwise.runtime.torch_private import fake_tensors


def simulated(num_ranks: int) -> Comm:
    device = torch.device("cpu")
    return simulated_comm(RankPlace(0, num_ranks, "cp"), CommResources.alone(device, 5.0), "gloo")


def own_tensors(num_ranks: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, num_heads, TOKENS // num_ranks, HEAD_DIM, generator=generator).requires_grad_()
        for num_heads in (HEADS, 2, 2)
    )
    return q, k, v


def results(attention: ContextAttention, tensors: tuple[Tensor, ...], *place: Any) -> list[Tensor]:
    out = attention(*tensors, *place)
    return [out.detach(), *torch.autograd.grad(out.sum(), tensors)]


def fail_amid_steps(rank: int, world_size: int, failing: dict[str, list[int]]) -> list[bool]:
    """Whether results after an error in some call of a kernel, the same on all ranks, are those before."""
    layout, split, tensors = layout_of("dense"), contiguous(TOKENS, world_size), own_tensors(world_size, rank)
    found = []
    for transport, numbers in failing.items():
        attention = ContextAttention(make_comm(), TRANSPORTS[transport])
        before = results(attention, tensors, layout, split)
        for name in ("attention_forward_partial", "attention_backward_partial"):
            for number in numbers:
                fail_in_call(number, name, attention, tensors, layout, split)
                again = results(attention, tensors, layout, split)
                found.append(all(map(torch.equal, before, again)))
        attention.close()
    return found


def fail_in_call(number: int, name: str, attention: ContextAttention, *given: Any) -> None:
    compute, num_calls = getattr(loop, name), 0

    def fail(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == number:
            raise MemoryError("no memory is left")
        return compute(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, name, fail)
        with pytest.raises(MemoryError):
            results(attention, *given)


def test_what_an_error_leaves_under_way_is_not_taken_for_what_comes_next(ranks: WorkerPool) -> None:
    failing = {"ring": [1, 2, 4], "all-gather": [1], "ring over pairs": [1, 2]}
    for of_rank in ranks(4).run(fail_amid_steps, failing):
        assert of_rank == [True] * 12


def attend_by_turns(rank: int, world_size: int) -> list[bool]:
    """Two engines on the same ranks, whose graphs live at once; one rank alone has new layouts, and plans again."""
    split = contiguous(TOKENS, world_size)
    several = [ContextAttention(make_comm(), TRANSPORTS[each]) for each in ("ring", "ulysses")]
    tensors = [own_tensors(world_size, seed) for seed in range(2)]
    layouts = [layout_of("dense causal"), layout_of("longformer")]
    alone = [results(several[i], tensors[i], layouts[i], split) for i in range(2)]
    if rank == 0:
        layouts = [BlockLayout(each.patterns) for each in layouts]
    outs = [several[i](*tensors[i], layouts[i], split) for i in range(2)]
    by_turns = [[outs[i].detach(), *torch.autograd.grad(outs[i].sum(), tensors[i])] for i in (1, 0)]
    for each in several:
        each.close()
    return [all(map(torch.equal, *pair)) for pair in zip(reversed(alone), by_turns, strict=True)]


def test_engines_take_turns_and_found_plans_equal_made_ones(ranks: WorkerPool) -> None:
    assert ranks(2).run(attend_by_turns) == [[True, True]] * 2


def test_a_plan_that_cannot_be_made_is_refused_again() -> None:
    attention = ContextAttention(simulated(2), TRANSPORTS["ring"])
    tensors, split = own_tensors(2), contiguous(TOKENS, 2)
    part = dense_layout(2 * TOKENS, causal=True).select(((0, TOKENS),), ((0, TOKENS),))
    for _ in range(2):
        with refused("layout-length", "96 tokens"):
            attention(*tensors, part, split)


def kept_by_autograd(transport: str, layout: BlockLayout, split: TokenSplit) -> tuple[set[int], list[Tensor]]:
    """Storages that the graph of one attention keeps, and what it was given and gave."""
    attention, kept = ContextAttention(simulated(2), TRANSPORTS[transport]), set()
    shape = (1, TOKENS // 2, -1, HEAD_DIM)
    tensors = [torch.randn(TOKENS // 2, each * HEAD_DIM, requires_grad=True) for each in (HEADS, 2, 2)]
    q, k, v = (each.view(shape).transpose(1, 2) for each in tensors)  # as a layer's products lie in memory
    with saved_tensors_hooks(lambda each: kept.add(each.untyped_storage().data_ptr()) or each, lambda each: each):
        out = attention(q, k, v, layout, split)
    return kept, [q, k, v, out]


@pytest.mark.parametrize("transport", ["ring", "all-gather"])
def test_autograd_keeps_what_the_layer_has_and_the_log_sum_exp_alone(transport: str) -> None:
    kept, given = kept_by_autograd(transport, layout_of("dense causal"), contiguous(TOKENS, 2))
    own = {each.untyped_storage().data_ptr() for each in given}
    assert own < kept
    assert len(kept - own) == 1


FORMS = {"tokens before heads": (0, 2, 1, 3), "heads before tokens": (0, 1, 2, 3), "tokens first": (1, 2, 0, 3)}


def in_form(form: str, *shape: int) -> Tensor:
    """Of a shape, with dims in some order in memory."""
    dims = FORMS[form]
    return torch.randn([shape[dim] for dim in dims]).permute([dims.index(dim) for dim in range(4)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("structure", ["dense causal", "longformer"])
def test_results_have_the_forms_of_the_fakes(form: str, structure: str) -> None:
    plans = PlanCache(simulated(4), TRANSPORTS["ring"])
    ops, plan = ContextCustomOps(plans, runs_on_fakes=False), plans.place(layout_of(structure), contiguous(TOKENS, 4))
    q, k, v, grad_out = (in_form(form, 2, num_heads, TOKENS // 4, HEAD_DIM) for num_heads in (HEADS, 2, 2, HEADS))

    def forms_of(*given: Tensor) -> list[Any]:
        out, lse = ops.attend_in_steps(*given[:3], *[None] * 4, HEADS, plan, 1.0, 0.0)
        grads = ops.differentiate_in_steps(given[3], *given[:3], out, lse, *[None] * 4, HEADS, plan, 1.0, 0.0, False)
        return [(each.shape, each.stride(), each.dtype) for each in (out, lse, *grads)]

    found = forms_of(q, k, v, grad_out)
    with fake_tensors():
        fakes = [torch.empty_strided(each.shape, each.stride()) for each in (q, k, v, grad_out)]
        assert forms_of(*fakes) == found
    assert [stride for _, stride, _ in found[2:]] == [each.stride() for each in (q, k, v)]
    ops.close()


def test_an_output_is_in_its_form_whatever_came_first() -> None:
    """Results that other ranks send lie in memory as messages do."""
    q = torch.randn(2, HEADS, 6, HEAD_DIM)
    out, lse = in_form("tokens first", *q.shape), torch.randn(2, HEADS, 6)
    output = MergedOutput(q)
    output.merge(((0, 6),), out, lse)
    assert torch.equal(output.result()[0], out)
    assert torch.equal(output.result()[1], lse)
    assert output.result()[0].transpose(1, 2).is_contiguous()


def test_numbers_that_are_not_floating_are_refused_under_autocast_too() -> None:
    attention = ContextAttention(simulated(2), TRANSPORTS["ring"])
    q, k, v = (each.detach().long() for each in own_tensors(2))
    with torch.autocast("cpu", torch.bfloat16), refused("qkv-dtype-device"):
        attention(q, k, v, layout_of("dense"), contiguous(TOKENS, 2))
