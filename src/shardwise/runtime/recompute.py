"""The functions here replace a block's own forward: recomputed, compiled, or both; and without a cache where
recomputed.

The hooks stay outside. The whole of `run_forward` is compiled, checkpoint included: there the recomputation is part of
the compiled backward, which saves what the policy of selective recomputation says. A checkpoint around compiled code
would see one opaque operation and recompute all of it.

Selective recomputation saves of a block what costs most to compute for its size. A saved result that something writes
into is not what the second pass must find there. Such a result is computed again. Torch's own checkpoint raises an
error without a code where the write has left a new version, and computes with the wrong values where it has not, as
inside of `torch.gru`.

Blocks of one class whose parameters have the same shapes share their compiled code, so the number of compilations does
not grow with the number of blocks. Parameters are inputs of that code; it knows neither their storage nor their engine.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from types import FunctionType, MethodType
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.config.errors import CodedError, ConfigError
from shardwise.config.resolve import CompileConfig, ResolvedConfig
from shardwise.layout.layout import Layout
from shardwise.runtime.forward_state import ForwardState
from shardwise.runtime.module_calls import call_before_forward, replace_forward
from shardwise.runtime.torch_private import (
    OpMode,
    compiler_errors,
    in_op_mode,
    is_compiling,
    named_backend,
    pytree,
    same_version_alias,
    storage_key,
    version,
    written_tensors,
)

Run = Callable[..., Any]
CheckGraph = Callable[[Any], None]


# Of inductor: those that replay CUDA graphs.
_GRAPH_MODES: Final = ("reduce-overhead", "max-autotune")


class CompileError(CodedError, RuntimeError):
    """A block cannot be compiled as one graph; the message names it and the reason."""


def replace_forwards(
    model: nn.Module,
    layout: Layout,
    config: ResolvedConfig,
    store: InputStore | None = None,
    check_graph: CheckGraph | None = None,
) -> list[Callable[[], None]]:
    """Recompute and compile the forwards of a model's blocks as the config says.

    Args:
        store: keeps the inputs of recomputed blocks; None leaves them where they are.
        check_graph: is given the graph of each block that is compiled; None for no check.

    Returns:
        the functions that put their own back; call them in reverse order.

    Raises:
        ConfigError: torch has no such backend, or it cannot work in this mode.
    """
    compiler = _BlockCompiler(config.compile, layout, store, check_graph) if config.compile.enabled else None
    undo: list[Callable[[], None]] = []
    if config.compile.enabled and config.compile.mode in _GRAPH_MODES:
        # Each block is code of its own to torch, which in a pass without a backward would take every block for the
        # begin of a new step, and overwrite what the one before it has returned.
        begin = call_before_forward(model, lambda args, kwargs: torch.compiler.cudagraph_mark_step_begin())
        undo.append(begin.remove)
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
        module: its forward is the recomputed one, and `plain` is its own.
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
            except cannot_compile as error:
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
    if config.mode in _GRAPH_MODES and layout.mesh.pp > 1:
        raise ConfigError(
            "compile-mode-pipeline",
            f"compile.mode={config.mode} replays CUDA graphs, whose memory is of one micro-batch at a time, but a "
            "pipeline has several in flight; use compile.mode=max-autotune-no-cudagraphs or mesh.pp=1",
        )
    if config.mode in _GRAPH_MODES and layout.stage.unshard_for_use:
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


class InputStore(Protocol):
    """Stores the inputs of recomputed blocks elsewhere; `shardwise.offload.activations.ActivationStore` is one."""

    def saving(self, inputs: Sequence[object]) -> AbstractContextManager[None]:
        """Keep what autograd saves of a block's inputs inside the context in this store."""


def recompute_forward(module: nn.Module, mode: str, store: InputStore | None = None) -> Callable[[], None]:
    """Checkpoint a module's forward in a mode of `run_forward`.

    Args:
        store: keeps the inputs; None leaves them where they are.

    Returns:
        the function that puts the module's own forward back.
    """
    forward, state = module.forward, ForwardState(module)
    if not inspect.ismethod(forward) or forward.__self__ is not module:
        return replace_forward(module, _checkpointed(forward, lambda args: state, mode, store))

    def state_of(args: Sequence[Any]) -> ForwardState:
        return state if args[0] is module else ForwardState(args[0])

    # A method follows a copy of the module: the copy computes with its own parameters.
    return replace_forward(module, MethodType(_checkpointed(forward.__func__, state_of, mode, store), module))


def _checkpointed(
    forward: Callable[..., Any],
    state_of: Callable[[Sequence[Any]], ForwardState],
    mode: str,
    store: InputStore | None,
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        own_store = None if store is None or _has_repeated((args, kwargs), set()) else store
        with state_of(args).first() as passed:
            passed.hold(args, kwargs, left_out=() if own_store is None else _SPREAD)
            return run_stored(run_forward, passed.repeating(forward), mode, args, kwargs, own_store)

    return recomputed


def _has_repeated(value: Any, seen: set[int]) -> bool:
    """Say whether a list or dict is in the arguments twice: a store would make two of it."""
    if type(value) not in _SPREAD:
        return False
    if id(value) in seen and type(value) is not tuple:
        return True
    seen.add(id(value))
    parts = value.values() if isinstance(value, dict) else value
    return any(_has_repeated(part, seen) for part in parts)


_SPREAD: Final = (tuple, list, dict)  # types of containers whose tensors a store keeps


def run_stored(
    run: Callable[..., Any],
    forward: Callable[..., Any],
    recompute: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    store: InputStore | None,
) -> Any:
    """Run `run_forward`, or its compiled form, with `store` for the inputs that the block keeps.

    Args:
        store: keeps the inputs; None leaves them where they are.
    """
    if store is None or recompute == "none" or not torch.is_grad_enabled():
        return run(forward, recompute, args, kwargs)
    inputs, structure = pytree.tree_flatten((args, kwargs), is_leaf=lambda node: type(node) not in _SPREAD)
    if run is not run_forward:  # compiled code saves all tensors in the same way
        with store.saving(inputs):
            return run(forward, recompute, args, kwargs)
    # A checkpoint saves tensors that are arguments, but holds those in keywords, tuples and dicts as they are.
    # The caller must find what a block writes into a list or dict that it is given; a recomputation's is of no use.
    given = [(args, kwargs)]

    def spread(*leaves: Any) -> Any:
        own_args, own_kwargs = given.pop() if given else pytree.tree_unflatten(leaves, structure)
        return forward(*own_args, **own_kwargs)

    with store.saving(inputs):
        return run(spread, recompute, tuple(inputs), {})


def run_forward(forward: Callable[..., Any], recompute: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a block's own forward and keep for its backward what `recompute` says.

    Torch compiles this function too, so `torch.compile` must know all that it calls.

    Args:
        recompute: "none" keeps all, "full" its inputs, "selective" products and attention too.
    """
    if recompute == "none" or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if recompute == "selective":
        return checkpoint(forward, *args, use_reentrant=False, context_fn=selective_contexts, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def run_in_parts(forward: Callable[[int, Tensor], Any], x: Tensor, num_tokens: int) -> Iterator[Any]:
    """Run a forward on parts of a tensor, each recomputed in its own backward; only `x` is kept for all of them.

    This holds inside a recomputation of any mode too: that one keeps nothing of the parts, and computes none of them
    where nothing after them is needed.

    Args:
        forward: is given the number of a part, and the part.
        num_tokens: of a part, along dim 1 of x [B, S, ...]; the last part may have fewer.

    Returns:
        the results of the forward, one by one.
    """
    if not torch.is_grad_enabled():
        yield from (forward(index, part) for index, part in enumerate(x.split(num_tokens, dim=1)))
        return
    kept = _KeptInput(x, num_tokens)
    for index, part in enumerate(x.split(num_tokens, dim=1)):
        # A checkpoint restores the generators of the devices of its arguments. A checkpoint around it must not see
        # what it saves of them: that one would run all parts in its recomputation to find the last one's.
        with saved_tensors_hooks(_as_it_is, _as_it_is):
            output = checkpoint(_run_part, x.new_empty(0), forward, kept, index, [part], use_reentrant=False)
        yield output


class _KeptInput:
    """Holds the input of all parts, saved once, by the hooks with which autograd saves."""

    def __init__(self, x: Tensor, num_tokens: int) -> None:
        anchor = torch.empty(0, device=x.device, requires_grad=True)
        self._node: Any = _Keep.apply(x, anchor).grad_fn
        self._num_tokens = num_tokens
        self._needs_gradient = x.requires_grad
        self._parts: tuple[Tensor, ...] | None = None

    def part(self, index: int) -> Tensor:
        """Return a part; call this in a backward."""
        if self._parts is None:  # a checkpoint around it returns what it has saved only once
            (x,) = self._node.saved_tensors
            self._parts = x.detach().requires_grad_(self._needs_gradient).split(self._num_tokens, dim=1)
        return self._parts[index]


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("nothing is computed of what keeps an input")


def _run_part(
    place: Tensor, forward: Callable[[int, Tensor], Any], kept: _KeptInput, index: int, given: list[Tensor]
) -> Any:
    token = _IN_PART.set(True)
    try:
        return forward(index, given.pop() if given else kept.part(index))
    finally:
        _IN_PART.reset(token)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


# A part of a block is recomputed alone: saved products of all parts would be what the parts must not keep.
_IN_PART: Final[ContextVar[bool]] = ContextVar("shardwise_in_part", default=False)


def selective_contexts() -> Any:
    """Return the contexts of a block's first pass and of its recomputations, as torch's checkpoint takes them."""
    if is_compiling():  # the compiler takes no other contexts, and shows them no writes
        return create_selective_checkpoint_contexts(_save_products)
    saving = _Saving()
    return saving, _OnceSaved(saving)


class _Saving(OpMode):
    """Keeps the products of a block's first pass, until something writes into them.

    torch's own contexts are public, but not what they have saved, which a write must be able to take back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_calls: defaultdict[Any, int] = defaultdict(int)
        # By op and call: what it returned, and all that shares its memory with versions of their own, and these.
        self.results: dict[tuple[Any, int], tuple[Any, list[tuple[Tensor, int]]]] = {}
        self._calls: dict[int, list[tuple[Any, int]]] = {}  # those whose results have this storage

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        for tensor in written_tensors(op, args, kwargs) if self._calls and hasattr(op, "_schema") else ():
            for call in self._calls.pop(storage_key(tensor), ()):
                self.results.pop(call, None)
        if _is_product(op):
            call = op, self.num_calls[op]
            self.num_calls[op] += 1
            saved = pytree.tree_map_only(Tensor, same_version_alias, result)
            tensors = [leaf for leaf in pytree.tree_leaves(saved) if isinstance(leaf, Tensor)]
            self.results[call] = saved, [(tensor, version(tensor)) for tensor in tensors]
            for tensor in tensors:
                self._calls.setdefault(storage_key(tensor), []).append(call)
        elif op is torch.ops.aten._unsafe_view.default:  # of a product of batches: writes into it count for it alone
            alias = same_version_alias(result)
            for call in self._calls.get(storage_key(result), ()):
                if call in self.results:
                    self.results[call][1].append((alias, version(alias)))
        return result


class _Replaying(OpMode):
    """Gives a recomputation the products that the first pass saved, each once."""

    def __init__(self, saving: _Saving) -> None:
        super().__init__()
        self._saving = saving
        self._num_calls: defaultdict[Any, int] = defaultdict(int)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_product(op):
            number = self._num_calls[op]
            self._num_calls[op] += 1
            if number >= self._saving.num_calls[op]:
                raise RuntimeError(f"a recomputation calls {op} more often than the forward did; both must do the same")
            if (saved := self._saving.results.pop((op, number), None)) is not None:
                result, watched = saved
                # Code after the block may have written into them, such as a sum into the block's output.
                if all(version(tensor) == before for tensor, before in watched):
                    return result
        return op(*args, **(kwargs or {}))


class _OnceSaved(AbstractContextManager[None]):
    """The context of the recomputations of a block: the first takes what was saved, later ones compute all again.

    A forward that takes derivatives in itself recomputes twice, as a second backward of one graph does.
    """

    def __init__(self, saving: _Saving) -> None:
        self._saving: _Saving | None = saving
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        saving, self._saving = self._saving, None
        self._entered.append(nullcontext() if saving is None else _Replaying(saving))
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def _save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_product(op) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_product(op: Any) -> bool:
    """Say whether to save what an op returns: matrix products and attention (Korthikanti et al. 2022, section 5)."""
    name = op.name() if hasattr(op, "name") else ""
    is_product = name in _SAVED_PRODUCTS or "scaled_dot_product" in name or name.startswith(_SAVED_PREFIXES)
    return is_product and not name.startswith(_RECOMPUTED_PREFIXES) and not _IN_PART.get()


# Results of collectives are saved, which sum products; gathered sequences are not: sequence parallelism avoids them.
# Keyed dropouts are drawn again, as they are in a backward.
_SAVED_PREFIXES: Final = ("c10d", "_c10d", "shardwise::")
_RECOMPUTED_PREFIXES: Final = ("shardwise::gather_sequence", "shardwise::keyed_")
_SAVED_PRODUCTS: Final = frozenset(
    {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::convolution"}
)
