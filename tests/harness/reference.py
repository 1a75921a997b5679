"""Plain training in one process: the side of every parity test that cannot be wrong in the library's way.

Nothing here is imported from the library: no sharding, no hooks, gradients in `.grad`, torch's own clipping.

The gradient of a step is that of (sum of the batches' sums) / (sum of their counts). Parity means, in float64
where only the order of sums differs, `max_error(actual, expected) <= PARITY` over the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.models import LossFn

PARITY = 1e-9


@dataclass(frozen=True)
class Trace:
    """What a training leaves, one entry a step or, after the last step, one a parameter.

    `grad_norms` and `gradients` are before clipping. `gradients` holds every trainable parameter, zeros for
    unused ones; `parameters` also the frozen ones; tied parameters stand once, under their first name.
    """

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def train_reference(
    model: nn.Module,
    batches: Sequence[Sequence[Any]],
    loss_fn: LossFn | None,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    clip_norm: float | None = None,
    around: Callable[[int, int], AbstractContextManager[Any]] | None = None,
) -> Trace:
    """Train `model` in place, one step for each item of `batches`: all micro-batches of all ranks of that
    step.

    `loss_fn(output, batch)` gives (sum, count); without it `output["loss"]` counts as `own_loss` says. Each forward
    runs inside `around(step, number of the batch in it)`.
    """
    optimizer = make_optimizer(model)
    losses: list[float] = []
    grad_norms: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step, step_batches in enumerate(batches):
        optimizer.zero_grad()
        contexts = [around(step, number) if around else nullcontext() for number in range(len(step_batches))]
        losses.append(_accumulate(model, step_batches, loss_fn, contexts))
        gradients = _gradients(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip_norm is None else clip_norm)
        grad_norms.append(norm.item())
        optimizer.step()
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Trace(losses, grad_norms, gradients, parameters)


def call_model(model: nn.Module, batch: Any, loss_fn: LossFn | None) -> Any:
    """A dict as keyword arguments, anything else as the one argument; with a loss_fn, of a tuple the first item."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if loss_fn is not None and isinstance(batch, tuple) else batch)


def own_loss(model: nn.Module, output: Any, batch: Any) -> tuple[Tensor, int]:
    """Sum and count of a model's own loss: Hugging Face's is a mean over its targets, any other counts as one.

    A target is where the loss has a gradient of the logits; so a model may shift its labels or not.
    """
    labels = batch.get("labels") if hasattr(model, "base_model_prefix") else None
    if labels is None or labels.is_floating_point():
        return output["loss"], 1
    if labels.shape == output["logits"].shape[:-1]:
        (gradient,) = torch.autograd.grad(output["loss"], output["logits"], retain_graph=True)
        count = int(gradient.ne(0).any(-1).sum())
    else:  # CTC's labels are fewer than its frames
        count = int(labels.ne(-100).sum())
    return output["loss"] * count, count


def max_error(
    actual: Mapping[str, Tensor] | Sequence[float], expected: Mapping[str, Tensor] | Sequence[float]
) -> float:
    """max |a - b| / max |b| over all tensors (or numbers) together; inf where anything is not finite.

    >>> max_error([1.0, 2.0, 4.0], [1.0, 3.0, 4.0])
    0.25
    """
    largest = max(_largest(tensor) for tensor in _named(expected).values())
    difference = max(_differences(actual, expected).values())
    if not (math.isfinite(largest) and math.isfinite(difference)):
        return math.inf
    return difference / largest if largest > 0 else (math.inf if difference > 0 else 0.0)


def check_parity(actual: Trace, expected: Trace, tolerance: float = PARITY) -> None:
    """Raise AssertionError, naming the field, the error and the worst entry, unless the traces agree."""
    for field in ("losses", "grad_norms", "gradients", "parameters"):
        a, b = getattr(actual, field), getattr(expected, field)
        error = max_error(a, b) if b else float(bool(a))
        if error > tolerance:
            differences = _differences(a, b)
            worst = max(differences, key=lambda name: differences[name])
            raise AssertionError(f"{field}: max error {error:.3g} > {tolerance:g}, largest at {worst}")


def _accumulate(
    model: nn.Module,
    batches: Sequence[Any],
    loss_fn: LossFn | None,
    contexts: Sequence[AbstractContextManager[Any]],
) -> float:
    """Leave the gradient of sum/count in `.grad`; returns sum/count."""
    total, count = 0.0, 0.0
    for batch, context in zip(batches, contexts, strict=True):
        with context:
            output = call_model(model, batch, loss_fn)
        batch_sum, batch_count = loss_fn(output, batch) if loss_fn else own_loss(model, output, batch)
        batch_sum.backward()
        total += batch_sum.item()
        count += float(batch_count)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= count
    return total / count


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in trainable.items()
    }


def _named(values: Mapping[str, Tensor] | Sequence[float]) -> dict[str, Tensor]:
    if isinstance(values, Mapping):
        return dict(values)
    return {f"step {index}": torch.tensor(value, dtype=torch.float64) for index, value in enumerate(values)}


def _differences(actual: Any, expected: Any) -> dict[str, float]:
    a, b = _named(actual), _named(expected)
    if a.keys() != b.keys():
        raise AssertionError(f"not the same entries, only one side has: {sorted(a.keys() ^ b.keys())}")
    for name in b:
        if a[name].shape != b[name].shape:
            raise AssertionError(f"{name}: shape {tuple(a[name].shape)}, expected {tuple(b[name].shape)}")
    return {name: _largest(a[name] - b[name]) for name in b}


def _largest(tensor: Tensor) -> float:
    """max |x|; nan and inf both give inf, so that `max` over several does not lose a nan."""
    value = tensor.detach().abs().max().item() if tensor.numel() else 0.0
    return value if math.isfinite(value) else math.inf
