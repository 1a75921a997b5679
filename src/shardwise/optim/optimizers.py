"""Make the optimizer that a config names, and step torch's fused ones.

A config names optimizers whose update of an element depends on that element alone, since they see 1-D pieces of
parameters, and Muon, which gets whole matrices (`shardwise.zero.matrix_step`). Of optimizers that a user gives, a trial
tells what they need (`shardwise.runtime.optimizer_probe`).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from shardwise.config.resolve import ConfigError, OptimizerConfig, shown_value
from shardwise.optim.rules import named_rule, rule_of_kind, rules_by_name

# These classes of torch's work on a whole matrix, or need a closure: they have no name in a config.
_NOT_ELEMENT_WISE: Final = frozenset({"lbfgs", "adafactor", "muon", "sparseadam"})

ParamGroups = Sequence[dict[str, Any]]


def optimizer_kind(name: str) -> type[Optimizer]:
    """Return the optimizer class of a name, in upper or lower case.

    Raises:
        ConfigError: no optimizer that is right on pieces has that name.
    """
    rule = named_rule(name)
    if rule is None:
        shown, names = f"optimizer.name={shown_value(name)}", f"choose one of {', '.join(sorted(rules_by_name()))}"
        if name.lower() in _NOT_ELEMENT_WISE:
            raise ConfigError("optimizer-element-wise", f"{shown} is not element-wise; {names}")
        raise ConfigError("unknown-optimizer", f"{shown} is unknown; {names}")
    return rule.kind


def build_optimizer(config: OptimizerConfig, groups: ParamGroups) -> Optimizer:
    """Construct the optimizer that `config.name` names over parameter groups, fused where torch has a fused kernel.

    Raises:
        ConfigError: no optimizer that is right on pieces has that name.
    """
    kind = optimizer_kind(config.name)
    accepted = inspect.signature(kind).parameters
    wanted: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "momentum": config.kept_momentum,
        "weight_decay": config.weight_decay,
        "fused": True,
    }
    return kind(groups, **{key: value for key, value in wanted.items() if key in accepted})


def scale_in_step(optimizer: Optimizer, factor: float) -> bool:
    """Let the next step of a fused optimizer multiply its fp32 gradients by `factor` itself; say whether it will.

    It spares a pass over the gradients. The kernels divide by an attribute `grad_scale`, which is to be deleted after
    the step: the protocol between `torch.amp.GradScaler` and torch's optimizers.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    scale = fused_grad_scale(type(optimizer), factor, {param.dtype for param in params})
    if not is_fused or scale is None:
        return False
    optimizer.grad_scale = torch.tensor(scale, device=params[0].device)  # type: ignore[attr-defined]
    return True


def fused_grad_scale(kind: type[Optimizer], factor: float, dtypes: Collection[torch.dtype]) -> float | None:
    """Return the fp32 number by which a fused step divides to multiply by `factor`; None where it cannot.

    Args:
        factor: turns accumulated sums into the gradient.
    """
    rule = rule_of_kind(kind)
    if rule is None or not rule.divides_by_scale or any(dtype != torch.float32 for dtype in dtypes):
        return None
    if not 1e-30 < abs(factor) < 1e30:
        return None
    return torch.tensor(1.0 / factor, dtype=torch.float32).item()


def lacks_some_momentum(optimizer: Optimizer, stepped: Sequence[Tensor]) -> bool:
    """Say whether torch's fused SGD would meet parameters with and without momentum, which its kernel cannot step.

    Args:
        stepped: what it is about to step.
    """
    if not isinstance(optimizer, SGD) or not any(group.get("fused") for group in optimizer.param_groups):
        return False
    if not any(group["momentum"] for group in optimizer.param_groups):
        return False
    have = [optimizer.state.get(param, {}).get("momentum_buffer") is not None for param in stepped]
    return any(have) and not all(have)


@contextmanager
def stepped_unfused(optimizer: Optimizer) -> Iterator[None]:
    """Let the optimizer step without its fused kernel."""
    fused = [group.get("fused") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["fused"] = False
    try:
        yield
    finally:
        for group, before in zip(optimizer.param_groups, fused, strict=True):
            group["fused"] = before
