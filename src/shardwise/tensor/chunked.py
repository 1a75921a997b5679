"""Compute feed-forwards and heads on some tokens at a time, so that inner states and logits never exist whole.

A feed-forward mixes no tokens, so it can be called on n of them at a time (Liu and Abbeel 2023, "Blockwise Parallel
Transformer", section 3). Only its input is kept, and each part is computed again in its own backward; so there are n
rows of inner states, in forward and backward, whatever the block around it recomputes. A block that is not recomputed
pays one more forward of the feed-forward. A recomputed block pays nothing, unless it uses the feed-forward's output in
a later op, such as a norm after it. Gradients of weights are summed over the parts in the weights' dtype, as autograd
sums: in bf16, 16 parts double their rounding error, and 128 multiply it by 6.

The head's logits are deferred until their cross entropy, which takes some tokens at a time, as those of a split head
are (`shardwise.tensor.loss_parallel`).

>>> from shardwise.construction.scan import build_layout
>>> from shardwise.models.presets import DecoderConfig
>>> shape = DecoderConfig(vocab_size=64, num_layers=1, hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=4,
...                       ffn_size=48, max_seq_len=32)
>>> model, tokens = Decoder(shape), torch.arange(16).view(2, 8)
>>> expected = model(tokens)
>>> from shardwise.config.resolve import Config
>>> config = Config.from_dict({"context": {"chunk_tokens": 3}}).resolve(world_size=1)
>>> undo = chunk_model(model, config, build_layout(model, config), KeyedDraws(seed=0))
>>> logits = model(tokens)
>>> logits.is_deferred, torch.allclose(logits.compute(), expected, atol=1e-6)
(True, True)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import ResolvedConfig
from shardwise.dropout import KeyedDraws, Tokens
from shardwise.layout.layout import Layout
from shardwise.layout.tensor_plan import is_within
from shardwise.models.decoder import Decoder
from shardwise.runtime.class_swap import set_attribute, subclass_module
from shardwise.runtime.recompute import run_in_parts
from shardwise.tensor import layers
from shardwise.tensor.cross_entropy import VocabSplit
from shardwise.tensor.loss_parallel import HEAD_STATE, LazyLogits, LazyLogitsHead

_LOG: Final = logging.getLogger("shardwise")

Undo = Callable[[], None]

# Names of feed-forwards in blocks of this library, of transformers, and of models written by hand.
_NAMES: Final = frozenset({"ffn", "mlp", "MLP", "feed_forward", "feedforward", "ff", "DenseReluDense"})
# A feed-forward that has one of these mixes tokens, or counts them.
_MIXING: Final = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)


def chunk_model(model: nn.Module, config: ResolvedConfig, layout: Layout, draws: KeyedDraws) -> list[Undo]:
    """Make a model's feed-forwards and its head take `context.chunk_tokens` tokens at a time.

    Call it after layers are split and dropouts keyed, and before forwards are wrapped for recomputation: the chunks
    must be around the former and inside the latter.

    Args:
        model: whose modules change; its parameters do not.
        draws: of the run; with them a dropout drops the same elements as on the whole sequence.

    Returns:
        functions that undo it; call them in reverse order. Empty where `context.chunk_tokens` is None.

    Raises:
        ConfigError: a feed-forward is a mixture of experts, or mixes tokens.
    """
    chunk_tokens = config.context.chunk_tokens
    if chunk_tokens is None:
        return []
    undo: list[Undo] = []
    for unit in layout.units:
        names = list(_feed_forwards(model.get_submodule(unit), unit))
        if not names:
            _LOG.warning(
                "context.chunk_tokens=%d: block %s has no feed-forward of its own (%s), so its inner states exist "
                "whole; move it into a module of such a name, which takes and returns one tensor",
                *(chunk_tokens, unit, ", ".join(sorted(_NAMES))),
            )
            break
        for name in names:
            module = model.get_submodule(name)
            if not isinstance(module, ChunkedForward):  # the model may have it under several names
                undo.append(subclass_module(module, ChunkedForward))
                undo.append(set_attribute(module, "_shardwise_chunks", _state(name, chunk_tokens, layout, draws)))
    return undo + _let_head_wait(model, layout, chunk_tokens)


@dataclass(frozen=True, eq=False)
class ChunkState:
    """Holds what a feed-forward needs to work in parts."""

    name: str
    num_tokens: int
    draws: KeyedDraws

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the object itself: nothing in it belongs to one module."""
        return self


class ChunkedForward(nn.Module):
    """Calls a module on some tokens (dim 1) at a time; each part is recomputed in its own backward.

    Raises:
        ConfigError: it is not given one tensor [B, S, E], or does not return one of that shape.
    """

    _shardwise_chunks: ChunkState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state, own = self._shardwise_chunks, super().forward
        given = [*args, *kwargs.values()]
        if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].dim() != 3:
            raise _unfit(state, "is called with", given)
        x: Tensor = given[0]  # [B, S, E]
        mark, total, outputs = state.draws.mark(), x.shape[1], []

        def run(index: int, part: Tensor) -> Any:  # [B, n, E]
            with state.draws.on_tokens(Tokens(index * state.num_tokens, part.shape[1], total), mark):
                return own(part.contiguous())  # models fold dims of what they are given by `view`

        for part, output in zip(x.split(state.num_tokens, dim=1), run_in_parts(run, x, state.num_tokens), strict=True):
            if not isinstance(output, Tensor) or output.shape != part.shape:
                raise _unfit(state, "returns", [output])
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class DeferredHead(nn.Module):
    """Computes the logits of a linear layer to the vocabulary only when they are read."""

    weight: Tensor
    bias: Tensor | None
    _shardwise_head: LazyLogitsHead

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:  # [..., E] -> [..., V]
        (x,) = (*args, *kwargs.values())
        return LazyLogits(x, self.weight, self.bias, self._shardwise_head)


def _feed_forwards(block: nn.Module, prefix: str) -> Iterator[str]:
    """Yield the names of a block's feed-forwards, the outermost ones.

    Raises:
        ConfigError: one of them cannot work in parts.
    """
    if prefix.rpartition(".")[2] in _NAMES:
        _check(block, prefix)
        yield prefix
        return
    for name, child in block.named_children():
        yield from _feed_forwards(child, f"{prefix}.{name}")


def _check(module: nn.Module, name: str) -> None:
    for inner, each in module.named_modules():
        kind = type(each).__name__
        if "expert" in inner.lower() or "expert" in kind.lower() or "moe" in kind.lower():
            raise ConfigError(
                "chunk-experts",
                f"context.chunk_tokens: {name}, a {type(module).__name__}, is a mixture of experts, which weighs all "
                "tokens of a sequence; leave context.chunk_tokens out",
            )
        if isinstance(each, _MIXING):
            raise ConfigError(
                "chunk-mixes-tokens",
                f"context.chunk_tokens: {name}, a {type(module).__name__}, has a {kind}, which mixes tokens; leave "
                "context.chunk_tokens out",
            )


def _state(name: str, chunk_tokens: int, layout: Layout, draws: KeyedDraws) -> ChunkState:
    tensor = layout.tensor
    # Where the feed-forward gathers the sequence, each rank contributes its part of the tokens.
    num_ranks = tensor.degree if tensor is not None and is_within(name, tensor.sequence_modules) else 1
    return ChunkState(name, max(1, chunk_tokens // num_ranks), draws)


def _unfit(state: ChunkState, does: str, values: list[Any]) -> ConfigError:
    shown = ", ".join(str(tuple(each.shape)) if isinstance(each, Tensor) else type(each).__name__ for each in values)
    return ConfigError(
        "chunk-one-tensor",
        f"context.chunk_tokens={state.num_tokens}: {state.name} {does} {shown or 'nothing'}, and a feed-forward in "
        "parts takes one tensor [B, S, E] and returns one of its shape; leave context.chunk_tokens out",
    )


def _let_head_wait(model: nn.Module, layout: Layout, chunk_tokens: int) -> list[Undo]:
    """Make a head that is not split return logits that are not computed yet."""
    name, head, reason = _deferrable_head(model, layout)
    if head is None:
        if reason:
            _LOG.warning("context.chunk_tokens=%d: logits exist whole, as %s", chunk_tokens, reason)
        return []
    return _defer(name, head, chunk_tokens)


@contextmanager
def deferred_head(model: nn.Module, layout: Layout) -> Iterator[None]:
    """Defer the logits of calls inside, where the head can: it takes as many tokens at a time as suit the device."""
    name, head, _ = _deferrable_head(model, layout)
    undo = [] if head is None else _defer(name, head, None)
    try:
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _defer(name: str, head: nn.Linear, chunk_tokens: int | None) -> list[Undo]:
    vocab = VocabSplit(head.weight.shape[0], chunk_tokens=chunk_tokens)
    return [subclass_module(head, DeferredHead), set_attribute(head, HEAD_STATE, LazyLogitsHead(vocab, name))]


def _deferrable_head(model: nn.Module, layout: Layout) -> tuple[str, nn.Linear | None, str]:
    """Return a head whose logits can be deferred, and its name; or None, and why it cannot, empty where they are."""
    name, head = _find_head(model)
    if isinstance(head, layers.VocabParallelHead | DeferredHead):
        return name, None, ""
    if head is None:
        return name, None, "the model names none (get_output_embeddings)"
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return name, None, f"{name} is a {type(head).__name__} with a forward of its own"
    if is_within(name, layout.units):
        return name, None, f"{name} is part of a block"
    return name, head, ""


def _find_head(model: nn.Module) -> tuple[str, nn.Module | None]:
    for name, module in model.named_modules():
        head = None
        if isinstance(module, Decoder):
            head = module.head
        elif hasattr(module, "base_model_prefix") and hasattr(module, "get_output_embeddings"):  # one of transformers
            head = module.get_output_embeddings()
        if head is not None:
            return next((each for each, found in model.named_modules() if found is head), name), head
    return "", None
