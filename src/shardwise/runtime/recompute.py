"""The functions here replace a block's own forward: recomputed, compiled, or both; and without a cache where
recomputed.

The hooks stay outside. The whole of `run_forward` is compiled, checkpoint included: there the recomputation is part of
the compiled backward, which saves what the policy of selective recomputation says. A checkpoint around compiled code
would see one opaque operation and recompute all of it.

Blocks of one class whose parameters have the same shapes share their compiled code, so the number of compilations does
not grow with the number of blocks. Parameters are inputs of that code; it knows neither their storage nor their engine.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any, Final

import torch
from torch import nn

from shardwise.config.errors import CodedError
from shardwise.config.resolve import CompileConfig, Config, ConfigError
from shardwise.layout.layout import Layout
from shardwise.runtime.module_hooks import InputStore, recompute_forward, replace_forward, run_forward, run_stored
from shardwise.runtime.torch_private import compiler_errors, in_op_mode, named_backend

Run = Callable[..., Any]
CheckGraph = Callable[[Any], None]


class CompileError(CodedError, RuntimeError):
    """A block cannot be compiled as one graph; the message names it and the reason."""


def replace_forwards(
    model: nn.Module,
    layout: Layout,
    config: Config,
    store: InputStore | None = None,
    check_graph: CheckGraph | None = None,
) -> list[Callable[[], None]]:
    """Recompute and compile the forwards of a model's blocks as the config says.

    Args:
        config: the sections `recompute` and `compile`.
        store: keeps the inputs of recomputed blocks; None leaves them where they are.
        check_graph: is given the graph of each block that is compiled; None for no check.

    Returns:
        the functions that put their own back; call them in reverse order.

    Raises:
        ConfigError: torch has no such backend, or it cannot work in this mode.
    """
    compiler = _BlockCompiler(config.compile, layout, store, check_graph) if config.compile.enabled else None
    undo = []
    for index, unit in enumerate(layout.units):
        module = model.get_submodule(unit)
        plain = module.forward
        recompute = config.recompute.mode if index % config.recompute.every == 0 else "none"
        if compiler is not None:
            undo.append(replace_forward(module, compiler.compiled(unit, module, recompute)))
        elif recompute != "none":
            undo.append(recompute_forward(module, recompute, store))
        if recompute != "none" and (names := _cache_arguments(plain)):
            undo.append(_leave_out_cache(module, plain, names))
    return undo


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model: a dict holds keyword arguments, a tuple or list positional ones, anything else is the only one."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)


# Names of the cache into which Hugging Face's blocks write.
_CACHE_ARGUMENTS: Final = ("past_key_values", "past_key_value", "layer_past", "cache_params", "cache")


def _cache_arguments(forward: Run) -> list[tuple[int, str]]:
    """Return position and name of the arguments of a block's forward that are caches."""
    names = list(inspect.signature(forward).parameters)
    return [(names.index(name), name) for name in _CACHE_ARGUMENTS if name in names]


def _leave_out_cache(module: nn.Module, plain: Run, places: Sequence[tuple[int, str]]) -> Callable[[], None]:
    """Give a recomputed block no cache of keys and values: the recomputation would write into it once more.

    In training no code reads what the block writes. In evaluation with gradients some may, and a cache that is not
    empty is read by the block itself: there it runs plainly.

    Args:
        module: its forward is the recomputed one.
        plain: its own forward.
        places: of the caches in its arguments.

    Returns:
        the function that puts the recomputed forward back.
    """
    forward = module.forward

    @functools.wraps(forward)
    def cacheless(*args: Any, **kwargs: Any) -> Any:
        for position, name in places if torch.is_grad_enabled() else ():
            is_positional = position < len(args)
            cache = args[position] if is_positional else kwargs.get(name)
            if cache is None:
                continue
            if not module.training or not _is_empty(cache):
                return plain(*args, **kwargs)
            if is_positional:
                args = (*args[:position], None, *args[position + 1 :])
            else:
                kwargs[name] = None
        return forward(*args, **kwargs)

    return replace_forward(module, cacheless)


def _is_empty(cache: Any) -> bool:
    """Say whether a cache is empty; one that has no `get_seq_length` is taken to hold something."""
    measure = getattr(cache, "get_seq_length", None)
    return measure is not None and measure() == 0


class _BlockCompiler:
    """Compiles blocks, and keeps the code that blocks of each kind share.

    Args:
        store: keeps the inputs of recomputed blocks, from outside the compiled code.
    """

    def __init__(
        self, config: CompileConfig, layout: Layout, store: InputStore | None, check_graph: CheckGraph | None
    ) -> None:
        _check(config, layout)
        self._config, self._check_graph = config, check_graph
        self._store = store
        self._shared: dict[Hashable, Run] = {}
        self._num_compiled = 0

    def compiled(self, unit: str, module: nn.Module, recompute: str) -> Callable[..., Any]:
        """Return a block's forward, which is compiled when it is first called.

        It runs plainly inside an op mode: under `MemoryTracker.meter` on the CPU a block is measured as if not
        compiled.
        """
        forward = module.forward
        kind = _kind(module, recompute)
        if kind not in self._shared:
            self._shared[kind] = self._compile(type(module).__name__)
        run, is_shared = self._shared[kind], True
        cannot_compile, compiled_too_often = compiler_errors()

        @functools.wraps(forward)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            nonlocal run, is_shared
            if in_op_mode():
                return run_stored(run_forward, forward, recompute, args, kwargs, self._store)
            try:
                return run_stored(run, forward, recompute, args, kwargs, self._store)
            except (cannot_compile, compiled_too_often) as error:
                failure = error
            if is_shared and isinstance(failure, compiled_too_often):
                # Blocks of this kind differ in what torch compiles for, such as a rate that grows with the depth.
                run, is_shared = self._compile(type(module).__name__), False
                return compiled(*args, **kwargs)
            raise _explained(failure, unit, self._config.backend) from failure

        return compiled

    def _compile(self, name: str) -> Run:
        """Compile `run_forward` with code of its own: torch counts compilations, and learns sizes, by code."""
        self._num_compiled += 1
        name = f"{name}_{self._num_compiled}"
        own = FunctionType(run_forward.__code__.replace(co_name=name), run_forward.__globals__, name)
        config = self._config
        if self._check_graph is None:
            return torch.compile(own, fullgraph=True, dynamic=config.dynamic, backend=config.backend, mode=config.mode)
        check, backend = self._check_graph, named_backend(config.backend, config.mode, config.dynamic)

        def checked(graph: Any, inputs: Any) -> Any:
            check(graph)
            return backend(graph, inputs)

        return torch.compile(own, fullgraph=True, dynamic=config.dynamic, backend=checked)


def _kind(module: nn.Module, recompute: str) -> Hashable:
    parameters = ((name, each.shape, each.requires_grad) for name, each in module.named_parameters())
    return type(module), recompute, tuple(parameters)


def check_backend(config: CompileConfig) -> None:
    """Refuse a backend that torch does not have; torch's compiler is imported for that.

    Raises:
        ConfigError: it names one that is close, or those there are.
    """
    backends = torch.compiler.list_backends(exclude_tags=None)
    if config.backend not in backends:
        close = difflib.get_close_matches(config.backend, backends, n=1)
        fix = f"did you mean {close[0]}?" if close else f"use one of {', '.join(torch.compiler.list_backends())}"
        raise ConfigError(
            "compile-backend", f"compile.backend={config.backend!r} is no backend of torch.compile; {fix}"
        )


def _check(config: CompileConfig, layout: Layout) -> None:
    check_backend(config)
    if config.mode is not None and config.backend != "inductor":
        raise ConfigError(
            "compile-mode-backend",
            f"compile.mode={config.mode} is inductor's, and compile.backend={config.backend} ignores it; "
            "leave compile.mode out",
        )
    if config.mode in ("reduce-overhead", "max-autotune") and layout.stage.unshard_for_use:
        raise ConfigError(
            "compile-mode-stage",
            f"compile.mode={config.mode} replays CUDA graphs, which need parameters at fixed addresses, but stage 3 "
            "gathers them again for each use; use compile.mode=max-autotune-no-cudagraphs or zero.stage=2",
        )


def _explained(error: Exception, unit: str, backend: str) -> Exception:
    """Make an error of one line from the several that torch writes: what, why and where."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, CodedError):  # of a check of ours
        return inner
    if inner is not None:
        return CompileError(
            "compile-backend-failed",
            f"block {unit}: compile.backend={backend} failed with {type(inner).__name__}: {_first_line(inner)}; "
            "install what it lacks, choose another backend or set compile.enabled=false",
        )
    text = str(error)
    explanation = re.search(r"^\s*Explanation: (.+)$", text, re.MULTILINE)
    places = re.findall(r'File "(.+)", line (\d+), in ', text)
    reason = ": ".join([_first_line(error), *([explanation[1]] if explanation else [])]).rstrip(". ")
    if isinstance(error.__cause__, Exception):
        reason += f" ({_first_line(error.__cause__)})"
    where = f", at {places[-1][0]}:{places[-1][1]}" if places else ""
    return CompileError(
        "compile-one-graph",
        f"block {unit} cannot be compiled as one graph: {reason}{where}; fix the block or set compile.enabled=false",
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0]
