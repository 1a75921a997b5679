"""Offer DeepSpeed's tiled computation: a function runs over one tile of a sequence after the other.

Each tile is recomputed in the backward, so that the activations of one tile are there at a time; values and gradients
are those of the whole, up to the order of sums. Parameters are gathered as for any module: `compute_params` names those
of the function for DeepSpeed, and is not used.

>>> import torch
>>> x, head = torch.ones(1, 4, 2, requires_grad=True), torch.nn.Linear(2, 3)
>>> TiledMLP.apply(lambda layer, tile: layer(tile), head, x, 2, None).shape
torch.Size([1, 4, 3])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwise.config.errors import ConfigError

_REDUCTIONS = ("mean", "sum")


def _tile(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return function(*args, **options)
    return checkpoint(function, *args, use_reentrant=False, **options)


def _reduced(outputs: Tensor, reduction: str | None) -> Tensor:
    if reduction is None:
        return outputs
    if reduction not in _REDUCTIONS:
        raise ConfigError("tiled-reduction", f"output_reduction={reduction!r} is unknown; take mean or sum")
    return outputs.mean() if reduction == "mean" else outputs.sum()


class TiledMLP:
    """Runs a layer over tiles of the next to last dimension."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor], module: Any, x: Tensor, shards: int, compute_params: Any = None
    ) -> Tensor:
        """Return `fn(module, x)`, computed in so many `shards`; the arguments are those of DeepSpeed."""
        return torch.cat([_tile(fn, module, tile) for tile in torch.chunk(x, shards, dim=-2)], dim=-2)


class AutogradComputeMLP:
    """Runs a layer whose activations are recomputed in the backward."""

    @staticmethod
    def apply(fn: Callable[[Any, Tensor], Tensor], module: Any, x: Tensor) -> Tensor:
        """Return `fn(module, x)`; the arguments are those of DeepSpeed."""
        result: Tensor = _tile(fn, module, x)
        return result


class TiledFusedLogitsLoss:
    """Computes a loss over tiles of tokens, so that the logits of one tile are there at a time."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        module: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Any = None,
        output_reduction: str = "mean",
    ) -> Tensor:
        """Return the mean or the sum of `fn(module, x, y)` over tiles of tokens; the arguments are those of DeepSpeed.

        The mean gives each tile the same weight, as DeepSpeed's does; "sum" fits tiles with other numbers of targets.
        """
        tensors = [tensor for tensor in (x, y, mask) if tensor is not None]
        if any(tensor.dim() < 2 or tensor.shape[:2] != x.shape[:2] for tensor in tensors):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise ConfigError("tiled-shapes", f"x, y and mask begin with batch and sequence; they have {shapes}")
        tiles = zip(*(torch.chunk(tensor.flatten(0, 1), shards) for tensor in tensors), strict=True)
        return _reduced(torch.stack([_tile(fn, module, *tile) for tile in tiles]), output_reduction or "")


class SequenceTiledCompute:
    """Runs a function over tiles of the second dimension of some of its arguments."""

    @staticmethod
    def apply(  # noqa: PLR0913  DeepSpeed's arguments
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Any,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> Tensor:
        """Return what `sequence_tiled_compute` does; the arguments are those of DeepSpeed."""
        shared = dict(zip(keys_to_pass, args[len(keys_to_shard) :], strict=True))
        size, outputs = -(-seqlen // shards), []
        for start in range(0, seqlen, size):
            tile = {key: value[:, start : start + size] for key, value in zip(keys_to_shard, args, strict=False)}
            outputs.append(_tile(fn, **tile, **shared))
        if output_unshard_dimension == 0:
            return _reduced(torch.stack(outputs), output_reduction)
        return _reduced(torch.cat(outputs, dim=output_unshard_dimension), output_reduction)


def sequence_tiled_compute(  # noqa: PLR0913  DeepSpeed's arguments
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Any = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Tensor:
    """Return `fn` over tiles of a sequence, joined, or their mean or sum; the arguments are those of DeepSpeed."""
    return SequenceTiledCompute.apply(
        fn,
        seqlen,
        shards,
        list(kwargs_to_shard),
        list(kwargs_to_pass),
        grad_requiring_tensor_key,
        compute_params,
        output_unshard_dimension,
        output_reduction,
        *kwargs_to_shard.values(),
        *kwargs_to_pass.values(),
    )
