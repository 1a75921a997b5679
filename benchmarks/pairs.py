"""The processes of the benchmarks: a pair of ranks for each system, which take turns and sleep in between.

This knows no system and prints nothing: what to run is in `peers.py` and the like, what to make of it in the scripts.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Read when torch and DeepSpeed are imported, here and in the ranks.
os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}

import torch
import torch.distributed as dist

from peers import NUM_RANKS, Step, Workload


class SystemFailedError(RuntimeError):
    """A system could not be built, or died; the message is its ranks' last words."""


@dataclass(frozen=True)
class Ready:
    """One rank has built its system: what that took beyond imports, and the most memory it has held."""

    initialize_s: float
    peak_bytes: int


@dataclass(frozen=True)
class Turn:
    """One rank's steps of one turn; the peak is since the system was built."""

    first_step: int
    step_s: list[float]
    losses: list[float]
    peak_bytes: int


Serve = Callable[[Connection, str, Workload, int], None]
"""What one rank of a system does, in a process group of its own: answer what it is sent, until it is sent 0."""


def run_rank(
    connection: Connection, system: str, workload: Workload, rank: int, folder: str, serve: Serve, num_ranks: int
) -> None:
    """One rank of one system: join the others, then serve."""
    log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
        importlib.import_module(workload.peers[system].package)
        workload.optimizer([torch.zeros(1)])  # the first one imports torch's compiler, whatever the system
        serve(connection, system, workload, rank)
        dist.barrier()
    except Exception:
        connection.send(SystemFailedError(f"rank {rank}: {traceback.format_exc()}"))
        os._exit(1)
    os._exit(0)  # gloo's threads sometimes abort a process that ends by itself


def serve_steps(connection: Connection, system: str, workload: Workload, rank: int) -> None:
    """Build the system, then run as many steps as asked, turn by turn."""
    model = workload.model()
    start = time.perf_counter()
    step = workload.peers[system].build(model, workload)
    connection.send(Ready(time.perf_counter() - start, peak_rss_bytes()))
    del model
    forget_peak()
    next_step = 0
    while num_steps := connection.recv():
        batches = [workload.tokens(index, rank) for index in range(next_step, next_step + num_steps)]
        step_s, losses = _timed(step, batches)
        connection.send(Turn(next_step, step_s, losses, peak_rss_bytes()))
        next_step += num_steps


def _timed(step: Step, batches: list[torch.Tensor]) -> tuple[list[float], list[float]]:
    step_s, losses = [], []
    dist.barrier()
    for tokens in batches:
        start = time.perf_counter()
        losses.append(step(tokens))
        step_s.append(time.perf_counter() - start)
    return step_s, losses


def peak_rss_bytes() -> int:
    """The most memory this process has held, without what it was forked from, which getrusage counts."""
    return _kib_after("VmHWM:", "/proc/self/status") * 1024


def rss_bytes() -> int:
    """The memory that this process holds now."""
    return _kib_after("VmRSS:", "/proc/self/status") * 1024


def forget_peak() -> None:
    """Let the peak start again."""
    Path("/proc/self/clear_refs").write_text("5")


def available_bytes() -> int:
    """What the kernel reckons can be allocated without taking from those who use it."""
    return _kib_after("MemAvailable:", "/proc/meminfo") * 1024


def _kib_after(label: str, path: str) -> int:
    return int(Path(path).read_text().partition(label)[2].split()[0])


class Pair:
    """The processes of one system under one workload, from the start to `close`.

    Args:
        system: one of the workload's.
        workload: what it trains on.
        timeout_s: for how long a rank may be silent.
        serve: what each rank does; it answers once when it is ready.
        num_ranks: how many.

    Raises:
        SystemFailedError: from the constructor, `ask` and `take_turn`: a rank raised, died, or was silent too long.
    """

    def __init__(
        self,
        system: str,
        workload: Workload,
        timeout_s: float,
        serve: Serve = serve_steps,
        num_ranks: int = NUM_RANKS,
    ) -> None:
        self.system = system
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix=f"{system}-")
        self._connections: list[Connection] = []
        self._processes = []
        context = multiprocessing.get_context("spawn")
        for rank in range(num_ranks):
            self._log(rank).touch()
            here, there = context.Pipe()
            arguments = (there, system, workload, rank, self._folder.name, serve, num_ranks)
            process = context.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)
        self.ready: list[Any] = self._receive()

    def ask(self, what: Any) -> list[Any]:
        """Send something to every rank; one answer a rank."""
        self._send(what)
        return self._receive()

    def take_turn(self, num_steps: int) -> list[Turn]:
        """Run steps; one result a rank."""
        return self.ask(num_steps)

    def close(self) -> None:
        """End the processes; one that does not end by itself is killed."""
        self._send(0)
        for process in self._processes:
            process.join(5)
            process.kill()
        self._folder.cleanup()

    def _send(self, what: Any) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):  # of a dead rank, which `_receive` reports
                connection.send(what)

    def _receive(self) -> list[Any]:
        replies = [self._reply_of(rank) for rank in range(len(self._connections))]
        failures = [str(reply) for reply in replies if isinstance(reply, SystemFailedError)]
        if failures:
            self.close()
            raise SystemFailedError("\n".join(failures))
        return replies

    def _reply_of(self, rank: int) -> Any:
        if not self._connections[rank].poll(self._timeout_s):
            return self._failure(rank, f"was silent for {self._timeout_s:.0f} s")
        try:
            return self._connections[rank].recv()
        except (EOFError, ConnectionError):
            return self._failure(rank, "died")

    def _failure(self, rank: int, what: str) -> SystemFailedError:
        return SystemFailedError(f"rank {rank} {what}; its log ends: {self._log(rank).read_text()[-2000:]}")

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name, f"rank{rank}.log")


@dataclass
class Record:
    """What was measured of one system under one workload; times by round, then by step, then by rank."""

    system: str
    recipe: str
    initialize_s: float = 0.0
    build_peak_bytes: int = 0
    step_peak_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    rounds: list[list[list[float]]] = field(default_factory=list)
    failure: str | None = None

    def add_ready(self, ready: list[Ready]) -> None:
        """Keep the worst rank's figures."""
        self.initialize_s = max(self.initialize_s, *(rank.initialize_s for rank in ready))
        self.build_peak_bytes = max(self.build_peak_bytes, *(rank.peak_bytes for rank in ready))

    def add_turn(self, turn: list[Turn], *, is_warmup: bool = False) -> None:
        """Keep the peak, the losses unless a restarted pair repeats them, the times unless it warms up."""
        self.step_peak_bytes = max(self.step_peak_bytes, *(rank.peak_bytes for rank in turn))
        if turn[0].first_step == len(self.losses):
            self.losses += map(statistics.mean, zip(*(rank.losses for rank in turn), strict=True))
        if not is_warmup:
            self.rounds.append([list(times) for times in zip(*(rank.step_s for rank in turn), strict=True)])

    @property
    def peak_bytes(self) -> int:
        """The most that a rank has held in its whole life."""
        return max(self.build_peak_bytes, self.step_peak_bytes)

    def quartiles_s(self) -> list[float]:
        """The lower quartile, the median and the upper quartile of seconds a step, averaged over ranks."""
        steps_s = torch.tensor([statistics.mean(times) for steps in self.rounds for times in steps])
        quartiles: list[float] = steps_s.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        return quartiles

    def ratio(self, other: Record) -> float:
        """This system's step over the other's: the median over rounds of the ratio of the round's medians."""
        pairs = zip(self.round_medians_s(), other.round_medians_s(), strict=True)
        return statistics.median(own_s / other_s for own_s, other_s in pairs)

    def round_medians_s(self) -> list[float]:
        """Seconds a step, averaged over ranks: the median of each round."""
        return [statistics.median(map(statistics.mean, steps)) for steps in self.rounds]


class Residents:
    """The pairs alive: each system's from its first turn on, as far as memory holds them.

    Where it does not, the pair that ran last ends, since in a rotating order its next turn is the farthest; when
    that comes, the system is built and warmed up again.
    """

    def __init__(
        self,
        workload: Workload,
        num_steps: int,
        num_warmup_steps: int,
        timeout_s: float,
        serve: Serve = serve_steps,
        num_ranks: int = NUM_RANKS,
    ) -> None:
        self._workload = workload
        self._serve = serve
        self._num_ranks = num_ranks
        self._num_steps = num_steps
        self._num_warmup_steps = num_warmup_steps
        self._timeout_s = timeout_s
        self._alive: list[Pair] = []  # in the order of their last turns
        self._largest_bytes = 0

    def take_turn(self, record: Record) -> None:
        """Run a system's turn into its record; a failure is kept there too, and ends its pair."""
        pair = next((pair for pair in self._alive if pair.system == record.system), None)
        try:
            if pair is None:
                pair = self._start(record)
            else:
                self._alive.remove(pair)
            record.add_turn(pair.take_turn(self._num_steps))
        except SystemFailedError as error:
            record.failure = str(error)
            return
        self._alive.append(pair)
        self._largest_bytes = max(self._largest_bytes, self._num_ranks * record.peak_bytes)

    def close(self) -> None:
        """End all pairs."""
        while self._alive:
            self._alive.pop().close()

    def _start(self, record: Record) -> Pair:
        # Space for the new pair, and for the sleeping one that grows most when it wakes.
        while self._alive and available_bytes() < 2 * self._largest_bytes:
            self._alive.pop().close()
        pair = Pair(record.system, self._workload, self._timeout_s, self._serve, self._num_ranks)
        record.add_ready(pair.ready)
        if self._num_warmup_steps:
            record.add_turn(pair.take_turn(self._num_warmup_steps), is_warmup=True)
        return pair
