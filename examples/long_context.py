"""Train a Hugging Face model on long sequences: tokens split over ranks, block-sparse attention, little memory.

    torchrun --nproc-per-node 8 examples/long_context.py --model my-llama --data long.txt --length 131072 --cp 8
    torchrun --nproc-per-node 2 examples/long_context.py --toy

With mesh.cp = 8 each rank computes an eighth of one sequence. Each token sees a window before it and the first block.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import shardwise


def batches_of_step(engine: shardwise.Engine, tokens: torch.Tensor, length: int, step: int) -> list[dict]:
    """Return this rank's micro-batches; the ranks that share a sequence all get the whole of it."""
    mesh, batch = engine.layout.mesh, engine.config.batch
    starts = torch.randint(len(tokens) - length, (batch.global_size,), generator=torch.Generator().manual_seed(step))
    mine = starts[mesh.data_index(torch.distributed.get_rank()) :: mesh.num_data_ranks]
    samples = torch.stack([tokens[at : at + length] for at in mine])
    return [{"input_ids": each, "labels": each} for each in samples.split(batch.micro_size)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--model", help="a Hugging Face folder")
    parser.add_argument("--data", help="a text file")
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    if args.toy:
        from toy import make_toy

        args.model, args.length = make_toy(), 512
        args.data = args.model / "texts.jsonl"

    tokens = AutoTokenizer.from_pretrained(args.model)(Path(args.data).read_text(), return_tensors="pt")["input_ids"][0]
    with shardwise.init():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    config = {
        "mesh": {"cp": args.cp},
        "context": {"transport": "ring", "chunk_tokens": 128 if args.toy else 4096},
        "attention": {
            "kind": "bslongformer",
            "block": 16 if args.toy else 64,
            "num_sliding_window_blocks": 9,
            "global_block_indices": [0],
        },
        "zero": {"stage": 3},
        "precision": {"param": "bf16"},
        "recompute": {"mode": "full"},  # a block's activations exist during its own backward only,
        "tiers": {"activations": "host"},  # and its input waits in host memory
        "batch": {"micro_size": 1, "accumulation": 1},
        "optimizer": {"lr": 1e-3 if args.toy else 1e-5},
    }
    engine = shardwise.initialize(model, config, weights=args.model)
    say = print if torch.distributed.get_rank() == 0 else lambda *_: None
    for _ in range(args.steps):
        result = engine.train_step(batches_of_step(engine, tokens, args.length, engine.num_steps))
        say(f"step {result.step}: loss {result.loss:.4f} over {result.count:,.0f} tokens")
    peak = {name.value: size for name, size in engine.memory.snapshot().peak_live_bytes.items() if size}
    say("peak on this rank:", ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in peak.items()))
    engine.close()


if __name__ == "__main__":
    main()
