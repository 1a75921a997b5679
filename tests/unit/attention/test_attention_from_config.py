"""A config's section chooses a structure: that of its kind, with the keys that are given."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from harness.refusals import refused
from shardwise.attention.from_config import structure_of
from shardwise.attention.structures import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)
from shardwise.config.resolve import AttentionConfig
from shardwise.config.validate import ATTENTION_KEYS

STRUCTURES: dict[str, type[SparsityConfig]] = {
    "fixed": FixedSparsityConfig,
    "variable": VariableSparsityConfig,
    "bigbird": BigBirdSparsityConfig,
    "bslongformer": BSLongformerSparsityConfig,
    "sliding-window": LocalSlidingWindowSparsityConfig,
}
GIVEN: dict[str, dict[str, Any]] = {
    "fixed": {
        "block": 16,
        "num_local_blocks": 8,
        "num_global_blocks": 2,
        "different_layout_per_head": True,
        "num_different_global_patterns": 4,
    },
    "variable": {
        "num_random_blocks": 2,
        "local_window_blocks": (1, 2),
        "global_block_indices": (0, 3),
        "global_block_end_indices": (1, 5),
        "seed": 7,
    },
    "bigbird": {"num_random_blocks": 2, "num_sliding_window_blocks": 5, "num_global_blocks": 0, "seed": 3},
    "bslongformer": {"num_sliding_window_blocks": 1, "global_block_indices": (2,), "different_layout_per_head": True},
    "sliding-window": {"block": 128, "num_sliding_window_blocks": 9},
}


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("causal", [True, False])
def test_a_kind_is_its_structure(kind: str, causal: bool) -> None:
    attention: Any = "unidirectional" if causal else "bidirectional"
    for given in ({}, GIVEN[kind]):
        section = AttentionConfig(kind=kind, **given)  # type: ignore[arg-type]
        expected = STRUCTURES[kind](4, **{"block": 64, "attention": attention, **given})
        assert structure_of(section, 4, causal=causal) == expected
        assert expected.causal == causal


@pytest.mark.parametrize("kind", STRUCTURES)
def test_the_keys_of_a_kind_are_its_structures(kind: str) -> None:
    """All but those that the model knows; and the seed, where nothing is drawn."""
    fields = {field.name for field in dataclasses.fields(STRUCTURES[kind]) if field.init}
    fields -= {"num_heads", "attention", "strict_deepspeed"}
    assert set(ATTENTION_KEYS[kind]) == fields - (set() if "num_random_blocks" in fields else {"seed"})
    assert {"kind", *fields} <= set(AttentionConfig.model_fields)


def test_dense_attention_needs_none() -> None:
    assert structure_of(AttentionConfig(), 4) is None


@pytest.mark.parametrize(
    ("section", "code", "value"),
    [
        (
            AttentionConfig(kind="fixed", num_local_blocks=4, num_global_blocks=3),
            "global-blocks-divide",
            "num_global_blocks=3",
        ),
        (AttentionConfig(kind="fixed", horizontal_global_attention=True), "horizontal-attention", "unidirectional"),
        (AttentionConfig(kind="fixed", num_different_global_patterns=2), "patterns-need-heads", "=2"),
        (AttentionConfig(kind="bigbird", num_local_blocks=2), "attention-key-of-kind", "attention.num_local_blocks=2"),
    ],
)
def test_what_does_not_go_together_is_refused(section: AttentionConfig, code: str, value: str) -> None:
    with refused(code, value):
        structure_of(section, 4)
