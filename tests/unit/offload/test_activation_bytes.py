"""With the inputs of recomputed blocks in host memory, the engine tracks exactly those less; simulated too."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.simulated import Measured, measure_steps, simulated
from harness.tier_bytes import Crossings, HostPages, offloaded_bytes
from harness.training import make_config
from shardwise import initialize, simulate
from shardwise.config.resolve import Config
from shardwise.layout.activation_bytes import LayerShape, activation_bytes_per_layer
from shardwise.models import Decoder, lm_loss
from shardwise.models.presets import DecoderConfig
from shardwise.offload import activations
from shardwise.runtime.memory_tracker import Category

SIZES = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_size": 96}
SEQ_LEN = 32


def build(num_layers: int) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocab_size=16, num_layers=num_layers, max_seq_len=SEQ_LEN, **SIZES))


def make(activations: str) -> Config:
    sections: dict[str, Any] = {"recompute": {"mode": "full"}, "precision": {"param": "bf16"}}
    return make_config(2, {**sections, "tiers": {"activations": activations}})


def make_batch() -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(2, SEQ_LEN, dtype=torch.long)
    return tokens, tokens


def loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return lm_loss(logits, batch[1])


def measure(num_layers: int, activations: str) -> tuple[Measured, dict[Any, int]]:
    """A step's tracked bytes, and the bytes that moved in two steps of two micro-batches."""
    engine = initialize(build(num_layers), make(activations), loss_fn=loss)
    measured = measure_steps(engine, [[make_batch(), make_batch()]] * 2)
    return (
        measured,
        engine.parts.activations._traffic.moved_bytes if engine.parts.activations is not None else {},
    )


@pytest.mark.parametrize("num_layers", [3, 6])
def test_the_peak_is_that_of_two_inputs(num_layers: int) -> None:
    input_bytes = activation_bytes_per_layer(LayerShape(**SIZES), seq_len=SEQ_LEN, micro_size=2, recompute="full")
    (plain, _), (offloaded, moved) = measure(num_layers, "device"), measure(num_layers, "host")
    expected = dict(plain.peak)
    expected[Category.ACTIVATIONS] -= (num_layers - 2) * int(input_bytes)
    assert offloaded.peak == expected
    assert offloaded.at_rest == plain.at_rest
    way_bytes = 4 * offloaded_bytes(input_bytes, num_layers)
    assert moved == {("device", "host"): way_bytes, ("host", "device"): way_bytes}


def test_a_simulated_rank_moves_them_too() -> None:
    real, _ = measure(4, "host")
    found = simulate(build(4), make("host"), make_batch, rank=0, world_size=1, loss_fn=loss)
    assert simulated(found).peak == real.peak
    assert simulated(found).at_rest == real.at_rest


def test_copies_that_are_watched_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    num_layers = 5
    input_bytes = activation_bytes_per_layer(LayerShape(**SIZES), seq_len=SEQ_LEN, micro_size=2, recompute="full")
    with HostPages() as pages, initialize(build(num_layers), make("host"), loss_fn=loss) as engine:
        engine.train_step([make_batch(), make_batch()])
        monkeypatch.setattr(activations, "unseen_by_op_modes", nullcontext)
        with Crossings(engine, pages) as seen:
            engine.train_step([make_batch(), make_batch()])
        assert not seen.mixed
    way_bytes = 2 * offloaded_bytes(input_bytes, num_layers)
    assert seen.bytes == {("device", "host"): way_bytes, ("host", "device"): way_bytes}
