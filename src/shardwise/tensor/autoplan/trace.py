"""Record what a model computes, op by op, on tensors without memory; a plan is proposed from this trace.

A linear layer, a dropout and an attention are one op each, whatever ops torch runs for them.

>>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
>>> [(op.name, op.module) for op in record(model, torch.zeros(3, 4)).ops]
[('linear', '0'), ('gelu', '1'), ('linear', '2')]
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.config.errors import ConfigError
from shardwise.runtime.module_calls import watch_calls
from shardwise.runtime.torch_private import (
    NO_VALUE_ERRORS,
    OpMode,
    OpOverload,
    fake_copy,
    fake_tensors,
    named_arguments,
    pytree,
)
from shardwise.tensor.autoplan.kinds import is_linear
from shardwise.tensor.plan_table import NO_TENSOR


@dataclass(frozen=True)
class TensorRef:
    """Identifies one tensor of a trace.

    Attributes:
        index: the same for the same tensor object.
        is_float: whether a gradient can flow to it.
    """

    index: int
    shape: tuple[int, ...]
    is_float: bool


@dataclass(frozen=True)
class TracedOp:
    """Describes one op of a trace.

    Attributes:
        name: of the aten op without its overload; or linear, dropout, sdpa.
        arguments: by name; a tensor among them is a `TensorRef`.
        module: the innermost one in whose forward it runs; for `linear` the layer.
        is_pointwise: whether every element of the output depends only on the inputs' elements at its place.
    """

    name: str
    arguments: Mapping[str, Any]
    outputs: tuple[TensorRef, ...]
    module: str
    is_pointwise: bool

    @property
    def inputs(self) -> tuple[TensorRef, ...]:
        """Return all tensors among the arguments."""
        return tuple(leaf for leaf in pytree.tree_leaves(dict(self.arguments)) if isinstance(leaf, TensorRef))


@dataclass
class ModuleCall:
    """Describes one call of a module.

    Attributes:
        arguments: those that are tensors, by name; `outputs` are the tensors in what it returned.
        start: the first op that ran in it; `stop` is the first after it.
    """

    module: str
    arguments: dict[str, TensorRef]
    start: int
    stop: int = 0
    outputs: tuple[TensorRef, ...] = ()


@dataclass
class ModelTrace:
    """Holds the trace of a forward.

    Attributes:
        ops: in the order in which they ran.
        calls: of modules, in the order in which they began.
        parameters: index of a `TensorRef` -> name of the parameter that it is.
        batch: of each tensor of the batch, the index of its `TensorRef`.
        outputs: tensors in what the model returned.
        deciding: modules whose code asked for the values of tensors, and by which op; it got zeros.
    """

    ops: list[TracedOp] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)
    batch: set[int] = field(default_factory=set)
    outputs: tuple[TensorRef, ...] = ()
    deciding: dict[str, str] = field(default_factory=dict)


def record(
    model: nn.Module,
    batch: Any,
    alter: Callable[[nn.Module], None] | None = None,
    check: Callable[[ModelTrace], None] = lambda trace: None,
) -> ModelTrace:
    """Run a model once, in training mode, on a copy without memory.

    Args:
        batch: as for `Engine.__call__` without a loss function.
        alter: changes the copy before it runs; None for no change.
        check: called with the trace after every op; it may raise.

    Raises:
        ConfigError: the model's own forward depends on the values of tensors, or a module's in an unsupported way.
    """
    trace = ModelTrace()
    with fake_tensors(), torch.enable_grad():
        tensors = [*model.parameters(), *model.buffers()]
        model = copy.deepcopy(model, {id(tensor): fake_copy(tensor) for tensor in tensors}).train()
        if alter is not None:
            alter(model)
        batch = pytree.tree_map(lambda leaf: fake_copy(leaf) if isinstance(leaf, Tensor) else leaf, batch)
        recorder = _TraceRecorder(model, trace, check)
        for module in model.modules():
            if isinstance(module, nn.Linear) and is_linear(module):  # subclasses too, in whatever ops they multiply
                module.forward = MethodType(nn.Linear.forward, module)  # type: ignore[method-assign]
        trace.batch.update(ref.index for ref in recorder.refs(batch))
        try:
            with watch_calls(model, recorder.before_call, recorder.after_call), _Functions(recorder), _Ops(recorder):
                output = call_model(model, batch)
        except Exception as error:
            if not isinstance(error, NO_VALUE_ERRORS) and (alter is not None or not trace.deciding):
                raise
            place = f"in {', '.join(trace.deciding) or 'its forward'}"
            raise ConfigError(
                "tp-value-decisions",
                f"the model decides on the values of tensors {place} "
                f"({str(error).splitlines()[0] if str(error) else type(error).__name__}), so tracing it once says "
                f"nothing of another batch; give a plan as a table, or {NO_TENSOR}",
            ) from error
    trace.outputs = recorder.refs(output)
    return trace


def call_model(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def plain_output(output: Any) -> Any:
    """Return an output whose fields pytrees see: fields of a dataclass that torch does not know are not leaves."""
    if isinstance(output, Mapping):
        return dict(output)
    return vars(output) if hasattr(output, "__dict__") and not isinstance(output, Tensor) else output


class _TraceRecorder:
    """Fills a trace; `is_paused` is set inside ops that count as one."""

    def __init__(self, model: nn.Module, trace: ModelTrace, check: Callable[[ModelTrace], None]) -> None:
        self.trace, self._check = trace, check
        self.is_paused = False
        self._refs: dict[int, tuple[Tensor, TensorRef]] = {}  # with the tensor, so that its id stays its own
        self._stack: list[ModuleCall] = []
        self._weights = {id(module.weight): name for name, module in model.named_modules() if is_linear(module)}
        for name, parameter in model.named_parameters():
            trace.parameters[self.ref(parameter).index] = name

    @property
    def module(self) -> str:
        return self._stack[-1].module if self._stack else ""

    def ref(self, tensor: Tensor) -> TensorRef:
        if id(tensor) not in self._refs:
            ref = TensorRef(len(self._refs), tuple(tensor.shape), tensor.is_floating_point() or tensor.is_complex())
            self._refs[id(tensor)] = (tensor, ref)
        return self._refs[id(tensor)][1]

    def refs(self, output: Any) -> tuple[TensorRef, ...]:
        return tuple(self.ref(leaf) for leaf in pytree.tree_leaves(plain_output(output)) if isinstance(leaf, Tensor))

    def before_call(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        except TypeError:
            bound = {}  # its forward will say what is wrong
        given = {key: self.ref(value) for key, value in bound.items() if isinstance(value, Tensor)}
        call = ModuleCall(name, given, len(self.trace.ops))
        self.trace.calls.append(call)
        self._stack.append(call)

    def after_call(self, output: Any) -> None:
        call = self._stack.pop()
        call.stop, call.outputs = len(self.trace.ops), self.refs(output)

    def add(self, name: str, arguments: Mapping[str, Any], output: Any, is_pointwise: bool = False) -> None:
        def named(tree: Any) -> Any:
            return pytree.tree_map(lambda leaf: self.ref(leaf) if isinstance(leaf, Tensor) else leaf, tree)

        outputs = tuple(leaf for leaf in pytree.tree_leaves(named(output)) if isinstance(leaf, TensorRef))
        self.trace.ops.append(TracedOp(name, named(dict(arguments)), outputs, self.module, is_pointwise))
        self._check(self.trace)

    def as_one(self, name: str, arguments: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        self.is_paused = True
        try:
            output = run()
        finally:
            self.is_paused = False
        self.add(name, arguments, output, is_pointwise=name == "dropout")
        return output

    def is_own_layer(self, weight: Any) -> bool:
        """Return whether the linear layer that has this weight is the module that runs."""
        return self._weights.get(id(weight), None) == self.module


_SDPA_ARGUMENTS: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class _Functions(TorchFunctionMode):
    """Sees the functions that count as one op."""

    def __init__(self, recorder: _TraceRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}

        def run() -> Any:
            return func(*args, **kwargs)

        recorder = self._recorder
        if recorder.is_paused:
            return run()
        if func is F.linear and len(args) >= 2 and recorder.is_own_layer(args[1]):
            return recorder.as_one("linear", {"input": args[0]}, run)
        if func is torch.addmm and len(args) == 3 and recorder.is_own_layer(args[2]):
            return recorder.as_one("linear", {"input": args[1]}, run)
        if func is F.scaled_dot_product_attention:
            arguments = dict(zip(_SDPA_ARGUMENTS, args, strict=False)) | kwargs
            return recorder.as_one("sdpa", arguments, run)
        if func in (F.dropout, torch.dropout):
            arguments = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
            return recorder.as_one("dropout", arguments, run)
        return run()


class _Ops(OpMode):
    """Sees all other ops."""

    def __init__(self, recorder: _TraceRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            output = func(*args, **kwargs)
        except NO_VALUE_ERRORS:
            if not self._recorder.module or str(func) not in _STAND_INS:
                raise
            self._recorder.trace.deciding.setdefault(self._recorder.module, str(func))
            output = _STAND_INS[str(func)](args[0])
        if not self._recorder.is_paused and func.namespace != "prim":
            name = str(func).split(".")[1]
            is_pointwise = torch.Tag.pointwise in func.tags
            self._recorder.add(name, named_arguments(func, args, kwargs), output, is_pointwise)
        return output


def _zero(asked: Tensor) -> float | int | bool:
    if asked.dtype is torch.bool:
        return False
    return 0.0 if asked.is_floating_point() else 0


# The values that code gets if it asks for them: the first index, or zero. The module that asks is left whole.
_STAND_INS: Final[Mapping[str, Callable[[Tensor], Any]]] = {
    "aten.nonzero.default": lambda asked: asked.new_zeros((1, asked.dim()), dtype=torch.int64),
    "aten._local_scalar_dense.default": _zero,
}
