"""LoRA over a base that bitsandbytes has packed in 4 bits trains as in one plain process, and its bytes are sharded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from harness.hf_folders import make_folder, write_chats
from harness.local_hub import make_hub
from harness.paths import ROOT
from harness.pool import WorkerPool
from harness.trainer_runs import Run, assert_same_history
from shardwise import initialize
from shardwise.runtime.memory_tracker import Category

bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

NUM_STEPS: Final = 3
GLOBAL_SIZE: Final = 4
SEQ_LEN: Final = 16
VOCAB: Final = 64
SIZES: Final = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
PACKED_BYTES: Final = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) // 2
TOLERANCE: Final = 1e-5  # sums in fp32


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of two models of the same sizes: rank 0's, and that of the other ranks, which must not count."""
    folders = []
    for seed in range(2):
        torch.manual_seed(seed)
        folders.append(str(tmp_path_factory.mktemp(f"base{seed}")))
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folders[-1])
    return folders[0], folders[1]


def make_model(folder: str, quantization: dict[str, Any], seed: int = 0) -> nn.Module:
    packing = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **quantization)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=packing, dtype=torch.float32, device_map={"": "cpu"}
    )
    torch.manual_seed(seed)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():  # zero at first, where nothing reaches lora_A
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def global_batches(step: int) -> list[dict[str, Tensor]]:
    tokens = torch.randint(1, VOCAB, (GLOBAL_SIZE, SEQ_LEN), generator=torch.Generator().manual_seed(step))
    return [{"input_ids": each, "labels": each} for each in tokens.split(1)]


def packed_bytes(model: nn.Module) -> dict[str, Tensor]:
    packed = {name: each for name, each in model.named_parameters() if type(each) is bitsandbytes.nn.Params4bit}
    return {name: each.detach().clone().view(-1).view(torch.uint8) for name, each in packed.items()}


def train_plainly(folder: str, quantization: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Train without the library; the last loss is of an evaluation."""
    model, losses = make_model(folder, quantization).train(), []
    for module in model.modules():  # in evaluation bitsandbytes would round to bf16 on CPUs that have it
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    own = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = torch.optim.AdamW(own.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(NUM_STEPS):
        loss = torch.stack([model(**batch).loss for batch in global_batches(step)]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own.values(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(torch.stack([model.eval()(**batch).loss for batch in global_batches(NUM_STEPS)]).mean().item())
    return losses, {name: each.detach().clone() for name, each in own.items()}


def train(
    rank: int, world_size: int, folders: tuple[str, str], quantization: dict[str, Any], sections: dict[str, Any]
) -> dict[str, Any]:
    """Train and evaluate on this rank's share of the batches; return what it has seen."""
    model = make_model(folders[min(rank, 1)], quantization, seed=rank)
    mesh = sections.get("mesh", {})
    num_data = world_size // (mesh.get("pp", 1) * mesh.get("cp", 1))
    config = {
        "optimizer": {"lr": 1e-2, "weight_decay": 0.0},
        "batch": {"micro_size": 1, "accumulation": GLOBAL_SIZE // num_data},
        "run": {"device": "cpu"},
    }
    with initialize(model, config | sections) as engine:
        place = engine.layout.mesh.data_index(rank)
        losses = [engine.train_step(global_batches(step)[place::num_data]).loss for step in range(NUM_STEPS)]
        own = {name: engine.read(name) for name, each in model.named_parameters() if each.requires_grad}
        model.eval()
        losses.append(engine.eval_step(global_batches(NUM_STEPS)[place::num_data]).loss)
        engine.train_step(global_batches(0)[place::num_data])  # after what an evaluation may have done
        groups = [group for group in engine.layout.groups if group.is_opaque]
        at_rest = sum(engine.layout.group_bytes_at_rest(group, rank)["param"] for group in groups)
        tracked = engine.memory.snapshot().live_bytes[Category.PARAMETERS]
        on_device = engine.layout.bytes_at_rest(rank, "device")["param"]
        names = {param.name for group in groups for param in group.params}
    kept = {name: each for name, each in packed_bytes(model).items() if name in names}
    return {
        "losses": losses,
        "own": own,
        "packed": kept,
        "at_rest": at_rest,
        "tracked": tracked,
        "on_device": on_device,
    }


LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    **{f"stage {stage}": {"zero": {"stage": stage}} for stage in range(4)},
    "stage 3, host": {"zero": {"stage": 3}, "tiers": {"params": "host"}},
    "stage 3, recomputed": {"zero": {"stage": 3}, "recompute": {"mode": "full"}},
    "cp 2": {"mesh": {"cp": 2}, "zero": {"stage": 3}},
    "pp 2": {"mesh": {"pp": 2}, "zero": {"stage": 0}},
}
PACKINGS: Final[dict[str, dict[str, Any]]] = {
    "uint8": {},
    "bf16": {"bnb_4bit_quant_storage": torch.bfloat16},
    "bf16, scales packed": {"bnb_4bit_quant_storage": torch.bfloat16, "bnb_4bit_use_double_quant": True},
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_adapters_train_over_a_packed_base_as_in_one_process(
    ranks: WorkerPool, bases: tuple[str, str], packing: str, layout: str
) -> None:
    losses, own = train_plainly(bases[0], PACKINGS[packing])
    packed = packed_bytes(make_model(bases[0], PACKINGS[packing]))
    assert sum(each.numel() for each in packed.values()) == PACKED_BYTES
    for found in ranks(2).run(train, bases, PACKINGS[packing], LAYOUTS[layout]):
        assert found["losses"] == pytest.approx(losses, rel=TOLERANCE)
        for name, expected in own.items():
            torch.testing.assert_close(found["own"][name], expected, rtol=1e-3, atol=1e-5)
        assert [name for name, each in found["packed"].items() if not torch.equal(each, packed[name])] == []
        num_holders = 2 if layout != "pp 2" else 1
        assert sum(each.numel() for each in found["packed"].values()) == PACKED_BYTES * num_holders // 2
        # These sizes need no padding.
        assert found["at_rest"] == PACKED_BYTES // (2 if layout in ("pp 2", "cp 2") or "stage 3" in layout else 1)
        assert found["tracked"] == found["on_device"]


def test_a_trainer_packs_its_base(tmp_path: Path) -> None:
    options = {"max_steps": 3, "adapters": True, "packed": True}
    runs = [Run(tmp_path / "plain", make_hub(tmp_path / "hub") / "llama", 1, None, **options)]
    runs += [Run(tmp_path / "zero3", tmp_path / "hub" / "llama", 2, "zero3", **options)]
    plain, sharded = (run.wait() for run in runs)
    assert_same_history(sharded, plain, tolerance=TOLERANCE)


def command(folder: Path, *words: str) -> None:
    """Run `shardwise train` in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "shardwise.cli", "train", *words]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_the_command_packs_a_folder(tmp_path: Path) -> None:
    make_folder("llama", tmp_path / "llama")
    write_chats(tmp_path / "chats.jsonl")
    words = ["--model", "llama", "--data", "chats.jsonl", "--lora", "run.device=cpu", "run.steps=3"]
    words += ["data.seq_len=64", "batch.micro_size=1", "batch.global_size=2", "optimizer.lr=0.01"]
    losses = {}
    for base, num_ranks, stage in (("nf4", 1, 0), ("nf4", 2, 3), ("keep", 1, 0)):
        name = f"{base}-{num_ranks}"
        layout = [f"run.num_procs={num_ranks}", f"zero.stage={stage}"]
        command(tmp_path, *words, *layout, f"lora.base={base}", f"run.name={name}")
        (run,) = tmp_path.glob(f"runs/*-{name}")
        rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        losses[name] = [row["loss"] for row in rows if "loss" in row]
        assert (run / "model" / "adapter_model.safetensors").exists()
    assert losses["nf4-2"] == pytest.approx(losses["nf4-1"], rel=TOLERANCE)
    assert losses["keep-1"] != pytest.approx(losses["nf4-1"], rel=10 * TOLERANCE)
