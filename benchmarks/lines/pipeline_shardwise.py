"""Train a Hugging Face model in two pipeline stages, and save a checkpoint."""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import shardwise

folder, out, num_steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
tokens = AutoTokenizer.from_pretrained(folder)((folder / "texts.jsonl").read_text(), return_tensors="pt")["input_ids"]
samples = tokens[0, : 32 * (tokens.numel() // 32)].view(-1, 32)
with shardwise.init():
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
config = {
    "mesh": {"pp": 2},
    "batch": {"micro_size": 2, "accumulation": 4},
    "optimizer": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0},
}
engine = shardwise.initialize(model, config, weights=folder)
for step in range(num_steps):
    result = engine.train_step(
        [{"input_ids": each, "labels": each} for each in samples[8 * step : 8 * step + 8].split(2)]
    )
    if torch.distributed.get_rank() == 0:
        print(f"step {result.step}: loss {result.loss:.4f}", flush=True)
engine.save(out)
engine.close()
