"""Compares two trainings and finds the first value that differs. It needs no process group; a trace is also a file.

>>> expected = TrainingTrace([2.0], [1.0], {"up": torch.ones(2), "down": torch.ones(2)})
>>> actual = TrainingTrace([2.0], [1.0], {"up": torch.ones(2), "down": torch.tensor([1.0, 1.5])})
>>> found = first_difference(actual, expected)
>>> found.what, found.step, found.names, found.error
('gradient', 1, ('down',), 0.5)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

PARITY: Final = 1e-9

What = Literal["loss", "gradient", "gradient norm", "parameter"]


@dataclass(frozen=True)
class TrainingTrace:
    """Holds a training's values: an entry a step, and the gradients of the first step before they are clipped.

    Parameters are stored under their first name, in the order of `named_parameters()`.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the trace as safetensors."""
        tensors = {f"gradient/{name}": tensor for name, tensor in self.gradients.items()}
        for step, parameters in enumerate(self.parameters):
            tensors |= {f"{step}/{name}": tensor for name, tensor in parameters.items()}
        numbers = {"losses": self.losses, "grad_norms": self.grad_norms}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"trace": json.dumps(numbers)})

    @classmethod
    def load(cls, path: Path) -> TrainingTrace:
        """Read what `save` wrote."""
        with safe_open(path, framework="pt") as file:
            trace = cls(**json.loads(file.metadata()["trace"]))
            trace.parameters.extend({} for _ in trace.losses)
            for key in file.keys():  # noqa: SIM118, it is no mapping
                state, _, name = key.partition("/")
                (trace.gradients if state == "gradient" else trace.parameters[int(state)])[name] = file.get_tensor(key)
        return trace


@dataclass(frozen=True)
class TrainingDifference:
    """Describes the first difference of two trainings.

    Attributes:
        what: the kind of value that differs.
        step: the step in which it differs, counted from 1.
        error: the largest error in the first tensor that differs, as a share of the largest value in the model.
        names: all tensors of this step that differ, in the order of the forward; empty for a loss or norm.
        values: the layout's value and one process's value at that error.
    """

    what: What
    step: int
    error: float
    names: tuple[str, ...]
    values: tuple[float, float]


def first_difference(
    actual: TrainingTrace, expected: TrainingTrace, tolerance: float = PARITY
) -> TrainingDifference | None:
    """Return the first value, in the order of the training, that is not equal; None where all are equal.

    Values are equal if max |a - b| <= tolerance * max |b|; for tensors, max |b| is over all of the model.

    Args:
        tolerance: the largest relative error that counts as equal.
    """
    for what, step, values, references in _stations(actual, expected):
        errors = _errors(values, references)
        names = tuple(name for name, error in errors.items() if error > tolerance)
        if names:
            pair = _worst_pair(values.get(names[0]), references[names[0]])
            return TrainingDifference(
                what, step, errors[names[0]], names if what in ("gradient", "parameter") else (), pair
            )
    return None


def largest_error(actual: TrainingTrace, expected: TrainingTrace) -> float:
    """Return the largest error of all losses, norms, gradients and parameters, as in `TrainingDifference.error`."""
    pairs = (_errors(values, references) for _, _, values, references in _stations(actual, expected))
    return max(error for errors in pairs for error in errors.values())


def _stations(
    actual: TrainingTrace, expected: TrainingTrace
) -> Iterator[tuple[What, int, Mapping[str, Tensor], Mapping[str, Tensor]]]:
    for index in range(len(expected.losses)):
        yield "loss", index + 1, _number(actual.losses, index), _number(expected.losses, index)
        if index == 0:
            yield "gradient", 1, actual.gradients, expected.gradients
        yield "gradient norm", index + 1, _number(actual.grad_norms, index), _number(expected.grad_norms, index)
        if index < len(expected.parameters):
            values = actual.parameters[index] if index < len(actual.parameters) else {}
            yield "parameter", index + 1, values, expected.parameters[index]


def _number(values: list[float], index: int) -> dict[str, Tensor]:
    return {"": torch.tensor(values[index], dtype=torch.float64)} if index < len(values) else {}


def _errors(values: Mapping[str, Tensor], references: Mapping[str, Tensor]) -> dict[str, float]:
    """Return each tensor's largest error as a share of the largest value of all; infinite for a missing tensor."""
    largest = max((_largest(reference) for reference in references.values()), default=0.0)
    return {name: _error(values.get(name), reference, largest) for name, reference in references.items()}


def _error(value: Tensor | None, reference: Tensor, largest: float) -> float:
    if value is None or value.shape != reference.shape:
        return math.inf
    difference = _largest(value - reference)
    if not (math.isfinite(difference) and math.isfinite(largest)):
        return math.inf
    return difference / largest if largest > 0 else (math.inf if difference > 0 else 0.0)


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() > 0 else 0.0


def _worst_pair(value: Tensor | None, reference: Tensor) -> tuple[float, float]:
    if value is None or value.shape != reference.shape:
        return math.nan, _largest(reference)
    index = int((value - reference).abs().flatten().argmax())
    return value.flatten()[index].item(), reference.flatten()[index].item()
