"""One rank of a tensor-parallel group on a GPU: streams, events and kernels, beside the same rank on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from harness.echo import EchoFactory, cancel_deviations
from harness.models import make_batches
from harness.tensor import make_case
from harness.training import make_config
from shardwise.dropout.hash_rng import Samples, ShardRegion, grid_of, keyed_mask
from shardwise.engine.build import EngineInputs
from shardwise.engine.engine import Engine
from shardwise.runtime.memory_tracker import MemoryTracker
from shardwise.tensor.cross_entropy import TokenLossTerms, VocabSplit, cross_entropy, cross_entropy_sum
from shardwise.tensor.plan_layout import plan_layout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda", 0)


def train(device: torch.device, world_size: int, **sections: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of a few steps, and this rank's own parameters."""
    overrides = {"mesh": {"tp": 2}, "optimizer": {"clip_norm": 0.05}, "run": {"device": device.type}, **sections}
    config = make_config(2, overrides).resolve(world_size)
    case = make_case("decoder")
    model = case.build(torch.float64)
    layout = plan_layout(model, config)
    network = EchoFactory(layout.mesh, rank=0)  # the rank whose weights are everybody's
    engine = Engine(EngineInputs(model, config, layout, MemoryTracker(device), network, loss_fn=case.loss))
    cancel_deviations(engine.parts.losses)
    trace = []
    for step in make_batches(case, num_steps=3, world_size=1, num_micro_batches=2):
        result = engine.train_step(step[0])
        trace += [result.loss, result.grad_norm]
    with engine.gathered():
        parameters = {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    engine.close()
    return trace, parameters


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (3, 4)])
def test_a_rank_computes_what_it_computes_on_the_cpu(
    stage: int, world_size: int, sequence_parallel: bool, recompute: str
) -> None:
    """With stage 3, gathers and reductions are on their streams meanwhile."""
    sections = {
        "zero": {"stage": stage},
        "tensor": {"sequence_parallel": sequence_parallel},
        "recompute": {"mode": recompute},
    }
    actual, parameters = train(DEVICE, world_size, **sections)
    expected, expected_parameters = train(torch.device("cpu"), world_size, **sections)
    assert actual == pytest.approx(expected, rel=1e-9)
    for name, value in expected_parameters.items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("zone", [None, ShardRegion(dim=1, index=1, degree=2)])
def test_masks_have_the_bits_of_the_cpu(zone: ShardRegion | None) -> None:
    masks = []
    for device in (DEVICE, torch.device("cpu")):
        grid = grid_of((4, 33, 130), zone, Samples(first=6, num=4), device)
        masks.append(keyed_mask(grid, key=2**62 + 12345, p=0.3).cpu())
    assert torch.equal(*masks)
    assert masks[0].double().mean().item() == pytest.approx(0.7, abs=0.02)


@pytest.mark.parametrize(
    ("function", "reduction"), [(cross_entropy_sum, "sum"), (lambda *args: cross_entropy(*args)[0], "none")]
)
def test_cross_entropy_never_waits_for_the_device(function: Any, reduction: str) -> None:
    """And equals torch's, in two chunks of tokens."""
    num_words, num_tokens = 2**16, 1040
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_tokens, 4), (num_words, 4)]
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE) for shape in shapes]
    hidden, weight = [leaf.requires_grad_() for leaf in leaves]
    targets = torch.randint(num_words, (num_tokens,), generator=generator).index_fill(0, torch.arange(7), -100)
    targets = targets.to(DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = function(hidden, weight, None, targets, VocabSplit(num_words), TokenLossTerms(label_smoothing=0.1))
        actual = [losses, *torch.autograd.grad(losses.sum(), leaves)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    losses = F.cross_entropy(hidden @ weight.T, targets, label_smoothing=0.1, reduction=reduction)
    expected = [losses, *torch.autograd.grad(losses.sum(), leaves)]
    for each, plain in zip(actual, expected, strict=True):
        torch.testing.assert_close(each, plain, rtol=1e-9, atol=1e-9)
