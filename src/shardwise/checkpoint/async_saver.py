"""Saves checkpoints while training goes on: at most one at a time, whole on all ranks or on none.

A `Saver` is idle; then staging, the only part that holds up training; then writing, on a thread of its own; and then
idle again, or failed until the error has been raised. Rank 0 makes the temporary folder; every rank writes its file
there; rank 0 merges the parts and commits. `coordination` has the exchange between the ranks, `commit` says what is on
the disk at each moment.

>>> import tempfile
>>> from shardwise.runtime.state_shards import TensorFlatState
>>> from shardwise.layout.slicing import LocalTensor
>>> saver = Saver(None, rank=0, world_size=1, timeout_s=60.0, device=torch.device("cpu"))
>>> pieces = LocalTensor.whole((2, 3)).pieces
>>> held = StateShard("up", (), "param", (2, 3), TensorFlatState(torch.arange(6.0)), pieces, written=pieces)
>>> with tempfile.TemporaryDirectory() as root:
...     request = SaveRequest(Path(root), Manifest(step=3, tensors=(), files={}), (held,))
...     saver.start(request, wait=False)
...     saver.wait().name
'step-00000003'
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint import commit, writer
from shardwise.checkpoint.commit import await_folder
from shardwise.checkpoint.coordination import StoreBarrier
from shardwise.checkpoint.file_ranges import windows
from shardwise.checkpoint.manifest import CheckpointError, Manifest, RankManifest, merge_parts
from shardwise.comm.consistency import listed
from shardwise.config.errors import code_of
from shardwise.layout.slicing import Chunk
from shardwise.runtime.pinned_memory import host_zeros
from shardwise.runtime.state_shards import ScalarState, StateShard, TensorFlatState

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class SaveRequest:
    """Describes one rank's part of a save: its states, and where they go.

    Attributes:
        root: the folder of the step folders, the same folder on all ranks; its path may differ.
        manifest: without tensors and files, which the save fills in; rank 0's is the one that is written.
        is_damaged: the checkpoint that `root` has of this step is known to be damaged; it is renamed before the save.
        is_in_files: some states, on any rank, are stored in files, since memory is too small for them.
        tag: names the folder in place of the step, unless empty.
    """

    root: Path
    manifest: Manifest
    state_shards: tuple[StateShard, ...]
    numbers: tuple[ScalarState, ...] = ()
    keep_last: int | None = None
    keep_every: int | None = None
    is_damaged: bool = False
    is_in_files: bool = False
    tag: str = ""


class Saver:
    """Runs the saves of one engine on one rank; every rank makes the same calls in the same order, on one thread.

    Args:
        store: of the engine; None where there is one rank.
        timeout_s: seconds without progress after which the other ranks give a rank up.
        device: that of the engine; copies are pinned if it is a GPU.

    Attributes:
        last_committed: the folder of the newest checkpoint of this saver.
    """

    def __init__(
        self, store: dist.Store | None, rank: int, world_size: int, timeout_s: float, device: torch.device
    ) -> None:
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._timeout_s = timeout_s
        self._staging = StagingMemory(device)
        self._thread: threading.Thread | None = None
        self.failure: CheckpointError | None = None
        self._num_saves = 0
        self._cleaned: set[Path] = set()
        self._has_said_so = False
        self.last_committed: Path | None = None

    @property
    def is_saving(self) -> bool:
        """Say whether a save is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, request: SaveRequest, wait: bool) -> None:
        """Save; a save that is running is finished first.

        Args:
            request: of the same step on all ranks.
            wait: True writes straight from the states, without a copy, and returns when the checkpoint is committed.
                False returns when what this rank writes has been copied to host memory; but where states are stored
                in files, for want of memory, it acts as True.

        Raises:
            CheckpointError: an earlier save has failed and that was not raised yet; nothing is saved then. Or, with
                `wait`, this save has failed on some rank.
        """
        self.wait()
        self._clean(request.root)
        wait = wait or self._must_wait(request)
        number, self._num_saves = self._num_saves, self._num_saves + 1
        prepared = self._prepare(request, stage=not wait)
        if wait:
            self._save(number, *prepared)
            return
        # No daemon: a program that ends finishes its save.
        background = partial(self._save_in_background, number, *prepared)
        self._thread = threading.Thread(target=background, name="shardwise-saver")
        self._thread.start()

    def poll(self) -> None:
        """Raise, once, the error of a save in the background; costs nothing where there is none.

        Raises:
            CheckpointError: the save has failed on some rank.
        """
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def wait(self) -> Path | None:
        """Finish the running save, and return the newest checkpoint's folder; None where there is none.

        Raises:
            CheckpointError: the save has failed on some rank, and that was not raised yet.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.poll()
        return self.last_committed

    def close(self) -> None:
        """Finish the running save, and free the memory of copies.

        It ends at the latest when the other ranks have shown no progress for `timeout_s`.

        Raises:
            CheckpointError: as in `wait`; this is the last call that can raise it.
        """
        try:
            self.wait()
        finally:
            self._staging.release()

    def _clean(self, root: Path) -> None:
        """Remove what dead runs have left in a root, before the first save into it; no other run saves there now."""
        if self._rank == 0 and root not in self._cleaned:
            self._cleaned.add(root)
            try:
                commit.clean(root)
            except CheckpointError as error:
                log.warning("%s", error)

    def _must_wait(self, request: SaveRequest) -> bool:
        """Say whether the save must run without a copy of the states, and log that once."""
        if not request.is_in_files:
            return False
        if not self._has_said_so:
            self._has_said_so = True
            log.warning(
                "states are stored on NVMe, and host memory for a copy is not assumed: every save holds up training"
            )
        return True

    def _prepare(self, request: SaveRequest, stage: bool) -> tuple[SaveRequest, Exception | None]:
        """Return the request to write, over copies if `stage`; or a failure, which the first round reports to all."""
        try:
            return replace(request, state_shards=self._staging.copy(request.state_shards)) if stage else request, None
        except Exception as error:
            return replace(request, state_shards=()), error

    def _save_in_background(self, number: int, request: SaveRequest, failure: Exception | None) -> None:
        try:
            self._save(number, request, failure)
        except CheckpointError as error:
            self.failure = error
        except BaseException as error:
            text = f"{_subject(request)} failed: {type(error).__name__}: {error}"
            self.failure = CheckpointError(code_of(error, "save-failed"), text)
            self.failure.__cause__ = error
        if self.failure is not None:
            log.error("%s", self.failure)  # the program may end, and not hear of it

    def _save(self, number: int, request: SaveRequest, failure: Exception | None) -> None:
        rounds = StoreBarrier(
            self._store, number, self._rank, self._world_size, self._timeout_s, subject=_subject(request)
        )
        try:
            self.last_committed = _Save(request, self._rank, self._world_size, rounds, self._timeout_s).run(failure)
            if self._rank == 0:
                _retain(request)
        finally:
            rounds.finish()


@dataclass
class _Save:
    """Tracks one save on one rank."""

    request: SaveRequest
    rank: int
    world_size: int
    rounds: StoreBarrier
    timeout_s: float
    start_s: float = field(default_factory=time.monotonic)

    def run(self, failure: Exception | None) -> Path:
        """Write and commit; return the step folder.

        Args:
            failure: an error of this rank in `_prepare`; None if there was none.
        """
        root = self.request.root

        def plan() -> str:
            if failure is not None:
                raise failure
            num_bytes = sum(state_shard.num_written_bytes for state_shard in self.request.state_shards)
            return json.dumps([self.request.manifest.step, num_bytes])

        temporary = root / self.rounds.run("begin", plan, self._begin)
        try:
            name = self.rounds.run("commit", lambda: self._write(temporary), lambda said: self._commit(temporary, said))
        except CheckpointError:
            if self.rank == 0:
                commit.discard(temporary)
            raise
        return root / name

    def _begin(self, said: Mapping[int, str]) -> str:
        step, root = self.request.manifest.step, self.request.root
        plans: dict[int, list[int]] = {rank: json.loads(text) for rank, text in said.items()}
        if odd := [rank for rank, plan in plans.items() if plan[0] != step]:
            raise CheckpointError(
                "save-steps-differ",
                f"{listed(odd)} saves step {plans[odd[0]][0]}, not {step}; save on every rank at the same step",
            )
        commit.check_free_space(root, sum(num_bytes for _, num_bytes in plans.values()))
        if self.request.is_damaged:
            commit.rename_step(root, step)
        return commit.begin(root, step, self.request.tag).name

    def _write(self, temporary: Path) -> str:
        await_folder(temporary, self.timeout_s / 2)
        file = f"rank-{self.rank:05d}-of-{self.world_size:05d}.safetensors"
        state_shards, numbers = self.request.state_shards, self.request.numbers
        part = writer.write_state_shards(temporary, file, state_shards, numbers, lambda _: self.rounds.show_progress())
        return part.to_text()

    def _commit(self, temporary: Path, said: Mapping[int, str]) -> str:
        tensors, files = merge_parts(RankManifest.from_text(said[rank]) for rank in sorted(said))
        saved_at = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = replace(
            self.request.manifest, tensors=tensors, files=files, saved_at=saved_at, library=library_version()
        )
        committed = commit.commit(temporary, self.request.root, manifest, self.request.tag)
        took_s = time.monotonic() - self.start_s
        log.info("%s committed: %s, %d bytes, %.1f s", _subject(self.request), committed, sum(files.values()), took_s)
        return committed.name


def _subject(request: SaveRequest) -> str:
    return f"checkpoint of step {request.manifest.step}"


def _retain(request: SaveRequest) -> None:
    """Delete old checkpoints. An error here is logged only, since the new checkpoint is whole."""
    try:
        commit.retain(request.root, request.keep_last, request.keep_every)
    except Exception as error:
        log.warning("old checkpoints in %s stay: %s", request.root, error)


def library_version() -> str:
    """Return the version of this library, as a manifest names it."""
    try:
        return version("shardwise")
    except PackageNotFoundError:
        return "unknown"


class StagingMemory:
    """Holds host memory for what one rank writes; it grows as needed and keeps its size until it is released.

    Args:
        device: of the engine; the memory is pinned if it is a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the memory."""
        return self._buffer.numel()

    @torch.no_grad()
    def copy(self, state_shards: Sequence[StateShard]) -> tuple[StateShard, ...]:
        """Copy what this rank writes, and return when the copy is complete.

        It runs on the current stream, so that later changes of the states come after it. The caller waits for it
        anyway, so a side stream would gain nothing.

        Returns:
            The state shards, in the same order, over this memory; each has only the pieces that this rank writes.

        Raises:
            CheckpointError: there is not enough memory.
        """
        num_bytes = sum(state_shard.num_written_bytes for state_shard in state_shards)
        if num_bytes > self.num_bytes:
            self.release()  # the old memory goes first
            try:
                self._buffer = host_zeros(num_bytes, torch.uint8, pin_memory=self._device.type == "cuda")
            except MemoryError as error:
                raise CheckpointError(
                    "no-copy-memory",
                    f"there is no host memory for a copy of the {num_bytes} bytes that this rank writes; "
                    "wait for the save, which then needs none",
                ) from error
        copies, offset_bytes = dict[int, StateShard](), 0
        # The widest elements come first, so that all are aligned without gaps.
        for index, each in sorted(enumerate(state_shards), key=lambda pair: -pair[1].flat.dtype.itemsize):
            place = self._buffer[offset_bytes : offset_bytes + each.num_written_bytes]
            copies[index] = _copy(each, place.view(each.flat.dtype))
            offset_bytes += each.num_written_bytes
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return tuple(copies[index] for index in range(len(state_shards)))

    def release(self) -> None:
        """Free the memory; the next copy allocates it again. No copy may be in use."""
        self._buffer = torch.empty(0, dtype=torch.uint8)


def _copy(state_shard: StateShard, place: Tensor) -> StateShard:
    """Copy the written pieces, one after the other, to `place`: 1-D, of their elements and dtype."""
    pieces, offset = list[Chunk](), 0
    for window in windows(state_shard.written, max(1, place.numel())):
        stop = offset + window.stop - window.start
        place[offset:stop].copy_(state_shard.flat.read(window.start, window.stop), non_blocking=True)
        pieces += [piece.shifted(offset) for piece in window.pieces]
        offset = stop
    return replace(state_shard, flat=TensorFlatState(place), pieces=tuple(pieces), written=tuple(pieces))
