"""A pipeline's stages in one process, one after the other: losses and gradients of any model, without ranks.

Each stage has a copy of the model in which the parameters of other stages are NaN, so that what uses one shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import Config
from shardwise.comm.loss import LossSum
from shardwise.pipeline.stage_module import StageForward
from shardwise.runtime.float64 import float64_throughout
from shardwise.runtime.torch_private import pytree
from shardwise.tensor.plan_layout import plan_layout

LossOf = Callable[[Any], Tensor]


def pipeline_error(model: nn.Module, batch: Mapping[str, Any], loss_of: LossOf, **section: Any) -> float:
    """How far a pipeline of two stages is from the plain model, of loss and gradients, over the largest of them.

    Args:
        model: of float64.
        batch: arguments of its forward.
        loss_of: of its output.
        section: the config's `pipeline`.
    """
    config = Config.from_dict({"mesh": {"pp": 2}, "batch": {"accumulation": 2}, "pipeline": section}).resolve(2)
    layout = plan_layout(model, config).pipeline
    assert layout is not None, "mesh.pp is two"
    stages = [_stage_of(model, layout.stages_of, stage) for stage in range(2)]
    forwards = [StageForward(each, layout.units, [stage], torch.device("cpu")) for stage, each in enumerate(stages)]
    with float64_throughout():
        for forward in forwards:
            forward.install()
        forwards[0].begin(0, None)
        sent = stages[0](**batch)
        forwards[0].end()
        received = pytree.tree_map(_received, sent)
        forwards[1].begin(1, received)
        output = stages[1](**batch)
        loss = forwards[1].read_loss(lambda: LossSum(loss_of(output), torch.ones(()))).total
        forwards[1].end()
        loss.backward()
        pairs = [
            (root, leaf.grad)
            for root, leaf in zip(pytree.tree_leaves(sent), pytree.tree_leaves(received), strict=True)
            if isinstance(leaf, Tensor) and leaf.grad is not None
        ]
        torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])
        plain = copy.deepcopy(model)
        expected = loss_of(plain(**batch))
        expected.backward()
    return max(_distance([expected], [loss]), _distance(_gradients(plain), _gradients(*stages)))


def _stage_of(model: nn.Module, stages_of: Mapping[str, tuple[int, ...]], stage: int) -> nn.Module:
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if stage not in stages_of[name]:
                parameter.fill_(torch.nan)
    return copied


def _received(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _gradients(*models: nn.Module) -> list[Tensor]:
    """The sum over the models."""
    return [
        torch.stack([torch.zeros_like(each) if each.grad is None else each.grad for each in same]).sum(0)
        for same in zip(*(model.parameters() for model in models), strict=True)
    ]


def _distance(expected: list[Tensor], found: list[Tensor]) -> float:
    largest = max(float(each.detach().abs().max()) for each in expected)
    gaps = [float((one - other).detach().abs().max()) for one, other in zip(expected, found, strict=True)]
    return max(gap if gap == gap else float("inf") for gap in gaps) / largest
