"""Prepare a batch of whole sequences for a rank's forward of a Hugging Face model over the `cp` axis.

The model is not changed. It gets its rank's tokens with their true positions, a mask from which its layers know the
whole sequence (`shardwise.attention.cp_hook`), and targets that were shifted before they were cut. Its own loss is then
the mean over the rank's targets. The weight of this loss is the rank's part of all targets, so the ranks' weighted
losses sum to the loss of the whole batch.

    given = split_inputs(model, batch, split_of, rank)
    loss = model(**given.inputs).loss * given.loss_weight
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.attention.cp_hook import sequence_mask
from shardwise.attention.huggingface import attends_causally
from shardwise.config.errors import ConfigError
from shardwise.context.batch import main_input, take_tokens
from shardwise.hf.losses import CAUSAL, IGNORED, NUM_ITEMS, PER_TOKEN, takes_shifted_labels
from shardwise.layout.token_ranges import Runs, TokenSplit
from shardwise.runtime.device import copied_to
from shardwise.runtime.torch_private import is_fake

_PACKING: Final = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_REPLACED: Final = ("attention_mask", "position_ids", "labels", "shift_labels", NUM_ITEMS, *_PACKING)
_WHOLE: Final = ("past_key_values", "cache", "logits_to_keep")
_MIXERS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
_NUM_PROOF_TOKENS: Final = 32
_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})

SplitOf = Callable[[tuple[int, ...]], TokenSplit]
"""Returns the token split of a sequence, by the lengths of the documents in it."""


@dataclass(frozen=True)
class RankInputs:
    """Holds a rank's inputs of the model.

    Attributes:
        tokens: of the sequence, that the rank has.
        loss_weight: of the model's own loss, 0-d: the rank's part of the targets that count; None without labels.
    """

    inputs: dict[str, Any]
    tokens: Runs
    loss_weight: Tensor | None


def is_huggingface(model: nn.Module) -> bool:
    """Return whether there is a model of transformers in a module."""
    return next(_inner(model), None) is not None


def check_model(model: nn.Module) -> None:
    """Check that the model of transformers in a module computes tokens apart from each other, but for attention.

    Raises:
        ConfigError: it does not, or does not take the positions of its tokens.
    """
    inner = next(_inner(model))
    config, name = inner.config, type(inner).__name__
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    mixers = [type(module).__name__ for module in model.modules() if isinstance(module, _MIXERS)]
    is_per_token = name.endswith((*PER_TOKEN, *CAUSAL)) or inner.base_model is inner
    takes_positions = "position_ids" in inspect.signature(inner.forward).parameters
    poolers = [each for each in _inner(model) if isinstance(getattr(each, "pooler", None), nn.Module)]
    reasons: dict[str, tuple[str, Any]] = {  # by code: what the model is, and whether it is that
        "cp-encoder-decoder": ("is an encoder with a decoder", getattr(config, "is_encoder_decoder", False)),
        "cp-nested-models": ("has other models in it, and takes more than text", _has_models(inner)),
        "cp-layer-types": (f"has layers of {', '.join(sorted(others))}", others),
        "cp-token-mixer": (f"mixes tokens by {next(iter(mixers), None)}", mixers),
        "cp-bidirectional-mask": (
            "has a bidirectional mask of its own (use_bidirectional_attention)",
            getattr(config, "use_bidirectional_attention", False),
        ),
        "cp-head-of-tokens": ("has a head that reads several tokens", not is_per_token),
        "cp-no-positions": ("takes no position_ids", not takes_positions),
        "cp-router-loss": (
            "has a loss of its router, which is no mean over tokens; set config.output_router_logits=False, and "
            "experts.aux_loss in its place",
            getattr(config, "output_router_logits", False),
        ),
        "cp-pooler": ("pools a sequence's first token; build it with add_pooling_layer=False", poolers),
    }
    for code, (reason, holds) in reasons.items():
        if holds:
            other = "or " if ";" in reason else ""
            raise ConfigError(code, f"mesh.cp splits sequences, and {name} {reason}; {other}set mesh.cp=1")


def inputs_for_proof(
    model: nn.Module, num_positions: int | None = None, num_samples: int = 1
) -> tuple[nn.Module, list[list[dict[str, Any]]]]:
    """Return the model of transformers in a module, and its arguments for a short sequence and for each half of it.

    There are two attempts. In the first the second half is beyond the positions that the model knows, because some
    frequencies follow from the longest position; in the second, for models with a table of positions, it is at the end
    of the table.

    Args:
        num_positions: the second half ends there instead; None for the two attempts above.
    """
    inner = next(_inner(model))
    getattr(inner, "set_experts_implementation", str)("eager")  # others want their weights in memory
    sizes = [getattr(each.config, "sliding_window", None) or _NUM_PROOF_TOKENS for each in _inner(model)]
    last = getattr(inner.config, "max_position_embeddings", None) or _NUM_PROOF_TOKENS
    half = max(1, min(_NUM_PROOF_TOKENS, num_positions or last, *sizes) // 2)
    tokens = (7 * torch.arange(2 * half) + 5 + torch.arange(num_samples)[:, None]) % inner.config.vocab_size
    whole: dict[str, Any] = {"attention_mask": sequence_mask(num_samples, (2 * half,))}
    if "use_cache" in inspect.signature(inner.forward).parameters:
        whole["use_cache"] = False
    attempts = []
    for end in (2 * last, last) if num_positions is None else (num_positions,):
        positions = torch.cat([torch.arange(half), torch.arange(end - half, end)])[None].repeat(num_samples, 1)
        attempts.append(
            [
                {**whole, "input_ids": tokens[:, own], "position_ids": positions[:, own]}
                for own in (slice(None), slice(0, half), slice(half, None))
            ]
        )
    return inner, attempts


def describe_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a model, as a hook before its forward, a mask by which its attention knows a sequence as one of `cp`.

    It is for attention that was replaced by a function of one token, so it says nothing of the sequence.
    """
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.ndim != 2:
        return args, kwargs
    main = main_input(kwargs if {"input_ids", "inputs_embeds"} & kwargs.keys() else args)
    return args, {**kwargs, "attention_mask": sequence_mask(main.shape[0], (1,))}


def trained_length(model: nn.Module) -> int | None:
    """Return the number of positions for which the inner model was first made; None where no config says it."""
    config: Any = next(_inner(model)).config
    rotary = getattr(config, "rope_parameters", None)
    name = "original_max_position_embeddings"
    known = (
        rotary.get(name) if isinstance(rotary, dict) else None,
        getattr(config, name, None),
        getattr(config, "max_position_embeddings", None),
    )
    return min((each for each in known if isinstance(each, int)), default=None)


def check_length(model: nn.Module, inputs: Mapping[str, Any], num_positions: int) -> None:
    """Check that sequences have no positions beyond those for which tokens are computed apart.

    Args:
        num_positions: the most that a sequence may have.

    Raises:
        ConfigError: they do.
    """
    given = inputs.get("position_ids")
    main = inputs.get("input_ids") if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
    longest = int(given.max()) + 1 if isinstance(given, Tensor) else main.shape[1] if isinstance(main, Tensor) else 0
    if longest > num_positions:
        raise ConfigError(
            "cp-rope-length",
            f"the batch has {longest} positions, and beyond {num_positions} the rotary frequencies of "
            f"{type(model).__name__} follow from the longest one, which under mesh.cp is another on each rank; give "
            f"sequences of at most {num_positions} tokens, or use mesh.dp_shard with zero.stage=3 in place of mesh.cp",
        )


def split_inputs(model: nn.Module, inputs: Mapping[str, Any], split_of: SplitOf, rank: int) -> RankInputs:
    """Return a rank's part of a batch of whole sequences.

    Args:
        model: with a model of transformers in it.
        inputs: of its forward: `input_ids` [B, S] or `inputs_embeds` [B, S, D], perhaps `attention_mask` [B, S],
            `position_ids` [B or 1, S], `labels` [B, S], `cu_seq_lens_q`, and other tensors of one value for each token.
        split_of: chooses which rank has which tokens.

    Raises:
        ConfigError: an input is not by token, or rows are packed differently, or the sequence does not divide.
    """
    inner = next(_inner(model))
    main = inputs.get("input_ids") if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
    if not isinstance(main, Tensor) or main.dim() < 2 or not main.shape[1]:
        raise ConfigError(
            "cp-no-input",
            "the batch has no input_ids [B, S] or inputs_embeds [B, S, D] for mesh.cp to split; give one of 1 or more "
            "tokens, or set mesh.cp=1",
        )
    num_samples, num_tokens = main.shape[:2]
    _refuse_whole(inputs, num_samples, num_tokens)
    lengths = _document_lengths(model, inputs, num_samples, num_tokens)
    tokens = split_of(lengths).shares[rank]
    own = {
        name: take_tokens(value, tokens) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
        if name not in _REPLACED
    }
    mask = inputs.get("attention_mask")
    real = mask.bool() if mask is not None and (is_fake(mask) or not mask.all()) else None  # [B, S]
    whole_mask = sequence_mask(num_samples, lengths, real)  # [B, 1, 1, S]
    positions = inputs.get("position_ids")
    if positions is None:
        positions = _own_positions(model, inputs, num_tokens)
    whole_mask, positions = (copied_to(main.device, made, made.dtype) for made in (whole_mask, positions))
    own |= {"attention_mask": whole_mask, "position_ids": take_tokens(positions, tokens)}
    if "use_cache" in inspect.signature(inner.forward).parameters and _takes(model, "use_cache"):
        own["use_cache"] = False  # a cache of a rank's tokens is of no use
    targets, weight = ({}, None) if inputs.get("labels") is None else _targets(inner, inputs, tokens)
    given = RankInputs({**own, **targets}, tokens, weight)
    _refuse_unknown(model, given.inputs, inputs)
    return given


def _takes(model: nn.Module, name: str) -> bool:
    """Say whether the model's forward takes an argument of this name."""
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _refuse_unknown(model: nn.Module, given: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    missing = [name for name in given if name not in inputs and not _takes(model, name)]
    if missing:
        raise ConfigError(
            "cp-wrapper-arguments",
            f"{type(model).__name__}.forward does not take {', '.join(missing)}, from which the layers of the model of "
            "transformers in it know the whole sequence; let it take them and pass them on, or set mesh.cp=1",
        )


def _targets(inner: Any, inputs: Mapping[str, Any], tokens: Runs) -> tuple[dict[str, Tensor], Tensor]:
    """Return a rank's targets as arguments of the model's forward, and the weight of their mean loss."""
    shifts = takes_shifted_labels(inner)
    if shifts is None:
        raise ConfigError(
            "cp-token-loss",
            f"the loss of {type(inner).__name__} is none of tokens that mesh.cp can split; leave the labels out and "
            "give a loss_fn of its outputs and of targets by token, or set mesh.cp=1",
        )
    whole = inputs["labels"]  # [B, S]
    if shifts:
        shifted = inputs.get("shift_labels")
        whole = F.pad(whole[:, 1:], (0, 1), value=IGNORED) if shifted is None else shifted
    own = take_tokens(whole, tokens)  # [B, n]
    num_own, num_whole = ((each != IGNORED).sum().double() for each in (own, whole))
    num_all = num_whole if inputs.get(NUM_ITEMS) is None else inputs[NUM_ITEMS]  # transformers divides by it then
    first, others = own.flatten().tensor_split([1])
    # A mean over no targets is NaN, which no weight makes 0; so there a target counts whose weight is 0.
    own = torch.cat([first.where(num_own > 0, torch.zeros_like(first)), others]).view_as(own)
    return {"labels": own, **({"shift_labels": own} if shifts else {})}, (num_own / num_all).where(num_own > 0, 0)


def _refuse_whole(inputs: Mapping[str, Any], num_samples: int, num_tokens: int) -> None:
    for name in _WHOLE:
        value = inputs.get(name)
        if value is not None and not (isinstance(value, int) and value == 0):
            raise ConfigError(
                "cp-whole-input", f"{name} of the batch is of whole sequences, and mesh.cp splits them; leave it out"
            )
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            is_fit = value.dim() >= 2 and value.shape[1] == num_tokens and value.shape[0] in (1, num_samples)
        else:
            is_fit = value is None or name != "attention_mask"
        if not is_fit and name not in _PACKING:
            found = tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ConfigError(
                "cp-input-by-token",
                f"{name} of the batch is {found}, and mesh.cp splits what is [{num_samples}, {num_tokens}, ...], one "
                "value for each token; leave it out",
            )


def _document_lengths(
    model: nn.Module, inputs: Mapping[str, Any], num_samples: int, num_tokens: int
) -> tuple[int, ...]:
    """Return the lengths of the documents packed in each row, as transformers and our attention recognize them."""
    ends: Any = inputs.get("cu_seq_lens_q")
    positions: Any = inputs.get("position_ids")
    has_ends = ends is not None and not is_fake(ends)  # simulated tokens have no values; they count as one document
    if not has_ends and (
        positions is None
        or is_fake(positions)
        or inputs.get("attention_mask") is not None
        or not _finds_packing(model, inputs)
    ):
        return (num_tokens,)
    begins = torch.zeros(num_samples, num_tokens, dtype=torch.bool)
    if has_ends:
        starts = ends.tolist()
        if starts[-1] != begins.numel():
            raise ConfigError(
                "cu-seq-lens", f"cu_seq_lens_q ends with {starts[-1]}, and the batch has {begins.numel()} tokens"
            )
        begins.view(-1)[starts[:-1]] = True
    else:
        begins[:, 1:] = (positions.diff(dim=1) != 1).cpu()  # [B, S - 1]
    begins[:, 0] = True
    if (begins != begins[0]).any():
        raise ConfigError(
            "cp-packed-rows",
            "the rows of the batch are packed with documents of different lengths, and mesh.cp splits all rows in the "
            "same places; give one row per micro-batch",
        )
    edges = [*begins[0].nonzero().flatten().tolist(), num_tokens]
    return tuple(stop - start for start, stop in pairwise(edges))


def _finds_packing(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Return whether the model recognizes packed documents by positions that start again at 0.

    It does not if it is bidirectional, if it caches, or if its masks do not depend on the positions (OPT, BERT).
    """
    inner = next(_inner(model))
    use_cache = inputs.get("use_cache")
    use_cache = getattr(inner.config, "use_cache", False) if use_cache is None else use_cache
    checkpoints = model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    tells = not getattr(inner.config, "is_decoder", False) and not any(map(_counts_mask, model.modules()))
    return attends_causally(model) and tells and (checkpoints or not use_cache)


def _own_positions(model: nn.Module, inputs: Mapping[str, Any], num_tokens: int) -> Tensor:
    """Return the positions that the model would give the tokens of whole sequences, [B or 1, S]."""
    mask = inputs.get("attention_mask")
    counted = torch.arange(num_tokens)[None]  # [1, S]
    for module in model.modules():
        name = "create_position_ids_from_input_ids"
        rule = getattr(module, name, None) or getattr(sys.modules[type(module).__module__], name, None)
        padding_idx = getattr(module, "padding_idx", None)
        if rule is not None and padding_idx is not None and hasattr(module, "position_embeddings"):  # RoBERTa's
            tokens = inputs.get("input_ids")
            own: Tensor = counted + padding_idx + 1 if tokens is None else rule(tokens, padding_idx)
            return own
        if _counts_mask(module) and mask is not None:
            return (mask.cumsum(1) * mask - 1).long()
    return counted


def _counts_mask(module: nn.Module) -> bool:
    """Return whether a module finds positions by counting the tokens that a mask keeps, as OPT's does."""
    return isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(module.forward).parameters


def _has_models(inner: Any) -> bool:
    """Return whether a model contains models with configs of their own, beyond configs of parts like attention."""
    parts = [getattr(inner.config, name, None) for name in inner.config.sub_configs]
    kinds = {type(each.config) for each in _inner(inner)}
    return len(kinds) > 1 or any(getattr(part, "model_type", "") for part in parts)


def _inner(model: nn.Module) -> Iterator[Any]:
    """Yield the models of transformers in a module, outer ones first; found by names, without an import."""
    for module in model.modules():
        if hasattr(type(module), "base_model_prefix") and hasattr(getattr(module, "config", None), "model_type"):
            yield module
