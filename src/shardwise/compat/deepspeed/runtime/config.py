"""Offer `DeepSpeedConfig`, which reads the JSON."""

from __future__ import annotations

from typing import Any

from shardwise.compat.deepspeed.config import read_config, translate
from shardwise.config.resolve import ConfigError as DeepSpeedConfigError

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]


class DeepSpeedConfig:
    """Reads DeepSpeed's JSON, a mapping or the path of a file; the arguments are those of DeepSpeed."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict = read_config(config)
        self.translation = translate(self._param_dict)
