"""This module has optimizers and learning-rate schedules by name.

A config names optimizers whose update of an element depends on that element alone, since they see 1-D pieces of
parameters, and Muon, which gets whole matrices (`shardwise.zero.matrix_step`). Of optimizers that a user gives, a trial
tells what they need (`shardwise.runtime.optimizer_probe`).

>>> sorted(optimizer_names())[:4]
['adadelta', 'adagrad', 'adam', 'adamax']
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from shardwise.config.errors import EngineError
from shardwise.config.resolve import Config, ConfigError, OptimizerConfig, SchedulerConfig, shown_value
from shardwise.runtime.muon import MuonWithAdamW
from shardwise.runtime.optimizer_probe import inner_optimizers

# These classes of torch's work on a whole matrix, or need a closure: they have no name in a config.
_NOT_ELEMENT_WISE: Final = frozenset({"lbfgs", "adafactor", "muon", "sparseadam"})

ParamGroups = Sequence[dict[str, Any]]


def optimizer_names() -> Mapping[str, type[Optimizer]]:
    """Return the element-wise optimizers of `torch.optim`, Lion and Muon, by lower-case name."""
    classes = inspect.getmembers(torch.optim, lambda value: inspect.isclass(value) and issubclass(value, Optimizer))
    names = {name.lower(): kind for name, kind in classes if kind is not Optimizer}
    known = {name: kind for name, kind in names.items() if name not in _NOT_ELEMENT_WISE}
    return MappingProxyType({"lion": Lion, **known, "muon": MuonWithAdamW})


def optimizer_kind(name: str) -> type[Optimizer]:
    """Return the optimizer class of a name, in upper or lower case.

    Raises:
        ConfigError: no optimizer that is right on pieces has that name.
    """
    kinds = optimizer_names()
    kind = kinds.get(name.lower())
    if kind is None:
        shown, names = f"optimizer.name={shown_value(name)}", f"choose one of {', '.join(sorted(kinds))}"
        if name.lower() in _NOT_ELEMENT_WISE:
            raise ConfigError("optimizer-element-wise", f"{shown} is not element-wise; {names}")
        raise ConfigError("unknown-optimizer", f"{shown} is unknown; {names}")
    return kind


def build_optimizer(config: OptimizerConfig, groups: ParamGroups) -> Optimizer:
    """Construct the optimizer that `config.name` names over parameter groups, fused where torch has a fused kernel.

    Raises:
        ConfigError: no optimizer that is right on pieces has that name.
    """
    kind = optimizer_kind(config.name)
    accepted = inspect.signature(kind).parameters
    wanted: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "momentum": config.kept_momentum,
        "weight_decay": config.weight_decay,
        "fused": True,
    }
    return kind(groups, **{key: value for key, value in wanted.items() if key in accepted})


def scale_in_step(optimizer: Optimizer, factor: float) -> bool:
    """Let the next step of a fused optimizer multiply its fp32 gradients by `factor` itself; say whether it will.

    It spares a pass over the gradients. The kernels divide by an attribute `grad_scale`, which is to be deleted after
    the step: the protocol between `torch.amp.GradScaler` and torch's optimizers.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    scale = fused_grad_scale(type(optimizer), factor, {param.dtype for param in params})
    if not is_fused or scale is None:
        return False
    optimizer.grad_scale = torch.tensor(scale, device=params[0].device)  # type: ignore[attr-defined]
    return True


def fused_grad_scale(kind: type[Optimizer], factor: float, dtypes: Collection[torch.dtype]) -> float | None:
    """Return the fp32 number by which a fused step divides to multiply by `factor`; None where it cannot.

    Args:
        kind: the class of the optimizer.
        factor: turns accumulated sums into the gradient.
        dtypes: of the gradients.
    """
    if kind not in _SCALING or not 1e-30 < abs(factor) < 1e30 or any(dtype != torch.float32 for dtype in dtypes):
        return None
    return torch.tensor(1.0 / factor, dtype=torch.float32).item()


def lacks_some_momentum(optimizer: Optimizer, stepped: Sequence[Tensor]) -> bool:
    """Say whether torch's fused SGD would meet parameters with and without momentum, which its kernel cannot step.

    Args:
        optimizer: any.
        stepped: what it is about to step.
    """
    if not isinstance(optimizer, SGD) or not any(group.get("fused") for group in optimizer.param_groups):
        return False
    if not any(group["momentum"] for group in optimizer.param_groups):
        return False
    have = [optimizer.state.get(param, {}).get("momentum_buffer") is not None for param in stepped]
    return any(have) and not all(have)


@contextmanager
def stepped_unfused(optimizer: Optimizer) -> Iterator[None]:
    """Let the optimizer step without its fused kernel."""
    fused = [group.get("fused") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["fused"] = False
    try:
        yield
    finally:
        for group, before in zip(optimizer.param_groups, fused, strict=True):
            group["fused"] = before


_SCALING: Final = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def learning_rate_factor(config: SchedulerConfig, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate at a step as a fraction of the peak: linear warm-up, then the named decay.

    >>> factor = learning_rate_factor(SchedulerConfig(name="linear", warmup_steps=2, final_ratio=0.0), total_steps=6)
    >>> [round(factor(step), 2) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    name = config.name or "constant"

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
        shape = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
        return config.final_ratio + (1.0 - config.final_ratio) * shape[name]

    return factor


def schedule_of(config: Config) -> Callable[[int], float]:
    """Return the schedule that the config names: constant where it names none; a decay needs a length.

    >>> schedule_of(Config())(10_000)
    1.0

    Raises:
        ConfigError: it names a decay and no length.
    """
    section, run = config.scheduler, config.run
    total_steps = section.total_steps or (run.steps if "steps" in run.model_fields_set else None)
    if section.name is None and section.total_steps is not None:
        section = section.model_copy(update={"name": "cosine"})
    if total_steps is None and section.name in ("linear", "cosine"):
        raise ConfigError(
            "scheduler-length",
            f"scheduler.name={section.name} decays over a length that is not given; set scheduler.total_steps to the "
            "number of steps, or leave scheduler.name out for a constant rate",
        )
    return learning_rate_factor(section, total_steps or 1)


def own_scheduler(config: Config, optimizer: Optimizer) -> LambdaLR:
    """Make the config's schedule over all of the optimizer's parameter groups, those too that are added later.

    Where it names none, rates are the script's, which may set them between steps.
    """
    section, factor = config.scheduler, schedule_of(config)
    is_constant = section.name in (None, "constant") and section.total_steps is None and section.warmup_steps == 0
    return _OwnSchedule(optimizer, _unchanged if is_constant else factor)


def _unchanged(step: int) -> float:
    """Is the factor of a schedule that leaves rates as they are; an optimizer that finds its own has None."""
    return 1.0


class _OwnSchedule(LambdaLR):
    """Gives groups that were added later the same factor of their own rate."""

    def get_lr(self) -> list[float | Tensor]:
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            rate = group["lr"]
            group["initial_lr"] = rate.clone() if isinstance(rate, Tensor) else rate
            self.base_lrs.append(group["initial_lr"])
            self.lr_lambdas.append(self.lr_lambdas[0])
        if self.lr_lambdas[0] is _unchanged:
            return [group["lr"] for group in self.optimizer.param_groups]
        return super().get_lr()


def check_scheduler(scheduler: object, optimizer: Optimizer) -> None:
    """Raise for a schedule of another optimizer, which would change nothing.

    Args:
        scheduler: any; a schedule names its optimizer in an attribute.
        optimizer: the engine's.

    Raises:
        ConfigError: it is of another one.
    """
    found: Any = getattr(scheduler, "optimizer", None)
    while not isinstance(found, Optimizer) and hasattr(found, "optimizer"):  # such as one that wraps it
        found = found.optimizer
    if isinstance(found, Optimizer) and found is not optimizer and found not in inner_optimizers(optimizer):
        raise ConfigError(
            "scheduler-of-another",
            f"the scheduler {type(scheduler).__name__} changes the rates of another {type(found).__name__} than the "
            "engine's optimizer; make it from the optimizer that is given to initialize, or from engine.optimizer",
        )


def advance(scheduler: Any) -> None:
    """Advance a schedule by a step, unless it needs a metric, as `ReduceLROnPlateau`: then the script does so."""
    if getattr(type(scheduler), "step", None) is LRScheduler.step or not _needs_arguments(scheduler.step):
        scheduler.step()


def _needs_arguments(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a function in C
        return False
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return any(each.default is inspect.Parameter.empty and each.kind not in kinds for each in parameters)


_BLOCK_NUMEL: Final = 256 * 1024  # of which a core's cache holds the four tensors of a step

Options = dict[str, Any]


def lion(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    maximize: bool = False,
) -> None:
    """Take one step in place; gradients stay as they are.

    Args:
        params: of any shapes.
        grads: of the same shapes and dtypes.
        exp_avgs: of the same shapes and dtypes; zeros before the first step.
        lr: the size of the update of each element; a tensor of one element is read.
        betas: how much of the momentum goes into the update, and how much of it stays.
        weight_decay: times `lr`, the share of a parameter that is subtracted from it.
        maximize: go up instead of down.
    """
    rate = float(lr)
    for whole in zip(params, grads, exp_avgs, strict=True):
        for param, grad, exp_avg in _blocks(*whole):
            direction = exp_avg.lerp(-grad if maximize else grad, 1 - betas[0]).sign_()
            if weight_decay != 0:
                param.mul_(1 - rate * weight_decay)
            param.add_(direction, alpha=-rate)
            exp_avg.lerp_(-grad if maximize else grad, 1 - betas[1])


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return the tensors whole, or on the CPU their parts, which stay in the cache from one pass to the next."""
    is_cut = tensors[0].numel() > _BLOCK_NUMEL and all(each.is_cpu and each.is_contiguous() for each in tensors)
    if is_cut:
        return zip(*(each.view(-1).split(_BLOCK_NUMEL) for each in tensors), strict=True)
    return iter((tensors,))


class Lion(Optimizer):
    """Steps by the sign of an interpolation of momentum and gradient, with decoupled weight decay.

    Args:
        params: parameters, or groups of them as torch's optimizers take.
        lr: the size of each update.
        betas: of the update, and of the momentum; (0.9, 0.99) in the paper.
        weight_decay: a share of the parameter, times `lr`.
        maximize: go up instead of down.

    Raises:
        ConfigError: an option is out of its range.
        EngineError: from `step`: a gradient is sparse.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ConfigError(
                "lr-one-element",
                f"lr has {lr.numel()} elements but one rate holds for all parameters; give one element",
            )
        for name, value in (("lr", float(lr)), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ConfigError("optimizer-option-negative", f"{name}={value} is negative; choose 0 or more")
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError("betas-range", f"betas={betas} are not both in [0, 1); the paper's are (0.9, 0.99)")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: computes the loss again, with gradients; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                self._step_group(group)
        return loss

    def _step_group(self, group: Options) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        if any(param.grad.is_sparse for param in params):
            raise EngineError(
                "sparse-gradient",
                "Lion got a sparse gradient but steps dense ones only; build the layer with sparse=False",
            )
        for param in params:
            if not self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        lion(
            params,
            [param.grad for param in params],
            [self.state[param]["exp_avg"] for param in params],
            **{name: group[name] for name in ("lr", "betas", "weight_decay", "maximize")},
        )
