"""Fine-tune a Hugging Face causal model: train, evaluate, save and resume, export, generate.

    torchrun --nproc-per-node 8 examples/finetune_hf.py --model my-llama --data texts.jsonl --out runs/tuned
    python examples/finetune_hf.py --toy                  # a tiny model and its texts: seconds on a CPU

The same command again goes on from the last checkpoint, on any number of GPUs. Each line of the JSONL is a
{"text": ...}. Parameters, gradients and optimizer are sharded over the ranks (ZeRO-3).
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

import shardwise


def rows_of(texts: list[str], tokenizer) -> list[dict]:
    """Return the tokens of each text."""
    return [tokenizer(text + tokenizer.eos_token, truncation=True, max_length=2048) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--model", help="a Hugging Face folder")
    parser.add_argument("--data", help="a JSONL file")
    parser.add_argument("--out", type=Path, default=Path("runs/tuned"))
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    if args.toy:
        from toy import make_toy

        args.model = make_toy()
        args.data = args.model / "texts.jsonl"

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = [json.loads(line)["text"] for line in Path(args.data).read_text().splitlines()]
    with shardwise.init():  # no rank ever holds the whole model
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    config = {
        "zero": {"stage": 3},
        "precision": {"param": "bf16"},
        "batch": {"micro_size": 4, "accumulation": 2},
        "optimizer": {"lr": 1e-3 if args.toy else 1e-5, "weight_decay": 0.0},
        "scheduler": {"name": "cosine", "warmup_steps": 5, "total_steps": args.steps},
        "recompute": {"mode": "full"},
    }
    engine = shardwise.initialize(model, config, weights=args.model)
    say = print if torch.distributed.get_rank() == 0 else lambda *_: None
    checkpoints, collate = args.out / "checkpoints", DataCollatorForLanguageModeling(tokenizer, mlm=False)
    # Each rank gets its rows of the global batch, in an order that depends on no number of ranks.
    loader = shardwise.data_loader(engine, rows_of(texts[20:], tokenizer), collate_fn=collate)
    held_out = shardwise.data_loader(engine, rows_of(texts[:20], tokenizer), collate_fn=collate, shuffle=False)
    if any(checkpoints.glob("step-*")):
        say("goes on from step", engine.load(checkpoints, data=loader).step)
    with shardwise.progress(engine, args.steps, args.out) as run:
        for batches in run.steps(loader):
            run.log(engine.train_step(batches))
            if engine.num_steps % 10 == 0:
                engine.save(checkpoints, wait=False, keep_last=2, data=loader)  # training goes on while it is written
    say("held-out loss", engine.eval_step(next(iter(held_out))).loss)
    engine.export_weights(args.out / f"model-{engine.num_steps}", tokenizer=tokenizer)  # from_pretrained loads it
    with engine.gathered() as whole:
        prompt = tokenizer("3 + 4 =", return_tensors="pt", return_token_type_ids=False).to(engine.device)
        say(tokenizer.decode(whole.generate(**prompt, max_new_tokens=8, do_sample=False)[0]))
    engine.close()


if __name__ == "__main__":
    main()
