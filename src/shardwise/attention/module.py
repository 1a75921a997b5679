"""Offers self-attention as a module, with the signature of DeepSpeed's `SparseSelfAttention`.

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

from operator import index
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.attention.api import block_sparse_attention
from shardwise.attention.block_layout import BlockLayout, keep_last, require_structure
from shardwise.config.errors import ConfigError
from shardwise.runtime.torch_private import constant_in_graphs, is_fake, version

_MODES: Final = ("add", "mul")
_MOST_LAYOUTS: Final = 32


class SparseSelfAttention(nn.Module):
    """Computes softmax attention with relative positions and masks; "mul" masks act after all is added to the scores.

    Unlike DeepSpeed's module it takes any dtype and fewer KV heads than query heads, `rpe` and masks that are added get
    gradients, rows that see no key give 0, and each instance keeps its own layouts.

    Args:
        sparsity_config: a structure, such as `FixedSparsityConfig`. In DeepSpeed's strict mode its layout is, as
            there, that of `max_seq_length`, cropped, and lengths must be multiples of its block.
        key_padding_mask_mode: "add" the mask to scores, or "mul": keys where it is 0 are not seen; `attn_mask_mode`
            says the same of `attn_mask`.
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
                raise ConfigError("mask-mode", f'{name}={mode!r} does not exist; legal: "add", "mul"')
        require_structure(sparsity_config)
        self._layouts: dict[tuple[int, int], BlockLayout] = {}
        self.sparsity_config = sparsity_config
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self._is_strict = bool(getattr(sparsity_config, "strict_deepspeed", False))
        if self._is_strict:
            self.register_buffer("master_layout", sparsity_config.make_layout(max_seq_length))

    @property
    def sparsity_config(self) -> Any:
        """Return the structure; it can be replaced in a module that is not strict."""
        return self._structure

    @sparsity_config.setter
    def sparsity_config(self, structure: Any) -> None:
        self._structure = structure
        self._layouts.clear()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute attention over the structure's blocks.

        Args:
            query: [B, H, N, D]; key and value have H heads, or a divisor of it.
            rpe: [1 or B, 1 or H, N, N], leading dims may be left out; added to the scaled scores. None for none.
            key_padding_mask: [B, N], or with dims of 1 between; None for no padding.
            attn_mask: [N, N], or with dims of 1 before; None for no mask.

        Returns:
            [B, H, N, D].

        Raises:
            ConfigError: shapes do not fit, or a mask of bools is to be added.
        """
        if query.ndim != 4:
            raise ConfigError(
                "qkv-dims",
                f"query of shape {tuple(query.shape)} has {query.ndim} dims; give [samples, heads, tokens, head size]",
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
        if self._is_strict and torch.compiler.is_compiling():
            raise ConfigError(
                "strict-compiled",
                "a layout in DeepSpeed's strict mode is a buffer, whose values compiled code does not follow; leave "
                "the strict mode, or this module uncompiled",
            )
        # Loading a checkpoint may change a strict layout.
        plan_key = (index(length), version(self.master_layout) if self._is_strict else 0)
        self._lay_out(*plan_key)
        return self._layouts[plan_key]

    @constant_in_graphs
    def _lay_out(self, *place: int) -> None:
        """Keep the layout; compiled code does so while it is compiled, and cannot pass a layout itself."""
        length, _ = place
        make = self._strict_layout if self._is_strict else self.sparsity_config.layout
        keep_last(self._layouts, (length, place[1]), lambda: make(length), _MOST_LAYOUTS)

    def _strict_layout(self, length: int) -> BlockLayout:
        block, num_blocks = self.sparsity_config.block, self.master_layout.shape[-1]
        if length % block or length > num_blocks * block:
            raise ConfigError(
                "strict-length",
                f"Sequence Length, {length}, needs to be dividable by Block size {block} and at most "
                f"max_seq_length={num_blocks * block}; pad it, or leave DeepSpeed's strict mode",
            )
        is_real = not (is_fake(self.master_layout) or self.master_layout.is_meta)
        structure = self.master_layout if is_real else self.sparsity_config.make_layout(num_blocks * block)
        return BlockLayout.from_blocks(structure[:, : length // block, : length // block], block)


def _shaped(name: str, mask: Tensor, shape: tuple[int, int]) -> Tensor:
    """Reshape a mask to its two dims, without further dims of 1."""
    if [size for size in mask.shape if size > 1] != [size for size in shape if size > 1]:
        raise ConfigError("mask-shape", f"{name} of shape {tuple(mask.shape)} does not fit; give {list(shape)}")
    return mask.reshape(shape)


def _addable(name: str, mask: Tensor) -> Tensor:
    if not mask.is_floating_point():
        raise ConfigError(
            "mask-addable", f'{name} is of {mask.dtype} and cannot be added to scores; set {name}_mode="mul"'
        )
    return mask
