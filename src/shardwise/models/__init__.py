"""Holds the library's own small decoder: its shapes by name, its loss and its sampler.

Not needed to use the engine, which takes any `nn.Module`; `shardwise train` and the proofs train this one. Every name
is imported from its module when it is first used: shapes need no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from shardwise.models.decoder import Decoder, DecoderBlock, generate, lm_loss
    from shardwise.models.decoder_experts import Experts
    from shardwise.models.presets import PRESETS, DecoderConfig, decoder_config, preset
    from shardwise.models.shape import flops_per_token, num_params

__all__ = [
    "PRESETS",
    "Decoder",
    "DecoderBlock",
    "DecoderConfig",
    "Experts",
    "decoder_config",
    "flops_per_token",
    "generate",
    "lm_loss",
    "num_params",
    "preset",
]

_MODULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Decoder": "decoder",
        "DecoderBlock": "decoder",
        "Experts": "decoder_experts",
        "flops_per_token": "shape",
        "generate": "decoder",
        "lm_loss": "decoder",
        "num_params": "shape",
    }
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shardwise.models' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"shardwise.models.{_MODULES.get(name, 'presets')}"), name)
