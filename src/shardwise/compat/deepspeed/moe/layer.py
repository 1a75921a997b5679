"""Refuse DeepSpeed's layer of experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.config.resolve import ConfigError


class MoE(nn.Module):
    """Represent a layer of experts that cannot be built."""

    def __init__(self, *args: Any, **options: Any) -> None:
        text = "deepspeed.moe.layer.MoE spreads experts over ranks, which is not offered; use plain modules"
        raise ConfigError("moe-layer", text)
