"""Compute the loss of a model over a data set, with its parameters sharded (ZeRO-3)."""

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

import shardwise

folder = Path(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(folder)
samples = [tokenizer(json.loads(line)["text"]) for line in (folder / "texts.jsonl").read_text().splitlines()]
with shardwise.init():
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
config = {"zero": {"stage": 3}, "precision": {"param": "bf16"}, "optimizer": {"name": "none"}}
engine = shardwise.initialize(model, config, weights=folder)
mesh = engine.layout.mesh
sampler = DistributedSampler(samples, mesh.num_data_ranks, mesh.data_index(torch.distributed.get_rank()))
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
result = engine.eval_step(list(DataLoader(samples, 4, sampler=sampler, collate_fn=collate)))
print(f"held-out loss {result.loss:.4f}")
engine.close()
