"""Offer `deepspeed.zero`: shards before there is an engine, and access to whole parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.compat.deepspeed.comm import init_distributed
from shardwise.compat.deepspeed.config import read_config, translate
from shardwise.compat.deepspeed.finder import answers
from shardwise.compat.deepspeed.runtime.zero.attributes import ZeroParamStatus as ZeroParamStatus
from shardwise.compat.deepspeed.runtime.zero.attributes import mark, shown_as_whole
from shardwise.construction.context import init
from shardwise.engine.state_api import gathered, gathered_in_turn
from shardwise.runtime.module_calls import watch_registrations
from shardwise.runtime.precision import TORCH_DTYPES

__getattr__ = answers(__name__)


class Init:
    """Makes each parameter a shard as soon as its module is constructed, under stage 3: `shardwise.init()`.

    The arguments are those of DeepSpeed: `dtype`, or else the JSON, gives the parameters their dtype. A module that is
    built already stays as it is, until `initialize` shards it. All ranks share the parameters.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        source = config_dict_or_path if config_dict_or_path is not None else config
        settings = translate(read_config(source)).config if source is not None else {}
        param = settings.get("precision", {}).get("param")
        self._dtype = dtype if dtype is not None else TORCH_DTYPES.get(param) if param else None
        self._is_on = enabled and settings.get("zero", {}).get("stage", 3) == 3
        if self._is_on:
            init_distributed()  # a notebook has no launcher, and loaders ask for the rank
        self._open = ExitStack()
        self._num_marked = 0

    def __enter__(self) -> None:
        if not self._is_on:
            return
        self._open.enter_context(init())
        self._open.enter_context(watch_registrations(self._mark, lambda module: None))
        if self._dtype is not None:
            self._open.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def _mark(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if "ds_id" not in parameter.__dict__ and not is_lazy(parameter):
            mark(parameter, self._num_marked, dist.get_world_size())
            self._num_marked += 1


MiCS_Init = Init  # the JSON's mics_shard_size says which ranks share the engine's parameters


@contextmanager
def GatheredParameters(  # noqa: N802  DeepSpeed's name
    params: Iterable[nn.Parameter] | nn.Parameter,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Make parameters whole inside the context, which all ranks enter; the arguments are those of DeepSpeed.

    Scripts that hand weights over read one parameter at a time, so the others of its unit are gathered with it.
    """
    if not enabled:
        yield
        return
    listed = [params] if isinstance(params, nn.Parameter) else list(params)
    # DeepSpeed passes over the others.
    owned = [parameter for parameter in listed if isinstance(parameter, nn.Parameter)]
    is_in_turn = len(owned) == 1 and modifier_rank is None
    context = gathered_in_turn(owned[0]) if is_in_turn else gathered(owned, modifier_rank=modifier_rank)
    with context, shown_as_whole(owned):
        yield


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Keep all parameters of an engine, or of a model, whole inside the context, which all ranks enter."""
    with GatheredParameters(model.parameters()):
        yield model


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a parameter is gathered wherever the model's forward uses it."""


unregister_external_parameter = register_external_parameter
