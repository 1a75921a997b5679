"""Seconds and bytes of handing over 100M parameters from two ranks to a server's sender, against others, in turns.

    python benchmarks/hand_over.py [--layers 12] [--turns 7] [--keep FILE]

All ways end with each tensor whole in bf16 on rank 0, from parameters that two ranks hold in shards, over gloo. Others'
are as their code does it: TRL and verl walk over FSDP2's tensors and call `full_tensor` of each, TRL of bf16
parameters, verl of fp32 ones, which it casts; DCP gathers a full state dict. The bytes are those that both ranks send.
The share of a delta is that of the bytes of a whole version, after one step of AdamW.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1"}

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwise import initialize
from shardwise.checkpoint.deltas import VersionWriter
from shardwise.models import Decoder, DecoderConfig, lm_loss

NUM_RANKS = 2
LEARNING_RATE = 1e-6


def make_model(num_layers: int) -> Decoder:
    """12 layers have 100M parameters."""
    torch.manual_seed(0)
    return Decoder(
        DecoderConfig(
            vocab_size=20_000,
            num_layers=num_layers,
            hidden_size=768,
            num_heads=12,
            num_kv_heads=12,
            head_dim=64,
            ffn_size=2048,
            max_seq_len=64,
            tie_embeddings=True,
        )
    )


def fsdp2(num_layers: int, dtype: torch.dtype) -> Decoder:
    """A model whose blocks, and the whole, are FSDP2's units."""
    model, mesh = make_model(num_layers).to(dtype), init_device_mesh("cpu", (NUM_RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def full_tensors(model: Decoder) -> None:
    """One parameter after the other, on all ranks; rank 0 sends."""
    for parameter in model.state_dict().values():
        parameter.full_tensor().to(torch.bfloat16)


def full_state_dict(model: Decoder) -> None:
    """All at once, on rank 0 in host memory."""
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def run(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """One rank of all ways, which take turns; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    config = {
        "zero": {"stage": 3},
        "precision": {"param": "bf16"},
        "optimizer": {"lr": LEARNING_RATE},
        "run": {"device": "cpu"},
    }
    engine = initialize(make_model(arguments.layers), config, loss_fn=lambda logits, batch: lm_loss(logits, batch[1]))
    half, full = fsdp2(arguments.layers, torch.bfloat16), fsdp2(arguments.layers, torch.float32)
    to_sender, to_all = engine.weights(to_rank=0), engine.weights()
    ways: dict[str, Callable[[], object]] = {
        "shardwise, to rank 0": lambda: drain(to_sender),
        "shardwise, to both": lambda: drain(to_all),
        "TRL: full_tensor, bf16": lambda: full_tensors(half),
        "DCP: full state dict": lambda: full_state_dict(half),
        "verl: full_tensor, fp32": lambda: full_tensors(full),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.turns + 1):
        for name, way in ways.items():
            dist.barrier()
            start_s = time.perf_counter()
            way()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start_s)
    num_bytes = sum(parameter.numel() for parameter in half.parameters()) * 2
    sent = dict(zip(ways, (num_bytes // 2, num_bytes, num_bytes, num_bytes, 2 * num_bytes), strict=True))
    found = {name: {"seconds": times[1:], "sent_bytes": sent[name]} for name, times in seconds.items()}
    if rank == 0:
        show(found, num_bytes)
    found["delta"] = delta(engine, Path(folder), rank)
    if rank == 0 and arguments.keep:
        Path(arguments.keep).write_text(json.dumps(found, indent=2))
    dist.barrier()
    os._exit(0)


def drain(source: Any) -> None:
    """Take each tensor, and keep none."""
    for _ in source:
        pass


def show(found: dict[str, Any], num_bytes: int) -> None:
    """Print the ways, the fastest turns first."""
    print(f"{num_bytes / 2e6:.0f}M parameters, {num_bytes / 2**20:.0f} MiB in bf16, {NUM_RANKS} ranks over gloo")
    for name, figures in found.items():
        times = figures["seconds"]
        spread = f"{min(times):.3f} .. {max(times):.3f}"
        sent = figures["sent_bytes"] / 2**20
        print(f"{name:26} median {statistics.median(times):.3f} s  ({spread})  {sent:6.0f} MiB sent")
    medians = {name: statistics.median(figures["seconds"]) for name, figures in found.items()}
    best = min(value for name, value in medians.items() if not name.startswith("shardwise"))
    print(f"to rank 0 against the best of the others: {medians['shardwise, to rank 0'] / best:.2f}")


def delta(engine: Any, folder: Path, rank: int) -> dict[str, float]:
    """Write versions around steps; the share of the whole that each has."""
    writer, source, shares = VersionWriter(folder / "versions"), engine.weights(to_rank=0), []
    writer.write(source)
    for step in range(2):
        tokens = torch.randint(20_000, (2, 33), generator=torch.Generator().manual_seed(2 * step + rank))
        engine.train_step([(tokens[:, :-1], tokens[:, 1:].contiguous())])
        version = writer.write(source)
        if version is not None:
            shares.append(version.num_bytes / version.num_whole_bytes)
            print(f"delta after step {step + 1}: {shares[-1]:.1%} of the bytes, at lr={LEARNING_RATE}")
    return dict(enumerate(shares))


def main() -> None:
    """Start the ranks, and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--keep", help="a JSON file for the figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=run, args=(rank, arguments, folder)) for rank in range(NUM_RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
