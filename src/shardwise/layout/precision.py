"""The precision policy says in which dtype each state is stored and each collective communicates.

It is a pure value: `shardwise.runtime.precision` casts by it. A policy means the same in every ZeRO stage.

>>> policy = precision_policy(PrecisionConfig(param="bf16"))
>>> policy.reduce, policy.accumulate, policy.master
('bf16', 'fp32', 'fp32')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import torch

from shardwise.config.resolve import Dtype, PrecisionConfig

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
StatesDtype = Literal["master", "bf16", "int8"]
StoredDtype = Dtype | Literal["uint8"]  # the last is of opaque parameters, and of codes
DTYPE_BYTES: Final[Mapping[str, int]] = MappingProxyType({"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "uint8": 1})


@dataclass(frozen=True)
class PrecisionPolicy:
    """Hold the dtypes by role.

    Attributes:
        param: parameters as the model computes with them, and as they are gathered.
        reduce: gradients on the wire; their sums run in `master`, never in less than fp32.
        accumulate: stored gradients, summed over micro-batches.
        master: the optimizer's copy of the parameters, and its states.
        states: how the optimizer's states are stored, if not in `master`.
    """

    param: StoredDtype
    reduce: StoredDtype
    accumulate: StoredDtype
    master: StoredDtype
    states: StatesDtype = "master"

    @property
    def keeps_master(self) -> bool:
        """Say whether the master is a separate copy; otherwise the parameters are the master."""
        return self.master != self.param

    @property
    def widened(self) -> PrecisionPolicy:
        """Return the policy of parameters that are not narrowed: all in the master's dtype, so there is no copy."""
        return PrecisionPolicy(self.master, self.master, self.master, self.master, self.states)


# Opaque parameters are stored, sent and computed with as they are.
OPAQUE: Final = PrecisionPolicy("uint8", "uint8", "uint8", "uint8")


def precision_policy(config: PrecisionConfig) -> PrecisionPolicy:
    """Derive the policy from the config section; under fp64 everything is fp64."""
    param: Dtype = config.param or "fp32"
    wide: Dtype = "fp64" if param == "fp64" else "fp32"
    return PrecisionPolicy(
        param=param,
        reduce=param if config.reduce == "param" else wide,
        accumulate=param if config.accumulate == "param" else wide,
        master=wide,
        states=config.states,
    )


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
