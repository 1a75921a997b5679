"""Measures how long the units of a model take on this machine, for a cut by measured costs.

>>> model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
>>> seconds = measure_units(model, torch.ones(4, 8), num_runs=1)
>>> list(seconds), all(value > 0 for value in seconds.values())
(['0', '1', '2'], True)
>>> config = {"mesh": {"pp": 2}, "pipeline": {"unit_seconds": seconds}}
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.loss import LossFn
from shardwise.config.arguments import checked
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, MeshConfig, PipelineConfig
from shardwise.config.sections import Positive
from shardwise.construction.scan import scan_model
from shardwise.runtime.batch_errors import refuse_misfit
from shardwise.runtime.device import choose_kind, current_device, synchronize
from shardwise.runtime.module_hooks import call_model, watch_calls
from shardwise.runtime.torch_private import pytree

_Call = tuple[tuple[Any, ...], dict[str, Any]]


@checked
def measure_units(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    units: Sequence[str] | None = None,
    num_runs: Positive = 5,
) -> dict[str, float]:
    """Return the seconds that each unit of a model takes forward and backward, for `pipeline.unit_seconds`.

    Each unit is timed alone, on the inputs that it gets from the model. Of units of one class whose parameters and
    inputs have equal shapes, only one is timed.

    Args:
        model: the whole model, on the device where it is to be timed, in the precision of the training.
        batch: one micro-batch on that device, as for `engine.train_step`.
        loss_fn: as for `initialize`; its time is added to the last unit's. None times no loss.
        num_runs: how many runs to take the median of.

    Raises:
        ConfigError: the model has no units, or a unit does not run in its forward.
    """
    inputs = batch[0] if loss_fn is not None and isinstance(batch, tuple | list) else batch
    before = [parameter.grad for parameter in model.parameters()]
    calls, output = _record_calls(model, inputs)
    seconds: dict[str, float] = {}
    known: dict[Hashable, float] = {}
    config = Config(mesh=MeshConfig(pp=2), pipeline=PipelineConfig(units=None if units is None else tuple(units)))
    found = scan_model(model, config).stage_units
    for unit in found:
        seconds[unit.name] = 0.0
        for name in {id(model.get_submodule(name)): name for name in unit.modules}.values():
            if name not in calls:
                raise ConfigError(
                    "unit-not-run", f"unit {name} does not run in the model's forward; name others in pipeline.units"
                )
            module = model.get_submodule(name)
            key = type(module), _shapes(dict(module.named_parameters())), _shapes(calls[name])
            if key not in known:
                known[key] = _median_s(partial(_run, module, calls[name]), num_runs)
            seconds[unit.name] += known[key]
    if loss_fn is not None:
        seconds[found[-1].name] += _median_s(lambda: loss_fn(_leaves_of(output), batch), num_runs)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        parameter.grad = gradient
    return seconds


def _record_calls(model: nn.Module, inputs: Any) -> tuple[dict[str, _Call], Any]:
    """Return the arguments of every module's first call, and the model's output."""
    calls: dict[str, _Call] = {}

    def note(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(name, (args, dict(kwargs)))

    with torch.no_grad(), watch_calls(model, note, lambda output: None):
        try:
            output = call_model(model, inputs)
        except Exception as error:
            refuse_misfit(error, model, inputs)
            raise
    return calls, output


def _run(module: nn.Module, call: _Call) -> Any:
    args, kwargs = call
    return module(*_leaves_of(args), **_leaves_of(kwargs))


def _median_s(run: Callable[[], Any], num_runs: int) -> float:
    """Return the median time of forward and backward; the first run, which warms up, does not count."""
    times_s, device = [], current_device(choose_kind("auto"))
    for _ in range(num_runs + 1):
        synchronize(device)
        start_s = time.perf_counter()
        roots = [leaf for leaf in pytree.tree_leaves(run()) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        synchronize(device)
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s[1:])


def _leaves_of(tree: Any) -> Any:
    """Return the same values as leaves; those that can require gradients do."""

    def leaf_of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().requires_grad_(value.is_floating_point())

    return pytree.tree_map(leaf_of, tree)


def _shapes(tree: Mapping[str, Tensor] | _Call) -> Hashable:
    leaves, structure = pytree.tree_flatten(tree)
    return str(structure), tuple(
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
    )
