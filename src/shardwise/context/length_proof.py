"""Prove the lengths that a run's batches have: code may branch on the number of tokens, which a rank has a part of.

A proof of a short sequence (`shardwise.context.locality`) says nothing of what code does to longer ones, as in
`2 * x if x.shape[1] > 1000 else x`. So each length that is new is proved when its first batch comes: the copy runs with
all of its tokens, and with those of each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from shardwise.context.locality import check_tokens_apart, copy_again

_MOST_WATCHED: Final = 2**25  # numbers that modules return, which are kept to name one
_MOST_NUMBERS: Final = 2**31

Kind = tuple[int, tuple[str, ...]]
"""The number of tokens of a sequence, and the names of what a batch gives."""


@dataclass(frozen=True)
class ProofInputs:
    """Holds what a copy is given: all tokens first, and then those of each rank.

    Attributes:
        parts: arguments of its forward.
        loss_weights: of the loss that the model itself returns; empty where it returns none.
    """

    parts: Sequence[Mapping[str, Any]]
    loss_weights: Sequence[Tensor | None] = ()


class LengthProofs:
    """Proves each length once.

    Args:
        copied: by `copy_for_proof`, with `attend_alone` for its attention.
        numbers_per_token: how many numbers its modules return for a token.
    """

    def __init__(self, copied: nn.Module, numbers_per_token: float = 0.0) -> None:
        self._copied = copied
        self._numbers_per_token = numbers_per_token
        self._proved: set[Kind] = set()

    def prove(self, num_samples: int, kind: Kind, inputs: Callable[[], ProofInputs]) -> None:
        """Prove that ranks may have parts of sequences of a length, unless it is known.

        Args:
            inputs: returns what to prove it with.

        Raises:
            ConfigError: they may not.
        """
        if kind in self._proved:
            return
        num_tokens = num_samples * kind[0]
        given = inputs()
        is_watched = num_tokens * self._numbers_per_token <= _MOST_WATCHED
        found = check_tokens_apart(copy_again(self._copied), [given.parts], given.loss_weights, is_watched)
        if found:
            self._numbers_per_token = found / num_tokens
        self._proved.add(kind)
