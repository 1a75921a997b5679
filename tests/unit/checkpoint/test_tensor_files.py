"""Headers against the public safetensors library, in both directions; and files that are torn or lie."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.refusals import refused
from shardwise.checkpoint.manifest import ITEM_BYTES, CheckpointError, DamagedError
from shardwise.checkpoint.safetensors_io import (
    FileTensor,
    TensorHeader,
    dtype_name,
    encode_header,
    named_dtype,
    read_header,
)

SHAPES = ((), (3,), (0, 4), (5, 7))


def tensors() -> dict[str, Tensor]:
    """Every dtype in every shape, of random bytes; the smallest elements first."""
    made = {}
    for name in sorted(ITEM_BYTES, key=lambda name: (ITEM_BYTES[name], name)):
        for shape in SHAPES:
            num_bytes = math.prod(shape) * ITEM_BYTES[name]
            values = torch.randint(0, 2 if name == "BOOL" else 256, (num_bytes,), dtype=torch.uint8)
            made[f"{name}.größe{list(shape)}"] = values.view(named_dtype(name)).view(shape)
    return made


def raw(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def write(path: Path, values: dict[str, Tensor]) -> dict[str, int]:
    """A file with our header; returns where each tensor starts."""
    header, offsets = encode_header(
        [TensorHeader(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in values.items()]
    )
    content = bytearray(header) + bytes(sum(map(len, map(raw, values.values()))))
    for tensor, offset in zip(values.values(), offsets, strict=True):
        content[offset : offset + len(raw(tensor))] = raw(tensor)
    path.write_bytes(content)
    return dict(zip(values, offsets, strict=True))


def test_the_public_library_reads_what_we_write(tmp_path: Path) -> None:
    path, values = tmp_path / "ours.safetensors", tensors()
    write(path, values)
    loaded = load_file(path)
    assert set(loaded) == set(values)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        for name, tensor in values.items():
            for found in (loaded[name], file.get_tensor(name)):
                assert (found.dtype, found.shape, raw(found)) == (tensor.dtype, tensor.shape, raw(tensor))


def test_we_read_what_the_public_library_writes(tmp_path: Path) -> None:
    path, values = tmp_path / "theirs.safetensors", tensors()
    save_file(values, path, metadata={"format": "pt", "other": "words"})
    content = path.read_bytes()
    found = {tensor.name: tensor for tensor in read_header(path)}
    assert set(found) == set(values)
    for name, tensor in values.items():
        each = found[name]
        assert (named_dtype(each.dtype), each.shape) == (tensor.dtype, tuple(tensor.shape))
        assert content[each.start : each.stop] == raw(tensor)


@given(st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 5), max_size=3)), max_size=8))
def test_tensors_are_aligned_and_leave_no_hole(kinds: list[tuple[str, list[int]]]) -> None:
    entries = [TensorHeader(f"t{place}", dtype, tuple(shape)) for place, (dtype, shape) in enumerate(kinds)]
    header, offsets = encode_header(entries)
    end = len(header)
    assert end % 8 == 0
    for offset, entry in sorted(
        zip(offsets, entries, strict=True), key=lambda pair: (pair[0], math.prod(pair[1].shape))
    ):
        assert offset == end
        assert offset % ITEM_BYTES[entry.dtype] == 0
        end += math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
    # Between elements of one size, the order given is kept.
    kept = sorted(range(len(entries)), key=lambda place: -ITEM_BYTES[entries[place].dtype])
    assert [name for name in json.loads(header[8:]) if name != "__metadata__"] == [f"t{place}" for place in kept]


def test_a_file_cut_short_or_grown_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001" / "rank-00000-of-00001.safetensors"
    path.parent.mkdir()
    write(path, {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int8)})
    content = path.read_bytes()
    assert len(read_header(path)) == 2
    for torn in (*(content[:length] for length in range(len(content))), content + b"\0"):
        path.write_bytes(torn)
        with refused("file-size-differs", "step-00000001/rank-00000-of-00001.safetensors"):
            read_header(path)


def header_of(values: object) -> bytes:
    text = values if isinstance(values, bytes) else json.dumps(values).encode()
    return len(text).to_bytes(8, "little") + text


ONE = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("code", "header"),
    [
        ("file-size-differs", (2**63).to_bytes(8, "little")),
        ("tensor-misplaced", header_of({"a": ONE, "b": {**ONE, "data_offsets": [2, 6]}})),  # over each other
        ("tensor-misplaced", header_of({"a": ONE, "b": {**ONE, "data_offsets": [6, 10]}})),  # a hole
        ("tensor-misplaced", header_of({"a": {**ONE, "data_offsets": [4, 0]}})),
        ("tensor-misplaced", header_of({"a": {**ONE, "data_offsets": [0, 8]}})),  # more than its shape
        ("header-malformed", header_of({"a": {**ONE, "shape": [-2, -2]}})),
        ("header-malformed", header_of({"a": {**ONE, "data_offsets": [0]}})),
        ("header-malformed", header_of({"a": {"dtype": "U8"}})),
        ("header-malformed", header_of([1, 2])),
        ("header-malformed", header_of(b"{" + bytes(30))),
        ("header-malformed", header_of(b"[" * 100_000)),
        ("header-malformed", header_of(b"\xff\xfe")),
    ],
)
def test_a_wrong_header_is_refused(tmp_path: Path, code: str, header: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(header + bytes(4))
    with refused(code, "bad.safetensors") as caught:
        read_header(path)
    assert isinstance(caught.value, DamagedError)


def test_the_header_may_name_tensors_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "any.safetensors"
    path.write_bytes(header_of({"b": {**ONE, "data_offsets": [4, 8]}, "a": ONE}) + bytes(8))
    first, second = read_header(path)
    assert (first.name, second.name) == ("a", "b")
    assert second == FileTensor("b", "U8", (4,), path.stat().st_size - 4, path.stat().st_size, path.name)


def test_a_missing_file_and_unknown_dtypes_are_named(tmp_path: Path) -> None:
    with refused("file-unreadable", "gone.safetensors"):
        read_header(tmp_path / "gone.safetensors")
    path = tmp_path / "new.safetensors"
    path.write_bytes(header_of({"a": {**ONE, "dtype": "F4"}}) + bytes(4))
    with refused("unknown-dtype", "F4") as caught:
        read_header(path)
    assert not isinstance(caught.value, DamagedError)
    with refused("dtype-has-no-name", "torch.complex128"):
        dtype_name(torch.complex128)


def test_a_name_stands_once() -> None:
    with refused("piece-twice", "a "):
        encode_header([TensorHeader("a", "U8", ()), TensorHeader("a", "F32", (2,))])


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":[' + b"[]," * 3_000_000 + b"[]]}",
        b'{"a":{"dtype":"F32","shape":[' + b"[]," * 3_000_000 + b'],"data_offsets":[0,0]}}',
        b'{"__metadata__":"' + b'\\"' * 3_000_000,
        b"[" * 9_000_000,
        b'{"' + b"a" * 9_000_000 + b'":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":["0",4]}}',
        b'{"a":{"dtype":7,"shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,%s]}}' % (b"9" * 900),
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} {}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},}',
        b"null",
        b"",
    ],
    ids=lambda header: str(header[:40]),
)
def test_a_header_that_is_made_to_hurt_takes_a_few_times_its_bytes(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            read_header(path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(caught.value).isprintable()
    assert most < 6 * path.stat().st_size + 2**20


def test_a_long_header_needs_as_many_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    text = b'{"__metadata__":{"a":"' + b"x" * 12_000_000 + b'"}}'
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with refused("file-size-differs"):
        read_header(path)
    assert read_header(path, 12_000) == ()
