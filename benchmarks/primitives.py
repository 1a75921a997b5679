"""The measurements for four choices: how gloo reduces, gathers and sums, and how two dtypes are added on the CPU.

python benchmarks/primitives.py --ranks 2
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.backends import process_group_comm
from shardwise.comm.collectives import CommResources
from shardwise.runtime.precision import add_widened

Run = Callable[[], object]


def median_ms(run: Run, repeats: int = 15) -> float:
    """The median time of a run, all ranks starting together."""
    times = []
    for index in range(repeats + 3):
        dist.barrier()
        start_s = time.perf_counter()
        run()
        if index >= 3:
            times.append(time.perf_counter() - start_s)
    return statistics.median(times) * 1e3


def collectives(numel: int, dtype: torch.dtype) -> dict[str, Run]:
    """Each way to gather or reduce one buffer of `numel` elements."""
    device = torch.device("cpu")
    comm = process_group_comm(dist.group.WORLD, "dp_shard", CommResources.alone(device, 60.0))
    full, shard = torch.zeros(numel, dtype=dtype), torch.zeros(numel // comm.world_size, dtype=dtype)
    total = torch.zeros(shard.numel(), dtype=torch.float32)
    return {
        "all-gather, gloo": lambda: dist.all_gather_into_tensor(full, shard),
        "all-gather, Shardwise": lambda: comm.all_gather(full, "bench").wait(),
        "reduce-scatter, gloo": lambda: dist.reduce_scatter_tensor(shard, full),
        "reduce-scatter, Shardwise": lambda: comm.reduce_scatter(full, total, accumulate=True, name="bench").wait(),
        "all-reduce, gloo": lambda: dist.all_reduce(full),
        "all-reduce, Shardwise": lambda: comm.sum_in_place(full, "bench"),
    }


def additions(numel: int) -> dict[str, Run]:
    """Each way to add bf16 to fp32."""
    total, addend = torch.zeros(numel), torch.ones(numel, dtype=torch.bfloat16)
    wide: Tensor = torch.ones(numel)
    return {
        "fp32 += fp32": lambda: total.add_(wide),
        "fp32 += bf16, torch": lambda: total.add_(addend),
        "fp32 += bf16, Shardwise": lambda: add_widened(total, addend),
    }


def measure(rank: int, world_size: int, port: int) -> None:
    """Print one line a primitive, on rank 0."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for kib in (32, 512, 2048, 16384):
        for dtype in (torch.float32, torch.bfloat16):
            for name, run in collectives(kib * 2**10 // dtype.itemsize, dtype).items():
                elapsed_ms = median_ms(run)
                if rank == 0:
                    print(f"{kib:5} KiB {str(dtype)[6:]:9} {name:28} {elapsed_ms:8.2f} ms", flush=True)
    for name, run in additions(4 * 2**20).items():
        elapsed_ms = median_ms(run)
        if rank == 0:
            print(f"  4 Mi elements       {name:28} {elapsed_ms:8.2f} ms", flush=True)
    dist.barrier()
    os._exit(0)  # gloo processes that tear down on their own sometimes abort


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--port", type=int, default=29571)
    options = parser.parse_args()
    torch.multiprocessing.spawn(measure, (options.ranks, options.port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
