"""A decoder with block-sparse attention: what it computes, keeps, costs, and says of itself."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.attention import reference_attention
from harness.refusals import refused
from shardwise.checkpoint.hf.config_files import config_files, decoder_config, describe
from shardwise.config.resolve import AttentionConfig, Config, ModelConfig
from shardwise.models import Decoder, DecoderConfig, flops_per_token, generate, lm_loss
from shardwise.models import decoder_config as chosen_config
from shardwise.models.decoder import DecoderAttention, DecoderBlock, rope_tables
from shardwise.models.decoder_attention import BlockSparse, attend_densely, attend_of
from shardwise.runtime.recompute import run_forward
from shardwise.tensor.plan_layout import plan_layout
from shardwise.verify.simulate import simulate

SHAPE = DecoderConfig(
    vocab_size=64, num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn_size=24, max_seq_len=32
)
BIGBIRD = AttentionConfig(kind="bigbird", block=2, different_layout_per_head=True)
FIXED = AttentionConfig(kind="fixed", block=4, num_local_blocks=2)
KINDS = [BIGBIRD, FIXED, AttentionConfig(kind="sliding-window", block=3), AttentionConfig(kind="bslongformer", block=3)]


def sparse(attention: AttentionConfig) -> Decoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Decoder(dataclasses.replace(SHAPE, attention=attention), dtype=torch.float64)


def attends_of(model: nn.Module) -> list[Any]:
    """What each layer attends by."""
    return [module.attend for module in model.modules() if isinstance(module, DecoderAttention)]


def layout_of(model: nn.Module, seq_len: int) -> Tensor:
    return attends_of(model)[0].structure.layout(seq_len).allowed()


@pytest.mark.parametrize("attention", KINDS, ids=lambda each: each.kind)
def test_a_decoder_computes_what_its_layout_allows(attention: AttentionConfig) -> None:
    """With dense attention under a mask in place of the sparse one: outputs and gradients."""
    model, tokens = sparse(attention), torch.arange(2 * 23).view(2, 23) % 64  # the last block is short
    expected = copy.deepcopy(model)
    allowed = layout_of(model, 23)
    assert not allowed.equal(torch.ones(1, 23, 23, dtype=torch.bool).tril().expand_as(allowed))

    def under_mask(q: Tensor, k: Tensor, v: Tensor, first_head: int, positions: None) -> Tensor:
        return reference_attention(q, k, v, allowed)[0]

    for module in expected.modules():
        if isinstance(module, DecoderAttention):
            module.attend = under_mask
    for each in (model, expected):
        lm_loss(each(tokens), tokens)[0].backward()
    torch.testing.assert_close(model(tokens), expected(tokens), rtol=1e-9, atol=1e-12)
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_all_layers_share_a_layout_and_its_plans() -> None:
    model = sparse(BIGBIRD)
    attends = attends_of(model)
    assert len({*attends, *attends_of(copy.deepcopy(model))}) == 1
    model(torch.zeros(1, 16, dtype=torch.int64))
    (layout,) = attends[0]._layouts.values()
    num_made = len(layout._made)
    model(torch.zeros(3, 16, dtype=torch.int64))
    assert len(layout._made) == num_made > 0


def test_generation_of_any_length_keeps_a_bounded_number_of_layouts() -> None:
    model = sparse(BIGBIRD)
    generate(model, torch.ones(1, 1, dtype=torch.int64), 40, max_seq_len=SHAPE.max_seq_len, temperature=0)
    attend = attends_of(model)[0]
    assert len(attend._layouts) == 32
    longer = dataclasses.replace(model.config, max_seq_len=64)
    model.config = longer
    generate(model, torch.ones(1, 30, dtype=torch.int64), 10, max_seq_len=64, temperature=0)
    assert len(attend._layouts) == 32


def test_the_heads_of_a_rank_have_their_own_layouts() -> None:
    attend: Any = attend_of(BIGBIRD, 4)
    q, k, v = torch.randn(3, 1, 4, 16, 8, dtype=torch.float64).unbind()
    halves = [attend(*(each[:, first : first + 2] for each in (q, k, v)), first) for first in (0, 2)]
    torch.testing.assert_close(torch.cat(halves, 1), attend(q, k, v, 0), rtol=1e-12, atol=1e-12)
    wrong = attend(*(each[:, 2:] for each in (q, k, v)), 0)
    assert not torch.allclose(wrong, halves[1])


def test_dense_attention_is_torchs() -> None:
    assert attend_of(AttentionConfig(), 4) is attend_densely
    assert isinstance(attend_of(FIXED, 4), BlockSparse)


def test_flops_count_the_pairs_that_are_visible() -> None:
    matmul_flops = flops_per_token(SHAPE, 0)
    dense = flops_per_token(SHAPE, 32) - matmul_flops
    assert dense == 12 * 2 * 4 * 4 * 32
    visible = layout_of(sparse(FIXED), 32).double().mean().item()
    assert 0 < visible < 0.5
    config = dataclasses.replace(SHAPE, attention=FIXED)
    assert flops_per_token(config, 32) - matmul_flops == round(dense * visible)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_recomputation_runs_the_op_again_only_where_its_output_is_not_kept(mode: str) -> None:
    class Counter(torch.utils._python_dispatch.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.calls += func.name() == "shardwise::block_sparse_attention"
            return func(*args, **(kwargs or {}))

    config = dataclasses.replace(SHAPE, attention=BIGBIRD)
    block = DecoderBlock(config, dtype=torch.float64)
    x = torch.randn(2, 16, 16, dtype=torch.float64, requires_grad=True)  # [B, S, E]
    rope = rope_tables(16, 4, 10_000.0, x.detach())
    with Counter() as counter:
        run_forward(block.forward, mode, (x, rope), {}).sum().backward()  # type: ignore[arg-type]
    assert counter.calls == (2 if mode == "full" else 1)


def test_a_block_compiles_whole() -> None:
    model = sparse(BIGBIRD)
    x = torch.randn(2, 16, 16, dtype=torch.float64)  # [B, S, E]
    rope = rope_tables(16, 4, 10_000.0, x)
    compiled = torch.compile(model.blocks[1].forward, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, rope), model.blocks[1](x, rope), rtol=1e-12, atol=1e-12)


def test_a_simulated_rank_sends_and_holds_what_a_dense_one_does() -> None:
    """The op keeps what flash attention does; the model has run before, so there are layouts with real tensors."""

    def peak_bytes(model: nn.Module) -> int:
        tokens = torch.zeros(2, 16, dtype=torch.int64)  # [B, S]
        model(tokens)
        sections = {"mesh": {"tp": 2}, "recompute": {"mode": "selective"}, "run": {"device": "cpu"}}
        batch = (tokens, tokens)
        simulation = simulate(
            model,
            sections,
            lambda: batch,
            rank=1,
            world_size=2,
            loss_fn=lambda logits, batch: lm_loss(logits, batch[1]),
        )
        return simulation.peak.peak_bytes

    assert peak_bytes(sparse(BIGBIRD)) == peak_bytes(sparse(AttentionConfig()))


@pytest.mark.parametrize(
    "attention", [AttentionConfig(), BIGBIRD, AttentionConfig(kind="variable", local_window_blocks=(1, 2))]
)
def test_a_checkpoint_describes_the_attention(attention: AttentionConfig, caplog: pytest.LogCaptureFixture) -> None:
    config = dataclasses.replace(SHAPE, attention=attention)
    described = describe(Decoder(config, device="meta"))
    assert decoder_config(described) == config
    assert ("attention" in described["config"]) == (attention.kind != "dense"), "dense ones are described as ever"
    files = config_files(described, "BF16")
    assert b"bigbird" not in files["config.json"]
    assert ("whose attention is dense" in caplog.text) == (attention.kind != "dense")


def test_a_config_without_such_an_attention_is_refused() -> None:
    with refused("global-blocks-divide", "num_global_blocks=3", "num_local_blocks=4"):
        chosen_config(ModelConfig(), attention=AttentionConfig(kind="fixed", num_global_blocks=3))
    assert chosen_config(ModelConfig(), attention=FIXED).attention == FIXED


def test_a_model_that_has_not_the_configs_attention_is_refused() -> None:
    config = Config(attention=BIGBIRD).resolve(1)
    plan_layout(sparse(BIGBIRD), config)
    for model in (sparse(FIXED), nn.Linear(2, 2)):
        with refused("attention-needs-decoder", "attention.kind=bigbird"):
            plan_layout(model, config)
