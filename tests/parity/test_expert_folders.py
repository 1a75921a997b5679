"""Folders of mixtures of experts: any layout reads and writes those of transformers, tensor by tensor, in float64.

Oracles: folders that transformers saves, and models that it loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from harness.moe_models import MOE_FAMILIES, build_moe
from harness.pool import WorkerPool
from shardwise import initialize, propose_plan
from shardwise.runtime.float64 import float64_throughout

pytest.importorskip("transformers")

TOKENS: Final = torch.arange(1, 21).view(2, 10)  # [B, S]
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "stage 3": {"zero": {"stage": 3}},
    "tp 2": {"mesh": {"tp": 2}, "zero": {"stage": 2}},
    "ep 2": {"mesh": {"ep": 2}, "zero": {"stage": 3}},
    "tp 2, ep 2": {"mesh": {"tp": 2, "ep": 2}, "zero": {"stage": 3}},
}
WITHOUT_PLAN: Final = {"inkling_text", "qwen4_exp_text", "zaya"}


def make_model(family: str, seed: int) -> nn.Module:
    """All values differ from those of any other place, also norms and biases."""
    torch.manual_seed(seed)
    model = build_moe(family).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad(), float64_throughout():
        return model(TOKENS).logits + 0  # [B, S, V]


def pass_through(rank: int, world_size: int, family: str, folder: Path, out: Path) -> dict[str, Tensor]:
    """Import into other weights and export again, in each layout; return the logits between."""
    found, plan = {}, None
    for name, overrides in LAYOUTS.items():
        model: Any = make_model(family, seed=1)
        if family in WITHOUT_PLAN and "tp" in name:
            plan = plan or propose_plan(model, {"input_ids": TOKENS}, tp=2)
            model.tensor_plan = plan
        config = {**overrides, "precision": {"param": "fp64"}, "run": {"device": "cpu", "timeout_s": 30.0}}
        with initialize(model, config) as engine:
            engine.import_weights(folder)
            found[name] = logits_of(engine.model.eval())
            engine.export_weights(out / name)
    return found


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "family",
    # A plan that is proposed takes longer than all else; `test_expert_families.py` trains by one.
    [pytest.param(each, marks=pytest.mark.full) if each in WITHOUT_PLAN else each for each in sorted(MOE_FAMILIES)],
)
def test_every_layout_reads_and_writes_the_folder_of_transformers(
    ranks: WorkerPool, family: str, tmp_path: Path
) -> None:
    source: Any = make_model(family, seed=0)
    source.save_pretrained(tmp_path / "theirs")
    expected, theirs = logits_of(source), stored(tmp_path / "theirs")
    for found in ranks(2).run(pass_through, family, tmp_path / "theirs", tmp_path / "ours"):
        for name, logits in found.items():
            torch.testing.assert_close(
                logits, expected, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )
    for name in sorted(LAYOUTS):
        folder = tmp_path / "ours" / name
        ours = stored(folder)
        assert ours.keys() == theirs.keys()
        assert all(ours[key].dtype == value.dtype and ours[key].equal(value) for key, value in theirs.items())
        again, info = type(source).from_pretrained(folder, output_loading_info=True, experts_implementation="eager")
        assert not any(info.values())
        # It makes its rotary frequencies again, and keeps some routers in float32.
        torch.testing.assert_close(logits_of(again.double().eval()), expected, rtol=0, atol=1e-5)
