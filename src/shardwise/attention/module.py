"""Self-attention as a module, with the signature of DeepSpeed's `SparseSelfAttention`.

>>> import torch
>>> from shardwise.attention import BlockLayout
>>> class Window:
...     def layout(self, seq_len):
...         return BlockLayout.from_blocks(torch.ones(2, 2).tril(), block=16)
>>> attention = SparseSelfAttention(Window(), key_padding_mask_mode="mul")
>>> q, k, v = torch.randn(3, 1, 4, 32, 8)
>>> attention(q, k, v, key_padding_mask=torch.arange(32)[None] < 24).shape
torch.Size([1, 4, 32, 8])
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise._torch_private import is_fake, unseen_by_op_modes, version
from shardwise.attention.block_layout import BlockLayout, require_structure
from shardwise.attention.functional import block_sparse_attention
from shardwise.config import ConfigError

_MODES: Final = ("add", "mul")


class SparseSelfAttention(nn.Module):
    """Softmax attention with relative positions and masks; the sum of scaled scores and all that is added is masked.

    Unlike DeepSpeed's it takes any dtype and fewer KV heads than query heads, `rpe` and masks that are added get
    gradients, rows that see no key give 0, and each instance keeps its own layouts.

    Args:
        sparsity_config: a structure, such as `FixedSparsityConfig`. In DeepSpeed's strict mode its layout is, as
            there, that of `max_seq_length`, cropped, and lengths must be multiples of its block.
        key_padding_mask_mode: "add" the mask to scores, or "mul": keys where it is 0 are not seen.
        attn_mask_mode: the same for `attn_mask`.
        max_seq_length: in strict mode, the most tokens.

    Raises:
        ConfigError: there is no such mode, or no structure.
    """

    master_layout: Tensor

    def __init__(
        self,
        sparsity_config: Any,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in _MODES:
                raise ConfigError(f'{name}={mode!r} does not exist; legal: "add", "mul"')
        require_structure(sparsity_config)
        self.sparsity_config = sparsity_config
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self._is_strict = bool(getattr(sparsity_config, "strict_deepspeed", False))
        self._layouts: dict[tuple[int, int], BlockLayout] = {}
        if self._is_strict:
            self.register_buffer("master_layout", sparsity_config.make_layout(max_seq_length))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attention over the structure's blocks.

        Args:
            query: [B, H, N, D].
            key: [B, H or a divisor of it, N, D].
            value: as key.
            rpe: [1 or B, 1 or H, N, N], leading dims may be left out; added to the scaled scores.
            key_padding_mask: [B, N], or with dims of 1 between.
            attn_mask: [N, N], or with dims of 1 before.

        Returns:
            [B, H, N, D].

        Raises:
            ConfigError: shapes do not fit, or a mask of bools is to be added.
        """
        if query.ndim != 4:
            raise ConfigError(
                f"query of shape {tuple(query.shape)} has {query.ndim} dims; give [samples, heads, tokens, head size]"
            )
        num_samples, _, length, _ = query.shape
        parts = [] if rpe is None else [rpe.reshape((1,) * (4 - rpe.ndim) + rpe.shape)]
        key_padding = None
        if key_padding_mask is not None:
            mask = _shaped("key_padding_mask", key_padding_mask, (num_samples, length))
            if self.key_padding_mask_mode == "mul":
                key_padding = mask != 0
            else:
                parts.append(_addable("key_padding_mask", mask)[:, None, None, :])
        if attn_mask is not None:
            mask = _shaped("attn_mask", attn_mask, (length, length))
            if self.attn_mask_mode == "mul":
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask == 0, -torch.inf)
            parts.append(_addable("attn_mask", mask)[None, None])
        bias = sum(parts[1:], parts[0].to(query.dtype)) if parts else None
        if bias is not None:
            bias = bias.to(query.dtype)
            bias = bias.expand(*bias.shape[:2], length, length)  # [1 or B, 1 or H, N, N]
        return block_sparse_attention(query, key, value, self._layout(length), key_padding=key_padding, bias=bias)

    def _layout(self, length: int) -> BlockLayout:
        if not self._is_strict:
            with unseen_by_op_modes(is_real=True):
                layout: BlockLayout = self.sparsity_config.layout(length)
            return layout
        block, num_blocks = self.sparsity_config.block, self.master_layout.shape[-1]
        if length % block or length > num_blocks * block:
            raise ConfigError(
                f"Sequence Length, {length}, needs to be dividable by Block size {block} and at most "
                f"max_seq_length={num_blocks * block}; pad it, or leave DeepSpeed's strict mode"
            )
        place = (length, version(self.master_layout))  # a checkpoint brings its own
        if place not in self._layouts:
            size = length // block
            with unseen_by_op_modes(is_real=True):
                is_real = not (is_fake(self.master_layout) or self.master_layout.is_meta)
                whole = self.master_layout if is_real else self.sparsity_config.make_layout(num_blocks * block)
                self._layouts[place] = BlockLayout.from_blocks(whole[:, :size, :size], block)
        return self._layouts[place]


def _shaped(name: str, mask: Tensor, shape: tuple[int, int]) -> Tensor:
    """A mask of two dims, which may come with dims of 1 besides."""
    if [size for size in mask.shape if size > 1] != [size for size in shape if size > 1]:
        raise ConfigError(f"{name} of shape {tuple(mask.shape)} does not fit; give {list(shape)}")
    return mask.reshape(shape)


def _addable(name: str, mask: Tensor) -> Tensor:
    if not mask.is_floating_point():
        raise ConfigError(f'{name} is of {mask.dtype} and cannot be added to scores; set {name}_mode="mul"')
    return mask
