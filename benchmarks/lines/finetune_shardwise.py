"""Fine-tune a model under ZeRO-3: accumulation, schedule, evaluation, checkpoints, resumption, export."""

import json
import sys
from itertools import count, islice
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

import shardwise

folder, out, num_steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(folder)
samples = [tokenizer(json.loads(line)["text"]) for line in (folder / "texts.jsonl").read_text().splitlines()]
with shardwise.init():
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
config = {
    "zero": {"stage": 3},
    "precision": {"param": "bf16"},
    "batch": {"micro_size": 4, "accumulation": 2},
    "optimizer": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0},
    "scheduler": {"name": "cosine", "warmup_steps": 2, "total_steps": num_steps, "final_ratio": 0.0},
}
engine = shardwise.initialize(model, config, weights=folder)


def loader_of(samples):
    mesh = engine.layout.mesh
    sampler = DistributedSampler(samples, mesh.num_data_ranks, mesh.data_index(torch.distributed.get_rank()))
    return DataLoader(samples, 4, sampler=sampler, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))


def epochs(loader):
    for epoch in count():
        loader.sampler.set_epoch(epoch)
        yield from loader


if (out / "checkpoints").exists():
    engine.load(out / "checkpoints")
steps = zip(*[epochs(loader_of(samples[16:]))] * 2, strict=False)
for batches in islice(steps, engine.num_steps, num_steps):
    result = engine.train_step(batches)
    print(f"step {result.step}: loss {result.loss:.4f}", flush=True)
    if result.step % 5 == 0:
        engine.save(out / "checkpoints", keep_last=2)
print(f"held-out loss {engine.eval_step(list(loader_of(samples[:16]))).loss:.4f}")
engine.export_weights(out / f"model-{num_steps}", tokenizer=tokenizer)
engine.close()
