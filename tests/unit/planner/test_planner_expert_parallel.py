"""Experts over ranks are priced, for runs of other codes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.planner.folded_layout import FoldedLayouts
from shardwise.planner.hardware import parse_cluster
from shardwise.planner.job import BASE, Experts, ModelShape, PlanJob, changed

FAST = parse_cluster("h100:64")
EXPERTS = Experts(num_experts=256, num_chosen=8, ffn_size=512, num_shared=1)
SHAPE = ModelShape(
    num_layers=6, hidden_size=7168, num_heads=64, num_kv_heads=8, head_dim=128, ffn_size=18432, vocab_size=32000,
    experts=EXPERTS, name="wide",
)  # fmt: skip


@pytest.mark.parametrize("ep", [2, 8])
def test_each_rank_holds_its_experts_and_zero_shards_them_over_the_others(ep: int) -> None:
    job = PlanJob(shape=SHAPE, seq_len=2048, global_batch=256, cluster=FAST)
    one = changed(BASE, {"mesh.dp_shard": 64, "zero.stage": 1})
    whole, split = (FoldedLayouts(replace(job, ep=each)).at_rest(one) for each in (1, ep))
    experts = 2 * SHAPE.num_layers * 256 * 3 * 7168 * 512
    assert whole["param"] - split["param"] == pytest.approx(experts * (1 - 1 / ep), rel=0.001)
    # ZeRO-1's states are as many on each rank: ep times fewer experts over ep times fewer ranks.
    assert split["optimizer"] == pytest.approx(whole["optimizer"], rel=0.001)
