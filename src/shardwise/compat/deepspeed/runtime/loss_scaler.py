"""Offer DeepSpeed's loss scalers: those that its checkpoints hold, and the engine's own, which changes step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from shardwise.compat.deepspeed.runtime.engine import DeepSpeedEngine


class LossScalerBase:
    """Holds a loss scale, as DeepSpeed's checkpoints do; the engine has its own."""

    def __init__(self, cur_scale: float = 1.0) -> None:
        self.cur_scale, self.dynamic = cur_scale, False

    @property
    def loss_scale(self) -> float:
        """Return the scale."""
        return self.cur_scale


class LossScaler(LossScalerBase):
    """Holds a scale that stays."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(scale)


class DynamicLossScaler(LossScalerBase):
    """Holds a scale that changes; the arguments are those of DeepSpeed, of which the first counts."""

    def __init__(self, init_scale: float = 2.0**32, *args: Any, **options: Any) -> None:
        super().__init__(init_scale)
        self.dynamic = True


class _Live:
    """Has the engine's values at the time that it is asked."""

    scale_factor: Final = 2.0

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine

    @property
    def cur_scale(self) -> float:
        """Return the scale of the next step."""
        return self._engine.loss_scale()

    @property
    def dynamic(self) -> bool:
        """Say whether it changes."""
        return self._engine.inner.parts.scaler.is_dynamic

    @property
    def cur_iter(self) -> int:
        """Return the number of steps, those that were left out too."""
        return self._engine.global_steps

    @property
    def scale_window(self) -> int:
        """Return the number of steps without an overflow after which it grows."""
        return self._engine.inner.config.precision.loss_scale_window

    @property
    def min_scale(self) -> float:
        """Return the least scale."""
        return self._engine.inner.config.precision.min_loss_scale


class _LiveScaler(_Live, LossScaler):  # type: ignore[override]  # it is read only
    """Is the engine's scale that stays."""


class _LiveDynamicScaler(_Live, DynamicLossScaler):  # type: ignore[override]
    """Is the engine's scale that changes."""


def scaler_of(engine: DeepSpeedEngine) -> LossScalerBase:
    """Return what has the engine's loss scale, of DeepSpeed's class for it."""
    is_dynamic = engine.inner.parts.scaler.is_dynamic
    return (_LiveDynamicScaler if is_dynamic else _LiveScaler)(engine)
