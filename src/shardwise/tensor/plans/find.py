"""Which plan a model gets: the user's, its own, ours for its family, or Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from shardwise.config import ConfigError
from shardwise.layout.tensor_plan import TensorPlan
from shardwise.tensor.kinds import is_linear, is_lookup
from shardwise.tensor.plans.check import check_plan
from shardwise.tensor.plans.families import family_plan
from shardwise.tensor.plans.huggingface import huggingface_plan
from shardwise.tensor.plans.table import Table, table_plan
from shardwise.tensor.plans.words import NO_TENSOR


def find_plan(model: nn.Module, degree: int, given: Table | TensorPlan | None, sequence_parallel: bool) -> TensorPlan:
    """The plan by which tensor parallelism splits a model.

    Args:
        model: of any device; names and shapes are read only.
        degree: ranks of the tensor-parallel group.
        given: a plan or a table, which count alone; without one the model's own `tensor_plan` counts (a plan, a table,
            or a method from `degree` to either), then ours for its family, then the one by Hugging Face. A model that
            contains such models is split where they are.
        sequence_parallel: whether the sequence is to be split between the plan's blocks.

    Raises:
        ConfigError: there is no plan, it does not fit the model, heads or features do not divide by `degree`, or
            sequence parallelism is asked of a plan without stacks.
    """
    plan = _plan_of(model, degree, given) or _plan_of_parts(model, degree)
    if plan is None:
        raise _no_plan(model, degree)
    check_plan(model, plan, degree, sequence_parallel)
    return plan


def _no_plan(model: nn.Module, degree: int) -> ConfigError:
    name = type(model).__name__
    if not any(is_linear(module) or is_lookup(module) for module in model.modules()):
        return ConfigError(f"{name} has no linear layers, nor embeddings, that mesh.tp={degree} can split; {NO_TENSOR}")
    return ConfigError(
        f"there is no tensor-parallel plan for {name}; let shardwise.propose_plan(model, batch, tp={degree}) make one, "
        "or give plan={module pattern: style}, such as {'blocks.*.up': 'column', 'blocks.*.down': 'row'}; where that "
        f"is refused too, {NO_TENSOR}"
    )


def _plan_of(model: nn.Module, degree: int, given: Table | TensorPlan | None = None) -> TensorPlan | None:
    source = getattr(model, "tensor_plan", None) if given is None else given
    if callable(source):
        source = source(degree)
    if source is not None and not isinstance(source, TensorPlan | Mapping):
        raise ConfigError(
            f"plan={source!r} is a {type(source).__name__}; give a table {{module pattern: style}}, or what "
            "shardwise.propose_plan returned"
        )
    if isinstance(source, Mapping):
        return table_plan(model, source, degree)
    return source or family_plan(model, degree) or huggingface_plan(model, degree)


def _plan_of_parts(model: nn.Module, degree: int) -> TensorPlan | None:
    """The plans of the outermost modules that have one, in one."""
    plan: TensorPlan | None = None
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        part = _plan_of(module, degree) if name and not name.startswith(inside or ("\0",)) else None
        if part is not None:
            inside += (f"{name}.",)
            plan = _join(plan or TensorPlan(), _moved(part, f"{name}."))
    return plan


def _join(one: TensorPlan, other: TensorPlan) -> TensorPlan:
    return TensorPlan(*(getattr(one, field) + getattr(other, field) for field in TensorPlan.__dataclass_fields__))


def _moved(plan: TensorPlan, prefix: str) -> TensorPlan:
    """The plan of a submodule, by the names that its modules have in the whole."""
    return TensorPlan(
        layers=tuple(replace(each, module=prefix + each.module) for each in plan.layers),
        regions=tuple(replace(each, module=prefix + each.module) for each in plan.regions),
        stacks=tuple(
            replace(
                each,
                first=prefix + each.first,
                last=prefix + each.last,
                modules=tuple(prefix + name for name in each.modules),
            )
            for each in plan.stacks
        ),
        partial=tuple(prefix + name for name in plan.partial),
        attributes=tuple((prefix + name, attribute, value) for name, attribute, value in plan.attributes),
        dropouts=tuple(replace(each, module=prefix + each.module) for each in plan.dropouts),
        notes=plan.notes,
    )
