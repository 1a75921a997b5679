"""Choose a split of a sequence's tokens that spreads a layout's work evenly and moves little.

Costs are in pairs of a query and a key, the mean over heads. A key that is received costs time on the wire and
counts as `RECEIVED_PAIRS` pairs, so that work and traffic have one price: that of the slowest rank.

>>> import torch
>>> layout = BlockLayout.from_blocks(torch.ones(8, 8), block=128, causal=True)
>>> work_per_rank(layout, contiguous(1024, 2)), work_per_rank(layout, zigzag(1024, 2))
((131328.0, 393472.0), (262400.0, 262400.0))
>>> choose_split("auto", layout, degree=2).kind
'zigzag'
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shardwise.attention.block_layout import BlockLayout, Pattern
from shardwise.config.errors import ConfigError
from shardwise.context.plan import find_moves, require_whole
from shardwise.context.visibility import VisibilityIndex
from shardwise.layout.token_ranges import Runs, TokenSplit, contiguous, join, zigzag

RECEIVED_PAIRS: Final = 400
"""Pairs that are computed in the time in which one token's keys and values are sent to a rank, forward and backward.

With D of a head, in bf16: 14 D FLOPs a pair and query head (two products forward, five backward), 16 D bytes a token
and KV head (2 x 4 D there, 8 D of fp32 gradients back). On an H100 at half its 989 TFLOPS, 450 GB/s of NVLink bring a
byte in 1,100 FLOPs: 1,260 pairs for H = K heads, and 310 at H = 4 K; between nodes, at 50 GB/s, nine times as much. A
ring overlaps sends with computation, so the lower figures are nearer to what is measured.
"""

_MOST_UNITS: Final = 64  # of a rank
_EVEN: Final = 1.05


@dataclass(frozen=True, eq=False)
class _Cost:
    """Holds the keys that queries see, of all heads, as sums over all tokens before each: int64 [num_tokens + 1]."""

    queries: Tensor
    num_heads: int

    def of(self, split: TokenSplit) -> tuple[float, ...]:
        """Return the pairs of each rank of a split, the mean over heads."""
        return tuple(_sum(self.queries, share) / self.num_heads for share in split.shares)


def work_per_rank(layout: BlockLayout, split: TokenSplit) -> tuple[float, ...]:
    """Return the visible pairs that each rank computes under `plan_steps`, the mean over heads.

    Raises:
        ConfigError: the split is of another number of tokens, or the layout is not of a whole sequence.
    """
    require_whole(layout, split)
    return _cost(layout).of(split)


def balanced(layout: BlockLayout, degree: int) -> TokenSplit:
    """Deal blocks, or runs of them, to the ranks by cost: the costliest first, to the rank that has least so far.

    Several sizes of runs are tried, dealt in this way and also by place: there and back over the ranks. Of the splits
    whose slowest rank is within 5% of the best, the one that moves least is taken, so runs are as long as possible.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies", with equally many runs for each rank. (Dealing
    there and back in the order of cost, as "PTRR" in torch's context parallelism, left the slowest rank up to 7% more.)

    Raises:
        ConfigError: the sequence does not divide.
    """
    return layout.cached(("balanced", degree), lambda whole: _balanced(whole, degree))


def choose_split(token_layout: str, layout: BlockLayout, degree: int, heads_over: int = 1) -> TokenSplit:
    """Return the split of a name, kept with the layout; for "auto" the one of least price among those that divide.

    The price is that of the costliest rank: its pairs, plus `RECEIVED_PAIRS` for each token whose keys it receives. At
    equal prices the split of fewer runs wins: contiguous for windows, for dense attention both ways and where heads are
    exchanged for all tokens; zigzag for dense causal attention.

    Args:
        layout: of the whole sequence, and of all heads, so that tensor-parallel ranks choose the same split.
        heads_over: neighbouring ranks that exchange heads, and have each other's tokens for attention.

    Raises:
        ConfigError: the sequence does not divide.
    """
    key = ("split", token_layout, degree, heads_over)
    return layout.cached(key, lambda whole: _choose(token_layout, whole, degree, heads_over))


def _choose(token_layout: str, layout: BlockLayout, degree: int, heads_over: int) -> TokenSplit:
    length = layout.num_queries
    if token_layout == "contiguous" or degree == 1 or (token_layout == "auto" and heads_over == degree):
        return contiguous(length, degree)
    if token_layout == "zigzag":
        return zigzag(length, degree)
    if token_layout == "balanced":
        return balanced(layout, degree)
    visibility = VisibilityIndex.of(layout)
    cost = _cost(layout)
    return min(_candidates(layout, degree), key=lambda split: _price(cost, visibility, split.teams(heads_over)))


def _candidates(layout: BlockLayout, degree: int) -> list[TokenSplit]:
    """Return the splits that divide, those of few runs first.

    Raises:
        ConfigError: none does.
    """
    length = layout.num_queries
    found = [contiguous(length, degree)]
    if length % (2 * degree) == 0:
        found.append(zigzag(length, degree))
    if _units(layout, degree):
        found.append(balanced(layout, degree))
    return found


def _price(cost: _Cost, visibility: VisibilityIndex, split: TokenSplit) -> float:
    received = find_moves(visibility, split).tokens_received()
    return max(pairs + RECEIVED_PAIRS * keys for pairs, keys in zip(cost.of(split), received, strict=True))


def _balanced(layout: BlockLayout, degree: int) -> TokenSplit:
    length = layout.num_queries
    units = _units(layout, degree)
    if not units:
        step = layout.block * degree
        below = length // step * step
        legal = ", ".join(str(each) for each in (below, below + step) if each)
        raise ConfigError(
            "cp-divides-tokens",
            f"mesh.cp={degree} with context.token_layout=balanced does not divide a sequence of {length} tokens into "
            f"equal runs; nearest legal: {legal}",
        )
    visibility = VisibilityIndex.of(layout)
    cost = _cost(layout)
    dealt = dict.fromkeys(_deal(cost, unit, degree, is_by_cost) for unit in units for is_by_cost in (False, True))
    splits = [TokenSplit("balanced", length, shares) for shares in dealt]
    most = [max(cost.of(split)) for split in splits]
    even = [split for split, pairs in zip(splits, most, strict=True) if pairs <= _EVEN * min(most)]

    def moved(split: TokenSplit) -> tuple[int, int]:
        return sum(find_moves(visibility, split).tokens_received()), sum(map(len, split.shares))

    return min(even, key=moved)


def _units(layout: BlockLayout, degree: int) -> list[int]:
    """Return sizes of runs that give each rank equally many, of whole blocks if possible, the largest first."""
    length, block = layout.num_queries, layout.block
    for least in (block, 1):
        size, left = divmod(length, least * degree)
        nums = [num for num in range(1, _MOST_UNITS + 1) if size % num == 0] if not left else []
        if len(nums) > 1:
            return [size // num * least for num in nums]
    return []


def _deal(cost: _Cost, unit: int, degree: int, is_by_cost: bool) -> tuple[Runs, ...]:
    """Return the runs of each rank, equally many."""
    costs = torch.diff(cost.queries[::unit])  # of each run
    if is_by_cost:
        own = _least_loaded(costs, degree)
    else:
        there = torch.arange(len(costs)).view(-1, degree)  # [runs of a rank, degree]
        there[1::2] = there[1::2].flip(1)
        own = there.T.tolist()
    return tuple(join([tuple((unit * each, unit * (each + 1)) for each in some)]) for some in own)


def _least_loaded(costs: Tensor, degree: int) -> list[list[int]]:
    own: list[list[int]] = [[] for _ in range(degree)]
    loads = [(0, rank) for rank in range(degree)]  # a heap of the ranks that can take more runs
    pairs = costs.tolist()
    for each in costs.argsort(descending=True, stable=True).tolist():
        load, rank = heapq.heappop(loads)
        own[rank].append(each)
        if len(own[rank]) < len(pairs) // degree:
            heapq.heappush(loads, (load + pairs[each], rank))
    return own


def _cost(layout: BlockLayout) -> _Cost:
    pairs = torch.cat([_pairs(pattern) for pattern in layout.patterns])  # [num_tokens]
    return _Cost(torch.cat([pairs.new_zeros(1), pairs.cumsum(0)]), layout.num_heads)


def _pairs(pattern: Pattern) -> Tensor:
    """Count the pairs of each query; int64 [tokens]."""
    block, num_tokens = pattern.block, pattern.num_tokens
    num_blocks = pattern.blocks.shape[-1]
    missing = num_blocks * block - num_tokens  # of the last block
    of_rows, diagonal = torch.zeros(2, num_blocks, dtype=torch.int64)
    for blocks in pattern.blocks:  # [num_blocks, num_blocks], of a head
        whole = blocks.tril(-1) if pattern.causal else blocks
        of_rows += whole.sum(-1) * block - whole[:, -1] * missing
        if pattern.causal:
            diagonal += blocks.diagonal()
    at = torch.arange(num_tokens)
    inside, of = at % block, at // block  # place in its block, and which it is
    return of_rows[of] + diagonal[of] * (inside + 1)


def _sum(sums: Tensor, runs: Runs) -> int:
    bounds = torch.tensor(runs, dtype=torch.int64).reshape(-1, 2)
    return int((sums[bounds[:, 1]] - sums[bounds[:, 0]]).sum())
