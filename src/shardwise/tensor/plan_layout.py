"""Compute the layout of a model with its plan of tensor parallelism, with which a run starts.

>>> from shardwise.models import Decoder, DecoderConfig
>>> shape = DecoderConfig(vocab_size=65, num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=4,
...                       ffn_size=48, max_seq_len=32)
>>> config = Config.from_dict({"mesh": {"tp": 2}}).resolve(world_size=4)
>>> layout = plan_layout(Decoder(shape, device="meta"), config)
>>> {param.name: param.shape for group in layout.groups for param in group.params if param.name.startswith("embed")}
{'embed.weight': (33, 16)}
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from shardwise.config.arguments import checked
from shardwise.config.resolve import Config, ConfigError
from shardwise.context.apply import check_context
from shardwise.dropout import ShardRegion, may_drop_by_function
from shardwise.layout.layout import Layout, build_layout
from shardwise.layout.matrices import fused_dims
from shardwise.layout.mesh_shape import MeshShape
from shardwise.layout.opaque import is_opaque
from shardwise.layout.param_groups import FusedDim, wide_parameters
from shardwise.layout.precision import TORCH_DTYPES
from shardwise.layout.stage_partition import partition_model
from shardwise.layout.tensor_plan import TensorLayout, TensorPlan, is_within, tensor_layout
from shardwise.models.apply_attention import check_attention
from shardwise.optim.rules import matrix_state_names
from shardwise.tensor.hf_plans import find_plan
from shardwise.tensor.plan_table import table_plan

_LOG: Final = logging.getLogger("shardwise")


@checked
def plan_layout(
    model: nn.Module, config: Config, plan: TensorPlan | Mapping[str, Any] | None = None, *, rank: int = 0
) -> Layout:
    """Compute the layout of `model` under a resolved config, on every axis.

    Args:
        model: any module; only names, shapes and `requires_grad` are read, so meta tensors will do.
        config: as `Config.resolve` returns it.
        plan: how layers are split where `mesh.tp` is more than 1; None for the one that the model brings or its family
            has. See `docs/tensor-parallel.md`.
        rank: whose stages are the layout's own, in a pipeline.

    Raises:
        ConfigError: the model has no parameters, `zero.blocks` does not fit it, there is no plan, sizes do not divide,
            the model cannot be cut into the stages, or it cannot have the config's attention, or attention over split
            sequences.
    """
    check_plain(model)
    num_ranks = MeshShape.from_config(config.mesh).world_size
    if not 0 <= rank < num_ranks:
        raise ConfigError(
            "rank-out-of-range", f"rank={rank} is not in a world of {num_ranks}; give 0 to {num_ranks - 1}"
        )
    check_attention(model, config.attention)
    check_context(model, config)
    degree, sequence_parallel = config.mesh.tp, config.tensor.sequence_parallel
    pipeline = partition_model(model, config, rank) if config.mesh.pp > 1 else None
    fused = _fused(model, config, plan)
    if degree == 1:
        if isinstance(plan, Mapping):
            table_plan(model, plan, degree)  # it may be wrong, even if it is not used
        return build_layout(model, config, pipeline=pipeline, fused=fused)
    _refuse_opaque(model, degree)
    found = find_plan(model, degree, plan, sequence_parallel)
    _LOG.info("split over tp=%d:\n%s", degree, found)
    return build_layout(model, config, tensor_layout(model, found, degree, sequence_parallel), pipeline, fused=fused)


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
    if any(isinstance(each, UninitializedParameter) for each in model.parameters()):
        raise ConfigError("lazy-parameters", "the model has parameters without a shape; run it once on a batch before")


def _fused(model: nn.Module, config: Config, plan: TensorPlan | Mapping[str, Any] | None) -> dict[str, FusedDim]:
    """Return what the plan knows of fused weights, in every layout the same: without tensor parallelism, too."""
    if not matrix_state_names(config.optimizer.name):
        return {}
    found: TensorPlan | None = None
    with suppress(ConfigError):  # without a plan such weights are one matrix
        found = find_plan(model, 1, plan, sequence_parallel=False)
    return fused_dims(model, found)


def _refuse_opaque(model: nn.Module, degree: int) -> None:
    name = next((name for name, each in model.named_parameters() if is_opaque(each)), None)
    if name is not None:
        raise ConfigError(
            "opaque-over-tp",
            f"mesh.tp={degree} splits matrices, but parameter {name} is packed or of integers, and its elements are "
            "bytes; set mesh.tp=1, and shard it by zero.stage=3",
        )


def with_own_dtype(model: nn.Module, config: Config, *, rank: int = 0) -> Config:
    """Return the config with the dtype of a model's parameters as `precision.param`, where it names none.

    Opaque ones, and those that stay in fp32 beside narrow ones, do not count. A model in several dtypes trains in fp32,
    and rank 0's log says so.
    """
    if config.precision.param is not None:
        return config
    named = model.named_parameters(remove_duplicate=False)
    dtypes = {name: each.dtype for name, each in named if not is_opaque(each)}
    for dtype in (name for name, each in TORCH_DTYPES.items() if each in dtypes.values()):
        precision = config.precision.model_copy(update={"param": dtype})
        wide = wide_parameters(model, precision)
        if {dtypes[name] for name in dtypes.keys() - wide} == {TORCH_DTYPES[dtype]}:
            return config.model_copy(update={"precision": precision})
    there = sorted({str(each).removeprefix("torch.") for each in dtypes.values()})
    if rank == 0 and len(there) > 1:
        kind, text = type(model).__name__, " and ".join(there)
        _LOG.warning("parameters of %s are in %s; all train in float32: set precision.param to choose", kind, text)
    return config.override(["precision.param=fp32"])


def dropout_zones(model: nn.Module, tensor: TensorLayout, tp_index: int) -> dict[str, ShardRegion]:
    """Return by module on which part of a tensor its dropout works, for a rank of the tensor-parallel group.

    Dropouts that the plan names are on split features or heads; others in a sequence-parallel stack are on a part of
    the sequence, unless a region's own code calls them.

    Args:
        model: whose modules are searched for dropouts.
        tp_index: of the rank in the tensor-parallel group.
    """
    zones = {each.module: ShardRegion(each.dim, tp_index, tensor.degree) for each in tensor.plan.dropouts}
    stacks = tensor.plan.stacks if tensor.sequence_parallel else ()
    regions = [region.module for region in tensor.plan.regions]
    for name, module in model.named_modules():
        if name in zones or not any(is_within(name, stack.modules) for stack in stacks):
            continue
        if isinstance(module, nn.Dropout) or (may_drop_by_function(module) and not is_within(name, regions)):
            zones[name] = ShardRegion(1, tp_index, tensor.degree)
    return zones
