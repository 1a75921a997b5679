"""What an optimizer does to a parameter, apart from the optimizer: for states that rest where it does not see them.

A rule knows which states an optimizer keeps, and updates lists of 1-D CPU tensors by torch's own kernels, so that the
result has the same bits as a step of the optimizer itself.

>>> rule = rule_of(torch.optim.SGD([torch.zeros(1)], momentum=0.5))
>>> rule.tensor_states({"momentum": 0.5}), rule.has_counter
({'momentum_buffer': 0.0}, False)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from shardwise.config import ConfigError
from shardwise.lion import Lion, lion

Options = Mapping[str, Any]
States = Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class Parts:
    """What one call of a kernel updates: tensors that share their options and the number of steps taken.

    Attributes:
        params: 1-D, fp32 or fp64.
        grads: of the same lengths and dtypes; they may be overwritten.
        states: by name, likewise; before the first step at their first values.
        step: how many steps they have taken before.
        is_first: no step has been taken, so that SGD's momentum starts as the gradient itself.
    """

    params: list[Tensor]
    grads: list[Tensor]
    states: States
    step: float
    is_first: bool

    def all(self, name: str) -> list[Tensor]:
        """One state of all tensors."""
        return [states[name] for states in self.states]

    def counters(self) -> list[Tensor]:
        """A counter for each tensor, which torch's functions count up before they use it."""
        return [torch.tensor(float(self.step)) for _ in self.params]


@dataclass(frozen=True)
class StepRule:
    """How an optimizer steps; the functions take a parameter group's options.

    Attributes:
        name: of the optimizer's class.
        tensor_states: the names of the states that are as long as the parameter, with their values before any step.
        has_counter: whether a 0-d fp32 `step` is kept for each parameter.
        kernel: updates in place.
    """

    name: str
    tensor_states: Callable[[Options], Mapping[str, float]]
    has_counter: bool
    kernel: Callable[[Options, Parts], None]

    def update(
        self,
        options: Options,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: States,
        step: float,
        is_first: bool,
    ) -> None:
        """Take one step in place.

        Args:
            options: of the tensors' parameter group.
            params: 1-D, fp32 or fp64, on the CPU.
            grads: of the same lengths and dtypes; they may be overwritten.
            states: by name, for each of `params`; before the first step at the values of `tensor_states`.
            step: how many steps they have taken before.
            is_first: whether they have no state yet.
        """
        self.kernel(_on_host(options), Parts(list(params), list(grads), states, step, is_first))


def rule_of(optimizer: Optimizer) -> StepRule:
    """The rule by which an optimizer steps.

    Raises:
        ConfigError: it is of another class, a subclass included, since that may step otherwise.
    """
    kind = type(optimizer)
    if kind not in _RULES:
        raise ConfigError(
            "tiers.optimizer off the device steps Adam, AdamW, SGD, Adagrad and Lion; "
            f"got {kind.__name__}; use one of these, or tiers.optimizer=device"
        )
    return _RULES[kind]


def needed_states(optimizer: Optimizer, options: Options) -> frozenset[str] | None:
    """What it reads of a parameter that it has stepped under these options: `step`, a number, and tensors as long as
    that. None where `rule_of` does not know it.
    """
    rule = _RULES.get(type(optimizer))
    return None if rule is None else frozenset([*rule.tensor_states(options), *(["step"] if rule.has_counter else [])])


def _on_host(options: Options) -> dict[str, Any]:
    """The options with their tensors, such as a learning rate's, where the step runs."""

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(moved(each) for each in value)
        return value.cpu() if isinstance(value, Tensor) else value

    return {name: moved(value) for name, value in options.items() if name != "params"}


def _implementation(options: Options) -> dict[str, Any]:
    """Which of torch's implementations, all with the learning rate that it takes.

    The fused one unless the user chose otherwise: `None` leaves the choice to who steps.
    """
    fused, foreach = options.get("fused"), options.get("foreach")
    if fused is None:
        fused = foreach is None and not options.get("differentiable")
    lr = options["lr"]
    return {"fused": fused, "foreach": bool(foreach) and not fused, "lr": float(lr) if fused or foreach else lr}


def _step_adam(options: Options, parts: Parts) -> None:
    beta1, beta2 = options["betas"]
    adam(
        parts.params,
        parts.grads,
        parts.all("exp_avg"),
        parts.all("exp_avg_sq"),
        parts.all("max_exp_avg_sq") if options["amsgrad"] else [],
        parts.counters(),
        **_implementation(options),
        decoupled_weight_decay=options["decoupled_weight_decay"],
        amsgrad=options["amsgrad"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=options["maximize"],
    )


def _step_sgd(options: Options, parts: Parts) -> None:
    has_momentum = options["momentum"] != 0
    kept = parts.all("momentum_buffer") if has_momentum and not parts.is_first else []
    buffers: list[Tensor | None] = [*kept] if kept else [None] * len(parts.params)
    names = ("weight_decay", "momentum", "dampening", "nesterov", "maximize")
    sgd(parts.params, parts.grads, buffers, **_implementation(options), **{name: options[name] for name in names})
    if has_momentum and parts.is_first:
        for kept_buffer, first in zip(parts.all("momentum_buffer"), buffers, strict=True):
            if first is not None:  # for typing: torch fills the list
                kept_buffer.copy_(first)


def _step_adagrad(options: Options, parts: Parts) -> None:
    names = ("weight_decay", "lr_decay", "eps", "maximize")
    chosen = {name: options[name] for name in names}
    adagrad(parts.params, parts.grads, parts.all("sum"), parts.counters(), **_implementation(options), **chosen)


def _step_lion(options: Options, parts: Parts) -> None:
    names = ("lr", "betas", "weight_decay", "maximize")
    lion(parts.params, parts.grads, parts.all("exp_avg"), **{name: options[name] for name in names})


def _adam_states(options: Options) -> dict[str, float]:
    return dict.fromkeys(("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options["amsgrad"] else [])), 0.0)


_RULES: Mapping[type[Optimizer], StepRule] = MappingProxyType(
    {
        Adam: StepRule("Adam", _adam_states, True, _step_adam),
        AdamW: StepRule("AdamW", _adam_states, True, _step_adam),
        SGD: StepRule("SGD", lambda options: {"momentum_buffer": 0.0} if options["momentum"] else {}, False, _step_sgd),
        Adagrad: StepRule(
            "Adagrad", lambda options: {"sum": options["initial_accumulator_value"]}, True, _step_adagrad
        ),
        Lion: StepRule("Lion", lambda options: {"exp_avg": 0.0}, False, _step_lion),
    }
)
