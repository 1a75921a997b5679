"""What fewer bits on the wire gain in time: steps of two ranks over gloo, with each codec, in alternating rounds.

The steps are bound by the wire where sequences are short. One machine's memory is a fast wire; a network of its own, of
so many bits a second, needs root and iproute2, and no other process sees it:

    python benchmarks/encoded_wire.py
    unshare -n sh -c "ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 1mb latency 50ms &&
        python benchmarks/encoded_wire.py"
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parent))

import shardwise
from peers import language_loss
from shardwise import Engine
from shardwise.models import Decoder
from shardwise.models.presets import decoder_config
from step_time import machine

NUM_RANKS = 2
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {},
    "gather=int8": {"gather": "int8"},
    "gather=fp8": {"gather": "fp8"},
    "reduce=int8": {"reduce": "int8"},
    "reduce=int4": {"reduce": "int4"},
    "reduce=int4, feedback": {"reduce": "int4", "reduce_feedback": True},
    "both=int8": {"gather": "int8", "reduce": "int8"},
    "gather=int8, reduce=int4": {"gather": "int8", "reduce": "int4"},
}


def engine_of(precision: Mapping[str, Any], options: argparse.Namespace) -> Engine:
    """An engine of the preset in bf16 on the CPU."""
    config = shardwise.Config.from_dict(
        {
            "model": {"preset": options.preset},
            "data": {"seq_len": options.seq_len},
            "batch": {"micro_size": 1, "accumulation": options.accumulation},
            "zero": {"stage": options.stage},
            "precision": {"param": "bf16", **precision},
            "scheduler": {"name": "constant"},
            "run": {"device": "cpu"},
        }
    )
    torch.manual_seed(0)
    shape = decoder_config(config.model, max_seq_len=options.seq_len)
    return shardwise.initialize(Decoder(shape), config, loss_fn=language_loss)


def measure(rank: int, options: argparse.Namespace) -> None:
    """Take turns; rank 0 prints the medians, and their ratios to bf16's."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options.port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    engines = {name: engine_of(precision, options) for name, precision in VARIANTS.items()}
    batches = [torch.randint(256, (1, options.seq_len)) for _ in range(options.accumulation)]  # [B, S]
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(options.rounds + 1):
        for name, engine in engines.items():
            torch.distributed.barrier()
            start_s = time.perf_counter()
            engine.train_step(batches)
            if number:  # the first makes the states
                seconds[name].append(time.perf_counter() - start_s)
    if rank == 0:
        print(machine())
        whole = statistics.median(seconds["bf16"])
        for name, found in seconds.items():
            median = statistics.median(found)
            sent = sum(engines[name].layout.bytes_on_wire(options.accumulation).values()) / 1e6
            print(f"{name:<24} {median:.3f} s a step, {median / whole:.2f} of bf16's; a rank sends {sent:.0f} MB")
    for engine in engines.values():
        engine.close()
    torch.distributed.destroy_process_group()


def main() -> None:
    """Run the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="25m")
    parser.add_argument("--seq-len", type=int, default=32)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=29_481)
    options = parser.parse_args()
    torch.multiprocessing.spawn(measure, (options,), nprocs=NUM_RANKS)


if __name__ == "__main__":
    main()
