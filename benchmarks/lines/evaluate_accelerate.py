"""Compute the loss of a model over a data set, with its parameters sharded (ZeRO-3)."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

folder = Path(sys.argv[1])
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3), mixed_precision="bf16")
tokenizer = AutoTokenizer.from_pretrained(folder)
samples = [tokenizer(json.loads(line)["text"]) for line in (folder / "texts.jsonl").read_text().splitlines()]
loader = DataLoader(samples, 4, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
model = AutoModelForCausalLM.from_pretrained(folder)
model, loader = accelerator.prepare(model, loader)
model.eval()
sums = torch.zeros(2, device=accelerator.device)
for batch in loader:
    with torch.no_grad():
        loss = model(**batch).loss
    num_targets = (batch["labels"][:, 1:] != -100).sum()
    sums += torch.stack([loss * num_targets, num_targets])
total, count = accelerator.reduce(sums, "sum").tolist()
accelerator.print(f"held-out loss {total / count:.4f}")
accelerator.end_training()
