"""Estimates the memory of stage 2 by the names of DeepSpeed's estimators; figures are of Shardwise's engine.

>>> estimate_zero2_model_states_mem_needs(1_000_000_000, num_gpus_per_node=8, cpu_offload=False)
(0, 4000000000)
"""

from __future__ import annotations

from torch import nn

from shardwise.compat.deepspeed.finder import answers
from shardwise.compat.deepspeed.runtime.zero._needs import Option, needs, print_needs

__getattr__ = answers(__name__)


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int]:
    """Return the bytes of each host and those of each GPU.

    Args:
        cpu_offload: `tiers.grads` and `tiers.optimizer` are the host.
        additional_buffer_factor: multiplies the host's bytes; 1.0 by default, since these are exact.
    """
    tiers = {"grads": "host", "optimizer": "host"} if cpu_offload else {}
    states = needs(total_params, 2, tiers, num_gpus_per_node=num_gpus_per_node, num_nodes=num_nodes)
    return int(states.host_bytes * additional_buffer_factor), states.device_bytes


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> None:
    """Print the memory that a model needs in stage 2, with and without offload.

    Args:
        additional_buffer_factor: has no effect; only DeepSpeed's estimates use it.
    """
    print_needs(model, 2, _options(), num_gpus_per_node=num_gpus_per_node, num_nodes=num_nodes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> None:
    """Print the memory that a number of parameters needs in stage 2, with and without offload.

    Args:
        additional_buffer_factor: has no effect; only DeepSpeed's estimates use it.
    """
    print_needs(total_params, 2, _options(), num_gpus_per_node=num_gpus_per_node, num_nodes=num_nodes)


def _options() -> list[Option]:
    return [
        ("offload_optimizer=cpu", {"grads": "host", "optimizer": "host"}),
        ("offload_optimizer=none", {}),
    ]
