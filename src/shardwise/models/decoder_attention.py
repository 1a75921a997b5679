"""Defines the decoder's attention: dense, or block-sparse by a structure; always causal.

Shapes: B batch, H query heads, K key and value heads, S sequence, D head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import index
from typing import Any, Final, Protocol

import torch.nn.functional as F
from torch import Tensor

from shardwise.attention.api import block_sparse_attention
from shardwise.attention.block_layout import BlockLayout, keep_last
from shardwise.attention.dense import dense_layout
from shardwise.attention.from_config import structure_of
from shardwise.attention.structures import SparsityConfig
from shardwise.config.resolve import AttentionConfig
from shardwise.runtime.torch_private import constant_in_graphs

_MAX_LAYOUTS: Final = 32


class Attend(Protocol):
    """Computes causal attention of some heads."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, first_head: int, positions: Tensor | None = None) -> Tensor:
        """Compute attention.

        Args:
            q: [B, H, S, D]; k and v are [B, K, S, D].
            first_head: number of q's first head among the whole model's query heads.
            positions: [S], int64, positions in the sequence of this rank's tokens; None where it has all of them.

        Returns:
            [B, H, S, D].
        """

    def layout(self, seq_len: int, first_head: int, num_heads: int) -> BlockLayout:
        """Return the layout of a whole sequence for some heads.

        Args:
            first_head: number of the first of the heads among the whole model's query heads.
        """


@dataclass(frozen=True, eq=False)
class Dense:
    """Computes dense attention: every query sees its own key and all keys before it."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, first_head: int, positions: Tensor | None = None
    ) -> Tensor:  # [B, H, S, D], [B, K, S, D]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    def layout(self, seq_len: int, first_head: int, num_heads: int) -> BlockLayout:
        """Return the causal layout of seq_len tokens; it is the same for all first_head and num_heads."""
        return dense_layout(seq_len, causal=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Dense:
        return self


attend_densely: Final = Dense()


@dataclass(frozen=True, eq=False)
class BlockSparse:
    """Block-sparse attention: a query sees its own key and those before it that are in blocks of the structure.

    All layers and copies of a model share one object, and so its layouts and their plans.

    Attributes:
        structure: causal, of the whole model's query heads.
    """

    structure: SparsityConfig
    _layouts: dict[tuple[int, int, int], BlockLayout] = field(default_factory=dict, init=False, repr=False)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, first_head: int, positions: Tensor | None = None
    ) -> Tensor:  # [B, H, S, D], [B, K, S, D]
        layout_key = index(q.shape[2]), first_head, index(q.shape[1])  # compiled code fixes them
        self._lay_out(*layout_key)
        return block_sparse_attention(q, k, v, self._layouts[layout_key])

    def layout(self, seq_len: int, first_head: int, num_heads: int) -> BlockLayout:
        """Return the layout of seq_len tokens for num_heads heads from first_head on; it is kept."""
        self._lay_out(seq_len, first_head, num_heads)
        return self._layouts[seq_len, first_head, num_heads]

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockSparse:
        return self

    @constant_in_graphs
    def _lay_out(self, seq_len: int, first_head: int, num_heads: int) -> None:
        """Keep the layout; compiled code does so while it is compiled, and cannot pass a layout itself."""
        keep_last(
            self._layouts,
            (seq_len, first_head, num_heads),
            lambda: self.structure.layout(seq_len).of_heads(first_head, num_heads),
            _MAX_LAYOUTS,
        )


def attend_of(section: AttentionConfig, num_heads: int) -> Attend:
    """Return the attention that a config's section chooses.

    Args:
        num_heads: query heads of the whole model.

    Raises:
        ConfigError: there is no such attention.
    """
    structure = structure_of(section, num_heads)
    return attend_densely if structure is None else BlockSparse(structure)
