"""The functional entry against attention written out in float64, and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from harness.attention import reference_attention
from harness.combinations import cover
from harness.refusals import refused
from shardwise.attention import (
    BlockLayout,
    Draw,
    attention_backend,
    block_sparse_attention,
    block_sparse_attention_with_lse,
)
from shardwise.attention.api import backend_for, drawn
from shardwise.attention.structures import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

STRUCTURES: Mapping[str, type[SparsityConfig]] = {
    "dense": DenseSparsityConfig,
    "fixed": FixedSparsityConfig,
    "variable": VariableSparsityConfig,
    "bigbird": BigBirdSparsityConfig,
    "bslongformer": BSLongformerSparsityConfig,
    "window": LocalSlidingWindowSparsityConfig,
}
NUM_HEADS, LENGTH, BLOCK, HEAD_DIM = 4, 90, 16, 8


def structure(kind: str, is_causal: bool = False, per_head: bool = False) -> SparsityConfig:
    given: dict[str, Any] = {"block": BLOCK}
    if kind != "window":
        given["different_layout_per_head"] = per_head
    if kind != "dense" or is_causal:
        given["attention"] = "unidirectional" if is_causal else "bidirectional"
    if kind in ("variable", "bigbird"):
        given["num_random_blocks"] = 1
    if kind == "fixed" and per_head:
        given["num_different_global_patterns"] = 4
    return STRUCTURES[kind](NUM_HEADS, **given)


def tensors(num_kv_heads: int = NUM_HEADS, length: int = LENGTH, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = [(2, heads, length, HEAD_DIM) for heads in (NUM_HEADS, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def assert_parity(inputs: list[Tensor], layout: BlockLayout, **given: Any) -> None:
    """Results and gradients through both results, in float64."""
    bias = given.get("bias")
    leaves = inputs if bias is None else [*inputs, bias]
    found = block_sparse_attention_with_lse(*inputs, layout, dropout=given.get("draw") or 0.0, **without_draw(given))
    expected = reference_attention(*inputs, layout.allowed(), **given)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = [torch.randn_like(each) for each in expected]
    weights[1].masked_fill_(expected[1].isinf(), 0)
    both = [
        torch.autograd.grad([each[0], each[1].masked_fill(each[1].isinf(), 0)], leaves, weights)
        for each in (found, expected)
    ]
    torch.testing.assert_close(*both, rtol=0, atol=1e-11)


def without_draw(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "draw"}


FACTORS: Mapping[str, list[Any]] = {
    "kind": [*STRUCTURES],
    "is_causal": [False, True],
    "num_kv_heads": [4, 2, 1],
    "padding": [False, True],
    "bias": [None, (1, 1), (2, 4)],
    "p": [0.0, 0.3],
    "packed": [False, True],
    "per_head": [False, True],
}


def exists(row: dict[str, Any]) -> bool:
    """All windows are equal."""
    return not (row["kind"] == "window" and row["per_head"])


@pytest.mark.parametrize("row", cover(FACTORS, exists))
def test_parity(row: dict[str, Any]) -> None:
    torch.manual_seed(0)
    made = structure(row["kind"], row["is_causal"], row["per_head"])
    layout = made.layout_of_documents([53, 37]) if row["packed"] else made.layout(LENGTH)
    inputs = tensors(row["num_kv_heads"])
    bias = None
    if row["bias"] is not None:
        bias = torch.randn(*row["bias"], LENGTH, LENGTH, dtype=torch.float64, requires_grad=True)
    key_padding = torch.arange(LENGTH) < torch.tensor([[LENGTH - 20], [0]]) if row["padding"] else None
    draw = drawn(inputs[0], layout, row["p"]) if row["p"] else None
    assert_parity(inputs, layout, bias=bias, key_padding=key_padding, draw=draw, scale=0.3)


def test_a_forced_back_end_holds_in_the_threads_of_autograd() -> None:
    """On a GPU a recomputation runs there, and must find the back end of the forward."""
    found: list[str] = []
    with attention_backend("dense"):
        thread = threading.Thread(target=lambda: found.append(backend_for("cpu")))
        thread.start()
        thread.join()
    assert (found, backend_for("cpu")) == (["dense"], "cpu")


class TestEdges:
    def test_empty_rows_and_heads_give_zeros(self) -> None:
        blocks = torch.ones(NUM_HEADS, 4, 4)
        blocks[1], blocks[2, 1:3] = 0, 0
        layout = BlockLayout.from_blocks(blocks, BLOCK)
        inputs = tensors(length=64)
        assert_parity(inputs, layout)
        out, lse = block_sparse_attention_with_lse(*inputs, layout)
        assert not out[:, 1].any()
        assert (lse[:, 1] == -torch.inf).all()
        grads = torch.autograd.grad(out.square().sum(), inputs)
        assert all(grad.isfinite().all() and not grad[:, 1].any() for grad in grads)

    @pytest.mark.parametrize("length", [1, 15, 16, 17])
    def test_short_sequences(self, length: int) -> None:
        assert_parity(tensors(length=length), structure("fixed", True).layout(length))

    def test_bias_of_minus_infinity_hides_keys_and_whole_rows(self) -> None:
        bias = torch.randn(1, 1, LENGTH, LENGTH, dtype=torch.float64)
        bias[:, :, :, 3], bias[:, :, 40] = -torch.inf, -torch.inf
        inputs, layout = tensors(), structure("dense").layout(LENGTH)
        out, lse = block_sparse_attention_with_lse(*inputs, layout, bias=bias)
        expected = reference_attention(*inputs, layout.allowed() & (bias > -torch.inf), bias=bias.clamp(min=-1e3))
        torch.testing.assert_close((out, lse), expected, rtol=0, atol=1e-12)
        for one, other in zip(
            torch.autograd.grad(out.square().sum(), inputs),
            torch.autograd.grad(expected[0].square().sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)

    def test_cached_keys(self) -> None:
        """The last queries alone give what they give among all, dropout too."""
        q, k, v = tensors(num_kv_heads=2)
        layout = structure("fixed", True).layout(LENGTH)
        for p in (0.0, 0.5):
            draw = None
            whole = drawn(q, layout, p) if p else 0.0
            if isinstance(whole, Draw):
                draw = Draw(whole.factors[..., 70:], whole.offsets[..., 70:], whole.columns, p)
            last = block_sparse_attention(q[:, :, 70:], k, v, layout.queries_from(70), dropout=draw or 0.0)
            expected = block_sparse_attention(q, k, v, layout, dropout=whole)[:, :, 70:]
            torch.testing.assert_close(last, expected, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("kind", STRUCTURES)
    def test_causal_never_leaks(self, kind: str) -> None:
        layout = structure(kind, is_causal=True).layout(LENGTH)
        q, k, v = tensors(dtype=torch.float32)
        before = block_sparse_attention(q, k, v, layout)
        for changed in (37, 64, 89):
            with torch.no_grad():
                others = [each.clone() for each in (q, k, v)]
                for each in others:
                    each[:, :, changed:] = torch.randn_like(each[:, :, changed:]) * 100
            after = block_sparse_attention(*others, layout)
            assert torch.equal(before[:, :, :changed], after[:, :, :changed])

    def test_is_bitwise_repeatable(self) -> None:
        inputs, layout = tensors(num_kv_heads=2, dtype=torch.float32), structure("bigbird").layout(LENGTH)
        bias = torch.randn(1, NUM_HEADS, LENGTH, LENGTH, requires_grad=True)
        draw = drawn(inputs[0], layout, 0.2)
        runs = []
        for _ in range(2):
            out, lse = block_sparse_attention_with_lse(*inputs, layout, bias=bias, dropout=draw)
            runs.append([out, lse, *torch.autograd.grad(out.sin().sum() + lse.sum(), [*inputs, bias])])
        assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_a_dense_layout_is_sdpa(self, is_causal: bool) -> None:
        inputs = tensors(num_kv_heads=2)
        layout = BlockLayout.from_blocks(torch.ones(6, 6), BLOCK, causal=is_causal, num_tokens=LENGTH)
        found = block_sparse_attention(*inputs, layout)
        expected = F.scaled_dot_product_attention(*inputs, is_causal=is_causal, enable_gqa=True)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)

    def test_strided_inputs(self) -> None:
        """As models make them: all three in one tensor [B, N, heads, D]; gradients arrive there."""
        fused = torch.randn(2, LENGTH, 3 * NUM_HEADS, HEAD_DIM, dtype=torch.float64, requires_grad=True)
        layout = structure("fixed").layout(LENGTH)
        q, k, v = fused.transpose(1, 2).chunk(3, 1)
        (grad,) = torch.autograd.grad(block_sparse_attention(q, k, v, layout).sin().sum(), fused)
        out, _ = reference_attention(q, k, v, layout.allowed())
        torch.testing.assert_close(grad, torch.autograd.grad(out.sin().sum(), fused)[0], rtol=0, atol=1e-12)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, dtype: torch.dtype) -> None:
        inputs, layout = tensors(dtype=dtype), structure("fixed").layout(LENGTH)
        out, lse = block_sparse_attention_with_lse(*inputs, layout)
        expected = reference_attention(*(each.double() for each in inputs), layout.allowed())
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        torch.testing.assert_close(out.double(), expected[0], rtol=0, atol=2e-2)

    def test_autocast_casts_as_for_sdpa(self) -> None:
        q, k, v = tensors(dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            out = block_sparse_attention(q, k.bfloat16(), v, structure("fixed").layout(LENGTH))
            assert out.dtype == F.scaled_dot_product_attention(q, k.bfloat16(), v).dtype
        assert [each.dtype for each in torch.autograd.grad(out.sum(), (q, k))] == [torch.float32] * 2

    def test_autocast_leaves_the_products_inside_alone(self) -> None:
        """What is padded takes products written out, whose sums are wide."""
        inputs, layout = tensors(dtype=torch.float32), structure("fixed").layout(LENGTH)
        padding = torch.ones(inputs[1].shape[0], LENGTH, dtype=torch.bool)
        with torch.autocast("cpu", torch.bfloat16):
            torch.manual_seed(0)
            out = block_sparse_attention(*inputs, layout, key_padding=padding, dropout=0.5)
            grads = torch.autograd.grad(out.sum(), inputs)
        torch.manual_seed(0)
        narrow = [each.bfloat16() for each in inputs]
        expected = block_sparse_attention(*narrow, layout, key_padding=padding, dropout=0.5)
        assert torch.equal(out, expected)
        assert all(map(torch.equal, grads, (each.float() for each in torch.autograd.grad(expected.sum(), narrow))))

    def test_no_samples(self) -> None:
        inputs = [each[:0] for each in tensors()]
        assert block_sparse_attention(*inputs, structure("fixed").layout(LENGTH), dropout=0.1).shape == inputs[0].shape


class TestRefusals:
    LAYOUT = BlockLayout.from_blocks(torch.ones(2, 2), 16)

    @pytest.mark.parametrize(
        ("changed", "refusal"),
        [
            ({"q": torch.ones(4, 32, 8)}, ("qkv-dims", "q of shape (4, 32, 8)", "3")),
            ({"v": torch.ones(2, 4, 32, 4)}, ("k-v-shapes", "(2, 4, 32, 8)", "(2, 4, 32, 4)")),
            ({"q": torch.ones(1, 4, 32, 8)}, ("q-k-shapes", "(1, 4, 32, 8)", "(2, 4, 32, 8)")),
            ({"q": torch.ones(2, 6, 32, 8)}, ("kv-heads-divide-heads", "4 KV", "6 query", "1, 2, 3, 6")),
            ({"q": torch.ones(2, 4, 31, 8)}, ("layout-length", "31 queries", "32 keys", "32 and 32")),
            ({"k": torch.ones(2, 4, 32, 8).double()}, ("qkv-dtype-device", "k is of torch.float64")),
            ({"v": torch.ones(2, 4, 32, 8, device="meta")}, ("qkv-dtype-device", "v is of torch.float32 on meta")),
            (dict.fromkeys("qkv", torch.ones(2, 0, 32, 8)), ("qkv-empty", "(2, 0, 32, 8)")),
            (dict.fromkeys("qkv", torch.ones(2, 4, 32, 0)), ("qkv-empty", "(2, 4, 32, 0)")),
            ({"layout": torch.ones(2, 2)}, ("layout-type", "Tensor", "BlockLayout")),
            ({"layout": BlockLayout.from_blocks(torch.ones(3, 2, 2), 16)}, ("layout-heads", "3", "1 or 4")),
            ({"key_padding": torch.ones(2, 32)}, ("padding-bools", "torch.float32")),
            ({"key_padding": torch.ones(2, 31) > 0}, ("operand-shape", "key_padding", "(2, 31)", "[2, 32]")),
            ({"bias": torch.ones(2, 32, 32)}, ("operand-shape", "bias", "[1 or 2, 1 or 4, 32, 32]")),
            ({"bias": torch.ones(1, 1, 32, 32) > 0}, ("bias-floats", "torch.bool")),
            ({"dropout": 1.0}, ("dropout-rate", "dropout=1.0", "0.99")),
            ({"dropout": -0.1}, ("dropout-rate", "dropout=-0.1", "0.0")),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )  # fmt: skip
    def test_what_does_not_fit(self, changed: dict[str, Any], refusal: tuple[str, ...]) -> None:
        ones = torch.ones(2, 4, 32, 8)
        given = {"q": ones, "k": ones, "v": ones, "layout": self.LAYOUT} | changed
        with refused(*refusal):
            block_sparse_attention(**given)

    def test_integers(self) -> None:
        ones = torch.ones(2, 4, 32, 8, dtype=torch.int64)
        with refused("attention-dtype", "torch.int64"):
            block_sparse_attention(ones, ones, ones, self.LAYOUT)

    def test_a_draw_of_another_shape(self) -> None:
        ones = torch.ones(2, 4, 32, 8)
        draw = drawn(ones[:1], self.LAYOUT, 0.5)
        with refused("operand-shape", "dropout.factors", "(1, 4, 32)", "[2, 4, 32]"):
            block_sparse_attention(ones, ones, ones, self.LAYOUT, dropout=draw)

    def test_backends_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with refused("unknown-backend", "cuda", "cpu, dense, triton, flex"):
            attention_backend("cuda").__enter__()
        used = []
        monkeypatch.setattr("shardwise.attention.api.attend", lambda *given: used.append(given[-1]) or given[:2])
        ones = torch.ones(2, 4, 32, 8)
        block_sparse_attention(ones, ones, ones, self.LAYOUT)
        with attention_backend("triton"):
            block_sparse_attention(ones, ones, ones, self.LAYOUT)
        block_sparse_attention(ones, ones, ones, self.LAYOUT)
        assert used == ["cpu", "triton", "cpu"]
