"""Split a batch of whole sequences for the engine: each rank of the `cp` axis takes its tokens.

Every tensor of a batch whose dim 1 is the sequence is cut to the rank's tokens, ascending, however deep it is nested;
the others stay whole. Dim 1 is recognized by its size: a tensor that has this size by chance is cut too, so give it
another shape, such as [samples, 1, size]. Targets, one for each token, must be shifted in the data: a loss that shifts
them itself would do so at every edge of the rank's runs.

With cp=2 and tp=2, ranks 0 and 1 are one tensor-parallel group and take the same tokens, ranks 2 and 3 the others. Of 8
tokens in zigzag the first two ranks have these; a tensor of one value for each sample stays whole:

>>> batch = (torch.arange(8).view(1, 8), {"targets": torch.arange(1, 9).view(1, 8), "weights": torch.ones(1)})
>>> tokens, others = cut_batch(batch, batch[0], ((0, 2), (6, 8)))
>>> tokens, others
(tensor([[0, 1, 6, 7]]), {'targets': tensor([[1, 2, 7, 8]]), 'weights': tensor([1.])})
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from shardwise.comm.collectives import Comm
from shardwise.config.errors import ConfigError
from shardwise.layout.token_ranges import Runs, TokenSplit
from shardwise.runtime.torch_private import pytree

# The names that models give their tokens.
_MAIN_INPUTS: Final = ("input_ids", "inputs_embeds")
POSITIONS: Final = "positions"
IGNORED: Final = -100  # the target that transformers' losses leave out


@dataclass(frozen=True)
class TokenShard:
    """Holds the part of a batch that a rank computes.

    Attributes:
        tokens: of the sequence, that this rank has; None where it has all of it.
        loss_weight: the weight of the mean that the model itself returns as its loss, 0-d; None for one over the
            number of ranks.
        num_targets: the number of targets of the batch over which the model's own loss is a mean, 0-d; None where it
            is not known.
    """

    batch: Any
    inputs: Any
    tokens: Runs | None = None
    loss_weight: Tensor | None = None
    num_targets: Tensor | None = None


class BatchSharder(Protocol):
    """Takes a rank's share of batches."""

    def share(self, batch: Any, has_more: bool) -> TokenShard:
        """Return this rank's share of a batch of whole sequences.

        Args:
            has_more: whether only its first item is for the model.

        Raises:
            ConfigError: it cannot be split.
        """


class TokenShardedBatch:
    """Gives a rank its tokens of every sample, and a model that takes `positions` their places in the sequence.

    Args:
        model: whose forward has an argument `positions`.
        rank: of this process along the `cp` axis.
        split_of: returns the token split of a sequence of some length.
        prove: called with each batch's inputs and positions, of the whole sequences; None for no proof.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        split_of: Callable[[int], TokenSplit],
        prove: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._prove = prove
        self._names = list(inspect.signature(model.forward).parameters)
        self._check_length: Callable[[int], None] = getattr(model, "check_length", _any_length)
        self._rank = rank
        self._split_of = split_of

    def share(self, batch: Any, has_more: bool) -> TokenShard:
        """Return the tokens of this rank: `batch` and `has_more` are those of `BatchSharder.share`.

        Raises:
            ConfigError: the batch has no sequence, or one that does not divide, or positions of its own.
        """
        main = main_input(batch[0] if has_more else batch)
        length = main.shape[1]
        self._check_length(length)
        tokens = self._split_of(length).shares[self._rank]
        if self._prove is not None:
            whole = by_name(batch[0] if has_more else batch, self._names)
            self._prove({**whole, POSITIONS: torch.arange(length)})
        own = cut_batch(batch, main, tokens)
        inputs = own[0] if has_more else own
        given = by_name(inputs, self._names)
        if POSITIONS in given:
            raise ConfigError(
                "cp-own-positions",
                "the batch gives positions, which under mesh.cp the engine gives the model; leave them out",
            )
        placed = {**given, POSITIONS: positions_of(tokens, main.device)}
        return TokenShard(own, placed, tokens)


def by_name(inputs: Any, names: Collection[str]) -> Mapping[str, Any]:
    """Return a model's inputs as keyword arguments: `names` are those of its forward, in order.

    Raises:
        ConfigError: there are more inputs than names.
    """
    if isinstance(inputs, Mapping):
        return inputs
    values = inputs if isinstance(inputs, list | tuple) else [inputs]
    if len(values) > len(names):
        raise ConfigError(
            "too-many-inputs",
            f"the batch has {len(values)} inputs and the model's forward takes {len(names)} ({', '.join(names)}); give "
            "as many, or a loss_fn and the rest of the batch after the inputs",
        )
    return dict(zip(names, values, strict=False))


def for_proof(leaf: Any) -> Any:
    """Return a tensor on the CPU, in fp64 if it is floating, and anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach().cpu()
    return leaf.double() if leaf.is_floating_point() else leaf


def parts_for_proof(inputs: Mapping[str, Any], num_tokens: int, num_parts: int) -> list[dict[str, Any]]:
    """Return the first tokens of whole sequences, on the CPU in fp64, and each part of them.

    Args:
        inputs: of whole sequences, by name, with their positions.
        num_tokens: how many of the first ones.
    """
    length, size = len(inputs[POSITIONS]), num_tokens // num_parts

    def take(tokens: slice) -> dict[str, Any]:
        def cut(leaf: Any) -> Any:
            is_by_token = isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] == length
            return for_proof(leaf[:, tokens] if is_by_token else leaf)

        given = {name: pytree.tree_map(cut, value) for name, value in inputs.items() if name != POSITIONS}
        return {**given, POSITIONS: inputs[POSITIONS][tokens]}

    parts = [slice(part * size, (part + 1) * size) for part in range(num_parts)]
    return [take(slice(size * num_parts)), *map(take, parts)]


def _any_length(length: int) -> None:
    """Accept any length: most models set no limit."""


def main_input(inputs: Any) -> Tensor:
    """Return the model input that has the sequence along dim 1: `input_ids`, `inputs_embeds` or the first that fits.

    Raises:
        ConfigError: none fits.
    """
    named = [inputs.get(name) for name in _MAIN_INPUTS] if isinstance(inputs, Mapping) else []
    for leaf in [*named, *pytree.tree_leaves(inputs)]:
        if isinstance(leaf, Tensor) and leaf.dim() >= 2 and leaf.shape[1]:
            return leaf
    raise ConfigError(
        "cp-no-input",
        "the batch has no tensor of [samples, tokens, ...] that mesh.cp could split; give one of 1 or more tokens, or "
        "set mesh.cp=1",
    )


def cut_batch(batch: Any, main: Tensor, tokens: Runs) -> Any:
    """Return a pytree with all tensors of [samples, length, ...] cut to some tokens.

    Args:
        main: the tensor that `main_input` finds; it gives samples and length.

    Raises:
        ConfigError: the batch has a mask of all pairs of tokens.
    """
    length = main.shape[1]

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() < 2:
            return leaf
        if leaf.shape[-2:] == (length, length) and _is_mask(leaf, main.shape[0]):
            raise ConfigError(
                "cp-pair-mask",
                f"the batch has a mask of shape {tuple(leaf.shape)}, of all pairs of {length} tokens, which mesh.cp "
                "does not split; choose which keys a query sees by the section attention, or set mesh.cp=1",
            )
        return take_tokens(leaf, tokens) if leaf.shape[1] == length else leaf

    return pytree.tree_map(cut, batch)


def _is_mask(square: Tensor, num_samples: int) -> bool:
    """Return whether a tensor whose last two dims are as many as tokens is a mask of pairs of tokens."""
    if square.dim() == 2:
        return square.shape[0] != num_samples
    return square.dim() > 3 or square.dtype == torch.bool


def take_tokens(tensor: Tensor, tokens: Runs) -> Tensor:
    """Return some tokens of a tensor of [samples, tokens, ...], one run after another."""
    parts = [tensor.narrow(1, start, stop - start) for start, stop in tokens]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, 1)


def positions_of(tokens: Runs, device: torch.device) -> Tensor:
    """Return the places of tokens in their sequence, int64 [tokens]."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in tokens])


@dataclass(frozen=True)
class PaddedTokens:
    """Holds sequences of different lengths as models take them, padded at their ends.

    >>> nested = torch.nested.as_nested_tensor([torch.tensor([5, 6, 7]), torch.tensor([8])], layout=torch.jagged)
    >>> padded = PaddedTokens.of(nested, multiple=2)
    >>> padded.tokens.tolist(), padded.targets.tolist()
    ([[5, 6, 7, 0], [8, 0, 0, 0]], [[6, 7, -100, -100], [-100, -100, -100, -100]])
    >>> padded.nested(padded.tokens).values().tolist()
    [5, 6, 7, 8]

    Attributes:
        mask: of the tokens, true for what is no padding.
        offsets: [B + 1], where each sequence begins among all their tokens.
    """

    tokens: Tensor  # [B, S]
    mask: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, nested: Tensor, multiple: int = 1) -> PaddedTokens:
        """Pad the sequences of a jagged tensor to one length that is a multiple."""
        tokens, offsets = torch.nested.to_padded_tensor(nested, 0.0), nested.offsets()  # type: ignore[attr-defined]
        tokens = F.pad(tokens, (0, -tokens.shape[1] % multiple))
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return cls(tokens, places < offsets.diff().unsqueeze(1), offsets)

    @property
    def inputs(self) -> dict[str, Any]:
        """Return what models of transformers take."""
        return {"input_ids": self.tokens, "attention_mask": self.mask.long(), "use_cache": False}

    @property
    def places(self) -> Tensor:
        """Return the place of each token in its sequence, [1, S]; cut with the tokens, they say which these are."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).unsqueeze(0)

    @property
    def targets(self) -> Tensor:
        """Return the token that follows each, [B, S], ignored after the last one."""
        return self.tokens.roll(-1, 1).where(F.pad(self.mask[:, 1:], (0, 1)), IGNORED)

    def nested(self, values: Tensor) -> Tensor:
        """Return numbers of all tokens, [B, S], as a jagged tensor of the same sequences."""
        return torch.nested.nested_tensor_from_jagged(values[self.mask], self.offsets)


def gather_tokens(own: Tensor, places: Tensor, num_tokens: int, comm: Comm) -> Tensor:
    """Return [samples, all tokens] of numbers of each rank's tokens, for a loss that each rank computes of all.

    A gradient counts once for each rank, as in a step, which takes the mean over the ranks.

    Args:
        places: of this rank's tokens in the sequence.
    """
    numbers: Tensor = _GatheredTokens.apply(own, places, num_tokens, comm)
    return numbers


class _GatheredTokens(Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, places: Tensor, num_tokens: int, comm: Comm) -> Tensor:
        ctx.places, ctx.num_ranks = places, comm.world_size
        numbers = own.new_zeros(own.shape[0], num_tokens)
        numbers[:, places] = own
        comm.sum_in_place(numbers.view(-1), "numbers of tokens")  # of each token one rank has a value, the others 0
        return numbers

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient[:, ctx.places] * ctx.num_ranks, None, None, None
