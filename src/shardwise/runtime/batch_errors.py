"""Says in one line that a model does not take a batch, where its forward fails in an operator far inside.

It is a module of its own, as the engine, the planner of layers and the timing of units all give batches to models.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.config.arguments import described
from shardwise.config.errors import CodedError, EngineError
from shardwise.runtime.torch_private import assert_async

# What torch's operators say of operands of the wrong size, dtype or class.
_OF_OPERANDS: Final = re.compile(
    r"shapes? cannot be multiplied|size mismatch|must match the|same reduction dim|same dtype, but got|at least 1D"
    r"|[Ee]xpected .*(dim|size|channel|input|type|tensor|shape)|is invalid for input of size|normalized_shape"
    r"|must be Tensor, not|no data!|index out of range in self"
    r"|(Target|index) -?\d+ is out of bounds|[Ee]xpected (input|target) (batch_size|size|dtype)"
    r"|Target size .* must be the same|not in the valid range"
    r"|tuple index out of range|Dimension out of range|values to unpack"
    r"|'(NoneType|numpy.ndarray|list|str)' object has no attribute"
)
_OF_TORCH: Final = (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError, AttributeError)
_MAX_SHOWN: Final = 4


def check_indices(indices: Tensor, size: int) -> None:
    """Raise where one of `indices`, int32 or int64, is not in 0 to `size` - 1, as torch's own lookups do.

    A lookup that is split over ranks sees only whether a row is its own, so it calls this first. On an accelerator the
    device asserts, and the host does not wait for it.

    Raises:
        IndexError: one is outside.
    """
    if torch.compiler.is_compiling():  # a compiler removes a lookup that is not read
        assert_async(((indices >= 0) & (indices < size)).all(), f"index out of range in self, which has {size} rows")
        return
    try:
        indices.new_zeros(1).expand(size).gather(0, indices.flatten())
    except RuntimeError as error:
        raise IndexError(f"index out of range in self: {error}") from None


def refuse_misfit(error: BaseException, model: nn.Module, inputs: Any) -> None:
    """Raise an error of one line from what a model's forward has raised, if it is about the batch; else return.

    Args:
        error: of the forward. One that has a code stays as it is; notes that explain it are kept.
        model: the model.
        inputs: what it was given: a dict of named arguments, a tuple or list of arguments, or the only one.

    Raises:
        EngineError: the batch does not fit.
    """
    if isinstance(error, CodedError):
        return
    is_of_torch = type(error) in _OF_TORCH and _OF_OPERANDS.search(str(error)) is not None
    if not is_of_torch and not (type(error) is TypeError and not _binds(model, inputs)):
        return
    said = " ".join(str(error).split())[:200] or type(error).__name__
    notes = getattr(error, "__notes__", None) or []
    takes = f"give what its forward takes: {', '.join(inspect.signature(model.forward).parameters)}"
    fix = " ".join(notes[0].split()) + f"; if the model runs without that, {takes}" if notes else takes
    refusal = EngineError("batch-misfit", f"{type(model).__name__} fails on a batch of {_shown(inputs)}: {said}; {fix}")
    for note in notes:
        refusal.add_note(note)
    raise refusal from error


def _binds(model: nn.Module, inputs: Any) -> bool:
    """Say whether the model's forward takes so many arguments of these names."""
    args, kwargs = (inputs if isinstance(inputs, list | tuple) else (inputs,)), {}
    if isinstance(inputs, dict):
        args, kwargs = (), inputs
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _shown(inputs: Any) -> str:
    """Return the shape and dtype of each input; what is no tensor is said to be so."""
    if isinstance(inputs, dict):
        named = [(str(name)[:40], value) for name, value in inputs.items()]
    else:
        named = [("input", value) for value in (inputs if isinstance(inputs, list | tuple) else [inputs])]
    texts = [
        f"{name} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        if isinstance(value, Tensor)
        else described(name, value)
        for name, value in named[:_MAX_SHOWN]
    ]
    return ", ".join([*texts, *(["..."] if len(named) > _MAX_SHOWN else [])]) or "nothing"
