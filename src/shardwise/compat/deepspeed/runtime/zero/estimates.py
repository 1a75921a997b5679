"""Estimate the memory of stages 2 and 3 by the names of DeepSpeed's estimators; figures are of Shardwise's engine.

`additional_buffer_factor` multiplies the bytes of a host, and is 1.0 by default, since these are exact; where an
estimate is printed it has no effect.

>>> estimate_zero2_model_states_mem_needs(1_000_000_000, num_gpus_per_node=8, cpu_offload=False)
(0, 4000000000)
>>> estimate_zero3_model_states_mem_needs(1_000_000_000, 50_000_000, num_gpus_per_node=8, cpu_offload=False)
(0, 2450000000, 200000000)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from torch import nn

from shardwise.construction.model_states import ModelStates, estimate_model_states
from shardwise.runtime.format import format_bytes

_ON_HOST: Final = MappingProxyType({"grads": "host", "optimizer": "host"})
# By the stage, DeepSpeed's names of its options, and the tiers that they mean.
_OPTIONS: Final[Mapping[int, Mapping[str, Mapping[str, str]]]] = MappingProxyType(
    {
        2: {"offload_optimizer=cpu": _ON_HOST, "offload_optimizer=none": {}},
        3: {
            "offload_param=cpu, offload_optimizer=cpu": {"params": "host", **_ON_HOST},
            "offload_param=none, offload_optimizer=cpu": _ON_HOST,
            "offload_param=none, offload_optimizer=none": {},
        },
    }
)


def _states(
    model: nn.Module | int, stage: int, tiers: Mapping[str, str], gpus: int, nodes: int, block: int | None = None
) -> ModelStates:
    (states,) = estimate_model_states(
        model,
        num_gpus=gpus * nodes,
        gpus_per_node=gpus,
        stages=(stage,),
        config={"tiers": tiers},
        largest_block=block,
    )
    return states


def _print(model: nn.Module | int, stage: int, gpus: int, nodes: int, block: int | None = None) -> None:
    """Print a line for each of a stage's options."""
    num_params = sum(parameter.numel() for parameter in model.parameters()) if isinstance(model, nn.Module) else model
    machines = "1 node" if nodes == 1 else f"{nodes} nodes"
    each = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    print(f"States of {num_params / 1e6:,.0f}M parameters, zero.stage={stage}, {machines} of {each}:")
    print(f"{'per GPU':>10} {'+ a block':>10} {'per host':>10} {'on disks':>10}")
    for label, tiers in _OPTIONS[stage].items():
        row = _states(model, stage, tiers, gpus, nodes, block)
        sizes = (row.device_bytes, row.device_bytes + row.unsharded_bytes, row.host_bytes, row.nvme_bytes)
        print(" ".join(f"{format_bytes(size):>10}" for size in sizes) + f"  {label}")
    print("Activations, logits and what the device itself keeps come on top: see `shardwise plan`.")


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int]:
    """Return the bytes of each host and those of each GPU; with `cpu_offload` gradients and optimizer are on hosts."""
    states = _states(total_params, 2, _ON_HOST if cpu_offload else {}, num_gpus_per_node, num_nodes)
    return int(states.host_bytes * additional_buffer_factor), states.device_bytes


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> None:
    """Print the memory that a model needs in stage 2, with and without offload."""
    _print(model, 2, num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> None:
    """Print the memory that a number of parameters needs in stage 2, with and without offload."""
    _print(total_params, 2, num_gpus_per_node, num_nodes)


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

    Parameters are on hosts too where both offloads are set. `zero_init` is not used: a model on meta, or one inside
    `shardwise.init`, is never whole on any host.
    """
    tiers = {"params": "host", **_ON_HOST} if cpu_offload_params else _ON_HOST
    states = _states(total_params, 3, tiers if cpu_offload else {}, num_gpus_per_node, num_nodes, largest_layer_params)
    layer_bytes = states.unsharded_bytes
    return int(states.host_bytes * additional_buffer_factor), states.device_bytes + layer_bytes, layer_bytes


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> None:
    """Print the memory that a model needs in stage 3, for each choice of offload."""
    _print(model, 3, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print the memory that a number of parameters needs in stage 3, for each choice of offload."""
    _print(total_params, 3, num_gpus_per_node, num_nodes, largest_layer_params)
