"""Layers of experts of two ranks on the virtual device, in each order of streams, against one process on the host.

    python -m device.expert_streams

Prints a JSON line for each rank and order: the values that differ, where the host waits in two layers, and what a step
of an engine with two layers computes and waits for.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from itertools import count
from typing import Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from device.orders import DEVICE, ORDERS, QUICK_ORDERS
from device.ranks import TIMEOUT_S, join, start_ranks
from device.virtual import install
from device.virtual.streams import Order, Scheduler
from harness.moe import (
    NUM_EXPERTS,
    DispatchedLayer,
    RoutedLayer,
    RoutedModel,
    Tokens,
    gradients_of,
    make_experts,
    make_tokens,
    part_of,
    routed_rows,
    square,
)
from harness.refusals import refusal_of
from harness.training import make_config
from shardwise.comm.backends import GlooComm, NcclComm, ProcessGroupFactory, process_group_comm
from shardwise.comm.collectives import Comm, CommResources, RankPlace
from shardwise.comm.mesh import Mesh, open_store
from shardwise.engine.build import EngineInputs
from shardwise.engine.engine import Engine
from shardwise.experts.dispatch import ExpertDispatch
from shardwise.runtime.memory_tracker import MemoryTracker
from shardwise.tensor.plan_layout import plan_layout

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


class Undecided(RoutedLayer):
    """A router that chooses others each time."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = count()  # no state that a second pass is given again

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x).softmax(-1)  # without `topk`, whose choice a second pass repeats
        index = (scores.argsort(-1, descending=True)[:, :2] + next(self.numbers)) % NUM_EXPERTS
        return scores.gather(-1, index), index


def make_engine(model: nn.Module) -> Engine:
    """An engine whose forwards run again in the backward."""
    sections = {"mesh": {"ep": NUM_RANKS}, "zero": {"stage": 3}, "recompute": {"mode": "full"}}
    config = make_config(1, {**sections, "run": {"device": "cuda"}}).resolve(NUM_RANKS)
    layout = plan_layout(model, config, rank=dist.get_rank())
    factory = ProcessGroupFactory(Mesh(layout.mesh, TIMEOUT_S), open_store(TIMEOUT_S))
    return Engine(EngineInputs(model, config, layout, MemoryTracker(DEVICE), factory, loss_fn=square))


def step(scheduler: Scheduler, order: Order, seed: int) -> tuple[list[float], list[str]]:
    """Loss, norm and parameters of an engine's second step, and where the host waits."""
    scheduler.restart(order, seed)
    torch.manual_seed(0)
    engine = make_engine(RoutedModel().double())
    rows = [routed_rows(dist.get_rank(), number).to(DEVICE) for number in range(2)]
    engine.train_step([rows[0]])
    scheduler.finish_all()
    waits: list[str] = []
    with mock.patch.object(scheduler, "on_wait", lambda why, _: waits.append(why)):
        result = engine.train_step([rows[1]])
    numbers = [float(result.loss), float(result.grad_norm)]
    for name in sorted(engine.layout.trained_names):
        value = engine.read(name)
        assert value is not None
        numbers.append(float(value.cpu().sum()))
    engine.close()
    return numbers, waits


def refuse(scheduler: Scheduler) -> str:
    """The code of the refusal of routers that choose others in a recomputation."""
    scheduler.restart("lazy", 0)
    model = RoutedModel().double()
    model.layers[1] = Undecided().double()
    engine = make_engine(model)
    code, _ = refusal_of(lambda: engine.train_step([routed_rows(dist.get_rank()).to(DEVICE)]))
    engine.close()
    scheduler.finish_all()
    return code


def main() -> int:
    if "RANK" not in os.environ:
        for process in start_ranks(NUM_RANKS, "device.expert_streams", sys.argv[1:]):
            print(process.communicate()[0], end="", flush=True)
        return 0
    scheduler = install()
    join()
    assert dist.group.WORLD is not None
    for order, seed in (("eager", 0), *(QUICK_ORDERS if "--quick" in sys.argv else ORDERS)):
        comm = process_group_comm(dist.group.WORLD, "ep", CommResources.alone(DEVICE, TIMEOUT_S))
        assert isinstance(comm, NcclComm)
        differences, waits = run(comm, scheduler, order, seed)
        numbers, step_waits = step(scheduler, order, seed)
        line = {"order": order, "differences": differences, "waits": waits}
        print(json.dumps({**line, "numbers": numbers, "step_waits": step_waits}), flush=True)
    print(json.dumps({"refusal": refuse(scheduler)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
