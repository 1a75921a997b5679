"""Train LoRA adapters on a base model under ZeRO-3, and save them."""

import json
import sys
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

folder, out, num_steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, gradient_clipping=1.0, zero3_save_16bit_model=True),
    mixed_precision="bf16",
)
tokenizer = AutoTokenizer.from_pretrained(folder)
samples = [tokenizer(json.loads(line)["text"]) for line in (folder / "texts.jsonl").read_text().splitlines()]
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
loader = DataLoader(samples, 4, shuffle=True, collate_fn=collate)
model = AutoModelForCausalLM.from_pretrained(folder)
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2, weight_decay=0.0)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, batch in enumerate(islice(loader, num_steps), 1):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    loss = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.print(f"step {step}: loss {loss:.4f}", flush=True)
state = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained(out, state_dict=state)
accelerator.end_training()
