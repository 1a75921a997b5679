"""Muon in every layout equals one plain process with torch's Muon and AdamW, and orthogonalizes each matrix once."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from harness import split_sequences, tensor
from harness.models import CASES, every_rank, make_batches
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity, train_reference
from harness.refusals import refused
from harness.tensor import CLIP_NORM
from harness.training import LR, make_config, merge_ranks, train_engine
from shardwise import Config, initialize
from shardwise.layout.layout import build_layout
from shardwise.layout.matrices import assign_owners, matrices_of, newton_schulz_flops, rounds_of
from shardwise.layout.param_groups import FusedDim, GroupSpec, ParamSpec
from shardwise.zero import matrix_step

NUM_STEPS: Final = 3
MUON: Final = {"name": "muon", "lr": LR, "clip_norm": CLIP_NORM}


class MuonBesideAdamW(torch.optim.Optimizer):
    """torch's two optimizers as one; Newton-Schulz runs in the parameters' own dtype, not in bf16.

    Fused weights, [in, out] of GPT-2, are stepped by thirds.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [each for each in model.named_parameters() if each[1].requires_grad]
        self.parts: list[tuple[nn.Parameter, nn.Parameter, int]] = []
        others: list[nn.Parameter] = []
        for name, parameter in named:
            if not name.startswith(("blocks.", "transformer.h.")) or parameter.dim() != 2:
                others.append(parameter)
                continue
            num_parts = 3 if name.endswith("c_attn.weight") else 1
            for index, part in enumerate(parameter.data.chunk(num_parts, dim=1)):
                self.parts.append((parameter, nn.Parameter(part), index))
        matrices = [part for _, part, _ in self.parts]
        decays = {0.1: [each for each in others if each.dim() >= 2], 0.0: [each for each in others if each.dim() < 2]}
        self.muon = torch.optim.Muon(matrices, lr=LR, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        groups = [{"params": params, "weight_decay": decay} for decay, params in decays.items()]
        self.adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
        super().__init__([{"params": [parameter for _, parameter in named]}], {})

    def step(self, closure: Any = None) -> None:
        for whole, part, index in self.parts:
            num_parts = whole.shape[1] // part.shape[1]
            part.grad = None if whole.grad is None else whole.grad.chunk(num_parts, dim=1)[index].clone()
        with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
            self.muon.step()
        self.adamw.step()


@functools.cache
def reference(case_name: str, world_size: int, accumulation: int) -> Trace:
    case = CASES[case_name]
    batches = make_batches(case, num_steps=NUM_STEPS, world_size=world_size, num_micro_batches=accumulation)
    return train_reference(case.build(torch.float64), every_rank(batches), case.loss, MuonBesideAdamW, CLIP_NORM)


def check(ranks: WorkerPool, case: str, num_ranks: int, accumulation: int, sections: dict[str, Any]) -> None:
    sections = {"optimizer": MUON, **sections}
    traces = ranks(num_ranks).run(train_engine, case, accumulation, NUM_STEPS, sections)
    holders = 1 if sections["zero"]["stage"] == 0 else sections.get("mesh", {}).get("dp_shard")
    check_parity(merge_ranks(traces, num_holders=holders), reference(case, num_ranks, accumulation))


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_stage_equals_one_process(ranks: WorkerPool, num_ranks: int, stage: int, accumulation: int) -> None:
    check(ranks, "transformer", num_ranks, accumulation, {"zero": {"stage": stage}})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicas_and_small_matrices_that_stay_whole_equal_one_process(ranks: WorkerPool, stage: int) -> None:
    sections = {"zero": {"stage": stage, "keep_whole_below": 200 * (stage == 3)}, "mesh": {"dp_shard": 2}}
    check(ranks, "transformer", 4, 1, sections)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("case", ["odd-shapes", "unused-parameters", "frozen-parameters", "reused-blocks"])
def test_odd_models_equal_one_process(ranks: WorkerPool, case: str, stage: int) -> None:
    check(ranks, case, 3, 2, {"zero": {"stage": stage}})


@pytest.mark.parametrize("optimizer", ["host", "nvme"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_off_the_device_equal_one_process(ranks: WorkerPool, tmp_path: Path, stage: int, optimizer: str) -> None:
    tiers: dict[str, Any] = {"optimizer": optimizer, "grads": "host" if stage > 1 else "device"}
    tiers |= {"params": "host"} if stage == 3 else {}
    tiers |= {"nvme_path": str(tmp_path)} if optimizer == "nvme" else {"optimizer_on_device": 0.3}
    check(ranks, "transformer", 2, 2, {"zero": {"stage": stage}, "tiers": tiers})


SPLITS: Final = [
    ("decoder", {"tp": 2}, 0),
    ("decoder", {"tp": 2}, 3),
    ("decoder", {"tp": 4}, 1),
    ("decoder", {"tp": 2, "dp_shard": 2}, 0),
    ("decoder", {"tp": 2, "dp_shard": 2}, 2),
    ("decoder", {"tp": 2, "dp_shard": 2}, 3),
    ("decoder", {"tp": 2, "dp_replicate": 2, "dp_shard": 1}, 0),
    ("gpt2", {"dp_shard": 2}, 3),
    ("gpt2", {"tp": 2}, 1),
    ("gpt2", {"tp": 2, "dp_shard": 2}, 3),
    ("deep", {"pp": 2}, 1),
    ("deep-tied", {"pp": 2, "dp_shard": 2}, 0),
    ("deep-tied", {"pp": 2, "dp_shard": 2}, 3),
    ("deep", {"pp": 2, "dp_shard": 2, "tp": 2}, 3),
    ("dense", {"cp": 2}, 1),
    ("dense", {"cp": 2, "dp_shard": 2}, 3),
    ("dense", {"cp": 2, "tp": 2}, 3),
]


@functools.cache
def split_reference(model: str, num_data_ranks: int) -> Trace:
    make_case = split_sequences.make_case if model == "dense" else tensor.make_case
    return tensor.train_plainly(make_case(model), num_data_ranks, 2, NUM_STEPS, optimizer_of=MuonBesideAdamW)


@pytest.mark.quick(5)
@pytest.mark.parametrize(("model", "mesh", "stage"), SPLITS)
def test_split_models_equal_one_process(ranks: WorkerPool, model: str, mesh: dict[str, int], stage: int) -> None:
    if model == "gpt2":
        pytest.importorskip("transformers")
    num_ranks = math.prod(mesh.values())
    sections = {"mesh": mesh, "zero": {"stage": stage}, "optimizer": MUON}
    train = split_sequences.train_split if model == "dense" else tensor.train_split
    traces = ranks(num_ranks).run(train, model, sections, 2, NUM_STEPS)
    num_data_ranks = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1)
    check_parity(merge_ranks(traces), split_reference(model, num_data_ranks))
