"""The precision policy says in which dtype each state is stored and each collective communicates.

It is a pure value: `shardwise.runtime.precision` casts by it. A policy means the same in every ZeRO stage.

>>> policy = precision_policy(PrecisionConfig(param="bf16"))
>>> policy.reduce, policy.accumulate, policy.master
('bf16', 'fp32', 'fp32')
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from shardwise.config.resolve import Dtype, PrecisionConfig
from shardwise.config.sections import Gather

StatesDtype = Literal["master", "bf16", "int8"]
StoredDtype = Dtype | Literal["uint8"]  # the last is of opaque parameters, and of codes
DTYPE_BYTES: Final[Mapping[str, int]] = MappingProxyType({"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "uint8": 1})
_OF_TORCH: Final[Mapping[str, Dtype]] = MappingProxyType(
    {
        "float64": "fp64", "double": "fp64", "float32": "fp32", "float": "fp32", "bfloat16": "bf16",
        "float16": "fp16", "half": "fp16",
    }
)  # fmt: skip

# Of codecs (`shardwise.layout.codec`, `shardwise.layout.wire_codec`): layouts count bytes by them without torch.
BLOCK_NUMEL: Final = 256
"""Elements that share a scale."""

SMALL_NUMEL: Final = 4096
"""Parameters of fewer elements, counted over the whole parameter, keep their states unencoded: they save nothing."""

SCALE_BYTES: Final = 4


def dtype_key(dtype: object) -> str:
    """Return a config's name of torch's dtype, or of one that is named as torch does; its own name where there is none.

    >>> dtype_key("torch.half"), dtype_key("bfloat16"), dtype_key("int4")
    ('fp16', 'bf16', 'int4')
    """
    name = str(dtype).removeprefix("torch.")
    return _OF_TORCH.get(name, name)


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


def is_encoded(global_shape: Sequence[int]) -> bool:
    """Say whether a parameter of that shape, whole, is large enough for its states to be encoded."""
    return math.prod(global_shape) >= SMALL_NUMEL
