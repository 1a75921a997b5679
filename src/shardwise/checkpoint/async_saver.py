"""Saves checkpoints while training goes on: at most one at a time, whole on all ranks or on none.

A `Saver` is idle; then staging, the only part that holds up training; then writing, on a thread of its own; and then
idle again, or failed until the error has been raised. Rank 0 makes the temporary folder; every rank writes its file
there; rank 0 merges the parts and commits. `comm.agreement` has the exchange between the ranks, `commit` says what is
on the disk at each moment. A save takes two rounds of it:

    begin    all: prepare, copy; rank 0: compare the steps, make the folder
    commit   all: write; rank 0: merge and commit

>>> import tempfile
>>> from shardwise.runtime.state_shards import TensorFlatState
>>> from shardwise.layout.slicing import LocalTensor
>>> saver = Saver(None, rank=0, world_size=1, timeout_s=60.0, device=torch.device("cpu"))
>>> pieces = LocalTensor.whole((2, 3)).pieces
>>> held = StateShard("up", (), "param", (2, 3), TensorFlatState(torch.arange(6.0)), pieces, written=pieces)
>>> with tempfile.TemporaryDirectory() as root:
...     request = SaveRequest(Path(root), Manifest(step=3, tensors=(), files={}), (held,))
...     saver.start(3, lambda: request, wait=False)
...     saver.wait().name
'step-00000003'
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint import commit, writer
from shardwise.checkpoint.commit import await_folder
from shardwise.checkpoint.file_ranges import windows
from shardwise.checkpoint.manifest import CheckpointError, Manifest, RankManifest, agreed, merge_parts
from shardwise.comm.agreement import Agreement, listed
from shardwise.comm.store import PatientStore
from shardwise.config.errors import code_of
from shardwise.layout.slicing import Chunk
from shardwise.runtime.device import Event
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
        digests: of what this rank writes and other ranks have too, by name.
        own: what this rank has of that, in the order of `own_digests`; what differs is written too.
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
    digests: Mapping[str, str] = field(default_factory=dict)
    own_digests: Mapping[str, str] = field(default_factory=dict)
    own: tuple[StateShard, ...] = ()


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
        # Of its own, since a save in the background must not wait for another request.
        self._store = None if store is None else PatientStore(store, timeout_s, "save")
        self._rank, self._world_size = rank, world_size
        self.timeout_s = timeout_s
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

    def start(self, step: int, prepare: Callable[[], SaveRequest], wait: bool) -> None:
        """Save; a save that is running is finished first.

        Args:
            step: of the checkpoint, the same on all ranks.
            prepare: returns what this rank saves; where it fails on a rank, all raise.
            wait: True writes straight from the states, without a copy, and returns when the checkpoint is committed.
                False returns when what this rank writes has been copied to host memory; but where states are stored
                in files, for want of memory, it acts as True.

        Raises:
            CheckpointError: an earlier save has failed and that was not raised yet; nothing is saved then. Or this save
                cannot begin on some rank; or, with `wait`, it has failed on some rank.
        """
        self.wait()
        ranks, part = range(self._world_size), str(self._num_saves)
        self._num_saves += 1
        agreement = Agreement(self._store, ranks, self._rank, self.timeout_s, part)
        save = _Save(agreement, f"checkpoint of step {step}", None if wait else self._staging, self._cleaned)
        save.begin(step, prepare)
        if wait or self._must_wait(save.request):
            self._staging.settle()
            self._finish(save)
            return
        # No daemon: a program that ends finishes its save.
        self._thread = threading.Thread(target=self._finish_in_background, args=(save,), name="shardwise-saver")
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
            if self._store is not None:
                self._store.close()

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

    def _finish_in_background(self, save: _Save) -> None:
        try:
            self._finish(save)
        except CheckpointError as error:
            self.failure = error
        except BaseException as error:
            text = f"{save.subject} failed: {type(error).__name__}: {error}"
            self.failure = CheckpointError(code_of(error, "save-failed"), text)
            self.failure.__cause__ = error
        if self.failure is not None:
            log.error("%s", self.failure)  # the program may end, and not hear of it

    def _finish(self, save: _Save) -> None:
        self.last_committed = save.finish()
        if self._rank == 0:
            _retain(save.request)


@dataclass
class _Save:
    """Tracks one save on one rank.

    Attributes:
        staging: for a copy of what is written; None to write straight from the states.
        cleaned: the roots that this run has cleaned.
        request: of this rank, from the first round on.
        temporary: the folder that rank 0 has made.
    """

    agreement: Agreement
    subject: str
    staging: StagingMemory | None
    cleaned: set[Path]
    start_s: float = field(default_factory=time.monotonic)
    request: SaveRequest = field(init=False)
    temporary: Path = field(init=False)

    def begin(self, step: int, prepare: Callable[[], SaveRequest]) -> None:
        """Prepare on all ranks, and make the temporary folder.

        Raises:
            CheckpointError: a rank cannot save.
        """
        verdict = self.agreement.run("begin", lambda: self._prepare(step, prepare()), self._begin, self.subject)
        name, digests = json.loads(agreed(verdict))
        own = zip(self.request.own_digests.items(), self.request.own, strict=True)
        differing = tuple(shard for (name, digest), shard in own if digests.get(name) != digest)
        self.request = replace(self.request, state_shards=self.request.state_shards + differing)
        self.temporary = self.request.root / name

    def finish(self) -> Path:
        """Write and commit; return the step folder.

        Raises:
            CheckpointError: it has failed on some rank; nothing is left of it.
        """
        try:
            return self.request.root / agreed(self.agreement.run("commit", self._write, self._commit, self.subject))
        except CheckpointError:
            if self.agreement.rank == 0:
                commit.discard(self.temporary)
            raise

    def _prepare(self, step: int, request: SaveRequest) -> str:
        """Take this rank's request, over copies of the states where the save runs beside training."""
        num_bytes = sum(state_shard.num_written_bytes for state_shard in request.state_shards)
        own_bytes = [state_shard.num_written_bytes for state_shard in request.own]
        if self.staging is not None and not request.is_in_files:
            shards, num_shards = self.staging.copy([*request.state_shards, *request.own]), len(request.state_shards)
            request = replace(request, state_shards=shards[:num_shards], own=shards[num_shards:])
        self.request = request
        return json.dumps([step, num_bytes, dict(request.digests), [*request.own_digests.items()], own_bytes])

    def _begin(self, reports: Mapping[int, str]) -> str:
        """Make the temporary folder; return its name, and the digests of what is written."""
        plans = {rank: json.loads(text) for rank, text in reports.items()}
        step, root = plans[0][0], self.request.root
        if odd := [rank for rank, plan in plans.items() if plan[0] != step]:
            raise CheckpointError(
                "save-steps-differ",
                f"{listed(odd)} saves step {plans[odd[0]][0]}, not {step}; save on every rank at the same step",
            )
        digests: dict[str, str] = {name: digest for plan in plans.values() for name, digest in plan[2].items()}
        num_bytes = sum(plan[1] for plan in plans.values())
        for *_, own_digests, own_bytes in plans.values():
            own = zip(own_digests, own_bytes, strict=True)
            num_bytes += sum(size for (name, digest), size in own if digests.get(name) != digest)
        self._clean(root)
        commit.check_free_space(root, num_bytes)
        if self.request.is_damaged:
            commit.rename_step(root, step)
        return json.dumps([commit.begin(root, step, self.request.tag).name, digests])

    def _clean(self, root: Path) -> None:
        """Remove what dead runs have left in a root, before the first save into it; no other run saves there now."""
        if root not in self.cleaned:
            self.cleaned.add(root)
            try:
                commit.clean(root)
            except CheckpointError as error:
                log.warning("%s", error)

    def _write(self) -> str:
        await_folder(self.temporary, self.agreement.timeout_s / 2)
        file = f"rank-{self.agreement.rank:05d}-of-{len(self.agreement.ranks):05d}.safetensors"
        state_shards, numbers = self.request.state_shards, self.request.numbers
        shown = self.agreement.show_progress
        return writer.write_state_shards(self.temporary, file, state_shards, numbers, lambda _: shown()).to_text()

    def _commit(self, reports: Mapping[int, str]) -> str:
        tensors, files = merge_parts(RankManifest.from_text(reports[rank]) for rank in sorted(reports))
        saved_at = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = replace(
            self.request.manifest, tensors=tensors, files=files, saved_at=saved_at, library=library_version()
        )
        committed = commit.commit(self.temporary, self.request.root, manifest, self.request.tag)
        took_s = time.monotonic() - self.start_s
        log.info("%s committed: %s, %d bytes, %.1f s", self.subject, committed, sum(files.values()), took_s)
        return committed.name


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
                self._buffer = host_zeros(num_bytes, torch.uint8, pinned_for=self._device)
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
        self.settle()
        return tuple(copies[index] for index in range(len(state_shards)))

    def settle(self) -> None:
        """Block until the device has done the current stream's work: other threads read on streams of their own."""
        Event.record(self._device).wait_on_host()

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
