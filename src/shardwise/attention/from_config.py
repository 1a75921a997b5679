"""Builds the block-sparse structure that a config's `attention` section chooses.

>>> from shardwise.config.resolve import AttentionConfig
>>> structure_of(AttentionConfig(), num_heads=4) is None
True
>>> layout = structure_of(AttentionConfig(kind="fixed", num_local_blocks=2), num_heads=4).layout(256)
>>> layout.patterns[0].blocks[0].int().tolist()
[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import AttentionConfig
from shardwise.config.validate import ATTENTION_KEYS, wrong_attention

if TYPE_CHECKING:
    from shardwise.attention.structures import SparsityConfig

_STRUCTURES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fixed": "FixedSparsityConfig",
        "variable": "VariableSparsityConfig",
        "bigbird": "BigBirdSparsityConfig",
        "bslongformer": "BSLongformerSparsityConfig",
        "sliding-window": "LocalSlidingWindowSparsityConfig",
    }
)


def structure_of(section: AttentionConfig, num_heads: int, *, causal: bool = True) -> SparsityConfig | None:
    """Return the structure of a section; None for dense attention, which needs none.

    Args:
        causal: a token sees none after it.

    Raises:
        ConfigError: the kind has no such key, or its values do not go together.
    """
    for code, message in wrong_attention(section):
        raise ConfigError(code, message)
    if section.kind == "dense":
        return None
    from shardwise.attention import structures

    arguments = {key: getattr(section, key) for key in ATTENTION_KEYS[section.kind]}
    options: dict[str, Any] = {key: value for key, value in arguments.items() if value is not None}
    options["attention"] = "unidirectional" if causal else "bidirectional"
    structure: SparsityConfig = getattr(structures, _STRUCTURES[section.kind])(num_heads, **options)
    return structure
