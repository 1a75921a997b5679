"""Prove the lengths that a run's batches have: code may decide by the number of tokens, of which a rank has a part.

A proof of a short sequence (`shardwise.context.locality`) says nothing of what code does to longer ones, as in
`2 * x if x.shape[1] > 1000 else x`. So each new length is proved when its first batch comes:

- A short one of a small model by values: a copy runs with all of its tokens, and with those of each rank.
- Others by decisions. The copy runs without values, with a symbol for the number of tokens: of all, and of a rank's.
  Where each decision that its code takes by them is one that it also takes at a length that is proved, this one is too.
- Where it is not, by values, as far as that ends within a minute or so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.config.resolve import ConfigError
from shardwise.context.locality import NO_CONTEXT, Inputs, check_tokens_apart, copy_again
from shardwise.runtime.float64 import float64_throughout
from shardwise.runtime.forward_state import kept_generators
from shardwise.runtime.symbolic_size import SymbolicSize
from shardwise.runtime.torch_private import pytree
from shardwise.runtime.user_hooks import hooks_put_back

_LOG: Final = logging.getLogger("shardwise")
# Numbers that modules return in a forward; a proof computes some 2**24 of them in a second.
_FEW_NUMBERS: Final = 2**22
_WATCHED_NUMBERS: Final = 2**25  # are kept, to name the module
_MOST_NUMBERS: Final = 2**27
_FEW_LENGTHS: Final = 8  # batches whose lengths change do not prove each of them by values


@dataclass(frozen=True)
class ProofInputs:
    """Holds what a copy is given for a proof: all tokens first, and then those of each rank.

    Attributes:
        attempts: arguments of its forward; the first attempt that runs counts.
        loss_weights: of the loss that the model itself returns; empty where it returns none.
    """

    attempts: Sequence[Sequence[Inputs]]
    loss_weights: Sequence[Tensor | None] = ()


@dataclass(frozen=True)
class _Decisions:
    """Holds what a model's code decides by the number of tokens: of all tokens, and of a rank's."""

    names: frozenset[str]
    of_all: SymbolicSize
    of_rank: SymbolicSize

    def differing_at(self, length: int, rank_length: int) -> str:
        return self.of_all.differing_at(length) or self.of_rank.differing_at(rank_length)


@dataclass
class LengthProofs:
    """Proves each length of a model's sequences once.

    Attributes:
        copied: by `copy_for_proof`, with `attend_alone` for its attention.
        cp: ranks that have a part of a sequence each.
        proved: lengths of all tokens and of a part that were proved before.
    """

    copied: nn.Module
    cp: int
    proved: list[tuple[int, int]] = field(default_factory=list)
    _known: set[tuple[int, frozenset[str]]] = field(default_factory=set, init=False, repr=False)
    _decisions: list[_Decisions] = field(default_factory=list, init=False, repr=False)
    _num_left: float = field(default=2.0 * _MOST_NUMBERS, init=False, repr=False)

    def prove(self, batch: Mapping[str, Any], num_samples: int, length: int, make: Callable[[], ProofInputs]) -> None:
        """Prove that ranks may have parts of sequences of a length, unless it is earlier.

        Args:
            batch: its inputs; a batch that gives others is proved apart from it.
            make: returns what to prove it with.

        Raises:
            ConfigError: they may not.
        """
        names = frozenset(name for name, value in batch.items() if value is not None)
        if (length, names) in self._known:
            return
        num_numbers = num_samples * length * _numbers_of_a_token(self.copied)
        is_costly = num_numbers > _FEW_NUMBERS or len(self.proved) > _FEW_LENGTHS
        lengths = length, length // self.cp
        if is_costly and any(known.names == names and not known.differing_at(*lengths) for known in self._decisions):
            return
        inputs = make()
        decisions = self._find_decisions(names, length, inputs) if is_costly else None
        if decisions is None or not self._are_proved(decisions):
            if is_costly and num_numbers > min(_MOST_NUMBERS, self._num_left):
                self._leave(decisions, length)
            else:
                self._num_left -= num_numbers if is_costly else 0
                is_watched = num_numbers <= _WATCHED_NUMBERS
                check_tokens_apart(copy_again(self.copied), inputs.attempts, inputs.loss_weights, is_watched)
                self.proved.append((length, length // self.cp))
        if decisions is not None:
            self._decisions.append(decisions)
        self._known.add((length, names))

    def _are_proved(self, decisions: _Decisions) -> bool:
        return any(not decisions.differing_at(*lengths) for lengths in self.proved)

    def _find_decisions(self, names: frozenset[str], length: int, inputs: ProofInputs) -> _Decisions | None:
        """Return what the code decides by the number of tokens, here and there; None where that cannot be known."""
        rank_length, decisions = length // self.cp, None
        attempts = inputs.attempts if rank_length > 1 else ()  # torch takes a size of 1 for a number
        for all_tokens, rank_tokens, *_ in attempts:
            with suppress(Exception):  # of code that needs values
                of_rank = of_all = _decided(copy_again(self.copied), all_tokens, length)
                if of_all.differing_at(rank_length):
                    of_rank = _decided(copy_again(self.copied), rank_tokens, rank_length)
                decisions = _Decisions(names, of_all, of_rank)
                if self._are_proved(decisions):  # torch's code may need numbers in one attempt and not in another
                    break
        return decisions

    def _leave(self, decisions: _Decisions | None, length: int) -> None:
        """Refuse a length that is not proved where the code decides by it, and warn where that is not known."""
        name = type(self.copied).__name__
        if decisions is None:
            _LOG.warning(
                "it could not be proved that %s computes its tokens apart from each other in sequences of %s tokens, "
                "as mesh.cp needs: its code needs values, and the proof with values is too large",
                *(name, f"{length:,}"),
            )
            return
        near = max((pair for pair in self.proved if pair[0] <= length), default=self.proved[-1])
        rule = decisions.differing_at(*near).replace("size", "tokens")
        raise ConfigError(
            "cp-length-unproved",
            f"mesh.cp splits sequences of {length:,} tokens, and {name} decides by the number of tokens ({rule}), "
            f"which on each rank is {length // self.cp:,}; that its numbers are the same could be proved up to "
            f"{near[0]:,} tokens only; let the code not depend on it, or {NO_CONTEXT}",
        )


def _decided(copied: nn.Module, inputs: Inputs, num_tokens: int) -> SymbolicSize:
    """Return what a model's code decides by the number of tokens, in evaluation and in training."""
    size = SymbolicSize(num_tokens)
    for module in copied.modules():
        getattr(module, "set_experts_implementation", str)("batched_mm")  # the one that needs no values

    def symbolic(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dim = min(leaf.dim(), 2) - 1
        if dim < 0 or leaf.shape[dim] != num_tokens:
            return leaf
        return torch.zeros([*leaf.shape[:dim], size.number, *leaf.shape[dim + 1 :]], dtype=leaf.dtype)

    with hooks_put_back(copied), kept_generators(), torch.no_grad(), float64_throughout(), size.in_place():
        arguments = pytree.tree_map(symbolic, dict(inputs))
        for is_training in (False, True):
            copied.train(is_training)(**arguments)
    return size


def _numbers_of_a_token(model: nn.Module) -> int:
    """Return about how many numbers a model's modules return for a token."""
    return sum(parameter.shape[0] for parameter in model.parameters() if parameter.dim() > 1)
