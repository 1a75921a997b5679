"""Attention of some queries over some keys: densities, the tiles of the CPU, and parts that sum to the whole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.attention import reference_attention
from harness.refusals import refused
from shardwise.attention.api import drawn
from shardwise.attention.backends import AttentionGrads, Draw, SavedForBackward, ScoreModifiers
from shardwise.attention.block_layout import BlockLayout, pack
from shardwise.attention.cpu import CpuBackend
from shardwise.attention.cpu_plan import unfold
from shardwise.attention.custom_op import attend, attention_backward_partial, attention_forward_partial
from shardwise.layout.token_ranges import Runs, join
from shardwise.runtime.torch_private import fake_tensors

SCALE, HEADS = 0.3, 4


def tokens_of(runs: Runs) -> list[int]:
    return [token for run in runs for token in range(*run)]


@st.composite
def layouts(draw: Any) -> BlockLayout:
    """Random blocks of one or several documents, causal or not, of one head or of `HEADS`."""
    block, num_heads, causal = draw(st.integers(1, 5)), draw(st.sampled_from([1, HEADS])), draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    share = draw(st.sampled_from([0.3, 0.8, 1.0]))
    documents = []
    for _ in range(draw(st.integers(1, 3))):
        num_blocks = draw(st.integers(1, 6))
        blocks = torch.rand(num_heads, num_blocks, num_blocks, generator=generator) < share
        num_tokens = num_blocks * block - draw(st.integers(0, block - 1))
        documents.append(BlockLayout.from_blocks(blocks, block, causal=causal, num_tokens=num_tokens))
    return pack(documents)


@st.composite
def runs_of(draw: Any, num_tokens: int) -> Runs:
    """Up to four runs, that cut blocks and touch documents anyhow."""
    bounds = draw(st.lists(st.integers(0, num_tokens), max_size=8))
    ends = sorted(bounds[: len(bounds) // 2 * 2])
    return join([tuple(zip(ends[::2], ends[1::2], strict=True))])


@st.composite
def selections(draw: Any) -> tuple[BlockLayout, Runs, Runs]:
    layout = draw(layouts())
    return layout, draw(runs_of(layout.num_keys)), draw(runs_of(layout.num_keys))


class TestDensities:
    @given(selections())
    def test_are_shares_of_the_pairs_of_the_whole(self, selection: tuple[BlockLayout, Runs, Runs]) -> None:
        whole, query_runs, key_runs = selection
        queries, keys = tokens_of(query_runs), tokens_of(key_runs)
        some = whole.select(query_runs, key_runs)
        allowed = whole.allowed()[:, queries][:, :, keys]  # [heads or 1, Nq, Nk]
        assert (some.num_queries, some.num_keys) == (len(queries), len(keys))
        assert torch.equal(some.allowed(), allowed)
        assert some.density == pytest.approx(allowed.double().mean().item() if allowed.numel() else 0)
        below = torch.tensor(queries)[:, None] >= torch.tensor(keys)  # [Nq, Nk]
        pairs = len(allowed) * below.sum().item()
        assert some.causal_density == pytest.approx((allowed & below).sum().item() / pairs if pairs else 0)

    @given(selections(), st.integers(1, 9), st.integers(1, 9))
    def test_of_tiles_count_blocks_with_keys_that_some_row_sees(
        self, selection: tuple[BlockLayout, Runs, Runs], rows: int, columns: int
    ) -> None:
        some, computed = selection[0].select(*selection[1:]), 0
        for pattern in some.patterns:
            queries = tokens_of(pattern.query_runs)
            key_blocks = {token // pattern.block for token in tokens_of(pattern.key_runs)}
            for head in pattern.blocks:
                for start in range(0, len(queries), rows):
                    of_tile = {query // pattern.block for query in queries[start : start + rows]}
                    seen = {key for key in key_blocks for query in of_tile if head[query, key]}
                    computed += rows * columns * -(-len(seen) * pattern.block // columns)
        pairs = some.num_heads * some.num_queries * some.num_keys
        assert some.tile_density(rows, columns) == pytest.approx(computed / pairs if pairs else 0)


class Problem:
    """Tensors of the whole sequence, in float64, two samples; one token in five is padding."""

    def __init__(self, layout: BlockLayout, num_kv: int, p: float, is_padded: bool, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64, generator=generator)

        def bits(*shape: int) -> Tensor:
            return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)

        self.layout, num = layout, layout.num_keys
        self.q, self.grad_out = normal(2, HEADS, num, 8), normal(2, HEADS, num, 8)
        self.k, self.v = normal(2, num_kv, num, 8), normal(2, num_kv, num, 8)
        draw = Draw(bits(2, HEADS, num) | 1, bits(2, HEADS, num), bits(num), p) if p else None
        self.extras = ScoreModifiers(
            SCALE, torch.rand(2, num, generator=generator) > 0.2 if is_padded else None, None, draw
        )

    def part(self, queries: list[int], keys: list[int]) -> tuple[tuple[Tensor, ...], ScoreModifiers]:
        """q, k, v and the gradient of the output; and what acts on the scores."""
        padding, draw = self.extras.key_padding, self.extras.draw
        if draw is not None:
            draw = Draw(draw.factors[:, :, queries], draw.offsets[:, :, queries], draw.columns[keys], draw.p)
        tensors = (self.q[:, :, queries], self.k[:, :, keys], self.v[:, :, keys], self.grad_out[:, :, queries])
        return tensors, ScoreModifiers(SCALE, None if padding is None else padding[:, keys], None, draw)


def expected(tensors: tuple[Tensor, ...], extras: ScoreModifiers, allowed: Tensor) -> tuple[Tensor, ...]:
    leaves = [each.detach().clone().requires_grad_() for each in tensors[:3]]
    out, lse = reference_attention(
        *leaves, allowed[None], scale=extras.scale, key_padding=extras.key_padding, draw=extras.draw
    )
    return (out.detach(), lse.detach(), *torch.autograd.grad((out * tensors[3]).sum(), leaves))


problems = st.builds(
    Problem, layouts(), num_kv=st.sampled_from([4, 2, 1]), p=st.sampled_from([0.0, 0.3]), is_padded=st.booleans()
)


class TestCpuTiles:
    @settings(max_examples=150)
    @given(problems, st.data(), st.booleans())
    def test_equal_the_dense_reference(self, problem: Problem, data: st.DataObject, may_flash: bool) -> None:
        query_runs, key_runs = (data.draw(runs_of(problem.layout.num_keys)) for _ in range(2))
        queries, keys = tokens_of(query_runs), tokens_of(key_runs)
        some, backend = problem.layout.select(query_runs, key_runs), CpuBackend(may_flash=may_flash)
        (q, k, v, grad_out), extras = problem.part(queries, keys)
        plan = backend.plan(some, q, k)
        out, lse = backend.forward(q, k, v, extras, plan)
        grads = backend.backward(grad_out, None, SavedForBackward(q, k, v, out, lse), extras, plan, False)
        theirs = expected((q, k, v, grad_out), extras, problem.layout.allowed()[:, queries][:, :, keys])
        for mine, their in zip((out, lse, grads.q, grads.k, grads.v), theirs, strict=True):
            torch.testing.assert_close(mine, their, rtol=0, atol=1e-10)

    def test_visit_no_keys_after_the_last_query(self) -> None:
        whole = BlockLayout.from_blocks(torch.ones(8, 8), 16, causal=True)

        def visited(queries: Runs, keys: Runs) -> int:
            plan = unfold(CpuBackend().plan(whole.select(queries, keys), *[torch.empty(1, 1, 1, 8)] * 2))
            return sum(bucket.columns.numel() for bucket in plan.buckets)

        assert visited(((0, 16),), ((0, 128),)) == 1
        assert visited(((24, 32),), ((0, 128),)) == 2
        assert visited(((20, 24),), ((24, 128),)) == 0  # in one block, and yet after
        assert visited(((20, 24),), ((23, 128),)) == 1

    def test_have_slots_for_blocks_with_tokens_alone(self) -> None:
        one = BlockLayout.from_blocks(torch.ones(64, 64), 16)
        some = pack([one, one, one]).select(((20, 30), (1104, 1109)), ((500, 520), (2500, 2501)))
        plan = unfold(CpuBackend().plan(some, *[torch.empty(1, 1, 1, 8)] * 2))
        assert (plan.queries.num_blocks, plan.keys.num_blocks) == (2, 3)
        assert sum(bucket.rows.numel() for bucket in plan.buckets) == 1  # the second document has queries alone

    def test_need_no_gaps_where_runs_are_of_whole_blocks(self) -> None:
        some = BlockLayout.from_blocks(torch.ones(8, 8), 16, causal=True).select(((16, 32), (96, 128)), ((0, 64),))
        plan = unfold(CpuBackend().plan(some, *[torch.empty(1, 1, 1, 8)] * 2))
        assert not plan.queries.token_of.numel()
        assert not plan.keys.token_of.numel()


def merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of all keys, of those of parts of them; NaN nowhere."""
    lses = torch.stack([lse for _, lse in parts])  # [parts, B, H, Nq]
    shifted = lses - lses.amax(0).masked_fill(lses.amax(0) == -torch.inf, 0.0)
    weights = shifted.exp()
    total = weights.sum(0)
    out = sum(weight[..., None] * out for weight, (out, _) in zip(weights, parts, strict=True))
    return out / total.masked_fill(total == 0, 1.0)[..., None], lses.logsumexp(0)


class TestParts:
    @settings(max_examples=100)
    @given(problems, st.data())
    def test_sum_to_the_whole(self, problem: Problem, data: st.DataObject) -> None:
        layout, num = problem.layout, problem.layout.num_keys
        query_runs = data.draw(runs_of(num))
        bounds = [0, *sorted(data.draw(st.lists(st.integers(0, num), max_size=6))), num]
        runs = [tuple(pair for pair in [pair] if pair[0] < pair[1]) for pair in pairwise(bounds)]
        shares = [join(runs[first::2]) for first in (0, 1)] + [()]  # two parts of some runs each, and an empty one
        queries = tokens_of(query_runs)
        given = [
            (layout.select(query_runs, share), tokens_of(share), *problem.part(queries, tokens_of(share)))
            for share in shares
        ]
        found = [attention_forward_partial(*qkv[:3], extras, some, "cpu") for some, _, qkv, extras in given]
        out, lse = merged(found)
        sums = [torch.zeros_like(out), *(torch.full_like(each, torch.nan) for each in (problem.k, problem.v))]
        for some, keys, (q, k, v, grad_out), extras in given:
            grads = attention_backward_partial(grad_out, SavedForBackward(q, k, v, out, lse), extras, some, "cpu")
            sums[0] += grads.q
            sums[1][:, :, keys], sums[2][:, :, keys] = grads.k, grads.v
        tensors, extras = problem.part(queries, list(range(num)))
        for mine, theirs in zip(
            (out, lse, *sums), expected(tensors, extras, layout.allowed()[:, queries]), strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)

    @pytest.mark.parametrize("p", [0.0, 0.3])
    def test_gradients_are_not_rounded(self, p: float) -> None:
        problem = Problem(BlockLayout.from_blocks(torch.ones(8, 8), 16, causal=True), 2, p, is_padded=True)
        q, k, v, grad_out = (each.bfloat16() for each in (problem.q, problem.k, problem.v, problem.grad_out))
        out, lse = attention_forward_partial(q, k, v, problem.extras, problem.layout, "cpu")
        saved = SavedForBackward(q, k, v, out, lse)
        narrow, wide = (self.grads(grad_out, saved, problem, is_wide) for is_wide in (False, True))
        exact = self.grads(
            grad_out.double(),
            SavedForBackward(q.double(), k.double(), v.double(), out.double(), lse.double()),
            problem,
            is_wide=True,
        )
        for name in ("q", "k", "v"):
            assert (getattr(narrow, name).dtype, getattr(wide, name).dtype) == (torch.bfloat16, torch.float32)
            error, rounded = ((getattr(each, name) - getattr(exact, name)).abs().max() for each in (wide, narrow))
            assert error < 1e-4 < 1e-3 < rounded

    @staticmethod
    def grads(grad_out: Tensor, saved: SavedForBackward, problem: Problem, is_wide: bool) -> AttentionGrads:
        if is_wide:
            return attention_backward_partial(grad_out, saved, problem.extras, problem.layout, "cpu")
        backend = CpuBackend()
        plan = backend.plan(problem.layout, saved.q, saved.k)
        return backend.backward(grad_out, None, saved, problem.extras, plan, False)

    def test_belong_to_no_graph_and_are_planned_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plans: list[BlockLayout] = []

        class Counted(CpuBackend):
            def plan(self, layout: BlockLayout, q: Tensor, k: Tensor) -> Any:
                plans.append(layout)
                return super().plan(layout, q, k)

        monkeypatch.setattr("shardwise.attention.custom_op.backend_named", lambda name: Counted())
        some = BlockLayout.from_blocks(torch.ones(4, 4), 16, causal=True).select(((3, 40),), ((0, 20),))
        q = torch.randn(1, 2, 37, 8, requires_grad=True)
        k, v = (torch.randn(1, 1, 20, 8, requires_grad=True) for _ in range(2))
        out, lse = attention_forward_partial(q, k, v, ScoreModifiers(SCALE), some, "cpu")
        grads = attention_backward_partial(
            torch.ones_like(out), SavedForBackward(q, k, v, out, lse), ScoreModifiers(SCALE), some, "cpu"
        )
        assert not any(each.requires_grad for each in (out, lse, grads.q, grads.k, grads.v))
        assert plans == [some]
        assert torch.equal(attend(q, k, v, ScoreModifiers(SCALE), some, "cpu")[0], out)

    def test_of_fakes_have_the_forms_of_real_ones(self) -> None:
        some = BlockLayout.from_blocks(torch.ones(4, 4), 16).select(((3, 40),), ((0, 20),))

        def results() -> list[Tensor]:
            q = torch.zeros(2, 37, 4, 8, dtype=torch.bfloat16).transpose(1, 2)
            k = torch.zeros(2, 20, 2, 8, dtype=torch.bfloat16).transpose(1, 2)
            out, lse = attention_forward_partial(q, k, k, ScoreModifiers(SCALE), some, "cpu")
            grads = attention_backward_partial(
                out, SavedForBackward(q, k, k, out, lse), ScoreModifiers(SCALE), some, "cpu"
            )
            return [out, lse, grads.q, grads.k, grads.v]

        real = results()
        with fake_tensors():
            fake = results()
        assert [each.dtype for each in real] == [torch.bfloat16, *[torch.float32] * 4]
        assert [(each.shape, each.dtype, each.stride()) for each in fake] == [
            (each.shape, each.dtype, each.stride()) for each in real
        ]


class TestDraws:
    LAYOUT = BlockLayout.from_blocks(torch.ones(2, 2), 16)

    @pytest.mark.parametrize(
        ("queries", "keys"), [(((0, 8),), ((0, 32),)), (((0, 8), (16, 32)), ((0, 32),)), (((16, 32),), ((0, 16),))]
    )
    def test_need_positions(self, queries: Runs, keys: Runs) -> None:
        some = self.LAYOUT.select(queries, keys)
        with refused("draw-positions", "keys of 32 tokens"):
            drawn(torch.ones(1, 1, some.num_queries, 8), some, 0.1)

    def test_of_documents_cut_at_their_front_are_refused(self) -> None:
        some = pack([self.LAYOUT, self.LAYOUT]).select(((40, 64),), ((0, 64),))
        with refused("draw-positions", "24 queries", "64 keys of 64"):
            drawn(torch.ones(1, 1, 24, 8), some, 0.1)

    def test_of_all_tokens_and_of_the_last_queries_are_drawn(self) -> None:
        for some in (pack([self.LAYOUT, self.LAYOUT]), self.LAYOUT.select(((20, 32),), ((0, 32),))):
            assert drawn(torch.ones(1, 1, some.num_queries, 8), some, 0.1).columns.shape == (some.num_keys,)
