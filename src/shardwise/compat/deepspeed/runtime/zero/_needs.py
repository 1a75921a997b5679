"""What DeepSpeed's estimators ask, answered by the planner's: the needs are those of Shardwise's engine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.planner.model_states import ModelStates, estimate_model_states, table_of

Option = tuple[str, dict[str, str]]
"""How DeepSpeed would say it, and the tiers that it means."""


def needs(
    model: nn.Module | int,
    stage: int,
    tiers: dict[str, str],
    *,
    largest_block: int | None = None,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
) -> ModelStates:
    """Of one stage, with states in these tiers."""
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
    """Print a line for each option."""
    num_params = sum(each.numel() for each in model.parameters()) if isinstance(model, nn.Module) else model
    nodes = "1 node" if num_nodes == 1 else f"{num_nodes} nodes"
    gpus = "1 GPU" if num_gpus_per_node == 1 else f"{num_gpus_per_node} GPUs"
    print(f"States of {num_params / 1e6:,.0f}M parameters, zero.stage={stage}, {nodes} of {gpus}:")
    estimates = [
        (
            label,
            needs(
                model,
                stage,
                tiers,
                largest_block=largest_block,
                num_gpus_per_node=num_gpus_per_node,
                num_nodes=num_nodes,
            ),
        )
        for label, tiers in options
    ]
    print(table_of(estimates))
    print("Activations, logits and what the device itself keeps come on top: see `shardwise plan`.")
