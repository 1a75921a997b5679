"""What made the planner's peak of an engine's rank differ from the engine's own, one cause each, in small configs."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from harness.engine_memory import Sample
from shardwise.models import DecoderConfig
from shardwise.planner.job import Strategy

pytestmark = pytest.mark.begin

SMALL: Final = DecoderConfig(
    vocab_size=64, num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=4, head_dim=32, ffn_size=128, max_seq_len=64
)
DEEP: Final = replace(SMALL, num_layers=4, vocab_size=1000, max_seq_len=128)
WIDE: Final = replace(SMALL, num_layers=4, hidden_size=192, num_heads=8, max_seq_len=128, tie_embeddings=True)
INTERLEAVED: Final = Strategy(
    pp=2, schedule="interleaved", virtual_stages=2, tp=2, sequence_parallel=True, micro_size=4, num_micro_batches=3
)
CASES: Final = {
    "a feed-forward in parts has no gradient of a weight in a bucket": (
        Sample(
            replace(DEEP, ffn_size=512, tie_embeddings=True),
            128,
            replace(
                INTERLEAVED,
                dp_shard=2,
                zero_stage=3,
                chunk_tokens=64,
                params_tier="host",
                grads_tier="host",
                optimizer_tier="nvme",
            ),
        ),
        0,
    ),
    "sums of activations are beside buckets, gradients are summed, and the one that has come stays": (
        Sample(
            DEEP,
            128,
            Strategy(
                pp=2,
                dp_shard=2,
                tp=4,
                zero_stage=3,
                micro_size=4,
                num_micro_batches=2,
                schedule="zb-h1",
                sequence_parallel=True,
                recompute="selective",
                param="fp32",
            ),
        ),
        0,
    ),
    "blocks that recompute nothing do not keep what has been sent": (
        Sample(
            replace(WIDE, ffn_size=768),
            128,
            replace(
                INTERLEAVED,
                dp_replicate=2,
                dp_shard=4,
                cp=2,
                zero_stage=1,
                transport="ulysses",
                chunk_tokens=64,
                recompute="selective",
                recompute_every=2,
                accumulate="param",
            ),
        ),
        1,
    ),
    "a stage is reduced when its backward is over": (
        Sample(
            SMALL,
            64,
            Strategy(
                pp=3,
                dp_replicate=2,
                dp_shard=2,
                zero_stage=1,
                num_micro_batches=2,
                schedule="zb-h1",
                recompute="full",
                optimizer_tier="host",
                param="fp32",
                reduce="fp32",
            ),
        ),
        0,
    ),
    "the step begins with the buffers that the last reductions have left": (
        Sample(
            replace(WIDE, ffn_size=192, vocab_size=4096),
            128,
            Strategy(
                pp=3,
                dp_replicate=2,
                dp_shard=4,
                zero_stage=2,
                num_micro_batches=2,
                schedule="naive",
                recompute="full",
                accumulate="param",
            ),
        ),
        1,
    ),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize(("sample", "rank"), CASES.values(), ids=CASES)
def test_the_planner_says_what_the_engine_holds_where(sample: Sample, rank: int) -> None:
    (estimated,) = [each for each in sample.estimated().ranks if each.pipeline_rank == rank]
    assert estimated.peak_bytes == pytest.approx(sample.simulated(rank).peak.peak_bytes, rel=0.01)
