"""Chunks of a state: as few as can be, equal, whole blocks of a file."""

from __future__ import annotations

import pytest

from shardwise.offload.step_pipeline import CHUNK_NUMEL, even_chunk_numel


@pytest.mark.parametrize("numel", [1, 2047, 2048, 2049, CHUNK_NUMEL, CHUNK_NUMEL + 1, 10_000_001, 218_112_000])
def test_chunks_are_few_and_equal(numel: int) -> None:
    length = even_chunk_numel(numel, CHUNK_NUMEL)
    lengths = [min(length, numel - start) for start in range(0, numel, length)]
    assert sum(lengths) == numel
    assert len(lengths) <= -(-numel // CHUNK_NUMEL)
    assert length % 2048 == 0
    assert length <= CHUNK_NUMEL
    assert numel <= CHUNK_NUMEL or lengths[-1] >= length * 8 / 9, "the pool would not use a buffer again for it"


def test_a_short_limit_holds() -> None:
    assert even_chunk_numel(1000, 256) == 256
    assert even_chunk_numel(0, 256) == 0
