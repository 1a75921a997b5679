"""The predicted times of the disk: all bytes that the Layout moves to and from it, each once, by bandwidth."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise.config.resolve import Config
from shardwise.layout.layout import Layout, build_layout
from shardwise.offload.disk_bench import passes_s, step_s

TIERS = st.sampled_from(["device", "host", "nvme"])


def layout_of(stage: int, num_ranks: int, **tiers: object) -> Layout:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])
    config = {"zero": {"stage": stage}, "precision": {"param": "bf16"}, "tiers": tiers}
    axes = {"mesh": {"dp_replicate": 1, "dp_shard": num_ranks}, "batch": {"micro_size": 1, "accumulation": 1}}
    return build_layout(model, Config.from_dict({**config, **axes}))  # not resolved: any tiers, whatever the stage


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), TIERS, TIERS, TIERS)
def test_every_byte_counts_once(stage, num_ranks, num_micro_batches, params, grads, optimizer) -> None:
    layout = layout_of(stage, num_ranks, params=params, grads=grads, optimizer=optimizer)
    across = layout.bytes_across(num_micro_batches)
    read_bytes, written_bytes = across.get(("nvme", "host"), 0), across.get(("host", "nvme"), 0)
    seconds = step_s(layout, 2.0, 5.0) + passes_s(layout, num_micro_batches, 2.0, 5.0)
    assert seconds == pytest.approx(read_bytes / 2.0 + written_bytes / 5.0)
    assert (seconds == 0) == ("nvme" not in layout.bytes_by_tier())


def test_the_step_is_of_the_optimizer_and_the_passes_of_parameters_and_gradients() -> None:
    numel, micro = 4 * 16 * 16 // 2, 3  # this rank's of two
    optimizer = layout_of(2, 2, optimizer="nvme")
    assert step_s(optimizer, 1.0, 1e9) == pytest.approx(12 * numel, rel=1e-6)
    assert step_s(optimizer, 1e9, 1.0) == pytest.approx(12 * numel, rel=1e-6)
    assert passes_s(optimizer, micro, 1.0, 1.0) == 0
    grads = layout_of(2, 2, grads="nvme")
    assert step_s(grads, 1.0, 1.0) == 4 * numel, "read for the step"
    assert passes_s(grads, micro, 1.0, 1.0) == 4 * numel * (micro + micro - 1), "written each time, read to be added to"
    params = layout_of(3, 2, params="nvme")
    assert step_s(params, 1.0, 1.0) == 2 * numel, "written after the step"
    gathered = sum(params.num_unshards(group, micro) * group.shard_numel for group in params.groups)
    assert passes_s(params, micro, 1.0, 1.0) == 2 * gathered > 0
