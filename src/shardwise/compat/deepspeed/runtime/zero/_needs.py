"""Computes DeepSpeed's memory estimates with the planner: the figures are those of Shardwise's engine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.construction.model_states import ModelStates, estimate_model_states
from shardwise.runtime.format import format_bytes

Option = tuple[str, dict[str, str]]
"""DeepSpeed's name of an option, and the tiers that it means."""


def needs(
    model: nn.Module | int,
    stage: int,
    tiers: dict[str, str],
    *,
    largest_block: int | None = None,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
) -> ModelStates:
    """Estimate the memory of model states in one stage.

    Args:
        model: a module, or its number of parameters.
        tiers: the tier of each state that is not on the device.
        largest_block: parameters of the largest block, where `model` is a number.
    """
    (states,) = estimate_model_states(
        model,
        num_gpus=num_gpus_per_node * num_nodes,
        gpus_per_node=num_gpus_per_node,
        stages=(stage,),
        config={"tiers": tiers},
        largest_block=largest_block,
    )
    return states


def print_needs(
    model: nn.Module | int,
    stage: int,
    options: Sequence[Option],
    *,
    largest_block: int | None = None,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
) -> None:
    """Print a line for each of the options; model, stage, largest_block, num_gpus_per_node, num_nodes as in `needs`."""
    num_params = sum(parameter.numel() for parameter in model.parameters()) if isinstance(model, nn.Module) else model
    nodes = "1 node" if num_nodes == 1 else f"{num_nodes} nodes"
    gpus = "1 GPU" if num_gpus_per_node == 1 else f"{num_gpus_per_node} GPUs"
    print(f"States of {num_params / 1e6:,.0f}M parameters, zero.stage={stage}, {nodes} of {gpus}:")
    print(f"{'per GPU':>10} {'+ a block':>10} {'per host':>10} {'on disks':>10}")
    for label, tiers in options:
        row = needs(
            model,
            stage,
            tiers,
            largest_block=largest_block,
            num_gpus_per_node=num_gpus_per_node,
            num_nodes=num_nodes,
        )
        sizes = (row.device_bytes, row.device_bytes + row.unsharded_bytes, row.host_bytes, row.nvme_bytes)
        print(" ".join(f"{format_bytes(size):>10}" for size in sizes) + f"  {label}")
    print("Activations, logits and what the device itself keeps come on top: see `shardwise plan`.")
