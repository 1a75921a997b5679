"""This file holds the private names of torch that Shardwise needs, each with its reason; no other file holds any.

`tests/unit/runtime/test_torch_private.py` tests every function here, so that a torch release that moves a name fails
there first.
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Final, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import TracingContext
from torch._ops import OpOverload as OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd import Variable, forward_ad
from torch.nn.modules import module as _modules
from torch.optim import optimizer as _optimizers
from torch.utils import _pytree
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_in_torch_dispatch_mode

pytree = _pytree
AnyTensor = TypeVar("AnyTensor", bound=Tensor)
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def assert_async(is_so: Tensor, message: str) -> None:
    """Raise if `is_so` holds false; on an accelerator its device asserts, later. Compilers keep it."""
    torch._assert_async(is_so, message)


def in_backward() -> bool:
    """Say whether the autograd engine is running on this thread: true in recomputation, false in a plain forward.

    Public torch has no such query; hooks need it, because a forward that runs inside a backward must not reshard.
    """
    return torch._C._current_graph_task_id() != -1


def in_transform() -> bool:
    """Say whether this thread is inside one of `torch.func`'s transforms; public torch has no such query."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context outside of `torch.func`'s transforms, which let no op write into memory from before them."""
    return temporarily_clear_interpreter_stack()


def in_op_mode() -> bool:
    """Say whether ops of this thread are shown to a mode, as of a meter, fake tensors or selective checkpointing.

    Such a mode sees no op of compiled code, and under one `torch.compile(fullgraph=True)` refuses to run.
    """
    return is_in_torch_dispatch_mode()


def is_compiling() -> bool:
    """Say whether code is compiled now; before 2.13 `torch.compiler.is_compiling` denies it inside of a checkpoint."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


def in_fake_mode() -> bool:
    """Say whether tensors made on this thread are fake; public torch has no such query."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@contextmanager
def unseen_by_op_modes(is_real: bool = False) -> Iterator[None]:
    """Hide the ops inside from op modes: selective checkpointing refuses a recomputation with ops its forward lacked.

    So a value that is computed once and kept, but may be computed again in a recomputation, must be hidden from it.
    Fake tensors are still made where the code around makes them, unless `is_real`.
    """
    fakes = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    with _disable_current_modes(), nullcontext() if fakes is None or is_real else fakes:
        yield


# What runs torch's checkpoint: from torch 2.15 on with the arguments in a tuple and a dict; before, after settings.
_CHECKPOINT: Final = max(name for name in vars(checkpoints) if name.startswith("_checkpoint_without_reentrant_gen"))
_SETTINGS: Final = tuple(inspect.signature(getattr(checkpoints, _CHECKPOINT)).parameters.values())
_NUM_SETTINGS: Final = sum(setting.kind is setting.POSITIONAL_OR_KEYWORD for setting in _SETTINGS) - 1

FirstPass = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], AbstractContextManager[Callable[..., Any]]]


@contextmanager
def replaced_checkpoints(first: FirstPass, is_tracked: Callable[[Sequence[Any]], bool] | None = None) -> Iterator[None]:
    """Tell `first` of each function that is checkpointed inside the context, by whatever name code knows the function
    `torch.utils.checkpoint.checkpoint`: what that calls is replaced here.

    Args:
        first: is given the function, its arguments by position and by name; the first pass runs inside its context,
            which gives the function to call in the backward, or as the first pass where that is inside autograd's own
            function.
        is_tracked: given, reentrant checkpoints are as the others, inside whose first pass there are gradients: it says
            whether autograd tracks one with these arguments.
    """
    run, kind = getattr(checkpoints, _CHECKPOINT), checkpoints.CheckpointFunction

    def watched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield from run(function, *args, **kwargs)
            return
        given = args[:2] if _SETTINGS[1].name == "args" else (args[_NUM_SETTINGS:], kwargs)
        with first(function, *given) as repeated:
            passes = run(repeated, *args, **kwargs)
            next(passes)
            try:
                yield
            except BaseException as error:
                passes.throw(error)
                raise
        yield from passes

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.apply(function, preserve, *args)
        if is_tracked is not None:
            with torch.set_grad_enabled(is_tracked(args)):
                return checkpoints.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
        with first(function, args, {}) as repeated:
            return kind.apply(repeated, preserve, *args)

    setattr(checkpoints, _CHECKPOINT, watched)
    checkpoints.CheckpointFunction = SimpleNamespace(apply=apply)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        setattr(checkpoints, _CHECKPOINT, run)
        checkpoints.CheckpointFunction = kind  # type: ignore[misc]


def compiler_errors() -> tuple[tuple[type[Exception], ...], type[Exception]]:
    """Return what `torch.compile` raises where it cannot compile, and that of too many times; imports the compiler.

    Public torch names none, and they share no base but `Exception`.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    cannot_compile = TorchDynamoException, GuardOnDataDependentSymNode, FailOnRecompileLimitHit
    return cannot_compile, FailOnRecompileLimitHit


def named_backend(name: str, mode: str | None, dynamic: bool | None) -> Any:
    """Return a backend of `torch.compile` by its name: the mode of inductor goes with the name only."""
    from torch._dynamo.backends.registry import lookup_backend

    return torch._TorchCompileInductorWrapper(mode, None, dynamic) if name == "inductor" else lookup_backend(name)


def constant_in_graphs(function: AnyFunction) -> AnyFunction:
    """Do what `torch.compiler.assume_constant_result` does: compiled code runs it when it is compiled, and keeps its
    result.

    The public name imports all of dynamo, which takes a second, to set this one attribute.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def abort_backend(group: Any, device: torch.device) -> None:
    """Abort what a process group's back end for a device does; the public `abort` takes the others too."""
    group._get_backend(device).abort()


def on_backward_end(callback: Callable[[], None]) -> None:
    """Run `callback` when the current backward has finished; call this from within it.

    Parameters that got no gradient fire no hook, so the end of the backward is the only place to close their group.
    """
    Variable._execution_engine.queue_callback(callback)


def set_unsharded_storage(storage: torch.UntypedStorage, num_bytes: int) -> None:
    """Allocate a storage for its unsharded content, or free it with 0 bytes, while views of it live on.

    `resize_` is documented for storages but not promised to keep views valid; FSDP2 relies on the same behaviour.
    """
    storage.resize_(num_bytes)


def has_views(tensor: Tensor, num_known: int = 0) -> bool:
    """Say whether another tensor shares the memory of this one; public torch does not count them.

    Args:
        num_known: other tensors that share it and do not count.
    """
    storage = tensor.untyped_storage()  # an owner as well
    return torch._C._storage_Use_Count(storage._cdata) > 2 + num_known


def storage_key(tensor: Tensor) -> int:
    """Return what tensors over one storage have in common; public torch has the address, which fake ones lack."""
    return tensor.untyped_storage()._cdata


def set_data(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter other data, also from or to the meta device, which `.data = ` refuses.

    It works as `torch.utils.swap_tensors`, but allows weak references to the parameter, such as those of `nn.LSTM`: the
    object stays. Nothing but the object may refer to the tensor, so a graph through it must be gone.
    """
    if parameter.is_meta == data.is_meta:
        with torch._C.DisableTorchFunctionSubclass():  # its class may report what `data` is set to
            Tensor.data.__set__(parameter, data)  # type: ignore[attr-defined]
    else:  # `data.data` counts its versions apart, as `parameter.data = data` would
        torch._C._swap_tensor_impl(parameter, nn.Parameter(data.data, requires_grad=parameter.requires_grad))
        # The object has its hooks still, but torch calls those of the tensor: without this later ones are not called.
        with torch._C.DisableTorchFunctionSubclass():  # a class that refuses uses of its values would refuse this one
            give_hooks(parameter, *hooks_of(parameter))


def set_parameter_class(parameter: Tensor, kind: type[Tensor]) -> None:
    """Change the class of a parameter, or of another tensor; torch sees the same tensor."""
    parameter.__class__ = kind


def set_parameter_classes(parameters: Sequence[Tensor], kinds: Sequence[type[Tensor]]) -> None:
    """Change the classes of parameters, each to its own."""
    for parameter, kind in zip(parameters, kinds, strict=True):
        parameter.__class__ = kind


def hooks_of(parameter: nn.Parameter) -> tuple[dict[int, Any] | None, dict[int, Any] | None]:
    """Return a leaf's hooks on its gradient, and those after it was accumulated, as torch has them by their handles."""
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def give_hooks(parameter: nn.Parameter, before: dict[int, Any] | None, after: dict[int, Any] | None) -> None:
    """Give a leaf dicts of hooks; torch calls their values, and puts what is registered later into them."""
    parameter._backward_hooks = before
    # Torch keeps the last dict where it is given None.
    parameter._post_accumulate_grad_hooks = OrderedDict() if after is None else after


Forward = tuple[Callable[..., Any], bool]
"""A hook on a module's forward, and whether it takes keyword arguments too."""


def forward_hooks(module: nn.Module) -> tuple[list[Forward], list[Forward]]:
    """Return a module's hooks before and after its forward; public torch shows none of them."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    if not before and not after:  # as of most modules
        return [], []
    return (
        [(hook, key in module._forward_pre_hooks_with_kwargs) for key, hook in before.items()],
        [(hook, key in module._forward_hooks_with_kwargs) for key, hook in after.items()],
    )


def hook_dicts(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the dicts of a module's hooks: before its forward and after, before its backward and after."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def global_forward_hooks() -> list[Callable[..., Any]]:
    """Return the hooks on the forward of every module."""
    return [*_modules._global_forward_pre_hooks.values(), *_modules._global_forward_hooks.values()]


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's schedules know that a step was taken, by other ranks: else they warn."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def written_tensors(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return what the op `func` writes of its `args` and `kwargs`, by its schema."""
    if not func._schema.is_mutable:
        return []
    values = [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def returned(func: OpOverload, written: Sequence[Tensor]) -> Any:
    """Return the result of an op that writes `written` in place: nothing, the one tensor, or all."""
    if not func._schema.returns:
        return None
    return written[0] if len(func._schema.returns) == 1 else tuple(written)


def parameter_ids(model: nn.Module) -> set[int]:
    """Return the identities of a model's parameters: `named_parameters` takes several times as long to name them."""
    found: set[int] = set()
    modules: list[nn.Module | None] = [model]
    while modules:
        if (module := modules.pop()) is not None:
            found.update(map(id, module._parameters.values()))
            modules += module._modules.values()
    return found - {id(None)}


def norms_of(tensors: list[Tensor]) -> Tensor:
    """Return the 2-norms of tensors of one device, 1-D: on a GPU by a few kernels for all of them."""
    return torch.stack(torch._foreach_norm(tensors))


def zero_all(tensors: list[Tensor]) -> None:
    """Fill tensors of one device with zeros, as `norms_of` takes norms."""
    torch._foreach_zero_(tensors)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors of one device into others of their shapes, as `norms_of` takes norms."""
    torch._foreach_copy_(targets, sources)


def add_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Add tensors to others, in place, of one device, as `norms_of` takes norms."""
    torch._foreach_add_(targets, sources)


def plain_torch_functions() -> AbstractContextManager[None]:
    """Run the body without calling any tensor subclass's `__torch_function__`, as torch's subclass guide does."""
    return torch._C.DisableTorchFunctionSubclass()


def no_torch_functions() -> AbstractContextManager[None]:
    """Run the body without any `__torch_function__`, those of modes too."""
    return torch._C.DisableTorchFunction()


class OpMode(TorchDispatchMode):
    """Is the base of the modes whose `__torch_dispatch__` gets every op of its thread; public torch has no such view.

    torch wraps that method so that dynamo never compiles it, and its wrapper imports all of dynamo, which takes a
    second, at the first op. Nothing here is compiled from within a mode, so this class refuses the wrapper.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each was written in place; writes through `.data` do not count, nor any in inference mode."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # of a tensor of `torch.inference_mode`; to ask first would cost as much again
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def version(tensor: Tensor) -> int:
    """Return the `versions` of one tensor."""
    return versions((tensor,))[0]


def same_version_alias(tensor: Tensor) -> Tensor:
    """Detach a tensor below autograd: the alias is in no graph, but a write into either counts for both."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def view_base(tensor: Tensor) -> Tensor | None:
    """Return the tensor that this one is a view of, as autograd knows it; public torch says only that there is one."""
    return tensor._base


def wrapper_like(kind: type[AnyTensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> AnyTensor:
    """Make a tensor of class `kind` that has no data; all authors of tensor subclasses make theirs by this name.

    Args:
        device: that it claims to be on.
    """
    return Tensor._make_wrapper_subclass(kind, tuple(shape), dtype=dtype, device=device)


def never_compiled(function: AnyFunction) -> AnyFunction:
    """Let compilers leave a function as it is, but not what it calls, as `torch.compiler.disable` would."""
    from torch._dynamo.decorators import skip

    return cast(AnyFunction, skip(function))


def frame_hook_of_compiler() -> Callable[[], object] | None:
    """Return what tells the interpreter's frame hook, None where nothing is compiled; None where torch has no such."""
    return getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)


def step_hooks(optimizer: Any) -> tuple[OrderedDict[int, Any], OrderedDict[int, Any], Mapping[int, Any]]:
    """Return the hooks before an optimizer's step, those after it, and those before all steps; no list is public."""
    before_all = _optimizers._global_optimizer_pre_hooks
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, before_all


# Gamma and Dirichlet distributions draw by these; public torch has the distributions alone.
PRIVATE_DRAWS: Final = (torch._standard_gamma, torch._sample_dirichlet)

# What asks a parameter for an alias: `Module.state_dict` for what is saved, and `nn.Parameter` for a new parameter.
STATE_DICT_CODE: Final = nn.Module._save_to_state_dict.__code__
PARAMETER_CODE: Final = nn.Parameter.__new__.__code__


def of_class(kind: type[AnyTensor], tensor: Tensor) -> AnyTensor:
    """Return a tensor with the data of another, as one of class `kind`, whatever that class makes of `as_subclass`."""
    return Tensor._make_subclass(kind, tensor)


# What `Module.to` and the like ask before they give a parameter other data; it reads no values.
HAS_COMPATIBLE_TYPE: Final = torch._has_compatible_shallow_copy_type

# A fake tensor raises these where its values are needed: for a number, or for a shape that follows from them.
NO_VALUE_ERRORS: Final = (DataDependentOutputException, DynamicOutputShapeException)


def fake_tensors(shapes: Any = None) -> AbstractContextManager[Any]:
    """Give the tensors made inside the context shapes, dtypes, storages and graphs but no memory.

    Public torch has the meta device only, on which ops choose other kernels than on the device that is meant.

    Args:
        shapes: keeps what is decided by symbolic sizes; real tensors may be read then. None for sizes that are numbers.
    """
    return FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=shapes is not None)


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Stop torch from logging what fails on fake tensors inside the context, which it does although it raises too."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def file_offset(tensor: Tensor) -> int:
    """Return where the first element is in the file from which `torch.load` has made this fake tensor.

    Torch documents the storage's offset for fake tensors alone, and has no public name for it.
    """
    return int(tensor.untyped_storage()._checkpoint_offset or 0) + int(tensor.storage_offset()) * tensor.itemsize


def fake_copy(tensor: Tensor) -> Tensor:
    """Return a fake tensor on the CPU like `tensor`, which may be real or on meta; `tensor` itself if it is one
    already.

    Call it inside `fake_tensors`.
    """
    return tensor if isinstance(tensor, FakeTensor) and tensor.device.type == "cpu" else fake_like(tensor)


def fake_like(tensor: Tensor) -> Tensor:
    """Return a fake tensor as `fake_copy` does, but always another tensor."""
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def is_fake(tensor: Tensor) -> bool:
    """Say whether a tensor has a shape but no memory: then one op stands for as many as there are parts."""
    return isinstance(tensor, FakeTensor)


def is_plain(tensor: Tensor) -> bool:
    """Say whether a tensor is memory of its shape and strides and no more: no parameter, no subclass, nothing lazy."""
    is_strided = type(tensor) in (Tensor, FakeTensor) and tensor.layout is torch.strided
    return is_strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def is_transformed(tensor: Tensor) -> bool:
    """Say whether one of `torch.func`'s transforms tracks a tensor, or it has a tangent.

    An op with no rule for them fails with a message about torch's internals, and its forward-mode derivatives are 0
    without a warning. Public torch has the query for the latter only, while outer transforms hide it.
    """
    functorch = torch._C._functorch
    return (
        functorch.is_batchedtensor(tensor)
        or functorch.is_gradtrackingtensor(tensor)
        or forward_ad.unpack_dual(tensor).tangent is not None
    )


def parameter_class(parameter: nn.Parameter) -> type[nn.Parameter]:
    """Return the class of a parameter when its data is present: a fake one must stay a `FakeTensor`, which dispatches
    for it.
    """
    return cast(type[nn.Parameter], FakeTensor if isinstance(parameter, FakeTensor) else type(parameter))


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that `state_dict` has, under all of their names.

    It does not call `state_dict`, which runs the user's hooks, and these may read parameters.
    """
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def container_types() -> list[type]:
    """Return the types that torch's pytree flattens, except named tuples that are not registered."""
    return [*pytree.SUPPORTED_NODES]


def pytree_node(kind: type) -> Any:
    """Return how torch's pytree flattens a type (`flatten_fn`) and rebuilds it (`unflatten_fn`); None for a leaf.

    It works one level at a time, because a `TreeSpec` can only be rebuilt from text by importing what the text names.
    """
    return pytree.SUPPORTED_NODES.get(kind)


def has_cpu_flash_attention() -> bool:
    """Say whether this torch has the ops of the two functions below."""
    names = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
    return all(hasattr(torch.ops.aten, name) for name in names)


def cpu_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Literal["causal"] | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute output and log-sum-exp; the public `scaled_dot_product_attention` gives no log-sum-exp.

    Args:
        q: [B, H, Nq, D]; k and v are [B, H, Nk, D].
        mask: added to the scaled scores, in the dtype of q; [1 or B, 1 or H, Nq, Nk]. "causal": the i-th query sees
            the first i keys alone. None: every query sees every key.
    """
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, isinstance(mask, str), attn_mask=None if isinstance(mask, str) else mask, scale=scale)
    return out, lse


def cpu_flash_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | Literal["causal"] | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v, from an output and log-sum-exp that may be of more keys.

    Args:
        q: [B, H, Nq, D], as `grad_out` and `out`; k and v are [B, H, Nk, D], the log-sum-exp `lse` is [B, H, Nq].
    """
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    is_causal, mask = isinstance(mask, str), None if isinstance(mask, str) else mask
    grad_q, grad_k, grad_v = op(grad_out, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale)
    return grad_q, grad_k, grad_v
