"""The unigram loss against the formula written out."""

import math

import numpy as np
import pytest

from shardwise.train import loop as baseline
from shardwise.train.loop import unigram_loss


def test_equals_the_sum_written_out(monkeypatch):
    """Chunks of 7 do not divide the data: catches a lost last chunk."""
    monkeypatch.setattr(baseline, "_CHUNK_TOKENS", 7)
    generator = np.random.default_rng(0)
    train = generator.integers(0, 11, size=100).astype(np.uint16)
    held_out = generator.integers(0, 13, size=50).astype(np.uint16)
    counts = [train.tolist().count(token) for token in range(13)]
    expected = -sum(math.log((counts[token] + 1) / (100 + 13)) for token in held_out.tolist()) / 50
    assert unigram_loss(train, held_out, 13) == pytest.approx(expected, rel=1e-12)


def test_without_training_data_it_is_uniform():
    held_out = np.array([3, 1, 4], dtype=np.uint32)
    assert unigram_loss(np.array([], dtype=np.uint32), held_out, 8) == pytest.approx(math.log(8))
