"""Train a model whose states are larger than the GPU, on one GPU: states in host memory and on NVMe.

    python examples/one_gpu_giant.py --model my-llama-70b --data texts.txt --nvme /nvme/swap
    python examples/one_gpu_giant.py --toy

The GPU holds a block at a time. Parameters and gradients are stored in host memory, masters and moments on a local
disk; the optimizer runs on the host's cores. `shardwise doctor` measures the disk.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import shardwise


def batches_of_step(tokens: torch.Tensor, length: int, step: int, config: dict) -> list[dict]:
    """Return the micro-batches of a step, which follow from its number."""
    size, num = config["batch"]["micro_size"], config["batch"]["accumulation"]
    starts = torch.randint(len(tokens) - length, (num, size), generator=torch.Generator().manual_seed(step))
    samples = [torch.stack([tokens[at : at + length] for at in each]) for each in starts]
    return [{"input_ids": each, "labels": each} for each in samples]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--model", help="a Hugging Face folder")
    parser.add_argument("--data", help="a text file")
    parser.add_argument("--nvme", default="runs/swap", help="a folder on a local NVMe disk")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    if args.toy:
        from toy import make_toy

        args.model, args.length = make_toy(), 64
        args.data = args.model / "texts.jsonl"

    config = {
        "zero": {"stage": 3},  # a block's parameters are on the device only while it computes
        "tiers": {
            "params": "host",
            "grads": "host",
            "optimizer": "nvme",
            "activations": "host",
            "nvme_path": args.nvme,
        },
        "recompute": {"mode": "full"},
        "precision": {"param": "bf16"},
        "batch": {"micro_size": 2, "accumulation": 4},  # many tokens a step: states move once for all of them
        "optimizer": {"lr": 1e-3 if args.toy else 1e-5},
    }
    tokens = AutoTokenizer.from_pretrained(args.model)(Path(args.data).read_text(), return_tensors="pt")["input_ids"][0]
    with shardwise.init(seed=0):  # nothing is held yet; `weights` goes straight to where each state is stored
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    engine = shardwise.initialize(model, config, weights=args.model)
    for tier, states in engine.layout.bytes_by_tier().items():
        print(f"{tier:>6}:", ", ".join(f"{name} {size / 2**20:.2f} MiB" for name, size in states.items() if size))
    for _ in range(args.steps):
        result = engine.train_step(batches_of_step(tokens, args.length, engine.num_steps, config))
        print(f"step {result.step}: loss {result.loss:.4f}")
    engine.close(keep_values=False)


if __name__ == "__main__":
    main()
