"""Layers of experts of two ranks on the virtual device, in each order of streams, against one process on the host.

    python -m device.expert_streams

Prints a JSON line for each rank and order: the values that differ, and where the host waits in two layers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from device.orders import DEVICE, ORDERS
from device.ranks import TIMEOUT_S, join, start_ranks
from device.virtual import install
from device.virtual.streams import Order, Scheduler
from harness.moe import DispatchedLayer, Tokens, gradients_of, make_experts, make_tokens, part_of
from shardwise.comm.backends import GlooComm, NcclComm, process_group_comm
from shardwise.comm.collectives import Comm, CommResources, RankPlace
from shardwise.experts.dispatch import ExpertDispatch

NUM_RANKS: Final = 2
CASES: Final = ("plain", "two ranks without")
FAMILY: Final = "gpt_oss"
Found = Mapping[str, Tensor]


def on_device(tokens: Tokens) -> Tokens:
    moved = (each.detach().to(DEVICE) for each in (tokens.hidden, tokens.index, tokens.weights, tokens.grad))
    return Tokens(*moved).as_leaves()


def expected_of(case: str, rank: int) -> Found:
    """What one process computes for a rank, with the tokens of all."""
    alone: Comm = GlooComm(RankPlace(0, 1, "ep"), CommResources.alone(torch.device("cpu"), TIMEOUT_S), None)
    experts = make_experts(FAMILY)
    parts = [make_tokens(case, each) for each in range(NUM_RANKS)]
    found = gradients_of(experts, Tokens.join(parts), DispatchedLayer(experts, ExpertDispatch(alone)))
    sizes = [len(part.hidden) for part in parts]
    of_tokens = ("out", "hidden", "weights")
    return {n: (v.split(sizes) if n in of_tokens else v.chunk(NUM_RANKS))[rank] for n, v in found.items()}


def run(comm: Comm, scheduler: Scheduler, order: Order, seed: int) -> tuple[list[str], list[str]]:
    scheduler.restart(order, seed)
    differences: list[str] = []
    waits: list[str] = []
    dispatch = ExpertDispatch(comm)
    for case in CASES:
        experts = part_of(make_experts(FAMILY), comm.rank, NUM_RANKS).to(DEVICE)
        tokens = on_device(make_tokens(case, comm.rank))
        scheduler.finish_all()
        with mock.patch.object(scheduler, "on_wait", lambda why, _: waits.append(why)):
            found = gradients_of(experts, tokens, DispatchedLayer(experts, dispatch))
        expected = expected_of(case, comm.rank)
        differences += [f"{case}: {name}" for name in expected if not torch.equal(found[name].cpu(), expected[name])]
    dispatch.close()
    return differences, waits


def main() -> int:
    if "RANK" not in os.environ:
        for process in start_ranks(NUM_RANKS, "device.expert_streams"):
            print(process.communicate()[0], end="", flush=True)
        return 0
    scheduler = install()
    join()
    assert dist.group.WORLD is not None
    for order, seed in (("eager", 0), *ORDERS):
        comm = process_group_comm(dist.group.WORLD, "ep", CommResources.alone(DEVICE, TIMEOUT_S))
        assert isinstance(comm, NcclComm)
        differences, waits = run(comm, scheduler, order, seed)
        print(json.dumps({"order": order, "differences": differences, "waits": waits}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
