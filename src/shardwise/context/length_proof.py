"""Prove the lengths that a run's batches have: code may decide by the number of tokens, of which a rank has a part.

A proof of a short sequence (`shardwise.context.locality`) says nothing of what code does to longer ones, as in
`2 * x if x.shape[1] > 1000 else x`. So each new length is proved when its first batch comes, and each new number of
samples:

- A short one of a small model by values: a copy runs with all of its tokens, and with those of each rank.
- Others by decisions. The copy runs without values, with symbols for the numbers of samples and tokens: of all, and of
  a rank's. Where each decision that its code takes by them is one that it also takes at sizes that are proved, these
  are too.
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
from shardwise.context.batch import main_input
from shardwise.context.locality import Inputs, Splitting, check_tokens_apart, copy_again
from shardwise.runtime.float64 import float64_throughout
from shardwise.runtime.forward_state import kept_generators
from shardwise.runtime.symbolic_size import SymbolicSizes
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


Sizes = Mapping[str, int]
"""By name: of samples, of tokens, and perhaps of the tokens of other sequences of a batch."""

Signature = tuple[Any, ...]


def sizes_of(inputs: Inputs) -> dict[str, int]:
    """Return the numbers of samples and tokens of a model's inputs.

    Raises:
        ConfigError: they have no tensor of tokens.
    """
    num_samples, num_tokens = main_input(inputs).shape[:2]
    return {"samples": num_samples, "tokens": num_tokens}


@dataclass(frozen=True)
class _Decisions:
    """Holds what a model's code decides by the sizes of its inputs: with all tokens, and with a rank's."""

    signature: Signature
    of_all: SymbolicSizes
    of_rank: SymbolicSizes

    def differing_at(self, sizes: Sizes, rank_sizes: Sizes) -> str:
        return self.of_all.differing_at(**sizes) or self.of_rank.differing_at(**rank_sizes)


@dataclass
class LengthProofs:
    """Proves each length of a model's sequences once, for each number of samples.

    Attributes:
        copied: by `copy_for_proof`, with `attend_alone` for its attention.
        numbers_of_a_token: how many numbers modules return for a token of a sequence of a length.
        cuts_inputs: whether a rank's inputs have its tokens alone.
        proved: sizes of inputs that were proved before, and of which inputs; of any, where that is None.
    """

    copied: nn.Module
    splitting: Splitting
    numbers_of_a_token: Callable[[int], int]
    cuts_inputs: bool = True
    proved: list[tuple[Signature | None, Sizes]] = field(default_factory=list)
    _known: set[Signature] = field(default_factory=set, init=False, repr=False)
    _decisions: list[_Decisions] = field(default_factory=list, init=False, repr=False)
    _num_left: float = field(default=2.0 * _MOST_NUMBERS, init=False, repr=False)

    def is_costly(self, sizes: Sizes) -> bool:
        """Say whether a proof with values takes long, or would be one of many."""
        return self._num_numbers(sizes) > _FEW_NUMBERS or len(self.proved) > _FEW_LENGTHS

    def is_known(self, signature: Signature, sizes: Sizes) -> bool:
        """Say whether inputs of these sizes were proved, or left."""
        return (signature, *sizes.values()) in self._known

    def prove(self, signature: Signature, sizes: Sizes, make: Callable[[], ProofInputs]) -> None:
        """Prove that ranks may have parts of sequences of a length, unless it is earlier.

        Args:
            signature: of the inputs; those of another one are proved apart from them.
            sizes: of the inputs that prove it.
            make: returns what to prove it with.

        Raises:
            ConfigError: they may not.
        """
        if self.is_known(signature, sizes):
            return
        is_costly, num_numbers = self.is_costly(sizes), self._num_numbers(sizes)
        if is_costly and any(
            known.signature == signature and not known.differing_at(sizes, self._of_rank(sizes))
            for known in self._decisions
        ):
            self._known.add((signature, *sizes.values()))
            return
        inputs = make()
        decisions = self._find_decisions(signature, sizes, inputs) if is_costly else None
        if decisions is None or not self._are_proved(decisions):
            if is_costly and num_numbers > min(_MOST_NUMBERS, self._num_left):
                self._leave(decisions, sizes)
            else:
                self._num_left -= num_numbers if is_costly else 0
                is_watched = num_numbers <= _WATCHED_NUMBERS
                copied = copy_again(self.copied)
                check_tokens_apart(copied, self.splitting, inputs.attempts, inputs.loss_weights, is_watched)
                self.proved.append((signature, sizes))
        if decisions is not None:
            self._decisions.append(decisions)
        self._known.add((signature, *sizes.values()))

    def _num_numbers(self, sizes: Sizes) -> int:
        return sizes["samples"] * sizes["tokens"] * self.numbers_of_a_token(sizes["tokens"])

    def _of_rank(self, sizes: Sizes) -> Sizes:
        return {**sizes, "tokens": sizes["tokens"] // self.splitting.degree} if self.cuts_inputs else sizes

    def _are_proved(self, decisions: _Decisions) -> bool:
        return any(
            signature in (None, decisions.signature) and not decisions.differing_at(sizes, self._of_rank(sizes))
            for signature, sizes in self.proved
        )

    def _find_decisions(self, signature: Signature, sizes: Sizes, inputs: ProofInputs) -> _Decisions | None:
        """Return what the code decides by the sizes, here and there; None where that cannot be known."""
        rank_sizes, decisions = self._of_rank(sizes), None
        for all_tokens, rank_tokens, *_ in inputs.attempts:
            with suppress(Exception):  # of code that needs values
                of_rank = of_all = self._decided(all_tokens, sizes, part=0)
                if not self.cuts_inputs or of_all.differing_at(**rank_sizes):
                    of_rank = self._decided(rank_tokens, rank_sizes, part=1)
                decisions = _Decisions(signature, of_all, of_rank)
                if self._are_proved(decisions):  # torch's code may need numbers in one attempt and not in another
                    break
        return decisions

    def _leave(self, decisions: _Decisions | None, sizes: Sizes) -> None:
        """Refuse a length that is not proved where the code decides by it, and warn where that is not known."""
        name, rule, length = type(self.copied).__name__, self.splitting.rule, sizes["tokens"]
        if decisions is None:
            _LOG.warning(
                "it could not be proved that %s computes its tokens apart from each other in sequences of %s tokens, "
                "as %s needs: its code needs values, and the proof with values is too large",
                *(name, f"{length:,}", rule.key),
            )
            return
        known = [each for signature, each in self.proved if signature in (None, decisions.signature)]
        shorter = [each for each in known if each["tokens"] <= length]
        near = max(shorter, key=lambda each: (each["samples"] == sizes["samples"], each["tokens"]), default={})
        differing = decisions.differing_at(near, self._of_rank(near)) if near else "no length is proved"
        raise ConfigError(
            rule.length_code,
            f"{rule.key} splits sequences of {length:,} tokens, and {name} decides by their size ({differing}), which "
            f"on each rank is {length // self.splitting.degree:,} tokens; that its numbers are the same could be "
            f"proved up to {near.get('tokens', 0):,} tokens only; let the code not depend on it, or {rule.fix}",
        )

    def _decided(self, inputs: Inputs, of_inputs: Sizes, part: int) -> SymbolicSizes:
        """Return what the code decides by the sizes of its inputs, in evaluation and in training."""
        copied, sizes = copy_again(self.copied), SymbolicSizes(**of_inputs)
        for module in copied.modules():
            getattr(module, "set_experts_implementation", str)("batched_mm")  # the one that needs no values

        def symbolic(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            names = _names_of(leaf, of_inputs)
            if not any(names):
                return leaf
            shape = [sizes.numbers[name] if name else size for name, size in zip(names, leaf.shape, strict=True)]
            return torch.zeros(shape, dtype=leaf.dtype)

        with hooks_put_back(copied), kept_generators(), torch.no_grad(), float64_throughout(), sizes.in_place():
            arguments = pytree.tree_map(symbolic, dict(inputs))
            for is_training in (False, True):
                with self.splitting.one_run(inputs, part):
                    copied.train(is_training)(**arguments)
        return sizes


def _names_of(leaf: Tensor, sizes: Sizes) -> list[str]:
    """Return the name of the size of each dim of a tensor of samples and tokens; empty for others."""
    of_tokens = {size: name for name, size in [*sizes.items()][::-1] if name != "samples"}
    names, shape = [""] * leaf.dim(), leaf.shape
    if leaf.dim() > 1:
        names[1] = of_tokens.get(shape[1], "")
    if leaf.dim() > 0 and shape[0] == sizes["samples"]:
        names[0] = "samples"
    if leaf.dim() == 1:
        names[0] = of_tokens.get(shape[0], names[0])
    if leaf.dim() > 2 and shape[-1] == shape[-2]:  # of pairs of tokens
        names[-2:] = [of_tokens.get(shape[-1], names[-2]), of_tokens.get(shape[-1], "")]
    return names


def signature_of(batch: Inputs, sizes: Sizes) -> Signature:
    """Return what inputs are but for their sizes."""

    def shape_of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return type(leaf).__name__
        return [name or size for name, size in zip(_names_of(leaf, sizes), leaf.shape, strict=True)][1:]

    return tuple((name, str(pytree.tree_map(shape_of, value))) for name, value in batch.items() if value is not None)


def numbers_of_a_token(model: nn.Module) -> int:
    """Return about how many numbers a model's modules return for a token."""
    return sum(parameter.shape[0] for parameter in model.parameters() if parameter.dim() > 1)
