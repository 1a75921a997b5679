"""Block-sparse attention in models that call torch's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.attention import reference_attention
from harness.refusals import refused
from harness.zoo_cells import case_of
from shardwise import ConfigError
from shardwise.attention import (
    BlockLayout,
    block_sparse_attention,
    sparse_sdpa,
    sparse_sdpa_module,
    use_sparse_attention,
)
from shardwise.attention.structures import FixedSparsityConfig
from shardwise.context.apply import prove_huggingface
from shardwise.dropout import KeyedDraws, ShardRegion, key_dropouts
from shardwise.runtime.recompute import recompute_forward

P, LENGTH = 0.3, 40
LAYOUT = BlockLayout.from_blocks(torch.eye(3) + torch.eye(3).roll(1, 0), 16, num_tokens=LENGTH)
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
REAL = torch.arange(LENGTH) < torch.tensor([[LENGTH], [25]])  # [B, N]


def tensors(num_kv_heads: int = 4) -> list[Tensor]:
    shapes = [(2, heads, LENGTH, 8) for heads in (4, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def biased(calls: list[dict[str, Any]]) -> list[bool]:
    return [call["bias"] is not None for call in calls]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What reaches the functional entry."""
    found: list[dict[str, Any]] = []

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        found.append(kwargs)
        return block_sparse_attention(*args, **kwargs)

    monkeypatch.setattr("shardwise.attention.sdpa_patch.block_sparse_attention", watched)
    return found


FLOATS = torch.randn(LENGTH, LENGTH, dtype=torch.float64)


@pytest.mark.parametrize(
    ("given", "allowed", "bias", "is_biased"),
    [
        ({}, True, None, False),
        ({"is_causal": True}, CAUSAL, None, False),
        ({"scale": 0.2}, True, None, False),
        ({"attn_mask": REAL[:, None, None], "is_causal": True}, CAUSAL & REAL[:, None, None], None, False),
        ({"attn_mask": CAUSAL.T, "is_causal": True}, CAUSAL & CAUSAL.T, None, True),
        ({"attn_mask": REAL[:, None, None]}, REAL[:, None, None], None, False),
        ({"attn_mask": REAL[:, None, None].expand(2, 1, LENGTH, LENGTH)}, REAL[:, None, None], None, False),
        ({"attn_mask": CAUSAL}, CAUSAL, None, False),
        ({"attn_mask": CAUSAL & REAL[:, None, None]}, CAUSAL & REAL[:, None, None], None, False),
        ({"attn_mask": CAUSAL.T}, CAUSAL.T, None, True),
        ({"attn_mask": CAUSAL.expand(2, 4, LENGTH, LENGTH)}, CAUSAL, None, True),
        ({"attn_mask": FLOATS}, True, FLOATS, True),
        ({"attn_mask": FLOATS[:1]}, True, FLOATS[:1], True),
        ({"attn_mask": FLOATS.expand(2, 1, LENGTH, LENGTH)}, True, FLOATS, True),
    ],
)
def test_a_query_sees_what_layout_and_call_let_it(
    calls: list[dict[str, Any]], given: dict[str, Any], allowed: Any, bias: Tensor | None, is_biased: bool
) -> None:
    inputs = tensors()
    with sparse_sdpa(LAYOUT):
        out = F.scaled_dot_product_attention(*inputs, **given)
    seen = LAYOUT.allowed() & allowed
    expected, _ = reference_attention(*inputs, seen, scale=given.get("scale"), bias=bias)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert biased(calls) == [is_biased]
    grads = [torch.autograd.grad(each.sin().sum(), inputs) for each in (out, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


def test_a_mask_is_read_once_until_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, inputs, mask = [], tensors(), CAUSAL.clone()
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *pair: compared.append(1) or equal(*pair))
    with sparse_sdpa(LAYOUT):
        first = [F.scaled_dot_product_attention(*inputs, each) for each in (mask, mask, mask[None, None])]
        assert len(compared) <= 4  # a mask and a view of it, each with both kinds
        assert equal(first[0], first[2])
        mask[1:, 0] = False
        changed = F.scaled_dot_product_attention(*inputs, mask)
    expected, _ = reference_attention(*inputs, LAYOUT.allowed() & mask)
    torch.testing.assert_close(changed, expected, rtol=0, atol=1e-12)


def test_structures_have_a_layout_for_each_length_and_kv_heads_may_be_fewer() -> None:
    structure = FixedSparsityConfig(4, block=16, num_local_blocks=2, attention="unidirectional")
    with sparse_sdpa(structure):
        for length in (LENGTH, 17):
            inputs = [each[:, :, :length] for each in tensors(2)]
            out = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
            expected, _ = reference_attention(*inputs, structure.layout(length).allowed())
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


class TestOthers:
    def test_cross_attention_is_dense(self) -> None:
        q, k, v = tensors()
        with sparse_sdpa(LAYOUT):
            found = F.scaled_dot_product_attention(q[:, :, :7], k, v)
        assert torch.equal(found, F.scaled_dot_product_attention(q[:, :, :7], k, v))

    @pytest.mark.parametrize(
        ("change", "values"),
        [
            (lambda q, k, v: (q[0], k[0], v[0]), ["(4, 40, 8)", "3 dims"]),
            (lambda q, k, v: (q, k, v[..., :4]), ["8 for queries", "4 for values"]),
            (
                lambda q, k, v: (q[:, :, 1:], k[:, :, 1:], v[:, :, 1:]),
                ["39 tokens", "40"],
            ),
        ],
    )
    def test_raise_or_are_dense(self, change: Any, values: list[str]) -> None:
        inputs = change(*tensors())
        with sparse_sdpa(LAYOUT), refused("sdpa-not-sparse", *values):
            F.scaled_dot_product_attention(*inputs)
        with sparse_sdpa(LAYOUT, otherwise="dense"):
            found = F.scaled_dot_product_attention(*inputs)
        assert torch.equal(found, F.scaled_dot_product_attention(*inputs))

    def test_heads_that_do_not_fit(self) -> None:
        layout = BlockLayout.from_blocks(torch.ones(3, 1, 1), LENGTH)
        with sparse_sdpa(layout), refused("sdpa-not-sparse", "4 heads", "layout of 3"):
            F.scaled_dot_product_attention(*tensors())

    def test_arguments_of_its_own(self) -> None:
        with refused("argument-choice", "otherwise='error'"):
            sparse_sdpa(LAYOUT, otherwise="error").__enter__()  # type: ignore[arg-type]
        with refused("wrong-argument", "structure=3", "int"):
            sparse_sdpa(3).__enter__()  # type: ignore[arg-type]


class Attention(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(16, 48, dtype=torch.float64), p

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (12, 4)).transpose(1, 2).chunk(3, 1)  # [B, 4, N, 4] each
        rate = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=rate).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention(p), Attention(p)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def result(model: nn.Module, x: Tensor) -> list[Tensor]:
    out = model(x)
    return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]


class TestModule:
    @pytest.mark.parametrize("mode", ["full", "selective"])
    def test_recomputations_are_sparse_too(self, mode: str) -> None:
        model, x = Model(), torch.randn(2, LENGTH, 16, dtype=torch.float64)
        dense = result(model, x)
        with sparse_sdpa(LAYOUT):
            expected = result(model, x)
        undo = sparse_sdpa_module(model, LAYOUT)
        assert all(torch.equal(*pair) for pair in zip(result(model, x), expected, strict=True))
        undo_recompute = [recompute_forward(block, mode) for block in model.blocks]
        assert all(torch.equal(*pair) for pair in zip(result(model, x), expected, strict=True))
        for each in undo_recompute:
            each()
        undo()
        assert all(torch.equal(*pair) for pair in zip(result(model, x), dense, strict=True))
        assert type(model) is Model
        assert not torch.allclose(dense[0], expected[0])

    def test_copies_are_sparse_on_their_own(self) -> None:
        model, x = Model(), torch.randn(2, LENGTH, 16, dtype=torch.float64)
        undo = sparse_sdpa_module(model, LAYOUT)
        expected, copied = model(x), copy.deepcopy(model)
        undo()
        assert torch.equal(copied(x), expected)
        assert not torch.equal(model(x), expected)

    def test_its_state_dict_is_the_models(self) -> None:
        model = Model()
        before = list(model.state_dict())
        sparse_sdpa_module(model, LAYOUT)
        assert list(model.state_dict()) == before
        pickle.dumps(model.state_dict())

    def test_it_serves_a_model_whose_refusal_names_it(self) -> None:
        """Falcon calls torch's attention, whose tokens mesh.cp would spread: its refusal there names another fix."""
        pytest.importorskip("transformers")
        case = case_of("falcon/new", {})
        model, batch = case.build(torch.float64), case.batch(0, 2, torch.float64)
        with refused("attention-interface", "sparse_sdpa_module"):
            use_sparse_attention(model, LAYOUT)
        with pytest.raises(ConfigError, match=r"zero\.stage=3") as caught:
            prove_huggingface(model)
        assert "sparse_sdpa_module" not in str(caught.value)
        dense = model(**batch).loss
        blocks = torch.ones(3, 3), torch.eye(3)
        full, diagonal = (BlockLayout.from_blocks(each, 4, num_tokens=12) for each in blocks)
        undo = sparse_sdpa_module(model, full)
        torch.testing.assert_close(model(**batch).loss, dense, rtol=0, atol=1e-11)
        undo()
        sparse_sdpa_module(model, diagonal)
        assert abs(model(**batch).loss - dense) > 1e-3


@contextmanager
def keyed(model: nn.Module, zones: dict[str, ShardRegion] | None = None) -> Iterator[None]:
    draws = KeyedDraws(7)
    undo = key_dropouts(model, draws, zones)
    try:
        with draws.at(0, 0, 0, 2):
            yield
    finally:
        for each in reversed(undo):
            each()


class TestKeyedDropout:
    DENSE = BlockLayout.from_blocks(torch.ones(3, 3), 16, num_tokens=LENGTH)

    def test_a_dense_layout_drops_what_the_model_drops_without(self) -> None:
        model, x = Model(P), torch.randn(2, LENGTH, 16, dtype=torch.float64)
        with keyed(model):
            expected = result(model, x)
        undo = sparse_sdpa_module(model, self.DENSE)
        for mode in (None, "full", "selective"):
            with keyed(model):
                undo_recompute = [recompute_forward(block, mode) for block in model.blocks] if mode else []
                found = result(model, x)
                for each in undo_recompute:
                    each()
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
        undo()

    def test_the_context_drops_so_too(self, calls: list[dict[str, Any]]) -> None:
        model, x = Model(P), torch.randn(2, LENGTH, 16, dtype=torch.float64)
        with keyed(model):
            expected = model(x)
        with keyed(model), sparse_sdpa(self.DENSE):
            torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)
        assert [call["dropout"] for call in calls] == [P, P]

    def test_without_an_engine_it_drops_at_the_rate(self) -> None:
        q, k, _ = (torch.zeros(2, 4, LENGTH, 8) for _ in range(3))
        with sparse_sdpa(self.DENSE):
            out = F.scaled_dot_product_attention(q, k, torch.ones_like(q), dropout_p=P)
        assert abs(float(out.mean()) - 1) < 0.05
        assert out.std() > 0.01
