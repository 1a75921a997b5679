"""Offer DeepSpeed's Adams, which are torch's: the engine shards, offloads and fuses any of them."""

from __future__ import annotations

from typing import Any

from torch.optim import Adam, AdamW, Optimizer


class DeepSpeedCPUAdam:
    """Makes torch's AdamW, or Adam with `adamw_mode=False`; its step runs where the states are stored."""

    def __new__(  # type: ignore[misc]  # noqa: PLR0913  DeepSpeed's arguments
        cls,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        **options: Any,
    ) -> Optimizer:
        """Return the optimizer; the arguments are DeepSpeed's."""
        kind = AdamW if adamw_mode else Adam
        return kind(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


class FusedAdam:
    """Makes torch's AdamW, or Adam with `adam_w_mode=False`."""

    def __new__(  # type: ignore[misc]  # noqa: PLR0913  DeepSpeed's arguments
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> Optimizer:
        """Return the optimizer; the arguments are DeepSpeed's."""
        kind = AdamW if adam_w_mode else Adam
        return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
