"""Splits the backward in two halves: gradients of inputs at once, those of weights when the schedule says so.

Zero-bubble schedules (Qi et al. 2023, section 2) run the second half while a stage would otherwise wait. Inside
`WeightGradQueue.splitting` a product with a parameter (`F.linear`, `torch.addmm`, `matmul`, `mm`, `@`) becomes an
autograd function whose backward computes the gradient of its input alone and queues the rest. Layers with functions of
their own queue through `shardwise.runtime.weight_grad_queue`. All else keeps its ordinary gradient, in the first half:
norms, embeddings, convolutions, products inside `nn.MultiheadAttention`, under autocast, in compiled code, and of
one-dimensional inputs; of split layers, columns that gather a sequence, and heads whose loss is computed with the
logits.

>>> layer, queue = torch.nn.Linear(4, 2), WeightGradQueue()
>>> with queue.splitting():
...     layer(torch.ones(3, 4)).sum().backward()
>>> queue.collect("stage 0, micro-batch 0")
>>> layer.weight.grad is None
True
>>> queue.drain("stage 0, micro-batch 0")
>>> layer.weight.grad.shape
torch.Size([2, 4])
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwise.config.errors import EngineError
from shardwise.runtime.torch_private import is_plain, version
from shardwise.runtime.weight_grad_queue import parameter_of_weight, weight_sink


class WeightGradQueue:
    """Queues the gradients of weights that a backward has deferred, until they are computed."""

    def __init__(self) -> None:
        self._queued: list[_QueuedGrad] = []
        self._collected: dict[Hashable, list[_QueuedGrad]] = {}

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the tensors that the queue keeps alive; a storage used by several counts once."""
        entries = [*self._queued, *(entry for entries in self._collected.values() for entry in entries)]
        storages = {id(storage): storage for entry in entries for storage in entry.storages()}
        return sum(storage.nbytes() for storage in storages.values())

    # [Note: Weight gradients and reductions]
    # The first half of a backward gives a product's weight no gradient, so its hooks do not fire. `drain` runs autograd
    # once more, over what was queued, and then they fire as in a whole backward: the gradients reach the same buckets.
    # So REDUCE follows BACKWARD_WEIGHT (`insert_gathers` of `schedule/lower.py`). Of a product's weight only the
    # strides are read by then, so its parameter may have been released.
    def splitting(self) -> AbstractContextManager[Any]:
        """Return a context in which products with parameters defer the parameters' gradients to the queue.

        Enter it around a stage's forward, and around its backward: a recomputation must do what its forward did. The
        backward must be `backward` to all leaves: one to chosen inputs skips what leads to parameters alone, and inside
        `torch.autograd.grad` torch shows no recomputation to a mode. Gradients that are not queued must be taken off
        their parameters, as `shardwise.runtime.module_hooks.hook_gradient` does: a gradient that stays may share
        memory with a held tensor, and autograd adds the next one to it in place, which `drain` refuses.
        """
        return _Splitting(self)

    def defer(
        self, parameters: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]], held: Sequence[Tensor]
    ) -> None:
        """Queue gradients of parameters; see `shardwise.runtime.weight_grad_queue.WeightGradSink.defer`.

        Args:
            compute: returns their gradients, each of its parameter's shape.
            held: the tensors that `compute` reads; they must not change until then.

        Raises:
            EngineError: the backward is to be differentiated again.
        """
        if torch.is_grad_enabled():
            raise EngineError(
                "create-graph-split-backward",
                "create_graph=True in a backward that computes weight gradients later: those have no graph; "
                "use a schedule that is not a zero-bubble one, or no gradients of gradients",
            )
        # Other micro-batches run before these tensors are read. Autograd checks the versions of what it saves, and here
        # it saves nothing.
        self._queued.append(_QueuedGrad(tuple(parameters), compute, tuple(held), tuple(map(version, held))))

    def collect(self, key: Hashable) -> None:
        """Keep under a key what was queued since the last call; to be called after each backward.

        Raises:
            RuntimeError: the key is in use.
        """
        if key in self._collected:
            raise RuntimeError(f"weight gradients of {key} are collected already; drain them before the next backward")
        self._collected[key] = self._queued
        self._queued = []

    def drain(self, key: Hashable) -> None:
        """Compute what was collected under a key and give it to the parameters, one by one, as a backward would.

        Gradients of one parameter are summed first, so that its hooks fire once.

        Raises:
            RuntimeError: nothing was collected under this key, or a tensor was changed in place since then.
        """
        if key not in self._collected:
            raise RuntimeError(
                f"weight gradients of {key} were not collected, or are drained; run its BACKWARD_INPUT first, once"
            )
        entries = self._collected.pop(key)
        entries.reverse()  # autograd runs the newest node first
        # All in one backward: autograd sums what comes for one parameter before it calls the hooks, which would refuse
        # a second gradient.
        with torch.enable_grad():
            deliveries = [_Deliver.apply(entry, *entry.parameters) for entry in entries]
        entries.clear()
        if deliveries:
            torch.autograd.backward(deliveries, [torch.empty_like(delivery) for delivery in deliveries])

    def check_empty(self) -> None:
        """Make sure that all was drained, at the end of a step.

        Raises:
            RuntimeError: something was not drained; the message names the keys.
        """
        left = [str(key) for key in self._collected]
        if self._queued:
            left.append(f"{len(self._queued)} products of a backward that was not collected")
        if left:
            raise RuntimeError(
                f"weight gradients are left at the end of the step: {'; '.join(left)}; "
                "every BACKWARD_INPUT needs its BACKWARD_WEIGHT"
            )

    def clear(self) -> None:
        """Forget everything, as after a step that failed."""
        self._queued.clear()
        self._collected.clear()


@dataclass(eq=False)
class _QueuedGrad:
    """Holds what computes gradients later."""

    parameters: tuple[Tensor, ...]
    compute: Callable[[], Sequence[Tensor]] | None
    held: tuple[Tensor, ...]
    versions: tuple[int, ...]

    def storages(self) -> list[torch.UntypedStorage]:
        return [tensor.untyped_storage() for tensor in self.held]

    def take(self) -> Sequence[Tensor]:
        """Compute the gradients, and release what was held."""
        compute, self.compute = self.compute, None
        if compute is None:
            raise RuntimeError("weight gradients were computed already; do not retain the graph of a drain")
        if tuple(map(version, self.held)) != self.versions:
            raise EngineError(
                "input-changed-in-place",
                f"an input or an output's gradient of shape {tuple(self.held[0].shape)} was changed in place before the"
                " gradient of its weight was computed from it; change a copy",
            )
        gradients = compute()
        self.held = ()
        return gradients


class _Deliver(Function):
    """A function whose backward computes queued gradients: autograd accumulates them as it does any gradient."""

    @staticmethod
    def forward(ctx: Any, entry: _QueuedGrad, *parameters: Tensor) -> Tensor:
        ctx.entry = entry
        # On the parameters' device, so that the backward runs on its thread; not of a parameter, which may be released.
        return entry.held[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *ctx.entry.take()


@dataclass(frozen=True, eq=False)
class _Product:
    """Describes `x @ right + bias`, where `right` is a parameter or its transpose, as the function is given it."""

    x: Tensor  # [..., in]
    weight: nn.Parameter
    is_transposed: bool
    bias: Tensor | None  # [out]

    @property
    def right(self) -> Tensor:  # [in, out]
        weight = self.weight.detach()
        return weight.t() if self.is_transposed else weight


class _SplitBackward(Function):
    """A product with a parameter; its backward queues what it does not compute.

    Products are computed as torch computes them, so that no bit differs: `x` folded to two dims, and gradients in the
    memory order of what they belong to.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, product: _Product, queue: WeightGradQueue) -> Tensor:
        right, bias, rows = product.right, product.bias, _rows(x)
        # Not saved by autograd: recomputation or offload of activations would treat the weight as an activation.
        ctx.right, ctx.version, ctx.queue = right, version(right), queue
        ctx.weight, ctx.is_transposed = product.weight, product.is_transposed
        ctx.bias = bias if bias is not None and bias.requires_grad else None
        ctx.save_for_backward(x)
        if bias is None:
            out = torch.mm(rows, right)
        elif x.dim() == 2 or x.is_contiguous():
            out = torch.addmm(bias, rows, right)
        else:
            out = torch.mm(rows, right).add_(bias)
        return out.view(*x.shape[:-1], -1 if out.numel() else out.shape[-1]).detach()  # a view cannot be changed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        if version(ctx.right) != ctx.version:
            raise EngineError(
                "weight-changed-in-place",
                f"a weight of shape {tuple(ctx.weight.shape)} was changed in place between forward and backward",
            )
        parameters = (ctx.weight,) if ctx.bias is None else (ctx.weight, ctx.bias)
        compute = partial(_weight_gradients, x, grad, ctx.right, ctx.is_transposed, ctx.bias is not None)
        ctx.queue.defer(parameters, compute, (x, grad))
        grad_x = _gradient_of_left(_rows(grad), _rows(x), ctx.right).view(x.shape) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None


def _weight_gradients(x: Tensor, grad: Tensor, right: Tensor, is_transposed: bool, has_bias: bool) -> list[Tensor]:
    rows = _rows(grad)
    gradient = _gradient_of_right(rows, _rows(x), right)
    return [gradient.t() if is_transposed else gradient, *([rows.sum(0)] if has_bias else [])]


def _gradient_of_left(grad: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return the gradient of `left` in `left @ right`: from [m, n], [m, k] and [k, n] to [m, k]."""
    return right.mm(grad.t()).t() if _is_column_major(left) else grad.mm(right.t())


def _gradient_of_right(grad: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return the gradient of `right` in `left @ right`: from [m, n], [m, k] and [k, n] to [k, n]."""
    return grad.t().mm(left).t() if _is_column_major(right) else left.t().mm(grad)


def _is_column_major(matrix: Tensor) -> bool:
    return matrix.stride() == (1, matrix.shape[0])


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])  # [..., k] -> [N, k]


class _Splitting(TorchFunctionMode):
    """Replaces products with parameters, and answers calls of `weight_sink`."""

    def __init__(self, queue: WeightGradQueue) -> None:
        super().__init__()
        self._queue = queue
        self._anchor = torch.empty(0, requires_grad=True)  # gives a graph to products of inputs that have none

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # the compiler traces this method too
            return func(*args, **kwargs)
        if func is weight_sink:
            return self._queue
        if func in _BACKWARDS and (backward := _BACKWARDS[func](*args, **kwargs)) is not None:
            with self:
                return backward()
        operands = _OPERANDS.get(func)
        if operands is not None and torch.is_grad_enabled():
            product = operands(*args, **kwargs)
            if product is not None and _can_split(product):
                anchor = None if product.x.requires_grad else self._anchor
                return _SplitBackward.apply(product.x, anchor, product, self._queue)
        return func(*args, **kwargs)


def _of_method(
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> Callable[[], None] | None:
    return _of_backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _of_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> Callable[[], None] | None:
    """Return a backward during which the mode stays on, so that it sees what is recomputed there; None for no such.

    While torch runs a call that it has shown to a mode, the mode is off. Torch shows it the backward of a tensor, but
    not that of an edge of the graph.
    """
    outputs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not all(isinstance(output, Tensor) and output.requires_grad for output in outputs):
        return None
    given = [grad_tensors] * len(outputs) if grad_tensors is None or isinstance(grad_tensors, Tensor) else grad_tensors
    gradients = [
        torch.ones_like(output) if gradient is None and output.numel() == 1 else gradient
        for output, gradient in zip(outputs, given, strict=True)
    ]
    edges = [get_gradient_edge(output) for output in outputs]
    if inputs is not None:
        inputs = [get_gradient_edge(tensor) for tensor in ([inputs] if isinstance(inputs, Tensor) else inputs)]
    return partial(torch.autograd.backward, edges, gradients, retain_graph, create_graph, grad_variables, inputs)


def _can_split(product: _Product) -> bool:
    x, weight, bias = product.x, product.weight, product.bias
    if not is_plain(x) or x.dim() < 2 or x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
        return False
    if bias is None:
        return True
    is_parameter = isinstance(bias, nn.Parameter) or not bias.requires_grad
    return is_parameter and bias.dim() == 1 and bias.shape[0] == weight.shape[0 if product.is_transposed else 1]


def _product(x: Any, weight: Any, bias: Any = None, is_linear: bool = False) -> _Product | None:
    found = parameter_of_weight(weight)
    if found is None or not isinstance(x, Tensor):
        return None
    parameter, is_transposed = found
    return _Product(x, parameter, is_transposed != is_linear, bias)


def _of_linear(input: Any, weight: Any, bias: Any = None) -> _Product | None:  # noqa: A002
    return _product(input, weight, bias, is_linear=True)


def _of_matmul(*factors: Any, **others: Any) -> _Product | None:
    return _product(*factors) if len(factors) == 2 and not others else None


def _of_addmm(*operands: Any, **others: Any) -> _Product | None:
    if len(operands) != 3 or others:
        return None
    bias, x, weight = operands
    return _product(x, weight, bias)


_BACKWARDS: Final[Mapping[Any, Callable[..., Callable[[], None] | None]]] = {
    Tensor.backward: _of_method,
    torch.autograd.backward: _of_backward,
}
_OPERANDS: Final[Mapping[Any, Callable[..., _Product | None]]] = {
    F.linear: _of_linear,
    torch.matmul: _of_matmul,
    torch.mm: _of_matmul,
    Tensor.matmul: _of_matmul,
    Tensor.mm: _of_matmul,
    Tensor.__matmul__: _of_matmul,
    torch.addmm: _of_addmm,
    Tensor.addmm: _of_addmm,
}
