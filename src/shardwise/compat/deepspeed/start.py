"""Start an engine as `deepspeed.initialize` does: the JSON becomes a config, and the engine runs in plain mode."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.compat.deepspeed import __git_branch__, __git_hash__, __version__
from shardwise.compat.deepspeed.comm import init_distributed
from shardwise.compat.deepspeed.config import Translation, read_config, translate
from shardwise.compat.deepspeed.optimizers import build_optimizer, build_scheduler
from shardwise.compat.deepspeed.runtime.dataloader import DeepSpeedDataLoader
from shardwise.compat.deepspeed.runtime.engine import AssertedError, DeepSpeedEngine, DeepSpeedOptimizer, NoSchedule
from shardwise.compat.deepspeed.runtime.pipe.engine import PipelineEngine
from shardwise.compat.deepspeed.runtime.pipe.module import PipelineModule
from shardwise.compat.deepspeed.runtime.zero.attributes import mark
from shardwise.compat.deepspeed.utils import ENGINE, PLACE, groups, leaf_modules, logger, set_log_level_from_string
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config
from shardwise.engine.initialize import initialize as initialize_engine
from shardwise.zero.tp_params import shard_param

_TP_SIZE: Final = "_deepspeed_tp_size"  # of a model, what `tp_model_init` was given


def initialize(  # noqa: PLR0913  DeepSpeed's arguments
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Make an engine of a model, as `deepspeed.initialize`; the arguments are those of DeepSpeed.

    The JSON is `config`, `config_params` or `args.deepspeed_config`. An engine without an optimizer, given or in the
    JSON, evaluates only. A `mpu` of Ulysses says how many ranks share a sequence; `"shardwise": {"mesh": ...}` in the
    JSON says all else of ranks. The launcher names the port, and the process group is started where there is none.

    Returns:
        the engine; its optimizer, or None; the loader of `training_data`, or None; the schedule, or None.

    Raises:
        ConfigError: a key is refused, or does not fit the model.
    """
    config_given = config if config is not None else config_params
    for name in ("deepspeed_config", "deepscale_config"):  # as arguments of the command line have it
        config_given = getattr(args, name, None) if config_given is None else config_given
    if model is None or config_given is None:
        raise AssertedError("deepspeed-arguments", "deepspeed.initialize needs a model and a config; pass both")
    while isinstance(model, DeepSpeedEngine):  # as the Trainer passes at a second `train()`
        model = model.module
    source = read_config(config_given)
    init_distributed(dist_init_required=dist_init_required)
    # A stage of a pipeline counts as one rank: its ranks see the same samples.
    num_stages = model.num_stages if isinstance(model, PipelineModule) else 1
    size = getattr(mpu, "get_sequence_parallel_world_size", None)
    sharers = {"sequence_parallel_size": size()} if size is not None else {}
    if model.__dict__.get(_TP_SIZE, 1) > 1 and not _sizes_tp(source):
        sharers["tensor_parallel.autotp_size"] = model.__dict__[_TP_SIZE]
    translation = translate({**source, **sharers}, dist.get_world_size() // num_stages)
    _release_earlier(model)
    if level := translation.given.get("log_level"):
        set_log_level_from_string(str(level))
    engine_class = DeepSpeedEngine
    if isinstance(model, PipelineModule):
        engine_class = PipelineEngine
        translation = replace(translation, config=model.train_batch_plan(translation.config))
    own_optimizer = _optimizer(model, optimizer, model_parameters, translation)
    engine = _engine(model, source, translation, own_optimizer, lr_scheduler, engine_class)
    engine.evaluates_whole = hasattr(mpu, "evaluates_whole") and mpu.evaluates_whole()
    if training_data is not None:
        engine.training_dataloader = DeepSpeedDataLoader.of(training_data, engine, collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def tp_model_init(model: Any, tp_size: int, dtype: Any, config: Any = None, **options: Any) -> Any:
    """Return the model, which `initialize` splits over so many ranks; the arguments are those of DeepSpeed.

    Only `tp_size` counts, where the JSON says none.
    """
    model.__dict__[_TP_SIZE] = tp_size
    return model


def _engine(
    model: nn.Module,
    source: Mapping[str, Any],
    translation: Translation,
    optimizer: Optimizer | None,
    schedule: Any,
    kind: type[DeepSpeedEngine],
) -> DeepSpeedEngine:
    """Start the engine; without an optimizer one that evaluates only, which freezes the parameters until it ends."""
    settings, frozen = dict(translation.config), list[nn.Parameter]()
    is_ours = optimizer is None and "name" in settings.get("optimizer", {})  # in the section `shardwise`
    if is_ours and (section := translation.section("scheduler")):
        raise ConfigError(
            "deepspeed-scheduler-of-ours",
            f"scheduler.type={section.get('type')} needs the section optimizer, and shardwise.optimizer.name is set; "
            "set shardwise.scheduler.name in its place",
        )
    if optimizer is None and not is_ours:
        frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
        settings["optimizer"] = {**settings.get("optimizer", {}), "name": "none"}
    elif optimizer is not None and schedule is None and (section := translation.section("scheduler")):
        schedule = build_scheduler(section, optimizer)
    elif callable(schedule) and not hasattr(schedule, "step"):
        schedule = schedule(optimizer)
    scheduler = schedule if schedule is not None or is_ours else NoSchedule()
    inner = initialize_engine(model, Config.from_dict(settings), optimizer=optimizer, scheduler=scheduler)
    if inner.comm.rank == 0:
        shown = f"version={__version__}, git-hash={__git_hash__}, git-branch={__git_branch__}"
        logger.info("DeepSpeed info: %s: Shardwise answers", shown)
        for note in translation.notes:
            logger.info("%s", note)
    groups.note_engine(inner.layout.mesh, inner.parts.comms)
    engine = kind(inner, source, translation, schedule, frozen)
    _mark(model, engine)
    leaf_modules.set_by_section(model, translation.section("zero_optimization.leaf_module"))
    return engine


def _optimizer(model: nn.Module, given: Any, model_parameters: Any, translation: Translation) -> Optimizer | None:
    inner = getattr(given, "optimizer", None)
    given = inner if isinstance(inner, DeepSpeedOptimizer) else given  # Accelerate wraps what `initialize` has returned
    if isinstance(given, DeepSpeedOptimizer):
        given = given.optimizer
    if isinstance(given, Optimizer):
        return given
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parameters = _listed(model_parameters) or trained
    if given is not None:
        made = given(parameters)
        return made if isinstance(made, Optimizer) else None
    section = translation.section("optimizer")
    is_on_host = translation.config.get("tiers", {}).get("optimizer", "device") != "device"
    return build_optimizer(section, parameters, is_on_host=is_on_host) if section else None


def _sizes_tp(source: Mapping[str, Any]) -> bool:
    keys_given = translate(source, refuse=False).given
    return any(key in keys_given for key in ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"))


def _listed(parameters: Any) -> list[Any]:
    if isinstance(parameters, nn.ParameterDict):
        return list(parameters.values())
    return [parameters] if isinstance(parameters, Mapping) else list(parameters or ())


def _release_earlier(model: nn.Module) -> None:
    """Close the engine that the model has, as at a second `train()`."""
    reference = model.__dict__.get(ENGINE)
    earlier = reference() if reference is not None else None
    if earlier is not None:
        earlier.destroy()


def _mark(model: nn.Module, engine: DeepSpeedEngine) -> None:
    """Note of each parameter where it belongs, and in stage 3 what scripts ask for before they gather it."""
    reference = weakref.ref(engine)
    model.__dict__[ENGINE] = reference
    model.__dict__["zero_grad"] = functools.partial(_zero_grad, model)
    is_sharded = engine.zero_optimization_stage() == 3
    if is_sharded:
        model.__dict__["_apply"] = functools.partial(_moved, model)
    groups = engine.inner.layout.model_groups
    kept_whole = {param.name for group in groups if group.is_replicated or group.is_small for param in group.params}
    split = {param.name for group in groups for param in group.params if param.over_tp is not None}
    if split:
        model.__dict__["state_dict"] = functools.partial(_whole_state_dict, model, split)
        model.__dict__["load_state_dict"] = functools.partial(_load_whole, model)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        parameter.__dict__[PLACE] = reference, name
        if is_sharded:
            mark(parameter, number, engine.dp_world_size, name in kept_whole)


def _zero_grad(model: nn.Module, set_to_none: bool = True) -> None:
    """Drop the model's gradients, where its engine has them too."""
    type(model).zero_grad(model, set_to_none)
    engine = model.__dict__[ENGINE]()
    if engine is not None and engine.module is model:  # not of a copy
        engine.zero_grad()


def _whole_state_dict(model: nn.Module, split: set[str], *given: Any, **options: Any) -> dict[str, Any]:
    """Return the state dict with the whole of what ranks hold parts of; all ranks call it, as Accelerate's do."""
    state: dict[str, Any] = type(model).state_dict(model, *given, **options)
    engine, prefix = model.__dict__[ENGINE](), options.get("prefix", "")
    if engine is not None and engine.module is model and not engine.is_destroyed:
        values = {
            id(parameter): engine.inner.read(name) for name, parameter in model.named_parameters() if name in split
        }
        for name, parameter in model.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
            if id(parameter) in values and name in state:
                state[name] = values[id(parameter)]
    return state


def _load_whole(model: nn.Module, state: Mapping[str, Any], *given: Any, **options: Any) -> Any:
    """Load a state dict that has the whole of what ranks hold parts of: each takes its part."""
    engine, local = model.__dict__[ENGINE](), dict(state)
    if engine is not None and engine.module is model and not engine.is_destroyed:
        for group in engine.inner.parts.sharding.groups:
            for param in group.spec.params:
                for name in local.keys() & {param.name, *param.aliases}:
                    if local[name].shape != param.global_shape:
                        raise ConfigError(
                            "state-dict-shape",
                            f"{name} of shape {tuple(local[name].shape)} is not the model's {param.global_shape}; give "
                            "the whole tensor on every rank, whatever part of it the rank has",
                        )
                    local[name] = shard_param(param.split, group.comms.tensor.rank, local[name])
    return type(model).load_state_dict(model, local, *given, **options)


def _moved(model: nn.Module, function: Callable[..., Any], *given: Any, **options: Any) -> nn.Module:
    """Leave shards where they are: scripts move the whole model at the end, as Lightning does with `model.cpu()`."""
    engine = model.__dict__[ENGINE]()
    if engine is not None and engine.module is model and not engine.is_destroyed:  # not a copy of it
        return model
    return type(model)._apply(model, function, *given, **options)
