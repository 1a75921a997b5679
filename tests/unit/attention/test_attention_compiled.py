"""Compiled block-sparse attention: whole graphs wherever it is called from, and never the plan of another layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.huggingface import VOCAB_SIZE, build_model
from shardwise.attention.api import block_sparse_attention
from shardwise.attention.block_layout import BlockLayout
from shardwise.attention.module import SparseSelfAttention
from shardwise.attention.sdpa_patch import sparse_sdpa
from shardwise.attention.structures import FixedSparsityConfig, LocalSlidingWindowSparsityConfig
from shardwise.config.resolve import AttentionConfig
from shardwise.models import Decoder, DecoderConfig

pytestmark = pytest.mark.begin

ALL = BlockLayout.from_blocks(torch.ones(2, 2), block=16)
OWN = BlockLayout.from_blocks(torch.eye(2), block=16)
SHORT, LONG = FixedSparsityConfig(2, block=8, num_local_blocks=1), FixedSparsityConfig(2, block=8)


@pytest.fixture(autouse=True)
def forget_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any, backend: str = "eager") -> Any:
    return torch.compile(function, backend=backend, fullgraph=True)


def make_q(num_tokens: int = 32) -> Tensor:
    return torch.randn(1, 2, num_tokens, 8, generator=torch.Generator().manual_seed(num_tokens))


def entry(q: Tensor, layout: BlockLayout) -> Tensor:
    return 2.0 * block_sparse_attention(q, q, q, layout)


class Holder(nn.Module):
    """A module whose layout can be exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.layout = ALL

    def forward(self, q: Tensor) -> Tensor:
        return entry(q, self.layout)


def test_another_layout_of_the_same_sizes_is_compiled_again() -> None:
    q, run, holder = make_q(), compiled(entry), Holder()
    run_holder = compiled(holder)
    for layout in (ALL, OWN, ALL):
        expected = entry(q, layout)
        torch.testing.assert_close(run(q, layout), expected)
        holder.layout = layout
        torch.testing.assert_close(run_holder(q), expected)
    assert not torch.allclose(entry(q, ALL), entry(q, OWN))


def test_gradients_of_a_compiled_call() -> None:
    grads = []
    for run in (entry, compiled(entry, "aot_eager")):
        q = make_q().requires_grad_()
        run(q, OWN).square().sum().backward()
        assert q.grad is not None
        grads.append(q.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_a_module_follows_lengths_and_its_structure() -> None:
    module = SparseSelfAttention(SHORT)
    run = compiled(module)
    for structure in (SHORT, LONG):
        module.sparsity_config = structure
        for num_tokens in (32, 40, 48, 32):
            q = make_q(num_tokens)
            torch.testing.assert_close(run(q, q, q), block_sparse_attention(q, q, q, structure.layout(num_tokens)))


def test_a_strict_layout_is_refused_as_its_values_may_change() -> None:
    module = SparseSelfAttention(FixedSparsityConfig(2, strict_deepspeed=True))
    q = make_q()
    with pytest.raises(Exception, match="strict mode is a buffer"):
        compiled(module)(q, q, q)


@pytest.mark.quick(1)
@pytest.mark.parametrize("is_causal", [False, True])
def test_intercepted_attention_follows_the_context(is_causal: bool) -> None:
    def run(q: Tensor) -> Tensor:
        return 2.0 * F.scaled_dot_product_attention(q, q, q, is_causal=is_causal)

    q, run_compiled = make_q(), compiled(run)
    torch.testing.assert_close(run_compiled(q), run(q))
    for structure in (ALL, OWN, SHORT, LONG):
        with sparse_sdpa(structure):
            expected = run(q)
            torch.testing.assert_close(run_compiled(q), expected)
    torch.testing.assert_close(run_compiled(q), run(q))


@pytest.mark.quick(1)
@pytest.mark.parametrize("dynamic", [None, True])
def test_decoders_of_one_shape_keep_their_own_structures_at_all_lengths(dynamic: bool | None) -> None:
    sizes = {"vocab_size": 17, "num_layers": 1, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
    shape = DecoderConfig(**sizes, ffn_size=8, max_seq_len=32)
    models = [
        Decoder(
            replace(shape, attention=AttentionConfig(kind="sliding-window", block=4, num_sliding_window_blocks=num))
        )
        for num in (1, 5)
    ]
    models[1].load_state_dict(models[0].state_dict())

    def run(model: nn.Module, tokens: Tensor) -> Any:
        return model(tokens)

    run_compiled, seen = torch.compile(run, backend="eager", fullgraph=True, dynamic=dynamic), []
    for length in (32, 21):
        tokens = torch.arange(length)[None] % 17
        for model in models:
            seen.append(run(model, tokens))
            torch.testing.assert_close(run_compiled(model, tokens), seen[-1])
    assert not torch.allclose(seen[0], seen[1])


@pytest.mark.parametrize("family", ["llama", pytest.param("bert", marks=pytest.mark.full)])
def test_hugging_face_models_compile_whole_and_follow_lengths_and_structure(family: str) -> None:
    pytest.importorskip("transformers")
    from shardwise.attention.huggingface import use_sparse_attention

    torch.manual_seed(0)
    model = build_model(family, num_hidden_layers=1).eval()
    tokens = torch.randint(1, VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(1))
    run, seen = compiled(model), []
    for num_blocks in (1, 3):
        structure = LocalSlidingWindowSparsityConfig(4, 2, num_blocks, "bidirectional")
        with use_sparse_attention(model, structure), torch.no_grad():
            for length in (7, 12):
                batch = {
                    "input_ids": tokens[:, :length],
                    "attention_mask": torch.ones(2, length).tril(length - 3).long(),
                }
                expected = model(**batch).logits
                torch.testing.assert_close(run(**batch).logits, expected)
            seen.append(expected)
    assert not torch.allclose(*seen)
