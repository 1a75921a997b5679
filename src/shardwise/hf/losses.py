"""Rules of the losses that models of transformers compute themselves: over which labels they are a mean."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor, nn

from shardwise.config.errors import ConfigError

IGNORED: Final = -100  # the target that transformers' losses leave out
NUM_ITEMS: Final = "num_items_in_batch"
PER_TOKEN: Final = ("ForMaskedLM", "ForTokenClassification")
CAUSAL: Final = ("ForCausalLM", "LMHeadModel")
# Of transformers' losses, those that are a mean over the labels that are not ignored.
_MEANS: Final = frozenset(
    {"ForCausalLMLoss", "ForMaskedLMLoss", "ForTokenClassification", "ForSequenceClassificationLoss"}
)
_PER_SAMPLE: Final = ("ForMultipleChoice", "ForNextSentencePrediction")
# Decoders of transformers that write out a mean over the labels as they are, where others call their `loss_function`.
_UNSHIFTED: Final = frozenset(
    f"{name}ForCausalLM"
    for name in (
        *("Bart", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "CpmAnt", "MBart", "Marian", "Musicgen"),
        *("MusicgenMelody", "Mvp", "PLBart", "Pegasus", "TrOCR", "Whisper"),
    )
) | {"FlaubertWithLMHeadModel", "XLMWithLMHeadModel", "XLNetLMHeadModel"}
# Decoders that write out another loss.
_OTHER_LOSS: Final = frozenset({"BlipTextLMHeadModel", "ClvpForCausalLM", "ProphetNetForCausalLM"})


def takes_shifted_labels(inner: Any) -> bool | None:
    """Return whether a model's loss takes targets that were shifted, rather than labels as they are.

    None where it is no mean over tokens, or does not take such targets.
    """
    name, function = type(inner).__name__, getattr(inner, "loss_function", None)
    if name.endswith(PER_TOKEN):
        return False
    calls_function = _is_transformers_own(inner) and name not in _UNSHIFTED | _OTHER_LOSS
    is_causal = name.endswith(CAUSAL) and getattr(function, "__name__", "") == "ForCausalLMLoss"
    return True if is_causal and calls_function else None


def shifts_labels(model: nn.Module) -> bool | None:
    """Return whether a model's own mean of cross-entropies leaves out the first label; None for any other loss.

    It is known for models of transformers, also with PEFT's adapters, whose loss is of integer `labels`.
    """
    base: Any = getattr(model, "get_base_model", None)
    inner: Any = base() if callable(base) else model
    name, is_decoder = type(inner).__name__, not getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    if not _is_transformers_own(inner) or name in _OTHER_LOSS:
        return None
    if name in _UNSHIFTED or name.endswith(_PER_SAMPLE):
        return False
    if inner.loss_type is None and is_decoder and not name.endswith(CAUSAL):
        return None
    kind = getattr(inner.loss_function, "__name__", "")
    return kind == "ForCausalLMLoss" and is_decoder if kind in _MEANS else None


def count_targets(inputs: Any, shifts_labels: bool | None) -> Tensor | None:
    """Count the targets of a batch over which the model's own loss is a mean, 0-d; None where that is not known.

    Args:
        inputs: the batch, by the names of the model's arguments.
    """
    given = inputs if isinstance(inputs, Mapping) and shifts_labels is not None else {}
    shifted, labels = given.get("shift_labels"), given.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    if isinstance(shifted, Tensor):
        labels = shifted
    elif shifts_labels and labels.dim() > 1:
        labels = labels[..., 1:]
    return (labels != IGNORED).sum()


def take_num_items(inputs: Any) -> tuple[Any, Any]:
    """Return inputs without `num_items_in_batch`, and its value; None where they have none.

    Given it, transformers' losses are a sum divided by it, and the engine would multiply that by the wrong number.
    Without it, a model's own loss is the mean over its own targets.
    """
    given = inputs.get(NUM_ITEMS) if isinstance(inputs, Mapping) else None
    if given is None:
        return inputs, None
    return {name: value for name, value in inputs.items() if name != NUM_ITEMS}, given


def check_num_items(model: nn.Module, num_items: Any, num_targets: Tensor | None) -> None:
    """Check that the loss of a batch that had `num_items_in_batch` can be weighed without it.

    Args:
        num_targets: that `count_targets` counts in the batch.

    Raises:
        ConfigError: it is not known over which targets the loss is a mean.
    """
    if num_items is not None and num_targets is None:
        raise ConfigError(
            "num-items-in-batch",
            f"the batch has {NUM_ITEMS}={num_items}, and how many targets the own loss of {type(model).__name__} is "
            f"over is not known, so micro-batches cannot be weighed; leave {NUM_ITEMS} out, or pass a loss_fn that "
            "returns (sum, count)",
        )


def _is_transformers_own(inner: Any) -> bool:
    """Return whether a model's forward is one of transformers, whose losses follow from their classes' names."""
    forward = inspect.unwrap(type(inner).forward)
    return hasattr(type(inner), "base_model_prefix") and forward.__module__.startswith("transformers.")
