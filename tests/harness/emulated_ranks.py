"""The ranks of a tensor-parallel group as threads of one process: what a plan says, carried out in the plainest way.

It imports nothing of the library's surgery, so it can tell whether a plan is right: loss and gradients of all ranks
together must be those of the whole model.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.layout.tensor_plan import LayerSplit, TensorPlan
from shardwise.layout.tp_sharding import ParamSplit

TIMEOUT_S = 30


class Ring:
    """One rank's way to the others."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.slots, self.barrier = rank, slots, barrier

    def gather(self, x: Tensor) -> list[Tensor]:
        self.slots[self.rank] = x
        self.barrier.wait(TIMEOUT_S)
        tensors = list(self.slots)
        self.barrier.wait(TIMEOUT_S)
        return tensors

    def total(self, x: Tensor) -> Tensor:
        return torch.stack(self.gather(x)).sum(0)

    def joined(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self.gather(x), dim)

    def own(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(len(self.slots), dim)[self.rank].contiguous()


class Exchange(torch.autograd.Function):
    """A function of this rank's tensor, and one of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


class Emulation:
    """One rank's copy of a model, split as a plan says."""

    def __init__(
        self, model: nn.Module, plan: TensorPlan, splits: dict[str, ParamSplit], ring: Ring, is_sequence: bool
    ) -> None:
        self.model, self.ring = copy.deepcopy(model), ring
        self.roots = [root for stack in plan.stacks for root in stack.modules] if is_sequence else []
        self.regions = [region.module for region in plan.regions]
        self._cut(splits)
        for layer in plan.layers:
            self._swap_class(layer)
        for name, attribute, value in plan.attributes_of(ring.rank, len(ring.slots)):
            setattr(self.model.get_submodule(name), attribute, value)
        for region in plan.regions:
            self._enter(region.module, region.inputs, self.is_split(region.module))
            self._enter(region.module, region.whole_inputs, False)
        for stack in plan.stacks if is_sequence else ():
            self._around_stack(stack.first, stack.argument, stack.last)

    def is_split(self, name: str) -> bool:
        return any(name == root or name.startswith(f"{root}.") for root in self.roots)

    def enter(self, x: Tensor, is_split: bool) -> Tensor:
        if is_split:
            return Exchange.apply(x, lambda y: self.ring.joined(y, 1), lambda g: self.ring.own(self.ring.total(g), 1))
        return Exchange.apply(x, lambda y: y, self.ring.total)

    def leave(self, x: Tensor, is_split: bool) -> Tensor:
        if is_split:
            return Exchange.apply(x, lambda y: self.ring.own(self.ring.total(y), 1), lambda g: self.ring.joined(g, 1))
        return Exchange.apply(x, self.ring.total, lambda g: g)

    def _cut(self, splits: dict[str, ParamSplit]) -> None:
        cut: dict[int, nn.Parameter] = {}
        for name, param in list(self.model.named_parameters(remove_duplicate=False)):
            local = param.new_zeros(splits[name].local_shape)
            for share in splits[name].shares(self.ring.rank):
                local[slices(share.target)] = param.detach()[slices(share.source)]
            owner, _, own_name = name.rpartition(".")
            parameter = cut.setdefault(id(param), nn.Parameter(local))
            self.model.get_submodule(owner)._parameters[own_name] = parameter

    def _swap_class(self, layer: LayerSplit) -> None:
        module = self.model.get_submodule(layer.module)
        inner = module.forward
        is_split = self.is_split(layer.module)
        is_inside = any(layer.module.startswith(f"{region}.") for region in self.regions)
        size = layer.parts[0].size
        if layer.is_transposed:
            module.nf = module.weight.shape[1]

        def column(x: Tensor) -> Tensor:
            y = inner(x if is_inside else self.enter(x, is_split))
            if layer.gathers_output or layer.style == "head":
                y = Exchange.apply(y, lambda t: self.ring.joined(t, -1), lambda g: self.ring.own(g, -1))
                y = y[..., :size]
            return y

        def head(x: Tensor) -> Tensor:
            pad = module.weight.shape[0] * len(self.ring.slots) - size
            y = inner(self.enter(x, is_split))
            own = slice(self.ring.rank * y.shape[-1], (self.ring.rank + 1) * y.shape[-1])
            return Exchange.apply(
                y, lambda t: self.ring.joined(t, -1)[..., :size], lambda g: F.pad(g, (0, pad))[..., own]
            )

        def row(x: Tensor) -> Tensor:
            if layer.splits_input:
                x = Exchange.apply(x, lambda t: self.ring.own(t, -1), lambda g: self.ring.joined(g, -1))
            y = x @ (module.weight if layer.is_transposed else module.weight.T)
            y = self.leave(y, is_split)
            return y if module.bias is None else y + module.bias

        def vocab(ids: Tensor) -> Tensor:
            low = self.ring.rank * module.weight.shape[0]
            is_mine = (ids >= low) & (ids < low + module.weight.shape[0])
            return self.leave(inner((ids - low).where(is_mine, 0)) * is_mine.unsqueeze(-1), False)

        forwards = {"column": column, "head": head, "row": row, "vocab": vocab, "column-embedding": inner}
        module.forward = forwards[layer.style]
        if layer.style == "vocab":
            module.padding_idx = None

    def _enter(self, name: str, inputs: tuple[str, ...], is_split: bool) -> None:
        module = self.model.get_submodule(name)
        self._before(module, inputs, lambda x: self.enter(x, is_split))

    def _around_stack(self, first: str, argument: str, last: str) -> None:
        ring = self.ring
        split = (lambda x: ring.own(x, 1)), (lambda g: ring.joined(g, 1))
        self._before(self.model.get_submodule(first), (argument,), lambda x: Exchange.apply(x, *split))
        module = self.model.get_submodule(last)
        inner = module.forward

        def gathered(*args: Any, **kwargs: Any) -> Any:
            output = inner(*args, **kwargs)
            is_tensor = isinstance(output, Tensor)
            whole = Exchange.apply(
                output if is_tensor else output[0], lambda x: ring.joined(x, 1), lambda g: ring.own(g, 1)
            )
            return whole if is_tensor else (whole, *output[1:])

        module.forward = gathered

    def _before(self, module: nn.Module, names: tuple[str, ...], change: Callable[[Tensor], Tensor]) -> None:
        inner, signature = module.forward, inspect.signature(module.forward)

        @functools.wraps(inner)
        def changed(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            for name in names:
                if isinstance(bound.arguments.get(name), Tensor):
                    bound.arguments[name] = change(bound.arguments[name])
            return inner(*bound.args, **bound.kwargs)

        module.forward = changed


def slices(rect: Any) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(rect.start, rect.stop, strict=True))


def emulate(
    model: nn.Module,
    plan: TensorPlan,
    splits: dict[str, ParamSplit],
    loss_of: Callable[[nn.Module], Tensor],
    is_sequence: bool,
) -> tuple[list[float], dict[str, Tensor]]:
    """Each rank's loss, and the whole gradient of each parameter, put together as the splits say.

    Raises:
        AssertionError: ranks that hold the same, and each compute all of its gradient, have different ones.
    """
    degree = next(iter(splits.values())).degree
    slots, barrier, failures = [None] * degree, threading.Barrier(degree), []
    ranks = [Emulation(model, plan, splits, Ring(rank, slots, barrier), is_sequence) for rank in range(degree)]
    losses = [0.0] * degree

    def run(rank: int) -> None:
        try:
            loss = loss_of(ranks[rank].model)
            loss.backward()
            losses[rank] = loss.item()
        except Exception as error:  # the other threads must not wait for this one
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        if not isinstance(failure, threading.BrokenBarrierError):
            raise failure
    if failures:
        raise failures[0]
    return losses, {name: _whole_grad(name, splits[name], [each.model for each in ranks]) for name in splits}


def _whole_grad(name: str, split: ParamSplit, models: list[nn.Module]) -> Tensor:
    params = [dict(model.named_parameters(remove_duplicate=False))[name] for model in models]
    whole = params[0].new_zeros(split.global_shape)
    is_written = torch.zeros(split.global_shape, dtype=torch.bool)
    for rank, param in enumerate(params):
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        for share in split.shares(rank):
            source, mine = slices(share.source), grad[slices(share.target)]
            if share.is_summed:
                whole[source] += mine
            elif is_written[source].any():
                torch.testing.assert_close(whole[source], mine, rtol=1e-9, atol=1e-12, msg=f"{name} differs")
            else:
                whole[source] = mine
            is_written[source] = True
    assert is_written.all(), name
    return whole
