"""One rank of two fails, and its process goes on, while the device of the other waits for it in a collective.

    python -m device.failures      # a JSON line: what the other rank raises, and after how many seconds

On gloo the host waits, and its time-out ends that. On a device nothing of c10d does before NCCL ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from device.orders import Case, factory_of, make_engine, model_case, zero
from device.ranks import join, start_ranks
from device.virtual import install
from harness.models import make_batches

CASE = Case("stage 2", 2, zero(2), has_echoes=False)
FAILING_RANK = 1


def fail(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    raise ValueError("no such label")


def run_rank(rank: int) -> None:
    """Train a step; in the next one this rank fails, or waits for the one that does."""
    install("lazy")
    join()
    store = dist.distributed_c10d._get_default_store()
    engine = make_engine(CASE, lambda mesh: factory_of(CASE, mesh))
    first, second = make_batches(model_case(CASE), num_steps=2, world_size=1, num_micro_batches=2)
    engine.train_step(first[0])
    if rank == FAILING_RANK:
        engine.parts.state.loss_fn = fail
    start_s = time.monotonic()
    try:
        engine.train_step(second[0])
    except Exception as error:
        if rank == FAILING_RANK:
            store.wait(["is over"], timedelta(seconds=300))
            store.set("has ended", "")
        else:
            engine.close()
            found = {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - start_s}
            print(json.dumps(found), flush=True)
            store.set("is over", "")
            store.wait(["has ended"], timedelta(seconds=60))  # this rank has the store
    os._exit(0)  # of process groups whose messages never came


def main() -> int:
    if "RANK" in os.environ:
        run_rank(int(os.environ["RANK"]))
    for process in start_ranks(CASE.world_size, "device.failures"):
        print(process.communicate()[0], end="", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
