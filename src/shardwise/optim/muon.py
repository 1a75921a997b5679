"""This module has Muon, which subtracts from matrices their orthogonalized momentum, and steps all else as AdamW does.

The definition is `torch.optim.Muon`'s with `adjust_lr_fn="match_rms_adamw"`: updates are as large as AdamW's, so one
learning rate serves both (Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982).

>>> update = orthogonalize(torch.diag(torch.tensor([3.0, 0.5])))
>>> bool((0.6 < update.diagonal()).all() and (update.diagonal() < 1.3).all())
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import AdamW

from shardwise.optim.rules import IS_MATRIX, MOMENTUM, NUM_ITERATIONS

# An option of the optimizer's parameter groups: of which parts along which dim they are made.
FUSED: Final = "fused_dim"

_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)  # the steepest at 0; singular values end between 0.7 and 1.2
_EPS: Final = 1e-7


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which matrices of `dtype` are orthogonalized: bf16 on a GPU, where it is many times faster.

    >>> compute_dtype(torch.float32, torch.device("cpu"))
    torch.float32
    """
    return torch.bfloat16 if device.type not in ("cpu", "meta") and dtype == torch.float32 else dtype


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return the matrix with singular values of about 1, by Newton-Schulz iterations in its own dtype.

    Args:
        matrix: [..., m, n]; each matrix of a stack is orthogonalized by itself.
    """
    # Owners do not stack their matrices, though it would launch less: a device may multiply stacks of other sizes by
    # other kernels, and then how many matrices a rank owns, which depends on the layout, would change the numbers.
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    stack = matrix.reshape(-1, *matrix.shape[-2:])
    x = stack.mT if is_tall else stack
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).reshape(matrix.shape)


def update_scale(shape: Sequence[int]) -> float:
    """Return the factor that makes a matrix's update as large as AdamW's usually are."""
    return 0.2 * math.sqrt(max(shape[-2:]))


def advance_momenta(momenta: list[Tensor], gradients: list[Tensor], shares: list[float]) -> Sequence[Tensor]:
    """Add gradients to their momenta in place, and return Nesterov's look ahead for each; element by element.

    Args:
        momenta: of the gradients' shapes and dtypes.
        shares: how much of each momentum stays.
    """
    torch._foreach_lerp_(momenta, gradients, [1 - share for share in shares])
    return torch._foreach_lerp(gradients, momenta, shares)


def apply_updates(updates: Iterable[tuple[Tensor, Tensor, float, Mapping[str, Any]]]) -> None:
    """Decay parameters, or parts of them, and subtract their updates, in place; element by element.

    Args:
        updates: a parameter, its update, the scale of that, and the options of the parameter's group.
    """
    by_factors: dict[tuple[float, float], tuple[list[Tensor], list[Tensor]]] = {}
    for param, update, scale, options in updates:
        rate = float(options["lr"])
        params, sums = by_factors.setdefault((1 - rate * options["weight_decay"], -rate * scale), ([], []))
        params.append(param)
        sums.append(update.to(param.dtype))
    for (decay, factor), (params, sums) in by_factors.items():
        torch._foreach_mul_(params, decay)
        torch._foreach_add_(params, sums, alpha=factor)


class MuonWithAdamW(AdamW):
    """Steps the groups with the option `is_matrix` by Muon, and the others by AdamW.

    The engine steps pieces of matrices itself (`shardwise.zero.matrix_step`), and gives those no gradient here.

    Args:
        params: parameter groups as torch's optimizers take.
        betas: AdamW's, and so are `eps` and `fused`.
        eps: a term against division by zero.
        momentum: Muon's: the share of the last momentum that stays.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)
        for group in self.param_groups:
            if group.get(IS_MATRIX):
                group.setdefault("momentum", momentum)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: computes the loss again, with gradients; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        taken: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            for param in group["params"] if group.get(IS_MATRIX) else ():
                if param.grad is not None:
                    self._step_matrix(param, param.grad, group)
                    taken.append((param, param.grad))
                    param.grad = None
        super().step()
        for param, gradient in taken:
            param.grad = gradient
        return loss

    def _step_matrix(self, param: Tensor, gradient: Tensor, options: Mapping[str, Any]) -> None:
        state = self.state[param]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(param, memory_format=torch.preserve_format)
        (ahead,) = advance_momenta([state[MOMENTUM]], [gradient], [options["momentum"]])
        ahead = ahead.to(compute_dtype(param.dtype, param.device))
        fused = options.get(FUSED)  # a `FusedDim` of the layout
        dim, sizes = (0, (param.shape[0],)) if fused is None else (fused.dim, fused.sizes)
        for part, values in zip(ahead.split(sizes, dim), param.split(sizes, dim), strict=True):
            apply_updates([(values, orthogonalize(part), update_scale(part.shape), options)])
