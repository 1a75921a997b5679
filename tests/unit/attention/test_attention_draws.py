"""Dropout of block-sparse attention: which bits, where they come from, and that keyed attention draws the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.attention import keep_mask, reference_attention
from harness.refusals import refused
from shardwise.attention import BlockLayout, block_sparse_attention
from shardwise.attention.api import drawn
from shardwise.dropout import KeyedDraws, ShardRegion, key_dropouts
from shardwise.dropout.hash_rng import Samples, grid_of, keyed_hashes, keyed_mask

P = 0.3
DENSE = BlockLayout.from_blocks(torch.ones(2, 2), 16, num_tokens=30)


class Attention(nn.Module):
    """Block-sparse or torch's, as asked for."""

    def __init__(self, layout: BlockLayout | None, p: float = P) -> None:
        super().__init__()
        self.layout, self.dropout = layout, p

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rate = self.dropout if self.training else 0.0
        if self.layout is None:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=rate, enable_gqa=True)
        return block_sparse_attention(q, k, v, self.layout, dropout=rate)


@contextmanager
def keyed(module: nn.Module, zone: ShardRegion | None = None, first: int = 0, num: int = 2) -> Iterator[None]:
    draws = KeyedDraws(7)
    undo = key_dropouts(module, draws, None if zone is None else {"": zone})
    try:
        with draws.at(0, 0, first, num):
            yield
    finally:
        for each in reversed(undo):
            each()


def tensors(num_samples: int = 2) -> list[Tensor]:
    return [torch.randn(num_samples, heads, 30, 8, dtype=torch.float64) for heads in (4, 2, 2)]


def test_hashes_are_those_of_the_mask() -> None:
    grid = grid_of((2, 3, 5, 7), None, Samples(0, 2), torch.device("cpu"))
    hashes = keyed_hashes(grid, 12345)
    x = hashes.factors[:, None] * hashes.columns + hashes.offsets[:, None]  # [rows, columns], wraps
    draw = drawn(torch.ones(1, 1, 30, 8), DENSE, P)
    assert torch.equal(x * (2 * x + 1) < draw.threshold, keyed_mask(grid, 12345, P))


def test_keeps_its_share_and_scales() -> None:
    q, k, v = tensors()
    draw = drawn(q, DENSE, P)
    assert abs(float(keep_mask(draw).double().mean()) - (1 - P)) < 0.03
    expected, _ = reference_attention(q, k, v, DENSE.allowed(), draw=draw)
    torch.testing.assert_close(block_sparse_attention(q, k, v, DENSE, dropout=draw), expected)


def test_follows_torchs_generator_elsewhere() -> None:
    inputs, found = tensors(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found += [block_sparse_attention(*inputs, DENSE, dropout=P) for _ in range(2)]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not any(torch.equal(found[0], other) for other in (found[1], found[4], found[5]))
    state = torch.get_rng_state()
    block_sparse_attention(*inputs, DENSE)
    assert torch.equal(torch.get_rng_state(), state)


def test_cached_keys_draw_by_true_positions() -> None:
    q, _, _ = tensors()
    torch.manual_seed(1)
    whole = keep_mask(drawn(q, DENSE, P))
    torch.manual_seed(1)
    assert torch.equal(keep_mask(drawn(q[:, :, 20:], DENSE.queries_from(20), P)), whole[:, :, 20:])


class TestKeyed:
    """In an engine's forward."""

    def test_a_dense_layout_drops_what_keyed_sdpa_drops(self) -> None:
        inputs, results = tensors(), []
        for layout in (DENSE, None):
            module = Attention(layout)
            with keyed(module):
                results.append([module(*inputs), module(*inputs)])
        torch.testing.assert_close(*results, rtol=0, atol=1e-12)
        assert not torch.equal(*results[0])

    def test_ranks_of_heads_and_samples_draw_what_one_process_draws(self) -> None:
        q, k, v = tensors(num_samples=4)
        module = Attention(DENSE)
        with keyed(module, num=4):
            whole = module(q, k, v)
        for head in range(2):
            for first in (0, 2):
                own = (slice(first, first + 2), slice(2 * head, 2 * head + 2))
                kv = (own[0], slice(head, head + 1))
                with keyed(module, ShardRegion(1, head, 2), first=first):
                    torch.testing.assert_close(module(q[own], k[kv], v[kv]), whole[own], rtol=0, atol=1e-12)

    def test_recomputations_draw_the_same(self) -> None:
        inputs = [each.requires_grad_() for each in tensors()]
        module, found = Attention(DENSE), []
        for run in (module, lambda *given: checkpoint(module, *given, use_reentrant=False)):
            with keyed(module):
                out = run(*inputs)
                found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))

    def test_evaluation_and_a_rate_of_zero_drop_nothing(self) -> None:
        inputs = tensors()
        expected = block_sparse_attention(*inputs, DENSE)
        for module in (Attention(DENSE).eval(), Attention(DENSE, 0.0)):
            with keyed(module):
                assert torch.equal(module(*inputs), expected)

    def test_where_ranks_share_a_forward_it_must_be_open(self) -> None:
        module = Attention(DENSE)
        key_dropouts(module, KeyedDraws(7), must_be_keyed=True)
        with refused("dropout-outside-forward"):
            module(*tensors())
