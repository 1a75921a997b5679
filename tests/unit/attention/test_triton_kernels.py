"""The kernels, in Triton's interpreter where there is no GPU, against attention written out in float64."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.attention import reference_attention
from harness.refusals import refused
from shardwise.attention import triton
from shardwise.attention.backends import AttentionGrads, BackendPlan, Draw, SavedForBackward, ScoreModifiers
from shardwise.attention.block_layout import BlockLayout, pack
from shardwise.attention.triton import backend
from shardwise.attention.triton.lut import HeadGroups
from shardwise.attention.triton.plan import plan_of

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCES = {torch.float32: 5e-6, torch.float16: 6e-3, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Case:
    """One row of the pairwise table."""

    heads: tuple[int, int] = (2, 1)
    block: int = 64
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    tokens: str = "ragged"  # whole, ragged, packed, empty, cached, per_head
    is_causal: bool = False
    has_padding: bool = False
    bias: str = ""  # dims that are not broadcast
    p: float = 0.0
    limit: int | None = None
    samples: int = 1
    scale: float = 0.2

    @property
    def layout(self) -> BlockLayout:
        num_heads = self.heads[0] if self.tokens in ("per_head", "empty") else 1
        size = 2 if self.block > 32 else 3
        most = size * self.block
        generator = torch.Generator().manual_seed(self.block + self.head_dim)
        blocks = torch.rand(num_heads, size, size, generator=generator) < 0.7
        blocks[:, -1, 0] = True
        if self.tokens == "empty":
            blocks[0] = False  # a head that sees nothing
            blocks[:, 0] = False  # rows
            blocks[:, :, -1] = False  # columns
        short = most if self.tokens == "whole" else most - self.block // 3
        layout = BlockLayout.from_blocks(blocks, self.block, causal=self.is_causal, num_tokens=short)
        if self.tokens == "packed":
            one = BlockLayout.from_blocks(torch.ones(1, 1), self.block, causal=self.is_causal, num_tokens=5)
            return pack([one, layout])
        return layout.queries_from(short - self.block // 2 - 3) if self.tokens == "cached" else layout


@dataclass(frozen=True, eq=False)
class Given:
    """The tensors of a case."""

    q: Tensor
    k: Tensor
    v: Tensor
    extras: ScoreModifiers
    grad_out: Tensor
    grad_lse: Tensor


def given(case: Case) -> Given:
    layout, (heads, kv) = case.layout, case.heads
    samples, num_queries, num_keys = case.samples, layout.num_queries, layout.num_keys

    def rows(num_heads: int, tokens: int) -> Tensor:  # [B, heads, N, D], in memory [B, N, heads, D]
        return torch.randn(samples, tokens, num_heads, case.head_dim).to(DEVICE, case.dtype).transpose(1, 2)

    padding = bias = draw = None
    if case.has_padding:
        padding = torch.rand(samples, num_keys, device=DEVICE) < 0.8
        padding[-1] = False  # a sample of nothing but padding, unless there is one alone
        padding[0, : num_keys // 2] = True
    if case.bias:
        sizes = (samples if "B" in case.bias else 1, heads if "H" in case.bias else 1, num_queries, num_keys)
        bias = torch.randn(sizes, device=DEVICE).to(case.dtype)
    if case.p:
        bits = [torch.randint(-(2**31), 2**31, (samples, heads, num_queries), device=DEVICE) for _ in range(2)]
        columns = torch.randint(-(2**31), 2**31, (num_keys,), device=DEVICE).int()
        draw = Draw(bits[0].int() | 1, bits[1].int(), columns, case.p)
    return Given(
        rows(heads, num_queries),
        rows(kv, num_keys),
        rows(kv, num_keys),
        ScoreModifiers(case.scale, padding, bias, draw),
        rows(heads, num_queries),
        torch.randn(samples, heads, num_queries, device=DEVICE),
    )


def computed(case: Case, tensors: Given) -> tuple[Tensor, Tensor, AttentionGrads]:
    q, k, v, extras = tensors.q, tensors.k, tensors.v, tensors.extras
    plan = planned(case, q)
    out, lse = backend.forward(q, k, v, extras, plan)
    saved = SavedForBackward(q, k, v, out, lse)
    needs_bias = extras.bias is not None
    return out, lse, backend.backward(tensors.grad_out, tensors.grad_lse, saved, extras, plan, needs_bias)


def planned(case: Case, q: Tensor) -> BackendPlan:
    heads = HeadGroups(*case.heads)
    return plan_of(case.layout, heads, head_dim=q.shape[3], dtype=q.dtype, device=q.device, limit=case.limit)


def expected(case: Case, tensors: Given) -> tuple[Tensor, Tensor, list[Tensor]]:
    extras = tensors.extras
    wide = [each.double().requires_grad_() for each in (tensors.q, tensors.k, tensors.v)]
    bias = None if extras.bias is None else extras.bias.double().requires_grad_()
    options: dict[str, Any] = {"scale": extras.scale, "key_padding": extras.key_padding, "draw": extras.draw}
    out, lse = reference_attention(*wide, case.layout.allowed().to(DEVICE), bias=bias, **options)
    loss = (out * tensors.grad_out).sum() + (lse * tensors.grad_lse).masked_fill(lse.isinf(), 0.0).sum()
    return out, lse, list(torch.autograd.grad(loss, [*wide, *([] if bias is None else [bias])]))


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = {  # every pair of values of: group, block, head size, dtype, tokens, causal, padding, bias, dropout, split
    "plain": Case((2, 1), 32, tokens="whole"),
    "causal": Case((2, 2), 64, 64, FP32, "ragged", True),
    "split": Case((2, 1), 32, 32, FP32, "ragged", True, False, "BH", 0.3, 1),
    "per_head": Case((4, 2), 32, 32, FP32, "per_head", False, False, "H", 0.0, 1),
    "empty": Case((2, 1), 32, 80, FP32, "empty", False, True, "", 0.2, None, 2),
    "packed": Case((2, 2), 32, 32, BF16, "packed", True, True, "BH"),
    "padded": Case((2, 1), 64, 32, FP16, "whole", True, True, "", 0.4, 1, 2),
    "block16": Case((2, 1), 16, 64, FP32, "packed", False, False, "B", 0.1, 1, 2),
    "block16_causal": Case((2, 2), 16, 80, BF16, "per_head", True, True, "", 0.0, None),
    "block128": Case((1, 1), 128, 80, FP16, "ragged", True, False, "BH", 0.0, None),
    "block128_bf16": Case((1, 1), 128, 64, BF16, "whole", False, True, "", 0.3),
    "cached": Case((2, 1), 32, 64, FP16, "cached", True, False, "", 0.2),
    "cached_wide": Case((2, 1), 32, 80, FP32, "cached", True, True, "B", 0.0, 1),
    "bias_of_none": Case((2, 2), 32, 32, FP32, "empty", True, False, "-", 0.0, None, 2),
    "bias_of_samples": Case((2, 1), 32, 32, BF16, "ragged", False, False, "B", 0.0, None, 2),
    "few_queries": Case((1, 1), 16, 32, FP16, "cached", False, False, "", 0.2, 1),
    "wide_packed": Case((2, 1), 128, 32, FP32, "packed", False, True, "", 0.0, 1),
    "empty_split": Case((2, 1), 64, 80, BF16, "empty", False, False, "BH", 0.1, 1),
    "empty_small": Case((2, 2), 16, 64, FP16, "empty", True, True, "H"),
    "own_heads": Case((2, 1), 64, 64, FP16, "per_head", True, False, "", 0.2),
    "packed_fp16": Case((1, 1), 64, 80, FP16, "packed", False),
    "whole_bias": Case((2, 1), 16, 80, BF16, "whole", True, False, "BH"),
    "ragged_padded": Case((1, 1), 16, 64, BF16, "ragged", False, True),
    "cached_bf16": Case((1, 1), 128, 32, BF16, "cached", True, False),
    "wide_own_heads": Case((1, 1), 128, 64, FP16, "per_head", False, False),
    "wide_empty": Case((1, 1), 128, 64, FP32, "empty", True, False),
    "cached_whole": Case((1, 1), 64, 64, FP32, "cached", True),
    "middling": Case((1, 1), 32, 32, FP32, "packed", True, False),
}
ODD = {  # values beside those
    "negative_scale": Case((1, 1), 64, 32, FP32, "ragged", scale=-0.3),
    "block_24": Case((1, 1), 24, 48, FP32, "ragged", True),
    "block_48": Case((4, 1), 48, 160, FP16, "per_head", True, True, limit=1),
    "block_96": Case((1, 1), 96, 96, FP16, "packed", True, p=0.1),
    "small_heads": Case((2, 2), 16, 8, FP32, "ragged", True, bias="H"),
    "widest_heads": Case((4, 1), 16, 256, BF16, "ragged", p=0.2, limit=1, scale=0.05),
    "widest_fp32": Case((1, 1), 16, 256, FP32, "per_head", True, limit=1, scale=0.05),
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", [*CASES, *ODD])
def test_equals_the_reference(name: str) -> None:
    case = (CASES | ODD)[name]
    tensors = given(case)
    out, lse, grads = computed(case, tensors)
    wanted_out, wanted_lse, wanted = expected(case, tensors)
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(out.double(), wanted_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
    found = [each for each in (grads.q, grads.k, grads.v, grads.bias) if each is not None]
    for each, want, like in zip(found, wanted, (tensors.q, tensors.k, tensors.v, tensors.extras.bias), strict=False):
        assert like is not None
        assert (each.dtype, each.shape) == (like.dtype, like.shape)
        largest = max(1.0, float(want.abs().max()))
        torch.testing.assert_close(each.double(), want, rtol=tolerance, atol=tolerance * largest)
    assert len(found) == len(wanted)


def test_the_cases_hold_what_their_names_say() -> None:
    """A split case is split; full and partial entries, gathered and whole ones, all occur on both sides."""
    seen = set()
    for case in CASES.values():
        plan = planned(case, given(case).q)
        for side, numbers in (("queries", plan.numbers[:5]), ("keys", plan.numbers[5:])):
            items, full, partial, _ = plan.tensors[:4] if side == "queries" else plan.tensors[4:]
            tile, entry, run, sub_block, num_slots = numbers
            seen |= {(side, "split", num_slots > 0), (side, "gathered", entry > sub_block), (side, "runs", tile > run)}
            seen |= {(side, "full", len(full) > 1), (side, "partial", len(partial) > 1)}
            seen |= {(side, "heads", len(items) > 1)}
    kinds = ("split", "gathered", "runs", "full", "partial", "heads")
    assert seen >= {(side, kind, True) for side in ("queries", "keys") for kind in kinds}


def test_the_cases_hold_every_pair_of_values() -> None:
    def values(case: Case) -> list[object]:
        shape = [case.heads[0] // case.heads[1], case.block, case.head_dim, case.dtype, case.tokens, case.is_causal]
        return [*shape, case.has_padding, bool(case.bias), case.p > 0, case.limit == 1]

    rows = [values(case) for case in CASES.values()]
    columns = list(zip(*rows, strict=True))
    for one, other in itertools.combinations(columns, 2):
        assert set(zip(one, other, strict=True)) == set(itertools.product(one, other))


def test_tensors_may_lie_in_memory_as_they_like() -> None:
    """Views of fused projections, heads that are one by expansion, and the gradient of a sum, which has no strides."""
    case = Case((2, 2), 32, 32, FP16, "whole", True, samples=2)
    tensors = given(case)
    num_tokens, shape = case.layout.num_keys, tensors.q.shape
    fused = torch.randn(num_tokens, 2, 3, 2, 32, device=DEVICE).half().permute(2, 1, 3, 0, 4)  # [q k v, B, H, N, D]
    odd = {
        "fused": replace(tensors, q=fused[0], k=fused[1], v=fused[2]),
        "expanded": replace(tensors, k=fused[1][:, :1].expand(shape), v=fused[2][:, :, :1].expand(shape)),
        "transposed": replace(tensors, q=torch.randn(2, 2, 32, num_tokens, device=DEVICE).half().mT),
        "gradient of a sum": replace(tensors, grad_out=torch.ones((), device=DEVICE).half().expand(shape)),
    }
    for name, strided in odd.items():
        plain = {each: getattr(strided, each).contiguous() for each in ("q", "k", "v", "grad_out")}
        results = flat(computed(case, strided)), flat(computed(case, replace(strided, **plain)))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True)), name


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_a_bias_of_minus_infinity_hides_a_pair_and_may_hide_a_row(dtype: torch.dtype) -> None:
    case = Case((1, 1), 16, 32, dtype, "ragged", bias="H")
    tensors = given(case)
    bias = tensors.extras.bias
    assert bias is not None
    bias[:, :, 3], bias[:, :, :, 5] = -torch.inf, -torch.inf
    out, lse, grads = computed(case, tensors)
    sees = (bias > -torch.inf) & case.layout.allowed().to(DEVICE)
    wide = (tensors.q.double(), tensors.k.double(), tensors.v.double())
    finite = bias.nan_to_num(neginf=0.0).double()
    wanted_out, wanted_lse = reference_attention(*wide, sees, scale=case.scale, bias=finite)
    torch.testing.assert_close(out.double(), wanted_out, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
    assert lse[0, 0, 3] == -torch.inf
    assert grads.bias is not None
    assert all(each.isfinite().all() for each in (grads.q, grads.k, grads.v, grads.bias))
    for hidden in (out[:, :, 3], grads.q[:, :, 3], grads.k[:, :, 5], grads.v[:, :, 5], grads.bias[:, :, 3]):
        assert not hidden.any()


def test_is_bitwise_repeatable_and_the_same_alone_or_in_a_batch() -> None:
    case = Case((2, 1), 16, 32, FP32, "ragged", True, False, "", 0.3, 1, 2)
    tensors = given(case)
    first, second = computed(case, tensors), computed(case, tensors)
    one = {name: getattr(tensors, name)[1:] for name in ("q", "k", "v", "grad_out", "grad_lse")}
    draw = tensors.extras.draw
    assert draw is not None
    extras = replace(tensors.extras, draw=replace(draw, factors=draw.factors[1:], offsets=draw.offsets[1:]))
    alone = computed(case, Given(**one, extras=extras))
    for both, again, single in zip(flat(first), flat(second), flat(alone), strict=True):
        assert torch.equal(both, again)
        assert torch.equal(both[1:], single)


def flat(results: tuple[Tensor, Tensor, AttentionGrads]) -> list[Tensor]:
    out, lse, grads = results
    return [out, lse, grads.q, grads.k, grads.v]


def test_a_future_token_changes_no_earlier_bit() -> None:
    case = Case((1, 1), 32, 32, FP32, "ragged", True)
    tensors = given(case)
    plan = planned(case, tensors.q)
    out, _ = backend.forward(tensors.q, tensors.k, tensors.v, tensors.extras, plan)
    k, v = tensors.k.clone(), tensors.v.clone()
    k[:, :, 40:], v[:, :, 40:] = 1e3, -1e3
    changed, _ = backend.forward(tensors.q, k, v, tensors.extras, plan)
    assert torch.equal(changed[:, :, :40], out[:, :, :40])
    assert not torch.equal(changed[:, :, 40:], out[:, :, 40:])


def test_scores_beyond_the_range_of_exp_stay_finite() -> None:
    case = Case((1, 1), 32, 32, FP32, "ragged", scale=1e4)
    out, lse, grads = computed(case, given(case))
    assert all(each.isfinite().all() for each in (out, lse, grads.q, grads.k, grads.v))


def test_what_no_kernel_serves_is_refused() -> None:
    layout = BlockLayout.from_blocks(torch.ones(1, 1), 16)
    double = torch.zeros(1, 1, 16, 32, dtype=torch.float64)
    with refused("triton-dtype", "float64"):
        backend.plan(layout, double, double)
    wide = torch.zeros(1, 1, 16, 320)
    with refused("triton-head-size", "256"):
        backend.plan(layout, wide, wide)
    many = torch.zeros(1, 3, 16, 32)
    with refused("layout-heads", "2 heads", "queries 3"):
        backend.plan(BlockLayout.from_blocks(torch.ones(2, 1, 1), 16), many, many)


def test_says_that_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(triton, "launch", raising=False)
    monkeypatch.setitem(sys.modules, "shardwise.attention.triton.launch", None)
    case = Case((1, 1), 16, 32)
    tensors = given(case)
    with refused("triton-missing"):
        backend.forward(tensors.q, tensors.k, tensors.v, tensors.extras, planned(case, tensors.q))
