"""What 8 bits for the optimizer's moments cost in time: steps of one process, with and without, in alternating rounds.

python benchmarks/encoded_states.py
python benchmarks/encoded_states.py --preset tiny --seq-len 32
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import shardwise
from peers import language_loss
from shardwise import Engine
from shardwise.models import Decoder
from shardwise.models.presets import decoder_config
from step_time import machine

STATES = ("master", "bf16", "int8")


def engine_of(states: str, options: argparse.Namespace) -> Engine:
    """An engine of the preset on the CPU, whose Adam has stepped once."""
    config = shardwise.Config.from_dict(
        {
            "model": {"preset": options.preset},
            "data": {"seq_len": options.seq_len},
            "batch": {"micro_size": options.micro_size},
            "precision": {"param": "fp32", "states": states},
            "scheduler": {"name": "constant"},
            "run": {"device": "cpu"},
        }
    )
    torch.manual_seed(0)
    shape = decoder_config(config.model, max_seq_len=options.seq_len)
    return shardwise.initialize(Decoder(shape), config, loss_fn=language_loss)


def main() -> None:
    """Print the medians, and their ratios to fp32."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="25m")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--micro-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    engines = {states: engine_of(states, options) for states in STATES}
    tokens = torch.randint(256, (options.micro_size, options.seq_len))  # [B, S]
    seconds: dict[str, list[float]] = {states: [] for states in STATES}
    for number in range(options.rounds + 1):
        for states, engine in engines.items():
            start_s = time.perf_counter()
            engine.train_step([tokens])
            if number:  # the first makes the states
                seconds[states].append(time.perf_counter() - start_s)
    print(machine())
    whole = statistics.median(seconds["master"])
    for states, found in seconds.items():
        median = statistics.median(found)
        held = engines[states].layout.bytes_at_rest()["optimizer"] / 2**20
        print(f"{states:<7} {median:.3f} s a step, {median / whole:.2f} of fp32's; {held:.0f} MiB of optimizer states")


if __name__ == "__main__":
    main()
