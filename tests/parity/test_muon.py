"""Muon in every layout equals one plain process with torch's Muon and AdamW, and orthogonalizes each matrix once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from harness.models import CASES, every_rank, make_batches
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity, train_reference
from harness.training import LR, merge_ranks, train_engine

NUM_STEPS: Final = 4
MUON: Final = {"name": "muon", "lr": LR}


class MuonBesideAdamW(torch.optim.Optimizer):
    """torch's two optimizers as one; Newton-Schulz runs in the parameters' own dtype, not in bf16."""

    def __init__(self, model: nn.Module, is_matrix: Callable[[str, Tensor], bool]) -> None:
        named = [each for each in model.named_parameters() if each[1].requires_grad]
        matrices = [parameter for name, parameter in named if is_matrix(name, parameter)]
        others = [parameter for name, parameter in named if not is_matrix(name, parameter)]
        decays = {0.1: [each for each in others if each.dim() >= 2], 0.0: [each for each in others if each.dim() < 2]}
        self.muon = torch.optim.Muon(matrices, lr=LR, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        groups = [{"params": params, "weight_decay": decay} for decay, params in decays.items()]
        self.adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
        super().__init__([{"params": [parameter for _, parameter in named]}], {})

    def step(self, closure: Any = None) -> None:
        with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
            self.muon.step()
        self.adamw.step()


def is_matrix(name: str, parameter: Tensor) -> bool:
    return name.startswith("blocks.") and parameter.dim() == 2


def reference(case_name: str, world_size: int, accumulation: int, clip_norm: float | None = None) -> Trace:
    case = CASES[case_name]
    batches = make_batches(case, num_steps=NUM_STEPS, world_size=world_size, num_micro_batches=accumulation)
    model = case.build(torch.float64)
    return train_reference(
        model, every_rank(batches), case.loss, lambda model: MuonBesideAdamW(model, is_matrix), clip_norm
    )


def check(ranks: WorkerPool, case: str, num_ranks: int, sections: dict[str, Any], clip_norm: float | None) -> None:
    accumulation = sections.get("batch", {}).get("accumulation", 1)
    overrides = {**sections, "optimizer": {**MUON, "clip_norm": clip_norm}}
    overrides.pop("batch", None)
    traces = ranks(num_ranks).run(train_engine, case, accumulation, NUM_STEPS, overrides)
    holders = 1 if sections["zero"]["stage"] == 0 else sections.get("mesh", {}).get("dp_shard")
    check_parity(merge_ranks(traces, num_holders=holders), reference(case, num_ranks, accumulation, clip_norm))


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_stage_equals_one_process(ranks: WorkerPool, num_ranks: int, stage: int, accumulation: int) -> None:
    sections = {"zero": {"stage": stage}, "batch": {"accumulation": accumulation}}
    check(ranks, "transformer", num_ranks, sections, clip_norm=0.05)
