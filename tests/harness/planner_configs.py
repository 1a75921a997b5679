"""What a resolved config says that another does not."""

from __future__ import annotations

from typing import Any

from shardwise.config.resolve import ResolvedConfig
from shardwise.planner.job import BASE


def differences(config: ResolvedConfig, base: ResolvedConfig = BASE) -> dict[str, Any]:
    """The values of keys that differ, by dotted key; the samples of a step follow from them."""
    return {
        f"{name}.{leaf}": value
        for name, section in config
        for leaf, value in section
        if value != getattr(getattr(base, name), leaf) and (name, leaf) != ("batch", "global_size")
    }
