"""Offer DeepSpeed's Lion, which is Shardwise's."""

from shardwise.runtime.optimizers import Lion as DeepSpeedCPULion
from shardwise.runtime.optimizers import Lion as FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
