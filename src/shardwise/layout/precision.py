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
from shardwise.config.sections import Gather

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
        accumulate: gradients as they are stored, summed over micro-batches.
        master: the optimizer's copy of the parameters, and its states.
        states: how the optimizer's states are stored, if not in `master`.
        gather: how parameters are sent, if not in `param`; see `Layout.gather_codec`.
        reduce_codec: how gradients are encoded on the wire, if not sent in `reduce`; see `Layout.sums_of`.
        reduce_feedback: whether what that rounds off is kept, in `reduce`, and added to the next gradients.
    """

    param: StoredDtype
    reduce: StoredDtype
    accumulate: StoredDtype
    master: StoredDtype
    states: StatesDtype = "master"
    gather: Gather = "param"
    reduce_codec: str | None = None
    reduce_feedback: bool = False

    @property
    def keeps_master(self) -> bool:
        """Say whether the master is a separate copy; otherwise the parameters are the master."""
        return self.master != self.param or self.gather != "param"

    @property
    def encodes_collectives(self) -> bool:
        """Say whether what collectives send is encoded in blocks; see `GroupSpec.is_small` for what is not."""
        return self.gather != "param" or self.reduce_codec is not None

    @property
    def block_keys(self) -> tuple[str, ...]:
        """Return the config's keys that lay blocks over the parameters, each with its value."""
        keys = {
            "states": "int8" if self.states == "int8" else "",
            "gather": self.gather.removeprefix("param"),
            "reduce": self.reduce_codec or "",
        }
        return tuple(f"precision.{key}={value}" for key, value in keys.items() if value)

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
        reduce=wide if config.reduce == "fp32" else param,
        accumulate=param if config.accumulate == "param" else wide,
        master=wide,
        states=config.states,
        gather=config.gather,
        reduce_codec=None if config.reduce in ("param", "fp32") else config.reduce,
        reduce_feedback=config.reduce_feedback,
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
