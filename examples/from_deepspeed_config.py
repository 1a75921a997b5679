"""Train with a DeepSpeed config: read ds_config.json, say what becomes of its keys, and start an engine with it.

    torchrun --nproc-per-node 8 examples/from_deepspeed_config.py ds_config.json --model my-llama --data texts.txt
    python examples/from_deepspeed_config.py examples/ds_config.json --toy

`shardwise convert ds_config.json --out my.toml` writes the same as a file. A whole script for DeepSpeed needs no
change at all: `shardwise run --as-deepspeed -- python train.py`.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import shardwise
from shardwise.compat.deepspeed.config import read_config, translate


def batches_of_step(engine: shardwise.Engine, tokens: torch.Tensor, length: int, step: int) -> list[dict]:
    """Return this rank's micro-batches."""
    mesh, batch = engine.layout.mesh, engine.config.batch
    starts = torch.randint(len(tokens) - length, (batch.global_size,), generator=torch.Generator().manual_seed(step))
    mine = starts[mesh.data_index(torch.distributed.get_rank()) :: mesh.num_data_ranks]
    samples = torch.stack([tokens[at : at + length] for at in mine])
    return [{"input_ids": each, "labels": each} for each in samples.split(batch.micro_size)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", help="DeepSpeed's JSON")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--model", help="a Hugging Face folder")
    parser.add_argument("--data", help="a text file")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    if args.toy:
        from toy import make_toy

        args.model, args.length = make_toy(), 16
        args.data = args.model / "texts.jsonl"

    translation = translate(read_config(args.config))
    print("config:", translation.config)
    for note in translation.notes:  # keys that have no meaning here, and why
        print("note:", note)
    tokens = AutoTokenizer.from_pretrained(args.model)(Path(args.data).read_text(), return_tensors="pt")["input_ids"][0]
    with shardwise.init():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    engine = shardwise.initialize(model, translation.config, weights=args.model)
    say = print if torch.distributed.get_rank() == 0 else lambda *_: None
    for _ in range(args.steps):
        result = engine.train_step(batches_of_step(engine, tokens, args.length, engine.num_steps))
        say(f"step {result.step}: loss {result.loss:.4f}")
    engine.close()


if __name__ == "__main__":
    main()
