"""The precision policy: which dtype each state rests in and each collective carries.

It is a value, not behaviour: casting by it is in `shardwise.precision`. The same policy means the same in every ZeRO
stage.

>>> policy = precision_policy(PrecisionConfig(param="bf16"))
>>> policy.reduce, policy.accumulate, policy.master
('bf16', 'fp32', 'fp32')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from shardwise.config import Dtype, PrecisionConfig

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


def precision_policy(config: PrecisionConfig) -> PrecisionPolicy:
    """Derive the policy from the config section; under fp64 everything is fp64."""
    wide: Dtype = "fp64" if config.param == "fp64" else "fp32"
    return PrecisionPolicy(
        param=config.param,
        reduce=config.param if config.reduce == "param" else wide,
        accumulate=config.param if config.accumulate == "param" else wide,
        master=wide,
    )
