"""The layout of a model with its plan of tensor parallelism: what a run starts from.

>>> from shardwise.models import Decoder, DecoderConfig
>>> shape = DecoderConfig(vocab_size=65, num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=4,
...                       ffn_size=48, max_seq_len=32)
>>> config = Config.from_dict({"mesh": {"tp": 2}}).resolve(world_size=4)
>>> layout = plan_layout(Decoder(shape, device="meta"), config)
>>> {param.name: param.shape for group in layout.groups for param in group.params if param.name.startswith("embed")}
{'embed.weight': (33, 16)}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.config import Config
from shardwise.layout.layout import Layout, build_layout
from shardwise.layout.tensor_plan import TensorPlan, tensor_layout
from shardwise.tensor.plans import find_plan


def plan_layout(model: nn.Module, config: Config, plan: TensorPlan | Mapping[str, Any] | None = None) -> Layout:
    """Compute the layout of `model` under a resolved config, on every axis.

    Args:
        model: any module; only names, shapes and `requires_grad` are read, so meta tensors will do.
        config: as `Config.resolve` returns it.
        plan: how layers are split where `mesh.tp` is more than 1; None for the one that the model brings or its family
            has. See `docs/tensor-parallel.md`.

    Raises:
        ConfigError: the model has no parameters, `zero.blocks` does not fit it, or no plan, or sizes that do not divide.
    """
    degree, sequence_parallel = config.mesh.tp, config.tensor.sequence_parallel
    if degree == 1:
        return build_layout(model, config)
    found = find_plan(model, degree, plan, sequence_parallel)
    return build_layout(model, config, tensor_layout(model, found, degree, sequence_parallel))
