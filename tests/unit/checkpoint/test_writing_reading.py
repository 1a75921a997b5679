"""What is written in any pieces is read in any others, bit for bit; and what was changed on disk is found."""

from __future__ import annotations

import errno
import math
import os
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.refusals import refused
from harness.states import fuse
from shardwise.checkpoint import reader as reading
from shardwise.checkpoint import writer as writing
from shardwise.checkpoint.manifest import (
    BLOCK_BYTES,
    RankManifest,
    StoredChunk,
    StoredState,
    StoredTensor,
    merge_parts,
)
from shardwise.checkpoint.reader import ChunkReader
from shardwise.checkpoint.safetensors_io import dtype_name, read_header
from shardwise.checkpoint.writer import write_state_shards
from shardwise.layout.slicing import Chunk, LocalTensor, Rect, flat_range_to_rects, overlap
from shardwise.runtime.state_shards import ScalarState, StateShard, TensorFlatState

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)
# A block of the tests below has a few elements, so that small tensors have many.
SMALL_BLOCK = 16


def set_small_blocks(patch: pytest.MonkeyPatch) -> None:
    for module in (reading, writing):
        patch.setattr(module, "BLOCK_BYTES", SMALL_BLOCK)
    patch.setattr(writing, "_BATCH_BYTES", 4 * SMALL_BLOCK)
    patch.setattr(writing, "_BATCH_BUFFERS", 3)
    patch.setattr(writing, "_WRITE_BACK_BYTES", 5 * SMALL_BLOCK)
    patch.setattr(reading, "_CHUNK_BYTES", 4 * SMALL_BLOCK)
    patch.setattr(reading, "_MAX_GAP_BYTES", SMALL_BLOCK)
    patch.setattr(reading, "_MAX_OPEN_FILES", 2)


@dataclass(frozen=True)
class Case:
    """A tensor, the pieces in which ranks hold it, and the pieces wanted, at places in a target of `numel`."""

    values: Tensor
    held: tuple[tuple[Chunk, ...], ...]
    wanted: tuple[Chunk, ...]
    numel: int


def cut(rect: Rect, rng: random.Random) -> Iterator[Rect]:
    """A random cover with rectangles: halves of halves, flat ranges, single rows."""
    dims = [dim for dim, size in enumerate(rect.shape) if size > 1]
    how = rng.choice(("whole", "halves", "halves", "flat", "rows"))
    if not dims or how == "whole":
        yield rect
    elif how == "halves":
        dim = rng.choice(dims)
        middle = rng.randrange(rect.start[dim] + 1, rect.stop[dim])
        low = Rect(rect.start, (*rect.stop[:dim], middle, *rect.stop[dim + 1 :]))
        high = Rect((*rect.start[:dim], middle, *rect.start[dim + 1 :]), rect.stop)
        yield from cut(low, rng)
        yield from cut(high, rng)
    else:
        num_elements = math.prod(rect.shape[1:]) if how == "rows" else rng.randrange(1, rect.numel + 1)
        for start in range(0, rect.numel, num_elements):
            stop = min(start + num_elements, rect.numel)
            yield from (piece.rect for piece in flat_range_to_rects(rect, start, stop))


def place(rects: Sequence[Rect], rng: random.Random) -> tuple[tuple[Chunk, ...], int]:
    """Each rectangle at an offset of a buffer, with gaps now and then; and the length of the buffer."""
    pieces, end = [], rng.randrange(3)
    for rect in rng.sample(rects, len(rects)) if rng.random() < 0.5 else rects:
        pieces.append(Chunk(rect, end))
        end = pieces[-1].local_stop + rng.choice((0, 0, 0, 0, 3))
    return tuple(pieces), end


def random_case(seed: int, dtype: torch.dtype) -> Case:
    rng = random.Random(seed)
    shape = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(4)))
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    rects = [rect for rect in cut(Rect.whole(shape), rng) if rect.numel]
    by_rank: list[list[Rect]] = [[] for _ in range(rng.randrange(1, 5))]
    for rect in rects:
        rng.choice(by_rank).append(rect)
    wanted = [rect for rect in cut(Rect.whole(shape), rng) if rect.numel and rng.random() < 0.7]
    held = tuple(place(mine, rng)[0] for mine in by_rank)
    return Case(raw.view(dtype).view(shape), held, *place(wanted, rng))


def at(values: Tensor, rect: Rect) -> Tensor:
    return values[tuple(map(slice, rect.start, rect.stop))]


def buffer_of(values: Tensor, pieces: Sequence[Chunk], numel: int | None = None) -> Tensor:
    """The local tensor that has these pieces; padding is zeros."""
    length = max((piece.local_stop for piece in pieces), default=0) if numel is None else numel
    buffer = torch.zeros(length, dtype=values.dtype)
    for piece in pieces:
        buffer[piece.local_offset : piece.local_stop] = at(values, piece.rect).reshape(-1)
    return buffer


def save(folder: Path, values: Tensor, held: Sequence[Sequence[Chunk]], name: str = "w") -> StoredTensor:
    """Write a tensor as ranks hold it; returns what the manifest would say of it."""
    parts = []
    for rank, pieces in enumerate(held):
        state_shard = StateShard(
            name,
            (),
            "param",
            tuple(values.shape),
            TensorFlatState(buffer_of(values, pieces)),
            tuple(pieces),
            tuple(pieces),
        )
        parts.append(write_state_shards(folder, f"rank-{rank:05d}.safetensors", [state_shard], []))
    (tensor,), files = merge_parts(parts)
    assert files == {path.name: path.stat().st_size for path in folder.iterdir()}
    return tensor


def raw(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def reread(folder: Path, tensor: StoredTensor, pieces: Sequence[Chunk], target: Tensor) -> int:
    with ChunkReader(folder) as reader:
        reader.read(tensor, "param", pieces, target)
        return reader.num_read_bytes


def blocks_needed(tensor: StoredTensor, wanted: Sequence[Chunk], block_bytes: int) -> int:
    """Bytes of the blocks that have a wanted element, element by element."""
    state, num_bytes = tensor.states["param"], 0
    for stored in state.pieces:
        numbers = torch.arange(stored.rect.numel).view(stored.rect.shape)
        item = BYTES[state.dtype]
        needed = {
            int(number) * item // block_bytes
            for copy in overlap([Chunk(stored.rect, 0)], wanted)
            for number in numbers[copy.rect.slices_in(stored.rect)].reshape(-1)
        }
        end = stored.rect.numel * item
        num_bytes += sum(min((block + 1) * block_bytes, end) - block * block_bytes for block in needed)
    return num_bytes


BYTES = {dtype_name(dtype): dtype.itemsize for dtype in DTYPES}


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.sampled_from(DTYPES))
def test_any_pieces_are_read_from_any_others(seed: int, dtype: torch.dtype) -> None:
    case = random_case(seed, dtype)
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        set_small_blocks(patch)
        tensor = save(Path(folder), case.values, case.held)
        storage = torch.zeros(case.numel + 3, dtype=dtype)
        num_read = reread(Path(folder), tensor, case.wanted, storage[3:])
        assert raw(storage) == bytes(3 * dtype.itemsize) + raw(buffer_of(case.values, case.wanted, case.numel))
        assert num_read == blocks_needed(tensor, case.wanted, SMALL_BLOCK)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float64)]))
def test_what_is_read_is_cast(seed: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    stored, wanted = dtypes
    case = random_case(seed, torch.uint8)
    values = case.values.to(torch.float32).mul(1 / 3).to(stored)
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        set_small_blocks(patch)
        tensor = save(Path(folder), values, case.held)
        target = torch.zeros(case.numel, dtype=wanted)
        reread(Path(folder), tensor, case.wanted, target)
        assert torch.equal(target, buffer_of(values, case.wanted, case.numel).to(wanted))


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_any_flipped_bit_is_found_and_named(seed: int) -> None:
    case, rng = random_case(seed, torch.float32), random.Random(seed)
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        set_small_blocks(patch)
        tensor = save(Path(folder), case.values, case.held)
        stored = rng.choice(tensor.states["param"].pieces)
        path, byte = Path(folder) / stored.file, stored.offset + rng.randrange(stored.rect.numel * 4)
        content = bytearray(path.read_bytes())
        content[byte] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        first = stored.offset + (byte - stored.offset) // SMALL_BLOCK * SMALL_BLOCK
        last = min(first + SMALL_BLOCK, stored.offset + stored.rect.numel * 4)
        name = f"{path.parent.name}/{path.name}"
        with refused("checksum-differs", f"{name}: w param", f"bytes {first} to {last};"):
            reread(Path(folder), tensor, [Chunk(Rect.whole(tensor.shape), 0)], torch.zeros(case.values.numel()))


def written_whole(tmp_path: Path, values: Tensor) -> StoredTensor:
    return save(tmp_path, values, [LocalTensor.whole(tuple(values.shape)).pieces])


def test_blocks_are_a_mebibyte_and_only_those_wanted_are_read(tmp_path: Path) -> None:
    values = torch.randn(1000, 1000)  # rows x columns; 4 MB: three blocks and most of a fourth
    tensor = written_whole(tmp_path, values)
    (stored,) = tensor.states["param"].pieces
    content = (tmp_path / stored.file).read_bytes()
    data = content[stored.offset :]
    assert stored.crcs == tuple(
        zlib.crc32(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES)
    )
    assert len(stored.crcs) == 4
    # The third block is elements 524288 to 786431.
    for start, stop, num_blocks in ((524_288, 786_432, 1), (524_287, 786_432, 2), (600_000, 600_001, 1)):
        wanted = flat_range_to_rects(Rect.whole((1000, 1000)), start, stop)
        target = torch.zeros(stop - start)
        assert reread(tmp_path, tensor, wanted, target) == num_blocks * BLOCK_BYTES
        assert torch.equal(target, values.view(-1)[start:stop])
    columns = LocalTensor.split((1000, 1000), 1, 1, 4)
    target = torch.zeros(columns.numel)
    assert reread(tmp_path, tensor, columns.pieces, target) == len(data)
    assert torch.equal(target, values[:, 250:500].reshape(-1))


def test_a_fused_matrix_is_one_entry_a_part_and_is_read_back(tmp_path: Path) -> None:
    """GPT-2's: query, key, value in one matrix, split by columns, is a piece for each row and part."""
    values = [torch.randn(64, 48) for _ in range(3)]  # in x out
    names = ("attn.q", "attn.k", "attn.v")
    for rank in range(2):
        parts = fuse([LocalTensor.split((64, 48), 1, rank, 2)] * 3, num_rows=64)
        buffer = sum(buffer_of(value, part.pieces, part.numel) for value, part in zip(values, parts, strict=True))
        assert len(parts[0].pieces) == 64
        state_shards = [
            StateShard(name, (), "param", (64, 48), TensorFlatState(buffer), part.pieces, part.pieces)
            for name, part in zip(names, parts, strict=True)
        ]
        written = write_state_shards(tmp_path, f"rank-{rank}.safetensors", state_shards, [])
        assert [len(tensor.states["param"].pieces) for tensor in written.tensors] == [1, 1, 1]
        columns = slice(24 * rank, 24 * rank + 24)
        for name, value in load_file(tmp_path / written.file).items():
            assert name.endswith(f"[0:64, {columns.start}:{columns.stop}]")
            assert torch.equal(value, values[names.index(name.split("[")[0])][:, columns])
        target = torch.zeros_like(buffer)
        with ChunkReader(tmp_path) as reader:
            for tensor, part in zip(written.tensors, parts, strict=True):
                reader.read(tensor, "param", part.pieces, target)
        assert torch.equal(target, buffer)


def test_names_say_state_and_rectangle_and_numbers_lie_in_the_result_alone(tmp_path: Path) -> None:
    whole, half = (Chunk(Rect.whole((4, 2)), 0),), (Chunk(Rect((2, 0), (4, 2)), 0),)
    parameter = StateShard(
        "up.weight", ("tied.weight",), "param", (4, 2), TensorFlatState(torch.arange(8.0)), whole, whole
    )
    average = StateShard(
        "up.weight", ("tied.weight",), "exp_avg", (4, 2), TensorFlatState(torch.arange(10, 14).half()), half, half
    )
    one = (Chunk(Rect((), ()), 0),)
    scalar = StateShard("scale", (), "param", (), TensorFlatState(torch.tensor([3])), one, one)
    empty = StateShard(
        "none", (), "param", (0, 4), TensorFlatState(torch.zeros(0)), (), (), kind="buffer", trainable=False
    )
    others = StateShard("others", (), "param", (4, 2), TensorFlatState(torch.ones(8)), whole, ())
    numbers = [ScalarState("up.weight", "step", 5.0, "float32"), ScalarState("others", "count", 7, "int")]
    seen: list[int] = []
    part = write_state_shards(
        tmp_path, "a.safetensors", [parameter, average, scalar, empty, others], numbers, seen.append
    )
    assert sum(seen) == 8 * 4 + 4 * 2 + 8
    assert {tensor.name: tensor.shape for tensor in read_header(tmp_path / "a.safetensors")} == {
        "up.weight": (4, 2),
        "up.weight/exp_avg[2:4, 0:2]": (2, 2),
        "scale": (),
    }
    # The file has them in another order, the largest elements first.
    values = load_file(tmp_path / "a.safetensors")
    assert values["up.weight"].reshape(-1).tolist() == list(range(8))
    assert values["up.weight/exp_avg[2:4, 0:2]"].reshape(-1).tolist() == list(range(10, 14))
    assert values["scale"].item() == 3
    by_name = {tensor.name: tensor for tensor in part.tensors}
    with ChunkReader(tmp_path) as reader:
        target = torch.zeros(4)
        reader.read(by_name["up.weight"], "exp_avg", half, target)
        assert target.tolist() == list(range(10, 14))
    assert list(by_name) == ["up.weight", "scale", "none", "others"]
    assert by_name["up.weight"].aliases == ("tied.weight",)
    assert by_name["up.weight"].states["step"] == StoredState("F32", value=5.0)
    assert by_name["up.weight"].states["exp_avg"].dtype == "F16"
    assert by_name["none"] == StoredTensor("none", (), (0, 4), {"param": StoredState("F32")}, "buffer", False)
    assert by_name["others"].states == {"count": StoredState("int", value=7)}
    assert part.num_bytes == (tmp_path / "a.safetensors").stat().st_size
    assert RankManifest.from_text(part.to_text()) == part


def test_a_rank_with_nothing_to_write_makes_no_file(tmp_path: Path) -> None:
    whole = (Chunk(Rect.whole((4,)), 0),)
    held = StateShard("w", (), "param", (4,), TensorFlatState(torch.ones(4)), whole, ())
    part = write_state_shards(tmp_path, "a.safetensors", [held], [ScalarState("w", "step", 2.0, "int64")])
    states = {"step": StoredState("I64", value=2.0)}
    assert part == RankManifest("", 0, (StoredTensor("w", (), (4,), states),))
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    values = torch.ones(4)
    written_whole(tmp_path, values)
    before = (tmp_path / "rank-00000.safetensors").read_bytes()
    with refused("write-refused", "rank-00000.safetensors", os.strerror(errno.EEXIST)):
        written_whole(tmp_path, values)
    assert (tmp_path / "rank-00000.safetensors").read_bytes() == before


@pytest.mark.parametrize("call", ["posix_fallocate", "writev", "fsync"])
def test_a_full_disk_says_what_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with refused("disk-full", "cannot write", "rank-00000.safetensors", os.strerror(errno.ENOSPC)):
        written_whole(tmp_path, torch.ones(80))


def test_file_systems_that_cannot_reserve_and_writes_that_stop_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_small_blocks(monkeypatch)

    def cannot(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "")

    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "posix_fallocate", cannot)
    monkeypatch.setattr(os, "writev", lambda file, views: writev(file, [views[0][:5]]))
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: preadv(file, [views[0][:7]], offset))
    values = torch.randn(9, 11)  # rows x columns
    tensor = written_whole(tmp_path, values)
    target = torch.zeros(99)
    reread(tmp_path, tensor, [Chunk(Rect.whole((9, 11)), 0)], target)
    assert torch.equal(target.view(9, 11), values)


@pytest.mark.parametrize("crcs", [True, False])
def test_missing_and_short_files_are_named(tmp_path: Path, crcs: bool) -> None:
    folder = tmp_path / "step-00000100"
    folder.mkdir()
    tensor = written_whole(folder, torch.ones(100))
    (stored,) = tensor.states["param"].pieces
    if not crcs:
        tensor = replace(tensor, states={"param": StoredState("F32", (replace(stored, crcs=()),))})
    path, wanted = folder / stored.file, [Chunk(Rect((0,), (100,)), 0)]
    os.truncate(path, stored.offset + 200)
    with refused("file-ends-early", "step-00000100/rank-00000.safetensors", f"byte {stored.offset + 200},", "w param"):
        reread(folder, tensor, wanted, torch.zeros(100))
    path.unlink()
    with refused("file-unreadable", "step-00000100/rank-00000.safetensors"):
        reread(folder, tensor, wanted, torch.zeros(100))


def test_single_elements_are_read_to_places_apart(tmp_path: Path) -> None:
    values = torch.arange(3.0)
    tensor = save(tmp_path, values, [[Chunk(Rect((place,), (place + 1,)), 0)] for place in range(3)])
    target = torch.zeros(6)
    reread(tmp_path, tensor, [Chunk(Rect((place,), (place + 1,)), 2 * place) for place in range(3)], target)
    assert target.tolist() == [0, 0, 1, 0, 2, 0]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    tensor = save(tmp_path, torch.ones(4, 3), [[Chunk(Rect((0, 0), (2, 3)), 0)]])
    whole, target = [Chunk(Rect.whole((4, 3)), 0)], torch.zeros(12)
    with refused("elements-missing", "6 elements of [0:4, 0:3] of w param", "(4, 3)"):
        reread(tmp_path, tensor, whole, target)
    number = replace(tensor, states={"param": StoredState("F32", value=3.0)})
    with refused("elements-missing", "12 elements of [0:4, 0:3] of w param"):
        reread(tmp_path, number, whole, target)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.booleans())
def test_files_of_others_are_read_transposed_and_without_checksums(seed: int, is_transposed: bool) -> None:
    case, rng = random_case(seed, torch.uint8), random.Random(seed)
    shape = (rng.randrange(1, 40), rng.randrange(1, 40))
    values = torch.randn(shape)
    wanted, numel = place([rect for rect in cut(Rect.whole(shape), rng) if rng.random() < 0.7], rng)
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        set_small_blocks(patch)
        path = Path(folder) / "model.safetensors"
        save_file({"w": (values.t() if is_transposed else values).contiguous(), "x": case.values}, path)
        file = next(tensor for tensor in read_header(path) if tensor.name == "w")
        stored = StoredChunk(Rect.whole(shape), path.name, file.start, is_transposed=is_transposed)
        tensor = StoredTensor("w", (), shape, {"param": StoredState("F32", (stored,))})
        target = torch.zeros(numel)
        reread(Path(folder), tensor, wanted, target)
        assert torch.equal(target, buffer_of(values, wanted, numel))


def test_only_bytes_wanted_are_read_of_files_of_others(tmp_path: Path) -> None:
    values = torch.randn(1000, 1000)  # rows x columns
    tensor = written_whole(tmp_path, values)
    (stored,) = tensor.states["param"].pieces
    tensor = replace(tensor, states={"param": StoredState("F32", (replace(stored, crcs=()),))})
    target = torch.zeros(2000)
    assert reread(tmp_path, tensor, [Chunk(Rect((10, 0), (12, 1000)), 0)], target) == 8000
    assert torch.equal(target, values[10:12].reshape(-1))
    # Of a column, all but the ends of the first and last rows: rows are read over.
    assert reread(tmp_path, tensor, [Chunk(Rect((0, 7), (1000, 8)), 0)], target[:1000]) == 999 * 4000 + 4
    assert torch.equal(target[:1000], values[:, 7])


def test_the_reader_keeps_few_files_open_and_none_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MAX_OPEN_FILES", 5)
    values = torch.randn(64, 8)  # rows x columns
    tensor = save(tmp_path, values, [[Chunk(Rect((row, 0), (row + 1, 8)), 0)] for row in range(64)])
    before = len(os.listdir("/proc/self/fd"))
    with ChunkReader(tmp_path) as reader:
        target = torch.zeros(64 * 8, dtype=torch.bfloat16)
        reader.read(tensor, "param", [Chunk(Rect.whole((64, 8)), 0)], target)
        assert len(os.listdir("/proc/self/fd")) == before + 5
    assert torch.equal(target.view(64, 8), values.bfloat16())
    assert len(os.listdir("/proc/self/fd")) == before
