"""Which cores each rank gets: a share of what the ranks of its machine share, and all of what it has for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from harness.pool import WorkerPool
from harness.refusals import refused
from shardwise.comm.agreement import Agreement
from shardwise.comm.mesh import open_store
from shardwise.config.resolve import Config
from shardwise.engine.initialize import with_own_cores
from shardwise.launch.host import usable_cores

BIND = Config.from_dict({"tiers": {"bind_cores": True}, "run": {"timeout_s": 60.0}})
UNKNOWN = range(1000, 1008)  # no system says where they lie


def own_cores(
    rank: int, world_size: int, usable: list[range], quota: float | None, named: dict[int, tuple[int, ...]]
) -> tuple[int, ...] | None:
    tiers = BIND.tiers.model_copy(update={"cores": named.get(rank)})
    config = BIND.model_copy(update={"tiers": tiers})
    agreement = Agreement(open_store(), range(world_size), rank, config.run.timeout_s)
    return with_own_cores(config, agreement, usable[rank], quota).tiers.cores


@pytest.mark.parametrize(
    ("usable", "quota", "named", "expected"),
    [
        ([UNKNOWN] * 3, None, {}, [(1000, 1001), (1002, 1003, 1004), (1005, 1006, 1007)]),
        ([range(4), range(4, 8)], None, {}, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ([range(1000, 1004), range(4), range(1000, 1004)], None, {}, [(1000, 1001), (0, 1, 2, 3), (1002, 1003)]),
        ([UNKNOWN] * 2, 5.5, {}, [(1000, 1001), (1004, 1005)]),
        ([UNKNOWN] * 2, 0.5, {}, [(1000,), (1004,)]),
        ([UNKNOWN] * 2, None, {1: (1007,)}, [(1000, 1001, 1002, 1003), (1007,)]),
    ],
    ids=["shared", "bound by the launcher", "partly shared", "quota", "little quota", "named"],
)
def test_ranks_share_what_they_have_in_common(ranks: WorkerPool, usable, quota, named, expected) -> None:
    assert ranks(len(usable)).run(own_cores, usable, quota, named) == expected


def cores_of_engine(rank: int, world_size: int, tiers: dict[str, Any]) -> tuple[int, ...] | None:
    config = {"tiers": tiers, "optimizer": {"name": "sgd"}, "run": {"device": "cpu"}}
    with shardwise.initialize(torch.nn.Linear(4, 4), config, loss_fn=lambda output, batch: output.sum()) as engine:
        dist.barrier()
        return engine.config.tiers.cores


def test_an_engine_knows_its_cores(ranks: WorkerPool) -> None:
    shares = ranks(2).run(cores_of_engine, {"bind_cores": True})
    assert set(shares[0]) | set(shares[1]) == set(usable_cores())
    first = usable_cores()[0]
    assert ranks(2).run(cores_of_engine, {"cores": [first]}) == [(first,)] * 2
    assert ranks(1).run(cores_of_engine, {}) == [None]


def test_an_engine_refuses_cores_that_it_may_not_use() -> None:
    with refused("cores-not-usable", "tiers.cores=[9999]"):
        shardwise.initialize(torch.nn.Linear(4, 4), {"tiers": {"cores": [9999]}, "run": {"device": "cpu"}})
