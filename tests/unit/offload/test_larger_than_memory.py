"""With its states on NVMe, a model trains that is several times larger than all the memory that the process may have.

The system sets the limit, RLIMIT_DATA, which on Linux counts all private memory that can be written: the heap, torch's
tensors, pages of buffers, the stacks of threads. This file is also the program that it is set for.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.models import Decoder, DecoderConfig, lm_loss
from shardwise.runtime.pinned_memory import host_pages

pytestmark = pytest.mark.begin

MIB = 2**20
STATES = ("params", "grads", "optimizer")
NUM_STEPS = 3
# What is freed goes back to the system at once, so that the limit is one on what is in use: below 32 MiB the C library
# keeps it otherwise, which is nothing beside the states of a model worth the trouble, but much beside these.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "262144"}
STACK_BYTES = 2 * MIB  # of each thread; the system's 8 MiB count in full, though hardly any is used


def train(hidden_size: int, num_layers: int, tier: str, folder: str) -> tuple[int, list[float]]:
    """Bytes of the model's states, and the losses of some steps."""
    sizes = {"num_heads": 4, "num_kv_heads": 4, "head_dim": hidden_size // 4, "ffn_size": 4 * hidden_size}
    with shardwise.init(seed=1):
        model = Decoder(
            DecoderConfig(vocab_size=64, num_layers=num_layers, hidden_size=hidden_size, max_seq_len=8, **sizes)
        )
    tiers = dict.fromkeys(STATES, tier)
    config: dict[str, Any] = {
        "zero": {"stage": 3},
        "batch": {"micro_size": 1, "accumulation": 1},
        "optimizer": {"lr": 1e-3, "clip_norm": 1.0},
        "tiers": {**tiers, "nvme_path": folder} if tier == "nvme" else tiers,
        "run": {"device": "cpu"},
    }
    tokens = torch.arange(8).unsqueeze(0)  # [B, S]
    engine = shardwise.initialize(model, config, loss_fn=lambda logits, batch: lm_loss(logits, batch[1]))
    losses = [engine.train_step([(tokens, tokens.roll(-1))]).loss for _ in range(NUM_STEPS)]
    engine.close(keep_values=False)  # whole, the parameters alone exceed the limit
    return sum(engine.layout.bytes_at_rest().values()), losses


def data_bytes() -> int:
    """What counts in the limit."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmData:\s*(\d+) kB", status).group(1)) * 1024


def limit(cap_bytes: int) -> None:
    """Let this process have so much more than it has now."""
    most = data_bytes() + cap_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def run_all(runs: list[dict[str, Any]], hidden_size: int, num_layers: int) -> list[dict[str, Any]]:
    """Run each in a process of its own, all at once; what it found, or what it died of."""
    program = [sys.executable, __file__]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    order = json.dumps({"runs": runs, "hidden_size": hidden_size, "num_layers": num_layers})
    done = subprocess.run(
        [*program, order], env=environment, capture_output=True, text=True, timeout=500, preexec_fn=_small_stacks
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _small_stacks() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, hard))


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the limit does not count pages of one's own")
@pytest.mark.parametrize(
    ("hidden_size", "num_layers", "cap_mib"), [(128, 96, 96), pytest.param(256, 80, 320, marks=pytest.mark.full)]
)
def test_a_model_several_times_the_limit_trains_with_nvme_alone(
    tmp_path: Path, hidden_size: int, num_layers: int, cap_mib: int
) -> None:
    runs = [
        {"tier": "device", "cap_mib": 0},
        {"tier": "nvme", "cap_mib": cap_mib},
        {"tier": "host", "cap_mib": cap_mib},
        {"tier": "device", "cap_mib": cap_mib},
    ]
    plain, nvme, *others = run_all([{**run, "folder": str(tmp_path)} for run in runs], hidden_size, num_layers)
    assert nvme["states_bytes"] == plain["states_bytes"] >= 4 * cap_mib * MIB
    assert nvme["losses"] == plain["losses"]
    assert len(set(nvme["losses"])) == NUM_STEPS
    for other in others:
        where = "(while its engine is made|in step 1)"
        assert re.match(f"(OutOfMemory|Memory)Error: out of memory on rank 0 {where}: .*; try ", other["error"])
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="as above")
def test_the_limit_counts_tensors_and_pages_of_buffers() -> None:
    for make in (host_pages, lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8)):
        ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed would serve the request
        before = data_bytes()
        made = make(64 * MIB)
        assert data_bytes() - before >= made.nbytes == 64 * MIB
        del made


def _run_one(run: dict[str, Any], hidden_size: int, num_layers: int) -> dict[str, Any]:
    train(16, 1, run["tier"], run["folder"])  # imports what is imported late, and has the threads started once
    if run["cap_mib"]:
        limit(run["cap_mib"] * MIB)
    try:
        states_bytes, losses = train(hidden_size, num_layers, run["tier"], run["folder"])
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return {"states_bytes": states_bytes, "losses": losses}


def main() -> None:
    """Fork a process for each run, after the imports, and print what they found, a line each."""
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    pipes = []
    for run in order["runs"]:
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.write(writing, json.dumps(_run_one(run, order["hidden_size"], order["num_layers"])).encode())
            os._exit(0)
        os.close(writing)
        pipes.append(reading)
    for reading in pipes:
        with os.fdopen(reading) as found:
            print(found.read() or '{"error": "killed"}')


if __name__ == "__main__":
    main()
