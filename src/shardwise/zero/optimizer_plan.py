"""Plans which optimizer steps which parameters under which options: the config's, the user's, or a function's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.config.resolve import ConfigError, OptimizerConfig
from shardwise.layout.layout import MATRIX_STATES, Layout
from shardwise.runtime.muon import IS_MATRIX
from shardwise.runtime.optimizers import build_optimizer

OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]


@dataclass(frozen=True)
class NamedGroup:
    """Holds one parameter group of the optimizer: the parameters' names, and their options (lr, weight_decay, ...)."""

    names: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerPlan:
    """Says how an engine makes its optimizer.

    Attributes:
        groups_of: returns the parameter groups for what is trainable in a layout; always as many.
        factory: makes the optimizer from parameter groups, or adopts a given one.
    """

    groups_of: Callable[[Layout], list[NamedGroup]]
    factory: OptimizerFactory


def plan_optimizer(
    given: Optimizer | OptimizerFactory | None, config: OptimizerConfig, model: nn.Module
) -> OptimizerPlan:
    """Choose between what the user gave and what the config names.

    Args:
        given: an optimizer over the model's parameters, without state since state of whole parameters does not fit
            pieces; a function from parameter groups to an optimizer; or None.
        config: of the optimizer.
        model: as given to `initialize`.

    Raises:
        ConfigError: the optimizer has stepped already, or holds a tensor that is no parameter of the model.
    """
    if isinstance(given, Optimizer):
        return _adopt(given, model)
    if given is not None:
        return OptimizerPlan(lambda layout: [NamedGroup(tuple(_trainable_names(layout)), {})], given)

    def by_decay(layout: Layout) -> list[NamedGroup]:
        places = [place for group in layout.groups if group.trainable and not group.is_matrix for place in group.params]
        plain = {place.name for place in places if len(place.shape) < 2 and not config.decay_1d}
        decayed = tuple(place.name for place in places if place.name not in plain)
        others = tuple(place.name for place in places if place.name in plain)
        named = [
            NamedGroup(decayed, {"weight_decay": config.weight_decay}),
            NamedGroup(others, {"weight_decay": 0.0}),
        ]
        if config.name.lower() in MATRIX_STATES:
            matrices = tuple(place.name for group in layout.groups if group.is_matrix for place in group.params)
            named.append(NamedGroup(matrices, {"weight_decay": config.weight_decay, IS_MATRIX: True}))
        return named

    if config.name == "none":  # nothing is trained: torch's optimizer keeps the groups alone
        return OptimizerPlan(by_decay, lambda param_groups: torch.optim.SGD(param_groups, lr=config.lr))
    return OptimizerPlan(by_decay, lambda param_groups: build_optimizer(config, param_groups))


def _adopt(optimizer: Optimizer, model: nn.Module) -> OptimizerPlan:
    """Take over an optimizer built on the model's own parameters: the same object, its groups over pieces."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if any(state.get("step", 1) != 0 for state in optimizer.state.values()):
        raise ConfigError(
            "optimizer-has-state", "the optimizer has state already; pass it to initialize before its first step"
        )
    named_groups = []
    for group in optimizer.param_groups:
        unknown = [tuple(parameter.shape) for parameter in group["params"] if id(parameter) not in names]
        if unknown:
            raise ConfigError(
                "optimizer-foreign-tensor",
                f"the optimizer holds a tensor of shape {unknown[0]} that is no parameter of the model; leave it out",
            )
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        named_groups.append(NamedGroup(tuple(names[id(parameter)] for parameter in group["params"]), options))

    known = {name for group in named_groups for name in group.names}
    left_out = {name for name, parameter in model.named_parameters() if parameter.requires_grad} - known

    def groups_of(layout: Layout) -> list[NamedGroup]:
        unknown = sorted(set(_trainable_names(layout)) - known - left_out)
        if unknown:
            raise ConfigError(
                "parameter-without-optimizer",
                f"parameter {unknown[0]} became trainable but the given optimizer was built without it; "
                "give frozen parameters to the optimizer too where they are to be trained later",
            )
        return named_groups

    def replace_parameters(param_groups: list[dict[str, Any]]) -> Optimizer:
        for group, replacement in zip(optimizer.param_groups, param_groups, strict=True):
            group["params"] = replacement["params"]
            group.pop("param_names", None)
        if optimizer.state:  # some, such as Adagrad, make it in their constructor
            optimizer.state = fresh_states(optimizer, param_groups)
        return optimizer

    return OptimizerPlan(groups_of, replace_parameters)


def fresh_states(optimizer: Optimizer, param_groups: list[dict[str, Any]]) -> Any:
    """Return the `state` that an optimizer of the same class and defaults has before its first step."""
    accepted = inspect.signature(type(optimizer)).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    return type(optimizer)(param_groups, **options).state


def _trainable_names(layout: Layout) -> list[str]:
    return [place.name for group in layout.groups if group.trainable for place in group.params]
