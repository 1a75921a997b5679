"""Says in one line that a model does not take a batch, where its forward fails in an operator far inside.

It is a module of its own, as the engine, the planner of layers and the timing of units all give batches to models.
"""

from __future__ import annotations

import dis
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
    r"|Target size .* must be the same|not in the valid range|Dimension out of range"
)
_OF_TORCH: Final = (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError)
# What Python says where code takes a value for another one: of a batch, or of a fault in the code.
_OF_PYTHON: Final = re.compile(
    r"tuple index out of range|values to unpack|'(NoneType|numpy.ndarray|list|str)' object has no attribute"
)
# Their code is known to be right, so what fails in it is the batch.
_LIBRARIES: Final = ("torch", "shardwise", "transformers")
_RAISE: Final = dis.opmap["RAISE_VARARGS"]
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

    It is where an operator refuses an operand, or code of a library cannot go on. What the user's own code raises, or
    what Python raises in it, may be a fault of that code, and stays as it is; a note may say what the model was given.

    Args:
        error: of the forward. One that has a code stays as it is; notes that explain it are kept.
        inputs: what it was given: a dict of named arguments, a tuple or list of arguments, or the only one.

    Raises:
        EngineError: the batch does not fit.
    """
    if isinstance(error, CodedError):
        return
    is_unbound = type(error) is TypeError and not _binds(model, inputs)
    is_of_python = type(error) in (IndexError, ValueError, AttributeError) and _OF_PYTHON.search(str(error)) is not None
    is_of_torch = type(error) in _OF_TORCH and _OF_OPERANDS.search(str(error)) is not None
    if not (is_unbound or is_of_python or is_of_torch):
        return
    takes = f"give what its forward takes: {', '.join(inspect.signature(model.forward).parameters)}"
    if not is_unbound and _is_of_own_code(error, is_of_python):
        error.add_note(f"{type(model).__name__} was given {_shown(inputs)}; if its code is right, {takes}")
        return
    said = " ".join(str(error).split())[:200] or type(error).__name__
    notes = getattr(error, "__notes__", None) or []
    fix = " ".join(notes[0].split()) + f"; if the model runs without that, {takes}" if notes else takes
    refusal = EngineError("batch-misfit", f"{type(model).__name__} fails on a batch of {_shown(inputs)}: {said}; {fix}")
    for note in notes:
        refusal.add_note(note)
    raise refusal from error


def _is_of_own_code(error: BaseException, is_of_python: bool) -> bool:
    """Say whether code that is of no library raised an error, by a statement or by a fault that Python met."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    is_stated = trace.tb_frame.f_code.co_code[trace.tb_lasti] == _RAISE
    name = str(trace.tb_frame.f_globals.get("__name__", ""))
    return (is_of_python or is_stated) and name.partition(".")[0] not in _LIBRARIES


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
