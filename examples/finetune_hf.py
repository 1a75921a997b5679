"""Fine-tune a Hugging Face causal model: train, evaluate, save and resume, export, generate.

    torchrun --nproc-per-node 8 examples/finetune_hf.py --model my-llama --data texts.jsonl --out runs/tuned
    python examples/finetune_hf.py --toy                  # a tiny model and its texts: seconds on a CPU

The same command again goes on from the last checkpoint, on any number of GPUs. Each line of the JSONL is a
{"text": ...}. Parameters, gradients and optimizer are sharded over the ranks (ZeRO-3).
"""

import argparse
import json
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

import shardwise


def loader_of(engine: shardwise.Engine, texts: list[str], tokenizer) -> DataLoader:
    """Return the micro-batches that this rank reads in an epoch."""
    mesh = engine.layout.mesh
    dataset = [tokenizer(text + tokenizer.eos_token, truncation=True, max_length=2048) for text in texts]
    # Ranks that share samples (mesh.tp, pp, cp) have the same data index.
    sampler = DistributedSampler(dataset, mesh.num_data_ranks, mesh.data_index(torch.distributed.get_rank()))
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return DataLoader(dataset, engine.config.batch.micro_size, sampler=sampler, collate_fn=collate)


def micro_batches(loader: DataLoader) -> Iterator[dict]:
    """Yield one epoch after another, each in an order of its own."""
    for epoch in count():
        loader.sampler.set_epoch(epoch)
        yield from loader


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
    checkpoints, held_out = args.out / "checkpoints", texts[::20]
    if any(checkpoints.glob("step-*")):
        say("goes on from step", engine.load(checkpoints).step)
    data = micro_batches(loader_of(engine, [text for i, text in enumerate(texts) if i % 20], tokenizer))
    steps = zip(*[data] * engine.config.batch.accumulation, strict=False)  # as many micro-batches as a step takes
    for batches in islice(steps, engine.num_steps, args.steps):
        result = engine.train_step(batches)
        say(f"step {result.step}: loss {result.loss:.4f}, lr {result.lr:.2e}, norm {result.grad_norm:.2f}")
        if result.step % 10 == 0:
            engine.save(checkpoints, wait=False, keep_last=2)  # training goes on while it is written
    say("held-out loss", engine.eval_step(list(loader_of(engine, held_out, tokenizer))).loss)
    engine.export_weights(args.out / f"model-{engine.num_steps}", tokenizer=tokenizer)  # from_pretrained loads it
    with engine.gathered() as whole:
        prompt = tokenizer("3 + 4 =", return_tensors="pt", return_token_type_ids=False).to(engine.device)
        say(tokenizer.decode(whole.generate(**prompt, max_new_tokens=8, do_sample=False)[0]))
    engine.close()


if __name__ == "__main__":
    main()
