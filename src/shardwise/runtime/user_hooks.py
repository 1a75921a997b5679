"""Records the calls that hooks of users saw, and shows them to the same hooks elsewhere.

A hook of a user is one that neither the library nor torch has registered. What it does beside changing a module's
output, such as to keep a feature for the loss, must also happen where the loss is computed.
"""

from __future__ import annotations

import dis
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.runtime.torch_private import (
    forward_hooks,
    global_forward_hooks,
    hook_dicts,
    in_backward,
    pytree,
    version,
)

# Those of transformers collect outputs in lists of the running model, which the model returns.
_OTHERS = ("shardwise.", "torch.", "transformers.utils.output_capturing.")


@dataclass(frozen=True)
class HookedCall:
    """Holds a call of a module as its hooks saw it.

    Attributes:
        args: positional arguments before any hook, as `kwargs` and `output` are.
        is_changed: whether a hook returned another output.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    is_changed: bool = False


def is_users(hook: Callable[..., Any]) -> bool:
    """Say whether a hook is a user's."""
    if isinstance(hook, _OnceHook):
        return True
    place = getattr(hook, "__module__", None) or type(hook).__module__
    return not f"{place}.".startswith(_OTHERS)


def has_user_hooks(module: nn.Module) -> bool:
    """Say whether users have hooks on a module's forward."""
    return any(is_users(hook) for hooks in forward_hooks(module) for hook, _ in hooks)


def has_any_user_hooks(module: nn.Module) -> bool:
    """Say whether users have hooks on a module's forward or backward."""
    return has_user_hooks(module) or any(is_users(hook) for hooks in hook_dicts(module)[2:] for hook in hooks.values())


class HooksOnce:
    """Keeps hooks on the forward that only look from looking again in a recomputation."""

    def __init__(self, units: Iterable[nn.Module]) -> None:
        modules = {id(module): module for unit in units for module in unit.modules() if module is not unit}
        self._dicts = [hooks for module in modules.values() for hooks in hook_dicts(module)[:2]]

    def follow(self) -> None:
        """Take note of the hooks that there are by now."""
        for hooks in [each for each in self._dicts if each]:
            for key, hook in hooks.items():
                if type(hook) is not _OnceHook and is_users(hook):
                    hooks[key] = _OnceHook(hook)

    def close(self) -> None:
        """Give the modules the hooks of users back."""
        for hooks in self._dicts:
            hooks.update({key: hook.own for key, hook in hooks.items() if type(hook) is _OnceHook})


class _OnceHook:
    """Is a hook of a user. A recomputation leaves it out where it has changed nothing that a forward reads."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own
        self._only_looks = False

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        if in_backward() and self._only_looks:
            return None
        tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        before = [*map(version, tensors), *map(id, vars(module).values())]
        result = self.own(module, *given)
        after = [*map(version, tensors), *map(id, vars(module).values())]
        self._only_looks = result is None and before == after
        return result


@contextmanager
def users_hooks_off(module: nn.Module) -> Iterator[None]:
    """Take the hooks that users have on a module's output and on its gradients away, and put them back."""
    dicts = hook_dicts(module)[1:]
    before = [hooks.copy() for hooks in dicts]
    for hooks in dicts:
        for key in [key for key, hook in hooks.items() if is_users(hook)]:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, own in zip(dicts, before, strict=True):
            hooks.clear()
            hooks.update(own)


def without_user_hooks(model: nn.Module) -> nn.Module:
    """Take the hooks of users from a copy of a model, which shall leave no trace where they keep what they see."""
    for module in model.modules():
        for hooks in hook_dicts(module):
            for key in [key for key, hook in hooks.items() if is_users(hook)]:
                del hooks[key]
    return model


@contextmanager
def hooks_put_back(model: nn.Module) -> Iterator[None]:
    """Give the variables of users' hooks, and of functions that modules keep, the contents back that they had, so that
    a trial of a model leaves no trace.

    Args:
        model: or a copy, whose hooks and functions have the variables of the model's.
    """
    kept = [dict(enumerate(filter(_is_function, vars(module).values()))) for module in model.modules()]
    put_back, caches = hook_contents([*hook_dicts_of(model.modules()), *kept]), caches_of(model)
    clear_caches(caches)
    try:
        yield
    finally:
        put_back()
        clear_caches(caches)


def clear_caches(caches: Iterable[Any]) -> None:
    """Empty caches: a trial computes on the CPU and in fp64, a run does not."""
    for cache in caches:
        cache.cache_clear()


def caches_of(model: nn.Module) -> list[Any]:
    """Return the functions with a cache of `functools` that code of a model's own classes may call by name."""
    classes = {type(module) for module in model.modules() if not type(module).__module__.startswith(_LIBRARIES)}
    caches: dict[int, Any] = {}
    for member in [member for each_class in classes for member in vars(each_class).values()]:
        function = inspect.unwrap(getattr(member, "__func__", member))  # of a staticmethod or classmethod
        code = function.__code__ if isinstance(function, FunctionType) else None
        called = [] if code is None else [function.__globals__.get(name) for name in code.co_names]
        caches |= {id(cached): cached for cached in (member, *called) if hasattr(cached, "cache_clear")}
    return [*caches.values()]


_LIBRARIES = ("torch.", "transformers.", "shardwise.")


def _is_function(value: Any) -> bool:
    return isinstance(value, FunctionType)


HookDicts = Sequence[Mapping[int, Callable[..., Any]]]


def hook_dicts_of(modules: Iterable[nn.Module]) -> HookDicts:
    """Return what holds the hooks on the forwards and backwards of modules."""
    return [hooks for module in modules for hooks in hook_dicts(module)]


def hook_contents(dicts: HookDicts) -> Callable[[], None]:
    """Return what gives the variables of users' hooks the contents that they have now."""
    found: dict[int, Callable[[], None]] = {}
    for hook in [hook for hooks in dicts if hooks for hook in hooks.values() if is_users(hook)]:
        inner = hook.own if isinstance(hook, _OnceHook) else hook
        _note(inspect.unwrap(inner), found, depth=4)

    def put() -> None:
        for put_back in found.values():
            put_back()

    return put


def _note(value: Any, found: dict[int, Callable[[], None]], depth: int) -> None:
    """Note how to give a value the contents back that it has, and what it refers to, for some steps."""
    if (
        isinstance(value, Tensor)
        and type(value) is Tensor
        and not value.requires_grad
        and value.numel() <= _MOST_COPIED
    ):
        found.setdefault(id(value), partial(_put_values, value, value.clone(), version(value)))
    if id(value) in found or depth == 0 or isinstance(value, _LEFT_ALONE):
        return
    parts: list[Any] = []
    if isinstance(value, list | deque):
        kept = [*value]
        found[id(value)], parts = lambda: (value.clear(), value.extend(kept))[0], kept
    elif isinstance(value, set | dict):
        held = value.copy()
        found[id(value)] = lambda: (value.clear(), value.update(held))[0]
        parts = [*held.values()] if isinstance(held, dict) else []
    elif isinstance(value, FunctionType):
        named = [value.__globals__.get(name) for name in value.__code__.co_names]
        parts = [*(value.__defaults__ or ()), *(each for each in named if not isinstance(each, FunctionType))]
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # it is empty
                content = cell.cell_contents
                found[id(cell)] = partial(setattr, cell, "cell_contents", content)
                parts.append(content)
    elif isinstance(value, partial | MethodType):
        parts = [value.func, *value.args] if isinstance(value, partial) else [value.__self__, value.__func__]
    elif hasattr(value, "__dict__"):
        parts = [vars(value)]
    for part in parts:
        _note(part, found, depth - 1)


def _put_values(tensor: Tensor, values: Tensor, number: int) -> None:
    if version(tensor) != number:
        with torch.no_grad():
            tensor.copy_(values)


_MOST_COPIED = 4096  # elements of a tensor to which a hook refers
_LEFT_ALONE = (Tensor, type, ModuleType, str, bytes, int, float)


@dataclass
class FollowedForward:
    """Holds the tensors of a forward from which autograd follows it.

    Attributes:
        sources: what modules return of no tensor that is followed, such as embeddings of tokens.
        has_code: the backward runs code of users: hooks, or a `torch.autograd.Function` of theirs.
    """

    sources: list[Tensor] = field(default_factory=list)
    has_code: bool = False

    def note(self, has_code: bool) -> None:
        """Take note whether something has code in its backward."""
        self.has_code |= has_code

    def gradients(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the sources, for a loss to which each number of the outputs adds on its own."""
        loss = sum((output.sin().sum() for output in outputs if output.requires_grad), torch.zeros(()))
        if not loss.requires_grad:
            return []
        return [*torch.autograd.grad(loss, self.sources, allow_unused=True, materialize_grads=True)]


@contextmanager
def followed(model: nn.Module, shape: tuple[int, ...]) -> Iterator[FollowedForward]:
    """Let autograd follow a forward inside the context, of a model none of whose parameters requires gradients.

    Args:
        shape: the first dims of tensors that it is followed from.
    """
    forward = FollowedForward()
    hooks = (hook for dicts in map(hook_dicts, model.modules()) for each in dicts[2:] for hook in each.values())
    forward.note(any(map(is_users, hooks)))
    register, apply = Tensor.register_hook, vars(torch.autograd.Function)["apply"]

    def follow(leaf: Any) -> Any:
        is_one = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape[: len(shape)] == shape
        if not is_one or leaf.requires_grad:
            return leaf
        forward.sources.append(leaf.detach().requires_grad_())
        return forward.sources[-1].clone()  # which code may write into

    def note_hook(tensor: Tensor, hook: Any) -> Any:
        forward.note(True)
        return register(tensor, hook)

    def note_function(kind: type, *args: Any, **kwargs: Any) -> Any:
        forward.note(not kind.__module__.startswith(("torch.", "shardwise.")))
        return apply.__get__(None, kind)(*args, **kwargs)

    with ExitStack() as stack, torch.enable_grad():
        for module in model.modules():
            handle = module.register_forward_hook(lambda _, args, output: pytree.tree_map(follow, output))
            stack.callback(handle.remove)
        for kind, name, own, noting in (
            (Tensor, "register_hook", register, note_hook),
            (torch.autograd.Function, "apply", apply, classmethod(note_function)),
        ):
            stack.callback(setattr, kind, name, own)
            setattr(kind, name, noting)
        yield forward


def is_in_function(frame: FrameType | None, top: CodeType | None, others: set[CodeType]) -> bool:
    """Say whether a frame is inside the forward of a `torch.autograd.Function`.

    Args:
        top: code outside of which is none, where the frame is inside of it.
        others: code that was found to be no such forward, which is not looked at again; what is found is added.
    """
    codes = set()
    while frame is not None and frame.f_code is not top:
        codes.add(frame.f_code)
        frame = frame.f_back
    kinds = [torch.autograd.Function] if (codes := codes - others) else []
    while kinds:  # from torch 2.15 on, what calls a forward is no Python frame
        kind = kinds.pop()
        if getattr(kind.forward, "__code__", None) in codes:
            return True
        kinds += kind.__subclasses__()
    others |= codes
    return False


def has_global_hooks() -> bool:
    """Say whether users have hooks on the forward of all modules."""
    return any(map(is_users, global_forward_hooks()))


@contextmanager
def record_calls(modules: Mapping[str, nn.Module], calls: list[HookedCall]) -> Iterator[None]:
    """Append the calls of some modules to a list, in the order in which they end, inside the context."""
    handles = [handle for name, module in modules.items() for handle in _record(name, module, calls)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _record(name: str, recorded: nn.Module, calls: list[HookedCall]) -> Iterable[Any]:
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []  # a module may call itself
    returned: list[Any] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is recorded:  # and no copy of it
            given.append((args, kwargs))

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if module is recorded:
            returned.append(output)

    def at_end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if module is recorded:
            own = returned.pop()
            calls.append(HookedCall(name, *given.pop(), own, is_changed=output is not own))

    return (
        recorded.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        recorded.register_forward_hook(after, prepend=True, with_kwargs=True),
        recorded.register_forward_hook(at_end, with_kwargs=True),
    )


def show_call(module: nn.Module, call: HookedCall) -> None:
    """Call a module's hooks as the recorded call did; what they return counts for those after them alone."""
    before, after = forward_hooks(module)
    args, kwargs, output = call.args, call.kwargs, call.output
    for hook, takes_kwargs in before:
        if not is_users(hook):
            continue
        result = hook(module, args, kwargs) if takes_kwargs else hook(module, args)
        if result is not None and takes_kwargs:
            args, kwargs = result
        elif result is not None:
            args = result if isinstance(result, tuple) else (result,)
    for hook, takes_kwargs in after:
        if is_users(hook):
            result = hook(module, args, kwargs, output) if takes_kwargs else hook(module, args, output)
            output = output if result is None else result


def reads_first_argument(hook: Any) -> bool:
    """Say whether a hook may read the first argument that it is given: any but a function that never names it.

    >>> reads_first_argument(lambda optimizer, *_: optimizer.state), reads_first_argument(lambda *_: None)
    (True, False)
    """
    inner = inspect.unwrap(hook)  # such as of `torch.no_grad`
    code = getattr(getattr(inner, "__func__", inner), "__code__", None)
    if code is None:
        return True
    num_before = int(inspect.ismethod(hook))
    place = num_before if code.co_argcount > num_before else code.co_argcount + code.co_kwonlyargcount
    name = code.co_varnames[place] if len(code.co_varnames) > place else None
    read = [instruction.argval for instruction in dis.get_instructions(code) if instruction.opname.startswith("LOAD")]
    return name is None or any(each == name or (isinstance(each, tuple) and name in each) for each in read)
