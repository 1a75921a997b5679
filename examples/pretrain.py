"""Pretrain a decoder from scratch on a file of tokens, with a loss that is yours.

    torchrun --nproc-per-node 8 examples/pretrain.py --tokens tokens.bin --preset 350m --steps 10000
    python examples/pretrain.py --toy

The file has one uint16 for each token, as `numpy.array(ids, dtype="uint16").tofile(path)` writes it. A step's samples
follow from its number alone, so a run that is restarted, on any number of ranks, reads what it would have read.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import shardwise
from shardwise.models import Decoder, preset


def batches_of_step(engine: shardwise.Engine, tokens: np.ndarray, length: int, step: int) -> list[tuple]:
    """Return this rank's (inputs, targets), one pair for each micro-batch."""
    mesh, batch = engine.layout.mesh, engine.config.batch
    starts = np.random.default_rng(step).integers(0, len(tokens) - length - 1, batch.global_size)
    mine = starts[mesh.data_index(torch.distributed.get_rank()) :: mesh.num_data_ranks]
    samples = torch.tensor(
        np.stack([tokens[at : at + length + 1] for at in mine]).astype("int64"), device=engine.device
    )
    return [(each[:, :-1], each[:, 1:]) for each in samples.split(batch.micro_size)]


def loss_fn(logits: torch.Tensor, batch: tuple) -> tuple[torch.Tensor, int]:
    """Return the sum over targets and their number: every token of all ranks weighs the same."""
    targets = batch[1]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"), targets.numel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--tokens", help="a file of uint16")
    parser.add_argument("--preset", default="100m", help="a name that `shardwise presets` lists")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/pretrained"))
    args = parser.parse_args()
    if args.toy:
        args.preset, args.length, args.steps = "tiny", 64, min(args.steps, 10)
        tokens = np.arange(20_000) ** 2 % 97
    else:
        tokens = np.memmap(args.tokens, dtype="uint16", mode="r")

    with shardwise.init(seed=0):  # each rank draws its own slices
        model = Decoder(preset(args.preset))
    config = {
        "zero": {"stage": 2},
        "precision": {"param": "bf16"},
        "batch": {"global_size": 16, "micro_size": 4},
        "scheduler": {"name": "cosine", "warmup_steps": args.steps // 20, "total_steps": args.steps},
        "recompute": {"mode": "selective"},
    }
    engine = shardwise.initialize(model, config, loss_fn=loss_fn)
    say = print if torch.distributed.get_rank() == 0 else lambda *_: None
    if any(args.out.glob("step-*")):
        engine.load(args.out)
    while engine.num_steps < args.steps:
        start = time.perf_counter()
        result = engine.train_step(batches_of_step(engine, tokens, args.length, engine.num_steps))
        say(f"step {result.step}: loss {result.loss:.4f}, {result.count / (time.perf_counter() - start):,.0f} tokens/s")
        if result.step % 1000 == 0 or result.step == args.steps:
            engine.save(args.out, wait=False, keep_last=3)
    engine.close()


if __name__ == "__main__":
    main()
