"""Train LoRA adapters with PEFT on a sharded base model (ZeRO-3), and save the adapter.

    torchrun --nproc-per-node 8 examples/lora.py --model my-llama --data texts.jsonl --out runs/adapter
    python examples/lora.py --toy

The base model is frozen: it has no gradients and no optimizer states, and each rank stores a slice of it.
"""

import argparse
import json
from itertools import islice
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

import shardwise


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--model", help="a Hugging Face folder")
    parser.add_argument("--data", help="a JSONL file with a text in each line")
    parser.add_argument("--out", type=Path, default=Path("runs/adapter"))
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    if args.toy:
        from toy import make_toy

        args.model = make_toy()
        args.data = args.model / "texts.jsonl"

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = [json.loads(line)["text"] for line in Path(args.data).read_text().splitlines()]
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with shardwise.init():  # each rank keeps its slices as the weights are read
        base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    model = get_peft_model(base, adapters)  # the adapters are small: every rank makes them
    config = {
        "zero": {"stage": 3},
        "precision": {"param": "bf16"},
        "batch": {"micro_size": 4, "accumulation": 1},
        "optimizer": {"lr": 1e-2 if args.toy else 2e-4, "weight_decay": 0.0},
        "recompute": {"mode": "full"},
    }
    engine = shardwise.initialize(model, config)
    say = print if torch.distributed.get_rank() == 0 else lambda *_: None
    trainable = sum(each.numel() for each in model.parameters() if each.requires_grad)
    say(f"trains {trainable:,} of {sum(each.numel() for each in model.parameters()):,} parameters")
    rows = [tokenizer(text + tokenizer.eos_token, truncation=True, max_length=2048) for text in texts]
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    for batches in islice(shardwise.data_loader(engine, rows, collate_fn=collate), args.steps):
        result = engine.train_step(batches)
        say(f"step {result.step}: loss {result.loss:.4f}")
    # The adapters alone are gathered, on rank 0; all ranks take part.
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    state = {name: engine.read(name, to_rank=0) for name in trained}
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(args.out, state_dict=state)
        print("saved the adapter in", args.out)
    engine.close()


if __name__ == "__main__":
    main()
