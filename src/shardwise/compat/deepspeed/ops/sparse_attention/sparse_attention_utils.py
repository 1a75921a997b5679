"""Offers DeepSpeed's helpers for models at DeepSpeed's path, as functions of one class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from shardwise.attention import padding, positions, structures
from shardwise.attention.huggingface import use_sparse_attention
from shardwise.compat.deepspeed.ops.sparse_attention.bert_sparse_self_attention import BertSparseSelfAttention
from shardwise.compat.deepspeed.ops.sparse_attention.sparsity_config import FixedSparsityConfig
from shardwise.runtime.class_swap import set_attribute


class SparseAttentionUtils:
    """Offers this library's functions by DeepSpeed's names; each supports more models than DeepSpeed's two."""

    extend_position_embedding = staticmethod(positions.extend_position_embedding)
    update_tokenizer_model_max_length = staticmethod(positions.update_tokenizer_model_max_length)
    unpad_sequence_output = staticmethod(padding.unpad_sequence_output)

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: nn.Module, max_position: int, sparsity_config: structures.SparsityConfig | None = None
    ) -> nn.Module:
        """Limit a Hugging Face model's self-attention to the blocks of a structure; its modules stay.

        Args:
            max_position: not used; if sequences are longer than the model's positions, call
                `extend_position_embedding` first, which changes the config too.
            sparsity_config: the structure; None for `FixedSparsityConfig` with the model's heads.

        Returns:
            the model, changed in place.
        """
        config: Any = getattr(model, "config", None)
        heads = getattr(config, "num_attention_heads", 1)  # if it is not a model, `use_sparse_attention` raises
        use_sparse_attention(model, sparsity_config or FixedSparsityConfig(heads))
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Iterable[Any], sparsity_config: structures.SparsityConfig | None = None
    ) -> Iterable[Any]:
        """Put a `BertSparseSelfAttention` with the same weights into each layer's `attention.self`; returns the layers.

        It is for models of the user's own: those of transformers call their modules in another way, and need
        `replace_model_self_attention_with_sparse_self_attention`.

        Args:
            config: of BERT, for `hidden_size` and `num_attention_heads`; the latter are also those of the default
                structure, a `FixedSparsityConfig`.
            layers: modules with an `attention.self` that has `query`, `key` and `value`; changed in place.
        """
        for layer in layers:
            sparse = BertSparseSelfAttention(config, sparsity_config)
            for name in ("query", "key", "value"):
                set_attribute(sparse, name, getattr(layer.attention.self, name))
            set_attribute(layer.attention, "self", sparse)
        return layers

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pad_token_id: int,
        model_embeddings: Callable[[Tensor], Tensor] | None,
    ) -> padding.PaddedInputs:
        """Call `shardwise.attention.padding.pad_to_block_size`, with DeepSpeed's names of arguments.

        block_size is its `block`; input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, pad_token_id
        and model_embeddings are its arguments of the same names.
        """
        return padding.pad_to_block_size(
            block_size,
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            pad_token_id,
            model_embeddings,
        )
