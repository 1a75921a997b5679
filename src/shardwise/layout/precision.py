"""The precision policy: which dtype each state rests in and each collective carries.

It is a value, not behaviour: casting by it is in `shardwise.runtime.precision`. The same policy means the same in every
ZeRO stage.

>>> policy = precision_policy(PrecisionConfig(param="bf16"))
>>> policy.reduce, policy.accumulate, policy.master
('bf16', 'fp32', 'fp32')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from shardwise.config.resolve import Dtype, PrecisionConfig

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
DTYPE_BYTES: Final[Mapping[str, int]] = MappingProxyType({"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2})


@dataclass(frozen=True)
class PrecisionPolicy:
    """Dtypes by role.

    Attributes:
        param: parameters as the model computes with them, and as they are gathered.
        reduce: gradients on the wire; their sums run in `master`, never in less than fp32.
        accumulate: gradients at rest, summed over micro-batches.
        master: the optimizer's copy of the parameters, and its states.
    """

    param: Dtype
    reduce: Dtype
    accumulate: Dtype
    master: Dtype

    @property
    def keeps_master(self) -> bool:
        """Whether the master is a copy of its own; otherwise the parameters are the master."""
        return self.master != self.param

    @property
    def widened(self) -> PrecisionPolicy:
        """The policy of parameters that are not narrowed: everything in the master's dtype, so there is no copy."""
        return PrecisionPolicy(self.master, self.master, self.master, self.master)


def precision_policy(config: PrecisionConfig) -> PrecisionPolicy:
    """Derive the policy from the config section; under fp64 everything is fp64."""
    param: Dtype = config.param or "fp32"
    wide: Dtype = "fp64" if param == "fp64" else "fp32"
    return PrecisionPolicy(
        param=param,
        reduce=param if config.reduce == "param" else wide,
        accumulate=param if config.accumulate == "param" else wide,
        master=wide,
    )


def buffer_dtype(given: torch.dtype, config: PrecisionConfig) -> torch.dtype:
    """Return the dtype of a buffer in training.

    Kept, it is as wide as it was given, and as the parameters: fp64 widens what fp32 activations would not meet.

    >>> buffer_dtype(torch.float32, PrecisionConfig(param="bf16")), buffer_dtype(torch.int64, PrecisionConfig())
    (torch.float32, torch.int64)
    """
    if not given.is_floating_point:
        return given
    param = TORCH_DTYPES[config.param or "fp32"]
    return param if config.buffers == "param" else torch.promote_types(given, param)
