"""Train LoRA adapters on a base model under ZeRO-3, and save them."""

import json
import sys
from itertools import islice
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

import shardwise

folder, out, num_steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(folder)
samples = [tokenizer(json.loads(line)["text"]) for line in (folder / "texts.jsonl").read_text().splitlines()]
with shardwise.init():
    model = AutoModelForCausalLM.from_pretrained(folder)
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
config = {
    "zero": {"stage": 3},
    "precision": {"param": "bf16"},
    "batch": {"micro_size": 4},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.0},
}
engine = shardwise.initialize(model, config)
mesh, rank = engine.layout.mesh, torch.distributed.get_rank()
sampler = DistributedSampler(samples, mesh.num_data_ranks, mesh.data_index(rank))
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
for batch in islice(DataLoader(samples, 4, sampler=sampler, collate_fn=collate), num_steps):
    result = engine.train_step(batch)
    print(f"step {result.step}: loss {result.loss:.4f}", flush=True)
with engine.gathered() as whole:
    if rank == 0:
        whole.save_pretrained(out)
engine.close()
