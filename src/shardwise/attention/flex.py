"""Runs FlexAttention on a block layout: the second back end on GPUs, with torch's own kernels and autograd.

torch writes and compiles the kernels (Dong et al. 2024, arXiv 2412.05496), for a mask of tiles of 128 x 128 tokens. The
tiles come from the layout's blocks and not from a mask of N x N. A tile that is wholly seen is computed without a mask;
in others a function of the indices decides which tokens see which: at the diagonal, at the sequence's end, and wherever
blocks are smaller than tiles or documents begin inside one. So blocks under 128 cost whole tiles.

There is no dropout. A bias has a gradient, summed by atomic adds: where samples or heads share one, its last bits
differ from run to run. All else is repeatable.

>>> from shardwise.attention.block_layout import BlockLayout
>>> layout = BlockLayout.from_blocks(torch.ones(4, 4), block=64, causal=True, num_tokens=250)
>>> mask = block_mask_of(layout, torch.device("cpu"))
>>> mask.seq_lengths, mask.to_dense().tolist()
((250, 250), [[[[1, 0], [1, 1]]]])
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from shardwise.attention.backends import ScoreModifiers
from shardwise.attention.block_layout import BlockLayout, Pattern
from shardwise.config.errors import ConfigError

TILE: Final = 128  # torch's default; its kernels for some GPUs need tiles as large as this
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_attention_of(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, extras: ScoreModifiers
) -> tuple[Tensor, Tensor]:
    """Compute attention of a layout on a GPU; both results are differentiable in q, k, v and the bias.

    Args:
        q: [B, H, Nq, D]; k and v are [B, K, Nk, D], and H is a multiple of K.
        layout: of Nq queries and Nk keys, with 1 head or H.

    Returns:
        Output [B, H, Nq, D] and log-sum-exp [B, H, Nq] in fp32; 0 and -inf in rows that see no key.

    Raises:
        ConfigError: there is dropout, tokens other than a document's first queries are left out, or the tensors are
            not on a GPU.
    """
    if q.device.type == "cpu":
        raise ConfigError(
            "flex-on-cpu",
            "the back end flex has no gradients on device='cpu'; use the back end cpu there, as is default",
        )
    options = flex_options(q, k, layout, extras)
    is_traced = torch.compiler.is_compiling()  # by a caller's torch.compile, which then compiles this too
    out, aux = flex_attention(q, k, v, **options) if is_traced else _compiled()(q, k, v, **options)
    return out, aux.lse


def flex_options(q: Tensor, k: Tensor, layout: BlockLayout, extras: ScoreModifiers) -> dict[str, Any]:
    """Return the arguments of torch's `flex_attention` after q, k and v.

    The arguments q, k, layout and extras are those of `flex_attention_of`.

    Raises:
        ConfigError: there is dropout, or tokens other than a document's first queries are left out.
    """
    if extras.draw is not None:
        raise ConfigError(
            "flex-dropout",
            f'dropout={extras.draw.p} is not for flex; use `with attention_backend("triton"):` or no dropout',
        )
    return {
        "score_mod": _score_mod(extras),
        "block_mask": block_mask_of(layout, q.device),
        "scale": extras.scale,
        "enable_gqa": q.shape[1] != k.shape[1],
        "return_aux": AuxRequest(lse=True),
        # The kernel for few queries does not take one layout per head with grouped queries, nor groups of 3, 5, 6, 7.
        "kernel_options": {"FORCE_USE_FLEX_ATTENTION": True},
    }


def block_mask_of(layout: BlockLayout, device: torch.device) -> BlockMask:
    """Make FlexAttention's mask of a layout, from tensors that the layout keeps for each device.

    Raises:
        ConfigError: tokens other than a document's first queries are left out.
    """
    tensors = layout.cached(("flex", device), functools.partial(_planned, device))
    others: Any = (*tensors[:8], (TILE, TILE), _mask_mod(layout, tensors[8:]))
    return BlockMask((layout.num_queries, layout.num_keys), *others)


@functools.cache
def _compiled() -> Callable[..., Any]:
    """Return FlexAttention under torch.compile; without it, every score would be stored."""
    # A graph for each kind of mask, dtype, head size and number of heads, with gradients and without: 8 are soon used.
    limit = {"recompile_limit": 64} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
    return torch.compile(flex_attention, fullgraph=True, **limit)  # type: ignore[call-overload]


def _planned(device: torch.device, layout: BlockLayout) -> tuple[Tensor, ...]:
    """Return the eight lists of a block mask, then the tensors that its function indexes.

    A compiled graph can hold tensors, but no `BlockMask`.
    """
    partial, full = _tiles(layout)
    lists = [block_list for tiles in (partial, full) for block_list in _ordered(tiles)]
    lists += [block_list for tiles in (partial, full) for block_list in _ordered(tiles.transpose(-1, -2))]
    return tuple(tensor.to(device) for tensor in (*lists, *_looked_up(layout)))


def _first_query(pattern: Pattern) -> int:
    """Return the position of the first query; raise `ConfigError` unless the queries go on to the document's end."""
    num_tokens = pattern.num_tokens
    if [stop for _, stop in pattern.query_runs] != [num_tokens] or pattern.key_runs != ((0, num_tokens),):
        raise ConfigError(
            "flex-queries",
            f"{pattern.num_queries} queries in {len(pattern.query_runs)} runs and {pattern.num_keys} keys of "
            f"{num_tokens} tokens are not for flex, which takes queries in one run to the end and all keys; use "
            '`with attention_backend("triton"):`, or "cpu" on CPUs',
        )
    return pattern.query_runs[0][0]


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Count the True of each row, [1, heads, rows], and list all columns, those first: [1, heads, rows, columns]."""
    columns = tiles.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)  # [heads, rows, columns]
    return tiles.sum(-1, dtype=torch.int32)[None], columns.to(torch.int32)[None]


def _tiles(layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """Find the tiles seen in part, and those seen wholly; bool [heads or 1, tiles of queries, tiles of keys] each."""
    num_rows, num_columns = -(-layout.num_queries // TILE), -(-layout.num_keys // TILE)
    seen = torch.zeros(2, layout.num_heads, num_rows, num_columns)  # pieces seen at all, tokens of those seen wholly
    row = column = 0
    for pattern in layout.patterns:
        queries, keys = _Pieces(pattern, _first_query(pattern), row), _Pieces(pattern, 0, column)
        for head, blocks in enumerate(pattern.blocks):
            some = every = blocks[queries.blocks][:, keys.blocks]  # [pieces of queries, pieces of keys]
            if pattern.causal:
                some = some & (queries.last[:, None] >= keys.first)
                every = every & (queries.first[:, None] >= keys.last)
            _add(seen[0, head], some.float(), queries, keys)
            _add(seen[1, head], every * (queries.sizes[:, None] * keys.sizes).float(), queries, keys)
        row, column = row + pattern.num_queries, column + pattern.num_tokens
    full = seen[1] == TILE * TILE  # [heads or 1, rows, columns]
    return (seen[0] > 0) & ~full, full


class _Pieces:
    """A document's tokens from `first` on, cut at the borders of blocks and of tiles; fields are [pieces]."""

    def __init__(self, pattern: Pattern, first: int, start: int) -> None:
        positions = torch.arange(first, pattern.num_tokens)
        tiles = (positions - first + start) // TILE
        # Neither number decreases, so their sum grows where either does.
        _, self.sizes = torch.unique_consecutive(positions // pattern.block + tiles, return_counts=True)
        ends = self.sizes.cumsum(0)
        self.first, self.last = positions[ends - self.sizes], positions[ends - 1]
        self.blocks = self.first // pattern.block
        self.tiles = tiles[ends - 1]


def _add(total: Tensor, values: Tensor, queries: _Pieces, keys: _Pieces) -> None:
    """Add values [pieces of queries, pieces of keys] to the totals of their tiles, [rows, columns]."""
    row, column = int(queries.tiles[0]), int(keys.tiles[0])
    num_rows, num_columns = int(queries.tiles[-1]) + 1 - row, int(keys.tiles[-1]) + 1 - column
    of_rows = values.new_zeros(num_rows, values.shape[1]).index_add_(0, queries.tiles - row, values)
    total[row : row + num_rows, column : column + num_columns].index_add_(1, keys.tiles - column, of_rows)


def _mask_mod(layout: BlockLayout, looked_up: tuple[Tensor, ...]) -> MaskMod:
    """Make the function that says whether a query sees a key of a tile seen in part; b, h, row, column are indices."""
    if not looked_up:
        return _not_after if layout.patterns[0].causal else _always
    query_document, reach, line, key_document, position, block, blocks = looked_up
    per_head = int(layout.num_heads > 1)

    def mask_mod(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        sees = (query_document[row] == key_document[column]) & (reach[row] >= position[column])
        # Between documents the index has no meaning, and may be out of range.
        index = torch.where(sees, line[row] + block[column], 0)
        return sees & blocks[h * per_head, index]

    return mask_mod


def _not_after(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return row >= column


def _always(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return row >= 0


def _looked_up(layout: BlockLayout) -> list[Tensor]:
    """Return the tensors that a mask function indexes; none where the indices themselves suffice.

    For queries [Nq]: document, last position seen, and the start of the row of its block in the blocks. For keys [Nk]:
    document, position, and block. Then the blocks of all documents, one after another, [heads or 1, all blocks].
    """
    (pattern, *others) = layout.patterns
    if not others and not _first_query(pattern) and not pattern.block % TILE:
        return []
    fields: list[tuple[Tensor, ...]] = []
    base = 0
    for document, pattern in enumerate(layout.patterns):
        positions = torch.arange(pattern.num_tokens)
        queries, num_blocks = positions[_first_query(pattern) :], pattern.blocks.shape[-1]
        reach = queries if pattern.causal else torch.full_like(queries, pattern.num_tokens)
        fields.append(
            (
                torch.full_like(queries, document),
                reach,
                base + queries // pattern.block * num_blocks,
                torch.full_like(positions, document),
                positions,
                positions // pattern.block,
            )
        )
        base += num_blocks**2
    width = torch.int32 if base < 2**31 else torch.int64
    tokens = [torch.cat(columns).to(width) for columns in zip(*fields, strict=True)]
    return [*tokens, torch.cat([pattern.blocks.flatten(1) for pattern in layout.patterns], 1)]


def _score_mod(extras: ScoreModifiers) -> ScoreMod | None:
    """Make the function that adds bias and key padding to scores, which acts in tiles that are wholly seen too."""
    bias, key_padding = extras.bias, extras.key_padding
    if bias is None and key_padding is None:
        return None
    per_sample, per_head = (0, 0) if bias is None else (int(bias.shape[0] > 1), int(bias.shape[1] > 1))

    def score_mod(score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        if bias is not None:
            score = score + bias[b * per_sample, h * per_head, row, column]
        if key_padding is not None:
            score = torch.where(key_padding[b, column], score, -torch.inf)
        return score

    return score_mod
