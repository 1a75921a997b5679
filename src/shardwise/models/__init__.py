"""Holds the library's own small decoder: its shapes by name, its loss and its sampler.

Not needed to use the engine, which takes any `nn.Module`; `shardwise train` and the proofs train this one.
"""

from shardwise.models.decoder import Decoder, DecoderBlock, DecoderConfig, flops_per_token, lm_loss, num_params
from shardwise.models.generate import generate
from shardwise.models.presets import PRESETS, decoder_config, preset

__all__ = [
    "PRESETS",
    "Decoder",
    "DecoderBlock",
    "DecoderConfig",
    "decoder_config",
    "flops_per_token",
    "generate",
    "lm_loss",
    "num_params",
    "preset",
]
