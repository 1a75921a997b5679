"""What block-sparse structures share: their checks in two modes, and the layouts that they keep."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from shardwise.attention.block_layout import BlockLayout, pack
from shardwise.config import ConfigError

Attention: TypeAlias = Literal["unidirectional", "bidirectional"]
Sample: TypeAlias = Callable[[range, int], list[int]]
"""Draws so many different members of a range."""

_ATTENTIONS: Final = ("unidirectional", "bidirectional")
_MAX_KEPT_LENGTHS: Final = 32


@dataclass(frozen=True)
class SparsityConfig:
    """What all structures share; itself none.

    Attributes:
        num_heads: query heads.
        block: tokens of a block; 64 and 128 are fastest.
        different_layout_per_head: heads draw their own random blocks, and have global patterns of their own.
        strict_deepspeed: DeepSpeed's layouts and errors, quirks included.
        seed: of random blocks. DeepSpeed, and so the strict mode, draws them from Python's global generator instead.
    """

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False
    strict_deepspeed: bool = field(default=False, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    _layouts: dict[int, BlockLayout] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._need_counts(1, "num_heads", "block")
        self._check()

    @property
    def num_layout_heads(self) -> int:
        """Heads whose blocks are drawn; the others have those of the first."""
        return self.num_heads if self.different_layout_per_head else 1

    @property
    def causal(self) -> bool:
        """Whether layouts let no token see one after it."""
        return self._looks_back and not self.strict_deepspeed

    def make_layout(self, seq_len: int) -> Tensor:
        """Which blocks are visible, int64 [num_heads, num_blocks, num_blocks], as DeepSpeed's method of this name.

        Raises:
            ConfigError: there is no token. In strict mode what DeepSpeed raises where `seq_len` does not suit.
        """
        num_blocks = self._num_blocks(seq_len)
        heads = self._heads(num_blocks)
        return heads.long().expand(self.num_heads, num_blocks, num_blocks).clone()

    def layout(self, seq_len: int) -> BlockLayout:
        """The layout of a sequence, with one head where all have the same; kept for the lengths used last.

        Raises:
            ConfigError: as `make_layout`.
        """
        layout = self._layouts.pop(seq_len, None) or self._new_layout(seq_len)
        self._layouts[seq_len] = layout
        if len(self._layouts) > _MAX_KEPT_LENGTHS:
            del self._layouts[next(iter(self._layouts))]
        return layout

    def layout_of_documents(self, lengths: Sequence[int]) -> BlockLayout:
        """The layout of documents packed one behind another, each with the one of its length.

        Raises:
            ConfigError: there are no documents, or one has no token.
        """
        return pack([self.layout(length) for length in lengths])

    @property
    def _looks_back(self) -> bool:
        return getattr(self, "attention", "bidirectional") == "unidirectional"

    @property
    def _num_made(self) -> int:
        """Heads to draw; further ones repeat them in turn."""
        return self.num_layout_heads

    def _check(self) -> None:
        """Raise for parameters that do not go together."""

    def _fill(self, blocks: Tensor, head: int, sample: Sample) -> None:
        """Set the visible blocks of a head in `blocks`, bool [num_blocks, num_blocks], which are none so far."""
        raise NotImplementedError(f"{type(self).__name__} has no blocks; give it a make_layout, or take a structure")

    def _new_layout(self, seq_len: int) -> BlockLayout:
        # A subclass's own `make_layout` counts; that of the library would spread all heads over eight times the bytes.
        if type(self).make_layout is SparsityConfig.make_layout:
            num_blocks = self._num_blocks(seq_len)
            for (pattern,) in (layout.patterns for layout in self._layouts.values()):
                if pattern.blocks.shape[1] == num_blocks:  # generation meets every length
                    return BlockLayout((replace(pattern, num_tokens=seq_len),))
            blocks = self._heads(num_blocks)
        else:
            blocks = self.make_layout(seq_len).bool()  # [num_heads, num_blocks, num_blocks]
        if (blocks[1:] == blocks[:1]).all():
            blocks = blocks[:1]
        return BlockLayout.from_blocks(blocks, self.block, causal=self.causal, num_tokens=seq_len)

    def _num_blocks(self, seq_len: int) -> int:
        self._need(seq_len >= 1, f"seq_len={seq_len} has no token; give 1 or more", None)
        if self.strict_deepspeed and seq_len % self.block:
            raise ValueError(f"Sequence Length, {seq_len}, needs to be dividable by Block size {self.block}!")
        return -(-seq_len // self.block)

    def _heads(self, num_blocks: int) -> Tensor:
        """Visible blocks, bool [num_layout_heads, num_blocks, num_blocks], or of one head where none can differ."""
        made = torch.zeros(self._num_made, num_blocks, num_blocks, dtype=torch.bool)
        for head in range(self._num_made):
            sample: Sample = random.sample if self.strict_deepspeed else random.Random(f"{self.seed}/{head}").sample
            self._fill(made[head], head, sample)
        if self.causal:
            made.tril_()
        return made if self._num_made == 1 else made[torch.arange(self.num_layout_heads) % self._num_made]

    def _need(self, holds: bool, ours: str, deepspeeds: str | None, kind: type[Exception] = ValueError) -> None:
        """Unless it holds, raise a ConfigError that says `ours`, or in strict mode a `kind` with DeepSpeed's words."""
        if holds:
            return
        if not self.strict_deepspeed:
            raise ConfigError(ours)
        if deepspeeds is not None:
            raise kind(deepspeeds)

    def _need_counts(self, least: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
            self._need(is_count, f"{name}={value!r} is not a count; give a whole number, {least} or more", None)

    def _need_attention(self, attention: str, is_checked_by_deepspeed: bool = True) -> None:
        words = 'only "uni/bi-directional" attentions are supported for now!' if is_checked_by_deepspeed else None
        self._need(
            attention in _ATTENTIONS,
            f"attention={attention!r} is neither; give 'unidirectional' or 'bidirectional'",
            words,
            NotImplementedError,
        )

    def _need_no_horizontal(self, attention: str, is_horizontal: bool) -> None:
        self._need(
            attention == "bidirectional" or not is_horizontal,
            f"horizontal_global_attention=True lets global blocks see those ahead, and attention={attention} does not; "
            "leave the former out, or look both ways",
            'only "bi-directional" attentions can support horizontal global attention!',
        )

    def _need_spans(self, starts: Sequence[int], ends: Sequence[int] | None) -> None:
        """Raise unless these are global blocks, or ranges of them."""
        self._need(
            min(starts, default=0) >= 0, f"global_block_indices={list(starts)} go below 0; count blocks from 0", None
        )
        if ends is None:
            return
        self._need(
            len(starts) == len(ends),
            f"global_block_indices has {len(starts)} entries and global_block_end_indices {len(ends)}; give both for "
            "each range",
            f"Global block start indices length, {len(starts)}, must be same as global block end indices length, "
            f"{len(ends)}!",
        )
        for start, end in zip(starts, ends, strict=True):
            self._need(
                start < end,
                f"global blocks {start} to {end} (exclusive) are none; give an end of {start + 1} or more",
                f"Global block start index, {start}, must be smaller than global block end index, {end}!",
            )

    def _need_room(self, name: str, num: int, num_blocks: int) -> None:
        """Raise, as DeepSpeed does, for a sequence of fewer blocks; by default they are cut."""
        if self.strict_deepspeed and num_blocks < num:
            raise ValueError(f"{name}, {num}, must be smaller than overall number of blocks in a row, {num_blocks}!")

    def _freeze(self, *names: str) -> None:
        """Lists, which DeepSpeed takes, become tuples: a structure is a value."""
        for name in names:
            given = getattr(self, name)
            object.__setattr__(self, name, None if given is None else tuple(given))
