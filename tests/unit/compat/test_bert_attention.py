"""BERT's self-attention of DeepSpeed's shape against transformers' own with the same weights."""

from __future__ import annotations

import pytest
import torch

from harness.refusals import refused
from shardwise.attention.structures import DenseSparsityConfig
from shardwise.compat.deepspeed.ops.sparse_attention import BertSparseSelfAttention

transformers = pytest.importorskip("transformers")


def make_config(num_heads: int) -> object:
    return transformers.BertConfig(
        hidden_size=16, num_attention_heads=num_heads, attention_probs_dropout_prob=0.0, attn_implementation="eager"
    )


def test_a_dense_structure_gives_what_bert_gives() -> None:
    from transformers.models.bert.modeling_bert import BertSelfAttention

    torch.manual_seed(0)
    own = BertSelfAttention(make_config(4)).double()
    sparse = BertSparseSelfAttention(make_config(4), DenseSparsityConfig(num_heads=4, block=4)).double()
    sparse.load_state_dict(own.state_dict())
    states = torch.randn(2, 10, 16, dtype=torch.float64)
    real = torch.arange(10) < torch.tensor([[10], [6]])  # [B, N]
    mask = torch.zeros(2, 1, 1, 10, dtype=torch.float64).masked_fill(~real[:, None, None], -10_000.0)
    torch.testing.assert_close(sparse(states, mask), own(states, mask)[0])
    torch.testing.assert_close(sparse(states), own(states)[0])


def test_heads_that_do_not_divide_are_refused() -> None:
    with refused("heads-divide-hidden", "num_attention_heads=5", "hidden_size=16"):
        BertSparseSelfAttention(make_config(5))
