"""The planner prices what owners of matrices compute and exchange under Muon, and one state of each matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.config.resolve import ResolvedConfig
from shardwise.models.presets import preset
from shardwise.models.shape import ModelShape
from shardwise.planner.folded_layout import FoldedLayouts
from shardwise.planner.hardware import Cluster, GpuSpec
from shardwise.planner.job import BASE, PlanJob, changed
from shardwise.planner.request import split_as
from shardwise.planner.step_time import TimeModel

GPU = GpuSpec(name="h100", memory_bytes=80 * 2**30, memory_bytes_per_s=3e12, peak_flops_per_s={"bf16": 989e12})
CLUSTER = Cluster(gpu=GPU, num_gpus=16, gpus_per_node=8, nic_bytes_per_s=5e10)
ADAMW = PlanJob(shape=ModelShape.of_decoder(preset("llama-3-8b")), seq_len=4096, global_batch=64, cluster=CLUSTER)
MUON = replace(ADAMW, base=changed(BASE, {"optimizer.name": "muon"}))


def step_s(job: PlanJob, config: ResolvedConfig) -> float:
    return TimeModel(job).estimate(split_as(job.base, config)).parts["step"]


@pytest.mark.parametrize(
    "config",
    [
        changed(BASE, {"mesh.dp_shard": 16, "zero.stage": 3}),
        changed(BASE, {"mesh.dp_shard": 4, "mesh.tp": 4, "zero.stage": 1}),
    ],
)
def test_a_step_has_the_products_of_its_share_of_the_matrices(config: ResolvedConfig) -> None:
    config = changed(config, {"precision.param": "bf16", "batch.accumulation": 4})
    shape = ADAMW.shape
    hidden, ffn, kv = shape.hidden_size, shape.ffn_size, shape.num_kv_heads * shape.head_dim
    layer = sum(5 * (4 * m * m * n + 2 * m**3) for m, n in 2 * [(hidden, hidden), (kv, hidden)] + 3 * [(hidden, ffn)])
    least_s = shape.num_layers * layer / 16 / 989e12
    added_s = step_s(MUON, config) - step_s(ADAMW, config)
    assert least_s < added_s < 4 * least_s + 0.1


def test_more_ranks_share_the_matrices() -> None:
    few, many = (
        changed(BASE, {"mesh.dp_replicate": 16 // n, "mesh.dp_shard": n, "zero.stage": 3, "precision.param": "bf16"})
        for n in (2, 16)
    )
    assert step_s(MUON, many) < 0.5 * step_s(MUON, few)


def test_no_step_takes_less_than_its_largest_matrix() -> None:
    cluster = replace(CLUSTER, num_gpus=4096)
    muon, adamw = (replace(job, cluster=cluster, global_batch=4096) for job in (MUON, ADAMW))
    config = changed(BASE, {"mesh.dp_shard": 4096, "zero.stage": 1, "precision.param": "bf16"})
    m, n = ADAMW.shape.hidden_size, ADAMW.shape.ffn_size
    assert step_s(muon, config) - step_s(adamw, config) > 5 * (4 * m * m * n + 2 * m**3) / 989e12


def test_one_state_of_matrices_is_stored() -> None:
    config = changed(BASE, {"mesh.dp_shard": 16, "zero.stage": 3, "precision.param": "bf16"})
    adamw, muon = (FoldedLayouts(job).at_rest(split_as(job.base, config))["optimizer"] for job in (ADAMW, MUON))
    assert 8 / 12 * adamw < muon < 0.75 * adamw
