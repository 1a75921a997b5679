"""Host time of a pipeline's actions beside torch.distributed.pipelining's, with kernels that cost next to nothing.

Two ranks over gloo, one thread each, train one decoder of 12 tiny blocks. All systems are in the same two processes and
take turns step by step. Time is that of the thread that runs the schedule, on the CPU: what it waits for the other rank
does not count, nor do gloo's threads. Figures are microseconds, the mean over ranks of the median over rounds.

    forward, backward  a stage's, of one micro-batch, beyond the bare modules of all stages of the rank, which have no
                       pipeline; what a zero-bubble schedule computes later counts as backward
    message            one that is sent or received: a micro-batch's values, or their gradients
    micro-batch        all of these of one micro-batch
    optimizer          the optimizer's part of a step, once
    others             of a step, once: batches, losses, the schedule itself

    python benchmarks/pipeline_host_time.py
    python benchmarks/pipeline_host_time.py --systems torch-1f1b,shardwise-1f1b --rounds 50
    python benchmarks/pipeline_host_time.py --profile shardwise-1f1b --rounds 100
"""

from __future__ import annotations

import cProfile
import dataclasses
import functools
import gc
import json
import os
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import PipelineStage

from cpu_time import join
from peers import NUM_RANKS, costless_shape, mean_loss
from pipeline_peers import PIPELINE_PEERS, VIRTUAL_STAGES, PipelineWorkload, Stage, cut_of
from shardwise.engine import pipeline_runner
from shardwise.models.decoder import DecoderConfig
from shardwise.pipeline.boundary import LocalEnd, RemoteEnd
from shardwise.pipeline.executor import StageCompute
from step_time import machine, names, parser_of

NUM_WARMUP = 4
NUM_MICRO_BATCHES = 8
SYSTEMS = [name for name in PIPELINE_PEERS if not name.startswith(("deepspeed", "shardwise-zb-h2"))]
KINDS = ("forward", "backward", "message", "optimizer", "others")


@dataclasses.dataclass(frozen=True)
class HostWorkload(PipelineWorkload):
    """A decoder whose kernels cost next to nothing."""

    @property
    def shape(self) -> DecoderConfig:
        return costless_shape(num_layers=12)


class Clock:
    """Adds up the thread's time by kind: what runs inside another kind counts as its own."""

    def __init__(self) -> None:
        self.ns: Counter[str] = Counter()
        self._kind = "outside"
        self._since_ns = time.thread_time_ns()

    @contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        outer = self._switch(kind)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, kind: str) -> str:
        now_ns, before = time.thread_time_ns(), self._kind
        self.ns[before] += now_ns - self._since_ns
        self._kind, self._since_ns = kind, now_ns
        return before

    def watch(self, owner: Any, name: str, kind: str) -> None:
        """Count the calls of a function of a class or module as of a kind."""
        own = getattr(owner, name)

        @functools.wraps(own)
        def counted(*args: Any, **kwargs: Any) -> Any:
            outer = self._switch(kind)
            try:
                return own(*args, **kwargs)
            finally:
                self._switch(outer)

        setattr(owner, name, counted)


def watch_all(clock: Clock) -> None:
    """Say of both sides' functions which kind they are."""
    clock.watch(StageCompute, "run_forward", "forward")
    for name in ("run_backward", "run_backward_weight"):
        clock.watch(StageCompute, name, "backward")
    for end in (RemoteEnd, LocalEnd):
        for name in ("send", "post", "take", "finish"):
            clock.watch(end, name, "message")
    clock.watch(pipeline_runner, "update", "optimizer")
    clock.watch(PipelineStage, "forward_one_chunk", "forward")
    for name in ("backward_one_chunk", "backward_weight_one_chunk"):
        clock.watch(PipelineStage, name, "backward")
    for name in ("get_fwd_recv_ops", "get_bwd_recv_ops", "get_fwd_send_ops", "get_bwd_send_ops"):
        clock.watch(PipelineStage, name, "message")
    for name in ("set_local_fwd_input", "get_local_bwd_output", "set_local_bwd_input"):
        clock.watch(PipelineStage, name, "message")
    for name in ("_batch_p2p", "_wait_batch_p2p"):
        clock.watch(schedules, name, "message")
    for name in ("step", "zero_grad"):
        clock.watch(torch.optim.AdamW, name, "optimizer")


def bare_step(workload: PipelineWorkload, clock: Clock, rank: int) -> Callable[[Tensor], None]:
    """A step of a rank's stages of 1F1B without a pipeline: their modules, on tensors that are not sent."""
    model, cut = workload.model(), cut_of(workload, "1f1b")
    stage, is_first, is_last = Stage(model, cut[rank]), rank == 0, rank == len(cut) - 1
    hidden = torch.zeros(workload.micro_size, workload.seq_len, workload.shape.hidden_size)

    def step(tokens: Tensor) -> None:
        for part in tokens.split(workload.micro_size):
            given = part if is_first else hidden.detach().requires_grad_()
            with clock.counting("forward"):
                output = stage(given)
                if is_last:
                    output = mean_loss(output, part)
            with clock.counting("backward"):
                torch.autograd.backward(output, None if is_last else hidden)
        for parameter in stage.parameters():
            parameter.grad = None

    return step


def measure(rank: int, systems: Sequence[str], num_rounds: int, port: int, json_path: Path | None) -> None:
    """One rank of all systems: they take turns, in an order that changes with each step."""
    join(rank, port)
    workload, clock = HostWorkload("tiny", "fp32", 8, 1, num_micro_batches=NUM_MICRO_BATCHES), Clock()
    steps: dict[str, Callable[[Tensor], Any]] = {"bare": bare_step(workload, clock, rank)}
    steps |= {name: PIPELINE_PEERS[name].build(workload.model(), workload) for name in systems}
    watch_all(clock)
    taken: dict[str, list[Counter[str]]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()  # a collection in one of them would be the others' gain
    order = list(steps)
    for index in range(NUM_WARMUP + num_rounds):
        tokens = workload.tokens(index, rank)
        for name in order if index % 2 else order[::-1]:
            dist.barrier()
            clock.ns.clear()
            with clock.counting("others"):
                steps[name](tokens)
            if index >= NUM_WARMUP:
                taken[name].append(clock.ns.copy())
        gc.collect()
    medians = {
        name: {kind: statistics.median(each[kind] for each in found) / 1e3 for kind in KINDS}
        for name, found in taken.items()
    }
    all_medians: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(all_medians, medians)
    if rank == 0:
        means = {
            name: {kind: statistics.mean(each[name][kind] for each in all_medians) for kind in KINDS} for name in steps
        }
        print_table(means)
        if json_path is not None:
            json_path.write_text(json.dumps({"machine": machine(), "us_a_step": means}, indent=1))
    dist.barrier()
    os._exit(0)  # engines of several systems end in no particular order


def print_table(means: dict[str, dict[str, float]]) -> None:
    """Show the microseconds of each action, and ours over torch's."""
    table = Table(title=f"{NUM_MICRO_BATCHES} micro-batches; bare modules' forward and backward in their row")
    for heading in ("system", "forward", "backward", "message", "micro-batch", "optimizer", "others"):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    table.add_column("/ torch: micro-batch, step")
    bare, rows = means["bare"], {name: row_of(name, means) for name in means}
    for name, row in rows.items():
        peer, shown = "torch-" + name.removeprefix("shardwise-"), ""
        if name.startswith("shardwise-") and peer in rows:
            ratios = row[3] / rows[peer][3], beyond(means[name], bare) / beyond(means[peer], bare)
            shown = ", ".join(f"{value:.2f}" for value in ratios)
        table.add_row(name, *(f"{value:.0f}" for value in row), shown)
    Console(width=120).print(", ".join(f"{key} {value}" for key, value in machine().items()), table, highlight=False)


def row_of(name: str, means: dict[str, dict[str, float]]) -> list[float]:
    """A system's microseconds an action."""
    found, bare = means[name], means["bare"]
    num_chunks = VIRTUAL_STAGES.get(name.partition("-")[2], 1)
    own = {kind: found[kind] - (bare[kind] if name != "bare" else 0.0) for kind in ("forward", "backward")}
    micro_batch = (own["forward"] + own["backward"] + found["message"]) / NUM_MICRO_BATCHES
    num_messages = NUM_MICRO_BATCHES * 2 * (NUM_RANKS * num_chunks - 1)  # a value and a gradient at each boundary
    return [
        own["forward"] / NUM_MICRO_BATCHES / num_chunks,
        own["backward"] / NUM_MICRO_BATCHES / num_chunks,
        found["message"] / num_messages,
        micro_batch,
        found["optimizer"],
        found["others"],
    ]


def beyond(found: dict[str, float], bare: dict[str, float]) -> float:
    """The microseconds of a whole step beyond the bare modules."""
    return sum(found.values()) - bare["forward"] - bare["backward"]


def profile(rank: int, system: str, num_rounds: int, port: int) -> None:
    """One rank: print the functions that take most of a step, by their own time, on both ranks in turn."""
    join(rank, port)
    workload = HostWorkload("tiny", "fp32", 8, 1, num_micro_batches=NUM_MICRO_BATCHES)
    step = PIPELINE_PEERS[system].build(workload.model(), workload)
    profiler = cProfile.Profile(time.thread_time)
    for index in range(NUM_WARMUP + num_rounds):
        tokens = workload.tokens(index, rank)
        if index >= NUM_WARMUP:
            profiler.enable()
        step(tokens)
        profiler.disable()
    for each in range(NUM_RANKS):
        if each == rank:
            print(f"rank {rank}", flush=True)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(60)
        dist.barrier()
    os._exit(0)


def main() -> None:
    """Measure, or profile one system."""
    parser = parser_of(__doc__)
    parser.add_argument("--systems", type=names, default=SYSTEMS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", metavar="SYSTEM", help="print where the time of its step goes")
    options: Any = parser.parse_args()
    port = 29600 + os.getpid() % 300
    if options.profile is not None:
        mp.spawn(profile, args=(options.profile, options.rounds, port), nprocs=NUM_RANKS)  # type: ignore[no-untyped-call]
        return
    mp.spawn(measure, args=(options.systems, options.rounds, port, options.json), nprocs=NUM_RANKS)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
