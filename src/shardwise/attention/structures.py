"""Block-sparse structures with DeepSpeed's names, parameters and defaults; each gives the layout of any length.

`strict_deepspeed=True` reproduces DeepSpeed's layouts and errors, quirks included. The default differs in this:

- `attention="unidirectional"` means that no token sees one after it. DeepSpeed looks at whole blocks only, and lets
  Fixed with several global blocks, and Variable with ranges or random blocks, see blocks ahead.
- A unidirectional layout is the beginning of that of any longer sequence, so that generation sees what training saw.
- Any length is taken: the last block may be short, and windows, global and random blocks are as
  many as there are.
- Random blocks come from `seed`, not from Python's global generator, and a row that looks back has as many as fit.
- Every parameter is checked when the structure is made.

>>> structure = LocalSlidingWindowSparsityConfig(num_heads=4, block=64, num_sliding_window_blocks=3)
>>> structure.layout(200).patterns[0].blocks[0].int().tolist()
[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
>>> structure.layout_of_documents([100, 70]).num_queries
170
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from shardwise.attention.block_layout import BlockFunction, BlockLayout, blocks_of_function, pack
from shardwise.config.arguments import checked
from shardwise.config.errors import ConfigError

Attention: TypeAlias = Literal["unidirectional", "bidirectional"]
Sample: TypeAlias = Callable[[range, int], list[int]]
"""Takes a range and a number; returns that many different members of the range, drawn at random."""

_ATTENTIONS: Final = ("unidirectional", "bidirectional")
_MAX_KEPT_LENGTHS: Final = 32


@dataclass(frozen=True)
class SparsityConfig:
    """Defines what all structures share: this is their base class.

    Attributes:
        num_heads: query heads; there may be fewer of keys and values.
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
        """Return the number of heads whose blocks are made; the others have those of the first."""
        return self.num_heads if self.different_layout_per_head else 1

    @property
    def causal(self) -> bool:
        """Say whether no token sees one after it in the layouts."""
        return self._looks_back and not self.strict_deepspeed

    def make_layout(self, seq_len: int) -> Tensor:
        """Return the visible blocks, int64 [num_heads, num_blocks, num_blocks], as DeepSpeed's `make_layout` does.

        Raises:
            ConfigError: there is no token. In strict mode, DeepSpeed's own error where `seq_len` does not fit.
        """
        num_blocks = self._num_blocks(seq_len)
        heads = self._heads(num_blocks)
        return heads.long().expand(self.num_heads, num_blocks, num_blocks).clone()

    @checked
    def layout(self, seq_len: int) -> BlockLayout:
        """Return the layout of a sequence, with one head where all have the same; kept for the lengths used last.

        Raises:
            ConfigError: as `make_layout`.
        """
        layout = self._layouts.pop(seq_len, None) or self._new_layout(seq_len)
        self._layouts[seq_len] = layout
        if len(self._layouts) > _MAX_KEPT_LENGTHS:
            del self._layouts[next(iter(self._layouts))]
        return layout

    def layout_of_documents(self, lengths: Sequence[int]) -> BlockLayout:
        """Return the layout of documents packed one after another, each with the layout of its length.

        Raises:
            ConfigError: there are no documents, or one has no token.
        """
        return pack([self.layout(length) for length in lengths])

    @property
    def _looks_back(self) -> bool:
        return getattr(self, "attention", "bidirectional") == "unidirectional"

    @property
    def _num_made(self) -> int:
        """Return the number of heads to make; further ones repeat them in turn."""
        return self.num_layout_heads

    def _check(self) -> None:
        """Raise for parameters that do not go together."""

    def _fill(self, blocks: Tensor, head: int, sample: Sample) -> None:
        """Set the visible blocks of a head in `blocks`, bool [num_blocks, num_blocks], which is all False so far."""
        raise NotImplementedError(f"{type(self).__name__} has no blocks; give it a make_layout, or take a structure")

    def _new_layout(self, seq_len: int) -> BlockLayout:
        # A subclass's own `make_layout` is called; the library's would store all heads in eight times the bytes.
        if type(self).make_layout is SparsityConfig.make_layout:
            num_blocks = self._num_blocks(seq_len)
            for (pattern,) in (layout.patterns for layout in self._layouts.values()):
                if pattern.blocks.shape[1] == num_blocks:  # generation comes with every length
                    return BlockLayout((replace(pattern, num_tokens=seq_len),))
            blocks = self._heads(num_blocks)
        else:
            blocks = self.make_layout(seq_len).bool()  # [num_heads, num_blocks, num_blocks]
        if (blocks[1:] == blocks[:1]).all():
            blocks = blocks[:1]
        return BlockLayout.from_blocks(blocks, self.block, causal=self.causal, num_tokens=seq_len)

    def _num_blocks(self, seq_len: int) -> int:
        self._need(seq_len >= 1, "seq-len-positive", f"seq_len={seq_len} has no token; give 1 or more", None)
        if self.strict_deepspeed and seq_len % self.block:
            raise ValueError(f"Sequence Length, {seq_len}, needs to be dividable by Block size {self.block}!")
        return -(-seq_len // self.block)

    def _heads(self, num_blocks: int) -> Tensor:
        """Return visible blocks, bool [num_layout_heads or 1, num_blocks, num_blocks]: of 1 head if none can differ."""
        made = torch.zeros(self._num_made, num_blocks, num_blocks, dtype=torch.bool)
        for head in range(self._num_made):
            sample: Sample = random.sample if self.strict_deepspeed else random.Random(f"{self.seed}/{head}").sample
            self._fill(made[head], head, sample)
        if self.causal:
            made.tril_()
        return made if self._num_made == 1 else made[torch.arange(self.num_layout_heads) % self._num_made]

    def _need(
        self, holds: bool, code: str, ours: str, deepspeeds: str | None, kind: type[Exception] = ValueError
    ) -> None:
        """Raise unless it holds: a ConfigError, or in strict mode a `kind` with DeepSpeed's message."""
        if holds:
            return
        if not self.strict_deepspeed:
            raise ConfigError(code, ours)
        if deepspeeds is not None:
            raise kind(deepspeeds)

    def _need_counts(self, least: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
            self._need(
                is_count,
                "structure-count",
                f"{name}={value!r} is not a count; give a whole number, {least} or more",
                None,
            )

    def _need_attention(self, attention: str, is_checked_by_deepspeed: bool = True) -> None:
        message = 'only "uni/bi-directional" attentions are supported for now!' if is_checked_by_deepspeed else None
        self._need(
            attention in _ATTENTIONS,
            "attention-direction",
            f"attention={attention!r} is neither; give 'unidirectional' or 'bidirectional'",
            message,
            NotImplementedError,
        )

    def _need_no_horizontal(self, attention: str, is_horizontal: bool) -> None:
        self._need(
            attention == "bidirectional" or not is_horizontal,
            "horizontal-attention",
            f"horizontal_global_attention=True lets global blocks see those ahead, and attention={attention} does not; "
            "leave the former out, or look both ways",
            'only "bi-directional" attentions can support horizontal global attention!',
        )

    def _need_spans(self, starts: Sequence[int], ends: Sequence[int] | None) -> None:
        """Raise unless these are global blocks, or ranges of them."""
        self._need(
            min(starts, default=0) >= 0,
            "global-block-index",
            f"global_block_indices={list(starts)} go below 0; count blocks from 0",
            None,
        )
        if ends is None:
            return
        self._need(
            len(starts) == len(ends),
            "global-block-ranges",
            f"global_block_indices has {len(starts)} entries and global_block_end_indices {len(ends)}; give both for "
            "each range",
            f"Global block start indices length, {len(starts)}, must be same as global block end indices length, "
            f"{len(ends)}!",
        )
        for start, end in zip(starts, ends, strict=True):
            self._need(
                start < end,
                "global-block-end",
                f"global blocks {start} to {end} (exclusive) are none; give an end of {start + 1} or more",
                f"Global block start index, {start}, must be smaller than global block end index, {end}!",
            )

    def _need_blocks(self, name: str, num: int, num_blocks: int) -> None:
        """Raise, as DeepSpeed does, for a sequence of fewer blocks; by default they are cut."""
        if self.strict_deepspeed and num_blocks < num:
            raise ValueError(f"{name}, {num}, must be smaller than overall number of blocks in a row, {num_blocks}!")

    def _freeze(self, *names: str) -> None:
        """Turn lists, which DeepSpeed takes, into tuples: a structure is a value."""
        for name in names:
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))


__all__ = [
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "CustomSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparsityConfig",
    "VariableSparsityConfig",
]

_RANDOM: Final = "Number of random blocks"
_SLIDING: Final = "Number of sliding window blocks"
_GLOBAL: Final = "Number of global blocks"


@dataclass(frozen=True)
class DenseSparsityConfig(SparsityConfig):
    """Makes all blocks visible.

    Attributes:
        attention: `unidirectional` for causal attention; DeepSpeed has no such key here.
    """

    attention: Attention = field(default="bidirectional", kw_only=True)

    def _check(self) -> None:
        self._need_attention(self.attention, is_checked_by_deepspeed=False)
        if self.strict_deepspeed and self.attention != "bidirectional":
            raise ConfigError(
                "strict-dense-attention",
                f"attention={self.attention!r} is unknown to DeepSpeed's dense structure; leave strict_deepspeed out",
            )

    @property
    def _num_made(self) -> int:
        return 1

    def _fill(self, blocks: Tensor, head: int, sample: Sample) -> None:
        blocks.fill_(True)


@dataclass(frozen=True)
class FixedSparsityConfig(SparsityConfig):
    """Cuts a sequence into windows of blocks that see each other, each with global blocks that represent it (Child et
    al., 2019, arXiv 1904.10509, "fixed", as customised by DeepSpeed).

    Attributes:
        num_global_blocks: blocks of each window that all see; its last ones where there is one pattern.
        attention: the direction in which tokens see.
        horizontal_global_attention: the global blocks see all others.
        num_different_global_patterns: number of choices of a window's global blocks, which heads take in turn.
    """

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: Attention = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def _check(self) -> None:
        num_local, num_global, num_patterns = (
            self.num_local_blocks,
            self.num_global_blocks,
            self.num_different_global_patterns,
        )
        self._need_counts(1, "num_local_blocks", "num_global_blocks", "num_different_global_patterns")
        self._need(
            num_local % num_global == 0,
            "global-blocks-divide",
            f"num_global_blocks={num_global} does not divide num_local_blocks={num_local}; nearest legal: "
            f"{', '.join(str(divisor) for divisor in range(1, num_local + 1) if num_local % divisor == 0)}",
            f"Number of blocks in a local window, {num_local}, must be dividable by number of global blocks, "
            f"{num_global}!",
        )
        self._need_attention(self.attention)
        self._need_no_horizontal(self.attention, self.horizontal_global_attention)
        self._need(
            num_patterns <= 1 or self.different_layout_per_head,
            "patterns-need-heads",
            f"num_different_global_patterns={num_patterns} needs heads that differ; set different_layout_per_head=True",
            "Number of different layouts cannot be more than one when you have set a single layout for all heads! Set "
            "different_layout_per_head to True.",
        )
        most = num_local // num_global
        self._need(
            num_patterns <= most,
            "pattern-count",
            f"num_different_global_patterns={num_patterns} is more than num_local_blocks / num_global_blocks = {most}; "
            f"give 1 to {most}",
            f"Number of layout versions (num_different_global_patterns), {num_patterns}, cannot be larger than number "
            f"of local window blocks divided by number of global blocks, {num_local} / {num_global} = {most}!",
        )

    @property
    def _num_made(self) -> int:
        return min(self.num_layout_heads, self.num_different_global_patterns)

    def _fill(self, blocks: Tensor, head: int, sample: Sample) -> None:
        num_blocks, num_local, num_global = len(blocks), self.num_local_blocks, self.num_global_blocks
        _fill_windows(blocks, ((start, start + num_local) for start in range(0, num_blocks, num_local)))
        if self._looks_back:
            blocks.tril_()
        first = num_local - (1 + head % self.num_different_global_patterns) * num_global
        end = num_blocks - num_blocks % num_local
        starts = [*range(first, end, num_local)]
        if end < num_blocks:
            starts.append(self._last_start(end + first, num_blocks))
        for start in starts:
            blocks[start if self._looks_back else 0 :, start : start + num_global] = True
            if self.horizontal_global_attention:
                blocks[start : start + num_global] = True

    def _last_start(self, start: int, num_blocks: int) -> int:
        """Return the start of the global blocks of a short last window; in a whole window it would be `start`."""
        if self.causal:
            return start  # None after it would see them: moved, they would only make the layout depend on its length.
        return min(start, num_blocks - self.num_global_blocks)


@dataclass(frozen=True)
class VariableSparsityConfig(SparsityConfig):
    """Combines windows of given sizes, given global blocks, and random ones.

    Attributes:
        num_random_blocks: further blocks that each row of blocks sees.
        local_window_blocks: sizes of the windows, in blocks; the last one repeats.
        global_block_indices: blocks that all see, or the starts of ranges of them; those after the sequence's end are
            ignored.
        global_block_end_indices: the ends of the ranges, exclusive; None where there are no ranges.
        attention: the direction in which tokens see.
        horizontal_global_attention: the global blocks see all others.
    """

    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] = (4,)
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: Attention = "bidirectional"
    horizontal_global_attention: bool = False

    def _check(self) -> None:
        self._freeze("local_window_blocks", "global_block_indices", "global_block_end_indices")
        self._need_counts(0, "num_random_blocks")
        self._need(
            len(self.local_window_blocks) > 0 and min(self.local_window_blocks) >= 1,
            "window-sizes",
            f"local_window_blocks={list(self.local_window_blocks)} are no sizes of windows; give one or more, each 1 "
            "or more",
            None,
        )
        self._need_spans(self.global_block_indices, self.global_block_end_indices)
        self._need_attention(self.attention)
        self._need_no_horizontal(self.attention, self.horizontal_global_attention)

    @property
    def _num_made(self) -> int:
        return self.num_layout_heads if self.num_random_blocks else 1

    def _fill(self, blocks: Tensor, head: int, sample: Sample) -> None:
        _fill_windows(blocks, _windows(self.local_window_blocks, len(blocks)))
        if self._looks_back:
            blocks.tril_()
        self._need_blocks(_RANDOM, self.num_random_blocks, len(blocks))
        _fill_random(blocks, self.num_random_blocks, sample, self.causal, is_cut=not self.strict_deepspeed)
        for span in _spans(self.global_block_indices, self.global_block_end_indices, len(blocks)):
            if self.horizontal_global_attention:
                blocks[span] = True
            first_row = span.start if isinstance(span, slice) else span
            blocks[first_row if self._looks_back else 0 :, span] = True


@dataclass(frozen=True)
class BigBirdSparsityConfig(SparsityConfig):
    """Combines random blocks, a sliding window, and global first blocks (Zaheer et al., 2020, arXiv 2007.14062, "ITC").

    Attributes:
        num_random_blocks: further blocks that each row of blocks sees.
        num_sliding_window_blocks: of a window; half of it, rounded down, is on either side of its row's block.
        num_global_blocks: first blocks, which see all and are seen by all.
        attention: the direction in which tokens see.
    """

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: Attention = "bidirectional"

    def _check(self) -> None:
        self._need_counts(0, "num_random_blocks", "num_global_blocks")
        self._need_counts(1, "num_sliding_window_blocks")
        self._need_attention(self.attention)

    @property
    def _num_made(self) -> int:
        return self.num_layout_heads if self.num_random_blocks else 1

    def _fill(self, blocks: Tensor, head: int, sample: Sample) -> None:
        self._need_blocks(_RANDOM, self.num_random_blocks, len(blocks))
        _fill_random(blocks, self.num_random_blocks, sample, self._looks_back, is_cut=not self.strict_deepspeed)
        self._need_blocks(_SLIDING, self.num_sliding_window_blocks, len(blocks))
        _fill_sliding(blocks, self.num_sliding_window_blocks)
        self._need_blocks(_GLOBAL, self.num_global_blocks, len(blocks))
        blocks[: self.num_global_blocks] = True
        blocks[:, : self.num_global_blocks] = True
        if self._looks_back:
            blocks.tril_()


@dataclass(frozen=True)
class BSLongformerSparsityConfig(SparsityConfig):
    """Combines a sliding window and given global blocks (Beltagy et al., 2020, arXiv 2004.05150, in blocks).

    Attributes:
        num_sliding_window_blocks: of a window; half of it, rounded down, is on either side of its row's block.
        global_block_indices: blocks that see all and are seen by all, or the starts of ranges of them; those after the
            sequence's end are ignored.
        global_block_end_indices: the ends of the ranges, exclusive; None where there are no ranges.
        attention: the direction in which tokens see. DeepSpeed takes any word for `bidirectional`.
    """

    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: Attention = "bidirectional"

    def _check(self) -> None:
        self._freeze("global_block_indices", "global_block_end_indices")
        self._need_counts(1, "num_sliding_window_blocks")
        self._need_attention(self.attention, is_checked_by_deepspeed=False)
        self._need_spans(self.global_block_indices, self.global_block_end_indices)

    @property
    def _num_made(self) -> int:
        return 1

    def _fill(self, blocks: Tensor, head: int, sample: Sample) -> None:
        self._need_blocks(_SLIDING, self.num_sliding_window_blocks, len(blocks))
        _fill_sliding(blocks, self.num_sliding_window_blocks)
        for span in _spans(self.global_block_indices, self.global_block_end_indices, len(blocks)):
            blocks[span] = True
            blocks[:, span] = True
        if self._looks_back:
            blocks.tril_()


@dataclass(frozen=True)
class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """Shows a sliding window alone.

    Attributes:
        num_sliding_window_blocks: of a window; half of it, rounded down, is on either side of its row's block, or only
            before it where unidirectional.
        attention: the direction in which tokens see. DeepSpeed takes any word for `unidirectional`.
    """

    different_layout_per_head: bool = field(default=False, init=False, repr=False)
    num_sliding_window_blocks: int = 3
    attention: Attention = "unidirectional"

    def _check(self) -> None:
        self._need_counts(1, "num_sliding_window_blocks")
        self._need_attention(self.attention, is_checked_by_deepspeed=False)

    @property
    def _looks_back(self) -> bool:
        return self.attention != "bidirectional"

    def _fill(self, blocks: Tensor, head: int, sample: Sample) -> None:
        self._need_blocks(_SLIDING, self.num_sliding_window_blocks, len(blocks))
        _fill_sliding(blocks, self.num_sliding_window_blocks)
        if self._looks_back:
            blocks.tril_()


@dataclass(frozen=True)
class CustomSparsityConfig(SparsityConfig):
    """Takes a structure of the user's own, for any length.

    >>> def strided(head, query, key):
    ...     return ((query - key) % 4 == 0) | (query - key <= 1)
    >>> structure = CustomSparsityConfig(num_heads=8, block=64, function=strided, attention="unidirectional")
    >>> structure.layout(320).patterns[0].blocks[0].int()[4].tolist()
    [1, 0, 0, 1, 1]

    Attributes:
        function: takes indices of head, block of queries and block of keys, int64 tensors that broadcast, and returns
            whether the block is visible.
        attention: the direction in which tokens see; where unidirectional, the function is ignored for blocks ahead.
    """

    function: BlockFunction = field(kw_only=True)
    attention: Attention = field(default="bidirectional", kw_only=True)

    def _check(self) -> None:
        self._need_attention(self.attention)
        if self.strict_deepspeed:
            raise ConfigError(
                "strict-unknown-structure",
                "strict_deepspeed=True has no meaning here: DeepSpeed has no such structure; leave it out",
            )

    def _heads(self, num_blocks: int) -> Tensor:
        return blocks_of_function(self.function, self.num_layout_heads, num_blocks)


def _windows(sizes: Sequence[int], num_blocks: int) -> Iterable[tuple[int, int]]:
    start = 0
    for size in sizes:
        yield start, start + size
        start += size
    for again in range(start, num_blocks, sizes[-1]):
        yield again, again + sizes[-1]


def _spans(starts: Sequence[int], ends: Sequence[int] | None, num_blocks: int) -> Iterable[int | slice]:
    """Return the global blocks of a sequence, as indices."""
    if ends is None:
        return [start for start in starts if start < num_blocks]
    return [slice(start, end) for start, end in zip(starts, ends, strict=True) if start < num_blocks]


def _fill_windows(blocks: Tensor, windows: Iterable[tuple[int, int]]) -> None:
    for start, end in windows:
        blocks[start:end, start:end] = True


def _fill_sliding(blocks: Tensor, num_window: int) -> None:
    side = num_window // 2
    blocks |= torch.ones_like(blocks).triu_(-side).tril_(side)


def _fill_random(blocks: Tensor, num: int, sample: Sample, looks_back: bool, *, is_cut: bool) -> None:
    """Set `num` random blocks of each row, or as many as there are where `is_cut`."""
    rows: list[int] = []
    columns: list[int] = []
    for row in range(len(blocks) if num else 0):
        population = range(row + 1 if looks_back else len(blocks))
        drawn = sample(population, min(num, len(population)) if is_cut else num)
        columns += drawn
        rows += [row] * len(drawn)
    blocks[rows, columns] = True
