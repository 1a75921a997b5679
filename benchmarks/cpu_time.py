"""Processor time and page faults of a step of the systems of `step_time.py`, on two CPU ranks over gloo.

Wall-clock times need a quiet machine; processor time says where a step's work is on a busy one too. A rank has one
thread of torch's; `main` is the time of the thread that computes, the others are gloo's.

    python benchmarks/cpu_time.py --systems ddp,shardwise-0 --dtype bf16 --seq 32

With `--together` all systems are in the same two processes and take turns step by step. Then small differences show:
each system's median step, and the median over all turns of its ratio to the first system.

    python benchmarks/cpu_time.py --together --systems shardwise-3,shardwise-3-lockstep --steps 60
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from peers import NUM_RANKS, Workload
from step_time import names, parser_of

NUM_WARMUP = 3


def join(rank: int, port: int) -> None:
    """Meet the other rank."""
    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": NUM_RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": NUM_RANKS}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | {key: str(place[key]) for key in place})
    dist.init_process_group("gloo")


def measure(rank: int, system: str, workload: Workload, num_steps: int, port: int) -> None:
    """One rank: build the system, take steps, and print what a step took on rank 0."""
    join(rank, port)
    step = workload.peers[system].build(workload.model(), workload)
    for index in range(NUM_WARMUP):
        step(workload.tokens(index, rank))
    dist.barrier()
    before, main_s = resource.getrusage(resource.RUSAGE_SELF), time.thread_time()
    for index in range(num_steps):
        step(workload.tokens(NUM_WARMUP + index, rank))
    after, main_s = resource.getrusage(resource.RUSAGE_SELF), time.thread_time() - main_s
    if rank == 0:
        user_s, system_s = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        faults = (after.ru_minflt - before.ru_minflt) // num_steps
        print(
            f"{system}: user {user_s / num_steps:.3f} s, system {system_s / num_steps:.3f} s, "
            f"main {main_s / num_steps:.3f} s, {faults} page faults a step",
            flush=True,
        )
    dist.barrier()


def measure_together(rank: int, systems: list[str], workload: Workload, num_steps: int, port: int) -> None:
    """One rank of all systems: they take turns, in an order that changes with each step."""
    join(rank, port)
    steps = {system: workload.peers[system].build(workload.model(), workload) for system in systems}
    taken_s: dict[str, list[float]] = {system: [] for system in systems}
    for index in range(NUM_WARMUP + num_steps):
        for system in systems if index % 2 else systems[::-1]:
            tokens, start = workload.tokens(index, rank), time.process_time()
            steps[system](tokens)
            taken_s[system].append(time.process_time() - start)
    if rank == 0:
        first = taken_s[systems[0]][NUM_WARMUP:]
        for system in systems:
            own = taken_s[system][NUM_WARMUP:]
            ratio = statistics.median(a / b for a, b in zip(own, first, strict=True))
            print(f"{system}: {statistics.median(own):.3f} s, {ratio:.3f} of {systems[0]}", flush=True)
    dist.barrier()
    os._exit(0)  # engines of several systems end in no particular order


def main() -> None:
    """Measure each system in processes of its own, or all of them together."""
    parser = parser_of(__doc__)
    parser.add_argument("--systems", type=names, default=["ddp", "shardwise-0"])
    parser.add_argument("--model", default="25m", help="a preset of shardwise.models")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--seq", type=int, default=32, help="tokens a sequence")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences a rank")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--together", action="store_true", help="in the same processes, step by step")
    options: Any = parser.parse_args()
    workload = Workload(options.model, options.dtype, options.seq, options.micro_batch)
    if options.together:
        arguments = (options.systems, workload, options.steps, 29500)
        mp.spawn(measure_together, args=arguments, nprocs=NUM_RANKS)  # type: ignore[no-untyped-call]
        return
    for index, system in enumerate(options.systems):
        mp.spawn(measure, args=(system, workload, options.steps, 29500 + index), nprocs=NUM_RANKS)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
