"""The optimizers that torch lacks and whose update of an element depends on that element alone.

Each is a class that holds options, and a kernel that steps lists of tensors. The class steps with it, and so does the
host, or a few blocks of encoded states at a time (`shardwise.offload.cpu_optimizer`), through its row in
`shardwise.optim.rules`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.config.errors import ConfigError, EngineError

_BLOCK_NUMEL: Final = 256 * 1024  # of which a core's cache holds the four tensors of a step
# What a device steps at a time: it has no such cache, but needs memory for what is between the operations.
_LIST_NUMEL: Final = 8 * 1024 * 1024

Options = Mapping[str, Any]
Row = TypeVar("Row", bound=tuple[Any, ...])


@dataclass(frozen=True)
class StepTensors:
    """Holds what one call of a kernel updates: tensors that share their options and the number of steps taken.

    Attributes:
        params: fp32 or fp64, of any shapes; the host's are 1-D.
        grads: of the same shapes and dtypes; the host's may be overwritten.
        states: for each of `params` by name, of its shape and dtype; before the first step at their first values.
        step: how many steps they have taken before.
        is_first: no step has been taken, so that SGD's momentum starts as the gradient itself.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Sequence[Mapping[str, Tensor]]
    step: float
    is_first: bool

    def all(self, name: str) -> list[Tensor]:
        """Return one state of all tensors."""
        return [states[name] for states in self.states]

    def counters(self) -> list[Tensor]:
        """Return a counter for each tensor; torch's functions increment it before they use it."""
        # Filled where they are: to copy a number to a device holds up the host until the device has come so far.
        first = self.params[0]
        return list(torch.full((len(self.params),), self.step, dtype=torch.float32, device=first.device).unbind())

    def blocks(self, *names: str) -> Iterator[tuple[Tensor, ...]]:
        """Yield parameter, gradient and states, whole, or on the CPU their parts: these stay in the cache."""
        for tensors in zip(self.params, self.grads, *map(self.all, names), strict=True):
            is_cut = tensors[0].numel() > _BLOCK_NUMEL and all(each.is_cpu and each.is_contiguous() for each in tensors)
            if is_cut:
                yield from zip(*(tensor.view(-1).split(_BLOCK_NUMEL) for tensor in tensors), strict=True)
            else:
                yield tensors

    def lists(self, *names: str) -> Iterator[Iterable[tuple[Tensor, ...]]]:
        """Yield what `blocks` does in the lists of `in_lists`."""
        return (zip(*rows, strict=True) for rows in in_lists(self.blocks(*names)))


def in_lists(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield rows that begin with a tensor in lists for torch's functions over lists.

    On a device each of these launches one kernel; on the CPU a list stays in the cache.
    """
    taken: list[Row] = []
    num_taken = 0
    for row in rows:
        if taken and num_taken + row[0].numel() > (_BLOCK_NUMEL if row[0].is_cpu else _LIST_NUMEL):
            yield taken
            taken, num_taken = [], 0
        taken.append(row)
        num_taken += row[0].numel()
    if taken:
        yield taken


class ElementWise(Optimizer):
    """Steps the parameters that have a gradient by a kernel of its class.

    Attributes:
        STATES: the tensors that are kept of each parameter; they are zeros before the first step.
        COUNTS: whether `step` is kept of each parameter, fp32 and 0-d.
    """

    STATES: ClassVar[tuple[str, ...]]
    COUNTS: ClassVar[bool]

    @staticmethod
    def kernel(options: Options, tensors: StepTensors) -> None:
        """Take one step in place; gradients stay as they are."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; return what `closure`, which computes the loss again with gradients, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: Options) -> None:
        by_step: dict[float, list[tuple[Tensor, Tensor]]] = {}
        for param in group["params"]:
            if (grad := param.grad) is None:
                continue
            if grad.is_sparse:
                raise EngineError(
                    "sparse-gradient",
                    f"{type(self).__name__} got a sparse gradient but steps dense ones only; build the layer with "
                    "sparse=False",
                )
            state = self.state[param]
            if not state:
                state |= {name: torch.zeros_like(param, memory_format=torch.preserve_format) for name in self.STATES}
                if self.COUNTS:
                    state["step"] = torch.tensor(0.0)
            by_step.setdefault(float(state.get("step", 0.0)), []).append((param, grad))
        for num_steps, pairs in by_step.items():
            params, grads = zip(*pairs, strict=True)
            states = [self.state[param] for param in params]
            self.kernel(group, StepTensors(params, grads, states, num_steps, is_first=num_steps == 0))
            for state in states if self.COUNTS else ():
                state["step"] += 1


def _check_options(lr: float | Tensor, **shares: float) -> None:
    """Raise for what steps no optimizer: a rate of several elements, a negative option."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ConfigError(
            "lr-one-element",
            f"lr has {lr.numel()} elements but one rate holds for all parameters; give one element",
        )
    for name, value in (("lr", float(lr)), *shares.items()):
        if not value >= 0:
            raise ConfigError("optimizer-option-negative", f"{name}={value} is negative; choose 0 or more")


def _check_betas(betas: tuple[float, ...], usual: tuple[float, ...]) -> None:
    if not all(0 <= beta < 1 for beta in betas):
        raise ConfigError("betas-range", f"betas={betas} are not all in [0, 1); the paper's are {usual}")


class Lion(ElementWise):
    """Steps by the sign of an interpolation of momentum and gradient, with decoupled weight decay.

    The definition is algorithm 2 of Chen et al. 2023, arXiv 2302.06675.

    Args:
        params: parameters, or groups of them as torch's optimizers take.
        betas: how much of the momentum goes into the update, and how much of it stays; (0.9, 0.99) in the paper.
        weight_decay: a share of the parameter, times `lr`.

    Raises:
        ConfigError: an option is out of its range.
        EngineError: from `step`: a gradient is sparse.
    """

    STATES = ("exp_avg",)
    COUNTS = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        _check_options(lr, weight_decay=weight_decay)
        _check_betas(betas, (0.9, 0.99))
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @staticmethod
    def kernel(options: Options, tensors: StepTensors) -> None:
        rate, (beta_update, beta_kept) = float(options["lr"]), options["betas"]
        for params, grads, means in tensors.lists("exp_avg"):
            if options["maximize"]:
                grads = torch._foreach_neg(grads)
            directions = torch._foreach_lerp(means, grads, 1 - beta_update)
            torch._foreach_sign_(directions)
            if options["weight_decay"] != 0:
                torch._foreach_mul_(params, 1 - rate * options["weight_decay"])
            torch._foreach_add_(params, directions, alpha=-rate)
            torch._foreach_lerp_(means, grads, 1 - beta_kept)


class AdEMAMix(ElementWise):
    """Steps as AdamW does, with a second, slow mean of the gradients added to the first.

    The definition is algorithm 1 of Pagliardini et al. 2024, arXiv 2409.03137.

    Args:
        params: parameters, or groups of them as torch's optimizers take.
        betas: of the fast mean, and of the mean of squares.
        eps: a term against division by zero.
        weight_decay: a share of the parameter, times `lr`.
        alpha: what the slow mean is multiplied by.
        warmup_steps: steps over which `alpha` grows from 0, and the slow mean's memory from the fast one's; None for
            the whole from the first step on.

    Raises:
        ConfigError: an option is out of its range.
        EngineError: from `step`: a gradient is sparse.
    """

    STATES = ("exp_avg", "exp_avg_slow", "exp_avg_sq")
    COUNTS = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        beta_slow: float = 0.9999,
        alpha: float = 5.0,
        warmup_steps: int | None = None,
    ) -> None:
        _check_options(lr, eps=eps, weight_decay=weight_decay, alpha=alpha)
        _check_betas((*betas, beta_slow), (0.9, 0.999, 0.9999))
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "beta_slow": beta_slow, "alpha": alpha, "warmup_steps": warmup_steps})

    @staticmethod
    def kernel(options: Options, tensors: StepTensors) -> None:
        rate, (beta_fast, beta_squares), step = float(options["lr"]), options["betas"], tensors.step + 1
        alpha, beta_slow = _warmed_up(options, step)
        to_mean, to_root = 1 / (1 - beta_fast**step), 1 / math.sqrt(1 - beta_squares**step)
        for params, grads, means, slow_means, squares in tensors.lists(*AdEMAMix.STATES):
            torch._foreach_lerp_(means, grads, 1 - beta_fast)
            torch._foreach_lerp_(slow_means, grads, 1 - beta_slow)
            torch._foreach_mul_(squares, beta_squares)
            torch._foreach_addcmul_(squares, grads, grads, value=1 - beta_squares)
            updates, roots = torch._foreach_mul(means, to_mean), torch._foreach_sqrt(squares)
            torch._foreach_add_(updates, slow_means, alpha=alpha)
            torch._foreach_mul_(roots, to_root)
            torch._foreach_add_(roots, options["eps"])
            torch._foreach_div_(updates, roots)
            torch._foreach_mul_(params, 1 - rate * options["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-rate)


def _warmed_up(options: Options, step: float) -> tuple[float, float]:
    """Return alpha and the slow beta at a step, from 1 on: equations 3 and 4 of the paper.

    The slow mean's half-life grows linearly.
    """
    alpha, beta_slow, beta_fast = options["alpha"], options["beta_slow"], options["betas"][0]
    if not options["warmup_steps"] or step >= options["warmup_steps"] or not beta_fast or not beta_slow:
        return alpha, beta_slow
    share = step / options["warmup_steps"]
    fast, slow = math.log(beta_fast), math.log(beta_slow)
    return share * alpha, min(math.exp(fast * slow / ((1 - share) * slow + share * fast)), beta_slow)
