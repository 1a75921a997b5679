"""What `checkpoint.py` compares on one and the same state: the bare disk, Shardwise, torch's distributed checkpoints.

Each is a `Subject` of two ranks that saves, loads, and saves while it trains; the operations that are timed are below.

>>> sorted(OPERATIONS)
['load cold', 'load from 1 rank', 'load warm', 'save', 'save aside']
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from pairs import Ready, forget_peak, peak_rss_bytes, rss_bytes
from peers import FP32, NUM_RANKS, Peer, Workload, shard_fsdp2, shardwise_engine, torch_step
from shardwise.models import Decoder
from shardwise.models.presets import DecoderConfig

MIB = 2**20
WRITE_BYTES = 4 * MIB
STATES = 3  # parameter, exp_avg, exp_avg_sq
NUM_PLAIN_STEPS = 3
POLL_S = 0.005


@dataclass(frozen=True)
class CheckpointWorkload(Workload):
    """A decoder in fp32 with AdamW's states.

    Attributes:
        folder: where checkpoints go; all ranks and systems share it.
    """

    folder: str = ""

    @property
    def peers(self) -> Mapping[str, Peer]:
        """The systems of this file."""
        return CHECKPOINT_PEERS

    def config(self) -> DecoderConfig:
        """Of `preset`, such as 12 x 768: layers and hidden size."""
        num_layers, hidden_size = map(int, self.preset.split(" x "))
        return DecoderConfig(
            vocab_size=256,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=hidden_size // 64,
            num_kv_heads=hidden_size // 64,
            head_dim=64,
            ffn_size=hidden_size * 8 // 3,
            max_seq_len=self.seq_len,
        )

    def model(self) -> Decoder:
        """The same weights on every rank and in every system."""
        torch.manual_seed(0)
        return Decoder(self.config())

    def tokens(self, step: int, rank: int) -> torch.Tensor:
        """A rank's tokens of a step, [B, S]."""
        generator = torch.Generator().manual_seed(step * NUM_RANKS + rank)
        return torch.randint(256, (self.micro_size, self.seq_len), generator=generator)

    def state_bytes(self) -> int:
        """Of parameters and optimizer states of all ranks together."""
        with torch.device("meta"):
            return STATES * 4 * sum(parameter.numel() for parameter in Decoder(self.config()).parameters())


@dataclass(frozen=True)
class Pending:
    """A save in the background: whether it is written, and what waits for it and raises what went wrong."""

    is_done: Callable[[], bool]
    finish: Callable[[], object]


@dataclass(frozen=True)
class Subject:
    """One rank of what is compared; all ranks make the same calls.

    Attributes:
        save: write all states into a new folder, and return when they are on disk.
        load: fill all states from it; nothing where a system does not load.
        save_async: the same as `save`, but return as soon as training may go on.
        step: an optimizer step.
    """

    save: Callable[[Path], object]
    load: Callable[[Path], object] | None = None
    save_async: Callable[[Path], Pending] | None = None
    step: Callable[[], object] = field(default=lambda: None)


@dataclass(frozen=True)
class Sample:
    """One operation on one rank: seconds, and what else there is to say of it."""

    seconds: float
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Place:
    """The checkpoints of one system: the newest, which loads read, and the one that a single rank wrote."""

    folder: Path
    number: int = 0

    @property
    def newest(self) -> Path:
        return self.folder / str(self.number)

    @property
    def of_one_rank(self) -> Path:
        return self.folder / "alone"

    def next(self) -> Path:
        """A new folder; the one before goes. What that leaves to write is written before anything is timed."""
        if dist.get_rank() == 0:
            shutil.rmtree(self.newest, ignore_errors=True)
            os.sync()
        self.number += 1
        dist.barrier()
        return self.newest


def files_below(folder: Path) -> Iterator[Path]:
    """All files of a checkpoint."""
    return (path for path in folder.rglob("*") if path.is_file())


def cool(folder: Path) -> None:
    """Have the kernel forget what it keeps in memory of a checkpoint; the disk may have caches of its own."""
    for path in files_below(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(folder: Path) -> None:
    """Have it all in memory: a write may have left a part out."""
    for path in files_below(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(WRITE_BYTES):
                pass


def time_save(subject: Subject, place: Place) -> Sample:
    """Until all ranks have saved."""
    folder = place.next()
    start = time.perf_counter()
    subject.save(folder)
    dist.barrier()
    return Sample(time.perf_counter() - start)


def time_load(subject: Subject, place: Place, prepare: Callable[[Path], None], *, from_one_rank: bool) -> Sample:
    """Until all ranks have loaded; and the most memory that took beyond what the rank holds before."""
    assert subject.load is not None
    folder = place.of_one_rank if from_one_rank else place.newest
    if dist.get_rank() == 0:
        prepare(folder)
    dist.barrier()
    before_bytes = rss_bytes()
    forget_peak()
    start = time.perf_counter()
    subject.load(folder)
    dist.barrier()
    seconds = time.perf_counter() - start
    return Sample(seconds, {"peak_bytes": peak_rss_bytes() - before_bytes})


def time_save_async(subject: Subject, place: Place) -> Sample:
    """How long training is held up; and the save as a whole, and the steps beside it over those without."""
    assert subject.save_async is not None
    plain_s = [_timed_s(subject.step) for _ in range(NUM_PLAIN_STEPS)]
    folder = place.next()
    start = time.perf_counter()
    pending = subject.save_async(folder)
    blocked_s = time.perf_counter() - start
    done_s: list[float] = []

    def watch() -> None:
        while not pending.is_done():
            time.sleep(POLL_S)
        done_s.append(time.perf_counter() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    beside_s = []
    is_going_on = torch.ones(1)
    while is_going_on.item():
        beside_s.append(_timed_s(subject.step))
        is_going_on.fill_(not done_s)
        dist.all_reduce(is_going_on, dist.ReduceOp.MAX)
    pending.finish()
    watcher.join()
    # The last step went on, mostly, after the save had ended.
    slower = statistics.median(beside_s[:-1] or beside_s) / statistics.median(plain_s)
    return Sample(blocked_s, {"whole_s": done_s[0], "share": blocked_s / done_s[0], "slower": slower})


def _timed_s(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


Operation = Callable[[Subject, Place], Sample]
OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "save": time_save,
        "load warm": partial(time_load, prepare=warm, from_one_rank=False),
        "load cold": partial(time_load, prepare=cool, from_one_rank=False),
        "load from 1 rank": partial(time_load, prepare=warm, from_one_rank=True),
        "save aside": time_save_async,
    }
)


def serve(connection: Connection, system: str, workload: CheckpointWorkload, rank: int) -> None:
    """Build the system, then do the operations that are named, one at a time."""
    start = time.perf_counter()
    subject = workload.peers[system].build(workload.model(), workload)
    place = Place(Path(workload.folder, system))
    connection.send(Ready(time.perf_counter() - start, peak_rss_bytes()))
    while operation := connection.recv():
        dist.barrier()
        connection.send(OPERATIONS[operation](subject, place))


def serve_alone(connection: Connection, system: str, workload: CheckpointWorkload, rank: int) -> None:
    """Save once, as one rank, what two ranks will load."""
    subject = workload.peers[system].build(workload.model(), workload)
    subject.save(Place(Path(workload.folder, system)).of_one_rank)
    connection.send(None)
    connection.recv()


def build_raw(model: Decoder, workload: CheckpointWorkload) -> Subject:
    """Bytes and a file for each rank: what the disk does at best when it is asked plainly."""
    content = torch.randint(256, (workload.state_bytes() // NUM_RANKS,), dtype=torch.uint8)
    memory = memoryview(content.numpy())

    def path(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return folder / str(dist.get_rank())

    def save(folder: Path) -> None:
        with path(folder).open("xb", buffering=0) as file:
            for start in range(0, len(memory), WRITE_BYTES):
                file.write(memory[start : start + WRITE_BYTES])
            os.fsync(file.fileno())

    def load(folder: Path) -> None:
        with path(folder).open("rb", buffering=0) as file:
            for start in range(0, len(memory), WRITE_BYTES):
                file.readinto(memory[start : start + WRITE_BYTES])

    return Subject(save, load)


def build_dd(model: Decoder, workload: CheckpointWorkload) -> Subject:
    """The same by dd itself, from a file in memory."""
    rank = dist.get_rank()
    source = Path("/dev/shm", f"{Path(workload.folder).name}-{rank}")
    source.write_bytes(torch.randint(256, (workload.state_bytes() // NUM_RANKS,), dtype=torch.uint8).numpy())

    def save(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        command = ["dd", f"if={source}", f"of={folder / str(rank)}", "bs=4M", "conv=fsync"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)

    return Subject(save)


def build_shardwise(model: Decoder, workload: CheckpointWorkload) -> Subject:
    """An engine under ZeRO-3, after a step."""
    engine = shardwise_engine(model, workload, stage=3)
    tokens = workload.tokens(0, dist.get_rank())
    engine.train_step([tokens])

    def save_async(folder: Path) -> Pending:
        engine.save(folder, wait=False)
        return Pending((folder / "latest").exists, engine.finish_saves)

    return Subject(engine.save, engine.load, save_async, lambda: engine.train_step([tokens]))


def build_dcp(model: Decoder, workload: CheckpointWorkload) -> Subject:
    """FSDP2 and AdamW, after a step; its state dicts are made beforehand, and are what is saved and loaded in place."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    shard_fsdp2(model, workload, reshard=True, reduce_dtype=torch.float32)
    optimizer = workload.optimizer(model.parameters())
    train = torch_step(model, optimizer, workload)
    tokens = workload.tokens(0, dist.get_rank())
    train(tokens)
    # Its collectives must not meet those of training.
    group = dist.new_group(backend="gloo")

    def state() -> dict[str, Any]:
        params, states = get_state_dict(model, optimizer)
        return {"model": params, "optimizer": states}

    kept = state()

    def save_async(folder: Path) -> Pending:
        future = dcp.async_save(kept, checkpoint_id=folder, process_group=group)
        return Pending(future.done, future.result)

    return Subject(
        lambda folder: dcp.save(kept, checkpoint_id=folder),
        lambda folder: dcp.load(kept, checkpoint_id=folder),
        save_async,
        lambda: train(tokens),
    )


def _peer(build: Callable[[Decoder, CheckpointWorkload], Subject], recipe: str, package: str = "torch") -> Peer:
    return Peer({FP32: recipe}, build, package)


CHECKPOINT_PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "raw": _peer(build_raw, "a file a rank: write and read by 4 MiB, fsync"),
        "dd": _peer(build_dd, "dd if=/dev/shm/... bs=4M conv=fsync, one a rank"),
        "shardwise": _peer(build_shardwise, "ZeRO-3", "shardwise.engine.engine"),
        "dcp": _peer(build_dcp, "FSDP2, torch.distributed.checkpoint", "torch.distributed.checkpoint"),
    }
)
