"""Scan a model once: read from its modules all that a layout needs to know of it.

>>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
>>> model[1].weight = model[0].weight
>>> facts = scan_model(model, Config())
>>> facts.units, [(entry.name, entry.aliases, entry.unit) for entry in facts.params]
(('0', '1'), [('0.weight', ('1.weight',), 'root')])
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from shardwise.config.arguments import checked
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, Dtype, PrecisionConfig, ResolvedConfig
from shardwise.construction.experts import dims_in_experts
from shardwise.construction.opaque import bytes_shape, check_opaque, is_opaque
from shardwise.construction.stage_order import Modules, find_stage_units
from shardwise.hf.losses import shifts_labels
from shardwise.layout.facts import FusedDim, ModelFacts, ParamEntry, StageUnit
from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import ROOT
from shardwise.layout.pipeline_layout import PipelineLayout
from shardwise.layout.resolve import layout_of
from shardwise.layout.tensor_plan import TensorLayout
from shardwise.runtime.precision import TORCH_DTYPES, buffer_dtype

AnyConfig = TypeVar("AnyConfig", bound=Config)
_LOG: Final = logging.getLogger("shardwise")
_NARROW: Final[tuple[Dtype, ...]] = ("bf16", "fp16")
_BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NOT_LINEAR: Final = (nn.Embedding, nn.EmbeddingBag, *_CONVOLUTIONS)


def scan_model(model: nn.Module, config: Config) -> ModelFacts:
    """Read the facts of a model.

    Args:
        model: any module; only names, shapes, dtypes and `requires_grad` are read, so meta tensors will do.
        config: says by patterns which modules are blocks (`zero.blocks`) and, with `mesh.pp`, units of a pipeline.

    Raises:
        ConfigError: a pattern fits no module, the pipeline cannot be cut, or a parameter cannot be sharded.
    """
    check_plain(model)
    modules: Modules = dict(model.named_modules(remove_duplicate=False))
    units = find_units(modules, config.zero.blocks)
    params = _read_parameters(modules, units, config.precision)
    pipeline, stage_units = config.pipeline, tuple[StageUnit, ...]()
    if config.mesh.pp > 1:
        patterns = pipeline.units
        chain = None if patterns is None else find_units(modules, patterns, key="pipeline.units")
        replicated = find_units(modules, pipeline.replicate or (), key="pipeline.replicate")
        stage_units = find_stage_units(modules, params, chain, replicated)
    return ModelFacts(type(model).__name__, units, params, stage_units, shifts_labels(model))


@checked
def build_layout(
    model: nn.Module,
    config: ResolvedConfig,
    tensor: TensorLayout | None = None,
    pipeline: PipelineLayout | None = None,
    trained: Collection[str] = (),
    fused: Mapping[str, FusedDim] | None = None,
) -> Layout:
    """Compute the layout of `model` under a resolved config.

    Args:
        tensor: how parameters are split over the tensor-parallel group; None for one rank.
        pipeline: the stages; None without a pipeline. The layout is that of its rank.
        trained: parameters that keep gradients and states whether or not they are frozen now.
        fused: the parameters that a matrix optimizer steps as several matrices, by name.

    Raises:
        ConfigError: the model has no parameters, `zero.blocks` does not fit it, or the optimizer has nothing to step.
    """
    config = ResolvedConfig.of(config)
    return layout_of(scan_model(model, config).with_fused(fused or {}), config, tensor, pipeline, trained)


def check_plain(model: nn.Module) -> None:
    """Refuse a model in a form in which its parameters cannot be sharded.

    Raises:
        ConfigError: it is wrapped, scripted, or has parameters without a shape.
    """
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "wrapped-model", f"the model is wrapped in {type(model).__name__}, which shards nothing; give model.module"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError("scripted-model", "the model is compiled by torch.jit; give the module that it was made from")
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise ConfigError("lazy-parameters", "the model has parameters without a shape; run it once on a batch before")


def with_own_dtype(facts: ModelFacts, config: AnyConfig, *, rank: int = 0) -> AnyConfig:
    """Return the config with the dtype of a model's parameters as `precision.param`, where it names none.

    Opaque ones, and those that stay in fp32 beside narrow ones, do not count. A model in several dtypes trains in fp32,
    and rank 0's log says so.
    """
    if config.precision.param is not None:
        return config
    params = [param for param in facts.params if not param.is_opaque]
    beside = {name: {param.dtype for param in params if name not in param.wide_in} for name in TORCH_DTYPES}
    own = [name for name, dtypes in beside.items() if dtypes == {_named(TORCH_DTYPES[name])}]
    there = sorted({param.dtype for param in params})
    if rank == 0 and not own and len(there) > 1:
        kind, text = facts.kind, " and ".join(there)
        _LOG.warning("parameters of %s are in %s; all train in float32: set precision.param to choose", kind, text)
    return config.model_copy(update={"precision": config.precision.model_copy(update={"param": (*own, "fp32")[0]})})


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def find_units(modules: Modules, patterns: Sequence[str] | None, key: str = "zero.blocks") -> tuple[str, ...]:
    """Find the names of the modules that form units, in module order.

    Args:
        patterns: class names or name patterns (`blocks.*`) of the blocks; None takes the children with parameters of
            the outermost `ModuleList`s and `Sequential`s.
        key: config key of the patterns, for error messages.

    Raises:
        ConfigError: a pattern matches no module, or a block is inside another.
    """
    if patterns is None:
        return tuple(_children_of_containers(modules[""], prefix=""))
    first_names = {id(module): name for name, module in [*modules.items()][::-1]}
    named = [(name, modules[name]) for name in modules if first_names[id(modules[name])] == name][1:]
    chosen: set[str] = set()
    for pattern in patterns:
        # Only the outermost modules that a pattern matches: `blocks.*` are the blocks, not the modules in them.
        outermost: list[str] = []
        for name, module in named:
            matches = type(module).__name__ == pattern or fnmatch.fnmatchcase(name, pattern)
            if matches and not (outermost and name.startswith(f"{outermost[-1]}.")):
                outermost.append(name)
        if not outermost:
            kinds = sorted({type(module).__name__ for module in modules.values()})
            raise ConfigError(
                "no-module-matches", f"{key}={pattern!r} matches no module; classes in this model: {', '.join(kinds)}"
            )
        chosen.update(outermost)
    for name in sorted(chosen):
        if nested := next((each for each in chosen if each.startswith(f"{name}.")), None):
            raise ConfigError(
                "block-in-block", f"{key}: block {nested} is inside block {name}; name only one of the two"
            )
    return tuple(name for name, _ in named if name in chosen)


def _children_of_containers(module: nn.Module, prefix: str) -> Iterator[str]:
    is_container = isinstance(module, nn.ModuleList | nn.Sequential)
    for name, child in module.named_children():
        if next(child.parameters(), None) is None:
            continue
        if is_container and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield prefix + name
        else:
            yield from _children_of_containers(child, f"{prefix}{name}.")


def _read_parameters(modules: Modules, units: Sequence[str], precision: PrecisionConfig) -> tuple[ParamEntry, ...]:
    """Read every parameter once, in module order."""
    parameters = {
        f"{prefix}.{own}".removeprefix("."): parameter
        for prefix, module in modules.items()
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    }
    names_of: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names_of.setdefault(id(parameter), []).append(name)
    firsts = {names[0]: parameters[names[0]] for names in names_of.values()}
    for name, parameter in firsts.items():
        _check_parameter(name, parameter)
    _refuse_shared_storage(firsts)
    wide = {dtype: _wide_names(modules, parameters, precision, dtype) for dtype in _NARROW}
    unit_at, block_at = _units_at(modules, units)
    in_experts = dims_in_experts(modules)
    entries = []
    for names in names_of.values():
        parameter, is_bytes = parameters[names[0]], is_opaque(parameters[names[0]])
        owners = {name: name.rpartition(".")[0] for name in names}
        holders = {unit_at[at] for at in owners.values()}
        unit = holders.pop() if len(holders) == 1 else ROOT
        is_linear = all(_is_linear_weight(name, parameter, modules[at]) for name, at in owners.items())
        layers = tuple(name for name, at in owners.items() if isinstance(modules[at], nn.Linear | nn.Embedding))
        entries.append(
            ParamEntry(
                name=names[0],
                aliases=tuple(names[1:]),
                unit=unit,
                shape=bytes_shape(parameter) if is_bytes else tuple(parameter.shape),
                requires_grad=parameter.requires_grad,
                is_opaque=is_bytes,
                is_matrix=unit != ROOT and block_at.issuperset(owners.values()) and is_linear,
                fused=_joint(names[0], modules[owners[names[0]]]),
                wide_in=() if is_bytes else tuple(narrow for narrow in _NARROW if not wide[narrow].isdisjoint(names)),
                dtype=_named(parameter.dtype),
                layer_names=layers,
                experts=in_experts.get(names[0]),
                is_in_experts=names[0] in in_experts,
            )
        )
    return tuple(entries)


def _units_at(modules: Modules, units: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Return for each name of a module its unit, or the root, and the names that begin with that of a unit.

    A module's unit is found by identity, as a block may be in its container twice.
    """
    unit_of_module = {id(modules[unit]): unit for unit in units}
    unit_at, inside, blocks = {"": ROOT}, set[str](), frozenset(units)
    for name, module in modules.items():
        above = name.rpartition(".")[0]
        unit_at[name] = unit_of_module.get(id(module), ROOT) if unit_at[above] == ROOT else unit_at[above]
        if name in blocks or above in inside:
            inside.add(name)
    return unit_at, inside


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if parameter.layout is not torch.strided:
        raise ConfigError(
            "sparse-parameter", f"parameter {name} is {parameter.layout} but shards are dense; use its to_dense()"
        )
    if parameter.is_complex():
        raise ConfigError(
            "parameter-dtype", f"parameter {name} is {parameter.dtype} but shards are real; keep its torch.view_as_real"
        )
    check_opaque(name, parameter)


def _refuse_shared_storage(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse two parameters over one storage, which would be trained apart; subclasses may have no address."""
    name_at: dict[tuple[str, int], str] = {}
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter or parameter.is_meta or parameter.numel() == 0:
            continue
        place = (str(parameter.device), parameter.data_ptr())
        if place in name_at:
            raise ConfigError(
                "shared-storage",
                f"parameters {name_at[place]} and {name} are two over one memory, so they would be trained apart; tie "
                "them by assigning the one to the other's module",
            )
        name_at[place] = name


def _is_linear_weight(name: str, parameter: nn.Parameter, module: nn.Module) -> bool:
    """Say whether a module multiplies by a parameter, by its name there.

    These are 2-D parameters whose names end in `weight`, and 3-D ones, which are stacks of matrices, such as those of
    experts. Embeddings and convolutions are left to an element-wise optimizer.
    """
    is_weight = parameter.dim() == 3 or (parameter.dim() == 2 and name.endswith("weight"))
    return is_weight and min(parameter.shape[-2:]) > 1 and not isinstance(module, _NOT_LINEAR)


def _joint(name: str, module: nn.Module) -> FusedDim | None:
    """Return the three matrices that torch's own attention has in one."""
    if not isinstance(module, nn.MultiheadAttention) or not name.endswith("in_proj_weight"):
        return None
    return FusedDim(0, (module.embed_dim,) * 3)


def _wide_names(modules: Modules, names: Iterable[str], precision: PrecisionConfig, param: Dtype) -> frozenset[str]:
    """Return the names of the parameters that stay in fp32 although `precision.param` is narrower.

    A Hugging Face model lists them in `_keep_in_fp32_modules_strict` and, for fp16, whose range is small, in
    `_keep_in_fp32_modules` too; both are read as `from_pretrained` does. Those of a batch norm whose statistics are in
    fp32 are added, because torch takes a narrow weight beside narrow statistics only.
    """
    narrow = precision.model_copy(update={"param": param})
    lists = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if param == "fp16" else [])]
    found: set[str] = set()
    for prefix, module in modules.items():
        patterns = [pattern.replace("*", ".*") for key in lists for pattern in getattr(module, key, None) or ()]
        if isinstance(module, _BATCH_NORMS) and module.running_mean is not None:
            patterns += [""] if buffer_dtype(module.running_mean.dtype, narrow) is torch.float32 else []
        start = f"{prefix}." if prefix else ""
        inside = [name for name in names if name.startswith(start)] if patterns else []
        found.update(each for each in inside if any(re.search(p, each.removeprefix(start)) for p in patterns))
    return frozenset(found)
