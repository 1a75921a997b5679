"""These functions widen and scale by the precision policy.

>>> total = torch.zeros(3)
>>> add_widened(total, torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))
>>> total
tensor([1., 2., 3.])
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn

from shardwise.config.resolve import PrecisionConfig
from shardwise.layout.precision import StoredDtype
from shardwise.runtime.torch_private import is_fake

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)

# On the CPU an addition of two dtypes is not vectorised: a cast and an addition of one dtype, through a scratch block
# that fits the cache, take about half its time (`benchmarks/primitives.py`).
SCRATCH_NUMEL: Final = 256 * 1024


def torch_dtype(name: StoredDtype) -> torch.dtype:
    """Return the torch dtype of a config's dtype name, or of opaque parameters."""
    return torch.uint8 if name == "uint8" else TORCH_DTYPES[name]


def buffer_dtype(given: torch.dtype, config: PrecisionConfig) -> torch.dtype:
    """Return the dtype of a buffer in training.

    A buffer that is kept has its own dtype, promoted with the parameters': in an fp64 model it must meet fp64 tensors.

    >>> buffer_dtype(torch.float32, PrecisionConfig(param="bf16")), buffer_dtype(torch.int64, PrecisionConfig())
    (torch.float32, torch.int64)
    """
    if not given.is_floating_point:
        return given
    param = TORCH_DTYPES[config.param or "fp32"]
    return param if config.buffers == "param" else torch.promote_types(given, param)


def add_widened(total: Tensor, addend: Tensor) -> None:
    """Add a tensor to a contiguous one, in place, in the dtype of `total`, the wider or equal one."""
    if total.dtype == addend.dtype or total.device.type != "cpu":
        total.add_(addend)
        return
    scratch = torch.empty(min(SCRATCH_NUMEL, total.numel()), dtype=total.dtype)
    if is_fake(total):
        total.add_(addend)  # after the scratch, which a memory tracker counts; thousands of blocks would be slow
        return
    blocks = (tensor.reshape(-1).split(SCRATCH_NUMEL) for tensor in (total, addend))
    for total_block, addend_block in zip(*blocks, strict=True):
        widened = scratch[: total_block.numel()]
        widened.copy_(addend_block)
        total_block.add_(widened)


def explain_dtypes(error: BaseException, model: nn.Module, dtype: torch.dtype) -> None:
    """Add the fix to a forward's error about dtypes where a buffer is not of the parameters' dtype.

    Args:
        error: of the forward; other errors stay as they are.
    """
    if not isinstance(error, RuntimeError) or re.search(r"dtype|scalar type", str(error)) is None:
        return
    kept = ((name, each.dtype) for name, each in model.named_buffers() if each.is_floating_point())
    name, found = next((each for each in kept if each[1] != dtype), ("", dtype))
    if name:
        error.add_note(
            f"precision.buffers=keep leaves buffers as they were given, such as {name} in {found}, and parameters are "
            f"in {dtype}; cast in the model's forward, or set precision.buffers=param, which casts all of them"
        )


class LossScaler:
    """Holds the factor that keeps fp16 gradients representable; 1 for every other dtype.

    Dynamic scaling halves the factor at an overflow, whose step is skipped, and doubles it after
    `precision.loss_scale_window` steps without one (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2). It counts
    as DeepSpeed's: the first step of all, and the first after an overflow, is none of a window.

    Attributes:
        is_stuck: whether the last step has overflowed at the smallest scale.
    """

    def __init__(self, config: PrecisionConfig) -> None:
        is_fp16 = config.param == "fp16"
        self.is_dynamic = is_fp16 and config.loss_scale == "dynamic"
        self._config = config
        self._num_good_steps = -1
        self._num_overflows_left = config.loss_scale_hysteresis
        self.is_stuck = False
        self.scale = 1.0
        if is_fp16:
            self.scale = config.initial_loss_scale if config.loss_scale == "dynamic" else config.loss_scale

    @property
    def can_shrink(self) -> bool:
        """Say whether an overflow may come from the scale, so that a smaller one can help."""
        return self.is_dynamic and self.scale > self._config.min_loss_scale

    def update(self, overflowed: bool) -> None:
        """Record one step's outcome."""
        if not self.is_dynamic:
            return
        self.is_stuck = overflowed and self._num_overflows_left <= 1 and not self.can_shrink
        if overflowed:
            if self._num_overflows_left > 1:
                self._num_overflows_left -= 1
            else:
                self.scale = max(self.scale / 2, self._config.min_loss_scale)
            self._num_good_steps = -1
            return
        self._num_good_steps += 1
        has_grown = self._num_good_steps == self._config.loss_scale_window
        if has_grown:
            self.scale *= 2
            self._num_good_steps = 0
        if has_grown or self._config.consecutive_hysteresis:
            self._num_overflows_left = self._config.loss_scale_hysteresis

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs; nothing where the config alone says the scale."""
        if not self.is_dynamic:
            return {}
        counts = {"num_good_steps": self._num_good_steps, "num_overflows_left": self._num_overflows_left}
        return {"scale": self.scale, **counts}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned, if both scales are dynamic; a fixed scale of another run is not taken."""
        if self.is_dynamic and state:
            self.scale = state["scale"]
            self._num_good_steps = int(state["num_good_steps"])
            most = self._config.loss_scale_hysteresis
            self._num_overflows_left = min(most, int(state.get("num_overflows_left", most)))
