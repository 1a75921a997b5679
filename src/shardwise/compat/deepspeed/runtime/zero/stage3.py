"""Estimates the memory of stage 3 by the names of DeepSpeed's estimators; figures are of Shardwise's engine.

>>> estimate_zero3_model_states_mem_needs(1_000_000_000, 50_000_000, num_gpus_per_node=8, cpu_offload=False)
(0, 2450000000, 200000000)
"""

from __future__ import annotations

from torch import nn

from shardwise.compat.deepspeed.finder import answers
from shardwise.compat.deepspeed.runtime.zero._needs import Option, needs, print_needs

__getattr__ = answers(__name__)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int, int]:
    """Return the bytes of each host, those of each GPU, and the part of these for the gathered largest layer.

    Args:
        cpu_offload: `tiers.grads` and `tiers.optimizer` are the host.
        cpu_offload_params: `tiers.params` is the host too, where `cpu_offload` is set.
        zero_init: not used; a model on meta, or one inside `shardwise.init`, is never whole on any host.
        additional_buffer_factor: multiplies the host's bytes; 1.0 by default, since these are exact.
    """
    tiers = {"grads": "host", "optimizer": "host"} if cpu_offload else {}
    if cpu_offload and cpu_offload_params:
        tiers["params"] = "host"
    states = needs(
        total_params,
        3,
        tiers,
        largest_block=largest_layer_params,
        num_gpus_per_node=num_gpus_per_node,
        num_nodes=num_nodes,
    )
    layer_bytes = states.unsharded_bytes
    return int(states.host_bytes * additional_buffer_factor), states.device_bytes + layer_bytes, layer_bytes


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> None:
    """Print the memory that a model needs in stage 3, for each choice of offload.

    Args:
        additional_buffer_factor: has no effect; only DeepSpeed's estimates use it.
    """
    print_needs(model, 3, _options(), num_gpus_per_node=num_gpus_per_node, num_nodes=num_nodes)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print the memory that a number of parameters needs in stage 3, for each choice of offload.

    Args:
        additional_buffer_factor: has no effect; only DeepSpeed's estimates use it.
    """
    print_needs(
        total_params,
        3,
        _options(),
        largest_block=largest_layer_params,
        num_gpus_per_node=num_gpus_per_node,
        num_nodes=num_nodes,
    )


def _options() -> list[Option]:
    return [
        ("offload_param=cpu, offload_optimizer=cpu", {"params": "host", "grads": "host", "optimizer": "host"}),
        ("offload_param=none, offload_optimizer=cpu", {"grads": "host", "optimizer": "host"}),
        ("offload_param=none, offload_optimizer=none", {}),
    ]
