"""Fine-tune a model under ZeRO-3: accumulation, schedule, evaluation, checkpoints, resumption, export."""

import json
import sys
from itertools import count
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    get_cosine_schedule_with_warmup,
)

folder, out, num_steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(
        zero_stage=3, gradient_accumulation_steps=2, gradient_clipping=1.0, zero3_save_16bit_model=True
    ),
    mixed_precision="bf16",
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    project_config=ProjectConfiguration(str(out), automatic_checkpoint_naming=True, total_limit=2),
)
tokenizer = AutoTokenizer.from_pretrained(folder)
samples = [tokenizer(json.loads(line)["text"]) for line in (folder / "texts.jsonl").read_text().splitlines()]
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
loader = DataLoader(samples[16:], 4, shuffle=True, collate_fn=collate)
held_out = DataLoader(samples[:16], 4, collate_fn=collate)
model = AutoModelForCausalLM.from_pretrained(folder)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
# Accelerate steps a schedule once for each process.
scheduler = get_cosine_schedule_with_warmup(
    optimizer, 2 * accelerator.num_processes, num_steps * accelerator.num_processes
)
model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
step, saved = 0, sorted((out / "checkpoints").glob("checkpoint_*"), key=lambda path: int(path.name.split("_")[1]))
if saved:
    accelerator.load_state(str(saved[-1]))
    accelerator.project_configuration.iteration = int(saved[-1].name.split("_")[1]) + 1
    step = 5 * accelerator.project_configuration.iteration
first_epoch, num_seen = divmod(2 * step, len(loader))
for epoch in count(first_epoch):
    if step == num_steps:
        break
    loader.set_epoch(epoch)
    batches = accelerator.skip_first_batches(loader, num_seen) if epoch == first_epoch and num_seen else loader
    model.train()
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            loss = accelerator.reduce(loss.detach(), "mean").item()
            accelerator.print(f"step {step}: loss {loss:.4f}", flush=True)
            if step % 5 == 0:
                accelerator.save_state()
            if step == num_steps:
                break
model.eval()
losses = []
for batch in held_out:
    with torch.no_grad():
        loss = model(**batch).loss
    losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
accelerator.print(f"held-out loss {torch.cat(losses).mean():.4f}")
accelerator.unwrap_model(model).save_pretrained(
    out / f"model-{num_steps}",
    is_main_process=accelerator.is_main_process,
    state_dict=accelerator.get_state_dict(model),
)
if accelerator.is_main_process:
    tokenizer.save_pretrained(out / f"model-{num_steps}")
accelerator.end_training()
