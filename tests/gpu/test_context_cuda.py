"""One rank of the cp axis on a GPU: exchanges on their stream beside the kernels, beside the same rank on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.echo import EchoFactory
from harness.models import make_batches
from harness.tensor import make_case
from harness.training import make_config
from shardwise.engine.build import EngineInputs
from shardwise.engine.engine import Engine
from shardwise.runtime.memory_tracker import MemoryTracker
from shardwise.tensor.plan_layout import plan_layout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda", 0)


def train(device: torch.device, model_name: str, **sections: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of a few steps, and this rank's parameters."""
    overrides = {
        "mesh": {"cp": 2},
        "precision": {"param": "fp32"},
        "run": {"device": device.type},
        **sections,
    }
    config = make_config(2, overrides).resolve(2)
    case = make_case(model_name)
    model = case.build(torch.float32)
    layout = plan_layout(model, config)
    network = EchoFactory(layout.mesh, rank=0)
    engine = Engine(EngineInputs(model, config, layout, MemoryTracker(device), network, loss_fn=case.loss))
    trace = []
    for step in make_batches(case, num_steps=3, world_size=1, num_micro_batches=2):
        result = engine.train_step(step[0])
        trace += [result.loss, result.grad_norm]
    with engine.gathered():
        parameters = {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    engine.close()
    return trace, parameters


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("transport", ["ring", "all-gather", "ulysses"])
@pytest.mark.parametrize("model_name", ["decoder", "sparse-fixed"])
def test_a_rank_computes_what_it_computes_on_the_cpu(model_name: str, transport: str, recompute: str) -> None:
    """With stage 3, gathers and reductions are on their streams meanwhile."""
    sections = {
        "zero": {"stage": 3},
        "context": {"transport": transport},
        "recompute": {"mode": recompute},
        "attention": {},
    }
    actual, parameters = train(DEVICE, model_name, **sections)
    expected, expected_parameters = train(torch.device("cpu"), model_name, **sections)
    assert actual == pytest.approx(expected, rel=1e-4)
    for name, value in expected_parameters.items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-3, atol=1e-3)
