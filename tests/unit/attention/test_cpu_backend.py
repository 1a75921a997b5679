"""The CPU's back end against attention written out densely in float64, over pairs of its features."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.attention import reference_attention
from shardwise.attention.backends import Draw, SavedForBackward, ScoreModifiers
from shardwise.attention.block_layout import BlockLayout, pack
from shardwise.attention.cpu import CpuBackend
from shardwise.attention.cpu_plan import unfold
from shardwise.runtime.torch_private import OpMode, pytree

HEADS, SCALE = 4, 0.3
SPLITTING = CpuBackend(flash_scores=1 << 13, written_out_scores=1 << 13)
# Odd settings of each feature: every pair of settings of two features meets in some case.
FEATURES: dict[str, tuple[Any, ...]] = {
    "blocks": ("window", "random", "empty", "dense"),
    "form": ("plain", "ragged", "packed", "cached", "selected"),
    "block": (16, 64),
    "causal": (False, True),
    "num_kv": (4, 2, 1),
    "per_head": (False, True),
    "padding": (False, True),
    "bias": (None, (1, 1), (2, HEADS), (1, HEADS), (2, 1)),
    "p": (0.0, 0.3),
    "grad_lse": (False, True),
    "backend": (CpuBackend(), SPLITTING, CpuBackend(may_flash=False)),
}


def pairwise(features: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Cases in which every pair of settings of two features occurs, chosen greedily from shuffled ones."""
    names = list(features)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(features[a]))
        for j in range(len(features[b]))
    }
    generator = torch.Generator().manual_seed(0)
    while missing:
        best: dict[str, int] = {}
        covered: set[Any] = set()
        for _ in range(40):
            case = {name: int(torch.randint(len(features[name]), (), generator=generator)) for name in names}
            case |= dict(min(missing))
            new = missing & set(itertools.combinations(case.items(), 2))
            if len(new) > len(covered):
                best, covered = case, new
        missing -= covered
        yield {name: features[name][index] for name, index in best.items()}


@dataclass(frozen=True, eq=False)
class Problem:
    """Leaves, what else acts on scores, and gradients of the results."""

    layout: BlockLayout
    leaves: tuple[Tensor, ...]
    extras: ScoreModifiers
    grad_out: Tensor
    grad_lse: Tensor | None


def blocks_of(kind: str, num_heads: int, num_blocks: int) -> Tensor:
    rows = torch.arange(num_blocks)
    if kind == "window":
        blocks = (rows[:, None] - rows).abs() <= 1  # [num_blocks, num_blocks]
        blocks[0] = blocks[:, 0] = True
        return blocks.repeat(num_heads, 1, 1)
    blocks = torch.rand(num_heads, num_blocks, num_blocks) < (1.0 if kind == "dense" else 0.3)
    if kind == "empty":
        blocks[:, num_blocks // 2] = False
        blocks[-1] = False
    return blocks


def layout_of(case: dict[str, Any]) -> BlockLayout:
    num_heads, block = HEADS if case["per_head"] else 1, case["block"]

    def one(kind: str, num_tokens: int) -> BlockLayout:
        blocks = blocks_of(kind, num_heads, -(-num_tokens // block))
        return BlockLayout.from_blocks(blocks, block, causal=case["causal"], num_tokens=num_tokens)

    if case["form"] == "packed":
        return pack([one(case["blocks"], 150), one("window", 64), one("random", 70)])
    if case["form"] == "selected":
        documents = pack([one(case["blocks"], 150), one("window", 64)])
        return documents.select(((5, 40), (70, 75), (128, 192)), ((0, 33), (48, 122), (155, 160)))
    layout = one(case["blocks"], 256 if case["form"] == "plain" else 201)
    return layout.queries_from(37) if case["form"] == "cached" else layout


def problem_of(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> Problem:
    """Two samples; of the second one every key is padding, where there is padding."""
    layout = layout_of(case)
    num_queries, num_keys = layout.num_queries, layout.num_keys
    q = torch.randn(2, num_queries, HEADS, 16, dtype=dtype).transpose(1, 2)
    k, v = (torch.randn(2, case["num_kv"], num_keys, 16, dtype=dtype) for _ in range(2))
    bias = None if case["bias"] is None else torch.randn(*case["bias"], num_queries, num_keys, dtype=dtype)
    padding = torch.stack([torch.rand(num_keys) > 0.3, torch.zeros(num_keys, dtype=torch.bool)])
    draw = None
    if case["p"]:
        factors, offsets, columns = (
            torch.randint(-(2**31), 2**31, shape).to(torch.int32)
            for shape in ((2, HEADS, num_queries), (2, HEADS, num_queries), (num_keys,))
        )
        draw = Draw(factors | 1, offsets, columns, case["p"])
    extras = ScoreModifiers(SCALE, padding if case["padding"] else None, bias, draw)
    leaves = (q, k, v) if bias is None else (q, k, v, bias)
    grad_out = torch.randn(2, HEADS, num_queries, 16, dtype=dtype)
    grad_lse = torch.randn(2, HEADS, num_queries, dtype=torch.promote_types(dtype, torch.float32))
    return Problem(layout, leaves, extras, grad_out, grad_lse if case["grad_lse"] else None)


def run(backend: CpuBackend, problem: Problem) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and the gradients of all leaves."""
    q, k, v = problem.leaves[:3]
    plan = backend.plan(problem.layout, q, k)
    out, lse = backend.forward(q, k, v, problem.extras, plan)
    saved, needs_bias = SavedForBackward(q, k, v, out, lse), problem.extras.bias is not None
    grads = backend.backward(problem.grad_out, problem.grad_lse, saved, problem.extras, plan, needs_bias)
    return (out, lse, grads.q, grads.k, grads.v, *([] if grads.bias is None else [grads.bias]))


def expected(problem: Problem) -> tuple[Tensor, ...]:
    leaves = [leaf.detach().double().requires_grad_() for leaf in problem.leaves]
    extras = problem.extras
    bias = leaves[3] if len(leaves) > 3 else None
    out, lse = reference_attention(
        *leaves[:3],
        problem.layout.allowed()[None],
        scale=SCALE,
        key_padding=extras.key_padding,
        bias=bias,
        draw=extras.draw,
    )
    total = (out * problem.grad_out).sum()
    if problem.grad_lse is not None:
        total = total + (lse.masked_fill(lse == -torch.inf, 0.0) * problem.grad_lse).sum()
    return (out.detach(), lse.detach(), *torch.autograd.grad(total, leaves))


PLAIN: dict[str, Any] = {name: settings[0] for name, settings in FEATURES.items()}


@pytest.mark.quick(10)
@pytest.mark.parametrize("case", list(pairwise(FEATURES)), ids=lambda case: "-".join(map(str, case.values()))[:90])
def test_equals_the_dense_reference(case: dict[str, Any]) -> None:
    torch.manual_seed(0)
    problem = problem_of(case)
    for mine, theirs in zip(run(case["backend"], problem), expected(problem), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_narrow_dtypes(dtype: torch.dtype, atol: float, p: float) -> None:
    torch.manual_seed(0)
    problem = problem_of(PLAIN | {"form": "ragged", "causal": True, "num_kv": 2, "padding": True, "p": p}, dtype)
    got = run(CpuBackend(), problem)
    assert [each.dtype for each in got] == [dtype, torch.float32, dtype, dtype, dtype]
    for mine, theirs in zip(got, expected(problem), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=atol)


def test_a_fully_padded_sample_gives_zeros() -> None:
    torch.manual_seed(0)
    for num_kv, p in ((4, 0.0), (1, 0.3)):
        out, lse, *grads = run(CpuBackend(), problem_of(PLAIN | {"padding": True, "num_kv": num_kv, "p": p}))
        assert (lse[1] == -torch.inf).all()
        assert not any(each[1].any() for each in (out, *grads))


@pytest.mark.parametrize("case", [PLAIN, PLAIN | {"bias": (1, 1), "p": 0.3}, PLAIN | {"per_head": True, "num_kv": 1}])
def test_repeats_bit_by_bit_on_any_number_of_threads(case: dict[str, Any]) -> None:
    torch.manual_seed(0)
    problem = problem_of(case, torch.float32)
    num_threads = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 1, 2):
            torch.set_num_threads(threads)
            results.append(run(CpuBackend(), problem))
    finally:
        torch.set_num_threads(num_threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    "case", [{"block": 16}, {"block": 64}, {"block": 16, "p": 0.3}, {"num_kv": 1, "blocks": "random"}]
)
def test_causal_never_leaks(case: dict[str, Any]) -> None:
    torch.manual_seed(0)
    problem = problem_of(PLAIN | {"causal": True, "form": "ragged"} | case, torch.float32)
    q, k, v = (leaf.clone() for leaf in problem.leaves[:3])
    backend = CpuBackend()
    plan = backend.plan(problem.layout, q, k)
    before = backend.forward(q, k, v, problem.extras, plan)
    for changed in (q, k, v):
        changed[:, :, 103:] *= 100
    after = backend.forward(q, k, v, problem.extras, plan)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, :, :103], b[:, :, :103])
        assert not torch.equal(a[:, :, 103:], b[:, :, 103:])


class Largest(OpMode):
    """The elements of the largest tensor that any op makes, and of all it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.untyped_storage().nbytes() // leaf.element_size())
        return made


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_no_tensor_grows_beyond_inputs_and_budget(p: float) -> None:
    backend, budget = CpuBackend(flash_scores=1 << 17, written_out_scores=1 << 17), 1 << 17
    largest = {}
    for num_blocks in (16, 64):
        num_tokens = num_blocks * 64
        layout = BlockLayout.from_blocks(blocks_of("window", 1, num_blocks), 64, causal=True)
        q = torch.randn(1, 2, num_tokens, 16)
        columns = torch.arange(num_tokens, dtype=torch.int32)
        rows = columns.repeat(1, 2, 1) | 1  # [1, 2, num_tokens]
        problem = Problem(
            layout, (q, q, q), ScoreModifiers(SCALE, draw=Draw(rows, rows, columns, p) if p else None), q, None
        )
        with Largest() as seen:
            run(backend, problem)
        largest[num_blocks] = seen.numel
        assert seen.numel <= max(budget, q.numel())
    assert largest[64] * 64 < (64 * 64) ** 2


def test_rows_that_see_the_same_share_a_tile_and_others_do_not() -> None:
    window = (torch.arange(64)[:, None] - torch.arange(64)).abs() <= 8  # [64, 64]
    q = torch.empty(1, 1, 64 * 64, 8)

    def heights(blocks: Tensor, block: int) -> set[int]:
        layout = BlockLayout.from_blocks(blocks, block)
        return {bucket.rows.shape[1] for bucket in unfold(CpuBackend().plan(layout, q, q)).buckets}

    assert heights(torch.eye(64), 64) == {1}
    assert min(heights(window, 64)) == 2
    assert min(heights(window, 16)) >= 4
    assert heights(torch.ones(64, 64), 64) == {4}


class Attention(torch.autograd.Function):
    """The back end alone, for `gradcheck`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, extras: ScoreModifiers) -> Any:
        plan = CpuBackend().plan(layout, q, k)
        out, lse = CpuBackend().forward(q, k, v, extras, plan)
        ctx.given = (SavedForBackward(q, k, v, out, lse), extras, plan)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> Any:
        grads = CpuBackend().backward(grad_out, grad_lse if grad_lse.any() else None, *ctx.given, False)
        return grads.q, grads.k, grads.v, None, None


@pytest.mark.parametrize("takes_lse", [False, True])
def test_gradients_equal_differences(takes_lse: bool) -> None:
    torch.manual_seed(0)
    layout = BlockLayout.from_blocks(torch.tensor([[1, 0], [1, 1]]), 4, causal=True, num_tokens=7)
    q, k, v = (torch.randn(1, heads, 7, 3, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))

    def attend(*qkv: Tensor) -> tuple[Tensor, ...]:
        out, lse = Attention.apply(*qkv, layout, ScoreModifiers(SCALE))
        return (out, lse) if takes_lse else (out,)

    assert torch.autograd.gradcheck(attend, (q, k, v))


def test_a_layout_is_planned_once() -> None:
    layout = BlockLayout.from_blocks(torch.eye(2), 16)
    q = torch.empty(1, 2, 32, 8)
    assert CpuBackend().plan(layout, q, q) is CpuBackend().plan(layout, q.double(), q.double())
    assert CpuBackend().plan(layout, q, q[:, :1]) is not CpuBackend().plan(layout, q, q)
