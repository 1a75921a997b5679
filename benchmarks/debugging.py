"""What the watchdog and the check mode cost a small collective, and comparing the setup costs the start.

python benchmarks/debugging.py --ranks 2

The best and the median round of each mode, in turns; CPU time is of the process, all threads.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from shardwise.comm.agreement import Agreement
from shardwise.comm.backends import ProcessGroupFactory
from shardwise.comm.collectives import Comm
from shardwise.comm.consistency import RankFacts, agree_on_setup
from shardwise.comm.mesh import Mesh, connect, open_store
from shardwise.comm.watchdog import Watchdog, watch
from shardwise.config.resolve import Config
from shardwise.construction.scan import build_layout
from shardwise.layout.mesh_shape import MeshShape
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.device import Streams
from shardwise.runtime.timeline import Timeline

CPU = torch.device("cpu")
MODES = {"neither": {"watchdog_s": 0.0}, "watchdog": {}, "check": {"watchdog_s": 0.0, "check_collectives": True}}
ROUNDS, CALLS = 100, 20


def make(mode: str) -> tuple[Comm, Watchdog | None]:
    """A group of all ranks in one mode."""
    config = Config.from_dict({"run": {"device": "cpu", **MODES[mode]}}).resolve(dist.get_world_size())
    shape = MeshShape.from_config(config.mesh)
    network = ProcessGroupFactory(Mesh(shape, 60.0), open_store())
    comms = connect(network, shape, config, CPU, Streams(CPU), BufferPool(CPU))
    return comms.shards, watch(network.store, comms.data.comm_log, Timeline(network.rank), config.run)


def measure(rank: int, world_size: int, port: int) -> None:
    """Print one line a mode, and one for the start, on rank 0."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    made = {mode: make(mode) for mode in MODES}
    full = torch.zeros(64 * world_size)
    times: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for _ in range(ROUNDS):
        for mode, (comm, _) in made.items():
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            for _ in range(CALLS):
                comm.all_gather(full, "bench").wait()
            times[mode].append(((time.perf_counter() - wall_s) / CALLS, (time.process_time() - cpu_s) / CALLS))
    for mode, pairs in times.items():
        walls, cpus = zip(*pairs, strict=True)
        best_us, median_us, cpu_us = 1e6 * min(walls), 1e6 * statistics.median(walls), 1e6 * min(cpus)
        if rank == 0:
            line = f"best {best_us:7.1f} us, median {median_us:7.1f} us, CPU {cpu_us:7.1f} us"
            print(f"all-gather of 256 B a rank, {mode:9} {line}", flush=True)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(500)])
    config = Config.from_dict({"run": {"device": "cpu"}}).resolve(world_size)
    layout = build_layout(model, config)
    dist.barrier()
    start_s = time.perf_counter()
    agreement = Agreement(open_store(), range(world_size), rank, 60.0)
    agree_on_setup(agreement, RankFacts.of(layout, config, model.named_buffers()))
    if rank == 0:
        print(f"comparing the setup of 1000 parameters {1e3 * (time.perf_counter() - start_s):8.1f} ms", flush=True)
    for _, watchdog in made.values():
        if watchdog is not None:
            watchdog.close()
    dist.barrier()
    os._exit(0)


def main() -> None:
    """Start the ranks here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    mp.spawn(measure, args=(arguments.ranks, 29_477), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
