"""The attention of our decoder over the `cp` axis: in the place of a module's `attend`, for its rank's tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from operator import index
from typing import Any, Final, Generic, TypeVar

from torch import Tensor

from shardwise._torch_private import constant_in_graphs
from shardwise.attention.block_layout import BlockLayout, keep_last
from shardwise.config import ContextConfig
from shardwise.context.attention import ContextAttention
from shardwise.context.balance import choose_split
from shardwise.context.heads import team_size
from shardwise.layout.token_split import TokenSplit
from shardwise.models.attend import Attend

Kind = TypeVar("Kind", bound=Hashable)

_MAX_LAYOUTS: Final = 32


@dataclass(frozen=True, eq=False)
class TokenSplits(Generic[Kind]):
    """Who has which tokens of sequences of some kind, such as of a length: as the work of a model's attention says.

    Attributes:
        layout_of: what all heads of the model see of such a sequence.
        section: of the config.
        degree: ranks of the `cp` axis.
    """

    layout_of: Callable[[Kind], BlockLayout]
    section: ContextConfig
    degree: int
    _splits: dict[Kind, TokenSplit] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, kind: Kind) -> TokenSplit:
        """The split of a sequence.

        Raises:
            ConfigError: its length does not divide.
        """
        keep_last(self._splits, kind, lambda: self._choose(kind), _MAX_LAYOUTS)
        return self._splits[kind]

    def _choose(self, kind: Kind) -> TokenSplit:
        size = team_size(self.section, self.degree)
        return choose_split(self.section.token_layout, self.layout_of(kind), self.degree, size)


@dataclass(frozen=True, eq=False)
class ContextAttend:
    """Attends over the ranks where tokens are given their positions, and plainly where the whole sequence is here.

    Attributes:
        own: what it stands in the place of; says which keys each query sees.
        attention: over the ranks.
        split_of: who has which tokens of a sequence of some length.
        degree: ranks of the `cp` axis.
    """

    own: Attend
    attention: ContextAttention
    split_of: Callable[[int], TokenSplit]
    degree: int
    _layouts: dict[tuple[int, int, int], tuple[BlockLayout, TokenSplit]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, first_head: int, positions: Tensor | None = None
    ) -> Tensor:  # [B, H, S / cp, D], [B, K, S / cp, D]
        if positions is None:
            return self.own(q, k, v, first_head)
        place = index(q.shape[2]) * self.degree, first_head, index(q.shape[1])  # compiled code fixes them
        self._lay_out(*place)
        layout, split = self._layouts[place]
        return self.attention(q, k, v, layout, split)

    def layout(self, length: int, first_head: int, num_heads: int) -> BlockLayout:
        """As of `own`."""
        return self.own.layout(length, first_head, num_heads)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextAttend:
        return self

    @constant_in_graphs
    def _lay_out(self, length: int, first_head: int, num_heads: int) -> None:
        """Keep layout and split; compiled code does so when it is compiled."""
        keep_last(
            self._layouts,
            (length, first_head, num_heads),
            lambda: (self.own.layout(length, first_head, num_heads), self.split_of(length)),
            _MAX_LAYOUTS,
        )
