"""DeepSpeed's sparse attention by its own import paths, strict where DeepSpeed is."""

import copy
import pickle
import random

import pytest
import torch
from torch import nn

from harness.refusals import refused
from shardwise.attention import structures
from shardwise.compat.deepspeed.ops import sparse_attention
from shardwise.compat.deepspeed.ops.sparse_attention import (
    BertSparseSelfAttention,
    FixedSparsityConfig,
    SparseAttentionUtils,
    SparseSelfAttention,
    SparsityConfig,
    bert_sparse_self_attention,
    sparse_attention_utils,
    sparse_self_attention,
    sparsity_config,
    sparsity_config_of,
)
from shardwise.config.errors import ConfigError

NAMES = ("Dense", "Fixed", "Variable", "BigBird", "BSLongformer", "LocalSlidingWindow")


class Diagonals(SparsityConfig):
    """A user's own, written as DeepSpeed's tutorial has it."""

    def __init__(self, num_heads, stride, block=16, different_layout_per_head=False):
        super().__init__(num_heads, block, different_layout_per_head)
        self.stride = stride

    def make_layout(self, seq_len):
        layout = self.setup_layout(seq_len)
        for head in range(self.num_layout_heads):
            for row in range(layout.shape[1]):
                layout[head, row, (row + head) % self.stride :: self.stride] = 1
        return self.check_and_propagate_first_head_layout(layout)


@pytest.mark.parametrize("name", NAMES)
def test_each_structure_is_strict_and_a_sparsity_config(name):
    kind = getattr(sparse_attention, f"{name}SparsityConfig")
    assert kind is getattr(sparsity_config, f"{name}SparsityConfig")
    made = kind(num_heads=2, block=8)
    assert isinstance(made, SparsityConfig)
    random.seed(3)
    layout = made.make_layout(80)
    random.seed(3)
    strict = getattr(structures, f"{name}SparsityConfig")(2, 8, strict_deepspeed=True)
    assert torch.equal(layout, strict.make_layout(80))
    with pytest.raises(ValueError, match="Sequence Length, 81, needs to be dividable by Block size 8!") as caught:
        made.layout(81)
    assert not isinstance(caught.value, ConfigError)
    assert kind(2, 8, strict_deepspeed=False).layout(81).num_queries == 81
    assert torch.equal(pickle.loads(pickle.dumps(made)).setup_layout(16), torch.zeros(2, 2, 2, dtype=torch.int64))


def test_positional_arguments_are_in_deepspeeds_order():
    fixed = FixedSparsityConfig(4, 32, True, 8, 2, "bidirectional", True, 3)
    assert (fixed.num_local_blocks, fixed.num_global_blocks, fixed.num_different_global_patterns) == (8, 2, 3)
    assert sparse_attention.LocalSlidingWindowSparsityConfig(4, 32, 5, "bidirectional").num_sliding_window_blocks == 5
    with pytest.raises(NotImplementedError, match="are supported for now!"):
        FixedSparsityConfig(4, attention="causal")


@pytest.mark.parametrize("is_different", [False, True])
def test_a_users_own_subclass_gives_layouts(is_different):
    own = Diagonals(3, stride=3, different_layout_per_head=is_different)
    layout = own.layout(96)
    assert layout.num_heads == (3 if is_different else 1)
    assert not layout.patterns[0].causal
    assert torch.equal(layout.patterns[0].blocks[0].long(), own.make_layout(96)[0])
    assert own.layout_of_documents([32, 48]).num_queries == 80
    own.stride = 2
    assert own != Diagonals(3, stride=2, different_layout_per_head=is_different)
    assert copy.copy(own).stride == 2
    with pytest.raises(ValueError, match="needs to be dividable"):
        own.layout(97)


def test_a_subclass_that_changes_a_structures_layout_is_heard():
    class AndFirst(FixedSparsityConfig):
        def make_layout(self, seq_len):
            layout = super().make_layout(seq_len)
            layout[1, :, 0] = 1
            return layout

    layout = AndFirst(2).layout(160)
    assert layout.num_heads == 2
    assert torch.equal(layout.patterns[0].blocks[0], FixedSparsityConfig(2).layout(160).patterns[0].blocks[0])
    assert layout.patterns[0].blocks[1, :, 0].all()


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, sparsity_config.FixedSparsityConfig(4)),
        ({"mode": "dense", "block": 32, "num_local_blocks": 7}, sparsity_config.DenseSparsityConfig(4, 32)),
        (
            {"mode": "fixed", "different_layout_per_head": True, "num_different_global_patterns": 4, "unknown": 1},
            sparsity_config.FixedSparsityConfig(4, 16, True, num_different_global_patterns=4),
        ),
        (
            {"mode": "fixed", "attention": "unidirectional", "num_local_blocks": 8, "num_global_blocks": 2},
            sparsity_config.FixedSparsityConfig(4, num_local_blocks=8, num_global_blocks=2, attention="unidirectional"),
        ),
        (
            {"mode": "variable", "local_window_blocks": [2, 4], "global_block_indices": [1], "num_random_blocks": 2},
            sparsity_config.VariableSparsityConfig(
                4, num_random_blocks=2, local_window_blocks=[2, 4], global_block_indices=[1]
            ),
        ),
        ({"mode": "bigbird"}, sparsity_config.BigBirdSparsityConfig(4, num_random_blocks=0)),
        (
            {"mode": "bigbird", "attention": "unidirectional", "num_random_blocks": 1, "num_global_blocks": 2},
            sparsity_config.BigBirdSparsityConfig(4, num_global_blocks=2),
        ),
        (
            {"mode": "bslongformer", "attention": "unidirectional", "num_sliding_window_blocks": 5},
            sparsity_config.BSLongformerSparsityConfig(4, num_sliding_window_blocks=5),
        ),
        (
            {"mode": "bslongformer", "global_block_indices": [0, 5], "global_block_end_indices": [1, 7]},
            sparsity_config.BSLongformerSparsityConfig(4, global_block_indices=[0, 5], global_block_end_indices=[1, 7]),
        ),
    ],
)
def test_the_json_section_has_deepspeeds_defaults_and_gaps(section, expected):
    made = sparsity_config_of(section, num_heads=4)
    assert made == expected
    assert type(made) is type(expected)
    assert made.strict_deepspeed


def test_the_json_section_has_no_other_modes():
    with pytest.raises(NotImplementedError, match="Given sparsity mode, local, has not been implemented yet!"):
        sparsity_config_of({"mode": "local"}, num_heads=4)


def test_the_module_takes_structures_and_subclasses():
    q, k, v = torch.randn(3, 2, 3, 96, 8)
    assert sparse_self_attention.SparseSelfAttention is SparseSelfAttention
    for structure in (Diagonals(3, stride=2), FixedSparsityConfig(3, attention="unidirectional")):
        allowed = structure.make_layout(96).bool().repeat_interleave(16, 1).repeat_interleave(16, 2)
        expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed[None])
        out = SparseSelfAttention(structure, max_seq_length=192)(q, k, v)
        torch.testing.assert_close(out, expected)


class Config:
    hidden_size, num_attention_heads = 24, 3


def test_bert_layers_get_a_module_with_their_weights():
    assert bert_sparse_self_attention.BertSparseSelfAttention is BertSparseSelfAttention
    assert sparse_attention_utils.SparseAttentionUtils is SparseAttentionUtils
    layer = nn.Module()
    layer.attention = nn.Module()
    layer.attention.self = nn.Module()
    for name in ("query", "key", "value"):
        layer.attention.self.add_module(name, nn.Linear(24, 24))
    query = layer.attention.self.query
    assert SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(Config(), [layer]) == [
        layer
    ]
    module = layer.attention.self
    assert isinstance(module, BertSparseSelfAttention)
    assert module.query is query
    assert set(dict(layer.named_parameters())) == {
        f"attention.self.{name}.{kind}" for name in ("query", "key", "value") for kind in ("weight", "bias")
    }
    hidden = torch.randn(2, 64, 24)
    assert module(hidden, torch.zeros(2, 1, 1, 64)).shape == (2, 64, 24)
    with refused("strict-length", "16"):
        module(hidden[:, :63], torch.zeros(2, 63))


def test_a_model_of_transformers_attends_sparsely_by_deepspeeds_function():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=24, num_attention_heads=3, num_hidden_layers=1, intermediate_size=32, vocab_size=50
    )
    model = transformers.BertModel(config).eval()
    ids = torch.randint(50, (1, 64))
    dense = model(ids).last_hidden_state
    structure = sparse_attention.BSLongformerSparsityConfig(3, 16, num_sliding_window_blocks=1)
    replaced = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(model, 512, structure)
    assert replaced is model
    ids[0, 40] = (ids[0, 40] + 1) % 50
    before = model(ids).last_hidden_state
    ids[0, 40] = (ids[0, 40] + 1) % 50
    after = model(ids).last_hidden_state
    changed = (before != after).any(-1)[0]
    assert changed[:16].all()  # the global block sees all
    assert not changed[16:32].any()
    assert not torch.allclose(dense, before, atol=1e-3)


def test_what_is_no_model_or_no_structure_is_refused():
    replace = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention
    with refused("not-transformers", "Linear"):
        replace(torch.nn.Linear(2, 2), 64)
    with refused("structure-type", "NoneType"):
        SparseSelfAttention(None)


def test_batches_are_padded_with_deepspeeds_arguments():
    padded = SparseAttentionUtils.pad_to_block_size(
        block_size=4,
        input_ids=torch.tensor([[5, 6, 7]]),
        attention_mask=torch.ones(1, 3),
        token_type_ids=None,
        position_ids=None,
        inputs_embeds=None,
        pad_token_id=9,
        model_embeddings=None,
    )
    pad_len, input_ids, attention_mask, *others = padded
    assert (pad_len, input_ids.tolist(), attention_mask.tolist()) == (1, [[5, 6, 7, 9]], [[1, 1, 1, 0]])
    assert others == [None] * 3
    assert SparseAttentionUtils.unpad_sequence_output(1, torch.ones(1, 4, 2)).shape == (1, 3, 2)
