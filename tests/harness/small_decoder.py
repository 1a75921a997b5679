"""A decoder of two layers for tests that need any; its sizes are all different."""

from __future__ import annotations

from shardwise.models.presets import DecoderConfig

SMALL_DECODER = DecoderConfig(
    vocab_size=37,
    num_layers=2,
    hidden_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    ffn_size=40,
    max_seq_len=16,
)
