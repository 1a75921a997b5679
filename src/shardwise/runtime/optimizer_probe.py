"""This module finds out by trial what an optimizer's step of an element depends on.

A copy of the optimizer takes a few steps on small tensors: whole, and in two slices, as ranks hold them. Where the
results are equal, the optimizer may see pieces of parameters. Where they are not, but each tensor may be stepped by
itself, it needs whole tensors; else all of them together.

>>> weights = [torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(3))]
>>> step_scope(torch.optim.AdamW(weights), torch.float32), step_scope(torch.optim.Adafactor(weights), torch.float32)
(<StepScope.ELEMENT: 'element'>, <StepScope.TENSOR: 'tensor'>)
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.config.resolve import ConfigError
from shardwise.runtime.torch_private import unseen_by_op_modes

# Gradients that are small and large beside the parameters, so that limits of norms and ratios are met on both sides.
_SCALES: Final = (1.0, 30.0, 1e-3, 0.3, 300.0, 0.05)
_SIDES: Final = (7, 6, 3, 2)  # of the small tensors, by dim
_WIDE_SIDE: Final = 129  # some optimizers factor only dims of 128 and more
_LEAST_RATE: Final = 1e-3  # a schedule's first rate may be 0, which moves nothing


class StepScope(Enum):
    """Says what the update of an element depends on."""

    ELEMENT = "element"
    TENSOR = "tensor"
    JOINT = "all"


def step_scope(optimizer: Optimizer, dtype: torch.dtype, device: torch.device | None = None) -> StepScope:
    """Return what a step of the optimizer depends on; neither it nor any generator of random numbers changes.

    Args:
        optimizer: that has not stepped, over tensors of the shapes that it is to step.
        dtype: of the tensors that it will step.
        device: where it will step them: tried where it cannot step on the CPU.

    Raises:
        ConfigError: its step cannot be called, such as without a closure.
    """
    dims = [_dims_of(group["params"]) for group in optimizer.param_groups]
    cpu = torch.device("cpu")
    try:
        return _probe(optimizer, dims, dtype, cpu)
    except ConfigError:
        if device is None or device.type == "cpu":
            raise
        return _probe(optimizer, dims, dtype, device)


def _probe(optimizer: Optimizer, dims: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> StepScope:
    """Return the scope; `dims` has for each parameter group the numbers of dims of its tensors."""
    with _undisturbed(device):
        small = _Trial(optimizer, [[_SIDES[:num] + (2,) * (num - 4) for num in group] for group in dims], dtype, device)
        scope = small.scope(len(_SCALES))
        if scope is not StepScope.ELEMENT or not any(num > 1 for group in dims for num in group):
            return scope
        wide = [[(_WIDE_SIDE + 1, _WIDE_SIDE, *(1,) * (num - 2)) for num in group if num > 1] for group in dims]
        return _Trial(optimizer, wide, dtype, device).scope(2)


class _Trial:
    """Steps tensors of given shapes, by parameter group, whole and in parts."""

    def __init__(
        self, optimizer: Optimizer, shapes: list[list[tuple[int, ...]]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._optimizer = optimizer
        self._dtype = dtype
        self._device = device
        draws = torch.Generator().manual_seed(0)
        self._values: list[list[Tensor]] = []
        self._gradients: list[list[list[Tensor]]] = []  # by group, tensor and step
        for group in shapes:
            values = [self._draw(shape, draws) for shape in group]
            self._values.append(values)
            self._gradients.append([[self._draw(each.shape, draws) * by for by in _SCALES] for each in values])

    def _draw(self, shape: Sequence[int], draws: torch.Generator) -> Tensor:
        """Return random values that grow along the tensor, so that no two parts have the same norm or mean."""
        values = torch.randn(tuple(shape), generator=draws, dtype=torch.float64, device="cpu")
        growth = torch.logspace(-2, 1, values.numel(), dtype=torch.float64, device="cpu").view(values.shape)
        return (values + 0.25).mul_(growth).to(self._device, self._dtype)

    def scope(self, num_steps: int) -> StepScope:
        whole, has_other_shapes = self._run(lambda flat: flat, num_steps)
        if not has_other_shapes and self._is_same(whole, self._in_slices(num_steps)):
            return StepScope.ELEMENT
        alone = [[self._alone(at, index, num_steps) for index in range(len(each))] for at, each in enumerate(whole)]
        found = [[each for each in group if each is not None] for group in alone]
        is_complete = all(len(some) == len(all_of) for some, all_of in zip(found, alone, strict=True))
        return StepScope.TENSOR if is_complete and self._is_same(whole, found) else StepScope.JOINT

    def _in_slices(self, num_steps: int) -> list[list[Tensor]] | None:
        """Step two optimizers, each with a slice of every tensor, flat as ranks have them."""

        def slice_of(flat: Tensor, part: int) -> Tensor:
            cut = flat.numel() * 2 // 5
            flat = flat.reshape(-1)
            return flat[cut:] if part else flat[:cut]

        try:
            low, _ = self._run(lambda whole: slice_of(whole, 0), num_steps)
            high, _ = self._run(lambda whole: slice_of(whole, 1), num_steps)
        except ConfigError:  # it takes matrices only
            return None
        both = zip(low, high, strict=True)
        return [[torch.cat(pair) for pair in zip(*each, strict=True)] for each in both]

    def _alone(self, at: int, index: int, num_steps: int) -> Tensor | None:
        """Step one tensor by an optimizer of its own."""
        try:
            (group,), _ = self._run(lambda whole: whole, num_steps, at, index)
        except ConfigError:
            return None
        return group[0]

    def _run(
        self, part_of: Callable[[Tensor], Tensor], num_steps: int, at: int | None = None, index: int = 0
    ) -> tuple[list[list[Tensor]], bool]:
        """Return the tensors after some steps, and whether a state has another size than its tensor."""
        params = [
            [
                nn.Parameter(part_of(value).clone())
                for number, value in enumerate(group)
                if at is None or (number_of_group, number) == (at, index)
            ]
            for number_of_group, group in enumerate(self._values)
        ]
        try:
            optimizer = copy_over(self._optimizer, params)
            for number in range(num_steps):
                for group, gradients in zip(params, self._gradients, strict=True):
                    own = gradients if at is None else [gradients[index]] if group else []
                    for param, steps in zip(group, own, strict=True):
                        param.grad = part_of(steps[number]).clone()
                optimizer.step()
        except Exception as error:  # of the user's code
            raise _unusable(type(self._optimizer).__name__, error) from error
        found = [[param.detach() for param in group] for group in params if group or at is None]
        has_other = any(_has_other_size(optimizer.state.get(param), param) for group in params for param in group)
        return found, has_other

    def _is_same(self, whole: list[list[Tensor]], other: list[list[Tensor]] | None) -> bool:
        if other is None:
            return False
        tolerance = 1e-9 if self._dtype == torch.float64 else 2e-4
        for group, others, starts in zip(whole, other, self._values, strict=True):
            for expected, found, start in zip(group, others, starts, strict=True):
                moved = (expected - start).abs().max().item()
                off = (expected.reshape(-1) - found.reshape(-1)).abs().max().item()
                rounding = 8 * torch.finfo(self._dtype).eps * expected.abs().max().item()
                if math.isfinite(moved) and not off <= tolerance * moved + rounding:
                    return False
        return True


def _has_other_size(state: Any, param: Tensor) -> bool:
    if isinstance(state, Tensor):
        return state.numel() > 1 and state.numel() != param.numel()
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return any(_has_other_size(each, param) for each in values)


def _unusable(name: str, error: Exception) -> ConfigError:
    text = " ".join(str(error).split())[:200]
    return ConfigError(
        "optimizer-element-wise",
        f"optimizer {name} cannot be stepped with gradients alone: its step() on small tensors raised "
        f"{type(error).__name__}: {text}; use AdamW, SGD or another whose step needs no closure",
    )


def _dims_of(params: Sequence[Tensor]) -> list[int]:
    """Return the numbers of dims, each once; twice where there is one, since two tensors may depend on each other."""
    found = sorted({param.dim() for param in params})
    return found * 2 if len(found) == 1 and len(params) > 1 else found


def copy_over(optimizer: Optimizer, groups: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
    """Return an optimizer of the same class, attributes and options over other parameters, without states.

    Args:
        optimizer: to copy; optimizers in its attributes are copied with it.
        groups: the parameters by parameter group.
    """
    memo: dict[int, Any] = {}
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        dims = _dims_of(group["params"])
        for param in group["params"]:
            if len(params) == len(dims):
                memo[id(param)] = params[dims.index(param.dim())]
            else:  # a trial without some of them
                like = (each for each in params if each.dim() == param.dim())
                memo[id(param)] = next(like, torch.empty(0, dtype=param.dtype))
    by_old = {id(old["params"]): list(params) for old, params in zip(optimizer.param_groups, groups, strict=True)}
    found = _copied(optimizer, memo, by_old)
    assert isinstance(found, Optimizer)
    for group, params in zip(found.param_groups, groups, strict=True):
        group["params"] = list(params)
    if callable(train := getattr(found, "train", None)):  # such as schedule-free ones
        train()
    return found


def _copied(optimizer: Optimizer, memo: dict[int, Any], by_old: dict[int, list[nn.Parameter]]) -> Optimizer:
    kind = type(optimizer)
    made = kind.__new__(kind)
    memo[id(optimizer)] = made
    memo[id(optimizer.state)] = defaultdict(dict)
    for group in optimizer.param_groups:
        if id(group) not in memo:
            copied = {key: _copy_of(value, memo) for key, value in group.items() if key != "params"}
            old = group["params"]
            copied["params"] = by_old.get(id(old)) or list(dict.fromkeys(memo.get(id(each), each) for each in old))
            memo[id(group)] = _with_a_rate(copied)
    memo[id(optimizer.param_groups)] = [memo[id(group)] for group in optimizer.param_groups]
    attributes = vars(optimizer)
    for inner in _inner(optimizer):
        if id(inner) not in memo:
            _copied(inner, memo, by_old)
    # A schedule replaces `step` by a function that steps the optimizer itself, which must not move.
    made.__dict__.update({key: _copy_of(each, memo) for key, each in attributes.items() if key != "step"})
    return made


def inner_optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizers that an optimizer wraps, and what they wrap."""
    for each in _inner(optimizer):
        yield each
        yield from inner_optimizers(each)


def _inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    for value in vars(optimizer).values():
        several = value.values() if isinstance(value, dict) and not isinstance(value, defaultdict) else value
        for each in several if isinstance(value, list | tuple | dict) else (value,):
            if isinstance(each, Optimizer):
                yield each


def _copy_of(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, nn.Module):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # such as a process group or a lock: the copy shares it
        return value


def _with_a_rate(group: dict[str, Any]) -> dict[str, Any]:
    rate = group.get("lr")
    if isinstance(rate, Tensor):
        rate.fill_(max(float(rate), _LEAST_RATE)) if rate.numel() == 1 else None
    elif isinstance(rate, int | float) and abs(rate) < _LEAST_RATE:
        group["lr"] = _LEAST_RATE
    return group


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Keep the generators of random numbers as they are, and make real tensors on the device."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.device(device), torch.random.fork_rng(devices), unseen_by_op_modes(is_real=True), _eagerly():
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(of_numpy)


@contextmanager
def _eagerly() -> Iterator[None]:
    with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        yield
