"""The Lion optimizer: the sign of an interpolation of momentum and gradient, of one size for all elements.

Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675), algorithm 2. Its one state is the
momentum, so it takes a third less memory than Adam; its learning rate wants to be 3 to 10 times smaller, its weight
decay as much larger.

>>> weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
>>> weight.grad = torch.tensor([0.5, 0.001])
>>> Lion([weight], lr=0.25, weight_decay=0.0).step()
>>> weight.tolist()
[0.75, -1.25]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

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
        exp_avgs: likewise; zeros before the first step.
        lr: the size of the update of each element; a tensor of one element is read.
        betas: how much of the momentum goes into the update, and how much of it stays.
        weight_decay: times `lr`, what share of a parameter is taken from it.
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
    """The tensors whole, or on the CPU their parts, which stay in the cache from one pass to the next."""
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
        ValueError: an option is out of its range.
        RuntimeError: from `step`: a gradient is sparse.
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
            raise ValueError(f"lr has {lr.numel()} elements but one rate holds for all parameters; give one element")
        for name, value in (("lr", float(lr)), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name}={value} is negative; choose 0 or more")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas} are not both in [0, 1); the paper's are (0.9, 0.99)")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: computes the loss anew, with gradients; its result is returned.
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
            raise RuntimeError(
                "Lion got a sparse gradient but steps dense ones only; build the layer with sparse=False"
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
