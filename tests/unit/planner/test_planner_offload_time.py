"""Moves between memories: what the Layout counts, what hides, and what shares a way."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from shardwise.models.presets import preset
from shardwise.models.shape import ModelShape
from shardwise.planner.comm_time import OverlapTimes
from shardwise.planner.hardware import Cluster, Host, find_gpu
from shardwise.planner.host_time import OffloadTimeModel
from shardwise.planner.job import BASE, PlanJob, changed
from shardwise.planner.profile import Profile

HOST = Host(memory_bytes_per_s=4e11, nvme_read_bytes_per_s=2e10, nvme_write_bytes_per_s=1e10)
CLUSTER = Cluster(gpu=find_gpu("h100"), num_gpus=16, gpus_per_node=8, nic_bytes_per_s=5e10, host=HOST)
JOB = PlanJob(shape=ModelShape.of_decoder(preset("llama-3-8b")), seq_len=8192, global_batch=64, cluster=CLUSTER)
MODEL = OffloadTimeModel(JOB)
AWAY = changed(BASE, {"mesh.dp_shard": 8, "zero.stage": 3, "batch.accumulation": 4, "tiers.optimizer": "host"})


def of_host(**fields: float) -> OffloadTimeModel:
    return OffloadTimeModel(replace(JOB, cluster=replace(CLUSTER, host=replace(HOST, **fields))))


def test_what_is_stored_on_the_device_takes_no_time() -> None:
    assert MODEL.times(changed(BASE, {"mesh.dp_shard": 8, "zero.stage": 3})) == OverlapTimes()
    assert OverlapTimes().exposed_s(1.0, 2.0) == 0


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("params", ["device", "host", "nvme"])
@pytest.mark.parametrize(("grads", "optimizer"), [("device", "host"), ("host", "host"), ("nvme", "nvme")])
@pytest.mark.parametrize(
    "more",
    [{}, {"mesh.pp": 2}, {"mesh.pp": 2, "pipeline.gather": "micro-batch", "mesh.tp": 2}, {"precision.param": "fp32"}],
)
@pytest.mark.parametrize("states", ["master", "int8"])
def test_moves_are_those_that_the_layout_counts(
    zero_stage: int, params: Any, grads: Any, optimizer: Any, more: dict[str, Any], states: Any
) -> None:
    model = MODEL
    config = changed(
        BASE,
        {
            "mesh.dp_shard": 4,
            "zero.stage": zero_stage,
            "batch.accumulation": 3,
            "tiers.params": params,
            "tiers.grads": grads,
            "tiers.optimizer": optimizer,
            "precision.states": states,
            **more,
        },
    )
    for rank in range(config.mesh.pp):
        across: dict[tuple[str, str], int] = {}
        for move in model.moves(config, rank):
            count = move.count * (3 if move.moment in ("forward", "backward") else 1)
            way = (move.source, move.target)
            across[way] = across.get(way, 0) + count * move.num_bytes
        folds = model.layouts.rank(config, rank)
        counted = folds.total(partial(folds.layout.group_bytes_across, num_micro_batches=3))
        assert across == {way: size for way, size in counted.items() if size}


def test_a_step_on_the_host_takes_30_bytes_a_parameter_of_the_node_s_memory() -> None:
    model = of_host(memory_bytes_per_s=1e11)  # slower than PCIe, so memory is what counts
    expected = 30 * JOB.shape.num_params / 8 / (0.4 * 1e11 / 8)
    assert model.times(AWAY).step_s == pytest.approx(expected, rel=1e-3)
    assert MODEL.times(AWAY).step_s == pytest.approx(expected / 4, rel=1e-3)


def test_more_shards_make_the_step_shorter_and_more_ranks_of_a_node_make_it_longer() -> None:
    assert MODEL.times(changed(AWAY, {"mesh.dp_shard": 16})).step_s == pytest.approx(
        MODEL.times(AWAY).step_s / 2, rel=1e-3
    )
    crowded = OffloadTimeModel(replace(JOB, cluster=replace(CLUSTER, gpus_per_node=16)))
    assert crowded.times(AWAY).step_s == pytest.approx(2 * MODEL.times(AWAY).step_s)


def test_disks_read_and_write_by_turns() -> None:
    config = changed(AWAY, {"tiers.optimizer": "nvme"})
    step_s = MODEL.times(config).step_s
    each = 12 * JOB.shape.num_params / 8
    assert step_s == pytest.approx(each / (2e10 / 8) + each / (1e10 / 8), rel=1e-3)
    faster = of_host(nvme_read_bytes_per_s=4e10, nvme_write_bytes_per_s=2e10)
    assert faster.times(config).step_s == pytest.approx(step_s / 2)


@pytest.mark.parametrize(("states", "state_bytes"), [("bf16", 8), ("int8", 6)])
def test_codes_take_fewer_bytes_of_a_disk_and_of_the_host_s_memory(states: Any, state_bytes: int) -> None:
    config, coded = changed(AWAY, {"tiers.optimizer": "nvme"}), {"precision.states": states}
    assert MODEL.times(changed(config, coded)).step_s == pytest.approx(
        MODEL.times(config).step_s * state_bytes / 12, rel=1e-3
    )
    slow = OffloadTimeModel(replace(JOB, cluster=replace(CLUSTER, host=replace(HOST, memory_bytes_per_s=1e11))))
    plain_s, coded_s = (slow.times(config).step_s for config in (AWAY, changed(AWAY, coded)))
    assert coded_s == pytest.approx(plain_s * (2 * state_bytes + 6) / 30, rel=1e-3)


def test_parameters_on_the_host_hide_beside_what_is_computed() -> None:
    times = MODEL.times(changed(AWAY, {"tiers.params": "host", "tiers.grads": "host"}))
    assert times.forward_s > 0
    assert times.backward_s > 0
    assert times.exposed_s(10.0, 20.0) < times.exposed_s(0.0, 0.0)


def test_activations_go_away_and_come_back() -> None:
    times = MODEL.times(changed(BASE, {"mesh.dp_shard": 8, "tiers.activations": "host", "recompute.mode": "full"}))
    share_bytes_per_s = min(JOB.cluster.gpu.host_bytes_per_s, 4e11 / 8)
    assert times.forward_s == times.backward_s == pytest.approx(32 * 2 * 8192 * 4096 / share_bytes_per_s)
    assert times.step_s == 0


def test_what_was_measured_is_asked_first() -> None:
    profile = Profile(
        device="cpu",
        num_ranks=2,
        num_threads=1,
        memory_bytes=1e9,
        step_bytes_per_s=1e9,
        copies_bytes_per_s=(("device->host", 1e9),),
        disk_read_bytes_per_s=1e8,
        disk_write_bytes_per_s=1e8,
    )
    model = OffloadTimeModel(replace(JOB, cluster=replace(CLUSTER, profile=profile)))
    assert model.times(AWAY).step_s == pytest.approx(30 * JOB.shape.num_params / 8 / 1e9, rel=1e-3)
    on_disk = model.times(changed(AWAY, {"tiers.optimizer": "nvme"})).step_s
    assert on_disk == pytest.approx(24 * JOB.shape.num_params / 8 / 1e8, rel=1e-3)
    away = model.times(changed(BASE, {"mesh.dp_shard": 8, "tiers.activations": "host"}))
    assert away.forward_s > 30 * away.backward_s
