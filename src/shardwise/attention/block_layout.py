"""Block layouts: they say which blocks of keys each block of queries sees, and every back end plans on them.

A `Pattern` belongs to one sequence. A `BlockLayout` belongs to one row of a batch: it has one pattern, or those of
several documents packed one after another, whose tokens never see each other. Only `allowed` is of size N x N; it is
for tests and drawings.

>>> layout = BlockLayout.from_blocks(torch.tensor([[1, 0], [1, 1]]), block=2, causal=True, num_tokens=3)
>>> layout.allowed()[0].int().tolist()
[[1, 0, 0], [1, 1, 0], [1, 1, 1]]
>>> pack([layout, layout]).num_queries
6
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from shardwise.config.arguments import checked
from shardwise.config.errors import ConfigError
from shardwise.layout.token_ranges import Runs, count_tokens, intersect, shift
from shardwise.runtime.torch_private import constant_in_graphs, unseen_by_op_modes

Made = TypeVar("Made")
Key = TypeVar("Key", bound=Hashable)
BlockFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes int64 indices of heads [heads, 1, 1], blocks of queries [rows, 1] and blocks of keys [num_blocks]; returns
bools that broadcast to [heads, rows, num_blocks], True where the block of queries sees the block of keys."""

_MAX_FUNCTION_NUMEL = 2**22
_MOST_MADE: Final = 64
_SHADES: Final = "·░▒▓█"
_MOST_CELLS: Final = 40


@dataclass(frozen=True, eq=False)
class Pattern:
    """Says which blocks of one sequence see each other; its queries and keys are the same tokens.

    Attributes:
        blocks: [heads or 1, num_blocks, num_blocks], bool, on the CPU, rows of queries; read only.
        block: tokens of a block; the last one may have fewer.
        causal: a token sees none after it, inside a block too.
        queries: the tokens whose queries are present, in this order; None for all. They are fewer where keys are
            cached, or where the sequence is spread over ranks.
        keys: the tokens whose keys are present, in this order; None for all.
    """

    blocks: Tensor
    block: int
    causal: bool
    num_tokens: int
    queries: Runs | None = None
    keys: Runs | None = None

    @property
    def query_runs(self) -> Runs:
        return ((0, self.num_tokens),) if self.queries is None else self.queries

    @property
    def key_runs(self) -> Runs:
        return ((0, self.num_tokens),) if self.keys is None else self.keys

    @property
    def num_queries(self) -> int:
        return count_tokens(self.query_runs)

    @property
    def num_keys(self) -> int:
        return count_tokens(self.key_runs)


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Holds patterns of documents in the order in which they are packed, and the plans that back ends made of them.

    A copy is the layout itself, and a pickle has the patterns alone: plans are never copied.

    Attributes:
        patterns: one pattern, or one for each packed document; all have the same block size and number of heads.
    """

    patterns: tuple[Pattern, ...]
    _made: dict[Hashable, object] = field(default_factory=dict, init=False, repr=False)
    _name: str = field(default_factory=lambda: uuid.uuid4().hex, init=False, repr=False)

    def __copy__(self) -> BlockLayout:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockLayout:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockLayout, (self.patterns,)

    @staticmethod
    @checked
    def from_blocks(blocks: Tensor, block: int, *, causal: bool = False, num_tokens: int | None = None) -> BlockLayout:
        """Make a layout of the user's own blocks.

        Args:
            blocks: [num_blocks, num_blocks] or [heads, num_blocks, num_blocks]; not 0 where a block of queries (rows)
                sees a block of keys (columns).
            causal: a token sees none after it, whatever the blocks say.
            num_tokens: of the sequence; all blocks are whole when left out.

        Raises:
            ConfigError: the blocks are not square, or as many as `num_tokens` need.
        """
        if blocks.ndim not in (2, 3) or blocks.shape[-1] != blocks.shape[-2] or not blocks.numel():
            raise ConfigError(
                "blocks-square",
                f"blocks of shape {tuple(blocks.shape)} are not square; give [num_blocks, num_blocks] or "
                "[heads, num_blocks, num_blocks]",
            )
        if block < 1:
            raise ConfigError("block-positive", f"block={block} is not positive; 64 and 128 are fastest")
        most = blocks.shape[-1] * block
        num_tokens = most if num_tokens is None else num_tokens
        if not most - block < num_tokens <= most:
            raise ConfigError(
                "blocks-hold-tokens",
                f"num_tokens={num_tokens} needs {-(-num_tokens // block)} blocks of {block}, and there are "
                f"{blocks.shape[-1]}; nearest legal: {most - block + 1} to {most}",
            )
        three_dims = blocks.detach().to("cpu", torch.bool, copy=True).reshape(-1, *blocks.shape[-2:])
        if causal:
            three_dims = three_dims.tril()
        return BlockLayout((Pattern(three_dims, block, causal, num_tokens),))

    @staticmethod
    def from_function(
        function: BlockFunction, num_tokens: int, block: int, *, num_heads: int = 1, causal: bool = False
    ) -> BlockLayout:
        """Make a layout from a function of block indices.

        >>> layout = BlockLayout.from_function(lambda head, query, key: (query - key) % 2 == head, 64, 16, num_heads=2)
        >>> layout.patterns[0].blocks[1].int().tolist()
        [[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]]

        Args:
            function: a `BlockFunction`, called on some rows at a time.
            num_heads: heads that differ; 1 where all share a layout.
            causal: a token sees none after it, whatever the function returns.

        Raises:
            ConfigError: there is no token, or the function does not work on tensors.
        """
        if block < 1 or num_tokens < 1:
            raise ConfigError(
                "no-blocks", f"num_tokens={num_tokens} in blocks of {block} are no blocks; give 1 or more of each"
            )
        blocks = blocks_of_function(function, num_heads, -(-num_tokens // block))
        return BlockLayout.from_blocks(blocks, block, causal=causal, num_tokens=num_tokens)

    def __str__(self) -> str:
        """Draw the first document, and say how much of dense attention is left.

        >>> print(str(BlockLayout.from_blocks(torch.tensor([[1, 0], [1, 1]]), block=64, causal=True)).splitlines()[1])
        ████
        """
        return "\n".join([*_drawing(self.patterns[0]), *_figures(self)])

    @property
    def num_queries(self) -> int:
        return sum(pattern.num_queries for pattern in self.patterns)

    @property
    def num_keys(self) -> int:
        return sum(pattern.num_keys for pattern in self.patterns)

    @property
    def num_heads(self) -> int:
        """Return the number of heads that differ: 1 where all heads share a layout."""
        return self.patterns[0].blocks.shape[0]

    @property
    def block(self) -> int:
        return self.patterns[0].block

    @property
    def density(self) -> float:
        """Return the visible share of all pairs of a query and a key, exact to the token; the mean over heads.

        This density and the others are 0 where there are no pairs.
        """
        return visible_pairs(self.patterns) / max(1, self.num_queries * self.num_keys)

    @property
    def causal_density(self) -> float:
        """Return the visible share of the pairs whose key is not after the query: against dense causal attention."""
        return visible_pairs(self.patterns, up_to_diagonal=True) / max(1, causal_pairs(self.patterns))

    def tile_density(self, rows: int, columns: int) -> float:
        """Return the share of all pairs that a kernel computes in whole tiles of `rows` queries and `columns` keys.

        A tile of rows visits the blocks of keys that any of its rows sees, gathered one after another. A pair is
        counted where it is computed, visible or not, so time is proportional to this density; above 1, attention is
        slower than dense attention.
        """
        return tile_pairs(self.patterns, rows, columns) / max(1, self.num_queries * self.num_keys)

    def cached(self, key: Hashable, make: Callable[[BlockLayout], Made]) -> Made:
        """Return `make(layout)`, made once for each key; the last 64 results are kept as long as the layout lives.

        Compiled code keeps the result as a constant, and is compiled again for another layout.
        """
        # Compiled code has guards on values that it reads, such as a name, but none on the owners of constant methods.
        return self._cached(self._name, key, make)

    @constant_in_graphs
    def _cached(self, name: str, key: Hashable, make: Callable[[BlockLayout], Made]) -> Made:
        keep_last(self._made, key, lambda: make(self), _MOST_MADE)
        return self._made[key]  # type: ignore[return-value]

    def of_heads(self, first: int, num: int) -> BlockLayout:
        """Return the layout of the `num` heads from `first` on, as for a tp rank; self where all heads share one."""
        if self.num_heads == 1:
            return self
        return self.cached(
            ("heads", first, num), lambda whole: _each(whole, lambda blocks: blocks[first : first + num])
        )

    @property
    def is_token_causal(self) -> bool:
        """Say whether no token sees one after it, according to `Pattern.causal`."""
        return all(pattern.causal for pattern in self.patterns)

    def token_causal(self) -> BlockLayout:
        """Return the layout without the pairs in which a key is after its query; self if there are none."""
        if self.is_token_causal:
            return self
        return BlockLayout(
            tuple(replace(pattern, blocks=pattern.blocks.tril(), causal=True) for pattern in self.patterns)
        )

    def queries_from(self, first_query: int) -> BlockLayout:
        """Return the layout of the queries from `first_query` on, for use with cached keys; for one pattern only.

        Raises:
            ConfigError: there are several documents, or no such query.
        """
        if len(self.patterns) > 1 or not 0 <= first_query < self.num_keys:
            raise ConfigError(
                "first-query",
                f"first_query={first_query} of {len(self.patterns)} documents of {self.num_keys} tokens in all; "
                "give one document and a position inside it",
            )
        return self.select(((first_query, self.num_keys),), ((0, self.num_keys),))

    def select(self, queries: Runs, keys: Runs) -> BlockLayout:
        """Return the layout of some queries and some keys alone, whose tensors hold one run after another.

        >>> layout = BlockLayout.from_blocks(torch.ones(2, 2), block=4, causal=True)
        >>> layout.select(queries=((2, 4), (6, 7)), keys=((0, 4),)).allowed()[0].int().tolist()
        [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]]

        Args:
            queries: runs of token numbers, counted through all documents; the layout itself must have all queries.
            keys: runs of token numbers, counted in the same way; the layout itself must have all keys.
        """
        patterns, before = [], 0
        for pattern in self.patterns:
            document = ((before, before + pattern.num_tokens),)
            own_queries, own_keys = (shift(intersect(runs, document), -before) for runs in (queries, keys))
            patterns.append(replace(pattern, queries=own_queries, keys=own_keys))
            before += pattern.num_tokens
        return BlockLayout(tuple(patterns))

    def allowed(self) -> Tensor:
        """Say whether each query sees each key, bool [heads or 1, num_queries, num_keys]: for tests and drawings."""
        mask = torch.zeros(self.num_heads, self.num_queries, self.num_keys, dtype=torch.bool)
        row = column = 0
        for pattern in self.patterns:
            queries, keys = (
                torch.tensor([token for run in runs for token in range(*run)], dtype=torch.int64)
                for runs in (pattern.query_runs, pattern.key_runs)
            )
            seen = pattern.blocks[:, queries // pattern.block][:, :, keys // pattern.block]  # [heads or 1, ...]
            if pattern.causal:
                seen = seen & (queries[:, None] >= keys)
            mask[:, row : row + pattern.num_queries, column : column + pattern.num_keys] = seen
            row, column = row + pattern.num_queries, column + pattern.num_keys
        return mask


def _drawing(pattern: Pattern) -> Iterator[str]:
    """Yield a row for each block of queries, or for several, shaded by the share of blocks that its heads see."""
    size = -(-pattern.blocks.shape[-1] // _MOST_CELLS)
    shares = avg_pool2d(pattern.blocks.float().mean(0, keepdim=True), size, ceil_mode=True)[0].tolist()
    for number, row in enumerate(shares, 1):
        shown = row[:number] if pattern.causal else row
        yield "".join(
            2 * _SHADES[0 if density <= 0 else 4 if density >= 1 else 1 + min(2, int(3 * density))] for density in shown
        )
    if size > 1:
        yield f"a cell is {size} x {size} blocks, darker as more of all heads' are visible"


def _figures(layout: BlockLayout) -> Iterator[str]:
    pattern, num_blocks = layout.patterns[0], layout.patterns[0].blocks.shape[-1]
    half = f", {100 * layout.causal_density:.3g} % of the causal half" if pattern.causal else ""
    per_head = int(pattern.blocks.sum()) / layout.num_heads
    yield f"blocks       {per_head:,.0f} of {num_blocks**2:,} a head, of {pattern.block} tokens"
    yield f"visible      {100 * layout.density:.3g} % of all pairs{half}"
    ones = [torch.ones_like(pattern.blocks) for pattern in layout.patterns]
    dense = BlockLayout(
        tuple(
            replace(each, blocks=blocks.tril() if each.causal else blocks)
            for each, blocks in zip(layout.patterns, ones, strict=True)
        )
    )
    for tile in (64, 128) if layout.density else ():
        computed, of_dense = (each.tile_density(tile, tile) for each in (layout, dense))
        yield f"tiles of {tile:<4}{100 * computed:.3g} % computed: up to {of_dense / computed:.1f} times dense's speed"


def require_structure(given: object) -> None:
    """Raise `ConfigError` unless `given` is a layout or has a method `layout(seq_len)`."""
    if not isinstance(given, BlockLayout) and not callable(getattr(given, "layout", None)):
        raise ConfigError(
            "structure-type",
            f"a {type(given).__name__} has no layout(seq_len); give a BlockLayout, or a structure such as "
            "FixedSparsityConfig",
        )


def keep_last(kept: dict[Key, Made], key: Key, make: Callable[[], Made], most: int) -> None:
    """Make `kept[key]` if it is missing, and drop the oldest entries so that at most `most` are kept.

    Op modes do not see how it is made: a recomputation may find it made already, and must run the same ops. The value
    has real tensors even where the first caller is in a fake mode.

    Args:
        kept: from keys to values, changed in place.
    """
    if key in kept:
        return
    while len(kept) >= most:
        del kept[next(iter(kept))]
    with unseen_by_op_modes(is_real=True):
        kept[key] = make()


def pack(layouts: Sequence[BlockLayout]) -> BlockLayout:
    """Join the layouts of documents packed one after another, whose tokens do not see each other.

    Raises:
        ConfigError: there is no layout, or they differ in block size or in their number of heads, unless that is 1.
    """
    num_heads = max((layout.num_heads for layout in layouts), default=1)
    kinds = {(layout.block, num_heads if layout.num_heads == 1 else layout.num_heads) for layout in layouts}
    if len(kinds) != 1:
        raise ConfigError(
            "documents-of-one-kind",
            f"documents of (block, heads) {sorted(kinds)} cannot be packed; give one or more of one kind",
        )
    # Heads that differ in a long document may be the same in a short one.
    spread = [_each(layout, lambda blocks: blocks.expand(num_heads, -1, -1)) for layout in layouts]
    return BlockLayout(tuple(pattern for layout in spread for pattern in layout.patterns))


def blocks_of_function(function: BlockFunction, num_heads: int, num_blocks: int) -> Tensor:
    """Evaluate a function of block indices on all blocks: bool [num_heads, num_blocks, num_blocks].

    Raises:
        ConfigError: the function does not work on tensors.
    """
    blocks = torch.empty(num_heads, num_blocks, num_blocks, dtype=torch.bool)
    heads, indices = torch.arange(num_heads)[:, None, None], torch.arange(num_blocks)
    for rows in indices.split(max(1, _MAX_FUNCTION_NUMEL // (num_heads * num_blocks))):
        try:
            blocks[:, rows] = (
                torch.as_tensor(function(heads, rows[:, None], indices)).bool().expand(num_heads, len(rows), num_blocks)
            )
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                "block-function",
                f"the function of block indices failed on tensors: {str(error).splitlines()[0]}; write it with tensor "
                "operations (&, |, torch.where), so that its result broadcasts over heads, queries and keys",
            ) from error
    return blocks


def _each(layout: BlockLayout, change: Callable[[Tensor], Tensor]) -> BlockLayout:
    return BlockLayout(tuple(replace(pattern, blocks=change(pattern.blocks)) for pattern in layout.patterns))


def visible_pairs(patterns: Sequence[Pattern], *, up_to_diagonal: bool = False) -> float:
    """Count the visible pairs, exact to the token; the mean over heads.

    Args:
        up_to_diagonal: leave out pairs in which the key is after the query.
    """
    return sum(_mean(keys_of_rows(pattern, up_to_diagonal=up_to_diagonal)) for pattern in patterns)


def causal_pairs(patterns: Sequence[Pattern]) -> int:
    """Count the pairs whose key is not after the query, across documents too: those of dense causal attention."""
    pairs = keys_before = 0
    for pattern in patterns:
        queries, keys = _there(pattern)  # [num_blocks, block] each
        pairs += pattern.num_queries * keys_before + int(keys.flatten().cumsum(0)[queries.flatten()].sum())
        keys_before += pattern.num_keys
    return pairs


def keys_of_rows(pattern: Pattern, *, up_to_diagonal: bool = False) -> Tensor:
    """Count the visible pairs of each row of blocks, int64 [heads or 1, num_blocks]; 0 where there is no query."""
    queries, keys = _there(pattern)  # [num_blocks, block] each
    num_queries, num_keys = queries.sum(1), keys.sum(1)  # [num_blocks] each
    rows, columns = num_queries.nonzero()[:, 0], num_keys.nonzero()[:, 0]
    pairs = torch.zeros(pattern.blocks.shape[:2], dtype=torch.int64)
    is_causal = pattern.causal or up_to_diagonal
    seen = cut(pattern.blocks, rows, columns)  # [heads or 1, block rows, key blocks]
    if is_causal:
        seen = seen & (rows[:, None] > columns)
    pairs[:, rows] = _num_seen(seen, num_keys[columns], pattern.block) * num_queries[rows]
    if is_causal:
        in_own_block = (keys.cumsum(1) * queries).sum(1)  # [num_blocks], pairs whose key is not after the query
        pairs += pattern.blocks.diagonal(dim1=1, dim2=2) * in_own_block
    return pairs


def tile_pairs(patterns: Sequence[Pattern], rows: int, columns: int) -> float:
    """Count the pairs in whole tiles that cover the gathered key blocks of each tile of rows; the mean over heads."""
    pairs = 0.0
    for pattern in patterns:
        seen = union_of_rows(pattern, rows).sum(-1) * pattern.block  # [heads or 1, num_tiles]
        pairs += _mean(-(-seen // columns) * columns * rows)
    return pairs


def union_of_rows(pattern: Pattern, rows: int) -> Tensor:
    """Return the blocks with keys that any of a tile's `rows` queries sees, bool [heads or 1, tiles, blocks with keys].

    A pattern's queries are stored one run after another: a tile may have queries of several runs.
    """
    queries, keys = (presence.sum(1) for presence in _there(pattern))  # [num_blocks] each
    block_rows, key_blocks = queries.nonzero()[:, 0], keys.nonzero()[:, 0]
    blocks = cut(pattern.blocks, block_rows, key_blocks)  # [heads or 1, block rows, key blocks]
    if pattern.causal:
        blocks = blocks & (block_rows[:, None] >= key_blocks)
    starts = torch.arange(0, pattern.num_queries, rows)
    ends = (starts + rows).clamp(max=pattern.num_queries) - 1
    so_far = queries[block_rows].cumsum(0)  # [block rows], queries up to the end of each
    first, last = (
        torch.searchsorted(so_far, bounds, right=True) for bounds in (starts, ends)
    )  # [num_tiles], block rows
    union = blocks[:, first]  # [heads or 1, num_tiles, key blocks]
    for step in range(1, max((last - first).tolist(), default=0) + 1):
        union |= blocks[:, torch.minimum(first + step, last)]
    return union


def _there(pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Say which tokens of each block have a query, and which have a key; bool [num_blocks, block] each."""
    num_blocks = pattern.blocks.shape[-1]
    return (
        is_there(pattern.query_runs, num_blocks, pattern.block),
        is_there(pattern.key_runs, num_blocks, pattern.block),
    )


def _num_seen(seen: Tensor, num_keys: Tensor, block: int) -> Tensor:
    """Count the keys in the blocks that are seen, int64 [..., block rows], of bool [..., block rows, key blocks]."""
    is_whole = num_keys == block
    few = (~is_whole).nonzero()[:, 0]  # blocks that are cut; a product over all blocks would take 8 times the memory
    return (seen & is_whole).sum(-1) * block + (seen[..., few] * num_keys[few]).sum(-1)


def _mean(of_heads: Tensor) -> float:
    return int(of_heads.sum()) / of_heads.shape[0]


def is_there(runs: Runs, num_blocks: int, block: int) -> Tensor:
    """Say which slots of a pattern's blocks hold a token of the runs, bool [num_blocks, block].

    Args:
        block: slots of a block; those after the last token of the last block are False.
    """
    is_token = torch.zeros(num_blocks * block, dtype=torch.bool)
    for start, stop in runs:
        is_token[start:stop] = True
    return is_token.view(num_blocks, block)


def cut(blocks: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Select rows and columns of blocks [heads, num_blocks, num_blocks]: a view where both are contiguous.

    Args:
        rows: int64 indices that ascend, and so are the columns.
    """
    if all(len(indices) and int(indices[-1] - indices[0]) == len(indices) - 1 for indices in (rows, columns)):
        return blocks[:, int(rows[0]) : int(rows[-1]) + 1, int(columns[0]) : int(columns[-1]) + 1]
    return blocks[:, rows[:, None], columns]
