"""Training over a cp axis, and the same in one plain process: the two sides of tests/parity/test_context.py.

Models drop, by modules and by function, and all sides draw keyed numbers: what a token meets depends on its place in
the sequence, not on the rank that computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from harness.models import IGNORED, ModelCase
from harness.reference import Trace
from harness.tensor import train_on_mesh, train_plainly
from harness.training import Overrides
from shardwise.config.resolve import AttentionConfig
from shardwise.models import Decoder, lm_loss
from shardwise.models.decoder import DecoderBlock
from shardwise.models.presets import DecoderConfig

NUM_MICRO_BATCHES: Final = 2
NUM_STEPS: Final = 2
DROPOUT: Final = 0.2
VOCAB_SIZE: Final = 29
LENGTHS: Final = (32, 16)  # of even and of odd batches

# By name: the attention, query heads and KV heads.
MODELS: Final[Mapping[str, tuple[AttentionConfig, int, int]]] = MappingProxyType(
    {
        "dense": (AttentionConfig(), 4, 1),
        "fixed": (AttentionConfig(kind="fixed", block=2, num_local_blocks=2), 8, 2),
        "window": (AttentionConfig(kind="sliding-window", block=2, num_sliding_window_blocks=3), 4, 4),
        "bigbird": (AttentionConfig(kind="bigbird", block=2, different_layout_per_head=True), 4, 2),
    }
)


class DroppingBlock(DecoderBlock):
    """A layer that drops after itself."""

    def forward(self, x: Tensor, rope: Tensor, positions: Tensor | None = None) -> Tensor:  # [B, S, E]
        return F.dropout(super().forward(x, rope, positions), DROPOUT, self.training)


class DroppingDecoder(Decoder):
    """A decoder that drops after every layer, and after the embedding."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.__class__ = DroppingBlock
        self.blocks[0].attention_norm = torch.nn.Sequential(self.blocks[0].attention_norm, torch.nn.Dropout(DROPOUT))


def make_case(name: str) -> ModelCase:
    """A model of `MODELS`; after "dropping-" it drops."""
    kind = name.removeprefix("dropping-")
    return ModelCase(name, partial(_decoder, kind, kind != name), _batch, _loss)


def train_split(
    rank: int,
    world_size: int,
    name: str,
    overrides: Overrides,
    num_micro_batches: int = NUM_MICRO_BATCHES,
    num_steps: int = NUM_STEPS,
) -> Trace:
    """Train on one rank of a mesh; see `train_on_mesh`."""
    case = make_case(name)
    return train_on_mesh(rank, case, overrides, case.loss, num_micro_batches, num_steps, inside=nullcontext)


def train_whole(
    name: str, num_data_ranks: int, num_micro_batches: int = NUM_MICRO_BATCHES, num_steps: int = NUM_STEPS
) -> Trace:
    """The same by one plain process; see `train_plainly`."""
    return train_plainly(make_case(name), num_data_ranks, num_micro_batches, num_steps)


def _decoder(name: str, drops: bool) -> Decoder:
    attention, num_heads, num_kv_heads = MODELS[name]
    config = DecoderConfig(
        vocab_size=VOCAB_SIZE,
        num_layers=2,
        hidden_size=16,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=6,
        ffn_size=24,
        max_seq_len=32,
        attention=attention,
    )
    return (DroppingDecoder if drops else Decoder)(config)


def _batch(seed: int, num_samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens and the next ones, both [B, S]; of the last tokens, and here and there, none counts."""
    length = LENGTHS[seed % 2]
    tokens = torch.randint(VOCAB_SIZE, (num_samples, length + 1), generator=torch.Generator().manual_seed(seed))
    targets = tokens[:, 1:].clone()
    targets[:, -1 - seed % 5 :] = IGNORED
    targets[0, seed % 7 :: 7] = IGNORED
    return tokens[:, :-1], targets


def _loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return lm_loss(logits, batch[1])
