"""The base that LoRA packs: what is refused, and the bytes of its stand-in on meta."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.refusals import refused
from shardwise.config.resolve import Config
from shardwise.construction.scan import build_layout
from shardwise.train import job_model


class Model(nn.Module):
    """Has a head, which stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 10), nn.Linear(10, 6, bias=False)])
        self.head = nn.Linear(6, 4)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_the_stand_in_has_the_bytes_of_a_packed_base() -> None:
    with torch.device("meta"):
        model = job_model.pack_on_meta(Model()).requires_grad_(False)
    assert type(model.head) is nn.Linear
    assert model.blocks[1](torch.zeros(3, 10, device="meta")).shape == (3, 6)
    layout = build_layout(model, Config.from_dict({"zero": {"stage": 3}}).resolve(world_size=2))
    packed = [group for group in layout.groups if group.is_opaque]
    assert [group.name for group in packed] == ["blocks.0:bytes", "blocks.1:bytes"]
    assert [group.numel for group in packed] == [30, 30]
    assert [layout.group_bytes_at_rest(group)["param"] for group in packed] == [128, 128]  # the padding's alignment


def test_a_packed_base_needs_adapters_and_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_model, "find_spec", lambda name: None)
    job_model.check_packing(Config.from_dict({}))
    with refused("packed-base-trains", "lora.base=nf4", "lora.rank"):
        job_model.check_packing(Config.from_dict({"lora": {"base": "nf4"}}))
    with refused("extra-missing", "bitsandbytes", "qlora"):
        job_model.check_packing(Config.from_dict({"lora": {"base": "nf4", "rank": 4}}))


def test_a_packed_folder_needs_what_unpacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_model, "find_spec", lambda name: None)
    for how in (None, {"quant_method": "gptq"}):
        assert job_model.unpacking(SimpleNamespace(quantization_config=how)) == {}
    with refused("extra-missing", "compressed-tensors", "packed"):
        job_model.unpacking(SimpleNamespace(quantization_config={"quant_method": "compressed-tensors"}))
