"""States in files: saved and loaded as from memory, bit for bit, and by parts that are neither large nor many."""

from __future__ import annotations

import errno
import math
import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.file_flats import FileFlat, make_files
from harness.pool import WorkerPool
from harness.refusals import refused
from shardwise.checkpoint import file_ranges as spans
from shardwise.checkpoint import reader as reading
from shardwise.checkpoint import writer as writing
from shardwise.checkpoint.async_saver import Saver, SaveRequest, StagingMemory
from shardwise.checkpoint.commit import read_manifest
from shardwise.checkpoint.hf.exporter import (
    ExportTensor,
    begin_export,
    finish_export,
    plan_export,
    stored_blocks,
    write_export,
)
from shardwise.checkpoint.hf.importer import open_folder
from shardwise.checkpoint.load import plan_load
from shardwise.checkpoint.manifest import CheckpointError, Manifest, merge_parts
from shardwise.checkpoint.safetensors_io import dtype_name
from shardwise.checkpoint.writer import write_state_shards
from shardwise.comm.mesh import open_store
from shardwise.layout.slicing import Chunk, LocalTensor, Rect, Shape, intersect
from shardwise.layout.tp_sharding import FusedPart, ParamSplit
from shardwise.runtime.state_shards import FlatState, StateShard, TensorFlatState

SMALL_BLOCK, SMALL_RUN, SMALL_WINDOW, SMALL_GAP = 16, 64, 96, 24
MIB = 2**20


def set_small_limits(patch: pytest.MonkeyPatch) -> None:
    for module in (reading, writing):
        patch.setattr(module, "BLOCK_BYTES", SMALL_BLOCK)
    patch.setattr(writing, "_BATCH_BYTES", 4 * SMALL_BLOCK)
    patch.setattr(reading, "_CHUNK_BYTES", 4 * SMALL_BLOCK)
    patch.setattr(spans, "RUN_BYTES", SMALL_RUN)
    patch.setattr(spans, "WINDOW_BYTES", SMALL_WINDOW)
    patch.setattr(spans, "MAX_GAP_BYTES", SMALL_GAP)
    patch.setattr(os, "fsync", lambda _: None)  # which takes the most time


# A rank's part of a tensor: the pieces of it in a flat state, and the length of that.
Held = tuple[tuple[Chunk, ...], int]


def random_layout(shape: Shape, rng: random.Random) -> list[Held]:
    """A tensor over tensor-parallel ranks, in one matrix or several fused ones, and over shards, with padding."""
    splits = [
        (dim, num_parts, degree)
        for dim, size in enumerate(shape)
        for num_parts in (1, 2, 3)
        for degree in (2, 3)
        if size % (num_parts * degree) == 0
    ]
    locals_ = [LocalTensor.whole(shape)]
    if splits and rng.random() < 0.8:
        dim, num_parts, degree = rng.choice(splits)
        split = ParamSplit(shape, degree=degree, dim=dim, parts=(FusedPart(shape[dim] // num_parts),) * num_parts)
        locals_ = [split.local(index) for index in range(degree)]
    held: list[Held] = []
    num_shards = rng.randrange(1, 4)
    for local in locals_:
        for shard in range(num_shards):
            start, stop = (local.numel * each // num_shards for each in (shard, shard + 1))
            before, after = rng.randrange(9), rng.randrange(9)
            pieces = tuple(piece.shifted(before) for piece in intersect(local, start, stop))
            if rng.random() < 0.4:  # a few elements of another tensor after each piece
                pieces = tuple(piece.shifted(3 * index) for index, piece in enumerate(pieces))
            end = max((piece.local_stop for piece in pieces), default=before)
            held.append((pieces, end + after))
    return held


def state_shard_of(
    values: Tensor, held: Held, put: Callable[[Tensor], FlatState], fill: Tensor | None = None
) -> StateShard:
    """What a rank holds of a tensor, whose state `put` makes; `fill` stands for its values and around them."""
    pieces, numel = held
    buffer = torch.full((numel,), 7).to(values.dtype)
    for piece in pieces:
        source = values if fill is None else fill
        buffer[piece.local_offset : piece.local_stop] = source[
            tuple(map(slice, piece.rect.start, piece.rect.stop))
        ].reshape(-1)
    return StateShard("w", (), "param", tuple(values.shape), put(buffer), pieces, pieces)


def whole_of(flat: FlatState) -> Tensor:
    return flat.whole() if isinstance(flat, FileFlat) else flat.read(0, flat.numel)


def save(folder: Path, ranks: Sequence[StateShard]) -> Manifest:
    folder.mkdir()
    parts = [write_state_shards(folder, f"rank-{rank}.safetensors", [held], []) for rank, held in enumerate(ranks)]
    return Manifest(3, *merge_parts(parts))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def load(folder: Path, manifest: Manifest, state_shards: Sequence[StateShard]) -> None:
    plan = plan_load(manifest, state_shards, "step-00000003", {}, strict=True, weights_only=True)
    plan.read(folder, state_shards)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]), st.booleans())
def test_any_layout_is_saved_and_loaded_as_in_memory(seed: int, dtype: torch.dtype, is_cast: bool) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.choice((1, 2, 6, 12)) for _ in range(rng.randrange(4)))
    values = torch.randint(0, 200, (math.prod(shape),)).to(dtype).view(shape)
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as root:
        set_small_limits(patch)
        put = make_files(Path(root, "swap"))
        layout = random_layout(shape, rng)
        in_files = [state_shard_of(values, held, put) for held in layout]
        in_memory = [state_shard_of(values, held, TensorFlatState) for held in layout]
        manifest = save(Path(root, "of files"), in_files)
        assert manifest == save(Path(root, "of memory"), in_memory)
        assert contents(Path(root, "of files")) == contents(Path(root, "of memory"))
        read = [size for held in in_files for size in held.flat.book.reads]
        assert max(read, default=0) <= SMALL_RUN

        wanted = torch.zeros(shape, dtype=torch.float64 if is_cast and dtype.is_floating_point else dtype)
        for held in random_layout(shape, rng):
            in_file, expected = state_shard_of(wanted, held, put), state_shard_of(wanted, held, TensorFlatState)
            for target in (in_file, expected):
                load(Path(root, "of files"), manifest, [target])
            assert torch.equal(whole_of(in_file.flat), whole_of(expected.flat))
            assert max((*in_file.flat.book.reads, *in_file.flat.book.writes), default=0) <= SMALL_WINDOW


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 40)), max_size=8), st.integers(1, 30))
def test_windows_have_every_piece_once_and_in_bounds(lengths: list[tuple[int, int]], most: int) -> None:
    pieces, end = [], 0
    for row, (before, length) in enumerate(lengths):
        pieces.append(Chunk(Rect((row, 0), (row + 1, length)), end + before))
        end = pieces[-1].local_stop
    seen: dict[int, tuple[int, int]] = {}
    last = 0
    for window in spans.windows(pieces[::-1], most):
        assert last <= window.start < window.stop <= window.start + most
        last, place = window.stop, 0
        for piece in window.pieces:
            assert piece.local_offset == place
            place = piece.local_stop
            (row, first), (_, stop) = piece.rect.start, piece.rect.stop
            for column in range(first, stop):
                assert (row, column) not in seen.values()
                seen[window.start + piece.local_offset + column - first] = row, column
        assert (window.pieces[0].local_offset, place) == (0, window.stop - window.start)
    assert seen == {
        piece.local_offset + column: (piece.rect.start[0], column)
        for piece in pieces
        for column in range(piece.rect.numel)
    }


def test_large_states_go_through_little_memory_in_large_parts(tmp_path: Path) -> None:
    values = torch.randn(5000, 2000)  # rows x columns; 40 MB
    whole = (LocalTensor.whole((5000, 2000)).pieces, 10_000_000)
    held = state_shard_of(values, whole, make_files(tmp_path / "swap"))
    manifest = save(tmp_path / "saved", [held])
    book = held.flat.book
    assert (sum(book.reads), max(book.reads), len(book.reads)) == (40_000_000, 4 * MIB, 10)
    # One that was written, one that is, and the next.
    assert book.peak <= 12 * MIB
    target = state_shard_of(torch.zeros(5000, 2000), whole, make_files(tmp_path / "other"))
    load(tmp_path / "saved", manifest, [target])
    assert target.flat.book.writes == [16 * MIB, 16 * MIB, 40_000_000 - 32 * MIB]
    assert target.flat.book.reads == []
    assert torch.equal(whole_of(target.flat), values.view(-1))


def test_rows_of_a_fused_matrix_are_not_read_and_written_one_by_one(tmp_path: Path) -> None:
    """GPT-2's: query, key and value in one matrix, split by columns, is 768 x 3 rows of 1.5 kB on each rank."""
    values = torch.randn(768, 3 * 768)  # in x out
    split = ParamSplit((768, 3 * 768), degree=2, dim=1, parts=(FusedPart(768),) * 3)
    layout = [(local.pieces, local.numel) for local in (split.local(index) for index in range(2))]
    assert len(layout[0][0]) == 3 * 768
    in_files = [state_shard_of(values, held, make_files(tmp_path / "swap")) for held in layout]
    manifest = save(tmp_path / "saved", in_files)
    for held in in_files:
        # For each of the three all of the rank's matrix, but for the two others in its first row or in its last.
        assert held.flat.book.reads == [768 * 1152 * 4 - 2 * 384 * 4] * 3
    targets = [state_shard_of(torch.zeros(768, 3 * 768), held, make_files(tmp_path / "other")) for held in layout]
    load(tmp_path / "saved", manifest, targets)
    for target, held in zip(targets, in_files, strict=True):
        assert (target.flat.book.reads, target.flat.book.writes) == ([], [768 * 1152 * 4])
        assert torch.equal(whole_of(target.flat), whole_of(held.flat))


def test_pieces_far_apart_are_read_for_themselves(tmp_path: Path) -> None:
    flat = make_files(tmp_path)(torch.arange(4 * MIB, dtype=torch.int32))
    held = StateShard("w", (), "param", (4 * MIB,), flat, (), ())
    found = spans.read_spans(held, [(0, 8), (2 * MIB, 2 * MIB + 4), (2 * MIB + 8, 2 * MIB + 16)])
    assert list(found.cast("i")) == [0, 1, MIB // 2, MIB // 2 + 2, MIB // 2 + 3]
    assert flat.book.reads == [8, 16]


WHOLE: Held = (LocalTensor.whole((30, 40)).pieces, 1200)


def make_request(root: Path, held: StateShard, step: int = 3) -> SaveRequest:
    return SaveRequest(root, Manifest(step, (), {}), (held,), is_in_files=True)


def start(saver: Saver, request: SaveRequest, wait: bool) -> None:
    saver.start(request.manifest.step, lambda: request, wait)


def make_saver() -> Saver:
    return Saver(None, 0, 1, 20.0, torch.device("cpu"))


def test_a_save_in_the_background_is_written_before_the_states_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = StagingMemory(torch.device("cpu"))
    with patch("shardwise.checkpoint.async_saver.StagingMemory", lambda device: memory):
        values, saver = torch.randn(30, 40), make_saver()
    held = state_shard_of(values, WHOLE, make_files(tmp_path / "swap"))
    for step in (3, 4):
        start(saver, make_request(tmp_path / "saved", held, step), wait=False)
        assert not saver.is_saving
    held.flat.write(0, torch.zeros(1200))
    folder = saver.wait()
    target = state_shard_of(torch.zeros(30, 40), WHOLE, TensorFlatState)
    load(folder, read_manifest(folder), [target])
    assert torch.equal(whole_of(target.flat), values.view(-1))
    assert memory.num_bytes == 0
    assert [record.message for record in caplog.records] == [
        "states are stored on NVMe, and host memory for a copy is not assumed: every save holds up training"
    ]


def fill_disk(call: int, calls: list[int], writev: Callable[..., int]) -> Callable[..., int]:
    """`os.writev` on a disk that is full at some call."""

    def write(file: int, views: Sequence[memoryview]) -> int:
        calls.append(len(views))
        if len(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writev(file, views)

    return write


@pytest.mark.parametrize("call", [1, 2, 4])
def test_a_full_disk_leaves_the_states_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    values, saver = torch.randn(2000, 2000), make_saver()  # 16 MB: four writes after that of the header
    held = state_shard_of(values, (LocalTensor.whole((2000, 2000)).pieces, 4_000_000), make_files(tmp_path / "swap"))
    monkeypatch.setattr(os, "writev", fill_disk(call, [], os.writev))
    with refused("disk-full", "rank 0", os.strerror(errno.ENOSPC)):
        start(saver, make_request(tmp_path / "saved", held), wait=False)
    assert held.flat.book.writes == []
    assert torch.equal(whole_of(held.flat), values.view(-1))
    assert list((tmp_path / "saved").glob("**/*.safetensors")) == []
    start(saver, make_request(tmp_path / "saved", held), wait=False)
    assert saver.wait() == tmp_path / "saved" / "step-00000003"


def fail_on_one(rank: int, world_size: int, root: Path) -> str:
    """Rank 1, which has no element to write, cannot read its state; both are to hear of that in the call itself."""
    saver = Saver(open_store(), rank, world_size, 20.0, torch.device("cpu"))
    held = state_shard_of(torch.randn(30, 40), WHOLE, make_files(root / f"swap of {rank}"))
    if rank == 1:
        held = replace(held, written=())
    else:
        held.flat.path.unlink()
    try:
        start(saver, make_request(root / "saved", held), wait=False)
    except CheckpointError as error:
        return f"{error.code}: {error}"
    return "nothing"


def test_all_ranks_wait_and_hear_of_a_failure_at_once(ranks: WorkerPool, tmp_path: Path) -> None:
    first, second = ranks(2).run(fail_on_one, tmp_path)
    assert first == second
    assert re.match("state-file-unreadable: checkpoint of step 3 failed on rank 0: w param .*No such file", first)


NAMES = {"fused": {"stored": ["f.a", "f.b"], "dim": 1, "shares": [1, 2]}, "turned": {"stored": "t", "transpose": True}}


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_hugging_face_folders_are_the_same_from_files_and_into_files(seed: int) -> None:
    rng = random.Random(seed)
    tensors = {"fused": torch.randn(6, 12), "turned": torch.randn(12, 6), "bias": torch.randn(12)}
    exports = [ExportTensor(name, (), tuple(values.shape), "BF16") for name, values in tensors.items()]
    layouts = {name: random_layout(tuple(values.shape), rng) for name, values in tensors.items()}
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as root:
        set_small_limits(patch)
        put = make_files(Path(root, "swap"))
        plan = plan_export(exports, NAMES)
        for folder, make in ((Path(root, "of files"), put), (Path(root, "of memory"), TensorFlatState)):
            begin_export(plan, folder)
            for name, values in tensors.items():
                for held in layouts[name]:
                    write_export(
                        plan, folder, stored_blocks(plan, [replace(state_shard_of(values, held, make), name=name)])
                    )
            finish_export(folder)
        assert contents(Path(root, "of files")) == contents(Path(root, "of memory"))
        stored = open_folder(Path(root, "of files"), dict.fromkeys(tensors, ()), NAMES)
        manifest = Manifest(0, stored, {}, "weights")
        found = {
            name: [replace(state_shard_of(torch.zeros_like(values), held, put), name=name) for held in layouts[name]]
            for name, values in tensors.items()
        }
        for targets in zip(*(each * 9 for each in found.values()), strict=False):
            load(Path(root, "of files"), manifest, targets)
        for name, values in tensors.items():
            for target, held in zip(found[name], layouts[name], strict=True):
                expected = state_shard_of(values.bfloat16().float(), held, TensorFlatState)
                assert torch.equal(whole_of(target.flat), whole_of(expected.flat))


def test_the_dtype_of_a_state_in_a_file_is_its_own(tmp_path: Path) -> None:
    held = state_shard_of(torch.randn(30, 40).bfloat16(), WHOLE, make_files(tmp_path / "swap"))
    assert held.num_written_bytes == 2400
    manifest = save(tmp_path / "saved", [held])
    assert manifest.tensors[0].states["param"].dtype == dtype_name(torch.bfloat16) == "BF16"
