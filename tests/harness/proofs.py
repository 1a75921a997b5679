"""Proofs that models may be split, which one rank of a pool makes once, and not each of them for each engine.

`initialize` proves the plan of a Hugging Face model by a tiny copy of it, and that its sequences may be split by
another; batches of new lengths are proved as they come. Most tests of a file train the same model, and proofs take
longer than their steps. What proves is tested by `test_prove_plan.py`, `test_context_locality.py` and others.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from shardwise.context import apply, length_proof
from shardwise.layout.tensor_plan import TensorPlan
from shardwise.tensor import plan_layout

_DEPTH = 6  # of objects in attributes of modules
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def remember_proofs(folder: Path) -> None:
    """What a process that was given this folder has proved is proved, for models of the same code, config and sizes.

    One process proves, and the others wait for it.
    """
    refute, check_tokens_apart = plan_layout.refute, length_proof.check_tokens_apart

    def refute_once(
        model: nn.Module, plan: TensorPlan, batch: Any, degree: int, sequence_parallel: bool = False
    ) -> str:
        key = (_of(model), repr(plan), _of(batch), degree, sequence_parallel)
        return _once(folder, key, lambda: refute(model, plan, batch, degree, sequence_parallel))

    def check_once(copied: nn.Module, splitting: Any, attempts: Any, *given: Any, **named: Any) -> None:
        key = (_of(copied), _of(splitting), _of(attempts), _of(given), _of(named))
        _once(folder, key, lambda: check_tokens_apart(copied, splitting, attempts, *given, **named) or "")

    plan_layout.refute = refute_once
    apply.check_tokens_apart = length_proof.check_tokens_apart = check_once


class _Warnings(logging.Handler):
    """Counts what is said: a proof with a warning is to be made, and to warn, again."""

    num = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num += 1


def _once(folder: Path, key: Any, prove: Callable[[], str]) -> str:
    folder.mkdir(exist_ok=True)
    proved = folder / sha256(repr(key).encode()).hexdigest()
    with proved.with_suffix(".lock").open("w") as lock:
        if not proved.exists():
            fcntl.flock(lock, fcntl.LOCK_EX)
        if proved.exists():
            return ""
        warnings = _Warnings(logging.WARNING)
        logging.getLogger("shardwise").addHandler(warnings)
        try:
            wrong = prove()
        finally:
            logging.getLogger("shardwise").removeHandler(warnings)
        if not wrong and not warnings.num:
            proved.touch()
    return wrong


def _of(value: Any, depth: int = _DEPTH) -> Any:
    """What a proof may depend on, in words that are the same in all processes."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if depth == 0:
        return type(value).__qualname__
    if isinstance(value, Tensor):
        of_values = () if value.is_meta or isinstance(value, nn.Parameter) else value.detach().cpu().tolist()
        return (str(value.dtype), tuple(value.shape), of_values)
    if isinstance(value, nn.Module):
        return [(name, _of_module(each, depth - 1)) for name, each in value.named_modules()]
    if isinstance(value, Mapping):
        return [(str(name), _of(each, depth - 1)) for name, each in value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_of(each, depth - 1)) for each in value)
    if isinstance(value, Sequence):
        return [_of(each, depth - 1) for each in value]
    if isinstance(value, MethodType):
        return _of_function(value.__func__, depth - 1)
    if isinstance(value, FunctionType):
        return _of_function(value, depth - 1)
    if isinstance(value, type):
        return (value.__module__, value.__qualname__)
    if hasattr(value, "to_dict"):  # a config of transformers
        return repr(value.to_dict())
    return (_of(type(value)), _of(getattr(value, "__dict__", None), depth - 1))


def _of_module(module: nn.Module, depth: int) -> Any:
    own = {name: each for name, each in vars(module).items() if name not in nn.Module().__dict__}
    hooks = [_of([*vars(module)[name].values()], depth) for name in _HOOKS]
    tensors = [_of(each, depth) for each in (module._parameters, module._buffers)]
    return (_of(type(module)), _of(type(module).forward, depth), own and _of(own, depth), hooks, tensors)


def _of_function(function: FunctionType, depth: int) -> Any:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    held = [each for each in cells if not isinstance(each, nn.Module)]
    return (_of_code(function.__code__), _of(held, depth), _of(function.__defaults__, depth))


def _of_code(code: CodeType) -> Any:
    consts = [_of_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return (code.co_qualname, code.co_code.hex(), consts, code.co_names)
