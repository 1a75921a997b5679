"""Split one model three ways: pipeline stages, tensor parallelism inside each, and data parallelism over all.

    torchrun --nproc-per-node 8 examples/three_d.py --model my-llama --data texts.txt --pp 2 --tp 2
    torchrun --nproc-per-node 4 examples/three_d.py --toy

The ranks that remain are data-parallel: 8 ranks with pp 2 and tp 2 make 2 replicas, over which ZeRO-1 shards the
optimizer. The model stays as it is: Hugging Face's own plan says how layers are split, and stages are cut by cost.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import shardwise


def batches_of_step(engine: shardwise.Engine, tokens: torch.Tensor, length: int, step: int) -> list[dict]:
    """Return this rank's micro-batches; all ranks of one replica get the same."""
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
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", default="runs/three_d", help="a folder for the checkpoint")
    args = parser.parse_args()
    if args.toy:
        from toy import make_toy

        args.model, args.length = make_toy("runs/toy-4", num_layers=4), 32
        args.data = args.model / "texts.jsonl"

    tokens = AutoTokenizer.from_pretrained(args.model)(Path(args.data).read_text(), return_tensors="pt")["input_ids"][0]
    with shardwise.init():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    config = {
        "mesh": {"pp": args.pp, "tp": args.tp},
        "tensor": {"sequence_parallel": True},
        "pipeline": {"schedule": "1f1b"},
        "zero": {"stage": 1},
        "precision": {"param": "bf16"},
        "batch": {"micro_size": 1, "accumulation": 4},  # the more micro-batches, the less a stage waits
        "optimizer": {"lr": 1e-3 if args.toy else 1e-5},
    }
    engine = shardwise.initialize(model, config, weights=args.model)
    rank = torch.distributed.get_rank()
    if rank == 0:
        print(engine.layout.mesh)
    for _ in range(args.steps):
        result = engine.train_step(batches_of_step(engine, tokens, args.length, engine.num_steps))
        if rank == 0:
            print(f"step {result.step}: loss {result.loss:.4f}")
    engine.save(args.out, tag="last")  # loads under any other mesh, on one process too
    engine.close()


if __name__ == "__main__":
    main()
