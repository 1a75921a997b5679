"""Train a Hugging Face model in two pipeline stages, and save a checkpoint (by DeepSpeed: Accelerate has none)."""

import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, out, num_steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])


class Block(nn.Module):
    def __init__(self, layer, rotary):
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, hidden):
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotations = self.rotary(hidden, positions)
        return self.layer(hidden, position_ids=positions, position_embeddings=rotations)


def loss_fn(logits, labels):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def micro_batches(samples):
    for each in samples.split(2):
        yield each, each


deepspeed.init_distributed()
tokens = AutoTokenizer.from_pretrained(folder)((folder / "texts.jsonl").read_text(), return_tensors="pt")["input_ids"]
samples = tokens[0, : 32 * (tokens.numel() // 32)].view(-1, 32)
model = AutoModelForCausalLM.from_pretrained(folder)
base = model.model
blocks = [Block(layer, base.rotary_emb) for layer in base.layers]
net = PipelineModule([base.embed_tokens, *blocks, base.norm, model.lm_head], num_stages=2, loss_fn=loss_fn)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
}
engine = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]
for step in range(num_steps):
    loss = engine.train_batch(micro_batches(samples[8 * step : 8 * step + 8]))
    if torch.distributed.get_rank() == 0:
        print(f"step {step + 1}: loss {float(loss):.4f}", flush=True)
engine.save_checkpoint(str(out))
