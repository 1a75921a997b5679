"""torch keeps what it was given for an op for ever: that must not be an engine, nor its process groups."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.refusals import refused
from harness.tensor import MICRO_SIZE, make_case
from harness.training import make_config
from shardwise import simulate
from shardwise.comm.collectives import Comm
from shardwise.runtime.op_registry import Op, OpRegistry

pytestmark = pytest.mark.begin


class Held:
    """What a kernel needs, such as the ranks of an engine."""

    def double(self, x: Tensor) -> Tensor:
        return 2 * x


def register_double(runs_on_fakes: bool = False) -> tuple[OpRegistry, Op, weakref.ref[Held]]:
    registry, held = OpRegistry(runs_on_fakes), Held()
    op = registry("double(Tensor x) -> Tensor", held.double, lambda x: x.new_empty(held.double(x).shape))
    return registry, op, weakref.ref(held)


@pytest.mark.parametrize("runs_on_fakes", [False, True])
def test_kernels_live_as_long_as_their_registry_is_open(runs_on_fakes: bool) -> None:
    registry, double, held = register_double(runs_on_fakes)
    gc.collect()
    assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
    assert double(torch.ones(3, device="meta")).shape == (3,)
    registry.close()
    gc.collect()
    assert held() is None
    with refused("engine-closed", "double"):
        double(torch.ones(2))


def test_kernels_go_with_a_registry_that_was_not_closed() -> None:
    registry, double, held = register_double()
    del registry
    gc.collect()
    assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0)), "its op holds the registry"
    del double
    gc.collect()
    assert held() is None


@pytest.mark.quick(1)
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"cp": 2}])
def test_engines_whose_ranks_compute_a_sample_together_leave_nothing(mesh: dict[str, Any]) -> None:
    gc.collect()
    before = num_comms()
    case = make_case("deep")
    batch = case.batch(0, MICRO_SIZE, torch.float64)
    config = make_config(1, {"mesh": mesh})
    simulate(case.build(torch.float32), config, lambda: batch, loss_fn=case.loss, rank=0, world_size=2)
    gc.collect()
    assert num_comms() == before


def num_comms() -> int:
    return sum(type(each) is Comm for each in gc.get_objects())
