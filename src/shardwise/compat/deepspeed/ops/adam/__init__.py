"""Offer DeepSpeed's Adams, which are torch's: the engine shards, offloads and fuses any of them."""

from __future__ import annotations

from typing import Any, Final

from torch.optim import Adam, AdamW, Optimizer

from shardwise.compat.deepspeed.finder import answers
from shardwise.config.errors import ConfigError

__getattr__ = answers(__name__)

_MADE_BY: Final = "_deepspeed_class"


class _TorchAdam(type):
    """Lets `isinstance` take what a class has made, which is torch's."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return getattr(instance, _MADE_BY, None) is cls


class DeepSpeedCPUAdam(metaclass=_TorchAdam):
    """Makes torch's AdamW, or Adam with `adamw_mode=False`; its step runs where the states are stored."""

    def __new__(  # type: ignore[misc]
        cls,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        **options: Any,
    ) -> Optimizer:
        """Return the optimizer; the arguments are those of DeepSpeed."""
        if not bias_correction:
            raise ConfigError("adam-bias-correction", "torch's Adams correct the bias; leave bias_correction out")
        optimizer_class = AdamW if adamw_mode else Adam
        made = optimizer_class(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
        return marked(made, cls, adamw_mode)


class FusedAdam(metaclass=_TorchAdam):
    """Makes torch's AdamW, or Adam with `adam_w_mode=False`."""

    def __new__(  # type: ignore[misc]
        cls, params: Any, lr: float = 1e-3, bias_correction: bool = True, *args: Any, **options: Any
    ) -> Optimizer:
        """Return the optimizer; the arguments are those of DeepSpeed."""
        names = ("betas", "eps", "adam_w_mode", "weight_decay", "amsgrad", "set_grad_none")
        arguments = {**dict(zip(names, args, strict=False)), **options}
        arguments["adamw_mode"] = arguments.pop("adam_w_mode", True)
        made = DeepSpeedCPUAdam(params, lr, bias_correction, **arguments)
        return marked(made, cls, arguments["adamw_mode"])


def marked(made: Optimizer, kind: type, is_adamw: bool) -> Optimizer:
    """Return an optimizer, which `isinstance` takes as of one of these classes from now on.

    Args:
        is_adamw: which of the two it is.
    """
    setattr(made, _MADE_BY, kind)
    made.adam_w_mode = is_adamw  # type: ignore[attr-defined]
    return made
