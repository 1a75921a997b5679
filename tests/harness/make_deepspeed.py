"""Make the checkpoints of `tests/data/deepspeed` with DeepSpeed 0.19.8, on two CPU ranks.

Run it in an environment that has DeepSpeed, which the library's own tests do not need:

    DS_BUILD_OPS=0 pip install deepspeed==0.19.8
    torchrun --nproc-per-node 2 tests/harness/make_deepspeed.py

Each folder there has a checkpoint as DeepSpeed leaves it, and `expected.safetensors`: every master and optimizer state
in full, as DeepSpeed itself gathers them. The sizes are odd, so that ranks' parts end in the middle of a row.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

FOLDER = Path(__file__).parents[1] / "data" / "deepspeed"
EXPECTED = "expected.safetensors"
CLIENT_STATE = {"epoch": 3, "seen": [1, 2]}
# DeepSpeed's own reads mix up the parameters of this one; it trains as without the option, bit for bit.
ROUND_ROBIN = "zero2-round-robin"
KINDS: dict[str, dict[str, Any]] = {
    "zero1-fp32": {"zero_optimization": {"stage": 1}},
    "zero1-bf16": {"zero_optimization": {"stage": 1, "parameter_alignment": True}, "bf16": {"enabled": True}},
    "zero2-bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    ROUND_ROBIN: {"zero_optimization": {"stage": 2, "round_robin_gradients": True}, "bf16": {"enabled": True}},
    "zero2-fp16": {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True, "initial_scale_power": 4}},
    "zero2-offload": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
    },
    "zero3-fp32": {"zero_optimization": {"stage": 3}},
    "zero3-bf16": {
        "zero_optimization": {"stage": 3, "sub_group_size": 20, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
    },
}


class Small(nn.Module):
    """Tied, frozen and trained parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.mix = nn.Linear(5, 6)
        self.out = nn.Linear(6, 5, bias=False)
        self.base = nn.Linear(5, 5, bias=False)
        self.base.weight.requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.linspace(-1, 1, 5))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.base(self.embed(tokens))
        hidden = hidden + self.offset.to(hidden.dtype)
        return self.head(self.out(torch.tanh(self.mix(hidden))))  # [b, n, 7]


def make(kind: str, root: Path) -> None:
    """Train a few steps and save."""
    import deepspeed

    torch.manual_seed(0)
    model = Small()
    decayed = [each for name, each in model.named_parameters() if "weight" in name and each.requires_grad]
    others = [each for name, each in model.named_parameters() if "bias" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adam = {"lr": 0.05, "betas": [0.9, 0.98]} | ({} if "offload" in kind else {"torch_adam": True})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": adam},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 4}},
        **KINDS[kind],
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(7, (2, 4), generator=generator)
        loss = nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(root / kind), client_state=CLIENT_STATE)
    if kind == ROUND_ROBIN and dist.get_rank() == 0:
        shutil.copy(root / "zero2-bf16" / EXPECTED, root / kind)
    elif kind != ROUND_ROBIN:
        save_expected(engine, root / kind / EXPECTED)


def save_expected(engine: Any, path: Path) -> None:
    """Save what DeepSpeed gathers of each parameter, on rank 0."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from safetensors.torch import save_file

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):  # it links the states too early, before any
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[f"{name} param"] = safe_get_full_fp32_param(parameter)
            for state in ("exp_avg", "exp_avg_sq"):
                found[f"{name} {state}"] = safe_get_full_optimizer_state(parameter, state)
        else:
            with deepspeed.zero.GatheredParameters([parameter]):
                found[f"{name} param"] = parameter.detach()
    found |= {f"{name} buffer": buffer for name, buffer in engine.module.named_buffers()}
    if dist.get_rank() == 0:
        save_file({name: value.clone().contiguous() for name, value in found.items()}, path)


def convert(source: Path, target: Path) -> None:
    """Make the universal checkpoint of a checkpoint."""
    tag = (source / "latest").read_text().strip()
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(source / tag), "--output_folder", str(target / f"{tag}_universal")]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    subprocess.run(command, check=True)
    shutil.copy(source / EXPECTED, target)


def main() -> None:
    """Make all kinds, one after the other."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # torch has what this model needs of it
    for kind in sys.argv[1:] or KINDS:
        if dist.get_rank() == 0:
            shutil.rmtree(FOLDER / kind, ignore_errors=True)
        dist.barrier()
        make(kind, FOLDER)
        dist.barrier()
    if dist.get_rank() == 0:
        for kind in ("zero2-bf16", "zero3-bf16"):
            target = FOLDER / f"universal-of-{kind}"
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            convert(FOLDER / kind, target)
        for script in FOLDER.glob("*/zero_to_*.py"):
            script.unlink()  # DeepSpeed's own code


if __name__ == "__main__":
    main()
