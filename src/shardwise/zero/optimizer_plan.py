"""Plans which optimizer steps which parameters under which options: the config's, the user's, or a function's."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.config.arguments import described
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import OptimizerConfig
from shardwise.layout.layout import Layout
from shardwise.optim.muon import MuonWithAdamW
from shardwise.optim.rules import IS_MATRIX, build_optimizer, matrix_state_names, optimizer_kind, rule_of_kind
from shardwise.runtime.optimizer_probe import StepScope, inner_optimizers, other_states, step_scope
from shardwise.runtime.precision import torch_dtype

OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]


@dataclass(frozen=True)
class NamedGroup:
    """Holds one parameter group of the optimizer: the parameters' names, and their options (lr, weight_decay, ...)."""

    names: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass
class OptimizerPlan:
    """Says how an engine makes its optimizer.

    Attributes:
        own_groups: returns the parameter groups that the optimizer was made with, for what is trainable in a layout;
            always as many.
        factory: makes the optimizer from parameter groups, or adopts a given one.
        name_of: the names of the model's parameters, by identity.
        scope: what a step of an element depends on.
        first_states: what the optimizer has of each parameter before its first step, by name; empty for nothing.
    """

    own_groups: Callable[[Layout, Collection[str]], list[NamedGroup]]
    factory: OptimizerFactory
    name_of: Mapping[int, str]
    kind: type[Optimizer]
    scope: StepScope = StepScope.ELEMENT
    first_states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    added: list[NamedGroup] = field(default_factory=list)

    @property
    def may_step_whole(self) -> bool:
        """Say whether parameters may be stepped by owners: of an optimizer of matrices, or one that no tier knows."""
        is_known = self.scope is StepScope.ELEMENT and rule_of_kind(self.kind) is not None
        return not is_known or self.kind is MuonWithAdamW

    def groups_of(self, layout: Layout) -> list[NamedGroup]:
        """Return the parameter groups for what is trainable in a layout; as many, unless a group was added."""
        taken = {name for group in self.added for name in group.names}
        own = self.own_groups(layout, taken)
        kept = [NamedGroup(tuple(name for name in group.names if name not in taken), group.options) for group in own]
        return [*kept, *self.added]

    def add(self, group: Mapping[str, Any], held: Collection[str]) -> NamedGroup:
        """Note a group that a user adds, in terms of the model's parameters.

        Args:
            held: the names of the parameters that are in groups already.

        Raises:
            ConfigError: it has a tensor that is no parameter of the model, or that a group has already.
        """
        given = group["params"]
        params = [given] if isinstance(given, Tensor) else list(given)
        params = [param if isinstance(param, Tensor) else param[1] for param in params]  # named parameters are pairs
        names = _names_of(params, self.name_of)
        if twice := next((name for name in names if name in held), None):
            raise ConfigError(
                "optimizer-parameter-twice",
                f"{twice} is in a group of the optimizer already; change that group's options, or add others",
            )
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        self.added.append(NamedGroup(tuple(names), options))
        return self.added[-1]


@dataclass(frozen=True)
class _Fill:
    """Stands for a state as long as its parameter, of one value."""

    value: float
    dtype: torch.dtype


def plan_optimizer(
    given: Optimizer | OptimizerFactory | None,
    config: OptimizerConfig,
    model: nn.Module,
    layout: Layout,
    device: torch.device,
) -> OptimizerPlan:
    """Choose between what the user gave and what the config names.

    Args:
        given: an optimizer over the model's parameters, without state since state of whole parameters does not fit
            pieces; a function from parameter groups to an optimizer; or None.

    Raises:
        ConfigError: the optimizer has stepped already, or holds a tensor that is no parameter of the model.
    """
    dtype = torch_dtype(layout.precision.master)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    if isinstance(given, Optimizer):
        return _adopt(given, name_of, layout, dtype, device)
    if given is not None:

        def in_one(layout: Layout, _: Collection[str]) -> list[NamedGroup]:
            return [NamedGroup(tuple(_trainable_names(layout)), {})]

        try:
            small = _made_by(given, _small_groups(layout, dtype))
        except Exception as error:
            return OptimizerPlan(in_one, partial(_raise, error), name_of, Optimizer)
        scope = step_scope(small, dtype, device)
        return OptimizerPlan(in_one, partial(_made_by, given), name_of, type(small), scope)

    def by_decay(layout: Layout, _: Collection[str]) -> list[NamedGroup]:
        places = [place for group in layout.groups if group.trainable and not group.is_matrix for place in group.params]
        plain = {place.name for place in places if len(place.shape) < 2 and not config.decay_1d}
        decayed = tuple(place.name for place in places if place.name not in plain)
        others = tuple(place.name for place in places if place.name in plain)
        named = [
            NamedGroup(decayed, {"weight_decay": config.weight_decay}),
            NamedGroup(others, {"weight_decay": 0.0}),
        ]
        if matrix_state_names(config.name):
            matrices = tuple(place.name for group in layout.groups if group.is_matrix for place in group.params)
            named.append(NamedGroup(matrices, {"weight_decay": config.weight_decay, IS_MATRIX: True}))
        return named

    if config.name == "none":  # nothing is trained: torch's optimizer keeps the groups alone
        return OptimizerPlan(by_decay, lambda groups: torch.optim.SGD(groups, lr=config.lr), name_of, torch.optim.SGD)
    return OptimizerPlan(by_decay, lambda groups: build_optimizer(config, groups), name_of, optimizer_kind(config.name))


def _made_by(factory: OptimizerFactory, groups: list[dict[str, Any]]) -> Optimizer:
    """Return the optimizer that the user's function makes over parameter groups; what it raises stays as it is.

    Raises:
        ConfigError: it returns none.
    """
    given: object = factory
    if isinstance(given, type) and not issubclass(given, Optimizer):
        raise ConfigError(
            "no-optimizer-made",
            f"{described('what is given as optimizer', given)}, which is no torch.optim.Optimizer; give a class or "
            "function that makes one over parameter groups, or set optimizer.name",
        )
    try:
        made: Any = factory(groups)
    except Exception as error:
        sizes = ", ".join(str(list(param.shape)) for param in groups[0]["params"][:4])
        error.add_note(
            "initialize has called the function given as optimizer with a list of one parameter group, whose "
            f"parameters are {sizes}; first with small ones, to see what it makes"
        )
        raise
    if not isinstance(made, Optimizer):
        raise ConfigError(
            "no-optimizer-made",
            f"{described('what the function given as optimizer returned', made)}; let it return an optimizer over the "
            "parameter groups that it is given",
        )
    return made


def _raise(error: Exception, _: Any) -> Optimizer:
    """Raise where the optimizer is made: one rank may fail alone, and there the ranks agree on it."""
    raise error


def _small_groups(layout: Layout, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return the parameter group of a small model with parameters of as many dims as the model's."""
    dims = [len(place.global_shape) for group in layout.model_groups if group.trainable for place in group.params]
    params = [nn.Parameter(torch.zeros((2,) * num, dtype=dtype)) for num in sorted(dims)[:1] + sorted({*dims})]
    return [{"params": params or [nn.Parameter(torch.zeros(2, dtype=dtype))]}]


def _names_of(params: Sequence[Tensor], name_of: Mapping[int, str]) -> list[str]:
    unknown = [tuple(parameter.shape) for parameter in params if id(parameter) not in name_of]
    if unknown:
        raise ConfigError(
            "optimizer-foreign-tensor",
            f"the optimizer holds a tensor of shape {unknown[0]} that is no parameter of the model; leave it out",
        )
    return [name_of[id(parameter)] for parameter in params]


def _adopt(
    optimizer: Optimizer, name_of: Mapping[int, str], layout: Layout, dtype: torch.dtype, device: torch.device
) -> OptimizerPlan:
    """Take over an optimizer built on the model's own parameters: the same object, its groups over pieces."""
    named_groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        named_groups.append(NamedGroup(tuple(_names_of(group["params"], name_of)), options))
    states = {name_of[id(param)]: (param, state) for param, state in optimizer.state.items() if id(param) in name_of}
    has_values = not any(
        isinstance(each, Tensor) and each.is_meta for _, own in states.values() for each in own.values()
    )
    first_states = {
        name: {key: _first_value(key, value, param) for key, value in own.items()}
        for name, (param, own) in (states.items() if has_values else ())
    }
    known = {name for group in named_groups for name in group.names}
    left_out = set(layout.trained_names) - known

    def groups_of(layout: Layout, added: Collection[str]) -> list[NamedGroup]:
        unknown = sorted(set(_trainable_names(layout)) - known - left_out - set(added))
        if unknown:
            raise ConfigError(
                "parameter-without-optimizer",
                f"parameter {unknown[0]} became trainable but the given optimizer was built without it; "
                "give frozen parameters to the optimizer too where they are to be trained later, or call its "
                "add_param_group first",
            )
        return named_groups

    def replace_parameters(param_groups: list[dict[str, Any]]) -> Optimizer:
        for group, replacement in zip(optimizer.param_groups, param_groups, strict=True):
            group["params"] = replacement["params"]
            group.pop("param_names", None)
        # Some, such as Adagrad, make states in their constructor; those of a model on meta have no values.
        others = other_states(optimizer)
        optimizer.state = defaultdict(dict) if has_values else fresh_states(optimizer, param_groups)
        optimizer.state.update(others)
        return optimizer

    return OptimizerPlan(
        groups_of, replace_parameters, name_of, type(optimizer), step_scope(optimizer, dtype, device), first_states
    )


def _first_value(key: str, value: Any, param: Tensor) -> Any:
    """Return what a state is before the first step: a number, or one value all along, as Adagrad's.

    Raises:
        ConfigError: it is of an optimizer that has stepped.
    """
    if isinstance(value, Tensor) and value.dim() and value.numel() == param.numel() > 0:
        first = value.reshape(-1)[0].item()
        if bool((value == first).all()):
            return _Fill(first, value.dtype)
    elif key != "step" or float(value) == 0:
        return value
    raise ConfigError(
        "optimizer-has-state", "the optimizer has state already; pass it to initialize before its first step"
    )


def first_states(plan: OptimizerPlan, name: str, view: nn.Parameter) -> dict[str, Any]:
    """Return what the plan's optimizer has of a parameter, or a piece of it, before its first step."""
    return {
        key: torch.full_like(view, value.value, dtype=value.dtype, requires_grad=False)
        if isinstance(value, _Fill)
        else copy.deepcopy(value)
        for key, value in plan.first_states.get(name, {}).items()
    }


def fresh_states(optimizer: Optimizer, param_groups: list[dict[str, Any]]) -> Any:
    """Return the `state` that an optimizer of the same class and defaults has before its first step."""
    accepted = inspect.signature(type(optimizer)).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    return type(optimizer)(param_groups, **options).state


def make_first_states(
    plan: OptimizerPlan, optimizer: Optimizer, has_states_at_once: bool, views: Mapping[str, nn.Parameter]
) -> None:
    """Give parameters the states that the optimizer has before its first step, if it has any.

    Args:
        views: what stands for the parameters, by name.
    """
    if plan.first_states:
        for name, view in views.items():
            if states := first_states(plan, name, view):
                optimizer.state[view] = states
    elif has_states_at_once and (missing := {id(view) for view in views.values() if view not in optimizer.state}):
        groups = [
            {**group, "params": own}
            for group in optimizer.param_groups
            if (own := [view for view in group["params"] if id(view) in missing])
        ]
        optimizer.state.update(fresh_states(optimizer, groups) if groups else {})


def inner_groups(
    optimizer: Optimizer, plan: OptimizerPlan, views: Mapping[str, nn.Parameter]
) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the groups of optimizers that an optimizer wraps, where they are not its own, with their names.

    Args:
        optimizer: over the model's parameters, or over `views`.
        views: what stands for the parameters, by name.
    """
    name_of = {**plan.name_of, **{id(view): name for name, view in views.items()}}
    own = {id(group) for group in optimizer.param_groups}
    return [
        (group, [name_of[id(param)] for param in group["params"] if id(param) in name_of])
        for inner in inner_optimizers(optimizer)
        for group in inner.param_groups
        if id(group) not in own
    ]


def follow_calls(
    optimizer: Optimizer,
    add_group: Callable[[Mapping[str, Any]], None],
    change_weights: Callable[[Callable[[], object]], None],
    clear_gradients: Callable[[], None],
) -> tuple[str, ...]:
    """Let the engine follow what an optimizer's methods do to its groups and parameters; return the methods' names.

    Args:
        optimizer: whose methods are replaced, in this object. It does not keep the others' objects alive.
        add_group: takes a parameter group over the model's parameters.
        change_weights: calls a function that writes the optimizer's parameters.
    """
    kind, this = type(optimizer), weakref.ref(optimizer)
    adding, changing, clearing = WeakMethod(add_group), WeakMethod(change_weights), WeakMethod(clear_gradients)

    def add_param_group(param_group: dict[str, Any]) -> None:
        if (add := adding()) is not None:
            add(param_group)

    def zero_grad(*args: Any, **options: Any) -> None:
        if (own := this()) is not None:
            kind.zero_grad(own, *args, **options)
        if (clear := clearing()) is not None:
            clear()

    def follow(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def changed(*args: Any, **options: Any) -> None:
            change, own = changing(), this()
            if change is not None and own is not None:
                change(lambda: method(own, *args, **options))

        return changed

    methods: dict[str, Callable[..., Any]] = {"add_param_group": add_param_group, "zero_grad": zero_grad}
    # Some, such as schedule-free ones, train with other weights than those to evaluate.
    methods |= {name: follow(getattr(kind, name)) for name in ("eval", "train") if callable(getattr(kind, name, None))}
    for name, method in methods.items():
        setattr(optimizer, name, method)
    return tuple(methods)


def _trainable_names(layout: Layout) -> list[str]:
    return [place.name for group in layout.groups if group.trainable for place in group.params]
