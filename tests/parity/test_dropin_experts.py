"""Mixtures of experts by DeepSpeed's names: Trainer and TRL divide them, save them whole, and go on in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file

from harness.huggingface import build_model
from harness.local_hub import train_tokenizer
from harness.trainer_runs import Run, assert_same_history

EP_2 = {"expert_parallel": {"enabled": True, "autoep_size": 2, "expert_tensor_parallel_size": 1}}
OWN_EP_2 = {"shardwise": {"mesh": {"ep": 2}}}
WHOLE: dict[str, Any] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "mixtral"
    torch.manual_seed(0)
    build_model("mixtral", output_router_logits=False).save_pretrained(folder)
    train_tokenizer().save_pretrained(folder)
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("zero", "sections"), [("zero2", EP_2), ("zero3", OWN_EP_2)])
def test_a_trainer_divides_experts_and_saves_the_weights_of_one_process(folder, tmp_path, zero, sections) -> None:
    runs = [Run(tmp_path / "plain", folder, 1, None, max_steps=3)]
    runs += [Run(tmp_path / "ep", folder, 2, zero, max_steps=3, sections=sections)]
    plain, divided = (run.wait() for run in runs)
    assert_same_history(divided, plain)
    theirs, ours = stored(tmp_path / "plain"), stored(tmp_path / "ep")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
