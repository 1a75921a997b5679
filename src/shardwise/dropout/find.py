"""Find the modules that call a dropout by function, by reading their code: torch has no list of them."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, Final

from torch import nn

DROPOUT_MODULES: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_ATTENTIONS: Final = ("scaled_dot_product_attention", "block_sparse_attention")


def drops_by_function(module: nn.Module) -> bool:
    """Say whether a module's own code calls a dropout, or attention with dropout, that is not a module of its own.

    It does if its forward, or a function of its class or file that the forward calls, uses a name with "dropout" in it
    that is not one of its own dropout modules, or passes on an argument of such a name; or if it calls torch's
    attention or the library's and either uses a name that may be a rate or passes on arguments that are not named
    there. A module found by mistake costs about a microsecond for each call of torch in it. A module that calls a
    dropout under another name is not found, and drops as torch does.
    """
    own = {name for name, child in module.named_children() if isinstance(child, DROPOUT_MODULES)}
    return any(_speaks_of_dropout(code, own) for code in _reachable(type(module)))


def rate_names(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names that a class's code reads and that may be its dropout rates."""
    return tuple(sorted({name for code in _reachable(kind) for name in code.co_names if _may_be_rate(name)}))


def _may_be_rate(name: str) -> bool:
    return name == "p" or any(part in name for part in ("drop", "prob", "rate"))


def _speaks_of_dropout(code: CodeType, own: set[str]) -> bool:
    # The names of the arguments of a call are a constant of its code.
    tuples = [constant for constant in code.co_consts if isinstance(constant, tuple)]
    arguments = [each for constant in tuples for each in constant if isinstance(each, str)]
    is_function = "functional" in code.co_names or "F" in code.co_names
    names = [name for name in code.co_names if is_function or name not in own]
    if any("dropout" in name for name in names + arguments):
        return True
    if not any(kind in name for name in names for kind in _ATTENTIONS):
        return False
    # A rate may be the fifth argument by position.
    if any(map(_may_be_rate, (*names, *arguments, *code.co_varnames, *code.co_freevars))):
        return True
    return any(each.opname == "CALL_FUNCTION_EX" for each in dis.get_instructions(code))


def _reachable(kind: type[nn.Module]) -> Iterator[CodeType]:
    """Yield the code of a class's forward and of the functions of its class and file that it calls; none of torch's."""
    owners = [each for each in kind.__mro__ if not each.__module__.startswith("torch.") and each is not object]
    pending: list[Any] = [vars(owner).get("forward") for owner in owners]
    seen: set[CodeType] = set()
    while pending:
        each = pending.pop()
        found = None if each is None else inspect.unwrap(getattr(each, "__func__", each))
        if not isinstance(found, FunctionType) or found.__code__ in seen:
            continue
        parts = [found.__code__]
        while parts:  # with the functions inside it
            code = parts.pop()
            seen.add(code)
            yield code
            parts += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            for name in code.co_names:
                pending += [vars(owner).get(name) for owner in owners]
                called = found.__globals__.get(name)
                if isinstance(called, FunctionType) and called.__module__ == found.__module__:
                    pending.append(called)
