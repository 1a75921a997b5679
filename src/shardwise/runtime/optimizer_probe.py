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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.config.errors import ConfigError
from shardwise.runtime.device import forked_rng
from shardwise.runtime.torch_private import step_hooks, unseen_by_op_modes
from shardwise.runtime.user_hooks import reads_first_argument

# Gradients that are small and large beside the parameters, so that limits of norms and ratios are met on both sides.
_SCALES: Final = (0.3, 1.0, 30.0, 1e-3, 300.0, 0.05)
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
    tries = [(torch.float64, cpu), (dtype, cpu), (dtype, device or cpu)]  # fp64 shows what rounding would hide
    for wide, where in dict.fromkeys(tries[:-1]):
        with suppress(ConfigError):
            return _probe(optimizer, dims, wide, where)
    return _probe(optimizer, dims, *tries[-1])


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
        self._dims = [[len(shape) for shape in group] for group in shapes]
        draws = torch.Generator().manual_seed(0)
        self._values: list[list[Tensor]] = []
        self._gradients: list[list[list[Tensor]]] = []  # by group, tensor and step
        for group in shapes:
            values = [self._draw(shape, draws) for shape in group]
            self._values.append(values)
            self._gradients.append([self._draw_gradients(value, draws) for value in values])

    def _draw(self, shape: Sequence[int], draws: torch.Generator) -> Tensor:
        """Return random values that grow along the tensor, so that no two parts have the same norm or mean."""
        values = torch.randn(tuple(shape), generator=draws, dtype=torch.float64, device="cpu")
        growth = torch.logspace(-2, 1, values.numel(), dtype=torch.float64, device="cpu").view(values.shape)
        return (values + 0.25).mul_(growth).to(self._device, self._dtype)

    def _draw_gradients(self, value: Tensor, draws: torch.Generator) -> list[Tensor]:
        """Return gradients that keep their direction; the second is orthogonal to each row of the values.

        Some optimizers estimate a rate from gradients that agree; some project what is nearly orthogonal.
        """
        steady = self._draw(value.shape, draws)
        found = [(steady + 0.3 * self._draw(value.shape, draws)) * by for by in _SCALES]
        if value.dim() > 1:
            rows, second = value.flatten(1), found[1].flatten(1)
            share = (rows * second).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
            found[1] = (second - share * rows).view(value.shape)
        return found

    def scope(self, num_steps: int) -> StepScope:
        whole = self._run(lambda flat: flat, num_steps)
        if not whole.has_other_shapes and self._is_sum_of_slices(whole, num_steps):
            return StepScope.ELEMENT
        for at, group in enumerate(whole.params):
            for index, expected in enumerate(group):
                if not self._is_alone(expected, whole.numbers[at][index], num_steps, at, index):
                    return StepScope.JOINT
        return StepScope.TENSOR

    def _is_sum_of_slices(self, whole: _Stepped, num_steps: int) -> bool:
        """Say whether two optimizers, each with a slice of every tensor, flat as ranks have them, do the same."""

        def slice_of(flat: Tensor, part: int) -> Tensor:
            cut = flat.numel() * 2 // 5
            flat = flat.reshape(-1)
            return flat[cut:] if part else flat[:cut]

        try:
            low = self._run(lambda each: slice_of(each, 0), num_steps)
            high = self._run(lambda each: slice_of(each, 1), num_steps)
        except ConfigError:  # it takes matrices only
            return False
        for at, group in enumerate(whole.params):
            for index, expected in enumerate(group):
                both = torch.cat([low.params[at][index], high.params[at][index]])
                if not self._is_same(expected, both, at, index):
                    return False
        return all(_are_same_numbers(whole.numbers, each.numbers) for each in (low, high))

    def _is_alone(self, expected: Tensor, numbers: list[float], num_steps: int, at: int, index: int) -> bool:
        """Say whether an optimizer that has one tensor only steps it as it is stepped beside the others."""
        try:
            alone = self._run(lambda each: each, num_steps, at, index)
        except ConfigError:
            return False
        is_same = self._is_same(expected, alone.params[at][0], at, index)
        return is_same and _are_same_numbers([[numbers]], [[alone.numbers[at][0]]])

    def _run(
        self, part_of: Callable[[Tensor], Tensor], num_steps: int, at: int | None = None, index: int = 0
    ) -> _Stepped:
        """Take some steps of all tensors' parts, or of the one tensor `index` of group `at`."""
        params = [
            [
                nn.Parameter(part_of(value).clone())
                for number, value in enumerate(group)
                if at is None or (number_of_group, number) == (at, index)
            ]
            for number_of_group, group in enumerate(self._values)
        ]
        try:
            dims = (
                self._dims
                if at is None
                else [[nums[index]] if at == one else [] for one, nums in enumerate(self._dims)]
            )
            optimizer = copy_over(self._optimizer, params, dims)
            for number in range(num_steps):
                for group, gradients in zip(params, self._gradients, strict=True):
                    own = gradients if at is None else [gradients[index]] if group else []
                    for param, steps in zip(group, own, strict=True):
                        param.grad = part_of(steps[number]).clone()
                optimizer.step()
        except Exception as error:  # of the user's code
            raise _unusable(type(self._optimizer).__name__, error) from error
        states = [[optimizer.state.get(param) for param in group] for group in params]
        return _Stepped(
            [[param.detach() for param in group] for group in params],
            [
                # A parameter of no dim is itself a number, and so are all its states: one slice of it has none.
                [
                    [*_numbers(options), *(_numbers(state) if num else ())]
                    for num, state in zip(nums, several, strict=True)
                ]
                for options, nums, several in zip(optimizer.param_groups, dims, states, strict=True)
            ],
            any(
                _has_other_size(state, param)
                for group, several in zip(params, states, strict=True)
                for param, state in zip(group, several, strict=True)
            ),
        )

    def _is_same(self, expected: Tensor, found: Tensor, at: int, index: int) -> bool:
        tolerance = 1e-9 if self._dtype == torch.float64 else 2e-4
        moved = (expected - self._values[at][index]).abs().max().item()
        off = (expected.reshape(-1) - found.reshape(-1)).abs().max().item()
        rounding = 8 * torch.finfo(self._dtype).eps * expected.abs().max().item()
        return not math.isfinite(moved) or off <= tolerance * moved + rounding


@dataclass(frozen=True)
class _Stepped:
    """Holds by parameter group the tensors after some steps, and the numbers that the optimizer keeps for each."""

    params: list[list[Tensor]]
    numbers: list[list[list[float]]]
    has_other_shapes: bool


def _numbers(options: Any) -> list[float]:
    """Return the numbers of a group's options, or of a state: counts, and what may be measured on tensors."""
    values = options.items() if isinstance(options, dict) else ()
    kept = [value for key, value in values if key != "params"]
    return [
        float(value)
        for value in kept
        if isinstance(value, int | float)
        or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex())
    ]


def _are_same_numbers(whole: list[list[list[float]]], other: list[list[list[float]]]) -> bool:
    pairs = zip((each for group in whole for each in group), (each for group in other for each in group), strict=True)
    return all(
        len(ours) == len(theirs)
        and all(math.isclose(one, two, rel_tol=1e-6) or one != one for one, two in zip(ours, theirs, strict=True))
        for ours, theirs in pairs
    )


def _has_other_size(state: Any, param: Tensor) -> bool:
    if isinstance(state, Tensor):
        return state.numel() > 1 and state.numel() != param.numel()
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return any(_has_other_size(value, param) for value in values)


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


def copy_over(
    optimizer: Optimizer, groups: Sequence[Sequence[nn.Parameter]], dims: Sequence[Sequence[int]]
) -> Optimizer:
    """Return an optimizer of the same class, attributes and options over other parameters, before its first step.

    Args:
        optimizer: to copy; optimizers in its attributes are copied with it.
        dims: how many dims the parameters have for which these stand.
    """
    memo: dict[int, Any] = {}
    of_dim = [dict(reversed([*zip(nums, params, strict=True)])) for nums, params in zip(dims, groups, strict=True)]
    for group, standing in zip(optimizer.param_groups, of_dim, strict=True):
        for param in group["params"]:
            memo[id(param)] = standing.get(param.dim(), torch.empty(0, dtype=param.dtype))
    by_old = {id(old["params"]): list(params) for old, params in zip(optimizer.param_groups, groups, strict=True)}
    found = _copied(optimizer, memo, by_old)
    for group, params in zip(found.param_groups, groups, strict=True):
        group["params"] = list(params)
    for old, params, nums in zip(optimizer.param_groups, groups, dims, strict=True):
        for param, num in zip(params, nums, strict=True):  # states that were made in the constructor
            before = next(param for param in old["params"] if param.dim() == num)
            if before in optimizer.state:
                states = optimizer.state[before].items()
                found.state[param] = {key: _first_state(value, before, param) for key, value in states}
    if callable(train := getattr(found, "train", None)):  # such as schedule-free ones
        train()
    return found


def _copied(optimizer: Optimizer, memo: dict[int, Any], by_old: dict[int, list[nn.Parameter]]) -> Optimizer:
    kind = type(optimizer)
    made = kind.__new__(kind)
    memo[id(optimizer)] = made
    memo[id(optimizer.state)] = defaultdict(dict, other_states(optimizer))
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
    for hooks in step_hooks(made)[:2]:  # others, such as an average's, would act in earnest
        for key in [key for key, hook in hooks.items() if not reads_first_argument(hook)]:
            del hooks[key]
    return made


def other_states(optimizer: Optimizer) -> dict[Any, Any]:
    """Return a copy of the states that are of no parameter, such as a count of all steps."""
    return {key: copy.deepcopy(value) for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def _first_state(value: Any, param: Tensor, like: nn.Parameter) -> Any:
    if isinstance(value, Tensor) and value.dim() and value.numel() == param.numel() and not value.is_meta:
        dtype = like.dtype if value.dtype == param.dtype else value.dtype
        return torch.full_like(like, value.reshape(-1)[0].item(), dtype=dtype, requires_grad=False)
    return copy.deepcopy(value)


def first_states(optimizer: Optimizer) -> frozenset[str]:
    """Return the names of what an optimizer keeps of a parameter after a step; none where that cannot be tried."""
    param = nn.Parameter(torch.zeros(2, 2))
    param.grad = torch.ones_like(param)
    try:
        tried = copy.copy(optimizer)
        tried.state = defaultdict(dict)
        tried.param_groups = [{**optimizer.param_groups[0], "params": [param]}]
        tried.step()
    except Exception:  # of an optimizer of others, which may need more than it was given here
        return frozenset()
    return frozenset(tried.state.get(param, {}))


def inner_optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizers that an optimizer wraps, and what they wrap."""
    for each in _inner(optimizer):
        yield each
        yield from inner_optimizers(each)


def check_scheduler(scheduler: object, optimizer: Optimizer) -> None:
    """Raise for a schedule of another optimizer, which would change nothing.

    Args:
        scheduler: any; a schedule names its optimizer in an attribute.

    Raises:
        ConfigError: it is of another one.
    """
    found: Any = getattr(scheduler, "optimizer", None)
    while not isinstance(found, Optimizer) and hasattr(found, "optimizer"):  # such as one that wraps it
        found = found.optimizer
    if isinstance(found, Optimizer) and found is not optimizer and found not in inner_optimizers(optimizer):
        raise ConfigError(
            "scheduler-of-another",
            f"the scheduler {type(scheduler).__name__} changes the rates of another {type(found).__name__} than the "
            "engine's optimizer; make it from the optimizer that is given to initialize, or from engine.optimizer",
        )


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
    with torch.device(device), forked_rng(device), unseen_by_op_modes(is_real=True), _eagerly():
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
