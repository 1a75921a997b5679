"""Training with the engine on one rank: the side of every parity test that is under test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.models import CASES, ModelCase, every_rank, make_batches
from harness.reference import Trace, train_reference
from shardwise import Config, Engine, initialize

Overrides = Mapping[str, Mapping[str, Any]]

LR = 1e-2


def make_config(num_micro_batches: int, overrides: Overrides) -> Config:
    """Float64 on the CPU with a constant learning rate, and what differs from that."""
    sections: dict[str, dict[str, Any]] = {
        "precision": {"param": "fp64"},
        "batch": {"micro_size": 2, "accumulation": num_micro_batches},
        "optimizer": {"lr": LR, "clip_norm": None},
        "scheduler": {"name": "constant"},
        "run": {"device": "cpu", "timeout_s": 30.0},
    }
    for name, values in overrides.items():
        sections[name] = {**sections.get(name, {}), **values}
    return Config.from_dict(sections)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """What `OptimizerConfig` makes of the defaults in `make_config`, in plain torch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() >= 2], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))


def train_engine(
    rank: int, world_size: int, case_name: str, num_micro_batches: int, num_steps: int, overrides: Overrides
) -> Trace:
    """Train on this rank's share of the batches; the trace's gradients hold this rank's slices, zero elsewhere."""
    return train_case(rank, world_size, CASES[case_name], num_micro_batches, num_steps, overrides)


def train_case(
    rank: int, world_size: int, case: ModelCase, num_micro_batches: int, num_steps: int, overrides: Overrides
) -> Trace:
    """`train_engine` for a case that has no name."""
    config = make_config(num_micro_batches, overrides)
    # Other ranks start from other weights: rank 0's are everybody's.
    model = case.build(torch.float64, seed=rank)
    batches = make_batches(case, num_steps=num_steps, world_size=world_size, num_micro_batches=num_micro_batches)
    engine = initialize(model, config, loss_fn=case.loss)
    losses, norms, gradients = [], [], {}
    for step in range(num_steps):
        for batch in batches[step][rank]:
            engine.backward(engine(batch))
        gradients = own_gradients(engine)
        result = engine.step()
        losses.append(result.loss)
        norms.append(result.grad_norm)
    scale = engine.parts.losses.normaliser / result.count
    with engine.gathered():
        parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine.close()
    return Trace(losses, norms, {name: gradient * scale for name, gradient in gradients.items()}, parameters)


def own_gradients(engine: Engine) -> dict[str, Tensor]:
    """This rank's slices of the summed gradients, in tensors of the parameters' shapes that are zero elsewhere."""
    engine.parts.sharding.finish()
    found: dict[str, Tensor] = {}
    for group in engine.parts.sharding.groups:
        gradient = None if group.grads is None else group.grads.gradient()
        if gradient is None:
            continue
        found.update({place.name: gradient.new_zeros(0) for place in group.spec.params if place.numel == 0})
        for slot in group.spec.slots(group.shard_start, group.shard_stop):
            flat = found.setdefault(slot.param.name, gradient.new_zeros(slot.param.numel))
            flat[slot.start : slot.stop] = gradient[slot.offset : slot.offset + slot.stop - slot.start]
    shapes = {place.name: place.shape for group in engine.layout.groups for place in group.params}
    return {name: flat.view(shapes[name]) for name, flat in found.items()}


def reference_trace(
    case_name: str, world_size: int, num_micro_batches: int, num_steps: int, clip_norm: float | None
) -> Trace:
    """The same training by one plain process."""
    return reference_of(CASES[case_name], world_size, num_micro_batches, num_steps, clip_norm)


def reference_of(
    case: ModelCase, world_size: int, num_micro_batches: int, num_steps: int, clip_norm: float | None
) -> Trace:
    """`reference_trace` for a case that has no name."""
    batches = make_batches(case, num_steps=num_steps, world_size=world_size, num_micro_batches=num_micro_batches)
    return train_reference(case.build(torch.float64), every_rank(batches), case.loss, make_optimizer, clip_norm)


def merge_ranks(traces: Sequence[Trace], num_holders: int | None = None) -> Trace:
    """One trace of all ranks: losses, norms and parameters must be the same on all.

    The gradient slices of the first `num_holders` ranks, all when left out, are put together to whole gradients.
    """
    first = traces[0]
    for other in traces[1:]:
        if other.losses != first.losses or other.grad_norms != first.grad_norms:
            raise AssertionError(f"ranks disagree: losses {first.losses} and {other.losses}")
        for name, parameter in first.parameters.items():
            if not torch.equal(parameter, other.parameters[name]):
                raise AssertionError(f"ranks hold different values of {name}")
    gradients: dict[str, Tensor] = {}
    for trace in traces[:num_holders]:
        for name, gradient in trace.gradients.items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return Trace(first.losses, first.grad_norms, gradients, first.parameters)
